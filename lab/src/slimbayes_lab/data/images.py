"""Image sets other than CIFAR itself: idx files, the .npy files around CIFAR-10, SVHN's .mat files, ImageNet's folders.

Sizes: N images, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimbayes.untrusted import open_file
from slimbayes_lab.data.archives import LIMIT, map_npy, read_idx, read_npz, require
from slimbayes_lab.data.cifar import CIFAR10_CLASSES
from slimbayes_lab.data.dataset import Found, Split, labels
from slimbayes_lab.data.folders import ImageFolder, class_folders

DIGITS = tuple("0123456789")
LETTERS = tuple("ABCDEFGHIJ")
SEVERITIES = 5


def idx(folder: Path, classes: tuple[str, ...]) -> Found | None:
    """MNIST and its kin: train and t10k, images-idx3-ubyte and labels-idx1-ubyte, with or without .gz."""

    def file(name: str) -> Path:
        spellings = (
            name,
            f"{name}.gz",
            name.replace("-idx", ".idx"),
            f"{name.replace('-idx', '.idx')}.gz",
        )
        return next(
            (
                folder / spelling
                for spelling in spellings
                if (folder / spelling).is_file()
            ),
            folder / name,
        )

    def read(images: Path, numbers: Path) -> Split:
        x, y = read_idx(images, 3), read_idx(numbers, 1)
        if len(x) != len(y):
            raise ValueError(
                f"{images} has {len(x)} images but {numbers} has {len(y)} labels."
            )
        return Split(x[:, None], labels(y, len(classes), numbers))

    kinds, prefixes = (
        ("images-idx3-ubyte", "labels-idx1-ubyte"),
        {"train": "train", "test": "t10k"},
    )
    files = {
        split: [file(f"{prefix}-{kind}") for kind in kinds]
        for split, prefix in prefixes.items()
    }
    return Found.of_files(read, files, classes)


def cifar_c(folder: Path, classes: int) -> Found | None:
    """CIFAR-10-C or CIFAR-100-C: <corruption>.npy (5 N, 32, 32, 3), severities 1 to 5 in turn, and labels.npy (5 N,).

    Splits are named "fog/3". Images are views of memory maps: opening all of them reads none.
    """
    numbers = folder / "labels.npy"
    files = sorted(path for path in folder.glob("*.npy") if path != numbers)
    if not files or not numbers.is_file():
        return None
    y = labels(map_npy(numbers, (None,), "ui"), classes, numbers)
    if not len(y) or len(y) % SEVERITIES:
        raise ValueError(
            f"{numbers} has {len(y)} labels, which is not a multiple of {SEVERITIES} severities."
        )
    rows = len(y) // SEVERITIES

    def read(path: Path, severity: int) -> Split:
        piece = slice((severity - 1) * rows, severity * rows)
        return Split(_map_images(path, len(y))[piece], y[piece])

    splits = {
        f"{path.stem}/{s}": partial(read, path, s)
        for path in files
        for s in range(1, SEVERITIES + 1)
    }
    return Found(
        splits,
        CIFAR10_CLASSES if classes == 10 else (),
        files=lambda: [*files, numbers],
    )


def _map_images(path: Path, count: int) -> Tensor:
    return torch.from_numpy(map_npy(path, (count, 32, 32, 3), "u")).permute(0, 3, 1, 2)


def cifar10h(folder: Path, plain: Callable[[], Found]) -> Found | None:
    """CIFAR-10H: how people label the test images of CIFAR-10, which `plain` finds.

    The split "test" has each image's share of votes (N, 10), float32; "counts" the votes, int64, if they are there.
    """
    names = ("cifar10h_counts.npz", "cifar10h-counts.npy", "cifar10h-probs.npy")
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None:
        return None

    def shares(votes: Tensor) -> Tensor:
        return (votes / votes.sum(1, keepdim=True)).float()

    def read(stored: Path, convert: Callable[[Tensor], Tensor]) -> Split:
        rows, y = plain().splits["test"](), convert(_votes(stored))
        assert isinstance(rows, Split)
        if len(rows) != len(y):
            raise ValueError(
                f"{stored} has votes on {len(y)} images, but CIFAR-10's test set here has {len(rows)}."
            )
        return Split(rows.x, y)

    kinds = {"test": shares} | ({} if "probs" in file.name else {"counts": Tensor.long})
    splits = {split: partial(read, file, convert) for split, convert in kinds.items()}
    return Found(splits, CIFAR10_CLASSES, files=lambda: [file, *plain().files()])


def _votes(file: Path) -> Tensor:
    values = (
        read_npz(file, "counts")["counts"]
        if file.suffix == ".npz"
        else map_npy(file, (None, 10), "uif")
    )
    votes = torch.from_numpy(values.astype("float64"))
    if votes.ndim != 2 or votes.shape[1] != 10:
        raise ValueError(f"{file} must hold (n, 10) votes, got {tuple(votes.shape)}.")
    wrong = ~((votes >= 0).all(1) & (votes.sum(1) > 0) & votes.isfinite().all(1))
    if wrong.any():
        row = int(wrong.nonzero()[0, 0])
        need = "votes must be finite, not negative and not all zero"
        raise ValueError(f"{file}, row {row}: {need}, got {votes[row].tolist()}.")
    return votes


def svhn(folder: Path) -> Found | None:
    """SVHN, cropped digits: train_32x32.mat, test_32x32.mat and, if it is there, extra_32x32.mat. Needs scipy."""
    return Found.of_files(
        _read_mat,
        {s: [folder / f"{s}_32x32.mat"] for s in ("train", "test", "extra")},
        DIGITS,
    )


def _read_mat(path: Path) -> Split:
    """X (32, 32, 3, N) uint8 and y (N, 1) in 1..10, where 10 stands for the digit 0."""
    sizes = {name: shape for name, shape, _ in _mat(path, "whosmat")}
    x_shape, y_shape = sizes.get("X", ()), sizes.get("y", ())
    if (
        len(x_shape) != 4
        or x_shape[:3] != (32, 32, 3)
        or tuple(y_shape) != (x_shape[3], 1)
    ):
        raise ValueError(
            f"{path} must hold X (32, 32, 3, n) and y (n, 1), got {sizes}."
        )
    if 3072 * x_shape[3] > 2 * LIMIT:
        raise ValueError(
            f"{path}: {x_shape[3]:,} images are more than the {2 * LIMIT:,} bytes allowed."
        )
    content = _mat(path, "loadmat", variable_names=["X", "y"])
    x, y = content["X"], content["y"]
    if x.dtype != "uint8" or y.dtype.kind not in "uif":
        raise ValueError(
            f"{path}: X must be uint8 and y whole numbers, got {x.dtype} and {y.dtype}."
        )
    digits = labels(y[:, 0].astype("int64"), 10, path, first=1) % 10
    return Split(torch.from_numpy(x.transpose(3, 2, 0, 1).copy()), digits)


def _mat(path: Path, function: str, **options: Any) -> Any:
    io = require("scipy.io")
    try:
        with open_file(path) as stream:
            return getattr(io, function)(stream, **options)
    except Exception as error:  # scipy's reader can fail in many ways on a damaged file
        raise ValueError(f"{path} is not a readable MATLAB 5 file: {error}") from error


def imagenet(folder: Path) -> Found | None:
    """ImageNet: train/<class>/*.JPEG and val/<class>/*.JPEG."""
    return _trees(
        {
            split: folder / split
            for split in ("train", "val")
            if (folder / split).is_dir()
        }
    )


def imagenet_c(folder: Path) -> Found | None:
    """ImageNet-C: <corruption>/<severity>/<class>/*.JPEG, or the same one folder deeper. Splits are named "fog/3"."""
    found = [
        path
        for pattern in ("*/[1-5]", "*/*/[1-5]")
        for path in folder.glob(pattern)
        if path.is_dir()
    ]
    return _trees(
        {
            "/".join(path.parts[-2:]): path
            for path in sorted(found, key=lambda path: path.parts[-2:])
        }
    )


def _trees(folders: dict[str, Path]) -> Found | None:
    if not folders:
        return None
    classes = class_folders(next(iter(folders.values())))
    return Found(
        {
            split: partial(ImageFolder, folder, None, classes)
            for split, folder in folders.items()
        },
        classes,
    )
