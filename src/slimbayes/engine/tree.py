"""Nested inputs and outputs: tensors in tuples, mappings, dataclasses, packed sequences, in any nesting.

torch's pytree does the work. Dataclasses that it does not know are opened here, and a packed sequence counts as one
leaf.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree


def _packed(leaf: Any) -> bool:
    return isinstance(leaf, PackedSequence)


def _record(leaf: Any) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)


def tree_map(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply a function to every leaf of a tree, or to leaves at one place of several trees alike.

    >>> tree_map(lambda a, b: a + b, {"x": 1, "y": (2,)}, {"x": 10, "y": (20,)})
    {'x': 11, 'y': (22,)}
    """

    def at(leaf: Any, *rest: Any) -> Any:
        if not _record(leaf):
            return function(leaf, *rest)
        new = copy.copy(leaf)
        for field in dataclasses.fields(leaf):
            parts = [getattr(one, field.name) for one in (leaf, *rest)]
            object.__setattr__(new, field.name, tree_map(function, *parts))
        return new

    return pytree.tree_map(at, tree, *others, is_leaf=_packed)


def leaves_of(tree: Any) -> list[Any]:
    """All leaves, in order.

    >>> leaves_of(({"a": 1}, [2, None]))
    [1, 2, None]
    """
    out: list[Any] = []
    for leaf in pytree.tree_leaves(tree, is_leaf=_packed):
        if _record(leaf):
            out += [part for field in dataclasses.fields(leaf) for part in leaves_of(getattr(leaf, field.name))]
        else:
            out.append(leaf)
    return out


def replaced(tree: Any, leaves: list[Any]) -> Any:
    """The tree with other leaves, in the order of `leaves_of`."""
    rest = iter(leaves)
    return tree_map(lambda leaf: next(rest), tree)


def _plain_call(tree: Any) -> bool:
    """Whether a tree is (tensors, {}), as of most calls: there is a shorter way through it."""
    plain = type(tree) is tuple and len(tree) == 2 and type(tree[0]) is tuple and type(tree[1]) is dict and not tree[1]
    return plain and all(type(array) is Tensor for array in tree[0])


def arrays_of(tree: Any) -> list[Any]:
    """The leaves that may hold rows: tensors and packed sequences."""
    if type(tree) is Tensor:
        return [tree]
    if _plain_call(tree):
        return list(tree[0])
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, (Tensor, PackedSequence))]


def map_arrays(function: Callable[[int, Any], Any], tree: Any) -> Any:
    """Apply function(i, array) to the i-th leaf that is a tensor or a packed sequence; other leaves stay."""
    if type(tree) is Tensor:
        return function(0, tree)
    if _plain_call(tree):
        return tuple(function(i, array) for i, array in enumerate(tree[0])), {}
    count = iter(range(10**9))
    return tree_map(
        lambda leaf: function(next(count), leaf) if isinstance(leaf, (Tensor, PackedSequence)) else leaf, tree
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


def attributes_of(leaf: Any) -> dict[Any, Any]:
    """What an object of somebody's holds tensors in: its attributes, as of a distribution, or its items, as of a
    mapping or a list that pytrees do not know.
    """
    if isinstance(leaf, (Tensor, PackedSequence)) or is_cache(leaf):
        return {}
    items = leaf if isinstance(leaf, Mapping) else enumerate(leaf) if isinstance(leaf, list) else vars_of(leaf)
    return {n: v for n, v in dict(items).items() if isinstance(v, Distribution) or arrays_of(v)}


def vars_of(leaf: Any) -> dict[str, Any]:
    """The attributes of an object, without those that Python keeps elsewhere."""
    return getattr(leaf, "__dict__", {}) if not isinstance(leaf, (type, ModuleType, nn.Module)) else {}


def opened(tree: Any) -> Any:
    """Outputs with the tensors of such objects in their place."""
    if isinstance(tree, Tensor):
        return tree
    return tree_map(lambda leaf: {n: opened(v) for n, v in attributes_of(leaf).items()} or leaf, tree)


def alike(leaves: Sequence[Any]) -> bool:
    """Whether these are one object, or equal numbers or words."""
    first, plain = leaves[0], (str, int, float)
    return all(leaf is first or (isinstance(leaf, plain) and leaf == first) for leaf in leaves)


class NotJoined:
    """Stands for what draws, or members, return one by one and nobody can join, such as caches of keys and values; or
    for one cache of the rows of several draws. The next call of the same draws gives each its own again.
    """

    def __init__(self, parts: Sequence[Any], draws: int = 1) -> None:
        self.parts, self.draws = tuple(parts), len(parts) * draws

    def of(self, draw: int) -> Any:
        """What one draw returned."""
        if len(self.parts) == self.draws:
            return self.parts[draw]
        rows, whole = next(_cached(self.parts[0])).shape[0] // self.draws, _copy(self.parts[0])
        whole.batch_select_indices(torch.arange(draw * rows, (draw + 1) * rows))
        return whole

    def __repr__(self) -> str:
        return f"{self.draws} separate {type(self.parts[0]).__name__}s"


def is_cache(leaf: Any) -> bool:
    """Whether an input or output holds keys and values of earlier steps."""
    return hasattr(type(leaf), "get_seq_length") or isinstance(leaf, NotJoined)


def without_cache(leaf: Any) -> Any:
    """Caches of earlier steps and lazy arguments cannot be repeated: trials run without them."""
    return None if is_cache(leaf) else leaf


def fresh(tree: Any) -> Any:
    """The same inputs in containers and tensors of their own: a model may write into what it is given, and other draws
    are to find it as it was.
    """
    return tree_map(_copy, tree) if not _plain_call(tree) else (tuple(array.clone() for array in tree[0]), {})


def _copy(leaf: Any) -> Any:
    if hasattr(
        type(leaf), "get_seq_length"
    ):  # a cache, to which a call adds its own; tensors of a graph do not copy deeply
        return copy.deepcopy(leaf, {id(tensor): tensor.clone() for tensor in _cached(leaf)})
    if isinstance(leaf, Tensor):
        return leaf.clone()
    held = any(isinstance(value, Tensor) for value in getattr(leaf, "__dict__", {}).values())
    return copy.copy(leaf) if opaque(leaf) and (held or hasattr(leaf, "__copy__")) else leaf


def opaque(leaf: Any) -> bool:
    """Whether an input is an object of somebody's, such as a batch of graphs, which may hold tensors."""
    return not isinstance(leaf, (str, bytes, int, float, complex, type(None), list, tuple, dict))


def _cached(cache: Any) -> Iterator[Tensor]:
    """The tensors in a cache, and in the layers and caches that it holds."""
    for value in vars(cache).values():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, Tensor):
                yield part
            elif hasattr(type(part), "get_seq_length"):
                yield from _cached(part)
