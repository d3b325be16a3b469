"""Activations and factors that differ between rows. Where the rows lie was proven; here they are only met.

Sizes: n draws of the pass (one for each block of rows, or for each row), R rows of the pass, C channels.
"""

from typing import Any

import torch
from torch import Tensor

from slimbayes.engine.passes import Pass, Unproven, block_of_row, block_sizes, same


def spread(x: Tensor, rows: int, dim: int) -> tuple[Tensor, int]:
    """x, and the dimension of its rows; a single row that stands for all (dim -1) is repeated for each of them."""
    if dim != -1:
        return x, dim
    return x.expand(rows, *x.shape[1:]), 0


def apply_rows(combine: Any, x: Tensor, factor: Tensor, current: Pass, dim: int, channel_dim: int) -> Tensor:
    """Combine activations with factors that differ between rows.

    Shape: x has its rows along `dim` and its channels along `channel_dim`; factor is (n, channels). A layer may see
    more rows than the pass has (windows or time steps folded into the batch): each row of the pass then owns a block of
    them.
    """
    factor = factor.to(x.dtype)
    if factor.shape[0] == 1:
        return combine(
            x, _place(factor, x.dim(), 0 if channel_dim % x.dim() else 1, channel_dim) if x.dim() > 1 else factor[0]
        )
    x, dim = spread(x, current.rows, dim)
    rows, seen = current.rows, x.shape[dim]
    if torch.compiler.is_compiling():
        # Cutting x into blocks divides its symbolic size anew in every layer, and the compiler's algebra explodes; a
        # lookup does not.
        if not same(factor.shape[0], rows):
            factor = factor[block_of_row(rows, factor.shape[0], factor.device)]
        if not same(seen, rows):
            factor = factor[torch.arange(seen, device=factor.device) // (seen // rows)]
        return combine(x, _place(factor, x.dim(), dim, channel_dim))
    if rows % factor.shape[0]:
        factor = factor[block_of_row(rows, factor.shape[0], factor.device)]
    count = factor.shape[0]
    if seen == count:
        return combine(x, _place(factor, x.dim(), dim, channel_dim))
    if seen % count:
        raise Unproven(f"a layer met {seen} rows, which {count} draws cannot share")
    if channel_dim > dim:
        channel_dim += 1
    blocks = x.unflatten(dim, (count, seen // count))
    # Back to the very shape of x: flattening would nest a division in every layer's symbolic shape when it is compiled.
    return combine(blocks, _place(factor, blocks.dim(), dim, channel_dim)).reshape(x.shape)


def _place(factor: Tensor, ndim: int, dim: int, channel_dim: int) -> Tensor:
    """Reshape (n, channels) so that it broadcasts against x."""
    shape = [1] * ndim
    shape[dim], shape[channel_dim] = factor.shape
    return factor.reshape(shape)


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
