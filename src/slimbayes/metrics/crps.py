"""The continuous ranked probability score of a predictive distribution F at y, in y's units; less is better.

    CRPS(F, y) = integral (F(x) - 1[x >= y])^2 dx = E|X - y| - E|X - X'| / 2          X, X' independent from F

For one value, or scale 0, it is the absolute error. With M samples of a wider F, `crps_samples` scores what it is
given, the empirical distribution, so it is larger on average than F's score, by E|X - X'| / (2 M).

Sizes: M samples or components, N rows.
"""

import math

import torch
from torch import Tensor

from slimbayes.prediction.accumulate import along_draws
from slimbayes.train.targets import check_positive


# torchmetrics' ContinuousRankedProbabilityScore compares all pairs of samples: O(M^2) memory, and it knows no weights.
def crps_samples(samples: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
    """CRPS of samples x_i; sorted, E|X - X'| / 2 = sum_i w_i x_i (2 W_i - w_i - 1) with W_i = w_1 + ... + w_i.

    Shape: samples (M, N, ...), target (N, ...), weights (M,) or (M, N) that sum to one; returns (N, ...) in float64.

    Example:
        >>> crps_samples(torch.tensor([[0.0], [2.0]]), torch.tensor([1.0]))  # 1 - 2 * 1/4
        tensor([0.5000], dtype=torch.float64)
    """
    off = _off(samples, target)  # differences do not change, and small numbers round less
    share = _shares(weights, off)
    off, order = off.sort(0)
    share = share.expand_as(off).gather(0, order)
    return (share * (off.abs() - off * (2 * share.cumsum(0) - share - 1))).sum(0)


def crps_mixture(means: Tensor, scales: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
    """CRPS of a mixture of normal distributions (Grimit et al. 2006); scale zero is a point. O(M^2) time, O(M) memory.

        sum_i w_i A(y - mu_i, s_i) - 1/2 sum_ij w_i w_j A(mu_i - mu_j, sqrt(s_i^2 + s_j^2))       A(m, s) = E|N(m, s^2)|

    Shape: means (M, N, ...), scales broadcast against means, target (N, ...), weights (M,) or (M, N) that sum to one;
    returns (N, ...) in float64.

    Example:
        >>> crps_mixture(torch.zeros(2, 1), torch.ones(2, 1), torch.zeros(1))  # N(0, 1): (sqrt(2) - 1) / sqrt(pi)
        tensor([0.2337], dtype=torch.float64)
    """
    off = _off(means, target)
    check_positive("scales", scales, zero=True)
    variance = scales.double().square().expand_as(off)
    share = _shares(weights, off)
    spread = torch.zeros_like(off[0])
    for i in range(len(off)):  # the pairs j > i count twice, the pair (i, i) once
        later = share[i] * share[i:] * _mean_distance(off[i] - off[i:], variance[i] + variance[i:])
        spread = spread + later.sum(0) - later[0] / 2
    return (share * _mean_distance(off, variance)).sum(0) - spread


def _off(values: Tensor, target: Tensor) -> Tensor:
    """Values (M, N, ...) less the targets (N, ...), which may not broadcast."""
    if values.shape[1:] != target.shape:
        raise ValueError(
            f"A target of shape {tuple(values.shape[1:])} is needed for values of shape {tuple(values.shape)}, got "
            f"{tuple(target.shape)}."
        )
    return values.double() - target.double()


def _mean_distance(m: Tensor, variance: Tensor) -> Tensor:
    """E|X| for X from N(m, variance)."""
    scale = variance.sqrt()
    z = m / scale.clamp_min(torch.finfo(scale.dtype).tiny)
    return math.sqrt(2 / math.pi) * scale * torch.exp(-0.5 * z.square()) + m * torch.erf(z / math.sqrt(2))


def _shares(weights: Tensor | None, values: Tensor) -> Tensor:
    """Weights (M, 1 or N, ...) to meet values (M, N, ...); equal ones if None."""
    share = values.new_full((len(values),), 1 / len(values)) if weights is None else weights.to(values)
    return along_draws(share, values)
