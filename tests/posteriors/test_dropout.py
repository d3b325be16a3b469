"""MC dropout: rates, units and scaling against torch's own dropout, masks that are held, and dropout that cannot be
converted.

Sizes: S draws, B rows.
"""

import copy
import itertools
import math
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import each, pairwise
from scipy import stats
from slimbayes_lab.models import resnet18
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import slimbayes as sb
from slimbayes.engine.passes import posteriors_of
from slimbayes.layers.base import LAYERS, BayesLayer
from slimbayes.layers.dropout import functional_dropout

pytestmark = pytest.mark.usefixtures("last_draws")

RARE = 1e-4  # a test of chance fails a correct library this often; the seed is fixed
SHAPES = {
    nn.Dropout: (5, 3, 4),
    nn.Dropout1d: (5, 3, 4),
    nn.Dropout2d: (5, 3, 4, 2),
    nn.Dropout3d: (5, 3, 2, 2, 2),
    nn.AlphaDropout: (5, 3, 4),
    nn.FeatureAlphaDropout: (5, 3, 4),
}
WHOLE_CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)
SELU = (nn.AlphaDropout, nn.FeatureAlphaDropout)


def frequency_p(hits: Tensor, rate: float) -> float:
    return stats.binomtest(int(hits.sum()), hits.numel(), rate).pvalue


def independent_p(a: Tensor, b: Tensor) -> float:
    table = torch.zeros(2, 2).index_put(
        (a.long(), b.long()), torch.ones(()), accumulate=True
    )
    return stats.chi2_contingency(table.numpy()).pvalue


def on(layer: nn.Module, **options: Any) -> nn.Module:
    """A model that is one dropout layer, turned on."""
    return sb.bayesianize(nn.Sequential(layer), sb.MCDropout(**options))


def test_every_dropout_of_torch_is_known() -> None:
    assert {
        plain for plain, cls in LAYERS.items() if cls.bayes_kind == "dropout"
    } == set(SHAPES)
    known = {
        cls
        for name, cls in vars(nn).items()
        if name.endswith(("Dropout", "Dropout1d", "Dropout2d", "Dropout3d"))
    }
    assert known == set(SHAPES)


# The model's own dropout layers ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "call", "kind"), pairwise(["train", "eval"], ["sample", "bare"], SHAPES)
)
def test_a_dropout_layer_drops_its_own_units_at_its_own_rate(
    kind: type[nn.Module], call: str, mode: str
) -> None:
    """Values, units, rate, and independence between units, rows and draws; torch in training mode gives the values."""
    rate, x = 0.3, torch.full(SHAPES[kind], 0.7)
    net = on(kind(rate)).train(mode == "train")
    with torch.no_grad():
        y = (
            sb.sample(net, x, draws=400)
            if call == "sample"
            else torch.stack([net(x) for _ in range(400)])
        )
        expected = torch.stack([kind(rate)(x) for _ in range(100)]).unique()
    values = y.unique()
    torch.testing.assert_close(values, expected)
    assert len(values) == 2
    dropped = y == values[0]  # zero, or SELU's limit
    units = dropped.flatten(3)
    if kind in WHOLE_CHANNELS:
        assert (units == units[..., :1]).all()
        units = units[..., :1]
    flat = units.flatten(1)  # (S, units of all rows)
    assert frequency_p(flat, rate) > RARE
    pairs = list(itertools.combinations(range(min(flat.shape[1], 12)), 2))
    assert min(independent_p(flat[:, i], flat[:, j]) for i, j in pairs) > RARE
    assert independent_p(flat[:-1, 0], flat[1:, 0]) > RARE


@pytest.mark.parametrize("kind", SELU)
@pytest.mark.parametrize("rate", [0.05, 0.4])
def test_alpha_dropout_keeps_the_moments_as_torchs_does(
    kind: type[nn.Module], rate: float
) -> None:
    x = torch.randn(400, 50, 5)
    y, reference = on(kind(rate)).eval()(x), kind(rate)(x)
    for z in (y, reference):
        assert abs(z.mean()) < 0.02 and abs(z.var() - 1) < 0.03
    ours, theirs = (
        z.flatten()[::7].round(decimals=5).numpy() for z in (y, reference)
    )  # dropped values may differ in the last bit
    assert stats.ks_2samp(ours, theirs).pvalue > RARE


@pytest.mark.parametrize("kind", SHAPES)
def test_gradients_pass_through_the_mask(kind: type[nn.Module]) -> None:
    net = on(kind(0.4)).double()
    x = torch.rand(SHAPES[kind], dtype=torch.float64, requires_grad=True)
    y = net(x)
    y.sum().backward()
    kept = x.grad != 0
    slope = x.grad[kept].unique()
    assert len(slope) == 1
    if kind not in SELU:
        assert math.isclose(slope.item(), 1 / 0.6)
        torch.testing.assert_close(y, x.detach() * x.grad)


