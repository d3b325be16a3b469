"""The rank-1 paper's equations, layout, moments, theorem, lemma and parameter counts (F1 to F6, F10, F13 to F16)."""

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from covering import each, pairwise
from oracle import shapes_alone
from scipy import integrate, special, stats
from slimbayes_lab.models import resnet50, wrn
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.distributions.families import Normal
from slimbayes.distributions.kl import information, kl
from slimbayes.posteriors.rank1 import Rank1Posterior

pytestmark = pytest.mark.usefixtures("last_draws")

Spatial = tuple[int, ...]


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def noisy(**changes: Any) -> sb.Rank1:
    """A posterior wide enough that a wrong factor shows."""
    return sb.Rank1(
        **(
            {"members": 3, "scale_init": 0.4, "mean_init": sb.Normal(1.0, 0.7)}
            | changes
        )
    )


def spread_bias(net: nn.Module) -> None:
    """Members' bias offsets start at zero, where a mix-up would not show."""
    with torch.no_grad():
        for name, p in net.named_parameters():
            if name.endswith("posterior.weight.bias"):
                p.normal_()


def factors(layer: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """r, s and bias offset of every draw of the last pass, ranks first: (p, n, channels)."""
    posterior = layer.posterior["weight"]
    (r, s, *_), bias = posterior.values(), posterior._offsets(posterior.values())
    r, s = (f if f.dim() == 3 else f.unsqueeze(1) for f in (r, s))
    return (
        r.detach().numpy().swapaxes(0, 1),
        s.detach().numpy().swapaxes(0, 1),
        None if bias is None else bias.detach().numpy(),
    )


# F1: Eq. 1 ------------------------------------------------------------------------------------------------------------


def conv_loops(
    x: np.ndarray,
    w: np.ndarray,
    stride: Spatial,
    padding: Spatial,
    dilation: Spatial,
    groups: int,
) -> np.ndarray:
    """Convolution of one example, one multiplication at a time: x (in, ...), w (out, in / groups, ...)."""
    n_out, per_group, *kernel = w.shape
    sizes = [
        (n + 2 * p - d * (k - 1) - 1) // st + 1
        for n, p, d, k, st in zip(x.shape[1:], padding, dilation, kernel, stride)
    ]
    y = np.zeros((n_out, *sizes))
    for o, pos, i, k in itertools.product(
        range(n_out), np.ndindex(*sizes), range(per_group), np.ndindex(*kernel)
    ):
        at = tuple(
            a * st - p + b * d
            for a, st, p, b, d in zip(pos, stride, padding, k, dilation)
        )
        if all(0 <= a < n for a, n in zip(at, x.shape[1:])):
            channel = o // (n_out // groups) * per_group + i
            y[(o, *pos)] += w[(o, i, *k)] * x[(channel, *at)]
    return y


def transposed_loops(
    x: np.ndarray,
    w: np.ndarray,
    stride: Spatial,
    padding: Spatial,
    dilation: Spatial,
    groups: int,
    extra: Spatial,
) -> np.ndarray:
    """Transposed convolution of one example by scattering: w (in, out / groups, ...)."""
    n_in, per_group, *kernel = w.shape
    sizes = [
        (n - 1) * st - 2 * p + d * (k - 1) + e + 1
        for n, st, p, d, k, e in zip(
            x.shape[1:], stride, padding, dilation, kernel, extra
        )
    ]
    y = np.zeros((per_group * groups, *sizes))
    for i, pos, o, k in itertools.product(
        range(n_in), np.ndindex(*x.shape[1:]), range(per_group), np.ndindex(*kernel)
    ):
        at = tuple(
            a * st - p + b * d
            for a, st, p, b, d in zip(pos, stride, padding, k, dilation)
        )
        if all(0 <= a < n for a, n in zip(at, sizes)):
            y[(i // (n_in // groups) * per_group + o, *at)] += (
                w[(i, o, *k)] * x[(i, *pos)]
            )
    return y


def masked(
    w: np.ndarray, r: np.ndarray, s: np.ndarray, groups: int, transposed: bool
) -> np.ndarray:
    """W'[o, i] = W[o, i] r[o] s[i], element by element."""
    out = w.copy()
    for a, b in np.ndindex(*w.shape[:2]):
        if transposed:
            i, o = a, a // (w.shape[0] // groups) * w.shape[1] + b
        else:
            o, i = a, a // (w.shape[0] // groups) * w.shape[1] + b
        out[a, b] *= r[o] * s[i]
    return out


@pytest.mark.parametrize(
    ("draws", "rank", "shape"), pairwise(["example", "member"], [1, 2], [(4,), (4, 2)])
)
def test_linear_equals_materialised_weights_row_by_row(
    draws: str, rank: int, shape: Spatial
) -> None:
    """F1: y = (W o r s^T) x + b of each member and, with draws="example", of each example."""
    layer = sb.bayesianize(nn.Linear(5, 3), noisy(draws=draws, rank=rank))
    spread_bias(layer)
    x = torch.randn(*shape, 5)
    y = sb.sample(layer, x, draws=6).detach().numpy()
    r, s, offset = factors(layer)
    assert y.shape == (6, *shape, 3)
    assert r.shape[1] == (24 if draws == "example" else 6)
    weight, bias = layer.weight.detach().numpy(), layer.bias.detach().numpy()
    for j, b in itertools.product(range(6), range(4)):
        n = j * 4 + b if draws == "example" else j
        w = sum(masked(weight, r[p, n], s[p, n], 1, False) for p in range(rank)) / rank
        expected = np.einsum("oi,...i->...o", w, x[b].numpy()) + bias + offset[n]
        np.testing.assert_allclose(y[j, b], expected, atol=1e-12)


CONVOLUTIONS = [
    (nn.Conv1d, {"stride": 2, "padding": 1, "dilation": 2, "groups": 2}, (9,)),
    (nn.Conv2d, {}, (4, 4)),
    (nn.Conv2d, {"stride": (2, 1), "padding": (1, 0)}, (5, 4)),
    (nn.Conv2d, {"groups": 2, "padding": 1, "dilation": 2, "bias": False}, (5, 5)),
    (nn.Conv2d, {"groups": 4, "stride": 2}, (5, 5)),
    (nn.Conv3d, {"groups": 2, "padding": (1, 0, 0)}, (2, 3, 3)),
    (
        nn.ConvTranspose1d,
        {"stride": 3, "padding": 1, "output_padding": 2, "dilation": 2, "groups": 2},
        (4,),
    ),
    (nn.ConvTranspose2d, {}, (3, 3)),
    (
        nn.ConvTranspose2d,
        {"stride": (2, 1), "padding": (1, 0), "output_padding": (1, 0), "groups": 2},
        (3, 2),
    ),
    (nn.ConvTranspose2d, {"groups": 4, "dilation": 2, "bias": False}, (2, 3)),
    (nn.ConvTranspose3d, {"groups": 2, "stride": 2}, (2, 2, 1)),
]


@pytest.mark.parametrize(
    ("draws", "members"), [("example", 2), ("member", 2), ("member", 1)]
)  # one draw is folded into W
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options", "size"), CONVOLUTIONS)
def test_convolution_equals_loops_with_materialised_kernels(
    kind: type, options: dict[str, Any], size: Spatial, draws: str, members: int
) -> None:
    """F1: a convolution with kernel W[o, i, ...] r[o] s[i], per member and per example."""
    layer = sb.bayesianize(
        kind(4, 8, 2, **options), noisy(members=members, draws=draws)
    )
    spread_bias(layer)
    x = torch.randn(2, 4, *size)
    y = sb.sample(layer, x).detach().numpy()
    r, s, offset = factors(layer)
    transposed, weight = (
        isinstance(layer, nn.modules.conv._ConvTransposeNd),
        layer.weight.detach().numpy(),
    )
    for j, b in itertools.product(range(members), range(2)):
        n = j * 2 + b if draws == "example" else j
        kernel = masked(weight, r[0, n], s[0, n], layer.groups, transposed)
        settings = (layer.stride, layer.padding, layer.dilation, layer.groups)
        if transposed:
            expected = transposed_loops(
                x[b].numpy(), kernel, *settings, layer.output_padding
            )
        else:
            expected = conv_loops(x[b].numpy(), kernel, *settings)
        if layer.bias is not None:
            bias = layer.bias.detach().numpy() + (0 if offset is None else offset[n])
            expected += bias.reshape(-1, *[1] * len(size))
        np.testing.assert_allclose(y[j, b], expected, atol=1e-12)


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_padded_borders_carry_the_input_factors_too(mode: str) -> None:
    """F1: channel factors commute with every padding mode, so the whole padded image is scaled."""
    layer = sb.bayesianize(
        nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode), noisy(members=1)
    )
    x = torch.randn(2, 2, 4, 4)
    y = sb.sample(layer, x)[0].detach().numpy()
    r, s, _ = factors(layer)
    numpy_mode = {"circular": "wrap", "reflect": "reflect", "replicate": "edge"}[mode]
    for b in range(2):
        padded = np.pad(x[b].numpy(), ((0, 0), (1, 1), (1, 1)), mode=numpy_mode)
        kernel = masked(layer.weight.detach().numpy(), r[0, b], s[0, b], 1, False)
        expected = (
            conv_loops(padded, kernel, (1, 1), (0, 0), (1, 1), 1)
            + layer.bias.detach().numpy()[:, None, None]
        )
        np.testing.assert_allclose(y[b], expected, atol=1e-12)


def test_additive_factors_of_convolutions_cannot_be_written_out() -> None:
    net = sb.bayesianize(
        nn.Conv2d(2, 3, 3, padding=1), sb.Rank1(members=2, perturbation="additive")
    )
    with pytest.raises(
        ValueError,
        match="weight: additive factors do not shift a convolution's padding",
    ):
        sb.materialize(net, member=0)


@pytest.mark.parametrize("draws", ["example", "member"])
def test_additive_form_shifts_inputs_and_outputs(draws: str) -> None:
    """F1, A.2: y = W (x + s) + r + b."""
    layer = sb.bayesianize(
        nn.Linear(4, 3),
        noisy(perturbation="additive", mean_init=sb.Normal(0.0, 0.5), draws=draws),
    )
    spread_bias(layer)
    x = torch.randn(2, 4)
    y = sb.sample(layer, x).detach().numpy()
    r, s, offset = factors(layer)
    for j, b in itertools.product(range(3), range(2)):
        n = j * 2 + b if draws == "example" else j
        expected = (
            layer.weight.detach().numpy() @ (x[b].numpy() + s[0, n])
            + r[0, n]
            + layer.bias.detach().numpy()
            + offset[n]
        )
        np.testing.assert_allclose(y[j, b], expected, atol=1e-12)


# F2: layout -----------------------------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def small_conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(3, 2))


MODELS = [(mlp, (4,)), (small_conv, (1, 2, 2))]


def select_members(net: nn.Module, order: list[int]) -> nn.Module:
    """A copy whose member i has the parameters of member order[i]; member 0's bias is the layer's own."""
    out = copy.deepcopy(net)
    with torch.no_grad():
        for name, p in out.named_parameters():
            if ".posterior." in f".{name}" and p.dim() == 3:
                p.copy_(p[order])
        for m in out.modules():
            if hasattr(m, "posterior") and m.posterior["weight"].bias is not None:
                offsets = torch.cat(
                    [torch.zeros_like(m.bias)[None], m.posterior["weight"].bias]
                )[order]
                m.bias += offsets[0]
                m.posterior["weight"].bias.copy_((offsets - offsets[0])[1:])
    return out


@pytest.mark.parametrize(("build", "shape"), MODELS)
def test_block_k_of_a_tiled_batch_belongs_to_member_k(
    build: Callable[[], nn.Module], shape: Spatial
) -> None:
    """F2: rows [k*B:(k+1)*B] are member k's; reading them interleaved (row i is member i mod K) must not fit."""
    net = sb.bayesianize(
        build(), sb.BatchEnsemble(members=3, mean_init=sb.Normal(1.0, 0.7))
    )
    spread_bias(net)
    x = torch.randn(
        3, *shape
    )  # as many rows as members: even the shapes cannot tell the two readings apart
    with sb.fixed_draws(net), torch.no_grad():
        rows = net(x.repeat(3, *[1] * len(shape)))
    alone = []
    for k in range(3):
        single = sb.bayesianize(build(), sb.BatchEnsemble(members=1))
        state = {
            n: (p[k : k + 1] if p.dim() == 3 and ".posterior." in f".{n}" else p)
            for n, p in net.named_parameters()
        }
        for n in [n for n in state if n.endswith("posterior.weight.bias")]:
            offset = state.pop(n)
            base = n.replace("posterior.weight.bias", "bias")
            state[base] = state[base] + (offset[k - 1] if k else 0)
        single.load_state_dict({n: p.detach() for n, p in state.items()})
        with torch.no_grad():
            alone.append(sb.sample(single, x)[0])
    expected = torch.stack(alone)
    torch.testing.assert_close(rows, expected.flatten(0, 1), rtol=0, atol=1e-12)
    torch.testing.assert_close(sb.sample(net, x).detach(), expected, rtol=0, atol=1e-12)
    interleaved = torch.stack([alone[i % 3][i // 3] for i in range(9)])
    assert (rows - interleaved).abs().max() > 0.1


@pytest.mark.parametrize(("build", "shape"), MODELS)
def test_permuting_members_permutes_blocks(
    build: Callable[[], nn.Module], shape: Spatial
) -> None:
    """F2: nothing else changes when members trade places."""
    net = sb.bayesianize(
        build(), sb.BatchEnsemble(members=3, mean_init=sb.Normal(1.0, 0.7))
    )
    spread_bias(net)
    x, order = torch.randn(5, *shape), [2, 0, 1]
    torch.testing.assert_close(
        sb.sample(select_members(net, order), x),
        sb.sample(net, x)[order],
        rtol=0,
        atol=1e-12,
    )


def test_per_example_factors_come_from_their_blocks_member() -> None:
    """F2 with fresh draws for every row: factors of rows [j*B:(j+1)*B] lie around the mean of member j mod K."""
    layer = sb.bayesianize(nn.Linear(4, 3), noisy(scale_init=1e-3, scale_jitter=0.0))
    sb.sample(layer, torch.randn(5, 4), draws=6)
    r, s, _ = factors(layer)
    for n in range(30):
        member = n // 5 % 3
        for drawn, factor in (
            (r, layer.posterior["weight"].r),
            (s, layer.posterior["weight"].s),
        ):
            assert (
                np.abs(drawn[0, n] - factor.loc.detach().numpy()[member, 0]).max()
                < 6e-3
            )


@pytest.mark.parametrize(
    ("rows", "config"),
    each(
        [1, 2, 3, 7, 12],
        [
            sb.BatchEnsemble(members=3, mean_init=sb.Normal(1.0, 0.7)),
            noisy(scale_init=1e-6, scale_jitter=0.0),
        ],
    ),
)
def test_bare_call_shares_rows_out_in_consecutive_blocks(
    rows: int, config: sb.Config
) -> None:
    """F2 for model(x): any number of rows, each row one member, blocks in cyclic order."""
    net = sb.bayesianize(mlp(), config)
    x = torch.randn(rows, 4)
    every = sb.sample(net, x).detach()
    found = []
    for i, row in enumerate(net(x).detach()):
        gap = (every[:, i] - row).abs().amax(-1)
        assert gap.min() < 1e-3
        found.append(int(gap.argmin()))
    changes = [(a, b) for a, b in itertools.pairwise(found) if a != b]
    assert len(changes) <= 2
    assert all(b == (a + 1) % 3 for a, b in changes)
    assert len(set(found)) == min(rows, 3)
    sizes = [found.count(k) for k in set(found)]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.slow
def test_bare_call_gives_a_row_each_member_equally_often() -> None:
    """F2: a training loop over model(x) must train every member on every row (chi-square)."""
    net = sb.bayesianize(
        nn.Linear(2, 1), sb.BatchEnsemble(members=4, mean_init=sb.Normal(1.0, 0.7))
    )
    x = torch.randn(1, 2)
    every, n = sb.sample(net, x)[:, 0, 0].detach(), 2000
    found = [int((every - net(x).item()).abs().argmin()) for _ in range(n)]
    assert stats.chisquare(np.bincount(found, minlength=4)).pvalue > 1e-3


@pytest.mark.parametrize(("build", "shape"), MODELS)
def test_split_rows_and_single_runs_agree_with_the_tiled_batch(
    build: Callable[[], nn.Module], shape: Spatial
) -> None:
    """F2: rows="split" is the block diagonal of the tiled batch; parallel=False is the tiled batch, run draw by draw."""
    net = sb.bayesianize(
        build(), sb.BatchEnsemble(members=3, mean_init=sb.Normal(1.0, 0.7))
    )
    spread_bias(net)
    x = torch.randn(6, *shape)
    every = sb.sample(net, x)
    parts = sb.sample(net, x, rows="split")
    torch.testing.assert_close(
        parts,
        torch.stack([every[k, 2 * k : 2 * k + 2] for k in range(3)]),
        rtol=0,
        atol=1e-12,
    )
    torch.testing.assert_close(
        sb.sample(net, x, parallel=False), every, rtol=0, atol=1e-12
    )
    with pytest.raises(ValueError, match="multiple of 3"):
        sb.sample(net, x[:5], rows="split")


def test_methods_of_different_size_cycle_through_all_pairs() -> None:
    """F2: layers of 2 and 3 members give 6 draws; draw j is member j mod 2 of the one and j mod 3 of the other."""
    start = sb.Normal(1.0, 0.7)
    net = sb.bayesianize(
        mlp(),
        {
            "0": sb.BatchEnsemble(members=2, mean_init=start),
            "2": sb.BatchEnsemble(members=3, mean_init=start),
        },
    )
    spread_bias(net)
    x = torch.randn(4, 4)
    y = sb.sample(net, x).detach()
    assert sb.members(net) == len(y) == 6
    (r0, s0, b0), (r2, s2, b2) = (factors(layer) for layer in (net[0], net[2]))
    for j in range(6):
        for layer, (r, s), count in ((net[0], (r0, s0), 2), (net[2], (r2, s2), 3)):
            posterior = layer.posterior["weight"]
            np.testing.assert_array_equal(
                r[0, j], posterior.r.loc[j % count, 0].detach()
            )
            np.testing.assert_array_equal(
                s[0, j], posterior.s.loc[j % count, 0].detach()
            )
        hidden = np.tanh(
            (x.numpy() * s0[0, j]) @ net[0].weight.detach().numpy().T * r0[0, j]
            + net[0].bias.detach().numpy()
            + b0[j]
        )
        expected = (
            (hidden * s2[0, j]) @ net[2].weight.detach().numpy().T * r2[0, j]
            + net[2].bias.detach().numpy()
            + b2[j]
        )
        np.testing.assert_allclose(y[j], expected, atol=1e-12)


class Windows(nn.Module):
    """Folds the steps of a sequence into the batch, as patch and frame models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])


@pytest.mark.parametrize("draws", ["example", "member"])
def test_windows_folded_into_the_batch_share_the_draw_of_their_row(draws: str) -> None:
    """F2: a layer that sees B * T rows gives each row of the pass its T windows."""
    net = sb.bayesianize(Windows(), noisy(draws=draws))
    x = torch.randn(2, 5, 4)
    y = sb.sample(net, x).detach().numpy()
    r, s, _ = factors(net.layer)
    for j, b in itertools.product(range(3), range(2)):
        n = j * 2 + b if draws == "example" else j
        w = masked(net.layer.weight.detach().numpy(), r[0, n], s[0, n], 1, False)
        np.testing.assert_allclose(
            y[j, b], x[b].numpy() @ w.T + net.layer.bias.detach().numpy(), atol=1e-12
        )


# F3: the plain network and BatchEnsemble as limits --------------------------------------------------------------------


@pytest.mark.parametrize(("build", "shape"), MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_member_at_the_unit_point_is_the_plain_network_bit_for_bit(
    build: Callable[[], nn.Module], shape: Spatial, dtype: torch.dtype
) -> None:
    """F3, R16: K = 1, no noise, unit factors."""
    plain = build().to(dtype)
    net = sb.bayesianize(
        copy.deepcopy(plain), sb.BatchEnsemble(members=1, mean_init=sb.Point(1.0))
    )
    x = torch.randn(4, *shape, dtype=dtype)
    assert torch.equal(net(x), plain(x))
    assert torch.equal(sb.sample(net, x)[0], plain(x))


@pytest.mark.parametrize(
    ("draws", "family"), each(["example", "member"], ["normal", "cauchy", "lognormal"])
)
def test_vanishing_scales_give_the_plain_network(family: str, draws: str) -> None:
    """F3: sigma -> 0 around the neutral factor, at the speed of sigma (1e-7 is the floor)."""
    plain = mlp()
    neutral = sb.Point(0.0 if family == "lognormal" else 1.0)
    net = sb.bayesianize(
        copy.deepcopy(plain),
        sb.Rank1(members=2, posterior=family, mean_init=neutral, draws=draws),
    )
    with torch.no_grad():
        for name, p in net.named_parameters():
            if name.endswith(".rho"):
                p.fill_(-60.0)
    x = torch.randn(5, 4)
    gap = (sb.sample(net, x) - plain(x)).abs().max()
    assert 0 < gap < (1e-4 if family == "cauchy" else 1e-5)


def test_point_factors_of_rank1_are_batchensemble() -> None:
    """F3: sigma = 0 is BatchEnsemble exactly, whatever draws= says."""
    ensemble = sb.bayesianize(mlp(), sb.BatchEnsemble(members=3))
    rank1 = sb.bayesianize(mlp(), sb.Rank1(members=3, posterior="point"))
    rank1.load_state_dict(ensemble.state_dict())
    x = torch.randn(4, 4)
    assert torch.equal(sb.sample(rank1, x), sb.sample(ensemble, x))
    assert sb.kl(rank1) == sb.kl(ensemble) == 0


# F4: independence of draws --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("training", "family"), each([True, False], ["normal", "cauchy", "lognormal"])
)
def test_equal_rows_get_different_draws_in_train_and_eval(
    family: str, training: bool
) -> None:
    """F4: one fresh draw for every example on every call; there is no mode that uses the mean."""
    net = sb.bayesianize(
        mlp(), sb.Rank1(members=2, posterior=family, scale_init=0.3)
    ).train(training)
    x = torch.randn(1, 4).expand(6, 4)
    first, second = sb.sample(net, x), sb.sample(net, x)
    for y in (first, second, torch.stack([first[0], second[0]])):
        flat = y.flatten(0, 1)
        gaps = torch.cdist(flat, flat) + torch.eye(len(flat))
        assert gaps.min() > 1e-6


def test_noise_of_different_examples_is_uncorrelated_and_of_one_member_draw_shared() -> (
    None
):
    """F4: correlation over 4,000 draws is 0 for draws="example", 1 for draws="member"."""
    n, x = 4000, torch.randn(1, 4).expand(2, 4)
    for draws, expected in (("example", 0.0), ("member", 1.0)):
        net = sb.bayesianize(nn.Linear(4, 1), noisy(members=1, draws=draws))
        y = sb.sample(net, x, draws=n).detach()[:, :, 0].numpy()
        assert np.corrcoef(y.T)[0, 1] == pytest.approx(expected, abs=4 / math.sqrt(n))


@pytest.mark.slow
def test_draws_for_each_example_divide_the_variance_of_gradients_by_the_rows() -> None:
    """Section 3.1: against weights that are drawn once for the batch. Of B equal rows the gradient is then a mean of B
    independent ones, so its variance is exactly a B-th, and its expectation the same."""
    torch.manual_seed(0)
    rows, passes = 8, 1000
    x, found = torch.randn(1, 5).expand(rows, 5), {}
    for draws in ("example", "member"):
        torch.manual_seed(1)
        net: Any = sb.bayesianize(
            nn.Linear(5, 4), noisy(members=1, draws=draws, mean_init=sb.Point(1.0))
        )
        grads = [
            torch.autograd.grad(sb.sample(net, x).square().mean(), net.weight)[0]
            for _ in range(passes)
        ]
        found[draws] = torch.stack(grads)
    shared, apart = found["member"], found["example"]
    assert float(apart.var(0).sum() / shared.var(0).sum()) == pytest.approx(
        1 / rows, rel=0.2
    )
    error = (shared.mean(0) - apart.mean(0)) / (
        shared.var(0) / passes + apart.var(0) / passes
    ).sqrt()
    assert float(error.abs().max()) < 4


def test_factors_of_different_layers_members_and_of_r_and_s_are_uncorrelated() -> None:
    """F4, A.2: r, s, layers and members draw independently."""
    n, x = 4000, torch.zeros(1, 2)
    net = sb.bayesianize(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        noisy(members=2, mean_init=sb.Point(1.0)),
    )
    sb.sample(net, x, draws=n)
    columns = []
    for layer in net:
        for drawn in factors(layer)[:2]:
            columns += [drawn[0, k::2, i] for k in range(2) for i in range(2)]
    off = np.corrcoef(np.stack(columns)) - np.eye(len(columns))
    assert np.abs(off).max() < 4.5 / math.sqrt(n)  # 120 pairs


# F5: moments ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("random", "draws"), each(["both", "r", "s"], ["example", "member"])
)
def test_output_moments_equal_their_closed_form(random: str, draws: str) -> None:
    """F5: mean and variance of every output within four standard errors of the formulas."""
    n = 40_000
    layer = sb.bayesianize(
        nn.Linear(5, 3), noisy(members=1, random=random, draws=draws, clip=None)
    )
    x = torch.randn(5)
    y = sb.sample(layer, x[None], draws=n).detach()[:, 0].numpy()
    posterior = layer.posterior["weight"]
    r, s = posterior.r.distribution(), posterior.s.distribution()
    mu_r, mu_s = r.loc[0, 0].detach(), s.loc[0, 0].detach()
    var_r, var_s = (
        q.scale[0, 0].detach() ** 2 if hasattr(q, "scale") else torch.zeros(())
        for q in (r, s)
    )
    weight, inner = layer.weight.detach(), layer.weight.detach() @ (mu_s * x)
    mean = (mu_r * inner + layer.bias.detach()).numpy()
    variance = (
        (mu_r**2 + var_r) * (weight**2 @ (x**2 * var_s * torch.ones(5)))
        + var_r * inner**2
    ).numpy()
    centred = y - mean
    assert (np.abs(centred.mean(0)) < 4 * y.std(0) / math.sqrt(n)).all()
    error = np.sqrt(((centred**2).var(0)) / n)
    assert (np.abs((centred**2).mean(0) - variance) < 4 * error).all()


# F6: clipping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "conv", "lstm"])
def test_used_factors_lie_within_the_clip(kind: str) -> None:
    """F6: Cauchy factors at scale 5 leave [-10, 10] often; none that is used does."""
    layer, x = {
        "linear": (nn.Linear(8, 8), torch.randn(50, 8)),
        "conv": (nn.Conv2d(8, 8, 1), torch.randn(50, 8, 1, 1)),
        "lstm": (nn.LSTM(8, 8, batch_first=True), torch.randn(50, 2, 8)),
    }[kind]
    net = sb.bayesianize(
        layer, sb.Rank1(members=2, posterior="cauchy", scale_init=5.0, clip=10.0)
    )
    sb.sample(net, x)
    for posterior in net.posterior.values():
        for drawn in (posterior.values().r, posterior.values().s):
            assert drawn.abs().max() == 10.0
            assert (drawn.abs() == 10.0).double().mean() > 0.1


def test_cauchy_factors_are_clipped_at_two_by_default_and_others_at_ten() -> None:
    """A clip of 2 scored better than 10 (docs/recipes.md); files hold the number, so that they never change."""
    heavy, light = sb.Rank1(prior=sb.Cauchy(1.0, 0.1)), sb.Rank1()
    assert (
        heavy.resolved().clip,
        light.resolved().clip,
        sb.Rank1(clip=None).resolved().clip,
    ) == (2.0, 10.0, None)
    assert (
        heavy == sb.Rank1(prior=sb.Cauchy(1.0, 0.1), clip=2.0)
        and heavy.to_dict()["clip"] == 2.0
    )
    net = sb.bayesianize(
        nn.Linear(50, 1), sb.Rank1(members=1, prior=sb.Cauchy(1.0, 5.0), scale_init=5.0)
    )
    with sb.fixed_draws(net, 20):
        assert net.posterior["weight"].values().s.abs().max() == 2.0


def test_clipped_factors_get_no_gradient_and_leave_the_kl_alone() -> None:
    """F6: a hard clip, so d(clamp) = 0 outside; the KL is that of the unclipped posterior."""
    config = {
        "members": 1,
        "posterior": "cauchy",
        "random": "s",
        "scale_init": 5.0,
        "mean_init": sb.Point(1.0),
        "draws": "member",
    }
    clipped = sb.bayesianize(
        nn.Linear(200, 1, bias=False), sb.Rank1(**config, clip=10.0)
    )
    free = sb.bayesianize(nn.Linear(200, 1, bias=False), sb.Rank1(**config, clip=None))
    free.load_state_dict(clipped.state_dict())
    assert torch.equal(sb.kl(clipped), sb.kl(free))
    grads = {}
    for name, net in (("clipped", clipped), ("free", free)):
        torch.manual_seed(3)
        sb.sample(net, torch.ones(1, 200)).sum().backward()
        factor = net.posterior["weight"].s
        grads[name] = torch.stack(
            [factor.loc.grad.flatten(), factor.rho.grad.flatten()]
        )
    outside = free.posterior["weight"].values().s.flatten().abs() > 10
    assert 20 < outside.sum() < 180
    assert (grads["clipped"][:, outside] == 0).all()
    assert (grads["free"][:, outside] != 0).all()
    torch.testing.assert_close(
        grads["clipped"][:, ~outside], grads["free"][:, ~outside], rtol=0, atol=0
    )


@pytest.mark.parametrize(
    ("perturbation", "neutral"), [("multiplicative", 1.0), ("additive", 0.0)]
)
def test_members_of_a_batch_ensemble_start_near_the_network(
    perturbation: str, neutral: float
) -> None:
    """A trained network survives its conversion; files and equality know the start that was left open."""
    config = sb.BatchEnsemble(members=4, perturbation=perturbation)
    net = sb.bayesianize(nn.Linear(3000, 2), config)
    s = net.posterior["weight"].s.loc
    assert s.mean().item() == pytest.approx(
        neutral, abs=0.01
    ) and s.std().item() == pytest.approx(0.2, abs=0.01)
    assert config.to_dict()["mean_init"] == {
        "kind": "Normal",
        "loc": neutral,
        "scale": 0.2,
    }
    assert (
        sb.config_from_dict(config.to_dict())
        == config
        != sb.BatchEnsemble(members=4, mean_init=sb.Signs(0.5))
    )
    assert (
        len(
            {
                config,
                sb.BatchEnsemble(
                    members=4,
                    perturbation=perturbation,
                    mean_init=sb.Normal(neutral, 0.2),
                ),
            }
        )
        == 1
    )


# F10: mixtures --------------------------------------------------------------------------------------------------------


FAMILIES = {"normal": stats.norm, "cauchy": stats.cauchy}


def one_factor(family: str, how: str, spread: float, members: int = 3) -> nn.Module:
    """A layer of one weight whose only random factor is s: the mixture lives in one dimension."""
    prior = {"normal": sb.Normal, "cauchy": sb.Cauchy}[family](1.0, 0.3)
    start = {"scale_init": 0.2, "mean_init": sb.Normal(1.0, spread)}
    config = sb.Rank1(members=members, prior=prior, random="s", mixture_kl=how, **start)
    return sb.bayesianize(nn.Linear(1, 1, bias=False), config)


def mixture_by_quadrature(family: str, locs: Any, scales: Any) -> float:
    """KL of a mixture of members in one dimension to a prior at 1 with scale 0.3."""
    make = FAMILIES[family]
    parts, target = (
        [make(m, s) for m, s in zip(locs, scales, strict=True)],
        make(1.0, 0.3),
    )

    def integrand(t: float) -> float:  # x = tan(t) covers the line for both families
        x = math.tan(t)
        density = sum(p.pdf(x) for p in parts) / len(parts)
        return (
            0.0
            if density < 1e-300
            else density * (math.log(density) - target.logpdf(x)) * (1 + x * x)
        )

    knots = sorted(math.atan(p.median()) for p in parts)
    return integrate.quad(
        integrand, -math.pi / 2, math.pi / 2, points=knots, limit=500
    )[0]


def repeated(value: Callable[[], Tensor], times: int) -> tuple[float, float]:
    """Mean of a number that is drawn afresh each time, and four standard errors of it."""
    many = torch.vmap(lambda _: value(), randomness="different")(
        torch.zeros(times)
    ).detach()
    return many.mean().item(), 4 * many.std().item() / math.sqrt(times) + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "spread"), each(["normal", "cauchy"], [0.01, 0.3, 3.0])
)
def test_three_kls_of_a_mixture_and_which_bounds_which(
    family: str, spread: float
) -> None:
    """F10: "exact" is the mixture's KL by quadrature in one dimension; it lies below "mean", by log K at most; "sum" is
    K times "mean"."""
    nets = {how: one_factor(family, how, spread) for how in ("sum", "mean", "exact")}
    for net in nets.values():
        net.load_state_dict(nets["sum"].state_dict())
    q = nets["sum"].posterior["weight"].s.distribution()
    truth = mixture_by_quadrature(
        family, q.loc.flatten().tolist(), q.scale.flatten().tolist()
    )
    mean = sb.kl(nets["mean"]).item()
    assert mean == pytest.approx(sb.kl(nets["sum"]).item() / 3, rel=1e-12)
    assert mean - math.log(3) - 1e-6 <= truth <= mean + 1e-6
    found, error = repeated(lambda: sb.kl(nets["exact"]), 20_000)
    assert found == pytest.approx(truth, abs=error + 1e-6)
    assert error < 0.03


def test_gradients_of_the_drawn_mixture_kl_are_unbiased() -> None:
    """The derivative by a member's mean, against the difference of two quadratures."""
    scales, h = [0.2, 0.3], 1e-4
    truth = (
        mixture_by_quadrature("normal", [0.9 + h, 1.2], scales)
        - mixture_by_quadrature("normal", [0.9 - h, 1.2], scales)
    ) / (2 * h)

    def slope(_: Tensor) -> Tensor:
        def value(loc: Tensor) -> Tensor:
            q = Normal(
                torch.stack([loc, torch.tensor(1.2)])[:, None],
                torch.tensor(scales)[:, None],
            )
            return kl(q, Normal(1.0, 0.3)).sum() / 2 - information([q])

        return torch.func.grad(value)(torch.tensor(0.9))

    many = torch.vmap(slope, randomness="different")(torch.zeros(20_000))
    assert many.mean().item() == pytest.approx(
        truth, abs=4 * many.std().item() / math.sqrt(len(many))
    )
    assert abs(truth) > 0.2


def test_the_mixture_is_one_of_whole_networks() -> None:
    """Members are matched across layers, so the mixture's KL is that of all factors together: of r and s of two layers,
    by a sum over a grid in four dimensions, not the sum of four mixtures' KLs."""
    config = sb.Rank1(
        members=2, mixture_kl="exact", scale_init=0.3, mean_init=sb.Normal(1.0, 0.4)
    )
    net = sb.bayesianize(
        nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)), config
    )
    found, error = repeated(lambda: sb.kl(net), 20_000)
    factors_of = [
        f
        for layer in net
        for f in (layer.posterior["weight"].r, layer.posterior["weight"].s)
    ]
    grid = np.linspace(-1.5, 3.5, 31)
    log_q: Any = [np.zeros([1] * 4), np.zeros([1] * 4)]
    log_p: Any = np.zeros([1] * 4)
    for d, factor in enumerate(factors_of):
        q, shape = factor.distribution(), [-1 if i == d else 1 for i in range(4)]
        log_p = log_p + stats.norm(1.0, 0.1).logpdf(grid).reshape(shape)
        for k in range(2):
            member = stats.norm(q.loc[k].item(), q.scale[k].item())
            log_q[k] = log_q[k] + member.logpdf(grid).reshape(shape)
    density = (np.exp(log_q[0]) + np.exp(log_q[1])) / 2
    truth = (density * (np.log(density + 1e-300) - log_p)).sum() * (
        grid[1] - grid[0]
    ) ** 4
    assert found == pytest.approx(truth, abs=error + 1e-3)
    apart = sum(repeated(lambda layer=layer: sb.kl(layer), 2000)[0] for layer in net)
    assert truth - apart > 0.1  # what the layers tell about each other's member


@pytest.mark.parametrize(("members", "networks"), [((2, 3), 6), ((2, 4), 4)])
def test_layers_with_different_members_mix_over_their_pairs(
    members: tuple[int, int], networks: int
) -> None:
    """Draw j is member j mod K of each layer. Members far apart: the mixture lies below the mean by the log of how many
    networks there are."""
    config = {"mixture_kl": "exact", "mean_init": sb.Point(1.0), "scale_init": 0.1}
    net = sb.bayesianize(
        mlp(),
        {n: sb.Rank1(members=k, **config) for n, k in zip("02", members, strict=True)},
    )
    with torch.no_grad():
        for layer in (net[0], net[2]):
            layer.posterior["weight"].r.loc += (
                torch.arange(len(layer.posterior["weight"].r.loc))[:, None, None] * 50.0
            )
    means = sum(kl(f.distribution(), f.prior).sum() / len(f.loc) for f in (net[0].posterior["weight"].r,
                net[0].posterior["weight"].s, net[2].posterior["weight"].r, net[2].posterior["weight"].s))  # fmt: skip
    assert sb.kl(net).item() == pytest.approx(
        means.item() - math.log(networks), rel=1e-12
    )


def test_the_mixtures_kl_needs_whole_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A shard does not know the other layers' factors: the sum of layers' mixtures would be another number."""
    net = sb.bayesianize(mlp(), sb.Rank1(members=2, mixture_kl="exact"))
    monkeypatch.setattr(Rank1Posterior, "sharded", True)
    posterior: Any = net[0].posterior["weight"]
    with pytest.raises(ValueError, match="needs whole parameters"):
        posterior.kl()  # what `sb.kl` calls for each posterior whose parameters are shards


# The log-uniform prior of section 3.2 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.3, 1.0, 2.5, 7.0, 100.0])
def test_log_uniform_prior_by_dawsons_integral_and_in_closed_form(ratio: float) -> None:
    """Normal: d/dt E log|t + e| is sqrt 2 D(t / sqrt 2), D Dawson's integral. Cauchy: log(1 + t^2) / 2. Both depend on
    the ratio of mean and scale alone."""
    loc, scale = torch.tensor(-0.7 * ratio), torch.tensor(0.7)
    slope = integrate.quad(
        lambda u: math.sqrt(2) * special.dawsn(u / math.sqrt(2)), 0, ratio, limit=500
    )[0]
    assert kl(Normal(loc, scale), sb.LogUniform()).item() == pytest.approx(
        slope, abs=3e-5
    )
    noise = torch.special.ndtri((torch.arange(200_000) + 0.5) / 200_000)
    for q in (Normal(loc, scale), sb.Cauchy(loc, scale)):
        x = q.rsample(noise)
        average = (q.log_prob(x) - sb.LogUniform().log_prob(x)).mean().item()
        assert kl(q, sb.LogUniform()).item() == pytest.approx(average, abs=2e-3)


def test_log_uniform_prior_trains_factors_and_refuses_log_normal_ones() -> None:
    """Molchanov et al. (2017): scales grow and means shrink where nothing speaks against it."""
    net = sb.bayesianize(mlp(), sb.Rank1(members=2, prior=sb.LogUniform()))
    assert net[0].posterior["weight"].r.family is Normal
    first = sb.kl(net)
    first.backward()
    factor = net[0].posterior["weight"].r
    assert (factor.loc.grad * factor.loc > 0).all() and (factor.rho.grad < 0).all()
    again = sb.config_from_dict(sb.Rank1(prior=sb.LogUniform()).to_dict())
    assert again == sb.Rank1(prior=sb.LogUniform())
    with pytest.raises(ValueError, match="falls without end"):
        sb.Rank1(posterior="lognormal", prior=sb.LogUniform())
    with pytest.raises(ValueError, match="LogUniform is no prior for weights"):
        sb.MeanField(prior=sb.LogUniform())


def test_kl_of_equal_members_is_members_times_one() -> None:
    """F10, A.5: the reference sums over members and divides by nothing but num_data."""
    single = sb.bayesianize(mlp(), noisy(members=1))
    many = sb.bayesianize(mlp(), noisy(members=5))
    with torch.no_grad():
        for name, p in many.named_parameters():
            if p.dim() == 3:
                p.copy_(single.get_parameter(name).expand_as(p))
    assert sb.kl(many).item() == pytest.approx(5 * sb.kl(single).item(), rel=1e-12)


# F13, F14: variance structure -----------------------------------------------------------------------------------------


def test_theorem_1_relates_weight_and_factor_fluctuations() -> None:
    """F13: tr(H_W C) = tr(H_s Sigma) for C_(ij)(kl) = W_ij Sigma_jl W_kl at every layer; the printed Sigma_jk fails."""
    width, depth = 4, 3
    blocks = [
        m
        for _ in range(depth)
        for m in (nn.Linear(width, width, bias=False), nn.Tanh())
    ]
    net = nn.Sequential(*blocks, nn.Linear(width, 1, bias=False))
    x = torch.randn(7, width)
    rank1 = sb.bayesianize(
        copy.deepcopy(net),
        sb.BatchEnsemble(members=1, mean_init=sb.Point(1.0)),
        exclude=str(2 * depth),
    )

    def score(model: nn.Module, name: str, value: Tensor) -> Tensor:
        return torch.func.functional_call(model, {name: value}, (x,)).sum()

    wrong = 0.0
    for h in range(depth):
        root = torch.randn(width, width)
        sigma = root @ root.T
        name = f"{2 * h}.posterior.weight.s.loc"
        ones = rank1.get_parameter(name).detach()
        hessian_s = torch.autograd.functional.hessian(
            lambda s, n=name: score(rank1, n, s), ones
        ).reshape(width, width)
        weight = net[2 * h].weight.detach()
        hessian_w = torch.autograd.functional.hessian(
            lambda w, n=f"{2 * h}.weight": score(net, n, w), weight
        )
        right = torch.einsum("ijkl,ij,jl,kl->", hessian_w, weight, sigma, weight)
        printed = torch.einsum("ijkl,ij,jk,kl->", hessian_w, weight, sigma, weight)
        expected = torch.einsum("jl,jl->", hessian_s, sigma)
        assert expected.abs() > 1e-3
        assert right.item() == pytest.approx(expected.item(), rel=1e-10)
        wrong = max(wrong, (printed / expected - 1).abs().item())
    assert wrong > 0.1


def deep_tanh(width: int = 4, depth: int = 3) -> tuple[list[Tensor], Tensor, Tensor]:
    """Weights W^(h), output weights a and one input of Appendix A's network, with c_sigma / M = 1."""
    torch.manual_seed(11)
    return (
        [torch.randn(width, width) / 1.5 for _ in range(depth)],
        torch.randn(width),
        torch.randn(width),
    )


def score_of(weights: list[Tensor], a: Tensor, x: Tensor) -> Tensor:
    for weight in weights:
        x = torch.tanh(weight @ x)
    return a @ x


def curvatures(
    weights: list[Tensor], a: Tensor, x: Tensor, h: int
) -> tuple[Tensor, Tensor, Tensor]:
    """x^(h-1), and Hessians of the score by the pre-activations of layer h: printed, and with what it leaves out."""
    inputs = [x]
    for weight in weights:
        inputs.append(torch.tanh(weight @ inputs[-1]))
    first = [1 - y**2 for y in inputs[1:]]  # sigma'
    second = [-2 * y * (1 - y**2) for y in inputs[1:]]  # sigma''
    gradient, full = a, torch.diag(second[-1] * a)
    printed = full
    for j in range(len(weights) - 2, h - 1, -1):
        gradient = weights[j + 1].T @ (first[j + 1] * gradient)
        passed_on = (
            first[j][:, None] * (weights[j + 1].T @ full @ weights[j + 1]) * first[j]
        )
        printed = torch.diag(second[j] * gradient)
        full = printed + passed_on
    return inputs[h], printed, full


@pytest.mark.parametrize("h", [0, 1, 2])
def test_lemma_1_and_equations_6_to_10_hold_at_the_last_layer_and_need_a_term_more_below(
    h: int,
) -> None:
    """F13: Eq. 9 is C (x) x x^T and Eq. 10 diag(x) W^T C W diag(x), for one C of the pre-activations; Eqs. 6 and 7 are
    their traces with the covariances. The printed C has sigma'' of its own layer alone: later layers bend, too."""
    weights, a, x = deep_tanh()
    hessian_w = torch.autograd.functional.hessian(
        lambda w: score_of([*weights[:h], w, *weights[h + 1 :]], a, x), weights[h]
    )
    hessian_s = torch.autograd.functional.hessian(
        lambda s: score_of([*weights[:h], weights[h] * s, *weights[h + 1 :]], a, x),
        torch.ones(4),
    )
    inputs, printed, full = curvatures(weights, a, x, h)
    eq_9 = torch.einsum("ik,j,l->ijkl", full, inputs, inputs)
    eq_10 = inputs[:, None] * (weights[h].T @ full @ weights[h]) * inputs
    torch.testing.assert_close(eq_9, hessian_w, rtol=0, atol=1e-12)
    torch.testing.assert_close(eq_10, hessian_s, rtol=0, atol=1e-12)
    root = torch.randn(4, 4)
    sigma = root @ root.T
    spread = weights[h] * inputs
    # Eqs. 6 and 7: trace of E[dW x x^T dW^T] C, with E[dW_ij dW_kl] = W_ij Sigma_jl W_kl
    trace = ((spread @ sigma @ spread.T) * full).sum()
    assert trace.item() == pytest.approx((hessian_s * sigma).sum().item(), rel=1e-10)
    pairs = torch.einsum("ij,jl,kl->ijkl", weights[h], sigma, weights[h])
    assert trace.item() == pytest.approx((hessian_w * pairs).sum().item(), rel=1e-10)
    gap = (
        (torch.einsum("ik,j,l->ijkl", printed, inputs, inputs) - hessian_w).abs().max()
    )
    assert gap < 1e-12 if h == 2 else gap > 0.2 * hessian_w.abs().max()


def test_multiplicative_noise_is_additive_noise_of_scaled_width() -> None:
    """F14: w (mu + sigma e) = w mu + (w sigma) e, so at one input both forms draw the same outputs from the same
    noise."""
    plain = nn.Linear(4, 3)
    with torch.no_grad():
        plain.weight.abs_()
    x = torch.rand(1, 4)
    inner = (
        plain.weight @ x[0]
    ).detach()  # positive: a negative one would flip the sign of the noise
    common = {
        "members": 1,
        "random": "r",
        "clip": None,
        "mean_init": sb.Point(1.0),
        "scale_init": 0.3,
    }
    times = sb.bayesianize(copy.deepcopy(plain), sb.Rank1(**common))
    plus = sb.bayesianize(
        copy.deepcopy(plain), sb.Rank1(**common, perturbation="additive")
    )
    with torch.no_grad():
        mu, sigma = (
            times.posterior["weight"].r.loc,
            times.posterior["weight"].r.distribution().scale,
        )
        mu.normal_(1.0, 0.5)
        plus.posterior["weight"].s.loc.zero_()
        plus.posterior["weight"].r.loc.copy_(inner * (mu - 1))
        plus.posterior["weight"].r.rho.copy_(
            torch.log(torch.expm1(inner * sigma - 1e-7))
        )
    drawn = []
    for net in (times, plus):
        torch.manual_seed(5)
        drawn.append(sb.sample(net, x, draws=50))
    torch.testing.assert_close(*drawn, rtol=0, atol=1e-12)
    assert drawn[0].std() > 0.1


# F15: induced priors --------------------------------------------------------------------------------------------------

N_INDUCED = 20_000


def induced(r: Tensor) -> np.ndarray:
    """Elements of W' = W o r s^T with s = 1 and W ~ N(0, 1), as the layer itself forms them."""
    layer = sb.bayesianize(
        nn.Linear(1, len(r), bias=False),
        sb.Rank1(members=1, posterior="point", mean_init=sb.Point(1.0), clip=None),
    )
    with torch.no_grad():
        layer.weight.normal_()
        layer.posterior["weight"].r.loc.copy_(r.view(1, 1, -1))
    return sb.sample(layer, torch.ones(1, 1)).detach().flatten().numpy()


def test_inverse_gamma_factors_induce_student_t_weights() -> None:
    """F15: r^2 ~ InvGamma(v/2, v/2) gives t with v degrees of freedom, and not a normal."""
    r = np.sqrt(stats.invgamma(1.5, scale=1.5).rvs(N_INDUCED, random_state=0))
    w = induced(torch.tensor(r))
    assert stats.kstest(w, stats.t(3).cdf).pvalue > 1e-3
    assert stats.kstest(w, stats.norm(0, w.std()).cdf).pvalue < 1e-6


def test_cauchy_factors_induce_the_horseshoe() -> None:
    """F15: |r| ~ half-Cauchy; the distribution by quadrature over r, its density within Carvalho's bounds."""

    def cdf_abs(t: float) -> float:  # P(|w'| < t) with r = tan(a)
        return integrate.quad(
            lambda a: math.erf(t / math.sqrt(2) / math.tan(a)) * 2 / math.pi,
            0,
            math.pi / 2,
        )[0]

    w = np.abs(induced(sb.Cauchy(0.0, 1.0).initial(N_INDUCED)))
    grid = np.concatenate([[0], np.logspace(-7, 7, 400)])
    table = np.array([cdf_abs(t) if t else 0.0 for t in grid])
    assert stats.kstest(w, lambda t: np.interp(t, grid, table)).pvalue > 1e-3
    factor = 1 / math.sqrt(2 * math.pi**3)
    for low, high in ((0.01, 0.1), (0.1, 1.0), (1.0, 5.0), (5.0, 50.0)):
        share = ((w > low) & (w < high)).mean()
        error = 4 * math.sqrt(share * (1 - share) / N_INDUCED)
        below = integrate.quad(lambda t: factor * math.log1p(4 / t**2), low, high)[
            0
        ]  # two-sided: twice K/2
        above = integrate.quad(lambda t: 2 * factor * math.log1p(2 / t**2), low, high)[
            0
        ]
        assert below - error < share < above + error


def test_normal_factors_induce_the_product_normal() -> None:
    """F15: r ~ N(0, 1) gives density K0(|w|) / pi."""

    def cdf(t: float) -> float:
        return 0.5 + math.copysign(
            integrate.quad(lambda u: special.k0(u) / math.pi, 0, abs(t))[0], t
        )

    grid = np.linspace(-15, 15, 1201)
    table = np.array([cdf(t) if t else 0.5 for t in grid])
    w = induced(sb.Normal(0.0, 1.0).initial(N_INDUCED))
    assert stats.kstest(w, lambda t: np.interp(t, grid, table)).pvalue > 1e-3


# F16: parameter counts and weight decay -------------------------------------------------------------------------------

COUNTS = [  # those of Tables 1 to 3 are in test_experiment_configs.py
    (lambda: wrn(28, 10, 10), sb.BatchEnsemble(members=4), 36_557_548),
    (lambda: resnet50(1000), sb.BatchEnsemble(members=10), 26_087_422),
    (lambda: resnet50(1000), sb.Rank1(members=10), 26_608_812),
    (lambda: resnet50(1000), sb.Rank1(members=1), 25_661_310),
]


@pytest.mark.slow
@pytest.mark.parametrize(("build", "config", "expected"), COUNTS)
def test_parameter_counts_are_the_papers(
    build: Callable[[], nn.Module], config: sb.Config, expected: int
) -> None:
    """F16, D.8: the true count, what summary says and what estimate_cost foretold."""
    with shapes_alone():
        net = build()
    plain = sum(p.numel() for p in net.parameters())
    cost = sb.estimate_cost(net, config)
    report = sb.summary(sb.bayesianize(net, config))
    assert sum(p.numel() for p in net.parameters()) == expected
    assert (report.before, report.after) == (plain, expected)
    assert (cost.parameters, cost.extra_parameters) == (plain, expected - plain)
    assert all(p.device.type == "meta" for p in net.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "convs", "norms"), [(wrn, 28, 25), (resnet50, 53, 53)]
)
def test_every_convolution_and_the_classifier_are_converted_and_norms_shared(
    build: Callable[[], nn.Module], convs: int, norms: int
) -> None:
    """F16, A.8: all convolutions, first and shortcut ones too, and the dense layer; batch norm stays shared."""
    with shapes_alone():
        net = sb.bayesianize(build(), sb.Rank1(members=4))
    rows = sb.summary(net).rows
    tally = {(r.layer, r.status): 0 for r in rows}
    for r in rows:
        tally[r.layer, r.status] += 1
    assert tally == {
        ("Conv2d", "converted"): convs,
        ("Linear", "converted"): 1,
        ("BatchNorm2d", "skipped"): norms,
    }


@pytest.mark.slow
def test_relative_overhead_is_the_papers() -> None:
    """F16: +.429 % for WRN-28-10 at K = 4, +.408 % for ResNet-50 at K = 1."""
    with shapes_alone():
        wide, residual = wrn(), resnet50()
    assert sb.estimate_cost(
        wide, sb.Rank1(members=4)
    ).relative_parameters == pytest.approx(0.00429, abs=5e-6)
    assert sb.estimate_cost(
        residual, sb.Rank1(members=1)
    ).relative_parameters == pytest.approx(0.00408, abs=5e-6)


def test_decay_is_the_gradient_of_the_l2_penalty_and_spares_factors() -> None:
    """F16, A.6: an SGD step with weight_decay = 2 lambda is one on loss + lambda * (squares of kernels, norms and
    biases)."""
    lam, lr = 3e-2, 0.5
    plain = nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 2)
    )
    net = sb.bayesianize(plain, sb.Rank1(members=2))
    spread_bias(net)
    penalised = copy.deepcopy(net)
    x, y = torch.randn(4, 2, 2, 2), torch.tensor([0, 1, 1, 0])
    for model, decay in ((net, 2 * lam), (penalised, 0.0)):
        torch.manual_seed(1)
        loss = sb.elbo(sb.categorical(sb.sample(model, x), y), model, num_data=10).loss
        if not decay:
            loss = loss + lam * sum(
                p.square().sum()
                for n, p in model.named_parameters()
                if ".posterior." not in n
            )
        groups = sb.param_groups(model, weight_decay=decay)
        assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
        loss.backward()
        torch.optim.SGD(groups, lr=lr).step()
    for (name, a), b in zip(
        net.named_parameters(), penalised.parameters(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=name)
    decayed = sb.param_groups(net, weight_decay=2 * lam)[0]["params"]
    names = {n for n, p in net.named_parameters() if any(p is q for q in decayed)}
    assert names == {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"}


def test_posterior_learning_rate_multiplier_scales_only_posteriors() -> None:
    """F16, A.6: fast_weight_lr_multiplier; with plain SGD the step of posterior parameters scales by it, no other."""
    net = sb.bayesianize(nn.Linear(3, 2), sb.Rank1(members=2))
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    sum(p.sum() for p in net.parameters()).backward()
    torch.optim.SGD(
        sb.param_groups(net, lr=0.5, posterior_lr_multiplier=0.25), lr=0.5
    ).step()
    for name, p in net.named_parameters():
        step = 0.125 if "posterior" in name else 0.5
        torch.testing.assert_close(before[name] - p.detach(), torch.full_like(p, step))
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    groups = sb.param_groups(
        net, lr=0.5, posterior_lr_multiplier=0.25, scale_lr_multiplier=10.0
    )
    torch.optim.SGD(groups, lr=0.5).step()
    for name, p in net.named_parameters():
        step = 1.25 if name.endswith("rho") else 0.125 if "posterior" in name else 0.5
        torch.testing.assert_close(before[name] - p.detach(), torch.full_like(p, step))
    with pytest.raises(ValueError, match="needs lr= to apply"):
        sb.param_groups(net, scale_lr_multiplier=10.0)
    with pytest.raises(ValueError, match="number from 0 on, got -1.0"):
        sb.param_groups(net, lr=0.5, scale_lr_multiplier=-1.0)
