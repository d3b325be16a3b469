"""Blurs.

Shape, everywhere: images (B, C, H, W) in [0, 1], result alike and not yet clipped.
"""

import math

import torch
from torch import Tensor

from slimbayes.data.corruptions import filters
from slimbayes.data.corruptions.noise import RandomNumbers


def gaussian_blur(x: Tensor, draw: RandomNumbers, sigma: float) -> Tensor:
    """A Gaussian of `sigma` pixels, edges repeated."""
    return filters.gaussian(x, sigma)


def disk(radius: float, alias: float) -> Tensor:
    """A disk whose rim is softened by a small Gaussian of width `alias`, without its empty margin.

    Quirk: the Gaussian mirrors at the kernel's border, so that disks reaching it (radius 8 and 10) don't sum to 1.

    Shape: result (k, k).

    Example:
        >>> disk(1.0, 0.2).shape, round(float(disk(1.0, 0.2).sum()), 6)
        (torch.Size([5, 5]), 1.0)
    """
    reach, soft = (8, 1) if radius <= 8 else (math.floor(radius), 2)
    line = torch.arange(-reach, reach + 1, dtype=torch.float64, device="cpu")
    flat = ((line**2 + line.unsqueeze(1) ** 2) <= radius**2).double()
    weights = torch.softmax(-0.5 * (torch.arange(-soft, soft + 1, device="cpu").double() / alias) ** 2, 0)
    kernel = filters.correlate(flat / flat.sum(), torch.outer(weights, weights))
    kept = min(math.floor(radius) + soft, reach)
    return kernel[reach - kept : reach + kept + 1, reach - kept : reach + kept + 1]


def defocus_blur(x: Tensor, draw: RandomNumbers, radius: float, alias: float) -> Tensor:
    """What a round aperture out of focus does: the mean over a disk."""
    return filters.correlate(x, disk(radius, alias))


def glass_blur(x: Tensor, draw: RandomNumbers, sigma: float, reach: float, rounds: float) -> Tensor:
    """Blur, let pixels take a near pixel's colour, blur."""
    x = filters.truncate_levels(filters.gaussian(x, sigma))  # the reference moves bytes
    batch, _, height, width = x.shape
    for _ in range(int(rounds)):
        down, right = draw.integers(2, batch, height, width, low=-int(reach), high=int(reach))  # quirk: never +reach
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
    walked = (row > reach) & (row <= height - reach) & (column > reach) & (column <= width - reach)
    source = torch.where(walked, own + down * width + right, own).flatten(1)
    done = walked.flatten()[source] & (source > own.flatten())  # the walk goes from large numbers to small ones
    ahead = torch.where(done, source, own.flatten())  # the next pixel of the chain; itself at the end
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
