"""Predicting the rows of a file with a finished run, from the run's directory alone: training data are not needed.

inputs.json    shape, type and column names of a row, scaling, classes, vocabulary, units of real targets,
               likelihood, and the data's facts about the network
"""

from __future__ import annotations

import contextlib
import csv
import zipfile
import zlib
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import slimbayes as sb
from slimbayes.data import Split
from slimbayes.data.folders import decode
from slimbayes.errors import brief
from slimbayes.files import write_csv, write_json
from slimbayes.lab.evaluate import Predictor
from slimbayes.lab.execution import Execution
from slimbayes.lab.network import plain_network
from slimbayes.lab.run_folder import RunError, stored_experiment
from slimbayes.lab.task import Scaling, Task
from slimbayes.prediction.prediction import Prediction
from slimbayes.train.likelihoods import LikelihoodName
from slimbayes.untrusted import parse_json, read_file

_IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
_TYPES = {str(t)[len("torch.") :]: t for t in (torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64)}


def predict_file(run: Path, inputs: Path, output: Path, draws: int = 16, accelerator: Any = "auto") -> int:
    """Predict the rows of a file and write predictions; returns how many rows there were.

    Rows that hold NaN or infinity are refused by number: a prediction for them would be a guess.
    """
    if output.suffix not in (".csv", ".json", ".npz"):
        raise ValueError(f"Predictions go to .csv, .json or .npz, got {output}.")
    predictor = read_predictor(run, Execution(accelerator=accelerator).device)
    x = fitted(read_rows(inputs, predictor.task.columns), predictor.task, str(inputs))
    found = predictor.predictions(Split(x, torch.zeros(len(x))), "predict", [draws])
    columns = as_columns([predictions[draws] for predictions, _ in found], predictor.task.classes)
    lines = [dict(zip(columns, line, strict=True)) for line in zip(*columns.values(), strict=True)]
    if output.suffix == ".npz":
        arrays: dict[str, Any] = {name: np.asarray(values) for name, values in columns.items()}
        np.savez_compressed(output, **arrays)
    elif output.suffix == ".json":
        write_json(output, lines)
    else:
        write_csv(output, lines)
    return len(x)


def as_columns(parts: Sequence[Prediction], classes: Sequence[str]) -> dict[str, list[Any]]:
    """Predictions as columns: label, probabilities and uncertainties, or mean and deviations of real targets."""

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(p, name).double() for p in parts]).cpu()

    if parts[0].likelihood == "gaussian":
        found = {"mean": joined("mean"), "std": joined("std"), "epistemic_std": joined("epistemic").sqrt()}
        targets = range(found["mean"].shape[1])
        ends = [f"_{target}" if len(targets) > 1 else "" for target in targets]
        return {f"{name}{ends[i]}": values[:, i].tolist() for i in targets for name, values in found.items()}
    probs = joined("probs")
    probs = torch.stack([1 - probs, probs], 1) if probs.dim() == 1 else probs
    names = classes or tuple(map(str, range(probs.shape[1])))
    confidence, label = probs.max(1)
    columns: dict[str, list[Any]] = {"label": [names[i] for i in label.tolist()], "confidence": confidence.tolist()}
    columns |= {name: joined(name).tolist() for name in ("entropy", "aleatoric", "epistemic")}
    return columns | {f"p({name})": probs[:, i].tolist() for i, name in enumerate(names)}


# --- what a network takes ---


def write_inputs(folder: Path, task: Task, likelihood: LikelihoodName) -> None:
    """Write down what a run's network takes; image folders, whose rows are files, are left out."""
    if not isinstance(task.train, Split):
        return
    tensors = {"mean": task.scaling.mean, "std": task.scaling.std, "y_mean": task.y_mean, "y_std": task.y_std}
    facts = {
        "row": list(task.train.x.shape[1:]), "dtype": str(task.train.x.dtype).removeprefix("torch."),
        "name": task.name, "classes": list(task.classes), "targets": list(task.train.y.shape[1:]), "real": task.real,
        "vocabulary": task.vocabulary, "likelihood": likelihood, "fills": task.fills(), "columns": list(task.columns),
    }  # fmt: skip
    facts |= {name: None if tensor is None else tensor.tolist() for name, tensor in tensors.items()}
    write_json(folder / "inputs.json", facts)


