"""calibration: does a model that is 60% sure turn out right 60% of the time? (Chang et al. 2019, appendix D.2)

The probability of the predicted class falls into one of R bins of equal width, ((r-1)/R, r/R], zero into the first:

    ECE = sum_r |B_r| / n * |accuracy(B_r) - confidence(B_r)|          n: all predictions
    MCE = max_r             |accuracy(B_r) - confidence(B_r)|

Bins of at most `drop` predictions are left out of both, while n stays. The papers differ: 20 bins and drop=5 in ensemble model
patching (the defaults here), bins=15 and drop=0 in rank-1 BNNs, whose code closes bins at the left end instead: a difference
only for probabilities that lie on an edge. They print percent, we return fractions.

An edge is r/R rounded to the precision of the probabilities: a float32 probability written 0.15 lies on the float32 edge
0.15, so in (0.10, 0.15], although both are a little more than 3/20.

Sizes: N rows, C classes, R bins.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from slimbayes.prediction import Prediction, check_labels


@dataclass(frozen=True, eq=False)
class Calibration:
    """Calibration errors and the reliability diagram behind them.

    Attributes:
        ece: expected calibration error, a fraction; nan if no bin is kept.
        mce: maximum calibration error, a fraction; nan if no bin is kept.
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
def calibration(probs: Prediction | Tensor, target: Tensor, bins: int = 20, drop: int = 5) -> Calibration:
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
    if bins < 1 or drop < 0:
        raise ValueError(f"calibration needs bins >= 1 and drop >= 0, got bins={bins!r}, drop={drop!r}.")
    confidence, right = _judge(probs, target)
    edges = (torch.arange(bins + 1, dtype=torch.float64, device=confidence.device) / bins).to(confidence.dtype).double()
    confidence = confidence.double()
    index = torch.bucketize(confidence, edges[1:-1])  # right=False: an edge belongs to the bin below
    count = torch.bincount(index, minlength=bins)
    accuracy = torch.bincount(index, right.double(), bins) / count
    mean = torch.bincount(index, confidence, bins) / count
    kept = count > drop
    gap = (accuracy - mean).abs()[kept]
    ece = float((gap * count[kept]).sum() / len(confidence)) if len(gap) else math.nan
    return Calibration(ece, float(gap.max()) if len(gap) else math.nan, accuracy, mean, count, edges, kept)


def _judge(probs: Prediction | Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Confidence in each predicted class and whether it is the right one, as vectors."""
    if isinstance(probs, Prediction):
        binary, probs = probs.likelihood == "bernoulli", probs.probs
    else:
        binary = probs.dim() == 1
    needed = probs.shape if binary else probs.shape[:-1]
    if probs.dim() == 0 or target.shape != needed or target.numel() == 0:
        raise ValueError(
            f"calibration needs probabilities (N, ..., C) and targets (N, ...), or both (N,) for two classes, with N >= 1, "
            f"got shapes {tuple(probs.shape)} and {tuple(target.shape)}."
        )
    _check_probabilities(probs, binary)
    check_labels(target, None if binary else probs.shape[-1])
    if binary:
        label, confidence = probs > 0.5, torch.maximum(probs, 1 - probs)
    else:
        confidence, label = probs.max(-1)
    return confidence.flatten(), (label == target).flatten()


def _check_probabilities(probs: Tensor, binary: bool) -> None:
    if not probs.is_floating_point():
        raise ValueError(f"calibration needs probabilities, got dtype {probs.dtype}.")
    slack = max(1e-3, torch.finfo(probs.dtype).eps)
    wrong = ~((probs >= 0) & (probs <= 1 + slack))  # written so that nan is wrong too
    if bool(wrong.any()):
        raise ValueError(f"Probabilities must lie in [0, 1], got {probs[wrong][0].item()!r}; logits need a softmax first.")
    off = (probs.double().sum(-1) - 1).abs() > slack
    if not binary and bool(off.any()):
        raise ValueError(f"The probabilities of a row must sum to 1, got {probs[off][0].double().sum().item():.4f}.")
