"""CIFAR-10 and CIFAR-100 in three formats: the binary version, the python version, and zipped sheets of lossless WebP.

Binary: records of 1 label byte (CIFAR-100: coarse, then fine) and 3 x 32 x 32 pixel bytes. Python: a pickled dictionary, read without
unpickling (see pickles.py). Sheets: `train-images*.zip` and `test-images*.zip` of 320 x 320 pictures with ten by ten images in row-major
order, numbered through all pieces of a split, and `labels.npz`.

Sizes: N images.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from slimbayes.data.archives import checked_zip, read_entry, read_npz, require
from slimbayes.data.dataset import Found, Part, Split, labels
from slimbayes.data.pickles import read_cifar_pickle

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PIXELS = 3 * 32 * 32
BATCHES = {"train": tuple(f"data_batch_{n}" for n in range(1, 6)), "test": ("test_batch",)}


def binary10(folder: Path) -> Found | None:
    """CIFAR-10, binary version: data_batch_1.bin to data_batch_5.bin and test_batch.bin."""
    files = {split: [folder / f"{name}.bin" for name in names] for split, names in BATCHES.items()}
    return _binary(files, 1, CIFAR10_CLASSES)


def binary100(folder: Path) -> Found | None:
    """CIFAR-100, binary version, fine labels: train.bin, test.bin, fine_label_names.txt."""
    names = folder / "fine_label_names.txt"
    classes = tuple(names.read_text().split()) if names.is_file() else tuple(f"class {n}" for n in range(100))
    return _binary({split: [folder / f"{split}.bin"] for split in ("train", "test")}, 2, classes, names)


def _binary(files: dict[str, list[Path]], header: int, classes: tuple[str, ...], *names: Path) -> Found | None:
    size = header + PIXELS

    def part(paths: list[Path]) -> Part:
        count: Callable[[], int] = lambda: sum(_needed(path).stat().st_size // size for path in paths)  # noqa: E731
        return Part(count, lambda: _join([read_records(path, header, len(classes)) for path in paths]))

    here = {split: paths for split, paths in files.items() if any(path.is_file() for path in paths)}
    return _found({split: part(paths) for split, paths in here.items()}, classes, [*chain(*here.values()), *names])


def read_records(path: Path, header: int, classes: int) -> Split:
    """One binary file; the label is the last of `header` bytes before each image."""
    content, size = bytearray(_needed(path).read_bytes()), header + PIXELS
    if not content or len(content) % size:
        raise ValueError(
            f"{path} has {len(content):,} bytes and stops in record {len(content) // size}; every record has {size}."
        )
    records = torch.frombuffer(content, dtype=torch.uint8).reshape(-1, size)
    return Split(records[:, header:].reshape(-1, 3, 32, 32), labels(records[:, header - 1], classes, path))


def python10(folder: Path) -> Found | None:
    """CIFAR-10, python version: data_batch_1 to data_batch_5 and test_batch."""
    return _python(
        {split: [folder / name for name in names] for split, names in BATCHES.items()}, "labels", CIFAR10_CLASSES
    )


def python100(folder: Path) -> Found | None:
    """CIFAR-100, python version, fine labels: train, test, meta."""
    files = {split: [folder / split] for split in ("train", "test") if (folder / split).is_file()}
    classes = tuple(f"class {n}" for n in range(100))
    if files and (folder / "meta").is_file():
        names = read_cifar_pickle(folder / "meta").get("fine_label_names")
        if not isinstance(names, list) or not all(isinstance(name, bytes | str) for name in names):
            raise ValueError(f"{folder / 'meta'} must hold the list 'fine_label_names'.")
        classes = tuple(name.decode("utf8") if isinstance(name, bytes) else name for name in names)
    return _python(files, "fine_labels", classes, folder / "meta")


def _python(files: dict[str, list[Path]], key: str, classes: tuple[str, ...], *names: Path) -> Found | None:
    def part(paths: list[Path]) -> Part:
        read = lambda: _join([read_batch(path, key, len(classes)) for path in paths])  # noqa: E731
        return Part(lambda: len(read()), read)

    here = {split: paths for split, paths in files.items() if any(path.is_file() for path in paths)}
    return _found({split: part(paths) for split, paths in here.items()}, classes, [*chain(*here.values()), *names])


def read_batch(path: Path, key: str, classes: int) -> Split:
    """One file of the python version, its labels under `key`."""
    content = read_cifar_pickle(_needed(path))
    images, numbers = content.get("data"), content.get(key)
    if not isinstance(images, Tensor) or images.ndim != 2 or images.shape[1] != PIXELS:
        got = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(f"{path}: 'data' must be an array of bytes of shape (n, {PIXELS}), got {got}.")
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        raise ValueError(f"{path}: {key!r} must be a list of whole numbers.")
    if len(numbers) != len(images):
        raise ValueError(f"{path}: {len(images)} images but {len(numbers)} labels.")
    wrong = next((row for row, number in enumerate(numbers) if not 0 <= number < classes), None)
    if wrong is not None:  # before a tensor is made of it: a pickled number may have any size
        raise ValueError(f"{path}, record {wrong}: its label is not one of 0..{classes - 1}.")
    return Split(images.reshape(-1, 3, 32, 32), torch.tensor(numbers, device="cpu"))


def sheets10(folder: Path) -> Found | None:
    """CIFAR-10 as sheets."""
    return _sheets(folder, lambda names: CIFAR10_CLASSES)


def sheets100(folder: Path) -> Found | None:
    """CIFAR-100 as sheets, fine labels; labels.npz also names the classes."""
    return _sheets(folder, lambda names: tuple(str(name) for name in read_npz(names, "classes")["classes"]))


def _sheets(folder: Path, name_classes: Callable[[Path], tuple[str, ...]]) -> Found | None:
    # The pieces may lie in several folders below this one; their names, not their paths, say the order.
    pieces = {
        split: sorted(folder.rglob(f"{split}-images*.zip"), key=lambda path: path.name) for split in ("train", "test")
    }
    numbers = next(iter(sorted(folder.rglob("labels.npz"))), None)
    if numbers is None or not any(pieces.values()):
        return None
    classes = name_classes(numbers)

    def part(split: str) -> Part:
        count = lambda: len(read_npz(numbers, split)[split])  # noqa: E731
        return Part(count, partial(read_sheets, pieces[split], numbers, split, len(classes)))

    return _found(
        {split: part(split) for split, paths in pieces.items() if paths}, classes, [*chain(*pieces.values()), numbers]
    )


def read_sheets(pieces: list[Path], numbers: Path, split: str, classes: int) -> Split:
    """All images of a split from its zips, in the order of the sheets' numbers."""
    stored = read_npz(numbers, split)[split]
    if stored.ndim != 1 or stored.dtype.kind not in "ui":
        raise ValueError(
            f"{numbers}: {split!r} must be whole numbers (n,), got {stored.dtype} of shape {stored.shape}."
        )
    y = labels(torch.from_numpy(stored.astype("int64")), classes, numbers)
    x, done = torch.empty(len(y), 3, 32, 32, dtype=torch.uint8, device="cpu"), 0
    for piece in pieces:
        with checked_zip(piece) as archive:
            for name in sorted(archive.namelist()):
                if not PurePosixPath(name).stem.isdecimal() or int(PurePosixPath(name).stem) != done // 100:
                    raise ValueError(
                        f"{piece}: entry {name!r} stands where sheet {done // 100:04d} must; a piece is missing or misnamed."
                    )
                if done + 100 > len(y):
                    raise ValueError(
                        f"{piece}: sheet {name!r} has images {done} to {done + 99}, but {numbers} has {len(y)} {split} labels."
                    )
                x[done : done + 100] = _sheet(piece, name, read_entry(piece, archive, name))
                done += 100
    if done != len(y):
        where = ", ".join(piece.name for piece in pieces)
        raise ValueError(f"{numbers} has {len(y)} {split} labels, but {where} hold {done} images: is a piece missing?")
    return Split(x, y)


