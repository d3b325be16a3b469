"""Noise, blurs, contrast, colour, geometry, resolution and JPEG.

Shape, everywhere: images (B, C, H, W) in [0, 1], result alike and not yet clipped.
"""

import io
import math

import numpy as np
import torch
from torch import Tensor

from slimbayes_lab.data.archives import require
from slimbayes_lab.data.corruptions import filters
from slimbayes_lab.data.corruptions.filters import RandomNumbers


def gaussian_noise(x: Tensor, draw: RandomNumbers, std: float) -> Tensor:
    """x + N(0, std^2)."""
    return x + draw.normal(*x.shape, std=std)


def shot_noise(x: Tensor, draw: RandomNumbers, photons: float) -> Tensor:
    """Poisson(x photons) / photons: mean x, variance x / photons."""
    return draw.poisson(x * photons) / photons


def impulse_noise(x: Tensor, draw: RandomNumbers, amount: float) -> Tensor:
    """Set a share `amount` of the values to 0 or 1, half each."""
    u = draw.uniform(*x.shape)
    return torch.where(u < amount, (u < amount / 2).to(x.dtype), x)


def disk(radius: float, alias: float) -> Tensor:
    """A disk whose rim is softened by a small Gaussian of width `alias`, without its empty margin.

    Quirk: the Gaussian mirrors at the kernel's border, so that disks reaching it (radius 8 and 10) don't sum to 1.

    Shape: result (k, k).
    """
    reach, soft = (8, 1) if radius <= 8 else (math.floor(radius), 2)
    line = torch.arange(-reach, reach + 1, dtype=torch.float64, device="cpu")
    flat = ((line**2 + line.unsqueeze(1) ** 2) <= radius**2).double()
    weights = torch.softmax(
        -0.5 * (torch.arange(-soft, soft + 1, device="cpu").double() / alias) ** 2, 0
    )
    kernel = filters.correlate(flat / flat.sum(), torch.outer(weights, weights))
    kept = min(math.floor(radius) + soft, reach)
    return kernel[reach - kept : reach + kept + 1, reach - kept : reach + kept + 1]


def defocus_blur(x: Tensor, draw: RandomNumbers, radius: float, alias: float) -> Tensor:
    """What a round aperture out of focus does: the mean over a disk."""
    return filters.correlate(x, disk(radius, alias))


def glass_blur(
    x: Tensor, draw: RandomNumbers, sigma: float, reach: float, rounds: float
) -> Tensor:
    """Blur, let pixels take a near pixel's colour, blur."""
    x = filters.truncate_levels(filters.gaussian(x, sigma))  # the reference moves bytes
    batch, _, height, width = x.shape
    for _ in range(int(rounds)):
        down, right = draw.integers(
            2, batch, height, width, low=-int(reach), high=int(reach)
        )  # quirk: never +reach
        x = filters.take(x, moved(down, right, int(reach)))
    return filters.gaussian(x, sigma)


def moved(down: Tensor, right: Tensor, reach: int) -> Tensor:
    """Which pixel each pixel's colour comes from after one round of moves.

    The reference walks from the last pixel to the first, margins left out, and means to swap each pixel with the one at
    (down, right). Quirk: numpy views turn the swap into a copy, the other pixel stays. So a pixel takes the first
    colour of one that comes later in the walk, and the new colour of one already done: a chain of references. Here each
    chain is followed by doubling its steps, log2 of its length times, instead of pixel by pixel.

    Shape: down and right (B, H, W), result (B, H, W) as numbers of pixels in row-major order.
    """
    _, height, width = down.shape
    own = torch.arange(height * width, device=down.device).view(height, width)
    row, column = own // width, own % width
    # Quirk: rows and columns reach + 1 .. size - reach take part, so one more is left out at the start than at the end.
    walked = (
        (row > reach)
        & (row <= height - reach)
        & (column > reach)
        & (column <= width - reach)
    )
    source = torch.where(walked, own + down * width + right, own).flatten(1)
    done = walked.flatten()[source] & (
        source > own.flatten()
    )  # the walk goes from large numbers to small ones
    ahead = torch.where(
        done, source, own.flatten()
    )  # the next pixel of the chain; itself at the end
    if reach > 1:  # with offsets of -1 and 0 alone no pixel looks back
        for _ in range(math.ceil(math.log2(height * width))):
            ahead = ahead.gather(1, ahead)
    return source.gather(1, ahead).view_as(down)


def motion_blur(x: Tensor, draw: RandomNumbers, radius: float, sigma: float) -> Tensor:
    """Motion along a line at an angle of -45 to 45 degrees; bytes go in and come out, as from ImageMagick."""
    angle = torch.deg2rad(draw.uniform(len(x), low=-45, high=45))
    return filters.round_levels(filters.motion(x, radius, sigma, angle)) / 255


def zoom_blur(x: Tensor, draw: RandomNumbers, *factors: float) -> Tensor:
    """Mean of the image and its enlargements."""
    # Quirk: the first factor is 1, so the image itself counts twice.
    return (x + sum(filters.zoom(x, factor) for factor in factors)) / (len(factors) + 1)


def contrast(x: Tensor, draw: RandomNumbers, factor: float) -> Tensor:
    """Pull every channel towards its mean."""
    mean = x.mean((2, 3), keepdim=True)
    return (x - mean) * factor + mean


