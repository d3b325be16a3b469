"""Mean-field variational inference (Blundell et al. 2015; the baseline of both papers), and what k-tied posteriors
share with it: draws, three estimators, and the KL.

    W ~ Normal(mean, sigma)     mean: the layer's own weight;  log sigma: a parameter for each weight, or k_tied.py's

The means are the layer's weights themselves, so a trained network stays itself and a base checkpoint loads. They train
together with the posterior: save with base=True, unless the base is frozen.

Estimators of the expected likelihood, all unbiased:

    "reparam"   one weight draw for each block of rows: W = mean + sigma * e
    "flipout"   the same draw with random signs for each row: y = W x + ((dW (x o s)) o r), s and r in {-1, +1}
                (Wen et al. 2018)
    "local"     the outputs are drawn instead of the weights: y ~ Normal(mean x, sigma^2 x^2)  (Kingma et al. 2015).
                Exact where a row meets the weights once; elsewhere positions draw independently, which must be asked
                for.

In a held pass (`fixed_draws`) every estimator uses the plain weight draw: a function must stay the same over calls.

Sizes: n draws or blocks of rows, R rows, in and out channels, m x n the matrix view.
"""

from __future__ import annotations

import math
import operator
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from slimbayes.distributions.families import Normal
from slimbayes.distributions.priors import TiedMean, gaussian_log_ratio
from slimbayes.distributions.scales import rademacher, widen
from slimbayes.distributions.sums import mean_plus_noise
from slimbayes.engine.noise import standard_normal
from slimbayes.engine.passes import Noise, Pass
from slimbayes.engine.rows import LinearMap
from slimbayes.layers.site import Site
from slimbayes.posteriors.base import WeightPosterior
from slimbayes.posteriors.configs.weights import GaussianConfig, MeanField
from slimbayes.posteriors.late import drawn_late, recomputed

_INDEPENDENT = "Set independent_positions=True to accept independent noise at each, or use 'flipout'"


class Perturbation(NamedTuple):
    """Deviations of a pass: scales (*shape) and noise (n, *shape), of biases (n, out); signs (R, in) and (R, out)."""

    scale: Tensor
    noise: Tensor
    bias: Tensor | None
    sign_in: Tensor | None
    sign_out: Tensor | None

    @property
    def weight(self) -> Tensor:
        """Deviations of the weights, (n, *shape)."""
        if (
            self.noise.shape[0] == 1
        ):  # without a dimension over which backward would have to sum
            return (self.scale * self.noise.squeeze(0)).unsqueeze(0)
        return self.scale * self.noise

    def weights(self, linear: LinearMap) -> Tensor:
        """The drawn weights, (n, *shape)."""
        if linear.mask is not None or linear.weight.dtype != self.scale.dtype:
            return linear.weight + linear.masked(self.weight).to(linear.weight.dtype)
        if self.noise.shape[0] == 1:
            return mean_plus_noise(
                linear.weight, self.scale, self.noise.squeeze(0)
            ).unsqueeze(0)
        return torch.addcmul(linear.weight, self.scale, self.noise)


