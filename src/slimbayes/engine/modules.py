"""The posteriors under a module, and what follows from which they are: worked out once, and again when modules change.

A call of a model begins by looking at its tree, since layers can be replaced, removed or added at any time. To compare
a tree with the one of the call before takes a tenth of the time of walking through it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from enum import Enum
from itertools import chain, count
from operator import is_, itemgetter, methodcaller
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")
_KEYS = count()


class Keyed(nn.Module):
    """A module that passes know by a key of its own; copies get new keys."""

    conversion: int = 0  # the number of the conversion that it comes from
    told_of_unused: bool = False  # whether a first pass has told which layers never ran
    told_of_part: bool = (
        False  # whether it was told that a part of a model was called by itself
    )

    def __init__(self) -> None:
        super().__init__()
        self.key = f"p{next(_KEYS)}"

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.key = f"p{next(_KEYS)}"


class Posteriors(list[Any]):
    """The posteriors of a model, each once, in a fixed order, with what was planned for them."""

    def __init__(self, found: Sequence[Any] = ()) -> None:
        super().__init__(found)
        self.plans: dict[Hashable, Any] = {}
        self.tree: Tree | None = None  # that they are all the posteriors of


def plan_once(posteriors: Sequence[Any], key: Hashable, make: Callable[[], T]) -> T:
    """make(), or what it gave for these posteriors and this key before; anew for any other sequence of posteriors.

    >>> some = Posteriors([1, 2])
    >>> [plan_once(which, "sum", lambda: total) for which, total in ((some, 3), (some, 0), ([1, 2], 0))]
    [3, 3, 0]
    """
    if type(posteriors) is not Posteriors:
        return make()
    found = posteriors.plans.get(key)
    if found is None:
        found = posteriors.plans[key] = make()
    return found


_CHANGES = [0]  # of posteriors, in this process
_READING = threading.Lock()
_PARTS, _VALUES = itemgetter("_modules"), methodcaller("values")


def discard_plans() -> None:
    """Say that a posterior has other parameters than before: what was planned for it, under any root, is forgotten."""
    _CHANGES[0] += 1


class Tree:
    """The modules under a root as they were read, and where rows lie in calls of it, as proven. Copies know nothing."""

    def __init__(self, root: nn.Module | None = None) -> None:
        self.modules = [] if root is None else _list_modules(root)
        self.posteriors = Posteriors([m for m in self.modules if isinstance(m, Keyed)])
        self.posteriors.tree = self
        # By which `stands` and `tree_of` know it again.
        self.changes, self.identities = _CHANGES[0], hash(tuple(map(id, self.modules)))
        self.dicts = [m.__dict__ for m in self.modules]
        self.children = self._children()
        # Modules that may have flags and numbers of their own, for `modes`.
        self.running = [
            m for m in self.modules if not isinstance(m, (Keyed, nn.ModuleDict))
        ]
        self.running_dicts = [m.__dict__ for m in self.running]
        self.layouts: dict[Any, dict[Any, Any]] = {}  # by kind of call, and modes
        self.latest: list[Any] = [
            None,
            None,
        ]  # of the last call in eval mode, and of the last in training
        # Whether modules keep something computed from drawn weights: by whether they train, and gradients are on.
        self.keeps_drawn: dict[tuple[bool, bool], bool] = {}
        self._read_flags()

    def __reduce__(self) -> Any:
        return Tree, ()

    def _children(self) -> list[nn.Module | None]:
        return list(
            chain.from_iterable(map(_VALUES, filter(None, map(_PARTS, self.dicts))))
        )  # most have none

    def _read_flags(self) -> None:
        self.attributes = sum(map(len, self.running_dicts))
        kept = zip(map(_flags_of, self.running), self.running_dicts, strict=True)
        # Of at least two names each, so that it gives a tuple.
        self.flags = [
            (itemgetter(names[0], *names), own) for names, own in kept if names
        ]

    def modes(self) -> Hashable:
        """What may lead the same modules another way: whether they train, and flags and numbers that they keep. Not
        hooks: most only look, and a proof would show them inputs that nobody gave.
        """
        if (
            sum(map(len, self.running_dicts)) != self.attributes
        ):  # a flag that was not there before, or is no more
            self._read_flags()
        try:
            flags = tuple(chain.from_iterable([read(own) for read, own in self.flags]))
        except KeyError:  # one was taken away and another added
            self._read_flags()
            flags = tuple(chain.from_iterable([read(own) for read, own in self.flags]))
        if not _PLAIN.issuperset(
            map(type, flags)
        ):  # what became an array is not to be kept
            flags = tuple(
                [flag if isinstance(flag, _FLAGS) else type(flag) for flag in flags]
            )
        return tuple([own.get("training") for own in self.running_dicts]), flags

    def stands(self, root: nn.Module) -> bool:
        """Whether the root is the same and has the same modules under it."""
        if (
            not self.modules
            or self.modules[0] is not root
            or self.changes != _CHANGES[0]
        ):
            return False
        found = self._children()
        return len(found) == len(self.children) and all(map(is_, found, self.children))


_OF_ALL = {"training", *nn.Module().__dict__}  # attributes that every module has
_PLAIN = {bool, int, float, str, type(None)}
_FLAGS = (*_PLAIN, Enum)


def _flags_of(module: nn.Module) -> list[str]:
    """Names of flags, modes and numbers that a module keeps; those of torch's and our own lead no rows to others."""
    if has_known_class(module):
        return []
    kept = [n for n, value in module.__dict__.items() if isinstance(value, _FLAGS)]
    return [n for n in kept if n not in _OF_ALL and not n.startswith("_slimbayes")]


