"""Image sets other than CIFAR itself: idx files, the .npy files around CIFAR-10, SVHN's .mat files, ImageNet's folders.

Sizes: N images, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimbayes.data.archives import LIMIT, idx_shape, map_npy, read_idx, read_npz, require
from slimbayes.data.cifar import CIFAR10_CLASSES
from slimbayes.data.dataset import Found, Part, Split, labels
from slimbayes.data.folders import ImageFolder, class_folders, count_images

DIGITS = tuple("0123456789")
LETTERS = tuple("ABCDEFGHIJ")
FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
KANA = ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")
SEVERITIES = 5


def idx(folder: Path, classes: tuple[str, ...]) -> Found | None:
    """MNIST and its kin: train and t10k, images-idx3-ubyte and labels-idx1-ubyte, with or without .gz."""
    parts, files = {}, []
    for split, prefix in (("train", "train"), ("test", "t10k")):
        images, numbers = (_idx_file(folder, f"{prefix}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
        if images and numbers:
            parts[split] = Part(partial(_idx_count, numbers), partial(read_pair, images, numbers, len(classes)))
            files += [images, numbers]
    return Found(parts, classes, files=lambda: files) if parts else None


def _idx_file(folder: Path, name: str) -> Path | None:
    spellings = (name, name.replace("-idx", ".idx"))
    return next((path for s in spellings for path in (folder / s, folder / f"{s}.gz") if path.is_file()), None)


def _idx_count(numbers: Path) -> int:
    return idx_shape(numbers, 1)[0]


def read_pair(images: Path, numbers: Path, classes: int) -> Split:
    """Images (N, 1, H, W) and labels (N,) from two idx files."""
    x, y = read_idx(images, 3), read_idx(numbers, 1)
    if len(x) != len(y):
        raise ValueError(f"{images} has {len(x)} images but {numbers} has {len(y)} labels.")
    return Split(x[:, None], labels(y, classes, numbers))


def cifar_c(folder: Path, classes: int) -> Found | None:
    """CIFAR-10-C or CIFAR-100-C: <corruption>.npy (5 N, 32, 32, 3), severities 1 to 5 in turn, and labels.npy (5 N,).

    Splits are named "fog/3". Images are views of memory maps: opening all of them reads none.
    """
    files = sorted(path for path in folder.glob("*.npy") if path.name != "labels.npy")
    if not files or not (folder / "labels.npy").is_file():
        return None
    number = map_npy(folder / "labels.npy", (None,), "ui")
    if not len(number) or len(number) % SEVERITIES:
        raise ValueError(
            f"{folder / 'labels.npy'} has {len(number)} labels, which is not a multiple of {SEVERITIES} severities."
        )
    y = labels(torch.from_numpy(number.astype("int64")), classes, folder / "labels.npy")
    rows = len(y) // SEVERITIES

    def part(path: Path, severity: int) -> Part:
        piece = slice((severity - 1) * rows, severity * rows)
        return Part(lambda: rows, lambda: Split(_mapped(path, len(y))[piece], y[piece]))

    names = CIFAR10_CLASSES if classes == 10 else ()
    parts = {f"{path.stem}/{severity}": part(path, severity) for path in files for severity in range(1, SEVERITIES + 1)}
    return Found(parts, names, files=lambda: [*files, folder / "labels.npy"])


def _mapped(path: Path, count: int | None) -> Tensor:
    return torch.from_numpy(map_npy(path, (count, 32, 32, 3), "u")).permute(0, 3, 1, 2)


def cifar10_1(folder: Path) -> Found | None:
    """CIFAR-10.1: cifar10.1_v6_data.npy and _labels.npy are the split "test"; v4, if it is there, is "v4"."""
    parts, files = {}, []
    for split, version in (("test", "v6"), ("v4", "v4")):
        data, numbers = (folder / f"cifar10.1_{version}_{kind}.npy" for kind in ("data", "labels"))
        if data.is_file() and numbers.is_file():
            parts[split] = Part(
                lambda numbers=numbers: len(map_npy(numbers, (None,), "ui")), partial(_npy_pair, data, numbers)
            )
            files += [data, numbers]
    return Found(parts, CIFAR10_CLASSES, files=lambda: files) if parts else None


def _npy_pair(data: Path, numbers: Path) -> Split:
    y = labels(torch.from_numpy(map_npy(numbers, (None,), "ui").astype("int64")), 10, numbers)
    return Split(_mapped(data, len(y)), y)


def cifar10h(folder: Path, images: Callable[[], Tensor], image_files: Callable[[], Sequence[Path]]) -> Found | None:
    """CIFAR-10H: how people label CIFAR-10's test images, whose pixels (N, 3, 32, 32) `images` brings from `image_files`.

    The split "test" has each image's share of votes (N, 10), float32; "counts" has the votes, int64, where the file is of counts.
    """
    packed, counts, shares = (
        folder / name for name in ("cifar10h_counts.npz", "cifar10h-counts.npy", "cifar10h-probs.npy")
    )
    file = next((path for path in (packed, counts, shares) if path.is_file()), None)
    if file is None:
        return None

    def votes() -> Tensor:
        values = read_npz(file, "counts")["counts"] if file == packed else map_npy(file, (None, 10), "uif")
        return _check_votes(torch.from_numpy(values.astype("float64")), file)

    def test() -> Split:
        votes_ = votes()
        return _paired(images(), (votes_ / votes_.sum(1, keepdim=True)).float(), file)

    parts = {"test": Part(lambda: len(votes()), test)}
    if file != shares:
        parts["counts"] = Part(lambda: len(votes()), lambda: _paired(images(), votes().long(), file))
    return Found(parts, CIFAR10_CLASSES, files=lambda: [file, *image_files()])


def _check_votes(votes: Tensor, file: Path) -> Tensor:
    if votes.ndim != 2 or votes.shape[1] != 10:
        raise ValueError(f"{file} must hold (n, 10) votes, got {tuple(votes.shape)}.")
    wrong = ~((votes >= 0).all(1) & (votes.sum(1) > 0) & votes.isfinite().all(1))
    if wrong.any():
        row = int(wrong.nonzero()[0, 0])
        raise ValueError(
            f"{file}, row {row}: votes must be finite, not negative and not all zero, got {votes[row].tolist()}."
        )
    return votes


def _paired(x: Tensor, y: Tensor, file: Path) -> Split:
    if len(x) != len(y):
        raise ValueError(f"{file} has votes on {len(y)} images, but CIFAR-10's test set here has {len(x)}.")
    return Split(x, y)


def svhn(folder: Path) -> Found | None:
    """SVHN, cropped digits: train_32x32.mat, test_32x32.mat and, if it is there, extra_32x32.mat. Needs scipy."""
    files = {split: folder / f"{split}_32x32.mat" for split in ("train", "test", "extra")}
    files = {split: path for split, path in files.items() if path.is_file()}
    parts = {split: Part(partial(_mat_count, path), partial(read_mat, path)) for split, path in files.items()}
    return Found(parts, DIGITS, files=lambda: list(files.values())) if parts else None


def _mat_count(path: Path) -> int:
    return next((int(shape[0]) for name, shape, _ in _mat(path, "whosmat") if name == "y"), 0)


def read_mat(path: Path) -> Split:
    """X (32, 32, 3, N) uint8 and y (N, 1) in 1..10, where 10 stands for the digit 0."""
    sizes = {name: shape for name, shape, _ in _mat(path, "whosmat")}
    x_shape, y_shape = sizes.get("X", ()), sizes.get("y", ())
    if len(x_shape) != 4 or x_shape[:3] != (32, 32, 3) or tuple(y_shape) != (x_shape[3], 1):
        raise ValueError(f"{path} must hold X (32, 32, 3, n) and y (n, 1), got {sizes}.")
    if 3072 * x_shape[3] > 2 * LIMIT:
        raise ValueError(f"{path}: {x_shape[3]:,} images are more than the {2 * LIMIT:,} bytes allowed.")
    content = _mat(path, "loadmat", variable_names=["X", "y"])
    if content["X"].dtype != "uint8" or content["y"].dtype.kind not in "uif":
        raise ValueError(
            f"{path}: X must be uint8 and y whole numbers, got {content['X'].dtype} and {content['y'].dtype}."
        )
    y = labels(torch.from_numpy(content["y"][:, 0].astype("int64")), 10, path, first=1)
    return Split(torch.from_numpy(content["X"].transpose(3, 2, 0, 1).copy()), y % 10)


def _mat(path: Path, function: str, **options: Any) -> Any:
    try:
        return getattr(require("scipy.io"), function)(str(path), **options)
    except ImportError:
        raise
    except Exception as error:  # scipy's reader can fail in many ways on a damaged file
        raise ValueError(f"{path} is not a readable MATLAB 5 file: {error}") from error


def imagenet(folder: Path) -> Found | None:
    """ImageNet: train/<class>/*.JPEG and val/<class>/*.JPEG."""
    here = [split for split in ("train", "val") if (folder / split).is_dir()]
    if not here:
        return None
    classes = class_folders(folder / here[0])
    return Found({split: _tree(folder / split, classes) for split in here}, classes)


def imagenet_c(folder: Path) -> Found | None:
    """ImageNet-C: <corruption>/<severity>/<class>/*.JPEG, or the same one folder deeper (blur, noise ...). Splits are named "fog/3"."""
    found = sorted(
        (path for pattern in ("*/[1-5]", "*/*/[1-5]") for path in folder.glob(pattern) if path.is_dir()),
        key=lambda p: p.parts[-2:],
    )
    if not found:
        return None
    classes = class_folders(found[0])
    return Found({f"{path.parent.name}/{path.name}": _tree(path, classes) for path in found}, classes)


def _tree(folder: Path, classes: tuple[str, ...]) -> Part:
    return Part(partial(count_images, folder), partial(ImageFolder, folder, None, classes))
