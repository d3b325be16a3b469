"""bayesianize and debayesianize: swap the classes of a model's layers in place, and back.

A conversion is planned completely, and its posteriors are built, before the first layer is touched: if anything fails the model
is as it was. Weights, buffers, hooks, flags and the names of all parameters stay; `layer.posterior` is the only addition.
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from slimbayes import passes
from slimbayes.layers import bayes_class
from slimbayes.layers.base import BayesLayer, Converted, posteriors_at
from slimbayes.layers.copied import Copied, copied_class
from slimbayes.layers.dropout import functional_dropout
from slimbayes.planning import Decision, Selection, check_patterns, plan
from slimbayes.posteriors.base import Config
from slimbayes.posteriors.ensemble import Ensemble, EnsemblePosterior
from slimbayes.posteriors.mc_dropout import MCDropout

Model = TypeVar("Model", bound=nn.Module)


@dataclass
class Conversion:
    """What `bayesianize` did to a model; lives at `model._slimbayes` of the module it was called on."""

    decisions: list[Decision]
    batch_dim: int
    patched: list[tuple[str, str, Any]] = field(default_factory=list)  # (module, attribute, former value)
    lead: Converted | None = None  # any converted layer of the module: its posteriors know whether a pass is open
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
    _report_functional_dropout(model, decisions)
    layers = dict(model.named_modules())
    built = [(layers[d.name], *_posteriors(d, layers[d.name])) for d in decisions if d.config is not None]
    root_dim = batch_dim if isinstance(batch_dim, int) else _own_batch_dim(model)
    dims = _batch_dims(model, batch_dim if isinstance(batch_dim, Mapping) else {}, root_dim, [d.name for d in decisions if d.config])
    try:
        for layer, cls, posteriors in built:
            _swap(layer, cls, posteriors)
        for layer, _, posteriors in built:  # only now, when nothing else can fail: starting components may set the layer's own scales
            _start(layer, posteriors)
    except Exception:
        for layer, _, posteriors in built:
            _restore(layer, posteriors)
        raise
    for name, dim in dims.items():
        set_batch_dim(layers[name], dim)
    _attach(model, Conversion(decisions, root_dim, _turn_off_fast_paths(model)))
    return model


def ensemble(models: Sequence[Model]) -> Model:
    """Join networks of one architecture, trained apart or built apart, into a deep ensemble; returns the first, now with the others in it.

    Args:
        models: two or more modules of one type whose parameters and buffers have the same names and shapes. They are not copied.

    Example:
        >>> import slimbayes as sb
        >>> nets = [nn.Linear(4, 3) for _ in range(5)]
        >>> pred = sb.predict(ensemble(nets), torch.randn(7, 4))
        >>> pred.member_probs.shape
        torch.Size([5, 7, 3])
    """
    if len(models) < 2:
        raise ValueError(f"ensemble needs at least two models, got {len(models)}.")
    first, looks = models[0], {str(model) for model in models}
    shapes = {name: tuple(t.shape) for name, t in first.state_dict().items()}
    for i, other in enumerate(models):
        theirs = {name: tuple(t.shape) for name, t in other.state_dict().items()}
        differ = sorted(n for n in shapes.keys() | theirs.keys() if shapes.get(n) != theirs.get(n))
        again = any(other is former for former in models[:i])
        if type(other) is not type(first) or differ or again:
            what = "is the same object as one before" if again else f"is a {type(other).__name__} that differs in {', '.join(differ[:5]) or 'its type'}"
            raise ValueError(f"ensemble needs separate models like the first ({type(first).__name__}), but model {i} {what}.")
    bayesianize(first, Ensemble(members=len(models), init="copies"))
    posterior: Any = passes.posteriors_of(first)[0]
    posterior.others = nn.ModuleList(models[1:])
    posterior.train(first.training)
    posterior.batched = posterior.batched and len(looks) == 1  # networks that differ in what they do must run one by one
    return first


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


def _report_functional_dropout(model: nn.Module, decisions: list[Decision]) -> None:
    """Where the model's own dropout layers are turned on, dropout inside a forward stays off in eval mode: say so."""
    if not any(isinstance(d.config, MCDropout) and "Dropout" in d.kind for d in decisions):
        return
    for name, what in functional_dropout(model).items():
        warnings.warn(
            f"{name or 'the model itself'} {what}: MCDropout turns on dropout layers, but this stays off in eval mode. Make it an nn.Dropout "
            f"layer if it is meant to be part of the posterior.",
            stacklevel=3,
        )
        known = next((d for d in decisions if d.name == name and d.config is None), None)
        if known is None:
            decisions.append(Decision(name, type(model.get_submodule(name)).__name__, None, f"functional dropout: {what}"))
        else:
            known.reason += f"; functional dropout: {what}"


