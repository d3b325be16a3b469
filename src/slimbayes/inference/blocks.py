"""The curvature of one joint posterior's numbers, summed row by row, in one of three forms; and the covariance that a
form gives the posterior.

A Kronecker product holds a layer's weights W (n outputs x m inputs and a one for the bias) by two small matrices
(Martens and Grosse 2015; over positions as KFAC-reduce, Eschenhagen et al. 2023):

    H ~ G (x) A / N,    A = sum over rows of a a^T,  G = sum over rows and directions of g g^T

a is a row's input to the layer, averaged over its positions, g the derivative of its outputs, summed over them. It is
exact for one row, and where g g^T is the same for all rows, as in a linear model of Gaussian targets.

Sizes: K members, D numbers of one posterior, B rows, N rows of all batches.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from slimbayes.inference.evidence import triangular
from slimbayes.posteriors.joint_normal import ROUNDING


class Block(Protocol):
    """What becomes of the derivatives of rows."""

    def add(self, lines: Tensor, member: int) -> None:
        """Derivatives (B, D) of rows along one direction of their outputs; of a layer's outputs (B, n) in a product."""

    def see(self, inputs: Tensor | None, kept: Tensor) -> None:
        """Inputs (B, m) of a layer, once for each batch, and how much rows count (B,)."""

    def spectrum(self) -> Tensor:
        """Eigenvalues (K, D)."""

    def finite(self) -> bool: ...

    def directions(self, scale: float, precision: float) -> int | None:
        """How many directions tell the covariance (H / scale + precision)^-1 from the prior's, all members' alike; None
        if so many that they take more room than the covariance.
        """

    def fit(self, scale: float, precision: float, directions: int | None = None) -> None:
        """Give the posterior that covariance, by so many directions or whole."""


class Single:
    """Diagonals (K, D), or whole matrices (K, D, D)."""

    _found: tuple[Tensor, Tensor] | None = None

    def __init__(self, posterior: Any) -> None:
        shape = (posterior.members, *[posterior.size] * (2 if posterior.correlated else 1))
        self.posterior, self.values = posterior, torch.zeros(shape, dtype=torch.float64, device=posterior.device)

    def add(self, lines: Tensor, member: int) -> None:
        lines = lines.double()
        self.values[member] += lines.square().sum(0) if self.values.dim() == 2 else lines.mT @ lines

    def see(self, inputs: Tensor | None, kept: Tensor) -> None:
        pass

    def _eigen(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues (K, D), the least first, and eigenvectors (K, D, D)."""
        if self._found is None:
            values, vectors = torch.linalg.eigh(self.values)
            self._found = values.clamp_min(0), vectors
        return self._found

    def spectrum(self) -> Tensor:
        return self.values if self.values.dim() == 2 else self._eigen()[0]

    def finite(self) -> bool:
        return bool(self.values.isfinite().all())

    def directions(self, scale: float, precision: float) -> int | None:
        p = self.posterior
        if not (p.correlated and p.rounded and p.dtype == torch.float32):
            return None
        # Standard deviations fall short of the prior's by a factor of sqrt(1 + e / precision).
        shares = self._eigen()[0] / (scale * precision)
        count = int((shares > (1 + ROUNDING) ** 2 - 1).sum(1).max())
        # Of what is 1e-4 of the prior's, float32 has three digits left in 1 - V V^T.
        return count if 2 * count < p.size - 1 and float(shares.max()) < 1e8 else None

    def fit(self, scale: float, precision: float, directions: int | None = None) -> None:
        if self.values.dim() == 2:
            self.posterior.set_root((self.values / scale + precision).rsqrt())
            return
        values, vectors = self._eigen()
        if directions is None:
            pairs = zip(values / scale, vectors, strict=True)
            self.posterior.set_root(torch.stack([triangular(e, v, precision) for e, v in pairs]))
            return
        first = values.shape[1] - directions
        narrower = 1 - (1 + values[:, first:] / (scale * precision)).rsqrt()
        self.posterior.set_directions(precision**-0.5, vectors[:, :, first:] * narrower.sqrt().unsqueeze(1))


class Product:
    """G (n, n) and A (m, m), or (m + 1, m + 1) with a bias."""

    def __init__(self, posterior: Any) -> None:
        self.posterior, self.rows = posterior, 0.0
        self.left, self.right = (torch.zeros_like(basis, dtype=torch.float64) for basis in posterior.bases())

    def add(self, lines: Tensor, member: int) -> None:
        self.left += lines.double().mT @ lines.double()

    def see(self, inputs: Tensor | None, kept: Tensor) -> None:
        assert inputs is not None
        lines = inputs.double() * kept.double().sqrt().unsqueeze(1)
        self.right += lines.mT @ lines
        self.rows += float(kept.sum())

    def spectrum(self) -> Tensor:
        left, right = (torch.linalg.eigvalsh(side).clamp_min(0) for side in (self.left, self.right))
        return torch.outer(left, right).flatten().unsqueeze(0) / max(self.rows, 1.0)

    def finite(self) -> bool:
        return bool(self.left.isfinite().all() and self.right.isfinite().all())

    def directions(self, scale: float, precision: float) -> int | None:
        return None

    def fit(self, scale: float, precision: float, directions: int | None = None) -> None:
        (left, u), (right, v) = (torch.linalg.eigh(side) for side in (self.left, self.right))
        values = torch.outer(left.clamp_min(0), right.clamp_min(0)) / max(self.rows, 1.0)
        self.posterior.set_bases(u, v, (values / scale + precision).rsqrt())


def block_of(posterior: Any) -> Block:
    return Product(posterior) if posterior.factored else Single(posterior)
