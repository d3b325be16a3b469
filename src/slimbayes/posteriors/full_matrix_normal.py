"""The matrix normal posterior with full covariances of rows and of columns (Louizos & Welling 2016; Sun et al. 2017).

    W = mean + A E B^T      E ~ Normal(0, 1) for each weight;  A (m x m) and B (n x n) lower triangular

So T = A (x) B is the Cholesky factor of the covariance of all weights. With diagonal A and B it is `MatrixNormal`, the
1-tied Normal.

    KL(q || Normal(m, s)) = (sum_ij T_ij^2 + |mean - m|^2) / (2 s^2) - D / 2 + D log s - sum_i log T_ii

Weights that stay as they are (padding, pruned) have no noise and get none: rows and columns are struck from T, which
leaves it triangular, so the formula holds for the others.

Sizes: m x n the matrix view of a weight, D = m n its weights, d draws of a pass.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.distributions.scales import cholesky_factor, widen
from slimbayes.distributions.sums import sum_dtype
from slimbayes.engine.passes import Noise
from slimbayes.engine.rows import LinearMap
from slimbayes.layers.site import Site
from slimbayes.posteriors.base import WeightPosterior
from slimbayes.posteriors.configs.weights import FullMatrixNormal


class Triangle(nn.Module):
    """A lower triangular matrix with a positive diagonal: exp(log_scale) times a matrix with ones on its diagonal.

    So correlations do not depend on the scale, and n (n + 1) / 2 numbers are free.
    """

    def __init__(self, size: int, scale: float) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.full((size,), math.log(scale)))
        self.below = (
            nn.Parameter(torch.zeros(size * (size - 1) // 2)) if size > 1 else None
        )

    def matrix(self) -> Tensor:
        """The triangle (n, n), in float32 at least."""
        return cholesky_factor(self.log_scale, self.below)


class FullMatrixNormalPosterior(WeightPosterior):
    """The factors A (m, m) and B (n, n) around the layer's own weight."""

    regularises_mean = True
    prior: Any  # of the weights of this layer: a Normal

    def __init__(self, config: FullMatrixNormal, site: Site) -> None:
        super().__init__()
        config.check_size(site)
        self.site, self.prior = site, config.prior.for_layer(site.matrix[0])
        self.rows, self.columns = (
            Triangle(size, math.sqrt(config.scale_init)) for size in site.matrix
        )

    def spread(self, noise: Tensor) -> Tensor:
        """A E B^T of noise (d, m, n)."""
        return self.rows.matrix() @ noise @ self.columns.matrix().T

    def variances(self, free: Tensor) -> Tensor:
        """Variance of each weight where noise is that of the free ones, marked by ones in (m, n): (m, n)."""
        return self.rows.matrix().square() @ free @ self.columns.matrix().square().T

    def log_diagonal(self) -> Tensor:
        """log T_ii of each weight, (m, n)."""
        return self.rows.log_scale.unsqueeze(1) + self.columns.log_scale

    def scale(self) -> Tensor:
        """Standard deviation of each weight by itself, in the shape of the stored weight."""
        every = torch.ones(self.site.matrix, device=self.device, dtype=self.dtype)
        return self.site.from_matrix(self.variances(every).sqrt())

    def widths(self, rowwise: bool) -> tuple[int, int]:
        return math.prod(self.site.shape), 0

    def draw(self, noise: Noise) -> Tensor:
        """Deviations from the mean, (d, *shape)."""
        free = self._free(self.linear_map())
        return self.site.from_matrix(self.spread(self._normal(noise.block) * free))

    def _normal(self, lines: Tensor) -> Tensor:
        return lines.reshape(-1, *self.site.matrix)

    def _free(self, linear: LinearMap) -> Tensor:
        """One for each weight with a distribution, zero for what stays as it is, (m, n)."""
        every = torch.ones(self.site.shape, device=self.device, dtype=self.dtype)
        return self.site.to_matrix(linear.masked(every))

    def kl(self) -> Tensor:
        linear = self.linear_map()
        mean, free = self.site.to_matrix(widen(linear.weight)), self._free(linear)
        prior = self.prior
        # Terms that nearly cancel beside the prior are summed in more digits.
        squares = (
            free
            * (self.variances(free) + (mean - prior.loc).square())
            * (0.5 / prior.scale**2)
        )
        terms = squares - free * (0.5 - math.log(prior.scale) + self.log_diagonal())
        return terms.sum(dtype=sum_dtype(terms)).to(mean.dtype)

    def log_ratio(self) -> Tensor:
        linear = self.linear_map()
        free, noise = (
            self._free(linear).double(),
            self._normal(self.noise.block).double(),
        )
        drawn = (linear.weight + self.values()).double()
        weights = torch.stack([self.site.to_matrix(one) for one in drawn])
        log_q = (
            -0.5 * noise.square()
            - self.log_diagonal().double()
            - 0.5 * math.log(2 * math.pi)
        )
        return (free * (self.prior.log_prob(weights) - log_q)).flatten(1).sum(1)

    def against_prior(self) -> list[tuple[Tensor, Tensor]]:
        linear = self.linear_map()
        mean, free = (
            self.site.to_matrix(widen(linear.weight.detach())),
            self._free(linear),
        )
        prior, deviation = self.prior, self.variances(free).detach().sqrt()
        return [
            (
                ((mean - prior.loc) / prior.scale)[free > 0],
                deviation[free > 0] / prior.scale,
            )
        ]
