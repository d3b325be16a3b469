"""Posteriors whose noise is drawn together, and those whose draws are made together.

Sizes: R rows of the batch, n blocks of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slimbayes.engine.modules import Posteriors, anchors_of, planned
from slimbayes.engine.passes import Pass


class Group(NamedTuple):
    """Posteriors on one device with one type of noise: how many numbers each takes for a block and for a row."""

    device: torch.device
    dtype: torch.dtype
    posteriors: list[Any]
    places: list[int]  # among all posteriors of the pass
    keys: tuple[str, ...]
    counts: list[int]  # of blocks
    block: list[int]
    row: list[int]
    apart: list[bool]  # whether single rows have noise of their own


def groups_of(posteriors: Sequence[Any], new: Pass) -> list[Group]:
    """How the noise of a pass is cut: the same for all passes of its kind."""
    kinds = tuple([(anchor.device, noise_type(anchor)) for anchor in anchors_of(posteriors)])
    return planned(posteriors, (new.draws, new.rowwise, kinds), lambda: _made(posteriors, new, kinds))


def _made(posteriors: Sequence[Any], new: Pass, kinds: Sequence[Any]) -> list[Group]:
    groups = []
    for device, dtype in dict.fromkeys(kinds):
        places = [i for i, kind in enumerate(kinds) if kind == (device, dtype)]
        same = [posteriors[i] for i in places]
        apart = [new.rowwise and not p.blockwise for p in same]
        widths = [p.widths(rowwise) for p, rowwise in zip(same, apart, strict=True)]
        keys, counts = tuple([p.key for p in same]), [new.blocks(p) for p in same]
        block, row = [w for w, _ in widths], [w for _, w in widths]
        groups.append(Group(device, dtype, same, places, keys, counts, block, row, apart))
    return groups


def noise_type(anchor: Tensor) -> torch.dtype:
    """Type of the noise of parameters: their own, float32 at least."""
    own = anchor.dtype
    return torch.float32 if own in (torch.float16, torch.bfloat16) else own


def kinds_of(posteriors: Sequence[Any]) -> list[Sequence[Any]]:
    """Posteriors of each class together, without those whose parameters are sharded."""
    sharded = [hasattr(a, "full_tensor") if type(a) is not nn.Parameter else False for a in anchors_of(posteriors)]

    def make() -> list[Sequence[Any]]:
        whole = [p for p, split in zip(posteriors, sharded, strict=True) if not split]
        some: Any = Posteriors if type(posteriors) is Posteriors else list
        return [some([p for p in whole if type(p) is kind]) for kind in dict.fromkeys(map(type, whole))]

    return planned(posteriors, ("kinds", tuple(sharded)), make)
