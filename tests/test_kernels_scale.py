"""The fused scaling of rows against its definition in plain torch, under Triton's interpreter where there is no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def test_under_the_interpreter() -> None:
    """Triton reads TRITON_INTERPRET when it is imported: the other tests run in a process that has it set."""
    pytest.importorskip("triton", reason="the kernels' tests need Triton")
    if INTERPRETED or CUDA:
        return
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", str(Path(__file__))]
    done = subprocess.run(words, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


if INTERPRETED or CUDA:
    from slimbayes import kernels
    from slimbayes.kernels.scale import CAUCHY, FAMILIES, LOGNORMAL, NORMAL, POINT, How, scaled

    DEVICE = "cuda" if CUDA else "cpu"
    needs_triton = pytest.mark.filterwarnings("default")
else:
    FAMILIES, POINT, NORMAL, CAUCHY, LOGNORMAL, DEVICE = {}, 0, 1, 2, 3, "cpu"
    needs_triton = pytest.mark.skip(reason="runs in the process of test_under_the_interpreter")

SHAPES = [(12, 3, 8), (7, 3, 5), (70, 1, 33), (9, 2, 130), (5, 5, 4), (2, 3, 6)]  # rows, blocks, channels


def numbers(rows: int, blocks: int, channels: int, family: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    x = torch.randn(rows, channels, device=DEVICE)
    loc, bias = (1 + 0.3 * torch.randn(blocks, channels, device=DEVICE) for _ in range(2))
    scale = None if family == POINT else 0.1 + torch.rand(blocks, channels, device=DEVICE)
    return x, loc, scale, bias, torch.tensor(1234567890123, device=DEVICE)


def noise(rows: int, channels: int, seed: Tensor, how: "How") -> Tensor:
    """The numbers behind factors, as a factor of median zero and scale one shows them."""
    family = CAUCHY if how.family == CAUCHY else NORMAL
    zero, one = (torch.full((1, channels), value, device=DEVICE) for value in (0.0, 1.0))
    how = How(family, salt=how.salt, first_row=how.first_row)
    return scaled(torch.ones(rows, channels, device=DEVICE), zero, one, None, seed, how)


def twin(x: Tensor, loc: Tensor, scale: Tensor | None, bias: Tensor | None, numbers: Tensor, how: "How") -> Tensor:
    """What the kernel computes, in float64."""
    block = torch.arange(len(x), device=x.device) * len(loc) // max(len(x), 1)
    f = loc[block] if scale is None else loc[block] + scale[block] * numbers
    f = f.exp() if how.family == LOGNORMAL else f
    y = x * f.clamp(-how.clip, how.clip)
    return y if bias is None else y + (bias if len(bias) == 1 else bias[block])


@needs_triton
@pytest.mark.parametrize("family", range(4))
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_its_definition(family: int, shape: tuple[int, int, int]) -> None:
    x, loc, scale, bias, seed = numbers(*shape, family)
    biased = (family + sum(shape)) % 3
    how = How(family, clip=float("inf") if family == POINT else 1.5, salt=3, first_row=11)  # points come clipped
    given = [x, loc, scale, [None, bias[:1], bias][biased]]
    mine = [None if t is None else t.clone().requires_grad_() for t in given]
    exact = [None if t is None else t.double().requires_grad_() for t in given]
    y = scaled(*mine, seed, how)
    expected = twin(*exact, noise(shape[0], shape[2], seed, how).double(), how)
    torch.testing.assert_close(y, expected.float())
    weights = torch.randn_like(y)
    leaves = [t for t in mine if t is not None]
    got = torch.autograd.grad((y * weights).sum(), leaves)
    want = torch.autograd.grad((expected * weights).sum(), [t for t in exact if t is not None])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b.float(), atol=2e-4, rtol=2e-4)


@needs_triton
def test_noise_is_standard_and_apart() -> None:
    seed = torch.tensor(5, device=DEVICE)
    normal = noise(200, 50, seed, How(NORMAL))
    assert normal.mean().abs() < 0.03 and (normal.std() - 1).abs() < 0.03
    assert torch.corrcoef(normal.T).fill_diagonal_(0).abs().max() < 0.35
    cauchy = noise(200, 50, seed, How(CAUCHY))
    assert (cauchy.abs().median() - 1).abs() < 0.05 and cauchy.median().abs() < 0.05
    other = noise(200, 50, seed, How(NORMAL, salt=1))
    assert torch.corrcoef(torch.stack([normal.flatten(), other.flatten()]))[0, 1].abs() < 0.03
    assert not torch.equal(normal, noise(200, 50, seed + 1, How(NORMAL)))


@needs_triton
def test_noise_does_not_depend_on_the_cut() -> None:
    """Later rows of a batch, or a batch in other blocks, see the same numbers; and twice the same."""
    seed = torch.tensor(7, device=DEVICE)
    whole = noise(90, 21, seed, How(NORMAL))
    torch.testing.assert_close(whole[30:60], noise(30, 21, seed, How(NORMAL, first_row=30)), rtol=0, atol=0)
    x, loc, scale, _, _ = numbers(90, 1, 21, NORMAL)
    one = scaled(x, loc, scale, None, seed, How(NORMAL))
    many = scaled(x, loc.expand(9, -1).contiguous(), scale.expand(9, -1).contiguous(), None, seed, How(NORMAL))
    assert torch.equal(one, many) and torch.equal(one, scaled(x, loc, scale, None, seed, How(NORMAL)))


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_types_strides_and_empty_batches(dtype: torch.dtype) -> None:
    x, loc, scale, bias, seed = numbers(24, 4, 20, NORMAL)
    how = How(NORMAL, clip=2.0)
    lines = noise(24, 20, seed, how).double()
    wide = torch.randn(24, 40, device=DEVICE).to(dtype)[:, :20].requires_grad_()  # rows lie apart
    y = scaled(wide, loc, scale, bias, seed, how)
    assert y.dtype == dtype
    expected = twin(wide.detach().double(), loc.double(), scale.double(), bias.double(), lines, how)
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