@pytest.mark.parametrize("kind", SHAPES)
def test_rate_zero_is_the_identity(kind: type[nn.Module]) -> None:
    x = torch.randn(SHAPES[kind])
    assert torch.equal(on(kind(0.0))(x), x)
    assert torch.equal(
        sb.sample(on(kind(0.4), rate=0.0), x, draws=3), x.expand(3, *x.shape)
    )


@pytest.mark.parametrize("kind", SHAPES)
def test_rate_one_is_what_torch_makes_of_it(kind: type[nn.Module]) -> None:
    x = torch.randn(SHAPES[kind])
    torch.testing.assert_close(on(kind(1.0))(x), kind(1.0)(x))


def test_the_rate_may_change_after_the_conversion_unless_the_config_fixed_it() -> None:
    x = torch.ones(100, 100)
    own, fixed = on(nn.Dropout(0.2)).eval(), on(nn.Dropout(0.2), rate=0.1).eval()
    assert (
        frequency_p(own(x) == 0, 0.2) > RARE and frequency_p(fixed(x) == 0, 0.1) > RARE
    )
    for net in (own, fixed):
        net[0].p = 0.6
    y = own(x)
    assert frequency_p(y == 0, 0.6) > RARE and torch.allclose(
        y.max(), torch.tensor(2.5)
    )
    assert frequency_p(fixed(x) == 0, 0.1) > RARE


@pytest.mark.parametrize(
    ("kind", "shape"), [(nn.Dropout1d, (6, 40)), (nn.Dropout3d, (6, 4, 4, 4))]
)
def test_an_unbatched_input_loses_whole_channels(
    kind: type[nn.Module], shape: tuple[int, ...]
) -> None:
    x = torch.ones(shape)
    plain = kind(0.5)(x).flatten(1)
    assert (plain == plain[:, :1]).all()
    y = on(kind(0.5))(x).flatten(1)
    assert (y == y[:, :1]).all()


def test_half_precision_keeps_its_type_and_small_rates() -> None:
    """0.995 is 0.9961 in bfloat16: a rate of 0.005 must not become 0.0039."""
    net = on(nn.Dropout(0.005)).bfloat16().eval()
    y = net(torch.ones(400, 1000).bfloat16())
    assert y.dtype == torch.bfloat16
    assert frequency_p(y == 0, 0.005) > RARE


def test_eval_mode_stays_random_and_debayesianize_gives_plain_dropout_back() -> None:
    net = nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Dropout(0.5), nn.Linear(20, 2))
    x = torch.randn(4, 3)
    plain = net.eval()(x)
    sb.bayesianize(net, sb.MCDropout())
    assert not torch.equal(net(x), net(x)) and not net.training
    pred = sb.predict(net, x, draws=30)
    assert bool((pred.epistemic > 0).all())
    assert len(pred.samples.unique(dim=0)) == 30
    sb.debayesianize(net)
    assert type(net[2]) is nn.Dropout and net[2].p == 0.5
    assert torch.equal(net(x), plain)


def test_the_mean_of_many_draws_approaches_the_network_without_dropout() -> None:
    net = nn.Sequential(nn.Dropout(0.3), nn.Linear(20, 2)).double().eval()
    x = torch.randn(4, 20).double()
    plain = net(x)
    sb.bayesianize(net, sb.MCDropout())
    y = sb.sample(net, x, draws=4000).detach()
    assert ((y.mean(0) - plain).abs() < 5 * y.std(0) / math.sqrt(4000)).all()
    weight = net[1].weight
    variance = ((x[:, None] * weight) ** 2).sum(-1) * 0.3 / 0.7
    assert ((y.var(0) / variance - 1).abs() < 5 * math.sqrt(3 / 4000)).all()


@pytest.mark.slow
@pytest.mark.parametrize("call", ["sample", "bare"])
def test_training_mode_has_the_statistics_of_plain_dropout(call: str) -> None:
    """Losses of many steps, ours against torch's: same distribution."""
    plain = nn.Sequential(
        nn.Linear(5, 30), nn.ReLU(), nn.Dropout(0.5), nn.Linear(30, 1)
    )
    net = sb.bayesianize(copy.deepcopy(plain), sb.MCDropout())
    x = torch.randn(8, 5)
    run = net if call == "bare" else (lambda x: sb.sample(net, x)[0])
    with torch.no_grad():
        ours = torch.stack([run(x).square().mean() for _ in range(600)])
        theirs = torch.stack([plain(x).square().mean() for _ in range(600)])
    assert stats.ks_2samp(ours.numpy(), theirs.numpy()).pvalue > RARE


