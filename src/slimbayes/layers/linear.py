"""Linear: weight (out, in), channels last, any leading dimensions."""

import torch.nn.functional as F
from torch import Tensor, nn

from slimbayes.layers.base import BayesLayer, LinearMap, matrix_outer
from slimbayes.posteriors.base import Site


class BayesLinear(BayesLayer, nn.Linear):
    """An nn.Linear whose weight is drawn from `posterior["weight"]`.

    Shape: (R, ..., in) -> (R, ..., out) with R rows; a single vector (in,) counts as one row.
    """

    plain = nn.Linear
    channels_last = True

    def sites(self) -> list[Site]:
        return [Site("weight", self.in_features, self.out_features, self.bias is not None, "weight", tuple(self.weight.shape))]

    def linear_map(self, site: str) -> LinearMap:
        return LinearMap(self.weight, self.bias, F.linear, matrix_outer, self.batch_dim, -1, self.posterior[site].name)

    def count_rows(self, input: Tensor) -> int:
        return 1 if input.dim() == 1 else input.shape[self.batch_dim]

    def run(self, input: Tensor) -> Tensor:
        if input.dim() == 1:
            return self.project("weight", input.unsqueeze(0)).squeeze(0)
        return self.project("weight", input)
