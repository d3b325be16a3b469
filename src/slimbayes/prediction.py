"""Prediction: averages, uncertainties and their decomposition from S draws of a model.

Probabilities are averaged, never logits. For classes the total uncertainty is an entropy, for real targets a variance, and

    total = aleatoric + epistemic

holds exactly: the two parts are computed, the total is their sum.

Sizes: S draws, K members, N rows, C classes.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from slimbayes.messages import did_you_mean
from slimbayes.objective import noise_scale

Likelihood = Literal["categorical", "bernoulli", "gaussian", "heteroscedastic_gaussian"]
_LIKELIHOODS = ("categorical", "bernoulli", "gaussian", "heteroscedastic_gaussian")


@dataclass
class Prediction:
    """Predictions for N rows from S draws.

    Attributes:
        likelihood: what the samples parameterise.
        count: S.
        member_mean: mean over draws of each member's class probabilities (K, N, C), or of its means (K, N, ...).
        aleatoric: uncertainty that stays if the weights were known: mean entropy in nats (N,), or mean noise variance (N, ...).
        epistemic: uncertainty about the weights: mutual information (N,), or variance of the means (N, ...).
        kept: the samples (S, N, ...), probabilities or means, unless predict was asked not to keep them.

    Example:
        >>> p = Prediction.from_outputs(torch.tensor([[[2.0, 0.0]], [[0.0, 2.0]]]), "categorical")
        >>> p.probs
        tensor([[0.5000, 0.5000]])
        >>> torch.equal(p.total, p.aleatoric + p.epistemic)
        True
    """

    likelihood: str
    count: int
    member_mean: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    kept: Tensor | None = field(default=None, repr=False)
    noise: Tensor | None = field(default=None, repr=False)  # (S, N, ...) noise variance of each draw, for real targets

    @classmethod
    def from_outputs(cls, outputs: Tensor, likelihood: Likelihood = "categorical", members: int = 1, scale: float = 0.0, class_dim: int = -1) -> "Prediction":
        """Summarise raw model outputs.

        Shape: outputs (S, N, ..., C) logits, whose classes may lie along another `class_dim` but come last in the result; (S, N) or (S, N, 1) binary logits, (S, N, ...) means, or (S, N, ..., 2) means and raw scales.
        """
        running = Running(likelihood, members, scale, keep=True, class_dim=class_dim)
        running.add(outputs)
        return running.result()

    @property
    def mean(self) -> Tensor:
        """Predictive mean: class probabilities (N, C), probability of class one (N,), or mean (N, ...)."""
        return self.member_mean.mean(0)

    @property
    def probs(self) -> Tensor:
        """Predictive class probabilities (N, C); for binary targets (N, ...), the probability of class one."""
        self._need("categorical", "bernoulli")
        return self.mean

    @property
    def member_probs(self) -> Tensor:
        """Class probabilities of each member, averaged over its draws: (K, N, C)."""
        self._need("categorical", "bernoulli")
        return self.member_mean

    @property
    def samples(self) -> Tensor:
        """Probabilities or means of every draw, (S, N, ...)."""
        if self.kept is None:
            raise ValueError("The samples were not kept; call predict(..., keep_samples=True).")
        return self.kept

    @property
    def total(self) -> Tensor:
        """Total predictive uncertainty: aleatoric + epistemic, exactly."""
        return self.aleatoric + self.epistemic

    @property
    def entropy(self) -> Tensor:
        """Entropy of the predictive distribution in nats (N,): the total uncertainty about a class."""
        self._need("categorical", "bernoulli")
        return self.total

    @property
    def variance(self) -> Tensor:
        """Predictive variance of a real target: the total uncertainty."""
        self._need("gaussian", "heteroscedastic_gaussian")
        return self.total

    @property
    def std(self) -> Tensor:
        """Predictive standard deviation of a real target."""
        return self.variance.sqrt()

    @property
    def label(self) -> Tensor:
        """Most probable class (N,)."""
        return self.probs.argmax(-1) if self.likelihood == "categorical" else (self.probs > 0.5).long()

    @property
    def confidence(self) -> Tensor:
        """Probability of the most probable class (N,)."""
        return self.probs.amax(-1) if self.likelihood == "categorical" else torch.maximum(self.probs, 1 - self.probs)

    def interval(self, level: float = 0.9, generator: torch.Generator | None = None, per_draw: int = 32) -> tuple[Tensor, Tensor]:
        """Central credible interval of the predictive distribution (real targets) or of the class probabilities.

        For real targets the observation noise is included: `per_draw` noise values are drawn for every sample.

        Shape: two tensors of the shape of `mean`.
        """
        if not 0 < level < 1:
            raise ValueError(f"level must lie strictly between 0 and 1, got {level!r}.")
        values = self.samples
        if self.noise is not None and bool((self.noise > 0).any()):
            wide = values.unsqueeze(0).expand(per_draw, *values.shape)
            noise = torch.randn(wide.shape, generator=generator, device=generator.device if generator else values.device, dtype=values.dtype)
            values = (wide + noise.to(values.device) * self.noise.sqrt()).flatten(0, 1)
        edges = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=values.dtype, device=values.device)
        low, high = torch.quantile(values, edges, dim=0)
        return low, high

    def to_numpy(self) -> dict[str, Any]:
        """Every summary as numpy arrays: mean, member_mean, total, aleatoric, epistemic and, if kept, samples."""
        arrays = {"mean": self.mean, "member_mean": self.member_mean, "total": self.total}
        arrays |= {"aleatoric": self.aleatoric, "epistemic": self.epistemic}
        if self.kept is not None:
            arrays["samples"] = self.kept
        return {name: t.detach().float().cpu().numpy() if t.dtype == torch.bfloat16 else t.detach().cpu().numpy() for name, t in arrays.items()}

    def _need(self, *kinds: str) -> None:
        if self.likelihood not in kinds:
            raise AttributeError(f"This Prediction has likelihood {self.likelihood!r}; that needs {' or '.join(kinds)}.")


class Running:
    """Sums over draws that arrive in chunks, so that memory does not grow with S unless samples are kept."""

    def __init__(self, likelihood: str, members: int, scale: float, keep: bool, class_dim: int = -1) -> None:
        if likelihood not in _LIKELIHOODS:
            raise ValueError(f"Unknown likelihood {likelihood!r}{did_you_mean(likelihood, _LIKELIHOODS)}")
        self.likelihood, self.members, self.scale, self.keep = likelihood, members, scale, keep
        self.class_dim = class_dim
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
            shift = values.mean(0) - self.member_sum.sum(0) / self.count
            self.square = self.square + shift**2 * (self.count * len(values) / (self.count + len(values)))
        if not self._classes:
            self.square = self.square + (values - values.mean(0)).square().sum(0)
        self.member_sum, self.noise_sum = self.member_sum + fresh, self.noise_sum + noise.sum(0)
        self.count += len(values)
        if self.keep:
            self.samples.append(values)
            self.noises.append(noise)

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
            return outputs, torch.full_like(outputs, self.scale**2)
        return outputs[..., 0], noise_scale(outputs[..., 1]).square()

    def result(self) -> Prediction:
        mean = self.member_sum.sum(0) / self.count
        aleatoric = self.noise_sum / self.count
        if self._classes:
            total = _entropy(mean) if self.likelihood == "categorical" else _binary_entropy(mean)
            epistemic = (total - aleatoric).clamp_min(0)  # a mutual information; rounding may dip below zero
        else:
            epistemic = self.square / self.count
        kept = torch.cat(self.samples) if self.keep else None
        noise = torch.cat(self.noises) if self.keep and not self._classes else None
        return Prediction(
            self.likelihood, self.count, self.member_sum / (self.count // self.members), aleatoric, epistemic, kept, noise
        )


def _entropy(probs: Tensor) -> Tensor:
    return torch.special.entr(probs).sum(-1)


def _binary_entropy(probs: Tensor) -> Tensor:
    return torch.special.entr(probs) + torch.special.entr(1 - probs)
