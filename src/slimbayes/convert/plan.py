"""Which layers a conversion changes and why the others stay: decided completely before anything is touched."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from slimbayes.errors import did_you_mean
from slimbayes.layers import bayes_class, class_for
from slimbayes.layers.anything import NOT_WORTH_IT, POSITIONS
from slimbayes.layers.base import Converted
from slimbayes.posteriors.configs.base import Config

Predicate = Callable[[str, nn.Module], bool]
Pattern = str | type[nn.Module] | Predicate
Selection = Pattern | Sequence[Pattern] | None
FIXED_CODE = (
    torch.jit.ScriptModule,
    torch.fx.GraphModule,
)  # what is inside runs as it was when it was made


@dataclass
class Decision:
    """What happens to one layer: the config that converts it, or the reason why it stays as it is.

    `tied` names the layer whose posterior it shares, because they share the weight. A `problem` is a reason that a
    strict conversion does not accept.
    """

    name: str
    kind: str
    config: Config | None
    reason: str = ""
    tied: str | None = None
    problem: bool = False

    def stay(self, reason: str, problem: bool = False) -> "Decision":
        """Leave the layer as it is."""
        self.config, self.reason, self.problem = None, reason, problem
        return self


def plan(
    model: nn.Module,
    config: Config | Mapping[str, Config],
    include: Selection,
    exclude: Selection,
    strict: bool = False,
) -> list[Decision]:
    """Decide for every layer with parameters what a conversion does to it, without changing anything."""
    check_config(config)
    if isinstance(config, Config) and config.whole and exclude is None:
        root = include is None or any(
            _matching(pattern, {"": model}) for pattern in _patterns(include)
        )
        if root:
            return [_whole(model, config)]
    layers = dict(_layers(model))
    included, excluded = (
        selected("include", include, layers),
        selected("exclude", exclude, layers),
    )
    configs: dict[str, Config] = (
        {n: config for n in layers} if isinstance(config, Config) else {}
    )
    for pattern, one in (
        config.items() if isinstance(config, Mapping) else ()
    ):  # the first that matches a layer counts
        configs = dict.fromkeys(selected("config", pattern, layers), one) | configs
    named = include is not None or isinstance(config, Mapping)
    decisions = [
        Decision(name, type(layer).__name__, configs.get(name))
        for name, layer in layers.items()
    ]
    for d in decisions:
        if d.config is None or (include is not None and d.name not in included):
            d.stay("not included")
        elif d.name in excluded:
            d.stay("excluded")
        elif not d.config.converts:
            d.stay(f"{type(d.config).__name__} converts nothing")
        elif not named and (reason := _why_left_alone(model, d, layers[d.name])):
            d.stay(reason)
    targets = {  # for each config the names it picks out of the layers offered to it, None for all
        c: c.targets(
            model, {d.name: layers[d.name] for d in decisions if d.config == c}, named
        )
        for c in dict.fromkeys(d.config for d in decisions if d.config is not None)
    }
    for d in decisions:
        _decide(d, layers[d.name], targets)
    # Layers without parameters (dropout, norms without scale) are listed only where they become part of a posterior.
    decisions = [
        d
        for d in decisions
        if d.config or d.problem or next(layers[d.name].parameters(), None) is not None
    ]
    _tie(decisions, layers, named)
    if strict:
        refuse(decisions)
    converts = any(
        c.converts
        for c in (config.values() if isinstance(config, Mapping) else [config])
    )
    if converts and not any(d.config for d in decisions):
        reasons = sorted({d.reason for d in decisions})
        raise ValueError(
            f"No layer would be converted. Reasons given: {'; '.join(reasons) or 'the model has no parameters'}."
        )
    return decisions


def check_config(config: object) -> None:
    """Refuse what is no config, in words."""
    values = list(config.values()) if isinstance(config, Mapping) else [config]
    for value in values:
        if isinstance(value, type) and issubclass(value, Config):
            raise TypeError(
                f"bayesianize needs a config, got the class {value.__name__} itself: write {value.__name__}()."
            )
        if not isinstance(value, Config):
            raise TypeError(
                f"bayesianize needs a config such as Rank1(), or a mapping from names to configs, got {value!r}."
            )


def refuse(decisions: Sequence[Decision]) -> None:
    """Raise if a layer stays because it cannot be converted: what strict=True asks for."""
    problems = [
        f"  {d.name or '(the model itself)'} ({d.kind}): {d.reason}"
        for d in decisions
        if d.problem
    ]
    if problems:
        raise ValueError(
            "These layers cannot be converted:\n"
            + "\n".join(problems)
            + "\nLeave them as they are with exclude=[...] or without strict=True, "
            "or make their type known with register_layer (docs/adding_a_layer.md)."
        )


def _whole(model: nn.Module, config: Config) -> Decision:
    if any(isinstance(m, Converted) for m in model.modules()):
        raise ValueError(
            "The model has converted layers already: call debayesianize first, or pick other layers with include."
        )
    if any(map(nn.parameter.is_lazy, model.parameters())):
        raise ValueError(
            "Some parameters are not initialised yet: run one batch through the model first."
        )
    if hasattr(model, "posterior"):
        raise ValueError(
            f"This {type(model).__name__} has an attribute `posterior` of its own, where its members would go. Wrap "
            "it: nn.Sequential(model)."
        )
    return Decision("", type(model).__name__, config)


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules with parameters of their own, and dropout layers; what lies inside an attention layer belongs to it."""
    owned: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if owned and name.startswith(owned):
            continue
        known = bayes_class(module)
        if isinstance(module, Converted) or (
            known is not None and isinstance(module, nn.MultiheadAttention)
        ):
            owned += (f"{name}.",) if name else ("",)
        if parametrize.is_parametrized(module):
            owned += (f"{name}.parametrizations.",) if name else ("parametrizations.",)
        graph = isinstance(module, torch.fx.GraphModule)
        owned += (f"{name}.",) if graph else ()
        if (
            any(True for _ in module.parameters(recurse=graph))
            or known
            or parametrize.is_parametrized(module)
        ):
            yield name, module


