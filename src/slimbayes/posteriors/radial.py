"""Radial Bayesian neural nets (Farquhar, Osborne & Gal 2020): weights close to their mean, however many they are.

    W = mean + sigma o (e / |e|) * r        e ~ Normal(0, 1) for each weight,  r ~ Normal(0, 1) for the whole matrix

A Gaussian's draws lie sqrt(D) scales from their mean, in a thin shell; here the distance is that of one normal number.
With u = (W - mean) / sigma, whose density is halfnormal(|u|) / (area of the unit sphere * |u|^(D - 1)), and a
Normal(m, s) prior,

    E log q = -sum log sigma + log sqrt(2 / pi) - 1/2 - log area - (D - 1) E log |r|,   E log |r| = -(gamma + log 2) / 2
    E log p = -D log(s sqrt(2 pi)) - (|mean - m|^2 + sum sigma^2 / D) / (2 s^2),        E (e_i / |e|)^2 = 1 / D

so the KL is a closed form, and no constant is dropped. Beside the paper: one r for each matrix, and biases stay points.

Sizes: n draws of a pass, D free weights of the matrix.
"""

import math

import torch
from torch import Tensor, nn

from slimbayes.distributions.families import Normal
from slimbayes.distributions.scales import widen
from slimbayes.engine.passes import Noise
from slimbayes.layers.site import Site
from slimbayes.posteriors.base import WeightPosterior
from slimbayes.posteriors.configs.weights import Radial


class RadialPosterior(WeightPosterior):
    """One log scale for each weight, in the shape of the stored weight."""

    regularises_mean = True

    def __init__(self, config: Radial, site: Site) -> None:
        super().__init__()
        assert isinstance(config.prior, Normal)
        self.site, self.prior = site, config.prior
        start = config.scale_init + config.scale_jitter * torch.randn(site.shape)
        self.weight_log_scale = nn.Parameter(
            start.clamp_min(0.1 * config.scale_init).log()
        )

    def widths(self, rowwise: bool) -> tuple[int, int]:
        return math.prod(self.site.shape) + 1, 0

    def draw(self, noise: Noise) -> Tensor:
        """Deviations from the mean, (n, *shape)."""
        direction = noise.block[:, :-1].reshape(-1, *self.site.shape)
        direction = self.linear_map().masked(
            direction
        )  # padding and pruned weights do not move
        length = noise.block[:, -1] / direction.flatten(1).norm(dim=1)
        return self.scale() * (direction * length.view(-1, *[1] * len(self.site.shape)))

    def centre(self, block: Tensor) -> Tensor:
        """Any direction, of length zero."""
        return torch.cat(
            [torch.ones_like(block[:, :-1]), torch.zeros_like(block[:, -1:])], 1
        )

    def scale(self) -> Tensor:
        """sigma in the shape of the stored weight; a weight's standard deviation is sigma / sqrt(D)."""
        return widen(self.weight_log_scale).exp()

    def against_prior(self) -> list[tuple[Tensor, Tensor]]:
        deviation = self.scale().detach() / math.sqrt(math.prod(self.site.shape))
        offset = (
            widen(self.linear_map().weight.detach()) - self.prior.loc
        ) / self.prior.scale
        return [(offset, deviation / self.prior.scale)]

    def kl(self) -> Tensor:
        linear = self.linear_map()
        mean, log_scale = linear.free(
            widen(linear.weight), widen(self.weight_log_scale)
        )
        s, size = self.prior.scale, mean.numel()
        squares = (mean - self.prior.loc).square().sum() + (
            2 * log_scale
        ).exp().sum() / size
        cross_entropy = size * math.log(s * math.sqrt(2 * math.pi)) + squares / (
            2 * s**2
        )
        return cross_entropy - log_scale.sum() - direction_entropy(size)


def direction_entropy(size: int) -> float:
    """Entropy of u = (e / |e|) r in `size` dimensions; that of a standard normal in one.

    >>> round(direction_entropy(1), 4), round(0.5 * math.log(2 * math.pi * math.e), 4)
    (1.4189, 1.4189)
    """
    log_area = math.log(2) + 0.5 * size * math.log(math.pi) - math.lgamma(0.5 * size)
    mean_log_length = -0.5 * (0.5772156649015329 + math.log(2))
    return 0.5 + log_area + (size - 1) * mean_log_length - 0.5 * math.log(2 / math.pi)
