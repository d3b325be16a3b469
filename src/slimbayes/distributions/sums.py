"""Products and sums over all weights of a matrix in few passes: backward computes anew what autograd would have kept.

    outer(u, v)               u v^T
    sum_log_outer(u, v)       sum log(u v^T)
    kl_of_scales(l, c)        sum (e^t - 1 - t) / 2,   t = 2 (l - c)
    squared_norm(x)           sum x^2
    squared_norms(xs)         the same over many tensors
    mean_plus_noise(m, s, e)  m + s o e

Each has a twin in plain operations, for compilers, torch.func and sharded tensors.

Sizes: m x n the matrix, k columns of its factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.distributions.joining import joined_among, needs_autograd
from slimbayes.distributions.scales import widen
from slimbayes.kernels import LARGE, ready


def outer(u: Tensor, v: Tensor) -> Tensor:
    """u v^T, multiplied out by element: matrix products may be set to fewer digits.

    Shape: u (m, k), v (n, k); returns (m, n).

    >>> outer(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]]))
    tensor([[11., 17.]])
    """
    if not needs_autograd(u):
        return _Outer.apply(u, v)
    first, *others = zip(u.unsqueeze(1).unbind(2), v.unbind(1), strict=True)
    total = first[0] * first[1]
    for a, b in others:
        total = torch.addcmul(total, a, b)
    return total


def sum_log_outer(u: Tensor, v: Tensor) -> Tensor:
    """Sum of log(u v^T) over all elements, which must be positive.

    Shape: u (m, k), v (n, k); returns a scalar of type `sum_dtype(u)`.

    >>> sum_log_outer(torch.ones(3, 2), torch.ones(4, 2))  # 12 log 2
    tensor(8.3178, dtype=torch.float64)
    """
    if needs_autograd(u):
        return _rows_summed(outer(u, v).log())
    if (
        ready(u)
        and u.shape[1] <= 8
        and u.dtype == v.dtype == torch.float32
        and u.shape[0] * v.shape[0] >= LARGE
    ):
        from slimbayes.kernels import tied

        return tied.sum_log_outer(u, v)
    return _SumLogOuter.apply(u, v)


def kl_of_scales(log_scale: Tensor, log_prior: float) -> Tensor:
    """KL between normals of one mean: the sum of (e^t - 1 - t) / 2 with t = 2 log(scale / prior), exact at t = 0, and
    never negative. A scalar.

    >>> kl_of_scales(torch.zeros(3), 0.0), kl_of_scales(torch.ones(1), 0.0)  # (e^2 - 3) / 2
    (tensor(0.), tensor(2.1945))
    """
    if not needs_autograd(log_scale):
        return _KLOfScales.apply(log_scale, log_prior)
    t = 2 * (log_scale - log_prior)
    return 0.5 * (t.expm1() - t).sum()


def mean_plus_noise(mean: Tensor, scale: Tensor, noise: Tensor) -> Tensor:
    """mean + scale * noise, of one shape and type; autograd's own addcmul takes a pass more in backward.

    >>> mean_plus_noise(torch.ones(2), torch.full((2,), 0.5), torch.tensor([-1.0, 2.0]))
    tensor([0.5000, 2.0000])
    """
    if (
        needs_autograd(mean)
        or noise.requires_grad
        or not mean.dtype == scale.dtype == noise.dtype
    ):
        return mean + scale * noise
    return _MeanPlusNoise.apply(mean, scale, noise)


def squared_norm(x: Tensor) -> Tensor:
    """Sum of squares: a scalar.

    >>> squared_norm(torch.tensor([3.0, 4.0]))
    tensor(25.)
    """
    return (
        x.square().sum() if needs_autograd(x) or x.dim() < 2 else _SquaredNorm.apply(x)
    )


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of squares over all elements of tensors on one device, in float32 at least: a scalar.

    >>> squared_norms([torch.tensor([3.0]), torch.ones(4, 4)])
    tensor(25.)
    """
    plain = all(type(x) in (Tensor, nn.Parameter) for x in tensors)
    if plain and not needs_autograd(tensors[0]):
        return _SquaredNorms.apply(tensors, *joined_among(tensors))
    return widen(torch.cat([x.flatten() for x in tensors])).square().sum()


