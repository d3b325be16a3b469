"""A trained run in its directory: kept there, and read back with its data (`load_run`) or without (`read_predictor`).

inputs.json says what the network takes, so that it predicts without the data it was trained on: shape, type and column
names of a row, scaling, classes, vocabulary, units of real targets, likelihood, and the data's facts about the network.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.errors import brief
from slimbayes.files import CheckpointError, write_json
from slimbayes.train.likelihoods import LIKELIHOODS, LikelihoodName
from slimbayes.untrusted import check_form, open_file, parse_json, read_file
from slimbayes_lab.configs.own import OwnCodeError
from slimbayes_lab.data import Dataset, Split
from slimbayes_lab.execution import Execution
from slimbayes_lab.runs.folder import RunError, check_data_of, check_seal, read_config
from slimbayes_lab.runs.predictor import (
    Predictor,
    TooLarge,
    likelihood_of,
    plain_network,
    with_noise,
)
from slimbayes_lab.tasks.own_table import TableReader
from slimbayes_lab.tasks.task import Scaling, Task, open_task

_TYPES = {
    str(t)[len("torch.") :]: t
    for t in (torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64)
}
_FORM = {  # of inputs.json, what is not checked by using it
    "row": [int],
    "targets": [int],
    "name": str,
    "classes": [str],
    "vocabulary": int,
    "fills": {str: object},
}


def save_network(folder: Path, network: nn.Module) -> None:
    """Save what was learned: alone, and with the network's own weights."""
    sb.save(network, folder / "posterior")
    sb.save(network, folder / "model", base=True)


def load_run(
    folder: Path,
    execution: Execution,
    network: nn.Module | None = None,
    dataset: Dataset | None = None,
) -> Predictor:
    """A trained run's network on its device, and its task; `network` and `dataset` as they were given to `fit`.

    Data other than those it was trained on are refused.
    """
    experiment = read_config(folder)
    check_seal(folder, ["data.json", "model/manifest.json"])
    task = open_task(experiment.data, execution.data_dir, dataset).to(execution.device)
    check_data_of(folder, task.name, task.sha256)
    facts = task.fills()
    size = weights_size(folder)
    own = network or plain_network(experiment, facts, task.name, size)
    plain = with_noise(experiment, facts, own)
    loaded = sb.load(plain, folder / "model").to(execution.device)
    return Predictor(experiment, loaded, task, likelihood_of(experiment, task, loaded))


# --- without its data ---


def write_inputs(folder: Path, task: Task, likelihood: LikelihoodName) -> None:
    """Write down what a run's network takes; image folders, whose rows are files, are left out."""
    if not isinstance(task.train, Split):
        return
    tensors = {
        "mean": task.scaling.mean,
        "std": task.scaling.std,
        "y_mean": task.y_mean,
        "y_std": task.y_std,
    }
    facts = {
        "row": list(task.train.x.shape[1:]), "dtype": str(task.train.x.dtype).removeprefix("torch."),
        "name": task.name, "classes": list(task.classes), "targets": list(task.train.y.shape[1:]), "real": task.real,
        "vocabulary": task.vocabulary, "likelihood": likelihood, "fills": task.fills(), "columns": list(task.columns),
    }  # fmt: skip
    facts |= {"own": None if task.reader is None else task.reader.to_dict()}
    facts |= {
        name: None if tensor is None else tensor.tolist()
        for name, tensor in tensors.items()
    }
    write_json(folder / "inputs.json", facts)


def read_predictor(folder: Path, device: torch.device) -> Predictor:
    """A run's network, with a task that holds no rows but knows everything about them."""
    experiment, file = read_config(folder), Path(folder) / "inputs.json"
    check_seal(Path(folder), ["inputs.json", "model/manifest.json"])
    try:
        facts = parse_json(read_file(file))
        check_form(facts, _FORM)
        x = torch.zeros(0, *facts["row"], dtype=_TYPES[facts["dtype"]])
        y = torch.zeros(
            0, *facts["targets"], dtype=torch.float32 if facts["real"] else torch.int64
        )
        names = ("mean", "std", "y_mean", "y_std")
        mean, std, y_mean, y_std = (
            None if facts[n] is None else _tensor(facts[n]) for n in names
        )
        columns = tuple(map(str, facts["columns"]))
        reader = TableReader.from_dict(facts["own"])
        likelihood: LikelihoodName = facts["likelihood"]
        if likelihood not in LIKELIHOODS:
            raise ValueError(f"likelihood must be one of {', '.join(LIKELIHOODS)}")
        size = weights_size(folder)
        network = plain_network(experiment, facts["fills"], facts["name"], size)
        plain = with_noise(experiment, facts["fills"], network)
    except FileNotFoundError as error:
        raise RunError(
            f"{folder} has no inputs.json: its training is not finished, or it is a run on image folders, which cannot "
            f"predict files yet."
        ) from error
    except OSError as error:
        raise RunError(f"{error.filename} cannot be read: {error.strerror}.") from error
    except TooLarge as error:
        raise RunError(f"{folder}: {error}") from error
    except (CheckpointError, OwnCodeError, RunError):
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:  # whatever becomes of odd facts
        raise RunError(
            f"{file} is damaged: {brief(error)}. `slimbayes evaluate {folder}` writes it anew."
        ) from error
    network, nothing = sb.load(plain, Path(folder) / "model").to(device), Split(x, y)
    task = Task(
        facts["name"],
        nothing,
        nothing,
        None,
        Scaling(mean, std),
        tuple(facts["classes"]),
        facts["vocabulary"],
        y_mean,
        y_std,
        columns,
        reader,
    )
    return Predictor(experiment, network, task.to(device), likelihood)


def weights_size(folder: Path) -> int:
    """Bytes of the files that hold a run's weights, none of which has holes."""
    model = Path(folder) / "model"
    size = 0
    for name in ("base.safetensors", "posterior.safetensors"):
        try:
            with open_file(model / name) as file:
                size += os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            continue  # sb.load will say it
        except OSError as error:
            raise RunError(
                f"{model / name} cannot be read: {error.strerror}."
            ) from error
    return size


def _tensor(numbers: Any) -> Tensor:
    """Numbers as they were written: in float32, unless they have more digits."""
    wide = torch.tensor(numbers, dtype=torch.float64)
    return wide.float() if torch.equal(wide, wide.float().double()) else wide
