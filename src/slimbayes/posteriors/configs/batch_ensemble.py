"""BatchEnsemble (Wen et al. 2020): the point-estimate case of rank-1 Bayesian neural nets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from slimbayes.distributions.families import Distribution, Signs
from slimbayes.posteriors.configs.factors import FactorConfig
from slimbayes.posteriors.configs.rank1 import Rank1

if TYPE_CHECKING:
    from slimbayes.layers.site import Site
    from slimbayes.posteriors.base import Posterior


@dataclass(frozen=True, kw_only=True)
class BatchEnsemble(FactorConfig):
    """BatchEnsemble: K members that share W and differ by point-estimated rank-1 factors and biases.

    Args: as in `Rank1`. Point factors have no prior and no scale, and a member makes the same prediction every time.

    Example:
        >>> import slimbayes as sb, torch
        >>> net = sb.bayesianize(torch.nn.Linear(3, 2), sb.BatchEnsemble(members=4))
        >>> sb.kl(net)
        tensor(0.)
    """

    members: int = 4
    perturbation: Literal["multiplicative", "additive"] = "multiplicative"
    mean_init: Distribution = Signs(0.5)  # noqa: RUF009 (immutable)
    member_bias: bool = True
    rank: int = 1

    def __post_init__(self) -> None:
        self._rank1()

    def _rank1(self) -> Rank1:
        return Rank1(
            members=self.members, posterior="point", perturbation=self.perturbation, mean_init=self.mean_init,
            member_bias=self.member_bias, rank=self.rank, clip=None, draws="member",
        )  # fmt: skip

    def extra_flops(self, site: Site) -> float:
        """As `Rank1`."""
        return self._rank1().extra_flops(site)

    def build(self, site: Site) -> Posterior:
        return self._rank1().build(site)