def _why_left_alone(model: nn.Module, decision: Decision, layer: nn.Module) -> str:
    """Why a layer is left alone unless it is included by name: by its method; or as a table of positions, a router."""
    assert decision.config is not None
    reason = decision.config.leaves_alone(layer)
    if reason or decision.config.whole:
        return reason
    name, kind = decision.name, decision.kind
    last = name.rsplit(".", 1)[-1]
    around = [part for part in name.split(".")[:-1] if not part.isdigit()][-1:]
    router = "router" in last.lower() or "router" in kind.lower()
    if last == "gate":
        parent = model.get_submodule(name.rpartition(".")[0])
        router = any("expert" in child for child, _ in parent.named_children())
    if router:
        return "a router: it is left alone unless included by name"
    if any(NOT_WORTH_IT.search(part) for part in (last, kind)) or any(
        POSITIONS.search(part) for part in around
    ):
        return (
            "a table of positions or the like: it is left alone unless included by name"
        )
    return ""


def _decide(
    decision: Decision, layer: nn.Module, targets: Mapping[Config, set[str] | None]
) -> Decision:
    """What becomes of one layer, with the reason if it stays."""
    config = decision.config
    if config is None:
        return decision
    wanted = targets[config]
    if wanted is not None and decision.name not in wanted:
        return decision.stay(
            config.leaves_alone(layer)
            or f"not among the layers that {config.describe()} is for"
        )
    if isinstance(layer, Converted):
        return decision.stay(
            "it is converted already; call debayesianize first, or exclude it",
            problem=True,
        )
    if isinstance(layer, FIXED_CODE):
        what = (
            "TorchScript"
            if isinstance(layer, torch.jit.ScriptModule)
            else "a module of torch.fx"
        )
        return decision.stay(
            f"it is {what}, which cannot be changed; convert the module it was made of",
            True,
        )
    known = bayes_class(layer)
    container = known is None and any(
        True for child in layer.children() for _ in child.parameters()
    )
    if config.whole:
        stays = "its own parameters, beside those of its submodules, stay as they are"
        return decision.stay(stays) if container else decision
    if any(p.is_complex() for p in layer.parameters(recurse=False)):
        return decision.stay(
            "its weights are complex, and methods draw real numbers", problem=True
        )
    if "posterior" in layer._modules or hasattr(type(layer), "posterior"):
        return decision.stay(
            "it has an attribute `posterior` of its own, where its posterior would go",
            problem=True,
        )
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
        return decision.stay(
            "it is not initialised yet; run one batch through the model first",
            problem=True,
        )
    if container and not parametrize.is_parametrized(layer):
        return decision.stay(
            "its own parameters, beside those of its submodules, stay point estimates"
        )
    cls = class_for(layer, config.covers)
    if cls is not None:
        reason = cls.refuse(layer)
        return decision if reason is None else decision.stay(reason, problem=True)
    if known is not None or all(p.dim() < 2 for p in layer.parameters(recurse=False)):
        return decision.stay(
            "it has no weight matrix (a flat vector of weights is none): norm and scale parameters are shared by all "
            "members"
        )
    if type(layer).forward is nn.Module.forward:
        return decision.stay("it only holds parameters, which stay point estimates")
    return decision.stay(
        f"no Bayesian form of {type(layer).__module__}.{decision.kind} is known",
        problem=True,
    )


