"""Norm layers with components: against plain torch in every mode, rank and layout, and inside models nobody here wrote.

The reference is always the plain layer (or F.*_norm) with the picked scale and bias written in. Sizes: S draws, B rows,
K components.
"""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import each, pairwise
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import slimbayes as sb
from slimbayes.engine.passes import posteriors_of
from slimbayes.layers.anything import scales_of
from slimbayes.layers.base import LAYERS, BayesLayer
from slimbayes.layers.norm import LARGE

# torch says so of every sequence-first nn.TransformerEncoder.
pytestmark = [
    pytest.mark.usefixtures("last_draws"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
]

B, C = 4, 6

CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(C), (B, C)),
    "BatchNorm1d-sequence": (lambda: nn.BatchNorm1d(C), (B, C, 5)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(C), (B, C, 3, 5)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(C), (B, C, 2, 3, 4)),
    "BatchNorm-cumulative": (lambda: nn.BatchNorm2d(C, momentum=None), (B, C, 3, 5)),
    "BatchNorm-momentum": (
        lambda: nn.BatchNorm2d(C, momentum=0.7, eps=0.1),
        (B, C, 3, 5),
    ),
    "BatchNorm-no-statistics": (
        lambda: nn.BatchNorm2d(C, track_running_stats=False),
        (B, C, 3, 5),
    ),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(C, affine=True), (B, C, 5)),
    "InstanceNorm2d": (
        lambda: nn.InstanceNorm2d(C, affine=True, track_running_stats=True),
        (B, C, 3, 5),
    ),
    "InstanceNorm2d-cumulative": (
        lambda: nn.InstanceNorm2d(
            C, affine=True, track_running_stats=True, momentum=None
        ),
        (B, C, 3, 5),
    ),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(C, affine=True), (B, C, 2, 3, 4)),
    "GroupNorm": (lambda: nn.GroupNorm(3, C, eps=0.1), (B, C, 3, 5)),
    "GroupNorm-flat": (lambda: nn.GroupNorm(2, C), (B, C)),
    "LayerNorm": (lambda: nn.LayerNorm(C), (B, C)),
    "LayerNorm-tokens": (lambda: nn.LayerNorm(C, eps=0.1), (B, 5, C)),
    "LayerNorm-4d": (lambda: nn.LayerNorm(C), (B, 2, 5, C)),
    "LayerNorm-two-dimensions": (lambda: nn.LayerNorm((5, C)), (B, 5, C)),
    "LayerNorm-three-dimensions": (lambda: nn.LayerNorm((2, 5, C)), (B, 3, 2, 5, C)),
    "LayerNorm-no-bias": (lambda: nn.LayerNorm(C, bias=False), (B, 5, C)),
    "RMSNorm": (lambda: nn.RMSNorm(C), (B, 5, C)),
    "RMSNorm-two-dimensions": (lambda: nn.RMSNorm((5, C), eps=0.1), (B, 5, C)),
}
APART = [
    case for case in CASES if case != "BatchNorm-no-statistics"
]  # which has those of all rows in eval mode, too


def shaken(layer: nn.Module) -> nn.Module:
    """Scales, biases and statistics away from their neutral values."""
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.5 * torch.randn_like(p))
        for name, b in layer.named_buffers():
            if name.endswith("running_mean"):
                b.normal_()
            elif name.endswith("running_var"):
                b.uniform_(0.5, 2.0)
    return layer


def made(case: str) -> tuple[nn.Module, Tensor]:
    build, shape = CASES[case]
    return shaken(build()), 2 * torch.randn(shape) + 0.5


def picked(layer: Any, draw: int) -> tuple[Tensor, Tensor | None]:
    """Scale and bias of one draw of the last pass, element by element."""
    posterior = layer.posterior["weight"]
    z = posterior.values()

    def choose(own: Tensor, others: Tensor, picks: Tensor) -> Tensor:
        stacked, flat = (
            torch.cat([own[None], others]).flatten(1),
            picks[draw].expand(own.shape).flatten(),
        )
        return torch.stack([stacked[k, i] for i, k in enumerate(flat.tolist())]).view(
            own.shape
        )

    of_weight, of_bias = z.weight, z.bias
    if (
        z.mixed is not None and z.weight.dim() > 1
    ):  # one pick for each element, scales first
        of_weight, of_bias = (
            part.view(-1, *layer.weight.shape)
            for part in z.weight.tensor_split([layer.weight.numel()], 1)
        )
    weight = choose(layer.weight, posterior.weight, of_weight)
    return weight, None if posterior.bias is None else choose(
        layer.bias, posterior.bias, of_bias
    )


def with_values(plain: nn.Module, weight: Tensor, bias: Tensor | None) -> nn.Module:
    """A copy of a plain norm layer with another scale and bias."""
    out = copy.deepcopy(plain)
    with torch.no_grad():
        out.weight.copy_(weight)
        if bias is not None:
            out.bias.copy_(bias)
    return out


def test_every_norm_of_the_library_is_in_the_list() -> None:
    norms = {plain for plain, cls in LAYERS.items() if cls.bayes_kind == "norm"}
    assert norms == {type(build()) for build, _ in CASES.values()}


