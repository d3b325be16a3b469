"""bayesianize and debayesianize: swap the classes of a model's layers in place, and back.

A conversion is planned completely, and its posteriors are built, before the first layer is touched: if anything fails the model
is as it was. Weights, buffers, hooks, flags and the names of all parameters stay; `layer.posterior` is the only addition.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils import parametrize

from slimbayes import passes
from slimbayes.layers import bayes_class
from slimbayes.layers.base import BayesLayer
from slimbayes.messages import did_you_mean
from slimbayes.posteriors.base import Config, Posterior

Model = TypeVar("Model", bound=nn.Module)
Predicate = Callable[[str, nn.Module], bool]
Pattern = str | type[nn.Module] | Predicate
Selection = Pattern | Sequence[Pattern] | None


@dataclass
class Decision:
    """What happens to one layer: the config that converts it, or the reason why it stays as it is."""

    name: str
    kind: str
    config: Config | None
    reason: str = ""


@dataclass
class Conversion:
    """What `bayesianize` did to a model; lives at `model._slimbayes` of the module it was called on."""

    decisions: list[Decision]
    batch_dim: int
    patched: list[tuple[str, str, Any]] = field(default_factory=list)  # (module, attribute, former value)
    lead: Posterior | None = None  # any posterior of the module: it knows whether a pass is open
    own: passes.Pass | None = None  # the pass that a bare call of this module has opened

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"own": None}


def bayesianize(
    model: Model,
    config: Config | Mapping[str, Config],
    include: Selection = None,
    exclude: Selection = None,
    batch_dim: int | Mapping[str, int] | None = None,
) -> Model:
    """Turn a model into a Bayesian neural net, in place, and return it.

    Args:
        model: any module. Its weights are kept; with unit factors and no noise it computes what it did before.
        config: the method, or a mapping from name patterns to methods (the first pattern that matches a layer counts).
        include: convert only these layers. A regular expression for the whole name, a layer type, a predicate
            `(name, layer) -> bool`, or several of them. What is included by name is converted even if the method
            leaves its type alone by default.
        exclude: leave these layers as they are.
        batch_dim: where the model's inputs and outputs hold their rows: 1 for sequence-first models, which is the default if the model
            itself is a torch recurrent or transformer module without batch_first, else 0. A mapping from name patterns sets it
            for single layers.

    Raises:
        ValueError: a layer cannot be converted and is not excluded, or a pattern matches nothing. The model is then unchanged.

    Example:
        >>> import slimbayes as sb
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> net is sb.bayesianize(net, sb.Rank1(members=2), exclude="2")
        True
        >>> type(net[0]).__name__, type(net[2]).__name__
        ('BayesLinear', 'Linear')
    """
    decisions = plan(model, config, include, exclude)
    layers = dict(model.named_modules())
    built = [(layers[d.name], _posteriors(d, layers[d.name])) for d in decisions if d.config is not None]
    root_dim = batch_dim if isinstance(batch_dim, int) else _own_batch_dim(model)
    dims = _batch_dims(model, batch_dim if isinstance(batch_dim, Mapping) else {}, root_dim, [d.name for d in decisions if d.config])
    for layer, posteriors in built:
        _swap(layer, posteriors)
    for name, dim in dims.items():
        layers[name].batch_dim = dim
    _attach(model, Conversion(decisions, root_dim, _turn_off_fast_paths(model)))
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
        if isinstance(layer, BayesLayer):
            layer.__class__ = layer.plain  # type: ignore[assignment]
            del layer.posterior
            layer.__dict__.pop("batch_dim", None)
        conversion: Conversion | None = layer.__dict__.get("_slimbayes")
        if conversion is not None:
            for name, attribute, former in conversion.patched:
                setattr(layer.get_submodule(name), attribute, former)
            _remove_hooks(layer)
            del layer._slimbayes
    return model


def conversions_of(model: nn.Module) -> list[tuple[str, Conversion]]:
    """Every conversion under a model with the name of the module it was made on; refuses a model that has none."""
    found = [(name, m.__dict__["_slimbayes"]) for name, m in model.named_modules() if "_slimbayes" in m.__dict__]
    if not found:
        raise ValueError(
            f"This {type(model).__name__} has not been converted. Call bayesianize(model, config) first; "
            f"bayesianize(model, Deterministic()) gives a plain model the same interface."
        )
    return found


def plan(model: nn.Module, config: Config | Mapping[str, Config], include: Selection, exclude: Selection) -> list[Decision]:
    """Decide for every layer with parameters what a conversion does to it, without changing anything."""
    layers = dict(_parametric_layers(model))
    _check_patterns("include", include, layers)
    _check_patterns("exclude", exclude, layers)
    if isinstance(config, Mapping):
        _check_patterns("config", list(config), layers)
    decisions, problems = [], []
    for name, layer in layers.items():
        decision, problem = _decide(name, layer, config, include, exclude)
        decisions.append(decision)
        if problem:
            problems.append(f"  {name or '(the model itself)'} ({decision.kind}): {problem}")
    if problems:
        raise ValueError(
            "These layers cannot be converted:\n" + "\n".join(problems) + "\nLeave them as they are with exclude=[...], "
            "or make their type known with register_layer (docs/adding_a_layer.md)."
        )
    if not any(d.config for d in decisions) and not _all_deterministic(config):
        reasons = sorted({d.reason for d in decisions})
        raise ValueError(f"No layer would be converted. Reasons given: {'; '.join(reasons) or 'the model has no parameters'}.")
    return decisions


def _all_deterministic(config: Config | Mapping[str, Config]) -> bool:
    return not any(c.converts for c in (config.values() if isinstance(config, Mapping) else [config]))


def _parametric_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules with parameters of their own. What lies inside an attention layer or a posterior belongs to it."""
    owned: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if owned and name.startswith(owned):
            continue
        if isinstance(module, (nn.MultiheadAttention, BayesLayer)):
            owned += (f"{name}.",) if name else ("",)
        if parametrize.is_parametrized(module):
            owned += (f"{name}.parametrizations.",) if name else ("parametrizations.",)
        if any(True for _ in module.parameters(recurse=False)) or bayes_class(module) or parametrize.is_parametrized(module):
            yield name, module


