"""Hamiltonian Monte Carlo (Neal 2011) of many chains at once, with leapfrog steps whose size is adapted to an
acceptance rate while chains burn in (dual averaging, Hoffman & Gelman 2014).

Sizes: K chains.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from slimbayes.inference.density import Density

ACCEPTANCE = 0.8
_TOO_FAR = 1000.0  # an error of the energy beyond which a path has left the posterior


class HMC:
    """States of K chains, moved in place in the density's factors."""

    def __init__(self, density: Density, step_size: float, leapfrog: int, generator: torch.Generator) -> None:
        self.density, self.leapfrog, self.generator = density, leapfrog, generator
        self.step_size, self.log_average, self.error, self.count = step_size, math.log(step_size), 0.0, 0
        self.start = math.log(10 * step_size)
        self.divergent, self.accepted, self.paths = 0, 0.0, 0
        self.value, self.slopes = self._value()

    def _value(self) -> tuple[Tensor, list[Tensor]]:
        with torch.enable_grad():
            value = self.density.whole()
            return value.detach(), list(torch.autograd.grad(value.sum(), self.density.factors))

    @torch.no_grad()
    def step(self, adapt: bool) -> Tensor:
        """Move every chain along a path and accept or stay; returns log densities (K,)."""
        factors = self.density.factors
        before = [f.clone() for f in factors], self.value, self.slopes
        momenta = [self._normal(f) for f in factors]
        energy = self.value - _kinetic(momenta)
        # Paths of one length may swing back to where they began, where directions have one period.
        step, least = self.step_size, -(-self.leapfrog // 3)
        for _ in range(int(torch.randint(least, self.leapfrog + 1, (), generator=self.generator))):
            for f, m, slope in zip(factors, momenta, self.slopes, strict=True):
                m += 0.5 * step * slope
                f += step * m
            self.value, self.slopes = self._value()
            for m, slope in zip(momenta, self.slopes, strict=True):
                m += 0.5 * step * slope
        gain = (self.value - _kinetic(momenta) - energy).nan_to_num(-math.inf, -math.inf, -math.inf)
        chance = gain.clamp_max(0).exp()
        stay = torch.rand(len(gain), generator=self.generator).to(chance) >= chance
        for f, old in zip(factors, before[0], strict=True):
            f[stay] = old[stay]
        self.value = torch.where(stay, before[1], self.value)
        self.slopes = [
            torch.where(stay[:, None, None], old, new) for old, new in zip(before[2], self.slopes, strict=True)
        ]
        if adapt:
            self._adapt(float(chance.mean()))
        else:
            self.paths += 1
            self.divergent += int((gain < -_TOO_FAR).sum())
            self.accepted += float(chance.mean())
        return self.value

    def _normal(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.generator, dtype=like.dtype).to(like.device)

    def _adapt(self, chance: float) -> None:
        self.count += 1
        n = self.count
        self.error += (ACCEPTANCE - chance - self.error) / (n + 10)
        log_step = self.start - math.sqrt(n) / 0.05 * self.error
        self.log_average += n**-0.75 * (log_step - self.log_average)
        self.step_size = math.exp(log_step)

    def settle(self) -> None:
        """End of the burn-in: from now on the step is the average of those tried."""
        self.step_size = math.exp(self.log_average) if self.count else self.step_size


def _kinetic(momenta: list[Tensor]) -> Tensor:
    return 0.5 * torch.stack([m.square().flatten(1).sum(1) for m in momenta]).sum(0)


def run(hmc: HMC, burn_in: int, draws: int, thin: int) -> Iterator[tuple[list[Tensor], Tensor]]:
    """States of all factors (K, channels) and log densities (K,), one after another."""
    for _ in range(burn_in):
        hmc.step(adapt=True)
    hmc.settle()
    for _ in range(draws):
        for _ in range(thin):
            value = hmc.step(adapt=False)
        yield [f.detach().squeeze(1).clone() for f in hmc.density.factors], value.clone()
