"""Snow, frost, fog, light, and splashes of water or mud.

Shape, everywhere: images (B, C, H, W) in [0, 1], result alike and not yet clipped; layers of splashes (B, H, W).
"""

import os
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from slimbayes_lab.data.corruptions import filters
from slimbayes_lab.data.corruptions.filters import RandomNumbers
from slimbayes_lab.data.folders import decode

PHOTOS = (
    "frost1.png",
    "frost2.png",
    "frost3.png",
    "frost4.jpg",
    "frost5.jpg",
)  # quirk: it never draws its sixth
GRAY = (0.299, 0.587, 0.114)


def snow(x: Tensor, draw: RandomNumbers, *strength: float) -> Tensor:
    """Whiten the image and add flakes: thresholded noise, enlarged, blown along a line, and turned by 180 degrees."""
    mean, std, zoom, limit, radius, sigma, mix = strength
    batch, channels, height, width = x.shape
    flakes = filters.zoom(
        draw.normal(batch, 1, height, width, mean=mean, std=std), zoom
    )
    flakes = filters.truncate_levels(torch.where(flakes < limit, 0, flakes).clamp(0, 1))
    angle = torch.deg2rad(draw.uniform(batch, low=-135, high=-45))
    flakes = filters.round_levels(filters.motion(flakes, radius, sigma, angle)) / 255
    gray = (
        x
        if channels == 1
        else torch.einsum("bchw,c->bhw", x, x.new_tensor(GRAY)).unsqueeze(1)
    )
    x = mix * x + (1 - mix) * torch.maximum(x, 1.5 * gray + 0.5)
    return x + flakes + flakes.flip(-2, -1)


def frost(
    x: Tensor,
    draw: RandomNumbers,
    image: float,
    photo: float,
    shrink: float,
    folder: str | Path | None = None,
) -> Tensor:
    """Blend with a random crop of one of the five photos."""
    batch, _, height, width = x.shape
    which = draw.integers(batch, low=0, high=len(PHOTOS))
    place = draw.uniform(batch, 2)
    ice = torch.empty_like(x)
    for i, whole in enumerate(read_photos(_find_photos(folder), int(shrink))):
        chosen = which == i
        ice[chosen] = _crops(
            _cover(whole.to(x), height, width), place[chosen], height, width
        )
    return image * x + photo * ice


def _crops(photo: Tensor, place: Tensor, height: int, width: int) -> Tensor:
    """Crops of a photo (3, h, w) at relative places (N, 2) in [0, 1): (N, 3, H, W)."""
    # Quirk: numpy's randint leaves out the end, so the last row and column of a photo are never seen.
    free = place.new_tensor([photo.shape[1] - height, photo.shape[2] - width])
    start = torch.minimum(
        (place * free).long(), (free.long() - 1).clamp(min=0)
    )  # u * n may round up to n
    rows = start[:, :1] + torch.arange(height, device=photo.device)
    columns = start[:, 1:] + torch.arange(width, device=photo.device)
    return photo[:, rows.unsqueeze(2), columns.unsqueeze(1)].transpose(0, 1)


def _cover(photo: Tensor, height: int, width: int) -> Tensor:
    """Enlarge a photo that is smaller than the images; the reference, with images of 224 pixels, never needs to."""
    scale = max((height + 1) / photo.shape[1], (width + 1) / photo.shape[2])
    if scale <= 1:
        return photo
    size = [
        max(round(photo.shape[1] * scale), height + 1),
        max(round(photo.shape[2] * scale), width + 1),
    ]
    return torch.nn.functional.interpolate(
        photo.unsqueeze(0), size, mode="bilinear", align_corners=False
    )[0]


def _find_photos(folder: str | Path | None) -> Path:
    """The folder that holds the photos, or an error that says what is missing."""
    root = os.environ.get("SLIMBAYES_DATA")
    needs = (
        f"frost needs the photos {', '.join(PHOTOS)} of github.com/hendrycks/robustness"
    )
    if folder is None and root is None:
        raise FileNotFoundError(
            f"{needs}: pass frost_folder=..., or put them into $SLIMBAYES_DATA/frost; it is not set."
        )
    path = Path(folder) if folder is not None else Path(root or "") / "frost"
    if missing := [name for name in PHOTOS if not (path / name).is_file()]:
        where = "frost_folder or $SLIMBAYES_DATA/frost says where"
        raise FileNotFoundError(
            f"{needs} in {str(path)!r}, which lacks {', '.join(missing)}; {where}."
        )
    return path.resolve()


@lru_cache(maxsize=4)
def read_photos(folder: Path, shrink: int) -> tuple[Tensor, ...]:
    """The five photos in [0, 1], each (3, H, W), shrunk by keeping one pixel of `shrink` x `shrink`."""
    return tuple(
        _subsample(decode(folder / name), shrink).float() / 255 for name in PHOTOS
    )


def _subsample(photo: Tensor, shrink: int) -> Tensor:
    """cv2.resize by 1/shrink for odd `shrink`: without smoothing, its bilinear sample points fall on middle pixels."""
    for dim in (1, 2):
        size = photo.shape[dim]
        index = torch.arange(round(size / shrink), device="cpu") * shrink + shrink // 2
        photo = photo.index_select(dim, index.clamp(max=size - 1))
    return photo


def fog(
    x: Tensor, draw: RandomNumbers, amount: float, decay: float, size: float
) -> Tensor:
    """Add a cloud and scale the image back to its old maximum."""
    batch, _, height, width = x.shape
    side = max(int(size), 1 << (max(height, width) - 1).bit_length())
    cloud = plasma(draw, batch, side, decay)[:, None, :height, :width]
    brightest = x.amax((1, 2, 3), keepdim=True)
    return (x + amount * cloud) * brightest / (brightest + amount)


def plasma(draw: RandomNumbers, batch: int, side: int, decay: float) -> Tensor:
    """Clouds in [0, 1] by the diamond-square rule on a torus.

    Each level adds wibble * U(-wibble, wibble) to the mean of four neighbours; wibble starts at 100 (quirk: it enters
    twice) and is divided by `decay` from level to level.

    Shape: result (B, side, side); `side` is a power of two.
    """
    cloud = torch.zeros(
        batch, side, side, dtype=draw.like.dtype, device=draw.like.device
    )
    step, wibble = side, 100.0
    while step >= 2:
        corners, half = cloud[:, ::step, ::step], step // 2
        shape, spread = corners.shape, wibble * wibble
        square = corners + corners.roll(-1, 1)
        middles = (square + square.roll(-1, 2)) / 4 + draw.uniform(
            *shape, low=-spread, high=spread
        )
        sides = (middles + middles.roll(1, 1) + corners + corners.roll(-1, 2)) / 4
        ends = (middles + middles.roll(1, 2) + corners + corners.roll(-1, 1)) / 4
        cloud[:, half::step, half::step] = middles
        cloud[:, ::step, half::step] = sides + draw.uniform(
            *shape, low=-spread, high=spread
        )
        cloud[:, half::step, ::step] = ends + draw.uniform(
            *shape, low=-spread, high=spread
        )
        step, wibble = half, wibble / decay
    low, high = cloud.amin((1, 2), keepdim=True), cloud.amax((1, 2), keepdim=True)
    return (cloud - low) / (high - low)


def brightness(x: Tensor, draw: RandomNumbers, amount: float) -> Tensor:
    """Raise V of hue, saturation and value, clipped at 1: colours are scaled by V' / V, black becomes gray."""
    value = x.amax(1, keepdim=True)
    raised = (value + amount).clamp(max=1)
    return torch.where(value > 0, x / value * raised, raised)
