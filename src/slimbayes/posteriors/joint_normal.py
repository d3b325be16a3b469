"""Gaussians with a full covariance over all factors, or all weights, of one matrix: correlated where rank-1 and
mean-field posteriors are independent. `laplace` fits them to curvature; they train like any posterior, too.

    x = mean + L e,     L = diag(sigma) (1 + T),    T strictly lower triangular,    covariance L L^T

Matrices with more than `full_up_to` numbers have no T: their numbers are independent.

Sizes: K members, n draws of a pass, D numbers of the matrix.
"""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from slimbayes.distributions.families import Normal, wide
from slimbayes.engine.passes import Noise
from slimbayes.layers.site import LinearMap, Site
from slimbayes.posteriors.base import MapOf, Pick, Role, WeightPosterior
from slimbayes.posteriors.configs.joint_normal import JointNormal
from slimbayes.posteriors.configs.rank1 import Rank1
from slimbayes.posteriors.factors import Drawn
from slimbayes.posteriors.rank1 import Rank1Posterior

ROUNDING = 2e-3  # relative
MOST_ENTANGLED = 0.1  # share of a weight by which its draws may be off on average


class Joint(WeightPosterior):
    """log sigma (K, D) and the elements of T below the diagonal (K, D (D - 1) / 2), row by row; None if independent."""

    site: Site
    size: int  # D
    prior: Normal
    lower: nn.Parameter | None
    factored = False  # whether the covariance is a Kronecker product
    rounded = False  # whether correlations may be rounded
    fitted = False  # whether the covariance was set, and nothing drawn since

    def _begin(self, config: JointNormal, site: Site, size: int) -> None:
        assert isinstance(config.prior, Normal)
        self.site, self.size, self.prior = site, size, config.prior
        self.log_scale = nn.Parameter(torch.full((config.members, size), math.log(config.scale_init)))
        full = size <= config.full_up_to
        self.lower = nn.Parameter(torch.zeros(config.members, size * (size - 1) // 2)) if full else None
        self.note = "" if full else f"independent: its {size:,} numbers are more than full_up_to={config.full_up_to:,}"

    @abstractmethod
    def means(self, linear: LinearMap) -> Tensor:
        """Means (K, D)."""

    def locs(self) -> float | Tensor:
        """Means of the prior: one for all numbers, or of each (D,)."""
        return self.prior.loc

    @abstractmethod
    def at(self, deviation: Tensor, pick: Pick) -> Any:
        """The draws of a pass that lie so far (n, D) from their members' means."""

    def widths(self, rowwise: bool) -> tuple[int, int]:
        return self.size, 0

    def realise(self, noise: Noise, pick: Pick) -> Any:
        return self.at(self._deviation(noise.block, pick), pick)

    def _deviation(self, lines: Tensor, pick: Pick) -> Tensor:
        """L e of each draw's member, for e (n, D)."""
        if self.lower is None:
            return pick(wide(self.log_scale).exp(), len(lines)) * lines
        root = self.root()
        every = torch.einsum("nj,kij->nki", lines.to(root.dtype), root)
        if self.members == 1:
            return every.squeeze(1)
        member = pick(torch.arange(self.members, device=lines.device), len(lines))
        return every[torch.arange(len(lines), device=lines.device), member]

    def root(self) -> Tensor:
        """L (K, D, D), in float32 at least."""
        scale = wide(self.log_scale).exp()
        if self.lower is None:
            return torch.diag_embed(scale)
        unit = torch.eye(self.size, dtype=scale.dtype, device=scale.device).repeat(len(scale), 1, 1)
        row, column = torch.tril_indices(self.size, self.size, -1, device=scale.device)
        index = (row * self.size + column).expand(len(scale), -1)
        unit = unit.flatten(1).scatter(1, index, wide(self.lower)).unflatten(1, (self.size, self.size))
        return scale.unsqueeze(2) * unit

    def times_root(self, member: int) -> Callable[[Tensor], Tensor]:
        """A function that takes derivatives (B, D) to (B, D) L."""
        if self.lower is None:
            scale = wide(self.log_scale[member]).exp()
            return lambda lines: lines * scale
        root = self.root()[member]
        return lambda lines: lines @ root

    def covariance(self) -> Tensor:
        """L L^T (K, D, D)."""
        return self.root() @ self.root().mT

    def variances(self) -> Tensor:
        """Variances of the single numbers, (K, D)."""
        return (2 * wide(self.log_scale)).exp() if self.lower is None else self.root().square().sum(2)

    @torch.no_grad()
    def set_root(self, root: Tensor) -> None:
        """Take over Cholesky factors (K, D, D) with positive diagonals, or standard deviations (K, D).

        T of factors in float32 is rounded to half precision, which `save` needs half the room for, where that changes
        the standard deviation of no combination of the numbers by more than `ROUNDING`.
        """
        scale = root if self.lower is None else root.diagonal(dim1=1, dim2=2)
        self.log_scale.copy_(scale.log())
        self.fitted = True
        if self.lower is None:
            return
        row, column = torch.tril_indices(self.size, self.size, -1, device=root.device)
        unit = root / scale.unsqueeze(2)
        if self.rounded and self.lower.dtype == torch.float32:
            short = unit.half().to(unit.dtype)
            # Of L (1 + E) and any a, |a^T L (1 + E)| is |a^T L| within a share of |E|.
            change = torch.linalg.solve_triangular(root, scale.unsqueeze(2) * (short - unit), upper=False)
            if bool((torch.linalg.matrix_norm(change) <= ROUNDING).all()):
                unit = short
        self.lower.copy_(unit[:, row, column])

    def kl(self, linear: MapOf) -> Tensor:
        mapped, prior = linear(), self.prior
        mean, log_scale, variance, free = self.means(mapped), wide(self.log_scale), self.variances(), self._free(mapped)
        if free is not None:
            mean, variance = mean[:, free], variance[:, free]
            log_scale = log_scale[:, free] if self.lower is None else self._log_scale_of(free)
        loc = self.locs() if free is None else prior.loc
        far = (wide(mean) - loc).square() + variance
        return (0.5 * (far / prior.scale**2 - 1) + math.log(prior.scale)).sum() - log_scale.sum()

    def _free(self, linear: LinearMap) -> Tensor | None:
        """Which of the D numbers may move, if not all of them."""
        return None

    def _log_scale_of(self, free: Tensor) -> Tensor:
        """log sigma of some of the numbers by themselves."""
        part = self.root()[:, free]
        return torch.linalg.cholesky(part @ part.mT).diagonal(dim1=1, dim2=2).log()

    def log_ratio(self, linear: LinearMap) -> Tensor | None:
        if self._free(linear) is not None:
            return None
        lines = self.noise.block.double()
        pick: Pick = lambda parameter, n: self.current.pick(self, parameter, n)  # noqa: E731
        x = pick(self.means(linear), len(lines)).double() + self._deviation(self.noise.block, pick).double()
        log_q = -0.5 * lines.square().sum(1) - pick(wide(self.log_scale), len(lines)).double().sum(1)
        return (
            self.prior.log_prob(x - self.locs() + self.prior.loc).sum(1)
            - log_q
            + 0.5 * math.log(2 * math.pi) * self.size
        )

    def against_prior(self, linear: LinearMap) -> list[tuple[Tensor, Tensor]]:
        """How far means are from the prior's, in its scales, and standard deviations over the prior's."""
        far = (wide(self.means(linear).detach()) - self.locs()) / self.prior.scale
        return [(far, self.variances().detach().sqrt() / self.prior.scale)]


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
        return "scale" if name in ("log_scale", "lower") else "factor"

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
        if self.lower is None or not self.parts[0] or not self.parts[1]:
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

    @classmethod
    def realise_together(cls, posteriors: Sequence[Self]) -> None:
        for posterior in posteriors:
            posterior.values()

    @classmethod
    def kl_together(cls, posteriors: Sequence[Self], linears: Sequence[MapOf]) -> list[Tensor]:
        return [posterior.kl(linear) for posterior, linear in zip(posteriors, linears, strict=True)]


class JointWeights(Joint):
    """Weights, in the order they are stored in, and biases, around the layer's own."""

    regularises_mean = True

    def __init__(self, config: JointNormal, site: Site) -> None:
        super().__init__()
        self.regularises_bias = site.bias
        self._begin(config, site, math.prod(site.shape) + (site.n_out if site.bias else 0))

    def means(self, linear: LinearMap) -> Tensor:
        own = [linear.weight, linear.bias] if self.site.bias and linear.bias is not None else [linear.weight]
        return torch.cat([wide(part).flatten() for part in own]).unsqueeze(0)

    def at(self, deviation: Tensor, pick: Pick) -> tuple[Tensor, Tensor]:
        """Deviations of the weights (n, *shape), and of the biases, (n, 0) where the layer has none."""
        weight, bias = deviation.tensor_split([math.prod(self.site.shape)], 1)
        return weight.reshape(-1, *self.site.shape), bias

    def _free(self, linear: LinearMap) -> Tensor | None:
        if linear.mask is None:
            return None
        weight = (linear.mask.expand(self.site.shape) != 0).flatten()
        return nn.functional.pad(weight, (0, self.size - len(weight)), value=True)

    def weights(self, linear: LinearMap, draws: slice = slice(None)) -> tuple[Tensor, Tensor | None]:
        change, shift = (part[draws] for part in self.values())
        weights = linear.weight + linear.masked(change).to(linear.weight.dtype)
        if linear.bias is None:
            return weights, None
        biases = linear.bias + shift.to(linear.bias.dtype) if self.site.bias else linear.bias
        return weights, biases.expand(weights.shape[0], -1)
