"""Folders of images, one folder for each class, as ImageNet and ImageNet-C come: decoded one by one when asked for. And
training-time augmentation of whole batches on the device they live on: no loop over images, no host round trip.

Sizes: B images, C channels, H x W pixels.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slimbayes.untrusted import most_unpacked, open_file
from slimbayes_lab.data.archives import require

ENDINGS = (".jpeg", ".jpg", ".png")
_FORMATS = ("JPEG", "PNG")


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
            got, odd = (
                f"{len(self.classes)} class folders",
                sorted(set(classes) ^ set(self.classes))[:5],
            )
            raise ValueError(
                f"{folder} has {got} and {len(classes)} were expected; only one side has {odd}."
            )
        self.paths: list[Path] = []
        numbers: list[int] = []
        for label, name in enumerate(self.classes):
            images = sorted(
                p for p in (self.folder / name).iterdir() if p.suffix.lower() in ENDINGS
            )
            if not images:
                raise ValueError(
                    f"{self.folder / name} holds no image that ends in {', '.join(ENDINGS)}."
                )
            self.paths += images
            numbers += [label] * len(images)
        self.y = torch.tensor(numbers, device="cpu")

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = self.read(self.paths[index])
        return (image if self.transform is None else self.transform(image)), int(
            self.y[index]
        )

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
        raise FileNotFoundError(
            f"{folder} is not a folder: it must hold one folder of images for each class."
        )
    return tuple(
        sorted(
            entry.name
            for entry in folder.iterdir()
            if entry.is_dir() and not entry.name.startswith(".")
        )
    )


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
    u = torch.rand(
        (5, 1), generator=generator, device="cpu"
    )  # where pictures are decoded
    top, left, tall, wide = (
        float(side)
        for side in crop_boxes(u, picture.height, picture.width, scale, ratio)
    )
    out = _resized(picture, (left, top, left + wide, top + tall), size)
    return out.flip(2) if flip and float(u[4]) < 0.5 else out


def _opened(path: Path) -> Any:
    """A picture of Pillow's in RGB: cropping and shrinking it before it becomes a tensor takes half the time."""
    image = require("PIL.Image")
    try:
        # ImageNet's files named .JPEG hold a few PNG, and some CMYK pictures.
        with open_file(path) as file, image.open(file, formats=_FORMATS) as picture:
            _check_pixels(picture.size, os.fstat(file.fileno()).st_size)
            picture.load()  # as it is where it can be: converting would copy it
            return picture if picture.mode == "RGB" else picture.convert("RGB")
    except (OSError, SyntaxError, ValueError, image.DecompressionBombError) as error:
        raise ValueError(
            f"{path} cannot be decoded as a JPEG or PNG image: {error}"
        ) from error


def _check_pixels(size: tuple[int, int], stored: int) -> None:
    """Refuse a picture whose pixels would fill the memory that its file does not."""
    width, height = size
    if 3 * width * height > most_unpacked(stored):
        raise ValueError(
            f"its {width:,} x {height:,} pixels are too many for a file of {stored:,} bytes; make it smaller"
        )


def _resized(picture: Any, box: tuple[float, float, float, float], size: int) -> Tensor:
    """The inside of a box (left, top, right, bottom), bilinear, every pixel of it weighed in."""
    return _pixels(
        picture.resize((size, size), require("PIL.Image").Resampling.BILINEAR, box)
    )


def _pixels(picture: Any) -> Tensor:
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


