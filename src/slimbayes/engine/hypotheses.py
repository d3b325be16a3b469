"""Which inputs may hold rows, and where: guesses that the proof tries in turn."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from slimbayes.engine.layout import Dims
from slimbayes.engine.tree import arrays_of


@dataclass
class Hypothesis:
    """Which inputs hold rows, where, and what tells how many there are."""

    inputs: Dims
    lead: tuple[int, int]


def hypotheses(inputs: Any, batch_dim: int | None) -> Iterator[Hypothesis]:
    """Which inputs may hold rows, the likeliest first."""
    arrays = arrays_of(inputs)
    shapes = [(-1, int(a.batch_sizes[0])) if isinstance(a, PackedSequence) else tuple(a.shape) for a in arrays]
    # Inputs with more dimensions first: masks, lengths and weights have fewer than what they are for.
    order = sorted(
        range(len(arrays)), key=lambda i: (not isinstance(arrays[i], PackedSequence), _flag(arrays[i]), -len(shapes[i]))
    )
    seen: set[Dims] = set()
    for dim in (0, 1) if batch_dim is None else (batch_dim,):
        for i in order:
            at = 1 if isinstance(arrays[i], PackedSequence) else dim
            if len(shapes[i]) > at and shapes[i][at] > 0:
                for dims in _variants(shapes, i, at):
                    if dims not in seen:
                        seen.add(dims)
                        yield Hypothesis(dims, (i, at))


def _flag(array: Any) -> bool:
    return isinstance(array, Tensor) and array.dtype == torch.bool


def _variants(shapes: Sequence[tuple[int, ...]], lead: int, at: int) -> Iterator[Dims]:
    """Rows of all inputs, if those of input `lead` lie along `at`: wherever a size fits, then with one input less, or
    multiples too.
    """
    rows = shapes[lead][at]
    fits = [[d for d, size in enumerate(shape) if size == rows and d < 2] for shape in shapes]
    first = [at if at in f else f[0] if f else None for f in fits]
    first[lead] = at
    yield tuple(first)
    for i, found in enumerate(fits):  # a state (layers, rows, units) of as many layers as rows
        for other in found if i != lead else ():
            yield tuple(other if j == i else d for j, d in enumerate(first))
    yield tuple(next((d for d in reversed(f)), None) if j != lead else at for j, f in enumerate(fits))
    for i, dim in enumerate(first):
        if dim is not None and i != lead:
            yield tuple(None if j == i else d for j, d in enumerate(first))
    yield tuple(
        d if d is not None or not s or rows < 2 or s[0] % rows else 0 for d, s in zip(first, shapes, strict=True)
    )
    yield tuple(at if j == lead else None for j in range(len(shapes)))
