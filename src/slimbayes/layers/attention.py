"""MultiheadAttention: the query, key, value and output projections are four sites.

torch's own forward calls its projections' weights directly (out_proj's forward never runs), so the attention is written out here
around the posteriors' projections. nn.TransformerEncoder and Decoder layers call it like the plain module.

Sizes: R rows, L queries, S keys, E channels, h heads.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimbayes.layers.base import BayesLayer, LinearMap, matrix_outer
from slimbayes.posteriors.base import Site

_BLOCKS = {"q": 0, "k": 1, "v": 2}


class BayesMultiheadAttention(BayesLayer, nn.MultiheadAttention):
    """An nn.MultiheadAttention with posteriors "q", "k", "v" and "out".

    Shape: as nn.MultiheadAttention: query (L, R, E), or (R, L, E) with batch_first, or unbatched (L, E).
    """

    plain, read_names = nn.MultiheadAttention, ()

    def sites(self) -> list[Site]:
        bias, size = self.in_proj_bias is not None, self.embed_dim
        inputs = {"q": size, "k": self.kdim, "v": self.vdim}
        packed = self._qkv_same_embed_dim
        sites = [
            Site(n, m, size, bias, "in_proj_weight" if packed else f"{n}_proj_weight", (size, m), positions="many")
            for n, m in inputs.items()
        ]
        return [
            *sites,
            Site("out", size, size, self.out_proj.bias is not None, "out_proj.weight", (size, size), positions="many"),
        ]

    def may_hold_rows(self, dim: int, ndim: int) -> bool:  # type: ignore[override]
        return ndim == 3 and dim == (0 if self.batch_first else 1)

    def linear_map(self, site: str, batch_dim: int = 0) -> LinearMap:
        weight, bias = self._parameters_of(site)
        return LinearMap(
            weight, bias, F.linear, matrix_outer, 0 if self.batch_first else 1, -1, self.posterior[site].name
        )

    def _parameters_of(self, site: str) -> tuple[Tensor, Tensor | None]:
        if site == "out":
            return self.out_proj.weight, self.out_proj.bias
        rows = slice(_BLOCKS[site] * self.embed_dim, (_BLOCKS[site] + 1) * self.embed_dim)
        weight = self.in_proj_weight[rows] if self._qkv_same_embed_dim else getattr(self, f"{site}_proj_weight")
        return weight, None if self.in_proj_bias is None else self.in_proj_bias[rows]

    def write_draw(self, plain: Any, site: Site, weight: Tensor, bias: Tensor | None) -> None:
        rows = slice(_BLOCKS.get(site.name, 0) * self.embed_dim, (_BLOCKS.get(site.name, 0) + 1) * self.embed_dim)
        if site.name == "out":
            plain.out_proj.weight.copy_(weight)
        elif self._qkv_same_embed_dim:
            plain.in_proj_weight[rows] = weight
        else:
            getattr(plain, f"{site.name}_proj_weight").copy_(weight)
        if bias is not None and site.name == "out":
            plain.out_proj.bias.copy_(bias)
        elif bias is not None:
            plain.in_proj_bias[rows] = bias

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
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        rows = 1 - seq
        q, k, v = (
            self.project_draw("q", query, rows),
            self.project_draw("k", key, rows),
            self.project_draw("v", value, rows),
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
            y, weights = y.squeeze(1 - seq), None if weights is None else weights.squeeze(0)
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

    def _mask(self, q: Tensor, keys: int, padding: Tensor | None, attn: Tensor | None, extra: int) -> Tensor | None:
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
        heads = [t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v)]
        dropout = self.dropout if self.training else 0.0
        if not need_weights:
            y = F.scaled_dot_product_attention(*heads, attn_mask=mask, dropout_p=dropout)
            return y.transpose(1, 2).flatten(2), None
        scores = heads[0] @ heads[1].transpose(-1, -2) / math.sqrt(heads[0].shape[-1])
        weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, -1), dropout)
        return (weights @ heads[2]).transpose(1, 2).flatten(2), weights


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
    return mask.to(dtype)
