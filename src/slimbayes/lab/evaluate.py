"""Judging a trained network: on test rows, corrupted ones, shifted ones and unfamiliar ones, for several numbers of draws at once.

Noise and corruptions are functions of the set and the batch, so equal weights give equal scores; corruptions are the same for all runs.
"""

from __future__ import annotations

import base64
import io
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.data import Dataset, Split, corrupt, load
from slimbayes.inference import predict_prefixes
from slimbayes.lab.config import Evaluate, Experiment
from slimbayes.lab.execution import Execution, Nobody, Watcher, watched
from slimbayes.lab.runs import command, environment, stored_experiment, write_text
from slimbayes.lab.scores import RealScores, Scores, strangeness, uncertainty
from slimbayes.lab.seeds import key, seed_everything
from slimbayes.lab.task import Rows, Task, batches, limited, open_task
from slimbayes.prediction import Likelihood, Prediction
from slimbayes.record import Cost, Evaluation, Example, Parameters, Record, RecordError, read

_CHUNK = 1000  # images that are corrupted together: their random numbers depend on it
STRANGERS = ("inverted", "shuffled")  # test images that are none any more


@dataclass(frozen=True)
class Judge:
    """A network and how it is asked."""

    network: nn.Module
    task: Task
    likelihood: Likelihood
    experiment: Experiment
    workers: int = 0

    @property
    def chosen(self) -> Evaluate:
        return self.experiment.evaluate

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def predictions(self, rows: Rows, place: str, draws: Sequence[int]) -> Iterator[tuple[dict[int, Prediction], Tensor]]:
        """Predictions by number of draws, and targets, batch by batch."""
        precision = torch.autocast(self.device.type, torch.bfloat16, enabled=self.experiment.train.precision == "bf16")
        for index, (x, y) in enumerate(batches(rows, self.chosen.batch, self.device, self.workers)):
            seed_everything(self.experiment.seed, "evaluate", place, index)
            x = self.task.scaling(x)
            if self.device.type == "cuda" and x.dim() == 4:
                x = x.contiguous(memory_format=torch.channels_last)
            with precision:
                found = predict_prefixes(self.network, x, draws, self.likelihood, self._noise())
            if self.task.y_mean is not None and self.task.y_std is not None:
                found = {n: p.rescaled(self.task.y_mean, self.task.y_std) for n, p in found.items()}
            yield found, y

    def _noise(self) -> float:
        return self.experiment.train.noise if self.likelihood == "gaussian" else 0.0

    def scores(self) -> Scores | RealScores:
        if self.likelihood == "gaussian":
            return RealScores(self.device)
        return Scores(max(2, len(self.task.classes)), self.chosen.bins, sb.members(self.network), self.likelihood == "bernoulli", self.device)

    def judge(self, rows: Rows, draws: Sequence[int], data: str, role: Any, **about: Any) -> tuple[list[Evaluation], dict[int, Tensor]]:
        """Evaluations of one set, one for each number of draws, and the rows' uncertainties."""
        place = f"{data} {role} {about}"
        tables = {count: self.scores() for count in draws}
        doubts: dict[int, list[Tensor]] = {count: [] for count in draws}
        for found, y in self.predictions(rows, place, draws):
            for count, prediction in found.items():
                tables[count].update(prediction, y)
                if self.likelihood != "gaussian":
                    doubts[count].append(uncertainty(prediction))
        curves = role in ("test", "shift")
        made = [Evaluation(data=data, role=role, draws=n, **about, **table.result(curves)) for n, table in tables.items()]
        return made, {n: torch.cat(parts) for n, parts in doubts.items() if parts}

    def doubts(self, rows: Rows, place: str, draws: Sequence[int]) -> dict[int, Tensor]:
        """Uncertainties of unlabelled rows, by number of draws."""
        parts: dict[int, list[Tensor]] = {count: [] for count in draws}
        for found, _ in self.predictions(rows, place, draws):
            for count, prediction in found.items():
                parts[count].append(uncertainty(prediction))
        return {n: torch.cat(found) for n, found in parts.items()}


def judge_validation(network: nn.Module, task: Task, likelihood: Likelihood, experiment: Experiment, epoch: int) -> dict[str, float]:
    """NLL, and accuracy or RMSE, of the validation rows after an epoch, with one draw of each member."""
    assert task.validation is not None
    judge = Judge(network, task, likelihood, experiment)
    if likelihood != "gaussian":
        (made,), _ = judge.judge(task.validation, [1], task.name, "validation", severity=0)
        return {f"validation_{name}": made.metrics[name] for name in ("nll", "accuracy")}
    total = torch.zeros(2, dtype=torch.float64, device=judge.device)
    for x, y in batches(task.validation, experiment.evaluate.batch, judge.device):
        seed_everything(experiment.seed, "validation", epoch)
        p = predict_prefixes(network, task.scaling(x), [1], likelihood, experiment.train.noise)[1]
        total += torch.stack([-p.log_prob(y).double().sum(), (p.mean - y).double().square().sum()])
    nll, square = (total / len(task.validation)).tolist()
    return {"validation_nll": nll, "validation_rmse": square**0.5}


