"""The log posterior density of rank-1 factors, for many chains at once: each member of the model is one chain's state.

    log p(factors | data) = sum over data log p(y | x, factors) + sum over factors log prior + constant

Sizes: K chains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.distributions.families import Distribution
from slimbayes.engine import passes
from slimbayes.inference.curvature import IGNORED, labelled
from slimbayes.prediction.predict import select
from slimbayes.prediction.sample import sample
from slimbayes.train.likelihoods import LikelihoodName, likelihood_named

Loss = Callable[[nn.Module], Tensor]  # negative log-likelihood of all data under each member, (K,)


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
        self.factors = [f.loc for p in posteriors for f in (p.r, p.s)]  # (K, 1, channels) each
        self.size = 1 if callable(self.data) else sum(self._count(y) for _, _, y in labelled(self.model, self.data))
        if not self.size:
            raise ValueError("sample_posterior was given no targets: the loader is empty.")

    def _count(self, target: Tensor) -> int:
        """How many targets the likelihood averages over."""
        return int((target != IGNORED).sum()) if likelihood_named(self.likelihood).discrete else len(target)

    def batches(self) -> Iterable[Any]:
        """What a pass over the data sees; one after another without end is up to the caller."""
        return [None] if callable(self.data) else labelled(self.model, self.data)

    def log_prior(self) -> Tensor:
        return torch.stack([self.prior.log_prob(f).flatten(1).sum(1) for f in self.factors]).sum(0)

    def at(self, batch: Any) -> Tensor:
        """Log density of each chain (K,), estimated from one batch."""
        losses = self.data(self.model) if callable(self.data) else self._losses(batch) * self.size
        return (self.log_prior() - losses) / self.temperature

    def whole(self) -> Tensor:
        """Log density of each chain (K,), of all data."""
        if callable(self.data):
            return self.at(None)
        losses = [self._losses(batch) * self._count(batch[2]) for batch in self.batches()]
        return (self.log_prior() - torch.stack(losses).sum(0)) / self.temperature

    def _losses(self, batch: tuple[Any, Any, Tensor]) -> Tensor:
        """Mean negative log-likelihood of a batch under each chain, (K,)."""
        args, kwargs, target = batch
        outputs = select(sample(self.model, *args, **kwargs), self.output)
        nll = likelihood_named(self.likelihood).nll
        return torch.vmap(lambda chain: nll(chain.unsqueeze(0), target, "average", self.noise))(outputs)
