"""Priors on the weights of mean-field posteriors: as `Normal` itself, each gives the KL of a Gaussian posterior with
means and log scales (`gaussian_kl`), and most from sums over the scales (`kl_of_sums`). `HeNormal` is a `Normal` for
each layer.

Sizes: m the fan-in of a weight matrix, the number of inputs that feed one output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from slimbayes.distributions.families import Distribution, Normal

if TYPE_CHECKING:
    from torch import Tensor


class ScaleSums(NamedTuple):
    """What most priors need to know of the scales of n weights: sum log sigma and sum sigma^2, scalars."""

    size: int  # n
    log_scale: Tensor
    variance: Tensor

    def kl(self, scale: float) -> Tensor:
        """KL of the weights about the means of a prior with this scale."""
        return 0.5 * (self.variance / scale**2 - self.size) - (
            self.log_scale - self.size * math.log(scale)
        )


def gaussian_log_ratio(
    deviation: Tensor, mean: Tensor, log_scale: Tensor, prior: Any
) -> Tensor:
    """log p(w) - log q(w) of draws w = mean + deviation of Normal(mean, exp(log_scale)) weights, summed over the
    weights.

    Shape: deviation (n, ...), mean and log_scale (...); returns (n,) in float64.

    >>> import torch
    >>> gaussian_log_ratio(torch.ones(2, 3), torch.zeros(3), torch.zeros(3), Normal(0.0, 1.0))
    tensor([0., 0.], dtype=torch.float64)
    """
    deviation, mean, log_scale = deviation.double(), mean.double(), log_scale.double()
    log_q = (
        -0.5 * (deviation * (-log_scale).exp()).square()
        - log_scale
        - 0.5 * math.log(2 * math.pi)
    )
    log_p = prior.of_weights(mean, log_scale).log_prob(mean + deviation)
    return (log_p - log_q).flatten(1).sum(1)


@dataclass(frozen=True)
class HeNormal(Distribution):
    """Normal(0, sqrt(gain / m)), as He initialisation: wide layers do not shrink the signal. Biases get Normal(0, 1).

    >>> HeNormal().for_layer(fan_in=2)
    Normal(loc=0.0, scale=1.0)
    """

    gain: float = 2.0
    above_zero = ("gain",)

    def for_layer(self, fan_in: int) -> Distribution:
        return Normal(0.0, math.sqrt(self.gain / fan_in))

    def for_biases(self) -> Distribution:
        return Normal(0.0, 1.0)  # He's rule has no word on them


@dataclass(frozen=True)
class TiedMean(Distribution):
    """Normal(posterior mean, scale): regularises scales alone, as the rank-1 paper's mean-field baseline does.

    >>> import torch
    >>> TiedMean(1.0).gaussian_kl(torch.tensor([5.0]), torch.zeros(1))
    tensor(0.)
    """

    scale: float = 0.1
    above_zero = ("scale",)

    def gaussian_kl(self, mean: Tensor, log_scale: Tensor) -> Tensor:
        from slimbayes.distributions.sums import kl_of_scales

        return kl_of_scales(log_scale, math.log(self.scale))

    def kl_of_sums(self, means: Sequence[Tensor], sums: ScaleSums) -> Tensor:
        return sums.kl(self.scale).to(means[0].dtype)

    def of_weights(self, mean: Tensor, log_scale: Tensor) -> Distribution:
        return Normal(mean, self.scale)


@dataclass(frozen=True)
class LaplacePrior(Distribution):
    """Laplace(0, scale): as scales of the posterior vanish, the KL becomes L1 regularisation, |mean| / scale.

    >>> import torch
    >>> kl = LaplacePrior(0.5).gaussian_kl(torch.tensor([3.0, 1.0]), torch.full((2,), -20.0))
    >>> kl - LaplacePrior(0.5).gaussian_kl(torch.tensor([2.0, 1.0]), torch.full((2,), -20.0))
    tensor(2.)
    """

    scale: float = 0.1
    above_zero = ("scale",)

    def log_prob(self, x: Tensor) -> Tensor:
        return -x.abs() / self.scale - math.log(2 * self.scale)

    def gaussian_kl(self, mean: Tensor, log_scale: Tensor) -> Tensor:
        scaled = mean * (-log_scale).exp()
        size = (
            math.sqrt(2 / math.pi) * (log_scale - 0.5 * scaled.square()).exp()
            + mean * (scaled / math.sqrt(2)).erf()
        )
        entropy = log_scale + 0.5 * math.log(2 * math.pi * math.e)
        return (size / self.scale + math.log(2 * self.scale) - entropy).sum()


@dataclass(frozen=True)
class EmpiricalBayes(Distribution):
    """Normal(0, v) whose variance v is the best one for the layer, under an inverse-gamma hyperprior.

        v* = (sum of scale^2 + mean^2 + 2 b) / (n + 2 a + 2)

    The term is KL(q || Normal(0, v*)) - log InverseGamma(v*; a, b); gradients flow through v*.

    >>> import torch
    >>> EmpiricalBayes().gaussian_kl(torch.zeros(4), torch.zeros(4)).isfinite()
    tensor(True)
    """

    concentration: float = 2.01
    rate: float = 0.101
    above_zero = ("concentration", "rate")
    per_layer: ClassVar[bool] = True

    def gaussian_kl(self, mean: Tensor, log_scale: Tensor) -> Tensor:
        return self.kl_of_sums([mean], _sums(log_scale))

    def kl_of_sums(self, means: Sequence[Tensor], sums: ScaleSums) -> Tensor:
        a, b, n = self.concentration, self.rate, sums.size
        moment, variance = self._moment_and_variance(means, sums)
        divergence = 0.5 * (moment / variance + n * variance.log() - n) - sums.log_scale
        hyperprior = (
            a * math.log(b) - math.lgamma(a) - (a + 1) * variance.log() - b / variance
        )
        return (divergence - hyperprior).to(means[0].dtype)

    def of_weights(self, mean: Tensor, log_scale: Tensor) -> Distribution:
        return Normal(
            0.0, self._moment_and_variance([mean], _sums(log_scale))[1].sqrt()
        )

    def _moment_and_variance(
        self, means: Sequence[Tensor], sums: ScaleSums
    ) -> tuple[Tensor, Tensor]:
        from slimbayes.distributions.sums import squared_norms

        moment = sums.variance + squared_norms(means)
        return moment, (moment + 2 * self.rate) / (
            sums.size + 2 * self.concentration + 2
        )


def _sums(log_scale: Tensor) -> ScaleSums:
    return ScaleSums(log_scale.numel(), log_scale.sum(), (2 * log_scale).exp().sum())


@dataclass(frozen=True)
class ScaleMixture(Distribution):
    """A wide and a narrow zero-mean Gaussian, mixed: weights are either used or nearly zero (Blundell et al. 2015).

    Its KL has no closed form; the expected log prior is a quadrature over each weight's posterior: no sampling noise.

    >>> import torch
    >>> bool(ScaleMixture().gaussian_kl(torch.zeros(3), torch.zeros(3)) > 0)
    True
    """

    mix: float = 0.5  # weight of the wide component
    wide: float = 1.0
    narrow: float = 0.0025
    nodes: ClassVar[int] = 65
    above_zero = ("wide", "narrow")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.narrow < self.wide:
            raise ValueError(
                f"ScaleMixture: narrow={self.narrow!r} must be below wide={self.wide!r}."
            )
        if not 0 < self.mix < 1:
            raise ValueError(
                f"ScaleMixture: mix must lie strictly between 0 and 1, got {self.mix!r}."
            )

    def log_prob(self, x: Tensor) -> Tensor:
        wide = Normal(0.0, self.wide).log_prob(x) + math.log(self.mix)
        return wide.logaddexp(
            Normal(0.0, self.narrow).log_prob(x) + math.log(1 - self.mix)
        )

    def gaussian_kl(self, mean: Tensor, log_scale: Tensor) -> Tensor:
        import torch

        # log p = log(mix N_wide) + bump, where the bump lives on the narrow component's scale. The first has a closed
        # form; the second is integrated over nodes of the posterior where that is narrower, over nodes of its own
        # elsewhere.
        scale = log_scale.exp()
        reach = math.sqrt(
            2 * max(math.log((1 - self.mix) / self.mix * self.wide / self.narrow), 0.0)
            + 40
        )
        wide = scale > self.narrow
        by_posterior = torch.zeros_like(mean)
        by_bump = torch.zeros_like(mean)
        nodes = torch.linspace(
            -1.0, 1.0, self.nodes, dtype=mean.dtype, device=mean.device
        )
        weight = torch.softmax(-0.5 * (7 * nodes) ** 2, 0)
        step = 2 * reach * self.narrow / (self.nodes - 1)
        q = Normal(mean, torch.where(wide, scale, torch.ones_like(scale)))
        for node, w in zip(
            nodes, weight, strict=True
        ):  # a loop over nodes keeps memory at a few copies of the weights
            by_posterior = by_posterior + w * self._bump(mean + 7 * node * scale)
            x = reach * self.narrow * node
            by_bump = by_bump + step * self._bump(x) * q.log_prob(x).exp()
        expected = -0.5 * (mean.square() + scale.square()) / self.wide**2 - math.log(
            self.wide / self.mix
        )
        expected = expected + torch.where(wide, by_bump, by_posterior)
        return -(expected + log_scale + 0.5).sum()

    def _bump(self, x: Tensor) -> Tensor:
        """log(1 + (1 - mix) N_narrow(x) / (mix N_wide(x)))."""
        from torch.nn.functional import softplus

        log_ratio = math.log((1 - self.mix) / self.mix * self.wide / self.narrow)
        return softplus(log_ratio - 0.5 * x**2 * (self.narrow**-2 - self.wide**-2))
