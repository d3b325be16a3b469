"""Faults met by a sceptical user of models nobody here wrote: each against written-out weights or a slow answer."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import each, pairwise
from oracle import assert_rows_of_draws
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import slimbayes as sb

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
MEMBERS = [sb.BatchEnsemble(members=3), sb.Ensemble(members=3)]


class Net(nn.Module):
    """Two dense layers and what to do with them."""

    def __init__(self, run: Callable[..., Any], **more: Any) -> None:
        super().__init__()
        self.run, self.a, self.b = run, nn.Linear(4, 8), nn.Linear(8, 3)
        for name, value in more.items():
            setattr(self, name, value)

    def forward(self, *args: Any) -> Any:
        return self.run(self, *args)


def product(net: Any, x: Tensor) -> Tensor:
    """Keeps the product of two layers' weights."""
    if net.kept is None:
        net.kept = net.b.weight @ net.a.weight
    return F.linear(x, net.kept)


def prompt(net: Any, x: Tensor) -> Tensor:
    """Keeps the features of a prompt, by its length, as zero-shot classifiers do."""
    if 2 not in net.kept:
        net.kept[2] = net.a(torch.ones(2, 4)).mean(0)
    return net.b(net.a(x) * net.kept[2])


def new_name(net: Any, x: Tensor) -> Tensor:
    if not hasattr(net, "made"):
        net.made = net.a(torch.ones(1, 4))
    return net.b(net.a(x) * net.made)


@pytest.mark.parametrize(
    "config",
    [sb.MeanField(scale_init=0.2), sb.BatchEnsemble(members=3), sb.Rank1(members=3)],
)
@pytest.mark.parametrize(
    ("run", "kept"), [(product, None), (prompt, {}), (new_name, ())]
)
@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
@torch.no_grad()
def test_what_was_computed_from_drawn_weights_is_not_kept_for_the_next_draw(
    config: Any, run: Any, kept: Any
) -> None:
    net = sb.bayesianize(Net(run, kept=kept), config).eval()
    for seed in range(2):
        with sb.fixed_draws(net, 3, seed=seed):
            wanted = torch.stack([sb.materialize(net, draw=j)(X) for j in range(3)])
            for parallel in ("auto", False):
                torch.testing.assert_close(sb.sample(net, X, parallel=parallel), wanted)
            assert_rows_of_draws(net(X), list(wanted), 0)
        torch.testing.assert_close(
            sb.predict(net, X, draws=3, seed=seed).samples,
            wanted.softmax(-1),
        )
    net(X)
    assert net.kept == kept and not hasattr(net, "made") and wanted.std(0).min() > 0
    sb.debayesianize(net)(X)
    assert net.kept is not None and not any(
        "_slimbayes" in name for name in net.__dict__
    )


def test_what_was_computed_from_inputs_is_kept() -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        net.seen.append(len(x))
        return net.b(net.a(x))

    net = sb.bayesianize(Net(run, seen=[]), sb.MeanField())
    net(X), net(X[:2])
    assert net.seen == [5, 2]


@pytest.mark.parametrize("config", [*MEMBERS, {".+": sb.Ensemble(members=3)}])
@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
@torch.no_grad()
def test_steps_of_rows_that_run_one_by_one_are_no_rows(config: Any) -> None:
    net, x = (
        Net(lambda net, x: torch.stack([net.b(net.a(row).tanh()) for row in x])),
        torch.randn(4, 5, 4),
    )
    net = sb.bayesianize(net, config).eval()
    with sb.fixed_draws(net):
        wanted = [sb.materialize(net, draw=j)(x) for j in range(3)]
        torch.testing.assert_close(sb.sample(net, x), torch.stack(wanted))
    assert_rows_of_draws(net(x), wanted, 0)


