"""Reading data of one's own: a table, arrays, or a folder of pictures.

Sizes: N rows, d columns of numbers, c of categories.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slimbayes.data import Dataset, Split
from slimbayes.data.catalog import root_folder
from slimbayes.data.cells import Kind, number_in
from slimbayes.data.folders import ImageFolder, read_square
from slimbayes.data.table_files import frames, look
from slimbayes.errors import brief, did_you_mean
from slimbayes.lab.configs.experiment import Data
from slimbayes.lab.configs.own import feature_kind, target_is_class
from slimbayes.lab.tasks.own_table import OwnColumns, OwnTable, say_as_config, with_dates
from slimbayes.lab.tasks.task import hold_out
from slimbayes.sklearn.columns import Table
from slimbayes.untrusted import check_regular

_BYTES = 4 << 30  # of pictures in memory


def open_own(chosen: Data, root: Path | str | None) -> Dataset:
    """The data of a config that names a file: splits train and test, none of it scaled."""
    assert chosen.source is not None
    kind, text = chosen.source
    path = find_own(text, root)
    if kind == "images":
        return _pictures(path, chosen)
    return _arrays(path, chosen) if kind == "npz" else _table(path, chosen)


def find_own(text: str, root: Path | str | None) -> Path:
    """Where a path leads from here or, if nothing is there, from the data folder."""
    folders = [Path.cwd()]
    if root is not None or os.environ.get("SLIMBAYES_DATA"):
        folders.append(root_folder(root))
    found = next((place for folder in folders if (place := folder / os.path.expanduser(text)).exists()), None)
    if found is None:
        raise FileNotFoundError(f"{brief(text)} is not there, seen from {' or '.join(map(str, folders))}.")
    return found


def _splits(found: list[Split], chosen: Data) -> dict[str, Split]:
    """Rows to train and to test on, as they are or, of one split, as the config says."""
    train, test = found if len(found) == 2 else hold_out(found[0], "test", chosen.test, chosen)
    return {"train": train, "test": test}


# --- tables ---


def _table(path: Path, chosen: Data) -> OwnTable:
    found = look(path, chosen.header, chosen.decimal)
    names = {"target": [chosen.target], "categories": chosen.categories, "drop": chosen.drop}
    for option, wanted in names.items():
        for name in wanted:
            if name not in found.columns:
                raise ValueError(
                    f"data.{option}: {path} has no column {brief(name)}{did_you_mean(str(name), found.columns)}"
                )
    assert chosen.target is not None
    left_out = {chosen.target, *chosen.drop}
    encode = chosen.dates == "encode"
    used = [column for name, column in found.columns.items() if name not in left_out]
    kinds = {column.name: feature_kind(found, column, chosen.categories, encode) for column in used}
    if not kinds:
        raise ValueError(f"{path} has no column beside the target and those that are dropped.")
    discrete = target_is_class(found.columns[chosen.target], path, chosen.task)
    target: Kind = "word" if discrete else "number"
    blocks = list(frames(path, kinds | {chosen.target: target}, found.header, found.decimal))
    whole = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    scaling = chosen.scaling if chosen.scaling in ("quantile", "standard") else "none"
    table = Table([name for name, kind in kinds.items() if kind == "word"], chosen.missing, scaling)
    y, classes = _targets(whole[chosen.target], discrete)
    places = _splits([Split(torch.arange(len(y)), y)], chosen)
    try:
        every, kept = with_dates(whole, kinds), places["train"].x.numpy()
        table.fit(every)  # refuses gaps of all rows
        table.fit(every, kept)  # categories of test rows alone stay unseen
        read = torch.from_numpy(table.read(every))
    except ValueError as error:
        raise ValueError(f"{path}: {say_as_config(error)}") from error
    splits = {name: Split(read[part.x], part.y) for name, part in places.items()}
    passed = tuple(name for name in found.columns if name in left_out)
    columns = tuple(table.names[j] for j in [*table.numbers, *table.categories])
    own = OwnColumns(table, passed, kinds, found.header, found.decimal)
    return OwnTable(chosen.name, splits, classes, (), columns, own)


def _targets(values: np.ndarray, discrete: bool) -> tuple[Tensor, tuple[str, ...]]:
    if not discrete:
        return _real(values), ()
    words: Mapping[str, int] = {word: i for i, word in enumerate(sorted(set(values.tolist()), key=_by_number))}
    return torch.tensor([words[word] for word in values.tolist()]), tuple(words)


def _real(values: np.ndarray) -> Tensor:
    """Real targets (N, T): in float64 where float32 would move them by more than a millionth of their deviation, as it
    does times in seconds and large sums in cents."""
    wide = values.astype(np.float64)
    single = wide.astype(np.float32)
    kept = wide if (np.abs(wide - single) > 1e-6 * wide.std(0)).any() else single
    return torch.from_numpy(kept[:, None] if kept.ndim == 1 else kept)


def _by_number(word: str) -> tuple[float, str]:
    """Classes that are numbers in their order, then others by the alphabet."""
    number = number_in(word)
    return float("inf") if number is None else number, word


# --- arrays ---


def _arrays(path: Path, chosen: Data) -> Dataset:
    check_regular(path)
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, OSError, EOFError, KeyError, AttributeError, MemoryError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read as a .npz file: {brief(str(error))}.") from error
    cut = {"x_train", "y_train", "x_test", "y_test"} <= arrays.keys()
    if not cut and not {"x", "y"} <= arrays.keys():
        has = ", ".join(map(brief, list(arrays)[:10])) or "none"
        raise ValueError(f"{path} needs the arrays x and y, or x_train, y_train, x_test and y_test; it has {has}.")
    names = [("x_train", "y_train"), ("x_test", "y_test")] if cut else [("x", "y")]
    found = [_array_split(arrays[x], arrays[y], f"{path}, {x}", chosen) for x, y in names]
    return Dataset(chosen.name, _splits(found, chosen))


def _array_split(x: np.ndarray, y: np.ndarray, place: str, chosen: Data) -> Split:
    for what, array in (("inputs", x), ("targets", y)):
        if array.dtype.kind not in "uifb" or not array.ndim or not array.size:
            got = f"{array.dtype} of shape {array.shape}"
            raise ValueError(f"{place}: {what} must be numbers, row by row, got {brief(got)}.")
    real = chosen.task == "regression" or (chosen.task is None and y.dtype.kind == "f")
    if not real and (y.dtype.kind == "f" or y.ndim > 1) and (y.ndim > 1 or (y != np.round(y)).any()):
        raise ValueError(f"{place}: classes must be whole numbers (n,), got {y.dtype} of shape {y.shape}.")
    inputs = torch.from_numpy(x if x.dtype == np.uint8 else x.astype(np.float32 if x.dtype.kind == "f" else np.int64))
    if inputs.dim() == 2 and not inputs.is_floating_point():
        inputs = inputs.float()  # a table of whole numbers: words of texts have sets of their own
    return Split(inputs, _real(y) if real else torch.from_numpy(y.astype(np.int64)))


# --- pictures ---


def _pictures(path: Path, chosen: Data) -> Dataset:
    size = chosen.image_size
    train = ImageFolder(path / "train" if (path / "train").is_dir() else path)
    cut = (path / "train").is_dir() and (path / "test").is_dir()
    folders = [train, ImageFolder(path / "test", classes=train.classes)] if cut else [train]
    if len(train.classes) < 2:
        raise ValueError(
            f"{path} must hold a folder of pictures for each class, at least two; it has {len(train.classes)}."
        )
    if (needed := sum(map(len, folders)) * 3 * size**2) > _BYTES:
        raise ValueError(
            f"{path}: pictures of {size} x {size} pixels take {needed / 2**30:.0f} GiB; set data.image_size to less."
        )
    found = [Split(torch.stack([read_square(path, size) for path in one.paths]), one.y) for one in folders]
    return Dataset(chosen.name, _splits(found, chosen), train.classes)
