"""Modules around converted layers: a call of one, by forward or by another method, opens a pass if none is under way.

Their class is swapped for one made on the spot that has the same name; `plain` is what it was.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from slimbayes.engine import calls
from slimbayes.layers.base import made_once


class Opens(nn.Module):
    """Mixin of modules that hold converted layers."""

    plain: type[nn.Module]


def wrap_methods(plain: type[nn.Module], run: Callable[[Any, str, Any, Any], Any]) -> dict[str, Any]:
    """Public methods that a class adds to nn.Module, each calling run(module, name, args, kwargs) instead."""
    found: dict[str, Any] = {}
    for cls in plain.__mro__:
        if cls in (nn.Module, object) or cls.__module__.startswith("torch.nn.modules"):
            continue
        for name, value in vars(cls).items():
            public = not name.startswith("_") and name != "forward" and not hasattr(nn.Module, name)
            if public and inspect.isfunction(value) and name not in found and not inspect.isgeneratorfunction(value):
                found[name] = _wrapped(name, value, run)
    return found


def _wrapped(name: str, value: Any, run: Callable[[Any, str, Any, Any], Any]) -> Any:
    @functools.wraps(value)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(self, name, args, kwargs)

    return method


def _scoped(module: Any, name: str, args: Any, kwargs: Any) -> Any:
    own = functools.partial(getattr(module.plain, name), module)
    return calls.scoped(module, own, args, kwargs, whole=name == "generate")


@made_once
def opening_class(plain: type[nn.Module]) -> type[nn.Module]:
    """The class of modules of one type that open passes."""

    @functools.wraps(plain.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return calls.bare(self, functools.partial(plain.forward, self), args, kwargs)

    attributes = {
        "plain": plain,
        "forward": forward,
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
    }
    return type(plain.__name__, (Opens, plain), attributes | wrap_methods(plain, _scoped))
