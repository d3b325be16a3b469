"""The fused scaling of rows against its definition in plain torch, under Triton's interpreter where there is no GPU."""

import operator
from types import SimpleNamespace

import kernel_noise
import numpy as np
import pytest
import torch
from covering import each
from interpreter import CUDA, DEVICE, INTERPRETED, needs_triton, run_interpreted
from torch import Tensor


def test_kernels_are_a_public_name() -> None:
    import slimbayes as sb

    assert "kernels" in sb.__all__
    with sb.kernels.disable():
        assert not sb.kernels.ready(torch.zeros(1))


def test_under_the_interpreter() -> None:
    run_interpreted(__file__)


if INTERPRETED or CUDA:
    from slimbayes import kernels
    from slimbayes.kernels.scale import (
        CAUCHY,
        FAMILIES,
        LOGNORMAL,
        NORMAL,
        POINT,
        How,
        scaled,
    )

else:
    FAMILIES, POINT, NORMAL, CAUCHY, LOGNORMAL = {}, 0, 1, 2, 3

SHAPES = [
    (12, 3, 8),
    (7, 3, 5),
    (70, 1, 33),
    (9, 2, 130),
    (5, 5, 4),
    (2, 3, 6),
]  # rows, blocks, channels


def numbers(
    rows: int, blocks: int, channels: int, family: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    x = torch.randn(rows, channels, device=DEVICE)
    loc, bias = (
        1 + 0.3 * torch.randn(blocks, channels, device=DEVICE) for _ in range(2)
    )
    scale = (
        None if family == POINT else 0.1 + torch.rand(blocks, channels, device=DEVICE)
    )
    return x, loc, scale, bias, torch.tensor(1234567890123, device=DEVICE)


def noise(rows: int, channels: int, seed: Tensor, how: "How") -> Tensor:
    """The numbers behind factors, by numpy in float64."""
    lines = kernel_noise.noise(
        how.family, rows, channels, int(seed), how.salt, how.first_row
    )
    return torch.from_numpy(lines).to(DEVICE)


def made(rows: int, channels: int, seed: Tensor, how: "How") -> Tensor:
    """The same by the kernel: factors of median zero and scale one."""
    zero, one = (
        torch.full((1, channels), value, device=DEVICE) for value in (0.0, 1.0)
    )
    y = scaled(torch.ones(rows, channels, device=DEVICE), zero, one, None, seed, how)
    return y.double().log() if how.family == LOGNORMAL else y.double()


def twin(
    x: Tensor,
    loc: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    numbers: Tensor,
    how: "How",
) -> Tensor:
    """What the kernel computes, in float64."""
    block = torch.arange(len(x), device=x.device) * len(loc) // max(len(x), 1)
    f = loc[block] if scale is None else loc[block] + scale[block] * numbers
    f = f.exp() if how.family == LOGNORMAL else f
    y = x * f.clamp(-how.clip, how.clip)
    return y if bias is None else y + (bias if len(bias) == 1 else bias[block])


@needs_triton
@pytest.mark.parametrize(("family", "shape"), each(range(4), SHAPES))
def test_equals_its_definition(family: int, shape: tuple[int, int, int]) -> None:
    x, loc, scale, bias, seed = numbers(*shape, family)
    biased = (family + sum(shape)) % 3
    how = How(
        family, clip=float("inf") if family == POINT else 1.5, salt=3, first_row=11
    )  # points come clipped
    given = [x, loc, scale, [None, bias[:1], bias][biased]]
    mine = [None if t is None else t.clone().requires_grad_() for t in given]
    exact = [None if t is None else t.double().requires_grad_() for t in given]
    y = scaled(*mine, seed, how)
    expected = twin(*exact, noise(shape[0], shape[2], seed, how), how)
    torch.testing.assert_close(y, expected.float())
    weights = torch.randn_like(y)
    leaves = [t for t in mine if t is not None]
    got = torch.autograd.grad((y * weights).sum(), leaves)
    want = torch.autograd.grad(
        (expected * weights).sum(), [t for t in exact if t is not None]
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b.float(), atol=2e-4, rtol=2e-4)


@needs_triton
@pytest.mark.parametrize("family", [1, 2, 3])
def test_noise_is_what_numpy_makes_of_the_seed(family: int) -> None:
    """Single digits of a GPU's logarithms and sines are off; what numbers there are, and where, is not."""
    how = How(family, salt=7, first_row=2**20)
    seed = torch.tensor(2**47 + 12345678901, device=DEVICE)
    found, wanted = made(67, 75, seed, how), noise(67, 75, seed, how)
    torch.testing.assert_close(
        found, wanted, atol=3e-6 if family == CAUCHY else 6e-5, rtol=5e-6
    )
    for other, place in (
        (seed + 1, how),
        (seed, how._replace(salt=8)),
        (seed, how._replace(first_row=2**20 + 1)),
    ):
        assert not torch.isclose(found, made(67, 75, other, place)).any(1).all()


def test_philox_is_the_published_one() -> None:
    """The answers that its authors give for seven rounds (Random123, kat_vectors)."""
    zero, ones = np.zeros(1, np.uint64), np.full(1, 2**32 - 1, np.uint64)
    found = [
        [int(word[0]) for word in kernel_noise.philox((c,) * 4, key)]
        for c, key in ((zero, 0), (ones, 2**64 - 1))
    ]
    assert found[0] == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    assert found[1] == [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]


def test_normals_of_sixteen_bits_have_the_moments_of_normals() -> None:
    """Over all radii there are; those of angles at the middles of 2^16 equal cells are exact."""
    square = -2 * np.log((np.arange(2**16) + 0.5) / 2**16)
    for power, (wanted, error) in enumerate([(2, 1e-5), (8, 1e-4), (48, 1e-3)], 1):
        assert abs((square**power).mean() / wanted - 1) < error
    angle = 2 * np.pi * (np.arange(2**16) - 32767.5) / 2**16
    assert (
        max(
            abs(np.cos(angle).mean()),
            abs(np.sin(2 * angle).mean()),
            abs((np.cos(angle) ** 4).mean() - 3 / 8),
        )
        < 1e-12
    )


@pytest.mark.slow
def test_normals_of_sixteen_bits_are_normal_and_apart() -> None:
    """2^22 numbers: the distance of their distribution from a normal's, and of neighbours' from that of two normals.
    All radii and angles of 16 bits are among them."""
    lines = kernel_noise.noise(1, 2048, 2048, 2024)
    even, odd = lines.reshape(-1, 2).T
    for turns in (
        np.exp(-(even**2 + odd**2) / 2),
        np.arctan2(odd, even) / (2 * np.pi) + 0.5,
    ):
        assert len(np.unique(np.floor(2**16 * turns))) == 2**16
    u = torch.special.ndtr(torch.from_numpy(lines))
    ordered = u.flatten().sort().values
    steps = torch.arange(1, 2**22 + 1, dtype=torch.float64) / 2**22
    assert (
        torch.maximum((steps - ordered).abs(), (steps - 2**-22 - ordered).abs()).max()
        * 2048
        < 1.95
    )  # p = 0.001
    cell = (u * 32).long()
    within = cell.view(2048, 256, 8)
    pairs = {
        "of one word": (within[..., 0::2], within[..., 1::2]),
        "of two words": (within[..., 1:7:2], within[..., 2::2]),
        "of two counters": (within[:, :-1], within[:, 1:]),
        "of two rows": (cell[:-1], cell[1:]),
    }
    for name, (left, right) in pairs.items():
        counts = torch.bincount((left * 32 + right).flatten(), minlength=1024).double()
        wanted = counts.sum() / 1024
        assert ((counts - wanted) ** 2 / wanted).sum() < 1023 + 4 * (2 * 1023) ** 0.5, (
            name
        )


@needs_triton
def test_noise_does_not_depend_on_the_cut() -> None:
    """Later rows of a batch, or a batch in other blocks, see the same numbers; and twice the same."""
    seed = torch.tensor(7, device=DEVICE)
    whole = made(90, 21, seed, How(NORMAL))
    torch.testing.assert_close(
        whole[30:60], made(30, 21, seed, How(NORMAL, first_row=30)), rtol=0, atol=0
    )
    x, loc, scale, _, _ = numbers(90, 1, 21, NORMAL)
    one = scaled(x, loc, scale, None, seed, How(NORMAL))
    many = scaled(
        x,
        loc.expand(9, -1).contiguous(),
        scale.expand(9, -1).contiguous(),
        None,
        seed,
        How(NORMAL),
    )
    assert torch.equal(one, many) and torch.equal(
        one, scaled(x, loc, scale, None, seed, How(NORMAL))
    )


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_types_strides_and_empty_batches(dtype: torch.dtype) -> None:
    x, loc, scale, bias, seed = numbers(24, 4, 20, NORMAL)
    how = How(NORMAL, clip=2.0)
    lines = noise(24, 20, seed, how)
    wide = (
        torch.randn(24, 40, device=DEVICE).to(dtype)[:, :20].requires_grad_()
    )  # rows lie apart
    y = scaled(wide, loc, scale, bias, seed, how)
    assert y.dtype == dtype
    expected = twin(
        wide.detach().double(), loc.double(), scale.double(), bias.double(), lines, how
    )
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}[dtype]
    torch.testing.assert_close(y.double(), expected, atol=tolerance, rtol=tolerance)
    y.sum().backward()
    assert wide.grad is not None and wide.grad.dtype == dtype
    assert scaled(x, loc, scale, bias, seed, how, dtype=dtype).dtype == dtype
    none = torch.empty(0, 20, device=DEVICE, requires_grad=True)
    few = loc.clone().requires_grad_()
    scaled(none, few, scale, bias, seed, how).sum().backward()
    assert torch.equal(few.grad, torch.zeros_like(few))


