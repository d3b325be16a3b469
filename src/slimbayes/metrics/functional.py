"""Scores as functions of tensors, which need no torchmetrics, and what all metrics of classes accept.

A binary probability p stands for the two classes (1 - p, p), so every metric of classes has one definition. Scores that
take logs ask for logs: a Prediction has them where float32 has rounded a probability to zero.

Does a model that is 60% sure turn out right 60% of the time? Calibration errors (Chang et al. 2019, appendix D.2): the
probability of the predicted class falls into one of R bins of equal width, ((r-1)/R, r/R], zero into the first:

    ECE = sum_r |B_r| / n * |accuracy(B_r) - confidence(B_r)|          n: all predictions
    MCE = max_r             |accuracy(B_r) - confidence(B_r)|

Bins of at most `drop` predictions are left out of both, while n stays. The papers differ: 20 bins and drop=5 in
ensemble model patching (the defaults here), 15 and 0 in rank-1 BNNs, whose code closes bins at the left end. They print
percent, we return fractions. An edge is r/R in the precision of the probabilities: a float32 0.15 lies on it.

The CRPS of a predictive distribution F at y is in y's units; less is better:

    CRPS(F, y) = integral (F(x) - 1[x >= y])^2 dx = E|X - y| - E|X - X'| / 2          X, X' independent from F

For one value, or scale 0, it is the absolute error. With M samples of a wider F, `crps_samples` scores what it is
given, the empirical distribution, so it is larger on average than F's score, by E|X - X'| / (2 M).

Sizes: N rows, C classes, K members, R bins, M = N times further dimensions; of the CRPS, M samples or components.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from slimbayes.prediction.averages import unsqueeze_like
from slimbayes.prediction.prediction import Prediction
from slimbayes.train.targets import check_labels, check_positive

Classes = (
    Prediction | Tensor
)  # a Prediction of classes, probabilities (N, ..., C), or those of class one (N,)


def class_probabilities(probs: Classes) -> Tensor:
    """Probabilities with the classes last, (N, ..., C)."""
    if isinstance(probs, Prediction):
        return _checked(probs.log_probs.exp())
    return (
        _two_classes(probs)
        if need_tensor("Probabilities", probs).dim() == 1
        else _checked(probs)
    )


def class_logs(probs: Classes) -> Tensor:
    """Logs of what `class_probabilities` gives, (N, ..., C), in float64."""
    return (
        probs.log_probs.double()
        if isinstance(probs, Prediction)
        else class_probabilities(probs).double().log()
    )


def labelled(probs: Classes, target: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities (M, C) and class indices (M,).

    Shape: probs (N, ..., C) with target (N, ...), or both (N,) for two classes.
    """
    given = (
        probs.probs
        if isinstance(probs, Prediction)
        else need_tensor("Probabilities", probs)
    )
    binary = (
        probs.likelihood == "bernoulli"
        if isinstance(probs, Prediction)
        else probs.dim() == 1
    )
    rows = given.shape if binary else given.shape[:-1]
    if (
        given.dim() == 0
        or need_tensor("Targets", target).shape != rows
        or target.numel() == 0
    ):
        raise ValueError(
            f"Probabilities (N, ..., C) and targets (N, ...) are needed, or both (N,) for two classes, with N >= 1, "
            f"got shapes {tuple(given.shape)} and {tuple(target.shape)}."
        )
    check_labels(target, None if binary else given.shape[-1])
    return class_probabilities(probs).flatten(0, -2), target.long().flatten()


def member_probabilities(members: Classes) -> Tensor:
    """Class probabilities of K >= 2 members (K, M, C), from a Prediction, (K, N, ..., C), or (K, N) of class one."""
    given = (
        members.member_probs
        if isinstance(members, Prediction)
        else need_tensor("Member probabilities", members)
    )
    if given.dim() < 2 or given.numel() == 0 or len(given) < 2:
        needed = "Probabilities (K, N, C) of K >= 2 members are needed, with N >= 1"
        raise ValueError(f"{needed}, got shape {tuple(given.shape)}.")
    if isinstance(members, Prediction):
        return _checked(members.by_member.exp()).flatten(1, -2)
    return (_two_classes(given) if given.dim() == 2 else _checked(given)).flatten(1, -2)


