"""From an experiment to the record of its run.

A run is a function of its config: stop it anywhere, resume it, and it ends in the same weights.
"""

from __future__ import annotations

import copy
import math
import resource
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.diagnostics.check import check as check_posterior
from slimbayes.errors import cut
from slimbayes.files import write_json
from slimbayes.seeds import seed_everything
from slimbayes.untrusted import check_form, parse_json, read_file
from slimbayes_lab.configs.experiment import Experiment
from slimbayes_lab.configs.files import merged, parse_override, validate
from slimbayes_lab.configs.own import code_allowed
from slimbayes_lab.data import Dataset, Split
from slimbayes_lab.execution import Execution, leave_together
from slimbayes_lab.report.record import (
    Diagnostics,
    ParameterCounts,
    Record,
    RecordError,
    RunCost,
    read,
    write,
)
from slimbayes_lab.runs import folder as run_folder
from slimbayes_lab.runs.evaluate import check_sets, evaluate
from slimbayes_lab.runs.predictor import Predictor
from slimbayes_lab.runs.trained import load_run, write_inputs
from slimbayes_lab.runs.training import Training
from slimbayes_lab.runs.watchers import Bars, Watcher
from slimbayes_lab.tasks.intake import data_digest, open_data
from slimbayes_lab.tasks.rows import Rows

_COST = {
    "train_seconds": (int, float),
    "epoch_seconds": [(int, float)],
    "peak_memory": (int, float),
}
_ROWS, _PICTURES = (
    128,
    32,
)  # that are looked at, and of folders, whose pictures are large


def fit(
    experiment: Experiment,
    folder: Path,
    execution: Execution = Execution(),  # noqa: B008 (frozen)
    resume: bool = False,
    watcher: Watcher = Watcher(),  # noqa: B008 (it keeps nothing)
    network: nn.Module | None = None,
    dataset: Dataset | None = None,
    judge: bool = True,
) -> Path:
    """Train an experiment in a run directory and evaluate it; a run that has finished is left as it is.

    Args:
        folder: the run directory (see folder.py).
        resume: continue from the latest checkpoint, if there is one.
        network, dataset: stand in for what the config names, for models and data of your own.
        judge: evaluate and write the record when training is done.

    Returns: the run directory.
    """
    if (folder / "record.json").exists() and read(
        folder
    ).config_hash == experiment.hash:
        _check_finished(experiment, folder, execution, watcher, dataset)
        return folder
    fabric = execution.fabric(experiment.train.precision)
    fabric.launch()
    first = fabric.global_rank == 0
    watcher = watcher if first else Watcher()
    with ExitStack() as stack:
        stack.enter_context(
            code_allowed()
        )  # whoever calls this has chosen the experiment
        if first:
            stack.enter_context(run_folder.open_run(folder, experiment, resume))
        plain = copy.deepcopy(network)
        training = Training(
            experiment, folder, execution, fabric, watcher, network, dataset
        )
        task = training.task
        begun = (folder / "data.json").exists() or any(
            (folder / "checkpoints").glob("step-*")
        )
        if begun and (note := run_folder.check_data_of(folder, task.name, task.sha256)):
            watcher.say(note)  # nor does it go on with other data
        if first:
            write_json(folder / "data.json", {"name": task.name, "sha256": task.sha256})
        if judge:
            check_sets(experiment.evaluate, task, execution)
            training.predictor.asked_draws()  # refuses "exact" of networks that cannot be counted
        training.run(resume)
        leave_together(fabric)
        if first:
            write_json(folder / "cost.json", _measured(training))
            write_inputs(folder, task, training.predictor.likelihood)
        if (
            judge and first
        ):  # a network that was shared among processes is read back whole
            alone = fabric.world_size == 1
            predictor = (
                training.predictor
                if alone
                else load_run(folder, execution, plain, dataset)
            )
            write_record(folder, experiment, predictor, execution, watcher)
        if first:
            run_folder.seal(folder)
    return folder


def _check_finished(
    experiment: Experiment,
    folder: Path,
    execution: Execution,
    watcher: Watcher,
    dataset: Dataset | None,
) -> None:
    """Refuse to pass off a finished run as one on the data that are here."""
    try:
        data, splits = open_data(experiment.data, execution.data_dir, dataset)
    except FileNotFoundError:
        watcher.say(
            f"{folder} is left as it is. Its data are not here, so they were not compared."
        )
        return
    if note := run_folder.check_data_of(folder, data.name, data_digest(data, splits)):
        watcher.say(note)


def evaluate_run(run: Path, overrides: Sequence[str], execution: Execution) -> Record:
    """Judge a trained run, with other choices for its evaluation if asked, and write its record anew."""
    predictor = load_run(run, execution)
    tree = predictor.experiment.resolved
    for override in overrides:
        if not override.strip().startswith("evaluate."):
            raise ValueError(
                f"Only evaluate.* can be changed after training, got {override!r}."
            )
        tree = merged(tree, parse_override(override))
    run_folder.check_seal(run, ["metrics.csv", "cost.json"])
    run_folder.unseal(run)
    write_inputs(run, predictor.task, predictor.likelihood)
    stored, predictor = (
        predictor.experiment,
        predictor._replace(experiment=validate(tree, str(run))),
    )
    with Bars(predictor.experiment.name) as bars:
        record = write_record(run, stored, predictor, execution, bars)
    run_folder.seal(run)
    return record


