"""Deep ensembles: every member is the network it would be alone, whatever the network is made of.

Sizes: K members, B rows.
"""

import copy
import itertools
import math
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import each, pairwise
from scipy import stats
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils import _pytree as pytree

import slimbayes as sb
from slimbayes.engine.passes import posteriors_of
from slimbayes.layers.base import Converted

pytestmark = pytest.mark.usefixtures("last_draws")

RARE = 1e-4  # a test of chance fails a correct library this often; the seed is fixed


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def images() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)
    )


class Custom(nn.Module):
    """Stray parameters and buffers, several inputs, outputs in a dict, a buffer that forward writes."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.token = nn.Parameter(torch.randn(1, 4))
        self.register_buffer("offset", torch.randn(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(
        self, x: Tensor, scale: Tensor | None = None, power: int = 1
    ) -> dict[str, Any]:
        self.calls += 1
        y = self.body(x) * self.token + self.offset
        y = y if scale is None else y * scale[:, None]
        return {
            "out": y**power,
            "pair": (y.sum(-1), y.argmax(-1)),
            "loss": y.square().mean(),
            "name": "custom",
        }


def nets_of(net: nn.Module) -> list[nn.Module]:
    """The K networks of an ensemble as plain modules of their own."""
    return [
        sb.debayesianize(copy.deepcopy(net)),
        *(copy.deepcopy(m) for m in net.posterior["members"].others),
    ]


def ensemble_of(
    build: Callable[[], nn.Module], members: int = 3, **options: Any
) -> nn.Module:
    options = {"init": "copies", "jitter": 0.5} | options
    return sb.bayesianize(build(), sb.Ensemble(members=members, **options))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (7, 3)),
    "batch-norm": (normed, (7, 3)),
    "images": (images, (7, 2, 6, 6)),
    "linear": (lambda: nn.Linear(3, 2), (7, 3)),
    "tokens": (
        lambda: nn.Sequential(
            nn.Linear(3, 4),
            nn.LayerNorm(4),
            nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
        ),
        (7, 5, 3),
    ),
    "recurrent": (
        lambda: nn.LSTM(3, 4, num_layers=2, batch_first=True, bidirectional=True),
        (7, 5, 3),
    ),
}


def first(output: Any) -> Tensor:
    return pytree.tree_leaves(output)[0]


# Members are networks -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draws", "parallel", "network"), pairwise([1, 2], [True, False], NETWORKS)
)
def test_member_k_is_the_kth_network_bit_for_bit(
    network: str, parallel: bool, draws: int
) -> None:
    build, shape = NETWORKS[network]
    net = ensemble_of(build).eval()
    x = torch.randn(shape)
    with torch.no_grad():
        y = first(sb.sample(net, x, draws=3 * draws, parallel=parallel))
        alone = [
            first(m(x.repeat(draws if parallel else 1, *[1] * (x.dim() - 1))))[:7]
            for m in nets_of(net)
        ]
    assert y.shape[:2] == (3 * draws, 7)
    for j, k in enumerate(itertools.islice(itertools.cycle(range(3)), 3 * draws)):
        assert torch.equal(y[j], alone[k])
    assert not torch.allclose(y[0], y[1])


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 5, 7, 12])
def test_rows_of_a_bare_call_are_shared_out_among_the_members(rows: int) -> None:
    """Blocks as equal as the number allows; each row is one member's, members follow each other, starting at a random
    one."""
    net = ensemble_of(mlp).double().eval()
    x = torch.randn(rows, 3).double()
    alone = torch.stack([m(x) for m in nets_of(net)])
    counts, starts = torch.zeros(rows, 3), []
    with torch.no_grad():
        for _ in range(300):
            gap = (alone - net(x)).abs().amax(2)
            assert gap.amin(0).max() < 1e-10
            member = gap.argmin(0)
            expected = (member[0] + torch.arange(rows) * 3 // rows) % 3
            assert torch.equal(member, expected)
            counts[torch.arange(rows), member] += 1
            starts.append(int(member[0]))
    assert min(stats.chisquare(line).pvalue for line in counts.numpy()) > RARE
    assert (
        stats.chi2_contingency(
            [
                [
                    sum(a == i and b == j for a, b in itertools.pairwise(starts))
                    for j in range(3)
                ]
                for i in range(3)
            ]
        ).pvalue
        > RARE
    )


def test_more_members_than_rows_and_rows_of_an_ensemble_with_fixed_draws() -> None:
    net = ensemble_of(mlp, members=5).eval()
    x = torch.randn(13, 3)
    alone = torch.stack([m(x) for m in nets_of(net)])
    assert net(x[:2]).shape == (2, 2)
    with sb.fixed_draws(net, 10):  # two of each member
        torch.testing.assert_close(sb.sample(net, x), torch.cat([alone, alone]))
        y = net(x)
        member = torch.arange(13) * 10 // 13 % 5
        torch.testing.assert_close(y, alone[member, torch.arange(13)])
        assert torch.equal(net(x), y)


def test_one_member_is_the_plain_network() -> None:
    plain = normed()
    net = sb.bayesianize(copy.deepcopy(plain), sb.Ensemble(members=1))
    x = torch.randn(5, 3)
    expected = plain(x)
    assert torch.equal(net(x), expected)
    for name, value in plain.named_buffers():
        assert torch.equal(net.get_buffer(name), value)
    assert torch.equal(sb.sample(net.eval(), x)[0], plain.eval()(x))


def test_predict_keeps_members_apart() -> None:
    net = ensemble_of(mlp, members=4)
    x = torch.randn(6, 3)
    alone = torch.stack([m(x).softmax(-1) for m in nets_of(net)]).detach()
    pred = sb.predict(net, x, draws=8)
    torch.testing.assert_close(pred.member_probs, alone)
    torch.testing.assert_close(pred.probs, alone.mean(0))
    entropy = torch.special.entr(alone.mean(0)).sum(-1)
    torch.testing.assert_close(pred.entropy, entropy)
    torch.testing.assert_close(
        pred.epistemic, entropy - torch.special.entr(alone).sum(-1).mean(0)
    )


# Any module -----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
def test_custom_modules_with_stray_parameters_buffers_and_nested_outputs() -> None:
    net = ensemble_of(Custom)
    nets = nets_of(net)
    x, scale = torch.randn(6, 3), torch.randn(6)
    y = sb.sample(net, x, scale=scale, power=2)
    alone = [m(x, scale=scale, power=2) for m in nets]
    torch.testing.assert_close(y["out"], torch.stack([a["out"] for a in alone]))
    torch.testing.assert_close(y["pair"][0], torch.stack([a["pair"][0] for a in alone]))
    assert torch.equal(y["pair"][1], torch.stack([a["pair"][1] for a in alone]))
    torch.testing.assert_close(y["loss"], torch.stack([a["loss"] for a in alone]))
    assert y["name"] == "custom"
    assert [int(m.calls) for m in (net, *net.posterior["members"].others)] == [1, 1, 1]
    bare = net(x[:4], scale[:4])
    assert bare["out"].shape == (4, 4) and bare["pair"][1].shape == (4,)


def test_fresh_members_renew_parameters_that_nothing_resets_and_member_0_keeps_its_own() -> (
    None
):
    net = Custom()
    with torch.no_grad():
        net.token.normal_()
    before = {n: t.clone() for n, t in net.state_dict().items()}
    with pytest.warns(
        UserWarning, match=r"1 parameters \(token\) do not start as torch starts them"
    ):
        sb.bayesianize(net, sb.Ensemble(members=3))
    assert "token" in str(sb.summary(net))
    members = nets_of(net)
    assert all(torch.equal(t, before[n]) for n, t in members[0].state_dict().items())
    tokens = [m.token for m in members]
    assert not torch.equal(tokens[0], tokens[1]) and not torch.equal(
        tokens[1], tokens[2]
    )
    plain = nn.Sequential(
        nn.Linear(2, 2), nn.ParameterList([torch.randn(3), torch.randn(4)])
    )
    with pytest.warns(UserWarning, match="Give factory="):
        lists = nets_of(sb.bayesianize(plain, sb.Ensemble(members=2)))
    assert all(
        a.shape == b.shape and not torch.equal(a, b)
        for a, b in zip(lists[0][1], lists[1][1], strict=True)
    )


def test_members_start_as_the_network_did_where_that_is_known_and_say_where_it_is_not() -> (
    None
):
    """A network whose constructor started it by He's rule, with biases at zero: a factory starts the others so, and
    without one they get the spread and the constants, with a warning. What torch started itself goes without."""

    def build() -> nn.Sequential:
        net = nn.Sequential(nn.Linear(30, 50), nn.ReLU(), nn.Linear(50, 10))
        for layer in (net[0], net[2]):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
        return net

    known = sb.bayesianize(build(), sb.Ensemble(members=4, factory=build))
    with pytest.warns(
        UserWarning,
        match=r"Ensemble of the model: 2 parameters \(0.weight, 2.weight\).*factory=",
    ):
        guessed = sb.bayesianize(build(), sb.Ensemble(members=4))
    for net, law in (
        (known, stats.norm),
        (guessed, stats.uniform(-math.sqrt(3), 2 * math.sqrt(3))),
    ):
        weights = [m.get_parameter("0.weight") for m in net.posterior["members"].others]
        numbers = (torch.cat(weights).detach() / math.sqrt(2 / 30)).flatten().numpy()
        assert 0.95 < numbers.std() < 1.05
        assert (
            stats.kstest(numbers / numbers.std(), law.cdf).pvalue > RARE
        )  # the guess has torch's own shape
        assert not any(
            m.get_parameter("0.bias").any() for m in net.posterior["members"].others
        )
    assert not sb.bayesianize(mlp(), sb.Ensemble(members=4)).posterior["members"].note


def test_a_loaded_ensemble_has_no_word_on_how_it_started(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="factory="):
        net = sb.bayesianize(Custom(), sb.Ensemble(members=2))
    again = sb.load(
        sb.debayesianize(copy.deepcopy(net)), sb.save(net, tmp_path / "saved")
    )
    assert not again.posterior["members"].note


@pytest.mark.parametrize(
    "build", [mlp, normed, images, lambda: nn.GRU(3, 4), lambda: nn.Embedding(9, 4)]
)
def test_fresh_members_start_as_torch_starts_them_and_member_0_keeps_its_weights(
    build: Callable[[], nn.Module],
) -> None:
    plain = build()
    with torch.no_grad():
        for t in (*plain.parameters(), *plain.buffers()):
            t.add_(5)
    net = sb.bayesianize(copy.deepcopy(plain), sb.Ensemble(members=3))
    for name, value in plain.state_dict().items():
        assert torch.equal(net.state_dict()[name], value)
    others = net.posterior["members"].others
    for name, p in build().named_parameters():
        values = [o.get_parameter(name) for o in others]
        if p.std() == 0:  # what is constant was started so, and by nobody trained
            assert all(
                torch.equal(value, plain.get_parameter(name)) for value in values
            )
            continue
        for value in values:
            limit = p.abs().max() + 0.1 if p.dim() == 1 else 4 * p.std() + 0.5
            assert value.abs().max() <= limit  # not five away
        if p.dim() > 1:
            assert not torch.equal(*values)
    for buffer in ("running_mean", "running_var"):
        for o in others:
            for m in o.modules():
                if hasattr(m, buffer):
                    assert (
                        getattr(m, buffer) == (0 if buffer == "running_mean" else 1)
                    ).all()


def test_fresh_attention_starts_as_torch_starts_it() -> None:
    net = sb.bayesianize(nn.MultiheadAttention(8, 2), sb.Ensemble(members=2))
    assert not net.out_proj.bias.any()  # as torch starts it
    assert not net.posterior["members"].others[0].out_proj.bias.any()


def test_a_method_named_init_weights_without_arguments_is_no_obstacle() -> None:
    class Net(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(3, 2))
            self._init_weights()

        def _init_weights(self) -> None:
            nn.init.zeros_(self[0].bias)

    sb.bayesianize(Net(), sb.Ensemble(members=2))


def test_copies_have_jitter_relative_to_each_parameters_size() -> None:
    plain = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 30))
    with torch.no_grad():
        plain[1].weight.mul_(100)
    net = sb.bayesianize(
        copy.deepcopy(plain), sb.Ensemble(members=3, init="copies", jitter=0.1)
    )
    for other in net.posterior["members"].others:
        for p, q in zip(plain.parameters(), other.parameters(), strict=True):
            noise = (q - p) / p.square().mean().sqrt() / 0.1
            assert stats.kstest(noise.detach().flatten().numpy(), "norm").pvalue > RARE
    net = sb.bayesianize(copy.deepcopy(plain), sb.Ensemble(members=2, init="copies"))
    assert all(
        torch.equal(p, q)
        for p, q in zip(
            plain.parameters(),
            net.posterior["members"].others.parameters(),
            strict=True,
        )
    )


class Projecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x)


class Running(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def run(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prior, self.posterior = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.posterior(x) + self.prior(x)


class Heads(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x) for head in self]).sum(0)


class Children(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            x = child(x)
        return x


@pytest.mark.parametrize(
    "build",
    [Projecting, Running, lambda: Heads([nn.Linear(3, 2), nn.Linear(3, 2)]), Children],
)
def test_names_and_children_of_the_library_do_not_get_in_a_modules_way(
    build: Callable[[], nn.Module],
) -> None:
    net, x = build(), torch.randn(4, 3)
    expected = net(x)
    sb.bayesianize(net, sb.Ensemble(members=2, init="copies"))
    torch.testing.assert_close(sb.sample(net, x), expected.expand(2, 4, 2))


def test_a_module_with_a_posterior_of_its_own_is_refused_and_can_be_wrapped() -> None:
    net, x = Autoencoder(), torch.randn(4, 3)
    expected = net(x)
    with pytest.raises(
        ValueError,
        match=r"This Autoencoder has an attribute `posterior` of its own, .* Wrap it: nn\.Sequential\(model\)",
    ):
        sb.bayesianize(net, sb.Ensemble(members=2, init="copies"))
    torch.testing.assert_close(net(x), expected)
    wrapped = sb.bayesianize(nn.Sequential(net), sb.Ensemble(members=2, init="copies"))
    torch.testing.assert_close(sb.sample(wrapped, x), expected.expand(2, 4, 2))


def test_a_sequential_does_not_run_its_posterior() -> None:
    net = ensemble_of(mlp)
    assert len(net) == 3 and [type(m) for m in net] == [nn.Linear, nn.Tanh, nn.Linear]
    assert net[-1] is net[2]
    assert isinstance(net, nn.Sequential) and type(net).__name__ == "CopiedSequential"


@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
def test_tuples_and_named_inputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 2), nn.Linear(4, 2)

        def forward(
            self, x: Tensor, *, z: Tensor, mask: Tensor
        ) -> tuple[Tensor, Tensor]:
            return self.a(x) + self.b(z), mask.sum() + self.b.bias

    net = ensemble_of(Two)
    x, z, mask = (
        torch.randn(5, 3),
        torch.randn(5, 4),
        torch.ones(9),
    )  # nine entries: no rows, so every member gets it whole
    y, bias = sb.sample(net, x, z=z, mask=mask)
    alone = [m(x, z=z, mask=mask) for m in nets_of(net)]
    torch.testing.assert_close(y, torch.stack([a for a, _ in alone]))
    torch.testing.assert_close(
        bias, torch.stack([b for _, b in alone])
    )  # without rows, and each member has its own


def test_packed_sequences_go_to_one_member_and_say_so() -> None:
    net = sb.bayesianize(nn.LSTM(3, 4), sb.Ensemble(members=2))
    packed = pack_sequence([torch.randn(4, 3), torch.randn(2, 3)])
    alone = [m(packed)[0].data for m in nets_of(net)]
    with pytest.warns(
        UserWarning, match="draw by draw.*members cannot share out a packed sequence"
    ):
        gaps = [(net(packed)[0].data - alone[0]).abs().max()]
    gaps += [(net(packed)[0].data - alone[0]).abs().max() for _ in range(20)]
    assert {bool(gap < 1e-6) for gap in gaps} == {
        True,
        False,
    }  # now one member, now the other
    for _ in range(5):
        y = net(packed)[0].data
        assert min((y - a).abs().max() for a in alone) < 1e-6


# Where rows lie -------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.LSTM(4, 4),
        lambda: nn.GRU(4, 4, num_layers=2),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.0), 1),
        lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0),
    ],
)
def test_sequence_first_networks_hold_their_rows_in_the_second_dimension(
    build: Callable[[], nn.Module],
) -> None:
    net = ensemble_of(build).eval()
    x = torch.randn(7, 3, 4)
    alone = [m(x) for m in nets_of(net)]
    for run in (lambda: sb.sample(net, x), lambda: sb.sample(net, x, parallel=False)):
        for ours, *theirs in zip(
            pytree.tree_leaves(run()), *map(pytree.tree_leaves, alone), strict=True
        ):
            torch.testing.assert_close(ours, torch.stack(theirs))
    y = first(net(x))
    for row in range(3):
        assert min((first(a)[:, row] - y[:, row]).abs().max() for a in alone) < 1e-6


class SequenceFirst(nn.Module):
    """Takes its rows first, but has a sequence-first part inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        y = (
            self.inner(x, x, x)[0]
            if isinstance(self.inner, nn.MultiheadAttention)
            else self.inner(x)[0]
        )
        return self.head(y[-1])