def test_dropout_has_no_parameters_no_kl_and_no_checkpoint_entries(
    tmp_path: Path,
) -> None:
    base = nn.Sequential(nn.Linear(3, 20), nn.Dropout(0.5), nn.Linear(20, 2))
    net = sb.bayesianize(copy.deepcopy(base), sb.MCDropout())
    assert list(net.state_dict()) == list(base.state_dict())
    assert [n for n, _ in net.named_parameters()] == [
        n for n, _ in base.named_parameters()
    ]
    assert float(sb.kl(net)) == 0.0
    assert sb.estimate_cost(base, sb.MCDropout()).extra_parameters == 0
    again = sb.load(copy.deepcopy(base), sb.save(net, tmp_path / "posterior"))
    x = torch.randn(4, 3)
    outputs = []
    for one in (net, again, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        torch.manual_seed(3)
        outputs.append(sb.sample(one.eval(), x, draws=5))
    assert all(torch.equal(outputs[0], y) for y in outputs[1:])


def test_only_dropout_layers_are_converted_and_listed() -> None:
    net = nn.Sequential(
        nn.Linear(3, 4),
        nn.Dropout(0.5),
        nn.BatchNorm1d(4),
        nn.Dropout(0.1),
        nn.Linear(4, 2),
    )
    sb.bayesianize(net, sb.MCDropout())
    rows = sb.summary(net).rows
    assert [
        (r.name, r.layer, r.status, r.before, r.after)
        for r in rows
        if r.status == "converted"
    ] == [
        ("1", "Dropout", "converted", 0, 0),
        ("3", "Dropout", "converted", 0, 0),
    ]
    assert {r.detail for r in rows if r.status == "skipped"} == {
        "not among the layers that MCDropout(rate=own or 0.005) is for"
    }
    assert [r.name for r in rows] == ["0", "1", "2", "3", "4"]
    other = sb.bayesianize(
        nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)), sb.Rank1()
    )
    assert type(other[1]) is nn.Dropout and [
        r.name for r in sb.summary(other).rows
    ] == ["0", "2"]


def test_dropout_beside_other_methods() -> None:
    net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    sb.bayesianize(
        net, {"1": sb.MCDropout(), "0|2": sb.BatchEnsemble(members=3)}
    ).eval()
    x = torch.randn(4, 3)
    assert sb.members(net) == 3 and sb.sample(net, x, draws=6).shape == (6, 4, 2)
    y = sb.sample(net, x, draws=150).view(50, 3, 4, 2)
    assert len(y[:, 0].flatten(1).unique(dim=0)) > 40


def test_a_second_method_may_follow_dropout() -> None:
    """Rank1 first: its decisions and those of MCDropout are both kept."""
    net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    sb.bayesianize(net, sb.Rank1(members=2))
    sb.bayesianize(net, sb.MCDropout())
    assert {r.name: r.detail.split("(")[0] for r in sb.summary(net).rows} == {
        "0": "Rank1",
        "1": "MCDropout",
        "2": "Rank1",
    }


def test_a_method_after_dropout_does_not_forget_it(tmp_path: Path) -> None:
    base = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    net = copy.deepcopy(base)
    sb.bayesianize(net, sb.MCDropout())
    sb.bayesianize(net, sb.Rank1(members=2))
    again = sb.load(base, sb.save(net, tmp_path / "posterior"))
    assert [isinstance(m, BayesLayer) for m in again] == [True, True, True]
    assert [r.name for r in sb.summary(net).rows] == ["0", "1", "2"]


# In front of layers ---------------------------------------------------------------------------------------------------


def stack() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, 4),
        nn.BatchNorm1d(4),
        nn.Linear(4, 4),
        nn.LayerNorm(4),
        nn.Dropout(0.5),
        nn.Linear(4, 2),
    )


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (None, {"4"}),
        ("norm", {"1", "3"}),
        ("output", {"5"}),
        ("input", {"0"}),
        ("norm+output", {"1", "3", "5"}),
        ("input+output", {"0", "5"}),
        ("[02]", {"0", "2"}),
    ],
)
def test_before_says_where_dropout_goes(before: str | None, expected: set[str]) -> None:
    net = sb.bayesianize(stack(), sb.MCDropout(before=before))
    assert {
        name for name, m in net.named_modules() if isinstance(m, BayesLayer)
    } == expected