@pytest.mark.parametrize(("mode", "case"), each(["train", "eval"], CASES))
def test_one_component_is_the_plain_layer_over_many_calls(case: str, mode: str) -> None:
    """Outputs and running statistics, bit for bit."""
    plain, _ = made(case)
    layer = sb.bayesianize(copy.deepcopy(plain), sb.Mixture(components=1))
    assert isinstance(layer, BayesLayer) and layer.bayes_kind == "norm"
    for net in (plain, layer):
        net.train(mode == "train")
    for _ in range(3):
        x = 2 * torch.randn(CASES[case][1]) + 0.5
        expected = plain(x)
        torch.manual_seed(1)
        assert torch.equal(layer(x), expected)
    for name, buffer in plain.named_buffers():
        assert torch.equal(layer.get_buffer(name), buffer), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draws", "assignment", "case"), pairwise([1, 3], ["layer", "element"], APART)
)
def test_every_draw_in_eval_mode_is_the_plain_layer_with_that_draws_values(
    case: str, assignment: str, draws: int
) -> None:
    plain, x = made(case)
    layer = sb.bayesianize(
        copy.deepcopy(plain),
        sb.Mixture(components=3, assignment=assignment, jitter=0.5),
    ).eval()
    plain.eval()
    y = sb.sample(layer, x, draws=draws)
    assert y.shape == (draws, *x.shape)
    for j in range(draws):
        torch.testing.assert_close(
            y[j], with_values(plain, *picked(layer, j))(x), rtol=1e-5, atol=1e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize(("assignment", "case"), each(["layer", "element"], APART))
def test_every_row_has_its_own_draw_where_it_is_asked_for(
    case: str, assignment: str
) -> None:
    plain, x = made(case)
    layer = sb.bayesianize(
        copy.deepcopy(plain),
        sb.Mixture(components=3, assignment=assignment, draws="example", jitter=0.5),
    ).eval()
    plain.eval()
    for run in (lambda: sb.sample(layer, x, draws=1)[0], lambda: layer(x)):
        y = run()
        reference = torch.stack(
            [with_values(plain, *picked(layer, i))(x)[i] for i in range(B)]
        )
        torch.testing.assert_close(y, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_folded_draws_in_training_mode_normalise_over_all_rows(case: str) -> None:
    """Statistics are those of the tiled batch; with equal components that is the plain layer on it."""
    plain, x = made(case)
    layer = sb.bayesianize(copy.deepcopy(plain), sb.Mixture(components=3, jitter=0.5))
    y = sb.sample(layer, x, draws=3)
    tiled = x.repeat(3, *[1] * (x.dim() - 1))
    for j in range(3):
        one = with_values(plain, *picked(layer, j))(tiled).unflatten(0, (3, B))[j]
        torch.testing.assert_close(y[j], one, rtol=1e-4, atol=1e-5)
    plain(tiled)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(layer.get_buffer(name), buffer)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
def test_folded_and_one_at_a_time_agree_in_eval_mode(case: str) -> None:
    layer, x = made(case)
    sb.bayesianize(
        layer, sb.Mixture(components=3, assignment="model", jitter=0.5)
    ).eval()
    torch.testing.assert_close(
        sb.sample(layer, x, draws=2),
        sb.sample(layer, x, draws=2, parallel=False),
        rtol=1e-5,
        atol=1e-5,
    )
    bare = torch.cat([layer(x) for _ in range(4)]).view(
        4, *x.shape
    )  # 4 rows for 3 members
    members = sb.sample(layer, x)
    gap = (bare[:, None] - members).abs().flatten(3).amax(3)  # (calls, members, rows)
    assert gap.amin(1).max() < 1e-5


@pytest.mark.parametrize("case", APART)
def test_gradients_equal_those_of_the_plain_layers_of_the_draws(case: str) -> None:
    plain, x = made(case)
    layer = sb.bayesianize(copy.deepcopy(plain), sb.Mixture(components=3, jitter=0.5))
    plain, layer, x = plain.double().eval(), layer.double().eval(), x.double()
    weight_of_loss = torch.randn(4, *x.shape).double()
    (sb.sample(layer, x, draws=4) * weight_of_loss).sum().backward()
    posterior = layer.posterior["weight"]
    z = posterior.values().weight.tolist()
    expected = torch.zeros(3, *layer.weight.shape).double()
    for j, k in enumerate(z):
        one = with_values(plain, *picked(layer, j))
        (one(x) * weight_of_loss[j]).sum().backward()
        expected[k] += one.weight.grad
    torch.testing.assert_close(
        torch.cat([layer.weight.grad[None], posterior.weight.grad]), expected
    )


@pytest.mark.parametrize(
    ("name", "tracks"),
    each(["InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d"], [False, True]),
)
def test_unbatched_instance_norm(name: str, tracks: bool) -> None:
    plain = shaken(getattr(nn, name)(C, affine=True, track_running_stats=tracks))
    x = torch.randn((C, 4, 3, 2)[: 1 + int(name[-2])])
    layer = sb.bayesianize(
        copy.deepcopy(plain), sb.ModelPatch(components=3, jitter=0.5)
    )
    for net in (plain, layer):
        net.eval()
    y = layer(x)
    torch.testing.assert_close(
        y, with_values(plain, *picked(layer, 0))(x), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    "build",
    [lambda: nn.LayerNorm(C), lambda: nn.RMSNorm(C), lambda: nn.LayerNorm((2, C))],
)
def test_a_single_vector_is_one_row(build: Any) -> None:
    plain = shaken(build())
    layer = sb.bayesianize(
        copy.deepcopy(plain), sb.ModelPatch(components=3, jitter=0.5)
    )
    x = torch.randn(plain.normalized_shape)
    y = layer(x)
    torch.testing.assert_close(
        y, with_values(plain, *picked(layer, 0))(x), rtol=1e-5, atol=1e-5
    )


@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
@pytest.mark.parametrize(
    "build",
    [lambda: nn.LayerNorm(C), lambda: nn.RMSNorm(C), lambda: nn.LayerNorm((2, C))],
)
def test_a_single_vector_meets_held_draws(build: Any) -> None:
    """Three draws are held; one row belongs to the first of them."""
    plain = shaken(build())
    layer = sb.bayesianize(copy.deepcopy(plain), sb.Mixture(components=3, jitter=0.5))
    x = torch.randn(plain.normalized_shape)
    with sb.fixed_draws(layer, 3):
        y = layer(x)
        torch.testing.assert_close(y, layer(x.unsqueeze(0))[0])
        torch.testing.assert_close(
            y, with_values(plain, *picked(layer, 0))(x), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_statistics_that_are_turned_off_later(mode: str) -> None:
    """track_running_stats may be set to False on a layer that has statistics: torch uses the batch in training, them in
    eval mode."""
    plain = shaken(nn.BatchNorm1d(C))
    layer = sb.bayesianize(copy.deepcopy(plain), sb.Mixture(components=2, jitter=0.0))
    x = torch.randn(5, C)
    for net in (plain, layer):
        net.track_running_stats = False
        net.train(mode == "train")
    torch.testing.assert_close(layer(x), plain(x))
    for name, buffer in plain.named_buffers():
        assert torch.equal(layer.get_buffer(name), buffer), name


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.BatchNorm1d(C, affine=False),
        lambda: nn.LayerNorm(C, elementwise_affine=False),
        lambda: nn.GroupNorm(2, C, affine=False),
        lambda: nn.InstanceNorm1d(C),
    ],
)
def test_dropout_acts_on_norms_without_scales(build: Any) -> None:
    """There is nothing to patch, but their inputs can be dropped: against plain torch on the dropped input."""
    plain = build().eval()
    net = sb.bayesianize(
        nn.Sequential(copy.deepcopy(plain)), sb.MCDropout(before="0", rate=0.5)
    ).eval()
    x = (
        torch.rand(3, C) + 1
        if not isinstance(plain, nn.InstanceNorm1d)
        else torch.rand(3, C, 4) + 1
    )
    y = sb.sample(net, x, draws=200)
    assert y.shape == (200, *x.shape)
    assert len(y.flatten(1).unique(dim=0)) > 100
    if isinstance(
        plain, nn.BatchNorm1d
    ):  # running statistics 0 and 1: the layer is the identity
        torch.testing.assert_close(
            torch.where(y == 0, 2 * x, y), 2 * x.expand_as(y), rtol=1e-4, atol=1e-4
        )


def test_dropout_before_norm_means_every_norm() -> None:
    net = nn.Sequential(
        nn.Linear(3, C),
        nn.BatchNorm1d(C, affine=False),
        nn.Linear(C, C),
        nn.BatchNorm1d(C),
    )
    sb.bayesianize(net, sb.MCDropout(before="norm"))
    assert [isinstance(m, BayesLayer) for m in net] == [False, True, False, True]


# Precision and memory -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:Mismatch dtype between input and weight:UserWarning"
)  # torch's own RMSNorm under autocast
@pytest.mark.parametrize(
    ("kind", "draws", "case"), pairwise(["bfloat16", "autocast"], [1, 3], APART)
)
def test_half_precision_has_the_plain_layers_type_and_values(
    case: str, kind: str, draws: int
) -> None:
    plain, x = made(case)
    layer = sb.bayesianize(
        copy.deepcopy(plain), sb.Mixture(components=3, jitter=0.5)
    ).eval()
    plain.eval()
    exact = sb.sample(layer, x, draws=draws)  # sets the picks that `picked` reads
    reference = torch.stack(
        [with_values(plain, *picked(layer, j))(x) for j in range(draws)]
    )
    torch.testing.assert_close(exact, reference, rtol=1e-5, atol=1e-5)
    x = x.bfloat16()
    if kind == "bfloat16":
        layer, plain = layer.bfloat16(), plain.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        y, one = sb.sample(layer, x, draws=draws), plain(x)
    assert y.dtype == one.dtype
    reference = torch.stack(
        [with_values(plain, *picked(layer, j)).float()(x.float()) for j in range(draws)]
    )
    torch.testing.assert_close(y.float(), reference, rtol=0.03, atol=0.1)