@pytest.mark.parametrize(
    "build", [lambda: nn.LSTM(4, 4), lambda: nn.MultiheadAttention(4, 2)]
)
def test_sequence_first_layers_inside_a_model_are_dealt_out_by_rows(
    build: Callable[[], nn.Module],
) -> None:
    config = sb.Ensemble(members=2, init="copies", jitter=0.5)
    net = sb.bayesianize(
        SequenceFirst(build()), {"inner": config, "head": config}
    ).eval()
    x = torch.randn(3, 6, 4)
    other = sb.debayesianize(copy.deepcopy(net))
    other.inner, other.head = (
        net.inner.posterior["members"].others[0],
        net.head.posterior["members"].others[0],
    )
    torch.testing.assert_close(sb.sample(net, x)[1], other(x))


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(6, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.table(torch.arange(x.shape[1])))


class Token(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.table, self.head = (
            nn.Parameter(torch.randn(1, 1, 4)),
            nn.Linear(4, 4),
            nn.Linear(4, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.table(self.token))


@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
@pytest.mark.parametrize("build", [Positions, Token])
def test_inputs_without_rows_reach_every_member_of_a_layer(
    build: Callable[[], nn.Module],
) -> None:
    config = sb.Ensemble(members=2, init="copies", jitter=0.5)
    net = sb.bayesianize(build(), {"table": config, "head": config})
    x = torch.randn(3, 5, 4)
    nets = [sb.debayesianize(copy.deepcopy(net)) for _ in range(2)]
    nets[1].table, nets[1].head = (
        net.table.posterior["members"].others[0],
        net.head.posterior["members"].others[0],
    )
    alone = torch.stack([m(x) for m in nets])
    torch.testing.assert_close(sb.sample(net, x), alone)
    for _ in range(
        10
    ):  # the layer on the positions and the head see the same member, whichever comes first
        gap = (alone - net(x)).abs().amax((2, 3))
        assert gap.amin(0).max() < 1e-5


def test_positions_beside_a_single_row_reach_one_member() -> None:
    config = sb.Ensemble(members=2, init="copies", jitter=0.5)
    net = sb.bayesianize(Positions(), {"table": config, "head": config})
    nets = [sb.debayesianize(copy.deepcopy(net)) for _ in range(2)]
    nets[1].table, nets[1].head = (
        net.table.posterior["members"].others[0],
        net.head.posterior["members"].others[0],
    )
    x = torch.randn(1, 6, 4)
    assert min((net(x) - m(x)).abs().max() for m in nets) < 1e-5


def test_states_of_a_recurrent_network_are_joined_by_rows() -> None:
    net = ensemble_of(lambda: nn.LSTM(3, 4, num_layers=2, batch_first=True))
    x = torch.randn(6, 5, 3)  # two rows for each of three members
    y, (h, _) = net(x)
    assert h.shape == (2, 6, 4)
    torch.testing.assert_close(h[-1], y[:, -1])


def test_states_go_in_and_out_by_rows() -> None:
    net = ensemble_of(lambda: nn.LSTM(3, 4, num_layers=2, batch_first=True))
    x, state = torch.randn(5, 6, 3), (torch.randn(2, 5, 4), torch.randn(2, 5, 4))
    y, (h, c) = sb.sample(net, x, state)
    for k, m in enumerate(nets_of(net)):
        alone, (ha, ca) = m(x, state)
        torch.testing.assert_close(y[k], alone)
        torch.testing.assert_close(h[k], ha)
        torch.testing.assert_close(c[k], ca)


# Training -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("network", ["mlp", "batch-norm", "images"])
def test_members_trained_together_equal_members_trained_apart(network: str) -> None:
    """The same data, SGD with momentum and decay; the joint loss is the average over members times K."""
    build, shape = NETWORKS[network]
    net = ensemble_of(build).double()
    nets = nets_of(net)
    together = torch.optim.SGD(
        sb.param_groups(net, weight_decay=0.01), lr=0.05, momentum=0.9
    )
    apart = [
        torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        for m in nets
    ]
    for _ in range(15):
        x, y = torch.randn(shape).double(), torch.randint(2, (shape[0],))
        together.zero_grad()
        terms = sb.elbo(sb.categorical(sb.sample(net, x), y), net, num_data=100)
        assert terms.kl == 0
        (3 * terms.loss).backward()
        together.step()
        for m, optimizer in zip(nets, apart, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(m(x), y).backward()
            optimizer.step()
    for ours, theirs in zip(nets_of(net), nets, strict=True):
        for name, value in theirs.state_dict().items():
            torch.testing.assert_close(
                ours.state_dict()[name], value, rtol=1e-6, atol=1e-9, msg=name
            )


def test_members_keep_batch_norm_statistics_of_their_own() -> None:
    net = ensemble_of(normed, members=2)
    x = torch.randn(9, 3)
    sb.sample(net, x)
    own, other = net[1], net.posterior["members"].others[0][1]
    assert not torch.allclose(own.running_mean, other.running_mean)
    assert int(own.num_batches_tracked) == int(other.num_batches_tracked) == 1
    y = sb.sample(net.eval(), x)
    assert not other.training
    torch.testing.assert_close(y, torch.stack([m(x) for m in nets_of(net)]))


@pytest.mark.parametrize("rows", [4, 5])
def test_a_bare_call_in_training_normalises_each_member_over_its_own_rows(
    rows: int,
) -> None:
    net = ensemble_of(normed, members=2)
    nets = nets_of(net)
    x = torch.randn(rows, 3)
    y, half = net(x), -(-rows // 2)
    with torch.no_grad():
        candidates = [
            torch.cat([copy.deepcopy(a)(x[:half]), copy.deepcopy(b)(x[half:])])
            for a, b in (nets, nets[::-1])
        ]
    assert min((y - c).abs().max() for c in candidates) < 1e-5


def test_a_members_gradient_comes_from_its_own_rows() -> None:
    net = ensemble_of(mlp)
    sb.sample(net, torch.randn(4, 3))[1].sum().backward()
    assert not net[0].weight.grad.any()
    assert (
        net.posterior["members"].others[0][0].weight.grad.any()
        and not net.posterior["members"].others[1][0].weight.grad.any()
    )


def test_modes_and_types_reach_every_member() -> None:
    net = ensemble_of(normed).eval()
    assert not any(m.training for m in net.modules())
    net.train().double()
    assert all(m.training for m in net.modules()) and {
        p.dtype for p in net.parameters()
    } == {torch.float64}
    assert sb.sample(net, torch.randn(4, 3).double()).dtype == torch.float64


def test_dropout_inside_members_is_drawn_apart() -> None:
    net = sb.bayesianize(
        nn.Sequential(nn.Linear(3, 50), nn.Dropout(0.5)),
        sb.Ensemble(members=2, init="copies"),
    )
    y = sb.sample(net, torch.randn(4, 3))
    assert not torch.equal(y[0] == 0, y[1] == 0)


# Saved, copied, taken apart -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", ["mlp", "batch-norm", "recurrent"])
def test_saved_loaded_copied_and_pickled_ensembles_are_the_same(
    network: str, tmp_path: Path
) -> None:
    build, shape = NETWORKS[network]
    base = build()
    net = sb.bayesianize(copy.deepcopy(base), sb.Ensemble(members=3))
    x = torch.randn(shape)
    sb.sample(net, x)  # batch norm's statistics part from those of the base
    plain = sb.debayesianize(copy.deepcopy(net))
    for folder, start, options in (
        ("own", copy.deepcopy(plain), {}),
        ("whole", build(), {"base": True}),
    ):
        again = sb.load(start, sb.save(net, tmp_path / folder, **options))
        assert list(again.state_dict()) == list(net.state_dict())
        assert all(
            torch.equal(a, b)
            for a, b in zip(
                again.state_dict().values(), net.state_dict().values(), strict=True
            )
        )
        assert type(again) is type(net)
    twins = [copy.deepcopy(net), pickle.loads(pickle.dumps(net)), again]
    expected = first(sb.sample(net.eval(), x))
    for twin in twins:
        torch.testing.assert_close(
            first(sb.sample(twin.eval(), x)), expected, rtol=0, atol=0
        )
        assert first(twin(x)).shape == (7, *expected.shape[2:])
        with torch.no_grad():
            for p in twin.parameters():
                p.zero_()
    assert torch.equal(first(sb.sample(net, x)), expected)  # twins share nothing


def test_debayesianize_gives_member_0_back() -> None:
    plain = normed()
    net = sb.bayesianize(copy.deepcopy(plain), sb.Ensemble(members=3))
    again = sb.debayesianize(net)
    assert (
        again is net and type(net) is nn.Sequential and len(list(net.children())) == 4
    )
    assert list(net.state_dict()) == list(plain.state_dict())
    x = torch.randn(4, 3)
    assert torch.equal(net.eval()(x), plain.eval()(x))
    assert not net._forward_hooks and not net._forward_pre_hooks


def test_a_base_checkpoint_still_loads() -> None:
    plain, net = normed(), ensemble_of(normed)
    result = net.load_state_dict(plain.state_dict(), strict=False)
    assert not result.unexpected_keys
    assert all(key.startswith("posterior.members.") for key in result.missing_keys)


def test_members_with_tied_weights_can_be_saved(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embed(ids))

    net = ensemble_of(Tied)
    other = net.posterior["members"].others[0]
    assert other.head.weight is other.embed.weight  # still tied
    base = sb.debayesianize(copy.deepcopy(net))
    again = sb.load(base, sb.save(net, tmp_path / "posterior"))
    ids = torch.randint(5, (3, 4))
    assert torch.equal(sb.sample(again, ids), sb.sample(net, ids))


# ensemble([...]) ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
@pytest.mark.parametrize("build", [mlp, normed, Custom])
def test_joined_networks_are_the_networks_themselves(
    build: Callable[[], nn.Module],
) -> None:
    nets = [build() for _ in range(3)]
    x = torch.randn(6, 3)
    for m in nets:
        m.train()(x)  # statistics of their own
        m.eval()
    alone = torch.stack([first(m(x)) for m in nets])
    parameters = [p for m in nets for p in m.parameters()]
    net = sb.ensemble(nets)
    assert net is nets[0]
    torch.testing.assert_close(first(sb.sample(net, x)), alone)
    assert {id(p) for p in net.parameters()} == {id(p) for p in parameters}
    assert sb.members(net) == 3 and not net.training
    assert sb.summary(net).after == sum(p.numel() for p in parameters)


@pytest.mark.parametrize(
    ("nets", "words"),
    [
        ([nn.Linear(2, 2)], "at least two models, got 1"),
        ([], "at least two models, got 0"),
        (
            [nn.Linear(2, 2), nn.Linear(2, 3)],
            "model 1 is a Linear that differs in bias, weight",
        ),
        (
            [nn.Linear(2, 2), nn.Linear(2, 2, bias=False)],
            "model 1 is a Linear that differs in bias",
        ),
        (
            [nn.Linear(2, 2), nn.Bilinear(2, 2, 2)],
            "model 1 is a Bilinear that differs in weight",
        ),
        (
            [nn.BatchNorm1d(2), nn.BatchNorm2d(2)],
            "model 1 is a BatchNorm2d that differs in its type",
        ),
        (
            [nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False)],
            "differs in num_batches_tracked, running_mean, running_var",
        ),
    ],
)
def test_misfits_are_refused_by_name(nets: list[nn.Module], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sb.ensemble(nets)
    assert not any(isinstance(m, Converted) for m in nets)


def test_the_same_object_is_refused() -> None:
    net = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="model 1 is the same object"):
        sb.ensemble([net, net])
    converted = sb.bayesianize(nn.Linear(2, 2), sb.Ensemble(members=2))
    with pytest.raises(ValueError):
        sb.ensemble([converted, nn.Linear(2, 2)])


def test_the_same_object_among_the_others_is_refused() -> None:
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(ValueError, match="same object"):
        sb.ensemble([a, b, b])


def test_networks_that_differ_in_their_activations_run_as_they_are() -> None:
    nets = [
        nn.Sequential(nn.Linear(3, 4), nn.Tanh() if i else nn.ReLU(), nn.Linear(4, 2))
        for i in range(3)
    ]
    x = torch.randn(5, 3)
    alone = torch.stack([m(x) for m in nets])
    torch.testing.assert_close(sb.sample(sb.ensemble(nets), x), alone)


@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
def test_a_joined_ensemble_survives_a_checkpoint(tmp_path: Path) -> None:
    nets = [Custom() for _ in range(3)]
    base = copy.deepcopy(nets[0])
    x = torch.randn(4, 3)
    alone = torch.stack([copy.deepcopy(m)(x)["out"] for m in nets])
    again = sb.load(base, sb.save(sb.ensemble(nets), tmp_path / "posterior"))
    torch.testing.assert_close(sb.sample(again, x)["out"], alone)


# Single layers, and other methods beside them -------------------------------------------------------------------------


def test_single_layers_can_be_copied() -> None:
    net = sb.bayesianize(
        normed(), sb.Ensemble(members=3, init="copies", jitter=0.5), include="0|1"
    ).eval()
    assert [isinstance(m, Converted) for m in net] == [True, True, False, False]
    x = torch.randn(4, 3)
    y = sb.sample(net, x)
    for k in range(3):
        layers = [
            m if k == 0 else m.posterior["members"].others[k - 1] for m in net[:2]
        ]
        h = F.linear(x, layers[0].weight, layers[0].bias)
        h = F.batch_norm(
            h,
            layers[1].running_mean,
            layers[1].running_var,
            layers[1].weight,
            layers[1].bias,
        )
        torch.testing.assert_close(y[k], net[3](h.relu()))
    assert {r.name: r.status for r in sb.summary(net).rows} == {
        "0": "converted",
        "1": "converted",
        "3": "skipped",
    }
    excluded = sb.bayesianize(normed(), sb.Ensemble(members=2), exclude="3")
    assert [isinstance(m, Converted) for m in excluded] == [True, True, False, False]


def member_of_layer(layer: Any, k: int) -> Callable[[Tensor], Tensor]:
    """What member k of a converted dense layer computes, whichever of three methods it has."""
    posterior = next(iter(layer.posterior.values()))
    kind = type(posterior).__name__
    if kind == "EnsemblePosterior":
        one = layer if k == 0 else posterior.others[k - 1]
        return lambda x: F.linear(x, one.weight, one.bias)
    if kind == "Rank1Posterior":
        r, s = posterior.r.loc[k].squeeze(0), posterior.s.loc[k].squeeze(0)
        bias = layer.bias
        if posterior.bias is not None:
            offsets = (
                posterior.bias
                if len(posterior.bias) == posterior.members
                else torch.cat([torch.zeros_like(posterior.bias[:1]), posterior.bias])
            )
            bias = bias + offsets[k]
        return lambda x: F.linear(x * s, layer.weight) * r + bias
    weight = layer.weight if k == 0 else posterior.weight[k - 1]
    bias = layer.bias if k == 0 else posterior.bias[k - 1]
    return lambda x: F.linear(x, weight, bias)


@pytest.mark.parametrize("rows", [3, 7, 8])
def test_a_row_sees_the_same_member_in_every_layer_whatever_its_method(
    rows: int,
) -> None:
    config = {
        "0": sb.Ensemble(members=3, init="copies", jitter=0.5),
        "1": sb.BatchEnsemble(members=3, mean_init=sb.Normal(1.0, 0.5)),
        "2": sb.Mixture(components=3, assignment="model", jitter=0.5),
        "3": sb.Ensemble(members=3, init="copies", jitter=0.5),
    }
    net = sb.bayesianize(
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), config
    ).double()
    x = torch.randn(rows, 4).double()
    alone = []
    for k in range(3):
        y = x
        for layer in net:
            y = member_of_layer(layer, k)(y)
        alone.append(y)
    alone = torch.stack(alone)
    torch.testing.assert_close(sb.sample(net, x), alone)
    torch.testing.assert_close(sb.sample(net, x, draws=6), torch.cat([alone, alone]))
    torch.testing.assert_close(sb.sample(net, x, parallel=False), alone)
    seen = set()
    for _ in range(20):
        gap = (alone - net(x)).abs().amax(2)
        assert gap.amin(0).max() < 1e-10
        seen.add(int(gap.argmin(0)[0]))
    assert seen == {0, 1, 2}


def test_numbers_of_members_may_differ() -> None:
    config = {
        "0": sb.Ensemble(members=2, init="copies", jitter=0.5),
        "1": sb.Ensemble(members=3, init="copies", jitter=0.5),
    }
    net = sb.bayesianize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), config)
    x = torch.randn(5, 4)
    y = sb.sample(net, x)
    assert sb.members(net) == 6 and y.shape == (6, 5, 4)
    for j in range(6):
        torch.testing.assert_close(
            y[j], member_of_layer(net[1], j % 3)(member_of_layer(net[0], j % 2)(x))
        )


