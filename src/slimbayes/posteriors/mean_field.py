"""Mean-field variational inference: a Normal posterior for every weight (Blundell et al. 2015; the baseline of both
papers).

    W_ij ~ Normal(mean_ij, sigma_ij)      mean: the layer's own weight;  log sigma: a free parameter for each weight

The means are the layer's weights themselves, so a trained network stays itself and a base checkpoint loads. They train
together with the posterior: save with base=True, unless the base is frozen.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from slimbayes.layers.site import Site
from slimbayes.posteriors.base import Posterior
from slimbayes.posteriors.gaussian import GaussianConfig, GaussianPosterior, initial_log_scale


@dataclass(frozen=True, kw_only=True)
class MeanField(GaussianConfig):
    """Mean-field Gaussian posterior over all weights: twice the parameters of the plain model.

    Args:
        prior: `Normal`, `HeNormal`, `TiedMean`, `EmpiricalBayes` or `ScaleMixture`. Different layers may have different
            ones: give bayesianize a mapping from name patterns to configs.
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
        return MeanFieldPosterior(self, site)


class MeanFieldPosterior(GaussianPosterior):
    """One log scale for each weight."""

    def __init__(self, config: MeanField, site: Site) -> None:
        super().__init__(config, site)
        self.weight_log_scale = nn.Parameter(initial_log_scale(config, site.shape))

    def raw_log_scale(self) -> Tensor:
        return self.weight_log_scale