def evaluate(judge: Judge, execution: Execution, watcher: Watcher | None = None) -> tuple[list[Evaluation], list[Example]]:
    """All evaluations that a config asks for, and the rows it is most and least sure of."""
    watcher, chosen, task = watcher or Nobody(), judge.chosen, judge.task
    draws = sorted(set(chosen.draws)) if _random(judge.network) else [1]
    made, familiar = judge.judge(task.test, draws, task.name, "test")
    for name, severity, rows in _corrupted(judge, execution, watcher):
        made += judge.judge(rows, draws, task.name, "corruption", corruption=name, severity=severity)[0]
    for name in chosen.shift:
        rows = limited(_test_of(name, execution), chosen.limit)
        made += judge.judge(rows.to(judge.device), draws, name, "shift")[0]
    for name in chosen.ood:
        strange = judge.doubts(_strange(name, judge, execution), f"ood {name}", draws)
        made += [
            Evaluation(data=name, role="ood", draws=n, rows=len(strange[n]), metrics=strangeness(familiar[n], strange[n])) for n in draws
        ]
    return made, _examples(judge, draws[-1]) if chosen.examples and judge.likelihood != "gaussian" else []


def _random(network: nn.Module) -> bool:
    from slimbayes.passes import posteriors_of

    return bool(posteriors_of(network))


def _corrupted(judge: Judge, execution: Execution, watcher: Watcher) -> Iterator[tuple[str, int, Split]]:
    """Test images under each corruption and severity: the published ones where they are at hand, else made here."""
    names = judge.chosen.corruption_names
    if not names:
        return
    if not judge.task.images or not isinstance(judge.task.test, Split):
        raise ValueError(f"evaluate.corruptions are for sets of images in memory; {judge.task.name} is not one.")
    test = limited(judge.task.test, judge.chosen.limit)
    pairs = [(name, severity) for name in names for severity in judge.chosen.severities]
    for name, severity in watched(pairs, watcher, "corruptions", len(pairs)):
        rows = _published(judge.task.name, name, severity, execution, judge.chosen.limit) or _corrupt(test, name, severity, execution, watcher)
        if rows is not None:
            yield name, severity, rows.to(judge.device)


def _published(data: str, name: str, severity: int, execution: Execution, limit: int | None) -> Split | None:
    if data not in ("cifar10", "cifar100"):
        return None
    try:
        rows = load(f"{data}-c", execution.data_dir, [f"{name}/{severity}"]).splits[f"{name}/{severity}"]
    except (FileNotFoundError, ValueError):
        return None
    assert isinstance(rows, Split)
    return limited(rows, limit)


def _corrupt(test: Split, name: str, severity: int, execution: Execution, watcher: Watcher) -> Split | None:
    folder = None if execution.data_dir is None else execution.data_dir / "frost"
    parts = []
    for index, images in enumerate(test.x.split(_CHUNK)):
        source = torch.Generator(images.device).manual_seed(key(0, "corrupt", name, severity, index))
        try:
            made = corrupt(images.float() / 255, name, severity, source, frost_folder=folder)
        except (ValueError, FileNotFoundError) as error:
            if severity == 1:
                watcher.say(f"{name} is left out: {error}")
            return None
        parts.append((made * 255).round().to(torch.uint8))
    return Split(torch.cat(parts), test.y)


def _test_of(name: str, execution: Execution) -> Split:
    found = load(name, execution.data_dir, ["test"]).splits["test"]
    if not isinstance(found, Split):
        raise ValueError(f"{name} is decoded image by image; only sets in memory can be asked for here.")
    return found


def _strange(name: str, judge: Judge, execution: Execution) -> Split:
    """Rows of a set the network never saw, or test images with their colours inverted or their pixels shuffled."""
    test = judge.task.test
    if name in STRANGERS:
        assert isinstance(test, Split)
        rows = limited(test, judge.chosen.limit)
        if name == "inverted":
            return Split(255 - rows.x, rows.y)
        flat = rows.x.flatten(2)
        source = torch.Generator("cpu").manual_seed(key(0, "shuffled"))
        order = torch.rand(len(flat), 1, flat.shape[2], generator=source).argsort(2).expand_as(flat).to(flat.device)
        return Split(flat.gather(2, order).view_as(rows.x), rows.y)
    rows = limited(_test_of(name, execution), judge.chosen.limit).to(judge.device)
    if isinstance(test, Split) and rows.x.shape[1:] != test.x.shape[1:]:
        raise ValueError(f"{name} has inputs of shape {tuple(rows.x.shape[1:])}, but {judge.task.name} has {tuple(test.x.shape[1:])}.")
    return rows


