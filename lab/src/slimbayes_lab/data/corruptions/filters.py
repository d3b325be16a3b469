"""Linear filters and resampling with the border rules of the libraries that the reference corruptions call.

Shape, everywhere: images (B, C, H, W), or (..., H, W) where channels do not matter; the result is alike.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomNumbers:
    """They have the device and dtype of `like`, but are made where the generator lives: a CPU's serves a GPU."""

    like: Tensor
    generator: torch.Generator | None = None

    @property
    def _device(self) -> torch.device:
        return self.like.device if self.generator is None else self.generator.device

    def normal(self, *shape: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
        """Independent N(mean, std^2)."""
        noise = torch.randn(
            shape, generator=self.generator, device=self._device, dtype=self.like.dtype
        )
        return noise.to(self.like.device).mul_(std).add_(mean)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Independent U(low, high)."""
        noise = torch.rand(
            shape, generator=self.generator, device=self._device, dtype=self.like.dtype
        )
        return noise.to(self.like.device).mul_(high - low).add_(low)

    def integers(self, *shape: int, low: int, high: int) -> Tensor:
        """Independent integers low .. high - 1."""
        return torch.randint(
            low, high, shape, generator=self.generator, device=self._device
        ).to(self.like.device)

    def poisson(self, rate: Tensor) -> Tensor:
        """Independent Poisson counts."""
        return torch.poisson(rate.to(self._device), generator=self.generator).to(
            self.like.device
        )


# Outside the image: a a|abc|c c (OpenCV replicate), b a|abc|c b (SciPy reflect), c b|abc|b a (OpenCV reflect 101).
Border = Literal["nearest", "reflect", "mirror"]


def fold(index: Tensor, size: int, border: Border) -> Tensor:
    """Bring positions outside 0 .. size - 1 back inside.

    Example:
        >>> [fold(torch.arange(-2, 5), 3, border).tolist() for border in ("nearest", "reflect", "mirror")]
        [[0, 0, 0, 1, 2, 2, 2], [1, 0, 0, 1, 2, 2, 1], [2, 1, 0, 1, 2, 1, 0]]
    """
    if border == "nearest" or size == 1:
        return index.clamp(0, size - 1)
    overlap = int(border == "reflect")
    period = 2 * (size - 1 + overlap)
    index = index.remainder(period)
    return torch.where(index >= size, period - overlap - index, index)


def truncate_levels(x: Tensor) -> Tensor:
    """Round down to multiples of 1/255, as numpy does when it casts 255 x to uint8."""
    return (
        torch.floor(x * 255 + 1e-3) / 255
    )  # the slack keeps a level that float32 holds as 1.9999998


def round_levels(x: Tensor) -> Tensor:
    """255 x as whole numbers: the bytes an image in [0, 1] was made from."""
    return torch.floor(x * 255 + 0.5)


def mix_columns(x: Tensor, matrix: Tensor) -> Tensor:
    """x @ matrix.T for every image and channel: (..., H, W) and (w, W) to (..., H, w)."""
    dtype = (
        torch.float64 if x.is_cuda else x.dtype
    )  # in float32 a GPU may round factors to TF32: wrong by a level
    return (x.contiguous().to(dtype) @ matrix.to(x.device, dtype).mT).to(x.dtype)


def separable(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """rows @ x @ columns.T for every image and channel: (..., H, W), (h, H) and (w, W) to (..., h, w)."""
    return mix_columns(mix_columns(x, columns).mT, rows).mT


def gaussian_matrix(
    size: int, sigma: float, border: Border = "nearest", truncate: float = 4.0
) -> Tensor:
    """Gaussian smoothing of `size` points as a matrix (size, size), cut off at `truncate` sigma like scipy.ndimage."""
    radius = int(truncate * sigma + 0.5)
    if radius == 0:
        return torch.eye(size, dtype=torch.float64, device="cpu")
    taps = torch.arange(-radius, radius + 1, device="cpu")
    weights = torch.softmax(-0.5 * (taps.double() / sigma) ** 2, 0)
    index = fold(torch.arange(size, device="cpu").unsqueeze(1) + taps, size, border)
    matrix = torch.zeros(size, size, dtype=torch.float64, device="cpu")
    return matrix.scatter_add_(1, index, weights.expand(size, -1))


def gaussian(
    x: Tensor, sigma: float, border: Border = "nearest", truncate: float = 4.0
) -> Tensor:
    """Smooth images with a Gaussian of `sigma` pixels."""
    return separable(
        x, *(gaussian_matrix(n, sigma, border, truncate) for n in x.shape[-2:])
    )


def zoom_matrix(size: int, factor: float) -> Tensor:
    """Enlarge the middle of `size` points by `factor`, linearly, and keep `size` of them, as a matrix (size, size)."""
    crop = math.ceil(size / factor)
    grown = round(crop * factor)
    start, trim = (size - crop) // 2, (grown - size) // 2
    at = (
        (trim + torch.arange(size, dtype=torch.float64, device="cpu"))
        * (crop - 1)
        / max(grown - 1, 1)
    )
    left = at.long().clamp(max=max(crop - 2, 0))
    share = (at - left).unsqueeze(1)
    eye = torch.eye(size, dtype=torch.float64, device="cpu")
    return (1 - share) * eye[start + left] + share * eye[
        start + (left + 1).clamp(max=crop - 1)
    ]


def zoom(x: Tensor, factor: float) -> Tensor:
    """Enlarge the middle of images, which keep their size."""
    return separable(x, *(zoom_matrix(n, factor) for n in x.shape[-2:]))


def correlate(x: Tensor, kernel: Tensor, border: Border = "mirror") -> Tensor:
    """Weigh every pixel's neighbourhood with an odd square kernel (k, k), like cv2.filter2D.

    Sums shifted images: kernels here are small or sparse, and a cuDNN convolution would round factors to TF32.
    """
    (height, width), margin, padded = x.shape[-2:], len(kernel) // 2, x
    for dim in (-2, -1):
        around = torch.arange(-margin, x.shape[dim] + margin, device=x.device)
        padded = padded.index_select(dim, fold(around, x.shape[dim], border))
    out = torch.zeros_like(x)
    for i, row in enumerate(kernel.tolist()):
        for j, weight in enumerate(row):
            if weight:
                out.add_(padded[..., i : i + height, j : j + width], alpha=weight)
    return out


def motion(x: Tensor, radius: float, sigma: float, angle: Tensor) -> Tensor:
    """ImageMagick's motion blur: a one-sided Gaussian tail along 2 radius + 1 whole-pixel steps at an angle (B,)."""
    height, width = x.shape[-2:]
    taps = torch.arange(2 * int(radius) + 1, device="cpu")
    weights = torch.softmax(-0.5 * (taps.double() / sigma) ** 2, 0).tolist()
    out = torch.zeros_like(x)
    for i, weight in enumerate(weights):
        down, right = (
            torch.ceil(i * step - 0.5).long().unsqueeze(1)
            for step in (angle.sin(), angle.cos())
        )
        rows = (torch.arange(height, device=x.device) + down).clamp(0, height - 1)
        columns = (torch.arange(width, device=x.device) + right).clamp(0, width - 1)
        out.add_(
            take(x, rows.unsqueeze(2) * width + columns.unsqueeze(1)), alpha=weight
        )
    return out


def take(x: Tensor, index: Tensor) -> Tensor:
    """Pixels by their number in row-major order, index (B, H, W), the same for all channels."""
    index = index.flatten(1).unsqueeze(1).expand(-1, x.shape[1], -1)
    return x.flatten(2).gather(2, index).view_as(x)


def bilinear(x: Tensor, rows: Tensor, columns: Tensor, border: Border) -> Tensor:
    """Sample images between pixels, at rows and columns (B, H, W)."""
    height, width = x.shape[-2:]
    top, left = rows.floor(), columns.floor()
    below, beside = (rows - top).unsqueeze(1), (columns - left).unsqueeze(1)

    def line(y: Tensor) -> Tensor:
        start = fold(y.long(), height, border) * width
        first, second = (
            take(x, start + fold(left.long() + i, width, border)) for i in (0, 1)
        )
        return torch.lerp(first, second, beside)

    return torch.lerp(line(top), line(top + 1), below)
