"""What configs of posteriors with correlated weights share."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slimbayes.distributions.families import Distribution, Normal
from slimbayes.distributions.priors import HeNormal
from slimbayes.errors import brief
from slimbayes.posteriors.configs.base import SiteConfig

if TYPE_CHECKING:
    from slimbayes.layers.site import Site


@dataclass(frozen=True, kw_only=True)
class CorrelatedConfig(SiteConfig):
    """What configs of posteriors with correlated weights share; `MultivariateNormal` describes the fields."""

    prior: Distribution = Normal(0.0, 1.0)  # noqa: RUF009 (immutable)
    scale_init: float = 0.01
    limit: int = 10_000_000

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not isinstance(self.prior, (Normal, HeNormal)):
            raise ValueError(f"{name}: the KL is known for a Normal or HeNormal prior, got {brief(self.prior)}.")
        if not self.scale_init > 0:
            raise ValueError(f"{name}: scale_init must be positive, got {brief(self.scale_init)}.")
        if not isinstance(self.limit, int) or isinstance(self.limit, bool) or self.limit < 1:
            raise ValueError(f"{name}: limit must be a whole number of at least 1, got {brief(self.limit)}.")

    @abstractmethod
    def numbers(self, m: int, n: int) -> int:
        """How many numbers the covariance of an m x n matrix takes."""

    def check_size(self, site: Site) -> None:
        """Refuse a matrix whose covariance would take more numbers than the limit."""
        m, n = site.matrix
        if self.numbers(m, n) > self.limit:
            raise ValueError(
                f"{type(self).__name__}: the covariance of a {m:,} x {n:,} matrix takes {self.numbers(m, n):,} numbers "
                f"({4e-9 * self.numbers(m, n):,.2f} GB), and limit={self.limit:,}. Use KTied or MeanField, or raise it."
            )

    def describe(self) -> str:
        return type(self).__name__