def need_tensor(role: str, value: Tensor) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{role} must be a tensor, got {type(value).__name__}.")
    return value


def _two_classes(probs: Tensor) -> Tensor:
    _check_range(probs)
    return torch.stack([1 - probs, probs], -1)


def _checked(probs: Tensor) -> Tensor:
    _check_range(probs)
    off = (probs.double().sum(-1) - 1).abs() > _slack(probs)
    if bool(off.any()):
        raise ValueError(
            f"The probabilities of a row must sum to 1, got {probs[off][0].double().sum().item():.4f}."
        )
    return probs


def _check_range(probs: Tensor) -> None:
    if not probs.is_floating_point():
        raise ValueError(
            f"Probabilities of a floating type are needed, got dtype {probs.dtype}."
        )
    wrong = ~(
        (probs >= 0) & (probs <= 1 + _slack(probs))
    )  # written so that nan is wrong too
    if bool(wrong.any()):
        got = probs[wrong][0].item()
        raise ValueError(
            f"Probabilities must lie in [0, 1], got {got!r}; logits need a softmax first."
        )


def _slack(probs: Tensor) -> float:
    return max(1e-3, torch.finfo(probs.dtype).eps)


# --- calibration ---


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
def calibration(
    probs: Classes, target: Tensor, bins: int = 20, drop: int = 5
) -> Calibration:
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
    confidence, right = confidence_and_hits(probs, target)
    sums = bin_sums(confidence, right, bins)
    ece, mce = bin_errors(sums, drop)
    accuracy, mean = sums[1:] / sums[0]
    edges = bin_edges(confidence, bins)
    return Calibration(
        float(ece), float(mce), accuracy, mean, sums[0].long(), edges, sums[0] > drop
    )


def confidence_and_hits(probs: Classes, target: Tensor) -> tuple[Tensor, Tensor]:
    """Confidence in each predicted class (M,) and whether it is the right one (M,)."""
    rows, label = labelled(probs, target)
    confidence, predicted = rows.max(-1)
    return confidence, predicted == label


