"""From a trained network to the record of its run, and back from a run's directory to the network."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from torch import nn

import slimbayes as sb
from slimbayes.data import Dataset
from slimbayes.files import write_text
from slimbayes.lab.config import Experiment
from slimbayes.lab.evaluate import evaluate
from slimbayes.lab.execution import Execution, Watcher
from slimbayes.lab.judge import Judge
from slimbayes.lab.network import likelihood_of, plain_network
from slimbayes.lab.run_folder import command, environment, stored_experiment
from slimbayes.lab.task import Task, open_task
from slimbayes.prediction.prediction import Likelihood
from slimbayes.report.record import Cost, Parameters, Record, RecordError, read


def load_run(
    folder: Path, execution: Execution, network: nn.Module | None = None, dataset: Dataset | None = None
) -> tuple[Experiment, nn.Module, Task, Likelihood]:
    """A trained run's experiment, network on its device, task and likelihood; `network` and `dataset` as they were given to `fit`."""
    experiment = stored_experiment(folder)
    task = open_task(experiment.data, execution.data_dir, dataset).to(execution.device)
    plain = network or plain_network(experiment, task.fills(), task.name)
    loaded = sb.load(plain, folder / "model").to(execution.device)
    return experiment, loaded, task, likelihood_of(task, loaded)


def write_record(
    folder: Path, execution: Execution, watcher: Watcher, network: nn.Module, task: Task, likelihood: Likelihood,
    experiment: Experiment | None = None,
) -> Record:  # fmt: skip
    """Evaluate a trained network, perhaps as another experiment asks, and write the run's record; what training cost is in cost.json."""
    stored = stored_experiment(folder)
    asked = experiment or stored
    start = time.perf_counter()
    evaluations, examples = evaluate(Judge(network, task, likelihood, asked, execution.workers), execution, watcher)
    seconds = time.perf_counter() - start
    former = _former(folder)
    cost = json.loads((folder / "cost.json").read_text()) if (folder / "cost.json").exists() else {}
    curve = _curve(folder)
    table = sb.summary(network)
    record = Record(
        name=stored.name, method=stored.told, data=task.name, seed=stored.seed, config=stored.resolved, config_hash=stored.hash,
        commands=[*(former.commands if former else []), command()], classes=list(task.classes),
        status="stopped early" if curve and curve[-1]["epoch"] < stored.train.epochs else "finished",
        parameters=Parameters(plain=table.before, total=table.after), curve=curve, evaluations=evaluations, examples=examples,
        environment=environment(), cost=_cost(cost, seconds),
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
