"""The log posterior density of rank-1 factors, and how chains move through it: each member of a model is one chain.

    log p(factors | data) = sum over data log p(y | x, factors) + sum over factors log prior + constant

    hmc       Hamiltonian Monte Carlo (Neal 2011), whose leapfrog steps are adapted to an acceptance rate while chains
              burn in (dual averaging, Hoffman & Gelman 2014)
    sgld      f += -e/2 g + sqrt(e T) n                                       Welling & Teh 2011
    sghmc     m = (1 - a) m - e g + sqrt(2 a e T) n,  f += m                  Chen, Fox & Guestrin 2014
    cyclical  sghmc whose step falls from e to zero as a cosine in every cycle; it explores without noise first, and
              draws come from the last part of each cycle                     Zhang et al. 2020

with g the gradient of the negative log posterior, of a batch but for "hmc", n standard normals, T the temperature. The
step e is given for the mean over the data, as a learning rate is, and divided by their number.

Sizes: K chains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.distributions.families import Distribution
from slimbayes.engine import passes
from slimbayes.prediction.batches import IGNORED, labelled_batches
from slimbayes.prediction.predict import find_output
from slimbayes.prediction.sample import sample
from slimbayes.train.likelihoods import LikelihoodName, likelihood_named
from slimbayes.train.targets import check_labels, check_real, check_shares

Loss = Callable[
    [nn.Module], Tensor
]  # negative log-likelihood of all data under each member, (K,)
State = tuple[list[Tensor], Tensor]  # all factors (K, channels), and log densities (K,)
ACCEPTANCE = 0.8
_TOO_FAR = 1000.0  # an error of the energy beyond which a path has left the posterior
PARTS = 5  # of a cycle; in the last of them there is noise, and states are kept


@dataclass
class Density:
    """Log densities of a model whose members are points."""

    model: nn.Module
    data: Iterable[Any] | Loss
    likelihood: LikelihoodName
    noise: float
    prior: Distribution
    temperature: float
    output: str | int | None = None

    def __post_init__(self) -> None:
        posteriors: list[Any] = passes.posteriors_of(self.model)
        self.factors = [
            f.loc for p in posteriors for f in (p.r, p.s)
        ]  # (K, 1, channels) each
        self.size, self.parts = (
            (1, 1) if callable(self.data) else self._sizes(self.data)
        )

    def _sizes(self, data: Iterable[Any]) -> tuple[int, int]:
        """How many targets and batches there are; every target is looked at once."""
        if iter(data) is data:
            raise ValueError(
                f"sample_posterior reads its data many times, but a {type(data).__name__} can be read once: give a "
                f"list of batches or a DataLoader."
            )
        size, parts, classes = 0, 0, None
        for args, kwargs, target in labelled_batches(self.model, data):
            if self.likelihood != "categorical":
                (
                    check_shares
                    if likelihood_named(self.likelihood).discrete
                    else check_real
                )(target)
            elif classes is None:
                with torch.no_grad():
                    outputs = find_output(
                        sample(self.model, *args, **kwargs), self.output
                    )
                classes = (
                    outputs.shape[-1] if outputs.shape[1:-1] == target.shape else 2**62
                )
            if classes is not None:
                check_labels(target, classes, IGNORED)
            size, parts = size + self._count(target), parts + bool(self._count(target))
        if not size:
            raise ValueError(
                "sample_posterior was given no targets: the loader is empty, or all of them are -100."
            )
        return size, parts

    def _count(self, target: Tensor) -> int:
        """How many targets the likelihood averages over."""
        return (
            int((target != IGNORED).sum())
            if likelihood_named(self.likelihood).discrete
            else len(target)
        )

    def batches(self) -> Iterable[Any]:
        """What a pass over the data sees: batches that have targets."""
        if callable(self.data):
            return [None]
        return (
            batch
            for batch in labelled_batches(self.model, self.data)
            if self._count(batch[2])
        )

    def log_prior(self) -> Tensor:
        return torch.stack(
            [self.prior.log_prob(f).flatten(1).sum(1) for f in self.factors]
        ).sum(0)

    def of_batch(self, batch: Any) -> Tensor:
        """Log density of each chain (K,), estimated from one batch; the batches' mean is that of all data, whatever
        their sizes.
        """
        return (self.log_prior() - self._losses(batch) * self.parts) / self.temperature

    def of_all(self) -> Tensor:
        """Log density of each chain (K,), of all data."""
        losses = [self._losses(batch) for batch in self.batches()]
        return (self.log_prior() - torch.stack(losses).sum(0)) / self.temperature

    def _losses(self, batch: Any) -> Tensor:
        """Negative log-likelihood of a batch under each chain, (K,); of a function all data are one."""
        if callable(self.data):
            return self.data(self.model)
        args, kwargs, target = batch
        outputs = find_output(sample(self.model, *args, **kwargs), self.output)
        nll = likelihood_named(self.likelihood).nll
        mean = torch.vmap(
            lambda chain: nll(chain.unsqueeze(0), target, "average", self.noise)
        )(outputs)
        return mean * self._count(target)

    def state(self, value: Tensor) -> State:
        """A copy of where all chains are."""
        return [
            f.detach().squeeze(1).clone() for f in self.factors
        ], value.detach().clone()


def normals(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=like.dtype).to(
        like.device
    )


class HMC:
    """States of K chains, moved in place in the density's factors."""

    def __init__(
        self,
        density: Density,
        step_size: float,
        leapfrog: int,
        generator: torch.Generator,
    ) -> None:
        self.density, self.leapfrog, self.generator = density, leapfrog, generator
        self.step_size, self.log_average, self.error, self.count = (
            step_size,
            math.log(step_size),
            0.0,
            0,
        )
        self.start = math.log(10 * step_size)
        self.divergent, self.accepted, self.paths = 0, 0.0, 0
        self.value, self.slopes = self._value()

    def _value(self) -> tuple[Tensor, list[Tensor]]:
        with torch.enable_grad():
            value = self.density.of_all()
            return value.detach(), list(
                torch.autograd.grad(value.sum(), self.density.factors)
            )

    @torch.no_grad()
    def step(self, adapt: bool) -> Tensor:
        """Move every chain along a path and accept or stay; returns log densities (K,)."""
        factors = self.density.factors
        before = [f.clone() for f in factors], self.value, self.slopes
        momenta = [normals(f, self.generator) for f in factors]
        energy = self.value - _kinetic(momenta)
        # Paths of one length may swing back to where they began, where directions have one period.
        step, least = self.step_size, -(-self.leapfrog // 3)
        for _ in range(
            int(torch.randint(least, self.leapfrog + 1, (), generator=self.generator))
        ):
            for f, m, slope in zip(factors, momenta, self.slopes, strict=True):
                m += 0.5 * step * slope
                f += step * m
            self.value, self.slopes = self._value()
            for m, slope in zip(momenta, self.slopes, strict=True):
                m += 0.5 * step * slope
        gain = (self.value - _kinetic(momenta) - energy).nan_to_num(
            -math.inf, -math.inf, -math.inf
        )
        chance = gain.clamp_max(0).exp()
        stay = torch.rand(len(gain), generator=self.generator).to(chance) >= chance
        for f, old in zip(factors, before[0], strict=True):
            f[stay] = old[stay]
        self.value = torch.where(stay, before[1], self.value)
        pairs = zip(before[2], self.slopes, strict=True)
        self.slopes = [torch.where(stay[:, None, None], old, new) for old, new in pairs]
        if adapt:
            self._adapt(float(chance.mean()))
        else:
            self.paths += 1
            self.divergent += int((gain < -_TOO_FAR).sum())
            self.accepted += float(chance.mean())
        return self.value

    def _adapt(self, chance: float) -> None:
        self.count += 1
        n = self.count
        self.error += (ACCEPTANCE - chance - self.error) / (n + 10)
        log_step = self.start - math.sqrt(n) / 0.05 * self.error
        self.log_average += n**-0.75 * (log_step - self.log_average)
        self.step_size = math.exp(log_step)

    def run(self, burn_in: int, draws: int, thin: int) -> Iterator[State]:
        """States, one after another."""
        for _ in range(burn_in):
            self.step(adapt=True)
        if burn_in:  # from now on the step is the average of those tried
            self.step_size = math.exp(self.log_average)
        for _ in range(draws):
            for _ in range(thin):
                value = self.step(adapt=False)
            yield self.density.state(value)


def _kinetic(momenta: list[Tensor]) -> Tensor:
    return 0.5 * torch.stack([m.square().flatten(1).sum(1) for m in momenta]).sum(0)


def langevin(
    density: Density,
    method: str,
    step_size: float,
    friction: float,
    burn_in: int,
    draws: int,
    thin: int,
    cycles: int,
    base_lr: float,
    generator: torch.Generator,
) -> Iterator[State]:
    """States of "sgld", "sghmc" or "cyclical", one after another; log densities are those of a batch."""
    momenta = [torch.zeros_like(f) for f in density.factors]
    steps = (
        _cycles(step_size, draws, thin, cycles)
        if method == "cyclical"
        else _even(step_size, burn_in, draws, thin)
    )
    base = [
        p
        for p in density.model.parameters()
        if p.requires_grad and not any(p is f for f in density.factors)
    ]
    batches = chain.from_iterable(density.batches() for _ in count())
    for number, (step, noisy, keep) in enumerate(steps):
        moving = base if base_lr and number < burn_in else []
        with torch.enable_grad():
            value = density.of_batch(next(batches))
            slopes = torch.autograd.grad(
                value.sum(), [*density.factors, *moving], allow_unused=True
            )
        # At temperature T the slopes are already divided by it, so that steps grow by it and the noise with its root.
        share = density.temperature / density.size
        step = step * share
        with torch.no_grad():
            for f, m, slope in zip(density.factors, momenta, slopes, strict=False):
                noise = normals(f, generator) if noisy else torch.zeros_like(f)
                if method == "sgld":
                    f += 0.5 * step * slope + math.sqrt(step) * noise
                else:
                    m.mul_(1 - friction).add_(
                        step * slope + math.sqrt(2 * friction * step) * noise
                    )
                    f += m
            for p, slope in zip(moving, slopes[len(momenta) :], strict=True):
                if slope is not None:
                    p.add_(slope, alpha=base_lr * share / len(value))
        if not bool(value.isfinite().all()):
            raise FloatingPointError(
                f"sample_posterior: chain {int((~value.isfinite()).nonzero()[0])} diverged at step {number}: its log "
                f"density is not finite. Lower step_size={step_size!r}."
            )
        if keep:
            yield density.state(value)


def _even(
    step: float, burn_in: int, draws: int, thin: int
) -> Iterator[tuple[float, bool, bool]]:
    for number in range(burn_in + draws * thin):
        yield step, True, number >= burn_in and (number - burn_in + 1) % thin == 0


def _cycles(
    step: float, draws: int, thin: int, cycles: int
) -> Iterator[tuple[float, bool, bool]]:
    """Step, whether there is noise, and whether to keep the state, of every step of every cycle."""
    each = -(-draws // cycles)
    length, kept = PARTS * each * thin, 0
    for _ in range(cycles):
        for place in range(length):
            noisy = place >= length - each * thin
            keep = noisy and (length - place - 1) % thin == 0 and kept < draws
            kept += keep
            yield 0.5 * step * (math.cos(math.pi * place / length) + 1), noisy, keep
