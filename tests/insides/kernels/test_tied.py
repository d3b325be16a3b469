"""Kernels of k-tied posteriors against their definitions in plain torch, under Triton's interpreter without a GPU."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interpreter import CUDA, DEVICE, INTERPRETED, needs_triton, run_interpreted
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.distributions import sums


def test_under_the_interpreter() -> None:
    run_interpreted(__file__)


if INTERPRETED or CUDA:
    from slimbayes.engine import fused
    from slimbayes.kernels.tied import sum_log_outer, tied_local

SEED = torch.tensor(123456789, device=DEVICE)


def gradients(function: Any, tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The result and the gradients of all tensors, in float64; those for factors stay float32 at least."""
    leaves = [
        t.detach().to(dtype if i < 3 else torch.promote_types(dtype, torch.float32))
        for i, t in enumerate(tensors)
    ]
    for leaf in leaves:
        leaf.requires_grad_()
    y = function(*leaves)
    weights = torch.linspace(
        -1, 1, y.numel(), device=y.device, dtype=torch.float64
    ).view(y.shape)
    (y.double() * weights).sum().backward()
    return [y.detach().double()] + [
        leaf.grad.double() for leaf in leaves if leaf.grad is not None
    ]


def numbers(rows: int, n_in: int, n_out: int, q: int, out_dim: int) -> list[Tensor]:
    """x, weight, bias, p, q and c."""
    shapes: list[tuple[int, ...]] = [
        (rows, n_in),
        (n_out, n_in) if out_dim == 0 else (n_in, n_out),
        (n_out,),
    ]
    signed = [torch.randn(shape, device=DEVICE) for shape in shapes]
    return signed + [
        torch.rand(shape, device=DEVICE) + 0.1
        for shape in ((n_in, q), (n_out, q), (n_out,))
    ]


