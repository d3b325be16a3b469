"""Which layers a conversion changes and why the others stay: decided completely before anything is touched."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.utils import parametrize

from slimbayes.layers import bayes_class
from slimbayes.layers.base import BayesLayer
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
    layers = dict(_parametric_layers(model))
    check_patterns("include", include, layers)
    check_patterns("exclude", exclude, layers)
    if isinstance(config, Mapping):
        check_patterns("config", list(config), layers)
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
    if chosen is None or not matches(include, name, layer, default=True):
        return Decision(name, kind, None, "not included"), ""
    if matches(exclude, name, layer, default=False):
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