class TwoPrecisions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.LayerNorm(C).bfloat16(), nn.LayerNorm(C)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).float())


@pytest.mark.parametrize("draws", [1, 3])
def test_norms_of_different_precision_keep_theirs(draws: int) -> None:
    net = sb.bayesianize(TwoPrecisions(), sb.ModelPatch(components=3, jitter=0.3))
    x, seen = torch.randn(4, C).bfloat16(), []
    net.b.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    y = sb.sample(net, x, draws=draws)
    for j, one in enumerate(
        seen[-1].unflatten(0, (draws, 4))
    ):  # the call itself, after those that located rows
        torch.testing.assert_close(
            y[j],
            with_values(nn.LayerNorm(C), *picked(net.b, j))(one),
            rtol=1e-5,
            atol=1e-5,
        )


@pytest.mark.parametrize(
    ("draws", "build"),
    each(
        ["forward", "example"],
        [
            lambda: nn.BatchNorm2d(C),
            lambda: nn.GroupNorm(2, C),
            lambda: nn.InstanceNorm2d(C, affine=True),
        ],
    ),
)
def test_channels_last_memory_stays(build: Any, draws: str) -> None:
    plain = shaken(build()).eval()
    layer = sb.bayesianize(
        copy.deepcopy(plain), sb.Mixture(components=3, jitter=0.5, draws=draws)
    ).eval()
    x = torch.randn(B, C, 3, 5).to(memory_format=torch.channels_last)
    torch.manual_seed(3)
    y = layer(x)
    torch.manual_seed(3)
    torch.testing.assert_close(y, layer(x.contiguous()), rtol=1e-5, atol=1e-5)
    if plain(x).is_contiguous(memory_format=torch.channels_last):
        assert y.is_contiguous(memory_format=torch.channels_last)


