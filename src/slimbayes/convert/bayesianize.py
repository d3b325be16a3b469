"""bayesianize and debayesianize: swap the classes of a model's layers in place, and back.

A conversion is planned completely, and its posteriors are built, before the first layer is touched: if anything fails
the model is as it was. Weights, buffers, hooks, flags and the names of all parameters stay; `layer.posterior` is the
only addition.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from slimbayes.convert.plan import Decision, Selection, plan, refuse
from slimbayes.convert.remarks import (
    refuse_fixed_code,
    report_functional_dropout,
    report_members,
    report_signs,
)
from slimbayes.convert.trainable import Train, freeze, modules_to_save
from slimbayes.engine.locate import unwrapped
from slimbayes.engine.state import CACHED_NAMES
from slimbayes.layers import class_for
from slimbayes.layers.base import Converted, sites_of
from slimbayes.layers.copied import OF_MEMBER_0, copied_class
from slimbayes.layers.opening import (
    Opens,
    class_before,
    open_passes,
    turn_off_fast_paths,
)
from slimbayes.posteriors.configs.base import Config, SiteConfig
from slimbayes.posteriors.configs.whole_modules import Ensemble
from slimbayes.posteriors.ensemble import copies

Model = TypeVar("Model", bound=nn.Module)


@dataclass
class Conversion:
    """What `bayesianize` did to a model; lives at `model._slimbayes` of the module it was called on."""

    decisions: list[Decision]
    batch_dim: int | None
    patched: list[tuple[str, str, Any]] = field(
        default_factory=list
    )  # (module, attribute, former value)
    saved: list[str] = field(
        default_factory=list
    )  # modules whose own state is saved with the posteriors
    frozen: list[str] = field(default_factory=list)  # parameters that trained before
    heads: list[str] = field(
        default_factory=list
    )  # modules that train beside the posteriors


def bayesianize(
    model: Model,
    config: Config | Mapping[str, Config],
    include: Selection = None,
    exclude: Selection = None,
    batch_dim: int | None = None,
    strict: bool = False,
    train: Train = "all",
    head: Selection = None,
) -> Model:
    """Turn a model into a Bayesian neural net, in place, and return it.

    Args:
        model: any module. Its weights are kept; with unit factors and no noise it computes what it did before.
        config: the method, or a mapping from name patterns to methods (the first pattern that matches a layer counts).
        include: convert only these layers. A regular expression for a whole name, or if none matches for the last parts
            of names ("q_proj|v_proj"); a layer type; a predicate `(name, layer) -> bool`; or several of them. What is
            included by name is converted even if the method leaves its type alone by default.
        exclude: leave these layers as they are.
        batch_dim: where the model's inputs hold their rows, if you want to say it. Without, it is found out on the
            first call.
        strict: raise if a layer cannot be converted. Otherwise it stays as it is, with the reason in `summary`.
        train: "all" leaves it to the model what trains; "posterior" freezes the model's own parameters, members' biases
            among them;
            "posterior+head" all but the modules that `head` names, which `save` then writes with the posterior, as it
            does with batch norms.
        head: as `include`, of modules of any kind; by default the last with parameters.

    Layers of types that are not known run through their own forward, once for each draw: right, and slower.

    Raises:
        ValueError: no layer would be converted, or a pattern matches nothing. The model is then unchanged.

    Example:
        >>> import slimbayes as sb
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> net is sb.bayesianize(net, sb.Rank1(members=2), exclude="2")
        True
        >>> type(net[0]).__name__, type(net[2]).__name__
        ('BayesLinear', 'Linear')
    """
    refuse_fixed_code(model)
    inner = unwrapped(model)
    if inner is not model:  # names as `save` writes them, without the wrapper's prefix
        bayesianize(inner, config, include, exclude, batch_dim, strict, train, head)
        return model
    saved, heads = modules_to_save(model, train, head)
    decisions = plan(model, config, include, exclude, strict)
    report_functional_dropout(model, decisions)
    report_signs(model, decisions)
    layers = dict(model.named_modules())
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    own = [d for d in decisions if d.config is not None and d.tied is None]
    built = [(d, layers[d.name], *_posteriors(d, layers[d.name], device)) for d in own]
    _share(decisions, layers, built)
    built = [entry for entry in built if entry[0].config is not None]
    if strict:
        refuse(decisions)
    if not built and any(d.problem for d in decisions):
        reasons = "; ".join(
            f"{d.name or '(the model itself)'} ({d.kind}): {d.reason}"
            for d in decisions
            if d.problem
        )
        raise ValueError(f"No layer would be converted. {reasons}.")
    try:
        for decision, layer, cls, posteriors in built:
            layer.__class__, layer.posterior = cls, posteriors
            for posterior in posteriors.values() if decision.tied is None else ():
                posterior.join(layer)  # type: ignore[operator]
        # Only now, when nothing else can fail: starting components may set the layer's scales.
        for decision, _, _, posteriors in built:
            for posterior in posteriors.values() if decision.tied is None else ():
                posterior.adopt()  # type: ignore[operator]
    except Exception:
        for _, layer, _, posteriors in built:
            _restore(layer, posteriors)
        raise
    frozen = [] if train == "all" else freeze(model, heads)
    _attach(
        model,
        Conversion(
            decisions, batch_dim, turn_off_fast_paths(model), saved, frozen, heads
        ),
    )
    open_passes(model)
    report_members(model)
    return model


def debayesianize(model: Model) -> Model:
    """Give the plain model back, in place: original classes, weights and names, no posterior.

    Example:
        >>> import slimbayes as sb
        >>> net = sb.debayesianize(sb.bayesianize(nn.Linear(4, 3), sb.Rank1()))
        >>> type(net).__name__, [name for name, _ in net.named_parameters()]
        ('Linear', ['weight', 'bias'])
    """
    for layer in list(model.modules()):
        if isinstance(layer, Converted):
            _restore(layer, layer.posterior)
        elif isinstance(layer, Opens):
            layer.__class__ = class_before(type(layer))
        for kept in (
            "_slimbayes_tree",
            "_slimbayes_methods",
            OF_MEMBER_0,
            CACHED_NAMES,
        ):
            layer.__dict__.pop(kept, None)
        conversion: Conversion | None = layer.__dict__.pop("_slimbayes", None)
        if conversion is not None:
            modules, own = dict(layer.named_modules()), dict(layer.named_parameters())
            for name, attribute, former in conversion.patched:
                if name in modules:  # it may have been removed since
                    setattr(modules[name], attribute, former)
            for name in own.keys() & set(conversion.frozen):
                own[name].requires_grad_(True)
    return model


def restate(
    said: Sequence[tuple[str, Conversion]], model: nn.Module, freezing: bool = True
) -> None:
    """Say of a model's new conversion what those that it replaces said beside their methods: where rows lie, what
    trains and is saved.
    """
    new: Conversion = model.__dict__["_slimbayes"]
    for root, former in said:
        new.saved += [f"{root}.{name}".strip(".") for name in former.saved]
        new.heads += [f"{root}.{name}".strip(".") for name in former.heads]
    new.batch_dim = next(
        (c.batch_dim for _, c in said if c.batch_dim is not None), None
    )
    if freezing and any(c.frozen for _, c in said):
        new.frozen = freeze(model, new.heads)


def conversions_of(model: nn.Module) -> list[tuple[str, Conversion]]:
    """Every conversion under a model with the name of the module it was made on; refuses a model that has none."""
    found = [
        (name, m.__dict__["_slimbayes"])
        for name, m in model.named_modules()
        if "_slimbayes" in m.__dict__
    ]
    if not found:
        raise ValueError(
            f"This {type(model).__name__} has not been converted. Call bayesianize(model, config) first; "
            f"bayesianize(model, Deterministic()) gives a plain model the same interface."
        )
    return found


def decisions_of(model: nn.Module) -> Iterator[tuple[str, nn.Module | None, Decision]]:
    """Every decision under a model, with its layer's name there, and the layer as it is now, or None if it is gone."""
    modules = dict(model.named_modules())
    for root, conversion in conversions_of(model):
        for decision in conversion.decisions:
            name = f"{root}.{decision.name}".strip(".")
            yield name, modules.get(name), decision


