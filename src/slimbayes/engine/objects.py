"""What draws are given and return that is no tensor: objects of somebody's, which may hold tensors, caches of keys and
values, which belong to the draws that filled them, and numbers.
"""

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Transform
from torch.nn.utils.rnn import PackedSequence

from slimbayes.engine.layout import (
    PACKED,
    is_plain_call,
    leaves_of,
    map_arrays,
    tree_map,
)
from slimbayes.errors import SlimbayesWarning

Objects = tuple[
    Sequence[Any], ...
]  # those that something lies in, of all draws, the outermost first
UNORDERED = Iterator, Set  # in which nobody finds the tensors of another run again
CODE = FunctionType, MethodType, partial
_DEEPEST = 6  # objects within objects


def copy_containers(tree: Any) -> Any:
    """The same inputs in containers and tensors of their own: a model may write into what it is given, and other draws
    are to find it as it was.
    """
    return (
        map_arrays(lambda i, array: array.clone(), tree)
        if is_plain_call(tree)
        else tree_map(copy_of, tree)
    )


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
        rows, whole = (
            next(_cached(self.parts[0])).shape[0] // self.draws,
            copy_of(self.parts[0]),
        )
        whole.batch_select_indices(torch.arange(draw * rows, (draw + 1) * rows))
        return whole

    def __repr__(self) -> str:
        return f"{self.draws} separate {type(self.parts[0]).__name__}s, of(j) is that of draw j"


def is_cache(leaf: Any) -> bool:
    """Whether an input or output holds keys and values of earlier steps."""
    return hasattr(type(leaf), "get_seq_length") or isinstance(leaf, NotJoined)


def copy_of(leaf: Any) -> Any:
    if hasattr(
        type(leaf), "get_seq_length"
    ):  # a cache, to which a call adds its own; tensors of a graph do not copy deeply
        return copy.deepcopy(
            leaf, {id(tensor): tensor.clone() for tensor in _cached(leaf)}
        )
    if isinstance(leaf, Tensor):
        return leaf.clone()
    held = any(
        isinstance(value, Tensor) for value in getattr(leaf, "__dict__", {}).values()
    )
    return (
        copy.copy(leaf)
        if is_opaque(leaf) and (held or hasattr(leaf, "__copy__"))
        else leaf
    )


def is_opaque(leaf: Any) -> bool:
    """Whether an input is an object of somebody's, such as a batch of graphs, which may hold tensors."""
    return not isinstance(
        leaf, (str, bytes, int, float, complex, type(None), list, tuple, dict)
    )


def _cached(cache: Any) -> Iterator[Tensor]:
    """The tensors in a cache, and in the layers and caches that it holds."""
    for value in vars(cache).values():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, Tensor):
                yield part
            elif hasattr(type(part), "get_seq_length"):
                yield from _cached(part)


def keep_caches_whole(outputs: Any, draws: int) -> Any:
    """Outputs of draws that shared a forward, with caches that know they are of so many draws."""
    return tree_map(
        lambda leaf: (
            NotJoined([leaf], draws) if hasattr(leaf, "get_seq_length") else leaf
        ),
        outputs,
    )


def without_cache(leaf: Any) -> Any:
    """Caches of earlier steps and lazy arguments cannot be repeated: trials run without them."""
    return None if is_cache(leaf) else leaf


def check_caches(kwargs: Mapping[str, Any], total: int | None = None) -> None:
    """Refuse caches of other draws than the `total` ones that are held, or warn where they may be others'."""
    for name, value in kwargs.items() if not torch.compiler.is_compiling() else ():
        if isinstance(value, NotJoined) and value.draws != total:
            raise ValueError(
                f"{name} belongs to the {value.draws} draws that filled it: call sample for all steps inside one `with "
                f"fixed_draws(model):`, with parallel=False where members are copies."
            )
        if (
            total is None
            and hasattr(type(value), "get_seq_length")
            and value.get_seq_length() > 0
        ):
            warnings.warn(
                f"{name} was filled by an earlier call, which had other draws than this one: take all steps inside one "
                f"`with fixed_draws(model):`, or call generate.",
                SlimbayesWarning,
                stacklevel=7,
            )


def attributes_of(leaf: Any, around: Objects = ()) -> dict[Any, Any]:
    """What an object of somebody's holds tensors in, also by way of other objects (the transforms of a distribution):
    its attributes, or its items, as of a mapping or a list that pytrees do not know. Not those that it lies in itself.
    """
    if (
        isinstance(leaf, (Tensor, PackedSequence))
        or is_cache(leaf)
        or len(around) > _DEEPEST
    ):
        return {}
    return {
        n: v
        for n, v in dict(_items_of(leaf)).items()
        if _holds_arrays(v, (*around, [leaf]))
    }


def _items_of(leaf: Any) -> Any:
    return (
        leaf
        if isinstance(leaf, Mapping)
        else enumerate(leaf)
        if isinstance(leaf, list)
        else vars_of(leaf)
    )


def _is_among(leaf: Any, around: Objects) -> bool:
    return any(leaf is one for objects in around for one in objects)


def _holds_arrays(value: Any, around: Objects) -> bool:
    leaves = [leaf for leaf in leaves_of(value) if not _is_among(leaf, around)]
    held = Tensor, PackedSequence, Distribution
    return any(isinstance(leaf, held) for leaf in leaves) or any(
        attributes_of(leaf, around) for leaf in leaves
    )