@needs_triton
def test_kernels_can_be_turned_off() -> None:
    x = torch.zeros(1, device=DEVICE)
    assert kernels.ready(x)
    with kernels.disable():
        assert not kernels.ready(x)
    assert kernels.ready(x)


def grads(net: torch.nn.Module, y: Tensor) -> list[Tensor]:
    return list(
        torch.autograd.grad(
            (y * torch.arange(y.numel(), device=y.device).view_as(y)).sum(),
            net.parameters(),
        )
    )


@needs_triton
@pytest.mark.parametrize(
    ("random", "family"), each(["both", "r"], ["normal", "cauchy", "lognormal"])
)
def test_a_model_with_seeded_noise(
    monkeypatch: pytest.MonkeyPatch, family: str, random: str
) -> None:
    """Folded or draw by draw, by rows or with positions: what kernels make of a seed, spelled out in plain torch."""
    import slimbayes as sb
    from slimbayes.engine import fused
    from slimbayes.posteriors.rank1 import Rank1Posterior

    net = torch.nn.Sequential(
        torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3)
    ).to(DEVICE)
    sb.bayesianize(
        net,
        sb.Rank1(members=2, posterior=family, random=random, scale_init=0.4, clip=1.5),
    )
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.add_(0.1 * torch.randn_like(p)) if name.endswith("bias") else None
    monkeypatch.setattr(fused, "SEEDED", 1)
    monkeypatch.setattr(fused, "LARGE", 1)
    met = []
    meet = fused.Seeded.meet

    def spelled_out(
        self: fused.Seeded, x: Tensor, bias: Tensor | None = None, dtype: object = None
    ) -> Tensor:
        met.append(self.family)
        block = torch.arange(self.rows, device=x.device) * len(self.loc) // self.rows
        y = x * meet(self, torch.ones_like(x))
        return y if bias is None else y + (bias if len(bias) == 1 else bias[block])

    for x in (torch.randn(5, 6, device=DEVICE), torch.randn(4, 3, 6, device=DEVICE)):
        assert Rank1Posterior.seeded(net[0].posterior["weight"], 5)
        sb.sample(net, x)
        torch.manual_seed(3)
        y = sb.sample(net, x, draws=2)
        got = grads(net, y)
        torch.manual_seed(3)
        torch.testing.assert_close(sb.sample(net, x, draws=2, parallel=False), y)
        monkeypatch.setattr(fused.Seeded, "meet", spelled_out)
        torch.manual_seed(3)
        again = sb.sample(net, x, draws=2)
        torch.testing.assert_close(again, y)
        for a, b in zip(got, grads(net, again), strict=True):
            torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)
        monkeypatch.setattr(fused.Seeded, "meet", meet)
        assert not torch.equal(y[0], y[2]), "draws differ"
    assert {name.lower() for name in met} == (
        {family} if random == "both" else {family, "point"}
    )


