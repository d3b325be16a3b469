"""Unfamiliar and corrupted inputs: telling them from familiar ones by a score, and how many errors they bring.

With the out-of-distribution rows as positives, at every threshold t "score >= t" has

    recall = TP / positives        false positive rate = FP / negatives        precision = TP / (TP + FP)

Ranking needs every score: AUROC, AUCPR and FPR95 keep 16 bytes per row. The corruption errors need constant memory;
their maths is that of corruption.py.

Sizes: N rows, M rows of all batches, T distinct scores, C classes.
"""

from typing import Literal

import torch
from torch import Tensor

from slimbayes.errors import did_you_mean
from slimbayes.metrics.corruption import CorruptionErrors, Rates, corruption_errors, severities
from slimbayes.metrics.probabilities import Classes, class_probabilities, labelled, need_tensor
from slimbayes.metrics.streaming import Streaming
from slimbayes.prediction.prediction import Prediction
from slimbayes.train.targets import check_labels

Score = Literal["entropy", "confidence", "mutual_information"]


def ood_score(probs: Classes, score: Score = "entropy") -> Tensor:
    """How unfamiliar each row looks to a classifier; more is more unfamiliar.

    Args:
        score: "entropy" of the averaged probabilities in nats; "confidence": 1 - max_c p_c; "mutual_information"
        between
            the class and the weights, the epistemic part of the entropy, which needs a Prediction of several draws.

    Shape: probs (N, ..., C), or (N,) of class one, or a Prediction; returns (N, ...).

    Example:
        >>> ood_score(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), "confidence")
        tensor([0.5000, 0.0000])
    """
    if score == "entropy":
        return (
            probs.entropy if isinstance(probs, Prediction) else torch.special.entr(class_probabilities(probs)).sum(-1)
        )
    if score == "confidence":
        return 1 - class_probabilities(probs).amax(-1)
    if score != "mutual_information":
        raise ValueError(f"score must be 'entropy', 'confidence' or 'mutual_information', got {score!r}.")
    if not isinstance(probs, Prediction):
        raise TypeError("The mutual information is between draws: it needs a Prediction, got averaged probabilities.")
    if probs.count < 2:
        raise ValueError("The mutual information needs at least two draws, got 1; call predict(..., draws=).")
    return probs.epistemic


# More right than torchmetrics' BinaryAUROC and BinaryAveragePrecision, which send only batches with a score outside
# [0, 1], such as an entropy, through a sigmoid, and so lose the ranking across batches.
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
        if need_tensor("Scores", scores).shape != need_tensor("Labels", is_ood).shape or scores.numel() == 0:
            got = f"{tuple(scores.shape)} and {tuple(is_ood.shape)}"
            raise ValueError(f"Scores and labels of equal shape (N,) are needed, N >= 1, got {got}.")
        if bool(scores.isnan().any()):
            raise ValueError("Scores must be numbers, got nan.")
        check_labels(is_ood, None)
        self.add_to("scores", scores)
        self.add_to("positive", is_ood)

    def counts(self) -> tuple[Tensor, Tensor]:
        """True and false positives (T,) at every distinct score as threshold, the highest first."""
        scores, order = self.all_of("scores").sort(descending=True)
        last = torch.ones_like(scores, dtype=torch.bool)
        last[:-1] = scores[1:] != scores[:-1]
        rank = torch.arange(1, len(scores) + 1, dtype=torch.float64, device=scores.device)
        true = self.all_of("positive")[order].cumsum(0)
        if not 0 < true[-1] < len(scores):
            kind = "negative (0)" if true[-1] == 0 else "positive (1)"
            raise ValueError(f"{type(self).__name__} needs rows of both kinds, got {len(scores)} rows, all {kind}.")
        return true[last], (rank - true)[last]


class AUROC(Ranking):
    """Area under the receiver operating characteristic: the chance that a positive outranks a negative (a tie: half).

    Shape: update(scores (N,), is_ood (N,) of 0 and 1), or any scores and positives, such as probabilities of class one
    and targets.

    Example:
        >>> metric = AUROC()
        >>> metric.update(torch.tensor([2.0, 0.1, 0.3]), torch.tensor([1, 0, 0]))
        >>> metric.update(torch.tensor([0.2]), torch.tensor([1]))
        >>> float(metric.compute())
        0.75
    """

    higher_is_better = True

    def compute(self) -> Tensor:
        true, false = self.counts()
        zero = true.new_zeros(1)
        return torch.trapezoid(torch.cat([zero, true]), torch.cat([zero, false])) / (true[-1] * false[-1])


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
        true, false = self.counts()
        return (true.diff(prepend=true.new_zeros(1)) * true / (true + false)).sum() / true[-1]


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
        true, false = self.counts()
        enough = true >= self.recall * true[-1] - 1e-9  # 0.55 * 100 is a little more than 55
        return false[enough][0] / false[-1]


