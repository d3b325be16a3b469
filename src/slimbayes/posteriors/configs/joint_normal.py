"""The config of Gaussians that join all factors, or all weights, of a layer; posteriors/joint_normal.py says what they
are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from slimbayes.distributions.families import Distribution, Normal, Point
from slimbayes.posteriors.configs.base import check_choice, check_count, check_distribution, check_positive
from slimbayes.posteriors.configs.rank1 import FactorConfig

if TYPE_CHECKING:
    from slimbayes.layers.site import Site
    from slimbayes.posteriors.base import Posterior

Over = Literal["both", "both+bias", "r", "s", "weights"]


@dataclass(frozen=True, kw_only=True)
class JointNormal(FactorConfig):
    """A Gaussian with a full covariance over the rank-1 factors of a layer, or over its weights: what `laplace` fits.

    Args:
        over: "both" factors, "both+bias", "r" (outputs) or "s" (inputs), the other one a point estimate; or the
            "weights" and biases themselves.
        members: K Gaussians that are mixed; of weights there is one.
        prior: a `Normal`, the same for every number; beside factors that of biases has mean zero.
        scale_init: where standard deviations start; correlations start at zero.
        full_up_to: matrices with more numbers than that have independent ones: a covariance holds their square.
        beyond: what weights of such matrices have instead: "independent" numbers, or a covariance that is a "kronecker"
            product, of dense layers and convolutions without groups.
        mean_init: where factors start: `Point(1)` keeps a network as it was.
        member_bias: whether members get their own biases.
        directions: k, so that factors have the prior's kind of Gaussian but for k directions: what `laplace` finds
            where data tell of few. None for a covariance that is whole.

    Example:
        >>> import slimbayes as sb, torch
        >>> net = sb.bayesianize(torch.nn.Linear(4, 3), sb.JointNormal())
        >>> net.posterior["weight"].covariance().shape  # of 3 output and 4 input factors
        torch.Size([1, 7, 7])
    """

    over: Over = "both"
    members: int = 1
    prior: Distribution = Normal(1.0, 0.1)  # noqa: RUF009 (immutable)
    scale_init: float = 0.01
    full_up_to: int = 1024
    beyond: Literal["independent", "kronecker"] = "independent"
    mean_init: Distribution = Point(1.0)  # noqa: RUF009 (immutable)
    member_bias: bool = True
    directions: int | None = None

    def __post_init__(self) -> None:
        check_choice(self, "over", self.over, ("both", "both+bias", "r", "s", "weights"))
        check_choice(self, "beyond", self.beyond, ("independent", "kronecker"))
        check_count(self, "members", self.members)
        check_distribution(self, "mean_init", self.mean_init)
        if not isinstance(self.prior, Normal):
            raise ValueError(f"JointNormal: the KL is known for a Normal prior, got {self.prior!r}.")
        check_positive(self, "scale_init", self.scale_init)
        for name, value in (("full_up_to", self.full_up_to), ("directions", self.directions or 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"JointNormal: {name} must be a whole number, got {value!r}.")
        if self.directions is not None and self.over == "weights":
            raise ValueError(
                f"JointNormal: directions are of factors, and over='weights' has none: got {self.directions}."
            )
        if self.beyond == "kronecker" and self.over != "weights":
            raise ValueError(
                f"JointNormal: a Kronecker product is of matrices, and factors are vectors: beyond='kronecker' needs "
                f"over='weights', got {self.over!r}."
            )
        if self.over == "weights" and self.members > 1:
            raise ValueError(f"JointNormal: weights have one member, got members={self.members!r}; use over='both'.")

    @property
    def covers(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("matrix", "table") if self.over == "weights" else super().covers

    def extra_flops(self, site: Site) -> float:
        """Of factors, as `Rank1`; weights are drawn once a pass."""
        return 0.0 if self.over == "weights" else 0.5 * (site.n_in + site.n_out)

    def build(self, site: Site) -> Posterior:
        from slimbayes.posteriors.joint_factors import JointFactors
        from slimbayes.posteriors.joint_normal import JointWeights
        from slimbayes.posteriors.kronecker_weights import KroneckerWeights, is_product

        if self.over != "weights":
            return JointFactors(self, site)
        return KroneckerWeights(self, site) if is_product(self, site) else JointWeights(self, site)

    def describe(self) -> str:
        return f"JointNormal({self.over}, members={self.members})"
