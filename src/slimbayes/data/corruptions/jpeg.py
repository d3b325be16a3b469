"""JPEG as Pillow writes and reads it (libjpeg: 4:2:0 chroma, smooth upsampling), in tensor operations without a file.

All steps are libjpeg's own integer arithmetic (colour, subsampling, cosine transform, upsampling): with a cosine transform in
floating point 15 % of the pixels of CIFAR came out different at quality 80, with this one none. float64 holds the integers,
since GPUs multiply no integer matrices.

Sizes: B images, C channels (3, or 1 for gray), H rows, W columns.
"""

import torch
from torch import Tensor

from slimbayes.data.corruptions import filters
from slimbayes.data.corruptions.draws import Draws

# Annex K of the JPEG standard, quality 50.
LUMA = (
    16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55, 14, 13, 16, 24, 40, 57, 69, 56, 14, 17, 22, 29, 51, 87, 80, 62,
    18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92, 49, 64, 78, 87, 103, 121, 120, 101, 72, 92, 95, 98, 112, 100, 103, 99,
)  # fmt: skip
CHROMA = (
    17, 18, 24, 47, 99, 99, 99, 99, 18, 21, 26, 66, 99, 99, 99, 99, 24, 26, 56, 99, 99, 99, 99, 99, 47, 66, 99, 99, 99, 99, 99, 99,
    *(99,) * 32,
)  # fmt: skip


