"""Running: a Prediction from draws that arrive in chunks.

Sizes: S draws, K members, N rows, C classes.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slimbayes.errors import did_you_mean
from slimbayes.prediction.prediction import Prediction, along_draws, entropy
from slimbayes.train.elbo import check_classes, check_two_outputs, noise_scale

_LIKELIHOODS = ("categorical", "bernoulli", "gaussian", "heteroscedastic_gaussian")


class Running:
    """Sums over draws that arrive in chunks, so that memory does not grow with S unless samples are kept.

    Args:
        class_dim: where the classes are; None means last, refused where outputs may be images, (S, N, C, H, W).

    Example:
        >>> running = Running("categorical", members=1, scale=0.0, keep=False)
        >>> running.add(torch.tensor([[[0.0, 200.0]]]))
        >>> running.add(torch.tensor([[[0.0, 0.0]]]))
        >>> running.result().probs
        tensor([[0.2500, 0.7500]])
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
        if likelihood not in _LIKELIHOODS:
            raise ValueError(f"Unknown likelihood {likelihood!r}{did_you_mean(likelihood, _LIKELIHOODS)}")
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
        values, noise = self._parameters(outputs.double() if outputs.dtype == torch.float64 else outputs.float())
        by_member = values.unflatten(0, (-1, self.members))
        if self._classes:
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
        """Values (S', ...) of draws, or (K, ...) of members, times K w of their member: factors of mean one, so sums and counts stay."""
        if self.weights is None:
            return values
        factors = (self.members * self.weights).to(values).repeat(len(values) // self.members)
        return values * along_draws(factors, values)

    @property
    def _classes(self) -> bool:
        return self.likelihood in ("categorical", "bernoulli")

    def _parameters(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies, or means and noise variances, of each draw."""
        if self.likelihood == "categorical":
            logs = F.log_softmax(outputs.movedim(self._class_dim(outputs), -1), -1)
            return logs, entropy(logs)
        if self.likelihood == "bernoulli":
            logits = outputs.squeeze(-1) if outputs.dim() > 2 and outputs.shape[-1] == 1 else outputs
            logs = torch.stack([F.logsigmoid(-logits), F.logsigmoid(logits)], -1)
            return logs, entropy(logs)
        if self.likelihood == "gaussian":
            return outputs, torch.empty_like(outputs).copy_(torch.as_tensor(self.scale**2, dtype=outputs.dtype))
        check_two_outputs(outputs)
        return outputs[..., 0], noise_scale(outputs[..., 1]).square()

    def _class_dim(self, outputs: Tensor) -> int:
        if self.class_dim is None and outputs.dim() > 4:
            raise ValueError(
                f"Outputs of shape {tuple(outputs.shape)} do not say where their classes are. "
                f"Give class_dim=2 for images (S, N, C, H, W), class_dim=-1 where classes come last."
            )
        found = -1 if self.class_dim is None else self.class_dim
        check_classes(outputs, found)
        return found

    def result(self) -> Prediction:
        each = self.count // self.members  # draws of a member
        parts = {
            "by_draw": torch.cat(self.samples) if self.keep else None,
            "noise": torch.cat(self.noises) if self.keep and not self._classes else None,
            "weights": self.weights,
        }
        aleatoric = self.noise_sum / self.count
        if not self._classes:
            epistemic = self.square / self.count
            return Prediction(self.likelihood, self.count, self.member_sum / each, aleatoric, epistemic, **parts)
        pred = Prediction(self.likelihood, self.count, self.member_sum - math.log(each), aleatoric, aleatoric, **parts)
        # A mutual information; rounding may dip below zero.
        return replace(pred, epistemic=(entropy(pred.log_probs) - aleatoric).clamp_min(0))


def _checked_weights(weights: Tensor | Sequence[float], members: int) -> Tensor:
    """Weights (K,) in float64, scaled to sum to one beyond the rounding of what was given."""
    w = torch.as_tensor(weights, dtype=torch.float64).detach()
    if w.shape != (members,) or not bool((w >= 0).all()) or not abs(float(w.sum()) - 1) <= 1e-4:
        raise ValueError(
            f"weights must be {members} non-negative numbers that sum to 1, one for each member, got {w.tolist()}."
        )
    return w / w.sum()
