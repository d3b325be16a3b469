"""Two more of the Gaussians of joint_normal.py: over the rank-1 factors of one matrix, and its biases; and over weights
whose covariance is diagonal in a basis that is a Kronecker product (George et al. 2018), which `laplace` fits to layers
too large for a full one.

    W = mean + U (sigma o E) V^T,     U (n, n) and V (m, m) orthogonal,  E standard normal

of n outputs and m inputs, with a column more for the bias. With U and V the unit matrix the weights are independent;
`laplace` sets them, and they do not train.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from slimbayes.distributions.families import widen
from slimbayes.engine.passes import Noise, Pass
from slimbayes.engine.rows import LinearMap
from slimbayes.layers.site import Site
from slimbayes.posteriors.base import Role
from slimbayes.posteriors.configs.rank1 import BatchEnsemble, JointNormal
from slimbayes.posteriors.factors import Drawn
from slimbayes.posteriors.joint_normal import Joint, JointWeights, Pick
from slimbayes.posteriors.rank1 import Rank1Posterior


@dataclass
class Watched:
    """Stands for draws of a pass that runs at the mean: adds a line (B, n) to the outputs of each row, and keeps what
    the layer was given, (B, m) for each time it ran, averaged over positions, of those that a mask (B, T) has.
    """

    shift: Tensor
    seen: list[Tensor]
    mask: Tensor | None = None

    def inputs(self, rows: int) -> Tensor:
        """Inputs of the rows, averaged over the times that the layer ran."""
        if not self.seen:
            raise ValueError(
                "laplace: a layer whose covariance is a Kronecker product did not run, or not by its own forward. "
                "Exclude it, or take structure='diagonal'."
            )
        return sum(self.seen[1:], self.seen[0]) / len(self.seen)


def is_product(config: JointNormal, site: Site) -> bool:
    """Whether a covariance is too large, and its matrix has all inputs and all outputs: no groups, no lookup."""
    whole = site.shape[site.out_dim] == site.n_out and site.shape[1 - site.out_dim] == site.n_in
    large = math.prod(site.shape) + site.n_out * site.bias > config.full_up_to
    plain = site.kind == "matrix" and site.name == "weight" and not site.whole
    return config.beyond == "kronecker" and large and plain and whole


class KroneckerWeights(JointWeights):
    """log sigma (1, n m) row by row, and the bases U and V."""

    factored = True
    left: Tensor
    right: Tensor

    def __init__(self, config: JointNormal, site: Site) -> None:
        super().__init__(config, site)
        m, n = site.matrix
        self.register_buffer("left", torch.eye(n))
        self.register_buffer("right", torch.eye(m + site.bias))
        self.note = f"a Kronecker product: its {self.size:,} numbers are more than full_up_to={config.full_up_to:,}"

    def bases(self) -> tuple[Tensor, Tensor]:
        return self.left, self.right

    @torch.no_grad()
    def set_bases(self, left: Tensor, right: Tensor, scale: Tensor) -> None:
        """Take over U, V and the standard deviations (n, m) between them."""
        self.left.copy_(left)
        self.right.copy_(right)
        self.log_scale.copy_(scale.log().view_as(self.log_scale))

    def _scale(self) -> Tensor:
        return widen(self.log_scale).exp().view(len(self.left), len(self.right))

    def _stored(self, matrix: Tensor) -> Tensor:
        """Numbers (..., n, m) in the order of `means`, (..., D)."""
        m = self.site.matrix[0]
        weight = self.site.from_matrix(matrix[..., :m].mT).flatten(matrix.dim() - 2)
        return torch.cat([weight, matrix[..., m]], -1) if self.site.bias else weight

    def _matrix(self, numbers: Tensor) -> Tensor:
        """The way back, (B, D) to (B, n, m)."""
        size = math.prod(self.site.shape)
        weight = numbers[:, :size].view(-1, *self.site.shape).movedim(1 + self.site.out_dim, 1).flatten(2)
        return torch.cat([weight, numbers[:, size:].unsqueeze(2)], 2) if self.site.bias else weight

    def _deviation(self, lines: Tensor, pick: Pick) -> Tensor:
        left, right = widen(self.left), widen(self.right)
        drawn = lines.to(left.dtype).view(-1, len(left), len(right)) * self._scale()
        return self._stored(left @ drawn @ right.mT)

    def variances(self) -> Tensor:
        left, right = widen(self.left).square(), widen(self.right).square()
        return self._stored(left @ self._scale().square() @ right.mT).unsqueeze(0)

    def root(self) -> Tensor:
        units = torch.eye(self.size, dtype=self._scale().dtype, device=self.log_scale.device)
        return self._deviation(units, lambda parameter, n: parameter).mT.unsqueeze(0)

    def times_root(self, member: int) -> Callable[[Tensor], Tensor]:
        left, right, scale = widen(self.left), widen(self.right), self._scale()
        return lambda lines: (left.mT @ self._matrix(lines) @ right * scale).flatten(1)

    def _free(self, linear: LinearMap) -> Tensor | None:
        if linear.mask is not None:
            raise ValueError(
                f"{self.name} has weights that stay as they are (pruned ones), which a Kronecker product cannot leave "
                f"out: take structure='diagonal'."
            )
        return None

    def forward(self, x: Tensor, linear: LinearMap) -> Tensor:
        drawn = self.values()
        if not isinstance(drawn, Watched):
            return super().forward(x, linear)
        self._free(linear)
        drawn.seen.append(self._inputs(x.detach(), linear, len(drawn.shift), drawn.mask))
        y = linear.op(x, linear.weight, linear.bias)
        return linear.rows(operator.add, y, drawn.shift.to(y.dtype), self.current)

    def _inputs(self, x: Tensor, linear: LinearMap, rows: int, mask: Tensor | None) -> Tensor:
        """What each row gives the matrix, averaged over positions, with a one for the bias, (B, m).

        The layer is linear, so it is the derivative of its mean output in the weights of one output.
        """
        one = linear.weight.detach().narrow(self.site.out_dim, 0, 1)

        def mean(weight: Tensor, row: Tensor, kept: Tensor) -> Tensor:
            y = linear.op(row, weight, None)
            if y.numel() != kept.numel():  # not a number for each token: no mask is known
                return y.mean()
            return (y.flatten() * kept).sum() / kept.sum().clamp_min(1)

        kept = x.new_zeros(rows, 0) if mask is None else mask.to(x.dtype)
        if linear.batch_dim == -1 or rows == 1:
            found = torch.func.grad(mean)(one, x, kept[0]).unsqueeze(0).expand(rows, *one.shape)
        else:
            blocks = x.unflatten(linear.batch_dim, (rows, -1))
            found = torch.vmap(torch.func.grad(mean), (None, linear.batch_dim, 0))(one, blocks, kept)
        lines = found.flatten(1)
        return torch.cat([lines, lines.new_ones(rows, 1)], 1) if self.site.bias else lines


MOST_ENTANGLED = 0.1  # share of a weight by which its draws may be off on average


class JointFactors(Joint, Rank1Posterior):
    """Factors r (K, out) and s (K, in), and biases (K, out), of which some are drawn together, in this order. The prior
    of biases has mean zero.
    """

    rounded = True

    def __init__(self, config: JointNormal, site: Site) -> None:
        points = BatchEnsemble(members=config.members, mean_init=config.mean_init, member_bias=config.member_bias)
        Rank1Posterior.__init__(self, points.resolved(), site)
        biases = site.n_out if config.over == "both+bias" and site.bias else 0
        self.parts = [0 if config.over == "s" else site.n_out, 0 if config.over == "r" else site.n_in, biases]
        self._begin(config, site, sum(self.parts))

    @property
    def prior_of_factors(self) -> Any:
        return self.prior

    def role(self, name: str) -> Role:
        return "scale" if name in ("log_scale", "lower", "directions") else Rank1Posterior.role(self, name)

    def means(self) -> Tensor:
        r, s = widen(self.r.loc).squeeze(1), widen(self.s.loc).squeeze(1)
        numbers = [r[:, : self.parts[0]], s[:, : self.parts[1]]]
        if self.parts[2]:
            bias = self.linear_map().bias
            assert bias is not None
            own = widen(bias).expand(self.members, -1)
            numbers.append(own if self.bias is None else own + nn.functional.pad(widen(self.bias), (0, 0, 1, 0)))
        return torch.cat(numbers, 1)

    @torch.no_grad()
    def entangled(self) -> float:
        """The largest covariance of an r and an s: by so much the mean of r s is off from that of their means."""
        if not self.correlated or not self.parts[0] or not self.parts[1]:
            return 0.0
        r, s, _ = self.root().split(self.parts, 1)
        return float((r @ s.mT).abs().max())

    def realise(self, noise: Noise) -> Any:
        if self.fitted and not torch.compiler.is_compiling():
            self.fitted, off = False, self.entangled()
            if off > MOST_ENTANGLED:
                warnings.warn(
                    f"laplace: factors of {self.name} vary against each other so much that drawn weights are up to "
                    f"{off:.0%} off from the network's on average. Use predict_linearised, which is not concerned, or "
                    f"laplace(..., prior=Normal(1.0, 0.2)) or over='r'.",
                    stacklevel=2,
                )
        return Joint.realise(self, noise)

    def locs(self) -> float | Tensor:
        if not self.parts[2]:
            return self.prior.loc
        factors = torch.arange(self.size, device=self.device) < self.size - self.parts[2]
        return factors * self.prior.loc

    def at(self, deviation: Tensor, pick: Pick) -> Drawn:
        count = len(deviation)
        r, s = (pick(widen(factor.loc).squeeze(1), count) for factor in (self.r, self.s))
        change_r, change_s, change = deviation.split(self.parts, 1)
        bias = None if self.bias is None else pick(nn.functional.pad(self.bias, (0, 0, 1, 0)), count)
        if self.parts[2]:
            bias = change if bias is None else bias + change
        return Drawn(r + change_r if self.parts[0] else r, s + change_s if self.parts[1] else s, bias)

    # What rank-1 posteriors join over layers is independent factors: these go one by one, as any posterior does.
    @classmethod
    def realise_together(cls, posteriors: Sequence[Self], current: Pass) -> None:
        super(Rank1Posterior, cls).realise_together(posteriors, current)

    @classmethod
    def kl_together(cls, posteriors: Sequence[Self]) -> list[Tensor]:
        return super(Rank1Posterior, cls).kl_together(posteriors)
