"""A layer's own parameters, where torch.nn.utils may compute them from others: parametrisations, norms and pruning."""

from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize


def own_value(layer: Any, name: str) -> Any:
    """A layer's parameter; computed anew where torch.nn.utils computes it from others."""
    if name in layer._parameters:
        return layer._parameters[name]
    if name in layer.__dict__:  # old-style weight norm, spectral norm and pruning set it before each forward
        hooks = _hooks(layer, name)
        return _recomputed(next(iter(hooks.values())), layer) if hooks else layer.__dict__[name]
    if "parametrizations" in layer._modules and name in layer.parametrizations:
        return layer.parametrizations[name]()
    raise AttributeError(f"{type(layer).__name__!r} object has no attribute {name!r}")


def set_value(layer: Any, name: str, value: Tensor) -> None:
    """Set a parameter of a plain layer for good: what torch.nn.utils computed it from goes."""
    if parametrize.is_parametrized(layer, name):
        del layer.parametrizations[name]
        if not len(layer.parametrizations):
            # torch would also take the property off the class, which copies of the layer share.
            del layer._modules["parametrizations"]
            layer.__class__ = type(layer).__bases__[0]
    for key in _hooks(layer, name):
        del layer._forward_pre_hooks[key]
    layer.__dict__.pop(name, None)
    own = layer._parameters.get(name)
    if own is not None:
        own.data.copy_(value)  # in place: other layers may be tied to it
    else:
        layer._parameters[name] = nn.Parameter(value.detach().clone())


def has(layer: nn.Module, name: str) -> bool:
    """Whether a layer has a parameter of this name."""
    try:
        return own_value(layer, name) is not None
    except AttributeError:
        return False


def mask_of(layer: nn.Module) -> Any:
    """Where pruning keeps a weight, as torch.nn.utils.prune notes it."""
    return layer._buffers.get("weight_mask")


def _hooks(layer: nn.Module, name: str) -> dict[int, Any]:
    """What computes a parameter before each forward."""
    hooks = layer._forward_pre_hooks.items()
    return {k: hook for k, hook in hooks if getattr(hook, "name", getattr(hook, "_tensor_name", None)) == name}


def _recomputed(hook: Any, layer: nn.Module) -> Any:
    if hasattr(hook, "apply_mask"):
        return hook.apply_mask(layer)
    if type(hook).__name__ == "SpectralNorm":
        return hook.compute_weight(layer, do_power_iteration=False)
    return hook.compute_weight(layer)
