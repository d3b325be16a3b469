"""Averages over draws and members that may have weights, and other arithmetic of a Prediction.

Sizes: S draws, K members, N rows.
"""

import math

import torch
from torch import Tensor


def along_draws(factors: Tensor, values: Tensor) -> Tensor:
    """Factors (S,), or (S, N), shaped to meet values (S, N, ...)."""
    return factors.reshape(*factors.shape, *[1] * (values.dim() - factors.dim()))


def log_mean(logs: Tensor, weights: Tensor | None = None) -> Tensor:
    """Log of the mean over the first axis of what has these logs (K, ...), weighted by (K,), by (K, N) or equally.

    Example:
        >>> log_mean(torch.tensor([1.0, 3.0]).log()).exp()
        tensor(2.)
    """
    if weights is None:
        return torch.logsumexp(logs, 0) - math.log(len(logs))
    return torch.logsumexp(logs + along_draws(weights.log().to(logs), logs), 0)


def quantile(values: Tensor, weights: Tensor | None, level: float) -> Tensor:
    """Quantile over the first axis of values (M, ...), of which every member, in turn, has equally many.

    Weights are (K,), or (K, N) where they differ between rows.

    It interpolates as torch.quantile does for equal weights. That is the mean of the inverse distribution function over
    a window of one observation's width; for unequal ones the width comes from Kish's effective number of observations
    (Akinshin 2023), so a share of nearly zero has nearly no influence.

    Example:
        >>> quantile(torch.tensor([1.0, 2.0, 3.0, 7.0]), torch.tensor([0.5, 0.5]), 0.5)
        tensor(2.5000)
    """
    if weights is None:
        return torch.quantile(values, level, dim=0)
    each = len(values) // len(weights)
    shares = along_draws(weights.to(values.device).repeat(each, *[1] * (weights.dim() - 1)) / each, values)
    ordered, order = values.sort(0)
    share = shares.expand_as(values).gather(0, order)
    width = shares.square().sum(0)
    start = level * (1 - width)
    upper = share.cumsum(0)
    inside = upper.clamp(start, start + width) - (upper - share).clamp(start, start + width)
    return (inside / inside.sum(0) * ordered).sum(0).to(values.dtype)


def mixture_quantile(means: Tensor, noise: Tensor, weights: Tensor | None, level: float) -> Tensor:
    """Quantile of the mixture of normals with these means and variances (M, ...), members and weights as in `quantile`.

    Bisection, between the lowest and the highest of the normals' own quantiles.

    Example:
        >>> mixture_quantile(torch.tensor([-1.0, 3.0]), torch.ones(2), None, 0.5)
        tensor(1.)
    """
    wide, scale = means.double(), noise.double().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    each = len(wide) if weights is None else len(wide) // len(weights)
    shares = wide.new_ones(1) if weights is None else weights.to(wide)
    shares = along_draws(shares.repeat(each, *[1] * (shares.dim() - 1)) / each, wide)
    own = wide + scale * torch.special.ndtri(wide.new_tensor(level))
    low, high = own.amin(0), own.amax(0)
    for _ in range(50):
        middle = (low + high) / 2
        short = (shares * torch.special.ndtr((middle - wide) / scale)).sum(0) < level
        low, high = torch.where(short, middle, low), torch.where(short, high, middle)
    return ((low + high) / 2).to(means.dtype)


def for_a_row(name: str, value: float | Tensor, like: Tensor) -> Tensor:
    """A number or a tensor that broadcasts against one row's targets, as (1, ...) to meet `like` (K, N, ...). One in
    float64 stays so: a time in seconds has more digits than float32."""
    shape = (1, *like.shape[2:])
    kind = torch.promote_types(value.dtype, like.dtype) if isinstance(value, Tensor) else like.dtype
    tensor = torch.as_tensor(value, dtype=kind, device=like.device)
    try:
        out = torch.broadcast_to(tensor.reshape(()) if tensor.numel() == 1 else tensor, shape)
    except RuntimeError:
        needed = f"{name} must be a number or broadcast against one row's targets, shape {shape[1:]}"
        raise ValueError(f"{needed}, got shape {tuple(tensor.shape)}.") from None
    if not bool(out.isfinite().all()):
        raise ValueError(f"{name} must be finite, got {value!r}.")
    return out


def log_at(logs: Tensor, target: Tensor) -> Tensor:
    """What logs (..., N, C) say of the targets (N, ...)."""
    return logs.gather(-1, target.long().expand(logs.shape[:-1]).unsqueeze(-1)).squeeze(-1)
