"""Telling unfamiliar inputs from familiar ones by a score.

With the out-of-distribution rows as positives, at every threshold t "score >= t" has

    recall = TP / positives        false positive rate = FP / negatives        precision = TP / (TP + FP)

Ranking needs every score: 16 bytes per row are kept.

Sizes: N rows, M rows of all batches, C classes.
"""

import math
from typing import Literal

import torch
from torch import Tensor
from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision

from slimbayes.metrics.functional import Classes, class_probabilities, need_tensor
from slimbayes.metrics.streaming import Streaming
from slimbayes.prediction.prediction import Prediction
from slimbayes.train.targets import check_labels

Score = Literal["entropy", "confidence", "mutual_information", "distance"]


def ood_score(probs: Classes, score: Score = "entropy") -> Tensor:
    """How unfamiliar each row looks to a classifier; more is more unfamiliar.

    Args:
        score: "entropy" of the averaged probabilities in nats; "confidence": 1 - max_c p_c; "mutual_information"
            between the class and the weights, the epistemic part of the entropy, which needs several draws;
            "distance" from the training rows, of any Prediction made with `predict(..., distance=)`.

    Shape: probs (N, ..., C), or (N,) of class one, or a Prediction; returns (N, ...).

    Example:
        >>> ood_score(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), "confidence")
        tensor([0.5000, 0.0000])
    """
    if score == "distance":
        if not isinstance(probs, Prediction) or probs.distance is None:
            raise TypeError(
                "The distance is that of a Prediction made with predict(..., distance=), see slimbayes.distance."
            )
        return probs.distance
    if score == "entropy":
        if isinstance(probs, Prediction):
            return probs.entropy
        return torch.special.entr(class_probabilities(probs)).sum(-1)
    if score == "confidence":
        return 1 - class_probabilities(probs).amax(-1)
    if score != "mutual_information":
        raise ValueError(
            f"score must be 'entropy', 'confidence', 'mutual_information' or 'distance', got {score!r}."
        )
    if not isinstance(probs, Prediction):
        raise TypeError(
            "The mutual information is between draws: it needs a Prediction, got averaged probabilities."
        )
    if probs.count < 2:
        raise ValueError(
            "The mutual information needs at least two draws, got 1; call predict(..., draws=)."
        )
    return probs.epistemic


class Ranking(Streaming):
    """Keeps scores and which rows are positive."""

    def __init__(self) -> None:
        super().__init__()
        self.add_list("scores")
        self.add_list("positive")

    def update(self, scores: Tensor | Prediction, is_ood: Tensor) -> None:
        """Take a batch; a binary Prediction stands for its probabilities of class one."""
        if isinstance(scores, Prediction):
            if scores.likelihood != "bernoulli":
                got = f"got a Prediction of {scores.likelihood} targets; use ood_score(prediction)"
                raise TypeError(f"{type(self).__name__} ranks scores, {got}.")
            scores = scores.probs
        if (
            need_tensor("Scores", scores).shape != need_tensor("Labels", is_ood).shape
            or scores.numel() == 0
        ):
            got = f"{tuple(scores.shape)} and {tuple(is_ood.shape)}"
            raise ValueError(
                f"Scores and labels of equal shape (N,) are needed, N >= 1, got {got}."
            )
        if bool(scores.isnan().any()):
            raise ValueError("Scores must be numbers, got nan.")
        check_labels(is_ood, None)
        self.add_to("scores", scores)
        self.add_to("positive", is_ood)

    def _rows(self) -> tuple[Tensor, Tensor]:
        """Scores and labels (M,) of all rows, of which some must be positive and some negative."""
        scores, positive = self.all_of("scores"), self.all_of("positive").long()
        found = int(positive.sum())
        if not 0 < found < len(scores):
            kind = "negative (0)" if found == 0 else "positive (1)"
            raise ValueError(
                f"{type(self).__name__} needs rows of both kinds, got {len(scores)} rows, all {kind}."
            )
        # torchmetrics takes two infinite scores for different ones, since their difference is not zero.
        return scores.nan_to_num(), positive


class AUROC(Ranking):
    """Area under the receiver operating characteristic: the chance that a positive outranks a negative (a tie: half).

    Shape: update(scores (N,), is_ood (N,) of 0 and 1), or probabilities of class one and targets.

    Example:
        >>> metric = AUROC()
        >>> metric.update(torch.tensor([2.0, 0.1, 0.3]), torch.tensor([1, 0, 0]))
        >>> metric.update(torch.tensor([0.2]), torch.tensor([1]))
        >>> float(metric.compute())
        0.75
    """

    higher_is_better = True

    def compute(self) -> Tensor:
        area: Tensor = BinaryAUROC(normalization=None)(*self._rows())
        return area


class AUCPR(Ranking):
    """Area under the precision-recall curve, as average precision without interpolation: that of scikit-learn.

    1 for a perfect ranking, the share of positives for constant scores. In-distribution rows as positives give another
    number: swap both, update(-scores, 1 - is_ood).

    Shape: update(scores (N,), is_ood (N,) of 0 and 1), or probabilities of class one and targets.

    Example:
        >>> metric = AUCPR()
        >>> metric.update(torch.tensor([0.9, 0.8, 0.7, 0.1]), torch.tensor([1, 0, 1, 0]))
        >>> round(float(metric.compute()), 4)  # 1/2 * 1 + 1/2 * 2/3
        0.8333
    """

    higher_is_better = True

    def compute(self) -> Tensor:
        area: Tensor = BinaryAveragePrecision(normalization=None)(*self._rows())
        return area


class FPR95(Ranking):
    """Share of familiar rows flagged by the highest threshold that finds 95% of the unfamiliar ones.

    Args:
        recall: what to find instead of 95%.

    Shape: update(scores (N,), is_ood (N,) of 0 and 1).

    >>> float(FPR95()(torch.tensor([0.9, 0.8, 0.7, 0.1]), torch.tensor([1, 0, 1, 0])))
    0.5
    """

    higher_is_better = False

    def __init__(self, recall: float = 0.95) -> None:
        if not 0 < recall <= 1:
            raise ValueError(f"recall must lie in (0, 1], got {recall!r}.")
        super().__init__()
        self.recall = recall

    def compute(self) -> Tensor:
        # BinaryROC divides in single precision, in which 19 / 20 is less than 0.95: count instead.
        scores, positive = self._rows()
        unfamiliar, familiar = scores[positive == 1], scores[positive == 0]
        wanted = self.recall * len(unfamiliar)
        count = max(1, math.ceil(wanted - 1e-9))  # 0.55 * 100 is a little more than 55
        threshold = unfamiliar.sort(descending=True).values[count - 1]
        return (familiar >= threshold).double().mean()