def test_folded_draws_keep_channels_last_memory() -> None:
    layer = sb.bayesianize(nn.BatchNorm2d(C), sb.Mixture(components=3)).eval()
    seen = []
    layer.register_forward_pre_hook(
        lambda module, args: seen.append(
            args[0].is_contiguous(memory_format=torch.channels_last)
        )
    )
    sb.sample(
        layer, torch.randn(B, C, 3, 5).to(memory_format=torch.channels_last), draws=3
    )
    assert all(seen)  # also while rows are located


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["BatchNorm2d", "LayerNorm-two-dimensions", "GroupNorm", "InstanceNorm2d"]
)  # torch's cumulative one breaks the graph
def test_compiles_as_one_graph_and_trains(case: str) -> None:
    layer, x = made(case)
    sb.bayesianize(layer, sb.Mixture(components=3, jitter=0.5))
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    twin = copy.deepcopy(layer)
    for step in range(2):
        torch.manual_seed(step)
        expected = sb.sample(twin, x, draws=3)
        torch.manual_seed(step)
        y = sb.sample(compiled, x, draws=3)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    y.square().sum().backward()
    assert layer.posterior["weight"].weight.grad is not None
    for name, buffer in twin.named_buffers():
        torch.testing.assert_close(layer.get_buffer(name), buffer)


def test_inputs_of_the_wrong_rank_are_refused_as_torch_refuses_them() -> None:
    for build, shape in (
        (lambda: nn.BatchNorm2d(C), (B, C, 3)),
        (lambda: nn.InstanceNorm2d(C, affine=True), (B, C)),
        (lambda: nn.BatchNorm1d(C), (C,)),
    ):
        with pytest.raises(ValueError) as plain:
            build()(torch.randn(shape))
        with pytest.raises(ValueError) as ours:
            sb.bayesianize(build(), sb.Mixture(components=2))(torch.randn(shape))
        assert str(ours.value) == str(plain.value)


def test_one_value_per_channel_cannot_be_normalised_in_training() -> None:
    layer = sb.bayesianize(nn.BatchNorm1d(C), sb.Mixture(components=3))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.randn(1, C))


# Inside transformers --------------------------------------------------------------------------------------------------


def encoder(
    batch_first: bool, norm_first: bool = False, norm: bool = True
) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        8, 2, 16, 0.0, batch_first=batch_first, norm_first=norm_first
    )
    return shaken(
        nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8) if norm else None)
    ).eval()


class Wrapped(nn.Module):
    """A sequence-first encoder inside a model that takes its rows first."""

    def __init__(self, inner: nn.TransformerEncoder) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(0, 1)).transpose(0, 1)


def reference_draws(net: nn.Module, x: Tensor, draws: int) -> Tensor:
    """Plain copies of the model with the picks of the last pass written into every patched layer, run one after
    another."""
    out = []
    for j in range(draws):
        plain = sb.debayesianize(copy.deepcopy(net))
        for name, layer in net.named_modules():
            if isinstance(layer, BayesLayer):
                target = plain.get_submodule(name)
                weight, bias = picked(layer, j)
                with torch.no_grad():
                    target.weight.copy_(weight)
                    if bias is not None:
                        target.bias.copy_(bias)
        out.append(plain(x))
    return torch.stack(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm_first", "batch_first", "tokens"),
    pairwise([False, True], [False, True], [5, 12]),
)
def test_an_encoder_with_patched_norms_equals_plain_encoders(
    batch_first: bool, norm_first: bool, tokens: int
) -> None:
    net = sb.bayesianize(
        encoder(batch_first, norm_first), sb.ModelPatch(components=3, jitter=0.5)
    )
    assert len(posteriors_of(net)) == 5
    x = torch.randn((B, tokens, 8) if batch_first else (tokens, B, 8))
    with torch.no_grad():
        y = sb.sample(net, x, draws=3)
        torch.testing.assert_close(y, reference_draws(net, x, 3), rtol=1e-4, atol=1e-5)
        torch.manual_seed(4)
        bare = net(x)
        torch.testing.assert_close(
            bare, reference_draws(net, x, 1)[0], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("tokens", [5, 8, 12])
def test_a_sequence_first_encoder_inside_a_model_equals_plain_ones(tokens: int) -> None:
    net = sb.bayesianize(
        Wrapped(encoder(False)), sb.ModelPatch(components=3, jitter=0.5)
    )
    x = torch.randn(B, tokens, 8)
    with torch.no_grad():
        y = sb.sample(net, x, draws=3)
        torch.testing.assert_close(y, reference_draws(net, x, 3), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [5, 12])
def test_the_norms_of_sequence_first_layers_inside_a_model_know_their_rows(
    tokens: int,
) -> None:
    net = sb.bayesianize(
        Wrapped(encoder(False, norm=False)), sb.ModelPatch(components=3, jitter=0.5)
    )
    x = torch.randn(B, tokens, 8)
    with torch.no_grad():
        y = sb.sample(net, x, draws=3)
        torch.testing.assert_close(y, reference_draws(net, x, 3), rtol=1e-4, atol=1e-5)


def test_a_decoder_with_patched_norms_equals_plain_decoders() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True)
            self.decoder = shaken(nn.TransformerDecoder(layer, 2, norm=nn.LayerNorm(8)))

        def forward(self, x: Tensor) -> Tensor:
            return self.decoder(x, x.flip(1))

    net = sb.bayesianize(Decoder().eval(), sb.ModelPatch(components=3, jitter=0.5))
    assert len(posteriors_of(net)) == 7
    x = torch.randn(B, 5, 8)
    with torch.no_grad():
        y = sb.sample(net, x, draws=3)
        torch.testing.assert_close(y, reference_draws(net, x, 3), rtol=1e-4, atol=1e-5)