def has_known_class(module: nn.Module) -> bool:
    """Whether torch or we wrote a module's class, or the one it had before it was swapped."""
    return getattr(type(module), "plain", type(module)).__module__.startswith(
        ("torch.nn.", "slimbayes.")
    )


def _list_modules(root: nn.Module) -> list[nn.Module]:
    """root.modules(), several times as fast."""
    seen: dict[nn.Module, None] = {}
    ahead: list[nn.Module | None] = [root]
    while ahead:
        module = ahead.pop()
        if module is not None and module not in seen:
            seen[module] = None
            ahead.extend(reversed(module._modules.values()))
    return list(seen)


def tree_of(root: nn.Module) -> Tree:
    """The tree under a module, read anew if it changed. Where there are posteriors in it, the module keeps it."""
    found: Tree | None = root.__dict__.get("_slimbayes_tree")
    if found is not None and found.stands(root):
        return found
    with _READING:  # threads that meet a model together share what they find out
        former = root.__dict__.get("_slimbayes_tree")
        found = former if former is not None and former.stands(root) else Tree(root)
        if (
            former is not None and former.identities == found.identities
        ):  # posteriors changed, not modules
            found.layouts, found.latest = former.layouts, former.latest
        if found.posteriors:
            root.__dict__["_slimbayes_tree"] = found
        else:
            root.__dict__.pop("_slimbayes_tree", None)
    return found


def modules_of(root: nn.Module) -> list[nn.Module]:
    """root.modules(), as a list that is not to be changed."""
    return (
        list(root.modules()) if torch.compiler.is_compiling() else tree_of(root).modules
    )


def posteriors_of(module: nn.Module) -> list[Any]:
    """Every posterior under a module, each once, in a fixed order: a list that is not to be changed."""
    if torch.compiler.is_compiling():
        return [m for m in module.modules() if isinstance(m, Keyed)]
    return tree_of(module).posteriors


def first_key(module: nn.Module) -> str | None:
    """The key of the first posterior under a module."""
    if isinstance(module, Keyed):
        return module.key
    for child in module._modules.values():
        found = None if child is None else first_key(child)
        if found is not None:
            return found
    return None


def anchors_of(posteriors: Sequence[Any]) -> list[Tensor]:
    """The tensor that stands for each posterior: its first parameter, or else its first buffer."""
    if type(posteriors) is not Posteriors:
        return [p.anchor for p in posteriors]
    places = plan_once(posteriors, "anchors", lambda: [_place(p) for p in posteriors])
    try:
        return [place[name] for place, name in places]
    except KeyError:  # somebody took a parameter away
        del posteriors.plans["anchors"]
        return [p.anchor for p in posteriors]


_WHOLE = {
    Tensor,
    nn.Parameter,
}  # to ask these for an attribute that they lack takes longer
Places = tuple[tuple[torch.device, torch.dtype, bool], ...]


def places_of(posteriors: Sequence[Any]) -> Places:
    """Device and type of each posterior's parameters, and whether they are split over processes (FSDP2): all of it may
    change where modules do not.
    """
    anchors = anchors_of(posteriors)
    return tuple(
        [
            (a.device, a.dtype, type(a) not in _WHOLE and hasattr(a, "full_tensor"))
            for a in anchors
        ]
    )


def _place(posterior: Any) -> tuple[dict[str, Any], str]:
    """Where a posterior keeps its anchor, and under which name."""
    anchor = posterior.anchor
    for module in posterior.modules():
        for place in (module._parameters, module._buffers):
            for name, tensor in place.items():
                if tensor is anchor:
                    return place, name
    raise AssertionError("an anchor that is no parameter and no buffer")


def noise_type(own: torch.dtype) -> torch.dtype:
    """Type of the noise of parameters: their own, float32 at least."""
    return torch.float32 if own in (torch.float16, torch.bfloat16) else own


def kinds_of(posteriors: Sequence[Any]) -> list[Sequence[Any]]:
    """Posteriors of each class together, without those whose parameters are sharded."""
    places = places_of(posteriors)

    def make() -> list[Sequence[Any]]:
        whole = [
            p
            for p, (_, _, sharded) in zip(posteriors, places, strict=True)
            if not sharded
        ]
        some: Any = Posteriors if type(posteriors) is Posteriors else list
        return [
            some([p for p in whole if type(p) is kind])
            for kind in dict.fromkeys(map(type, whole))
        ]

    return plan_once(posteriors, ("kinds", places), make)
