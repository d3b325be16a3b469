"""The noise of a pass: standard normals for every posterior, drawn at once, each process its own.

Draws of a held pass and of a prediction are numbered, and draw j is a function of (seed, j) alone: however many are
drawn together, for however many rows, in whatever order, it is the same function. What a layer draws while it runs
(dropout) follows from a number that each draw has, by hashing; so it works in compiled code, too.

Sizes: S draws, R rows of the batch, B rows per draw, K members.
"""

from __future__ import annotations

import math
import operator
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from slimbayes.engine import passes
from slimbayes.engine.blocks import is_exporting
from slimbayes.engine.modules import kinds_of, noise_type, places_of, plan_once
from slimbayes.engine.passes import Noise, Pass
from slimbayes.engine.quiet import inside_func
from slimbayes.kernels import INTERPRETED, LARGE, ready
from slimbayes.seeds import key

Seed = int | torch.Generator | None

_CALLS = count()
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: multiples of an odd number differ in their low bits, too
_OWN = threading.RLock()


def seed_of(seed: Seed) -> int:
    """The number behind a seed: itself, the next of a generator's, or the next of torch's own, of which ranks and
    forked processes that have it in common make different ones.

    Example:
        >>> seed_of(7), seed_of(torch.Generator().manual_seed(0)) == seed_of(torch.Generator().manual_seed(0))
        (7, True)
    """
    if seed is None:
        return key(int(torch.randint(2**62, ())), processes()[0], _FORKS.line())
    if isinstance(seed, torch.Generator):
        return int(torch.randint(2**62, (), generator=seed, device=seed.device))
    if isinstance(seed, bool) or not hasattr(type(seed), "__index__"):
        raise TypeError(
            f"seed must be a whole number, a torch.Generator or None, got {type(seed).__name__}."
        )
    return operator.index(seed)


class _Forks:
    """Which fork of which process this is: children counted by their parents, so that equal runs count alike."""

    def __init__(self) -> None:
        self.children, self.own, self.seed = 0, 0, 0
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self._count, after_in_child=self._begin)

    def _count(self) -> None:
        self.children += 1

    def _begin(self) -> None:
        self.own, self.children, self.seed = (
            key(self.own, self.children),
            0,
            torch.initial_seed(),
        )

    def line(self) -> int:
        """A number of this process's own as long as torch's generator goes on where the parent's was; else 0."""
        return self.own if self.own and torch.initial_seed() == self.seed else 0


_FORKS = _Forks()


