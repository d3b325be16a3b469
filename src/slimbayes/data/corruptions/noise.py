"""Noise that falls on every value of an image by itself.

Shape, everywhere: images (B, C, H, W) in [0, 1], result alike and not yet clipped.
"""

import torch
from torch import Tensor

from slimbayes.data.corruptions.draws import Draws


def gaussian_noise(x: Tensor, draw: Draws, std: float) -> Tensor:
    """x + N(0, std^2)."""
    return x + draw.normal(*x.shape, std=std)


def shot_noise(x: Tensor, draw: Draws, photons: float) -> Tensor:
    """Poisson(x photons) / photons: mean x, variance x / photons."""
    return draw.poisson(x * photons) / photons


def impulse_noise(x: Tensor, draw: Draws, amount: float) -> Tensor:
    """Set a share `amount` of the values to 0 or 1, half each."""
    u = draw.uniform(*x.shape)
    return torch.where(u < amount, (u < amount / 2).to(x.dtype), x)


def speckle_noise(x: Tensor, draw: Draws, std: float) -> Tensor:
    """x + x N(0, std^2)."""
    return x + x * draw.normal(*x.shape, std=std)
