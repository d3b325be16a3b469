"""Embedding and EmbeddingBag: the input channels are the words of the vocabulary, the output channels the vector.

The factor of a word scales (or shifts) that word's vector, so input factors are looked up beside the table, never
multiplied into all of it.
"""

import operator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimbayes.engine.passes import Pass
from slimbayes.engine.rows import Given, LinearMap, line_of_row, per_row, spread
from slimbayes.layers.base import BayesLayer, register_layer
from slimbayes.layers.site import Site, own_value, table_outer


class LookupMap(LinearMap):
    """Rows of a table: the input factor of a word acts on that word's vector."""

    def _batched(
        self, x: Tensor, weights: Tensor, biases: Tensor | None, batch_dim: int
    ) -> Tensor:
        y = super()._batched(x, weights, biases, batch_dim)
        if self.mask is None:
            return y
        moves = self.mask.bool()[
            x
        ]  # vmap forgets the padding word, which is not to learn
        return torch.where(moves, y, y.detach())

    def squared(self, x: Tensor) -> Tensor:
        return x  # a lookup has weight one

    def modulated(  # a table has no bias
        self,
        combine: Any,
        x: Tensor,
        s: Any,
        r: Any,
        current: Pass,
        weights: Given = None,
        bias: Given = None,
    ) -> Tensor:
        rows, dim = (
            spread(x, current.rows, self.batch_dim) if s.shape[0] > 1 else (x, 0)
        )
        rows = rows.movedim(dim, 0)
        words = (
            per_row(s, rows.shape[0], current)
            .gather(1, rows.reshape(rows.shape[0], -1))
            .view(rows.shape)
        )
        if (
            self.mask is not None and combine is operator.add
        ):  # a shift of what must stay is none
            words = words * self.mask[:, 0].to(words.dtype)[rows]
        y = self.apply(x, weights, current)
        y = combine(y, words.movedim(0, dim).unsqueeze(-1).to(y.dtype))
        return y if r is None else self.rows(combine, y, r, current)


class _BayesTable(BayesLayer):
    bayes_kind = "table"
    positions: Literal["many", "pooled", "nonlinear"] = "many"

    @classmethod
    def refuse(cls, layer: Any) -> str | None:
        return (
            "max_norm rewrites the table in place during lookup"
            if layer.max_norm is not None
            else None
        )

    def sites(self) -> list[Site]:
        words, channels = own_value(self, "weight").shape
        return [
            Site(
                "weight",
                words,
                channels,
                False,
                "weight",
                (words, channels),
                1,
                self.positions,
                "table",
            )
        ]


