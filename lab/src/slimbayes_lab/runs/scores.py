"""All scores of a set of rows, in one pass over its batches.

Sizes: S draws, N rows, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from slimbayes import metrics
from slimbayes.prediction.prediction import Prediction
from slimbayes_lab.report.record import Reliability, RiskCoverage

Metrics = dict[str, Any]  # by name; each has `update` and `compute`
_POINTS = 50  # of a risk-coverage curve
_COMPARED = 8  # draws of a single member that diversity compares


@dataclass
class Scores:
    """Metrics of one set of rows, in groups that take different arguments. A group that is empty is not asked for.

    They are of this process only: every process judges all rows.

    Attributes:
        whole: of the whole prediction; soft: of soft labels.
        members: of each member by itself; diversity: of members, or of the first draws of a single one, to one another.
        uncertainty: means over rows.
    """

    device: torch.device
    whole: Metrics
    soft: Metrics = field(default_factory=dict)
    diversity: Metrics = field(default_factory=dict)
    uncertainty: Metrics = field(default_factory=dict)
    members: list[Metrics] = field(default_factory=list)
    rows: int = 0

    def __post_init__(self) -> None:
        for group in (
            self.whole,
            self.soft,
            self.diversity,
            self.uncertainty,
            *self.members,
        ):
            for metric in group.values():
                metric.sync_on_compute = False
                metric.to(self.device)

    def update(self, prediction: Prediction, target: Tensor) -> None:
        """Take a batch; soft labels (N, C) are scored by their most likely class, and by their own NLL."""
        if self.soft and target.is_floating_point():
            self.soft["soft_nll"].update(prediction, target)
            target = target.argmax(-1)
        self.rows += len(target)
        for metric in self.whole.values():
            metric.update(prediction, target)
        for name, mean in self.uncertainty.items():
            mean.update(getattr(prediction, name))
        if self.diversity:
            self._update_members(prediction, target)

    def _update_members(self, prediction: Prediction, target: Tensor) -> None:
        if self.members:
            parts = zip(
                self.members,
                prediction.member_probs,
                prediction.member_log_prob(target),
                strict=True,
            )
            for scores, probs, log_prob in parts:
                scores["accuracy"].update(probs, target)
                scores["ece"].update(probs, target)
                scores["nll"].update(-log_prob)
        compared = prediction
        if not self.members:  # of a single member, its first draws
            assert prediction.by_draw is not None  # predict_prefixes keeps them
            compared = replace(
                prediction, by_member=prediction.by_draw[:_COMPARED], weights=None
            )
        if len(compared.by_member) > 1:
            for name, metric in self.diversity.items():
                metric.update(
                    compared, target
                ) if name == "normalised_disagreement" else metric.update(compared)

    def result(self, curves: bool) -> dict[str, Any]:
        """Fields of an Evaluation."""
        out = {
            "rows": self.rows,
            "metrics": _numbers(self.whole | self.uncertainty | _used(self.soft)),
            "members": [_numbers(scores) for scores in self.members],
            "diversity": _numbers(_used(self.diversity)),
        }
        if curves and "ece" in self.whole:
            out |= {
                "reliability": self._reliability(),
                "risk_coverage": self._risk_coverage(),
            }
        return out

    def _reliability(self) -> Reliability:
        sums = self.whole["ece"].bin_sums.cpu()
        count, right, confidence = sums[:, sums[0] > 0]
        return Reliability(
            confidence=(confidence / count).tolist(),
            accuracy=(right / count).tolist(),
            count=count.long().tolist(),
        )

    def _risk_coverage(self) -> RiskCoverage:
        risk = (
            self.whole["aurc"].risk().cpu()
        )  # its own `curve` would wait for other processes
        coverage = torch.arange(1, len(risk) + 1) / len(risk)
        index = torch.linspace(0, len(risk) - 1, min(_POINTS, len(risk))).round().long()
        return RiskCoverage(
            coverage=coverage[index].double().tolist(),
            risk=risk[index].double().tolist(),
        )


def class_scores(
    classes: int,
    bins: int,
    members: int,
    binary: bool,
    device: torch.device,
) -> Scores:
    """Scores of predicted classes."""
    from slimbayes.metrics.streaming import (
        GivenMean,
    )  # torchmetrics takes as long to import as torch

    whole = {
        "accuracy": metrics.Accuracy(), "nll": metrics.NLL(), "brier": metrics.Brier(),
        "ece": metrics.ECE(bins), "mce": metrics.MCE(bins), "adaptive_ece": metrics.AdaptiveECE(bins),
        "classwise_ece": metrics.ClasswiseECE(classes, bins), "aurc": metrics.AURC(),
    }  # fmt: skip
    whole |= {"top5": metrics.TopK(5)} if classes > 5 else {}
    whole |= (
        {"auroc": metrics.AUROC(), "aucpr": metrics.AUCPR()} if binary else {}
    )  # of the probability of "yes"
    diversity = {
        "disagreement": metrics.Disagreement(), "normalised_disagreement": metrics.NormalisedDisagreement(),
        "kl": metrics.PairwiseKL(), "cosine": metrics.CosineSimilarity(),
    }  # fmt: skip
    alone = [
        {"accuracy": metrics.Accuracy(), "ece": metrics.ECE(bins), "nll": GivenMean()}
        for _ in range(members if members > 1 else 0)
    ]
    soft, uncertainty = (
        {"soft_nll": metrics.SoftLabelNLL()},
        {"entropy": GivenMean(), "epistemic": GivenMean()},
    )
    return Scores(device, whole, soft, diversity, uncertainty, alone)


def regression_scores(device: torch.device) -> Scores:
    """Scores of real targets: errors, log density, CRPS, and how often a 95 % interval holds the target."""
    whole = {"rmse": metrics.RMSE(), "lpd": metrics.LPD(), "crps": metrics.CRPS()}
    return Scores(device, {**whole, "coverage95": metrics.IntervalCoverage(0.95)})


def curve_scores(discrete: bool, device: torch.device) -> Scores:
    """What curves show of each epoch: a short epoch of a small network takes less time than all scores do."""
    if not discrete:
        return Scores(device, {"rmse": metrics.RMSE(), "lpd": metrics.LPD()})
    whole = {"accuracy": metrics.Accuracy(), "nll": metrics.NLL()}
    return Scores(device, whole, {"soft_nll": metrics.SoftLabelNLL()})


def ood_scores(familiar: Tensor, unfamiliar: Tensor) -> dict[str, float]:
    """How well an uncertainty tells unfamiliar rows from familiar ones: auroc, aucpr, fpr95."""
    scores = torch.cat([familiar, unfamiliar])
    target = torch.cat([torch.zeros_like(familiar), torch.ones_like(unfamiliar)]).long()
    chosen = {
        "auroc": metrics.AUROC(),
        "aucpr": metrics.AUCPR(),
        "fpr95": metrics.FPR95(),
    }
    for metric in chosen.values():
        metric.to(scores.device).update(scores, target)
    return _numbers(chosen)


def _used(group: Metrics) -> Metrics:
    return {name: metric for name, metric in group.items() if metric.update_called}


def _numbers(group: Metrics) -> dict[str, float]:
    return {name: float(metric.compute()) for name, metric in group.items()}