def test_the_fast_path_of_torchs_encoder_does_not_hide_the_draws() -> None:
    """In eval mode without gradients torch would read weights past the layers' forward."""
    net = sb.bayesianize(encoder(True), sb.ModelPatch(components=3, jitter=0.5))
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        assert (
            len(
                torch.stack([net(x) for _ in range(20)])
                .flatten(1)
                .round(decimals=4)
                .unique(dim=0)
            )
            > 5
        )


# Models nobody here wrote ---------------------------------------------------------------------------------------------

transformers = pytest.importorskip("transformers")


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=8,
        num_labels=3,
        initializer_range=0.3,
    )
    return shaken(transformers.BertForSequenceClassification(config)).eval()


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=8,
        patch_size=4,
        num_labels=3,
        initializer_range=0.3,
    )
    return shaken(transformers.ViTForImageClassification(config)).eval()


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=20,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=8,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    return shaken(transformers.GPT2LMHeadModel(config)).eval()


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=4,
        hidden_sizes=[4, 8],
        depths=[1, 1],
        layer_type="basic",
        num_labels=3,
    )
    return shaken(transformers.ResNetForImageClassification(config)).eval()


def ids() -> Tensor:
    return torch.randint(20, (3, 6))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], str, int]] = {
    "bert": (bert, ids, "classifier", 5),
    "vit": (vit, lambda: torch.randn(3, 3, 8, 8), "classifier", 5),
    "gpt2": (gpt2, ids, "lm_head", 5),
    "resnet": (resnet, lambda: torch.randn(3, 3, 16, 16), r"classifier\.1", 6),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("patch", "cross", "model"),
    pairwise(["norm", "norm+output"], [False, True], MODELS),
)
def test_patched_models_equal_plain_ones_draw_by_draw(
    model: str, cross: bool, patch: str
) -> None:
    build, inputs, head, norms = MODELS[model]
    net = sb.bayesianize(
        build(), sb.ModelPatch(components=3, cross=cross, patch=patch, jitter=0.5)
    )
    converted = [r for r in sb.summary(net).rows if r.status == "converted"]
    assert len([r for r in converted if "Norm" in r.layer]) == norms
    assert [r.name for r in converted if "Norm" not in r.layer] == (
        [head.replace("\\", "")] if patch == "norm+output" else []
    )
    x = inputs()
    with torch.no_grad():
        y = sb.sample(net, x, draws=4).logits
        for j in range(4):
            plain = sb.debayesianize(copy.deepcopy(net))
            for name, layer in net.named_modules():
                if isinstance(layer, BayesLayer):
                    weight, bias = picked(layer, j)
                    plain.get_submodule(name).weight.copy_(weight)
                    if bias is not None:
                        plain.get_submodule(name).bias.copy_(bias)
            torch.testing.assert_close(y[j], plain(x).logits, rtol=1e-3, atol=1e-4)
    assert len(y.flatten(1).round(decimals=3).unique(dim=0)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_patched_models_train_and_predict(model: str) -> None:
    build, inputs, _, _ = MODELS[model]
    net = sb.bayesianize(
        build(), sb.ModelPatch(components=3, patch="norm+output", tau=None)
    ).train()
    x = inputs()
    y = torch.randint(3, (3,)) if model != "gpt2" else x
    optimizer = torch.optim.Adam(sb.param_groups(net, weight_decay=1e-3), lr=1e-2)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        terms = sb.elbo(sb.categorical(sb.sample(net, x).logits, y), net, num_data=100)
        terms.loss.backward()
        optimizer.step()
        losses.append(terms.nll.item())
    assert min(losses[-4:]) < 0.8 * losses[0]
    for posterior in posteriors_of(net):
        assert posterior.weight.grad is not None
    pred = sb.predict(net, x, draws=20)
    assert pred.probs.shape == (*y.shape, 20 if model == "gpt2" else 3)
    assert bool((pred.epistemic > 0).all())


@pytest.mark.slow
@pytest.mark.parametrize(("draws", "model"), each([1, 3], ["bert", "gpt2", "vit"]))
def test_gradient_checkpointing_gives_the_same_gradients(
    model: str, draws: int
) -> None:
    build, inputs, _, _ = MODELS[model]
    net = sb.bayesianize(
        build(), sb.ModelPatch(components=3, patch="norm+output", jitter=0.5)
    ).train()
    for m in net.modules():  # dropout has noise of its own
        if isinstance(m, nn.Dropout):
            m.p = 0.0
    x, grads = inputs(), []
    for on in (False, True):
        if on:
            net.gradient_checkpointing_enable({"use_reentrant": False})
        net.zero_grad()
        torch.manual_seed(7)
        options = {"use_cache": False} if model == "gpt2" else {}
        sb.sample(net, x, draws=draws, **options).logits.square().sum().backward()
        grads.append(
            {
                name: p.grad.clone()
                for name, p in net.named_parameters()
                if p.grad is not None
            }
        )
    assert grads[0].keys() == grads[1].keys()
    assert any(".posterior." in name for name in grads[0])
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-4, atol=1e-5, msg=name)