@register_layer
class BayesEmbedding(_BayesTable, nn.Embedding):
    """An nn.Embedding whose table is drawn from `posterior["weight"]`.

    Shape: (R, ...) indices -> (R, ..., embedding_dim).
    """

    plain = nn.Embedding
    bayes_unbatched = 0

    def bayes_op(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        sparse = self.sparse and weight is self._parameters.get(
            "weight"
        )  # what a draw is made of takes none
        return F.embedding(
            x, weight, self.padding_idx, None, 2.0, self.scale_grad_by_freq, sparse
        )

    def linear_map(self, site: str, batch_dim: int = 0) -> LinearMap:
        weight = own_value(self, "weight")
        mask = words_that_move(self.padding_idx, weight)
        return LookupMap(
            weight,
            None,
            self.bayes_op,
            table_outer,
            batch_dim,
            -1,
            absorbs=False,
            mask=mask,
        )


def words_that_move(padding: int | None, weight: Tensor) -> Tensor | None:
    """The vector of a padding word is no parameter: a mask (words, 1) that is zero there."""
    if padding is None:
        return None
    words = torch.arange(weight.shape[0], device=weight.device).unsqueeze(1)
    return (words != padding % weight.shape[0]).to(weight.dtype)


@dataclass
class BagMap(LinearMap):
    """Sums, means or maxima of looked-up vectors, which are perturbed first: a maximum does not commute."""

    layer: Any = None
    bag: Any = None  # bag index of each entry
    bags: int = 0
    sample_weights: Tensor | None = None

    def apply(self, x: Tensor, weights: Tensor | None, current: Pass) -> Tensor:
        """The vector of each entry, before the bags are reduced."""
        if weights is None or weights.shape[0] == 1:
            weight = self.weight if weights is None else weights[0]
            return F.embedding(
                x, weight, None, None, 2.0, self.layer.scale_grad_by_freq
            )
        return weights[
            line_of_row(weights.shape[0], self.bags, current, x.device)[self.bag], x
        ]

    def blocks(
        self, x: Tensor, weights: Tensor, biases: Tensor | None, current: Pass
    ) -> Tensor:
        return self.reduce(self.apply(x, weights, current), x)

    def modulated(  # a table has no bias
        self,
        combine: Any,
        x: Tensor,
        s: Any,
        r: Any,
        current: Pass,
        weights: Given = None,
        bias: Given = None,
    ) -> Tensor:
        return self.reduce(self._vectors(combine, x, s, r, current, weights), x)

    def averaged(
        self,
        combine: Any,
        x: Tensor,
        s: Tensor,
        r: Tensor,
        current: Pass,
        bias: Given = None,
    ) -> Tensor:
        # A maximum does not commute with the mean over products either.
        products = [
            self._vectors(combine, x, s[:, j], r[:, j], current, None)
            for j in range(s.shape[1])
        ]
        return self.reduce(torch.stack(products).mean(0), x)

    def _vectors(
        self,
        combine: Any,
        x: Tensor,
        s: Tensor,
        r: Given,
        current: Pass,
        weights: Given,
    ) -> Tensor:
        vectors = self.apply(x, weights, current)
        words = per_row(s, self.bags, current)[self.bag, x]
        vectors = combine(vectors, words.unsqueeze(-1).to(vectors.dtype))
        return (
            vectors
            if r is None
            else combine(
                vectors, per_row(r, self.bags, current)[self.bag].to(vectors.dtype)
            )
        )

    def reduce(self, vectors: Tensor, x: Tensor) -> Tensor:
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
            count = out.new_zeros(self.bags).index_add(
                0, bag, torch.ones_like(vectors[:, 0])
            )
            out = out / count.clamp_min(1).unsqueeze(-1)
        return out


@register_layer
class BayesEmbeddingBag(_BayesTable, nn.EmbeddingBag):
    """An nn.EmbeddingBag whose table is drawn from `posterior["weight"]`.

    Shape: (R, words) indices -> (R, embedding_dim); or flat indices with offsets, one row per bag.
    """

    plain = nn.EmbeddingBag

    @property
    def positions(self) -> Literal["pooled", "nonlinear"]:  # type: ignore[override]
        return "nonlinear" if self.mode == "max" else "pooled"

    def linear_map(self, site: str, batch_dim: int = 0) -> BagMap:
        weight = own_value(self, "weight")
        mask = words_that_move(self.padding_idx, weight)
        linear = BagMap(
            weight,
            None,
            self.bayes_op,
            table_outer,
            0,
            -1,
            absorbs=False,
            mask=mask,
            layer=self,
        )
        scaled = self.scale_grad_by_freq
        linear.op = lambda x, weight, bias: linear.reduce(
            F.embedding(x, weight, None, None, 2.0, scaled), x
        )
        return linear

    def bayes_forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        linear = self.linear_map("weight")
        linear.bags = (
            input.shape[0]
            if offsets is None
            else offsets.shape[0] - int(self.include_last_offset)
        )
        if input.dim() == 2:
            linear.bag = torch.arange(
                linear.bags, device=input.device
            ).repeat_interleave(input.shape[1])
        else:
            assert offsets is not None
            starts = offsets[: linear.bags].contiguous()
            linear.bag = (
                torch.searchsorted(
                    starts,
                    torch.arange(input.shape[0], device=input.device),
                    right=True,
                )
                - 1
            )
        linear.sample_weights = (
            None if per_sample_weights is None else per_sample_weights.reshape(-1)
        )
        return self.posterior["weight"](input.reshape(-1), linear)