def _decide(
    name: str, layer: nn.Module, config: Config | Mapping[str, Config], include: Selection, exclude: Selection
) -> tuple[Decision, str]:
    """The decision for one layer, and what makes its conversion impossible, if anything."""
    kind = type(layer).__name__
    chosen = config
    if isinstance(config, Mapping):
        chosen = next((c for pattern, c in config.items() if re.fullmatch(pattern, name)), None)  # type: ignore[assignment]
    if chosen is None or not _matches(include, name, layer, default=True):
        return Decision(name, kind, None, "not included"), ""
    if _matches(exclude, name, layer, default=False):
        return Decision(name, kind, None, "excluded"), ""
    assert isinstance(chosen, Config)
    if not chosen.converts:
        return Decision(name, kind, None, f"{type(chosen).__name__} converts nothing"), ""
    if isinstance(layer, BayesLayer):
        return Decision(name, kind, None), "it is converted already; call debayesianize first, or exclude it"
    named = include is not None or isinstance(config, Mapping)
    if kind in chosen.leaves_alone and not named:
        return Decision(name, kind, None, chosen.leaves_alone[kind]), ""
    return _decide_type(Decision(name, kind, chosen), layer)


def _decide_type(decision: Decision, layer: nn.Module) -> tuple[Decision, str]:
    cls = bayes_class(layer)
    if cls is not None:
        return decision, cls.refuse(layer) or ""
    decision.config = None
    if parametrize.is_parametrized(layer):
        return decision, "its weight is computed by torch.nn.utils.parametrize; remove the parametrization first"
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
        return decision, "it is not initialised yet; run one batch through the model first"
    if all(p.dim() < 2 for p in layer.parameters(recurse=False)):
        decision.reason = "it has no weight matrix: norm and scale parameters are shared by all members"
        return decision, ""
    if any(True for _ in layer.children()):
        decision.reason = "its own parameters, beside those of its submodules, stay point estimates"
        return decision, ""
    return decision, f"no Bayesian form of {type(layer).__module__}.{decision.kind} is known"


def _matches(selection: Selection, name: str, layer: nn.Module, default: bool) -> bool:
    if selection is None:
        return default
    patterns = [selection] if isinstance(selection, (str, type)) or callable(selection) else selection
    return any(_matches_one(p, name, layer) for p in patterns)


def _matches_one(pattern: Pattern, name: str, layer: nn.Module) -> bool:
    if isinstance(pattern, str):
        return re.fullmatch(pattern, name) is not None
    if isinstance(pattern, type):
        return isinstance(layer, pattern)
    return bool(pattern(name, layer))


def _check_patterns(argument: str, selection: Selection, layers: Mapping[str, nn.Module]) -> None:
    """Every pattern must match a layer: one that does not is a slip that would otherwise pass in silence."""
    if selection is None:
        return
    patterns = [selection] if isinstance(selection, (str, type)) or callable(selection) else list(selection)
    for pattern in patterns:
        if not any(_matches_one(pattern, name, layer) for name, layer in layers.items()):
            label = pattern if isinstance(pattern, str) else getattr(pattern, "__name__", repr(pattern))
            raise ValueError(f"{argument}={label!r} matches no layer with parameters{did_you_mean(str(label), layers)}")


