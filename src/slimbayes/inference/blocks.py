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

from slimbayes.inference.evidence import inverse_root


class Block(Protocol):
    """What becomes of the derivatives of rows."""

    def add(self, lines: Tensor, member: int) -> None:
        """Derivatives (B, D) of rows along one direction of their outputs; of a layer's outputs (B, n) in a product."""

    def see(self, inputs: Tensor | None, kept: Tensor) -> None:
        """Inputs (B, m) of a layer, once for each batch, and how much rows count (B,)."""

    def spectrum(self) -> Tensor:
        """Eigenvalues (K, D)."""

    def finite(self) -> bool: ...

    def fit(self, scale: float, precision: float) -> None:
        """Give the posterior the covariance (H / scale + precision)^-1."""


class Single:
    """Diagonals (K, D), or whole matrices (K, D, D)."""

    def __init__(self, posterior: Any) -> None:
        shape = (posterior.members, *[posterior.size] * (1 if posterior.lower is None else 2))
        self.posterior, self.values = posterior, torch.zeros(shape, dtype=torch.float64, device=posterior.device)

    def add(self, lines: Tensor, member: int) -> None:
        lines = lines.double()
        self.values[member] += lines.square().sum(0) if self.values.dim() == 2 else lines.mT @ lines

    def see(self, inputs: Tensor | None, kept: Tensor) -> None:
        pass

    def spectrum(self) -> Tensor:
        return self.values if self.values.dim() == 2 else torch.linalg.eigvalsh(self.values).clamp_min(0)

    def finite(self) -> bool:
        return bool(self.values.isfinite().all())

    def fit(self, scale: float, precision: float) -> None:
        self.posterior.set_root(torch.stack([inverse_root(m / scale, precision) for m in self.values]))


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

    def fit(self, scale: float, precision: float) -> None:
        (left, u), (right, v) = (torch.linalg.eigh(side) for side in (self.left, self.right))
        values = torch.outer(left.clamp_min(0), right.clamp_min(0)) / max(self.rows, 1.0)
        self.posterior.set_bases(u, v, (values / scale + precision).rsqrt())


def block_of(posterior: Any) -> Block:
    return Product(posterior) if posterior.factored else Single(posterior)
