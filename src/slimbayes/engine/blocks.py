"""How rows are cut into blocks, one for each draw, and what compilers have to say about it."""

from itertools import pairwise

import torch
from torch import Tensor


def same(a: int, b: int) -> bool:
    """Whether two sizes are equal; while a compiler traces, whether they always are."""
    if not torch.compiler.is_compiling():
        return a == b
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # slow to import

    return statically_known_true(a == b)


def exporting() -> bool:
    """Whether torch.export traces: the flag itself, since torch's compiler takes `torch.compiler.is_exporting()` for
    true wherever it traces, of which 2.13 makes an exception.

    >>> exporting()
    False
    """
    return torch.compiler._is_exporting_flag


@torch.library.custom_op("slimbayes::realised", mutates_args=())
def _realised(x: Tensor) -> Tensor:
    return x.clone()


_realised.register_fake(torch.empty_like)
_realised.register_autograd(lambda ctx, gradient: gradient)
_realised.register_vmap(lambda info, in_dims, x: (_realised(x), in_dims[0]))


def realised(x: Tensor) -> Tensor:
    """x, which a compiler then holds in memory: left alone, it draws factors anew for every activation that meets one.

    >>> realised(torch.ones(2))
    tensor([1., 1.])
    """
    return _realised(x) if torch.compiler.is_compiling() and not exporting() else x


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
    edges = [-(-j * rows // blocks) for j in range(blocks + 1)]  # the first row of block j is ceil(j * rows / blocks)
    return [stop - start for start, stop in pairwise(edges)]
