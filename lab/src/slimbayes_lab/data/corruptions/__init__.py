"""The corruptions of CIFAR-10-C and ImageNet-C (Hendrycks & Dietterich 2019) on batches of images, on any device.

    corrupt(images, "fog", severity=3, generator=torch.Generator().manual_seed(0))

Constants and quirks are those of the authors' code; each quirk is named where it is kept. What differs:

- Random numbers come from torch, so images agree with the published files in distribution and not one by one. Where a
  published file is at hand, evaluate on it.
- Motion blur (and with it snow) follows ImageMagick's rule in floating point. elastic_transform samples at exact
  places, older OpenCV at multiples of 1/32 pixel.
- The reference knows images of 32 x 32 and 224 x 224. Here any size goes: elastic_transform's constants are shares of
  the shorter side, fog takes the next power of two, small photos of frost grow.
- The published ImageNet-C was stored as JPEG of quality 85 after all this; nothing here does so.
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from slimbayes.errors import did_you_mean
from slimbayes_lab.data.corruptions import effects, filters, weather
from slimbayes_lab.data.corruptions.filters import RandomNumbers

Style = Literal["cifar", "imagenet"]
Arguments = tuple[float, ...]
# Strengths, severity 1 to 5, from the authors' code: the arguments that follow `(images, draw)` in the function of that
# name. Beside strength, the sets differ in three sizes: the plasma map of fog, the shrinking of frost photos and the
# scale of elastic_transform.


CORRUPTIONS = (
    "gaussian_noise", "shot_noise", "impulse_noise",
    "defocus_blur", "glass_blur", "motion_blur", "zoom_blur",
    "snow", "frost", "fog", "brightness",
    "contrast", "elastic_transform", "pixelate", "jpeg_compression",
)  # fmt: skip


def steps(stop: float, step: float) -> Arguments:
    """Zoom factors from 1 to `stop` as numpy's arange rounds: (1.06 - 1) / 0.01 is a little over 6, so 1.06 is in.

    Example:
        >>> [round(f, 2) for f in steps(1.06, 0.01)]
        [1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06]
    """
    delta = (1 + step) - 1
    return tuple(1 + i * delta for i in range(math.ceil((stop - 1) / step)))


def _single(*values: float) -> tuple[Arguments, ...]:
    return tuple((value,) for value in values)


_CIFAR: dict[str, tuple[Arguments, ...]] = {
    "gaussian_noise": _single(0.04, 0.06, 0.08, 0.09, 0.10),
    "shot_noise": _single(500, 250, 100, 75, 50),
    "impulse_noise": _single(0.01, 0.02, 0.03, 0.05, 0.07),
    "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),  # radius, alias
    "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),  # sigma, reach, rounds
    "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),  # radius, sigma
    "zoom_blur": (steps(1.06, 0.01), steps(1.11, 0.01), steps(1.16, 0.01), steps(1.21, 0.01), steps(1.26, 0.01)),
    "snow": (  # mean, std, zoom, threshold, radius, sigma, mix
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95), (0.1, 0.2, 1, 0.5, 10, 4, 0.9), (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85), (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    "frost": ((1, 0.2, 5), (1, 0.3, 5), (0.9, 0.4, 5), (0.85, 0.4, 5), (0.75, 0.45, 5)),  # image, photo, shrink
    "fog": ((0.2, 3, 32), (0.5, 3, 32), (0.75, 2.5, 32), (1, 2, 32), (1.5, 1.75, 32)),  # amount, decay, map size
    "brightness": _single(0.05, 0.1, 0.15, 0.2, 0.3),
    "contrast": _single(0.75, 0.5, 0.4, 0.3, 0.15),
    "elastic_transform": (  # alpha, sigma, affine, all three as shares of the image size, and a factor on the size
        (0, 0, 0.08, 1), (0.05, 0.2, 0.07, 1), (0.08, 0.06, 0.06, 1), (0.1, 0.04, 0.05, 1), (0.1, 0.03, 0.03, 1),
    ),
    "pixelate": _single(0.95, 0.9, 0.85, 0.75, 0.65),
    "jpeg_compression": _single(80, 65, 58, 50, 40),
}  # fmt: skip

_LARGE = (
    244 / 224
)  # the reference multiplies elastic_transform's constants by 244 where images have 224 pixels; kept

_IMAGENET: dict[str, tuple[Arguments, ...]] = {
    "gaussian_noise": _single(0.08, 0.12, 0.18, 0.26, 0.38),
    "shot_noise": _single(60, 25, 12, 5, 3),
    "impulse_noise": _single(0.03, 0.06, 0.09, 0.17, 0.27),
    "defocus_blur": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
    "glass_blur": ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
    "motion_blur": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
    "zoom_blur": (steps(1.11, 0.01), steps(1.16, 0.01), steps(1.21, 0.02), steps(1.26, 0.02), steps(1.31, 0.03)),
    "snow": (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8), (0.2, 0.3, 2, 0.5, 12, 4, 0.7), (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65), (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ),
    "frost": ((1, 0.4, 1), (0.8, 0.6, 1), (0.7, 0.7, 1), (0.65, 0.7, 1), (0.6, 0.75, 1)),
    "fog": ((1.5, 2, 256), (2, 2, 256), (2.5, 1.7, 256), (2.5, 1.5, 256), (3, 1.4, 256)),
    "brightness": _single(0.1, 0.2, 0.3, 0.4, 0.5),
    "contrast": _single(0.4, 0.3, 0.2, 0.1, 0.05),
    "elastic_transform": (
        (2, 0.7, 0.1, _LARGE), (2, 0.08, 0.2, _LARGE), (0.05, 0.01, 0.02, _LARGE), (0.07, 0.01, 0.02, _LARGE),
        (0.12, 0.01, 0.02, _LARGE),
    ),
    "pixelate": _single(0.6, 0.5, 0.4, 0.3, 0.25),
    "jpeg_compression": _single(25, 18, 15, 10, 7),
}  # fmt: skip

STRENGTHS: dict[Style, dict[str, tuple[Arguments, ...]]] = {
    "cifar": _CIFAR,
    "imagenet": _IMAGENET,
}

# --- corrupting ---

_MADE = vars(effects) | vars(weather)
_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    name: _MADE[name] for name in CORRUPTIONS
}
# Number of channels, for those corruptions that know colours; the others take any.
_CHANNELS = {
    "snow": (1, 3),
    "brightness": (1, 3),
    "jpeg_compression": (1, 3),
    "frost": (3,),
}
_SMALL = 64  # pixels: the longer side up to which images count as CIFAR's kind


@torch.no_grad()
def corrupt(
    images: Tensor,
    name: str,
    severity: int,
    generator: torch.Generator | None = None,
    style: Style | None = None,
    frost_folder: str | Path | None = None,
    quantize: bool = True,
) -> Tensor:
    """Corrupt a batch of images as CIFAR-10-C or ImageNet-C does.

    Every image gets random numbers of its own. The same generator state gives the same result for the same batch on the
    same device (with a CPU generator, the same random numbers on any); splitting a batch changes who gets which.

    Args:
        images: values in [0, 1], any floating dtype.
        name: one of CORRUPTIONS.
        severity: 1 to 5.
        generator: where random numbers come from; torch's default generator of the images' device if None.
        style: "cifar" or "imagenet" constants; "cifar" for images of up to 64 pixels if None.
        frost_folder: where frost1.png to frost5.jpg lie; the folder frost in $SLIMBAYES_DATA if None.
        quantize: round the result down to multiples of 1/255, as the reference does when it stores bytes.

    Shape: images (B, C, H, W), result alike, with the same dtype and device. snow, brightness and jpeg_compression need
    C 1 or 3; frost 3.

    Example:
        >>> gray = torch.full((2, 3, 32, 32), 0.5)
        >>> noisy = corrupt(gray, "gaussian_noise", severity=5, generator=torch.Generator().manual_seed(0))
        >>> noisy.shape, round(float(noisy.std()), 2)
        (torch.Size([2, 3, 32, 32]), 0.1)
    """
    _check_choice(name, severity, style)
    _check_images(images, name)
    if len(images) == 0:
        return images.clone()
    style = style or ("cifar" if max(images.shape[-2:]) <= _SMALL else "imagenet")
    function = (
        partial(_FUNCTIONS[name], folder=frost_folder)
        if name == "frost"
        else _FUNCTIONS[name]
    )
    x = (
        images if images.dtype == torch.float64 else images.float()
    )  # half precision cannot tell 256 levels apart
    with torch.autocast(images.device.type, enabled=False):
        x = function(
            x, RandomNumbers(x, generator), *STRENGTHS[style][name][int(severity) - 1]
        ).clamp(0, 1)
    return (filters.truncate_levels(x) if quantize else x).to(images.dtype).contiguous()


def _check_choice(name: str, severity: int, style: str | None) -> None:
    if name not in _FUNCTIONS:
        raise ValueError(
            f"Unknown corruption {name!r}{did_you_mean(str(name), _FUNCTIONS)}"
        )
    if isinstance(severity, bool) or severity not in (1, 2, 3, 4, 5):
        raise ValueError(f"severity must be 1, 2, 3, 4 or 5, got {severity!r}.")
    if style is not None and style not in STRENGTHS:
        raise ValueError(
            f"Unknown style {style!r}{did_you_mean(str(style), STRENGTHS)}"
        )


def _check_images(images: Tensor, name: str) -> None:
    if not isinstance(images, Tensor):
        raise TypeError(
            f"corrupt needs a tensor (B, C, H, W), got {type(images).__name__}."
        )
    if not images.is_floating_point():
        hint = (
            "; bytes become that by images.float() / 255"
            if images.dtype == torch.uint8
            else ""
        )
        raise TypeError(
            f"corrupt needs floating-point images in [0, 1], got {images.dtype}{hint}."
        )
    shape = tuple(images.shape)
    if len(shape) != 4 or 0 in shape[1:]:
        raise ValueError(
            f"corrupt needs images (B, C, H, W), got shape {shape}; a single image needs [None]."
        )
    channels = _CHANNELS.get(name, shape[1:2])
    if shape[1] not in channels:
        hint = (
            "; gray images become coloured by images.expand(-1, 3, -1, -1)"
            if shape[1] == 1
            else ""
        )
        wanted = " or ".join(map(str, channels))
        raise ValueError(
            f"{name} needs images of {wanted} channels (B, C, H, W), got shape {shape}{hint}."
        )
    wrong = ~((images >= 0) & (images <= 1))  # written so that nan is wrong too
    if bool(wrong.any()):
        advice = (
            "bytes must be divided by 255, a normalisation undone and nan removed first"
        )
        raise ValueError(
            f"corrupt needs values in [0, 1], got {images[wrong][0].item()!r}; {advice}."
        )
