"""What a layer tells a posterior: its weight matrices (sites), for each the linear map that applies it, and its own
parameters, which torch.nn.utils may compute from others: parametrisations, norms and pruning.

Sizes: n draws of a pass, m x n the matrix view of a weight.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from slimbayes.engine.blocks import same
from slimbayes.engine.fused import lowered
from slimbayes.engine.passes import Pass, Unproven
from slimbayes.engine.rows import apply_rows, dense_rows, sizes_of_blocks, spread

# What a layer is: it multiplies by a matrix, or by one stored as integers, looks up rows of one, scales normalised
# channels, or drops units.
Kind = Literal["matrix", "quantised", "table", "norm", "dropout"]
Unit = Literal["element", "channel"]  # what dropout drops
Op = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Outer = Callable[[Tensor, Tensor], Tensor]
Given = Tensor | None


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
        """How many inputs feed one output, for priors that scale with it: a lookup has one, the row that is looked up.

        >>> Site("weight", 5000, 16, False, "weight", (5000, 16), out_dim=1, kind="table").fan_in
        1
        """
        return 1 if self.kind == "table" else self.matrix[0]

    def to_matrix(self, weight: Tensor) -> Tensor:
        """A stored weight as a matrix (m, n)."""
        return weight.movedim(self.out_dim, -1).reshape(self.matrix)

    def from_matrix(self, matrix: Tensor) -> Tensor:
        """A matrix (..., m, q) as a stored weight with q outputs, (..., *shape)."""
        shape = [size for d, size in enumerate(self.shape) if d != self.out_dim]
        lead = matrix.dim() - 2
        return matrix.reshape(*matrix.shape[:-2], *shape, matrix.shape[-1]).movedim(-1, lead + self.out_dim)


@dataclass
class LinearMap:
    """y = op(x, weight, bias), with rows along `batch_dim` and channels along `channel_dim` of x and of y.

    A `batch_dim` of -1 means a single row that stands for all. `outer(r, s)` spreads output factors r (n_out,) and
    input factors s (n_in,) to a tensor that broadcasts against `weight`.
    """

    weight: Tensor
    bias: Tensor | None
    op: Op
    outer: Outer
    batch_dim: int
    channel_dim: int
    foldable: bool = True  # one draw for all rows may be multiplied into the weight (a lookup touches few rows of it)
    out_dim: int | None = None  # of the weight, where op is one matrix along the last dimension, whatever comes before
    mask: Tensor | None = None  # broadcasts against weight: zero where it must stay as it is (padding, pruned)

    def modulated(
        self, combine: Any, x: Tensor, s: Any, r: Any, current: Pass, weights: Given = None, bias: Given = None
    ) -> Tensor:
        """op(x . s) . r + bias, where . is `combine` (multiply or add), s is (n, n_in), r and bias are (n, n_out) or
        None.

        With `weights` (blocks, ...) each block of rows has a weight of its own.
        """
        if self.out_dim is not None and combine is operator.mul and weights is None and r is not None:
            y = dense_rows(self, x, s, r, bias, current)
            if y is not None:
                return y
        x = apply_rows(combine, x, s, current, self.batch_dim, self.channel_dim, dtype=lowered(x))
        y = self.apply(x, weights, current)
        return y if r is None else apply_rows(combine, y, r, current, self.batch_dim, self.channel_dim, bias)

    def apply(self, x: Tensor, weights: Tensor | None, current: Pass) -> Tensor:
        """op without a bias, with the layer's own weight or one for each block of rows."""
        return self.op(x, self.weight, None) if weights is None else self.blocks(x, weights, None, current)

    def squared(self, x: Tensor) -> Tensor:
        """The inputs that carry variances where x carries means."""
        return x.square()

    def averaged(self, combine: Any, x: Tensor, s: Tensor, r: Tensor, current: Pass, bias: Given = None) -> Tensor:
        """Mean of `modulated` over p products of factors, s (n, p, n_in) and r (n, p, n_out), and a bias (n, n_out)."""
        parts = [self.modulated(combine, x, s[:, j], r[:, j], current) for j in range(s.shape[1])]
        y = sum(parts[1:], parts[0]) / len(parts)
        return y if bias is None else self.rows(operator.add, y, bias, current)

    def masked(self, change: Tensor) -> Tensor:
        """A change of the weight, without what must stay as it is."""
        return change if self.mask is None else change * self.mask.to(change.dtype)

    def free(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Of values (..., *shape) of the weights those that may change, (..., count), where not all may."""
        if self.mask is None:
            return values
        free = self.mask.expand_as(self.weight) != 0
        return tuple(value[..., free] for value in values)

    def rows(self, combine: Any, y: Tensor, factor: Tensor, current: Pass) -> Tensor:
        """Combine the outputs with one line of factors (n, n_out) for each draw."""
        return apply_rows(combine, y, factor, current, self.batch_dim, self.channel_dim)

    def blocks(self, x: Tensor, weights: Tensor, biases: Tensor | None, current: Pass) -> Tensor:
        """Apply one weight (n, ...) and bias (n, n_out) to each block of rows."""
        if weights.shape[0] == 1:  # squeezing has a cheaper backward than [0]
            return self.op(x, weights.squeeze(0), None if biases is None else biases.squeeze(0))
        x, batch_dim = spread(x, current.rows, self.batch_dim)
        if (
            not torch.compiler.is_compiling()
            and x.shape[batch_dim] % current.rows
            and x.shape[batch_dim] % len(weights)
        ):
            raise Unproven(f"a layer met {x.shape[batch_dim]} rows, which {len(weights)} draws cannot share")
        sizes = sizes_of_blocks(x.shape[batch_dim], weights.shape[0], current)
        if not all(same(size, sizes[0]) for size in sizes):
            parts = enumerate(x.split(sizes, batch_dim))
            done = [self.op(part, weights[k], None if biases is None else biases[k]) for k, part in parts]
            return torch.cat(done, batch_dim)
        if x.is_floating_point() and torch.is_autocast_enabled(x.device.type):  # vmap runs past autocast
            lower = torch.get_autocast_dtype(x.device.type)
            biases = None if biases is None else biases.to(lower)
            with torch.autocast(x.device.type, enabled=False):
                return self._batched(x.to(lower), weights.to(lower), biases, batch_dim)
        return self._batched(x, weights, biases, batch_dim)

    def _batched(self, x: Tensor, weights: Tensor, biases: Tensor | None, batch_dim: int) -> Tensor:
        blocks = x.unflatten(batch_dim, (weights.shape[0], -1))
        in_dims = (batch_dim, 0, None if biases is None else 0)
        y = torch.vmap(self.op, in_dims, out_dims=batch_dim)(blocks, weights, biases)
        return y.flatten(batch_dim, batch_dim + 1)

    def chosen(self, x: Tensor, weights: Tensor, biases: Tensor | None, index: Tensor, current: Pass) -> Tensor:
        """`blocks` with weights[index[j]] for block j: rows that share one of few weights (K, ...) meet it together."""
        x, batch_dim = spread(x, current.rows, self.batch_dim)
        sizes = sizes_of_blocks(x.shape[batch_dim], index.shape[0], current)
        even = all(same(size, sizes[0]) for size in sizes)
        if torch.compiler.is_compiling() or not self.foldable or not even:
            biases = None if biases is None else biases.index_select(0, index)
            return self.blocks(x, weights.index_select(0, index), biases, current)
        order = index.argsort()
        blocks = x.unflatten(batch_dim, (index.shape[0], -1))
        rows = blocks.shape[batch_dim + 1]
        counts = index.bincount(minlength=weights.shape[0])
        sizes = [rows * count for count in counts.tolist()]
        used = [k for k, size in enumerate(sizes) if size]
        parts = blocks.index_select(batch_dim, order).flatten(batch_dim, batch_dim + 1).split(sizes, batch_dim)
        done = [self.op(parts[k], weights[k], None if biases is None else biases[k]) for k in used]
        y = torch.cat(done, batch_dim).unflatten(batch_dim, (index.shape[0], -1))
        return y.index_select(batch_dim, order.argsort()).flatten(batch_dim, batch_dim + 1)

    def add_bias(self, y: Tensor) -> Tensor:
        """Add the layer's own bias (n_out,), if there is one."""
        return y if self.bias is None else y + self.along_channels(self.bias.to(y.dtype), y.dim())

    def along_channels(self, numbers: Tensor, ndim: int) -> Tensor:
        """One number for each output channel, (n_out,), shaped to meet an output of `ndim` dimensions."""
        shape = [1] * ndim
        shape[self.channel_dim] = -1
        return numbers.view(shape)


def matrix_outer(r: Tensor, s: Tensor) -> Tensor:
    """r s^T for weights stored as (out, in)."""
    return torch.outer(r, s)


def table_outer(r: Tensor, s: Tensor) -> Tensor:
    """s r^T for weights stored as (in, out)."""
    return torch.outer(s, r)


def diagonal_outer(r: Tensor, s: Tensor) -> Tensor:
    """The factors of a scale (C,), whose inputs are its outputs."""
    return r * s


def own_value(layer: Any, name: str) -> Any:
    """A layer's parameter; computed anew where torch.nn.utils computes it from others."""
    if name in layer._parameters:
        return layer._parameters[name]
    if name in layer.__dict__:  # old-style weight norm, spectral norm and pruning set it before each forward
        hooks = _hooks(layer, name)
        hook = next(iter(hooks.values()), None)
        if hook is None:
            return layer.__dict__[name]
        if hasattr(hook, "apply_mask"):
            return hook.apply_mask(layer)
        once = {"do_power_iteration": False} if type(hook).__name__ == "SpectralNorm" else {}
        return hook.compute_weight(layer, **once)
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
