"""What every converted layer shares: the class swap, its sites and their linear maps, and the table of layer types.

A layer knows no method. It says its kind, its weight matrices (sites), how to run each and where rows and channels lie;
the posterior at `layer.posterior[site]` does the rest.
"""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn

from slimbayes.engine import calls, passes
from slimbayes.engine.layout import Unproven
from slimbayes.engine.rows import LinearMap, Op
from slimbayes.layers.site import Kind, Site, has, own_value, set_value


class Converted(nn.Module):
    """A module whose class was swapped: `plain` is the class it had, `posterior` what it gained."""

    plain: ClassVar[type[nn.Module]]
    posterior: nn.ModuleDict
    bayes_copied: ClassVar[bool] = (
        False  # whether members are copies of it as a whole, each with rows of its own
    )
    bayes_note: ClassVar[str] = ""  # what a summary should say about it
    if TYPE_CHECKING:  # a mixin reads attributes of the plain class it is mixed with

        def __getattr__(self, name: str) -> Any: ...

    @property
    def bayes_key(self) -> str:
        """How passes know it: by its first posterior."""
        first: Any = next(iter(self._modules["posterior"]._modules.values()))  # type: ignore[union-attr]
        return first.key

    @property
    def bayes_name(self) -> str:
        """Its name in the converted model, for messages."""
        site, posterior = next(iter(self.posterior.items()))
        return str(posterior.name).removesuffix(site).rstrip(".") or "the model itself"

    def posteriors(self) -> list[Any]:
        """Those of the module itself."""
        return list(self.posterior.values())

    def trace_of(self, posterior: Any) -> Any:
        """What a pass notes where it used this posterior."""
        return self.bayes_key

    @classmethod
    def may_hold_rows(cls, dim: int, ndim: int) -> bool:
        """Whether a dimension of the first input, which has `ndim` of them, can hold rows."""
        return True

    def located(self, found: passes.Pass, arrays: list[Any]) -> Any:
        """Where rows lie in the tensors of a call, and in those of its outputs, as proven."""
        at = (self.bayes_key, tuple(a.dim() for a in arrays))
        known = None if found.layout is None else found.layout.arguments.get(at)
        if known is None:
            raise Unproven(
                f"{self.bayes_name} met arguments whose rows nobody has located"
            )
        return known

    def plain_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
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
        """`_bayes_in` the pass under way, which a call of this module alone has opened."""
        key = self.bayes_key
        return self._bayes_in(passes.pass_of(key), key, args, kwargs)

    def _bayes_in(
        self, found: Any, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run in a pass; a proof of rows, which takes its place, looks at what comes in instead."""
        if found.probing:
            return found.visit(self, args, kwargs)
        if not torch.compiler.is_compiling():
            found.drawn_yet = True
            found.met[key] = None
        return self.bayes_forward(*args, **kwargs)


def _forward_of(plain: type[nn.Module]) -> Any:
    """The forward of a converted class, with the signature of the plain one."""

    @functools.wraps(plain.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        key = self.bayes_key
        found = passes.pass_of(key)
        if found is None or found.held:
            return calls.call_module(self, self._bayes_inside, args, kwargs)
        return self._bayes_in(found, key, args, kwargs)

    return forward


class BayesLayer(Converted):
    """Mixin of converted layers. Subclasses also inherit the plain torch class, which `plain` names.

    A layer with one matrix called "weight" says its `sites` and its `bayes_op`; one with several writes `linear_map`
    and `bayes_forward` itself.
    """

    bayes_kind: ClassVar[Kind] = "matrix"
    bayes_channel_dim: ClassVar[int] = -1
    # Of the weight, where `bayes_op` is one matrix along the last dimension, whatever comes before.
    bayes_out_dim: ClassVar[int | None] = None
    bayes_unbatched: int | None = None  # dimensions of an input that counts as one row
    bayes_absorbs: ClassVar[bool] = (
        True  # whether factors of one draw may be multiplied into the weight
    )
    inner_dropout: ClassVar[str] = (
        ""  # where a rate at its attribute `dropout` acts, inside its own forward
    )
    read_names: ClassVar[tuple[str, ...]] = (
        "weight",
        "bias",
    )  # what others may read past the layer's forward

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in cls.read_names:
            if "plain" in cls.__dict__ and name not in cls.__dict__:
                setattr(cls, name, reading(name))

    @classmethod
    def refuse(cls, layer: Any) -> str | None:
        """Why a plain layer of this type cannot be converted, or None if it can."""
        return None

    def sites(self) -> list[Site]:
        """The weight matrices that posteriors cover. Also called on the plain layer, before its class is swapped."""
        raise NotImplementedError

    def bayes_op(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        """Apply a weight and a bias."""
        raise NotImplementedError

    def bayes_outer(self, r: Tensor, s: Tensor) -> Tensor:
        """Output factors r (n_out,) and input factors s (n_in,) as a tensor that broadcasts against the weight."""
        return torch.outer(r, s)

    def own_affine(self) -> tuple[Any, Any]:
        """The layer's own weight and its bias or None, whatever the pass under way."""
        own = self._parameters
        weight = own["weight"] if "weight" in own else own_value(self, "weight")
        return weight, own["bias"] if "bias" in own else own_value(self, "bias") if has(
            self, "bias"
        ) else None

    def linear_map(self, site: str, batch_dim: int = 0) -> LinearMap:
        """The map of one site, with its present weight and bias, for inputs with rows along `batch_dim`."""
        (weight, bias), mask = self.own_affine(), self._buffers.get("weight_mask")
        op, outer, channels = self.bayes_op, self.bayes_outer, self.bayes_channel_dim
        how: dict[str, Any] = {
            "absorbs": self.bayes_absorbs,
            "mask": mask,
            "out_dim": self.bayes_out_dim,
        }
        return LinearMap(weight, bias, op, outer, batch_dim, channels, **how)

    def bayes_forward(self, *args: Any, **kwargs: Any) -> Any:
        (x,) = (*args, *kwargs.values())
        return self.project_draw("weight", x)

    def project_draw(
        self, site: str, x: Tensor, batch_dim: int | None = None, op: Op | None = None
    ) -> Tensor:
        """Apply this pass's draw of one site's linear map, or of one with another `op`, to inputs whose rows lie along
        `batch_dim`, or where they were located.
        """
        if batch_dim is None and x.dim() == self.bayes_unbatched:
            return self.project_draw(site, x.unsqueeze(0), 0, op).squeeze(0)
        current, dim = (
            passes.met_by(self.bayes_key, x) if batch_dim is None else (None, batch_dim)
        )
        linear = self.linear_map(site, dim)
        linear.current, linear.op = current, op or linear.op
        posterior: Any = self._modules["posterior"]._modules[site]  # type: ignore[union-attr]
        # Not a call of the module: nobody hooks a posterior, and a call costs as much as the product of a small layer.
        return posterior.forward(x, linear)

    def write_draw(
        self, plain: nn.Module, site: Site, weight: Tensor, bias: Tensor | None
    ) -> None:
        """Put a drawn weight and bias into a plain layer of the same type."""
        for name, value in ((site.parameter, weight), (site.bias_parameter, bias)):
            if value is not None:
                set_value(plain, name, value)

    def drawn_value(self, name: str) -> Any:
        """A parameter as drawn in this pass, for code that uses it past the layer's forward."""
        found = passes.pass_of(self.bayes_key)
        weights = [site.parameter for site in self.sites()]
        if found is not None and name in weights and not torch.compiler.is_compiling():
            found.met[self.bayes_key] = (
                None  # not for its bias alone: its weight may be kept elsewhere
            )
            self.posteriors()[
                0
            ].note = "its weight is used past the layer's own forward"
        for site in self.sites():
            posterior: Any = self.posterior[site.name]
            if (
                name in (site.parameter, site.bias_parameter)
                and posterior.has_weights
                and posterior.drawn == 1
            ):
                value = posterior.materialize(self.linear_map(site.name), 0)[
                    name != site.parameter
                ]
                return (
                    value if found is None else found.hand_out(self.bayes_name, value)
                )
        return own_value(self, name)


def reading(name: str) -> property:
    """An attribute of a converted layer: its own parameter, or the drawn one while a draw is under way."""

    def get(layer: Any) -> Any:
        value = own_value(layer, name)
        found: Any = (
            None
            if value is None or "posterior" not in layer._modules
            else passes.pass_of(layer.bayes_key)
        )
        if (
            found is None or found.held or hasattr(value, "full_tensor")
        ):  # FSDP2 looks for its shards
            return value
        if not (found.probing or torch.compiler.is_compiling()):
            found.met[layer.bayes_key, name] = None
        if (layer.bayes_key, name) in found.substitutes:
            return found.substitutes[layer.bayes_key, name]
        if found.probing:
            inside = found.inside and found.inside[-1] == layer.bayes_key
            return value if inside else found.quiet.watch(value, layer.bayes_name)
        return layer.drawn_value(name)

    def put(layer: Any, value: Any) -> None:
        layer.__dict__[name] = value

    def drop(layer: Any) -> None:
        del layer.__dict__[name]

    return property(get, put, drop)


def sites_of(cls: type[BayesLayer], layer: Any) -> list[Site]:
    """The sites of a plain layer: those of the class it is about to get."""
    plain = type(layer)
    layer.__class__ = cls
    try:
        return layer.sites()
    finally:
        layer.__class__ = plain


def made_once(make: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a maker of classes: equal arguments give one class, whose modules are pickled as what it is made of."""
    made: dict[tuple[Any, ...], Any] = {}

    @functools.wraps(make)
    def class_of(*arguments: Any) -> Any:
        if arguments not in made:
            cls = made[arguments] = make(*arguments)
            cls.__reduce_ex__ = lambda module, protocol: (
                _empty,
                (class_of, arguments),
                module.__getstate__(),
            )
        return made[arguments]

    return class_of


def _empty(class_of: Callable[..., Any], arguments: tuple[Any, ...]) -> nn.Module:
    cls = class_of(*arguments)
    return cls.__new__(cls)


def mixed_class(
    name: str, bases: tuple[type, ...], attributes: dict[str, Any]
) -> type[Any]:
    """A class of mixins and, last, a plain class, whose modules can become its own: they lie in memory alike."""
    cls, module = type(name, bases, attributes), cast(Any, object.__new__(bases[-1]))
    try:
        module.__class__ = cls
        return cls
    except TypeError:  # of a class that begins with one of no attributes, as ABC and Generic, the plain one goes first
        first, order = (bases[-1], *bases[:-1]), cls.__mro__[1:]

    def mro(new: Any) -> Any:
        return [new, *order] if new.__bases__ == first else type.mro(new)

    meta: Any = type(type(cls).__name__, (type(cls),), {"mro": mro})
    return meta(name, first, attributes)


@made_once
def derive_class(parent: type[BayesLayer], plain: type[nn.Module]) -> type[BayesLayer]:
    """The class of converted layers of a type that is only met at run time, from a mixin or its parent's class."""
    return mixed_class(
        f"Bayes{plain.__name__}",
        (parent, plain),
        {"plain": plain, "__module__": __name__},
    )


LAYERS: dict[
    type[nn.Module], type[BayesLayer]
] = {}  # by plain type; every file of layers registers its own
Layer = TypeVar("Layer", bound=BayesLayer)


def registered_class(layer: nn.Module) -> type[BayesLayer] | None:
    """The class of the nearest registered type among a layer's own and its parents, whatever it changes of it."""
    return next((LAYERS[cls] for cls in type(layer).__mro__ if cls in LAYERS), None)


def register_layer(cls: type[Layer]) -> type[Layer]:
    """Make a layer type convertible: decorate the BayesLayer subclass whose `plain` names it (docs/adding_a_layer.md).

    >>> from slimbayes.layers.linear import BayesLinear
    >>> LAYERS[nn.Linear] is register_layer(BayesLinear)
    True
    """
    LAYERS[cls.plain] = cls
    return cls


def bayes_form(
    mixin: type[BayesLayer], plain: type[nn.Module], **attributes: Any
) -> type[BayesLayer]:
    """The registered class of a plain type that a mixin serves; `attributes` say what is special about it."""
    space = {"plain": plain, "__module__": mixin.__module__, **attributes}
    return register_layer(type(f"Bayes{plain.__name__}", (mixin, plain), space))
