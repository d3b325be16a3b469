"""Modules around converted layers: a call of one, by forward or by another method, opens a pass if none is under way.

Their class is swapped for one made on the spot that has the same name; `plain` is what it was. torch's fused paths,
which would read weights past our layers, are turned off.
"""

import functools
import inspect
from collections.abc import Callable
from itertools import count
from typing import Any

from torch import nn

from slimbayes.engine import calls, passes
from slimbayes.layers.base import Converted, made_once, mixed_class

_NUMBERS = count(1)  # of conversions, in this process


class Opens(nn.Module):
    """Mixin of modules that hold converted layers."""

    plain: type[nn.Module]


def wrap_methods(plain: type[nn.Module], run: Callable[[Any, str, Any, Any], Any]) -> dict[str, Any]:
    """Public methods that a class adds to nn.Module, each calling run(module, name, args, kwargs) instead."""
    found: dict[str, Any] = {}

    def wrapped(name: str, value: Any) -> Any:
        return functools.wraps(value)(lambda self, *args, **kwargs: run(self, name, args, kwargs))

    for cls in plain.__mro__:
        if cls in (nn.Module, object) or cls.__module__.startswith("torch.nn.modules"):
            continue
        for name, value in vars(cls).items():
            public = not name.startswith("_") and name != "forward" and not hasattr(nn.Module, name)
            if public and inspect.isfunction(value) and name not in found:
                found[name] = wrapped(name, value)
    return found


def runs_later(plain: type[nn.Module], name: str) -> bool:
    """Whether calling a method only begins it: generators and coroutines, and what is both."""
    value = inspect.unwrap(getattr(plain, name))
    later = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction
    return any(kind(value) for kind in later)


def _scoped(module: Any, name: str, args: Any, kwargs: Any) -> Any:
    own = functools.partial(getattr(module.plain, name), module)
    later = runs_later(module.plain, name)
    scope = calls.scope_of(module, args, kwargs, whole=name == "generate" and not later)
    if scope is not None and not later:
        return passes.run(scope, own, *args, **kwargs)
    begun = own(*args, **kwargs)
    if scope is None:
        return begun
    held = _stepwise if inspect.isgenerator(begun) else _awaited_steps if inspect.isasyncgen(begun) else _awaited
    return held(scope, begun)


def _stepwise(scope: Any, steps: Any) -> Any:
    """A generator each of whose steps belongs to one scope, whatever happens in between."""
    step, given = steps.send, None
    while True:
        try:
            made = passes.run(scope, step, given)
        except StopIteration as end:
            return end.value
        try:
            step, given = steps.send, (yield made)
        except GeneratorExit:
            steps.close()
            raise
        except BaseException as error:  # thrown in from outside: it is for the steps
            step, given = steps.throw, error


async def _awaited_steps(scope: Any, steps: Any) -> Any:
    """The same of a generator that is awaited."""
    step, given = steps.asend, None
    while True:
        try:
            made = await _awaited(scope, step(given))
        except StopAsyncIteration:
            return
        try:
            step, given = steps.asend, (yield made)
        except GeneratorExit:
            await steps.aclose()
            raise
        except BaseException as error:
            step, given = steps.athrow, error


async def _awaited(scope: Any, begun: Any) -> Any:
    with passes.holding(scope):
        return await begun


@made_once
def opening_class(plain: type[nn.Module]) -> type[nn.Module]:
    """The class of modules of one type that open passes."""

    @functools.wraps(plain.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return calls.call_module(self, functools.partial(plain.forward, self), args, kwargs)

    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
    attributes = {"plain": plain, "forward": forward} | names | wrap_methods(plain, _scoped)
    return mixed_class(plain.__name__, (Opens, plain), attributes)


def class_before(cls: Any) -> Any:
    """The class that a swapped one was; of what others made of it since (torch's parametrisations, FSDP2's shards) the
    same, made of that.
    """
    if "plain" in cls.__dict__:
        return cls.plain
    bases = tuple(class_before(base) if issubclass(base, (Converted, Opens)) else base for base in cls.__bases__)
    return type(cls.__name__, bases, {k: v for k, v in cls.__dict__.items() if k not in ("__dict__", "__weakref__")})


def open_passes(model: nn.Module) -> None:
    """Let calls of every module around converted layers open a pass; what lies inside a copied module belongs to it."""
    number = next(_NUMBERS)
    for posterior in passes.posteriors_of(model):
        posterior.conversion = number
    for module in _around(model):
        if not isinstance(module, (Converted, Opens)) and type(module).forward is not nn.Module.forward:
            module.__class__ = opening_class(type(module))
        own = module.__dict__.get("forward")  # set on the instance by somebody, it hides that of the class
        if own is not None and getattr(own, "func", None) is not _call_instance:
            module.forward = functools.partial(_call_instance, module, own)


def _call_instance(module: nn.Module, function: Any, *args: Any, **kwargs: Any) -> Any:
    """A forward that somebody set on a module, made to open a pass."""
    return calls.call_module(module, function, args, kwargs)


def _around(model: nn.Module) -> list[nn.Module]:
    """The modules that hold converted layers."""
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> bool:
        if isinstance(module, Converted):
            return True
        holds = [visit(child) for child in module.children()]
        if any(holds):
            found.append(module)
        return any(holds)

    visit(model)
    return found


def turn_off_fast_paths(model: nn.Module) -> list[tuple[str, str, Any]]:
    """torch's fused encoder path in eval mode reads weights past our layers' forward: switch it off where it would."""
    patched = []
    switches = {nn.TransformerEncoderLayer: "activation_relu_or_gelu", nn.TransformerEncoder: "use_nested_tensor"}
    for name, module in model.named_modules():
        attribute = next((a for cls, a in switches.items() if isinstance(module, cls)), None)
        if attribute and hasattr(module, attribute) and any(isinstance(m, Converted) for m in module.modules()):
            patched.append((name, attribute, getattr(module, attribute)))
            setattr(module, attribute, 0 if attribute == "activation_relu_or_gelu" else False)
    return patched
