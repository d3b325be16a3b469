"""Folders of images, one folder for each class, as ImageNet and ImageNet-C come: decoded one by one when asked for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from slimbayes.data.archives import require
from slimbayes.data.augment import check_boxes, crop_boxes

ENDINGS = (".jpeg", ".jpg", ".png")


class ImageFolder(torch.utils.data.Dataset[tuple[Any, int]]):
    """A torch data set over `folder/<class>/<image>`: item i is (image, label), the image decoded at that moment.

    Classes are numbered in the order of their names. Give `classes` to insist on those of another folder, so that a
    missing class cannot shift the labels. `read` makes an image of a file, by default all of it; `transform` maps that
    image, uint8 (3, H, W), to what the DataLoader collates.

    Example:
        >>> ImageFolder(Path("/nowhere"))
        Traceback (most recent call last):
        ...
        FileNotFoundError: /nowhere is not a folder: it must hold one folder of images for each class.
    """

    def __init__(
        self,
        folder: Path | str,
        transform: Callable[[Tensor], Any] | None = None,
        classes: tuple[str, ...] | None = None,
    ) -> None:
        self.folder, self.transform = Path(folder), transform
        self.read: Callable[[Path], Tensor] = decode
        self.classes = class_folders(self.folder)
        if classes is not None and self.classes != classes:
            got, odd = f"{len(self.classes)} class folders", sorted(set(classes) ^ set(self.classes))[:5]
            raise ValueError(f"{folder} has {got} and {len(classes)} were expected; only one side has {odd}.")
        self.paths: list[Path] = []
        numbers: list[int] = []
        for label, name in enumerate(self.classes):
            images = sorted(p for p in (self.folder / name).iterdir() if p.suffix.lower() in ENDINGS)
            if not images:
                raise ValueError(f"{self.folder / name} holds no image that ends in {', '.join(ENDINGS)}.")
            self.paths += images
            numbers += [label] * len(images)
        self.y = torch.tensor(numbers, device="cpu")

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = self.read(self.paths[index])
        return (image if self.transform is None else self.transform(image)), int(self.y[index])

    def pick(self, index: Tensor) -> Self:
        """The same folder with some of its images, in that order."""
        out = copy.copy(self)
        out.paths, out.y = [self.paths[i] for i in index.tolist()], self.y[index]
        return out

    def to(self, device: torch.device | str) -> ImageFolder:
        """Itself: images are decoded in main memory, whoever takes them."""
        return self


def class_folders(folder: Path) -> tuple[str, ...]:
    """Names of the class folders, sorted."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder: it must hold one folder of images for each class.")
    return tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")))


def decode(path: Path) -> Tensor:
    """One JPEG or PNG as uint8 (3, H, W)."""
    return _pixels(_opened(path))


def read_square(path: Path, size: int, share: float = 1.0) -> Tensor:
    """The middle of a picture, `share` of its shorter side high and wide, as uint8 (3, size, size).

    224 pixels of a picture whose shorter side is made 256, as classifiers of ImageNet are tested, are
    `read_square(path, 224, 224 / 256)`.
    """
    picture = _opened(path)
    side = share * min(picture.size)
    left, top = ((length - side) / 2 for length in picture.size)
    return _resized(picture, (left, top, left + side, top + side), size)


def read_crop(
    path: Path,
    size: int,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    flip: bool = True,
    generator: torch.Generator | None = None,
) -> Tensor:
    """`resized_crop` of a picture in its file: from all of it, smoothed before it shrinks; uint8 (3, size, size)."""
    check_boxes(scale, ratio)
    picture = _opened(path)
    u = torch.rand((5, 1), generator=generator, device="cpu")  # where pictures are decoded
    top, left, tall, wide = (float(side) for side in crop_boxes(u, picture.height, picture.width, scale, ratio))
    out = _resized(picture, (left, top, left + wide, top + tall), size)
    return out.flip(2) if flip and float(u[4]) < 0.5 else out


def _opened(path: Path) -> Any:
    """A picture of Pillow's in RGB: cropping and shrinking it before it becomes a tensor takes half the time."""
    image = require("PIL.Image")
    try:
        # ImageNet's files named .JPEG hold a few PNG, and some CMYK pictures.
        with image.open(path, formats=("JPEG", "PNG")) as picture:
            picture.load()  # as it is where it can be: converting would copy it
            return picture if picture.mode == "RGB" else picture.convert("RGB")
    except (OSError, SyntaxError, image.DecompressionBombError) as error:
        raise ValueError(f"{path} cannot be decoded as a JPEG or PNG image: {error}") from error


def _resized(picture: Any, box: tuple[float, float, float, float], size: int) -> Tensor:
    """The inside of a box (left, top, right, bottom), bilinear, every pixel of it weighed in."""
    return _pixels(picture.resize((size, size), require("PIL.Image").Resampling.BILINEAR, box))


def _pixels(picture: Any) -> Tensor:
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()
