"""What a model, and hooks on it, may keep things in beside attributes of modules: containers, objects of its own
package, caches of methods."""

import inspect
from collections import deque
from collections.abc import Iterable, Iterator, Set
from functools import _lru_cache_wrapper
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from slimbayes.engine.objects import CODE

_GROWS = (list, dict, set, deque)
_MACHINERY = {
    "torch",
    "slimbayes",
    "accelerate",
    "deepspeed",
}  # packages whose hooks do not look on: they run models
_CACHES: WeakKeyDictionary[type[nn.Module], list[Any]] = WeakKeyDictionary()  # by class
PLAIN = {int, float, str, bool, bytes, type(None)}  # of which vocabularies have many


def written_by_hooks(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """What hooks on modules may collect things in: containers and tensors that they refer to, and the attributes of
    their own objects, or of others from where they come from. Not what they count in a variable of a function's.
    """
    of_all = (
        nn.modules.module._global_forward_hooks,
        nn.modules.module._global_forward_pre_hooks,
    )
    kinds = (
        *of_all,
        *(held for m in modules for held in (m._forward_hooks, m._forward_pre_hooks)),
    )
    for hook in {id(hook): hook for held in kinds for hook in held.values()}.values():
        bound = [
            *getattr(hook, "args", ()),
            *getattr(hook, "keywords", {}).values(),
        ]  # of a partial
        function = getattr(hook, "func", hook)
        owner = getattr(function, "__self__", None)
        function = getattr(function, "__func__", function)
        home = str(getattr(function, "__module__", "")).partition(".")[0]
        if home in _MACHINERY:
            continue
        if inspect.isfunction(function):
            named = inspect.getclosurevars(function)
            bound += [
                *named.nonlocals.values(),
                *named.globals.values(),
                *(function.__defaults__ or ()),
            ]
        for value in (owner, *bound):
            if isinstance(value, (Tensor, list, dict, set, deque)):
                yield value
            elif type(value).__module__.partition(".")[0] == home and (
                value is owner or not isinstance(value, nn.Module)
            ):
                yield getattr(value, "__dict__", {})


def homes_of(modules: Iterable[nn.Module]) -> set[str]:
    """The packages that modules come from: objects from there, or of no class of their own, may hold their state."""
    names = {
        getattr(type(m), "plain", type(m)).__module__.partition(".")[0] for m in modules
    }
    return (names - {"torch", "slimbayes"}) | {"types"}


def reached(values: Iterable[Any], homes: Set[str] = frozenset()) -> dict[int, Any]:
    """By identity, what can be written into of these: tensors and containers, and those within containers and within
    objects of these packages, whose attributes are a container.
    """
    found: dict[int, Any] = {}
    ahead = [(value, False) for value in values]
    while ahead:
        value, within = ahead.pop()
        if not isinstance(value, (Tensor, tuple, *_GROWS)):
            if type(value).__module__.partition(".")[0] not in homes or isinstance(
                value, (nn.Module, type, *CODE)
            ):
                continue
            value, within = getattr(value, "__dict__", ()), True
        if (
            isinstance(value, nn.Parameter)
            or id(value) in found
            or (within and is_large(value))
        ):
            continue
        found[id(value)] = value
        if not isinstance(value, Tensor):
            inner = value.values() if isinstance(value, dict) else value
            ahead += [(v, within) for v in inner if type(v) not in PLAIN]
    return found


def is_large(value: Any) -> bool:
    """Whether a tensor in an object is data, which nobody is to copy."""
    return isinstance(value, Tensor) and value.numel() > 2**22


def caches_of(cls: type[nn.Module]) -> list[Any]:
    """Methods of a class that remember what they returned (`functools.lru_cache`), for whatever weights that was."""
    if cls not in _CACHES:
        every = [value for one in cls.__mro__ for value in vars(one).values()]
        _CACHES[cls] = [
            value for value in every if isinstance(value, _lru_cache_wrapper)
        ]
    return _CACHES[cls]