def test_ensembles_beside_patches_dropout_and_mean_field() -> None:
    net = nn.Sequential(
        nn.Linear(3, 6),
        nn.BatchNorm1d(6),
        nn.Dropout(0.5),
        nn.Linear(6, 6),
        nn.Linear(6, 2),
    )
    config = {
        "0": sb.Ensemble(members=2, init="copies", jitter=0.5),
        "1": sb.ModelPatch(components=3),
        "2": sb.MCDropout(),
        "3": sb.MeanField(),
        "4": sb.Rank1(members=2),
    }
    sb.bayesianize(net, config).eval()
    x = torch.randn(5, 3)
    assert sb.sample(net, x, draws=8).shape == (8, 5, 2) and net(x).shape == (5, 2)
    assert sb.summary(net).ensemble_size == "infinite (continuous)"
    sb.elbo(
        sb.categorical(sb.sample(net, x), torch.zeros(5, dtype=torch.long)),
        net,
        num_data=10,
    ).loss.backward()
    assert all(p.grad is not None for p in net.parameters())
    enumerated = sb.bayesianize(
        nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6)),
        {
            "0": sb.Ensemble(members=2, init="copies", jitter=0.5),
            "1": sb.ModelPatch(components=2, jitter=0.5),
        },
    )
    scales = torch.stack(
        [enumerated[1].weight, enumerated[1].posterior["weight"].weight[0]]
    )
    shifts = torch.stack(
        [enumerated[1].bias, enumerated[1].posterior["weight"].bias[0]]
    )
    y = sb.sample(enumerated, x, draws=20)
    for j in range(20):
        h = member_of_layer(enumerated[0], j % 2)(x)
        assert (
            min(
                (F.layer_norm(h, (6,), s, b) - y[j]).abs().max()
                for s, b in zip(scales, shifts, strict=True)
            )
            < 1e-5
        )