def _examples(judge: Judge, draws: int) -> list[Example]:
    """Test rows the network is most and least sure of, by the entropy of its prediction."""
    facts: list[Tensor] = []
    for found, y in judge.predictions(judge.task.test, f"{judge.task.name} test {{}}", [draws]):
        p = found[draws]
        label = p.label if p.likelihood == "categorical" else (p.probs > 0.5).long()
        confidence = p.confidence if p.likelihood == "categorical" else torch.maximum(p.probs, 1 - p.probs)
        y = y.argmax(-1) if y.is_floating_point() else y
        facts.append(torch.stack([y.double(), label.double(), confidence.double(), p.entropy.double(), p.epistemic.double()], 1))
    table = torch.cat(facts).cpu()
    order = table[:, 3].sort(stable=True).indices
    count = min(judge.chosen.examples, len(order) // 2)
    picked = [("most", int(i)) for i in order[:count]] + [("least", int(i)) for i in order.flip(0)[:count]]
    return [_example(judge, sure, index, table[index].tolist()) for sure, index in picked]


def _example(judge: Judge, sure: Any, index: int, facts: list[float]) -> Example:
    names = judge.task.classes or ("0", "1")
    truth, label, confidence, entropy, epistemic = facts
    return Example(
        index=index, sure=sure, label=names[int(truth)], predicted=names[int(label)], confidence=confidence,
        entropy=entropy, epistemic=epistemic, image=_picture(judge.task.test, index),
    )  # fmt: skip


def _picture(rows: Rows, index: int) -> str | None:
    """A row's image as a PNG data URL; None where rows are no images of bytes."""
    if not isinstance(rows, Split) or rows.x.dtype != torch.uint8 or rows.x.dim() != 4 or rows.x.shape[1] not in (1, 3):
        return None
    from PIL import Image

    pixels = rows.x[index].permute(1, 2, 0).cpu().numpy()
    out = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(out, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


# --- records ---


def load_run(
    folder: Path, execution: Execution, network: nn.Module | None = None, dataset: Dataset | None = None
) -> tuple[Experiment, nn.Module, Task, Likelihood]:
    """A trained run's experiment, network on its device, task and likelihood; `network` and `dataset` as they were given to `fit`."""
    from slimbayes.lab.fit import likelihood_of

    experiment = stored_experiment(folder)
    device = torch.device("cuda" if execution.accelerator != "cpu" and torch.cuda.is_available() else "cpu")
    task = open_task(experiment.data, execution.data_dir, dataset).to(device)
    chosen, facts = experiment.model, task.fills()
    plain = network or chosen.build(**{name: facts[name] for name in chosen.filled})
    loaded = sb.load(plain, folder / "model").to(device)
    return experiment, loaded, task, likelihood_of(task, loaded)


def write_record(
    folder: Path, execution: Execution, watcher: Watcher, network: nn.Module, task: Task, likelihood: Likelihood, cost: dict[str, Any] | None = None,
    experiment: Experiment | None = None,
) -> Record:  # fmt: skip
    """Evaluate a trained network and write the run's record; without `cost`, that of the former record is kept."""
    stored = stored_experiment(folder)
    asked = experiment or stored
    start = time.perf_counter()
    evaluations, examples = evaluate(Judge(network, task, likelihood, asked, execution.workers), execution, watcher)
    seconds = time.perf_counter() - start
    former = _former(folder)
    if cost is not None:
        write_text(folder / "cost.json", json.dumps(cost) + "\n")
    elif (folder / "cost.json").exists():
        cost = json.loads((folder / "cost.json").read_text())
    curve = _curve(folder)
    table = sb.summary(network)
    record = Record(
        name=stored.name, method=stored.told, data=task.name, seed=stored.seed, config=stored.resolved, config_hash=stored.hash,
        commands=[*(former.commands if former else []), command()], classes=list(task.classes),
        status="stopped early" if curve and curve[-1]["epoch"] < stored.train.epochs else "finished",
        parameters=Parameters(plain=table.before, total=table.after), curve=curve, evaluations=evaluations, examples=examples,
        environment=environment(), cost=_cost(cost or {}, seconds),
    )  # fmt: skip
    write_text(folder / "record.json", record.model_dump_json() + "\n")
    return record


def _cost(measured: dict[str, Any], seconds: float) -> Cost:
    epochs = sorted(measured.get("epoch_seconds", ()))
    return Cost(
        train_seconds=measured.get("train_seconds", float("nan")), seconds_per_epoch=epochs[len(epochs) // 2] if epochs else float("nan"),
        evaluate_seconds=seconds, peak_memory=measured.get("peak_memory"),
    )  # fmt: skip


def _former(folder: Path) -> Record | None:
    try:
        return read(folder)
    except RecordError:
        return None


def _curve(folder: Path) -> list[dict[str, float]]:
    import csv

    file = folder / "metrics.csv"
    if not file.exists():
        return []
    with open(file, newline="") as handle:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(handle)]
