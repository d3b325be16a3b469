"""A pass: which draw each row of a batch gets, and the noise behind the draws.

A draw belongs to a forward pass of the whole model, not to one layer call: a module called twice, or tied weights, see
one weight sample. A pass is opened by `sample`, by `frozen`, by a bare `model(x)` (a hook on the converted root), or by a
converted layer that is called on its own.

Sizes: S draws, R rows of the batch, B rows per draw, K members.

Layout. Rows are cut into consecutive blocks, one block per draw: rows [j*B:(j+1)*B] belong to draw j, and draw j belongs
to member (first + j) mod K. In a bare call there are K blocks, of as equal size as R allows, and `first` is random, so every
row gets one draw of a uniformly random member.
"""

import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from slimbayes.posteriors.base import Noise, Posterior, processes

# torch.compile looks at .grad of every tensor it meets on a module, drawn factors too, and would warn about them.
warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning, r"torch\._dynamo")


class Pass:
    """The layout of one forward pass. It is open while the model runs; afterwards only a backward pass may reread it."""

    def __init__(self, draws: int | None, rows: int | None, first: int | Tensor = 0, held: bool = False) -> None:
        self.draws = draws  # None in a bare call: each posterior then has one draw per member
        self.rows = rows  # of the call under way; a held pass sees many calls
        self.first = first
        self.held = held
        self.open = True
        self.turn = 0  # forwards that a held pass has seen
        self.calls: dict[int, tuple[int, int]] = {}  # of layers in the forward under way, by posterior: (turn, count)

    def blocks(self, posterior: Posterior) -> int:
        """How many blocks of rows this posterior has draws for."""
        return posterior.members if self.draws is None else self.draws

    def pick(self, posterior: Posterior, parameter: Tensor, count: int) -> Tensor:
        """Lay a parameter (K, ...) out by the member of each block, or of each row: (count, ...)."""
        members, blocks = posterior.members, self.blocks(posterior)
        if not isinstance(self.first, int) or self.first % members or blocks % members:
            block = torch.arange(blocks, device=posterior.device)
            if count != blocks:
                block = block_of_row(count, blocks, posterior.device)
            return parameter[(block + self.first) % members]
        # The regular layout as plain expansion: its backward is a sum, not a scatter.
        tail = parameter.shape[1:]
        rows = 1 if count == blocks else count // blocks
        return parameter[None, :, None].expand(blocks // members, members, rows, *tail).reshape(count, *tail)


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


def posteriors_of(module: nn.Module) -> list[Posterior]:
    """Every posterior under a module, each once, in a fixed order."""
    return [m for m in module.modules() if isinstance(m, Posterior)]


def is_open(posteriors: Sequence[Posterior]) -> bool:
    """Whether a pass is under way; inside a backward pass (gradient checkpointing) the last one counts as open."""
    current = posteriors[0].current if posteriors else None
    if current is None or current.open:
        return current is not None
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def begin(posteriors: Sequence[Posterior], new: Pass) -> Pass:
    """Start a pass: draw all its noise at once and hand each posterior its share."""
    try:
        for posterior, noise in zip(posteriors, _noise(posteriors, new), strict=True):
            posterior.start(new, noise)
        whole = [p for p in posteriors if not p.sharded]
        for kind in dict.fromkeys(type(p) for p in whole):
            kind.realise_together([p for p in whole if type(p) is kind])
    except BaseException:
        new.open = False  # else the next pass would take itself for a call inside of this one
        raise
    return new


def remember(posteriors: Sequence[Posterior], outputs: Any) -> None:
    """Let the backward pass through these outputs find this pass's draws again: gradient checkpointing recomputes layers then.

    Autograd runs nodes in the reverse order of their creation: all of a later pass is done when an earlier output is reached.
    """
    if torch.compiler.is_compiling() or not posteriors or posteriors[0].current is None:
        return
    current, rows = posteriors[0].current, posteriors[0].current.rows
    draws = [(p, p._noise, p._values) for p in posteriors]

    def restore(gradients: Any) -> None:
        current.rows = rows
        for posterior, noise, values in draws:
            posterior.current, posterior._noise, posterior._values = current, noise, values

    for leaf in pytree.tree_leaves(outputs):
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            leaf.grad_fn.register_prehook(restore)


def begin_bare(posteriors: Sequence[Posterior], rows: int) -> Pass:
    """Start the pass of a bare model(x): each row one draw, members starting at a random one."""
    most = max(p.members for p in posteriors)
    first: int | Tensor = 0
    if most > 1:
        # 720720 is divisible by 1 to 16, so the offset is uniform for each of those member counts.
        first = torch.randint(720720, (), device=posteriors[0].device)
    return begin(posteriors, Pass(draws=None, rows=rows, first=first))


def _noise(posteriors: Sequence[Posterior], new: Pass) -> list[Noise]:
    """Standard normals for the blocks and the rows of each posterior, cut from two flat draws per device and dtype.

    With several processes every rank draws the numbers of all ranks and takes its own share: equal seeds then still give
    each rank different noise, and one process on the whole batch would have drawn the same numbers for the same rows if the rows
    were dealt out one by one, as DistributedSampler does.
    """
    rank, world = processes()
    out: list[Noise | None] = [None] * len(posteriors)
    kinds = [(p.device, p.dtype) for p in posteriors]
    for device, dtype in dict.fromkeys(kinds):
        index = [i for i, kind in enumerate(kinds) if kind == (device, dtype)]
        widths = [posteriors[i].widths(new.held) for i in index]
        counts = [new.blocks(posteriors[i]) for i in index]
        sizes = [count * width for count, (width, _) in zip(counts, widths, strict=True)]
        flat = torch.randn((world, sum(sizes)), device=device, dtype=dtype)[rank]
        blocks = [part.view(n, size // n) for part, n, size in zip(flat.split(sizes), counts, sizes, strict=True)]
        per_row = [width for _, width in widths]
        rows, groups = (new.rows or 0) if any(per_row) else 0, new.draws or 1
        wide = torch.randn((groups, rows // groups, world, sum(per_row)), device=device, dtype=dtype)[:, :, rank]
        lines = wide.reshape(rows, sum(per_row)).split(per_row, dim=1)
        for i, block, row in zip(index, blocks, lines, strict=True):
            out[i] = Noise(block, row)
    return [noise for noise in out if noise is not None]


def infer_rows(inputs: Any, batch_dim: int) -> int | None:
    """Number of rows: the size along `batch_dim` of the first tensor in the inputs that has that dimension."""
    for leaf in pytree.tree_leaves(inputs, is_leaf=lambda leaf: isinstance(leaf, PackedSequence)):
        if isinstance(leaf, PackedSequence):
            return int(leaf.batch_sizes[0])
        if isinstance(leaf, Tensor) and leaf.dim() > batch_dim:
            return leaf.shape[batch_dim]
    return None


def apply_rows(
    combine: Any, x: Tensor, factor: Tensor, current: Pass, batch_dim: int, channel_dim: int, name: str, certain: bool = False
) -> Tensor:
    """Combine activations with factors that differ between rows.

    Shape: x has its rows along `batch_dim` and its channels along `channel_dim`; factor is (n, channels), one line for each
    draw of the pass. A layer may see more rows than the pass has (windows or time steps folded into the batch): each
    row of the pass then owns a block of them. An x with a single row is broadcast. Unless the layer is `certain` of
    `batch_dim`, rows that only fit another dimension are looked for there.
    """
    factor = factor.to(x.dtype)
    if factor.shape[0] == 1:
        return combine(x, _place(factor, x.dim(), batch_dim, channel_dim))
    rows = current.rows or 0
    batch_dim = batch_dim_of(x, rows, batch_dim, channel_dim, name, certain)
    seen = x.shape[batch_dim]
    if rows % factor.shape[0] or (seen == 1 and rows > 1):
        factor = factor[block_of_row(rows, factor.shape[0], factor.device)]
    if torch.compiler.is_compiling() and seen not in (factor.shape[0], 1):
        # Cutting x into blocks divides its symbolic size anew in every layer, and the compiler's algebra explodes; a lookup does not.
        factor = factor[block_of_row(seen, factor.shape[0], factor.device)]
    count = factor.shape[0]
    if seen in (count, 1):
        return combine(x, _place(factor, x.dim(), batch_dim, channel_dim))
    if channel_dim > batch_dim:
        channel_dim += 1
    blocks = x.unflatten(batch_dim, (count, seen // count))
    # Back to the very shape of x: flattening would nest a division in every layer's symbolic shape when it is compiled.
    return combine(blocks, _place(factor, blocks.dim(), batch_dim, channel_dim)).reshape(x.shape)


def per_row(factor: Tensor, seen: int, current: Pass) -> Tensor:
    """Repeat the lines of factor (n, C), one for each draw of the pass, so that each of the `seen` rows has its own."""
    count, rows = factor.shape[0], current.rows or 0
    if count == 1:
        return factor.expand(seen, -1)
    if rows % count:
        factor = factor[block_of_row(rows, count, factor.device)]
    return factor.repeat_interleave(seen // factor.shape[0], 0) if seen != factor.shape[0] else factor


def _place(factor: Tensor, dims: int, batch_dim: int, channel_dim: int) -> Tensor:
    shape = [1] * dims
    shape[batch_dim], shape[channel_dim] = factor.shape
    return factor.reshape(shape)


def batch_dim_of(x: Tensor, rows: int, batch_dim: int, channel_dim: int, name: str, certain: bool = False) -> int:
    """The dimension that holds the pass's rows: the declared one if it fits, else the only other one that does."""
    seen = x.shape[batch_dim]
    if seen in (rows, 1):
        return batch_dim
    others = [d for d in range(x.dim()) if d not in (batch_dim, channel_dim % x.dim()) and x.shape[d] == rows]
    if seen % rows == 0 and not others:
        return batch_dim
    if seen % rows != 0 and len(others) == 1 and not certain:
        return others[0]
    raise ValueError(
        f"{name}: an input of shape {tuple(x.shape)} does not show which dimension holds the {rows} rows of this pass "
        f"(dimension {batch_dim} was expected). Say it with bayesianize(..., batch_dim={{'<layer name>': dim}}), "
        f"exclude the layer, or use draws='member' and sample(..., fold=False), which suits any layout."
    )