def to_the_longest(net: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return net.b(net.a(x[:, : int(lengths.max())]).tanh().mean(1))


def packed(net: Any, x: Tensor, lengths: Tensor) -> Tensor:
    rows = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return net.b(pad_packed_sequence(net.lstm(rows)[0], batch_first=True)[0])


@pytest.mark.parametrize("run", [to_the_longest, packed])
@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
@torch.no_grad()
def test_members_do_not_cut_sequences_to_the_longest_of_their_rows(run: Any) -> None:
    net = sb.bayesianize(Net(run, lstm=nn.LSTM(4, 8)), sb.Ensemble(members=3)).eval()
    x, lengths = torch.randn(5, 6, 4), torch.tensor([3, 4, 6, 5, 2])
    with sb.fixed_draws(net):
        wanted = [sb.materialize(net, draw=j)(x, lengths) for j in range(3)]
        torch.testing.assert_close(sb.sample(net, x, lengths), torch.stack(wanted))
    assert_rows_of_draws(net(x, lengths), wanted, 0)


@pytest.mark.parametrize("config", [sb.MeanField(), sb.BatchEnsemble(members=3)])
def test_layers_are_pruned_after_their_conversion_and_pruning_made_permanent(
    config: Any,
) -> None:
    net = sb.bayesianize(Net(lambda net, x: net.b(net.a(x).tanh())), config).eval()
    for layer in (net.a, net.b):
        prune.l1_unstructured(layer, "weight", amount=0.5)
        prune.remove(layer, "weight")
    with sb.fixed_draws(net, 3):
        wanted = [sb.materialize(net, draw=j)(X) for j in range(3)]
        torch.testing.assert_close(sb.sample(net, X), torch.stack(wanted))
    assert isinstance(net.a._parameters["weight"], nn.Parameter)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
def test_scripted_parts_are_left_alone() -> None:
    net = Net(
        lambda net, x: net.b(net.part(x)),
        part=torch.jit.script(nn.Sequential(nn.Linear(4, 8), nn.Tanh())),
    )
    with pytest.raises(ValueError, match="found none"):
        sb.bayesianize(net, sb.MCDropout())
    net = sb.bayesianize(net, sb.BatchEnsemble(members=3), include="b").eval()
    with sb.fixed_draws(net):
        wanted = torch.stack([sb.materialize(net, draw=j)(X) for j in range(3)])
        torch.testing.assert_close(sb.sample(net, X, parallel=True), wanted)
    torch.testing.assert_close(sb.predict(net, X).samples, wanted.softmax(-1))


class Remembers(nn.Module):
    """A layer of a type nobody knows that keeps a state of its rows, and begins anew at the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.state = nn.Parameter(torch.randn(4, 4)), None

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        state = torch.zeros_like(x) if self.state is None else self.state
        self.state = (x @ self.weight).tanh() + state * ~first
        return self.state


@pytest.mark.parametrize("config", [sb.BatchEnsemble(members=3), sb.Rank1(members=3)])
@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
@torch.no_grad()
def test_layers_that_keep_a_state_of_all_rows_are_not_run_on_some(config: Any) -> None:
    net = Net(lambda net, x, first: net.b(net.a(net.cell(x, first))), cell=Remembers())
    net, first = sb.bayesianize(net, config).eval(), torch.ones(5, 1, dtype=torch.bool)
    with sb.fixed_draws(net):
        wanted = [sb.materialize(net, draw=j)(X, first) for j in range(3)]
        for _ in range(2):
            assert_rows_of_draws(net(X, first), wanted, 0)
            torch.testing.assert_close(sb.sample(net, X, first), torch.stack(wanted))


def follow(net: Any, x: Tensor) -> Tensor:
    """A target network follows another at each call, as in contrastive learning."""
    if net.training:
        with torch.no_grad():
            for own, other in zip(
                net.target.parameters(), net.a.parameters(), strict=True
            ):
                net.write(own, other)
    return net.b(net.a(x) + net.target(x))


@pytest.mark.parametrize(
    ("config", "write"),
    each(
        [sb.BatchEnsemble(members=3), sb.Rank1(members=3), sb.Ensemble(members=3)],
        [
            lambda own, other: own.lerp_(other, 0.5),
            lambda own, other: own.data.mul_(0.5).add_(other.data, alpha=0.5),
            lambda own, other: setattr(own, "data", own.data * 0.5 + other.data * 0.5),
        ],
    ),
)
def test_trials_leave_parameters_that_a_forward_writes_to_as_they_were(
    config: Any, write: Any
) -> None:
    net = sb.bayesianize(
        Net(follow, target=nn.Linear(4, 8), write=write), config
    ).train()
    kept, wanted = (
        net.target.weight.data,
        0.5 * (net.target.weight + net.a.weight).detach(),
    )
    kept_before = kept.clone()
    sb.sample(net, X)
    torch.testing.assert_close(
        net.target.weight.detach(), wanted
    )  # once, not by each run of the proof
    if net.target.weight.data_ptr() != kept.data_ptr():
        torch.testing.assert_close(kept, kept_before)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.write = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.write.weight = self.read.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.write(self.read(x).tanh())


def test_tied_layers_that_are_converted_apart_are_told() -> None:
    sb.bayesianize(
        Tied(), {"read": sb.MeanField(), "write": sb.BatchEnsemble(members=2)}
    )(X)  # in one call: one draw
    net = Tied()
    (
        sb.bayesianize(net.read, sb.MeanField()),
        sb.bayesianize(net.write, sb.BatchEnsemble(members=2)),
    )
    with pytest.warns(
        sb.SlimbayesWarning,
        match="have one weight, but were converted in different calls",
    ):
        sb.sample(net, X)


def test_weights_that_a_model_keeps_in_a_list_are_told_to_be_as_they_were() -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        return net.b(F.linear(x, net.weights[0], net.a.bias))

    net = Net(run)
    net.weights = [net.a.weight]
    with pytest.warns(UserWarning, match="never called: a"):
        sb.sample(sb.bayesianize(net, sb.MeanField()), X)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "parallel"),
    each(
        [sb.MeanField(estimator="local"), sb.MCDropout(), sb.DropConnect(), sb.Rank1()],
        ["auto", False],
    ),
)
def test_what_is_drawn_late_from_a_seed_is_the_same_when_it_is_recomputed(
    config: Any, parallel: Any
) -> None:
    gradients = []
    for reentrant in (None, True, False):

        def run(net: Any, x: Tensor, how: Any = reentrant) -> Tensor:
            part = nn.Sequential(net.a, net.drop, nn.Tanh())
            return net.b(
                part(x) if how is None else checkpoint(part, x, use_reentrant=how)
            )

        torch.manual_seed(0)
        net, x = (
            sb.bayesianize(Net(run, drop=nn.Dropout(0.5)), config),
            X.clone().requires_grad_(),
        )
        out = sb.sample(net, x, draws=3, seed=5, parallel=parallel)
        (out * torch.arange(1.0, out.numel() + 1).view(out.shape)).sum().backward()
        gradients.append(
            [x.grad, *(p.grad for p in net.parameters() if p.grad is not None)]
        )
    for found in gradients[1:]:
        torch.testing.assert_close(found, gradients[0])


@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
@pytest.mark.parametrize(
    ("config", "ready"),
    each(
        [
            *MEMBERS,
            sb.MeanField(scale_init=0.2),
            sb.MCDropout(rate=0.5, before="output"),
        ],
        [False, True],
    ),
)
def test_models_that_take_derivatives_in_their_forward_are_folded_and_predict(
    config: Any, ready: bool
) -> None:
    def forces(net: Any, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(ready or torch.is_grad_enabled()):
            x = x.requires_grad_()
            energy = net.b(net.a(x).tanh())
            return torch.autograd.grad(energy.sum(), x, create_graph=net.training)[0]

    net = sb.bayesianize(Net(forces), config).eval()
    with sb.fixed_draws(net, 3, seed=0):
        wanted = sb.sample(net, X.clone(), parallel=False)
        torch.testing.assert_close(sb.sample(net, X.clone(), parallel=True), wanted)
    found = sb.predict(
        net,
        X.clone(),
        draws=3,
        seed=0,
        likelihood="gaussian",
        likelihood_std=1.0,
    ).samples
    torch.testing.assert_close(found, wanted)
    assert not found.requires_grad and wanted.std(0).max() > 0
    sb.sample(net.train(), X.clone(), draws=3).square().sum().backward()
    assert all(p.grad is not None for n, p in net.named_parameters() if "weight" in n)


@torch.no_grad()
def test_points_with_as_many_coordinates_as_there_are_rows_are_no_rows() -> None:
    def run(
        net: Any, x: Tensor, more: Tensor, places: Tensor, others: Tensor
    ) -> Tensor:
        return net.b(
            net.a(x + more) * places.sin().sum()
            + others.cos().sum(1, keepdim=True).mean()
        )

    net = sb.bayesianize(Net(run), sb.BatchEnsemble(members=3)).eval()
    inputs = X[:3], X[:3].sin(), torch.randn(7, 3), torch.randn(6, 3)
    with sb.fixed_draws(net):
        wanted = torch.stack([sb.materialize(net, draw=j)(*inputs) for j in range(3)])
        torch.testing.assert_close(sb.sample(net, *inputs, parallel=True), wanted)


@pytest.mark.parametrize("config", [*MEMBERS, sb.MeanField(scale_init=0.2)])
@torch.no_grad()
def test_parts_made_by_fx_stay_and_the_rest_is_converted(config: Any) -> None:
    part = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    net = sb.bayesianize(
        Net(lambda net, x: net.b(net.a(net.part(x))), part=part), config
    ).eval()
    with sb.fixed_draws(net, 3, seed=0):
        wanted = torch.stack([sb.materialize(net, draw=j)(X) for j in range(3)])
        torch.testing.assert_close(sb.sample(net, X), wanted)
    assert wanted.std(0).min() > 0
    if not isinstance(config, sb.Ensemble):
        assert "a module of torch.fx, which cannot be changed" in str(
            sb.summary(net)
        ) and "part.0" not in str(sb.summary(net))
        with pytest.raises(ValueError, match="a module of torch.fx"):
            sb.bayesianize(
                Net(lambda net, x: net.part(x), part=part), config, include="part"
            )


class Wired(nn.Module):
    """A cell of a type nobody knows that reads its parameters from a dict of its own, as liquid networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = (
            nn.Parameter(torch.randn(4, 4)),
            nn.Parameter(torch.randn(4, 4)),
        )
        self.params = {"w": self.w}

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.params["w"] @ self.v


@pytest.mark.parametrize(
    "config", [sb.MeanField(), sb.BatchEnsemble(members=3), sb.Rank1()]
)
def test_weights_that_a_layer_reads_from_a_dict_of_its_own_are_told(
    config: Any,
) -> None:
    net = sb.bayesianize(nn.Sequential(Wired(), nn.Linear(4, 3)), config)
    with pytest.warns(
        UserWarning,
        match=r"never called: 0\.w\. 0\.w was not read as an attribute of its layer",
    ):
        sb.sample(net, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sb.sample(
            sb.bayesianize(Remembers(), config),
            X,
            torch.ones(5, 1, dtype=torch.bool),
            parallel=False,
        )


def charge(net: Any, x: Tensor) -> Tensor:
    """Neurons that fire when they have met enough: the first calls show nothing of what they keep."""
    met = net.a(x).abs() * 0.1
    net.charge = met if net.charge is None else net.charge + met
    return net.b((net.charge > 1).to(x))


@pytest.mark.parametrize(
    "config", [sb.MeanField(scale_init=0.3), sb.BatchEnsemble(members=2)]
)
@torch.no_grad()
def test_states_that_show_only_after_some_calls_are_those_of_one_draw(
    config: Any,
) -> None:
    net = sb.bayesianize(Net(charge, charge=None), config)
    with sb.fixed_draws(net, 4):
        plain = [sb.materialize(net, draw=j) for j in range(4)]
        with pytest.warns(
            UserWarning, match="it keeps 'charge' from one call for the next"
        ):
            sb.sample(net, X)
        [one(X) for one in plain]
        for _ in range(30):
            torch.testing.assert_close(
                sb.sample(net, X), torch.stack([one(X) for one in plain])
            )
    assert net.charge.shape == (5, 8) and net.charge.max() > 1


def seeded(net: Any, x: Tensor) -> Tensor:
    """Noise along a path that is the same in each call, as solvers of stochastic equations fix it."""
    own = torch.Generator().manual_seed(3)
    return net.b(net.a(x) + torch.randn(len(x), 8, generator=own))


def freely(net: Any, x: Tensor) -> Tensor:
    return net.b(net.a(x) + torch.randn(len(x), 8))


@pytest.mark.parametrize("config", [sb.MeanField(scale_init=0.2), *MEMBERS])
@torch.no_grad()
def test_random_numbers_that_a_model_seeds_itself_are_those_of_each_draw(
    config: Any,
) -> None:
    net = sb.bayesianize(Net(seeded), config)
    with sb.fixed_draws(net, 3):
        wanted = torch.stack([sb.materialize(net, draw=j)(X) for j in range(3)])
        with pytest.warns(UserWarning, match="it seeds random numbers itself"):
            torch.testing.assert_close(sb.sample(net, X), wanted)
    sb.sample(sb.bayesianize(Net(freely), config), X, parallel=True)


@pytest.mark.parametrize("config", [sb.MeanField(), *MEMBERS])
def test_tensors_of_a_graph_that_a_model_keeps_do_not_keep_it_from_being_copied(
    config: Any,
) -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        net.last = {"features": net.a(x)}
        return net.b(net.last["features"])

    net = Net(run)
    net(X)
    net = sb.bayesianize(net, config)
    with sb.fixed_draws(net):
        one = sb.sample(net, X)[0]
        torch.testing.assert_close(sb.materialize(net, draw=0)(X), one)
    assert type(sb.materialize(net, member=0)) is Net


def test_errors_that_say_nothing_are_told_by_their_line() -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        if len(x) != 5:
            raise RuntimeError
        return net.b(net.a(x))

    with pytest.warns(
        UserWarning,
        match="RuntimeError when every row came twice: in run: raise RuntimeError",
    ):
        sb.sample(sb.bayesianize(Net(run), sb.MeanField()), X, draws=2)


def test_draws_of_weights_without_numbers_are_not_written_out() -> None:
    net = sb.bayesianize(nn.Linear(4, 3, bias=False), sb.MeanField())
    net._parameters["weight"] = nn.Parameter(torch.empty(3, 4, device="meta"))
    with (
        sb.fixed_draws(net),
        pytest.raises(ValueError, match="or on the meta device, is no weight"),
    ):
        sb.materialize(net, draw=0)


def test_binary_targets_have_the_shape_that_they_had_in_training() -> None:
    net, y = (
        sb.bayesianize(nn.Linear(4, 1), sb.Rank1()),
        torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0]),
    )
    sb.bernoulli(sb.sample(net, X), y[:, None])
    prediction = sb.predict(net, X, likelihood="bernoulli")
    torch.testing.assert_close(prediction.log_prob(y[:, None]), prediction.log_prob(y))
    with pytest.raises(
        ValueError, match=r"shape \(5,\) is needed for this prediction, got \(1, 5\)"
    ):
        prediction.log_prob(y[None])