def test_a_converted_model_cannot_be_copied_as_a_whole() -> None:
    net = sb.bayesianize(mlp(), sb.Rank1(), include="0")
    with pytest.raises(
        ValueError,
        match="converted layers already: call debayesianize first, or pick other layers with include",
    ):
        sb.bayesianize(net, sb.Ensemble(members=2))
    sb.bayesianize(net, sb.Ensemble(members=4), include="2")
    assert sb.members(net) == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"members": 0}, "members must be a whole number of at least 1, got 0"),
        ({"init": "random"}, "unknown init 'random'"),
        ({"init": "copies", "jitter": -1.0}, "must not be negative, got -1.0"),
        ({"jitter": 0.1}, "it needs init='copies'"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match="Ensemble: .*" + words):
        sb.Ensemble(**options)


# Counts, summaries, compilers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "build"),
    each([1, 2, 5], [mlp, normed, images, Custom, lambda: nn.LSTM(3, 4)]),
)
def test_counts_and_costs(build: Callable[[], nn.Module], members: int) -> None:
    net = build()
    size = sum(p.numel() for p in net.parameters())
    config = sb.Ensemble(members=members, init="copies")
    cost = sb.estimate_cost(net, config)
    assert (cost.parameters, cost.extra_parameters, cost.extra_bytes) == (
        size,
        (members - 1) * size,
        4 * (members - 1) * size,
    )
    assert cost.forwards == members and cost.relative_flops == 1.0
    sb.bayesianize(net, config)
    assert sum(p.numel() for p in net.parameters()) == members * size
    report = sb.summary(net)
    assert (report.before, report.after) == (size, members * size)
    assert (
        len(report.rows) == 1
        and report.rows[0].status == "converted"
        and report.rows[0].detail == f"Ensemble(members={members})"
    )
    assert math.isclose(
        report.log_ensemble_size, math.log(members)
    ) and report.ensemble_size == str(members)
    assert f"1 of 1 layers converted; {size:,} -> {members * size:,} parameters" in str(
        report
    )