def test_include_and_mappings_put_dropout_in_front_of_layers() -> None:
    def names(net: nn.Module) -> set[str]:
        return {name for name, m in net.named_modules() if isinstance(m, BayesLayer)}

    assert names(sb.bayesianize(stack(), sb.MCDropout(), include="0|4")) == {"0", "4"}
    assert names(
        sb.bayesianize(stack(), {"[25]": sb.MCDropout(rate=0.2), "0": sb.Rank1()})
    ) == {"0", "2", "5"}
    assert names(sb.bayesianize(stack(), sb.MCDropout(), exclude="[0-3]")) == {"4"}


def test_the_papers_baseline_is_dropout_before_every_batch_norm() -> None:
    net = sb.bayesianize(resnet18(), sb.MCDropout(before="norm"))
    posteriors = posteriors_of(net)
    assert len(posteriors) == 20 and {p.rate for p in posteriors} == {0.005}
    assert sum(p.numel() for p in net.parameters()) == 11_689_512


@pytest.mark.parametrize(
    ("unit", "kind"), each(["element", "channel"], ["dense", "convolution", "norm"])
)
def test_inputs_of_a_layer_are_dropped_scaled_and_nothing_else(
    kind: str, unit: str
) -> None:
    """Layers that can be undone show their inputs: zero or x / (1 - rate), whole channels where asked; biases stay."""
    rate = 0.3
    shape = (5, 6) if kind == "dense" else (5, 6, 4, 4)
    layer = (
        {
            "dense": nn.Linear(6, 6),
            "convolution": nn.Conv2d(6, 6, 1),
            "norm": nn.BatchNorm2d(6),
        }[kind]
        .double()
        .eval()
    )
    x = torch.rand(shape).double() + 0.5
    net = sb.bayesianize(
        nn.Sequential(layer), sb.MCDropout(before="0", rate=rate, unit=unit)
    )
    y = sb.sample(net, x, draws=100).detach()
    if kind == "norm":
        inputs = y * math.sqrt(1 + layer.eps)
    else:
        flat = y.movedim(2, -1) - layer.bias.detach()
        inputs = (
            torch.linalg.solve(layer.weight.detach().view(6, 6), flat.unsqueeze(-1))
            .squeeze(-1)
            .movedim(-1, 2)
        )
    ratio = (inputs / x).round(decimals=6)
    assert set(ratio.unique().tolist()) == {0.0, round(1 / (1 - rate), 6)}
    kept = ratio.flatten(3) > 0 if kind != "dense" else ratio[..., None] > 0
    if unit == "channel":
        assert (kept == kept[..., :1]).all()
        kept = kept[..., :1]
    elif kind != "dense":
        assert not (kept == kept[..., :1]).all()
    assert frequency_p(~kept, rate) > RARE
    assert independent_p(kept[:, 0, 0, 0], kept[:, 1, 0, 0]) > 1e-3  # rows drop apart


@pytest.mark.parametrize(
    "config",
    [
        sb.MCDropout(before="0", rate=0.3, unit="channel"),
        sb.Mixture(
            components=2,
            assignment="input",
            zero=True,
            probs=(0.7, 0.3),
            draws="example",
        ),
    ],
)
def test_channel_dropout_of_a_matrix_is_a_distribution_over_weights(
    config: Any,
) -> None:
    """Table 2: `Mixture` with one pick for every input; sequences lose the same inputs at every place."""
    layer = nn.Linear(6, 6).double()
    net = sb.bayesianize(nn.Sequential(layer), config)
    x = torch.rand(5, 7, 6).double() + 0.5
    y = sb.sample(net, x, draws=40).detach() - layer.bias.detach()
    inputs = torch.linalg.solve(layer.weight.detach(), y.unsqueeze(-1)).squeeze(-1)
    dropped = inputs.abs() < 1e-9
    assert (dropped == dropped[:, :, :1]).all()
    assert not (dropped == dropped[:, :1]).all()
    assert frequency_p(dropped[:, :, 0], 0.3) > RARE


def test_channels_of_a_layer_norm_are_its_last_dimension() -> None:
    net = sb.bayesianize(
        nn.Sequential(nn.RMSNorm(6, eps=1e-9, elementwise_affine=False)),
        sb.MCDropout(before="0", rate=0.5, unit="channel"),
    )
    y = sb.sample(net, torch.rand(5, 7, 6) + 0.5, draws=40)
    dropped = y == 0
    assert (dropped == dropped[:, :, :1]).all() and 0.4 < dropped.float().mean() < 0.6


# Recurrent and attention layers ---------------------------------------------------------------------------------------