def test_checkpointed_batch_norm_recomputes_with_the_same_picks() -> None:
    class Net(nn.Module):
        def __init__(self, on: bool) -> None:
            super().__init__()
            self.body, self.on = (
                nn.Sequential(
                    nn.Linear(3, C),
                    nn.BatchNorm1d(C),
                    nn.Tanh(),
                    nn.Linear(C, C),
                    nn.LayerNorm(C),
                ),
                on,
            )

        def forward(self, x: Tensor) -> Tensor:
            return (
                checkpoint(self.body, x, use_reentrant=False)
                if self.on
                else self.body(x)
            )

    plain, saving = Net(False), Net(True)
    for net in (plain, saving):
        torch.manual_seed(0)
        sb.bayesianize(net, sb.ModelPatch(components=3, cross=True, jitter=0.5))
    saving.load_state_dict(plain.state_dict())
    x = torch.randn(8, 3)
    for net in (plain, saving):
        torch.manual_seed(2)
        losses = [
            sb.sample(net, x, draws=2).square().sum(),
            net(x).square().sum(),
        ]  # two passes before the backward
        sum(losses).backward()
    for (name, p), q in zip(plain.named_parameters(), saving.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)


class GroupNormAct(nn.GroupNorm):
    """A norm that ends in an activation, with few channels in a group."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


@pytest.mark.parametrize(("channels", "groups"), [(64, 32), (32, 2), (8, 8)])
def test_group_norms_with_an_activation_are_norms(channels: int, groups: int) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, channels, 3),
        GroupNormAct(groups, channels),
        nn.Conv2d(channels, 2, 3),
    )
    sb.bayesianize(model, sb.ModelPatch(components=3))
    assert {
        row.name for row in sb.summary(model).rows if row.status == "converted"
    } == {"1"}


# What a converted norm layer costs ------------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Counts what reaches the dispatcher, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def operations(function: Callable[[], Any]) -> Counter[str]:
    with Operations() as mode:
        function()
    return mode.counts


def norms(count: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(*[shaken(nn.BatchNorm2d(C)) for _ in range(count)]).to(dtype)


@pytest.mark.parametrize("cross", [False, True])
def test_with_one_draw_a_norm_layer_runs_what_the_plain_layer_runs(cross: bool) -> None:
    x, config, more = (
        torch.randn(4, C, 3, 3),
        sb.ModelPatch(components=3, cross=cross),
        [],
    )
    for converted in (False, True):
        nets = [
            sb.bayesianize(norms(n), config) if converted else norms(n) for n in (2, 6)
        ]
        for net in nets:
            net(x)
        few, many = (operations(lambda net=net: net(x)) for net in nets)
        more.append(many - few)
    plain, ours = more
    ours.pop("view", None)  # of the noise
    assert plain and ours == plain


def test_blocks_of_rows_cost_a_norm_layer_one_operation_on_activations() -> None:
    net, x = (
        sb.bayesianize(norms(5), sb.ModelPatch(components=3)),
        torch.randn(4, C, 3, 3),
    )
    sb.sample(net, x, draws=2)
    counts = operations(lambda: sb.sample(net, x, draws=2))
    assert counts["addcmul"] == 5 and counts["native_batch_norm"] == 5


@pytest.mark.parametrize("bias", [True, False])
def test_running_statistics_are_folded_into_the_scales_of_blocks(bias: bool) -> None:
    plain = shaken(nn.BatchNorm1d(C)).eval()
    if not bias:
        plain.bias = None
    plain.running_mean += 3.0
    layer = sb.bayesianize(
        copy.deepcopy(plain), sb.Mixture(components=3, jitter=0.5)
    ).eval()
    x = 2 * torch.randn(LARGE // C, C) + 3
    sb.sample(layer, x, draws=2)
    assert not [
        name
        for name in operations(lambda: sb.sample(layer, x, draws=2))
        if "batch_norm" in name
    ]
    with sb.fixed_draws(layer, 3):
        y = sb.sample(layer, x)
        for j in range(3):
            torch.testing.assert_close(
                y[j], sb.materialize(layer, draw=j).eval()(x), rtol=1e-4, atol=1e-5
            )


def test_a_large_mean_is_not_folded_in_half_precision() -> None:
    plain = nn.BatchNorm1d(C).eval()
    plain.running_mean += 100.0
    layer = (
        sb.bayesianize(copy.deepcopy(plain), sb.Mixture(components=2, jitter=0.0))
        .eval()
        .to(torch.bfloat16)
    )
    x = (100 + torch.randn(LARGE // C + 1, C)).to(torch.bfloat16)
    torch.testing.assert_close(
        sb.sample(layer, x, draws=2)[0],
        plain.to(torch.bfloat16)(x),
        rtol=2e-2,
        atol=2e-2,
    )


def test_folded_statistics_still_refuse_other_channels() -> None:
    layer = sb.bayesianize(nn.BatchNorm1d(C), sb.Mixture(components=3)).eval()
    with pytest.raises(RuntimeError), sb.fixed_draws(layer, 2):
        sb.sample(layer, torch.randn(LARGE, 1))


@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize("cross", [False, True])
def test_norm_layers_of_several_widths_are_mixed_by_their_own_picks(
    draws: int, cross: bool
) -> None:
    parts = [
        nn.LayerNorm(6),
        nn.Linear(6, 3),
        nn.BatchNorm1d(3),
        nn.Linear(3, 10),
        nn.Unflatten(1, (2, 5)),
    ]
    net = nn.Sequential(*parts, nn.LayerNorm((2, 5)), nn.RMSNorm(5), nn.GroupNorm(2, 2))
    net = sb.bayesianize(
        net, sb.ModelPatch(components=4, cross=cross, patch="norm", jitter=0.5)
    )
    x = torch.randn(4, 6)
    different = set()
    for _ in range(5):
        sb.sample(net, x, draws=draws)
        for layer in (layer for layer in net if isinstance(layer, BayesLayer)):
            z = layer.posterior["weight"].values()
            weight, bias = (None if part is None else part.detach() for part in z.mixed)
            for j in range(draws):
                expected = picked(layer, j)
                torch.testing.assert_close(
                    weight if draws == 1 else weight[j],
                    expected[0].detach(),
                    rtol=0,
                    atol=0,
                )
                if bias is not None:
                    torch.testing.assert_close(
                        bias if draws == 1 else bias[j],
                        expected[1].detach(),
                        rtol=0,
                        atol=0,
                    )
            different.add(tuple(z.weight.flatten().tolist()))
    assert len(different) > 1


# refresh_norms --------------------------------------------------------------------------------------------------------


def normed() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 2)
    )


@pytest.mark.parametrize(
    "config",
    [sb.MeanField(scale_init=0.3), sb.Rank1(members=2), sb.ModelPatch(components=3), sb.BatchEnsemble(members=2),
     sb.KTied(scale_init=0.3, estimator="flipout"), sb.Ensemble(members=2)],
    ids=lambda config: type(config).__name__,
)  # fmt: skip
def test_each_draw_has_the_statistics_it_would_have_alone(config: sb.Config) -> None:
    """The oracle: that draw written out, and torch's own update_bn on it."""
    torch.manual_seed(0)
    net, x = sb.bayesianize(normed().train(), config), torch.randn(40, 3) + 2
    before = {name: t.clone() for name, t in net.state_dict().items()}
    fitted = sb.refresh_norms(net, DataLoader(x, 20), per="draw", draws=3, seed=5)
    found = sb.predict(fitted, x).samples
    with sb.fixed_draws(net, 3, seed=5):
        alone = [sb.materialize(net, draw=j) for j in range(3)]
    for plain in alone:
        torch.optim.swa_utils.update_bn(DataLoader(x, 20), plain.eval())
    expected = torch.stack([plain.eval()(x).softmax(-1) for plain in alone])
    torch.testing.assert_close(found, expected.detach())
    assert net.training and all(
        torch.equal(t, before[name]) for name, t in net.state_dict().items()
    )