def jpeg_compression(x: Tensor, draw: Draws, quality: float) -> Tensor:
    """Compress with JPEG at `quality` (1 to 100) and decompress.

    Shape: x (B, C, H, W) in [0, 1] with C 1 or 3, result alike.
    """
    pixels = filters.round_levels(x).int()
    if x.shape[1] == 1:
        return _code(pixels[:, 0], LUMA, quality).unsqueeze(1).to(x.dtype) / 255
    height, width = x.shape[-2:]
    luma, *chroma = _to_ycc(pixels)
    luma = _code(luma, LUMA, quality)
    halves = (_code(_halve(plane), CHROMA, quality)[..., : (width + 1) // 2] for plane in chroma)  # without the filling
    blue, red = (_double(half)[:, :height, :width] - 128 for half in halves)
    return _to_rgb(luma, blue, red).clamp(0, 255).to(x.dtype) / 255


def quantisation(base: tuple[int, ...], quality: float) -> Tensor:
    """The step of each coefficient at a quality.

    Shape: result (8, 8).

    Example:
        >>> quantisation(LUMA, 80)[0, :4].tolist()
        [6.0, 4.0, 4.0, 6.0]
    """
    scale = int(5000 / quality if quality < 50 else 200 - 2 * quality)
    steps = [min(max((step * scale + 50) // 100, 1), 255) for step in base]
    return torch.tensor(steps, dtype=torch.float64, device="cpu").view(8, 8)


def _cosines() -> Tensor:
    """libjpeg's accurate cosine transform of eight points in 13-bit fixed point, its factors multiplied out: (8, 8)."""
    even = [
        [8192, 8192, 8192, 8192],
        [10703, 4433, -4433, -10703],
        [8192, -8192, -8192, 8192],
        [4433, -10704, 10704, -4433],
    ]
    odd = [
        [11363, 9633, 6437, 2260],
        [9633, -2259, -11362, -6436],
        [6437, -11362, 2261, 9633],
        [2260, -6436, 9633, -11363],
    ]
    rows = [
        row for pair in zip(([*e, *e[::-1]] for e in even), ([*o, *(-v for v in o[::-1])] for o in odd)) for row in pair
    ]
    return torch.tensor(rows, dtype=torch.float64, device="cpu")


def _pass(blocks: Tensor, matrix: Tensor, bits: int) -> Tensor:
    """Transform rows of eight, drop `bits` binary digits with rounding, and turn rows into columns."""
    return torch.floor(filters.mix_columns(blocks, matrix) / 2**bits + 0.5).mT


def _code(plane: Tensor, base: tuple[int, ...], quality: float) -> Tensor:
    """Transform blocks of 8 x 8, round to steps, transform back: integers (B, h, w) in 0 .. 255, result alike."""
    batch, height, width = plane.shape
    down, across = -height % 8, -width % 8
    plane = _repeat_edge(plane, down, across).double() - 128
    blocks = plane.view(batch, (height + down) // 8, 8, (width + across) // 8, 8).transpose(2, 3)
    steps, cosines = quantisation(base, quality).to(plane.device), _cosines()
    scaled = _pass(_pass(blocks, cosines, 11), cosines, 15)  # rows, then columns: 8 times the coefficients
    rounded = torch.floor(scaled.abs() / (8 * steps) + 0.5) * scaled.sign()
    blocks = _pass(_pass((rounded * steps).mT, cosines.mT, 11), cosines.mT, 18).mT  # columns, then rows
    plane = blocks.transpose(2, 3).reshape(batch, height + down, width + across)[:, :height, :width]
    return (plane + 128).clamp(0, 255).int()


def _repeat_edge(plane: Tensor, down: int, across: int) -> Tensor:
    """Repeat the last row and column: (B, h, w) to (B, h + down, w + across)."""
    plane = torch.cat([plane, plane[:, -1:].expand(-1, down, -1)], 1)
    return torch.cat([plane, plane[:, :, -1:].expand(-1, -1, across)], 2)


def _fixed(x: float) -> int:
    return int(x * 65536 + 0.5)  # libjpeg's 16-bit fixed point


def _to_ycc(pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes of red, green, blue (B, 3, H, W) to brightness and two colour differences, each (B, H, W)."""
    red, green, blue = pixels.unbind(1)
    half, centre = 1 << 15, (128 << 16) + (1 << 15) - 1
    luma = (_fixed(0.299) * red + _fixed(0.587) * green + _fixed(0.114) * blue + half) >> 16
    to_blue = (_fixed(0.5) * blue - _fixed(0.168735892) * red - _fixed(0.331264108) * green + centre) >> 16
    to_red = (_fixed(0.5) * red - _fixed(0.418687589) * green - _fixed(0.081312411) * blue + centre) >> 16
    return luma, to_blue, to_red


def _to_rgb(luma: Tensor, blue: Tensor, red: Tensor) -> Tensor:
    """The way back, colour differences around 0: (B, 3, H, W), not yet clipped."""
    half = 1 << 15
    return torch.stack(
        [
            luma + ((_fixed(1.402) * red + half) >> 16),
            luma + ((half - _fixed(0.344136286) * blue - _fixed(0.714136286) * red) >> 16),
            luma + ((_fixed(1.772) * blue + half) >> 16),
        ],
        1,
    )


def _halve(plane: Tensor) -> Tensor:
    """Mean of 2 x 2 pixels; libjpeg rounds halves down and up in turn along a row. (B, H, W) to (B, H/2, W/2)."""
    _, height, width = plane.shape
    plane = _repeat_edge(plane, height % 2, -width % 16)
    total = plane[:, ::2, ::2] + plane[:, ::2, 1::2] + plane[:, 1::2, ::2] + plane[:, 1::2, 1::2]
    return (total + 1 + torch.arange(total.shape[2], device=plane.device, dtype=plane.dtype) % 2) >> 2


def _double(plane: Tensor) -> Tensor:
    """Twice the size, each new pixel 3 parts of the nearest and 1 part of the next one, both ways: (B, h, w) to (B, 2h, 2w)."""
    above, below = torch.cat([plane[:, :1], plane[:, :-1]], 1), torch.cat([plane[:, 1:], plane[:, -1:]], 1)
    rows = torch.stack([3 * plane + above, 3 * plane + below], 2).flatten(1, 2)
    before, after = torch.cat([rows[..., :1], rows[..., :-1]], 2), torch.cat([rows[..., 1:], rows[..., -1:]], 2)
    return torch.stack([(3 * rows + before + 8) >> 4, (3 * rows + after + 7) >> 4], 3).flatten(2, 3)