def test_dropout_of_an_lstms_weights_is_the_same_at_every_step() -> None:
    """Against a loop over time with the masks written out: one mask for the inputs and one for the states of each
    row."""
    lstm = nn.LSTM(3, 4, batch_first=True).double()
    net = sb.bayesianize(
        nn.Sequential(lstm),
        sb.Mixture(
            components=2,
            assignment="input",
            zero=True,
            probs=(0.6, 0.4),
            draws="example",
        ),
    ).eval()
    x = torch.randn(5, 6, 3).double()
    y = sb.sample(net, x, draws=2)[0].flatten(0, 1)
    masks = [
        (lstm.posterior[f"weight_{kind}_l0"].values().weight == 0).double() / 0.6
        for kind in ("ih", "hh")
    ]
    assert masks[0].shape == (10, 3) and masks[1].shape == (10, 4)
    x = x.repeat(2, 1, 1)
    h = c = torch.zeros(10, 4).double()
    for t in range(6):
        gates = F.linear(
            x[:, t] * masks[0], lstm.weight_ih_l0, lstm.bias_ih_l0
        ) + F.linear(h * masks[1], lstm.weight_hh_l0, lstm.bias_hh_l0)
        i, f, g, o = gates.chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        torch.testing.assert_close(y[:, t], h)


def test_element_dropout_of_an_lstm_differs_from_step_to_step() -> None:
    """With open gates and no recurrence the outputs show the inputs of every step."""
    lstm = nn.LSTM(1, 1, batch_first=True).double()
    with torch.no_grad():
        for p in lstm.parameters():
            p.zero_()
        lstm.bias_ih_l0[0] = lstm.bias_ih_l0[3] = 50.0  # input and output gates open
        lstm.bias_ih_l0[1] = -50.0  # forgets
        lstm.weight_ih_l0[2] = 0.1
    net = sb.bayesianize(nn.Sequential(lstm), sb.MCDropout(before="0", rate=0.5)).eval()
    y = sb.sample(net, torch.ones(4, 60, 1).double(), draws=10)[0].squeeze(-1)
    dropped = (y.abs() < 1e-9).flatten(0, 1)
    assert (y.flatten(0, 1)[~dropped] - math.tanh(math.tanh(0.2))).abs().max() < 1e-9
    assert (
        frequency_p(dropped, 0.5) > RARE
        and independent_p(dropped[:, :-1].flatten(), dropped[:, 1:].flatten()) > RARE
    )


@pytest.mark.parametrize("unit", ["element", "channel"])
def test_attention_drops_the_inputs_of_its_four_projections(unit: str) -> None:
    """One token attends to itself alone, so with identity matrices only the value and the output projection act: two
    masks."""
    attention = nn.MultiheadAttention(6, 2, bias=False, batch_first=True).double()
    with torch.no_grad():
        attention.in_proj_weight.copy_(torch.eye(6).repeat(3, 1))
        attention.out_proj.weight.copy_(torch.eye(6))

    class Self(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    net = sb.bayesianize(
        Self(), sb.MCDropout(before="attention", rate=0.3, unit=unit)
    ).eval()
    assert len(posteriors_of(net)) == 4
    x = torch.rand(5, 1, 6).double() + 0.5
    ratio = (sb.sample(net, x, draws=200).detach() / x).round(decimals=6)
    assert set(ratio.unique().tolist()) == {0.0, round(1 / 0.49, 6)}
    assert frequency_p(ratio > 0, 0.49) > RARE


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.filterwarnings("ignore:.*dropout=.* on its attention weights:UserWarning")
@pytest.mark.parametrize("batch_first", [False, True])
def test_torchs_transformer_layers_drop_in_eval_mode_too(batch_first: bool) -> None:
    """The fused path of eval mode would skip the dropout layers."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=batch_first)
    net = sb.bayesianize(nn.TransformerEncoder(layer, 2), sb.MCDropout()).eval()
    assert len(posteriors_of(net)) == 6
    x = torch.randn(3, 3, 8)
    with torch.no_grad():
        y = sb.sample(net, x, draws=6)
        assert len(y.flatten(1).round(decimals=4).unique(dim=0)) == 6
        with sb.fixed_draws(net, 2):
            first = sb.sample(net, x)
            rows = x[:1] if batch_first else x[:, :1]
            part = first[:, :1] if batch_first else first[:, :, :1]
            torch.testing.assert_close(sb.sample(net, rows), part, rtol=1e-4, atol=1e-5)


# Held masks -----------------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    """One dropout module used at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.drop(x), self.drop(x)], 1)