class Stream:
    """Random numbers that follow from a seed alone, on whatever device they are asked for."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}

    def on(self, device: torch.device) -> torch.Generator:
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(
                key(self.seed, "pass")
            )
        return self.generators[device]


@contextmanager
def own_noise(seed: int | None, device: torch.device) -> Iterator[None]:
    """Let what a model draws by itself, from torch's generators, follow from a seed; they go on afterwards as if
    nothing had been drawn.
    """
    if seed is None:
        yield
        return
    every = (
        range(torch.cuda.device_count()) if device.type == "cuda" else []
    )  # a seed is set on all of them
    with _OWN, torch.random.fork_rng(every):
        torch.manual_seed(key(seed, "model"))
        yield


class NoiseGroup(NamedTuple):
    """Posteriors on one device with one type of noise: how many numbers each takes for a block and for a row."""

    device: torch.device
    dtype: torch.dtype
    posteriors: list[Any]
    places: list[int]  # among all posteriors of the pass
    keys: tuple[str, ...]
    counts: list[int]  # of blocks
    block: list[int]
    row: list[int]
    rowwise: list[bool]  # whether single rows have noise of their own


def groups_of(posteriors: Sequence[Any], new: Pass) -> list[NoiseGroup]:
    """How the noise of a pass is cut: the same for all passes of its kind."""
    places = places_of(posteriors)

    def make() -> list[NoiseGroup]:
        groups = []
        kinds = [(device, noise_type(dtype)) for device, dtype, _ in places]
        for kind in dict.fromkeys(kinds):
            which = [i for i, other in enumerate(kinds) if other == kind]
            same = [posteriors[i] for i in which]
            rowwise = [new.rowwise and not p.blockwise for p in same]
            widths = [p.widths(own) for p, own in zip(same, rowwise, strict=True)]
            keys, counts = tuple([p.key for p in same]), [new.blocks(p) for p in same]
            block, row = [w for w, _ in widths], [w for _, w in widths]
            groups.append(
                NoiseGroup(*kind, same, which, keys, counts, block, row, rowwise)
            )
        return groups

    return plan_once(posteriors, (new.draws, new.rowwise, places), make)


def draw_numbered(
    posteriors: Sequence[Any], new: Pass, seed: int, start: int = 0
) -> Pass:
    """Draw the noise of a pass whose rows share draws: draw j follows from (seed, start + j) alone."""
    assert new.draws is not None and not new.rowwise
    numbers = range(start, start + new.draws)
    for which, group in enumerate(groups_of(posteriors, new)):
        flat = torch.empty(
            new.draws, sum(group.block), device=group.device, dtype=group.dtype
        )
        generator, first = torch.Generator(group.device), key(seed, "noise", which)
        for line, j in zip(flat if sum(group.block) else [], numbers, strict=False):
            line.normal_(generator=generator.manual_seed((first + j * GOLDEN) % 2**63))
        _hand_out(group, new, flat, flat.new_empty(0, 0))
    for place, posterior in enumerate(posteriors):
        if posterior.late:
            first = key(seed, "late", place)
            keys = [(first + j * GOLDEN) % 2**63 for j in numbers]
            new.keys[posterior.key] = torch.tensor(keys, device=posterior.device)
    return new


def _hand_out(group: NoiseGroup, new: Pass, block: Tensor, row: Tensor) -> None:
    """Give each posterior its part of (n, sum of widths) numbers for blocks and (R, sum of widths) for rows."""

    def cut(lines: Tensor, widths: list[int]) -> Sequence[Tensor]:
        return (
            lines.split_with_sizes(widths, 1)
            if lines.shape[1]
            else [lines] * len(widths)
        )

    for at, part, line in zip(
        group.keys, cut(block, group.block), cut(row, group.row), strict=True
    ):
        new.noise[at] = Noise(part, line)
    if not (row.shape[1] and block.shape[1]):
        new.joint[group.keys] = Noise(block, row)


def draw(posteriors: Sequence[Any], new: Pass) -> Pass:
    """Draw the noise of a pass for all posteriors at once."""
    for group in groups_of(posteriors, new):
        from_seed = [False] * len(group.keys)
        if (
            any(group.rowwise)
            and (group.device.type == "cuda" or INTERPRETED)
            and ready(group.posteriors[0].anchor)
        ):
            from_seed = [
                own and p.seeded(new.rows)
                for p, own in zip(group.posteriors, group.rowwise, strict=True)
            ]
        alike = len(set(group.counts)) == 1
        if alike and not any(from_seed):
            block, row = (
                (group.counts[0], sum(group.block)),
                (new.rows if any(group.row) else 0, sum(group.row)),
            )
            numbers = [
                _normal(shape, group.device, group.dtype, new) for shape in (block, row)
            ]
            _hand_out(group, new, *numbers)
        else:
            _draw_separately(group, from_seed, new)
    return new


def _normal(
    shape: tuple[int, int], device: torch.device, dtype: torch.dtype, new: Pass
) -> Tensor:
    """Standard normals; past a compiler where its own, which call Philox for each number, take longer: four times on a
    GPU, and seven on a CPU (140,000 numbers). A generator in plain torch, Threefry or a hash, would halve randn's time
    on a CPU, but in a whole loss the compiler then works for minutes: it writes out again what rounds have in common.
    """
    if not shape[1]:
        return torch.empty(shape, device=device, dtype=dtype)
    compiled = torch.compiler.is_compiling() and not is_exporting()
    past = compiled and (device.type == "cpu" or math.prod(shape) >= LARGE)
    return _random(_eager_normal if past else torch.randn, shape, device, dtype, new)


def _draw_separately(group: NoiseGroup, from_seed: list[bool], new: Pass) -> None:
    """Noise where posteriors have different numbers of blocks, or some of them a seed instead of numbers for rows."""
    block = [
        0 if own else width for width, own in zip(group.block, from_seed, strict=True)
    ]
    row = [0 if own else width for width, own in zip(group.row, from_seed, strict=True)]
    sizes = [count * width for count, width in zip(group.counts, block, strict=True)]
    flat = _random(torch.randn, (sum(sizes),), group.device, group.dtype, new).split(
        sizes
    )
    rows = new.rows if any(row) or any(from_seed) else 0
    lines = _random(
        torch.randn, (rows, sum(row)), group.device, group.dtype, new
    ).split(row, dim=1)
    seed = kernel_seed(group.device, new) if any(from_seed) else None
    for i, at in enumerate(group.keys):
        numbers = flat[i].view(group.counts[i], block[i])
        new.noise[at] = Noise(
            numbers, lines[i], seed if from_seed[i] else None, 2 * group.places[i]
        )


def make_draws(posteriors: Sequence[Any], new: Pass) -> Pass:
    """Turn the noise of the pass under way into draws, in a few large operations for all layers. Sharded parameters
    wait until their layer runs.
    """
    for alike in kinds_of(posteriors):
        type(alike[0]).draw_together(alike, new)
    return new


def kernel_seed(device: torch.device, new: Pass) -> Tensor:
    """A whole number of 48 bits on a device, for kernels that make numbers from it."""
    if not torch.compiler.is_compiling():
        return _random(partial(torch.randint, 2**48), (), device, torch.int64, new)
    low, high = (
        (_random(torch.rand, (2,), device, torch.float32, new) * 2**24).long().unbind()
    )
    return low + high * 2**24


def processes() -> tuple[int, int]:
    """This process's rank and the number of processes that train together."""
    together = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if together else (0, 1)


