"""Activations and factors that differ between rows. Where the rows lie was proven; here they are only met.

Sizes: n draws of the pass (one for each block of rows, or for each row), R rows of the pass, C channels.
"""

import operator
from typing import Any

import torch
from torch import Tensor

from slimbayes.engine.blocks import block_of_row, block_sizes, same
from slimbayes.engine.fused import Seeded, dense, fused
from slimbayes.engine.passes import Pass, Unproven
from slimbayes.kernels import LARGE, ready


def spread(x: Tensor, rows: int, dim: int) -> tuple[Tensor, int]:
    """x, and the dimension of its rows; a single row that stands for all (dim -1) is repeated for each of them."""
    if dim != -1:
        return x, dim
    return x.expand(rows, *x.shape[1:]), 0


def apply_rows(
    combine: Any,
    x: Tensor,
    factor: Tensor | Seeded,
    current: Pass,
    dim: int,
    channel_dim: int,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Combine activations with factors that differ between rows, then add a bias.

    Shape: x has its rows along `dim` and its channels along `channel_dim`; factor is (n, channels), bias the same or
    (1, channels). A layer may see more rows than the pass has (windows or time steps folded into the batch): each row
    of the pass then owns a block of them. The result may come in `dtype`, where that costs nothing.
    """
    if isinstance(factor, Seeded):
        x, dim = spread(x, current.rows, dim)
        if x.dim() == 2 and dim == 0 and x.shape[0] == factor.rows and x.stride(1) == 1:
            return factor.meet(x, bias, dtype)
        if bias is not None and bias.shape[0] > 1:
            bias = bias[block_of_row(factor.rows, bias.shape[0], bias.device)]
        return apply_rows(combine, x, factor.lines(), current, dim, channel_dim, bias, dtype)
    done = fused(combine, x, factor, dim, channel_dim, bias, dtype or x.dtype)
    if done is not None:
        return done
    lines = [f if f.dtype == x.dtype else f.to(x.dtype) for f in (factor, bias) if f is not None]
    if factor.shape[0] == 1:
        at = 0 if x.dim() < 2 or channel_dim % x.dim() else 1
        return _combined(combine, x, [_place(f, x.dim(), at, channel_dim) if x.dim() > 1 else f[0] for f in lines])
    x, dim = spread(x, current.rows, dim)
    rows, seen, count = current.rows, x.shape[dim], factor.shape[0]
    if torch.compiler.is_compiling() and not (same(rows % count, 0) and same(seen % count, 0)):
        # Cutting x into blocks divides its symbolic size anew in every layer, and the compiler's algebra explodes; a
        # lookup does not, but its gradient is a scatter.
        if not same(count, rows):
            lines = _looked_up(lines, block_of_row(rows, count, factor.device))
        if not same(seen, rows):
            lines = _looked_up(lines, torch.arange(seen, device=factor.device) // (seen // rows))
        return _combined(combine, x, [_place(f, x.dim(), dim, channel_dim) for f in lines])
    if rows % count:
        lines, count = _looked_up(lines, block_of_row(rows, count, factor.device)), rows
    if same(seen, count):
        return _combined(combine, x, [_place(f, x.dim(), dim, channel_dim) for f in lines])
    if seen % count:
        raise Unproven(f"a layer met {seen} rows, which {count} draws cannot share")
    if torch.compiler.is_compiling() and x.dim() > 2:
        # A factor's gradient as a sum over positions, then over rows: both at once leave a GPU too few sums to do.
        lines = [f if f.shape[0] == 1 else f.unsqueeze(1).expand(-1, seen // count, -1).flatten(0, 1) for f in lines]
        return _combined(combine, x, [_place(f, x.dim(), dim, channel_dim) for f in lines])
    channel_dim = channel_dim + 1 if channel_dim > dim else channel_dim
    blocks = x.unflatten(dim, (count, seen // count))
    # Back to the very shape of x: flattening would nest a division in every layer's symbolic shape when it is compiled.
    placed = [_place(f, blocks.dim(), dim, channel_dim) for f in lines]
    return _combined(combine, blocks, placed).reshape(x.shape)


def dense_rows(linear: Any, x: Tensor, s: Any, r: Any, bias: Tensor | None, current: Pass) -> Tensor | None:
    """linear.op(x o s) o r + bias, as `apply_rows` before and after, for rows along the first dimension and one matrix
    along the last; None where that takes a closer look.
    """
    if torch.compiler.is_compiling() or linear.batch_dim != 0:
        return None
    count, seen = s.shape[0], x.shape[0]
    if current.rows % count or seen % count or not seen:
        return None
    if ready(x) and (isinstance(s, Seeded) or x.numel() >= LARGE):
        return dense(x, linear.weight, linear.out_dim, s, r, bias)
    if isinstance(s, Seeded):
        return None
    shape = x.shape if seen != count else None
    if shape is not None:
        x = x.view(count, seen // count, *shape[1:])
    lines = [s, r] if bias is None else [s, r, bias]
    for _ in range(x.dim() - 2):
        lines = [line.unsqueeze(1) for line in lines]
    y = linear.op(x * (lines[0] if s.dtype == x.dtype else lines[0].to(x.dtype)), linear.weight, None)
    if y.dtype != r.dtype:
        lines = [line.to(y.dtype) for line in lines]
    if bias is not None and torch.is_grad_enabled():  # autograd's own addcmul takes a product more in backward
        y = y * lines[1] + lines[2]
    else:
        y = _combined(operator.mul, y, lines[1:])
    return y if shape is None else y.reshape(*shape[:-1], y.shape[-1])


def _looked_up(lines: list[Tensor], index: Tensor) -> list[Tensor]:
    return [line if line.shape[0] == 1 else line[index] for line in lines]


def _combined(combine: Any, x: Tensor, placed: list[Tensor]) -> Tensor:
    if len(placed) == 1:
        return combine(x, placed[0])
    factor, bias = placed
    return torch.addcmul(bias, x, factor) if combine is operator.mul else combine(x, factor) + bias


def _place(factor: Tensor, ndim: int, dim: int, channel_dim: int) -> Tensor:
    """Reshape (n, channels) so that it broadcasts against x."""
    if ndim == 2 and dim == 0:
        return factor
    shape = [1] * ndim
    shape[dim], shape[channel_dim] = factor.shape
    return factor.view(shape) if factor.is_contiguous() else factor.reshape(shape)


def per_row(factor: Tensor, seen: int, current: Pass) -> Tensor:
    """Repeat the lines of factor (n, C), one for each draw of the pass, so that each of the `seen` rows has its own."""
    count, rows = factor.shape[0], current.rows
    if count == 1:
        return factor.expand(seen, -1)
    if rows % count:
        factor = factor[block_of_row(rows, count, factor.device)]
    return factor.repeat_interleave(seen // factor.shape[0], 0) if seen != factor.shape[0] else factor


def line_of_row(lines: int, seen: int, current: Pass, device: torch.device) -> Tensor:
    """Which of n lines, one for each draw, belongs to each of the `seen` rows: (seen,)."""
    return block_of_row(current.rows, lines, device).repeat_interleave(seen // current.rows)


def sizes_of_blocks(seen: int, blocks: int, current: Pass) -> list[int]:
    """How many of the `seen` rows each block has. A row of the pass may have become several: they stay together.

    >>> sizes_of_blocks(6, 2, Pass(2, 3)), sizes_of_blocks(6, 2, Pass(2, 6))
    ([4, 2], [3, 3])
    """
    if blocks == 1:
        return [seen]
    return [seen // max(current.rows, 1) * size for size in block_sizes(current.rows, blocks)]
