"""Temperature scaling: one number, fitted after training, that makes a classifier more or less sure (Guo et al. 2017).

    p_c(T) = softmax(z / T)_c,     T = argmin of the held-out NLL

Of averaged probabilities p, z = log p, so p(T) is proportional to p^(1/T): members are pooled first, then calibrated (Rahaman
& Thiery 2021). Labels, and so accuracy, do not change. With b = 1/T the NLL is convex, its derivative and curvature being

    g(b) = mean_n (E_p(b)[z] - z_y)          h(b) = mean_n Var_p(b)[z]

so Newton's steps, kept inside a bracket, find it. The optimum is 0 or infinite where every row is right, or predictions are worse
than uniform ones: T is held within [1e-3, 1e3].

Sizes: N rows, C classes.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from slimbayes.metrics.inputs import class_logs, class_probabilities, need_tensor
from slimbayes.prediction.prediction import Prediction, check_labels

LOWEST, HIGHEST = 1e-3, 1e3
CHUNK = 2**22  # numbers in float64 at a time


@torch.no_grad()
def temperature(logits: Prediction | Tensor, target: Tensor) -> float:
    """The temperature that makes held-out targets most probable: above 1 if the model was too sure.

    Args:
        logits: a Prediction of classes, whose log-probabilities are right at any logits; or logits, or probabilities.
            Rows that are non-negative and all sum to one are read as probabilities, others as logits; (N,) is always
            the probability of class one. Probabilities rounded to zero count as the smallest normal number of their
            type.
        target: class indices, of rows the model was not trained on.

    Shape: logits (N, ..., C) with target (N, ...), or both (N,).

    Example:
        >>> logits = torch.tensor([[4.0, 0.0]] * 4)
        >>> round(temperature(logits, torch.tensor([0, 0, 0, 1])), 4)  # 98% sure, 75% right: 4 / log 3
        3.641
    """
    scores, label = _scores(logits), need_tensor("Targets", target)
    if scores.dim() < 2 or label.shape != scores.shape[:-1] or label.numel() == 0:
        raise ValueError(
            f"Logits or probabilities (N, ..., C) and targets (N, ...) are needed, or both (N,) for two classes, with N >= 1, "
            f"got scores of shape {tuple(scores.shape)} and targets {tuple(label.shape)}."
        )
    check_labels(label, None if _binary(logits) else scores.shape[-1])
    scores, label = scores.flatten(0, -2), label.long().flatten()
    if bool(scores.gather(-1, label[:, None]).isinf().any()):
        raise ValueError("A target has the logit -inf: no temperature makes it possible.")
    return 1 / _sharpness(scores, label)


def _sharpness(scores: Tensor, label: Tensor) -> float:
    """b = 1 / T for scores (M, C)."""
    low, high = 1 / HIGHEST, 1 / LOWEST
    if bool((scores.amax(-1) == scores.amin(-1)).all()):
        return 1.0  # uniform at every temperature
    if _slope(scores, label, low)[0] >= 0:
        return low
    if _slope(scores, label, high)[0] <= 0:
        return high
    b = 1.0
    for _ in range(100):
        g, h = _slope(scores, label, b)
        low, high = (low, b) if g > 0 else (b, high)
        step = b - g / h if h > 0 else math.inf
        fresh = step if low < step < high else math.sqrt(low * high)
        if abs(fresh - b) <= 1e-10 * b:
            return fresh
        b = fresh
    return b


def _slope(scores: Tensor, label: Tensor, b: float) -> tuple[float, float]:
    """Sums over rows of the NLL's derivative and curvature in b."""
    g = h = 0.0
    size = max(1, CHUNK // scores.shape[-1])
    for z, y in zip(scores.split(size), label.split(size)):
        z = z.double()
        z = z - z.amax(-1, keepdim=True)
        p = (b * z).softmax(-1)
        inside = z.masked_fill(p == 0, 0.0)  # -inf times zero
        mean = (p * inside).sum(-1, keepdim=True)
        g += float((mean - z.gather(-1, y[:, None])).sum())
        h += float((p * (inside - mean).square()).sum())
    return g, h


def _scores(logits: Prediction | Tensor) -> Tensor:
    """Logits (N, ..., C), of probabilities their logarithms."""
    if isinstance(logits, Prediction):
        return class_logs(logits)
    if not need_tensor("Logits", logits).is_floating_point():
        raise ValueError(f"Logits or probabilities of a floating type are needed, got dtype {logits.dtype}.")
    if logits.dim() != 1 and not _sums_to_one(logits):
        if bool((logits.isnan() | logits.isposinf()).any()):
            raise ValueError("Logits must be numbers, got nan or infinity.")
        return logits
    rows = class_probabilities(logits)
    return rows.clamp_min(torch.finfo(rows.dtype).tiny).double().log()


def _sums_to_one(rows: Tensor) -> bool:
    return rows.dim() > 1 and bool((rows >= 0).all()) and bool(((rows.double().sum(-1) - 1).abs() < 1e-3).all())


def _binary(logits: Prediction | Tensor) -> bool:
    return logits.likelihood == "bernoulli" if isinstance(logits, Prediction) else logits.dim() == 1


@dataclass(frozen=True)
class TemperatureScaling:
    """Probabilities at another temperature.

    Attributes:
        temperature: T; above 1 makes predictions less sure, below 1 more.

    Shape: called with logits or probabilities (N, ..., C), or probabilities of class one (N,), or a Prediction; returns probabilities
    of that shape.

    Example:
        >>> scaling = TemperatureScaling.fit(torch.tensor([[4.0, 0.0]] * 4), torch.tensor([0, 0, 0, 1]))
        >>> scaling(torch.tensor([[4.0, 0.0], [0.0, 8.0]]))
        tensor([[0.7500, 0.2500],
                [0.1000, 0.9000]])
    """

    temperature: float

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature must be positive and finite, got {self.temperature!r}.")

    @classmethod
    def fit(cls, logits: Prediction | Tensor, target: Tensor) -> "TemperatureScaling":
        """Fit the temperature to rows the model was not trained on, as `temperature` does."""
        return cls(temperature(logits, target))

    def __call__(self, logits: Prediction | Tensor) -> Tensor:
        given = logits.probs if isinstance(logits, Prediction) else logits
        scaled = (_scores(logits).double() / self.temperature).softmax(-1)
        return (scaled[..., 1] if _binary(logits) else scaled).to(given.dtype)