def noise_of(rows: int, n_out: int, first: int) -> Tensor:
    """The noise itself: outputs of mean zero and variance one."""
    zero, one = torch.zeros(1, 1, device=DEVICE), torch.ones(n_out, device=DEVICE)
    of_out = torch.zeros(n_out, 1, device=DEVICE)
    y = tied_local(
        zero.expand(rows, 1).contiguous(),
        of_out,
        0,
        None,
        zero,
        of_out,
        one,
        SEED,
        first,
        torch.float32,
    )
    return y.double()


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)]
)
@pytest.mark.parametrize(
    "shape", [(3, 5, 7, 3, 0), (33, 70, 65, 1, 1), (9, 130, 3, 6, 0)]
)
def test_local_equals_its_definition(
    shape: tuple[int, ...], dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    tensors = [
        t.to(dtype).float() if i < 3 else t for i, t in enumerate(numbers(*shape))
    ]
    out_dim, noise = shape[4], noise_of(shape[0], shape[2], 3)

    def defined(
        x: Tensor, w: Tensor, b: Tensor, p: Tensor, q: Tensor, c: Tensor
    ) -> Tensor:
        return (
            x @ (w.T if out_dim == 0 else w)
            + b
            + (x.square() @ p @ q.T + c).sqrt() * noise
        )

    def by_kernel(
        x: Tensor, w: Tensor, b: Tensor, p: Tensor, q: Tensor, c: Tensor
    ) -> Tensor:
        return tied_local(x, w, out_dim, b, p, q, c, SEED, 3, dtype)

    found, wanted = (
        gradients(by_kernel, tensors, dtype),
        gradients(defined, tensors, torch.float64),
    )
    assert len(found) == len(wanted) == 7
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(
            a, b, rtol=tolerance, atol=tolerance * float(b.abs().max())
        )


@needs_triton
def test_small_scales_stay_small() -> None:
    """A floor under the variance must be lost beside any scale that somebody trains."""
    x, w, _, p, q, _ = numbers(4, 5, 6, 1, 0)
    y = tied_local(
        x, 0 * w, 0, None, 1e-12 * p, q, None, SEED, 0, torch.float32
    ).double()
    scale = (x.double().square() @ (1e-12 * p.double()) @ q.double().T).sqrt()
    torch.testing.assert_close(y, scale * noise_of(4, 6, 0), rtol=1e-3, atol=1e-12)


@needs_triton
def test_noise_is_standard() -> None:
    noise = noise_of(128, 128, 0)
    assert abs(float(noise.mean())) < 0.04 and abs(float(noise.std()) - 1) < 0.04
    assert abs(float((noise[:, :-1] * noise[:, 1:]).mean())) < 0.04
    assert abs(float((noise[:-1] * noise[1:]).mean())) < 0.04
    assert abs(float((noise * noise_of(128, 128, 128)).mean())) < 0.04, (
        "other rows have other numbers"
    )


@needs_triton
def test_without_variance_there_is_no_noise_and_no_nan() -> None:
    x, w, b, p, q, _ = numbers(4, 3, 5, 1, 0)
    x = torch.zeros_like(x).requires_grad_()
    y = tied_local(x, w, 0, b, p, q, None, SEED, 0, torch.float32)
    torch.testing.assert_close(y, b.expand(4, -1), rtol=0, atol=2e-3)
    y.sum().backward()
    assert x.grad is not None and torch.allclose(
        x.grad, w.sum(0).expand(4, -1), atol=1e-5
    )


@needs_triton
@pytest.mark.parametrize("shape", [(5, 3, 1), (33, 65, 2), (64, 130, 5)])
def test_sum_of_logs(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    m, n, k = shape
    tensors = [
        torch.rand(m, k, device=DEVICE) + 0.01,
        torch.rand(n, k, device=DEVICE) + 0.01,
    ]

    def found(function: Any, dtype: torch.dtype) -> list[Tensor]:
        u, v = (t.to(dtype).requires_grad_() for t in tensors)
        total = function(u, v)
        return [
            total.double(),
            *(g.double() for g in torch.autograd.grad(3 * total, (u, v))),
        ]

    for a, b in zip(
        found(sum_log_outer, torch.float32),
        found(lambda u, v: (u @ v.T).log().sum(), torch.float64),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


@needs_triton
def test_a_layer_takes_the_kernels_and_gives_the_same_moments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from slimbayes.posteriors import k_tied

    for module in (fused, k_tied, sums):
        monkeypatch.setattr(module, "LARGE", 1)
    torch.manual_seed(0)
    net = sb.bayesianize(
        nn.Linear(6, 3),
        sb.KTied(rank=2, prior=sb.Normal(0.0, 1.0), estimator="local", scale_init=0.5),
    )
    net = net.to(DEVICE)
    x = torch.randn(1, 6, device=DEVICE).expand(1500, -1).contiguous()
    calls: list[bool] = []
    original = k_tied.KTiedPosterior._by_kernel

    def noted(*args: Any) -> Tensor | None:
        found = original(*args)
        calls.append(found is not None)
        return found

    monkeypatch.setattr(k_tied.KTiedPosterior, "_by_kernel", noted)
    y, divergence = sb.sample(net, x, draws=1)[0], sb.kl(net)
    assert calls.pop()
    with sb.kernels.disable():
        twin, same = sb.sample(net, x, draws=1)[0], sb.kl(net)
    assert not calls.pop()
    torch.testing.assert_close(divergence, same, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y.mean(0), twin.mean(0), rtol=0, atol=0.15)
    torch.testing.assert_close(y.std(0), twin.std(0), rtol=0.12, atol=0)
    y.sum().backward()
    assert all(
        p.grad is not None and bool(p.grad.isfinite().all()) for p in net.parameters()
    )


def test_biases_go_to_the_kernel_with_their_variances(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stand-in for it, so that this is tested without Triton, too."""
    from slimbayes.posteriors import k_tied

    def stand_in(
        x: Tensor, weight: Tensor, out_dim: int, bias: Tensor, *rest: Any
    ) -> Tensor:
        seen.append(rest[2])  # after P and Q
        return nn.functional.linear(x, weight, bias)

    seen: list[Tensor | None] = []
    monkeypatch.setattr(k_tied, "ready", lambda *tensors: True)
    monkeypatch.setattr(k_tied, "LARGE", 1)
    monkeypatch.setitem(
        sys.modules, "slimbayes.kernels.tied", SimpleNamespace(tied_local=stand_in)
    )
    for bias in ("point", "gaussian"):
        seen.clear()
        net = sb.bayesianize(
            nn.Linear(6, 3),
            sb.KTied(rank=2, estimator="local", bias=bias, scale_init=0.5),
        )
        assert sb.sample(net, torch.randn(5, 6), draws=1).shape == (1, 5, 3)
        log_scale = net.posterior["weight"].bias_log_scale
        torch.testing.assert_close(
            seen[-1], None if bias == "point" else (2 * log_scale).exp()
        )
