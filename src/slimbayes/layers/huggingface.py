"""transformers' Conv1D (GPT-2): a Linear that stores its weight as (in, out). Imported when one is met."""

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from slimbayes.layers.base import BayesLayer, register_layer
from slimbayes.layers.parameters import own_value
from slimbayes.layers.site import Site, table_outer


@register_layer
class BayesConv1D(BayesLayer, Conv1D):
    """A transformers Conv1D whose weight is drawn from `posterior["weight"]`.

    Shape: (R, ..., in) -> (R, ..., out).
    """

    plain = Conv1D
    bayes_out_dim = 1

    def sites(self) -> list[Site]:
        n_in, n_out = own_value(self, "weight").shape
        return [Site("weight", n_in, n_out, True, "weight", (n_in, n_out), out_dim=1)]

    @classmethod
    def may_hold_rows(cls, dim: int, ndim: int) -> bool:
        return dim < ndim - 1

    def bayes_op(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = x @ weight if bias is None else torch.addmm(bias, x.reshape(-1, x.size(-1)), weight)
        return y.view(*x.shape[:-1], weight.shape[1])

    def bayes_outer(self, r: Tensor, s: Tensor) -> Tensor:
        return table_outer(r, s)