def elastic_transform(
    x: Tensor,
    draw: RandomNumbers,
    alpha: float,
    sigma: float,
    affine: float,
    factor: float,
) -> Tensor:
    """A random affine map followed by a smooth random displacement.

    The constants are shares of the size: 32 for CIFAR and, as the reference has it, 244 for images of 224 pixels.
    """
    batch, _, height, width = x.shape
    size = min(height, width) * factor
    offsets = draw.uniform(batch, 3, 2, low=-affine * size, high=affine * size)
    down, right = draw.uniform(2, batch, height, width, low=-1, high=1)
    x = warp_affine(x, offsets)
    down, right = (
        filters.gaussian(f, sigma * size, "reflect", truncate=3.0) * alpha * size
        for f in (down, right)
    )
    rows, columns = _grid(x)
    return filters.bilinear(x, rows + down, columns + right, "reflect")


def warp_affine(x: Tensor, offsets: Tensor) -> Tensor:
    """Map three corners of the image's middle ninth, moved by `offsets`, and all else with them; borders are mirrored.

    Quirk: the corners are (row, column) pairs used as (x, y), which shows in images that are not square.

    Shape: x (B, C, H, W), offsets (B, 3, 2) in pixels as (x, y), result like x.
    """
    height, width = x.shape[-2:]
    side = min(height, width) // 3
    if side == 0:
        raise ValueError(
            f"elastic_transform needs images of at least 3 x 3 pixels, got {height} x {width}."
        )
    middle = x.new_tensor([height // 2, width // 2])
    corners = x.new_tensor(
        [[1, 1], [1, -1], [-1, -1]]
    )  # from the middle, in units of `side`: keeps the system tame
    moved = torch.cat([corners + offsets / side, torch.ones_like(offsets[..., :1])], 2)
    back = torch.linalg.solve(
        moved, corners.expand(len(x), -1, -1)
    )  # (moved x, moved y, 1) @ back = corner
    rows, columns = _grid(x)
    at = torch.stack(
        [
            (columns - middle[0]) / side,
            (rows - middle[1]) / side,
            torch.ones_like(rows),
        ],
        -1,
    )
    # A sum instead of a product of matrices, which TF32 would round to a tenth of a pixel.
    there = (at.unsqueeze(-1) * back.view(-1, 1, 1, 3, 2)).sum(-2) * side + middle
    return filters.bilinear(x, there[..., 1], there[..., 0], "mirror")


def _grid(x: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of every pixel, each (1, H, W)."""
    height, width = x.shape[-2:]
    rows = torch.arange(height, dtype=x.dtype, device=x.device).view(1, -1, 1)
    columns = torch.arange(width, dtype=x.dtype, device=x.device).view(1, 1, -1)
    return rows.expand(1, height, width), columns.expand(1, height, width)


def pixelate(x: Tensor, draw: RandomNumbers, factor: float) -> Tensor:
    """Shrink with a box filter and grow back, as Pillow does: bytes, columns before rows, rounded after each."""
    height, width = x.shape[-2:]
    pixels = filters.round_levels(x)
    for size in (
        max(int(width * factor), 1),
        max(int(height * factor), 1),
        width,
        height,
    ):
        pixels = filters.mix_columns(pixels, box_matrix(pixels.shape[-1], size))
        pixels = torch.floor(
            pixels + 0.5 + 1e-4
        ).mT  # the slack keeps halves, which thirds in float32 just miss
    return pixels / 255


def box_matrix(size: int, target: int) -> Tensor:
    """Pillow's box filter from `size` to `target` points as a matrix: means of whole pixels, never of parts of them.

    Shape: result (target, size).
    """
    scale = size / target
    wide = max(scale, 1.0)
    centre = (
        torch.arange(target, dtype=torch.float64, device="cpu").unsqueeze(1) + 0.5
    ) * scale
    pixel = torch.arange(size, dtype=torch.float64, device="cpu")
    away = (pixel - centre + 0.5) * (
        1 / wide
    )  # in Pillow's order of operations, on which ties depend
    window = (pixel >= (centre - wide / 2 + 0.5).floor()) & (
        pixel < (centre + wide / 2 + 0.5).floor()
    )
    inside = ((away > -0.5) & (away <= 0.5) & window).double()
    return inside / inside.sum(1, keepdim=True)


def jpeg_compression(x: Tensor, draw: RandomNumbers, quality: float) -> Tensor:
    """Compress with JPEG at `quality` (1 to 100) and decompress, image by image in Pillow, as the reference does.

    Shape: x (B, C, H, W) in [0, 1] with C 1 or 3, result alike.
    """
    image = require("PIL.Image")
    out = torch.empty(x.shape, dtype=torch.uint8, device="cpu")
    pixels = filters.round_levels(x).to("cpu", torch.uint8).permute(0, 2, 3, 1).numpy()
    for picture, result in zip(pixels, out):
        file = io.BytesIO()
        image.fromarray(picture[..., 0] if x.shape[1] == 1 else picture).save(
            file, "JPEG", quality=int(quality)
        )
        result.copy_(
            torch.from_numpy(np.array(image.open(file)))
            .view(*picture.shape)
            .permute(2, 0, 1)
        )
    return out.to(x) / 255
