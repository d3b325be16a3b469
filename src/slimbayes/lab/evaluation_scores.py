"""All scores of a set of rows in one pass over its batches, for several numbers of draws at once.

Sizes: K members, S draws, N rows, C classes.
"""

from __future__ import annotations

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


class Scores:
    """Scores of class predictions, batch by batch: `metrics`, `members`, `diversity` and the two curves of an Evaluation."""

    def __init__(
        self, classes: int, bins: int, members: int, binary: bool, device: torch.device, drop: int = 0
    ) -> None:
        self.classes, self.member_count, self.binary = classes, members, binary
        self.whole: dict[str, Any] = {
            "accuracy": metrics.Accuracy(), "nll": metrics.NLL(), "brier": metrics.Brier(), "ece": metrics.ECE(bins, drop), "mce": metrics.MCE(bins, drop),
            "adaptive_ece": metrics.AdaptiveECE(bins), "classwise_ece": metrics.ClasswiseECE(classes, bins), "aurc": metrics.AURC(),
        }  # fmt: skip
        if classes > 5:
            self.whole["top5"] = metrics.TopK(5)
        self.ranking: dict[str, Any] = {"auroc": metrics.AUROC(), "aucpr": metrics.AUCPR()} if binary else {}
        judged = members if members > 1 else 0  # by themselves
        self.alone = [{"accuracy": metrics.Accuracy(), "ece": metrics.ECE(bins)} for _ in range(judged)]
        self.alone_nll = [Mean() for _ in self.alone]
        self.pairs: dict[str, Any] = {
            "disagreement": metrics.Disagreement(), "normalised_disagreement": metrics.NormalisedDisagreement(),
            "kl": metrics.PairwiseKL(), "cosine": metrics.CosineSimilarity(),
        }  # fmt: skip
        self.uncertainty = {"entropy": Mean(), "epistemic": Mean()}
        self.soft: Any = None
        self.rows = 0
        for metric in [
            *self.whole.values(),
            *self.ranking.values(),
            *self.pairs.values(),
            *(m for one in self.alone for m in one.values()),
        ]:
            _alone(metric, device)

    def update(self, prediction: Prediction, target: Tensor) -> None:
        """Take a batch; soft labels (N, C) are scored by their most likely class, and by their own NLL."""
        if target.is_floating_point():
            self.soft = self.soft or _alone(metrics.SoftLabelNLL(), target.device)
            self.soft.update(prediction, target)
            target = target.argmax(-1)
        self.rows += len(target)
        for metric in self.whole.values():
            metric.update(prediction, target)
        for metric in self.ranking.values():
            metric.update(prediction.probs, target)
        if self.alone:
            self._update_members(prediction, target)
        compared = prediction if self.member_count > 1 else _draws_as_members(prediction)
        if len(compared.by_member) > 1:
            for name, metric in self.pairs.items():
                metric.update(compared, target) if name == "normalised_disagreement" else metric.update(compared)
        self.uncertainty["entropy"].update(prediction.entropy)
        self.uncertainty["epistemic"].update(prediction.epistemic)

    def _update_members(self, prediction: Prediction, target: Tensor) -> None:
        probs, logs = prediction.member_probs, prediction.member_log_prob(target)
        for index, one in enumerate(self.alone):
            for metric in one.values():
                metric.update(probs[index], target)
            self.alone_nll[index].update(-logs[index])

    def result(self, curves: bool) -> dict[str, Any]:
        """Fields of an Evaluation."""
        groups = {**self.whole, **self.ranking, **self.uncertainty} | ({"soft_nll": self.soft} if self.soft else {})
        drew = any(metric.update_called for metric in self.pairs.values())
        out: dict[str, Any] = {
            "rows": self.rows,
            "metrics": _numbers(groups),
            "members": [_numbers(one | {"nll": nll}) for one, nll in zip(self.alone, self.alone_nll, strict=True)],
            "diversity": _numbers(self.pairs) if drew else {},
        }
        if curves:
            out |= {"reliability": self._reliability(), "risk_coverage": self._risk_coverage()}
        return out

    def _reliability(self) -> Reliability:
        count, right, confidence = self.whole["ece"].bin_sums.cpu()
        kept = count > 0
        return Reliability(
            confidence=(confidence / count)[kept].tolist(),
            accuracy=(right / count)[kept].tolist(),
            count=count[kept].long().tolist(),
        )

    def _curve(self) -> tuple[Tensor, Tensor]:
        risk = self.whole["aurc"].risk()  # its own `curve` would wait for other processes
        return torch.arange(1, len(risk) + 1, device=risk.device) / len(risk), risk

    def _risk_coverage(self) -> RiskCoverage:
        coverage, risk = (t.cpu() for t in self._curve())
        index = torch.linspace(0, len(risk) - 1, min(_POINTS, len(risk))).round().long()
        return RiskCoverage(coverage=coverage[index].double().tolist(), risk=risk[index].double().tolist())


class RealScores:
    """Scores of real targets: root mean squared error, log density, CRPS, and how often a 95 % interval holds the target."""

    def __init__(self, device: torch.device) -> None:
        self.whole: dict[str, Any] = {
            "rmse": metrics.RMSE(), "lpd": metrics.LPD(), "crps": metrics.CRPS(), "coverage95": metrics.IntervalCoverage(0.95)
        }  # fmt: skip
        self.rows = 0
        for metric in self.whole.values():
            _alone(metric, device)

    def update(self, prediction: Prediction, target: Tensor) -> None:
        self.rows += len(target)
        for metric in self.whole.values():
            metric.update(prediction, target)

    def result(self, curves: bool) -> dict[str, Any]:
        return {"rows": self.rows, "metrics": _numbers(self.whole)}


def _draws_as_members(prediction: Prediction) -> Prediction:
    """What diversity compares of a single member: its first draws."""
    assert prediction.by_draw is not None  # predict_prefixes keeps them
    return replace(prediction, by_member=prediction.by_draw[:_COMPARED], weights=None)


def uncertainty(prediction: Prediction) -> Tensor:
    """What tells unfamiliar rows from familiar ones, (N,): the entropy of the averaged probabilities."""
    return prediction.entropy


def strangeness(familiar: Tensor, strange: Tensor) -> dict[str, float]:
    """How well an uncertainty tells strange rows from familiar ones: auroc, aucpr, fpr95."""
    scores = torch.cat([familiar, strange])
    is_strange = torch.cat([torch.zeros_like(familiar), torch.ones_like(strange)]).long()
    out = {}
    for name, metric in (("auroc", metrics.AUROC()), ("aucpr", metrics.AUCPR()), ("fpr95", metrics.FPR95())):
        metric.to(scores.device).update(scores, is_strange)
        out[name] = float(metric.compute())
    return out


def _alone(metric: Any, device: torch.device) -> Any:
    """A metric of this process only: every process judges all rows."""
    metric.sync_on_compute = False
    return metric.to(device)


def _numbers(group: dict[str, Any]) -> dict[str, float]:
    return {name: float(metric.compute()) for name, metric in group.items()}
