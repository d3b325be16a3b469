"""Predicting the rows of a file with a finished run, from the run's directory alone: training data are not needed.

Rows come block by block, never all of a large file: an array of .npy or .npz, numbers of a .csv, a table, or images.
Predictions are columns, written block by block to a .csv, .json or .npz file that is whole or not there.

Sizes: n rows of a block, N of all.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from slimbayes.columns import number_in
from slimbayes.files import replacing
from slimbayes.prediction.prediction import Prediction
from slimbayes.train.likelihoods import LIKELIHOODS
from slimbayes.untrusted import open_file
from slimbayes_lab.data import Split
from slimbayes_lab.data.archives import DAMAGE, checked_zip, npy_blocks
from slimbayes_lab.data.folders import ENDINGS, decode, read_square
from slimbayes_lab.data.table_files import cell_lines, number_blocks
from slimbayes_lab.execution import Execution
from slimbayes_lab.runs.predictor import Predictor
from slimbayes_lab.runs.trained import read_predictor
from slimbayes_lab.tasks.rows import check_names
from slimbayes_lab.tasks.task import Task

Columns = dict[str, np.ndarray]  # names and (n,) values
# Rows of a folder. The decoder takes ENDINGS and refuses the others: to pass one over would shift all rows after it.
_IMAGES = (*ENDINGS, ".webp", ".bmp", ".gif", ".tif", ".tiff")
_TOGETHER = 64  # images of a block


def predict_file(
    run: Path,
    inputs: Path,
    output: Path,
    draws: int = 16,
    accelerator: Any = "auto",
    level: float = 0.9,
) -> int:
    """Predict the rows of a file and write predictions, both in pieces; returns how many rows there were.

    `level` is the probability that intervals of real targets hold a new one.
    Rows that hold NaN or infinity are refused by number: a prediction for them would be a guess.
    """
    if output.suffix not in (".csv", ".json", ".npz"):
        raise ValueError(f"Predictions go to .csv, .json or .npz, got {output}.")
    predictor = read_predictor(run, Execution(accelerator=accelerator).device)
    batches = regrouped(_rows(inputs, predictor), predictor.experiment.evaluate.batch)
    # Nobody looks at the targets.
    examples = ((x, x.new_zeros(len(x))) for x in batches)
    made = predictor.predict_batches(
        examples, f"the rows of {inputs}", "predict", [draws]
    )
    classes = predictor.task.classes
    columns = (as_columns(by_draws[draws], classes, level) for by_draws, _ in made)
    return write_columns(output, columns)


def _rows(inputs: Path, predictor: Predictor) -> Iterator[Tensor]:
    """Rows of a file as the network takes them, read as the run's own data were."""
    data, task, first = predictor.experiment.data, predictor.task, 0
    if task.reader is not None:
        blocks = task.reader.blocks(inputs)
    else:
        size = data.image_size if data.images else None
        blocks = row_blocks(inputs, task.columns, size)
    for block in blocks:
        yield check_and_fit(block, task, str(inputs), first)
        first += len(block)


# --- what is read ---


def row_blocks(
    file: Path,
    columns: Sequence[str] = (),
    size: int | None = None,
) -> Iterator[Tensor]:
    """Rows of a file: an array of .npy or of .npz (named x, or its only one), numbers of a .csv, or images.

    Args:
        columns: the training data's names, if they had any: a csv with names must have these, and gets their order.
        size: make images squares of so many pixels, as those of training were; by default they stay as they are.

    Shape: blocks of (n, ...), at least one.
    """
    if not os.path.lexists(file):
        raise FileNotFoundError(f"{file} is not there.")
    if file.is_dir() or file.suffix.lower() in _IMAGES:
        return _image_blocks(
            file, decode if size is None else partial(read_square, size=size)
        )
    if file.suffix == ".csv":
        return _csv_blocks(file, columns)
    if file.suffix not in (".npy", ".npz"):
        raise ValueError(
            f"{file}: rows come as .npy, .npz, .csv, an image or a folder of images."
        )
    return _array_blocks(file)