def test_held_draws_drop_the_same_units_on_every_call() -> None:
    net = sb.bayesianize(Twice(), sb.MCDropout())
    x = torch.ones(4, 30)
    with sb.fixed_draws(net, 3):
        first = sb.sample(net, x)
        assert torch.equal(sb.sample(net, x), first)
        assert torch.equal(sb.sample(net, x[:2]), first[:, :2])
        assert torch.equal(sb.sample(net, 2 * x), 2 * first)
        bare = net(torch.ones(6, 30))  # rows are shared out among the three draws
        assert torch.equal(bare, first[:, :2].flatten(0, 1))
        assert torch.equal(net(torch.ones(6, 30)), bare)
    assert (first == first[:, :1]).all()  # a function: the same for all rows
    assert not torch.equal(first[:, :, 0], first[:, :, 1])  # but the two places differ
    assert len(first[:, 0].flatten(1).unique(dim=0)) == 3
    with sb.fixed_draws(net, 3):
        assert not torch.equal(sb.sample(net, x), first)
    assert not torch.equal(sb.sample(net, x, draws=3), sb.sample(net, x, draws=3))


@pytest.mark.parametrize("kind", SHAPES)
def test_held_masks_have_the_layers_own_units(kind: type[nn.Module]) -> None:
    net = on(kind(0.5)).eval()
    x = torch.ones(SHAPES[kind])
    with sb.fixed_draws(net, 300):
        y = sb.sample(net, x)
        assert torch.equal(sb.sample(net, x), y)
    assert (y == y[:, :1]).all()
    dropped = (y[:, 0] == y.min()).flatten(2)
    if kind in WHOLE_CHANNELS:
        assert (dropped == dropped[..., :1]).all()
        dropped = dropped[..., :1]
    assert frequency_p(dropped, 0.5) > RARE


def test_held_masks_of_a_unit_do_not_depend_on_how_many_there_are() -> None:
    net = on(nn.Dropout(0.5))
    with sb.fixed_draws(net):
        first = net(torch.ones(4, 30))
        assert (first == first[:1]).all() and torch.equal(
            net(torch.ones(7, 30))[:4], first
        )  # one function, whatever the rows
        assert torch.equal(net(torch.ones(4, 31))[:, :30], first)
        steps = net(
            torch.ones(4, 9, 5)
        )  # a sequence, and the same one with more padding
        assert (
            torch.equal(net(torch.ones(4, 12, 5))[:, :9], steps)
            and len(steps[0].unique(dim=0)) > 3
        )
    net = on(nn.Dropout2d(0.5))
    with sb.fixed_draws(net):  # whole channels: images of any size
        small, large = net(torch.ones(2, 9, 4, 4)), net(torch.ones(2, 9, 8, 6))
    assert torch.equal(small[:, :, 0, 0], large[:, :, 7, 5])


def test_more_places_may_be_met_in_a_later_call() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.steps = nn.Dropout(0.5), 2

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.drop(x) for _ in range(self.steps)], 1)

    net = sb.bayesianize(Loop(), sb.MCDropout())
    x = torch.ones(2, 30)
    with sb.fixed_draws(net):
        short = sb.sample(net, x)
        net.steps = 4
        long = sb.sample(net, x)
        net.steps = 3
        assert torch.equal(sb.sample(net, x), long[:, :, :3])
    assert torch.equal(short, long[:, :, :2])
    assert len(long[0, 0].unique(dim=0)) == 4


def test_a_sequence_of_one_token_keeps_its_shape() -> None:
    """The sequence-first positional encoding of torch's tutorial drops (tokens, rows, channels)."""

    class Encoding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(x.transpose(0, 1)).transpose(0, 1)

    net = sb.bayesianize(Encoding(), sb.MCDropout())
    assert net(torch.randn(4, 2, 6)).shape == (4, 2, 6)
    assert net(torch.randn(4, 1, 6)).shape == (4, 1, 6)


class Saving(nn.Module):
    def __init__(self, on: bool) -> None:
        super().__init__()
        self.a, self.drop, self.b, self.on = (
            nn.Linear(4, 8),
            nn.Dropout(0.5),
            nn.Linear(8, 1),
            on,
        )

    def body(self, x: Tensor) -> Tensor:
        return self.b(self.drop(self.a(x)).tanh())

    def forward(self, x: Tensor) -> Tensor:
        return (
            checkpoint(self.body, x, use_reentrant=False) if self.on else self.body(x)
        )


def both_gradients(held: bool, looked_before: bool) -> list[Tensor]:
    plain, saving = Saving(False), Saving(True)
    saving.load_state_dict(plain.state_dict())
    x = torch.randn(6, 4)
    for net in (plain, saving):
        sb.bayesianize(net, sb.MCDropout())
        torch.manual_seed(1)
        if not held:
            sb.sample(net, x, draws=2).sum().backward()
            continue
        with sb.fixed_draws(net, 2 * sb.members(net)):
            if looked_before:
                with torch.no_grad():
                    sb.sample(net, x)
            sb.sample(net, x).sum().backward()
    return [plain.a.weight.grad, saving.a.weight.grad]