def surest_first(sure: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """How sure rows are (M,), the surest first, and values of theirs (M,), of equally sure rows their mean: no order of
    rows can make a difference. In float64.
    """
    sure, order = sure.double().sort(descending=True)
    _, group, size = sure.unique_consecutive(return_inverse=True, return_counts=True)
    return sure, (torch.bincount(group, values.double()[order]) / size)[group]


def bin_sums(confidence: Tensor, right: Tensor, bins: int) -> Tensor:
    """How many confidences fall into each bin, how many are right, and their sum: (3, R), which add over batches.

    Shape: confidence and right (M,).
    """
    index, confidence = bin_index(confidence, bins), confidence.double()
    weights = (torch.ones_like(confidence), right.double(), confidence)
    return torch.stack([torch.bincount(index, weight, bins) for weight in weights])


def bin_index(confidence: Tensor, bins: int) -> Tensor:
    """Bin of each probability, from 0 to R - 1; an edge belongs to the bin below."""
    return torch.bucketize(confidence.double(), bin_edges(confidence, bins)[1:-1])


def bin_edges(confidence: Tensor, bins: int) -> Tensor:
    """The bins' ends (R + 1,), rounded to the precision of the probabilities."""
    return (
        (torch.arange(bins + 1, dtype=torch.float64, device=confidence.device) / bins)
        .to(confidence.dtype)
        .double()
    )


def bin_errors(sums: Tensor, drop: int) -> tuple[Tensor, Tensor]:
    """ECE and MCE from the sums (3, R) of `bin_sums`; nan if no bin is kept."""
    count, right, confidence = sums[:, sums[0] > drop]
    if len(count) == 0:
        return sums.new_tensor(math.nan), sums.new_tensor(math.nan)
    gap = (right - confidence).abs()
    return gap.sum() / sums[0].sum(), (gap / count).max()


def need_bins(bins: int, drop: int = 0) -> None:
    if bins < 1 or drop < 0:
        raise ValueError(
            f"At least one bin and drop >= 0 are needed, got bins={bins!r}, drop={drop!r}."
        )


# --- CRPS ---


# torchmetrics' ContinuousRankedProbabilityScore compares all pairs of samples: O(M^2) memory, and it knows no weights.
def crps_samples(
    samples: Tensor, target: Tensor, weights: Tensor | None = None
) -> Tensor:
    """CRPS of samples x_i; sorted, E|X - X'| / 2 = sum_i w_i x_i (2 W_i - w_i - 1) with W_i = w_1 + ... + w_i.

    Shape: samples (M, N, ...), target (N, ...), weights (M,) or (M, N) that sum to one; returns (N, ...) in float64.

    Example:
        >>> crps_samples(torch.tensor([[0.0], [2.0]]), torch.tensor([1.0]))  # 1 - 2 * 1/4
        tensor([0.5000], dtype=torch.float64)
    """
    off = _off(
        samples, target
    )  # differences do not change, and small numbers round less
    share = _shares(weights, off)
    off, order = off.sort(0)
    share = share.expand_as(off).gather(0, order)
    return (share * (off.abs() - off * (2 * share.cumsum(0) - share - 1))).sum(0)


def crps_mixture(
    means: Tensor, scales: Tensor, target: Tensor, weights: Tensor | None = None
) -> Tensor:
    """CRPS of a mixture of normal distributions (Grimit et al. 2006); scale zero is a point. O(M^2) time, O(M) memory.

        sum_i w_i A(y - mu_i, s_i) - 1/2 sum_ij w_i w_j A(mu_i - mu_j, sqrt(s_i^2 + s_j^2))       A(m, s) = E|N(m, s^2)|

    Shape: means (M, N, ...), scales broadcast against means, target (N, ...), weights (M,) or (M, N) that sum to one;
    returns (N, ...) in float64.

    Example:
        >>> crps_mixture(torch.zeros(2, 1), torch.ones(2, 1), torch.zeros(1))  # N(0, 1): (sqrt(2) - 1) / sqrt(pi)
        tensor([0.2337], dtype=torch.float64)
    """
    off = _off(means, target)
    check_positive("scales", scales, zero=True)
    variance = scales.double().square().expand_as(off)
    share = _shares(weights, off)
    spread = torch.zeros_like(off[0])
    for i in range(len(off)):  # the pairs j > i count twice, the pair (i, i) once
        later = (
            share[i]
            * share[i:]
            * _mean_distance(off[i] - off[i:], variance[i] + variance[i:])
        )
        spread = spread + later.sum(0) - later[0] / 2
    return (share * _mean_distance(off, variance)).sum(0) - spread


def _off(values: Tensor, target: Tensor) -> Tensor:
    """Values (M, N, ...) less the targets (N, ...), which may not broadcast."""
    if values.shape[1:] != target.shape:
        raise ValueError(
            f"A target of shape {tuple(values.shape[1:])} is needed for values of shape {tuple(values.shape)}, got "
            f"{tuple(target.shape)}."
        )
    return values.double() - target.double()


def _mean_distance(m: Tensor, variance: Tensor) -> Tensor:
    """E|X| for X from N(m, variance)."""
    scale = variance.sqrt()
    z = m / scale.clamp_min(torch.finfo(scale.dtype).tiny)
    return math.sqrt(2 / math.pi) * scale * torch.exp(
        -0.5 * z.square()
    ) + m * torch.erf(z / math.sqrt(2))


def _shares(weights: Tensor | None, values: Tensor) -> Tensor:
    """Weights (M, 1 or N, ...) to meet values (M, N, ...); equal ones if None."""
    share = (
        values.new_full((len(values),), 1 / len(values))
        if weights is None
        else weights.to(values)
    )
    return unsqueeze_like(share, values)
