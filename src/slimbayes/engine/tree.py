"""What draws are given and return that is no tensor: objects of somebody's, which may hold tensors, caches, numbers."""

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.utils.rnn import PackedSequence

from slimbayes.engine.layout import PACKED, NotJoined, arrays_of, copy_of, is_cache, is_plain_call, map_arrays, tree_map
from slimbayes.errors import SlimbayesWarning

UNORDERED = Iterator, Set  # in which nobody finds the tensors of another run again


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


def open_objects(tree: Any) -> Any:
    """Outputs with the tensors of such objects in their place."""
    if isinstance(tree, Tensor):
        return tree
    return tree_map(lambda leaf: {n: open_objects(v) for n, v in attributes_of(leaf).items()} or leaf, tree)


def all_same(leaves: Sequence[Any]) -> bool:
    """Whether these are one object, or equal numbers or words."""
    first, plain = leaves[0], (str, int, float)
    return all(leaf is first or (isinstance(leaf, plain) and leaf == first) for leaf in leaves)


def replace_leaves(tree: Any, leaves: list[Any]) -> Any:
    """The tree with other leaves, in the order of `leaves_of`."""
    rest = iter(leaves)
    return tree_map(lambda leaf: next(rest), tree)


def without_cache(leaf: Any) -> Any:
    """Caches of earlier steps and lazy arguments cannot be repeated: trials run without them."""
    return None if is_cache(leaf) else leaf


def copy_containers(tree: Any) -> Any:
    """The same inputs in containers and tensors of their own: a model may write into what it is given, and other draws
    are to find it as it was.
    """
    return map_arrays(lambda i, array: array.clone(), tree) if is_plain_call(tree) else tree_map(copy_of, tree)


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
    if all_same(leaves) and not array and (len(leaves) > 1 or not held[0]):
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
