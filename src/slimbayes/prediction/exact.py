"""Exact marginalisation over picks (Chang et al. 2019, B.4): every network that a model can be, weighted by how likely
it is, instead of draws of them.

A posterior says which standard normals lead to each value of one of its picks (`Posterior.support`). All combinations
of values are the draws of one pass, so that networks run as any draws do: folded, chunk by chunk.

Sizes: M networks, K members, N rows, W values of a pick.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.engine.calls import Fold, stack_draws
from slimbayes.engine.noise import Seed
from slimbayes.engine.passes import Noise, Pass
from slimbayes.engine.tree import tree_map
from slimbayes.posteriors.base import Support
from slimbayes.prediction.draws import Draws
from slimbayes.prediction.sample import sampled

MOST_NETWORKS = 4096


class Networks(Draws):
    """All M networks of a model as draws of one pass, each a member with a weight of its own.

    Args: as of `Draws`; `weights` are those of the model's own members, None where they count alike.
    """

    def __init__(
        self, model: nn.Module, chunk: int | None, share: bool, fold: Fold, seed: Seed, weights: Tensor | None
    ) -> None:
        super().__init__(model, chunk, share, fold, seed)
        if self.held is not None:
            raise ValueError('predict(draws="exact") inside `frozen`: held draws are all there are; call it outside.')
        supports = self._supports()
        self.support = {p.key: support for p, support in zip(self.posteriors, supports, strict=True)}
        probs = [support.probs.double().cpu() for support in supports for _ in range(support.picks)]
        self.combined = _combinations([len(p) for p in probs])  # (M / K, picks of all posteriors)
        joint = torch.ones(len(self.combined), dtype=torch.float64)
        for index, values in zip(self.combined.T, probs, strict=True):
            joint *= values[index]
        own = torch.ones(self.members) if weights is None else weights.cpu()
        every = (joint[:, None] * own).flatten()
        self.count = len(every)  # M
        self.weights = None if bool((every == every[0]).all()) else every / every.sum()

    def _supports(self) -> list[Support]:
        """What each posterior can be; refuses a model that can be too much."""
        found = []
        for p in self.posteriors:
            support = p.support()
            if support is None:
                raise ValueError(
                    f'predict(draws="exact") sums over networks that can be counted, but the draws of {p.name} '
                    f"({type(p).__name__}) are no picks from given components. Give a number of draws."
                )
            found.append(support)
        size = math.log(self.members) + sum(s.picks * math.log(max(1, len(s.probs))) for s in found)
        if size > math.log(MOST_NETWORKS) + 1e-9:
            count = f"{round(math.exp(size)):,}" if size < math.log(1e12) else f"10^{size / math.log(10):,.0f}"
            raise ValueError(
                f'predict(draws="exact") would run {count} networks, and runs {MOST_NETWORKS:,} at most. Give a number '
                f"of draws, or patch fewer layers with fewer components."
            )
        return found

    def outputs(self, args: Any, kwargs: Any, draws: int = 0, start: int = 0) -> Iterator[Any]:
        """Outputs (M, N, ...) of all networks, as one: their weights are those of members."""
        if not self.posteriors:
            yield stack_draws([self.model(*args, **kwargs)])
            return
        at_once, parts = max(1, self._at_once((args, kwargs))), []
        for some in self.combined.split(at_once):
            new = self._pass(some)
            parts.append(sampled(self.model, args, kwargs, new.total, self.fold, new, share=self.share))
        yield tree_map(lambda *leaves: torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0], *parts)

    def _pass(self, combined: Tensor) -> Pass:
        """The draws of some combinations, each for every member in turn."""
        new, at = Pass(len(combined) * self.members, 1, rowwise=False), 0
        for p in self.posteriors:
            support = self.support[p.key]
            picked = combined[:, at : at + support.picks].to(p.device)
            at += support.picks
            block = support.lines.to(p.device, p.dtype)[picked].transpose(1, 2).flatten(1)
            new.put(p.key, Noise(block.repeat_interleave(self.members, 0), block.new_empty(0, 0)))
        return new


def _combinations(sizes: list[int]) -> Tensor:
    """All combinations of so many values each, (product of sizes, number of sizes), as integers.

    Example:
        >>> _combinations([2, 2]).tolist()
        [[0, 0], [0, 1], [1, 0], [1, 1]]
    """
    ranges = [torch.arange(size) for size in sizes]
    return torch.stack(torch.meshgrid(*ranges, indexing="ij"), -1).flatten(0, -2) if sizes else torch.zeros(1, 0).long()