def sum_dtype(x: Tensor) -> torch.dtype:
    """The type for sums that nearly cancel: float64, where the device has it."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def negligible(x: Tensor) -> float:
    """A number that is lost beside any that matters, and whose reciprocals can still be added up in their millions."""
    return float(torch.finfo(x.dtype).tiny ** 0.8)


def _rows_summed(matrix: Tensor) -> Tensor:
    # Row by row in the type at hand: a wider copy of the whole matrix would cost more than all the rest.
    return matrix.sum(1).to(sum_dtype(matrix)).sum()


def _product(u: Tensor, v: Tensor) -> Tensor:
    first, *others = zip(u.unsqueeze(1).unbind(2), v.unbind(1), strict=True)
    total = first[0] * first[1]
    for a, b in others:
        total.addcmul_(a, b)
    return total


def _to_factors(gradient: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of u and v from that of u v^T. Few lines times a matrix are many times as fast as the other way."""
    with torch.autocast(gradient.device.type, enabled=False):
        return (v.T.contiguous() @ gradient.T).T, (u.T.contiguous() @ gradient).T


class _Outer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(u, v)
        return _product(u, v)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return _to_factors(gradients[0], *ctx.saved_tensors)


class _SumLogOuter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(u, v)
        return _rows_summed(_product(u, v).log_())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        u, v = ctx.saved_tensors
        of_u, of_v = _to_factors(_product(u, v).reciprocal_(), u, v)
        gradient = gradients[0].to(u.dtype)
        return gradient * of_u, gradient * of_v


class _KLOfScales(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log_scale: Tensor, log_prior: float) -> Tensor:
        ctx.save_for_backward(log_scale)
        ctx.log_prior = log_prior
        t = log_scale.sub(log_prior).mul_(2)
        return t.expm1().sub_(t).sum().mul_(0.5)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (log_scale,) = ctx.saved_tensors
        return log_scale.sub(ctx.log_prior).mul_(2).expm1_() * gradients[0], None


class _SquaredNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        # The norm of each line in one pass; one norm of all would add up millions of float32 in a row.
        return torch.linalg.vector_norm(x, dim=tuple(range(1, x.dim()))).square().sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x * (2 * gradients[0])


class _SquaredNorms(torch.autograd.Function):
    """Of tensors that autograd does not see: gradients are those of `roots`, what has joined some, then the others."""

    @staticmethod
    def forward(
        ctx: Any, tensors: Sequence[Tensor], joined: Sequence[Any], *roots: Tensor
    ) -> Tensor:
        ctx.save_for_backward(
            *[part for one in joined for part in one.parts], *roots[len(joined) :]
        )
        ctx.joined = [(len(one.parts), one.dim) for one in joined]
        widest = (
            torch.float64
            if any(x.dtype == torch.float64 for x in tensors)
            else torch.float32
        )
        # On a CPU norms of lines: one norm of all would add up millions of float32 in a row.
        if tensors[0].is_cuda:
            return (
                torch.stack(torch._foreach_norm(list(tensors), 2, widest))
                .square()
                .sum()
            )
        lines = [x.flatten(1) if x.dim() > 1 else x.reshape(1, -1) for x in tensors]
        return (
            torch.cat([torch.linalg.vector_norm(x, dim=1, dtype=widest) for x in lines])
            .square_()
            .sum()
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rest, twice, roots = list(ctx.saved_tensors), 2 * gradients[0], []
        for count, dim in ctx.joined:
            roots.append(torch.cat(rest[:count], dim))
            rest = rest[count:]
        roots += rest
        found = (
            [x * twice for x in roots]
            if torch.is_grad_enabled()
            else torch._foreach_mul(roots, twice)
        )
        return (
            None,
            None,
            *[
                g if need else None
                for g, need in zip(found, ctx.needs_input_grad[2:], strict=True)
            ],
        )


class _MeanPlusNoise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mean: Tensor, scale: Tensor, noise: Tensor) -> Tensor:
        ctx.save_for_backward(noise)
        return torch.addcmul(mean, scale, noise)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (noise,) = ctx.saved_tensors
        return (
            gradients[0],
            gradients[0] * noise if ctx.needs_input_grad[1] else None,
            None,
        )
