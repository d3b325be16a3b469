"""Averages over draws, and over members that may have weights: means, quantiles, mixtures. And Accumulator, which makes
those that a Prediction is made of from draws that arrive in chunks.

Sizes: S draws, K members, N rows, C classes.
"""

import math
from collections.abc import Callable, Sequence
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
        likelihood_std: float | Tensor,
        keep: bool,
        class_dim: int | None = None,
        weights: Tensor | Sequence[float] | None = None,
    ) -> None:
        self.meaning = likelihood_named(likelihood)
        if not isinstance(likelihood_std, Tensor) or can_read_values(likelihood_std):
            check_positive("likelihood_std", torch.as_tensor(likelihood_std), zero=True)
        self.likelihood, self.members, self.likelihood_std, self.keep = (
            likelihood,
            members,
            likelihood_std,
            keep,
        )
        self.class_dim = class_dim
        # What a draw of each member counts, 1 on average; None if all count alike.
        self.factors = (
            None
            if weights is None
            else [members * w for w in _checked_weights(weights, members)]
        )
        self.count = 0
        self.mass = 0.0  # sum of what the draws so far count
        self.member_sum: Any = None  # of means, or the log of a sum of probabilities
        self.noise_sum: Any = 0.0  # entropies of the draws, or their noise variances
        self.square: Any = (
            0.0  # sum of squared deviations from the running mean (Chan's update)
        )
        self.samples: list[Tensor] = []
        self.noises: list[Tensor] = []

    def add(self, outputs: Tensor) -> None:
        """Take outputs (S', N, ...) of further draws: the next one belongs to member `count` mod K."""
        if outputs.dim() < (3 if self.meaning.option == "class_dim" else 2):
            raise ValueError(
                f"Outputs need an axis of draws and one of rows, got shape {tuple(outputs.shape)}."
            )
        wide = outputs if outputs.dtype == torch.float64 else outputs.float()
        values, noise = self.meaning.predictive(
            wide, self.likelihood_std, self.class_dim
        )
        for start, stop in self._turns(len(values)):
            self._add_turns(values[start:stop], noise[start:stop])
        if self.keep:
            self.samples.append(values)
            self.noises.append(noise)

    def _turns(self, draws: int) -> list[tuple[int, int]]:
        """Cut further draws into ranges: whole turns of all members, and what comes before and after these."""
        before = min(-self.count % self.members, draws)
        whole = before + (draws - before) // self.members * self.members
        edges = [(0, before), (before, whole), (whole, draws)]
        return [(start, stop) for start, stop in edges if start < stop]

    def _add_turns(self, values: Tensor, noise: Tensor) -> None:
        """Take draws (S', N, ...) of whole turns, or of a part of one turn."""
        first, draws = self.count % self.members, len(values)
        by_member = values.unflatten(0, (-1, min(draws, self.members)))
        factors = self._factors(first, draws)
        mass = float(draws) if factors is None else sum(factors)
        if not self.meaning.discrete:
            mean = _weighted_sum(values, factors) / (mass or 1.0)
            if self.mass and mass:
                shift = mean - self._mean()
                both = self.mass * mass / (self.mass + mass)
                self.square = self.square + shift**2 * both
            square = (values - mean).square()
            self.square = self.square + _weighted_sum(square, factors)
        reduce = torch.logsumexp if self.meaning.discrete else torch.sum
        self._add_members(reduce(by_member, 0), first)
        self.noise_sum = self.noise_sum + _weighted_sum(noise, factors)
        self.count += draws
        self.mass += mass

    def _add_members(self, fresh: Tensor, first: int) -> None:
        """Add sums over draws (r, N, ...) of the members from `first` on."""
        if self.member_sum is None:
            self.member_sum = fresh
        elif first >= len(self.member_sum):  # members that had no draw so far
            self.member_sum = torch.cat([self.member_sum, fresh])
        else:
            stop = first + len(fresh)
            add = torch.logaddexp if self.meaning.discrete else torch.add
            sums = add(self.member_sum[first:stop], fresh)
            before, after = self.member_sum[:first], self.member_sum[stop:]
            self.member_sum = torch.cat([before, sums, after])

    def _factors(self, first: int, draws: int) -> list[float] | None:
        """What each of so many draws counts, the first of them of member `first`."""
        if self.factors is None:
            return None
        return [self.factors[j % self.members] for j in range(first, first + draws)]

    def _mean(self) -> Tensor:
        """Mean (N, ...) over the draws so far."""
        factors = None if self.factors is None else self.factors[: len(self.member_sum)]
        return _weighted_sum(self.member_sum, factors) / self.mass

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
        """The fields of a Prediction, whose members are those that had a draw."""
        if not self.mass:
            raise ValueError(
                f"All of the first {self.count} members have weight zero: ask for more draws, {self.members} for one "
                f"of each member."
            )
        counts = draw_counts(self.count, len(self.member_sum))
        weights, aleatoric = self._weights(counts), self.noise_sum / self.mass
        each = unsqueeze_like(self.member_sum.new_tensor(counts), self.member_sum)
        if self.meaning.discrete:
            by_member = self.member_sum - each.log()
            epistemic = mutual_information(by_member, weights, aleatoric)
        else:
            by_member, epistemic = self.member_sum / each, self.square / self.mass
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
            "weights": weights,
        }

    def _weights(self, counts: list[int]) -> Tensor | None:
        """Share of each member that had so many draws; None if all are equal."""
        if self.factors is None and counts[0] == counts[-1]:
            return None
        factors = self.factors or [1.0] * len(counts)
        shares = [f * n / self.mass for f, n in zip(factors, counts, strict=False)]
        device = self.member_sum.device
        return torch.tensor(shares, dtype=torch.float64, device=device)


def draw_counts(draws: int, members: int) -> list[int]:
    """How many of so many draws belong to each member: draw j belongs to member j mod K.

    >>> draw_counts(5, 3)
    [2, 2, 1]
    """
    return [len(range(k, draws, members)) for k in range(members)]


def over_draws(
    values: Tensor, members: int, average: Callable[[Tensor], Tensor]
) -> Tensor:
    """An average over the first axis of the draws' values (S, N, ...) for each member by itself: (K, N, ...)."""
    if len(values) % members == 0:
        return average(values.unflatten(0, (-1, members)))
    return torch.stack([average(values[k::members]) for k in range(members)])


def _weighted_sum(values: Tensor, factors: list[float] | None) -> Tensor:
    """Sum over the first axis of values (S, ...) times what each counts."""
    if factors is None:
        return values.sum(0)
    return (unsqueeze_like(values.new_tensor(factors), values) * values).sum(0)


def _checked_weights(weights: Tensor | Sequence[float], members: int) -> list[float]:
    """Weights of K members, scaled to sum to one beyond the rounding of what was given."""
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
    total = sum(given)
    return [w / total for w in given]


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
    members: draw j belongs to member j mod K, whose draws share its weight equally.
    """
    weights = torch.ones(1, dtype=torch.float64) if weights is None else weights
    members, weights = len(weights), weights.to(values.device)
    counts = torch.tensor(draw_counts(len(values), members), device=values.device)
    each = weights / unsqueeze_like(counts, weights)
    return each[torch.arange(len(values), device=values.device) % members]


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
