"""Gaussians with a full covariance over the rank-1 factors of one matrix, and its biases: see joint_normal.py."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from slimbayes.distributions.families import wide
from slimbayes.engine.passes import Noise
from slimbayes.layers.site import LinearMap, Site
from slimbayes.posteriors.base import MapOf, Pick, Role
from slimbayes.posteriors.configs.rank1 import JointNormal, Rank1
from slimbayes.posteriors.factors import Drawn
from slimbayes.posteriors.joint_normal import Joint
from slimbayes.posteriors.rank1 import Rank1Posterior

MOST_ENTANGLED = 0.1  # share of a weight by which its draws may be off on average


class JointFactors(Joint, Rank1Posterior):
    """Factors r (K, out) and s (K, in), and biases (K, out), of which some are drawn together, in this order. The prior
    of biases has mean zero.
    """

    rounded = True

    def __init__(self, config: JointNormal, site: Site) -> None:
        points = Rank1(
            members=config.members,
            posterior="point",
            mean_init=config.mean_init,
            clip=None,
            member_bias=config.member_bias,
            draws="member",
        )
        Rank1Posterior.__init__(self, points.resolved(), site)
        biases = site.n_out if config.over == "both+bias" and site.bias else 0
        self.parts = [0 if config.over == "s" else site.n_out, 0 if config.over == "r" else site.n_in, biases]
        self._begin(config, site, sum(self.parts))

    @property
    def prior_of_factors(self) -> Any:
        return self.prior

    countable = False  # type: ignore[assignment]
    log_size = math.inf  # type: ignore[assignment]

    def role(self, name: str) -> Role:
        return "scale" if name in ("log_scale", "lower", "directions") else "factor"

    def choices(self) -> Tensor | None:
        return None

    def means(self, linear: LinearMap) -> Tensor:
        r, s = wide(self.r.loc).squeeze(1), wide(self.s.loc).squeeze(1)
        numbers = [r[:, : self.parts[0]], s[:, : self.parts[1]]]
        if self.parts[2]:
            assert linear.bias is not None
            own = wide(linear.bias).expand(self.members, -1)
            numbers.append(own if self.bias is None else own + nn.functional.pad(wide(self.bias), (0, 0, 1, 0)))
        return torch.cat(numbers, 1)

    @torch.no_grad()
    def entangled(self) -> float:
        """The largest covariance of an r and an s: by so much the mean of r s is off from that of their means."""
        if not self.correlated or not self.parts[0] or not self.parts[1]:
            return 0.0
        r, s, _ = self.root().split(self.parts, 1)
        return float((r @ s.mT).abs().max())

    def realise(self, noise: Noise, pick: Pick) -> Any:
        if self.fitted and not torch.compiler.is_compiling():
            self.fitted, off = False, self.entangled()
            if off > MOST_ENTANGLED:
                warnings.warn(
                    f"laplace: factors of {self.name} vary against each other so much that drawn weights are up to "
                    f"{off:.0%} off from the network's on average. Use predict_linearised, which is not concerned, or "
                    f"laplace(..., prior=Normal(1.0, 0.2)) or over='r'.",
                    stacklevel=2,
                )
        return Joint.realise(self, noise, pick)

    def locs(self) -> float | Tensor:
        if not self.parts[2]:
            return self.prior.loc
        factors = torch.arange(self.size, device=self.device) < self.size - self.parts[2]
        return factors * self.prior.loc

    def at(self, deviation: Tensor, pick: Pick) -> Drawn:
        count = len(deviation)
        r, s = (pick(wide(factor.loc).squeeze(1), count) for factor in (self.r, self.s))
        change_r, change_s, change = deviation.split(self.parts, 1)
        bias = None if self.bias is None else pick(nn.functional.pad(self.bias, (0, 0, 1, 0)), count)
        if self.parts[2]:
            bias = change if bias is None else bias + change
        return Drawn(r + change_r if self.parts[0] else r, s + change_s if self.parts[1] else s, bias)

    # What rank-1 posteriors join over layers is independent factors: these go one by one, as any posterior does.
    @classmethod
    def realise_together(cls, posteriors: Sequence[Self]) -> None:
        super(Rank1Posterior, cls).realise_together(posteriors)

    @classmethod
    def kl_together(cls, posteriors: Sequence[Self], linears: Sequence[MapOf]) -> list[Tensor]:
        return super(Rank1Posterior, cls).kl_together(posteriors, linears)
