"""Does a model that is 60% sure turn out right 60% of the time, and which temperature makes it so?

Calibration errors (Chang et al. 2019, appendix D.2). The probability of the predicted class falls into one of R bins of
equal width, ((r-1)/R, r/R], zero into the first:

    ECE = sum_r |B_r| / n * |accuracy(B_r) - confidence(B_r)|          n: all predictions
    MCE = max_r             |accuracy(B_r) - confidence(B_r)|

Bins of at most `drop` predictions are left out of both, while n stays. The papers differ: 20 bins and drop=5 in
ensemble model patching (the defaults here), 15 and 0 in rank-1 BNNs, whose code closes bins at the left end. They print
percent, we return fractions. An edge is r/R in the precision of the probabilities: a float32 0.15 lies on it.

Temperature scaling (Guo et al. 2017) divides logits z by T, the argmin of the held-out NLL. Averaged probabilities have
z = log p: members are pooled first (Rahaman & Thiery 2021). With b = 1/T the NLL is convex, so bisection finds it.
Where every row is right, or predictions are worse than uniform, T ends at 1e-3 or 1e3.

Sizes: N rows, C classes, R bins, M = N times further dimensions.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from slimbayes.metrics.probabilities import (
    Classes,
    class_logs,
    class_probabilities,
    is_binary,
    labelled,
    need_labels,
    need_tensor,
)
from slimbayes.prediction.prediction import Prediction

LOWEST, HIGHEST = 1e-3, 1e3
CHUNK = 2**22  # numbers in float64 at a time


@dataclass(frozen=True, eq=False)
class Calibration:
    """Calibration errors and the reliability diagram behind them.

    Attributes:
        ece, mce: expected and maximum calibration error, fractions; nan if no bin is kept.
        accuracy: share of right predictions in each bin (R,); nan where there are none.
        confidence: mean probability of the predicted class in each bin (R,); nan where there are none.
        count: predictions in each bin (R,).
        edges: the bins' ends (R + 1,).
        kept: whether a bin counts in `ece` and `mce` (R,).
    """

    ece: float
    mce: float
    accuracy: Tensor
    confidence: Tensor
    count: Tensor
    edges: Tensor
    kept: Tensor


@torch.no_grad()
def calibration(probs: Classes, target: Tensor, bins: int = 20, drop: int = 5) -> Calibration:
    """Compare the confidence in predicted classes with how often they are right.

    Args:
        probs: a Prediction of classes, or probabilities.
        target: class indices; 0 or 1 for binary predictions.
        bins: R, the number of bins.
        drop: leave out bins with at most so many predictions; 0 leaves out the empty ones alone.

    Shape: probs (N, ..., C) with target (N, ...), or the probabilities of class one (N,) with target (N,).

    Example:
        >>> result = calibration(torch.tensor([[0.7, 0.3]] * 10), torch.tensor([0] * 6 + [1] * 4))
        >>> round(result.ece, 4), int(result.count[13])  # 70% sure, 60% right
        (0.1, 10)
    """
    need_bins(bins, drop)
    confidence, right = judged(probs, target)
    sums = bin_sums(confidence, right, bins)
    ece, mce = bin_errors(sums, drop)
    accuracy, mean = sums[1:] / sums[0]
    edges = bin_edges(confidence, bins)
    return Calibration(float(ece), float(mce), accuracy, mean, sums[0].long(), edges, sums[0] > drop)


def judged(probs: Classes, target: Tensor) -> tuple[Tensor, Tensor]:
    """Confidence in each predicted class (M,) and whether it is the right one (M,)."""
    rows, label = labelled(probs, target)
    confidence, predicted = rows.max(-1)
    return confidence, predicted == label


def bin_sums(confidence: Tensor, right: Tensor, bins: int) -> Tensor:
    """How many confidences fall into each bin, how many are right, and their sum: (3, R), which add over batches.

    Shape: confidence and right (M,).

    Example:
        >>> bin_sums(torch.tensor([0.5, 0.75, 1.0]), torch.tensor([True, False, True]), 2)
        tensor([[1.0000, 2.0000],
                [1.0000, 1.0000],
                [0.5000, 1.7500]], dtype=torch.float64)
    """
    index, confidence = bin_index(confidence, bins), confidence.double()
    weights = (torch.ones_like(confidence), right.double(), confidence)
    return torch.stack([torch.bincount(index, weight, bins) for weight in weights])


def bin_index(confidence: Tensor, bins: int) -> Tensor:
    """Bin of each probability, from 0 to R - 1; an edge belongs to the bin below."""
    return torch.bucketize(confidence.double(), bin_edges(confidence, bins)[1:-1])


def bin_edges(confidence: Tensor, bins: int) -> Tensor:
    """The bins' ends (R + 1,), rounded to the precision of the probabilities."""
    return (torch.arange(bins + 1, dtype=torch.float64, device=confidence.device) / bins).to(confidence.dtype).double()


