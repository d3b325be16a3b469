"""y = x * f + b in one pass over the activations, and the gradients of x, f and b in another.

The factors f differ between blocks of rows (`loc` alone), or between single rows, as loc + scale * noise. Such noise is
as large as the activations: it is made where it is used, from a seed, and again in the backward pass, and never stored.
Each program of the backward pass adds up some rows of one block; torch adds the parts, in a fixed order.

Sizes: M rows, C channels, B blocks of rows: row i belongs to block i * B // M.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slimbayes.kernels.launch import aligned, launch
from slimbayes.kernels.philox import drawn, noise

POINT, NORMAL, CAUCHY, LOGNORMAL = 0, 1, 2, 3
FAMILIES = {"Point": POINT, "Normal": NORMAL, "Cauchy": CAUCHY, "LogNormal": LOGNORMAL}
BUSY = 1024  # programs that keep a GPU busy


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
    if any(
        t is not None and t.stride(1) != 1 and t.shape[1] > 1
        for t in (x, loc, scale, bias)
    ):
        raise ValueError("scaled needs columns that lie side by side")
    return _Scaled.apply(x, loc, scale, bias, seed, *how, dtype or x.dtype)


def scale_rows(
    x: Tensor,
    loc: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    how: tuple[Any, ...],
    dtype: torch.dtype,
) -> Tensor:
    """The result of `scaled`, by the kernel alone: autograd knows nothing of it."""
    y = _room(x, dtype)
    if x.shape[0]:
        family, clip, salt, first_row = how
        grid, rows, sizes, constants, warps = _plan(
            x, loc.shape[0], False, family != POINT
        )
        launch(
            _forward,
            grid,
            (
                x,
                loc,
                scale,
                bias,
                seed,
                y,
                salt,
                first_row,
                clip,
                rows,
                *sizes,
                *_steps(loc, scale, bias),
            ),
            (*constants, family, bias is not None),
            (x.dtype, loc.dtype, dtype, bias is not None and bias.dtype, *aligned(x)),
            warps,
        )
    return y


def gradients_of_rows(
    g: Tensor,
    x: Tensor,
    loc: Tensor,
    scale: Tensor | None,
    seed: Tensor | None,
    how: tuple[Any, ...],
    bias: tuple[int, torch.dtype] | None,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of x, loc, scale and bias, those that are needed, from that of the result.

    Shape: g (M, C), columns side by side; `bias` has the number of its lines, and its type.
    """
    need_x, need_loc, need_scale, need_bias = needs
    grid, rows, sizes, constants, warps = _plan(x, loc.shape[0], True, how[0] != POINT)
    dx = _room(x, x.dtype) if need_x else None
    count = need_loc + need_scale + need_bias
    # Sums that are needed lie in a row: of loc, of scale, of bias.
    parts = torch.empty(
        (count, loc.shape[0], grid[1], x.shape[1]), dtype=torch.float32, device=x.device
    )
    if x.shape[0]:
        family, clip, salt, first_row = how
        steps = _steps(loc, scale, None)
        launch(
            _backward,
            grid,
            (
                g,
                x,
                loc,
                scale,
                seed,
                dx,
                parts,
                salt,
                first_row,
                clip,
                rows,
                *sizes,
                *steps,
                grid[1],
            ),
            (*constants, family, need_x, need_loc, need_scale, need_bias),
            (g.dtype, x.dtype, loc.dtype, *aligned(x, g)),
            warps,
        )
    else:
        parts.zero_()
    sums = iter((parts.sum(2) if grid[1] > 1 else parts.squeeze(2)).unbind())
    dloc, dscale = (
        next(sums).to(loc.dtype) if need else None for need in (need_loc, need_scale)
    )
    dbias = None
    if need_bias and bias is not None:
        dbias = (
            next(sums).to(bias[1])
            if bias[0] > 1
            else next(sums).sum(0, keepdim=True).to(bias[1])
        )
    return [dx, dloc, dscale, dbias]


