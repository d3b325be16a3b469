"""Matrix normal posteriors with full covariances (Louizos & Welling 2016; Sun et al. 2017).

    W = mean + A E B^T          A (m x m) and B (n x n) lower triangular;  covariances A A^T of rows, B B^T of columns

The covariance of all weights is the Kronecker product of both. With diagonal A and B this is `MatrixNormal`, the 1-tied
Normal.
"""

from __future__ import annotations

import math

from torch import Tensor

from slimbayes.layers.site import Site
from slimbayes.posteriors.configs.full_matrix_normal import FullMatrixNormal as FullMatrixNormal
from slimbayes.posteriors.correlated import CorrelatedPosterior, Triangle


class FullMatrixNormalPosterior(CorrelatedPosterior):
    """The factors A (m, m) and B (n, n)."""

    def __init__(self, config: FullMatrixNormal, site: Site) -> None:
        super().__init__(config, site)
        self.rows, self.columns = (Triangle(size, math.sqrt(config.scale_init)) for size in site.matrix)

    def spread(self, noise: Tensor) -> Tensor:
        return self.rows.matrix() @ noise @ self.columns.matrix().T

    def variances(self, free: Tensor) -> Tensor:
        return self.rows.matrix().square() @ free @ self.columns.matrix().square().T

    def log_diagonal(self) -> Tensor:
        return self.rows.log_scale.unsqueeze(1) + self.columns.log_scale
