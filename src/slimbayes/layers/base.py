"""What every converted layer shares: the class swap, the linear map it hands to posteriors, and stand-alone calls.

A layer knows no method. It states, for each weight matrix (site), how to run the map and where its rows and channels lie;
the posterior at `layer.posterior[site]` does the rest.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from slimbayes.engine import calls, passes
from slimbayes.engine.passes import Pass
from slimbayes.engine.rows import apply_rows, sizes_of_blocks, spread
from slimbayes.posteriors.base import Kind, Posterior, Site

Op = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Outer = Callable[[Tensor, Tensor], Tensor]


@dataclass
class LinearMap:
    """A linear map of a layer: y = op(x, weight, bias), rows along `batch_dim`, channels along `channel_dim` of x and of y.

    A `batch_dim` of -1 means a single row that stands for all.

    `outer(r, s)` spreads output factors r (n_out,) and input factors s (n_in,) to a tensor that broadcasts against `weight`.
    """

    weight: Tensor
    bias: Tensor | None
    op: Op
    outer: Outer
    batch_dim: int
    channel_dim: int
    name: str
    foldable: bool = True  # one draw for all rows may be multiplied into the weight (a lookup touches few rows of it)
    mask: Tensor | None = None  # broadcasts against weight: zero where it must stay as it is (padding, pruned)

    def modulated(
        self, combine: Any, x: Tensor, s: Tensor, r: Tensor | None, current: Pass, weights: Tensor | None = None
    ) -> Tensor:
        """op(x . s) . r without a bias, where . is `combine` (multiply or add), s is (n, n_in) and r is (n, n_out) or None.

        With `weights` (blocks, ...) each block of rows has a weight of its own.
        """
        x = apply_rows(combine, x, s, current, self.batch_dim, self.channel_dim)
        y = self.apply(x, weights, current)
        return y if r is None else self.rows(combine, y, r, current)

    def apply(self, x: Tensor, weights: Tensor | None, current: Pass) -> Tensor:
        """op without a bias, with the layer's own weight or one for each block of rows."""
        return self.op(x, self.weight, None) if weights is None else self.blocks(x, weights, None, current)

    def squared(self, x: Tensor) -> Tensor:
        """The inputs that carry variances where x carries means."""
        return x.square()

    def averaged(self, combine: Any, x: Tensor, s: Tensor, r: Tensor, current: Pass) -> Tensor:
        """Mean of `modulated` over p products of factors: s is (n, p, n_in), r is (n, p, n_out)."""
        y = self.modulated(combine, x, s[:, 0], r[:, 0], current)
        for j in range(1, s.shape[1]):
            y = y + self.modulated(combine, x, s[:, j], r[:, j], current)
        return y / s.shape[1] if s.shape[1] > 1 else y

    def masked(self, change: Tensor) -> Tensor:
        """A change of the weight, without what must stay as it is."""
        return change if self.mask is None else change * self.mask.to(change.dtype)

    def rows(self, combine: Any, y: Tensor, factor: Tensor, current: Pass) -> Tensor:
        """Combine the outputs with one line of factors (n, n_out) for each draw."""
        return apply_rows(combine, y, factor, current, self.batch_dim, self.channel_dim)

    def blocks(self, x: Tensor, weights: Tensor, biases: Tensor | None, current: Pass) -> Tensor:
        """Apply one weight (n, ...) and bias (n, n_out) to each block of rows."""
        if weights.shape[0] == 1:
            return self.op(
                x, weights.squeeze(0), None if biases is None else biases.squeeze(0)
            )  # cheaper backward than [0]
        x, batch_dim = spread(x, current.rows, self.batch_dim)
        sizes = sizes_of_blocks(x.shape[batch_dim], weights.shape[0], current)
        if len(set(sizes)) > 1:
            parts = [
                self.op(part, weights[j], None if biases is None else biases[j])
                for j, part in enumerate(x.split(sizes, batch_dim))
            ]
            return torch.cat(parts, batch_dim)
        if x.is_floating_point() and torch.is_autocast_enabled(x.device.type):  # vmap runs past autocast
            lower = torch.get_autocast_dtype(x.device.type)
            with torch.autocast(x.device.type, enabled=False):
                return self._batched(
                    x.to(lower), weights.to(lower), None if biases is None else biases.to(lower), batch_dim
                )
        return self._batched(x, weights, biases, batch_dim)

    def _batched(self, x: Tensor, weights: Tensor, biases: Tensor | None, batch_dim: int) -> Tensor:
        blocks = x.unflatten(batch_dim, (weights.shape[0], -1))
        in_dims = (batch_dim, 0, None if biases is None else 0)
        y = torch.vmap(self.op, in_dims, out_dims=batch_dim)(blocks, weights, biases)
        return y.flatten(batch_dim, batch_dim + 1)

    def chosen(self, x: Tensor, weights: Tensor, biases: Tensor | None, index: Tensor, current: Pass) -> Tensor:
        """`blocks` with weights[index[j]] for block j: rows that share one of few weights (K, ...) meet it together."""
        x, batch_dim = spread(x, current.rows, self.batch_dim)
        even = len(set(sizes_of_blocks(x.shape[batch_dim], index.shape[0], current))) == 1
        if torch.compiler.is_compiling() or not self.foldable or not even:
            return self.blocks(
                x, weights.index_select(0, index), None if biases is None else biases.index_select(0, index), current
            )
        order = index.argsort()
        blocks = x.unflatten(batch_dim, (index.shape[0], -1))
        rows = blocks.shape[batch_dim + 1]
        sizes = [rows * count for count in index.bincount(minlength=weights.shape[0]).tolist()]
        parts = blocks.index_select(batch_dim, order).flatten(batch_dim, batch_dim + 1).split(sizes, batch_dim)
        done = [
            self.op(part, weights[k], None if biases is None else biases[k]) for k, part in enumerate(parts) if sizes[k]
        ]
        y = torch.cat(done, batch_dim).unflatten(batch_dim, (index.shape[0], -1))
        return y.index_select(batch_dim, order.argsort()).flatten(batch_dim, batch_dim + 1)

    def add_bias(self, y: Tensor) -> Tensor:
        """Add the layer's own bias (n_out,), if there is one."""
        if self.bias is None:
            return y
        shape = [1] * y.dim()
        shape[self.channel_dim] = -1
        return y + self.bias.to(y.dtype).view(shape)