def refuse_second_derivatives() -> None:
    """To be called in a backward pass, whose kernels autograd cannot see through."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "slimbayes' kernels have no second derivatives, which create_graph=True asks for: call "
            "slimbayes.kernels.disable() first."
        )


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        loc: Tensor,
        scale: Tensor | None,
        bias: Tensor | None,
        seed: Tensor | None,
        family: int,
        clip: float,
        salt: int,
        first_row: int,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(x, loc, scale, seed)
        ctx.how, ctx.bias = (
            (family, clip, salt, first_row),
            None if bias is None else (bias.shape[0], bias.dtype),
        )
        return scale_rows(x, loc, scale, bias, seed, ctx.how, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        refuse_second_derivatives()
        x, loc, scale, seed = ctx.saved_tensors
        g = gradients[0].contiguous()
        found = gradients_of_rows(
            g, x, loc, scale, seed, ctx.how, ctx.bias, ctx.needs_input_grad[:4]
        )
        return *found, None, None, None, None, None, None


def _room(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of x's shape, row after row, that holds nothing yet: the quick way takes half of the time."""
    return (
        torch.empty_like(x, dtype=dtype)
        if x.is_contiguous()
        else torch.empty(x.shape, dtype=dtype, device=x.device)
    )


def _steps(*lines: Tensor | None) -> list[int]:
    """How far apart the lines of two blocks lie; a single line serves all."""
    return [
        0 if line is None or line.shape[0] == 1 else line.stride(0) for line in lines
    ]


def _tile(channels: int, sums: bool, noisy: bool) -> tuple[int, int, int]:
    """Rows and columns of a tile, and warps: the fastest of a sweep on an H200. Sums want smaller ones, for their
    registers. A thread makes noise for eight columns: of these tiles it also has eight of x, others would swap them.
    """
    wide = 32 if channels <= 32 else 64
    if sums:
        return 1024 // wide, wide, 4
    if channels <= 64:
        return 32, wide, 4
    return (16, 256, 4) if 128 < channels <= 256 and not noisy else (32, 128, 8)


Plan = tuple[tuple[int, int, int], int, tuple[int, int], tuple[int, ...], int]


