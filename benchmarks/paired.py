"""Intervals of differences that few seeds share.

A percentile bootstrap of three differences is about the least and the largest of them, which chance alone puts on one
side of zero once in four times: what pages call beyond noise is judged by Student's t instead.
"""

from collections.abc import Sequence
from statistics import mean

from scipy.stats import t as student

from slimbayes.report.statistics import Interval, standard_error


def t_interval(values: Sequence[float], level: float = 0.95) -> Interval | None:
    """Student's interval of the mean; None for a single value or where one is not finite.

    >>> low, high = t_interval([1.0, 2.0, 3.0])
    >>> round(low, 3), round(high, 3)
    (-0.484, 4.484)
    """
    error = standard_error(values)
    if error is None:
        return None
    half = float(student.ppf((1 + level) / 2, len(values) - 1)) * error
    return mean(values) - half, mean(values) + half
