"""transformers' Conv1D (GPT-2): a Linear that stores its weight as (in, out). Imported only when such a layer is met."""

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from slimbayes.layers.base import BayesLayer, LinearMap, mask_of, own_value
from slimbayes.posteriors.base import Site


def _op(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x @ weight if bias is None else torch.addmm(bias, x.reshape(-1, x.size(-1)), weight)
    return y.view(*x.shape[:-1], weight.shape[1])


def _outer(r: Tensor, s: Tensor) -> Tensor:
    return torch.outer(s, r)


class BayesConv1D(BayesLayer, Conv1D):
    """A transformers Conv1D whose weight is drawn from `posterior["weight"]`.

    Shape: (R, ..., in) -> (R, ..., out).
    """

    plain = Conv1D

    def sites(self) -> list[Site]:
        shape = tuple(own_value(self, "weight").shape)
        return [Site("weight", *shape, True, "weight", shape, out_dim=1)]

    @classmethod
    def may_hold_rows(cls, dim: int, ndim: int) -> bool:
        return dim < ndim - 1

    def linear_map(self, site: str, batch_dim: int = 0) -> LinearMap:
        weight, bias = self.own_value("weight"), self.own_value("bias")
        return LinearMap(weight, bias, _op, _outer, batch_dim, -1, self.posterior[site].name, mask=mask_of(self))

    def bayes_forward(self, x: Tensor) -> Tensor:
        return self.project_draw("weight", x)
