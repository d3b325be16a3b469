"""Calls of a converted model, and of its parts, open a pass: classes around converted layers, and fused paths off."""

import functools
from typing import Any

from torch import nn

from slimbayes.engine import calls
from slimbayes.layers.base import Converted
from slimbayes.layers.methods import Opens, opening_class


def open_passes(model: nn.Module) -> None:
    """Let calls of every module around converted layers open a pass; what lies inside a copied module belongs to it."""
    for module in _around(model):
        if not isinstance(module, (Converted, Opens)) and type(module).forward is not nn.Module.forward:
            module.__class__ = opening_class(type(module))
        own = module.__dict__.get("forward")  # set on the instance by somebody, it hides that of the class
        if own is not None and not isinstance(own, _Instance):
            module.forward = _Instance(module, own)


class _Instance(functools.partial):  # type: ignore[type-arg]
    """A forward that somebody set on a module, made to open a pass."""

    def __new__(cls, module: nn.Module, function: Any) -> Any:
        return super().__new__(cls, _call_instance, module, function)


def _call_instance(module: nn.Module, function: Any, *args: Any, **kwargs: Any) -> Any:
    return calls.bare(module, function, args, kwargs)


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
