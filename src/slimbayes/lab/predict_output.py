"""Predictions as columns, written block by block to a .csv, .json or .npz file that is whole or not there.

Sizes: n rows of a block, N of all.
"""

from __future__ import annotations

import csv
import json
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from slimbayes.files import replacing
from slimbayes.prediction.prediction import Prediction
from slimbayes.train.likelihoods import LIKELIHOODS

Columns = dict[str, np.ndarray]  # names and (n,) values; labels are numbers of classes until they are written
LABEL = "label"


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


def class_names(classes: Sequence[str], count: int) -> Sequence[str]:
    """The names of classes, or their numbers where they have none."""
    return classes or tuple(map(str, range(count)))


def write_columns(file: Path, blocks: Iterable[Columns], classes: Sequence[str]) -> int:
    """Write blocks of columns to a file, at once for whoever reads it; returns how many rows there were."""
    with replacing(file) as draft:
        if file.suffix == ".npz":
            return _write_npz(draft, blocks, classes)
        with open(draft, "w", encoding="utf8", newline="") as out:
            return (_write_json if file.suffix == ".json" else _write_csv)(out, _counted(blocks, classes))


def _counted(blocks: Iterable[Columns], classes: Sequence[str]) -> Iterator[tuple[list[str], list[tuple[object, ...]]]]:
    """Names of the columns and lines of each block."""
    for columns in blocks:
        names = class_names(classes, len(columns))
        cells = [
            [names[i] for i in values.tolist()] if name == LABEL else values.tolist()
            for name, values in columns.items()
        ]
        yield list(columns), list(zip(*cells, strict=True))


def _write_csv(out: IO[str], blocks: Iterable[tuple[list[str], list[tuple[object, ...]]]]) -> int:
    writer, rows = csv.writer(out, lineterminator="\n"), 0
    for names, lines in blocks:
        if not rows:
            writer.writerow(names)
        writer.writerows(lines)
        rows += len(lines)
    return rows


def _write_json(out: IO[str], blocks: Iterable[tuple[list[str], list[tuple[object, ...]]]]) -> int:
    rows = 0
    for names, lines in blocks:
        text = json.dumps([dict(zip(names, line, strict=True)) for line in lines], indent=1)
        out.write(("," if rows else "[") + text[1:-2])  # a list without its brackets
        rows += len(lines)
    out.write("\n]\n")
    return rows


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
