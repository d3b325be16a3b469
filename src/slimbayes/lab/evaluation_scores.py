"""All scores of a set of rows in one pass over its batches.

Sizes: S draws, N rows, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slimbayes import metrics
from slimbayes.prediction.prediction import Prediction
from slimbayes.report.record import Reliability, RiskCoverage

_POINTS = 50  # of a risk-coverage curve
_COMPARED = 8  # draws of a single member that diversity compares


class Mean:
    """A running mean in float64."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, values: Tensor) -> None:
        self.total, self.count = self.total + float(values.double().sum()), self.count + values.numel()

    def compute(self) -> float:
        return self.total / self.count if self.count else float("nan")


class ClassScores:
    """Scores of predicted classes: `metrics`, `members`, `diversity` and the two curves of an Evaluation."""

    def __init__(
        self, classes: int, bins: int, members: int, binary: bool, device: torch.device, drop: int = 0
    ) -> None:
        def here(**chosen: Any) -> dict[str, Any]:
            return {name: _alone(metric, device) for name, metric in chosen.items()}

        self.rows, self.single = 0, members == 1
        self.whole = here(
            accuracy=metrics.Accuracy(), nll=metrics.NLL(), brier=metrics.Brier(), ece=metrics.ECE(bins, drop),
            mce=metrics.MCE(bins, drop), adaptive_ece=metrics.AdaptiveECE(bins),
            classwise_ece=metrics.ClasswiseECE(classes, bins), aurc=metrics.AURC(),
        )  # fmt: skip
        if classes > 5:
            self.whole |= here(top5=metrics.TopK(5))
        self.ranking = here(auroc=metrics.AUROC(), aucpr=metrics.AUCPR()) if binary else {}
        self.soft = here(soft_nll=metrics.SoftLabelNLL())
        self.diversity = here(
            disagreement=metrics.Disagreement(), normalised_disagreement=metrics.NormalisedDisagreement(),
            kl=metrics.PairwiseKL(), cosine=metrics.CosineSimilarity(),
        )  # fmt: skip
        self.uncertainty = {"entropy": Mean(), "epistemic": Mean()}
        self.members = [
            here(accuracy=metrics.Accuracy(), ece=metrics.ECE(bins)) | {"nll": Mean()}
            for _ in range(0 if self.single else members)
        ]

    def update(self, prediction: Prediction, target: Tensor) -> None:
        """Take a batch; soft labels (N, C) are scored by their most likely class, and by their own NLL."""
        if target.is_floating_point():
            self.soft["soft_nll"].update(prediction, target)
            target = target.argmax(-1)
        self.rows += len(target)
        for metric in self.whole.values():
            metric.update(prediction, target)
        for metric in self.ranking.values():
            metric.update(prediction.probs, target)
        for name, mean in self.uncertainty.items():
            mean.update(getattr(prediction, name))
        if self.members:
            self._update_members(prediction, target)
        compared = _draws_as_members(prediction) if self.single else prediction
        if len(compared.by_member) > 1:
            for name, metric in self.diversity.items():
                metric.update(compared, target) if name == "normalised_disagreement" else metric.update(compared)

    def _update_members(self, prediction: Prediction, target: Tensor) -> None:
        for scores, probs, log_prob in zip(
            self.members, prediction.member_probs, prediction.member_log_prob(target), strict=True
        ):
            scores["accuracy"].update(probs, target)
            scores["ece"].update(probs, target)
            scores["nll"].update(-log_prob)

    def result(self, curves: bool) -> dict[str, Any]:
        """Fields of an Evaluation."""
        out = {
            "rows": self.rows,
            "metrics": _numbers(self.whole | self.ranking | self.uncertainty | _used(self.soft)),
            "members": [_numbers(scores) for scores in self.members],
            "diversity": _numbers(_used(self.diversity)),
        }
        return out | ({"reliability": self._reliability(), "risk_coverage": self._risk_coverage()} if curves else {})

    def _reliability(self) -> Reliability:
        sums = self.whole["ece"].bin_sums.cpu()
        count, right, confidence = sums[:, sums[0] > 0]
        return Reliability(
            confidence=(confidence / count).tolist(), accuracy=(right / count).tolist(), count=count.long().tolist()
        )

    def _risk_coverage(self) -> RiskCoverage:
        risk = self.whole["aurc"].risk().cpu()  # its own `curve` would wait for other processes
        coverage = torch.arange(1, len(risk) + 1) / len(risk)
        index = torch.linspace(0, len(risk) - 1, min(_POINTS, len(risk))).round().long()
        return RiskCoverage(coverage=coverage[index].double().tolist(), risk=risk[index].double().tolist())


class RegressionScores:
    """Scores of real targets: rmse, log density, CRPS, and how often a 95 % interval holds the target."""

    def __init__(self, device: torch.device) -> None:
        chosen = {"rmse": metrics.RMSE(), "lpd": metrics.LPD(), "crps": metrics.CRPS()}
        chosen["coverage95"] = metrics.IntervalCoverage(0.95)
        self.rows, self.whole = 0, {name: _alone(metric, device) for name, metric in chosen.items()}

    def update(self, prediction: Prediction, target: Tensor) -> None:
        self.rows += len(target)
        for metric in self.whole.values():
            metric.update(prediction, target)

    def result(self, curves: bool) -> dict[str, Any]:
        """Fields of an Evaluation; real targets have no curves."""
        return {"rows": self.rows, "metrics": _numbers(self.whole)}


def ood_scores(familiar: Tensor, unfamiliar: Tensor) -> dict[str, float]:
    """How well an uncertainty tells unfamiliar rows from familiar ones: auroc, aucpr, fpr95."""
    scores = torch.cat([familiar, unfamiliar])
    target = torch.cat([torch.zeros_like(familiar), torch.ones_like(unfamiliar)]).long()
    chosen = {"auroc": metrics.AUROC(), "aucpr": metrics.AUCPR(), "fpr95": metrics.FPR95()}
    for metric in chosen.values():
        metric.to(scores.device).update(scores, target)
    return _numbers(chosen)


def _draws_as_members(prediction: Prediction) -> Prediction:
    """What diversity compares of a single member: its first draws."""
    assert prediction.by_draw is not None  # predict_prefixes keeps them
    return replace(prediction, by_member=prediction.by_draw[:_COMPARED], weights=None)


def _alone(metric: Any, device: torch.device) -> Any:
    """A metric of this process only: every process judges all rows."""
    metric.sync_on_compute = False
    return metric.to(device)


def _used(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: metric for name, metric in group.items() if metric.update_called}


def _numbers(group: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(metric.compute()) for name, metric in group.items()}
