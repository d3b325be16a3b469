"""Embedding and EmbeddingBag: the input channels are the words of the vocabulary, the output channels the vector.

The factor of a word scales (or shifts) that word's vector, so input factors are looked up beside the table, never multiplied
into all of it.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimbayes.layers.base import BayesLayer, LinearMap
from slimbayes.passes import Pass, block_of_row, per_row
from slimbayes.posteriors.base import Site


def _outer(r: Tensor, s: Tensor) -> Tensor:
    return torch.outer(s, r)  # the table is (words, channels)


class LookupMap(LinearMap):
    """Rows of a table: the input factor of a word acts on that word's vector."""

    def squared(self, x: Tensor) -> Tensor:
        return x  # a lookup has weight one

    def modulated(self, combine: Any, x: Tensor, s: Tensor, r: Tensor | None, current: Pass, weights: Tensor | None = None) -> Tensor:
        rows = x.movedim(self.batch_dim, 0)
        if rows.shape[0] == 1 and s.shape[0] > 1:
            rows = rows.expand(current.rows or 1, *rows.shape[1:])
        words = per_row(s, rows.shape[0], current).gather(1, rows.reshape(rows.shape[0], -1)).view(rows.shape)
        y = self.apply(x, weights, current)
        y = combine(y, words.movedim(0, self.batch_dim).unsqueeze(-1).to(y.dtype))
        return y if r is None else self.rows(combine, y, r, current)


class BayesEmbedding(BayesLayer, nn.Embedding):
    """An nn.Embedding whose table is drawn from `posterior["weight"]`.

    Shape: (R, ...) indices -> (R, ..., embedding_dim).
    """

    plain = nn.Embedding
    channels_last = True

    @classmethod
    def refuse(cls, layer: nn.Module) -> str | None:
        return "max_norm rewrites the table in place during lookup" if layer.max_norm is not None else None

    def sites(self) -> list[Site]:
        return [Site("weight", *self.weight.shape, False, "weight", tuple(self.weight.shape), 1, "many")]

    def _op(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.embedding(x, weight, self.padding_idx, None, 2.0, self.scale_grad_by_freq, self.sparse)

    def linear_map(self, site: str) -> LinearMap:
        name = self.posterior[site].name
        return LookupMap(self.weight, None, self._op, _outer, self.batch_dim, -1, name, foldable=False)

    def count_rows(self, input: Tensor) -> int:
        return 1 if input.dim() == 0 else input.shape[self.batch_dim]

    def run(self, input: Tensor) -> Tensor:
        if input.dim() == 0:
            return self.project("weight", input.unsqueeze(0)).squeeze(0)
        return self.project("weight", input)


@dataclass
class BagMap(LinearMap):
    """Sums, means or maxima of looked-up vectors. The perturbed vectors are formed first: a maximum does not commute."""

    layer: Any = None
    bag: Any = None  # bag index of each entry
    bags: int = 0
    sample_weights: Tensor | None = None

    def apply(self, x: Tensor, weights: Tensor | None, current: Pass) -> Tensor:
        """The vector of each entry, before the bags are reduced."""
        if weights is None or len(weights) == 1:
            return F.embedding(x, self.weight if weights is None else weights[0])
        return weights[block_of_row(self.bags, len(weights), x.device)[self.bag], x]

    def blocks(self, x: Tensor, weights: Tensor, biases: Tensor | None, current: Pass) -> Tensor:
        return self._reduce(self.apply(x, weights, current), x)

    def modulated(self, combine: Any, x: Tensor, s: Tensor, r: Tensor | None, current: Pass, weights: Tensor | None = None) -> Tensor:
        return self._reduce(self._vectors(combine, x, s, r, current, weights), x)

    def averaged(self, combine: Any, x: Tensor, s: Tensor, r: Tensor, current: Pass) -> Tensor:
        # A maximum does not commute with the mean over products either.
        products = [self._vectors(combine, x, s[:, j], r[:, j], current, None) for j in range(s.shape[1])]
        return self._reduce(torch.stack(products).mean(0), x)

    def _vectors(self, combine: Any, x: Tensor, s: Tensor, r: Tensor | None, current: Pass, weights: Tensor | None) -> Tensor:
        if s.shape[0] > 1 and current.rows != self.bags:
            raise ValueError(
                f"{self.name}: {self.bags} bags for the {current.rows} rows of this pass. Give the indices as (rows, words), "
                f"without offsets, or use draws='member' and sample(..., fold=False)."
            )
        vectors = self.apply(x, weights, current)
        words = per_row(s, self.bags, current)[self.bag, x]
        vectors = combine(vectors, words.unsqueeze(-1).to(vectors.dtype))
        return vectors if r is None else combine(vectors, per_row(r, self.bags, current)[self.bag].to(vectors.dtype))

    def _reduce(self, vectors: Tensor, x: Tensor) -> Tensor:
        bag = self.bag
        if self.sample_weights is not None:
            vectors = vectors * self.sample_weights.unsqueeze(-1)
        if self.layer.padding_idx is not None:
            kept = x != self.layer.padding_idx
            vectors, bag = vectors[kept], bag[kept]
        out = vectors.new_zeros(self.bags, vectors.shape[-1])
        if self.layer.mode == "max":
            index = bag.unsqueeze(-1).expand_as(vectors)
            return out.scatter_reduce(0, index, vectors, "amax", include_self=False)
        out = out.index_add(0, bag, vectors)
        if self.layer.mode == "mean":
            count = torch.zeros(self.bags, device=bag.device, dtype=out.dtype).index_add(0, bag, torch.ones_like(vectors[:, 0]))
            out = out / count.clamp_min(1).unsqueeze(-1)
        return out


class BayesEmbeddingBag(BayesLayer, nn.EmbeddingBag):
    """An nn.EmbeddingBag whose table is drawn from `posterior["weight"]`.

    Shape: (R, words) indices -> (R, embedding_dim); or flat indices with offsets, one row per bag.
    """

    plain = nn.EmbeddingBag

    @classmethod
    def refuse(cls, layer: nn.Module) -> str | None:
        return "max_norm rewrites the table in place during lookup" if layer.max_norm is not None else None

    def sites(self) -> list[Site]:
        return [Site("weight", *self.weight.shape, False, "weight", tuple(self.weight.shape), 1, "nonlinear" if self.mode == "max" else "pooled")]

    def linear_map(self, site: str) -> LinearMap:
        name = self.posterior[site].name
        linear = BagMap(self.weight, None, F.embedding, _outer, 0, -1, name, foldable=False, layer=self)
        linear.op = lambda x, weight, bias: linear._reduce(F.embedding(x, weight), x)
        return linear

    def count_rows(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> int:
        return input.shape[0] if offsets is None else offsets.shape[0] - int(self.include_last_offset)

    def run(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        linear: Any = self.linear_map("weight")
        linear.bags = self.count_rows(input, offsets)
        if input.dim() == 2:
            linear.bag = torch.arange(linear.bags, device=input.device).repeat_interleave(input.shape[1])
        else:
            assert offsets is not None
            starts = offsets[: linear.bags].contiguous()
            linear.bag = torch.searchsorted(starts, torch.arange(input.shape[0], device=input.device), right=True) - 1
        linear.sample_weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
        return self.posterior["weight"](input.reshape(-1), linear)
