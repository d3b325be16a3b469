"""Does a model that is 60% sure turn out right 60% of the time?

Calibration errors (Chang et al. 2019, appendix D.2). The probability of the predicted class falls into one of R bins of
equal width, ((r-1)/R, r/R], zero into the first:

    ECE = sum_r |B_r| / n * |accuracy(B_r) - confidence(B_r)|          n: all predictions
    MCE = max_r             |accuracy(B_r) - confidence(B_r)|

Bins of at most `drop` predictions are left out of both, while n stays. The papers differ: 20 bins and drop=5 in
ensemble model patching (the defaults here), 15 and 0 in rank-1 BNNs, whose code closes bins at the left end. They print
percent, we return fractions. An edge is r/R in the precision of the probabilities: a float32 0.15 lies on it.

Sizes: N rows, C classes, R bins, M = N times further dimensions.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from slimbayes.metrics.probabilities import Classes, labelled


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
