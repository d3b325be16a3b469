"""Random numbers for a batch of images, and noise that falls on every value of an image by itself.

Shape, everywhere: images (B, C, H, W) in [0, 1], result alike and not yet clipped.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomNumbers:
    """They have the device and dtype of `like`, but are made where the generator lives: a CPU's serves a GPU.

    Example:
        >>> RandomNumbers(torch.zeros(2), torch.Generator().manual_seed(0)).normal(2, 3).shape
        torch.Size([2, 3])
    """

    like: Tensor
    generator: torch.Generator | None = None

    @property
    def _device(self) -> torch.device:
        return self.like.device if self.generator is None else self.generator.device

    def normal(self, *shape: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
        """Independent N(mean, std^2)."""
        noise = torch.randn(shape, generator=self.generator, device=self._device, dtype=self.like.dtype)
        return noise.to(self.like.device).mul_(std).add_(mean)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Independent U(low, high)."""
        noise = torch.rand(shape, generator=self.generator, device=self._device, dtype=self.like.dtype)
        return noise.to(self.like.device).mul_(high - low).add_(low)

    def integers(self, *shape: int, low: int, high: int) -> Tensor:
        """Independent integers low .. high - 1."""
        return torch.randint(low, high, shape, generator=self.generator, device=self._device).to(self.like.device)

    def poisson(self, rate: Tensor) -> Tensor:
        """Independent Poisson counts."""
        return torch.poisson(rate.to(self._device), generator=self.generator).to(self.like.device)


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


def speckle_noise(x: Tensor, draw: RandomNumbers, std: float) -> Tensor:
    """x + x N(0, std^2)."""
    return x + x * draw.normal(*x.shape, std=std)
