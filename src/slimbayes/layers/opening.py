"""Modules around converted layers: a call of one, by forward or by another method, opens a pass if none is under way.

Their class is swapped for one made on the spot that has the same name; `plain` is what it was. torch's fused paths,
which would read weights past our layers, are turned off.
"""

import functools
import inspect
import warnings
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from slimbayes.engine import bare, calls, passes
from slimbayes.engine.layout import arrays_of
from slimbayes.engine.modules import first_key, modules_of
from slimbayes.engine.trial import on_trial
from slimbayes.errors import SlimbayesWarning
from slimbayes.layers.base import BayesLayer, Converted, made_once, mixed_class

_NUMBERS = count(1)  # of conversions, in this process


class Opens(nn.Module):
    """Mixin of modules that hold converted layers."""

    plain: type[nn.Module]


def wrap_methods(
    plain: type[nn.Module], run: Callable[[Any, str, Any, Any], Any]
) -> dict[str, Any]:
    """Public methods that a class adds to nn.Module, each calling run(module, name, args, kwargs) instead."""
    found: dict[str, Any] = {}

    def wrapped(name: str, value: Any) -> Any:
        return functools.wraps(value)(
            lambda self, *args, **kwargs: run(self, name, args, kwargs)
        )

    for cls in plain.__mro__:
        if cls in (nn.Module, object) or cls.__module__.startswith("torch.nn.modules"):
            continue
        for name, value in vars(cls).items():
            public = (
                not name.startswith("_")
                and name != "forward"
                and not hasattr(nn.Module, name)
            )
            if public and inspect.isfunction(value) and name not in found:
                found[name] = wrapped(name, value)
    return found


def runs_later(plain: type[nn.Module], name: str) -> bool:
    """Whether calling a method only begins it: generators and coroutines, and what is both."""
    value = inspect.unwrap(getattr(plain, name))
    later = (
        inspect.isgeneratorfunction,
        inspect.iscoroutinefunction,
        inspect.isasyncgenfunction,
    )
    return any(kind(value) for kind in later)


class _Uses(TorchFunctionMode):
    """Sees whose weights a method computes with itself, which are then those of the layers and no draws."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        layers = [m for m in modules_of(module) if isinstance(m, BayesLayer)]
        drawn = [
            m for m in layers if not all(p.late for p in m.posteriors())
        ]  # those drop activations
        self.owners = {
            id(p): m
            for m in drawn
            for name, p in m._parameters.items()
            if name in m.read_names and p is not None
        }
        self.used: BayesLayer | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out, found = func(*args, **(kwargs or {})), passes.innermost()
        if (
            found is not None
            and found.held
            and isinstance(out, Tensor)
            and not on_trial()
        ):  # not for its type alone
            given = (*args, *(kwargs or {}).values())
            self.used = self.used or next(
                (self.owners[id(a)] for a in given if id(a) in self.owners), None
            )
        return out


def _look_at_first(
    module: Any, name: str, own: Callable[..., Any]
) -> Callable[..., Any]:
    """A method that says, at its first call, whether it computes with layers' own weights."""
    seen: set[str] = module.__dict__.setdefault("_slimbayes_methods", set())
    held = passes.pass_of(first_key(module) or "")
    if (
        name in seen
        or held is None
        or not held.held
        or held.watched
        or torch.compiler.is_compiling()
    ):
        return own

    def run(*args: Any, **kwargs: Any) -> Any:
        seen.add(name)
        held.watched = True
        try:
            with _Uses(module) as uses:
                out = own(*args, **kwargs)
        finally:
            held.watched = False
        if uses.used is not None and arrays_of((args, kwargs)) and arrays_of(out):
            warnings.warn(
                f"{name} of {type(module).__name__} computes with a parameter of {uses.used.bayes_name} past that "
                f"layer's forward: it is the layer's own, and no draw. Do so in the model's forward, where it is one, "
                f"or take a draw as a plain model: materialize(model, draw=j) inside fixed_draws(model).",
                SlimbayesWarning,
                stacklevel=5,
            )
        return out

    return run


def _scoped(module: Any, name: str, args: Any, kwargs: Any) -> Any:
    own = functools.partial(getattr(module.plain, name), module)
    later = runs_later(module.plain, name)
    scope = bare.scope_of(module, args, kwargs, whole=name == "generate" and not later)
    if scope is not None and not later:
        return passes.run(
            scope, lambda: _look_at_first(module, name, own)(*args, **kwargs)
        )
    begun = (own if later else _look_at_first(module, name, own))(*args, **kwargs)
    if scope is None:
        return begun
    held = (
        _stepwise
        if inspect.isgenerator(begun)
        else _awaited_steps
        if inspect.isasyncgen(begun)
        else _awaited
    )
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
        return calls.call_module(
            self, functools.partial(plain.forward, self), args, kwargs
        )

    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
    attributes = (
        {"plain": plain, "forward": forward} | names | wrap_methods(plain, _scoped)
    )
    return mixed_class(plain.__name__, (Opens, plain), attributes)


def class_before(cls: Any) -> Any:
    """The class that a swapped one was; of what others made of it since (torch's parametrisations, FSDP2's shards) the
    same, made of that.
    """
    if "plain" in cls.__dict__:
        return cls.plain
    bases = tuple(
        class_before(base) if issubclass(base, (Converted, Opens)) else base
        for base in cls.__bases__
    )
    return type(
        cls.__name__,
        bases,
        {k: v for k, v in cls.__dict__.items() if k not in ("__dict__", "__weakref__")},
    )


def open_passes(model: nn.Module) -> None:
    """Let calls of every module around converted layers open a pass; what lies inside a copied module belongs to it."""
    number = next(_NUMBERS)
    for posterior in passes.posteriors_of(model):
        posterior.conversion = number
    for module in _around(model):
        if (
            not isinstance(module, (Converted, Opens))
            and type(module).forward is not nn.Module.forward
        ):
            module.__class__ = opening_class(type(module))
        own = module.__dict__.get(
            "forward"
        )  # set on the instance by somebody, it hides that of the class
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
    switches = {
        nn.TransformerEncoderLayer: "activation_relu_or_gelu",
        nn.TransformerEncoder: "use_nested_tensor",
    }
    for name, module in model.named_modules():
        attribute = next(
            (a for cls, a in switches.items() if isinstance(module, cls)), None
        )
        if (
            attribute
            and hasattr(module, attribute)
            and any(isinstance(m, Converted) for m in module.modules())
        ):
            patched.append((name, attribute, getattr(module, attribute)))
            setattr(
                module,
                attribute,
                0 if attribute == "activation_relu_or_gelu" else False,
            )
    return patched
