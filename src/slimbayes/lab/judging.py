"""What a network is judged on beside its test rows, corrupted, shifted and unfamiliar ones, and by: all scores of a set
of rows in one pass over its batches.

Corruptions are functions of their name, severity and rows. Published ones (CIFAR-10-C, ImageNet-C) come first; images
in memory that have none are corrupted here, pictures in folders are not.

Sizes: S draws, N rows, C classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slimbayes import metrics
from slimbayes.data import Split, corrupt, load
from slimbayes.data.catalog import find
from slimbayes.data.folders import ImageFolder, read_square
from slimbayes.lab.config import Evaluate, Experiment
from slimbayes.lab.execution import Execution, generator, key
from slimbayes.lab.intake import check_split
from slimbayes.lab.task import Rows, Task, limited
from slimbayes.lab.watchers import Watcher
from slimbayes.prediction.prediction import Prediction
from slimbayes.report.record import Reliability, RiskCoverage

UNFAMILIAR = ("inverted", "shuffled")  # test images that are none any more
_PUBLISHED = ("cifar10", "cifar100", "imagenet")  # of which there is a set of this name with -c
_CHUNK = 1000  # images that are corrupted together: their random numbers depend on it


def check(chosen: Evaluate, task: Task, execution: Execution) -> None:
    """Refuse sets that are not there or do not fit, before anything is trained."""
    if chosen.ood and task.real:
        raise ValueError(f"evaluate.ood asks for {chosen.ood[0]}, but {task.name} has real targets: it is for classes.")
    for name in (*chosen.shift, *chosen.ood):
        if name not in UNFAMILIAR:
            fitting(name, task, execution)
    in_memory = task.images and isinstance(task.test, Split)
    if chosen.corruption_names and not in_memory:
        _check_folders(chosen, task, execution)
    if set(chosen.ood) & set(UNFAMILIAR) and not in_memory:
        names = " and ".join(UNFAMILIAR)
        raise ValueError(f"evaluate.ood: {names} are made of images in memory; {task.name} has none.")


def _check_folders(chosen: Evaluate, task: Task, execution: Execution) -> None:
    """Refuse corruptions of pictures that are not published, not here, or of other classes."""
    if not task.images or task.name not in _PUBLISHED:
        raise ValueError(f"evaluate.corruptions are for sets of images; {task.name} is none, or has none published.")
    found = find(f"{task.name}-c", execution.data_dir)
    wanted = [f"{name}/{severity}" for name in chosen.corruption_names for severity in chosen.severities]
    if missing := [name for name in wanted if name not in found.splits]:
        raise ValueError(
            f"evaluate.corruptions asks for {missing[0]} and {len(missing) - 1} more that {task.name}-c has not here; "
            f"it has {len(found.splits)}. Complete it, or ask for fewer corruptions or severities."
        )
    if found.classes != task.classes:
        odd = sorted(set(found.classes) ^ set(task.classes))[:3]
        raise ValueError(
            f"{task.name}-c has {len(found.classes)} classes and {task.name} {len(task.classes)}, which "
            f"differ in {', '.join(odd)}: labels would not fit."
        )


def corrupted(
    experiment: Experiment, task: Task, execution: Execution, watcher: Watcher
) -> Iterator[tuple[str, dict[str, Any], Rows]]:
    """Test images under each corruption and severity: the published ones where they are at hand, else made here."""
    chosen, said = experiment.evaluate, set()
    pairs = [(name, severity) for name in chosen.corruption_names for severity in chosen.severities]
    if not pairs:
        return
    watcher.begin("corruptions", len(pairs))
    for done, (name, severity) in enumerate(pairs, 1):
        watcher.move(done)
        about = {"corruption": name, "severity": severity}
        if published := _published(task.name, name, severity, execution, experiment.data.image_size):
            yield f"{task.name}-c", about, limited(published, chosen.limit)
            continue
        assert isinstance(task.test, Split)  # `check` has seen that folders have them all
        try:
            yield task.name, about, _corrupt(limited(task.test, chosen.limit), name, severity, execution)
        except (ValueError, FileNotFoundError) as error:
            if name not in said:
                watcher.say(f"{name} is left out: {error}")
            said.add(name)


def _published(data: str, name: str, severity: int, execution: Execution, size: int) -> Rows | None:
    if data not in _PUBLISHED:
        return None
    try:
        rows = load(f"{data}-c", execution.data_dir, [f"{name}/{severity}"]).splits[f"{name}/{severity}"]
    except FileNotFoundError:
        return None
    except ValueError as error:
        if "has no split" in str(error):
            return None
        raise  # a damaged file is no reason to judge by other images
    if isinstance(rows, ImageFolder):  # already the middle of the pictures, 224 pixels high and wide
        rows.read = partial(read_square, size=size)
    return rows


def _corrupt(test: Split, name: str, severity: int, execution: Execution) -> Split:
    folder = None if execution.data_dir is None else execution.data_dir / "frost"
    parts = []
    for index, images in enumerate(test.x.split(_CHUNK)):
        source = torch.Generator(images.device).manual_seed(key(0, "corrupt", name, severity, index))
        parts.append((corrupt(images.float() / 255, name, severity, source, frost_folder=folder) * 255).round().byte())
    return Split(torch.cat(parts), test.y)


def fitting(name: str, task: Task, execution: Execution) -> Split:
    """Test rows of another set, of the same shape as the task's."""
    rows = load(name, execution.data_dir, ["test"]).splits["test"]
    if not isinstance(rows, Split):
        raise ValueError(f"{name} is decoded image by image; only sets in memory can be asked for here.")
    if isinstance(task.test, Split) and rows.x.shape[1:] != task.test.x.shape[1:]:
        shape, needed = tuple(rows.x.shape[1:]), tuple(task.test.x.shape[1:])
        raise ValueError(f"{name} has inputs of shape {shape}, but {task.name} has {needed}.")
    check_split(rows, f"{name}, test")
    return rows


