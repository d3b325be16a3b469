"""Mean-field variational inference: a Normal posterior for every weight (Blundell et al. 2015; the baseline of both
papers).

    W_ij ~ Normal(mean_ij, sigma_ij)      mean: the layer's own weight;  log sigma: a free parameter for each weight

The means are the layer's weights themselves, so a trained network stays itself and a base checkpoint loads. They train
together with the posterior: save with base=True, unless the base is frozen.
"""

from __future__ import annotations

from torch import Tensor, nn

from slimbayes.layers.site import Site
from slimbayes.posteriors.configs.mean_field import MeanField as MeanField
from slimbayes.posteriors.gaussian import GaussianPosterior, initial_log_scale


class MeanFieldPosterior(GaussianPosterior):
    """One log scale for each weight."""

    def __init__(self, config: MeanField, site: Site) -> None:
        super().__init__(config, site)
        self.weight_log_scale = nn.Parameter(initial_log_scale(config, site.shape))

    def raw_log_scale(self) -> Tensor:
        return self.weight_log_scale