def pad_crop_flip(
    images: Tensor,
    pad: int = 4,
    flip: bool = True,
    fill: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Crops of the images padded by `pad` on every side, at random places, half of them mirrored: the CIFAR recipe.

    The papers say 4, the rank-1 paper's code pads by 2. Pad normalised images, so that `fill` is the mean colour.

    Shape: (B, C, H, W) of any dtype -> (B, C, H, W).

    Example:
        >>> pad_crop_flip(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 3, 32, 32])
    """
    _check(images)
    if pad < 0:
        raise ValueError(f"pad must not be negative, got {pad!r}.")
    batch, _, height, width = images.shape
    rows = _offsets(batch, 2 * pad + 1, images, generator) + torch.arange(
        height, device=images.device
    )
    columns = _offsets(batch, 2 * pad + 1, images, generator) + torch.arange(
        width, device=images.device
    )
    if flip:
        mirrored = _offsets(batch, 2, images, generator) == 1
        columns = torch.where(mirrored, columns.flip(1), columns)
    padded = F.pad(images, (pad, pad, pad, pad), value=fill).permute(0, 2, 3, 1)
    image = torch.arange(batch, device=images.device).view(-1, 1, 1)
    return padded[image, rows.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 1, 2)


def resized_crop(
    images: Tensor,
    size: int,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    flip: bool = True,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Random crops of random area and shape, resized to a square, half of them mirrored: the ImageNet recipe.

    Bilinear, without smoothing before it shrinks. A crop that would not fit is cut down to the image.

    Args:
        size: height and width of the results.
        scale: least and largest share of the image's area.
        ratio: least and largest width over height, drawn evenly in its logarithm.

    Shape: float (B, C, H, W) -> (B, C, size, size).

    Example:
        >>> resized_crop(torch.rand(2, 3, 64, 48), size=32).shape
        torch.Size([2, 3, 32, 32])
    """
    _check(images)
    if not images.is_floating_point():
        raise TypeError(
            f"resized_crop needs floating-point images, got {images.dtype}; divide by 255."
        )
    check_boxes(scale, ratio)
    batch, _, height, width = images.shape
    device = generator.device if generator else images.device
    u = torch.rand((5, batch), generator=generator, device=device).to(images.device)
    top, left, tall, wide = crop_boxes(u, height, width, scale, ratio)
    rows, columns = _centres(top, tall, size, height), _centres(left, wide, size, width)
    if flip:
        columns = torch.where(u[4].unsqueeze(1) < 0.5, columns.flip(1), columns)
    grid = torch.stack(
        [
            columns.unsqueeze(1).expand(-1, size, -1),
            rows.unsqueeze(2).expand(-1, -1, size),
        ],
        -1,
    )
    return F.grid_sample(
        images,
        grid.to(images.dtype),
        mode="bilinear",
        padding_mode="border",
        align_corners=False,
    )


def check_boxes(scale: tuple[float, float], ratio: tuple[float, float]) -> None:
    """Refuse shares of the area, or ratios of width to height, that no crop has."""
    if not 0 < scale[0] <= scale[1] <= 1 or not 0 < ratio[0] <= ratio[1]:
        raise ValueError(
            f"scale must lie in (0, 1] and ratio above 0, least first; got scale={scale}, ratio={ratio}."
        )


def crop_boxes(
    u: Tensor,
    height: int,
    width: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> tuple[Tensor, ...]:
    """Top, left, height and width of crops, each (B,), from numbers u (4 or more, B) in [0, 1)."""
    area = (scale[0] + (scale[1] - scale[0]) * u[0]) * height * width
    shape = torch.exp(
        math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * u[1]
    )
    tall, wide = (
        (area / shape).sqrt().round().clamp(1, height),
        (area * shape).sqrt().round().clamp(1, width),
    )
    return (
        (u[2] * (height - tall + 1)).floor(),
        (u[3] * (width - wide + 1)).floor(),
        tall,
        wide,
    )


def _centres(start: Tensor, length: Tensor, size: int, whole: int) -> Tensor:
    """Where the centres of `size` target pixels lie within crops, (B, size), in grid_sample's units of [-1, 1]."""
    steps = (torch.arange(size, device=start.device) + 0.5) / size
    # Within half a pixel of the crop's edge, so that nothing outside of it is mixed in.
    inside = (
        (steps * length.unsqueeze(1)).clamp_min(0.5).minimum(length.unsqueeze(1) - 0.5)
    )
    return (start.unsqueeze(1) + inside) * 2 / whole - 1


def _offsets(
    batch: int, values: int, images: Tensor, generator: torch.Generator | None
) -> Tensor:
    """One whole number below `values` for each image, (B, 1)."""
    device = generator.device if generator else images.device
    return torch.randint(values, (batch, 1), generator=generator, device=device).to(
        images.device
    )


def _check(images: Tensor) -> None:
    if images.dim() != 4:
        raise ValueError(
            f"Images must be a batch (B, C, H, W), got shape {tuple(images.shape)}."
        )