def regrouped(blocks: Iterator[Tensor], size: int) -> Iterator[Tensor]:
    """The same rows, `size` at a time."""
    kept: Tensor | None = None
    for block in blocks:
        *whole, kept = (block if kept is None else torch.cat([kept, block])).split(size)
        yield from whole
    if kept is not None:
        yield kept


def _array_blocks(file: Path) -> Iterator[Tensor]:
    with contextlib.ExitStack() as stack:
        try:
            if file.suffix == ".npz":
                archive = stack.enter_context(checked_zip(file, limit=math.inf))
                names = [name.removesuffix(".npy") for name in archive.namelist()]
                if "x" not in names and len(names) != 1:
                    raise ValueError(
                        f"it has the arrays {', '.join(names) or 'none'}, and needs one named x"
                    )
                entry = archive.getinfo(f"{'x' if 'x' in names else names[0]}.npy")
                stream, size = stack.enter_context(archive.open(entry)), entry.file_size
            else:
                stream = stack.enter_context(open_file(file))
                size = os.fstat(stream.fileno()).st_size
            yield from npy_blocks(stream, size)
        except DAMAGE as error:
            raise ValueError(f"{file} cannot be read: {error}.") from error


def _image_blocks(path: Path, read: Callable[[Path], Tensor]) -> Iterator[Tensor]:
    files = (
        sorted(p for p in path.iterdir() if p.suffix.lower() in _IMAGES)
        if path.is_dir()
        else [path]
    )
    if not files:
        raise ValueError(f"{path} holds no image that ends in {', '.join(ENDINGS)}.")
    first = read(files[0]).shape
    for start in range(0, len(files), _TOGETHER):
        images = [read(file) for file in files[start : start + _TOGETHER]]
        shapes = {tuple(image.shape) for image in images} | {tuple(first)}
        if len(shapes) > 1:
            raise ValueError(
                f"{path}: images must have one size, got {sorted(shapes)[:4]}."
            )
        yield torch.stack(images)


def _csv_blocks(file: Path, columns: Sequence[str]) -> Iterator[Tensor]:
    """Rows of a csv in the order of `columns`. A first line of numbers is a row, unless they are the columns' names."""
    first = next(cell_lines(file), (1, []))[1]
    named = columns and (
        set(first) == set(columns) or any(number_in(cell) is None for cell in first)
    )
    if named:
        check_names(f"{file}, line 1", first, columns)
    for block in number_blocks(
        file, columns if named else None, True if named else None
    ):
        yield torch.from_numpy(block)


# --- what a network takes ---


def check_and_fit(x: Tensor, task: Task, source: str, first: int = 0) -> Tensor:
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
    _refuse(
        ~x.isfinite(),
        first,
        source,
        "NaN or infinity, so nothing can be said about it",
    )
    if task.images and x.is_floating_point():
        low, high = float(x.min()), float(x.max())
        if low < 0 or high > 1:
            raise ValueError(
                f"{source}: images must be bytes, or numbers in [0, 1], got {low:g} to {high:g}."
            )
        return (x * 255).round().to(torch.uint8)
    if not like.is_floating_point():  # bytes and words
        most, wide = (
            255 if like.dtype == torch.uint8 else task.vocabulary - 1,
            x.double(),
        )
        outside = (wide != wide.round()) | (wide < 0) | (wide > most)
        _refuse(
            outside,
            first,
            source,
            f"other numbers than the whole ones from 0 to {most}",
        )
    return x.to(like.dtype)


def _as_images(x: Tensor, shape: torch.Size) -> Tensor:
    """Images (N, C, H, W) from ones with their colours last, three equal colours, or no axis for the only one."""
    if x.dim() == 4 and x.shape[1:] != shape and x.movedim(-1, 1).shape[1:] == shape:
        x = x.movedim(-1, 1)
    if x.dim() == 4 and x.shape[1] == 3 and shape[0] == 1:
        x = x.float().mean(1, keepdim=True).round().to(x.dtype)
    return x.unsqueeze(1) if x.dim() == 3 and shape[0] == 1 else x


