"""The corruptions of CIFAR-10-C and ImageNet-C (Hendrycks & Dietterich 2019) on batches of images, on any device.

    corrupt(images, "fog", severity=3, generator=torch.Generator().manual_seed(0))

Constants and quirks are those of the authors' code; each quirk is named where it is kept. What differs:

- Random numbers come from torch, so images agree with the published files in distribution and not one by one. Where a
  published file is at hand, evaluate on it.
- Motion blur (and with it snow) follows ImageMagick's rule in floating point. elastic_transform samples at exact
  places, older OpenCV at multiples of 1/32 pixel. Where spatter leaves an image dry the reference divides 0 by 0.
- The reference knows images of 32 x 32 and 224 x 224. Here any size goes: elastic_transform's constants are shares of
  the shorter side, fog takes the next power of two, small photos of frost grow.
- The published ImageNet-C was stored as JPEG of quality 85 after all this; nothing here does so.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from slimbayes.data.corruptions import blur, digital, filters, noise, weather
from slimbayes.data.corruptions.noise import RandomNumbers
from slimbayes.data.corruptions.strengths import CORRUPTIONS as CORRUPTIONS
from slimbayes.data.corruptions.strengths import EXTRA as EXTRA
from slimbayes.data.corruptions.strengths import STRENGTHS, Style
from slimbayes.errors import did_you_mean

_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    function.__name__: function
    for function in (
        noise.gaussian_noise, noise.shot_noise, noise.impulse_noise, noise.speckle_noise,
        blur.defocus_blur, blur.glass_blur, blur.motion_blur, blur.zoom_blur, blur.gaussian_blur,
        weather.snow, weather.frost, weather.fog, weather.brightness, weather.spatter,
        digital.contrast, digital.elastic_transform, digital.pixelate, digital.jpeg_compression, digital.saturate,
    )
}  # fmt: skip
# Number of channels, for those corruptions that know colours; the others take any.
_GRAY, _COLOUR = ("snow", "brightness", "jpeg_compression"), ("frost", "spatter", "saturate")
_CHANNELS = dict.fromkeys(_GRAY, (1, 3)) | dict.fromkeys(_COLOUR, (3,))
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
        name: one of CORRUPTIONS or EXTRA.
        severity: 1 to 5.
        generator: where random numbers come from; torch's default generator of the images' device if None.
        style: "cifar" or "imagenet" constants; "cifar" for images of up to 64 pixels if None.
        frost_folder: where frost1.png to frost5.jpg lie; the folder frost in $SLIMBAYES_DATA if None.
        quantize: round the result down to multiples of 1/255, as the reference does when it stores bytes.

    Shape: images (B, C, H, W), result alike, with the same dtype and device. snow, brightness and jpeg_compression need
    C 1 or 3; frost, spatter and saturate 3.

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
    function = partial(_FUNCTIONS[name], folder=frost_folder) if name == "frost" else _FUNCTIONS[name]
    x = images if images.dtype == torch.float64 else images.float()  # half precision cannot tell 256 levels apart
    with torch.autocast(images.device.type, enabled=False):
        x = function(x, RandomNumbers(x, generator), *STRENGTHS[style][name][int(severity) - 1]).clamp(0, 1)
    return (filters.truncate_levels(x) if quantize else x).to(images.dtype).contiguous()


def _check_choice(name: str, severity: int, style: str | None) -> None:
    if name not in _FUNCTIONS:
        raise ValueError(f"Unknown corruption {name!r}{did_you_mean(str(name), _FUNCTIONS)}")
    if isinstance(severity, bool) or severity not in (1, 2, 3, 4, 5):
        raise ValueError(f"severity must be 1, 2, 3, 4 or 5, got {severity!r}.")
    if style is not None and style not in STRENGTHS:
        raise ValueError(f"Unknown style {style!r}{did_you_mean(str(style), STRENGTHS)}")


def _check_images(images: Tensor, name: str) -> None:
    if not isinstance(images, Tensor):
        raise TypeError(f"corrupt needs a tensor (B, C, H, W), got {type(images).__name__}.")
    if not images.is_floating_point():
        hint = "; bytes become that by images.float() / 255" if images.dtype == torch.uint8 else ""
        raise TypeError(f"corrupt needs floating-point images in [0, 1], got {images.dtype}{hint}.")
    shape = tuple(images.shape)
    if len(shape) != 4 or 0 in shape[1:]:
        raise ValueError(f"corrupt needs images (B, C, H, W), got shape {shape}; a single image needs [None].")
    channels = _CHANNELS.get(name, shape[1:2])
    if shape[1] not in channels:
        hint = "; gray images become coloured by images.expand(-1, 3, -1, -1)" if shape[1] == 1 else ""
        wanted = " or ".join(map(str, channels))
        raise ValueError(f"{name} needs images of {wanted} channels (B, C, H, W), got shape {shape}{hint}.")
    wrong = ~((images >= 0) & (images <= 1))  # written so that nan is wrong too
    if bool(wrong.any()):
        advice = "bytes must be divided by 255, a normalisation undone and nan removed first"
        raise ValueError(f"corrupt needs values in [0, 1], got {images[wrong][0].item()!r}; {advice}.")