def calls_layers(value: Any, around: Objects = ()) -> bool:
    """Whether something holds converted layers, in attributes, closures or bound arguments, to call them later."""
    if isinstance(value, nn.Module):
        return any(hasattr(type(module), "plain_forward") for module in value.modules())
    if isinstance(value, Tensor) or len(around) > _DEEPEST or _is_among(value, around):
        return False
    inside = [*vars_of(value).values(), getattr(value, "__self__", None)]
    inside += [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
    inside += (
        [value.func, value.args, value.keywords] if isinstance(value, partial) else []
    )
    return any(
        calls_layers(leaf, (*around, [value]))
        for part in inside
        for leaf in leaves_of(part)
    )


def vars_of(leaf: Any) -> dict[str, Any]:
    """The attributes of an object, without those that Python keeps elsewhere."""
    return (
        getattr(leaf, "__dict__", {})
        if not isinstance(leaf, (type, ModuleType, nn.Module))
        else {}
    )


def open_objects(tree: Any, around: Objects = ()) -> Any:
    """Outputs with the tensors of such objects in their place."""
    if isinstance(tree, Tensor):
        return tree
    return tree_map(
        lambda leaf: (
            {
                n: open_objects(v, (*around, [leaf]))
                for n, v in attributes_of(leaf, around).items()
            }
            or leaf
        ),
        tree,
    )


def all_same(leaves: Sequence[Any]) -> bool:
    """Whether these are one object, or equal numbers or words."""
    first, plain = leaves[0], (str, int, float)
    return all(
        leaf is first or (isinstance(leaf, plain) and leaf == first) for leaf in leaves
    )


def stack_draws(
    parts: list[Any], around: Objects = (), batch: torch.Size | None = None
) -> Any:
    """Outputs of single draws, stacked along a new first axis. Inside of objects that lie `around` them, and of a
    distribution over a `batch`, what has not that many entries is for all.
    """

    def stack(*leaves: Any) -> Any:
        if isinstance(leaves[0], PackedSequence):
            raise ValueError(PACKED)
        if not isinstance(leaves[0], Tensor):
            return _joined(leaves, around, batch)
        if batch is not None and any(
            leaf.shape[: len(batch)] != batch for leaf in leaves
        ):
            if not all(torch.equal(leaf, leaves[0]) for leaf in leaves):
                raise _Apart
            return leaves[0]
        shapes = {tuple(leaf.shape) for leaf in leaves}
        if len(shapes) > 1:
            raise ValueError(
                f"Draws gave outputs of different shapes, which cannot be stacked: {sorted(shapes)[:3]}. Take draws "
                f"one by one: inside fixed_draws(model), materialize(model, draw=j) is a plain model of one."
            )
        return torch.stack(leaves)

    return tree_map(stack, *parts)


class _Apart(Exception):
    """What an object holds differs between draws in a way that one object cannot show."""


def _joined(leaves: Sequence[Any], around: Objects, batch: torch.Size | None) -> Any:
    """What draws returned that is no tensor: one for all if they are the same, (S,) of numbers, objects with all that
    they hold stacked.
    """
    first, held = leaves[0], [attributes_of(leaf, around) for leaf in leaves]
    if isinstance(first, UNORDERED):
        raise ValueError(
            f"Draws gave a {type(first).__name__} each, which cannot be stacked: return a tuple or list."
        )
    array = hasattr(type(first), "__array__")
    if all_same(leaves) and not array and (len(leaves) > 1 or not held[0]):
        return first
    if array or isinstance(first, (int, float)):
        return torch.stack([torch.as_tensor(leaf) for leaf in leaves])
    if calls_layers(first):
        raise ValueError(
            f"The model returned a {type(first).__name__} that calls its layers when it is used, after the draws are "
            f"gone. Compute what you need of it (log_prob, rsample) in the forward of a module and convert that, or "
            f"exclude those layers."
        )
    if around and isinstance(first, CODE) and not all(leaf == first for leaf in leaves):
        raise _Apart  # nobody sees what they were bound to
    if not held[0]:
        return first if around and not isinstance(first, str) else NotJoined(leaves)
    if batch is not None and not isinstance(first, (Distribution, Transform)):
        raise _Apart  # a matrix that is computed later, say: nobody knows how many dimensions it counts on
    if any(one.keys() != held[0].keys() for one in held):
        return NotJoined(leaves)
    try:
        return _fill_copy(leaves, held, (*around, leaves), batch)
    except _Apart:
        if around:
            raise
        return NotJoined(leaves)


def _fill_copy(
    leaves: Sequence[Any],
    held: list[dict[Any, Any]],
    around: Objects,
    batch: torch.Size | None,
) -> Any:
    """A copy of the first object that holds what all of them hold."""
    first, over = leaves[0], batch
    if isinstance(first, Distribution):
        over = first._batch_shape
        if (
            batch is not None and over[: len(batch)] != batch
        ):  # one for all rows, if it is the same for all draws
            over = batch
    new = copy.copy(first)
    for name in dict(_items_of(first)):
        values = [
            held_by.get(name, dict(_items_of(leaf)).get(name))
            for leaf, held_by in zip(leaves, held, strict=True)
        ]
        if any(_is_among(leaf, around) for leaf in leaves_of(values[0])):
            continue  # an object that it lies in itself
        value = stack_draws(values, around, over)
        if isinstance(new, (Mapping, list)):
            new[name] = value  # type: ignore[index]
        if not isinstance(new, (Mapping, list)) or name in vars_of(
            new
        ):  # mappings may have items as attributes, too
            vars(new)[name] = value
    if isinstance(first, Distribution) and over == first._batch_shape:
        new._batch_shape = torch.Size([len(leaves), *over])
    return new