def test_statistics_of_the_posterior_are_those_of_all_draws_together() -> None:
    """Every batch counts alike, momentum and modes are as before, dropout is off; a plain net gets update_bn's."""
    torch.manual_seed(0)
    net, x = (
        sb.bayesianize(normed(), sb.Rank1(members=2, mean_init=sb.Normal(1.0, 0.5))),
        torch.randn(40, 3) + 2,
    )
    met: list[Tensor] = []
    net[1].register_forward_pre_hook(lambda module, args: met.append(args[0]))
    fitted = sb.refresh_norms(net, DataLoader(x, 20), draws=100, seed=5)
    seen = [h for h in met if len(h) == 100 * 20][
        -2:
    ]  # what comes before proves where rows lie
    assert fitted[1].num_batches_tracked == 2
    torch.testing.assert_close(
        fitted[1].running_mean, torch.stack([h.mean(0) for h in seen]).mean(0).detach()
    )
    torch.testing.assert_close(
        fitted[1].running_var, torch.stack([h.var(0) for h in seen]).mean(0).detach()
    )
    assert (
        fitted[1].momentum == 0.1
        and fitted[1].training
        and not net[1].running_mean.any()
    )
    plain = sb.bayesianize(normed(), sb.Deterministic())
    ours = sb.refresh_norms(plain, DataLoader(x, 20), per="draw")
    torch.optim.swa_utils.update_bn(DataLoader(x, 20), plain)
    torch.testing.assert_close(ours[1].running_var, plain[1].running_var)


