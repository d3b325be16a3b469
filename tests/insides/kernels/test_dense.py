"""The scaled product as one operation against its definition in plain torch, under Triton's interpreter where there is
no GPU.
"""

from typing import Any

import pytest
import torch
from interpreter import CUDA, DEVICE, INTERPRETED, needs_triton, run_interpreted
from torch import Tensor, nn

import slimbayes as sb


def test_under_the_interpreter() -> None:
    run_interpreted(__file__)


if INTERPRETED or CUDA:
    from slimbayes.engine import fused
    from slimbayes.kernels.dense import KernelLines, scaled_product
    from slimbayes.kernels.scale import NORMAL, How, scaled


def numbers(
    rows: int, blocks: int, n_in: int, n_out: int, out_dim: int
) -> list[Tensor]:
    """x, weight, s, r and bias."""
    shapes = [
        (rows, n_in),
        (n_out, n_in) if out_dim == 0 else (n_in, n_out),
        (blocks, n_in),
        (blocks, n_out),
    ]
    return [torch.randn(shape, device=DEVICE) for shape in [*shapes, (blocks, n_out)]]


def defined(
    x: Tensor, weight: Tensor, s: Tensor, r: Tensor, bias: Tensor, out_dim: int
) -> Tensor:
    """((x o s) W) o r + b with a line of factors for each row."""
    s, r, bias = (
        line.repeat_interleave(len(x) // len(line), 0) for line in (s, r, bias)
    )
    return ((x * s) @ (weight.T if out_dim == 0 else weight)) * r + bias


def gradients(
    function: Any, tensors: list[Tensor], dtype: torch.dtype, frozen: int | None = None
) -> list[Tensor]:
    """The result and the gradients of all tensors but the frozen one, in float64."""
    leaves = [
        t.detach().to(dtype, copy=True).requires_grad_(i != frozen)
        for i, t in enumerate(tensors)
    ]
    y = function(*leaves)
    weights = torch.linspace(
        -1, 1, y.numel(), device=y.device, dtype=torch.float64
    ).view(y.shape)
    (y.double() * weights).sum().backward()
    return [y.detach().double()] + [
        leaf.grad.double() for leaf in leaves if leaf.grad is not None
    ]


@needs_triton
@pytest.mark.parametrize(
    ("shape", "out_dim", "frozen"),
    [
        ((6, 3, 8, 5), 0, None),
        ((4, 4, 3, 33), 1, None),
        ((2, 1, 130, 2), 0, 1),
        ((4, 2, 3, 5), 1, 0),
        ((0, 2, 3, 3), 0, 1),
    ],
)
def test_equals_its_definition(
    shape: tuple[int, int, int, int], out_dim: int, frozen: int | None
) -> None:
    torch.manual_seed(0)
    tensors = numbers(*shape, out_dim)

    def ours(x: Tensor, weight: Tensor, s: Tensor, r: Tensor, bias: Tensor) -> Tensor:
        return scaled_product(x, weight, out_dim, KernelLines(s), KernelLines(r), bias)

    found = gradients(ours, tensors, torch.float32, frozen)
    wanted = gradients(lambda *t: defined(*t, out_dim), tensors, torch.float64, frozen)
    assert len(found) == len(wanted) == (6 if frozen is None else 5)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@needs_triton
def test_rows_of_many_positions_are_rows() -> None:
    """Leading dimensions, as of tokens, with a gradient that does not lie row after row."""
    torch.manual_seed(0)
    x, *others = numbers(6, 2, 3, 5, 0)

    def ours(x: Tensor, weight: Tensor, s: Tensor, r: Tensor, bias: Tensor) -> Tensor:
        return scaled_product(
            x.view(2, 3, 3), weight, 0, KernelLines(s), KernelLines(r), bias
        ).transpose(0, 1)

    found = gradients(ours, [x, *others], torch.float32)
    wanted = gradients(
        lambda *t: defined(*t, 0).view(2, 3, 5).transpose(0, 1),
        [x, *others],
        torch.float64,
    )
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = numbers(8, 4, 16, 16, 0)
    found = gradients(
        lambda x, w, s, r, b: scaled_product(
            x, w, 0, KernelLines(s), KernelLines(r), b
        ),
        tensors,
        dtype,
    )
    wanted = gradients(
        lambda *t: defined(*t, 0), [t.to(dtype) for t in tensors], torch.float64
    )
    for a, b in zip(found, wanted, strict=True):
        assert float((a - b).abs().max()) < 0.05 * float(b.abs().max())


@needs_triton
def test_seeded_noise_is_that_of_the_single_steps() -> None:
    torch.manual_seed(0)
    x, weight, s, r, bias = numbers(6, 2, 5, 7, 0)
    seed, scales = (
        torch.tensor(99, device=DEVICE),
        [torch.rand_like(t) + 0.1 for t in (s, r)],
    )
    hows = [How(NORMAL, salt=salt) for salt in (2, 3)]

    def ours(
        x: Tensor,
        weight: Tensor,
        s: Tensor,
        a: Tensor,
        r: Tensor,
        b: Tensor,
        bias: Tensor,
    ) -> Tensor:
        return scaled_product(
            x,
            weight,
            0,
            KernelLines(s, a, hows[0]),
            KernelLines(r, b, hows[1]),
            bias,
            seed,
        )

    def steps(
        x: Tensor,
        weight: Tensor,
        s: Tensor,
        a: Tensor,
        r: Tensor,
        b: Tensor,
        bias: Tensor,
    ) -> Tensor:
        return scaled(
            scaled(x, s, a, None, seed, hows[0]) @ weight.T, r, b, bias, seed, hows[1]
        )

    tensors = [x, weight, s, scales[0], r, scales[1], bias]
    for a, b in zip(
        *(gradients(f, tensors, torch.float32) for f in (ours, steps)), strict=True
    ):
        torch.testing.assert_close(a, b)


@needs_triton
def test_second_derivatives_are_refused() -> None:
    tensors = [t.requires_grad_() for t in numbers(4, 2, 3, 3, 0)]
    y = scaled_product(
        tensors[0],
        tensors[1],
        0,
        KernelLines(tensors[2]),
        KernelLines(tensors[3]),
        tensors[4],
    )
    with pytest.raises(NotImplementedError, match=r"kernels\.disable"):
        torch.autograd.grad(y.sum(), tensors, create_graph=True)


@needs_triton
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("draws", ["example", "member"])
def test_a_model_runs_it(
    monkeypatch: pytest.MonkeyPatch, draws: Any, autocast: bool
) -> None:
    """A layer that is used twice, on rows with positions: outputs and gradients as without kernels."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(torch.relu(self.a(x))))

    torch.manual_seed(0)
    net = sb.bayesianize(Twice(), sb.Rank1(members=2, draws=draws)).to(DEVICE)
    x = torch.randn(4, 5, 6, device=DEVICE)
    met: list[Any] = []
    product = fused.dense
    monkeypatch.setattr(
        "slimbayes.engine.rows.dense", lambda *a: met.append(1) or product(*a)
    )

    def run() -> list[Tensor]:
        net.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            out = sb.sample(net, x, seed=7)
        out.float().square().sum().backward()
        return [out.detach()] + [p.grad for p in net.parameters() if p.grad is not None]

    plain = run()
    assert not met
    for place in ("engine.rows", "posteriors.rank1"):
        monkeypatch.setattr(f"slimbayes.{place}.LARGE", 1)
    for a, b in zip(run(), plain, strict=True):
        torch.testing.assert_close(
            a.float(),
            b.float(),
            **(
                {"atol": 0.5, "rtol": 0.1} if autocast else {"atol": 1e-4, "rtol": 1e-4}
            ),
        )
    assert len(met) == 3
