"""The table of convertible layers. Dispatch is on the exact type: a subclass may have another forward."""

from importlib import import_module

from torch import nn

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


def bayes_class(layer: nn.Module) -> type[BayesLayer] | None:
    """The class that a layer's exact type converts to, or None.

    >>> bayes_class(nn.Linear(1, 1)).__name__
    'BayesLinear'
    """
    kind = type(layer)
    where = (kind.__module__, kind.__qualname__)
    if kind not in LAYERS and where in _ON_DEMAND:
        module, name = _ON_DEMAND[where]
        LAYERS[kind] = getattr(import_module(module), name)
    return LAYERS.get(kind)


def register_layer(cls: type[BayesLayer]) -> type[BayesLayer]:
    """Make a layer type of your own convertible: decorate the BayesLayer subclass whose `plain` names it.

    See docs/adding_a_layer.md.
    """
    LAYERS[cls.plain] = cls
    return cls
