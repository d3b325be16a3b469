"""Predicting the rows of a file with a finished run, from the run's directory alone: training data are not needed.

Predictions are columns, written block by block to a .csv, .json or .npz file that is whole or not there.

Sizes: n rows of a block, N of all.
"""

from __future__ import annotations

import csv
import json
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from slimbayes.data import Split
from slimbayes.files import replacing
from slimbayes.lab.execution import Execution
from slimbayes.lab.finished.predict_input import regrouped, row_blocks
from slimbayes.lab.runs.fit import read_predictor
from slimbayes.lab.runs.predictor import Predictor
from slimbayes.lab.tasks.task import Task
from slimbayes.prediction.prediction import Prediction
from slimbayes.train.likelihoods import LIKELIHOODS

Columns = dict[str, np.ndarray]  # names and (n,) values; labels are numbers of classes until they are written
LABEL = "label"


def predict_file(
    run: Path, inputs: Path, output: Path, draws: int = 16, accelerator: Any = "auto", level: float = 0.9
) -> int:
    """Predict the rows of a file and write predictions, both in pieces; returns how many rows there were.

    `level` is the probability that intervals of real targets hold a new one.
    Rows that hold NaN or infinity are refused by number: a prediction for them would be a guess.
    """
    if output.suffix not in (".csv", ".json", ".npz"):
        raise ValueError(f"Predictions go to .csv, .json or .npz, got {output}.")
    predictor = read_predictor(run, Execution(accelerator=accelerator).device)
    classes, size = predictor.task.classes, predictor.experiment.evaluate.batch
    batches = ((x, x.new_zeros(len(x))) for x in regrouped(_rows(inputs, predictor), size))
    found = predictor.predict_batches(batches, f"the rows of {inputs}", "predict", [draws])
    return write_columns(output, (as_columns(made[draws], classes, level) for made, _ in found), classes)


def _rows(inputs: Path, predictor: Predictor) -> Iterator[Tensor]:
    """Rows of a file as the network takes them, read as the run's own data were."""
    data, task, first = predictor.experiment.data, predictor.task, 0
    blocks = (
        row_blocks(inputs, task.columns, data.allow_nonfinite, data.image_size if data.images else None)
        if task.own is None
        else task.own.blocks(inputs)
    )
    for block in blocks:
        yield check_and_fit(block, task, str(inputs), first, data.allow_nonfinite)
        first += len(block)


# --- what a network takes ---


def check_and_fit(x: Tensor, task: Task, source: str, first: int = 0, allow_nonfinite: bool = False) -> Tensor:
    """Rows in the shape and type that the network was trained on, or an error that says what does not fit.

    `first` is the number of the first row in its file.
    """
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
    if not allow_nonfinite:
        _refuse(~x.isfinite(), first, f"{source}: row {{}} holds NaN or infinity, so nothing can be said about it.")
    if task.images and x.is_floating_point():
        low, high = float(x.min()), float(x.max())
        if low < 0 or high > 1:
            raise ValueError(f"{source}: images must be bytes, or numbers in [0, 1], got {low:g} to {high:g}.")
        return (x * 255).round().to(torch.uint8)
    if not like.is_floating_point():  # bytes and words
        most, wide = 255 if like.dtype == torch.uint8 else task.vocabulary - 1, x.double()
        outside = (wide != wide.round()) | (wide < 0) | (wide > most)
        _refuse(outside, first, f"{source}: row {{}} holds other numbers than the whole ones from 0 to {most}.")
    return x.to(like.dtype)


def _as_images(x: Tensor, shape: torch.Size) -> Tensor:
    """Images (N, C, H, W) from ones with their colours last, three equal colours, or no axis for the only one."""
    if x.dim() == 4 and x.shape[1:] != shape and x.movedim(-1, 1).shape[1:] == shape:
        x = x.movedim(-1, 1)
    if x.dim() == 4 and x.shape[1] == 3 and shape[0] == 1:
        x = x.float().mean(1, keepdim=True).round().to(x.dtype)
    return x.unsqueeze(1) if x.dim() == 3 and shape[0] == 1 else x


def _refuse(bad: Tensor, first: int, message: str) -> None:
    found = bad.flatten(1).any(1).nonzero()
    if len(found):
        raise ValueError(message.format(first + int(found[0])))


# --- what is written ---