def standard_normal(
    shape: Sequence[int], device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Standard normals of this process; ranks with equal seeds get different ones."""
    return _random(torch.randn, shape, device, dtype, passes.innermost())


def uniform(shape: Sequence[int], device: torch.device) -> Tensor:
    """Uniform numbers of this process; ranks with equal seeds get different ones."""
    return _random(torch.rand, shape, device, torch.float32, passes.innermost())


@torch.library.custom_op(
    "slimbayes::normal", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def _eager_normal(
    shape: Sequence[int], device: torch.device, dtype: torch.dtype
) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype)


@_eager_normal.register_fake
def _(shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, device=device, dtype=dtype)


def _random(
    function: Any,
    shape: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    current: Pass | None,
) -> Tensor:
    rank, world = processes()
    if torch.compiler.is_compiling() or (
        device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    ):
        # A graph takes torch's own generator alone: each rank draws the numbers of all ranks and takes its share.
        every = function(
            (world, *shape) if world > 1 else shape, device=device, dtype=dtype
        )
        return every[rank] if world > 1 else every
    while current is not None and current.stream is None:
        current = current.outer
    if current is not None:
        return function(
            shape, device=device, dtype=dtype, generator=current.stream.on(device)
        )
    line = _FORKS.line()
    if world == 1 and not line:
        return function(shape, device=device, dtype=dtype)
    # A seed from the generator that ranks and forked processes may have in common, and a stream of one's own from it.
    seed = int(torch.randint(2**48, ()))
    own = torch.Generator(device).manual_seed(
        (seed * 1_000_003 + rank * 7_919 + 1 + line) % 2**63
    )
    return function(shape, device=device, dtype=dtype, generator=own)


def random_member(device: torch.device | None = None) -> Any:
    """Where the members of a bare call start. 720720 is divisible by 1 to 16: uniform for each of those member
    counts.
    """
    if torch.compiler.is_compiling() or not inside_func():
        first = torch.randint(720720, (), device=device)
        line = 0 if torch.compiler.is_compiling() else _FORKS.line()
        return (first + line) % 720720 if line else first
    # Inside vmap every number would be one of many: count on from the seed instead.
    return (
        torch.initial_seed() * 6364136223846793005 + next(_CALLS) * 1442695040888963407
        >> 33
    ) % 720720