def _posteriors(decision: Decision, layer: nn.Module) -> tuple[type[Converted], nn.ModuleDict]:
    """The class a layer gets, and posteriors of all its sites, on its device, in its dtype or float32, whichever is wider."""
    assert decision.config is not None
    if isinstance(decision.config, Ensemble):
        members = decision.config.copies(layer)
        members.name = decision.name
        return copied_class(type(layer)), nn.ModuleDict({"members": members}).train(layer.training)
    cls = bayes_class(layer)
    assert cls is not None
    first = next(layer.parameters(), torch.empty(0))
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
    return cls, out.train(layer.training)


def _swap(layer: nn.Module, cls: type[Converted], posteriors: nn.ModuleDict) -> None:
    layer.__class__ = cls
    layer.posterior = posteriors
    for posterior in posteriors.values():
        posterior.join(layer)  # type: ignore[operator]


def _start(layer: Any, posteriors: nn.ModuleDict) -> None:
    for site, posterior in posteriors.items():
        if not isinstance(posterior, EnsemblePosterior):
            posterior.adopt(layer.linear_map(site))  # type: ignore[operator]


def set_batch_dim(layer: nn.Module, dim: int) -> None:
    """Say where a converted layer's inputs hold their rows."""
    owner = layer.posterior["members"] if isinstance(layer, Copied) else layer
    owner.batch_dim = dim  # type: ignore[assignment]


def batch_dim_of_layer(layer: Any) -> int:
    """Where a converted layer's inputs hold their rows."""
    owner: Any = layer.posterior["members"] if isinstance(layer, Copied) else layer
    return owner.batch_dim


def _restore(layer: Any, posteriors: nn.ModuleDict) -> None:
    """Undo `_swap`, if it was done with these posteriors."""
    if isinstance(layer, Converted) and layer.posterior is posteriors:
        if not isinstance(layer, Copied):
            layer.__dict__.pop("batch_dim", None)
        layer.__class__ = layer.plain  # type: ignore[assignment]
        del layer.posterior


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
    check_patterns("batch_dim", list(declared), layers)
    dims = {n: root_dim for n, layer in layers.items() if root_dim and (not n or getattr(bayes_class(layer), "channels_last", False))}
    # Copied sequence modules of torch say themselves where their rows are.
    dims |= {n: 1 for n, layer in layers.items() if n and _own_batch_dim(layer)}
    for name, module in model.named_modules():
        if isinstance(module, (nn.TransformerEncoder, nn.TransformerDecoder)) and not module.layers[0].self_attn.batch_first:
            dims[f"{name}.norm".lstrip(".")] = 1
        if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)) and not module.self_attn.batch_first:
            dims |= {f"{name}.{part}".lstrip("."): 1 for part, _ in module.named_children() if part.startswith(("linear", "norm", "dropout"))}
    dims |= {n: d for n in layers for pattern, d in declared.items() if re.fullmatch(pattern, n)}
    return {n: d for n, d in dims.items() if n in layers}


def _turn_off_fast_paths(model: nn.Module) -> list[tuple[str, str, Any]]:
    """torch's fused encoder path in eval mode reads weights past our layers' forward: switch it off where it would."""
    patched = []
    for name, module in model.named_modules():
        attribute = {nn.TransformerEncoderLayer: "activation_relu_or_gelu", nn.TransformerEncoder: "use_nested_tensor"}.get(type(module))
        if attribute and any(isinstance(m, Converted) for m in module.modules()):
            patched.append((name, attribute, getattr(module, attribute)))
            setattr(module, attribute, 0 if attribute == "activation_relu_or_gelu" else False)
    return patched


def _attach(model: nn.Module, new: Conversion) -> None:
    former: Conversion | None = model.__dict__.get("_slimbayes")
    if former is not None:  # a second method on other layers of the same model
        redone = {d.name for d in new.decisions if d.config}
        kept = {d.name: d for d in former.decisions if d.name not in redone}
        listed = {d.name for d in new.decisions}  # a converted dropout layer is not listed again
        order = {name: i for i, (name, _) in enumerate(model.named_modules())}
        merged = [kept.get(d.name, d) for d in new.decisions] + [d for d in kept.values() if d.name not in listed]
        new.decisions = sorted(merged, key=lambda d: order[d.name])
        new.patched = former.patched + new.patched
        _remove_hooks(model)
    new.lead = next((m for m in model.modules() if isinstance(m, Converted)), None)
    model._slimbayes = new  # type: ignore[assignment]
    model.register_forward_pre_hook(_begin, prepend=True, with_kwargs=True)
    model.register_forward_hook(_end, always_call=True)


def _begin(model: nn.Module, args: Any, kwargs: Any) -> None:
    """Open a pass when the converted module is called outside any other."""
    conversion: Conversion = model._slimbayes  # type: ignore[assignment]
    lead = conversion.lead
    if lead is None:
        return
    posteriors = posteriors_at(lead)
    if isinstance(model, BayesLayer):  # it knows which of its inputs are unbatched
        rows = model.count_rows(*args, **kwargs)
    else:
        rows = passes.infer_rows((args, kwargs), conversion.batch_dim) or 1
    if passes.is_open(posteriors):
        current = posteriors[0].current
        if current is not None and current.held:
            current.rows, current.turn = rows, current.turn + 1
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