class Converted(nn.Module):
    """A module whose class was swapped: `plain` is the class it had, `posterior` what it gained."""

    plain: ClassVar[type[nn.Module]]
    posterior: nn.ModuleDict

    @property
    def bayes_key(self) -> str:
        """How passes know it: by its first posterior."""
        return next(iter(self.posterior._modules.values())).key  # type: ignore[union-attr, return-value]

    @property
    def bayes_name(self) -> str:
        """Its name in the converted model, for messages."""
        site, posterior = next(iter(self.posterior._modules.items()))
        name = posterior.name.removesuffix(site).rstrip(".")  # type: ignore[union-attr, operator]
        return name or "the model itself"

    @classmethod
    def may_hold_rows(cls, dim: int, ndim: int) -> bool:
        """Whether a dimension of the first input, which has `ndim` of them, can hold rows."""
        return True

    def plain_forward(self, args: Any, kwargs: Any) -> Any:
        """What the module did before it was converted."""
        return self.plain.forward(self, *args, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "plain" in cls.__dict__ and "forward" not in cls.__dict__:
            cls.forward = _forward_of(cls.plain)  # type: ignore[method-assign]

    def bayes_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward under the pass under way."""
        raise NotImplementedError

    def _bayes_inside(self, *args: Any, **kwargs: Any) -> Any:
        found = passes.of(self.bayes_key)
        assert found is not None
        if found.probing:
            return found.visit(self, args, kwargs)  # type: ignore[attr-defined]
        if not torch.compiler.is_compiling():
            found.drawn_yet = True
            found.met[self.bayes_key] = None
        return self.bayes_forward(*args, **kwargs)


def _forward_of(plain: type[nn.Module]) -> Any:
    """The forward of a converted class, with the signature of the plain one."""

    @functools.wraps(plain.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = passes.of(self.bayes_key)
        if found is None or found.held:
            return calls.bare(self, self._bayes_inside, args, kwargs)
        return self._bayes_inside(*args, **kwargs)

    return forward


def posteriors_at(module: Converted) -> list[Posterior]:
    """The posteriors that belong to a converted module itself."""
    return list(module.posterior.values())  # type: ignore[arg-type]


class BayesLayer(Converted):
    """Mixin of converted layers. Subclasses also inherit the plain torch class, which `plain` names."""

    bayes_kind: ClassVar[Kind] = "matrix"
    read_names: ClassVar[tuple[str, ...]] = (
        "weight",
        "bias",
    )  # parameters that others may read past the layer's forward
    if TYPE_CHECKING:  # a mixin reads attributes of the plain class it is mixed with

        def __getattr__(self, name: str) -> Any: ...

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in cls.read_names:
            if "plain" in cls.__dict__ and name not in cls.__dict__:
                setattr(cls, name, _reading(name))

    @classmethod
    def refuse(cls, layer: nn.Module) -> str | None:
        """Why a plain layer of this type cannot be converted, or None if it can."""
        return None

    def sites(self) -> list[Site]:
        """The weight matrices that posteriors cover. Also called on the plain layer, before its class is swapped."""
        raise NotImplementedError

    def linear_map(self, site: str, batch_dim: int = 0) -> LinearMap:
        """The map of one site, with its present weight and bias, for inputs with rows along `batch_dim`."""
        raise NotImplementedError

    def own_value(self, name: str) -> Any:
        """A parameter of the layer itself, whatever the pass under way."""
        return own_value(self, name)

    def rows_of(self, x: Tensor) -> int:
        """The dimension of an input that holds rows, as proven."""
        found = passes.of(self.bayes_key)
        assert found is not None
        return found.dim(self.bayes_key, x)

    def posteriors(self) -> list[Posterior]:
        return posteriors_at(self)

    def project_draw(self, site: str, x: Tensor, batch_dim: int | None = None) -> Tensor:
        """Apply this pass's draw of one site's linear map."""
        return self.posterior[site](x, self.linear_map(site, self.rows_of(x) if batch_dim is None else batch_dim))

    def write_draw(self, plain: nn.Module, site: Site, weight: Tensor, bias: Tensor | None) -> None:
        """Put a drawn weight and bias into a plain layer of the same type."""
        for name, value in ((site.parameter, weight), (site.bias_parameter, bias)):
            if value is not None:
                set_value(plain, name, value)

    def drawn_value(self, name: str) -> Any:
        """A parameter as drawn in this pass, for code that uses it past the layer's forward."""
        found = passes.of(self.bayes_key)
        if found is not None and not torch.compiler.is_compiling():
            found.met[self.bayes_key] = None
            self.posteriors()[0].note = "its weight is used past the layer's own forward"
        for site in self.sites():
            posterior: Any = self.posterior[site.name]
            if name in (site.parameter, site.bias_parameter) and posterior.has_weights and posterior.drawn == 1:
                return posterior.materialise(self.linear_map(site.name), 0)[name != site.parameter]
        return self.own_value(name)


def sites_of(cls: type[BayesLayer], layer: nn.Module) -> list[Site]:
    """The sites of a plain layer: those of the class it is about to get."""
    plain = type(layer)
    layer.__class__ = cls
    try:
        return layer.sites()  # type: ignore[operator]
    finally:
        layer.__class__ = plain


def own_value(layer: nn.Module, name: str) -> Any:
    """A layer's parameter; computed anew where torch.nn.utils computes it from others."""
    if name in layer._parameters:
        return layer._parameters[name]
    if name in layer.__dict__:  # old-style weight norm, spectral norm and pruning set it before each forward
        for hook in layer._forward_pre_hooks.values():
            if getattr(hook, "name", getattr(hook, "_tensor_name", None)) == name:
                return _recomputed(hook, layer)
        return layer.__dict__[name]
    if "parametrizations" in layer._modules and name in layer.parametrizations:  # type: ignore[operator]
        return layer.parametrizations[name]()  # type: ignore[index, operator]
    raise AttributeError(f"{type(layer).__name__!r} object has no attribute {name!r}")


def set_value(layer: nn.Module, name: str, value: Tensor) -> None:
    """Set a parameter of a plain layer for good: what torch.nn.utils computed it from goes."""
    if parametrize.is_parametrized(layer, name):
        del layer.parametrizations[name]  # type: ignore[operator, union-attr]
        if not len(layer.parametrizations):  # type: ignore[arg-type]
            # torch would also take the property off the class, which copies of the layer share.
            del layer._modules["parametrizations"]
            layer.__class__ = type(layer).__bases__[0]
    for key, hook in list(layer._forward_pre_hooks.items()):
        if getattr(hook, "name", getattr(hook, "_tensor_name", None)) == name:
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


def _recomputed(hook: Any, layer: nn.Module) -> Any:
    if hasattr(hook, "apply_mask"):
        return hook.apply_mask(layer)
    if type(hook).__name__ == "SpectralNorm":
        return hook.compute_weight(layer, do_power_iteration=False)
    return hook.compute_weight(layer)


def _reading(name: str) -> property:
    """An attribute of a converted layer: its own parameter, and while a draw of it is under way elsewhere, the drawn one."""

    def get(layer: Any) -> Any:
        value = own_value(layer, name)
        found = None if value is None or "posterior" not in layer._modules else passes.of(layer.bayes_key)
        if found is None or found.held or hasattr(value, "full_tensor"):  # FSDP2 looks for its shards
            return value
        if (layer.bayes_key, name) in found.substitutes:
            return found.substitutes[layer.bayes_key, name]
        if found.probing:
            inside = found.inside and found.inside[-1] == layer.bayes_key  # type: ignore[attr-defined]
            return value if inside else found.quiet.watch(value, layer.bayes_name)  # type: ignore[attr-defined]
        return layer.drawn_value(name)

    def put(layer: Any, value: Any) -> None:
        layer.__dict__[name] = value

    return property(get, put)


def matrix_outer(r: Tensor, s: Tensor) -> Tensor:
    """r s^T for weights stored as (out, in)."""
    return torch.outer(r, s)