def test_costs_of_single_layers() -> None:
    net = mlp()
    cost = sb.estimate_cost(net, sb.Ensemble(members=4), include="0")
    sb.bayesianize(net, sb.Ensemble(members=4), include="0")
    report = sb.summary(net)
    assert cost.extra_parameters == report.after - report.before == 3 * (3 * 8 + 8)


@pytest.mark.slow
def test_compiles_as_one_graph() -> None:
    net = ensemble_of(mlp)
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    x = torch.randn(6, 3)
    y = sb.sample(compiled, x)
    torch.testing.assert_close(y, sb.sample(net, x))
    y.square().sum().backward()
    grads = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    sb.sample(net, x).square().sum().backward()
    for g, p in zip(grads, net.parameters(), strict=True):
        torch.testing.assert_close(g, p.grad)
    alone = torch.stack([m(x) for m in nets_of(net)])
    members = set()
    for _ in range(8):
        gap = (alone - compiled(x)).abs().amax(2)
        assert gap.amin(0).max() < 1e-5
        members.add(int(gap.argmin(0)[0]))
    assert len(members) > 1  # the first member is drawn anew in every call


# Models nobody here wrote ---------------------------------------------------------------------------------------------

transformers = pytest.importorskip("transformers")


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=8,
        num_labels=3,
        initializer_range=0.3,
    )
    return transformers.BertForSequenceClassification(config).eval()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
