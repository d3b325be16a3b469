"""Dropout layers: they have no weights, but which units they drop is a draw, in eval mode too."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.layers.base import BayesLayer, register_layer
from slimbayes.layers.site import LinearMap, Site, Unit, diagonal_outer


@dataclass
class DropMap(LinearMap):
    """The identity, and how the layer drops: its rate, its unit, and whether it keeps SELU's moments."""

    rate: float = 0.0
    unit: Unit = "element"
    selu: bool = False


class _BayesDropout(BayesLayer):
    bayes_kind = "dropout"
    bayes_channel_dim = 1
    read_names = ()
    unit: Unit = "element"
    selu = False
    unbatched: int | None = None  # dimensions of an input without a row axis, where torch allows one

    def sites(self) -> list[Site]:
        return [Site("units", 0, 0, False, "", (0,), positions="many", kind="dropout")]

    def bayes_op(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        return x

    def linear_map(self, site: str, batch_dim: int = 0) -> DropMap:
        how = {"rate": self.p, "unit": self.unit, "selu": self.selu}
        return DropMap(torch.empty(0), None, self.bayes_op, diagonal_outer, batch_dim, self.bayes_channel_dim, **how)

    def bayes_forward(self, input: Tensor) -> Tensor:
        return self.project_draw("units", input, unbatched=self.unbatched)


@register_layer
class BayesDropout(_BayesDropout, nn.Dropout):
    """Shape: any; every element is dropped on its own."""

    plain = nn.Dropout


@register_layer
class BayesDropout1d(_BayesDropout, nn.Dropout1d):
    """Shape: (R, C, L); whole channels are dropped."""

    plain, unit, unbatched = nn.Dropout1d, "channel", 2


@register_layer
class BayesDropout2d(_BayesDropout, nn.Dropout2d):
    """Shape: (R, C, H, W); whole channels are dropped."""

    plain, unit = nn.Dropout2d, "channel"


@register_layer
class BayesDropout3d(_BayesDropout, nn.Dropout3d):
    """Shape: (R, C, D, H, W); whole channels are dropped."""

    plain, unit, unbatched = nn.Dropout3d, "channel", 4


@register_layer
class BayesAlphaDropout(_BayesDropout, nn.AlphaDropout):
    """Shape: any; dropped elements get SELU's negative limit, and mean and variance are kept."""

    plain, selu = nn.AlphaDropout, True


@register_layer
class BayesFeatureAlphaDropout(_BayesDropout, nn.FeatureAlphaDropout):
    """Shape: (R, C, ...); whole channels are dropped as in AlphaDropout."""

    plain, selu, unit = nn.FeatureAlphaDropout, True, "channel"