def _tie(
    decisions: list[Decision], layers: Mapping[str, nn.Module], named: bool
) -> None:
    """Layers that share a weight share one posterior; if one stays as it is so do the others, unless named."""
    users: dict[int, list[Decision]] = {}
    for decision in decisions:
        for parameter in layers[decision.name].parameters(recurse=False):
            if not nn.parameter.is_lazy(parameter) and parameter.dim() > 1:
                users.setdefault(id(parameter), []).append(decision)
    for group in users.values():
        converted = [d for d in group if d.config is not None]
        if len(group) < 2 or not converted:
            continue
        if converted[0].config.whole:  # type: ignore[union-attr]
            for d in converted if len(converted) > 1 else []:
                d.stay(
                    "its weight is tied, and copies of single layers would untie it; copy the whole model",
                    True,
                )
            continue
        if len(converted) < len(group) and not named:
            left = next(d for d in group if d.config is None)
            for d in converted:
                both = "include it by name to convert both, where the method has one posterior for both"
                d.stay(
                    f"its weight is tied to {left.name}, which stays as it is; {both}"
                )
            continue
        for d in group:
            if d is not converted[0]:
                d.config, d.tied, d.reason = converted[0].config, converted[0].name, ""


def selected(
    argument: str, selection: Selection, layers: Mapping[str, nn.Module]
) -> set[str]:
    """Names of the layers that patterns, types or predicates mean. A pattern that means none is a slip, and refused.

    A string is a regular expression for a whole name; where no whole name matches, for the last parts of names. Of
    several plain names ("classifier|q_proj") each counts for itself.
    """
    if selection is None:
        return set()
    out: set[str] = set()
    for pattern in _patterns(selection):
        found = _matching(pattern, layers)
        if not found:
            label = (
                pattern
                if isinstance(pattern, str)
                else getattr(pattern, "__name__", repr(pattern))
            )
            raise ValueError(
                f"{argument}={label!r} matches no layer with parameters{did_you_mean(str(label), layers)}"
            )
        out |= found
    return out


def _patterns(selection: Any) -> Sequence[Pattern]:
    return (
        [selection]
        if isinstance(selection, (str, type)) or callable(selection)
        else selection
    )


def _matching(pattern: Pattern, layers: Mapping[str, nn.Module]) -> set[str]:
    if isinstance(pattern, str):
        if re.fullmatch(r"[\w.]+(\|[\w.]+)+", pattern):
            return set().union(
                *(_matching(name, layers) for name in pattern.split("|"))
            )
        whole = {n for n in layers if re.fullmatch(pattern, n)}
        return whole or {
            n for n in layers if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", n)
        }
    if isinstance(pattern, type):
        return {n for n, layer in layers.items() if isinstance(layer, pattern)}
    return {n for n, layer in layers.items() if pattern(n, layer)}
