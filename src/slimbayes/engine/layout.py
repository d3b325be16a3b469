"""Where the rows of a kind of call lie: in its inputs, in its outputs, and at each converted layer. How inputs are cut
and repeated by it, and which layouts a proof tries in turn. Inputs and outputs are tuples, mappings, dataclasses and
packed sequences, in any nesting.

torch's pytree does the work. Dataclasses that it does not know are opened here, and a packed sequence counts as one
leaf.

Sizes: S draws, B rows of the caller's batch.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree

Dims = tuple[int | None, ...]
PACKED = "A packed output has no axis for draws: unpack it inside the model, with pad_packed_sequence."


class Unproven(Exception):
    """Rows do not lie where a layout says, or act on each other; the text says where. A proof then tries another guess,
    and a call runs one draw at a time.
    """


@dataclass
class Layout:
    """What the proof of rows found for one kind of input.

    Attributes:
        folds: several draws of the whole batch may share one forward.
        rowwise: every row may have a draw of its own.
        why: what stands against it.
        inputs, outputs: the dimension of rows of each tensor, None for tensors without rows.
        lead: number and dimension of an input that tells how many rows there are.
        dims: by layer and number of dimensions of its input, where that holds rows; -1 for a single row that stands for
            all.
        merged: of these, what has no entries of its own for each row, as of pairs of rows that became one.
        arguments: the same for all arguments and outputs of modules that run as a whole.
        shareable: modules (by identity) that run before any draw is used, and where rows lie in their inputs and
            outputs.
        output_sizes: how many rows the proof had, and the shapes of its outputs.
        random: the model draws random numbers of its own.
        warned: the user knows why it does not fold.
        provisional: it says nothing of other inputs of this kind: it is neither kept nor warned of.
        mixed: rows, or draws, were seen to act on each other.
        largest: rows and numbers of the largest inputs for which layers were seen to be called alike.
        calls: how many used it after the one it was proven for.
        stateful: a call leaves something in the modules for the next.
        objects: outputs are, or hold, objects of somebody's, of which each draw has its own.
    """

    folds: bool = False
    rowwise: bool = False
    why: str = ""
    inputs: Dims = ()
    outputs: Dims = ()
    lead: tuple[int, int] | None = None
    dims: dict[tuple[str, int], int] = field(default_factory=dict)
    merged: set[tuple[str, int]] = field(default_factory=set)
    arguments: dict[tuple[str, tuple[int, ...]], tuple[Dims, Dims]] = field(
        default_factory=dict
    )
    shareable: dict[int, tuple[Dims, Dims]] = field(default_factory=dict)
    output_sizes: tuple[int, list[tuple[int, ...]]] = (1, [])
    random: bool = False
    warned: bool = False
    provisional: bool = False
    mixed: bool = False
    largest: tuple[int, ...] = (0, 0)
    calls: int = 0
    stateful: bool = False
    objects: bool = False

    def rows(self, inputs: Any) -> int:
        """How many rows these inputs have; 1 where nothing holds rows."""
        if self.lead is None:
            return 1
        leaf = arrays_of(inputs)[self.lead[0]]
        return (
            int(leaf.batch_sizes[0])
            if isinstance(leaf, PackedSequence)
            else leaf.shape[self.lead[1]]
        )

    def tile(self, inputs: Any, draws: int) -> Any:
        """Inputs repeated once for each draw, whole block after whole block."""
        if draws == 1:
            return inputs
        return self._cut(inputs, [(0, None)] * draws)

    def narrow(self, inputs: Any, start: int, size: int) -> Any:
        """Some of the rows."""
        return self._cut(inputs, [(start, size)])

    def one_more(self, inputs: Any) -> Any:
        """The first row twice, then the others."""
        return self._cut(inputs, [(0, 1), (0, None)])

    def _cut(self, inputs: Any, blocks: list[tuple[int, int | None]]) -> Any:
        """Blocks of rows one after another, each by its first row and how many it has, None for all."""
        rows = self.rows(inputs)

        def part(leaf: Tensor, dim: int, start: int, size: int) -> Tensor:
            each = leaf.shape[dim] // rows  # entries of one row
            return leaf.narrow(dim, start * each, size * each)

        def cut(i: int, leaf: Any) -> Any:
            dim = self.inputs[i]
            if dim is None:
                return leaf
            if isinstance(leaf, PackedSequence):
                index = [
                    torch.arange(start, rows if size is None else start + size)
                    for start, size in blocks
                ]
                return index_rows(leaf, 1, torch.cat(index))
            if leaf.shape[dim] == 1 != rows:
                return leaf  # it stands for all rows already
            parts = [
                leaf if size is None else part(leaf, dim, start, size)
                for start, size in blocks
            ]
            return (
                parts[0] if len(parts) == 1 else torch.cat(parts, dim)
            )  # which keeps the memory format

        return map_arrays(cut, inputs)

    def run_one_by_one(self, why: str) -> None:
        """From now on calls of this kind run draw by draw."""
        self.folds, self.rowwise, self.why = False, False, why

    def size(self, inputs: Any, draws: int = 1) -> tuple[int, int]:
        """How many rows there are with every row repeated for so many draws, and how many numbers they hold."""
        arrays = zip(arrays_of(inputs), self.inputs, strict=True)
        return draws * self.rows(inputs), draws * sum(
            [padded(a).numel() for a, dim in arrays if dim is not None]
        )

    def covers(self, inputs: Any, draws: int = 1) -> bool:
        """Whether layers were seen to be called alike for as many rows and numbers; one row is always right."""
        if not self.folds or torch.compiler.is_compiling():
            return True  # nothing hangs on it, or nobody can look
        rows, numbers = self.size(inputs, draws)
        return rows <= 1 or (rows <= self.largest[0] and numbers <= self.largest[1])

    def split(self, outputs: Any, draws: int, rows: int) -> Any:
        """Undo `tile` on an output: S x B rows become (S, B, ...); what has no rows is the same for every draw.

        What has not as many entries for each of B `rows` is refused: draws may have kept different ones.
        """
        if len(arrays_of(outputs)) != len(self.outputs):
            raise Unproven(
                "the model returned other tensors than when its rows were located"
            )

        def split(i: int, leaf: Any) -> Any:
            dim, (before, shapes) = self.outputs[i], self.output_sizes
            if isinstance(leaf, PackedSequence):
                raise ValueError(PACKED)
            if dim is None:
                return leaf.expand(draws, *leaf.shape)
            if not torch.compiler.is_compiling() and leaf.shape[dim] % (draws * rows):
                made = shapes[i][
                    dim
                ]  # windows that are joined are as many for as many rows
                if (
                    not made
                    or before % made
                    or leaf.shape[dim] * before != made * draws * rows
                ):
                    raise Unproven(
                        f"output {i} of shape {tuple(leaf.shape)} has no entry for each of {draws * rows} rows"
                    )
            parts = leaf.unflatten(dim, (draws, leaf.shape[dim] // draws))
            return parts.movedim(dim, 0) if dim else parts

        return map_arrays(split, outputs)


def candidate_layouts(inputs: Any, batch_dim: int | None) -> Iterator[Layout]:
    """Layouts that say which inputs hold rows, where, and what tells how many there are; the likeliest first."""
    arrays = arrays_of(inputs)
    shapes = [
        (-1, int(a.batch_sizes[0])) if isinstance(a, PackedSequence) else tuple(a.shape)
        for a in arrays
    ]
    # Inputs with more dimensions first: masks, lengths and weights have fewer than what they are for.
    packed = [isinstance(a, PackedSequence) for a in arrays]
    flags = [isinstance(a, Tensor) and a.dtype == torch.bool for a in arrays]
    order = sorted(
        range(len(arrays)), key=lambda i: (not packed[i], flags[i], -len(shapes[i]))
    )
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
    fits = [
        [d for d, size in enumerate(shape) if size == rows and d < 2]
        for shape in shapes
    ]
    first = [at if at in f else f[0] if f else None for f in fits]
    first[lead] = at
    yield tuple(first)
    yield tuple(
        at if at in f else None for f in fits
    )  # as many coordinates (points, 3) as rows
    for i, found in enumerate(
        fits
    ):  # a state (layers, rows, units) of as many layers as rows
        for other in found if i != lead else ():
            yield tuple(other if j == i else d for j, d in enumerate(first))
    yield tuple(
        next((d for d in reversed(f)), None) if j != lead else at
        for j, f in enumerate(fits)
    )
    for i, dim in enumerate(first):
        if dim is not None and i != lead:
            yield tuple(None if j == i else d for j, d in enumerate(first))
    yield tuple(
        d if d is not None or not s or rows < 2 or s[0] % rows else 0
        for d, s in zip(first, shapes, strict=True)
    )
    yield tuple(at if j == lead else None for j in range(len(shapes)))


def _is_packed(leaf: Any) -> bool:
    return isinstance(leaf, PackedSequence)


def tree_map(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply a function to every leaf of a tree, or to leaves at one place of several trees alike.

    >>> tree_map(lambda a, b: a + b, {"x": 1, "y": (2,)}, {"x": 10, "y": (20,)})
    {'x': 11, 'y': (22,)}
    """

    def at(leaf: Any, *rest: Any) -> Any:
        if not is_dataclass(leaf) or isinstance(leaf, type):
            return function(leaf, *rest)
        new = copy.copy(leaf)
        for part in fields(leaf):
            parts = [getattr(one, part.name) for one in (leaf, *rest)]
            object.__setattr__(new, part.name, tree_map(function, *parts))
        return new

    return pytree.tree_map(at, tree, *others, is_leaf=_is_packed)