def write_record(
    folder: Path,
    stored: Experiment,
    predictor: Predictor,
    execution: Execution,
    watcher: Watcher,
) -> Record:
    """Evaluate a trained network as its experiment asks, and write the record of the run in a directory, whose own
    experiment is `stored`.
    """
    start = time.perf_counter()
    evaluations, examples = evaluate(predictor, execution, watcher)
    seconds = time.perf_counter() - start
    curve, counts = run_folder.read_curve(folder), sb.summary(predictor.network)
    former: list[str] = []
    with suppress(RecordError):
        former = read(folder).commands
    record = Record(
        name=stored.name,
        method=stored.method_text,
        data=predictor.task.name,
        seed=stored.seed,
        config=stored.resolved,
        config_hash=stored.hash,
        commands=[*former, run_folder.command()],
        classes=list(predictor.task.classes),
        status="stopped early"
        if curve and curve[-1]["epoch"] < stored.train.epochs
        else "finished",
        parameters=ParameterCounts(plain=counts.before, total=counts.after),
        curve=curve,
        evaluations=evaluations,
        examples=examples,
        environment=dict(run_folder.environment()),
        cost=_cost(folder / "cost.json", seconds),
        data_sha256=predictor.task.sha256,
        diagnostics=_diagnostics(predictor, folder, watcher),
    )
    write(folder / "record.json", record)
    return record


def _diagnostics(
    predictor: Predictor, folder: Path, watcher: Watcher
) -> Diagnostics | None:
    """Diagnostics of a fit; whatever a network cannot do for them must not cost the record of its training."""
    try:
        return check_fit(predictor, folder)
    except (
        ArithmeticError,
        NotImplementedError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        watcher.say(f"There are no diagnostics of this fit: {error}")
        return None


def _measured(training: Training) -> dict[str, Any]:
    """Seconds of training and of each epoch, and the peak memory in bytes: what cost.json holds."""
    cuda, seconds = training.fabric.device.type == "cuda", training.seconds
    peak = (
        torch.cuda.max_memory_allocated()
        if cuda
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    return {
        "train_seconds": sum(seconds),
        "epoch_seconds": seconds,
        "peak_memory": peak,
    }


def _cost(file: Path, evaluate_seconds: float) -> RunCost:
    """The cost of a run, from its cost.json."""
    measured: dict[str, Any] = {}
    try:
        measured = parse_json(read_file(file))
        check_form(measured, _COST)
    except FileNotFoundError:
        pass  # a run that was only evaluated
    except (OSError, ValueError) as error:
        raise run_folder.RunError(
            f"{file} cannot be read: {cut(str(error))}. Restore it from a copy, or remove it."
        ) from error
    epochs = sorted(measured.get("epoch_seconds", ()))
    return RunCost(
        train_seconds=measured.get("train_seconds", float("nan")),
        seconds_per_epoch=epochs[len(epochs) // 2] if epochs else float("nan"),
        evaluate_seconds=evaluate_seconds,
        peak_memory=measured.get("peak_memory"),
    )


# --- diagnostics after every fit, from some rows of its own ---


def check_fit(predictor: Predictor, folder: Path) -> Diagnostics:
    """Diagnostics of a trained network: KL, NLL and k-hat on training rows, label changes on test rows."""
    task, experiment, curve = (
        predictor.task,
        predictor.experiment,
        run_folder.read_curve(folder),
    )
    seed_everything(experiment.seed, "diagnostics")
    (x, y), (unseen, _) = (_some(rows, predictor) for rows in (task.train, task.test))
    weight = curve[-1].get("kl_weight", 1.0) if curve else 1.0
    found = check_posterior(
        predictor.network,
        x,
        y,
        predictor.likelihood,
        predictor.training_noise,
        len(task.train),
        weight,
        unseen,
    )
    skipped = sum(
        not math.isfinite(row["loss"])
        for row in run_folder.read_rows(folder / "steps.csv", "loss")
    )
    warnings = found.warnings
    if skipped:
        warnings.append(
            f"The loss of {skipped} steps was not finite. Lower the learning rate or clip gradients."
        )
    return Diagnostics(
        **found.to_dict() | {"warnings": warnings}, nonfinite_steps=skipped
    )


def _some(rows: Rows, predictor: Predictor) -> tuple[Tensor, Tensor]:
    """Inputs as the network takes them and targets of a few rows, spread evenly."""
    most = _ROWS if isinstance(rows, Split) else _PICTURES
    index = torch.linspace(0, len(rows) - 1, min(most, len(rows))).long()
    if isinstance(rows, Split):
        x, y = rows.x[index.to(rows.x.device)], rows.y[index.to(rows.y.device)]
    else:
        x, y = torch.stack([rows[i][0] for i in index.tolist()]), rows.y[index]
    return predictor.task.scaling(x.to(predictor.device)), y.to(predictor.device)