def _planned(
    rows: int, channels: int, step: int, count: int, sums: bool, noisy: bool
) -> Plan:
    """Grid (blocks of rows, chunks of a block, tiles of columns), rows of a chunk, sizes (M, B), constants, and warps.

    There are as many chunks as keep a GPU busy; without any there is nothing to add up afterwards.
    """
    tall, wide, warps = _tile(channels, sums, noisy)
    tiles, largest = -(-channels // wide), -(-rows // count)
    busy = BUSY // 2 if noisy else BUSY  # making noise, half as many do
    chunks = max(1, min(-(-largest // tall), -(-busy // (count * tiles))))
    return (
        (count, chunks, tiles),
        -(-largest // chunks),
        (rows, count),
        (channels, step, tall, wide),
        warps,
    )


_KEPT = lru_cache(maxsize=1024)(
    _planned
)  # a launch asks each time, and arithmetic in Python costs as much as it


def _plan(x: Tensor, count: int, sums: bool, noisy: bool) -> Plan:
    how = x.shape[0], x.shape[1], x.stride(0), count, sums, noisy
    return (
        _planned(*how) if torch.compiler.is_compiling() else _KEPT(*how)
    )  # sizes may be symbols


_NUMBERS = [
    "salt",
    "first_row",
    "clip",
    "rows",
    "M",
    "B",
    "loc_step",
    "scale_step",
    "bias_step",
    "chunks",
]
_LINES = ["loc", "scale", "bias", "seed"]


@triton.jit(do_not_specialize=_NUMBERS[:-1], do_not_specialize_on_alignment=_LINES)
def _forward(  # type: ignore[no-untyped-def]
    x, loc, scale, bias, seed, y, salt, first_row, clip, rows, M, B, loc_step, scale_step, bias_step,
    C: tl.constexpr, X_STEP: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, FAMILY: tl.constexpr,
    BIASED: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(
        tl.int64
    )  # times M, and lines times their step, may pass 2^31
    start = (block * M + B - 1) // B + tl.program_id(1) * rows
    stop = tl.minimum(((block + 1) * M + B - 1) // B, start + rows)
    column = tl.program_id(2) * WIDE + tl.arange(0, WIDE)
    eight = tl.program_id(2) * (WIDE // 8) + tl.arange(0, WIDE // 8)
    there = column < C
    middle = tl.load(loc + block * loc_step + column, mask=there, other=0.0).to(
        tl.float32
    )[None, :]
    if FAMILY != 0:
        key = tl.load(seed)
        width = tl.load(scale + block * scale_step + column, mask=there, other=0.0).to(
            tl.float32
        )[None, :]
    if BIASED:
        shift = tl.load(bias + block * bias_step + column, mask=there, other=0.0).to(
            tl.float32
        )[None, :]
    for top in range(start, stop, TALL):
        row = top + tl.arange(0, TALL)
        mask = (row < stop)[:, None] & there[None, :]
        at = row[:, None]
        value = tl.load(x + at * X_STEP + column[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        factor = middle
        if FAMILY != 0:
            numbers = noise(key, (row + first_row).to(tl.int32), eight, salt, FAMILY)
            _free, factor = drawn(middle, width, numbers, clip, FAMILY)
        value *= factor
        if BIASED:
            value += shift
        tl.store(y + at * C + column[None, :], value.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_LINES)
def _backward(  # type: ignore[no-untyped-def]
    g, x, loc, scale, seed, dx, parts, salt, first_row, clip, rows, M, B, loc_step, scale_step, bias_step, chunks,
    C: tl.constexpr, X_STEP: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, FAMILY: tl.constexpr,
    DX: tl.constexpr, LOC: tl.constexpr, SCALE: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(
        tl.int64
    )  # times M, and lines times their step, may pass 2^31
    start = (block * M + B - 1) // B + tl.program_id(1) * rows
    stop = tl.minimum(((block + 1) * M + B - 1) // B, start + rows)
    column = tl.program_id(2) * WIDE + tl.arange(0, WIDE)
    eight = tl.program_id(2) * (WIDE // 8) + tl.arange(0, WIDE // 8)
    there = column < C
    middle = tl.load(loc + block * loc_step + column, mask=there, other=0.0).to(
        tl.float32
    )[None, :]
    if FAMILY != 0:
        key = tl.load(seed)
        width = tl.load(scale + block * scale_step + column, mask=there, other=0.0).to(
            tl.float32
        )[None, :]
    sum_loc = tl.zeros((TALL, WIDE), tl.float32)
    sum_scale = tl.zeros((TALL, WIDE), tl.float32)
    sum_bias = tl.zeros((TALL, WIDE), tl.float32)
    for top in range(start, stop, TALL):
        row = top + tl.arange(0, TALL)
        mask = (row < stop)[:, None] & there[None, :]
        at = row[:, None]
        gradient = tl.load(g + at * C + column[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        if LOC or SCALE:  # before anything is stored: nothing is loaded across a store
            product = gradient * tl.load(
                x + at * X_STEP + column[None, :], mask=mask, other=0.0
            ).to(tl.float32)
        factor = middle
        if FAMILY != 0:
            numbers = noise(key, (row + first_row).to(tl.int32), eight, salt, FAMILY)
            free, factor = drawn(middle, width, numbers, clip, FAMILY)
        if DX:
            tl.store(
                dx + at * C + column[None, :],
                (gradient * factor).to(dx.dtype.element_ty),
                mask=mask,
            )
        if LOC or SCALE:
            if FAMILY == 3:
                product *= free
            if FAMILY != 0:
                product = tl.where(
                    free == factor, product, 0.0
                )  # what was clipped has no slope
                sum_scale += product * numbers
            sum_loc += product
        if BIASED:
            sum_bias += gradient
    to = (block * chunks + tl.program_id(1)) * C + column
    apart = (
        tl.cast(B, tl.int64) * chunks * C
    )  # B.to: torch's look at what kernels write to has a plain number here
    if LOC:
        tl.store(parts + to, tl.sum(sum_loc, 0), mask=there)
        to += apart
    if SCALE:
        tl.store(parts + to, tl.sum(sum_scale, 0), mask=there)
        to += apart
    if BIASED:
        tl.store(parts + to, tl.sum(sum_bias, 0), mask=there)
