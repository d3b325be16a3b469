"""Numbers that a posterior draws while its layer runs, when the shape of the input is known: masks of dropout, noise of
outputs. Draws that run one by one, and gradient checkpointing, which runs a layer again, must meet the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slimbayes.engine.noise import kernel_seed
from slimbayes.posteriors.base import Posterior


def drawn_late(
    posterior: Posterior,
    make: Callable[[list[int]], Tensor],
    shape: Sequence[int],
    dim: int | None,
) -> Tensor:
    """Numbers drawn while the layer runs, make(shape) with rows along `dim`.

    Of draws that run one by one each takes its part of what all would have drawn in one forward.
    """
    current, sizes = posterior.current, list(shape)
    if current.index is None or dim is None:
        return _made_once(posterior, lambda: make(sizes))
    every = [n * current.total if d == dim else n for d, n in enumerate(sizes)]
    return _made_here(posterior, lambda: make(every)).narrow(
        dim, current.index * sizes[dim], sizes[dim]
    )


def seed_late(posterior: Posterior, rows: int) -> tuple[Tensor, int]:
    """What `drawn_late` gives to a kernel: a seed for numbers of rows, and which of them is the first here."""
    current = posterior.current
    if current.index is None:
        return _made_once(posterior, lambda: kernel_seed(posterior.device, current)), 0
    return _made_here(
        posterior, lambda: kernel_seed(posterior.device, current)
    ), current.index * rows


def _made_once(posterior: Posterior, make: Callable[[], Tensor]) -> Tensor:
    """What this draw makes: gradient checkpointing brings torch's generators back, not the stream of a seed."""
    current = posterior.current
    kept = current.stream is not None and not torch.compiler.is_compiling()
    return (
        _made_here(posterior, make, f"{posterior.key} {current.index}")
        if kept
        else make()
    )


def _made_here(
    posterior: Posterior, make: Callable[[], Tensor], key: str = ""
) -> Tensor:
    """What the first of several draws made at this place of the forward."""
    made, place = (
        posterior.current.masks.setdefault(key or posterior.key, []),
        place_in_forward(posterior),
    )
    while len(made) <= place:
        made.append(make())
    return made[place]


def place_in_forward(posterior: Posterior) -> int:
    """How many times this forward has asked before."""
    calls = posterior.current.calls
    count = calls.get(posterior.key, 0)
    if recomputed():
        if count > 1:
            raise ValueError(
                f"{posterior.name}: draws at several places of a forward cannot be told apart by gradient "
                f"checkpointing; use one layer for each."
            )
        return 0
    calls[posterior.key] = count + 1
    return count


def recomputed() -> bool:
    """Whether gradient checkpointing is computing a forward again."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
