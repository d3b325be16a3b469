"""What curvature H says of a Laplace approximation: covariances, its marginal likelihood, and the prior precision and
noise that make that largest.

    log p(D) = log p(D | mean) - 1/2 sum over layers [lambda |mean - loc|^2 + log det(H + lambda) - D log lambda]

In log lambda it has one maximum, where lambda |mean - loc|^2 = gamma, the number of directions that the data determine
(MacKay 1992), gamma = sum e / (e + lambda) over eigenvalues e of H. For Gaussian targets H falls with the noise
variance, whose best value is (sum of squared residuals) / (targets - gamma), with gamma at that noise.

H of a posterior's numbers is a diagonal, a matrix, or for a layer's weights W (n outputs x m inputs and a one for the
bias) a Kronecker product of two small ones (Martens and Grosse 2015; over positions as KFAC-reduce, Eschenhagen et al.
2023):

    H ~ G (x) A / N,    A = sum over rows of a a^T,  G = sum over rows and directions of g g^T

a is a row's input to the layer, averaged over its positions, g the derivative of its outputs, summed over them. It is
exact for one row, and where g g^T is the same for all rows, as in a linear model of Gaussian targets.

Sizes: K members, D numbers of one posterior, B rows, N rows of all batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slimbayes.posteriors.joint_normal import ROUNDING

LARGEST = 1e10  # a prior precision beyond it, or below its inverse, has run away


@dataclass(frozen=True)
class CurvatureSpectrum:
    """Eigenvalues of one matrix's curvature (K, D), and |mean - loc|^2, averaged over members as all here is."""

    name: str
    values: Tensor
    scatter: float

    def determined(self, precision: float) -> float:
        """gamma."""
        return float((self.values / (self.values + precision)).sum()) / len(self.values)

    def log_penalty(self, precision: float) -> float:
        """What the matrix takes from the log-likelihood."""
        return 0.5 * (precision * self.scatter + float((self.values / precision).log1p().sum()) / len(self.values))


@dataclass(frozen=True)
class Evidence:
    """Prior precisions of the matrices, the noise's standard deviation, and log-likelihood and evidence with them."""

    precisions: list[float]
    noise: float
    log_likelihood: float
    log_evidence: float


def best_precision(spectra: Sequence[CurvatureSpectrum]) -> float:
    """The prior precision of most evidence that these matrices share."""
    low, high = -math.log(LARGEST), math.log(LARGEST)
    scatter, names = sum(s.scatter for s in spectra), ", ".join(s.name for s in spectra[:3])

    def slope(log_precision: float) -> float:
        precision = math.exp(log_precision)
        return sum(s.determined(precision) for s in spectra) - precision * scatter

    if slope(high) > 0:
        raise ValueError(
            f"laplace: the prior precision of {names} runs away to infinity: its means lie at the prior's mean, so "
            f"that the evidence grows as the posterior shrinks. Give prior=Normal(loc, scale)."
        )
    if slope(low) < 0:
        raise ValueError(
            f"laplace: the prior precision of {names} runs away to zero: outputs do not change with these numbers "
            f"(singular curvature), or targets are in the millions. Exclude the layer, standardise the targets, or "
            f"give prior=Normal(loc, scale)."
        )
    return math.exp(_root(slope, low, high, 80))


def maximise(
    spectra: Sequence[CurvatureSpectrum],
    log_likelihood: float,
    targets: int,
    noise: float | None,
    scaled: bool,
    precisions: Sequence[float] | None,
    groups: Sequence[int],
) -> Evidence:
    """Evidence at its maximum over whatever is not given.

    Args:
        log_likelihood: of all targets, at unit noise where the noise is `scaled`.
        noise: its standard deviation; None finds it.
        precisions: of the matrices; None finds them.
        groups: which matrices share one: those of equal number.
    """
    found, sigma = list(precisions or [1.0] * len(spectra)), 1.0 if noise is None else noise
    squares = max(-2 * log_likelihood - targets * math.log(2 * math.pi), 0.0) if scaled else 0.0
    for _ in range(500):
        now = [replace(s, values=s.values / sigma**2) for s in spectra]
        if precisions is None:
            best = {g: best_precision([s for s, own in zip(now, groups, strict=True) if own == g]) for g in set(groups)}
            found = [best[g] for g in groups]
        if not scaled or noise is not None:
            break
        before, sigma = sigma, _noise(squares, targets, spectra, found)
        if abs(sigma - before) < 1e-10 * before:
            break
    if scaled:
        log_likelihood = -0.5 * squares / sigma**2 - targets * math.log(sigma * math.sqrt(2 * math.pi))
    taken = sum(s.log_penalty(precision) for s, precision in zip(now, found, strict=True))
    return Evidence(found, sigma, log_likelihood, log_likelihood - taken)


