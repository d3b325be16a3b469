"""The one door for data: sets with a name, arrays, pictures and tables of one's own, and the digest of their rows."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slimbayes.errors import brief
from slimbayes.seeds import generator
from slimbayes_lab.configs.experiment import Data
from slimbayes_lab.data import Dataset, Split, load, load_bags
from slimbayes_lab.data.archives import read_npz
from slimbayes_lab.data.folders import ImageFolder, read_square
from slimbayes_lab.data.sources import find_files, root_folder
from slimbayes_lab.tasks.own_table import read_table, real_targets
from slimbayes_lab.tasks.rows import hold_out

_WHOLE = 256 << 20  # bytes of a tensor that are all read
_BLOCK, _BLOCKS = (
    64 << 10,
    1024,
)  # bytes of a block, and how many are read of larger ones
_FILES = 4096  # pictures of a folder whose sizes are read
_BYTES = 4 << 30  # of pictures in memory


def open_data(
    chosen: Data, root: Path | str | None = None, dataset: Dataset | None = None
) -> tuple[Dataset, tuple[str, ...]]:
    """The data set of a config, and the names of the splits that are trained, tested and, if it names one, validated
    on; of a UCI set, whose standard splits are made of all rows, the one that has all."""
    data = dataset or _opened(chosen, root)
    if dataset is None and "all" in data.splits:
        return data, ("all",)
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
def _bags(
    name: str, root: Path | str | None, stamps: tuple[object, ...], **bags: Any
) -> Dataset:
    """Bags of files with these stamps: tables look at the data of many runs, and bags take seconds to fill."""
    return load_bags(name, root, **bags)


def _opened(chosen: Data, root: Path | str | None) -> Dataset:
    if chosen.source is not None:
        return _open_own(*chosen.source, chosen, root)
    if chosen.bags is not None:
        files = find_files(chosen.name, root).files()
        stamps = tuple(
            (file, file.stat().st_size, file.stat().st_mtime_ns) for file in files
        )
        return _bags(chosen.name, root, stamps, **chosen.bags.model_dump())
    return digits() if chosen.name == "digits" else load(chosen.name, root)


def digits() -> Dataset:
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, 1,000 to train on and 797 to test."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ImportError(
            'The digits come with scikit-learn: pip install "slimbayes-lab"'
        ) from error
    found = load_digits()
    x = torch.tensor(found.images * (255 / 16)).round().to(torch.uint8).unsqueeze(1)
    y = torch.tensor(found.target, dtype=torch.int64)
    order = torch.randperm(len(y), generator=generator(0, "digits"))
    x, y = x[order], y[order]
    splits = {"train": Split(x[:1000], y[:1000]), "test": Split(x[1000:], y[1000:])}
    return Dataset("digits", splits, tuple(map(str, range(10))))


# --- data of one's own ---


def _open_own(kind: str, path: str, chosen: Data, root: Path | str | None) -> Dataset:
    """The data of a config that names a file of this kind: splits train and test, none of it scaled."""
    read = {
        "images": _pictures,
        "npz": _arrays,
        "csv": read_table,
        "parquet": read_table,
    }
    return read[kind](_find_own(path, root), chosen)


def _find_own(text: str, root: Path | str | None) -> Path:
    """Where a path leads from here or, if nothing is there, from the data folder."""
    folders = [Path.cwd()]
    if root is not None or os.environ.get("SLIMBAYES_DATA"):
        folders.append(root_folder(root))
    found = next(
        (
            place
            for folder in folders
            if (place := folder / os.path.expanduser(text)).exists()
        ),
        None,
    )
    if found is None:
        raise FileNotFoundError(
            f"{brief(text)} is not there, seen from {' or '.join(map(str, folders))}."
        )
    return found


def _splits(found: list[Split], chosen: Data) -> dict[str, Split]:
    """Rows to train and to test on, as they are or, of one split, as the config says."""
    train, test = (
        found if len(found) == 2 else hold_out(found[0], "test", chosen.test, chosen)
    )
    return {"train": train, "test": test}


def _arrays(path: Path, chosen: Data) -> Dataset:
    arrays = read_npz(path, limit=math.inf)
    cut = {"x_train", "y_train", "x_test", "y_test"} <= arrays.keys()
    if not cut and not {"x", "y"} <= arrays.keys():
        has = ", ".join(map(brief, list(arrays)[:10])) or "none"
        raise ValueError(
            f"{path} needs the arrays x and y, or x_train, y_train, x_test and y_test; it has {has}."
        )
    names = [("x_train", "y_train"), ("x_test", "y_test")] if cut else [("x", "y")]
    found = [
        _array_split(arrays[x], arrays[y], f"{path}, {x}", chosen) for x, y in names
    ]
    return Dataset(chosen.name, _splits(found, chosen))


def _array_split(x: np.ndarray, y: np.ndarray, place: str, chosen: Data) -> Split:
    for what, array in (("inputs", x), ("targets", y)):
        if array.dtype.kind not in "uifb" or not array.ndim or not array.size:
            got = f"{array.dtype} of shape {array.shape}"
            raise ValueError(
                f"{place}: {what} must be numbers, row by row, got {brief(got)}."
            )
    real = chosen.task == "regression" or (chosen.task is None and y.dtype.kind == "f")
    if not real and (y.ndim > 1 or (y != np.round(y)).any()):
        raise ValueError(
            f"{place}: classes must be whole numbers (n,), got {y.dtype} of shape {y.shape}."
        )
    inputs = torch.from_numpy(
        x
        if x.dtype == np.uint8
        else x.astype(np.float32 if x.dtype.kind == "f" else np.int64)
    )
    if inputs.dim() == 2 and not inputs.is_floating_point():
        inputs = (
            inputs.float()
        )  # a table of whole numbers: words of texts have sets of their own
    return Split(
        inputs, real_targets(y) if real else torch.from_numpy(y.astype(np.int64))
    )


def _pictures(path: Path, chosen: Data) -> Dataset:
    size = chosen.image_size
    train = ImageFolder(path / "train" if (path / "train").is_dir() else path)
    cut = (path / "train").is_dir() and (path / "test").is_dir()
    folders = (
        [train, ImageFolder(path / "test", classes=train.classes)] if cut else [train]
    )
    if len(train.classes) < 2:
        raise ValueError(
            f"{path} must hold a folder of pictures for each class, at least two; it has {len(train.classes)}."
        )
    if (needed := sum(map(len, folders)) * 3 * size**2) > _BYTES:
        raise ValueError(
            f"{path}: pictures of {size} x {size} pixels take {needed / 2**30:.0f} GiB; set data.image_size to less."
        )
    found = [
        Split(torch.stack([read_square(file, size) for file in one.paths]), one.y)
        for one in folders
    ]
    return Dataset(chosen.name, _splits(found, chosen), train.classes)


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
        first = (
            range(0, len(tensor), size)
            if whole
            else _spread(max(0, len(tensor) - size), _BLOCKS)
        )
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
    return (
        sorted({round(i * last / (count - 1)) for i in range(count)})
        if last >= 0
        else []
    )