@pytest.mark.parametrize("held", [False, True])
def test_gradient_checkpointing_recomputes_with_the_same_masks(held: bool) -> None:
    torch.testing.assert_close(*both_gradients(held, looked_before=False))


def test_gradient_checkpointing_recomputes_with_masks_that_were_held_before() -> None:
    torch.testing.assert_close(*both_gradients(True, looked_before=True))


def test_an_input_of_one_row_is_dropped_anew_for_every_draw() -> None:
    class Position(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.drop = nn.Parameter(torch.ones(1, 50)), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.drop(self.table)

    net = sb.bayesianize(Position(), sb.MCDropout())
    assert (
        len(
            sb.sample(net, torch.zeros(2, 50), draws=8, parallel=False)[:, 0].unique(
                dim=0
            )
        )
        == 8
    )
    assert len(sb.sample(net, torch.zeros(2, 50), draws=8)[:, 0].unique(dim=0)) == 8


# Dropout that cannot be converted -------------------------------------------------------------------------------------


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.fc, self.p = nn.Dropout(0.1), nn.Linear(4, 4), 0.2

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.drop(self.fc(x)), self.p, self.training)


class TorchDropout(Functional):
    def forward(self, x: Tensor) -> Tensor:
        return torch.dropout(x, 0.1, self.training) + nn.functional.alpha_dropout(
            x, 0.2, self.training
        )


class Attending(Functional):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            x, x, self.fc(x), dropout_p=0.1 if self.training else 0.0
        )


class AttendingByPosition(Functional):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            x, x, self.fc(x), None, 0.1 if self.training else 0.0
        )


class Clean(Functional):
    """Names that look like dropout, and a comment with F.dropout(x), but only layers are called."""

    def dropout(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.dropout(self.fc(x)))  # not F.dropout(x)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Functional(), {"": "calls F.dropout in its forward"}),
        (
            TorchDropout(),
            {"": "calls torch.dropout, nn.functional.alpha_dropout in its forward"},
        ),
        (Attending(), {"": "calls F.scaled_dot_product_attention in its forward"}),
        (Clean(), {}),
        (nn.Sequential(Clean(), Functional()), {"1": "calls F.dropout in its forward"}),
        (
            nn.MultiheadAttention(4, 2, dropout=0.1),
            {"": "dropout=0.1 on its attention weights"},
        ),
        (nn.MultiheadAttention(4, 2), {}),
        (
            nn.LSTM(4, 4, num_layers=2, dropout=0.2),
            {"": "dropout=0.2 between its layers"},
        ),
        (nn.GRU(4, 4, num_layers=2), {}),
        (nn.Sequential(nn.Dropout(0.1), nn.Linear(4, 4)), {}),
        (
            nn.TransformerEncoderLayer(4, 2, 8, 0.1),
            {"self_attn": "dropout=0.1 on its attention weights"},
        ),
        (nn.TransformerEncoderLayer(4, 2, 8, 0.0), {}),
    ],
)
def test_dropout_inside_a_forward_is_found(
    model: nn.Module, expected: dict[str, str]
) -> None:
    assert functional_dropout(model) == expected


def test_attention_dropout_given_by_position_is_found() -> None:
    assert functional_dropout(AttendingByPosition()) == {
        "": "calls F.scaled_dot_product_attention in its forward"
    }


@pytest.mark.parametrize("build", [lambda: nn.Sequential(Functional()), Functional])
def test_dropout_that_stays_off_is_reported_in_a_warning_and_in_the_summary(
    build: Any,
) -> None:
    net = build()
    name = "0" if isinstance(net, nn.Sequential) else ""
    with pytest.warns(
        UserWarning,
        match=f"{name or 'the model itself'} calls F.dropout in its forward: MCDropout turns on dropout layers, "
        "but this stays off",
    ) as caught:
        sb.bayesianize(net, sb.MCDropout())
    assert len(caught) == 1 and caught[0].filename == __file__
    row = next(r for r in sb.summary(net).rows if r.name == name)
    assert (
        row.status == "skipped"
        and "functional dropout: calls F.dropout in its forward" in row.detail
    )


def test_a_recurrent_layers_dropout_is_reported_on_its_own_row() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.drop, self.head = (
                nn.LSTM(3, 4, num_layers=2, dropout=0.3, batch_first=True),
                nn.Dropout(0.1),
                nn.Linear(4, 2),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.drop(self.lstm(x)[0][:, -1]))

    net = Net()
    with pytest.warns(UserWarning, match=r"lstm dropout=0\.3 between its layers"):
        sb.bayesianize(net, sb.MCDropout())
    rows = {r.name: r for r in sb.summary(net).rows}
    assert list(rows) == ["lstm", "drop", "head"]
    assert rows["lstm"].detail.endswith(
        "; functional dropout: dropout=0.3 between its layers"
    )