def _noise(squares: float, targets: int, spectra: Sequence[CurvatureSpectrum], precisions: Sequence[float]) -> float:
    """The noise of most evidence at these precisions, of spectra at unit noise: where squares / sigma^2 = targets -
    gamma. Both sides fall and rise with sigma, also where layers by themselves, each by its own account, determine more
    directions than there are targets.
    """
    if not squares > 1e-12 * targets:
        raise ValueError(
            f"laplace: {targets} targets do not tell the noise: they are met exactly, or to a millionth. Give noise=, "
            f"the standard deviation of the targets' noise, or standardise targets that are that small."
        )

    def slope(log_sigma: float) -> float:
        variance = math.exp(2 * log_sigma)  # e / variance + lambda is (e + lambda variance) / variance
        gamma = sum(s.determined(p * variance) for s, p in zip(spectra, precisions, strict=True))
        return squares / variance - targets + gamma

    low = 0.5 * math.log(squares / targets)  # without any direction determined
    high = low + 1.0
    while slope(high) > 0:
        high += 1.0
    return math.exp(_root(slope, low, high, 60))


def _root(falling: Callable[[float], float], low: float, high: float, steps: int) -> float:
    for _ in range(steps):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return 0.5 * (low + high)


def triangular(values: Tensor, vectors: Tensor, precision: float) -> Tensor:
    """Cholesky factor of (H + lambda)^-1 (D, D) from eigenvalues (D,) and eigenvectors (D, D) of H."""
    half = vectors * (values.clamp_min(0) + precision).rsqrt()
    # A triangular root of half half^T from a QR, which keeps the digits that forming the product would lose.
    root = torch.linalg.qr(half.mT).R.mT
    return root * root.diagonal().sign()


class Single:
    """The curvature of one posterior's numbers: diagonals (K, D), or whole matrices (K, D, D)."""

    _found: tuple[Tensor, Tensor] | None = None

    def __init__(self, posterior: Any) -> None:
        shape = (posterior.members, *[posterior.size] * (2 if posterior.correlated else 1))
        self.posterior, self.values = posterior, torch.zeros(shape, dtype=torch.float64, device=posterior.device)

    def add(self, lines: Tensor, member: int) -> None:
        """Derivatives (B, D) of rows along one direction of their outputs; of a layer's outputs (B, n) in a product."""
        lines = lines.double()
        self.values[member] += lines.square().sum(0) if self.values.dim() == 2 else lines.mT @ lines

    def see(self, inputs: Tensor | None, kept: Tensor) -> None:
        """Inputs (B, m) of a layer, once for each batch, and how much rows count (B,)."""

    def _eigen(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues (K, D), the least first, and eigenvectors (K, D, D)."""
        if self._found is None:
            values, vectors = torch.linalg.eigh(self.values)
            self._found = values.clamp_min(0), vectors
        return self._found

    def spectrum(self) -> Tensor:
        """Eigenvalues (K, D)."""
        return self.values if self.values.dim() == 2 else self._eigen()[0]

    def finite(self) -> bool:
        return bool(self.values.isfinite().all())

    def directions(self, scale: float, precision: float) -> int | None:
        """How many directions tell the covariance (H / scale + precision)^-1 from the prior's, all members' alike; None
        if so many that they take more room than the covariance.
        """
        p = self.posterior
        if not (p.correlated and p.rounded and p.dtype == torch.float32):
            return None
        # Standard deviations fall short of the prior's by a factor of sqrt(1 + e / precision).
        shares = self._eigen()[0] / (scale * precision)
        count = int((shares > (1 + ROUNDING) ** 2 - 1).sum(1).max())
        # Of what is 1e-4 of the prior's, float32 has three digits left in 1 - V V^T.
        return count if 2 * count < p.size - 1 and float(shares.max()) < 1e8 else None

    def fit(self, scale: float, precision: float, directions: int | None = None) -> None:
        """Give the posterior that covariance, by so many directions or whole."""
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


class Product(Single):
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

    def _eigen(self) -> tuple[Any, Any]:
        """Eigenvalues (n, m), and eigenvectors of both sides."""
        (left, u), (right, v) = (torch.linalg.eigh(side) for side in (self.left, self.right))
        return torch.outer(left.clamp_min(0), right.clamp_min(0)) / max(self.rows, 1.0), (u, v)

    def spectrum(self) -> Tensor:
        return self._eigen()[0].flatten().unsqueeze(0)

    def finite(self) -> bool:
        return bool(self.left.isfinite().all() and self.right.isfinite().all())

    def directions(self, scale: float, precision: float) -> int | None:
        return None

    def fit(self, scale: float, precision: float, directions: int | None = None) -> None:
        values, sides = self._eigen()
        self.posterior.set_bases(*sides, (values / scale + precision).rsqrt())
