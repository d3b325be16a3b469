"""What a layer tells a posterior: its weight matrices (sites), and its own parameters, which torch.nn.utils may compute
from others: parametrisations, norms and pruning. `engine.rows.LinearMap` applies a site.

Sizes: m x n the matrix view of a weight.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

# What a layer is: it multiplies by a matrix, or by one stored as integers, looks up rows of one, scales normalised
# channels, or drops units.
Kind = Literal["matrix", "quantised", "table", "norm", "dropout"]
Unit = Literal["element", "channel"]  # what dropout drops


@dataclass(frozen=True)
class Site:
    """One weight matrix of a layer that a posterior covers, the scale of a norm layer, or the units of a dropout layer.

    Attributes:
        name: key of its posterior in `layer.posterior`.
        n_in, n_out: its input and output channels.
        bias: whether a bias follows it.
        parameter: name of the layer's parameter that holds it.
        shape: shape of the weight as it is stored.
        out_dim: which dimension of the stored weight counts outputs; the others, flattened, are the inputs of its
            matrix view.
        positions: whether one row meets the matrix once, or at many places or times that share the weights; "pooled" if
            such places are averaged, "nonlinear" if the output is not linear in the weights.
        kind: that of its layer.
        whole: the layer is of a type we do not know and runs its own forward, with drawn weights in place of its own.
        bias_in: name of the layer's parameter that holds the bias, if it is not called as the weight is.
    """

    name: str
    n_in: int
    n_out: int
    bias: bool
    parameter: str
    shape: tuple[int, ...]
    out_dim: int = 0
    positions: Literal["one", "many", "pooled", "nonlinear"] = "one"
    kind: Kind = "matrix"
    whole: bool = False
    bias_in: str = ""

    @property
    def bias_parameter(self) -> str:
        """Name of the layer's parameter that holds the bias."""
        return self.bias_in or self.parameter.replace("weight", "bias")

    @property
    def matrix(self) -> tuple[int, int]:
        """Shape (m, n) of the matrix view: inputs (times the kernel's size) by outputs."""
        n = self.shape[self.out_dim]
        return math.prod(self.shape) // n, n

    @property
    def fan_in(self) -> int:
        """How many inputs feed one output, for priors that scale with it; a lookup has one, the row looked up."""
        return 1 if self.kind == "table" else self.matrix[0]

    def to_matrix(self, weight: Tensor) -> Tensor:
        """A stored weight as a matrix (m, n)."""
        return weight.movedim(self.out_dim, -1).reshape(self.matrix)

    def from_matrix(self, matrix: Tensor) -> Tensor:
        """A matrix (..., m, q) as a stored weight with q outputs, (..., *shape)."""
        shape = [size for d, size in enumerate(self.shape) if d != self.out_dim]
        lead = matrix.dim() - 2
        return matrix.reshape(*matrix.shape[:-2], *shape, matrix.shape[-1]).movedim(
            -1, lead + self.out_dim
        )


def table_outer(r: Tensor, s: Tensor) -> Tensor:
    """s r^T for weights stored as (in, out)."""
    return torch.outer(s, r)


def own_value(layer: Any, name: str) -> Any:
    """A layer's parameter; computed anew where torch.nn.utils computes it from others."""
    if name in layer._parameters:
        return layer._parameters[name]
    if (
        name in layer.__dict__
    ):  # old-style weight norm, spectral norm and pruning set it before each forward
        hooks = _hooks(layer, name)
        hook = next(iter(hooks.values()), None)
        if hook is None:
            return layer.__dict__[name]
        if hasattr(hook, "apply_mask"):
            return hook.apply_mask(layer)
        once = (
            {"do_power_iteration": False}
            if type(hook).__name__ == "SpectralNorm"
            else {}
        )
        return hook.compute_weight(layer, **once)
    if "parametrizations" in layer._modules and name in layer.parametrizations:
        return layer.parametrizations[name]()
    raise AttributeError(f"{type(layer).__name__!r} object has no attribute {name!r}")


def set_value(layer: Any, name: str, value: Tensor) -> None:
    """Set a parameter of a plain layer for good: what torch.nn.utils computed it from goes."""
    hooks = _hooks(layer, name)
    if isinstance(layer.__dict__.get(name), Tensor) and not hooks:
        raise ValueError(
            f"The {name} of a {type(layer).__name__} is no parameter: code around it sets it anew in each call, "
            f"and would write over a draw. Sample from the converted model instead, or exclude the layer."
        )
    if parametrize.is_parametrized(layer, name):
        del layer.parametrizations[name]
        if not len(layer.parametrizations):
            # torch would also take the property off the class, which copies of the layer share.
            del layer._modules["parametrizations"]
            layer.__class__ = type(layer).__bases__[0]
    for key in hooks:
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


def _hooks(layer: nn.Module, name: str) -> dict[int, Any]:
    """What computes a parameter before each forward."""
    hooks = layer._forward_pre_hooks.items()
    return {
        k: hook
        for k, hook in hooks
        if getattr(hook, "name", getattr(hook, "_tensor_name", None)) == name
    }
