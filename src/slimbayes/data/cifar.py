"""CIFAR-10 and CIFAR-100 in three formats: the binary version, the python version, and zipped sheets of lossless WebP.

Binary: records of 1 label byte (CIFAR-100: coarse, then fine) and 3 x 32 x 32 pixel bytes. Python: a pickled
dictionary, read without unpickling. Sheets: `train-images*.zip` and `test-images*.zip` of 320 x 320
pictures with ten by ten images in row-major order, numbered through all pieces of a split, and `labels.npz`.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slimbayes.data.archives import LIMIT, checked_zip, read_entry, read_npz, require
from slimbayes.data.dataset import Found, Split, labels
from slimbayes.untrusted import read_file

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


def cifar10(folder: Path, binary: bool) -> Found | None:
    """CIFAR-10, binary or python version: data_batch_1 to data_batch_5 and test_batch, with .bin or without."""
    end = ".bin" if binary else ""
    files = {
        split: [folder / f"{name}{end}" for name in names]
        for split, names in _BATCHES.items()
    }
    read = (
        partial(_read_records, header=1)
        if binary
        else partial(_read_batch, key="labels")
    )
    return Found.of_files(
        partial(_joined, read=partial(read, classes=10)), files, CIFAR10_CLASSES
    )


def python100(folder: Path) -> Found | None:
    """CIFAR-100, python version, fine labels: train, test, meta."""
    classes, meta, files = (
        _UNNAMED,
        folder / "meta",
        {split: [folder / split] for split in _BATCHES},
    )
    if meta.is_file() and any(path.is_file() for (path,) in files.values()):
        names = read_cifar_pickle(meta).get("fine_label_names")
        if not isinstance(names, list) or not all(
            isinstance(name, bytes | str) for name in names
        ):
            raise ValueError(f"{meta} must hold the list 'fine_label_names'.")
        classes = tuple(
            name.decode("utf8") if isinstance(name, bytes) else name for name in names
        )
    return Found.of_files(
        partial(_read_batch, key="fine_labels", classes=len(classes)),
        files,
        classes,
        meta,
    )


def _joined(*paths: Path, read: Callable[[Path], Split]) -> Split:
    splits = [read(path) for path in paths]
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


def _read_batch(path: Path, key: str, classes: int) -> Split:
    """One file of the python version, its labels under `key`."""
    content = read_cifar_pickle(path)
    images, numbers = content.get("data"), content.get(key)
    if not isinstance(images, Tensor) or images.ndim != 2 or images.shape[1] != PIXELS:
        got = (
            tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        )
        raise ValueError(
            f"{path}: 'data' must be an array of bytes of shape (n, {PIXELS}), got {got}."
        )
    if not isinstance(numbers, list) or not all(
        type(number) is int for number in numbers
    ):
        raise ValueError(f"{path}: {key!r} must be a list of whole numbers.")
    if len(numbers) != len(images):
        raise ValueError(f"{path}: {len(images)} images but {len(numbers)} labels.")
    wrong = next(
        (row for row, number in enumerate(numbers) if not 0 <= number < classes), None
    )
    if (
        wrong is not None
    ):  # before a tensor is made of it: a pickled number may have any size
        raise ValueError(
            f"{path}, record {wrong}: its label is not one of 0..{classes - 1}."
        )
    return Split(images.reshape(-1, 3, 32, 32), torch.tensor(numbers, device="cpu"))


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


# --- pickles ---

# A pickle may call any function it can name. These files name three, all of numpy, to rebuild one array of bytes; each
# has a harmless stand-in here that only notes its arguments, and any other name is refused: no name in a file is ever
# looked up. numpy's own functions would not do: a state they trust can make it take numbers for addresses.


class _Noted:
    """Stands for numpy.dtype and numpy.ndarray: what they would be made of."""

    state: Any = ()

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Bytes(bytes):
    """Stands for _codecs.encode, which is how Python 3 spells bytes in protocol 2. A class with a state that cannot be
    set: a pickle may set the attributes of anything that it was handed, a plain function's too."""

    def __new__(cls, text: Any, codec: Any = "latin1") -> _Bytes:
        if not isinstance(text, str) or codec not in ("latin1", b"latin1"):
            raise ValueError(
                f"a byte string spelled with the codec {codec!r}, only latin1 is known"
            )
        return super().__new__(cls, text.encode("latin1"))

    def __setstate__(self, state: Any) -> None:
        raise ValueError("a byte string with attributes")


_STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Noted,
    ("numpy._core.multiarray", "_reconstruct"): _Noted,
    ("numpy", "ndarray"): _Noted,
    ("numpy", "dtype"): _Noted,
    ("_codecs", "encode"): _Bytes,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            raise ValueError(
                f"it asks for {module}.{name}, which no such file does; refused, nothing was run"
            )
        return _STAND_INS[module, name]


def read_cifar_pickle(path: Path) -> dict[str, Any]:
    """The dictionary in a file of CIFAR's python version, text keys, arrays as uint8 tensors."""
    packed = read_file(path, LIMIT)
    try:
        for operation, argument, _ in pickletools.genops(packed):
            # Python makes room for whatever place in its memory a pickle names: six bytes could ask for all there is.
            if (
                "PUT" in operation.name
                and isinstance(argument, int)
                and argument > len(packed)
            ):
                raise ValueError(
                    f"it asks for memory place {argument:,}, more than it has bytes"
                )
        content = _Reader(io.BytesIO(packed), encoding="bytes").load()
    except Exception as error:  # a broken pickle can raise nearly anything
        raise ValueError(
            f"{path} is not a file of CIFAR's python version: {error}"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} must hold a dictionary, got {type(content).__name__}."
        )
    named = {
        key.decode("latin1") if isinstance(key, bytes) else str(key): value
        for key, value in content.items()
    }
    return {
        k: _tensor(f"{path}: {k!r}", v) if isinstance(v, _Noted) else v
        for k, v in named.items()
    }


def _tensor(place: str, array: _Noted) -> Tensor:
    try:
        _, shape, dtype, fortran, raw = array.state
        code, *_ = dtype.arguments
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{place} is not an array of bytes.") from error
    if not isinstance(raw, bytes) or not isinstance(shape, tuple):
        raise ValueError(f"{place} is not an array of bytes.")
    if code not in ("u1", "|u1", b"u1", b"|u1") or not all(
        type(n) is int and n > 0 for n in shape
    ):
        raise ValueError(
            f"{place} must be an array of unsigned bytes, got {code!r} of shape {shape}."
        )
    if math.prod(shape) != len(raw):
        raise ValueError(
            f"{place} has {len(raw):,} bytes where its shape {shape} needs {math.prod(shape):,}."
        )
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return (
        flat.reshape(shape[::-1]).permute(*reversed(range(len(shape))))
        if fortran
        else flat.reshape(shape)
    )