class CorruptionError(Streaming):
    """Mean corruption error (mCE) in percent of a reference network's: 100 is as bad as the reference.

    Args:
        reference: error rates, as fractions, of each corruption at every severity, such as `ALEXNET`, and perhaps the
            "clean" one. All its corruptions and severities must be seen before compute; unseen clean rows only cost the
            relative error.

    Shape: update(probs (N, ..., C), target (N, ...), corruption, severity from 1); corruption "clean" has no severity.

    Example:
        >>> metric = CorruptionError({"fog": [0.5, 0.5]})
        >>> probs = torch.tensor([[0.9, 0.1], [0.9, 0.1]])
        >>> metric.update(probs, torch.tensor([0, 0]), "fog", 1)
        >>> metric.update(probs, torch.tensor([0, 1]), "fog", 2)
        >>> float(metric.compute())  # 100 * (0 + 1/2) / (1/2 + 1/2)
        50.0
    """

    higher_is_better = False
    wrong: Tensor
    rows: Tensor

    def __init__(self, reference: Rates) -> None:
        corruption_errors(reference, reference)  # refuses rates that cannot serve
        super().__init__()
        self.reference = dict(reference)
        self.levels = {"clean": [0]}  # severities of each corruption
        self.levels |= {name: [*range(1, len(r) + 1)] for name, r in sorted(severities("reference", reference).items())}
        self.cells = [(name, level) for name, levels in self.levels.items() for level in levels]
        self.add_sum("wrong", len(self.cells))
        self.add_sum("rows", len(self.cells))

    def update(self, probs: Classes, target: Tensor, corruption: str, severity: int | None = None) -> None:
        """Take a batch of one corruption and severity."""
        if corruption not in self.levels:
            raise ValueError(f"The reference has no corruption {corruption!r}{did_you_mean(corruption, self.levels)}")
        if (severity or 0) not in self.levels[corruption]:
            raise ValueError(f"{corruption}: the severity must be one of {self.levels[corruption]}, got {severity!r}.")
        here = torch.zeros_like(self.rows)
        here[self.cells.index((corruption, severity or 0))] = 1
        rows, label = labelled(probs, target)
        self.add_to("wrong", here * float((rows.argmax(-1) != label).sum()))
        self.add_to("rows", here * len(rows))

    def errors(self) -> CorruptionErrors:
        """Both means and the errors of each corruption, of this process."""
        self.need_rows(self.rows.sum())
        missing = [f"{name} {level}" for (name, level), rows in zip(self.cells, self.rows) if level and not rows]
        if missing:
            raise ValueError(f"{type(self).__name__} has no rows yet of {', '.join(missing)}.")
        rates = iter((self.wrong / self.rows).tolist())
        ours = {name: [next(rates) for _ in levels] for name, levels in self.levels.items()}
        (clean,) = ours.pop("clean")
        if "clean" in self.reference and self.rows[0]:
            return corruption_errors({"clean": clean, **ours}, self.reference)
        return corruption_errors(ours, {name: r for name, r in self.reference.items() if name != "clean"})

    def compute(self) -> Tensor:
        return self.rows.new_tensor(self.errors().mce)

    def details(self) -> CorruptionErrors:
        """Both means and the errors of each corruption, over all processes, which must all call it."""
        with self.sync_context():
            return self.errors()


class RelativeCorruptionError(CorruptionError):
    """Mean relative corruption error (rmCE): what corruption adds to the clean error, in percent of the reference's.

    Args:
        reference: as for `CorruptionError`, with the "clean" error rate.

    Shape: update(probs (N, ..., C), target (N, ...), corruption, severity from 1); corruption "clean" has no severity.

    Example:
        >>> metric = RelativeCorruptionError({"clean": 0.0, "fog": [0.5]})
        >>> probs = torch.tensor([[0.9, 0.1]] * 4)
        >>> metric.update(probs, torch.tensor([0, 0, 0, 1]), "clean")
        >>> metric.update(probs, torch.tensor([0, 0, 1, 1]), "fog", 1)
        >>> float(metric.compute())  # 100 * (2/4 - 1/4) / (1/2 - 0)
        50.0
    """

    def __init__(self, reference: Rates) -> None:
        if "clean" not in reference:
            raise ValueError('A relative error needs the reference\'s "clean" error rate.')
        super().__init__(reference)

    def compute(self) -> Tensor:
        if self.rows.sum() and not self.rows[0]:
            raise ValueError("RelativeCorruptionError has no clean rows yet.")
        return self.rows.new_tensor(self.errors().rmce)
