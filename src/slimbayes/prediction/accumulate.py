"""Accumulator: what a Prediction is made of, from draws that arrive in chunks.

Sizes: S draws, K members, N rows, C classes.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slimbayes.prediction.averages import along_draws, log_mean
from slimbayes.train.likelihoods import entropy, likelihood_named


class Accumulator:
    """Sums over draws that arrive in chunks, so that memory does not grow with S unless samples are kept.

    Args:
        class_dim: where the classes are; None means last, refused where outputs may be images, (S, N, C, H, W).

    Example:
        >>> draws = Accumulator("categorical", members=1, scale=0.0, keep=False)
        >>> draws.add(torch.tensor([[[0.0, 200.0]]]))
        >>> draws.add(torch.tensor([[[0.0, 0.0]]]))
        >>> draws.fields()["by_member"].exp()
        tensor([[[0.2500, 0.7500]]])
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
        self.of = likelihood_named(likelihood)
        self.likelihood, self.members, self.scale, self.keep = likelihood, members, scale, keep
        self.class_dim = class_dim
        self.weights = None if weights is None else _checked_weights(weights, members)
        self.count = 0
        self.member_sum: Any = None  # of means, or the log of a sum of probabilities
        self.noise_sum: Any = 0.0  # entropies of the draws, or their noise variances
        self.square: Any = 0.0  # sum of squared deviations from the running mean (Chan's update)
        self.samples: list[Tensor] = []
        self.noises: list[Tensor] = []

    def add(self, outputs: Tensor) -> None:
        """Take outputs (S', N, ...) of further draws; their number must be a multiple of the members."""
        wide = outputs if outputs.dtype == torch.float64 else outputs.float()
        values, noise = self.of.predictive(wide, self.scale, self.class_dim)
        by_member = values.unflatten(0, (-1, self.members))
        if self.of.discrete:
            fresh = torch.logsumexp(by_member, 0)
            self.member_sum = fresh if self.member_sum is None else torch.logaddexp(self.member_sum, fresh)
        else:
            self._add_squares(values)
            fresh = by_member.sum(0)
            self.member_sum = fresh if self.member_sum is None else self.member_sum + fresh
        self.noise_sum = self.noise_sum + self._weighted(noise).sum(0)
        self.count += len(values)
        if self.keep:
            self.samples.append(values)
            self.noises.append(noise)

    def _add_squares(self, values: Tensor) -> None:
        mean = self._weighted(values).mean(0)
        if self.count:
            shift = mean - self._weighted(self.member_sum).sum(0) / self.count
            self.square = self.square + shift**2 * (self.count * len(values) / (self.count + len(values)))
        self.square = self.square + self._weighted((values - mean).square()).sum(0)

    def _weighted(self, values: Tensor) -> Tensor:
        """Values (S', ...) of draws, or (K, ...) of members, times K w of their member: factors of mean one."""
        if self.weights is None:
            return values
        factors = (self.members * self.weights).to(values).repeat(len(values) // self.members)
        return values * along_draws(factors, values)

    def sound(self) -> bool:
        """Whether the draws so far make a prediction: class probabilities that are numbers, or finite means. One number
        is read from the device.
        """
        total = self.member_sum.sum()
        if self.of.discrete:
            return not bool(total.isnan())  # a probability of zero has the log -inf
        finite = bool((total + self.noise_sum.sum()).isfinite())  # large numbers may add up to infinity
        return finite or bool(self.member_sum.isfinite().all() & self.noise_sum.isfinite().all())

    def fields(self) -> dict[str, Any]:
        """The fields of a Prediction."""
        each, aleatoric = self.count // self.members, self.noise_sum / self.count  # draws of a member
        if self.of.discrete:
            by_member = self.member_sum - math.log(each)
            # A mutual information; rounding may dip below zero.
            epistemic = (entropy(log_mean(by_member, self.weights)) - aleatoric).clamp_min(0)
        else:
            by_member, epistemic = self.member_sum / each, self.square / self.count
        return {
            "likelihood": self.likelihood,
            "count": self.count,
            "by_member": by_member,
            "aleatoric": aleatoric,
            "epistemic": epistemic,
            "by_draw": torch.cat(self.samples) if self.keep else None,
            "noise": torch.cat(self.noises) if self.keep and not self.of.discrete else None,
            "weights": self.weights,
        }


def _checked_weights(weights: Tensor | Sequence[float], members: int) -> Tensor:
    """Weights (K,) in float64, scaled to sum to one beyond the rounding of what was given."""
    given: Any = (
        weights.tolist() if isinstance(weights, Tensor) else list(weights)
    )  # numbers: torch.export traces tensors
    flat = not any(isinstance(w, (list, tuple)) for w in given)
    if not flat or len(given) != members or not all(w >= 0 for w in given) or not abs(sum(given) - 1) <= 1e-4:
        raise ValueError(
            f"weights must be {members} non-negative numbers that sum to 1, one for each member, got {given}."
        )
    total, device = sum(given), weights.device if isinstance(weights, Tensor) else None
    return torch.tensor([w / total for w in given], dtype=torch.float64, device=device)
