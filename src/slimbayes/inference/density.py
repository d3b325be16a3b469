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
from slimbayes.train.targets import check_labels

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
        self.size = 1 if callable(self.data) else self._size(self.data)

    def _size(self, data: Iterable[Any]) -> int:
        """How many targets there are, all of which are looked at once."""
        if iter(data) is data:
            raise ValueError(
                f"sample_posterior reads its data many times, but a {type(data).__name__} can be read once: give a "
                f"list of batches or a DataLoader."
            )
        size, classes = 0, None
        for args, kwargs, target in labelled(self.model, data):
            if classes is None and self.likelihood == "categorical":
                with torch.no_grad():
                    outputs = select(sample(self.model, *args, **kwargs), self.output)
                classes = outputs.shape[-1] if outputs.shape[1:-1] == target.shape else 2**62
            if classes is not None:
                check_labels(target, classes, IGNORED)
            size += self._count(target)
        if not size:
            raise ValueError("sample_posterior was given no targets: the loader is empty, or all of them are -100.")
        return size

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
