"""MultiheadAttention: the query, key, value and output projections are four sites.

torch's own forward calls its projections' weights directly (out_proj's forward never runs), so the attention is written
out here around the posteriors' projections. nn.TransformerEncoder and Decoder layers call it like the plain module.

Sizes: R rows, L queries, S keys, E channels, h heads.
"""

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimbayes.engine import passes
from slimbayes.engine.rows import LinearMap
from slimbayes.layers.base import BayesLayer, register_layer
from slimbayes.layers.site import Site, own_value

_BLOCKS = {"q": 0, "k": 1, "v": 2}
_READ = ("in_proj_weight", "in_proj_bias", *(f"{name}_proj_weight" for name in _BLOCKS))


@register_layer
class BayesMultiheadAttention(BayesLayer, nn.MultiheadAttention):
    """An nn.MultiheadAttention with posteriors "q", "k", "v" and "out".

    Shape: as nn.MultiheadAttention: query (L, R, E), or (R, L, E) with batch_first, or unbatched (L, E).
    """

    plain, read_names, inner_dropout = (
        nn.MultiheadAttention,
        _READ,
        "on its attention weights",
    )

    def sites(self) -> list[Site]:
        size, found = self.embed_dim, []
        for name, inputs in {
            "q": size,
            "k": self.kdim,
            "v": self.vdim,
            "out": size,
        }.items():
            packed = (
                "in_proj_weight" if self._qkv_same_embed_dim else f"{name}_proj_weight"
            )
            weight, bias = (
                ("out_proj.weight", "out_proj.bias")
                if name == "out"
                else (packed, "in_proj_bias")
            )
            biased = _parameters_of(self, name)[1] is not None
            shape = (size, inputs)
            found.append(
                Site(
                    name,
                    inputs,
                    size,
                    biased,
                    weight,
                    shape,
                    positions="many",
                    bias_in=bias,
                )
            )
        return found

    def may_hold_rows(self, dim: int, ndim: int) -> bool:  # type: ignore[override]
        return ndim == 3 and dim == (0 if self.batch_first else 1)

    def linear_map(self, site: str, batch_dim: int = 0) -> LinearMap:
        weight, bias = _parameters_of(self, site)
        return LinearMap(
            weight, bias, F.linear, torch.outer, 0 if self.batch_first else 1, -1
        )

    def write_draw(
        self, plain: nn.Module, site: Site, weight: Tensor, bias: Tensor | None
    ) -> None:
        for own, drawn in zip(
            _parameters_of(plain, site.name), (weight, bias), strict=True
        ):
            if own is not None and drawn is not None:
                own.copy_(drawn)

    def drawn_value(self, name: str) -> Any:
        """A parameter as drawn in this pass, for code that uses it past the layer's forward."""
        names = _BLOCKS if name.startswith("in_proj") else name[:1]
        return torch.cat([self._drawn(site)[name == "in_proj_bias"] for site in names])

    def _drawn(self, site: str) -> Any:
        """Weight and bias of one projection in this pass."""
        posterior: Any = self.posterior[site]
        if not (posterior.has_weights and posterior.drawn == 1):
            return _parameters_of(self, site)
        if not torch.compiler.is_compiling():
            posterior.current.met[self.bayes_key] = None
        return posterior.materialize(self.linear_map(site), 0)

    @property
    def out_proj(self) -> Any:  # type: ignore[override]
        """The output projection; for code that calls it past the layer's forward, one with the drawn weight."""
        own: Any = self._modules["out_proj"]
        found: Any = (
            passes.pass_of(self.bayes_key) if "posterior" in self._modules else None
        )
        if (
            found is None
            or found.held
            or (found.probing and found.inside[-1:] == [self.bayes_key])
        ):
            return own
        values = (own.weight, own.bias) if found.probing else self._drawn("out")
        if found.probing:
            values = tuple(
                v if v is None else found.quiet.watch(v, self.bayes_name)
                for v in values
            )
        new = copy.copy(own)
        new.__dict__["_parameters"] = dict(zip(("weight", "bias"), values, strict=True))
        return new

    def bayes_forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        batched, seq = query.dim() == 3, 1 if self.batch_first else 0
        if not batched:
            query, key, value = (t.unsqueeze(1 - seq) for t in (query, key, value))
            key_padding_mask = (
                None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
            )
        rows = 1 - seq
        q, k, v = (
            self.project_draw(n, x, rows)
            for n, x in (("q", query), ("k", key), ("v", value))
        )
        if not self.batch_first:
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        k, v, extra = self._extend(k, v)
        mask = self._mask(q, k.shape[1], key_padding_mask, attn_mask, extra)
        y, weights = self._attend(q, k, v, mask, need_weights)
        y = self.project_draw("out", y if self.batch_first else y.transpose(0, 1), rows)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            y, weights = (
                y.squeeze(1 - seq),
                None if weights is None else weights.squeeze(0),
            )
        return y, weights

    def _extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
        """Append the learned and the zero key and value, where the layer has them: (R, S, E) -> (R, S + extra, E)."""
        size = k.shape[1]
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.to(k.dtype).expand(k.shape[0], 1, -1)], 1)
            v = torch.cat([v, self.bias_v.to(v.dtype).expand(v.shape[0], 1, -1)], 1)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        return k, v, k.shape[1] - size

    def _mask(
        self,
        q: Tensor,
        keys: int,
        padding: Tensor | None,
        attn: Tensor | None,
        extra: int,
    ) -> Tensor | None:
        """Both masks as one additive tensor that broadcasts to (R, h, L, S)."""
        total: Tensor | None = None
        if attn is not None:
            attn = F.pad(_additive(attn, q.dtype), (0, extra))
            if attn.dim() == 3:
                attn = attn.view(-1, self.num_heads, q.shape[1], keys)
            total = attn
        if padding is not None:
            padding = F.pad(_additive(padding, q.dtype), (0, extra))[:, None, None]
            total = padding if total is None else total + padding
        return total

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (
            t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v)
        )
        dropout = self.dropout if self.training else 0.0
        if not need_weights:
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout
            )
            return y.transpose(1, 2).flatten(2), None
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        weights = F.dropout(
            torch.softmax(scores if mask is None else scores + mask, -1), dropout
        )
        return (weights @ v).transpose(1, 2).flatten(2), weights


def _parameters_of(layer: Any, site: str) -> tuple[Tensor, Tensor | None]:
    """The weight and bias of one projection, as they lie in a plain or converted layer."""
    if site == "out":
        return layer._modules["out_proj"].weight, layer._modules["out_proj"].bias
    rows = slice(_BLOCKS[site] * layer.embed_dim, (_BLOCKS[site] + 1) * layer.embed_dim)
    packed, bias = layer._qkv_same_embed_dim, own_value(layer, "in_proj_bias")
    weight = (
        own_value(layer, "in_proj_weight")[rows]
        if packed
        else own_value(layer, f"{site}_proj_weight")
    )
    return weight, None if bias is None else bias[rows]


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
    return mask.to(dtype)
