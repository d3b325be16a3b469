"""Chains from gradients of mini-batches, in which noise takes the place of an acceptance step.

    sgld      f += -e/2 g + sqrt(e T) n                                       Welling & Teh 2011
    sghmc     m = (1 - a) m - e g + sqrt(2 a e T) n,  f += m                  Chen, Fox & Guestrin 2014
    cyclical  sghmc whose step falls from e to zero as a cosine in every cycle; it explores without noise first, and
              draws come from the last part of each cycle                     Zhang et al. 2020

with g the gradient of the negative log posterior, n standard normals, T the temperature. The step e is given for the
mean over the data, as a learning rate is, and divided by their number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from slimbayes.inference.density import Density

Method = Literal["sgld", "sghmc", "cyclical"]
PARTS = 5  # of a cycle; in the last of them there is noise, and states are kept


def run(
    density: Density,
    method: Method,
    step_size: float,
    friction: float,
    burn_in: int,
    draws: int,
    thin: int,
    cycles: int,
    base_lr: float,
    generator: torch.Generator,
) -> Iterator[tuple[list[Tensor], Tensor]]:
    """States of all factors (K, channels) and log densities of a batch (K,), one after another."""
    momenta = [torch.zeros_like(f) for f in density.factors]
    steps = _cycles(step_size, draws, thin, cycles) if method == "cyclical" else _even(step_size, burn_in, draws, thin)
    base = [p for p in density.model.parameters() if p.requires_grad and not any(p is f for f in density.factors)]
    batches = _endless(density)
    for number, (step, noisy, keep) in enumerate(steps):
        moving = base if base_lr and number < burn_in else []
        with torch.enable_grad():
            value = density.at(next(batches))
            slopes = torch.autograd.grad(value.sum(), [*density.factors, *moving], allow_unused=True)
        with torch.no_grad():
            _move(
                density,
                momenta,
                slopes,
                method,
                step / density.size,
                friction if method != "sgld" else 1.0,
                noisy,
                generator,
            )
            for p, slope in zip(moving, slopes[len(momenta) :], strict=True):
                if slope is not None:
                    p.add_(slope, alpha=base_lr / (density.size * len(value)))
        if not bool(value.isfinite().all()):
            bad = [k for k in range(len(value)) if not bool(value[k].isfinite())]
            raise FloatingPointError(
                f"sample_posterior: chain {bad[0]} diverged at step {number}: its log density is not finite. Lower "
                f"step_size={step_size!r}."
            )
        if keep:
            yield [f.detach().squeeze(1).clone() for f in density.factors], value.detach().clone()


def _move(
    density: Density,
    momenta: list[Tensor],
    slopes: tuple[Tensor, ...],
    method: Method,
    step: float,
    friction: float,
    noisy: bool,
    generator: torch.Generator,
) -> None:
    # At temperature T the slopes are already divided by it, so that steps grow by it and the noise with its root.
    step = step * density.temperature
    for f, m, slope in zip(density.factors, momenta, slopes, strict=False):
        noise = torch.randn(f.shape, generator=generator, dtype=f.dtype).to(f.device) if noisy else torch.zeros_like(f)
        if method == "sgld":
            f += 0.5 * step * slope + math.sqrt(step) * noise
        else:
            m.mul_(1 - friction).add_(step * slope + math.sqrt(2 * friction * step) * noise)
            f += m


def _even(step: float, burn_in: int, draws: int, thin: int) -> Iterator[tuple[float, bool, bool]]:
    for number in range(burn_in + draws * thin):
        yield step, True, number >= burn_in and (number - burn_in + 1) % thin == 0


def _cycles(step: float, draws: int, thin: int, cycles: int) -> Iterator[tuple[float, bool, bool]]:
    """Step, whether there is noise, and whether to keep the state, of every step of every cycle."""
    each = -(-draws // cycles)
    length, kept = PARTS * each * thin, 0
    for _ in range(cycles):
        for place in range(length):
            noisy = place >= length - each * thin
            keep = noisy and (length - place - 1) % thin == 0 and kept < draws
            kept += keep
            yield 0.5 * step * (math.cos(math.pi * place / length) + 1), noisy, keep


def _endless(density: Density) -> Iterator[object]:
    while True:
        yield from density.batches()
