"""The config of mean-field variational inference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slimbayes.posteriors.configs.gaussian import GaussianConfig

if TYPE_CHECKING:
    from slimbayes.layers.site import Site
    from slimbayes.posteriors.base import Posterior


@dataclass(frozen=True, kw_only=True)
class MeanField(GaussianConfig):
    """Mean-field Gaussian posterior over all weights: twice the parameters of the plain model.

    Args:
        prior: `Normal`, `HeNormal`, `TiedMean`, `LaplacePrior` (L1), `EmpiricalBayes` or `ScaleMixture`. Different
            layers may have different ones: give bayesianize a mapping from name patterns to configs.
        estimator: "reparam", "flipout" or "local" (see posteriors/gaussian.py).
        scale_init, scale_jitter: scales start at Normal(scale_init, scale_jitter).
        bias: "point" keeps biases point estimates, "gaussian" gives them posteriors too.
        max_scale: cap on the scales.
        independent_positions: lets "local" draw independent noise at positions that share their weights.

    Example:
        >>> import slimbayes as sb, torch
        >>> net = sb.bayesianize(torch.nn.Linear(3, 2), sb.MeanField(prior=sb.Normal(0.0, 0.3), estimator="flipout"))
        >>> sb.sample(net, torch.randn(5, 3), draws=4).shape
        torch.Size([4, 5, 2])
    """

    def build(self, site: Site) -> Posterior:
        from slimbayes.posteriors.mean_field import MeanFieldPosterior

        return MeanFieldPosterior(self, site)
