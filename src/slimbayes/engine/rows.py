"""Activations and factors that differ between rows, and the linear maps between them. Where the rows lie was proven;
here they are only met.

Sizes: n draws of the pass (one for each block of rows, or for each row), R rows of the pass, C channels.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimbayes.engine.blocks import block_of_row, block_sizes, sizes_equal
from slimbayes.engine.fused import Seeded, autocast_type, dense, fused
from slimbayes.engine.layout import Unproven
from slimbayes.engine.passes import Pass
from slimbayes.kernels import LARGE, ready

Op = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Outer = Callable[[Tensor, Tensor], Tensor]
Given = Tensor | None


@dataclass
class LinearMap:
    """y = op(x, weight, bias), with rows along `batch_dim` and channels along `channel_dim` of x and of y.

    A `batch_dim` of -1 means a single row that stands for all. `outer(r, s)` spreads output factors r (n_out,) and
    input factors s (n_in,) to a tensor that broadcasts against `weight`.
    """

    weight: Tensor
    bias: Tensor | None
    op: Op
    outer: Outer
    batch_dim: int
    channel_dim: int
    absorbs: bool = True  # factors of one draw may be multiplied into the weight (a lookup touches few rows of it)
    out_dim: int | None = (
        None  # of the weight, where op is one matrix along the last dimension, whatever comes before
    )
    mask: Tensor | None = (
        None  # broadcasts against weight: zero where it must stay as it is (padding, pruned)
    )
    current: Pass | None = None  # the pass under way, where whoever made it had looked

    def modulated(
        self,
        combine: Any,
        x: Tensor,
        s: Any,
        r: Any,
        current: Pass,
        weights: Given = None,
        bias: Given = None,
    ) -> Tensor:
        """op(x . s) . r + bias, where . is `combine` (multiply or add), s is (n, n_in), r and bias are (n, n_out) or
        None.

        With `weights` (blocks, ...) each block of rows has a weight of its own.
        """
        if (
            self.out_dim is not None
            and combine is operator.mul
            and weights is None
            and r is not None
        ):
            y = self._dense(x, s, r, bias, current)
            if y is not None:
                return y
        x = apply_rows(
            combine,
            x,
            s,
            current,
            self.batch_dim,
            self.channel_dim,
            dtype=autocast_type(x),
        )
        y = self.apply(x, weights, current)
        return (
            y
            if r is None
            else apply_rows(
                combine, y, r, current, self.batch_dim, self.channel_dim, bias
            )
        )

    def _dense(
        self, x: Tensor, s: Any, r: Any, bias: Tensor | None, current: Pass
    ) -> Tensor | None:
        """op(x o s) o r + bias, as `apply_rows` before and after, for rows along the first dimension and one matrix
        along the last; None where that takes a closer look.
        """
        if torch.compiler.is_compiling() or self.batch_dim != 0:
            return None
        count, seen = s.shape[0], x.shape[0]
        if current.rows % count or seen % count or not seen:
            return None
        if (isinstance(s, Seeded) or x.numel() >= LARGE) and ready(x):
            return dense(x, self.weight, self.out_dim or 0, s, r, bias)
        if isinstance(s, Seeded):
            return None
        shape = x.shape if seen != count else None
        if shape is not None:
            x = x.view(count, seen // count, *shape[1:])
        lines = [s, r] if bias is None else [s, r, bias]
        for _ in range(x.dim() - 2):
            lines = [line.unsqueeze(1) for line in lines]
        y = self.op(
            x * (lines[0] if s.dtype == x.dtype else lines[0].to(x.dtype)),
            self.weight,
            None,
        )
        if y.dtype != r.dtype:
            lines = [line.to(y.dtype) for line in lines]
        if (
            bias is not None and torch.is_grad_enabled()
        ):  # autograd's own addcmul takes a product more in backward
            y = y * lines[1] + lines[2]
        else:
            y = _combined(operator.mul, y, lines[1:])
        return y if shape is None else y.reshape(*shape[:-1], y.shape[-1])

    def apply(self, x: Tensor, weights: Tensor | None, current: Pass) -> Tensor:
        """op without a bias, with the layer's own weight or one for each block of rows."""
        return (
            self.op(x, self.weight, None)
            if weights is None
            else self.blocks(x, weights, None, current)
        )

    def squared(self, x: Tensor) -> Tensor:
        """The inputs that carry variances where x carries means."""
        return x.square()

    def averaged(
        self,
        combine: Any,
        x: Tensor,
        s: Tensor,
        r: Tensor,
        current: Pass,
        bias: Given = None,
    ) -> Tensor:
        """Mean of `modulated` over p products of factors, s (n, p, n_in) and r (n, p, n_out), and a bias (n, n_out)."""
        parts = [
            self.modulated(combine, x, s[:, j], r[:, j], current)
            for j in range(s.shape[1])
        ]
        y = sum(parts[1:], parts[0]) / len(parts)
        return y if bias is None else self.rows(operator.add, y, bias, current)

    def masked(self, change: Tensor) -> Tensor:
        """A change of the weight, without what must stay as it is."""
        return change if self.mask is None else change * self.mask.to(change.dtype)

    def free(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Of values (..., *shape) of the weights those that may change, (..., count), where not all may."""
        if self.mask is None:
            return values
        free = self.mask.expand_as(self.weight) != 0
        return tuple(value[..., free] for value in values)

    def rows(self, combine: Any, y: Tensor, factor: Tensor, current: Pass) -> Tensor:
        """Combine the outputs with one line of factors (n, n_out) for each draw."""
        return apply_rows(combine, y, factor, current, self.batch_dim, self.channel_dim)

    def blocks(
        self, x: Tensor, weights: Tensor, biases: Tensor | None, current: Pass
    ) -> Tensor:
        """Apply one weight (n, ...) and bias (n, n_out) to each block of rows."""
        if weights.shape[0] == 1:  # squeezing has a cheaper backward than [0]
            return self.op(
                x, weights.squeeze(0), None if biases is None else biases.squeeze(0)
            )
        x, batch_dim = spread(x, current.rows, self.batch_dim)
        seen = x.shape[batch_dim]
        if (
            not torch.compiler.is_compiling()
            and seen % current.rows
            and seen % len(weights)
        ):
            raise Unproven(
                f"a layer met {seen} rows, which {len(weights)} draws cannot share"
            )
        sizes = sizes_of_blocks(seen, weights.shape[0], current)
        if not all(sizes_equal(size, sizes[0]) for size in sizes):
            parts = enumerate(x.split(sizes, batch_dim))
            done = [
                self.op(part, weights[k], None if biases is None else biases[k])
                for k, part in parts
            ]
            return torch.cat(done, batch_dim)
        if x.is_floating_point() and torch.is_autocast_enabled(
            x.device.type
        ):  # vmap runs past autocast
            lower = torch.get_autocast_dtype(x.device.type)
            biases = None if biases is None else biases.to(lower)
            with torch.autocast(x.device.type, enabled=False):
                return self._batched(x.to(lower), weights.to(lower), biases, batch_dim)
        return self._batched(x, weights, biases, batch_dim)

    def _batched(
        self, x: Tensor, weights: Tensor, biases: Tensor | None, batch_dim: int
    ) -> Tensor:
        blocks = x.unflatten(batch_dim, (weights.shape[0], -1))
        in_dims = (batch_dim, 0, None if biases is None else 0)
        y = torch.vmap(self.op, in_dims, out_dims=batch_dim)(blocks, weights, biases)
        return y.flatten(batch_dim, batch_dim + 1)

    def chosen(
        self,
        x: Tensor,
        weights: Tensor,
        biases: Tensor | None,
        index: Tensor,
        current: Pass,
    ) -> Tensor:
        """`blocks` with weights[index[j]] for block j: rows that share one of few weights (K, ...) meet it together."""
        x, batch_dim = spread(x, current.rows, self.batch_dim)
        sizes = sizes_of_blocks(x.shape[batch_dim], index.shape[0], current)
        even = all(sizes_equal(size, sizes[0]) for size in sizes)
        if torch.compiler.is_compiling() or not self.absorbs or not even:
            biases = None if biases is None else biases.index_select(0, index)
            return self.blocks(x, weights.index_select(0, index), biases, current)
        order = index.argsort()
        blocks = x.unflatten(batch_dim, (index.shape[0], -1))
        rows = blocks.shape[batch_dim + 1]
        counts = index.bincount(minlength=weights.shape[0])
        sizes = [rows * count for count in counts.tolist()]
        used = [k for k, size in enumerate(sizes) if size]
        parts = (
            blocks.index_select(batch_dim, order)
            .flatten(batch_dim, batch_dim + 1)
            .split(sizes, batch_dim)
        )
        done = [
            self.op(parts[k], weights[k], None if biases is None else biases[k])
            for k in used
        ]
        y = torch.cat(done, batch_dim).unflatten(batch_dim, (index.shape[0], -1))
        return y.index_select(batch_dim, order.argsort()).flatten(
            batch_dim, batch_dim + 1
        )

    def add_bias(self, y: Tensor) -> Tensor:
        """Add the layer's own bias (n_out,), if there is one."""
        return (
            y
            if self.bias is None
            else y + self.along_channels(self.bias.to(y.dtype), y.dim())
        )

    def along_channels(self, numbers: Tensor, ndim: int) -> Tensor:
        """One number for each output channel, (n_out,), shaped to meet an output of `ndim` dimensions."""
        shape = [1] * ndim
        shape[self.channel_dim] = -1
        return numbers.view(shape)


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
        return apply_rows(
            combine, x, factor.lines(), current, dim, channel_dim, bias, dtype
        )
    done = fused(combine, x, factor, dim, channel_dim, bias, dtype or x.dtype)
    if done is not None:
        return done
    lines = [
        f if f.dtype == x.dtype else f.to(x.dtype)
        for f in (factor, bias)
        if f is not None
    ]
    if factor.shape[0] == 1:
        at = 0 if x.dim() < 2 or channel_dim % x.dim() else 1
        return _combined(
            combine,
            x,
            [
                _place(f, x.dim(), at, channel_dim) if x.dim() > 1 else f[0]
                for f in lines
            ],
        )
    x, dim = spread(x, current.rows, dim)
    rows, seen, count = current.rows, x.shape[dim], factor.shape[0]
    if torch.compiler.is_compiling() and not (
        sizes_equal(rows % count, 0) and sizes_equal(seen % count, 0)
    ):
        # Cutting x into blocks divides its symbolic size anew in every layer, and the compiler's algebra explodes; a
        # lookup does not, but its gradient is a scatter.
        if not sizes_equal(count, rows):
            lines = _looked_up(lines, block_of_row(rows, count, factor.device))
        if not sizes_equal(seen, rows):
            lines = _looked_up(
                lines, torch.arange(seen, device=factor.device) // (seen // rows)
            )
        return _combined(
            combine, x, [_place(f, x.dim(), dim, channel_dim) for f in lines]
        )
    if rows % count:
        lines, count = _looked_up(lines, block_of_row(rows, count, factor.device)), rows
    if sizes_equal(seen, count):
        return _combined(
            combine, x, [_place(f, x.dim(), dim, channel_dim) for f in lines]
        )
    if seen % count:
        raise Unproven(f"a layer met {seen} rows, which {count} draws cannot share")
    if torch.compiler.is_compiling() and x.dim() > 2:
        # A factor's gradient as a sum over positions, then over rows: both at once leave a GPU too few sums to do.
        lines = [
            f
            if f.shape[0] == 1
            else f.unsqueeze(1).expand(-1, seen // count, -1).flatten(0, 1)
            for f in lines
        ]
        return _combined(
            combine, x, [_place(f, x.dim(), dim, channel_dim) for f in lines]
        )
    channel_dim = channel_dim + 1 if channel_dim > dim else channel_dim
    blocks = x.unflatten(dim, (count, seen // count))
    # Back to the very shape of x: flattening would nest a division in every layer's symbolic shape when it is compiled.
    placed = [_place(f, blocks.dim(), dim, channel_dim) for f in lines]
    return _combined(combine, blocks, placed).reshape(x.shape)


def _looked_up(lines: list[Tensor], index: Tensor) -> list[Tensor]:
    return [line if line.shape[0] == 1 else line[index] for line in lines]


def _combined(combine: Any, x: Tensor, placed: list[Tensor]) -> Tensor:
    if len(placed) == 1:
        return combine(x, placed[0])
    factor, bias = placed
    return (
        torch.addcmul(bias, x, factor)
        if combine is operator.mul
        else combine(x, factor) + bias
    )


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
    return (
        factor.repeat_interleave(seen // factor.shape[0], 0)
        if seen != factor.shape[0]
        else factor
    )


def line_of_row(lines: int, seen: int, current: Pass, device: torch.device) -> Tensor:
    """Which of n lines, one for each draw, belongs to each of the `seen` rows: (seen,)."""
    return block_of_row(current.rows, lines, device).repeat_interleave(
        seen // current.rows
    )


def sizes_of_blocks(seen: int, blocks: int, current: Pass) -> list[int]:
    """How many of the `seen` rows each block has. A row of the pass may have become several: they stay together.

    >>> sizes_of_blocks(6, 2, Pass(2, 3)), sizes_of_blocks(6, 2, Pass(2, 6))
    ([4, 2], [3, 3])
    """
    if blocks == 1:
        return [seen]
    return [
        seen // max(current.rows, 1) * size
        for size in block_sizes(current.rows, blocks)
    ]