def _sheet(piece: Path, name: str, content: bytes) -> Tensor:
    """A hundred images (100, 3, 32, 32) of one sheet."""
    image, numpy = require("PIL.Image"), require("numpy")
    try:
        with image.open(io.BytesIO(content), formats=("WEBP", "PNG")) as sheet:
            if sheet.size != (320, 320):
                raise ValueError(f"it is {sheet.size[0]} x {sheet.size[1]} pixels, a sheet is 320 x 320")
            pixels = numpy.array(sheet.convert("RGB"))
    except (OSError, SyntaxError, ValueError, image.DecompressionBombError) as error:
        raise ValueError(f"{piece}: entry {name!r} is not a sheet of images: {error}") from error
    return torch.from_numpy(pixels).view(10, 32, 10, 32, 3).permute(0, 2, 4, 1, 3).reshape(100, 3, 32, 32)


def _found(parts: dict[str, Part], classes: tuple[str, ...], files: list[Path]) -> Found | None:
    return Found(parts, classes, files=lambda: [file for file in files if file.is_file()]) if parts else None


def _join(splits: list[Split]) -> Split:
    return splits[0] if len(splits) == 1 else Split(torch.cat([s.x for s in splits]), torch.cat([s.y for s in splits]))


def _needed(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing, though other files of the set are there.")
    return path
