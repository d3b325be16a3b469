"""Linear: weight (out, in), channels last, any leading dimensions."""

import torch.nn.functional as F
from torch import Tensor, nn

from slimbayes.layers.base import BayesLayer, register_layer
from slimbayes.layers.parameters import has
from slimbayes.layers.site import Site


@register_layer
class BayesLinear(BayesLayer, nn.Linear):
    """An nn.Linear whose weight is drawn from `posterior["weight"]`.

    Shape: (R, ..., in) -> (R, ..., out) with R rows; a single vector (in,) counts as one row.
    """

    plain = nn.Linear
    bayes_out_dim = 0

    def sites(self) -> list[Site]:
        shape = (self.out_features, self.in_features)
        return [Site("weight", self.in_features, self.out_features, has(self, "bias"), "weight", shape)]

    @classmethod
    def may_hold_rows(cls, dim: int, ndim: int) -> bool:
        return dim < ndim - 1

    def bayes_op(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def bayes_forward(self, input: Tensor) -> Tensor:
        return self.project_draw("weight", input, unbatched=1)