def leaves_of(tree: Any) -> list[Any]:
    """All leaves, in order.

    >>> leaves_of(({"a": 1}, [2, None]))
    [1, 2, None]
    """
    out: list[Any] = []
    for leaf in pytree.tree_leaves(tree, is_leaf=_is_packed):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            out += [
                inner
                for part in fields(leaf)
                for inner in leaves_of(getattr(leaf, part.name))
            ]
        else:
            out.append(leaf)
    return out


def is_plain_call(tree: Any) -> bool:
    """Whether a tree is (tensors, tensors by name), as of most calls: there is a shorter way through it."""
    plain = (
        type(tree) is tuple
        and len(tree) == 2
        and type(tree[0]) is tuple
        and type(tree[1]) is dict
    )
    return plain and {*map(type, tree[0]), *map(type, tree[1].values())} == {Tensor}


def arrays_of(tree: Any) -> list[Any]:
    """The leaves that may hold rows: tensors and packed sequences."""
    if type(tree) is Tensor:
        return [tree]
    if is_plain_call(tree):
        return [*tree[0], *tree[1].values()]
    return [
        leaf for leaf in leaves_of(tree) if isinstance(leaf, (Tensor, PackedSequence))
    ]


def map_arrays(function: Callable[[int, Any], Any], tree: Any) -> Any:
    """Apply function(i, array) to the i-th leaf that is a tensor or a packed sequence; other leaves stay."""
    if type(tree) is Tensor:
        return function(0, tree)
    if is_plain_call(tree):
        more, names = (
            [
                function(i, array)
                for i, array in enumerate([*tree[0], *tree[1].values()])
            ],
            tree[1],
        )
        return tuple(more[: len(tree[0])]), dict(
            zip(names, more[len(tree[0]) :], strict=True)
        )
    count = iter(range(10**9))
    return tree_map(
        lambda leaf: (
            function(next(count), leaf)
            if isinstance(leaf, (Tensor, PackedSequence))
            else leaf
        ),
        tree,
    )


def padded(leaf: Any) -> Tensor:
    """A tensor as it is; a packed sequence as (time, rows, ...)."""
    return pad_packed_sequence(leaf)[0] if isinstance(leaf, PackedSequence) else leaf


def index_rows(leaf: Any, dim: int, index: Tensor) -> Any:
    """Rows of a tensor along `dim`, or of a packed sequence, chosen by index."""
    if not isinstance(leaf, PackedSequence):
        return leaf.index_select(dim, index.to(leaf.device))
    whole, lengths = pad_packed_sequence(leaf)
    chosen = whole.index_select(1, index.to(whole.device))
    return pack_padded_sequence(chosen, lengths[index.cpu()], enforce_sorted=False)
