"""Standard errors, intervals and sign-flip tests over a handful of seeds. All of it repeats bit for bit.

Bootstrap: percentile interval of the mean. With n values it is too short by about sqrt((n - 1) / n) and worse for tiny
n; docs/report.md has measured coverages. Sign flips (Fisher's randomisation test): if the method made no difference,
every paired difference could as well have had the other sign, so p is the share of the 2^n sign patterns whose mean is
at least as large. scipy has both, but a report need not install it, and tables would change with its version.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

# 97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom.
_STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
EXACT = 16  # up to so many pairs all 2^n sign patterns are counted
FLIPS = 2**16  # random patterns beyond that
Interval = tuple[float, float]


def _usable(values: Sequence[float]) -> bool:
    """At least two values, all finite: otherwise nothing can be said about their spread."""
    return len(values) > 1 and all(map(math.isfinite, values))


def mean(values: Sequence[float]) -> float:
    """The plain mean; NaN and infinity go through it, an empty sequence gives NaN.

    Example:
        >>> mean([1.0, 2.0])
        1.5
    """
    return sum(values) / len(values) if values else math.nan


def standard_error(values: Sequence[float]) -> float | None:
    """Standard deviation (n - 1) over sqrt(n); None for a single value or where one is not finite.

    Example:
        >>> standard_error([1.0, 3.0]), standard_error([1.0])
        (1.0, None)
    """
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if _usable(values) else None


def t_interval(values: Sequence[float]) -> Interval | None:
    """Student's 95 % interval of the mean; None for a single value or where one is not finite. Claims are judged by it:
    a bootstrap of three values is about their span, which chance alone puts on one side of zero once in four times.

    Example:
        >>> low, high = t_interval([1.0, 2.0, 3.0])
        >>> round(low, 3), round(high, 3)
        (-0.484, 4.484)
    """
    error, freedom = standard_error(values), len(values) - 1
    if error is None:
        return None
    half = error * (_STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.96 + 2.42 / freedom)
    return mean(values) - half, mean(values) + half


def bootstrap_interval(
    values: Sequence[float], *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval | None:
    """Percentile bootstrap interval of the mean; None for a single value or where one is not finite.

    Example:
        >>> low, high = bootstrap_interval([1.0, 2.0, 3.0, 4.0])
        >>> 1.0 < low < 2.5 < high < 4.0
        True
    """
    if not _usable(values):
        return None
    data = np.asarray(values, dtype=float)
    drawn = np.random.default_rng(seed).integers(len(data), size=(resamples, len(data)))
    low, high = np.quantile(data[drawn].mean(1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def sign_flip_p(differences: Sequence[float], *, seed: int = 0) -> float | None:
    """Two-sided p-value of paired differences under random signs; None for fewer than two or where one is not finite.

    It is never below 2 / 2^n: five pairs cannot give less than 0.0625.

    Example:
        >>> sign_flip_p([0.1, 0.2, 0.3, 0.1, 0.2])
        0.0625
    """
    if not _usable(differences):
        return None
    data, exact = np.asarray(differences, dtype=float), len(differences) <= EXACT
    if exact:
        flipped = np.arange(2 ** len(data))[:, None] >> np.arange(len(data)) & 1
    else:
        flipped = np.random.default_rng(seed).integers(2, size=(FLIPS, len(data)))
    sums = np.abs((1.0 - 2.0 * flipped) @ data)
    # Sums that are equal on paper may differ in the last bits.
    reached = int((sums >= abs(data.sum()) - 1e-12 * np.abs(data).sum()).sum())
    return reached / len(sums) if exact else (reached + 1) / (len(sums) + 1)
