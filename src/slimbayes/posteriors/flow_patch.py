"""A planar flow (Rezende & Mohamed 2015) over the scales and biases of a norm layer, jointly, which Chang et al. 2019
name as future work for the layers that they patch:

    d = sigma o e,   e ~ Normal(0, 1)                             the layer's own scale and bias are the mean
    d <- d + u tanh(w . d + c)          for each of T steps       det = 1 + (1 - tanh^2)(w . u)

    log q = log Normal(e; 0, 1) - sum log sigma - sum log det

u is moved along w until w . u > -1, so that a step can be undone (their A.1). The KL is an average over draws, since no
closed form is known: log sigma and the entropy of e are exact in it, log det and log p are not.

Sizes: n draws, T steps, D scales and biases of a layer.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimbayes.distributions.scales import widen
from slimbayes.engine.noise import standard_normal
from slimbayes.engine.passes import Noise
from slimbayes.layers.site import Site
from slimbayes.posteriors.base import Role, WeightPosterior
from slimbayes.posteriors.configs.mixture import FlowPatch

_DRAWS = 256  # that a standard deviation is taken from


class FlowPosterior(WeightPosterior):
    """Scales of the base (D,), and u (T, D), w (T, D), c (T,) of the steps."""

    regularises_mean = True

    def __init__(self, config: FlowPatch, site: Site) -> None:
        super().__init__()
        if not site.n_out:
            raise ValueError("it has no scale or bias to put a flow on (affine=False)")
        self.site, self.samples, self.regularises_bias = site, config.samples, site.bias
        self.size = math.prod(site.shape)
        size = self.size * (2 if site.bias else 1)
        precisions = [config.tau, config.tau if config.rho is None else config.rho]
        self.precisions = precisions[: 2 if site.bias else 1]
        self.log_scale = nn.Parameter(torch.full((size,), math.log(config.scale_init)))
        self.u = nn.Parameter(0.1 * config.scale_init * torch.randn(config.steps, size))
        self.w = nn.Parameter(
            torch.randn(config.steps, size) / (config.scale_init * math.sqrt(size))
        )
        self.c = nn.Parameter(torch.zeros(config.steps))

    def role(self, name: str) -> Role:
        return "scale" if name == "log_scale" else "factor"

    def widths(self, rowwise: bool) -> tuple[int, int]:
        return len(self.log_scale), 0

    def centre(self, block: Tensor) -> Tensor:
        if len(self.u):
            raise ValueError(
                f"{self.name}: a flow bends the middle of its noise away from the posterior's mean, for which no "
                f"closed form is known; average draws with predict(model, x, draws=...)."
            )
        return super().centre(block)

    def deviations(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Deviations from the mean (n, D), and log det of each (n,), from standard normals (n, D)."""
        d, log_det = widen(self.log_scale).exp() * noise, noise.new_zeros(len(noise))
        for u, w, c in zip(widen(self.u), widen(self.w), widen(self.c), strict=True):
            product = w @ u
            u = u + (F.softplus(product) - 1 - product) * w / w.square().sum()
            bent = torch.tanh(d @ w + c)
            log_det = log_det + torch.log1p((1 - bent**2) * (w @ u))
            d = d + bent.unsqueeze(1) * u
        return d, log_det

    def draw(self, noise: Noise) -> tuple[Tensor, Tensor | None]:
        """Deviations of the scales and of the biases, (n, *shape)."""
        weight, bias = self.deviations(noise.block)[0].tensor_split([self.size], 1)
        return weight.view(-1, *self.site.shape), bias.view(
            -1, *self.site.shape
        ) if self.site.bias else None

    def _mean(self) -> Tensor:
        linear = self.linear_map()
        own = [linear.weight] if linear.bias is None else [linear.weight, linear.bias]
        return torch.cat([widen(t).flatten() for t in own])

    def _log_prior(self, values: Tensor) -> Tensor:
        """Log density of scales and biases (n, D) under their priors, (n,)."""
        terms = [
            0.5
            * (
                len(part[0]) * math.log(tau / (2 * math.pi))
                - tau * part.square().sum(1)
            )
            for part, tau in zip(
                values.split(self.size, 1), self.precisions, strict=True
            )
        ]
        return sum(terms[1:], terms[0])

    def kl(self) -> Tensor:
        size = len(self.log_scale)
        d, log_det = self.deviations(
            standard_normal((self.samples, size), self.device, self.dtype)
        )
        entropy = (
            0.5 * size * math.log(2 * math.pi * math.e) + widen(self.log_scale).sum()
        )
        return -entropy - (log_det + self._log_prior(self._mean() + d)).mean()

    def log_ratio(self) -> Tensor:
        noise = self.lines
        d, log_det = self.deviations(noise)
        log_q = -0.5 * (noise.square().sum(1) + noise.shape[1] * math.log(2 * math.pi))
        log_q = log_q - widen(self.log_scale).sum() - log_det
        return self._log_prior(self._mean() + d).double() - log_q.double()

    def against_prior(self) -> list[tuple[Tensor, Tensor]]:
        noise = standard_normal((_DRAWS, len(self.log_scale)), self.device, self.dtype)
        values = (self._mean() + self.deviations(noise)[0]).detach().split(self.size, 1)
        return [
            (v.mean(0) * tau**0.5, v.std(0) * tau**0.5)
            for v, tau in zip(values, self.precisions, strict=True)
        ]
