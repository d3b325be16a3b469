"""What can be done with a finished run: evaluate it anew, and predict rows of one's own."""

from __future__ import annotations

import csv
import json
import zipfile
import zlib
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimbayes.data import Split
from slimbayes.files import write_text
from slimbayes.lab.bars import Bars
from slimbayes.lab.config_files import merged, parse_override, validate
from slimbayes.lab.execution import Execution
from slimbayes.lab.inputs import read_inputs, write_inputs
from slimbayes.lab.judge import Judge
from slimbayes.lab.records import load_run, write_record
from slimbayes.lab.task import Task
from slimbayes.prediction.prediction import Prediction
from slimbayes.report.record import Record

_IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


def evaluate_again(
    run: Path, overrides: Sequence[str] = (), accelerator: Any = "auto", data_dir: Path | None = None
) -> Record:
    """Judge a trained run, with other choices for its evaluation if asked, and write its record anew."""
    execution = Execution(accelerator=accelerator, data_dir=data_dir)
    experiment, network, task, likelihood = load_run(run, execution)
    tree = experiment.resolved
    for override in overrides:
        if not override.strip().startswith("evaluate."):
            raise ValueError(f"Only evaluate.* can be changed after training, got {override!r}.")
        tree = merged(tree, parse_override(override))
    write_inputs(run, task, likelihood)
    with Bars(experiment.name) as bars:
        return write_record(run, execution, bars, network, task, likelihood, experiment=validate(tree, str(run)))


def predict_file(run: Path, inputs: Path, output: Path, draws: int = 16, accelerator: Any = "auto") -> int:
    """Predict the rows of a file and write predictions; returns how many rows there were. The training data are not needed.

    Rows that hold NaN or infinity are refused by number: a prediction for them would be a guess.
    """
    if output.suffix not in (".csv", ".json", ".npz"):
        raise ValueError(f"Predictions go to .csv, .json or .npz, got {output}.")
    known = read_inputs(run, Execution(accelerator=accelerator).device)
    task = known.task
    x = fitted(read_rows(inputs, task.columns), task, str(inputs))
    judge = Judge(known.network, task, known.likelihood, known.experiment)
    parts = [found[draws] for found, _ in judge.predictions(Split(x, torch.zeros(len(x))), "predict", [draws])]
    columns = table_of(parts, task)
    if output.suffix == ".npz":
        import numpy as np

        np.savez_compressed(output, **{name: np.asarray(values) for name, values in columns.items()})
    elif output.suffix == ".json":
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        write_text(output, json.dumps(rows, indent=1) + "\n")
    else:
        with open(output, "w", newline="", encoding="utf8") as handle:
            writer = csv.writer(handle)
            writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))
    return len(x)


def table_of(parts: Sequence[Prediction], task: Task) -> dict[str, list[Any]]:
    """Predictions as columns: label, probabilities and uncertainties of classes; mean and standard deviations of real targets."""
    join = lambda name: torch.cat([getattr(p, name).double() for p in parts]).cpu()  # noqa: E731
    if parts[0].likelihood == "gaussian":
        columns: dict[str, list[Any]] = {}
        mean, std, epistemic = join("mean"), join("std"), join("epistemic").sqrt()
        for target in range(mean.shape[1]):
            end = f"_{target}" if mean.shape[1] > 1 else ""
            columns |= {
                f"{n}{end}": t[:, target].tolist()
                for n, t in (("mean", mean), ("std", std), ("epistemic_std", epistemic))
            }
        return columns
    probs = join("probs")
    probs = torch.stack([1 - probs, probs], 1) if probs.dim() == 1 else probs
    names = task.classes or tuple(map(str, range(probs.shape[1])))
    label = probs.argmax(1)
    columns = {"label": [names[i] for i in label.tolist()], "confidence": probs.max(1).values.tolist()}
    columns |= {name: join(name).tolist() for name in ("entropy", "aleatoric", "epistemic")}
    return columns | {f"p({name})": probs[:, i].tolist() for i, name in enumerate(names)}


def read_rows(file: Path, columns: Sequence[str] = ()) -> Tensor:
    """Rows of a file: an array of .npy or of .npz (named x, or its only one), numbers of a .csv, or one or more images.

    `columns` are the training data's names, if they had any: a csv with names must have these, and gets their order.
    """
    import numpy as np

    if not file.exists():
        raise FileNotFoundError(f"{file} is not there.")
    if file.is_dir() or file.suffix.lower() in _IMAGES:
        return _images(file)
    if file.suffix == ".csv":
        return _numbers(file, columns)
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


