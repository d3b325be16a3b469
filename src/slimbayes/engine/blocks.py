"""How rows are cut into blocks, one for each draw, and what compilers have to say about it."""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor


def sizes_equal(a: int, b: int) -> bool:
    """Whether two sizes are equal; while a compiler traces, whether they always are."""
    if not torch.compiler.is_compiling():
        return a == b
    from torch.fx.experimental.symbolic_shapes import (
        statically_known_true,
    )  # slow to import

    return statically_known_true(a == b)


def is_exporting() -> bool:
    """Whether torch.export traces: the flag itself, since torch's compiler takes `torch.compiler.is_exporting()` for
    true wherever it traces, of which 2.13 makes an exception.

    >>> is_exporting()
    False
    """
    return torch.compiler._is_exporting_flag


@torch.library.custom_op("slimbayes::keep_in_memory", mutates_args=())
def _keep_in_memory(x: Tensor) -> Tensor:
    return x.clone()


_keep_in_memory.register_fake(torch.empty_like)
_keep_in_memory.register_autograd(lambda ctx, gradient: gradient)
_keep_in_memory.register_vmap(lambda info, in_dims, x: (_keep_in_memory(x), in_dims[0]))


def keep_in_memory(x: Tensor) -> Tensor:
    """x, which a compiler then holds in memory: left alone, it draws factors anew for every activation that meets one.

    >>> keep_in_memory(torch.ones(2))
    tensor([1., 1.])
    """
    return (
        _keep_in_memory(x)
        if torch.compiler.is_compiling() and not is_exporting()
        else x
    )


def block_of_row(rows: int, blocks: int, device: torch.device | None = None) -> Tensor:
    """Block index of each row: consecutive, as equal in size as the numbers allow.

    >>> block_of_row(5, 2)
    tensor([0, 0, 0, 1, 1])
    """
    return torch.arange(rows, device=device) * blocks // max(rows, 1)


def block_sizes(rows: int, blocks: int) -> list[int]:
    """Number of rows in each block of `block_of_row`.

    >>> block_sizes(5, 2)
    [3, 2]
    """
    edges = [
        -(-j * rows // blocks) for j in range(blocks + 1)
    ]  # the first row of block j is ceil(j * rows / blocks)
    return [stop - start for start, stop in pairwise(edges)]


class Spread(NamedTuple):
    """How lines of K members become those of n draws: by the member of each block of draws, or in order."""

    member: Tensor | None
    shape: tuple[
        int, ...
    ]  # of n: turns of all members where there are several, members (or blocks), draws of a block

    def out(self, lines: Tensor) -> Tensor:
        """Lines (K, 1, w) as (members or blocks, 1, w), to meet what has the shape of the draws."""
        return lines if self.member is None else lines.index_select(0, self.member)

    def laid(self, lines: Tensor) -> Tensor:
        """Lines (K, 1, ...) as (n, ...)."""
        lines = self.out(lines)
        if len(self.shape) == 2 and sizes_equal(self.shape[1], 1):
            return lines.squeeze(1)
        return lines.expand(self.shape + lines.shape[2:]).reshape(-1, *lines.shape[2:])


def spread_of(
    members: int, blocks: int, count: int, first: Any, device: torch.device
) -> Spread:
    """How the lines of members become those of so many draws, one for each block of rows or for each row of a pass
    whose first block has member `first`.

    >>> spread_of(2, 4, 12, 0, torch.device("cpu"))
    Spread(member=None, shape=(2, 2, 3))
    """
    rows = (
        1
        if sizes_equal(count, blocks)
        else count // blocks
        if sizes_equal(count % blocks, 0)
        else 0
    )
    if rows and isinstance(first, int) and not first % members and not blocks % members:
        return Spread(
            None,
            (members, rows)
            if sizes_equal(blocks, members)
            else (blocks // members, members, rows),
        )
    block = (
        torch.arange(blocks, device=device)
        if rows
        else block_of_row(count, blocks, device)
    )
    return Spread((block + first) % members, (blocks, rows) if rows else (count, 1))