def test_members_with_statistics_of_their_own_keep_them_apart() -> None:
    torch.manual_seed(0)
    methods = {
        "1": sb.MemberNorm(members=2),
        ".*": sb.BatchEnsemble(members=2, mean_init=sb.Normal(1.0, 0.5)),
    }
    net, x = sb.bayesianize(normed(), methods), torch.randn(40, 3) + 2
    fitted = sb.refresh_norms(net, x)
    seen = sb.sample(net[:1], x)
    torch.testing.assert_close(fitted[1].running_mean, seen[0].mean(0).detach())
    torch.testing.assert_close(
        fitted[1].posterior["weight"].running_mean[0], seen[1].mean(0).detach()
    )


def test_statistics_that_fit_each_draw_mend_weight_noise_shared_by_a_batch() -> None:
    """Scales as large as the weights: averaged over draws, statistics fit none of them."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6, bias=False), nn.BatchNorm1d(6, affine=False))
    sb.bayesianize(net, sb.MeanField(scale_init=1.0))
    x = torch.randn(500, 3) + 2
    shared, own = (
        sb.refresh_norms(net, x, per=per, draws=8, seed=1)
        for per in ("posterior", "draw")
    )
    spread = [
        sb.predict(n, x, likelihood="gaussian", draws=d, seed=1).samples.var(1)
        for n, d in ((shared, 8), (own, 1))
    ]
    assert (spread[1] - 1).abs().max() < 0.05 < 0.3 < (spread[0] - 1).abs().max()


def test_what_has_nothing_to_refresh_is_told() -> None:
    net = sb.bayesianize(nn.Linear(3, 2), sb.Rank1())
    with pytest.raises(ValueError, match="no batch norm"):
        sb.refresh_norms(net, torch.randn(5, 3))
    normal = sb.bayesianize(normed(), sb.Rank1())
    with pytest.raises(ValueError, match="'posterior' or 'draw'"):
        sb.refresh_norms(normal, torch.randn(5, 3), per="member")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one draw"):
        sb.refresh_norms(normal, torch.randn(5, 3), draws=0)


def test_torchs_average_of_weights_takes_converted_networks() -> None:
    """Polyak-Ruppert averaging and SWA: equal weights for every step, against means by hand; batch norms are then given
    the statistics of the averaged network, which a pass in training mode shows."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    net, x, y = (
        sb.bayesianize(net, sb.BatchEnsemble(members=2)),
        torch.randn(64, 4),
        torch.randint(3, (64,)),
    )
    average, optimizer = (
        torch.optim.swa_utils.AveragedModel(net),
        torch.optim.SGD(net.parameters(), lr=0.1),
    )
    seen: list[dict[str, torch.Tensor]] = []
    for _ in range(4):
        optimizer.zero_grad()
        sb.categorical(sb.sample(net, x), y).backward()
        optimizer.step()
        average.update_parameters(net)
        seen.append({name: p.detach().clone() for name, p in net.named_parameters()})
    for name, p in average.module.named_parameters():
        torch.testing.assert_close(
            p.detach(), torch.stack([one[name] for one in seen]).mean(0)
        )
    fitted = sb.refresh_norms(average.module, x)
    hidden: list[torch.Tensor] = []
    handle = fitted[0].register_forward_hook(
        lambda _module, _inputs, output: hidden.append(output.detach())
    )
    sb.sample(fitted, x)
    handle.remove()
    torch.testing.assert_close(fitted[1].running_mean, hidden[-1].mean(0))


class Shifted(nn.Module):
    """A norm that calls its scale, less one, gamma, and its shift beta."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.gamma, self.beta = (
            nn.Parameter(torch.zeros(width)),
            nn.Parameter(torch.zeros(width)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * (self.gamma + 1) + self.beta


class Sphere(nn.Module):
    """A norm with a scale g, and no shift."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(x, dim=-1) * len(self.g) ** 0.5 * self.g


class Stretch(nn.Module):
    """A scale without a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gamma


def test_norms_are_known_by_what_they_do_whatever_their_scales_are_called() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(6, 8),
        Shifted(8),
        nn.Linear(8, 8),
        Sphere(8),
        Stretch(8),
        nn.Linear(8, 3),
    )
    x = torch.randn(5, 6)
    sb.bayesianize(net, sb.ModelPatch(components=3, jitter=0.5))
    parts = {
        name: tuple(p.shape)
        for name, p in net.named_parameters()
        if "posterior" in name
    }
    shapes = {
        "1.posterior.gamma.weight",
        "1.posterior.gamma.bias",
        "3.posterior.g.weight",
    }
    assert parts == dict.fromkeys(shapes, (2, 8))
    draws = sb.sample(net, x, draws=6, seed=1)
    torch.testing.assert_close(
        draws, sb.sample(net, x, draws=6, seed=1, parallel=False)
    )
    assert float(draws.detach().std(0).max()) > 0.01
    with sb.fixed_draws(net, 1, seed=2):
        torch.testing.assert_close(sb.materialize(net, draw=0)(x), net(x))


def test_a_module_with_weights_inside_is_no_norm() -> None:
    class Rms(nn.Module):
        def __init__(self, *inside: nn.Module) -> None:
            super().__init__()
            self.gain, self.inside = nn.Parameter(torch.ones(4)), nn.Sequential(*inside)

        def forward(self, x: Tensor) -> Tensor:
            return self.inside(x / x.square().mean(-1, keepdim=True).sqrt()) * self.gain

    assert scales_of(Rms()) == scales_of(Rms(nn.Identity())) == ["gain"]
    assert scales_of(Rms(nn.Linear(4, 4))) == scales_of(nn.Linear(4, 4)) == []
