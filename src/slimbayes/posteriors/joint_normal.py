"""Gaussians with a full covariance over all numbers of one matrix, its rank-1 factors here, its weights in
joint_weights.py: correlated where rank-1 and mean-field posteriors are independent. `laplace` fits them to curvature;
they train like any posterior, too.

    x = mean + L e,     L = diag(sigma) (1 + T),    T strictly lower triangular,    covariance L L^T

Where data tell of few directions, k, a matrix V (D, k) says as much: L = diag(sigma) (1 - V V^T). Matrices with more
than `full_up_to` numbers have neither: their numbers are independent.

Sizes: K members, n draws of a pass, D numbers of the matrix, k directions.
"""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from slimbayes.distributions.families import Normal
from slimbayes.distributions.scales import cholesky_factor, widen
from slimbayes.engine.passes import Noise, Pass
from slimbayes.engine.rows import LinearMap
from slimbayes.layers.site import Site
from slimbayes.posteriors.base import Role, WeightPosterior
from slimbayes.posteriors.configs.rank1 import BatchEnsemble, JointNormal
from slimbayes.posteriors.factors import Drawn
from slimbayes.posteriors.rank1 import Rank1Posterior

ROUNDING = 2e-3  # relative
MOST_ENTANGLED = 0.1  # share of a weight by which its draws may be off on average
ByMember = Callable[
    [Tensor, int], Tensor
]  # `Posterior.by_member`, or what lays one member out for all rows


