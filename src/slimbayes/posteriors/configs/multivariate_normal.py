"""The config of multivariate normal posteriors; posteriors/multivariate_normal.py says what they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slimbayes.posteriors.configs.correlated import CorrelatedConfig

if TYPE_CHECKING:
    from slimbayes.layers.site import Site
    from slimbayes.posteriors.base import Posterior


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

    def numbers(self, m: int, n: int) -> int:
        return m * n * (m * n + 1) // 2

    def build(self, site: Site) -> Posterior:
        from slimbayes.posteriors.multivariate_normal import MultivariateNormalPosterior

        return MultivariateNormalPosterior(self, site)
