"""The table of convertible layers: every file here registers its own types.

A subclass that keeps its parent's forward is its parent; a layer of any other type runs its own forward.
"""

import pkgutil
from collections.abc import Callable, Sequence
from importlib import import_module

import torch
from torch import nn
from torch.nn.utils import parametrize

from slimbayes.layers.anything import any_class, bias_of, matrices_of, scales_of
from slimbayes.layers.base import LAYERS, BayesLayer, derive_class, registered_class
from slimbayes.layers.base import register_layer as register_layer
from slimbayes.layers.linear import Quantised, StoredInOut, is_quantised
from slimbayes.layers.site import Kind

for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

# What a fast path calls of its plain class: a subclass that changes any of it is a type of its own.
_CALLED = (
    "forward",
    "_conv_forward",
    "_output_padding",
    "_check_input_dim",
    "_get_no_batch_dim",
)
_READ = (
    "weight",
    "bias",
)  # by properties, where a subclass computes them from parameters of its own


def bayes_class(layer: nn.Module) -> type[BayesLayer] | None:
    """The class that a layer's type converts to on the fast path, or None."""
    kind = type(layer)
    if kind not in LAYERS and (kind.__module__, kind.__name__) == (
        "transformers.pytorch_utils",
        "Conv1D",
    ):
        LAYERS[kind] = derive_class(StoredInOut, kind)
    known = registered_class(layer)
    if known is None or kind in LAYERS:
        return known
    names = _CALLED + (() if parametrize.is_parametrized(layer) else _READ)
    changed = any(
        getattr(kind, name, None) is not getattr(known.plain, name, None)
        for name in names
    )
    return None if changed else derive_class(known, kind)


def class_for(layer: nn.Module, covers: Sequence[Kind]) -> type[BayesLayer] | None:
    """The class a layer converts to for a method that covers these kinds: on the fast path, else by its own forward."""
    known = bayes_class(layer)
    if known is not None:
        return known if known.bayes_kind in covers else None
    if (
        isinstance(layer, torch.jit.ScriptModule)
        or type(layer).forward is nn.Module.forward
    ):
        return None
    if is_quantised(layer):
        return derive_class(Quantised, type(layer)) if "quantised" in covers else None
    finds: dict[Kind, Callable[[nn.Module], list[str]]] = {
        "matrix": matrices_of,
        "norm": scales_of,
    }
    for kind, find in finds.items():
        if kind in covers and (found := find(layer)):
            biases = [bias for name in found if (bias := bias_of(layer, name))]
            return any_class(type(layer), tuple(found), kind, (*found, *biases))
    return None


def kind_of(layer: nn.Module) -> Kind | None:
    """What a layer is by its type or a parent's, converted or not; None for types that nobody registered."""
    known = registered_class(layer)
    if known is None and isinstance(layer, nn.modules.batchnorm._NormBase):
        return "norm"  # SyncBatchNorm is no subclass of a registered one
    return None if known is None else known.bayes_kind
