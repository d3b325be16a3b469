"""Linear: weight (out, in), channels last, any leading dimensions."""

import torch.nn.functional as F
from torch import Tensor, nn

from slimbayes.layers.base import BayesLayer, LinearMap, has, mask_of, matrix_outer
from slimbayes.posteriors.base import Site


class BayesLinear(BayesLayer, nn.Linear):
    """An nn.Linear whose weight is drawn from `posterior["weight"]`.

    Shape: (R, ..., in) -> (R, ..., out) with R rows; a single vector (in,) counts as one row.
    """

    plain = nn.Linear

    def sites(self) -> list[Site]:
        shape = (self.out_features, self.in_features)
        return [Site("weight", self.in_features, self.out_features, has(self, "bias"), "weight", shape)]

    @classmethod
    def may_hold_rows(cls, dim: int, ndim: int) -> bool:
        return dim < ndim - 1

    def linear_map(self, site: str, batch_dim: int = 0) -> LinearMap:
        weight, bias = self.own_value("weight"), self.own_value("bias")
        return LinearMap(
            weight, bias, F.linear, matrix_outer, batch_dim, -1, self.posterior[site].name, mask=mask_of(self)
        )

    def bayes_forward(self, input: Tensor) -> Tensor:
        if input.dim() == 1:
            return self.project_draw("weight", input.unsqueeze(0), 0).squeeze(0)
        return self.project_draw("weight", input)
