"""sample and frozen: run a model under S draws at once, or hold draws over many calls.

Sizes: S draws, B rows of the caller's batch, K members. Folded batches are draw-major: rows [j*B:(j+1)*B] belong to draw j, and
draw j to member j mod K.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree

from slimbayes import passes
from slimbayes.convert import conversions_of
from slimbayes.passes import Pass
from slimbayes.posteriors.base import Posterior


def members(model: nn.Module) -> int:
    """K, the number of members of a converted model; with several methods, their least common multiple.

    >>> import slimbayes as sb
    >>> members(sb.bayesianize(nn.Linear(2, 2), sb.BatchEnsemble(members=3)))
    3
    """
    conversions_of(model)
    return math.lcm(*(p.members for p in passes.posteriors_of(model)))


def sample(
    model: nn.Module, *args: Any, draws: int = 1, rows: Literal["tile", "split"] = "tile", fold: bool = True, **kwargs: Any
) -> Any:
    """Run the model under S = members x draws draws from its posterior.

    Args:
        model: a converted model; its mode (train or eval) is left as it is.
        *args, **kwargs: what the model takes. Every tensor with as many rows as the first one is repeated for each draw.
        draws: draws from every member.
        rows: "tile" lets every draw see every row; "split" hands the rows out, the first S-th of them to draw 0.
        fold: run all draws as one large batch; False runs them one after another, for models that mix the rows of a batch or
            lay them out in an unusual way.

    Shape: every tensor of the output gets a leading axis S; what follows is what the plain model returns.
    Draw j belongs to member j mod K.

    Example:
        >>> import slimbayes as sb
        >>> net = sb.bayesianize(nn.Linear(4, 3), sb.Rank1(members=2))
        >>> sample(net, torch.randn(5, 4), draws=3).shape
        torch.Size([6, 5, 3])
    """
    if draws < 1:
        raise ValueError(f"sample needs at least one draw, got draws={draws!r}.")
    modules = list(model.modules())  # walked once: on small networks this is most of the overhead
    posteriors = [m for m in modules if isinstance(m, Posterior)]
    conversion = next((m.__dict__["_slimbayes"] for m in modules if "_slimbayes" in m.__dict__), None)
    batch_dim = conversions_of(model)[0][1].batch_dim if conversion is None else conversion.batch_dim
    size = passes.infer_rows((args, kwargs), batch_dim)
    if size is None:
        raise ValueError("sample found no tensor among the inputs, so it cannot tell the number of rows.")
    held = posteriors[0].current if posteriors and passes.is_open(posteriors) else None
    total = math.lcm(*(p.members for p in posteriors)) * draws
    if held is not None:
        if not held.held:
            raise ValueError("sample was called inside a forward pass of the same model; call it from outside.")
        total = held.draws or 1
    if rows == "split":
        if size % total:
            raise ValueError(
                f"rows='split' hands rows out to {total} draws (members x draws) evenly, but the batch has {size} rows. "
                f"Use a multiple of {total}, or call model(x), which takes any number."
            )
        return _run(model, posteriors, (args, kwargs), total, size // total, batch_dim, held, first=0, tile=False)
    if fold or held is not None:
        return _run(model, posteriors, (args, kwargs), total, size, batch_dim, held, first=0, tile=True)
    parts = [_run(model, posteriors, (args, kwargs), 1, size, batch_dim, None, first=j, tile=True) for j in range(total)]
    return pytree.tree_map(lambda *leaves: torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0], *parts)


def _run(
    model: nn.Module, posteriors: list[Any], inputs: Any, draws: int, rows: int, batch_dim: int, held: Pass | None, first: int, tile: bool
) -> Any:
    """One forward of draws x rows rows, unfolded into (draws, rows, ...)."""
    args, kwargs = tile_rows(inputs, rows, draws, batch_dim) if tile and draws > 1 else inputs
    recurrent = isinstance(model, nn.RNNBase)
    if recurrent and tile and len(inputs[0]) > 1:  # states hold their rows along dimension 1 and may hold as many layers as rows
        args = (args[0], tile_rows(inputs[0][1], rows, draws, 1))
    current = held
    if held is not None:
        held.rows, held.turn = draws * rows, held.turn + 1
    elif posteriors:
        current = passes.begin(posteriors, Pass(draws, draws * rows, first))
    try:
        outputs = model(*args, **kwargs)
        passes.remember(posteriors, outputs)
        if recurrent:
            return split_rows(outputs[0], draws, rows, batch_dim), split_rows(outputs[1], draws, rows, 1)
        return split_rows(outputs, draws, rows, batch_dim)
    finally:
        if current is not None and held is None:
            current.open = False


def run_pass(model: nn.Module, posteriors: list[Any], inputs: Any, current: Pass, rows: int, batch_dim: int) -> Any:
    """Outputs (S, rows, ...) of a pass that is open already."""
    return _run(model, posteriors, inputs, current.draws or 1, rows, batch_dim, current, first=0, tile=True)


def tile_rows(inputs: Any, rows: int, draws: int, batch_dim: int = 0) -> Any:
    """Repeat every tensor of `rows` rows once for each draw, whole block after whole block.

    >>> tile_rows(torch.tensor([1, 2]), rows=2, draws=2)
    tensor([1, 2, 1, 2])
    """

    def tile(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            padded, lengths = pad_packed_sequence(leaf)
            return pack_padded_sequence(padded.repeat(1, draws, *[1] * (padded.dim() - 2)), lengths.repeat(draws), enforce_sorted=False)
        if not isinstance(leaf, Tensor) or leaf.dim() <= batch_dim or leaf.shape[batch_dim] != rows:
            return leaf
        repeats = [1] * leaf.dim()
        repeats[batch_dim] = draws
        if leaf.dim() == 4 and batch_dim == 0 and not leaf.is_contiguous() and leaf.is_contiguous(memory_format=torch.channels_last):
            return leaf.permute(0, 2, 3, 1).repeat(repeats).permute(0, 3, 1, 2)  # repeat forgets the memory format
        return leaf.repeat(repeats)

    return pytree.tree_map(tile, inputs, is_leaf=lambda leaf: isinstance(leaf, PackedSequence))


def split_rows(outputs: Any, draws: int, rows: int, batch_dim: int = 0) -> Any:
    """Undo `tile_rows` on an output: every tensor of draws x rows rows becomes (draws, rows, ...).

    >>> split_rows(torch.tensor([1, 2, 3, 4]), draws=2, rows=2)
    tensor([[1, 2],
            [3, 4]])
    """

    def split(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            raise ValueError("A packed output has no axis for draws: unpack it inside the model, with pad_packed_sequence.")
        if not isinstance(leaf, Tensor):
            return leaf
        fits = [d for d in range(leaf.dim()) if leaf.shape[d] == draws * rows]
        if not fits:
            return leaf.expand(draws, *leaf.shape)  # no rows in it: the same for every draw
        dim = batch_dim if batch_dim in fits else fits[0]  # a recurrent state keeps its rows elsewhere
        return leaf.unflatten(dim, (draws, rows)).movedim(dim, 0)

    return pytree.tree_map(split, outputs, is_leaf=lambda leaf: isinstance(leaf, PackedSequence))


@contextmanager
def frozen(model: nn.Module, draws: int = 1) -> Iterator[nn.Module]:
    """Hold S = members x draws draws over every call inside the block: the same functions on every batch.

    Inside, `sample(model, x)` returns (S, B, ...) of the held draws, and a bare `model(x)` shares its rows out among them. Methods
    that draw afresh for every row hold one draw for all rows here.

    Example:
        >>> import slimbayes as sb
        >>> net = sb.bayesianize(nn.Linear(1, 1), sb.Rank1(members=1))
        >>> x = torch.linspace(-1, 1, 5).unsqueeze(1)
        >>> with frozen(net, draws=8):
        ...     same = torch.equal(sample(net, x), sample(net, x))
        >>> same
        True
    """
    posteriors = passes.posteriors_of(model)
    if posteriors and passes.is_open(posteriors):
        raise ValueError("frozen cannot be nested: draws are already held.")
    total = members(model) * draws
    current = Pass(total, None, held=True)
    if posteriors:
        passes.begin(posteriors, current)
    try:
        yield model
    finally:
        current.open = False


def call_batch(model: nn.Module, batch: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """How to hand a data loader's batch to a model: inputs of an (inputs, targets) pair, a mapping by keyword if it fits."""
    if isinstance(batch, (tuple, list)) and not isinstance(batch, PackedSequence):
        batch = batch[0]
    if isinstance(batch, Mapping):
        import inspect

        accepted = inspect.signature(model.forward).parameters
        if any(p.kind is p.VAR_KEYWORD for p in accepted.values()) or set(batch) <= set(accepted):
            return (), dict(batch)
    return (batch,), {}
