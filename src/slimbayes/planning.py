"""Which layers a conversion changes and why the others stay: decided completely before anything is touched."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.utils import parametrize

from slimbayes.layers import bayes_class
from slimbayes.layers.base import Converted
from slimbayes.messages import did_you_mean
from slimbayes.posteriors.base import Config

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


def plan(model: nn.Module, config: Config | Mapping[str, Config], include: Selection, exclude: Selection) -> list[Decision]:
    """Decide for every layer with parameters what a conversion does to it, without changing anything."""
    if isinstance(config, Config) and config.whole and exclude is None and matches(include, "", model, default=True):
        return [_whole(model, config)]
    layers = dict(_layers(model))
    check_patterns("include", include, layers)
    check_patterns("exclude", exclude, layers)
    if isinstance(config, Mapping):
        check_patterns("config", list(config), layers)
    chosen = {name: _choose(name, layer, config, include, exclude) for name, layer in layers.items()}
    targets = _targets(model, layers, chosen, named=include is not None or isinstance(config, Mapping))
    decisions, problems = [], []
    for name, layer in layers.items():
        decision, problem = _decide(name, layer, chosen[name], targets)
        # Layers without parameters (dropout, norms without scale) are listed only where they become part of a posterior.
        if decision.config is not None or problem or next(layer.parameters(), None) is not None:
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


def _whole(model: nn.Module, config: Config) -> Decision:
    if any(isinstance(m, Converted) for m in model.modules()):
        raise ValueError("The model has converted layers already: call debayesianize first, or pick other layers with include.")
    if hasattr(model, "posterior"):
        raise ValueError(f"This {type(model).__name__} has an attribute `posterior` of its own, where its members would go. Wrap it: nn.Sequential(model).")
    return Decision("", type(model).__name__, config)


def _targets(
    model: nn.Module, layers: Mapping[str, nn.Module], chosen: Mapping[str, tuple[Config | None, str]], named: bool
) -> dict[Config, set[str] | None]:
    """For each config the names it picks out of the layers offered to it, None for all."""
    configs = dict.fromkeys(config for config, _ in chosen.values() if config is not None)
    return {c: c.targets(model, {n: layers[n] for n, (own, _) in chosen.items() if own == c}, named) for c in configs}


def _all_deterministic(config: Config | Mapping[str, Config]) -> bool:
    return not any(c.converts for c in (config.values() if isinstance(config, Mapping) else [config]))


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules with parameters of their own, and dropout layers. What lies inside an attention layer or a posterior belongs to it."""
    owned: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if owned and name.startswith(owned):
            continue
        if isinstance(module, (nn.MultiheadAttention, Converted)):
            owned += (f"{name}.",) if name else ("",)
        if parametrize.is_parametrized(module):
            owned += (f"{name}.parametrizations.",) if name else ("parametrizations.",)
        if any(True for _ in module.parameters(recurse=False)) or bayes_class(module) or parametrize.is_parametrized(module):
            yield name, module


def _choose(
    name: str, layer: nn.Module, config: Config | Mapping[str, Config], include: Selection, exclude: Selection
) -> tuple[Config | None, str]:
    """The config that is offered a layer, or why none is."""
    chosen = config
    if isinstance(config, Mapping):
        chosen = next((c for pattern, c in config.items() if re.fullmatch(pattern, name)), None)  # type: ignore[assignment]
    if chosen is None or not matches(include, name, layer, default=True):
        return None, "not included"
    if matches(exclude, name, layer, default=False):
        return None, "excluded"
    assert isinstance(chosen, Config)
    if not chosen.converts:
        return None, f"{type(chosen).__name__} converts nothing"
    kind = type(layer).__name__
    if kind in chosen.leaves_alone and include is None and not isinstance(config, Mapping):
        return None, chosen.leaves_alone[kind]
    return chosen, ""


def _decide(
    name: str, layer: nn.Module, chosen: tuple[Config | None, str], targets: Mapping[Config, set[str] | None]
) -> tuple[Decision, str]:
    """The decision for one layer, and what makes its conversion impossible, if anything."""
    (config, reason), kind = chosen, type(layer).__name__
    if config is None:
        return Decision(name, kind, None, reason), ""
    wanted = targets[config]
    if wanted is not None and name not in wanted:
        return Decision(name, kind, None, config.leaves_alone.get(kind, f"not among the layers that {config.describe()} is for")), ""
    if isinstance(layer, Converted):
        return Decision(name, kind, None), "it is converted already; call debayesianize first, or exclude it"
    return _decide_type(Decision(name, kind, config), layer)


def _decide_type(decision: Decision, layer: nn.Module) -> tuple[Decision, str]:
    cls, config = bayes_class(layer), decision.config
    assert config is not None
    container = cls is None and any(True for _ in layer.children())
    if config.whole and not container:
        return decision, ""
    if cls is not None and cls.kind in config.covers:
        return decision, cls.refuse(layer) or ""
    decision.config = None
    if parametrize.is_parametrized(layer):
        return decision, "its weight is computed by torch.nn.utils.parametrize; remove the parametrization first"
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
        return decision, "it is not initialised yet; run one batch through the model first"
    if (cls is not None or all(p.dim() < 2 for p in layer.parameters(recurse=False))) and not config.whole:
        decision.reason = "it has no weight matrix: norm and scale parameters are shared by all members"
        return decision, ""
    if container:
        decision.reason = "its own parameters, beside those of its submodules, stay point estimates"
        return decision, ""
    return decision, f"no Bayesian form of {type(layer).__module__}.{decision.kind} is known"


def matches(selection: Selection, name: str, layer: nn.Module, default: bool) -> bool:
    """Whether a layer is selected by a pattern, a type, a predicate, or any of several; `default` where nothing is said."""
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


def check_patterns(argument: str, selection: Selection, layers: Mapping[str, nn.Module]) -> None:
    """Every pattern must match a layer: one that does not is a slip that would otherwise pass in silence."""
    if selection is None:
        return
    patterns = [selection] if isinstance(selection, (str, type)) or callable(selection) else list(selection)
    for pattern in patterns:
        if not any(_matches_one(pattern, name, layer) for name, layer in layers.items()):
            label = pattern if isinstance(pattern, str) else getattr(pattern, "__name__", repr(pattern))
            raise ValueError(f"{argument}={label!r} matches no layer with parameters{did_you_mean(str(label), layers)}")
