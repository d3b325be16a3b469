"""Running: a Prediction from draws that arrive in chunks.

Sizes: S draws, K members, N rows, C classes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slimbayes.messages import did_you_mean
from slimbayes.objective import noise_scale
from slimbayes.prediction import Prediction, along_draws

_LIKELIHOODS = ("categorical", "bernoulli", "gaussian", "heteroscedastic_gaussian")


class Running:
    """Sums over draws that arrive in chunks, so that memory does not grow with S unless samples are kept."""

    def __init__(
        self,
        likelihood: str,
        members: int,
        scale: float | Tensor,
        keep: bool,
        class_dim: int = -1,
        weights: Tensor | Sequence[float] | None = None,
    ) -> None:
        if likelihood not in _LIKELIHOODS:
            raise ValueError(f"Unknown likelihood {likelihood!r}{did_you_mean(likelihood, _LIKELIHOODS)}")
        self.likelihood, self.members, self.scale, self.keep = likelihood, members, scale, keep
        self.class_dim = class_dim
        self.weights = None if weights is None else _checked_weights(weights, members)
        self.count = 0
        self.member_sum: Any = None
        self.noise_sum: Any = 0.0  # entropies of the draws, or their noise variances
        self.square: Any = 0.0  # sum of squared deviations from the running mean (Chan's update)
        self.samples: list[Tensor] = []
        self.noises: list[Tensor] = []

    def add(self, outputs: Tensor) -> None:
        """Take outputs (S', N, ...) of further draws; their number must be a multiple of the members."""
        values, noise = self._parameters(outputs.double() if outputs.dtype == torch.float64 else outputs.float())
        fresh = values.unflatten(0, (-1, self.members)).sum(0)
        if self.member_sum is None:
            self.member_sum = torch.zeros_like(fresh)
        elif not self._classes:
            shift = self._weighted(values).mean(0) - self._weighted(self.member_sum).sum(0) / self.count
            self.square = self.square + shift**2 * (self.count * len(values) / (self.count + len(values)))
        if not self._classes:
            self.square = self.square + self._weighted((values - self._weighted(values).mean(0)).square()).sum(0)
        self.member_sum, self.noise_sum = self.member_sum + fresh, self.noise_sum + self._weighted(noise).sum(0)
        self.count += len(values)
        if self.keep:
            self.samples.append(values)
            self.noises.append(noise)

    def _weighted(self, values: Tensor) -> Tensor:
        """Values (S', ...) of draws, or (K, ...) of members, times K w of their member: factors of mean one, so sums and counts stay."""
        if self.weights is None:
            return values
        factors = (self.members * self.weights).to(values).repeat(len(values) // self.members)
        return values * along_draws(factors, values)

    @property
    def _classes(self) -> bool:
        return self.likelihood in ("categorical", "bernoulli")

    def _parameters(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities and entropies, or means and noise variances, of each draw."""
        if self.likelihood == "categorical":
            probs = outputs.movedim(self.class_dim, -1).softmax(-1)
            return probs, _entropy(probs)
        if self.likelihood == "bernoulli":
            probs = (outputs.squeeze(-1) if outputs.dim() > 2 and outputs.shape[-1] == 1 else outputs).sigmoid()
            return probs, _binary_entropy(probs)
        if self.likelihood == "gaussian":
            return outputs, torch.empty_like(outputs).copy_(torch.as_tensor(self.scale**2, dtype=outputs.dtype))
        return outputs[..., 0], noise_scale(outputs[..., 1]).square()

    def result(self) -> Prediction:
        mean = self._weighted(self.member_sum).sum(0) / self.count
        aleatoric = self.noise_sum / self.count
        if self._classes:
            total = _entropy(mean) if self.likelihood == "categorical" else _binary_entropy(mean)
            epistemic = (total - aleatoric).clamp_min(0)  # a mutual information; rounding may dip below zero
        else:
            epistemic = self.square / self.count
        kept = torch.cat(self.samples) if self.keep else None
        noise = torch.cat(self.noises) if self.keep and not self._classes else None
        member_mean = self.member_sum / (self.count // self.members)
        return Prediction(self.likelihood, self.count, member_mean, aleatoric, epistemic, kept, noise, self.weights)


def _checked_weights(weights: Tensor | Sequence[float], members: int) -> Tensor:
    """Weights (K,) in float64, scaled to sum to one beyond the rounding of what was given."""
    w = torch.as_tensor(weights, dtype=torch.float64).detach()
    if w.shape != (members,) or not bool((w >= 0).all()) or not abs(float(w.sum()) - 1) <= 1e-4:
        raise ValueError(f"weights must be {members} non-negative numbers that sum to 1, one for each member, got {w.tolist()}.")
    return w / w.sum()


def _entropy(probs: Tensor) -> Tensor:
    return torch.special.entr(probs).sum(-1)


def _binary_entropy(probs: Tensor) -> Tensor:
    return torch.special.entr(probs) + torch.special.entr(1 - probs)