def _posteriors(decision: Decision, layer: nn.Module) -> nn.ModuleDict:
    """Posteriors of all sites of a layer, on its device, in its dtype or float32, whichever is wider."""
    cls = bayes_class(layer)
    assert cls is not None and decision.config is not None
    first = next(layer.parameters())
    wide = torch.promote_types(first.dtype, torch.float32)
    out = nn.ModuleDict()
    for site in cls.sites(layer):  # type: ignore[arg-type]
        name = f"{decision.name}.{site.name}" if decision.name else site.name
        try:
            posterior = decision.config.build(site).to(device=first.device, dtype=wide)
        except ValueError as error:
            raise ValueError(f"{name} ({decision.kind}): {error}.") from error
        posterior.name = name
        out[site.name] = posterior
    return out.train(layer.training)


def _swap(layer: nn.Module, posteriors: nn.ModuleDict) -> None:
    cls = bayes_class(layer)
    assert cls is not None
    layer.__class__ = cls
    layer.posterior = posteriors


def _own_batch_dim(model: nn.Module) -> int:
    """Where torch's own sequence modules hold their rows; 0 for anything else."""
    if isinstance(model, (nn.TransformerEncoder, nn.TransformerDecoder)):
        model = model.layers[0]
    if isinstance(model, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        model = model.self_attn
    sequential = isinstance(model, (nn.RNNBase, nn.Transformer, nn.MultiheadAttention))
    return int(sequential and not model.batch_first)


def _batch_dims(model: nn.Module, declared: Mapping[str, int], root_dim: int, converted: Sequence[str]) -> dict[str, int]:
    """Layers whose rows do not lie along dimension 0: by declaration, or inside torch's sequence-first transformer layers."""
    layers = {name: model.get_submodule(name) for name in converted}
    _check_patterns("batch_dim", list(declared), layers)
    dims = {n: root_dim for n, layer in layers.items() if root_dim and getattr(bayes_class(layer), "channels_last", False)}
    for name, module in model.named_modules():
        if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)) and not module.self_attn.batch_first:
            dims |= {f"{name}.{part}".lstrip("."): 1 for part in ("linear1", "linear2")}
    dims |= {n: d for n in layers for pattern, d in declared.items() if re.fullmatch(pattern, n)}
    return {n: d for n, d in dims.items() if n in layers}


def _turn_off_fast_paths(model: nn.Module) -> list[tuple[str, str, Any]]:
    """torch's fused encoder path in eval mode reads weights past our layers' forward: switch it off where it would."""
    patched = []
    for name, module in model.named_modules():
        attribute = {nn.TransformerEncoderLayer: "activation_relu_or_gelu", nn.TransformerEncoder: "use_nested_tensor"}.get(type(module))
        if attribute and any(isinstance(m, BayesLayer) for m in module.modules()):
            patched.append((name, attribute, getattr(module, attribute)))
            setattr(module, attribute, 0 if attribute == "activation_relu_or_gelu" else False)
    return patched


def _attach(model: nn.Module, new: Conversion) -> None:
    former: Conversion | None = model.__dict__.get("_slimbayes")
    if former is not None:  # a second method on other layers of the same model
        redone = {d.name for d in new.decisions if d.config}
        kept = {d.name: d for d in former.decisions if d.name not in redone}
        new.decisions = [kept.get(d.name, d) for d in new.decisions]
        new.patched = former.patched + new.patched
        _remove_hooks(model)
    new.lead = next(iter(passes.posteriors_of(model)), None)
    model._slimbayes = new  # type: ignore[assignment]
    model.register_forward_pre_hook(_begin, prepend=True, with_kwargs=True)
    model.register_forward_hook(_end, always_call=True)


def _begin(model: nn.Module, args: Any, kwargs: Any) -> None:
    """Open a pass when the converted module is called outside any other."""
    conversion: Conversion = model._slimbayes  # type: ignore[assignment]
    lead = conversion.lead
    if lead is None:
        return
    if isinstance(model, BayesLayer):  # it knows which of its inputs are unbatched
        rows = model.count_rows(*args, **kwargs)
    else:
        rows = passes.infer_rows((args, kwargs), conversion.batch_dim) or 1
    if passes.is_open([lead]):
        if lead.current is not None and lead.current.held:
            lead.current.rows = rows
        return
    conversion.own = passes.begin_bare(passes.posteriors_of(model), rows)


def _end(model: nn.Module, args: Any, output: Any) -> None:
    conversion: Conversion = model._slimbayes  # type: ignore[assignment]
    if conversion.own is not None:
        passes.remember(passes.posteriors_of(model), output)
        conversion.own.open = False
        conversion.own = None


def _remove_hooks(model: nn.Module) -> None:
    for hooks, ours in ((model._forward_pre_hooks, _begin), (model._forward_hooks, _end)):
        for key in [k for k, hook in hooks.items() if hook is ours]:
            del hooks[key]
            model._forward_pre_hooks_with_kwargs.pop(key, None)
            model._forward_hooks_always_called.pop(key, None)