def _numbers(file: Path, columns: Sequence[str]) -> Tensor:
    """Rows of a csv in the order of `columns`. A first line of numbers is a row, unless they are the columns' names."""
    rows = []
    with open(file, newline="", encoding="utf-8-sig") as handle:
        lines = csv.reader(handle)
        first = [cell.strip() for cell in next(lines, [])]
        names = [] if _is_row(first, columns, file) else first
        order = _order(names, columns, file) if names and columns else range(len(first))
        for line in lines if names else chain([first], lines):
            if not line:
                continue
            if len(line) != len(first):
                wanted = f"{len(first)} {'column names' if names else 'in the first row'}"
                raise ValueError(f"{file}, line {lines.line_num}: {len(line)} cells, but there are {wanted}.")
            try:
                rows.append([float(line[i]) for i in order])
            except ValueError as error:
                raise ValueError(f"{file}, line {lines.line_num}: {error}.") from error
    if not rows:
        raise ValueError(f"{file} has no rows{' below its line of column names' if names else ''}.")
    return torch.tensor(rows)


def _is_row(first: Sequence[str], columns: Sequence[str], file: Path) -> bool:
    """Whether the first line holds numbers. Where no names are known, one of numbers and words is neither."""
    if columns and set(first) == set(columns):
        return False
    numbers = [cell for cell in first if _is_number(cell)]
    if numbers and len(numbers) < len(first) and not columns:
        raise ValueError(
            f"{file}, line 1 holds numbers ({numbers[0]!r}) and other cells, so it is neither a row nor column names. "
            f"Fill in its missing cells, or give every column a name that is no number."
        )
    return bool(first) and len(numbers) == len(first)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _order(names: Sequence[str], columns: Sequence[str], file: Path) -> list[int]:
    """Where the training data's columns are among a file's names: all of them must be there, once, and no others."""
    twice = sorted({name for name in names if names.count(name) > 1})
    missing, unknown = [c for c in columns if c not in names], [n for n in names if n not in columns]
    faults = [("missing", missing), ("not known to the run", unknown), ("there twice", twice)]
    told = "; ".join(f"{what}: {', '.join(map(repr, found))}" for what, found in faults if found)
    if told:
        known = ", ".join(columns)
        raise ValueError(f"{file}, line 1: columns {told}. The run was trained on {known}: name these, in any order.")
    return [names.index(column) for column in columns]


def _images(path: Path) -> Tensor:
    from slimbayes.data.folders import decode

    files = (
        [path]
        if path.is_file()
        else sorted((p for p in path.iterdir() if p.suffix.lower() in _IMAGES), key=lambda p: p.name)
    )
    if not files:
        raise ValueError(f"{path} holds no image that ends in {', '.join(_IMAGES)}.")
    images = [decode(file) for file in files]
    shapes = {tuple(image.shape) for image in images}
    if len(shapes) > 1:
        raise ValueError(f"{path}: images must have one size, got {sorted(shapes)[:4]}.")
    return torch.stack(images)


def fitted(x: Tensor, task: Task, source: str) -> Tensor:
    """Rows in the shape and type that the network was trained on, or an error that says what does not fit."""
    assert isinstance(task.test, Split)
    if not x.numel() or x.is_complex():
        raise ValueError(
            f"{source}: real numbers are needed, of at least one row, got {x.dtype} of shape {tuple(x.shape)}."
        )
    like = task.test.x
    if task.images and x.dim() == 4 and x.shape[1:] != like.shape[1:] and x.movedim(-1, 1).shape[1:] == like.shape[1:]:
        x = x.movedim(-1, 1)  # images with their colours last
    if task.images and x.dim() == 4 and x.shape[1] == 3 and like.shape[1] == 1:
        x = x.float().mean(1, keepdim=True).round().to(x.dtype)
    if task.images and x.dim() == 3 and like.shape[1] == 1:
        x = x.unsqueeze(1)
    if x.shape[1:] != like.shape[1:]:
        raise ValueError(
            f"{source}: each row must have shape {tuple(like.shape[1:])}, as in training, got {tuple(x.shape[1:])}."
        )
    if x.is_floating_point():
        bad = (~x.flatten(1).isfinite().all(1)).nonzero()
        if len(bad):
            raise ValueError(f"{source}: row {int(bad[0])} holds NaN or infinity, so nothing can be said about it.")
        if task.images:
            if float(x.min()) < 0 or float(x.max()) > 1:
                raise ValueError(
                    f"{source}: images must be bytes, or numbers in [0, 1], got {float(x.min()):g} to {float(x.max()):g}."
                )
            return (x * 255).round().to(torch.uint8)
        if like.is_floating_point():
            return x.float()
    # Bytes and words: whole numbers that were there in training.
    most = 255 if like.dtype == torch.uint8 else task.vocabulary - 1
    wide = x.double() if not like.is_floating_point() else x[:0]
    bad = ((wide != wide.round()) | (wide < 0) | (wide > most)).flatten(1).any(1).nonzero()
    if len(bad):
        raise ValueError(f"{source}: row {int(bad[0])} holds other numbers than the whole ones from 0 to {most}.")
    return x.to(like.dtype)
