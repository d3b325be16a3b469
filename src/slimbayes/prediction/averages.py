"""Averages over draws, and over members that may have weights: means, quantiles, mixtures. And Accumulator, which makes
those that a Prediction is made of from draws that arrive in chunks.

Sizes: S draws, K members, N rows, C classes.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slimbayes.train.likelihoods import entropy, likelihood_named
from slimbayes.train.targets import can_read_values, check_positive


class Accumulator:
    """Sums over draws that arrive in chunks, so that memory does not grow with S unless samples are kept.

    Args:
        class_dim: where the classes are; None means last, refused where outputs may be images, (S, N, C, H, W).
    """

    def __init__(
        self,
        likelihood: str,
        members: int,
        scale: float | Tensor,
        keep: bool,
        class_dim: int | None = None,
        weights: Tensor | Sequence[float] | None = None,
    ) -> None:
        self.meaning = likelihood_named(likelihood)
        if not isinstance(scale, Tensor) or can_read_values(scale):
            check_positive("scale", torch.as_tensor(scale), zero=True)
        self.likelihood, self.members, self.scale, self.keep = (
            likelihood,
            members,
            scale,
            keep,
        )
        self.class_dim = class_dim
        self.weights = None if weights is None else _checked_weights(weights, members)
        self.count = 0
        self.member_sum: Any = None  # of means, or the log of a sum of probabilities
        self.noise_sum: Any = 0.0  # entropies of the draws, or their noise variances
        self.square: Any = (
            0.0  # sum of squared deviations from the running mean (Chan's update)
        )
        self.samples: list[Tensor] = []
        self.noises: list[Tensor] = []

    def add(self, outputs: Tensor) -> None:
        """Take outputs (S', N, ...) of further draws; their number must be a multiple of the members."""
        if (
            outputs.dim() < (3 if self.meaning.option == "class_dim" else 2)
            or len(outputs) % self.members
        ):
            raise ValueError(
                f"Outputs need an axis of draws, as many for each of {self.members} members, and one of rows, got "
                f"shape {tuple(outputs.shape)}."
            )
        wide = outputs if outputs.dtype == torch.float64 else outputs.float()
        values, noise = self.meaning.predictive(wide, self.scale, self.class_dim)
        by_member = values.unflatten(0, (-1, self.members))
        if self.meaning.discrete:
            fresh = torch.logsumexp(by_member, 0)
            self.member_sum = (
                fresh
                if self.member_sum is None
                else torch.logaddexp(self.member_sum, fresh)
            )
        else:
            mean = self._weighted(values).mean(0)
            if self.count:
                shift = mean - self._weighted(self.member_sum).sum(0) / self.count
                self.square = self.square + shift**2 * (
                    self.count * len(values) / (self.count + len(values))
                )
            self.square = self.square + self._weighted((values - mean).square()).sum(0)
            fresh = by_member.sum(0)
            self.member_sum = (
                fresh if self.member_sum is None else self.member_sum + fresh
            )
        self.noise_sum = self.noise_sum + self._weighted(noise).sum(0)
        self.count += len(values)
        if self.keep:
            self.samples.append(values)
            self.noises.append(noise)

    def _weighted(self, values: Tensor) -> Tensor:
        """Values (S', ...) of draws, or (K, ...) of members, times K w of their member: factors of mean one."""
        if self.weights is None:
            return values
        return values * unsqueeze_like(
            (len(values) * draw_shares(self.weights, values)).to(values), values
        )

    def sound(self) -> bool:
        """Whether draws so far are numbers, or finite means. One number is read from the device."""
        total = self.member_sum.sum()
        if self.meaning.discrete:
            return not bool(total.isnan())  # a probability of zero has the log -inf
        finite = bool(
            (total + self.noise_sum.sum()).isfinite()
        )  # large numbers may add up to infinity
        return finite or bool(
            self.member_sum.isfinite().all() & self.noise_sum.isfinite().all()
        )

    def fields(self) -> dict[str, Any]:
        """The fields of a Prediction."""
        each, aleatoric = (
            self.count // self.members,
            self.noise_sum / self.count,
        )  # draws of a member
        if self.meaning.discrete:
            by_member = self.member_sum - math.log(each)
            epistemic = mutual_information(by_member, self.weights, aleatoric)
        else:
            by_member, epistemic = self.member_sum / each, self.square / self.count
        return {
            "likelihood": self.likelihood,
            "count": self.count,
            "by_member": by_member,
            "aleatoric": aleatoric,
            "epistemic": epistemic,
            "by_draw": torch.cat(self.samples) if self.keep else None,
            "noise": torch.cat(self.noises)
            if self.keep and not self.meaning.discrete
            else None,
            "weights": self.weights,
        }


def _checked_weights(weights: Tensor | Sequence[float], members: int) -> Tensor:
    """Weights (K,) in float64, scaled to sum to one beyond the rounding of what was given."""
    given: Any = (
        weights.tolist() if isinstance(weights, Tensor) else list(weights)
    )  # torch.export traces tensors
    flat = not any(isinstance(w, (list, tuple)) for w in given)
    if (
        not flat
        or len(given) != members
        or not all(w >= 0 for w in given)
        or not abs(sum(given) - 1) <= 1e-4
    ):
        raise ValueError(
            f"weights must be {members} non-negative numbers that sum to 1, one for each member, got {given}."
        )
    total, device = sum(given), weights.device if isinstance(weights, Tensor) else None
    return torch.tensor([w / total for w in given], dtype=torch.float64, device=device)


def unsqueeze_like(factors: Tensor, values: Tensor) -> Tensor:
    """Factors (S,), or (S, N), with dimensions of size one behind them to meet values (S, N, ...)."""
    return factors.reshape(*factors.shape, *[1] * (values.dim() - factors.dim()))


def member_mean(values: Tensor, weights: Tensor | None) -> Tensor:
    """Mean over the first axis of values (K, ...) of members, weighted by (K,), by (K, N) or equally."""
    if weights is None:
        return values.mean(0)
    return (unsqueeze_like(weights.to(values), values) * values).sum(0)


def log_mean(logs: Tensor, weights: Tensor | None = None) -> Tensor:
    """Log of the mean over the first axis of what has these logs (K, ...), weighted by (K,), by (K, N) or equally."""
    if weights is None:
        return torch.logsumexp(logs, 0) - math.log(len(logs))
    return torch.logsumexp(logs + unsqueeze_like(weights.log().to(logs), logs), 0)


def mutual_information(
    by_member: Tensor, weights: Tensor | None, aleatoric: Tensor
) -> Tensor:
    """What draws disagree on (N, ...): the entropy of the average of members' log probabilities (K, N, ..., C), less
    the mean entropy of the draws. Rounding may dip below zero.
    """
    return (entropy(log_mean(by_member, weights)) - aleatoric).clamp_min(0)


def quantile(values: Tensor, weights: Tensor | None, level: float) -> Tensor:
    """Quantile over the first axis of values (M, ...), of which every member, in turn, has equally many.

    Weights are (K,), or (K, N) where they differ between rows.

    It interpolates as torch.quantile does for equal weights. That is the mean of the inverse distribution function over
    a window of one observation's width; for unequal ones the width comes from Kish's effective number of observations
    (Akinshin 2023), so a share of nearly zero has nearly no influence.
    """
    if weights is None:
        return torch.quantile(values, level, dim=0)
    shares = unsqueeze_like(draw_shares(weights, values), values)
    ordered, order = values.sort(0)
    share = shares.expand_as(values).gather(0, order)
    width = shares.square().sum(0)
    start = level * (1 - width)
    upper = share.cumsum(0)
    inside = upper.clamp(start, start + width) - (upper - share).clamp(
        start, start + width
    )
    return (inside / inside.sum(0) * ordered).sum(0).to(values.dtype)


def draw_shares(weights: Tensor | None, values: Tensor) -> Tensor:
    """Share (M,), or (M, N), of each of the draws' values (M, N, ...) in an average, from weights (K,) or (K, N) of
    members: draw j belongs to member j mod K.
    """
    weights = torch.ones(1, dtype=torch.float64) if weights is None else weights
    each = len(values) // len(weights)
    return weights.to(values.device).repeat(each, *[1] * (weights.dim() - 1)) / each


def mixture_below(
    at: Tensor, means: Tensor, scale: Tensor, weights: Tensor | None
) -> Tensor:
    """Probability (N, ...) below `at` (N, ...) under the mixture of normals with these means and deviations (M, N, ...)
    in float64, members and weights as in `quantile`.
    """
    own = torch.special.ndtr(
        (at - means) / scale.clamp_min(torch.finfo(torch.float64).tiny)
    )
    return (unsqueeze_like(draw_shares(weights, means), own) * own).sum(0)


def mixture_quantile(
    means: Tensor, noise: Tensor, weights: Tensor | None, level: float
) -> Tensor:
    """Quantile of the mixture of normals with these means and variances (M, ...), members and weights as in `quantile`.

    Bisection, between the lowest and the highest of the normals' own quantiles.
    """
    wide, scale = means.double(), noise.double().sqrt()
    own = wide + scale * torch.special.ndtri(wide.new_tensor(level))
    low, high = own.amin(0), own.amax(0)
    for _ in range(50):
        middle = (low + high) / 2
        short = mixture_below(middle, wide, scale, weights) < level
        low, high = torch.where(short, middle, low), torch.where(short, high, middle)
    return ((low + high) / 2).to(means.dtype)


def check_level(level: float) -> None:
    """Refuse what is no probability of an interval or a set."""
    if not 0 < level < 1:
        raise ValueError(f"level must lie strictly between 0 and 1, got {level!r}.")


def for_a_row(name: str, value: float | Tensor, like: Tensor) -> Tensor:
    """A number or a tensor that broadcasts against one row's targets, as (1, ...) to meet `like` (K, N, ...). One in
    float64 stays so: a time in seconds has more digits than float32.
    """
    shape = (1, *like.shape[2:])
    kind = (
        torch.promote_types(value.dtype, like.dtype)
        if isinstance(value, Tensor)
        else like.dtype
    )
    tensor = torch.as_tensor(value, dtype=kind, device=like.device)
    try:
        out = torch.broadcast_to(
            tensor.reshape(()) if tensor.numel() == 1 else tensor, shape
        )
    except RuntimeError:
        needed = f"{name} must be a number or broadcast against one row's targets, shape {shape[1:]}"
        raise ValueError(f"{needed}, got shape {tuple(tensor.shape)}.") from None
    if not bool(out.isfinite().all()):
        raise ValueError(f"{name} must be finite, got {value!r}.")
    return out


def log_at(logs: Tensor, target: Tensor) -> Tensor:
    """What logs (..., N, C) say of the targets (N, ...)."""
    return logs.gather(-1, target.long().expand(logs.shape[:-1]).unsqueeze(-1)).squeeze(
        -1
    )
