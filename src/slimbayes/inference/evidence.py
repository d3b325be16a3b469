"""What curvature H says of a Laplace approximation: its marginal likelihood, and the prior precision and noise that
make it largest.

    log p(D) = log p(D | mean) - 1/2 sum over layers [lambda |mean - loc|^2 + log det(H + lambda) - D log lambda]

In log lambda it has one maximum, where lambda |mean - loc|^2 = gamma, the number of directions that the data determine
(MacKay 1992), gamma = sum e / (e + lambda) over eigenvalues e of H. For Gaussian targets H falls with the noise
variance, whose best value is (sum of squared residuals) / (targets - gamma), with gamma at that noise.

Sizes: K members, D numbers of one posterior.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

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
        return 0.5 * (
            precision * self.scatter
            + float((self.values / precision).log1p().sum()) / len(self.values)
        )


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
    scatter, names = (
        sum(s.scatter for s in spectra),
        ", ".join(s.name for s in spectra[:3]),
    )

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
    found, sigma = (
        list(precisions or [1.0] * len(spectra)),
        1.0 if noise is None else noise,
    )
    squares = (
        max(-2 * log_likelihood - targets * math.log(2 * math.pi), 0.0)
        if scaled
        else 0.0
    )
    for _ in range(500):
        now = [replace(s, values=s.values / sigma**2) for s in spectra]
        if precisions is None:
            best = {
                g: best_precision(
                    [s for s, own in zip(now, groups, strict=True) if own == g]
                )
                for g in set(groups)
            }
            found = [best[g] for g in groups]
        if not scaled or noise is not None:
            break
        before, sigma = sigma, _noise(squares, targets, spectra, found)
        if abs(sigma - before) < 1e-10 * before:
            break
    if scaled:
        log_likelihood = -0.5 * squares / sigma**2 - targets * math.log(
            sigma * math.sqrt(2 * math.pi)
        )
    taken = sum(
        s.log_penalty(precision) for s, precision in zip(now, found, strict=True)
    )
    return Evidence(found, sigma, log_likelihood, log_likelihood - taken)


def _noise(
    squares: float,
    targets: int,
    spectra: Sequence[CurvatureSpectrum],
    precisions: Sequence[float],
) -> float:
    """The noise of most evidence at these precisions, of spectra at unit noise: where squares / sigma^2 = targets -
    gamma. Both sides fall and rise with sigma, also where layers by themselves, each by its own account, determine more
    directions than there are targets.
    """
    if not squares > 1e-12 * targets:
        raise ValueError(
            f"laplace: {targets} targets do not tell the noise: they are met exactly, or to a millionth. Give "
            f"likelihood_std=, the standard deviation of the targets' noise, or standardise targets that are that small."
        )

    def slope(log_sigma: float) -> float:
        variance = math.exp(
            2 * log_sigma
        )  # e / variance + lambda is (e + lambda variance) / variance
        gamma = sum(
            s.determined(p * variance) for s, p in zip(spectra, precisions, strict=True)
        )
        return squares / variance - targets + gamma

    low = 0.5 * math.log(squares / targets)  # without any direction determined
    high = low + 1.0
    while slope(high) > 0:
        high += 1.0
    return math.exp(_root(slope, low, high, 60))


def _root(
    falling: Callable[[float], float], low: float, high: float, steps: int
) -> float:
    for _ in range(steps):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return 0.5 * (low + high)
