"""Rows of a file, block by block: an array of .npy or .npz, numbers of a .csv, or images. Never all of a large file.

Sizes: n rows of a block.
"""

from __future__ import annotations

import contextlib
import math
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from slimbayes.data.archives import npy_header
from slimbayes.data.cells import Allow, number_in
from slimbayes.data.folders import ENDINGS, decode, read_square
from slimbayes.data.table_files import cell_lines, number_blocks
from slimbayes.lab.tasks.intake import check_names
from slimbayes.untrusted import check_regular

# Rows of a folder. The decoder takes ENDINGS and refuses the others: to pass one over would shift all rows after it.
_IMAGES = (*ENDINGS, ".webp", ".bmp", ".gif", ".tif", ".tiff")
_BYTES = 1 << 22  # of a block of an array
_TOGETHER = 64  # images of a block
DAMAGE = (ValueError, TypeError, OSError, EOFError, KeyError, MemoryError, zipfile.BadZipFile, zlib.error)


def row_blocks(
    file: Path, columns: Sequence[str] = (), allow_nonfinite: bool = False, size: int | None = None
) -> Iterator[Tensor]:
    """Rows of a file: an array of .npy or of .npz (named x, or its only one), numbers of a .csv, or images.

    Args:
        columns: the training data's names, if they had any: a csv with names must have these, and gets their order.
        size: make images squares of so many pixels, as those of training were; by default they stay as they are.
        allow_nonfinite: take cells of a csv that are NaN or infinite.

    Shape: blocks of (n, ...), at least one.
    """
    if not file.exists():
        raise FileNotFoundError(f"{file} is not there.")
    if file.is_dir() or file.suffix.lower() in _IMAGES:
        return _image_blocks(file, decode if size is None else partial(read_square, size=size))
    check_regular(file)
    if file.suffix == ".csv":
        return _csv_blocks(file, columns, "any" if allow_nonfinite else "finite")
    if file.suffix not in (".npy", ".npz"):
        raise ValueError(f"{file}: rows come as .npy, .npz, .csv, an image or a folder of images.")
    return _array_blocks(file)


def regrouped(blocks: Iterator[Tensor], size: int) -> Iterator[Tensor]:
    """The same rows, `size` at a time."""
    kept: Tensor | None = None
    for block in blocks:
        *whole, kept = (block if kept is None else torch.cat([kept, block])).split(size)
        yield from whole
    if kept is not None:
        yield kept


# --- arrays ---


def _array_blocks(file: Path) -> Iterator[Tensor]:
    with contextlib.ExitStack() as stack:
        try:
            stream: IO[bytes] = stack.enter_context(open(file, "rb"))
            if file.suffix == ".npz":
                archive = stack.enter_context(zipfile.ZipFile(stream))
                names = [name.removesuffix(".npy") for name in archive.namelist()]
                if "x" not in names and len(names) != 1:
                    raise ValueError(f"it has the arrays {', '.join(names) or 'none'}, and needs one named x")
                stream = stack.enter_context(archive.open(f"{'x' if 'x' in names else names[0]}.npy"))
            yield from blocks_of(stream)
        except DAMAGE as error:
            raise ValueError(f"{file} cannot be read: {error}.") from error


def blocks_of(stream: IO[bytes]) -> Iterator[Tensor]:
    """The array of a .npy stream in blocks of rows."""
    shape, fortran, dtype = npy_header(stream)
    if dtype.hasobject or not shape or min(shape) < 0:
        raise ValueError("an array of rows of numbers is needed")
    rows, row = shape[0], dtype.itemsize * math.prod(shape[1:])
    size = rows if fortran else max(1, _BYTES // max(1, row))  # whose columns come first is read at once
    for start in range(0, max(1, rows), max(1, size)):
        count = min(size, rows - start)
        data = stream.read(count * row)
        if len(data) != count * row:
            raise ValueError(f"it ends before its last row, of {rows:,}")
        block = np.frombuffer(data, dtype).reshape((count, *shape[1:]), order="F" if fortran else "C")
        yield torch.from_numpy(np.array(block, dtype.newbyteorder("="), order="C"))
    if stream.read(1):  # of an archive, this looks at the checksum too
        raise ValueError("it goes on after its last row")


# --- images ---


def _image_blocks(path: Path, read: Callable[[Path], Tensor]) -> Iterator[Tensor]:
    files = sorted(p for p in path.iterdir() if p.suffix.lower() in _IMAGES) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path} holds no image that ends in {', '.join(ENDINGS)}.")
    first = read(files[0]).shape
    for start in range(0, len(files), _TOGETHER):
        images = [read(file) for file in files[start : start + _TOGETHER]]
        shapes = {tuple(image.shape) for image in images} | {tuple(first)}
        if len(shapes) > 1:
            raise ValueError(f"{path}: images must have one size, got {sorted(shapes)[:4]}.")
        yield torch.stack(images)


# --- tables ---


def _csv_blocks(file: Path, columns: Sequence[str], allow: Allow) -> Iterator[Tensor]:
    """Rows of a csv in the order of `columns`. A first line of numbers is a row, unless they are the columns' names."""
    first = next(cell_lines(file), (1, []))[1]
    named = columns and (set(first) == set(columns) or any(number_in(cell) is None for cell in first))
    if named:
        check_names(f"{file}, line 1", first, columns)
    for block in number_blocks(file, columns if named else None, True if named else None, allow):
        yield torch.from_numpy(block)
