"""The noise of a pass: standard normals for every posterior, drawn at once, each process its own.

Sizes: S draws, R rows of the batch, B rows per draw, K members.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slimbayes.engine import passes
from slimbayes.engine.passes import Noise, Pass

_CALLS = count()


def draw(posteriors: Sequence[Any], new: Pass) -> Pass:
    """Draw the noise of a pass for all posteriors at once."""
    for posterior, noise in zip(posteriors, _noise(posteriors, new), strict=True):
        new.noise[posterior.key] = noise
    return new


def realise(posteriors: Sequence[Any], new: Pass) -> Pass:
    """Turn a pass's noise into draws, in a few large operations for all layers. Sharded parameters wait until their
    layer runs.
    """
    whole = [p for p in posteriors if not p.sharded]

    def together() -> None:
        for kind in dict.fromkeys(type(p) for p in whole):
            kind.realise_together([p for p in whole if type(p) is kind])

    passes.run(new, together)
    return new


def _noise(posteriors: Sequence[Any], new: Pass) -> list[Noise]:
    """Standard normals for the blocks and the rows of each posterior, cut from two flat draws per device and dtype."""
    out: list[Noise | None] = [None] * len(posteriors)
    kinds = [(p.device, p.dtype) for p in posteriors]
    for device, dtype in dict.fromkeys(kinds):
        index = [i for i, kind in enumerate(kinds) if kind == (device, dtype)]
        rowwise = [new.rowwise and not posteriors[i].blockwise for i in index]
        seeded = [apart and posteriors[i].seeded(new.rows) for i, apart in zip(index, rowwise, strict=True)]
        widths = [
            (0, 0) if late else posteriors[i].widths(apart)
            for i, apart, late in zip(index, rowwise, seeded, strict=True)
        ]
        counts = [new.blocks(posteriors[i]) for i in index]
        sizes = [count * width for count, (width, _) in zip(counts, widths, strict=True)]
        flat = standard_normal((sum(sizes),), device, dtype)
        blocks = [part.view(n, size // n) for part, n, size in zip(flat.split(sizes), counts, sizes, strict=True)]
        per_row = [width for _, width in widths]
        rows = new.rows if any(per_row) or any(seeded) else 0
        lines = standard_normal((rows, sum(per_row)), device, dtype).split(per_row, dim=1)
        seed = _seed(device) if any(seeded) else None
        for i, block, row, late in zip(index, blocks, lines, seeded, strict=True):
            out[i] = Noise(block, row, seed if late else None, 2 * i)
    return [noise for noise in out if noise is not None]


def _seed(device: torch.device) -> Tensor:
    """A whole number of 48 bits on a device, for kernels that make numbers from it."""
    low, high = (uniform((2,), device) * 2**24).long().unbind()
    return low + high * 2**24


def processes() -> tuple[int, int]:
    """This process's rank and the number of processes that train together."""
    together = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if together else (0, 1)


def standard_normal(shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Standard normals of this process; ranks with equal seeds get different ones."""
    return _random(torch.randn, shape, device, dtype)


def uniform(shape: Sequence[int], device: torch.device) -> Tensor:
    """Uniform numbers of this process; ranks with equal seeds get different ones."""
    return _random(torch.rand, shape, device, torch.float32)


def _random(function: Any, shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    rank, world = processes()
    if world == 1:
        return function(shape, device=device, dtype=dtype)
    if torch.compiler.is_compiling() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        # A graph takes torch's own generator alone: each rank draws the numbers of all ranks and takes its share.
        return function((world, *shape), device=device, dtype=dtype)[rank]
    # A seed from the generator that ranks may have in common, and a stream of this rank's own from it.
    seed = int(torch.randint(2**48, ()))
    own = torch.Generator(device).manual_seed((seed * 1_000_003 + rank * 7_919 + 1) % 2**63)
    return function(shape, device=device, dtype=dtype, generator=own)


def random_member(device: torch.device | None = None) -> Any:
    """Where the members of a bare call start. 720720 is divisible by 1 to 16: uniform for each of those member
    counts.
    """
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None:
        return torch.randint(720720, (), device=device)
    # Inside vmap every number would be one of many: count on from the seed instead.
    return (torch.initial_seed() * 6364136223846793005 + next(_CALLS) * 1442695040888963407 >> 33) % 720720