class GaussianPosterior(WeightPosterior):
    """Scales of a Gaussian posterior around the layer's own weight; subclasses say how the scales are parameterised."""

    prior: Any  # of the weights of this layer
    bias_prior: Any

    def __init__(self, config: GaussianConfig, site: Site) -> None:
        super().__init__()
        self.site, self.estimator = site, config.estimator
        self.prior, self.bias_prior = (
            config.prior.for_layer(site.fan_in),
            config.prior.for_biases(),
        )
        self.log_cap = None if config.max_scale is None else math.log(config.max_scale)
        self.independent_positions = config.independent_positions
        self.regularises_mean = not isinstance(config.prior, TiedMean)
        self.late = self.estimator == "local"
        if self.late and not site.whole and site.positions in ("pooled", "nonlinear"):
            raise ValueError(
                "the local estimator cannot tell the variance of pooled vectors; use 'reparam'"
            )
        if (
            self.late
            and not site.whole
            and site.positions == "many"
            and not self.independent_positions
        ):
            raise ValueError(
                "the local estimator is exact only where each row meets the weights once, and this layer shares them "
                f"over positions or steps. {_INDEPENDENT}"
            )
        if self.estimator == "flipout" and site.positions == "nonlinear":
            raise ValueError(
                "flipout needs outputs linear in the weights, which a maximum is not; use 'reparam'"
            )
        gaussian_bias = site.bias and config.bias == "gaussian"
        self.bias_log_scale = (
            nn.Parameter(initial_log_scale(config, (site.n_out,)))
            if gaussian_bias
            else None
        )
        self.regularises_bias = gaussian_bias and self.regularises_mean

    @abstractmethod
    def raw_log_scale(self) -> Tensor:
        """log sigma in the shape of the stored weight, before the cap."""

    def log_scale(self) -> Tensor:
        """log sigma in the shape of the stored weight, in float32 at least."""
        return self._capped(self.raw_log_scale())

    def scale(self) -> Tensor:
        """sigma in the shape of the stored weight."""
        return self.log_scale().exp()

    def means(self) -> Tensor:
        """Means as a matrix (m, n), a copy in float64."""
        return self.site.to_matrix(self.linear_map().weight.detach()).double()

    def scales(self) -> Tensor:
        """Standard deviations as a matrix (m, n), a copy in float64."""
        return self.site.to_matrix(self.log_scale().detach()).double().exp()

    def _capped(self, log_scale: Tensor) -> Tensor:
        return (
            widen(log_scale)
            if self.log_cap is None
            else _Cap.apply(widen(log_scale), self.log_cap)
        )

    def widths(self, rowwise: bool) -> tuple[int, int]:
        weights = math.prod(self.site.shape) + (
            0 if self.bias_log_scale is None else self.site.n_out
        )
        if not rowwise or self.estimator == "reparam":
            return weights, 0
        return (
            (weights, -(-(self.site.n_in + self.site.n_out) // 8))
            if self.estimator == "flipout"
            else (0, 0)
        )

    @property
    def has_weights(self) -> bool:
        return self.noise.block.shape[1] > 0 and not self.per_row

    @classmethod
    def draw_together(cls, posteriors: Sequence[Self], current: Pass) -> None:
        """Signs of all layers take a dozen small operations, not a dozen for each."""
        alike: dict[Any, list[Any]] = {}
        for p in posteriors:
            noise = current.noise[p.key]
            alike.setdefault(
                (noise.row.device, noise.row.dtype) if noise.row.shape[1] else None, []
            ).append((p, noise))
        super().draw_together([p for p, _ in alike.pop(None, [])], current)
        for same in alike.values():
            rows = [noise.row for _, noise in same]
            signs = rademacher(torch.cat(rows, 1)).split(
                [8 * row.shape[1] for row in rows], 1
            )
            current.values |= {
                p.key: p._perturbation(own, part)
                for (p, own), part in zip(same, signs, strict=True)
            }

    def draw(self, noise: Noise) -> Perturbation | None:
        return self._perturbation(
            noise, rademacher(noise.row) if self.per_row else None
        )

    def _perturbation(self, noise: Noise, signs: Tensor | None) -> Perturbation | None:
        if not noise.block.shape[1]:  # the local estimator draws no weights
            return None
        size, bias, a = math.prod(self.site.shape), None, self.site.n_in
        scale, normal = (
            self.scale(),
            noise.block[:, :size].reshape(-1, *self.site.shape),
        )
        if self.bias_log_scale is not None:
            bias = self._capped(self.bias_log_scale).exp() * noise.block[:, size:]
        each = (
            (None, None)
            if signs is None
            else (signs[:, :a], signs[:, a : a + self.site.n_out])
        )
        return Perturbation(scale, normal, bias, *each)

    def forward(self, x: Tensor, linear: LinearMap) -> Tensor:
        drawn: Perturbation | None = self.values()
        if drawn is None:
            return self._local(x, linear)
        if drawn.sign_in is None or drawn.sign_out is None:
            return super().forward(x, linear)
        deviation = linear.masked(drawn.weight).to(linear.weight.dtype)
        y = linear.op(x, linear.weight, linear.bias)
        if drawn.bias is not None:
            y = linear.rows(operator.add, y, drawn.bias, self.current)

        def onto(
            z: Tensor, sign: Tensor
        ) -> Tensor:  # z may come cut into blocks of rows, y be one row for all
            return mean_plus_noise(
                y.reshape(z.shape) if y.numel() == z.numel() else y.expand(z.shape),
                z,
                sign,
            )

        z = linear.modulated(
            operator.mul, x, drawn.sign_in, None, self.current, weights=deviation
        )
        return linear.rows(onto, z, drawn.sign_out, self.current)

    def weights(
        self, linear: LinearMap, draws: slice = slice(None)
    ) -> tuple[Tensor, Tensor | None]:
        drawn: Perturbation = self.values()
        weights = drawn._replace(noise=drawn.noise[draws]).weights(linear)
        if linear.bias is None:
            return weights, None
        if drawn.bias is None:
            return weights, linear.bias.expand(weights.shape[0], -1)
        return weights, linear.bias + drawn.bias[draws].to(linear.bias.dtype)

    def _local(self, x: Tensor, linear: LinearMap) -> Tensor:
        if not self.independent_positions:
            self._check_met_once(x)
        mean = linear.op(x, linear.weight, linear.bias)
        variance = self.output_variance(linear.squared(x), linear)
        if self.bias_log_scale is not None:
            of_bias = (2 * self._capped(self.bias_log_scale)).exp().to(variance.dtype)
            variance = variance + linear.along_channels(of_bias, variance.dim())
        dim = (
            None
            if self.current.layout is None or linear.batch_dim < 0
            else linear.batch_dim
        )
        noise = drawn_late(
            self,
            lambda shape: standard_normal(shape, mean.device, mean.dtype),
            mean.shape,
            dim,
        )
        # Clamped: the root of an exact zero (a row of zeros) has no gradient. A normal float16 would be too large.
        root = variance.clamp_min(
            min(torch.finfo(variance.dtype).tiny * 1e4, 1e-7)
        ).sqrt()
        return mean_plus_noise(mean, root, noise)

    def _check_met_once(self, x: Tensor) -> None:
        """Refuse inputs in which a row meets the weights more than once: by positions, or by a second call."""
        calls, at = self.current.calls, f"{self.key} met"
        again = calls.get(at, 0) > 0 and not recomputed()
        calls[at] = 1
        if x.dim() > 2 or x.shape[0] != self.current.rows or again:
            met = "a second time in one pass" if again else "at several positions"
            raise ValueError(
                f"{self.name}: the local estimator is exact where each row meets the weights once; here rows came "
                f"{met}, got {tuple(x.shape)}, whose positions share the weights. {_INDEPENDENT}."
            )

    def output_variance(self, squared: Tensor, linear: LinearMap) -> Tensor:
        """Variance of the outputs given the squared inputs: sigma^2 x^2."""
        return linear.op(
            squared,
            linear.masked((2 * self.log_scale()).exp()).to(linear.weight.dtype),
            None,
        )

    def kl(self) -> Tensor:
        linear = self.linear_map()
        free = linear.free(
            widen(linear.weight), self.log_scale()
        )  # what stays as it is has no distribution
        return sum(self.kl_of_bias(linear), self.prior.gaussian_kl(*free))

    def kl_of_bias(self, linear: LinearMap) -> list[Tensor]:
        """KL of the biases to their prior, where they have posteriors: one scalar or none."""
        if self.bias_log_scale is None or linear.bias is None:
            return []
        return [
            self.bias_prior.gaussian_kl(
                widen(linear.bias), self._capped(self.bias_log_scale)
            )
        ]

    def log_ratio(self) -> Tensor:
        drawn: Perturbation = self.values()
        linear = self.linear_map()
        deviation, weight, log_scale = linear.free(
            drawn.weight, linear.weight, self.log_scale()
        )
        total = gaussian_log_ratio(deviation, weight, log_scale, self.prior)
        if (
            drawn.bias is not None
            and linear.bias is not None
            and self.bias_log_scale is not None
        ):
            log_scale = self._capped(self.bias_log_scale)
            total = total + gaussian_log_ratio(
                drawn.bias, linear.bias, log_scale, self.bias_prior
            )
        return total

    def against_prior(self) -> list[tuple[Tensor, Tensor]]:
        linear = self.linear_map()
        mean, log_scale = linear.free(
            widen(linear.weight.detach()), self.log_scale().detach()
        )
        prior = self.prior.of_weights(mean, log_scale)
        return (
            [((mean - prior.loc) / prior.scale, log_scale.exp() / prior.scale)]
            if isinstance(prior, Normal)
            else []
        )


class MeanFieldPosterior(GaussianPosterior):
    """One log scale for each weight."""

    def __init__(self, config: MeanField, site: Site) -> None:
        super().__init__(config, site)
        self.weight_log_scale = nn.Parameter(initial_log_scale(config, site.shape))

    def raw_log_scale(self) -> Tensor:
        return self.weight_log_scale


class _Cap(torch.autograd.Function):
    """A cap that lets scales at it come down again but not climb further, as a projection after each step would."""

    @staticmethod
    def forward(ctx: Any, log_scale: Tensor, cap: float) -> Tensor:
        ctx.save_for_backward(log_scale > cap)
        return log_scale.clamp_max(cap)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,), (above,) = gradients, ctx.saved_tensors
        return gradient.masked_fill(above & (gradient < 0), 0.0), None


def initial_log_scale(config: GaussianConfig, shape: tuple[int, ...]) -> Tensor:
    """log of scales that start at Normal(scale_init, scale_jitter), kept above a tenth of scale_init."""
    scale = config.scale_init + config.scale_jitter * torch.randn(shape)
    return scale.clamp_min(0.1 * config.scale_init).log()