def unfamiliar(name: str, limit: int | None, task: Task, execution: Execution) -> Split:
    """Rows of a set the network never saw, or test images with their colours inverted or their pixels shuffled."""
    if name not in UNFAMILIAR:
        return limited(fitting(name, task, execution), limit)
    assert isinstance(task.test, Split)
    rows = limited(task.test, limit)
    if name == "inverted":
        return Split(255 - rows.x, rows.y)
    flat = rows.x.flatten(2)
    order = torch.rand(len(flat), 1, flat.shape[2], generator=generator(0, "shuffled")).argsort(2)
    return Split(flat.gather(2, order.expand_as(flat).to(flat.device)).view_as(rows.x), rows.y)


Metrics = dict[str, Any]  # by name; each has `update` and `compute`
_POINTS = 50  # of a risk-coverage curve
_COMPARED = 8  # draws of a single member that diversity compares


class Mean:
    """A running mean in float64; torchmetrics is imported where rows are scored, and takes as long as torch."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, values: Tensor) -> None:
        self.total, self.count = self.total + float(values.double().sum()), self.count + values.numel()

    def compute(self) -> float:
        return self.total / self.count if self.count else float("nan")


@dataclass
class Scores:
    """Metrics of one set of rows, in groups that take different arguments. A group that is empty is not asked for.

    Attributes:
        whole: of the whole prediction; ranking: of the probability of "yes"; soft: of soft labels.
        members: of each member by itself; diversity: of members, or of the first draws of a single one, to one another.
        uncertainty: means over rows.
    """

    whole: Metrics
    ranking: Metrics = field(default_factory=dict)
    soft: Metrics = field(default_factory=dict)
    diversity: Metrics = field(default_factory=dict)
    uncertainty: Metrics = field(default_factory=dict)
    members: list[Metrics] = field(default_factory=list)
    rows: int = 0

    def update(self, prediction: Prediction, target: Tensor) -> None:
        """Take a batch; soft labels (N, C) are scored by their most likely class, and by their own NLL."""
        if self.soft and target.is_floating_point():
            self.soft["soft_nll"].update(prediction, target)
            target = target.argmax(-1)
        self.rows += len(target)
        for metric in self.whole.values():
            metric.update(prediction, target)
        for metric in self.ranking.values():
            metric.update(prediction.probs, target)
        for name, mean in self.uncertainty.items():
            mean.update(getattr(prediction, name))
        if self.diversity:
            self._update_members(prediction, target)

    def _update_members(self, prediction: Prediction, target: Tensor) -> None:
        if self.members:
            parts = zip(self.members, prediction.member_probs, prediction.member_log_prob(target), strict=True)
            for scores, probs, log_prob in parts:
                scores["accuracy"].update(probs, target)
                scores["ece"].update(probs, target)
                scores["nll"].update(-log_prob)
        compared = prediction
        if not self.members:  # of a single member, its first draws
            assert prediction.by_draw is not None  # predict_prefixes keeps them
            compared = replace(prediction, by_member=prediction.by_draw[:_COMPARED], weights=None)
        if len(compared.by_member) > 1:
            for name, metric in self.diversity.items():
                metric.update(compared, target) if name == "normalised_disagreement" else metric.update(compared)

    def result(self, curves: bool) -> dict[str, Any]:
        """Fields of an Evaluation."""
        out = {
            "rows": self.rows,
            "metrics": _numbers(self.whole | self.ranking | self.uncertainty | _used(self.soft)),
            "members": [_numbers(scores) for scores in self.members],
            "diversity": _numbers(_used(self.diversity)),
        }
        if curves and "ece" in self.whole:
            out |= {"reliability": self._reliability(), "risk_coverage": self._risk_coverage()}
        return out

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


def class_scores(classes: int, bins: int, members: int, binary: bool, device: torch.device, drop: int = 0) -> Scores:
    """Scores of predicted classes; bins of at most `drop` rows do not count."""
    whole = {
        "accuracy": metrics.Accuracy(), "nll": metrics.NLL(), "brier": metrics.Brier(),
        "ece": metrics.ECE(bins, drop), "mce": metrics.MCE(bins, drop), "adaptive_ece": metrics.AdaptiveECE(bins),
        "classwise_ece": metrics.ClasswiseECE(classes, bins), "aurc": metrics.AURC(),
    }  # fmt: skip
    diversity = {
        "disagreement": metrics.Disagreement(), "normalised_disagreement": metrics.NormalisedDisagreement(),
        "kl": metrics.PairwiseKL(), "cosine": metrics.CosineSimilarity(),
    }  # fmt: skip
    alone = [{"accuracy": metrics.Accuracy(), "ece": metrics.ECE(bins)} for _ in range(members if members > 1 else 0)]
    return Scores(
        whole=_alone(whole | ({"top5": metrics.TopK(5)} if classes > 5 else {}), device),
        ranking=_alone({"auroc": metrics.AUROC(), "aucpr": metrics.AUCPR()} if binary else {}, device),
        soft=_alone({"soft_nll": metrics.SoftLabelNLL()}, device),
        diversity=_alone(diversity, device),
        uncertainty={"entropy": Mean(), "epistemic": Mean()},
        members=[_alone(one, device) | {"nll": Mean()} for one in alone],
    )


def regression_scores(device: torch.device) -> Scores:
    """Scores of real targets: errors, log density, CRPS, and how often a 95 % interval holds the target."""
    whole = {"rmse": metrics.RMSE(), "lpd": metrics.LPD(), "crps": metrics.CRPS()}
    return Scores(whole=_alone({**whole, "coverage95": metrics.IntervalCoverage(0.95)}, device))


def curve_scores(discrete: bool, device: torch.device) -> Scores:
    """What curves show of each epoch: a short epoch of a small network takes less time than all scores do."""
    whole = {"accuracy": metrics.Accuracy(), "nll": metrics.NLL()}
    real = {"rmse": metrics.RMSE(), "lpd": metrics.LPD()}
    soft = _alone({"soft_nll": metrics.SoftLabelNLL()}, device) if discrete else {}
    return Scores(whole=_alone(whole if discrete else real, device), soft=soft)


def ood_scores(familiar: Tensor, unfamiliar: Tensor) -> dict[str, float]:
    """How well an uncertainty tells unfamiliar rows from familiar ones: auroc, aucpr, fpr95."""
    scores = torch.cat([familiar, unfamiliar])
    target = torch.cat([torch.zeros_like(familiar), torch.ones_like(unfamiliar)]).long()
    chosen = {"auroc": metrics.AUROC(), "aucpr": metrics.AUCPR(), "fpr95": metrics.FPR95()}
    for metric in chosen.values():
        metric.to(scores.device).update(scores, target)
    return _numbers(chosen)


def _alone(group: Mapping[str, Any], device: torch.device) -> Metrics:
    """Metrics of this process only: every process judges all rows."""
    for metric in group.values():
        metric.sync_on_compute = False
    return {name: metric.to(device) for name, metric in group.items()}


def _used(group: Metrics) -> Metrics:
    return {name: metric for name, metric in group.items() if metric.update_called}


def _numbers(group: Metrics) -> dict[str, float]:
    return {name: float(metric.compute()) for name, metric in group.items()}
