"""Splashes of water or mud: thresholded smooth noise; water shines along its edges.

Shape, everywhere: x (B, 3, H, W) in [0, 1], layers (B, H, W).
"""

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

from slimbayes.data.corruptions import filters
from slimbayes.data.corruptions.noise import RandomNumbers

WATER = (175 / 255, 238 / 255, 238 / 255)
MUD = (63 / 255, 42 / 255, 20 / 255)
FAR = 20.0  # pixels from an edge of the water beyond which its light no longer changes


def spatter(
    x: Tensor, draw: RandomNumbers, mean: float, std: float, sigma: float, threshold: float, strength: float, mud: float
) -> Tensor:
    """Splash the image; for mud `strength` is the sigma that softens its rim."""
    batch, _, height, width = x.shape
    layer = filters.gaussian(draw.normal(batch, height, width, mean=mean, std=std), sigma)
    colour = x.new_tensor(MUD if mud else WATER).view(1, 3, 1, 1)
    if mud:
        cover = filters.gaussian((layer > threshold).to(x.dtype), strength)
        cover = torch.where(cover < 0.8, 0, cover).unsqueeze(1)
        return x * (1 - cover) + colour * cover
    layer = torch.where(layer < threshold, 0, layer)
    return x + colour * strength * water(torch.floor(layer * 255).clamp(0, 255)).unsqueeze(1)


def water(layer: Tensor) -> Tensor:
    """Light on water (bytes), largest 1: its depth times the relief of the distance from its edges."""
    distance = edge_distance(canny(layer, 50, 150))
    box = torch.full((3, 3), 1 / 9, dtype=torch.float64, device="cpu")
    relief = equalize(torch.floor(filters.correlate(distance, box) + 1e-4))
    slope = torch.tensor([[-2.0, -1, 0], [-1, 1, 1], [0, 1, 2]], device="cpu")
    relief = torch.round(filters.correlate(filters.correlate(relief, slope).clamp(0, 255), box))
    light = layer * relief
    return light / light.amax((1, 2), keepdim=True).clamp(min=1)  # where nothing is wet the reference divides 0 by 0


def canny(layer: Tensor, low: float, high: float) -> Tensor:
    """Edges by Canny's rule as OpenCV has it: Sobel slopes, |dx| + |dy|, thinned, weak ones kept beside strong ones."""
    sobel = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]], device="cpu")
    across, down = filters.correlate(layer, sobel, "nearest"), filters.correlate(layer, sobel.mT, "nearest")
    size = across.abs() + down.abs()
    weak = (size > low) & _is_crest(size, across, down)
    strong = weak & (size > high)
    while True:  # grow strong edges along weak ones until nothing changes
        grown = (max_pool2d(strong.to(layer.dtype).unsqueeze(1), 3, 1, 1)[:, 0] > 0) & weak
        if bool((grown == strong).all()):
            return strong
        strong = grown


def _is_crest(size: Tensor, across: Tensor, down: Tensor) -> Tensor:
    """Whether a slope is the largest along its direction, which is rounded to eight; outside the image slopes are 0."""
    height, width = size.shape[-2:]
    around = torch.nn.functional.pad(size, (1, 1, 1, 1))

    def beside(dy: int, dx: int) -> Tensor:
        return around[:, 1 + dy : 1 + dy + height, 1 + dx : 1 + dx + width]

    flat = down.abs() * 32768 < across.abs() * 13573  # tan 22.5 degrees in OpenCV's fixed point
    steep = down.abs() * 32768 > across.abs() * (13573 + 65536)
    level = (size > beside(0, -1)) & (size >= beside(0, 1))
    upright = (size > beside(-1, 0)) & (size >= beside(1, 0))
    falling = (size > beside(-1, -1)) & (size > beside(1, 1))
    rising = (size > beside(-1, 1)) & (size > beside(1, -1))
    slanted = torch.where((across < 0) != (down < 0), rising, falling)
    return torch.where(flat, level, torch.where(steep, upright, slanted))


def edge_distance(edges: Tensor) -> Tensor:
    """Distance to the nearest edge, at most FAR, in OpenCV's steps: 1 straight, 1.4 diagonal, 2.1969 like a knight."""
    distance = torch.where(edges, 0.0, FAR)
    height, width = distance.shape[-2:]
    steps = [(0, 1, 1.0), (1, 0, 1.0), (1, 1, 1.4), (1, -1, 1.4)]
    steps += [(a, b, 2.1969) for a, b in ((1, 2), (2, 1), (1, -2), (2, -1))]
    for _ in range(int(FAR)):  # each round reaches at least one pixel further
        around = torch.nn.functional.pad(distance, (2, 2, 2, 2), value=FAR)
        for sign in (1, -1):
            for dy, dx, cost in steps:
                top, left = 2 + sign * dy, 2 + sign * dx
                torch.minimum(distance, around[:, top : top + height, left : left + width] + cost, out=distance)
    return distance


def equalize(layer: Tensor) -> Tensor:
    """Spread the whole numbers 0 .. FAR over 0 .. 255 by their ranks, like cv2.equalizeHist; a single value stays."""
    total = layer[0].numel()
    below = torch.stack([(layer <= level).sum((1, 2)) for level in range(int(FAR) + 1)], 1).to(layer.dtype)
    first = below.masked_fill(below == 0, total).amin(1, keepdim=True)  # how many share the smallest value
    ranks = torch.round((below - first) * (255 / (total - first).clamp(min=1)))
    spread = ranks.gather(1, layer.long().flatten(1)).view_as(layer)
    return torch.where((first == total).unsqueeze(2), layer, spread)