def test_no_warning_where_nothing_is_functional_or_no_dropout_layer_is_turned_on() -> (
    None
):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sb.bayesianize(Clean(), sb.MCDropout())
        sb.bayesianize(Functional(), sb.MCDropout(before="fc"))
        sb.bayesianize(Functional(), sb.Rank1())


def test_a_model_without_dropout_is_refused_in_words() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(
        ValueError,
        match=r"MCDropout\(\) looked for dropout layers \(Dropout, Dropout1d, .*\) in this Sequential and found none\. "
        r"Put dropout in front of layers with before=\"norm\"",
    ):
        sb.bayesianize(net, sb.MCDropout())
    net = nn.LSTM(3, 4, num_layers=2, dropout=0.3)
    with pytest.raises(
        ValueError,
        match=r"found none\. Dropout inside a forward was found, which cannot be converted: \(the model itself\) "
        r"dropout=0\.3 between its layers\. Make it an nn\.Dropout layer",
    ):
        sb.bayesianize(net, sb.MCDropout())
    with pytest.raises(
        ValueError,
        match=r"MCDropout\(before='norm'\) looked for norm layers and found none",
    ):
        sb.bayesianize(nn.Sequential(nn.Linear(3, 4)), sb.MCDropout(before="norm"))
    with pytest.raises(
        ValueError,
        match=r"MCDropout\(before='conv\.\*'\) looked for layers whose whole name matches",
    ):
        sb.bayesianize(nn.Sequential(nn.Linear(3, 4)), sb.MCDropout(before="conv.*"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rate": 1.0}, r"rate must lie in \[0, 1\), got 1\.0"),
        ({"rate": -0.1}, r"rate must lie in \[0, 1\)"),
        ({"rate": "half"}, r"rate must lie in \[0, 1\)"),
        ({"unit": "row"}, "unknown unit 'row'"),
        (
            {"before": "norm("},
            r"before='norm\(' is neither norm, output, input nor a regular expression",
        ),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match="MCDropout: " + words):
        sb.MCDropout(**options)


def test_impossible_rates_of_dropconnect_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"DropConnect: rate must lie in \[0, 1\), got 1"
    ):
        sb.DropConnect(rate=1)


@pytest.mark.parametrize("unit", ["element", "channel"])
def test_dropping_word_indices_is_refused_in_words(unit: Any) -> None:
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2))
    with pytest.raises(ValueError, match="word indices, of which none can be dropped"):
        sb.bayesianize(net, sb.MCDropout(before="0", unit=unit))


def test_dropout_of_an_embeddings_weights_drops_words() -> None:
    """Every occurrence of a word in a row is dropped together."""
    net = sb.bayesianize(
        nn.Sequential(nn.Embedding(5, 4)),
        sb.Mixture(
            components=2,
            assignment="input",
            zero=True,
            probs=(0.5, 0.5),
            draws="example",
        ),
    )
    words = torch.tensor([[0, 1, 0, 2, 1]]).repeat(200, 1)
    dropped = (net(words) == 0).all(-1)
    assert torch.equal(dropped[:, 0], dropped[:, 2]) and torch.equal(
        dropped[:, 1], dropped[:, 4]
    )
    assert frequency_p(dropped[:, :2], 0.5) > RARE


# In models nobody here wrote ------------------------------------------------------------------------------------------


transformers = pytest.importorskip("transformers")


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=8,
    )
    return transformers.BertForSequenceClassification(config).eval()


def test_berts_dropout_layers_are_turned_on_and_its_attention_dropout_is_reported() -> (
    None
):
    """transformers hands attention dropout to a function as a number: that layer is converted, but never runs."""
    with pytest.warns(
        UserWarning,
        match=r"bert\.encoder\.layer\.0\.attention\.self calls attention_interface in its forward",
    ):
        net = sb.bayesianize(bert(), sb.MCDropout(rate=0.3))
    ids = torch.randint(20, (3, 6))
    with pytest.warns(
        UserWarning,
        match=r"never called: bert\.encoder\.layer\.0\.attention\.self\.dropout",
    ):
        drawn = sb.sample(net, ids, draws=5).logits
    assert len(drawn.flatten(1).unique(dim=0)) == 5
    with sb.fixed_draws(net, 2):
        first = sb.sample(net, ids).logits
        torch.testing.assert_close(sb.sample(net, ids[:2]).logits, first[:, :2])