@pytest.mark.parametrize("init", ["fresh", "copies"])
def test_an_ensemble_of_berts(init: str, tmp_path: Path) -> None:
    base = bert()
    net = sb.bayesianize(
        copy.deepcopy(base),
        sb.Ensemble(members=3, init=init, jitter=0.2 if init == "copies" else 0.0),
    ).eval()
    nets = nets_of(net)
    for (name, p), q in zip(
        nets[0].named_parameters(), nets[1].parameters(), strict=True
    ):
        if p.dim() > 1:
            assert not torch.equal(p, q), name
            if init == "fresh":
                assert 0.5 < q.std() / p.std() < 2, (
                    name
                )  # as BERT starts it, not as torch's layers do
    ids, mask, labels = (
        torch.randint(1, 20, (4, 6)),
        torch.ones(4, 6, dtype=torch.long),
        torch.tensor([0, 1, 2, 0]),
    )
    mask[0, 4:] = 0
    with torch.no_grad():
        y = sb.sample(net, input_ids=ids, attention_mask=mask, labels=labels)
        alone = [m(input_ids=ids, attention_mask=mask, labels=labels) for m in nets]
    assert type(y).__name__ == "SequenceClassifierOutput"
    torch.testing.assert_close(y.logits, torch.stack([a.logits for a in alone]))
    torch.testing.assert_close(y.loss, torch.stack([a.loss for a in alone]))
    bare = net(ids, attention_mask=mask).logits
    gap = (torch.stack([a.logits for a in alone]) - bare).abs().amax(2)
    assert gap.amin(0).max() < 1e-5 and len(gap.argmin(0).unique()) == 3
    pred = sb.predict(net, {"input_ids": ids, "attention_mask": mask})
    assert pred.member_probs.shape == (3, 4, 3)
    again = sb.load(copy.deepcopy(base), sb.save(net, tmp_path / "posterior")).eval()
    torch.testing.assert_close(
        sb.sample(again, ids, attention_mask=mask).logits, y.logits
    )