def read_predictor(folder: Path, device: torch.device) -> Predictor:
    """A run's network, with a task that holds no rows but knows everything about them."""
    experiment, file = stored_experiment(folder), Path(folder) / "inputs.json"
    try:
        facts = parse_json(read_file(file))
        x = torch.zeros(0, *facts["row"], dtype=_TYPES[facts["dtype"]])
        y = torch.zeros(0, *facts["targets"], dtype=torch.float32 if facts["real"] else torch.int64)
        names = ("mean", "std", "y_mean", "y_std")
        mean, std, y_mean, y_std = (None if facts[n] is None else torch.tensor(facts[n]).float() for n in names)
        columns = tuple(map(str, facts.get("columns", ())))  # runs of before they were kept have none
        plain = plain_network(experiment, facts["fills"], facts["name"])
    except OSError as error:
        raise RunError(
            f"{folder} has no inputs.json: its training is not finished, or it is a run on image folders, which cannot "
            f"predict files yet."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{file} is damaged: {brief(error)}. `slimbayes evaluate {folder}` writes it anew.") from error
    network, nothing = sb.load(plain, Path(folder) / "model").to(device), Split(x, y)
    classes, words = tuple(facts["classes"]), facts["vocabulary"]
    task = Task(facts["name"], nothing, nothing, None, Scaling(mean, std), classes, words, y_mean, y_std, columns)
    return Predictor(experiment, network, task.to(device), facts["likelihood"])


def fitted(x: Tensor, task: Task, source: str) -> Tensor:
    """Rows in the shape and type that the network was trained on, or an error that says what does not fit."""
    assert isinstance(task.test, Split)
    like = task.test.x
    if not x.numel() or x.is_complex():
        raise ValueError(
            f"{source}: real numbers are needed, of at least one row, got {x.dtype} of shape {tuple(x.shape)}."
        )
    if task.images:
        x = _as_images(x, like.shape[1:])
    if x.shape[1:] != like.shape[1:]:
        raise ValueError(
            f"{source}: each row must have shape {tuple(like.shape[1:])}, as in training, got {tuple(x.shape[1:])}."
        )
    _refuse(~x.isfinite(), f"{source}: row {{}} holds NaN or infinity, so nothing can be said about it.")
    if task.images and x.is_floating_point():
        low, high = float(x.min()), float(x.max())
        if low < 0 or high > 1:
            raise ValueError(f"{source}: images must be bytes, or numbers in [0, 1], got {low:g} to {high:g}.")
        return (x * 255).round().to(torch.uint8)
    if not like.is_floating_point():  # bytes and words
        most, wide = 255 if like.dtype == torch.uint8 else task.vocabulary - 1, x.double()
        outside = (wide != wide.round()) | (wide < 0) | (wide > most)
        _refuse(outside, f"{source}: row {{}} holds other numbers than the whole ones from 0 to {most}.")
    return x.to(like.dtype)


def _as_images(x: Tensor, shape: torch.Size) -> Tensor:
    """Images (N, C, H, W) from ones with their colours last, three equal colours, or no axis for the only one."""
    if x.dim() == 4 and x.shape[1:] != shape and x.movedim(-1, 1).shape[1:] == shape:
        x = x.movedim(-1, 1)
    if x.dim() == 4 and x.shape[1] == 3 and shape[0] == 1:
        x = x.float().mean(1, keepdim=True).round().to(x.dtype)
    return x.unsqueeze(1) if x.dim() == 3 and shape[0] == 1 else x


def _refuse(bad: Tensor, message: str) -> None:
    found = bad.flatten(1).any(1).nonzero()
    if len(found):
        raise ValueError(message.format(int(found[0])))


# --- reading files ---


def read_rows(file: Path, columns: Sequence[str] = ()) -> Tensor:
    """Rows of a file: an array of .npy or of .npz (named x, or its only one), numbers of a .csv, or images.

    `columns` are the training data's names, if they had any: a csv with names must have these, and gets their order.
    """
    if not file.exists():
        raise FileNotFoundError(f"{file} is not there.")
    if file.is_dir() or file.suffix.lower() in _IMAGES:
        return _read_images(file)
    if file.suffix == ".csv":
        return _read_csv(file, columns)
    if file.suffix not in (".npy", ".npz"):
        raise ValueError(f"{file}: rows come as .npy, .npz, .csv, an image or a folder of images.")
    try:
        with open(file, "rb") as handle:  # numpy leaves a damaged file open
            found = np.load(handle, allow_pickle=False)
            if file.suffix == ".npz":
                names = list(found)
                if "x" not in names and len(names) != 1:
                    raise ValueError(f"it has the arrays {', '.join(names) or 'none'}, and needs one named x")
                found = found["x" if "x" in names else names[0]]
        return torch.from_numpy(np.ascontiguousarray(found, found.dtype.newbyteorder("=")))
    except (ValueError, TypeError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{file} cannot be read: {error}.") from error


def _read_images(path: Path) -> Tensor:
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.suffix.lower() in _IMAGES)
    if not files:
        raise ValueError(f"{path} holds no image that ends in {', '.join(_IMAGES)}.")
    images = [decode(file) for file in files]
    shapes = {tuple(image.shape) for image in images}
    if len(shapes) > 1:
        raise ValueError(f"{path}: images must have one size, got {sorted(shapes)[:4]}.")
    return torch.stack(images)


def _read_csv(file: Path, columns: Sequence[str]) -> Tensor:
    """Rows of a csv in the order of `columns`. A first line of numbers is a row, unless they are the columns' names."""
    rows = []
    with open(file, newline="", encoding="utf-8-sig") as handle:
        lines = csv.reader(handle)
        first = [cell.strip() for cell in next(lines, [])]
        names = [] if _is_row(first, columns, file) else first
        order = _order(names, columns, file) if names and columns else range(len(first))
        for line in filter(None, lines if names else chain([first], lines)):
            try:
                if len(line) != len(first):
                    wanted = f"{len(first)} {'column names' if names else 'in the first row'}"
                    raise ValueError(f"{len(line)} cells, but there are {wanted}")
                rows.append([float(line[i]) for i in order])
            except ValueError as error:
                raise ValueError(f"{file}, line {lines.line_num}: {error}.") from error
    if not rows:
        raise ValueError(f"{file} has no rows{' below its line of column names' if names else ''}.")
    return torch.tensor(rows)


def _is_row(first: Sequence[str], columns: Sequence[str], file: Path) -> bool:
    """Whether the first line holds numbers. Where no names are known, one of numbers and words is neither."""
    numbers = []
    for cell in first:
        with contextlib.suppress(ValueError):
            float(cell)
            numbers.append(cell)
    if 0 < len(numbers) < len(first) and not columns:
        raise ValueError(
            f"{file}, line 1 holds numbers ({numbers[0]!r}) and other cells, so it is neither a row nor column names. "
            f"Fill in its missing cells, or give every column a name that is no number."
        )
    return bool(first) and len(numbers) == len(first) and set(first) != set(columns)


def _order(names: Sequence[str], columns: Sequence[str], file: Path) -> list[int]:
    """Where the training data's columns are among a file's names: all of them must be there, once, and no others."""
    faults = {
        "missing": [c for c in columns if c not in names],
        "not known to the run": [n for n in names if n not in columns],
        "there twice": sorted({n for n in names if names.count(n) > 1}),
    }
    if message := "; ".join(f"{what}: {', '.join(map(repr, found))}" for what, found in faults.items() if found):
        raise ValueError(
            f"{file}, line 1: columns {message}. The run was trained on {', '.join(columns)}: name these, in any order."
        )
    return [names.index(column) for column in columns]