def _refuse(bad: Tensor, first: int, source: str, what: str) -> None:
    """Name the first row with something bad in it, if there is one."""
    found = bad.flatten(1).any(1).nonzero()
    if len(found):
        raise ValueError(f"{source}: row {first + int(found[0])} holds {what}.")


# --- what is written ---


def as_columns(prediction: Prediction, classes: Sequence[str], level: float) -> Columns:
    """Predictions as columns: label, probabilities and uncertainties; or mean, deviations and the ends of the central
    interval that holds a real target with probability `level`."""

    def whole(name: str) -> Tensor:
        return getattr(prediction, name).double().cpu()

    if not LIKELIHOODS[prediction.likelihood].discrete:
        # In float64 an interval does not depend on the other rows of a block.
        low, high = prediction.to(torch.float64).interval(level)
        found = {
            "mean": whole("mean"),
            "std": whole("std"),
            "epistemic_std": whole("epistemic").sqrt(),
            "low": low.cpu(),
            "high": high.cpu(),
        }
        targets = range(found["mean"].shape[1])
        ends = [f"_{target}" if len(targets) > 1 else "" for target in targets]
        return {
            f"{name}{ends[i]}": values[:, i].numpy()
            for i in targets
            for name, values in found.items()
        }
    probs = whole("probs")
    probs = torch.stack([1 - probs, probs], 1) if probs.dim() == 1 else probs
    confidence, label = probs.max(1)
    names = np.array(classes or list(map(str, range(probs.shape[1]))))
    columns = {"label": names[label.numpy()], "confidence": confidence.numpy()}
    columns |= {
        name: whole(name).numpy() for name in ("entropy", "aleatoric", "epistemic")
    }
    return columns | {
        f"p({name})": probs[:, i].numpy() for i, name in enumerate(names.tolist())
    }


def write_columns(file: Path, blocks: Iterable[Columns]) -> int:
    """Write blocks of columns to a file, at once for whoever reads it; returns how many rows there were."""
    with replacing(file) as draft:
        if file.suffix == ".npz":
            return _write_npz(draft, blocks)
        with open(draft, "w", encoding="utf8", newline="") as out:
            write, rows = _write_json if file.suffix == ".json" else _write_csv, 0
            for columns in blocks:
                lines = list(
                    zip(*(values.tolist() for values in columns.values()), strict=True)
                )
                write(out, list(columns), lines, rows == 0)
                rows += len(lines)
            out.write("\n]\n" if file.suffix == ".json" else "")
            return rows


def _write_csv(
    out: IO[str], names: list[str], lines: list[tuple[Any, ...]], first: bool
) -> None:
    csv.writer(out, lineterminator="\n").writerows([names, *lines] if first else lines)


def _write_json(
    out: IO[str], names: list[str], lines: list[tuple[Any, ...]], first: bool
) -> None:
    text = json.dumps([dict(zip(names, line, strict=True)) for line in lines], indent=1)
    out.write(("[" if first else ",") + text[1:-2])  # a list without its brackets


def _write_npz(draft: Path, blocks: Iterable[Columns]) -> int:
    """An archive has one column after the other, so blocks wait in a file without a name, which nothing outlives."""
    rows, kinds = 0, dict[str, np.dtype[Any]]()
    pieces: dict[
        str, list[tuple[int, int]]
    ] = {}  # of each column, in the file: where, and how many bytes
    with tempfile.TemporaryFile(dir=draft.parent) as waiting:
        for columns in blocks:
            for name, values in columns.items():
                kinds[name] = values.dtype
                pieces.setdefault(name, []).append((waiting.tell(), values.nbytes))
                waiting.write(values.tobytes())
            rows += len(values)
        with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, kind in kinds.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as out:
                    header = {
                        "descr": kind.str,
                        "fortran_order": False,
                        "shape": (rows,),
                    }
                    np.lib.format.write_array_header_1_0(out, header)
                    for start, size in pieces[name]:
                        waiting.seek(start)
                        out.write(waiting.read(size))
    return rows
