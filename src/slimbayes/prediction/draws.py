"""The draws of one prediction: numbered functions of its seed, so many at a time as fit, the same for every batch.

Or exact marginalisation over picks (Chang et al. 2019, B.4): every network that a model can be, weighted by how likely
it is. A posterior says which standard normals lead to each value of one of its picks (`Posterior.support`). All
combinations of values are the draws of one pass, so that networks run as any draws do: folded, chunk by chunk.

Sizes: S draws, M networks, K members, N rows, W values of a pick.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.engine import calls, noise, passes
from slimbayes.engine.calls import Parallel
from slimbayes.engine.layout import arrays_of, padded, tree_map
from slimbayes.engine.locate import layout_of
from slimbayes.engine.noise import Seed
from slimbayes.engine.objects import copy_containers, stack_draws
from slimbayes.engine.passes import Noise, Pass
from slimbayes.engine.trial import takes_derivatives
from slimbayes.posteriors.base import Support
from slimbayes.posteriors.ensemble import EnsemblePosterior
from slimbayes.prediction.checks import MISFITS, explain
from slimbayes.prediction.sample import converted_posteriors, device_of, members

MOST_ROWS = 2**15  # draws x inputs in one forward, by default
_MOST_NUMBERS = 2**23  # of the inputs of one forward, by default
_MOST_NOISE = (
    2**24
)  # numbers of noise, some 64 MiB: for posteriors that draw whole weights


class Draws:
    """Runs calls of a model under draws that follow from a seed: draw j is one function for all rows of all calls.

    Args:
        chunk, share, parallel, seed: as in `predict`.
    """

    def __init__(
        self,
        model: nn.Module,
        chunk: int | None,
        share: bool,
        parallel: Parallel,
        seed: Seed,
    ) -> None:
        self.model, self.chunk, self.share, self.parallel = (
            model,
            chunk,
            share,
            parallel,
        )
        self.posteriors, self.members = converted_posteriors(model), members(model)
        self.predicted_members, self.weights = (
            self.members,
            member_weights(model),
        )  # of the Prediction
        self.held = calls.held_draws(
            "predict", self.posteriors, seed
        )  # inside fixed_draws these are all there are
        drawn = (
            self.posteriors and self.held is None
        )  # else torch's generator is left alone
        self.seed = noise.seed_of(seed) if drawn or seed is not None else 0
        self.seeded = (
            seed is not None
        )  # by default what the model draws by itself is left alone
        self.latest: tuple[int, Pass] | None = None
        self.differentiates = False  # whether the model takes derivatives

    def outputs(
        self, args: Any, kwargs: Any, draws: int, start: int = 0
    ) -> Iterator[Any]:
        """Outputs (S', N, ...) of so many draws from number `start` on, so many at a time as fit; names inputs that
        do not fit the model.
        """
        try:
            yield from self._outputs(args, kwargs, draws, start)
        except MISFITS as error:
            explain(error, self.model, args, kwargs)

    def _outputs(self, args: Any, kwargs: Any, draws: int, start: int) -> Iterator[Any]:
        if not self.posteriors:
            for j in range(start, start + draws):
                with noise.own_noise(self._model_seed(j), device_of(self.model)):
                    yield self._run_call(lambda: self._run_plain(args, kwargs))
            return
        if self.held is not None:
            call = (
                self.model,
                self.posteriors,
                args,
                kwargs,
                self.held.total,
                self.parallel,
                self.held,
            )
            yield self._run_call(lambda: calls.run_sampled(*call))
            return
        at_once = min(draws, self._at_once((args, kwargs)))
        countable = (
            self.share
            and draws > 1
            and self.members == 1
            and all(p.countable for p in self.posteriors)
        )
        # The user's own noise differs between draws that picked alike.
        if countable and (
            self.parallel is False
            or not layout_of(self.model, args, kwargs, self.posteriors).random
        ):
            yield from self._distinct(args, kwargs, start, draws, at_once)
            return
        for first in range(start, start + draws, at_once):
            yield self._run(
                args,
                kwargs,
                self._numbered(first, min(at_once, start + draws - first)),
                first,
            )

    def _model_seed(self, first: int) -> int | None:
        """For what the model draws by itself in a call whose first draw has this number."""
        return noise.key(self.seed, "call", first) if self.seeded else None

    def _run(self, args: Any, kwargs: Any, new: Pass, first: int) -> Any:
        call, own = (self.model, self.posteriors, args, kwargs), self._model_seed(first)
        return self._run_call(
            lambda: calls.run_sampled(
                *call, new.total, self.parallel, new, share=self.share, seed=own
            )
        )

    def _run_plain(self, args: Any, kwargs: Any) -> Any:
        args, kwargs = copy_containers((args, kwargs))
        return stack_draws([self.model(*args, **kwargs)])

    def _run_call(self, call: Callable[[], Any]) -> Any:
        """What a call returns, without gradients unless the model's own forward takes derivatives."""
        try:
            if not self.differentiates:
                return call()
        except RuntimeError as error:
            if not takes_derivatives(error):
                raise
            self.differentiates = True
        with torch.enable_grad():
            return tree_map(
                lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, call()
            )

    def _numbered(self, first: int, draws: int) -> Pass:
        """The pass of so many draws from number `first` on; the latest is kept for the next batch."""
        known = self.latest
        if known is None or known[0] != first or known[1].total != draws:
            self.latest = None  # never two of them at once
            new = Pass(draws, 1, first % self.members, rowwise=False)
            noise.draw_numbered(self.posteriors, new, self.seed, first)
            self.latest = known = first, new
        return known[1]

    def _at_once(self, inputs: Any) -> int:
        """How many draws one forward takes: whole turns of all members, unless so many do not fit."""
        arrays = [padded(leaf) for leaf in arrays_of(inputs)]
        rows = max((a.shape[0] for a in arrays if a.dim()), default=1) or 1
        numbers = max((a.numel() for a in arrays), default=1)
        wanted = (
            min(_MOST_NUMBERS * rows // max(numbers, 1), MOST_ROWS)
            if self.chunk is None
            else self.chunk
        )
        floats = sum(p.widths(False)[0] for p in self.posteriors)
        most = max(1, min(wanted // rows, _MOST_NOISE // max(floats, 1)))
        return most // self.members * self.members or most

    def _distinct(
        self, args: Any, kwargs: Any, start: int, draws: int, at_once: int
    ) -> Iterator[Any]:
        """Outputs of draws that pick from finitely many networks: each network that was picked runs once."""
        held, device = self._numbered(start, draws), self.posteriors[0].device
        picked = torch.stack(
            passes.run(held, lambda: [p.choices().to(device) for p in self.posteriors])
        )
        unique, which = torch.unique(picked, dim=1, return_inverse=True)
        first_of = torch.empty(unique.shape[1], dtype=torch.long, device=device)
        first_of.scatter_(0, which, torch.arange(draws, device=device))
        networks = _joined(
            [
                self._run(args, kwargs, held.take(some), start)
                for some in first_of.split(at_once)
            ]
        )
        for index in which.split(max(at_once, 64)):
            yield tree_map(
                lambda leaf, index=index: (
                    leaf[index] if isinstance(leaf, Tensor) else leaf
                ),
                networks,
            )


def member_weights(model: nn.Module) -> Tensor | None:
    """Stacking weights of a model's members, (K,), or None where they count alike."""
    found = [
        p.weights
        for p in passes.posteriors_of(model)
        if isinstance(p, EnsemblePosterior)
    ]
    if not found or bool((found[0] == found[0][0]).all()):
        return None
    return (
        found[0].repeat(members(model) // len(found[0]))
        * len(found[0])
        / members(model)
    )


MOST_NETWORKS = 4096


class Networks(Draws):
    """All M networks of a model as draws of one pass, each a member with a weight of its own."""

    def __init__(
        self,
        model: nn.Module,
        chunk: int | None,
        share: bool,
        parallel: Parallel,
        seed: Seed,
    ) -> None:
        super().__init__(model, chunk, share, parallel, seed)
        if self.held is not None:
            raise ValueError(
                'predict(draws="exact") inside `fixed_draws`: held draws are all there are; call it outside.'
            )
        supports = self._supports()
        self.support = {
            p.key: support for p, support in zip(self.posteriors, supports, strict=True)
        }
        probs = [
            support.probs.double().cpu()
            for support in supports
            for _ in range(support.picks)
        ]
        picks = [torch.arange(len(p)) for p in probs]
        alone = torch.zeros(1, 0).long()
        # All combinations of values, (M / K, picks of all posteriors).
        self.combined = (
            torch.cartesian_prod(*picks).view(-1, len(picks)) if picks else alone
        )
        joint = torch.ones(len(self.combined), dtype=torch.float64)
        for index, values in zip(self.combined.T, probs, strict=True):
            joint *= values[index]
        own = torch.ones(self.members) if self.weights is None else self.weights.cpu()
        every = (joint[:, None] * own).flatten()
        self.predicted_members = len(every)  # M
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
        size = math.log(self.members) + sum(
            s.picks * math.log(max(1, len(s.probs))) for s in found
        )
        if size > math.log(MOST_NETWORKS) + 1e-9:
            count = (
                f"{round(math.exp(size)):,}"
                if size < math.log(1e12)
                else f"10^{size / math.log(10):,.0f}"
            )
            raise ValueError(
                f'predict(draws="exact") would run {count} networks, and runs {MOST_NETWORKS:,} at most. Give a number '
                f"of draws, or patch fewer layers with fewer components."
            )
        return found

    def _outputs(self, args: Any, kwargs: Any, draws: int, start: int) -> Iterator[Any]:
        """Outputs (M, N, ...) of all networks, as one: their weights are those of members."""
        if not self.posteriors:
            yield from super()._outputs(args, kwargs, draws, start)
            return
        at_once, parts = self._at_once((args, kwargs)), []
        # Network i is a combination for member i mod K.
        for number in torch.arange(self.predicted_members).split(at_once):
            some = self.combined[number // self.members]
            first, at = int(number[0]) % self.members, 0
            new = Pass(len(some), 1, first, rowwise=False)
            for p in self.posteriors:
                support = self.support[p.key]
                picked = some[:, at : at + support.picks].to(p.device)
                at += support.picks
                block = (
                    support.lines.to(p.device, p.dtype)[picked]
                    .transpose(1, 2)
                    .flatten(1)
                )
                new.put(p.key, Noise(block, block.new_empty(0, 0)))
            parts.append(self._run(args, kwargs, new, 0))
        yield _joined(parts)


def _joined(parts: list[Any]) -> Any:
    """Outputs (S', N, ...) of several calls as one."""
    return tree_map(
        lambda *leaves: (
            torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0]
        ),
        *parts,
    )