def test_a_likelihood_that_is_a_function_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match="did you mean 'gaussian'"):
        sb.predict(
            sb.bayesianize(nn.Linear(4, 1), sb.Rank1()), X, likelihood=sb.gaussian
        )  # type: ignore[arg-type]


class Stored(nn.Module):
    """A layer whose weight is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@pytest.mark.parametrize("layer", [Stored(), nn.Linear(4, 3)])
def test_members_that_cannot_start_anew_are_told_to_be_alike(layer: nn.Module) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        net = sb.bayesianize(
            nn.Sequential(layer, nn.LayerNorm(3)), sb.Ensemble(members=2)
        )
    one, other = sb.sample(net, X)
    told = any("are all alike" in str(w.message) for w in said)
    assert torch.equal(one, other) == told == isinstance(layer, Stored)


@pytest.mark.parametrize("config", [sb.Ensemble(members=2), sb.MeanField()])
def test_networks_that_have_not_met_an_input_are_told_to(config: Any) -> None:
    net = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(
        ValueError,
        match="not initialised yet[:;] run one batch through the model first",
    ):
        sb.bayesianize(net, config)
    net(X)
    assert sb.sample(sb.bayesianize(net, config), X, draws=2).shape[1:] == (5, 3)


class Attends(nn.Module):
    """Calls an attention layer, and computes the same once more from its parameters, as WavLM does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(
            8, 2, kdim=width, vdim=width, batch_first=True
        )
        self.packed = width == 8

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        own = self.attention
        bias = own.in_proj_bias.chunk(3)
        weights = (
            own.in_proj_weight.chunk(3)
            if self.packed
            else (own.q_proj_weight, own.k_proj_weight, own.v_proj_weight)
        )
        q, k, v = (
            F.linear(z, w, b) for z, w, b in zip((x, y, y), weights, bias, strict=True)
        )
        again = (
            own.out_proj(F.scaled_dot_product_attention(q, k, v)) @ own.out_proj.weight
        )
        return again + own(x, y, y)[0] if self.training else again


@pytest.mark.parametrize(
    ("config", "training", "width"),
    pairwise(
        [
            sb.MeanField(scale_init=0.2),
            sb.BatchEnsemble(members=3),
            sb.Ensemble(members=3),
        ],
        [True, False],
        [8, 5],
    ),
)
@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
@torch.no_grad()
def test_parameters_of_attention_that_are_used_past_its_forward_are_drawn(
    config: Any, training: bool, width: int
) -> None:
    net = sb.bayesianize(Attends(width), config).train(training)
    x, y = torch.randn(2, 4, 8), torch.randn(2, 3, width)
    with sb.fixed_draws(net, 3):
        wanted = torch.stack([sb.materialize(net, draw=j)(x, y) for j in range(3)])
        torch.testing.assert_close(sb.sample(net, x, y), wanted)
        torch.testing.assert_close(sb.sample(net, x, y, parallel=False), wanted)
    assert not torch.allclose(wanted[0], wanted[1])
    assert type(net.attention.out_proj) is type(nn.MultiheadAttention(8, 2).out_proj)
