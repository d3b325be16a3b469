"""Linear: weight (out, in), channels last, any leading dimensions.

Its weight may be stored as integers (bitsandbytes' Linear8bitLt and Linear4bit, and their like): factors scale what
goes in and what comes out, so the layer's own forward does the rest, whatever its kernel. The weight is neither read
nor changed, and methods that draw weights leave such layers alone.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from slimbayes.layers.base import BayesLayer, made_once, register_layer
from slimbayes.layers.parameters import has
from slimbayes.layers.site import LinearMap, Site


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


class Quantised(BayesLayer):
    """Mixin of linear layers that run their own forward between factors."""

    bayes_kind = "quantised"
    bayes_note = "factors around the layer's own forward"
    read_names = ()  # its forward reads the weight as it is

    def sites(self) -> list[Site]:
        n_in, n_out = self.in_features, self.out_features
        return [Site("weight", n_in, n_out, has(self, "bias"), "weight", (n_out, n_in), kind="quantised")]

    @classmethod
    def may_hold_rows(cls, dim: int, ndim: int) -> bool:
        return dim < ndim - 1

    def bayes_op(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        own, y = self._parameters.get("bias"), self.plain.forward(self, x)
        y = y if own is None else y - own.to(y.dtype)  # it comes after the factors
        return y if bias is None else y + bias.to(y.dtype)

    def linear_map(self, site: str, batch_dim: int = 0) -> LinearMap:
        linear = super().linear_map(site, batch_dim)
        linear.foldable = False
        return linear

    bayes_forward = BayesLinear.bayes_forward


def is_quantised(layer: nn.Module) -> bool:
    """Whether a linear layer stores integers.

    >>> is_quantised(nn.Linear(2, 2))
    False
    """
    weight = layer._parameters.get("weight")
    return isinstance(layer, nn.Linear) and weight is not None and not weight.is_floating_point()


@made_once
def quantised_class(plain: type[nn.Module]) -> type[BayesLayer]:
    """The class of converted layers of one type."""
    return type(f"Bayes{plain.__name__}", (Quantised, plain), {"plain": plain, "__module__": __name__})
