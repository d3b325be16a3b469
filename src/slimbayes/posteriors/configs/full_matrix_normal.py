"""The config of matrix normal posteriors with full covariances; posteriors/full_matrix_normal.py says what they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slimbayes.posteriors.configs.correlated import CorrelatedConfig

if TYPE_CHECKING:
    from slimbayes.layers.site import Site
    from slimbayes.posteriors.base import Posterior


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

    def numbers(self, m: int, n: int) -> int:
        return m * (m + 1) // 2 + n * (n + 1) // 2

    def build(self, site: Site) -> Posterior:
        from slimbayes.posteriors.full_matrix_normal import FullMatrixNormalPosterior

        return FullMatrixNormalPosterior(self, site)