def test_caches_of_a_language_model_hold_every_row_or_are_refused() -> None:
    config = transformers.GPT2Config(
        vocab_size=20,
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=8,
        bos_token_id=0,
        eos_token_id=0,
    )
    net = sb.bayesianize(
        transformers.GPT2LMHeadModel(config),
        sb.Ensemble(members=2, init="copies", jitter=0.5),
    ).eval()
    ids = torch.randint(20, (4, 5))
    with torch.no_grad(), sb.fixed_draws(net):
        full = net(ids).logits[:, -1]
        try:
            cache = net(ids[:, :4]).past_key_values
            step = net(ids[:, 4:], past_key_values=cache).logits[:, -1]
        except ValueError:
            return
    torch.testing.assert_close(step, full, rtol=1e-3, atol=1e-4)


def test_every_posterior_of_an_ensemble_is_found_once() -> None:
    net = ensemble_of(normed, members=4)
    assert [type(p).__name__ for p in posteriors_of(net)] == ["EnsemblePosterior"]
    groups = sb.param_groups(net, weight_decay=0.1)
    assert {g["weight_decay"] for g in groups} == {0.1}
    assert sum(p.numel() for g in groups for p in g["params"]) == sum(
        p.numel() for p in net.parameters()
    )


# The module itself, member 0 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [sb.Ensemble(members=3, init="copies", jitter=0.5), {"0": sb.Ensemble(members=3)}],
)
def test_hooks_that_were_there_before_run_once_for_every_member(config: Any) -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    for module in (net, net[0]):
        module.register_forward_pre_hook(lambda module, args: (args[0] + 1.0,))
        module.register_forward_hook(lambda module, args, out: out * 3.0)
    net, x = sb.bayesianize(net, config).eval(), torch.randn(5, 4)
    with torch.no_grad(), sb.fixed_draws(net):
        wanted = torch.stack([sb.materialize(net, draw=j)(x) for j in range(3)])
        torch.testing.assert_close(sb.sample(net, x), wanted)
        torch.testing.assert_close(sb.sample(net, x, parallel=False), wanted)