def _posteriors(
    decision: Decision, layer: nn.Module, device: torch.device
) -> tuple[type[Converted], nn.ModuleDict]:
    """The class a layer gets, and posteriors of all its sites, on its device, in float32 at least.

    A site that a method cannot serve leaves the layer as it is, with the reason in the decision.
    """
    assert decision.config is not None
    if isinstance(decision.config, Ensemble):
        members = copies(decision.config, layer)
        members.name = decision.name
        names = () if any(True for _ in layer.children()) else tuple(layer._parameters)
        return copied_class(type(layer), names), nn.ModuleDict(
            {"members": members}
        ).train(layer.training)
    cls = class_for(layer, decision.config.covers)
    assert cls is not None and isinstance(decision.config, SiteConfig)
    first = next(layer.parameters(), torch.empty(0, device=device))
    wide = torch.promote_types(first.dtype, torch.float32)
    out = nn.ModuleDict()
    for site in sites_of(cls, layer):
        name = f"{decision.name}.{site.name}" if decision.name else site.name
        try:
            posterior = decision.config.build(site).to(device=first.device, dtype=wide)
        except ValueError as error:
            decision.stay(str(error), problem=True)
            break
        posterior.name, posterior.site, posterior.blockwise = name, site, site.whole
        out[site.name] = posterior
    return cls, out.train(layer.training)


