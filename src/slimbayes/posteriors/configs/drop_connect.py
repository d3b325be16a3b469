"""DropConnect (Wan et al. 2013) as variational inference: the case of `Mixture` that sets single weights to zero.

Table 2 of Chang et al. 2019:   K = 2, M_2 = 0, one pick for every weight; biases are never dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slimbayes.posteriors.checks import check_choice, check_rate
from slimbayes.posteriors.configs.base import SiteConfig
from slimbayes.posteriors.configs.components import Draws
from slimbayes.posteriors.configs.mixture import Mixture, dropping

if TYPE_CHECKING:
    from torch import nn

    from slimbayes.layers.site import Site
    from slimbayes.posteriors.base import Posterior


@dataclass(frozen=True, kw_only=True)
class DropConnect(SiteConfig):
    """Set every weight to zero with probability `rate`, in eval mode too, and divide the others by 1 - rate.

    Args:
        rate: probability of dropping a weight.
        draws: "forward" drops once for each draw of a pass; "example" for every row, each with a weight matrix of its
            own.
        tau, rho: prior precisions of weights and biases, as in `Mixture`. By default the prior is left to weight decay.

    Example:
        >>> import slimbayes as sb, torch
        >>> net = sb.bayesianize(torch.nn.Linear(3, 2), DropConnect(rate=0.2))
        >>> sb.sample(net, torch.randn(5, 3), draws=4).shape
        torch.Size([4, 5, 2])
    """

    rate: float = 0.1
    draws: Draws = "forward"
    tau: float | None = None
    rho: float | None = None

    def __post_init__(self) -> None:
        check_rate(self, "rate", self.rate)
        check_choice(self, "draws", self.draws, ("forward", "example"))
        self._mixture()

    def _mixture(self) -> Mixture:
        return dropping("element", self.rate, self.draws, self.tau, self.rho)

    def leaves_alone(self, layer: nn.Module) -> str:
        from slimbayes.layers import kind_of

        why = "DropConnect leaves embeddings alone; include it by name to convert it"
        return why if kind_of(layer) == "table" else ""

    def build(self, site: Site) -> Posterior:
        from slimbayes.posteriors.mixture import MixturePosterior

        return MixturePosterior(self._mixture(), site)

    def describe(self) -> str:
        return f"DropConnect(rate={self.rate})"
