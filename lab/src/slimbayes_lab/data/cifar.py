"""CIFAR-10 and CIFAR-100 in two formats: the binary version, and zipped sheets of lossless WebP.

Binary: records of 1 label byte (CIFAR-100: coarse, then fine) and 3 x 32 x 32 pixel bytes. Sheets: `train-images*.zip`
and `test-images*.zip` of 320 x 320 pictures with ten by ten images in row-major order, numbered through all pieces of a
split, and `labels.npz`.
"""

from __future__ import annotations

import io
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from torch import Tensor

from slimbayes.untrusted import LIMIT, read_file
from slimbayes_lab.data.archives import checked_zip, read_entry, read_npz, require
from slimbayes_lab.data.dataset import Found, Split, labels

CIFAR10_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
PIXELS = 3 * 32 * 32
_BATCHES = {"train": [f"data_batch_{n}" for n in range(1, 6)], "test": ["test_batch"]}
_UNNAMED = tuple(f"class {n}" for n in range(100))


def binary100(folder: Path) -> Found | None:
    """CIFAR-100, binary version, fine labels: train.bin, test.bin, fine_label_names.txt."""
    files = {split: [folder / f"{split}.bin"] for split in _BATCHES}
    names = folder / "fine_label_names.txt"
    classes = tuple(read_file(names).decode().split()) if names.is_file() else _UNNAMED
    return Found.of_files(
        partial(_read_records, header=2, classes=len(classes)), files, classes, names
    )


def binary10(folder: Path) -> Found | None:
    """CIFAR-10, binary version: data_batch_1.bin to data_batch_5.bin and test_batch.bin."""
    files = {
        split: [folder / f"{name}.bin" for name in names]
        for split, names in _BATCHES.items()
    }
    return Found.of_files(_read_batches, files, CIFAR10_CLASSES)


def _read_batches(*paths: Path) -> Split:
    splits = [_read_records(path, header=1, classes=10) for path in paths]
    return Split(torch.cat([s.x for s in splits]), torch.cat([s.y for s in splits]))


def _read_records(path: Path, header: int, classes: int) -> Split:
    """One binary file; the label is the last of `header` bytes before each image."""
    content, size = bytearray(read_file(path, LIMIT)), header + PIXELS
    if not content or len(content) % size:
        where = f"{len(content):,} bytes and stops in record {len(content) // size}"
        raise ValueError(f"{path} has {where}; every record has {size}.")
    records = torch.frombuffer(content, dtype=torch.uint8).reshape(-1, size)
    return Split(
        records[:, header:].reshape(-1, 3, 32, 32),
        labels(records[:, header - 1], classes, path),
    )


def sheets(folder: Path, names: tuple[str, ...] = ()) -> Found | None:
    """Either set as sheets, CIFAR-100 with its fine labels; `names` of the classes, or those in labels.npz."""
    # The pieces may lie in several folders below this one; their names, not their paths, say the order.
    found = {
        s: sorted(folder.rglob(f"{s}-images*.zip"), key=lambda path: path.name)
        for s in _BATCHES
    }
    pieces = {split: paths for split, paths in found.items() if paths}
    numbers = next(iter(sorted(folder.rglob("labels.npz"))), None)
    if numbers is None or not pieces:
        return None
    classes = names or tuple(map(str, read_npz(numbers, "classes")["classes"]))
    files = [*chain(*pieces.values()), numbers]
    splits = {
        s: partial(_read_sheets, paths, numbers, s, len(classes))
        for s, paths in pieces.items()
    }
    return Found(splits, classes, files=lambda: files)


def _read_sheets(pieces: list[Path], numbers: Path, split: str, classes: int) -> Split:
    """All images of a split from its zips, in the order of the sheets' numbers."""
    y = labels(read_npz(numbers, split)[split], classes, numbers)
    sheets: list[Tensor] = []
    for piece in pieces:
        with checked_zip(piece) as archive:
            for name in sorted(archive.namelist()):
                stem = PurePosixPath(name).stem
                if not stem.isdecimal() or int(stem) != len(sheets):
                    where = f"entry {name!r} stands where sheet {len(sheets):04d} must"
                    raise ValueError(
                        f"{piece}: {where}; a piece is missing or misnamed."
                    )
                if 100 * len(sheets) >= len(y):
                    raise ValueError(
                        f"{piece}: sheet {name!r} is beyond the {len(y)} {split} labels of {numbers}."
                    )
                sheets.append(_sheet(piece, name, read_entry(piece, archive, name)))
    if 100 * len(sheets) != len(y):
        hold = f"{', '.join(piece.name for piece in pieces)} hold {100 * len(sheets)} images"
        raise ValueError(
            f"{numbers} has {len(y)} {split} labels, but {hold}: is a piece missing?"
        )
    return Split(torch.cat(sheets), y)


def _sheet(piece: Path, name: str, content: bytes) -> Tensor:
    """A hundred images (100, 3, 32, 32) of one sheet."""
    image = require("PIL.Image")
    try:
        with image.open(io.BytesIO(content), formats=("WEBP", "PNG")) as sheet:
            if sheet.size != (320, 320):
                raise ValueError(
                    f"it is {sheet.size[0]} x {sheet.size[1]} pixels, a sheet is 320 x 320"
                )
            pixels = np.array(sheet.convert("RGB"))
    except (OSError, SyntaxError, ValueError, image.DecompressionBombError) as error:
        raise ValueError(
            f"{piece}: entry {name!r} is not a sheet of images: {error}"
        ) from error
    return (
        torch.from_numpy(pixels)
        .view(10, 32, 10, 32, 3)
        .permute(0, 2, 4, 1, 3)
        .reshape(100, 3, 32, 32)
    )