def _share(
    decisions: Sequence[Decision], layers: Mapping[str, nn.Module], built: list[Any]
) -> None:
    """Layers that are tied to another get its posterior: one draw and one KL for one weight."""
    owners = {
        decision.name: (decision, posteriors) for decision, _, _, posteriors in built
    }
    for decision in decisions:
        if decision.tied is None or decision.config is None:
            continue
        if decision.tied not in owners or owners[decision.tied][0].config is None:
            decision.stay(
                f"its weight is tied to {decision.tied}, which stays as it is"
            )
            continue
        owner, posterior = (
            owners[decision.tied][0],
            next(iter(owners[decision.tied][1].values())),
        )
        layer = layers[decision.name]
        cls = class_for(layer, decision.config.covers)
        assert cls is not None
        first = sites_of(cls, layer)[0]
        if posterior.oriented and first.out_dim != posterior.site.out_dim:
            # What scales the inputs of one scales the outputs of the other: the same factors are other weights.
            for d, other in ((owner, decision), (decision, owner)):
                d.stay(
                    f"its weight is tied to {other.name}, which has inputs for outputs: they share no factors",
                    True,
                )
            continue
        posterior.blockwise = True  # type: ignore[assignment]
        built.append((decision, layer, cls, nn.ModuleDict({first.name: posterior})))


def _restore(layer: Any, posteriors: nn.ModuleDict) -> None:
    """Give a layer its own class back, if it was swapped for these posteriors."""
    if layer._modules.get("posterior") is posteriors:
        layer.__class__ = class_before(type(layer))
        del layer._modules["posterior"]


def _attach(model: nn.Module, new: Conversion) -> None:
    former: Conversion | None = model.__dict__.get("_slimbayes")
    if former is not None:  # a second method on other layers of the same model
        redone = {d.name for d in new.decisions if d.config}
        kept = {d.name: d for d in former.decisions if d.name not in redone}
        listed = {
            d.name for d in new.decisions
        }  # a converted dropout layer is not listed again
        order = {name: i for i, (name, _) in enumerate(model.named_modules())}
        merged = [kept.get(d.name, d) for d in new.decisions] + [
            d for d in kept.values() if d.name not in listed
        ]
        new.decisions = sorted(merged, key=lambda d: order.get(d.name, len(order)))
        new.patched = former.patched + new.patched
        new.saved, new.frozen = former.saved + new.saved, former.frozen + new.frozen
        new.heads = former.heads + new.heads
    model._slimbayes = new  # type: ignore[assignment]
