"""What k-tied posteriors need without a matrix of scales: outputs drawn by the local estimator, and a sum in the KL.

    y = x W + b + sqrt(v) o noise,    v = (x o x) P Q^T + c,    noise made where it is used, from a seed
    sum of log(u v^T), with its gradients, in one pass that reads the thin factors alone

`GaussianPosterior._local` and `sums.sum_log_outer` define them in plain torch.

Sizes: M rows, in and out channels, q columns of P and Q; m x n a matrix of rank k.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slimbayes.kernels.launch import aligned, launch
from slimbayes.kernels.philox import noise
from slimbayes.kernels.scale import refuse_second_derivatives

LEAST = (
    torch.finfo(torch.float32).tiny * 1e4
)  # variance whose root still has a gradient
TALL, WIDE = 32, 64


def tied_local(
    x: Tensor,
    weight: Tensor,
    out_dim: int,
    bias: Tensor | None,
    p: Tensor,
    q: Tensor,
    c: Tensor | None,
    seed: Tensor,
    first_row: int,
    dtype: torch.dtype,
) -> Tensor:
    """Outputs (M, out) of the local estimator.

    Shape: x (M, in), contiguous; weight (out, in), or (in, out) if `out_dim` is 1; bias, c (out,); p (in, q), q (out,
    q), c float32; seed a whole number on x's device. The noise is that of rows from `first_row` on, the product is
    taken in `dtype`.
    """
    return _TiedLocal.apply(x, weight, bias, p, q, c, seed, (out_dim, first_row, dtype))


def sum_log_outer(u: Tensor, v: Tensor) -> Tensor:
    """Sum of log(u v^T): a scalar in float64. Shape: u (m, k), v (n, k), float32."""
    return _SumLogOuter.apply(u, v)


class _TiedLocal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        p: Tensor,
        q: Tensor,
        c: Tensor | None,
        seed: Tensor,
        how: tuple[int, int, torch.dtype],
    ) -> Tensor:
        out_dim, _, dtype = how
        rows, p, q = x.to(dtype), p.contiguous(), q.contiguous()
        low = weight.to(dtype)
        turned = low.t() if out_dim == 0 else low
        y = rows @ turned if bias is None else torch.addmm(bias.to(dtype), rows, turned)
        thin = torch.empty(
            (len(rows), p.shape[1]), dtype=torch.float32, device=x.device
        )
        grid = (-(-len(rows) // 8), 1, 1)
        launch(
            _thin,
            grid,
            (rows, p, thin, len(rows)),
            (rows.shape[1], p.shape[1], 8, 128),
            (dtype, *aligned(rows)),
        )
        grid = (-(-len(rows) // TALL), -(-y.shape[1] // WIDE), 1)
        constants = (y.shape[1], p.shape[1], c is not None, TALL, WIDE)
        launch(
            _spread,
            grid,
            (y, thin, q, c, seed, how[1], len(rows), LEAST),
            constants,
            (dtype, *aligned(y)),
        )
        ctx.save_for_backward(rows, low, p, q, c, seed, thin)
        ctx.how, ctx.types = (
            how,
            (x.dtype, weight.dtype, None if bias is None else bias.dtype),
        )
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        refuse_second_derivatives()
        x, low, p, q, c, seed, thin = ctx.saved_tensors
        (out_dim, first_row, dtype), (type_x, type_w, type_b) = ctx.how, ctx.types
        g, (m, k), (n_in, n_out) = (
            gradients[0].to(dtype).contiguous(),
            thin.shape,
            (x.shape[1], q.shape[0]),
        )
        need_x, need_w, need_b, need_p = ctx.needs_input_grad[:4]
        grid = (-(-m // TALL), -(-n_out // WIDE), 1)
        # Parts of the gradients of thin (k, M) by columns, and of q, c and the bias (k + 2, out) by rows.
        of_thin = torch.empty((grid[1], k, m), dtype=torch.float32, device=x.device)
        of_out = torch.empty(
            (grid[0], k + 2, n_out), dtype=torch.float32, device=x.device
        )
        launch(
            _spread_backward,
            grid,
            (g, thin, q, c, seed, of_thin, of_out, first_row, m, LEAST),
            (n_out, k, c is not None, TALL, WIDE),
            (dtype, *aligned(g)),
        )
        d_thin, d_out = of_thin.sum(0), of_out.sum(0)
        dx = dw = dp = None
        if need_w:
            dw = (g.t() @ x if out_dim == 0 else x.t() @ g).to(type_w)
        if need_x:
            dx = g @ (low if out_dim == 0 else low.t())
        if need_x or need_p:
            tiles = (-(-m // TALL), -(-n_in // WIDE), 1)
            parts = torch.empty(
                (tiles[0], k, n_in), dtype=torch.float32, device=x.device
            )
            launch(
                _thin_backward,
                tiles,
                (x, p, d_thin, dx, parts, m),
                (n_in, k, need_x, TALL, WIDE),
                (dtype, *aligned(x)),
            )
            dp = parts.sum(0).t()
        return (
            None if dx is None else dx.to(type_x),
            dw,
            d_out[k + 1].to(type_b) if need_b else None,
            dp,
            d_out[:k].t(),
            d_out[k] if c is not None else None,
            None,
            None,
        )


class _SumLogOuter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, v: Tensor) -> Tensor:
        u, v, (m, k), n = u.contiguous(), v.contiguous(), u.shape, v.shape[0]
        grid = (-(-m // TALL), -(-n // WIDE), 1)
        sums = torch.empty(grid[:2], dtype=torch.float32, device=u.device)
        of_u = torch.empty((grid[1], k, m), dtype=torch.float32, device=u.device)
        of_v = torch.empty((grid[0], k, n), dtype=torch.float32, device=u.device)
        launch(_logs, grid, (u, v, sums, of_u, of_v, m, n), (k, TALL, WIDE), ())
        ctx.save_for_backward(of_u.sum(0).t(), of_v.sum(0).t())
        return sums.sum(dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        refuse_second_derivatives()
        of_u, of_v = ctx.saved_tensors
        gradient = gradients[0].to(of_u.dtype)
        return gradient * of_u, gradient * of_v


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["p", "thin"])
def _thin(
    x,
    p,
    thin,
    M,
    IN: tl.constexpr,
    K: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
):  # type: ignore[no-untyped-def]
    """thin = (x o x) P, one column after the other: x is read again for each, from the cache as a rule."""
    row = tl.program_id(0) * TALL + tl.arange(0, TALL)
    for a in tl.static_range(K):
        total = tl.zeros((TALL, WIDE), tl.float32)
        for left in range(0, IN, WIDE):
            column = left + tl.arange(0, WIDE)
            mask = (row < M)[:, None] & (column < IN)[None, :]
            value = tl.load(
                x + row.to(tl.int64)[:, None] * IN + column[None, :],
                mask=mask,
                other=0.0,
            ).to(tl.float32)
            total += (
                value
                * value
                * tl.load(p + column * K + a, mask=column < IN, other=0.0)[None, :]
            )
        tl.store(thin + row * K + a, tl.sum(total, 1), mask=row < M)


@triton.jit(
    do_not_specialize=["M"], do_not_specialize_on_alignment=["p", "d_thin", "parts"]
)
def _thin_backward(  # type: ignore[no-untyped-def]
    x, p, d_thin, dx, parts, M, IN: tl.constexpr, K: tl.constexpr, DX: tl.constexpr, TALL: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TALL + tl.arange(0, TALL)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    here, there = row < M, column < IN
    mask, at = (
        here[:, None] & there[None, :],
        row.to(tl.int64)[:, None] * IN + column[None, :],
    )
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    slope = tl.zeros((TALL, WIDE), tl.float32)
    for a in tl.static_range(K):
        given = tl.load(d_thin + a * M + row, mask=here, other=0.0)[:, None]
        slope += given * tl.load(p + column * K + a, mask=there, other=0.0)[None, :]
        tl.store(
            parts + (tl.program_id(0).to(tl.int64) * K + a) * IN + column,
            tl.sum(value * value * given, 0),
            mask=there,
        )
    if DX:
        before = tl.load(dx + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(
            dx + at, (before + 2.0 * value * slope).to(dx.dtype.element_ty), mask=mask
        )


@triton.jit
def _variance(
    thin,
    q,
    c,
    row,
    column,
    M,
    N,
    K: tl.constexpr,
    SHIFTED: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
):  # type: ignore[no-untyped-def]
    total = tl.zeros((TALL, WIDE), tl.float32)
    if SHIFTED:
        total += tl.load(c + column, mask=column < N, other=0.0)[None, :]
    for a in tl.static_range(K):
        left = tl.load(thin + row * K + a, mask=row < M, other=0.0)[:, None]
        total += left * tl.load(q + column * K + a, mask=column < N, other=0.0)[None, :]
    return total


@triton.jit(
    do_not_specialize=["first_row", "M", "least"],
    do_not_specialize_on_alignment=["thin", "q", "c", "seed"],
)
def _spread(  # type: ignore[no-untyped-def]
    y, thin, q, c, seed, first_row, M, least, OUT: tl.constexpr, K: tl.constexpr, SHIFTED: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """y += sqrt(variance) * noise, in place."""
    row = tl.program_id(0) * TALL + tl.arange(0, TALL)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    eight = tl.program_id(1) * (WIDE // 8) + tl.arange(0, WIDE // 8)
    root = tl.sqrt(
        tl.maximum(
            _variance(thin, q, c, row, column, M, OUT, K, SHIFTED, TALL, WIDE), least
        )
    )
    mask, at = (
        (row < M)[:, None] & (column < OUT)[None, :],
        row.to(tl.int64)[:, None] * OUT + column[None, :],
    )
    value = tl.load(y + at, mask=mask, other=0.0).to(tl.float32) + root * noise(
        tl.load(seed), row + first_row, eight, 0, 1
    )
    tl.store(y + at, value.to(y.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["first_row", "M", "least"],
    do_not_specialize_on_alignment=["thin", "q", "c", "seed", "of_thin", "of_out"],
)
def _spread_backward(  # type: ignore[no-untyped-def]
    g, thin, q, c, seed, of_thin, of_out, first_row, M, least, OUT: tl.constexpr, K: tl.constexpr,
    SHIFTED: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TALL + tl.arange(0, TALL)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    eight = tl.program_id(1) * (WIDE // 8) + tl.arange(0, WIDE // 8)
    here, there = row < M, column < OUT
    variance = _variance(thin, q, c, row, column, M, OUT, K, SHIFTED, TALL, WIDE)
    mask, at = (
        here[:, None] & there[None, :],
        row.to(tl.int64)[:, None] * OUT + column[None, :],
    )
    gradient = tl.load(g + at, mask=mask, other=0.0).to(tl.float32)
    slope = (
        0.5
        * gradient
        * noise(tl.load(seed), row + first_row, eight, 0, 1)
        / tl.sqrt(tl.maximum(variance, least))
    )
    slope = tl.where(variance > least, slope, 0.0)
    to = of_out + tl.program_id(0).to(tl.int64) * (K + 2) * OUT + column
    for a in tl.static_range(K):
        right = tl.load(q + column * K + a, mask=there, other=0.0)[None, :]
        tl.store(
            of_thin + (tl.program_id(1).to(tl.int64) * K + a) * M + row,
            tl.sum(slope * right, 1),
            mask=here,
        )
        left = tl.load(thin + row * K + a, mask=here, other=0.0)[:, None]
        tl.store(to + a * OUT, tl.sum(slope * left, 0), mask=there)
    tl.store(to + K * OUT, tl.sum(slope, 0), mask=there)
    tl.store(to + (K + 1) * OUT, tl.sum(gradient, 0), mask=there)


@triton.jit(
    do_not_specialize=["M", "N"],
    do_not_specialize_on_alignment=["u", "v", "sums", "of_u", "of_v"],
)
def _logs(
    u,
    v,
    sums,
    of_u,
    of_v,
    M,
    N,
    K: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
):  # type: ignore[no-untyped-def]
    row = tl.program_id(0) * TALL + tl.arange(0, TALL)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    here, there = row < M, column < N
    mask = here[:, None] & there[None, :]
    product = tl.where(mask, 0.0, 1.0)
    for a in tl.static_range(K):
        left = tl.load(u + row * K + a, mask=here, other=0.0)[:, None]
        product += left * tl.load(v + column * K + a, mask=there, other=0.0)[None, :]
    inverse = tl.where(mask, 1.0 / product, 0.0)
    tl.store(
        sums + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1),
        tl.sum(tl.sum(tl.log(product), 1), 0),
    )
    for a in tl.static_range(K):
        right = tl.load(v + column * K + a, mask=there, other=0.0)[None, :]
        tl.store(
            of_u + (tl.program_id(1) * K + a) * M + row,
            tl.sum(inverse * right, 1),
            mask=here,
        )
        left = tl.load(u + row * K + a, mask=here, other=0.0)[:, None]
        tl.store(
            of_v + (tl.program_id(0) * K + a) * N + column,
            tl.sum(inverse * left, 0),
            mask=there,
        )
