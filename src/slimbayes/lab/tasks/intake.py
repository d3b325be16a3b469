"""The one door for data: rows are looked at and named by a digest before anything is trained on them.

Sizes: N rows, P columns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimbayes.data import Dataset, Split, load, load_bags
from slimbayes.data.catalog import find
from slimbayes.data.folders import ImageFolder
from slimbayes.errors import brief
from slimbayes.lab.configs.experiment import Data
from slimbayes.lab.execution import generator

_WHOLE = 256 << 20  # bytes of a tensor that are all read
_BLOCK, _BLOCKS = 64 << 10, 1024  # bytes of a block, and how many are read of larger ones
_FILES = 4096  # pictures of a folder whose sizes are read
_AT_ONCE = 1 << 20  # numbers that are looked at together


def open_data(
    chosen: Data, root: Path | str | None = None, dataset: Dataset | None = None
) -> tuple[Dataset, tuple[str, ...]]:
    """The data set of a config, and the names of the splits that are trained, tested and validated on, if one is named:
    one for all in tables."""
    if dataset is None and chosen.source is None and chosen.name.startswith("uci/"):
        return load(chosen.name, root), ("all",)
    data = dataset or _opened(chosen, root)
    named = (chosen.validation,) if isinstance(chosen.validation, str) else ()
    splits = ("train", "test" if "test" in data.splits else "val", *named)
    for name in splits:
        if name not in data.splits:
            has = ", ".join(data.splits)
            raise ValueError(
                f"{data.name} has no split {name!r}, so it cannot be trained and tested on; it has: {has}."
            )
    return data, splits


@lru_cache(maxsize=2)
def _bags(name: str, root: Path | str | None, stamps: tuple[object, ...], **bags: Any) -> Dataset:
    """Bags of files with these stamps: tables look at the data of many runs, and bags take seconds to fill."""
    return load_bags(name, root, **bags)


def _opened(chosen: Data, root: Path | str | None) -> Dataset:
    if chosen.source is not None:
        from slimbayes.lab.tasks.own_data import open_own  # needs scikit-learn, which other sets do without

        return open_own(chosen, root)
    if chosen.bags is not None:
        files = find(chosen.name, root).files()
        stamps = tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
        return _bags(chosen.name, root, stamps, **chosen.bags.model_dump())
    return digits() if chosen.name == "digits" else load(chosen.name, root)


def digits() -> Dataset:
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, 1,000 to train on and 797 to test."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ImportError('The digits come with scikit-learn: pip install "slimbayes[lab]"') from error
    found = load_digits()
    x = torch.tensor(found.images * (255 / 16)).round().to(torch.uint8).unsqueeze(1)
    y = torch.tensor(found.target, dtype=torch.int64)
    order = torch.randperm(len(y), generator=generator(0, "digits"))
    x, y = x[order], y[order]
    splits = {"train": Split(x[:1000], y[:1000]), "test": Split(x[1000:], y[1000:])}
    return Dataset("digits", splits, tuple(map(str, range(10))))


# --- which rows they are ---


def data_digest(data: Dataset, splits: Sequence[str]) -> str:
    """sha256 of the rows of a data set, of their shapes and types, and of the names of its classes.

    It is cheap for large sets, and misses what that costs: of a tensor above 256 MiB only 1,024 blocks of 64 KiB are
    read, spread evenly, the first and the last among them; of folders of pictures the names, the labels and the sizes
    of 4,096 files spread evenly, not the pixels. What a run is evaluated on beside its test rows is not part of it.

    Example:
        >>> rows = Split(torch.zeros(2, 3), torch.tensor([0, 1]))
        >>> data = Dataset("toy", {"train": rows, "test": rows})
        >>> data_digest(data, ["train"])[:8]
        '3c8827dc'
    """
    found = hashlib.sha256(repr(data.named).encode())
    for name in splits:
        rows = data.splits[name]
        parts = _parts(rows.x, rows.y) if isinstance(rows, Split) else _files(rows)
        found.update(name.encode())
        for part in parts:
            found.update(part)
    return found.hexdigest()


def _parts(*tensors: Tensor) -> Iterator[bytes]:
    for tensor in tensors:
        yield repr((tuple(tensor.shape), str(tensor.dtype))).encode()
        row = tensor[:1].numel() * tensor.element_size()
        size, whole = max(1, _BLOCK // max(1, row)), row * len(tensor) <= _WHOLE
        first = range(0, len(tensor), size) if whole else _spread(max(0, len(tensor) - size), _BLOCKS)
        for start in first:
            piece = tensor[start : start + size].detach().cpu().contiguous()
            yield piece.reshape(-1).view(torch.uint8).numpy().tobytes()


def _files(rows: ImageFolder) -> Iterator[bytes]:
    yield repr((rows.y.shape, str(rows.y.dtype))).encode() + rows.y.numpy().tobytes()
    for path in rows.paths:
        yield b"/".join(part.encode() for part in path.parts[-2:])
    for index in _spread(len(rows.paths) - 1, _FILES):
        yield str(rows.paths[index].stat().st_size).encode()


def _spread(last: int, count: int) -> list[int]:
    """`count` whole numbers from 0 to `last`, evenly spread; all of them where there are no more."""
    return sorted({round(i * last / (count - 1)) for i in range(count)}) if last >= 0 else []


# --- rows that cannot be trained or judged on ---


def check_data(data: Dataset, splits: Sequence[str], allow_nonfinite: bool = False) -> None:
    """Refuse rows that are empty, not finite, of different widths, or whose labels are out of range or all alike.

    The error names the data set, the split, and the row and column where there is one, counted from zero.

    Args:
        splits: the names of those that are used; the first is trained on.
        allow_nonfinite: let inputs be NaN or infinite; targets never may.
    """
    shapes = {}
    for name in splits:
        rows, place = data.splits[name], f"{data.name}, {name}"
        if not len(rows):
            raise ValueError(f"{data.name}: the {name} split has no rows.")
        if isinstance(rows, ImageFolder):
            continue
        check_split(rows, place, data.columns, len(data.classes) or None, allow_nonfinite)
        shapes[name] = tuple(rows.x.shape[1:])
    if len(set(shapes.values())) > 1:
        told = " and ".join(f"{name} rows of shape {shape}" for name, shape in shapes.items())
        raise ValueError(f"{data.name} has {told}: they must be alike.")
    first = data.splits[splits[0]]
    if isinstance(first, Split) and _is_label(first.y) and int(first.y.min()) == int(first.y.max()):
        raise ValueError(
            f"{data.name}, {splits[0]}: all {len(first):,} labels are {int(first.y[0])}, and there is nothing to learn "
            f"from one class."
        )


def check_split(
    rows: Split, place: str, columns: Sequence[str] = (), classes: int | None = None, allow_nonfinite: bool = False
) -> None:
    """Refuse one split whose inputs or targets are no finite numbers, or whose labels are not below `classes`."""
    for what, values in (("inputs", rows.x), ("targets", rows.y)):
        if not isinstance(values, Tensor) or values.is_complex():
            got = values.dtype if isinstance(values, Tensor) else type(values).__name__
            raise TypeError(f"{place}: {what} must be a tensor of real numbers, got {got}.")
    if not rows.x.numel():
        raise ValueError(f"{place}: rows have no columns, got inputs of shape {tuple(rows.x.shape)}.")
    if not allow_nonfinite:
        remedy = "Fill it in or drop the row, or set data.allow_nonfinite if the network can take it."
        _refuse(rows.x, columns, f"{place} {{}}: the input is {{}}. {remedy}")
    _refuse(rows.y, (), f"{place} {{}}: the target is {{}}. Fill it in or drop the row.")
    if _is_label(rows.y):
        bad = (rows.y < 0) if classes is None else (rows.y < 0) | (rows.y >= classes)
        if len(found := bad.nonzero()):
            row = int(found[0, 0])
            allowed = "0 or more" if classes is None else f"one of 0..{classes - 1}"
            raise ValueError(f"{place} row {row}: the label {int(rows.y[row])} is not {allowed}. Drop such rows.")


def _is_label(y: Tensor) -> bool:
    return not y.is_floating_point() and y.dim() == 1


def _refuse(values: Tensor, columns: Sequence[str], message: str) -> None:
    """Raise a message about the first number that is not finite: where it is, and what."""
    if not values.is_floating_point():
        return
    size = max(1, _AT_ONCE // max(1, values[:1].numel()))
    for start in range(0, len(values), size):
        bad = (~values[start : start + size].isfinite()).nonzero()
        if len(bad):
            row, *rest = bad[0].tolist()
            value = float(values[start + row][tuple(rest)])
            raise ValueError(message.format(f"row {start + row}{_column(rest, columns)}", value))


def _column(index: Sequence[int], columns: Sequence[str]) -> str:
    if not index:
        return ""
    if len(index) == 1:
        return f", column {columns[index[0]]!r}" if columns else f", column {index[0]}"
    return f", at {tuple(index)}"


def check_names(place: str, names: Sequence[str], needed: Sequence[str], passed: Sequence[str] = ()) -> None:
    """Refuse columns unless all that are needed are there, once, and no others but those that may be passed over."""
    faults = {
        "missing": [name for name in needed if name not in names],
        "not known to the run": [name for name in names if name not in needed and name not in passed],
        "there twice": sorted({name for name in names if names.count(name) > 1}),
    }
    if message := "; ".join(f"{what}: {', '.join(map(brief, found[:10]))}" for what, found in faults.items() if found):
        known = ", ".join(map(brief, needed[:50]))
        raise ValueError(f"{place}: columns {message}. The run was trained on {known}: name these, in any order.")
