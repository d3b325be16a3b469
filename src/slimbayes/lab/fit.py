"""Training an experiment. A run is a function of its config: stop it anywhere, resume it, and it ends in the same weights."""

from __future__ import annotations

import copy
import json
from pathlib import Path

from torch import nn

from slimbayes.data import Dataset
from slimbayes.files import write_text
from slimbayes.lab.config import Experiment
from slimbayes.lab.evaluate import check
from slimbayes.lab.execution import Execution, Nobody, Watcher
from slimbayes.lab.inputs import write_inputs
from slimbayes.lab.records import load_run, write_record
from slimbayes.lab.run_folder import open_run
from slimbayes.lab.training import Diverged as Diverged
from slimbayes.lab.training import Stopped as Stopped
from slimbayes.lab.training import Training as Training
from slimbayes.lab.training import leave_together


def fit(
    experiment: Experiment,
    folder: Path,
    execution: Execution = Execution(),  # noqa: B008 (frozen)
    resume: bool = False,
    watcher: Watcher | None = None,
    network: nn.Module | None = None,
    dataset: Dataset | None = None,
    judge: bool = True,
) -> Path:
    """Train an experiment in a run directory and evaluate it; a run that has finished is left as it is.

    Args:
        folder: the run directory (see runs.py).
        resume: continue from the latest checkpoint, if there is one.
        network, dataset: stand in for what the config names, for models and data of your own.
        judge: evaluate and write the record when training is done.

    Returns: the run directory.
    """
    if (folder / "record.json").exists():
        from slimbayes.report import record

        if record.read(folder).config_hash == experiment.hash:
            return folder
    fabric = execution.fabric(experiment.train.precision)
    fabric.launch()
    watcher = watcher if watcher and fabric.global_rank == 0 else Nobody()
    lock = open_run(folder, experiment, resume) if fabric.global_rank == 0 else None
    try:
        plain = copy.deepcopy(network)
        training = Training(experiment, folder, execution, fabric, watcher, network, dataset)
        if judge:
            check(experiment.evaluate, training.task, execution)
        training.run(resume)
        leave_together(fabric)
        if fabric.global_rank == 0:
            write_text(folder / "cost.json", json.dumps(training.cost()) + "\n")
            write_inputs(folder, training.task, training.likelihood)
        if judge and fabric.global_rank == 0:
            _judge(training, plain, dataset)
    finally:
        if lock is not None:
            lock.close()
    return folder


def _judge(training: Training, plain: nn.Module | None, dataset: Dataset | None) -> None:
    """Evaluate what was trained and write the record; a network that was shared among processes is read back whole."""
    network, task, likelihood = training.network, training.task, training.likelihood
    if training.fabric.world_size > 1:
        _, network, task, likelihood = load_run(training.folder, training.execution, plain, dataset)
    write_record(training.folder, training.execution, training.watcher, network, task, likelihood)
