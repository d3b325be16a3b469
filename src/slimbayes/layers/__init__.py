"""The table of convertible layers. A subclass that keeps its parent's forward is its parent; any other type runs its own forward."""

from collections.abc import Sequence
from importlib import import_module

from torch import nn

from slimbayes.layers.anything import any_class, has_bias, matrices_of, scales_of
from slimbayes.layers.attention import BayesMultiheadAttention
from slimbayes.layers.base import BayesLayer
from slimbayes.layers.conv import (
    BayesConv1d,
    BayesConv2d,
    BayesConv3d,
    BayesConvTranspose1d,
    BayesConvTranspose2d,
    BayesConvTranspose3d,
)
from slimbayes.layers.dropout import DROPOUTS
from slimbayes.layers.embedding import BayesEmbedding, BayesEmbeddingBag
from slimbayes.layers.linear import BayesLinear
from slimbayes.layers.norm import NORMS
from slimbayes.layers.recurrent import BayesGRU, BayesGRUCell, BayesLSTM, BayesLSTMCell, BayesRNN, BayesRNNCell

LAYERS: dict[type[nn.Module], type[BayesLayer]] = {
    cls.plain: cls
    for cls in (
        BayesLinear,
        BayesConv1d,
        BayesConv2d,
        BayesConv3d,
        BayesConvTranspose1d,
        BayesConvTranspose2d,
        BayesConvTranspose3d,
        BayesEmbedding,
        BayesEmbeddingBag,
        BayesLSTM,
        BayesGRU,
        BayesRNN,
        BayesLSTMCell,
        BayesGRUCell,
        BayesRNNCell,
        BayesMultiheadAttention,
        *NORMS,
        *DROPOUTS,
    )
}

# Layers of packages that may not be installed: where the type lives -> our module that registers it on import.
_ON_DEMAND = {("transformers.pytorch_utils", "Conv1D"): ("slimbayes.layers.huggingface", "BayesConv1D")}


# What a fast path calls of its plain class: a subclass that changes any of it is a type of its own.
_CALLED = ("forward", "_conv_forward", "_output_padding", "_check_input_dim", "_get_no_batch_dim")
_SUBCLASSES: dict[type[nn.Module], type[BayesLayer]] = {}


def bayes_class(layer: nn.Module) -> type[BayesLayer] | None:
    """The class that a layer's type converts to on the fast path, or None.

    >>> bayes_class(nn.Linear(1, 1)).__name__
    'BayesLinear'
    >>> class Named(nn.Linear):
    ...     pass
    >>> issubclass(bayes_class(Named(1, 1)), Named)
    True
    """
    kind = type(layer)
    where = (kind.__module__, kind.__qualname__)
    if kind not in LAYERS and where in _ON_DEMAND:
        module, name = _ON_DEMAND[where]
        LAYERS[kind] = getattr(import_module(module), name)
    if kind in LAYERS:
        return LAYERS[kind]
    base = next((cls for cls in kind.__mro__ if cls in LAYERS), None)
    if base is None or any(getattr(kind, name, None) is not getattr(base, name, None) for name in _CALLED):
        return None
    return subclass(base, kind)


def subclass(base: type[nn.Module], kind: type[nn.Module]) -> type[BayesLayer]:
    """The converted class of a subclass that keeps its parent's forward."""
    if kind not in _SUBCLASSES:
        attributes = {"plain": kind, "__module__": __name__, "__reduce_ex__": _reduce}
        _SUBCLASSES[kind] = type(f"Bayes{kind.__name__}", (LAYERS[base], kind), attributes)
    return _SUBCLASSES[kind]


def _reduce(layer: nn.Module, protocol: object) -> object:
    base = next(cls for cls in layer.plain.__mro__ if cls in LAYERS)  # type: ignore[union-attr]
    return _empty, (base, layer.plain), layer.__getstate__()


def _empty(base: type[nn.Module], kind: type[nn.Module]) -> nn.Module:
    cls = subclass(base, kind)
    return cls.__new__(cls)


def class_for(layer: nn.Module, covers: Sequence[str]) -> type[BayesLayer] | None:
    """The class a layer converts to for a method that covers these kinds, by the fast path or by its own forward; None if by neither."""
    known = bayes_class(layer)
    if known is not None:
        return known if known.bayes_kind in covers else None
    if type(layer).forward is nn.Module.forward:
        return None
    for kind, names in (("matrix", matrices_of), ("norm", scales_of)):
        found = tuple(names(layer)) if kind in covers else ()
        if found:
            biases = tuple(name.replace("weight", "bias") for name in found if has_bias(layer, name))
            return any_class(type(layer), found, kind, found + biases)  # type: ignore[arg-type]
    return None


def register_layer(cls: type[BayesLayer]) -> type[BayesLayer]:
    """Make a layer type of your own convertible: decorate the BayesLayer subclass whose `plain` names it.

    See docs/adding_a_layer.md.
    """
    LAYERS[cls.plain] = cls
    return cls