class JointNormalPosterior(WeightPosterior):
    """log sigma (K, D), and what lies below T's diagonal (K, D (D - 1) / 2), row by row, or V (K, D, k), or neither."""

    site: Site
    size: int  # D
    prior: Normal
    lower: nn.Parameter | None
    directions: nn.Parameter | None
    factored = False  # whether the covariance is a Kronecker product
    rounded = False  # whether correlations may be rounded
    fitted = False  # whether the covariance was set, and nothing drawn since

    def _init_covariance(self, config: JointNormal, site: Site, size: int) -> None:
        assert isinstance(config.prior, Normal)
        self.site, self.size, self.prior = site, size, config.prior
        self.log_scale = nn.Parameter(
            torch.full((config.members, size), math.log(config.scale_init))
        )
        full, count = size <= config.full_up_to, config.directions
        whole = full and count is None
        self.lower = (
            nn.Parameter(torch.zeros(config.members, size * (size - 1) // 2))
            if whole
            else None
        )
        self.register_parameter("directions", None)
        self.note = (
            ""
            if full
            else f"independent: its {size:,} numbers are more than full_up_to={config.full_up_to:,}"
        )
        if full and count is not None:
            # Small, but not zero, where the derivative by V is zero, too: it would stay there.
            self._use_directions(
                torch.randn(config.members, size, count) * (0.1 / math.sqrt(size))
            )

    def _use_directions(self, directions: Tensor) -> None:
        self.lower = None
        self.directions = nn.Parameter(
            directions.contiguous()
        )  # as it is once loaded, to the last bit
        self.note = (
            f"the prior but for {directions.shape[2]:,} of {self.size:,} directions"
        )

    @property
    def correlated(self) -> bool:
        return self.lower is not None or self.directions is not None

    @abstractmethod
    def means(self) -> Tensor:
        """Means (K, D)."""

    def locs(self) -> float | Tensor:
        """Means of the prior: one for all numbers, or of each (D,)."""
        return self.prior.loc

    @abstractmethod
    def draws_at(self, deviation: Tensor, by_member: ByMember) -> Any:
        """The draws of a pass that lie so far (n, D) from their members' means."""

    def widths(self, rowwise: bool) -> tuple[int, int]:
        return self.size, 0

    def draw(self, noise: Noise) -> Any:
        return self.draws_at(
            self._deviation(noise.block, self.by_member), self.by_member
        )

    def _deviation(self, lines: Tensor, by_member: ByMember) -> Tensor:
        """L e of each draw's member, for e (n, D)."""
        scale = widen(self.log_scale).exp()
        if not self.correlated:
            return by_member(scale, len(lines)) * lines
        lines = lines.to(scale.dtype)
        if self.directions is None:
            every = torch.einsum(
                "nj,kij->nki", lines, self.root()
            )  # of every member, (n, K, D)
        else:
            v = widen(self.directions)
            along = torch.einsum("nd,kdc->nkc", lines, v)
            every = scale * (
                lines.unsqueeze(1) - torch.einsum("nkc,kdc->nkd", along, v)
            )
        if self.members == 1:
            return every.squeeze(1)
        member = by_member(torch.arange(self.members, device=lines.device), len(lines))
        return every[torch.arange(len(lines), device=lines.device), member]

    def root(self) -> Tensor:
        """L (K, D, D), in float32 at least."""
        if self.directions is None:
            return cholesky_factor(self.log_scale, self.lower)
        scale, v = widen(self.log_scale).exp(), widen(self.directions)
        return torch.diag_embed(scale) - scale.unsqueeze(2) * (v @ v.mT)

    def times_root(self, member: int) -> Callable[[Tensor], Tensor]:
        """A function that takes derivatives (B, D) to (B, D) L."""
        scale = widen(self.log_scale[member]).exp()
        if self.directions is not None:
            v = widen(self.directions[member])
            return lambda lines: (lines * scale) - (lines * scale) @ v @ v.mT
        if self.lower is None:
            return lambda lines: lines * scale
        root = self.root()[member]
        return lambda lines: lines @ root

    def covariance(self) -> Tensor:
        """L L^T (K, D, D)."""
        return self.root() @ self.root().mT

    def variances(self) -> Tensor:
        """Variances of the single numbers, (K, D)."""
        return (
            self.root().square().sum(2)
            if self.correlated
            else (2 * widen(self.log_scale)).exp()
        )

    def log_dets(self) -> Tensor:
        """log |det L| of each member (K,)."""
        found = widen(self.log_scale).sum(1)
        if self.directions is None:
            return found
        v = widen(self.directions)
        inner = torch.eye(v.shape[2], dtype=v.dtype, device=v.device) - v.mT @ v
        return found + torch.linalg.slogdet(inner).logabsdet

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
            change = torch.linalg.solve_triangular(
                root, scale.unsqueeze(2) * (short - unit), upper=False
            )
            if bool((torch.linalg.matrix_norm(change) <= ROUNDING).all()):
                unit = short
        self.lower.copy_(unit[:, row, column])

    @torch.no_grad()
    def set_directions(self, scale: float, directions: Tensor) -> None:
        """Become a Gaussian that is narrower along orthogonal directions (K, D, k): V, rounded as T is."""
        self.log_scale.fill_(math.log(scale))
        v, short = directions, directions.half().to(directions.dtype)
        lengths = v.square().sum(1, keepdim=True)
        moved = v @ v.mT - short @ short.mT
        change = moved + (v / (1 - lengths)) @ (
            v.mT @ moved
        )  # (1 - V V^T)^-1 = 1 + V (1 - V^T V)^-1 V^T
        fine = bool((torch.linalg.matrix_norm(change) <= ROUNDING).all())
        self._use_directions((short if fine else v).to(self.log_scale))
        self.fitted = True

    def kl(self) -> Tensor:
        mean, variance, free, prior = (
            self.means(),
            self.variances(),
            self._free(self.linear_map()),
            self.prior,
        )
        log_det = self.log_dets().sum()
        if free is not None:
            mean, variance, log_det = (
                mean[:, free],
                variance[:, free],
                widen(self.log_scale)[:, free].sum(),
            )
            if self.lower is not None:  # of these numbers by themselves
                part = self.root()[:, free]
                log_det = (
                    torch.linalg.cholesky(part @ part.mT)
                    .diagonal(dim1=1, dim2=2)
                    .log()
                    .sum()
                )
        loc = self.locs() if free is None else prior.loc
        far = (widen(mean) - loc).square() + variance
        return (
            0.5 * (far / prior.scale**2 - 1) + math.log(prior.scale)
        ).sum() - log_det

    def _free(self, linear: LinearMap) -> Tensor | None:
        """Which of the D numbers may move, if not all of them."""
        return None

    def log_ratio(self) -> Tensor | None:
        if self._free(self.linear_map()) is not None:
            return None
        lines = self.noise.block.double()
        x = (
            self.by_member(self.means(), len(lines)).double()
            + self._deviation(self.noise.block, self.by_member).double()
        )
        log_q = (
            -0.5 * lines.square().sum(1)
            - self.by_member(self.log_dets(), len(lines)).double()
        )
        log_p = self.prior.log_prob(x - self.locs() + self.prior.loc).sum(1)
        return log_p - log_q + 0.5 * math.log(2 * math.pi) * self.size

    def against_prior(self) -> list[tuple[Tensor, Tensor]]:
        far = (widen(self.means().detach()) - self.locs()) / self.prior.scale
        return [(far, self.variances().detach().sqrt() / self.prior.scale)]


class JointFactors(JointNormalPosterior, Rank1Posterior):
    """Factors r (K, out) and s (K, in), and biases (K, out), of which some are drawn together, in this order. The prior
    of biases has mean zero.
    """

    rounded = True

    def __init__(self, config: JointNormal, site: Site) -> None:
        points = BatchEnsemble(
            members=config.members,
            mean_init=config.mean_init,
            member_bias=config.member_bias,
        )
        Rank1Posterior.__init__(self, points.resolved(), site)
        biases = site.n_out if config.over == "both+bias" and site.bias else 0
        self.parts = [
            0 if config.over == "s" else site.n_out,
            0 if config.over == "r" else site.n_in,
            biases,
        ]
        self._init_covariance(config, site, sum(self.parts))

    @property
    def prior_of_factors(self) -> Any:
        return self.prior

    def role(self, name: str) -> Role:
        return (
            "scale"
            if name in ("log_scale", "lower", "directions")
            else Rank1Posterior.role(self, name)
        )

    def means(self) -> Tensor:
        r, s = widen(self.r.loc).squeeze(1), widen(self.s.loc).squeeze(1)
        numbers = [r[:, : self.parts[0]], s[:, : self.parts[1]]]
        if self.parts[2]:
            bias = self.linear_map().bias
            assert bias is not None
            own = widen(bias).expand(self.members, -1)
            numbers.append(
                own
                if self.bias is None
                else own + nn.functional.pad(widen(self.bias), (0, 0, 1, 0))
            )
        return torch.cat(numbers, 1)

    @torch.no_grad()
    def entangled(self) -> float:
        """The largest covariance of an r and an s: by so much the mean of r s is off from that of their means."""
        if not self.correlated or not self.parts[0] or not self.parts[1]:
            return 0.0
        r, s, _ = self.root().split(self.parts, 1)
        return float((r @ s.mT).abs().max())

    def draw(self, noise: Noise) -> Any:
        if self.fitted and not torch.compiler.is_compiling():
            self.fitted, off = False, self.entangled()
            if off > MOST_ENTANGLED:
                warnings.warn(
                    f"laplace: factors of {self.name} vary against each other so much that drawn weights are up to "
                    f"{off:.0%} off from the network's on average. Use predict_linearised, which is not concerned, or "
                    f"laplace(..., prior=Normal(1.0, 0.2)) or over='r'.",
                    stacklevel=2,
                )
        return JointNormalPosterior.draw(self, noise)

    def locs(self) -> float | Tensor:
        if not self.parts[2]:
            return self.prior.loc
        factors = (
            torch.arange(self.size, device=self.device) < self.size - self.parts[2]
        )
        return factors * self.prior.loc

    def draws_at(self, deviation: Tensor, by_member: ByMember) -> Drawn:
        count = len(deviation)
        r, s = (
            by_member(widen(factor.loc).squeeze(1), count)
            for factor in (self.r, self.s)
        )
        change_r, change_s, change = deviation.split(self.parts, 1)
        bias = (
            None
            if self.bias is None
            else by_member(nn.functional.pad(self.bias, (0, 0, 1, 0)), count)
        )
        if self.parts[2]:
            bias = change if bias is None else bias + change
        return Drawn(
            r + change_r if self.parts[0] else r,
            s + change_s if self.parts[1] else s,
            bias,
        )

    # What rank-1 posteriors join over layers is independent factors: these go one by one, as any posterior does.
    @classmethod
    def draw_together(cls, posteriors: Sequence[Self], current: Pass) -> None:
        super(Rank1Posterior, cls).draw_together(posteriors, current)

    @classmethod
    def kl_together(cls, posteriors: Sequence[Self]) -> list[Tensor]:
        return super(Rank1Posterior, cls).kl_together(posteriors)
