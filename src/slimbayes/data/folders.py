"""Folders of images, one folder for each class, as ImageNet and ImageNet-C come: decoded one by one when asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimbayes.data.archives import require

ENDINGS = (".jpeg", ".jpg", ".png")


class ImageFolder(torch.utils.data.Dataset[tuple[Any, int]]):
    """A torch data set over `folder/<class>/<image>`: item i is (image, label), the image decoded at that moment.

    Classes are numbered in the order of their names. Give `classes` to insist on those of another folder, so that a
    missing class cannot shift the labels. `transform` maps an image, uint8 (3, H, W), to what the DataLoader collates.

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
        self.classes = class_folders(self.folder)
        if classes is not None and self.classes != classes:
            got, odd = f"{len(self.classes)} class folders", sorted(set(classes) ^ set(self.classes))[:5]
            raise ValueError(f"{folder} has {got} and {len(classes)} were expected; only one side has {odd}.")
        self.paths: list[Path] = []
        numbers: list[int] = []
        for label, name in enumerate(self.classes):
            images = _images(self.folder / name)
            if not images:
                raise ValueError(f"{self.folder / name} holds no image that ends in {', '.join(ENDINGS)}.")
            self.paths += images
            numbers += [label] * len(images)
        self.y = torch.tensor(numbers, device="cpu")

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = decode(self.paths[index])
        return (image if self.transform is None else self.transform(image)), int(self.y[index])


def class_folders(folder: Path) -> tuple[str, ...]:
    """Names of the class folders, sorted."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder: it must hold one folder of images for each class.")
    return tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")))


def decode(path: Path) -> Tensor:
    """One JPEG or PNG as uint8 (3, H, W)."""
    image, numpy = require("PIL.Image"), require("numpy")
    try:
        # ImageNet's files named .JPEG hold a few PNG, and some CMYK pictures.
        with image.open(path, formats=("JPEG", "PNG")) as picture:
            pixels = numpy.array(picture.convert("RGB"))
    except (OSError, SyntaxError, image.DecompressionBombError) as error:
        raise ValueError(f"{path} cannot be decoded as a JPEG or PNG image: {error}") from error
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def _images(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in ENDINGS)
