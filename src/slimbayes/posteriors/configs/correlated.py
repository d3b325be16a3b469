"""The configs of Gaussian posteriors with correlated weights; posteriors/correlated.py says what they are."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from slimbayes.distributions.families import Distribution, Normal
from slimbayes.distributions.priors import HeNormal
from slimbayes.errors import brief
from slimbayes.posteriors.configs.base import SiteConfig, check_positive

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
        check_positive(self, "scale_init", self.scale_init)
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


@dataclass(frozen=True, kw_only=True)
class MultivariateNormal(CorrelatedConfig):
    """Gaussian posterior with a full covariance of all weights of a matrix: for small layers.

    An m x n matrix takes mn (mn + 1) / 2 numbers beside its mean. Biases stay points.

    Args:
        prior: `Normal` or `HeNormal`, independent for each weight.
        scale_init: standard deviation of all weights at the start, uncorrelated.
        limit: matrices that take more numbers are refused.

    Example:
        >>> import slimbayes as sb, torch
        >>> net = sb.bayesianize(torch.nn.Linear(3, 2), sb.MultivariateNormal())
        >>> sum(p.numel() for p in net.posterior.parameters())
        21
    """

    builds: ClassVar[str] = "correlated.MultivariateNormalPosterior"

    def numbers(self, m: int, n: int) -> int:
        return m * n * (m * n + 1) // 2


@dataclass(frozen=True, kw_only=True)
class FullMatrixNormal(CorrelatedConfig):
    """Matrix normal posterior with full covariances of rows and of columns; `MatrixNormal` has diagonal ones.

    An m x n matrix takes m (m + 1) / 2 + n (n + 1) / 2 numbers beside its mean. Biases stay points.

    Args: as in `MultivariateNormal`.

    Example:
        >>> import slimbayes as sb, torch
        >>> net = sb.bayesianize(torch.nn.Linear(3, 2), sb.FullMatrixNormal())
        >>> sum(p.numel() for p in net.posterior.parameters())
        9
    """

    builds: ClassVar[str] = "correlated.FullMatrixNormalPosterior"

    def numbers(self, m: int, n: int) -> int:
        return m * (m + 1) // 2 + n * (n + 1) // 2
