"""Dropout layers: they have no weights, but which units they drop is a draw, in eval mode too."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.layers.base import BayesLayer, bayes_form
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


BayesDropout = bayes_form(_BayesDropout, nn.Dropout)  # any shape; every element is dropped on its own
# Whole channels of (R, C, ...) are dropped.
BayesDropout1d = bayes_form(_BayesDropout, nn.Dropout1d, unit="channel", unbatched=2)
BayesDropout2d = bayes_form(_BayesDropout, nn.Dropout2d, unit="channel")
BayesDropout3d = bayes_form(_BayesDropout, nn.Dropout3d, unit="channel", unbatched=4)
# What is dropped gets SELU's negative limit, and mean and variance are kept.
BayesAlphaDropout = bayes_form(_BayesDropout, nn.AlphaDropout, selu=True)
BayesFeatureAlphaDropout = bayes_form(_BayesDropout, nn.FeatureAlphaDropout, selu=True, unit="channel")