@needs_triton
def test_fused_factors_equal_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures that lie channels last, sequences and plain rows, with kernels and without."""
    import slimbayes as sb
    from slimbayes.engine import fused

    monkeypatch.setattr(fused, "LARGE", 1)
    monkeypatch.setattr("slimbayes.posteriors.rank1.LARGE", 1)
    used = []
    real = fused.fused
    monkeypatch.setattr(
        "slimbayes.engine.rows.fused", lambda *a: used.append(real(*a)) or used[-1]
    )
    cases = [
        (
            torch.nn.Conv2d(5, 6, 3, padding=1),
            torch.randn(4, 5, 6, 7).to(memory_format=torch.channels_last),
        ),
        (torch.nn.Conv2d(5, 6, 3), torch.randn(4, 5, 6, 7)),
        (torch.nn.Linear(5, 6), torch.randn(4, 3, 5)),
        (torch.nn.Linear(5, 6), torch.randn(7, 5)),
    ]
    for layer, x in cases:
        net = sb.bayesianize(layer.to(DEVICE), sb.Rank1(members=2, scale_init=0.3))
        x = x.to(DEVICE).requires_grad_()
        sb.sample(net, x)
        torch.manual_seed(0)
        y = sb.sample(net, x)
        got = [*grads(net, y), *torch.autograd.grad(sb.sample(net, x).sum(), x)]
        with kernels.disable():
            torch.manual_seed(0)
            plain = sb.sample(net, x)
            want = [
                *grads(net, plain),
                *torch.autograd.grad(sb.sample(net, x).sum(), x),
            ]
        torch.testing.assert_close(y, plain)
        for a, b in zip(got[:-1], want[:-1], strict=True):
            torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)
    assert any(y is not None for y in used) and any(y is None for y in used)


@pytest.mark.skipif(not CUDA, reason="too many programs for the interpreter")
@pytest.mark.parametrize("family", [0, 1])
def test_many_blocks_of_many_rows(family: int) -> None:
    """Blocks times rows beyond 2^31, which a convolution of a few thousand rows with factors of their own has."""
    rows, blocks, channels = 2**21, 2**12, 4
    x, loc, scale, bias, seed = numbers(rows, blocks, channels, family)
    leaves = [t.requires_grad_() for t in (x, loc, bias)]
    y = scaled(x, loc, scale, bias, seed, How(family))
    z = (
        made(rows, channels, seed, How(family)).float()
        if family
        else torch.zeros((), device=DEVICE)
    )
    expected = twin(x, loc, scale, bias, z, How(family))
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
    weight = torch.randn_like(x)
    found, wanted = (
        torch.autograd.grad((t * weight).sum(), leaves) for t in (y, expected)
    )
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)


def test_rows_that_blocks_divide_go_to_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stand-in for it, so that this is tested without Triton, too."""
    from slimbayes.engine import fused

    def stand_in(rows: Tensor, factor: Tensor, *rest: object) -> Tensor:
        return rows * factor.repeat_interleave(len(rows) // len(factor), 0)

    monkeypatch.setattr(fused, "ready", lambda *tensors: True)
    monkeypatch.setattr(fused, "LARGE", 1)
    monkeypatch.setattr(
        "slimbayes.kernels.scale",
        SimpleNamespace(scaled=stand_in, How=object),
        raising=False,
    )
    x, factor = torch.randn(6, 4), torch.randn(2, 4)
    options = 0, -1, None, torch.float32
    got = fused.fused(operator.mul, x, factor, *options)
    torch.testing.assert_close(got, torch.cat([x[:3] * factor[0], x[3:] * factor[1]]))
    assert fused.fused(operator.mul, x[:5], factor, *options) is None
    assert fused.fused(operator.add, x, factor, *options) is None
    assert (
        fused.seeded(fused.SEEDED, 2, x)
        and not fused.seeded(fused.SEEDED, 1, x)
        and not fused.seeded(1, 2, x)
    )
