"""y = x * f + b in one pass over the activations, and the gradients of x, f and b in another.

The factors f differ between blocks of rows (`loc` alone), or between single rows, as loc + scale * noise. Such noise is
as large as the activations: it is made where it is used, from a seed, and again in the backward pass, and never stored.

    numbers     Philox keyed by the seed, with the counter (column / 4, row, salt), whose four outputs serve four
                columns side by side. The noise of an element does not depend on how the work is cut.
    sums        each program adds up some rows of one block; the parts are added by torch, in a fixed order.

Sizes: M rows, C channels, B blocks of rows: row i belongs to block i * B // M.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

POINT, NORMAL, CAUCHY, LOGNORMAL = 0, 1, 2, 3
FAMILIES = {"Point": POINT, "Normal": NORMAL, "Cauchy": CAUCHY, "LogNormal": LOGNORMAL}
CHUNK = 64  # rows of one program


class How(NamedTuple):
    """What is fixed about a call: family of the factors, clip (inf for none), salt and first row of their noise."""

    family: int = POINT
    clip: float = float("inf")
    salt: int = 0
    first_row: int = 0


def scaled(
    x: Tensor,
    loc: Tensor,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    seed: Tensor | None = None,
    how: How = How(),  # noqa: B008 (immutable)
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x * f + bias.

    Shape: x (M, C); loc, scale (B, C); bias (B, C) or (1, C); seed a whole number on x's device. Columns must lie side
    by side. The result has x's type or `dtype`.
    """
    return _Scaled.apply(x, loc, scale, bias, seed, how, dtype or x.dtype)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        loc: Tensor,
        scale: Tensor | None,
        bias: Tensor | None,
        seed: Tensor | None,
        how: How,
        dtype: torch.dtype,
    ) -> Tensor:
        y = torch.empty(x.shape, dtype=dtype, device=x.device)
        if y.numel():
            grid, sizes, blocks = _plan(x, loc)
            _forward[grid](
                x, loc, loc if scale is None else scale, loc if bias is None else bias, loc if seed is None else seed,
                y, how.salt, how.first_row, how.clip, *sizes, x.stride(0), loc.stride(0), _step(scale), _step(bias),
                FAMILY=how.family, BIASED=bias is not None, **blocks,
            )  # fmt: skip
        ctx.save_for_backward(x, loc, scale, seed)
        ctx.how, ctx.bias = how, None if bias is None else (bias.shape, bias.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, loc, scale, seed = ctx.saved_tensors
        need_x, need_loc, need_scale, need_bias = ctx.needs_input_grad[:4]
        g = gradients[0].contiguous()
        (blocks_of_rows, chunks, tiles), sizes, blocks = _plan(x, loc)
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if need_x else g
        parts = torch.empty(3, loc.shape[0], chunks, x.shape[1], dtype=torch.float32, device=x.device)
        if x.numel():
            _backward[blocks_of_rows, chunks, tiles](
                g, x, loc, loc if scale is None else scale, loc if seed is None else seed, dx, parts, ctx.how.salt,
                ctx.how.first_row, ctx.how.clip, *sizes, x.stride(0), loc.stride(0), _step(scale), chunks,
                FAMILY=ctx.how.family, DX=need_x, FACTORS=need_loc or need_scale, BIASED=need_bias, **blocks,
            )  # fmt: skip
        else:
            parts.zero_()
        dloc, dscale, dbias = (parts.sum(2) if chunks > 1 else parts.squeeze(2)).unbind(0)
        if need_bias:
            shape, dtype = ctx.bias
            dbias = (dbias.sum(0, keepdim=True) if shape[0] == 1 else dbias).to(dtype)
        return (
            dx if need_x else None,
            dloc.to(loc.dtype) if need_loc else None,
            dscale.to(loc.dtype) if need_scale else None,
            dbias if need_bias else None,
            None,
            None,
            None,
        )


def _step(lines: Tensor | None) -> int:
    """How far apart the lines of two blocks lie; a single line serves all."""
    return 0 if lines is None or lines.shape[0] == 1 else lines.stride(0)


def _plan(x: Tensor, loc: Tensor) -> tuple[tuple[int, int, int], tuple[int, int, int], dict[str, int]]:
    """Grid (blocks of rows, chunks of a block, tiles of columns), sizes (M, B, C), and sizes of tiles."""
    (rows, channels), count = x.shape, loc.shape[0]
    wide = 32 if channels <= 32 else 64 if channels <= 64 else 128
    largest = -(-rows // count)
    chunks = max(-(-largest // CHUNK), 1)
    return ((count, chunks, -(-channels // wide)), (rows, count, channels), {"ROWS": CHUNK, "TALL": 8, "WIDE": wide})


@triton.jit
def _quantile(u):  # type: ignore[no-untyped-def]
    """Of a standard Cauchy: tan(pi (u - 1/2))."""
    angle = 3.141592653589793 * tl.maximum(u, 2.3e-10)
    return -tl.cos(angle) / tl.maximum(tl.sin(angle), 1e-30)


@triton.jit
def _noise(key, row, quad, salt, FAMILY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Standard numbers for a tile: rows by four times as many columns as there are quads."""
    zero = (row[:, None] + quad[None, :]) * 0
    a, b, c, d = tl.philox(key, zero + quad[None, :], zero + row[:, None], zero + salt, zero)
    a, b = tl.uint_to_uniform_float(a), tl.uint_to_uniform_float(b)
    c, d = tl.uint_to_uniform_float(c), tl.uint_to_uniform_float(d)
    if FAMILY == 2:
        a, b, c, d = _quantile(a), _quantile(b), _quantile(c), _quantile(d)
    else:
        a, b = tl.pair_uniform_to_normal(a, b)
        c, d = tl.pair_uniform_to_normal(c, d)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (row.shape[0], 4 * quad.shape[0]))


@triton.jit
def _drawn(loc, scale, noise, clip, FAMILY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Factors, and their derivatives by loc and by scale."""
    value = loc + scale * noise
    by_loc = value * 0.0 + 1.0
    if FAMILY == 3:
        value = tl.exp(value)
        by_loc = value
    inside = (value >= -clip) & (value <= clip)
    by_loc = tl.where(inside, by_loc, 0.0)
    return tl.minimum(tl.maximum(value, -clip), clip), by_loc, tl.where(inside, by_loc * noise, 0.0)


@triton.jit(do_not_specialize=["salt", "first_row"])
def _forward(  # type: ignore[no-untyped-def]
    x, loc, scale, bias, seed, y, salt, first_row, clip, M, B, C, x_step, loc_step, scale_step, bias_step,
    FAMILY: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    start = (block * M + B - 1) // B + tl.program_id(1) * ROWS
    stop = tl.minimum(((block + 1) * M + B - 1) // B, start + ROWS)
    column = tl.program_id(2) * WIDE + tl.arange(0, WIDE)
    quad = tl.program_id(2) * (WIDE // 4) + tl.arange(0, WIDE // 4)
    there = column < C
    middle = tl.load(loc + block * loc_step + column, mask=there, other=0.0).to(tl.float32)[None, :]
    if FAMILY != 0:
        key = tl.load(seed)
        width = tl.load(scale + block * scale_step + column, mask=there, other=0.0).to(tl.float32)[None, :]
    if BIASED:
        shift = tl.load(bias + block * bias_step + column, mask=there, other=0.0).to(tl.float32)[None, :]
    for top in range(start, stop, TALL):
        row = top + tl.arange(0, TALL)
        mask = (row < stop)[:, None] & there[None, :]
        factor = middle
        if FAMILY != 0:
            factor, _by_loc, _by_scale = _drawn(
                middle, width, _noise(key, row + first_row, quad, salt, FAMILY), clip, FAMILY
            )
        at = row.to(tl.int64)[:, None]
        value = tl.load(x + at * x_step + column[None, :], mask=mask, other=0.0).to(tl.float32) * factor
        if BIASED:
            value += shift
        tl.store(y + at * C + column[None, :], value.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["salt", "first_row"])
def _backward(  # type: ignore[no-untyped-def]
    g, x, loc, scale, seed, dx, parts, salt, first_row, clip, M, B, C, x_step, loc_step, scale_step, chunks,
    FAMILY: tl.constexpr, DX: tl.constexpr, FACTORS: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    start = (block * M + B - 1) // B + tl.program_id(1) * ROWS
    stop = tl.minimum(((block + 1) * M + B - 1) // B, start + ROWS)
    column = tl.program_id(2) * WIDE + tl.arange(0, WIDE)
    quad = tl.program_id(2) * (WIDE // 4) + tl.arange(0, WIDE // 4)
    there = column < C
    middle = tl.load(loc + block * loc_step + column, mask=there, other=0.0).to(tl.float32)[None, :]
    if FAMILY != 0:
        key = tl.load(seed)
        width = tl.load(scale + block * scale_step + column, mask=there, other=0.0).to(tl.float32)[None, :]
    sum_loc = tl.zeros((TALL, WIDE), tl.float32)
    sum_scale = tl.zeros((TALL, WIDE), tl.float32)
    sum_bias = tl.zeros((TALL, WIDE), tl.float32)
    for top in range(start, stop, TALL):
        row = top + tl.arange(0, TALL)
        mask = (row < stop)[:, None] & there[None, :]
        at = row.to(tl.int64)[:, None]
        gradient = tl.load(g + at * C + column[None, :], mask=mask, other=0.0).to(tl.float32)
        factor = middle
        if FAMILY != 0:
            factor, by_loc, by_scale = _drawn(
                middle, width, _noise(key, row + first_row, quad, salt, FAMILY), clip, FAMILY
            )
        if DX:
            tl.store(dx + at * C + column[None, :], (gradient * factor).to(dx.dtype.element_ty), mask=mask)
        if FACTORS:
            product = gradient * tl.load(x + at * x_step + column[None, :], mask=mask, other=0.0).to(tl.float32)
            if FAMILY != 0:
                sum_loc += product * by_loc
                sum_scale += product * by_scale
            else:
                sum_loc += product
        if BIASED:
            sum_bias += gradient
    to = (block * chunks + tl.program_id(1)) * C + column
    apart = B * chunks * C
    if FACTORS:
        tl.store(parts + to, tl.sum(sum_loc, 0), mask=there)
        if FAMILY != 0:
            tl.store(parts + apart + to, tl.sum(sum_scale, 0), mask=there)
    if BIASED:
        tl.store(parts + 2 * apart + to, tl.sum(sum_bias, 0), mask=there)
