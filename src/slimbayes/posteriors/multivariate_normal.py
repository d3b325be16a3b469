"""Multivariate normal posteriors: a full covariance of all weights of a matrix (Table 1 of Swiatkowski et al. 2020).

vec W ~ Normal(vec mean, T T^T)         T lower triangular, mn x mn;  vec takes row after row of the matrix view
"""

from __future__ import annotations

from torch import Tensor

from slimbayes.layers.site import Site
from slimbayes.posteriors.configs.multivariate_normal import MultivariateNormal as MultivariateNormal
from slimbayes.posteriors.correlated import CorrelatedPosterior, Triangle


class MultivariateNormalPosterior(CorrelatedPosterior):
    """The factor T (mn, mn)."""

    def __init__(self, config: MultivariateNormal, site: Site) -> None:
        super().__init__(config, site)
        m, n = site.matrix
        self.factor = Triangle(m * n, config.scale_init)

    def spread(self, noise: Tensor) -> Tensor:
        return (noise.flatten(1) @ self.factor.matrix().T).view(noise.shape)

    def variances(self, free: Tensor) -> Tensor:
        return (self.factor.matrix().square() @ free.flatten()).view(free.shape)

    def log_diagonal(self) -> Tensor:
        return self.factor.log_scale.view(self.site.matrix)
