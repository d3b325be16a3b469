"""What a trained network takes and gives, written beside it, so that predictions need neither its training data nor their scaling anew.

inputs.json    shape, type and column names of a row, scaling, classes, vocabulary, units of real targets,
               likelihood, and the data's facts about the network
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.data import Split
from slimbayes.files import write_text
from slimbayes.lab.config import Experiment
from slimbayes.lab.network import plain_network
from slimbayes.lab.run_folder import RunError, stored_experiment
from slimbayes.lab.task import Scaling, Task
from slimbayes.prediction.prediction import Likelihood

_TYPES = {
    str(t).removeprefix("torch."): t for t in (torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64)
}


@dataclass(frozen=True)
class Inputs:
    """A run's network, ready to be asked, and a stand-in for its task that holds no rows but knows everything about them."""

    experiment: Experiment
    network: nn.Module
    task: Task
    likelihood: Likelihood


def write_inputs(folder: Path, task: Task, likelihood: Likelihood) -> None:
    """Write down what a run's network takes; image folders, whose rows are files, are left out."""
    if not isinstance(task.train, Split):
        return
    facts = {
        "row": list(task.train.x.shape[1:]), "dtype": str(task.train.x.dtype).removeprefix("torch."), "name": task.name, "classes": list(task.classes),
        "targets": list(task.train.y.shape[1:]), "real": task.real, "vocabulary": task.vocabulary, "likelihood": likelihood, "fills": task.fills(),
        "columns": list(task.columns),
        "mean": _listed(task.scaling.mean), "std": _listed(task.scaling.std), "y_mean": _listed(task.y_mean), "y_std": _listed(task.y_std),
    }  # fmt: skip
    write_text(folder / "inputs.json", json.dumps(facts, indent=1) + "\n")


def read_inputs(folder: Path, device: torch.device) -> Inputs:
    """A run's network and what it takes, from the run's directory alone."""
    experiment, file = stored_experiment(folder), Path(folder) / "inputs.json"
    try:
        facts = json.loads(file.read_text())
        x = torch.zeros(0, *facts["row"], dtype=_TYPES[facts["dtype"]])
        y = torch.zeros(0, *facts["targets"], dtype=torch.float32 if facts["real"] else torch.int64)
        mean, std, y_mean, y_std = (_tensor(facts[name]) for name in ("mean", "std", "y_mean", "y_std"))
        columns = tuple(map(str, facts.get("columns", ())))  # runs of before they were kept have none
        plain = plain_network(experiment, facts["fills"], facts["name"])
    except OSError as error:
        raise RunError(
            f"{folder} has no inputs.json: its training is not finished, or it is a run on image folders, which cannot predict files yet."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{file} is damaged: {error!r}. `slimbayes evaluate {folder}` writes it anew.") from error
    network = sb.load(plain, Path(folder) / "model").to(device)
    nothing = Split(x, y)
    classes, words = tuple(facts["classes"]), facts["vocabulary"]
    task = Task(facts["name"], nothing, nothing, None, Scaling(mean, std), classes, words, y_mean, y_std, columns)
    return Inputs(experiment, network, task.to(device), facts["likelihood"])


def _listed(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.tolist()


def _tensor(values: Any) -> Tensor | None:
    return None if values is None else torch.tensor(values, dtype=torch.float32)