def as_columns(prediction: Prediction, classes: Sequence[str], level: float | None = None) -> Columns:
    """Predictions as columns: label, probabilities and uncertainties; or mean, deviations and, given a `level`, the
    ends of the central interval that holds a real target with this probability."""

    def whole(name: str) -> Tensor:
        return getattr(prediction, name).double().cpu()

    if not LIKELIHOODS[prediction.likelihood].discrete:
        found = {"mean": whole("mean"), "std": whole("std"), "epistemic_std": whole("epistemic").sqrt()}
        if level is not None:
            low, high = prediction.to(torch.float64).interval(level)  # in which other rows of a block do not matter
            found |= {"low": low.cpu(), "high": high.cpu()}
        targets = range(found["mean"].shape[1])
        ends = [f"_{target}" if len(targets) > 1 else "" for target in targets]
        return {f"{name}{ends[i]}": values[:, i].numpy() for i in targets for name, values in found.items()}
    probs = whole("probs")
    probs = torch.stack([1 - probs, probs], 1) if probs.dim() == 1 else probs
    confidence, label = probs.max(1)
    columns = {LABEL: label.numpy(), "confidence": confidence.numpy()}
    columns |= {name: whole(name).numpy() for name in ("entropy", "aleatoric", "epistemic")}
    return columns | {f"p({name})": probs[:, i].numpy() for i, name in enumerate(class_names(classes, probs.shape[1]))}


def as_lists(columns: Columns, classes: Sequence[str]) -> dict[str, list[Any]]:
    """Columns as lists of plain values, labels by name."""
    names = class_names(classes, len(columns))
    return {k: [names[i] for i in v.tolist()] if k == LABEL else v.tolist() for k, v in columns.items()}


def class_names(classes: Sequence[str], count: int) -> Sequence[str]:
    """The names of classes, or their numbers where they have none."""
    return classes or tuple(map(str, range(count)))


def write_columns(file: Path, blocks: Iterable[Columns], classes: Sequence[str]) -> int:
    """Write blocks of columns to a file, at once for whoever reads it; returns how many rows there were."""
    with replacing(file) as draft:
        if file.suffix == ".npz":
            return _write_npz(draft, blocks, classes)
        with open(draft, "w", encoding="utf8", newline="") as out:
            write, rows = _write_json if file.suffix == ".json" else _write_csv, 0
            for columns in blocks:
                lists = as_lists(columns, classes)
                write(out, list(lists), list(zip(*lists.values(), strict=True)), rows == 0)
                rows += len(next(iter(lists.values())))
            out.write("\n]\n" if file.suffix == ".json" else "")
            return rows


def _write_csv(out: IO[str], names: list[str], lines: list[tuple[Any, ...]], first: bool) -> None:
    csv.writer(out, lineterminator="\n").writerows([names, *lines] if first else lines)


def _write_json(out: IO[str], names: list[str], lines: list[tuple[Any, ...]], first: bool) -> None:
    text = json.dumps([dict(zip(names, line, strict=True)) for line in lines], indent=1)
    out.write(("[" if first else ",") + text[1:-2])  # a list without its brackets


def _write_npz(draft: Path, blocks: Iterable[Columns], classes: Sequence[str]) -> int:
    """An archive has one column after the other, so blocks wait in a file without a name, which nothing outlives."""
    sizes, names = [], []
    with tempfile.TemporaryFile(dir=draft.parent) as waiting:
        for columns in blocks:
            names = list(columns)
            waiting.write(np.stack([values.astype(np.float64) for values in columns.values()]).tobytes())
            sizes.append(len(columns[names[0]]))
        with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as archive:
            for index, name in enumerate(names):
                texts = np.array(class_names(classes, len(names))) if name == LABEL else None
                with archive.open(f"{name}.npy", "w", force_zip64=True) as out:
                    kind = np.dtype(np.float64) if texts is None else texts.dtype
                    header = {"descr": kind.str, "fortran_order": False, "shape": (sum(sizes),)}
                    np.lib.format.write_array_header_1_0(out, header)
                    for values in _column(waiting, index, len(names), sizes):
                        out.write((values if texts is None else texts[values.astype(int)]).tobytes())
    return sum(sizes)


def _column(waiting: IO[bytes], index: int, columns: int, sizes: Sequence[int]) -> Iterator[np.ndarray]:
    start = 0
    for size in sizes:
        waiting.seek(start + 8 * size * index)
        yield np.frombuffer(waiting.read(8 * size), np.float64)
        start += 8 * size * columns