def test_a_thread_finds_an_ensemble_while_another_runs_member_0() -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 2)
            self.calls: tuple[
                int, ...
            ] = ()  # no number, which would make each call another mode

        def forward(self, x: Tensor) -> Tensor:
            self.calls = (*self.calls, len(x))
            if (
                threading.current_thread() is not threading.main_thread()
                and not inside.is_set()
            ):
                inside.set()
                assert go_on.wait(100)
            return self.a(x)

    net, x = (
        sb.bayesianize(
            Waits(), sb.Ensemble(members=3, init="copies", jitter=0.5)
        ).eval(),
        torch.randn(5, 4),
    )
    wanted, found = sb.predict(net, x, likelihood="gaussian").samples, []
    before = len(net.calls)
    other = threading.Thread(
        target=lambda: found.append(sb.predict(net, x, likelihood="gaussian").samples)
    )
    other.start()
    try:
        assert inside.wait(100)
        here = sb.predict(net, x, likelihood="gaussian").samples
    finally:
        go_on.set()
        other.join()
    assert torch.equal(here, wanted) and torch.equal(found[0], wanted)
    assert len(net.calls) > before  # what a forward sets stays


def test_tied_layers_are_not_copied_one_by_one() -> None:
    def tied() -> nn.Sequential:
        net = nn.Sequential(
            nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2)
        )
        net[2].weight = net[0].weight
        return net

    net = sb.bayesianize(
        tied(), {".+": sb.Ensemble(members=2, init="copies", jitter=0.5)}
    )
    assert "untie" in str(sb.summary(net)) and [
        isinstance(m, Converted) for m in net
    ] == [False, False, False, True]
    with pytest.raises(ValueError, match="untie"):
        sb.bayesianize(tied(), {".+": sb.Ensemble(members=2)}, strict=True)
    net = sb.bayesianize(tied(), sb.Ensemble(members=2))
    with sb.fixed_draws(net):
        other = sb.materialize(net, draw=1)
    assert other[0].weight is other[2].weight


def test_what_a_forward_sets_and_takes_away_is_on_the_module() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            if hasattr(self, "kept"):
                del self.kept
            else:
                self.kept = x.shape[0]
            return self.layer(x)

    net, x = sb.bayesianize(Keeps(), sb.Ensemble(members=1)).eval(), torch.randn(4, 3)
    for there in (True, False, True):
        net(x)
        assert hasattr(net, "kept") is there
