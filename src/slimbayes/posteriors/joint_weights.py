"""The Gaussians of joint_normal.py over the weights and biases of a layer: with a full covariance, or with one that is
diagonal in a basis that is a Kronecker product (George et al. 2018), which `laplace` fits to layers too large for a
full one.

    W = mean + U (sigma o E) V^T,     U (n, n) and V (m, m) orthogonal,  E standard normal

of n outputs and m inputs, with a column more for the bias. With U and V the unit matrix the weights are independent;
`laplace` sets them, and they do not train.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slimbayes.distributions.scales import widen
from slimbayes.engine.rows import LinearMap
from slimbayes.layers.site import Site
from slimbayes.posteriors.configs.rank1 import JointNormal
from slimbayes.posteriors.joint_normal import ByMember, JointNormalPosterior


class JointWeights(JointNormalPosterior):
    """Weights, in the order they are stored in, and biases, around the layer's own."""

    regularises_mean = True

    def __init__(self, config: JointNormal, site: Site) -> None:
        super().__init__()
        self.regularises_bias = site.bias
        self._init_covariance(
            config, site, math.prod(site.shape) + (site.n_out if site.bias else 0)
        )

    def means(self) -> Tensor:
        linear = self.linear_map()
        own = (
            [linear.weight, linear.bias]
            if self.site.bias and linear.bias is not None
            else [linear.weight]
        )
        return torch.cat([widen(part).flatten() for part in own]).unsqueeze(0)

    def draws_at(
        self, deviation: Tensor, by_member: ByMember
    ) -> tuple[Tensor, Tensor | None]:
        """Deviations of the weights (n, *shape), and of the biases (n, out), where the layer has any."""
        weight, bias = deviation.tensor_split([math.prod(self.site.shape)], 1)
        return weight.reshape(-1, *self.site.shape), bias if self.site.bias else None

    def _free(self, linear: LinearMap) -> Tensor | None:
        if linear.mask is None:
            return None
        weight = (linear.mask.expand(self.site.shape) != 0).flatten()
        return nn.functional.pad(weight, (0, self.size - len(weight)), value=True)


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
    whole = (
        site.shape[site.out_dim] == site.n_out
        and site.shape[1 - site.out_dim] == site.n_in
    )
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
        weight = (
            numbers[:, :size]
            .view(-1, *self.site.shape)
            .movedim(1 + self.site.out_dim, 1)
            .flatten(2)
        )
        return (
            torch.cat([weight, numbers[:, size:].unsqueeze(2)], 2)
            if self.site.bias
            else weight
        )

    def _deviation(self, lines: Tensor, by_member: ByMember) -> Tensor:
        left, right = widen(self.left), widen(self.right)
        drawn = lines.to(left.dtype).view(-1, len(left), len(right)) * self._scale()
        return self._stored(left @ drawn @ right.mT)

    def variances(self) -> Tensor:
        left, right = widen(self.left).square(), widen(self.right).square()
        return self._stored(left @ self._scale().square() @ right.mT).unsqueeze(0)

    def root(self) -> Tensor:
        units = torch.eye(
            self.size, dtype=self._scale().dtype, device=self.log_scale.device
        )
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
        drawn.seen.append(
            self._inputs(x.detach(), linear, len(drawn.shift), drawn.mask)
        )
        y = linear.op(x, linear.weight, linear.bias)
        return linear.rows(operator.add, y, drawn.shift.to(y.dtype), self.current)

    def _inputs(
        self, x: Tensor, linear: LinearMap, rows: int, mask: Tensor | None
    ) -> Tensor:
        """What each row gives the matrix, averaged over positions, with a one for the bias, (B, m).

        The layer is linear, so it is the derivative of its mean output in the weights of one output.
        """
        one = linear.weight.detach().narrow(self.site.out_dim, 0, 1)

        def mean(weight: Tensor, row: Tensor, kept: Tensor) -> Tensor:
            y = linear.op(row, weight, None)
            if (
                y.numel() != kept.numel()
            ):  # not a number for each token: no mask is known
                return y.mean()
            return (y.flatten() * kept).sum() / kept.sum().clamp_min(1)

        kept = x.new_zeros(rows, 0) if mask is None else mask.to(x.dtype)
        if linear.batch_dim == -1 or rows == 1:
            found = (
                torch.func.grad(mean)(one, x, kept[0])
                .unsqueeze(0)
                .expand(rows, *one.shape)
            )
        else:
            blocks = x.unflatten(linear.batch_dim, (rows, -1))
            found = torch.vmap(torch.func.grad(mean), (None, linear.batch_dim, 0))(
                one, blocks, kept
            )
        lines = found.flatten(1)
        return (
            torch.cat([lines, lines.new_ones(rows, 1)], 1) if self.site.bias else lines
        )
