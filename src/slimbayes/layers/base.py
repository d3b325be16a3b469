"""What every converted layer shares: the class swap, the linear map it hands to posteriors, and stand-alone calls.

A layer knows no method. It states, for each weight matrix (site), how to run the map and where its rows and channels lie;
the posterior at `layer.posterior[site]` does the rest.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from slimbayes import passes
from slimbayes.passes import Pass, apply_rows, batch_dim_of, block_of_row, block_sizes
from slimbayes.posteriors.base import Kind, Posterior, Site

Op = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Outer = Callable[[Tensor, Tensor], Tensor]


@dataclass
class LinearMap:
    """A linear map of a layer: y = op(x, weight, bias), rows along `batch_dim`, channels along `channel_dim` of x and of y.

    `outer(r, s)` spreads output factors r (n_out,) and input factors s (n_in,) to a tensor that broadcasts against `weight`.
    """

    weight: Tensor
    bias: Tensor | None
    op: Op
    outer: Outer
    batch_dim: int
    channel_dim: int
    name: str
    certain: bool = False  # the layer itself defines batch_dim, so rows found elsewhere are a misunderstanding
    foldable: bool = True  # one draw for all rows may be multiplied into the weight (a lookup touches few rows of it)

    def modulated(self, combine: Any, x: Tensor, s: Tensor, r: Tensor | None, current: Pass, weights: Tensor | None = None) -> Tensor:
        """op(x . s) . r without a bias, where . is `combine` (multiply or add), s is (n, n_in) and r is (n, n_out) or None.

        With `weights` (blocks, ...) each block of rows has a weight of its own.
        """
        x = apply_rows(combine, x, s, current, self.batch_dim, self.channel_dim, self.name, self.certain)
        y = self.apply(x, weights, current)
        return y if r is None else self.rows(combine, y, r, current)

    def apply(self, x: Tensor, weights: Tensor | None, current: Pass) -> Tensor:
        """op without a bias, with the layer's own weight or one for each block of rows."""
        return self.op(x, self.weight, None) if weights is None else self.blocks(x, weights, None, current)

    def squared(self, x: Tensor) -> Tensor:
        """The inputs that carry variances where x carries means."""
        return x.square()

    def averaged(self, combine: Any, x: Tensor, s: Tensor, r: Tensor, current: Pass) -> Tensor:
        """Mean of `modulated` over p products of factors: s is (n, p, n_in), r is (n, p, n_out)."""
        y = self.modulated(combine, x, s[:, 0], r[:, 0], current)
        for j in range(1, s.shape[1]):
            y = y + self.modulated(combine, x, s[:, j], r[:, j], current)
        return y / s.shape[1] if s.shape[1] > 1 else y

    def batch_dim_in(self, x: Tensor, current: Pass) -> int:
        """The dimension of x that holds the rows of this pass."""
        return batch_dim_of(x, current.rows or 0, self.batch_dim, self.channel_dim, self.name, self.certain)

    def by_row(self, lines: Tensor, x: Tensor, current: Pass) -> Tensor:
        """Repeat what has one line for each draw along the rows of x: (.., n, ..) -> (.., rows, ..)."""
        dim = self.batch_dim_in(x, current)
        seen, rows = x.shape[dim], current.rows or x.shape[dim]
        if seen % rows == 0 and rows % lines.shape[dim]:  # a row of the pass may have become several
            return lines.index_select(dim, block_of_row(rows, lines.shape[dim], x.device).repeat_interleave(seen // rows))
        return lines.index_select(dim, block_of_row(seen, lines.shape[dim], x.device))

    def rows(self, combine: Any, y: Tensor, factor: Tensor, current: Pass) -> Tensor:
        """Combine the outputs with one line of factors (n, n_out) for each draw."""
        return apply_rows(combine, y, factor, current, self.batch_dim, self.channel_dim, self.name, self.certain)

    def blocks(self, x: Tensor, weights: Tensor, biases: Tensor | None, current: Pass) -> Tensor:
        """Apply one weight (n, ...) and bias (n, n_out) to each block of rows."""
        if len(weights) == 1:
            return self.op(x, weights.squeeze(0), None if biases is None else biases.squeeze(0))  # cheaper backward than [0]
        batch_dim = self.batch_dim_in(x, current)
        if x.shape[batch_dim] == 1 and (current.rows or 1) > 1:  # one row that stands for all: every draw sees it
            shape = list(x.shape)
            shape[batch_dim] = len(weights)
            alone = Pass(len(weights), len(weights))
            y = self.blocks(x.expand(shape), weights, biases, alone)
            return y.index_select(batch_dim, block_of_row(current.rows or 1, len(weights), x.device))
        if sizes := uneven_sizes(x.shape[batch_dim], len(weights), current):
            parts = [self.op(part, weights[j], None if biases is None else biases[j]) for j, part in enumerate(x.split(sizes, batch_dim))]
            return torch.cat(parts, batch_dim)
        if x.is_floating_point() and torch.is_autocast_enabled(x.device.type):  # vmap runs past autocast
            lower = torch.get_autocast_dtype(x.device.type)
            with torch.autocast(x.device.type, enabled=False):
                return self.blocks(x.to(lower), weights.to(lower), None if biases is None else biases.to(lower), current)
        blocks = x.unflatten(batch_dim, (len(weights), -1))
        in_dims = (batch_dim, 0, None if biases is None else 0)
        y = torch.vmap(self.op, in_dims, out_dims=batch_dim)(blocks, weights, biases)
        return y.flatten(batch_dim, batch_dim + 1)

    def chosen(self, x: Tensor, weights: Tensor, biases: Tensor | None, index: Tensor, current: Pass) -> Tensor:
        """`blocks` with weights[index[j]] for block j: rows that share one of few weights (K, ...) meet it together."""
        batch_dim = self.batch_dim_in(x, current)
        if torch.compiler.is_compiling() or not self.foldable or uneven_sizes(x.shape[batch_dim], len(index), current):
            return self.blocks(x, weights.index_select(0, index), None if biases is None else biases.index_select(0, index), current)
        order = index.argsort()
        blocks = x.unflatten(batch_dim, (len(index), -1))
        rows = blocks.shape[batch_dim + 1]
        sizes = [rows * count for count in index.bincount(minlength=len(weights)).tolist()]
        parts = blocks.index_select(batch_dim, order).flatten(batch_dim, batch_dim + 1).split(sizes, batch_dim)
        done = [self.op(part, weights[k], None if biases is None else biases[k]) for k, part in enumerate(parts) if sizes[k]]
        y = torch.cat(done, batch_dim).unflatten(batch_dim, (len(index), -1))
        return y.index_select(batch_dim, order.argsort()).flatten(batch_dim, batch_dim + 1)

    def add_bias(self, y: Tensor) -> Tensor:
        """Add the layer's own bias (n_out,), if there is one."""
        if self.bias is None:
            return y
        shape = [1] * y.dim()
        shape[self.channel_dim] = -1
        return y + self.bias.to(y.dtype).view(shape)


def uneven_sizes(seen: int, blocks: int, current: Pass) -> list[int]:
    """Sizes of blocks of rows that are not all alike, or none. A row of the pass may have become several: they stay together.

    >>> uneven_sizes(6, 2, Pass(2, 3)), uneven_sizes(6, 2, Pass(2, 6))
    ([4, 2], [])
    """
    rows = current.rows or seen
    if seen % rows:
        rows = seen
    return [seen // rows * size for size in block_sizes(rows, blocks)] if rows % blocks else []


class Converted(nn.Module):
    """A module whose class was swapped: `plain` is the class it had, `posterior` what it gained."""

    plain: ClassVar[type[nn.Module]]
    posterior: nn.ModuleDict


def posteriors_at(module: Converted) -> list[Posterior]:
    """The posteriors that belong to a converted module itself."""
    return list(module.posterior.values())  # type: ignore[arg-type]


class BayesLayer(Converted):
    """Mixin of converted layers. Subclasses also inherit the plain torch class, which `plain` names."""

    kind: ClassVar[Kind] = "matrix"
    if TYPE_CHECKING:  # a mixin reads attributes of the plain class it is mixed with

        def __getattr__(self, name: str) -> Any: ...

    channels_last: ClassVar[bool] = False  # rows may lie along any dimension but the last
    batch_dim: int = 0  # instances override it where rows lie elsewhere

    @classmethod
    def refuse(cls, layer: nn.Module) -> str | None:
        """Why a plain layer of this type cannot be converted, or None if it can."""
        return None

    def sites(self) -> list[Site]:
        """The weight matrices that posteriors cover. Also called on the plain layer, before its class is swapped."""
        raise NotImplementedError

    def linear_map(self, site: str) -> LinearMap:
        """The map of one site, with its present weight and bias."""
        raise NotImplementedError

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's forward, written with `project`."""
        raise NotImplementedError

    def count_rows(self, *args: Any, **kwargs: Any) -> int:
        """Rows of an input, for a call outside any pass of the whole model."""
        rows = passes.infer_rows((args, kwargs), self.batch_dim)
        return 1 if rows is None else rows

    def posteriors(self) -> list[Posterior]:
        return posteriors_at(self)

    def project(self, site: str, x: Tensor) -> Tensor:
        """Apply this pass's draw of one site's linear map."""
        return self.posterior[site](x, self.linear_map(site))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        posteriors = self.posteriors()
        if passes.is_open(posteriors):
            return self.run(*args, **kwargs)
        own = passes.begin_bare(posteriors, self.count_rows(*args, **kwargs))
        try:
            return self.run(*args, **kwargs)
        finally:
            own.open = False


def matrix_outer(r: Tensor, s: Tensor) -> Tensor:
    """r s^T for weights stored as (out, in)."""
    return torch.outer(r, s)
