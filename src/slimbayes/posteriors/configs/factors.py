"""What configs of rank-1 methods share: the families of their factors, and where they go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slimbayes.distributions.families import Cauchy, Distribution, LogNormal, Normal, Point
from slimbayes.posteriors.configs.base import SiteConfig

if TYPE_CHECKING:
    from torch import nn

    from slimbayes.layers.site import Kind

FAMILY: dict[str, type[Distribution]] = {"normal": Normal, "cauchy": Cauchy, "lognormal": LogNormal, "point": Point}


class FactorConfig(SiteConfig):
    """What configs of rank-1 methods share: where they go."""

    @property
    def covers(self) -> tuple[Kind, ...]:
        return ("matrix", "quantised", "table")

    def leaves_alone(self, layer: nn.Module) -> str:
        from slimbayes.layers import kind_of

        why = "rank-1 methods leave embeddings alone, as the paper does; include it by name to convert it"
        return why if kind_of(layer) == "table" else ""
