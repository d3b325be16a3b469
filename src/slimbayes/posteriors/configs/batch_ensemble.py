"""BatchEnsemble (Wen et al. 2020): the point-estimate case of rank-1 Bayesian neural nets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from slimbayes.distributions.families import Distribution, Normal
from slimbayes.posteriors.configs.factors import FactorConfig
from slimbayes.posteriors.configs.rank1 import Rank1

if TYPE_CHECKING:
    from slimbayes.layers.site import Site
    from slimbayes.posteriors.base import Posterior


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchEnsemble(FactorConfig):
    """BatchEnsemble: K members that share W and differ by point-estimated rank-1 factors and biases.

    Args: as in `Rank1`, but
        mean_init: where factors start. By default Normal(1, 0.2), which a trained network survives; from scratch
            Normal(1, 0.5) makes members differ more (docs/recipes.md), and Signs(0.5) is the paper's.

    Point factors have no prior and no scale, and a member makes the same prediction every time.

    Example:
        >>> import slimbayes as sb, torch
        >>> net = sb.bayesianize(torch.nn.Linear(3, 2), sb.BatchEnsemble(members=4))
        >>> sb.kl(net)
        tensor(0.)
    """

    members: int = 4
    perturbation: Literal["multiplicative", "additive"] = "multiplicative"
    mean_init: Distribution | None = None
    member_bias: bool = True
    rank: int = 1

    def __post_init__(self) -> None:
        self._rank1()

    def _rank1(self) -> Rank1:
        start = self.mean_init or Normal(0.0 if self.perturbation == "additive" else 1.0, 0.2)
        return Rank1(
            members=self.members, posterior="point", perturbation=self.perturbation, mean_init=start,
            member_bias=self.member_bias, rank=self.rank, clip=None, draws="member",
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """JSON form, with the start that follows from the rest."""
        return super(BatchEnsemble, replace(self, mean_init=self._rank1().mean_init)).to_dict()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BatchEnsemble) and self._rank1() == other._rank1()

    def __hash__(self) -> int:
        return hash(self._rank1())

    def extra_flops(self, site: Site) -> float:
        """As `Rank1`."""
        return self._rank1().extra_flops(site)

    def build(self, site: Site) -> Posterior:
        return self._rank1().build(site)
