"""DropConnect (Wan et al. 2013) as variational inference: the case of `Mixture` that sets single weights to zero.

Table 2 of Chang et al. 2019:   K = 2, M_2 = 0, one pick for every weight; biases are never dropped.
"""

from dataclasses import dataclass
from typing import ClassVar

from slimbayes.posteriors.base import Config, Posterior, Site, check_choice, check_rate
from slimbayes.posteriors.component_config import Draws
from slimbayes.posteriors.mixture import Mixture, MixturePosterior

_EMBEDDINGS = "DropConnect leaves embeddings alone; include it by name to convert it"


@dataclass(frozen=True, kw_only=True)
class DropConnect(Config):
    """Set every weight to zero with probability `rate`, in eval mode too, and divide the others by 1 - rate.

    Args:
        rate: probability of dropping a weight.
        draws: "forward" drops once for each draw of a pass; "example" for every row, which takes a weight matrix for each.
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
    leaves_alone: ClassVar[dict[str, str]] = {"Embedding": _EMBEDDINGS, "EmbeddingBag": _EMBEDDINGS}

    def __post_init__(self) -> None:
        check_rate(self, "rate", self.rate)
        check_choice(self, "draws", self.draws, ("forward", "example"))
        self._mixture()

    def _mixture(self) -> Mixture:
        return Mixture(
            components=2,
            assignment="element",
            zero=True,
            probs=(1 - self.rate, self.rate),
            draws=self.draws,
            tau=self.tau,
            rho=self.rho,
        )

    def build(self, site: Site) -> Posterior:
        return MixturePosterior(self._mixture(), site)

    def describe(self) -> str:
        return f"DropConnect(rate={self.rate})"