def bin_errors(sums: Tensor, drop: int) -> tuple[Tensor, Tensor]:
    """ECE and MCE from the sums (3, R) of `bin_sums`; nan if no bin is kept."""
    count, right, confidence = sums[:, sums[0] > drop]
    if len(count) == 0:
        return sums.new_tensor(math.nan), sums.new_tensor(math.nan)
    gap = (right - confidence).abs()
    return gap.sum() / sums[0].sum(), (gap / count).max()


def need_bins(bins: int, drop: int = 0) -> None:
    if bins < 1 or drop < 0:
        raise ValueError(f"At least one bin and drop >= 0 are needed, got bins={bins!r}, drop={drop!r}.")


@torch.no_grad()
def temperature(logits: Classes, target: Tensor) -> float:
    """The temperature that makes held-out targets most probable: above 1 if the model was too sure.

    Args:
        logits: a Prediction of classes, whose log-probabilities are right at any logits; or logits, or probabilities.
            Rows that are non-negative and all sum to one are read as probabilities, others as logits; (N,) is always
            the probability of class one. Probabilities rounded to zero count as their type's smallest normal number.
        target: class indices, of rows the model was not trained on.

    Shape: logits (N, ..., C) with target (N, ...), or both (N,).

    Example:
        >>> logits = torch.tensor([[4.0, 0.0]] * 4)
        >>> round(temperature(logits, torch.tensor([0, 0, 0, 1])), 4)  # 98% sure, 75% right: 4 / log 3
        3.641
    """
    label = need_labels("Logits or probabilities", logits, target)
    scores = _scores(logits).flatten(0, -2)
    if bool(scores.gather(-1, label[:, None]).isinf().any()):
        raise ValueError("A target has the logit -inf: no temperature makes it possible.")
    if bool((scores.amax(-1) == scores.amin(-1)).all()):
        return 1.0  # uniform at every temperature
    return 1 / _sharpness(scores, label)


def _sharpness(scores: Tensor, label: Tensor) -> float:
    """b = 1 / T for scores (M, C): where the NLL's slope changes its sign, or the end on that side."""
    low, high = 1 / HIGHEST, 1 / LOWEST
    for _ in range(50):
        b = math.sqrt(low * high)
        low, high = (low, b) if _slope(scores, label, b) > 0 else (b, high)
    return b


def _slope(scores: Tensor, label: Tensor, b: float) -> float:
    """Sum over rows of the NLL's derivative in b, E_p(b)[z] - z_y."""
    total = 0.0
    size = max(1, CHUNK // scores.shape[-1])
    for part, y in zip(scores.split(size), label.split(size)):
        z = part.double() - part.double().amax(-1, keepdim=True)
        p = (b * z).softmax(-1)
        mean = (p * z.masked_fill(p == 0, 0.0)).sum(-1, keepdim=True)  # -inf times zero
        total += float((mean - z.gather(-1, y[:, None])).sum())
    return total


def _scores(logits: Classes) -> Tensor:
    """Logits (N, ..., C), of probabilities their logarithms."""
    if isinstance(logits, Prediction):
        return class_logs(logits)
    if not need_tensor("Logits", logits).is_floating_point():
        raise ValueError(f"Logits or probabilities of a floating type are needed, got dtype {logits.dtype}.")
    sums_to_one = bool((logits >= 0).all()) and bool(((logits.double().sum(-1) - 1).abs() < 1e-3).all())
    if is_binary(logits) or sums_to_one:
        rows = class_probabilities(logits)
        return rows.clamp_min(torch.finfo(rows.dtype).tiny).double().log()
    if bool((logits.isnan() | logits.isposinf()).any()):
        raise ValueError("Logits must be numbers, got nan or infinity.")
    return logits


@dataclass(frozen=True)
class TemperatureScaling:
    """Probabilities at another temperature.

    Attributes:
        temperature: T; above 1 makes predictions less sure, below 1 more.

    Shape: logits or probabilities (N, ..., C), or those of class one (N,), or a Prediction; returns that shape.

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
    def fit(cls, logits: Classes, target: Tensor) -> "TemperatureScaling":
        """Fit the temperature to rows the model was not trained on, as `temperature` does."""
        return cls(temperature(logits, target))

    def __call__(self, logits: Classes) -> Tensor:
        given = logits.probs if isinstance(logits, Prediction) else logits
        scaled = (_scores(logits).double() / self.temperature).softmax(-1)
        return (scaled[..., 1] if is_binary(logits) else scaled).to(given.dtype)
