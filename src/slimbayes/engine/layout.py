"""Where the rows of a kind of call lie: in its inputs, in its outputs, and at each converted layer. And how calls are
folded by it. Which inputs may hold rows, and where, are guesses that the proof tries in turn (`hypotheses`).

Sizes: S draws, B rows of the caller's batch.
"""

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.nn.utils.rnn import PackedSequence

from slimbayes.engine.passes import Unproven
from slimbayes.engine.tree import (
    NotJoined,
    alike,
    arrays_of,
    attributes_of,
    index_rows,
    is_cache,
    leaves_of,
    map_arrays,
    padded,
    tree_map,
    vars_of,
)
from slimbayes.errors import SlimbayesWarning

Dims = tuple[int | None, ...]
UNORDERED = Iterator, Set  # in which nobody finds the tensors of another run again
PACKED = "A packed output has no axis for draws: unpack it inside the model, with pad_packed_sequence."


@dataclass
class Layout:
    """What the proof of rows found for one kind of input.

    Attributes:
        folds: several draws of the whole batch may share one forward.
        apart: every row may have a draw of its own.
        why: what stands against it.
        inputs, outputs: the dimension of rows of each tensor, None for tensors without rows.
        lead: number and dimension of an input that tells how many rows there are.
        dims: by layer and number of dimensions of its input, where that holds rows; -1 for a single row that stands for
            all.
        joined: of these, what has no entries of its own for each row, as of pairs of rows that became one.
        arguments: the same for all arguments and outputs of modules that run as a whole.
        ahead: modules (by identity) that run before any draw is used, with the dimensions of their inputs and outputs.
        made: how many rows the proof had, and the shapes of its outputs.
        tree: which modules the model had.
        random: the model draws random numbers of its own.
        told: the user knows why it does not fold.
        mixed: rows, or draws, were seen to act on each other.
        most: rows and numbers of the largest inputs for which layers were seen to be called alike.
        calls: how many used it after the one it was proven for.
        keeps: a call leaves something in the modules for the next.
        objects: outputs are, or hold, objects of somebody's, of which each draw has its own.
    """

    folds: bool = False
    apart: bool = False
    why: str = ""
    inputs: Dims = ()
    outputs: Dims = ()
    lead: tuple[int, int] | None = None
    dims: dict[tuple[str, int], int] = field(default_factory=dict)
    joined: set[tuple[str, int]] = field(default_factory=set)
    arguments: dict[tuple[str, tuple[int, ...]], tuple[Dims, Dims]] = field(default_factory=dict)
    ahead: dict[int, tuple[Dims, Dims]] = field(default_factory=dict)
    made: tuple[int, list[tuple[int, ...]]] = (1, [])
    tree: int = 0
    key: str | None = None
    random: bool = False
    told: bool = False
    mixed: bool = False
    most: tuple[int, ...] = (0, 0)
    calls: int = 0
    keeps: bool = False
    objects: bool = False

    def rows(self, inputs: Any) -> int:
        """How many rows these inputs have; 1 where nothing holds rows."""
        if self.lead is None:
            return 1
        leaf = arrays_of(inputs)[self.lead[0]]
        return int(leaf.batch_sizes[0]) if isinstance(leaf, PackedSequence) else leaf.shape[self.lead[1]]

    def tile(self, inputs: Any, draws: int) -> Any:
        """Inputs repeated once for each draw, whole block after whole block."""
        rows = self.rows(inputs)

        def tile(i: int, leaf: Any) -> Any:
            dim = self.inputs[i]
            if dim is None or draws == 1:
                return leaf
            if isinstance(leaf, PackedSequence):
                return index_rows(leaf, 1, torch.arange(rows).repeat(draws))
            if leaf.shape[dim] == 1 != rows:
                return leaf  # it stands for all rows already
            repeats = [draws if d == dim else 1 for d in range(leaf.dim())]
            image = leaf.dim() == 4 and dim == 0 and not leaf.is_contiguous()
            if image and leaf.is_contiguous(memory_format=torch.channels_last):
                return leaf.permute(0, 2, 3, 1).repeat(repeats).permute(0, 3, 1, 2)  # repeat forgets the memory format
            return leaf.repeat(repeats)

        return map_arrays(tile, inputs)

    def narrow(self, inputs: Any, start: int, size: int) -> Any:
        """Some of the rows."""
        rows = self.rows(inputs)

        def cut(i: int, leaf: Any) -> Any:
            dim = self.inputs[i]
            if dim is None:
                return leaf
            if isinstance(leaf, PackedSequence):
                return index_rows(leaf, 1, torch.arange(start, start + size))
            each = leaf.shape[dim] // rows
            return leaf if leaf.shape[dim] == 1 != rows else leaf.narrow(dim, start * each, size * each)

        return map_arrays(cut, inputs)

    def one_more(self, inputs: Any) -> Any:
        """The first row twice, then the others."""
        rows = self.rows(inputs)

        def more(i: int, leaf: Any) -> Any:
            dim = self.inputs[i]
            if dim is None or (isinstance(leaf, Tensor) and leaf.shape[dim] == 1 != rows):
                return leaf
            if isinstance(leaf, PackedSequence):
                return index_rows(leaf, 1, torch.arange(-1, rows).clamp_min(0))
            return torch.cat([leaf.narrow(dim, 0, leaf.shape[dim] // rows), leaf], dim)

        return map_arrays(more, inputs)

    def size(self, inputs: Any, draws: int = 1) -> tuple[int, int]:
        """How many rows there are with every row repeated for so many draws, and how many numbers they hold."""
        arrays = zip(map(padded, arrays_of(inputs)), self.inputs, strict=True)
        return draws * self.rows(inputs), draws * sum(a.numel() for a, dim in arrays if dim is not None)

    def covers(self, size: tuple[int, int]) -> bool:
        """Whether layers were seen to be called alike for as many rows and numbers; one row is always right."""
        return size[0] <= 1 or all(map(int.__le__, size, self.most))

    def split(self, outputs: Any, draws: int, rows: int) -> Any:
        """Undo `tile` on an output: S x B rows become (S, B, ...); what has no rows is the same for every draw.

        What has not as many entries for each of B `rows` is refused: draws may have kept different ones.
        """
        if len(arrays_of(outputs)) != len(self.outputs):
            raise Unproven("the model returned other tensors than when its rows were located")
        if draws > 1 and not isinstance(outputs, Tensor) and any(map(is_cache, leaves_of(outputs))):
            outputs = tree_map(
                lambda leaf: NotJoined([leaf], draws) if hasattr(leaf, "get_seq_length") else leaf, outputs
            )

        def split(i: int, leaf: Any) -> Any:
            dim, (before, shapes) = self.outputs[i], self.made
            if isinstance(leaf, PackedSequence):
                raise ValueError(PACKED)
            if dim is None:
                return leaf.expand(draws, *leaf.shape)
            if not torch.compiler.is_compiling() and leaf.shape[dim] % (draws * rows):
                made = shapes[i][dim]  # windows that are joined are as many for as many rows
                if not made or before % made or leaf.shape[dim] * before != made * draws * rows:
                    raise Unproven(
                        f"output {i} of shape {tuple(leaf.shape)} has no entry for each of {draws * rows} rows"
                    )
            return leaf.unflatten(dim, (draws, leaf.shape[dim] // draws)).movedim(dim, 0)

        return map_arrays(split, outputs)


def stack_draws(parts: list[Any]) -> Any:
    """Outputs of single draws, stacked along a new first axis."""

    def stack(*leaves: Any) -> Any:
        if isinstance(leaves[0], PackedSequence):
            raise ValueError(PACKED)
        if not isinstance(leaves[0], Tensor):
            return _joined(leaves)
        shapes = {tuple(leaf.shape) for leaf in leaves}
        if len(shapes) > 1:
            raise ValueError(
                f"Draws gave outputs of different shapes, which cannot be stacked: {sorted(shapes)[:3]}. Take draws "
                f"one by one: inside frozen(model), write_out(model, draw) is a plain model of one."
            )
        return torch.stack(leaves)

    return tree_map(stack, *parts)


def check_caches(kwargs: Mapping[str, Any], total: int | None = None) -> None:
    """Refuse caches of other draws than the `total` ones that are held, or warn where they may be others'."""
    for name, value in kwargs.items() if not torch.compiler.is_compiling() else ():
        if isinstance(value, NotJoined) and value.draws != total:
            raise ValueError(
                f"{name} belongs to the {value.draws} draws that filled it: call sample for all steps inside one `with "
                f"frozen(model):`, with fold=False where members are copies."
            )
        if total is None and hasattr(type(value), "get_seq_length") and value.get_seq_length() > 0:
            warnings.warn(
                f"{name} was filled by an earlier call, which had other draws than this one: take all steps inside one "
                f"`with frozen(model):`, or call generate.",
                SlimbayesWarning,
                stacklevel=7,
            )


def _joined(leaves: Sequence[Any]) -> Any:
    """What draws returned that is no tensor: one for all if they are the same, (S,) of numbers, objects with all that
    they hold stacked.
    """
    first, held = leaves[0], [attributes_of(leaf) for leaf in leaves]
    if isinstance(first, UNORDERED):
        raise ValueError(f"Draws gave a {type(first).__name__} each, which cannot be stacked: return a tuple or list.")
    array = hasattr(type(first), "__array__")
    if alike(leaves) and not array and (len(leaves) > 1 or not held[0]):
        return first
    if array or isinstance(first, (int, float)):
        return torch.stack([torch.as_tensor(leaf) for leaf in leaves])
    batch = first._batch_shape if isinstance(first, Distribution) else torch.Size()
    stacks = all(v.shape[: len(batch)] == batch for one in held for v in one.values() if isinstance(v, Tensor))
    if not held[0] or not stacks or any(one.keys() != held[0].keys() for one in held):
        return NotJoined(leaves)
    new = copy.copy(first)
    for name in held[0]:
        value = stack_draws([one[name] for one in held])
        if isinstance(new, (Mapping, list)):
            new[name] = value  # type: ignore[index]
        if not isinstance(new, (Mapping, list)) or name in vars_of(new):  # mappings may have items as attributes, too
            vars(new)[name] = value
    if isinstance(first, Distribution):
        new._batch_shape = torch.Size([len(leaves), *batch])
    return new


def hypotheses(inputs: Any, batch_dim: int | None) -> Iterator[Layout]:
    """Layouts that say which inputs hold rows, where, and what tells how many there are; the likeliest first."""
    arrays = arrays_of(inputs)
    shapes = [(-1, int(a.batch_sizes[0])) if isinstance(a, PackedSequence) else tuple(a.shape) for a in arrays]
    # Inputs with more dimensions first: masks, lengths and weights have fewer than what they are for.
    packed = [isinstance(a, PackedSequence) for a in arrays]
    flags = [isinstance(a, Tensor) and a.dtype == torch.bool for a in arrays]
    order = sorted(range(len(arrays)), key=lambda i: (not packed[i], flags[i], -len(shapes[i])))
    seen: set[Dims] = set()
    for dim in (0, 1) if batch_dim is None else (batch_dim,):
        for i in order:
            at = 1 if packed[i] else dim
            if len(shapes[i]) > at and shapes[i][at] > 0:
                for dims in _variants(shapes, i, at):
                    if dims not in seen:
                        seen.add(dims)
                        yield Layout(inputs=dims, lead=(i, at))


def _variants(shapes: Sequence[tuple[int, ...]], lead: int, at: int) -> Iterator[Dims]:
    """Rows of all inputs, if input `lead` has them along `at`: where sizes fit, with one input less, multiples too."""
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
