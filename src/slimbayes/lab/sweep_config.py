"""The file of a sweep: a config, and axes along which it varies. Every combination of their values is a run.

    base: rank1.yaml                     # a file beside this one, or a config written out here
    axes:
      seed: [0, 1, 2]
      method: {rank1: {kind: Rank1, members: 4}, plain: {kind: Deterministic}}
      train.optimizer.lr: [0.1, 0.01]
    name: "{method}-{lr}"                # of each run; by default the base's and all axes but seeds and data sets
    search: {trials: 30, space: {train.weight_decay: {low: 0.0, high: 0.1}}}      # around each combination (search.py)

An axis is a path of the config (or "." for the whole of it) with a list of values, or with a mapping from labels to
values; mappings are laid over the base's as `extends` does. All combinations are checked before the first one runs.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from slimbayes.errors import brief, cut, did_you_mean
from slimbayes.lab.config import Experiment
from slimbayes.lab.config_files import ConfigError, Tree, listed, merged, parse_override, read_tree, validate
from slimbayes.lab.launch import Run

_UNNAMED = ("seed", "data.name")  # runs that differ by these alone share a name: reports tell them apart
_SHOWN = 20  # faults in one message
_RUNS = 10_000  # of one sweep
_LOWER = ("nll", "brier", "ece", "mce", "adaptive_ece", "classwise_ece", "aurc", "rmse", "crps")  # is better
_HIGHER = ("accuracy", "top5", "auroc", "aucpr", "lpd")
Values = list[Any] | dict[str, Any]


class Search(BaseModel):
    """What is searched for, and where.

    Attributes:
        metric: validation_nll, validation_accuracy or validation_rmse; scores of the test rows need `allow_test`.
        direction: by default the one in which the metric is better.
        trials: of the whole search, over all calls.
        pruner: "median" stops trials that are worse after an epoch than the median of the others at that epoch, but
            lets `startup` trials finish first and each trial train for `warmup` epochs.
        seed: of the sampler (TPE).
        space: from paths to {low, high, log, step}, whole numbers if both bounds are, or to values as of an axis.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    metric: str = "validation_nll"
    direction: Literal["minimize", "maximize"] | None = None
    trials: int = Field(30, ge=1)
    pruner: Literal["median", "none"] = "median"
    startup: int = Field(5, ge=0)
    warmup: int = Field(0, ge=0)
    seed: int = Field(0, ge=0)
    allow_test: bool = False
    space: dict[str, Values] = Field(min_length=1)

    @model_validator(mode="after")
    def _sound(self) -> Search:
        role, _, score = self.metric.partition("_")
        watched = ("nll", "accuracy", "rmse")
        if role not in ("validation", "test") or score not in _LOWER + _HIGHER:
            known = ", ".join(f"validation_{name}" for name in watched)
            raise ValueError(f"unknown metric {brief(self.metric)}. Known: {known}, and test_<score> with allow_test.")
        if role == "test" and not self.allow_test:
            raise ValueError(
                f"{self.metric} would choose values by the test rows, whose scores then say nothing about new data. "
                f"Search by validation_{score} with data.validation: 0.1, or say allow_test: true if these rows are "
                "not your test."
            )
        if role == "validation" and score not in watched:
            raise ValueError(
                f"validation rows are scored by nll, and accuracy or rmse, after each epoch; got {brief(self.metric)}."
            )
        if self.direction not in (None, self.aim):
            raise ValueError(f"direction is {self.direction!r}, but {score} is better the other way.")
        return self

    @property
    def aim(self) -> Literal["minimize", "maximize"]:
        return "minimize" if self.metric.partition("_")[2] in _LOWER else "maximize"

    def check(self, base: Experiment) -> None:
        """Refuse a space that holds values which are not valid, and a metric that a run would not have."""
        if self.metric.startswith("validation_") and not base.data.validation:
            raise ConfigError(
                f"search.metric {self.metric} is of validation rows: set data.validation in the base, to 0.1 say."
            )
        for path, given in self.space.items():
            ends = range_of(path, given)
            for value in [ends["low"], ends["high"]] if ends else labelled(path, given).values():
                validate(with_values(base.resolved, {path: value}), f"search.space.{path} = {value}")


class Sweep(BaseModel):
    """The file of a sweep."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    base: str | dict[str, Any]
    axes: dict[str, Values] = {}
    name: str | None = None
    ray: dict[str, Any] = {}
    search: Search | None = None


def read_sweep(file: Path, overrides: Sequence[str] = ()) -> Sweep:
    """A sweep's file with what it extends; raises ConfigError with every fault."""
    tree = read_tree(file)
    for text in overrides:
        section, _, rest = text.partition(".")
        path, _, value = rest.partition("=")  # an axis's path has dots of its own
        axis = {"axes": {path: parse_override(f"axis={value}")["axis"]}} if section == "axes" else None
        tree = merged(tree, axis or parse_override(text))
    try:
        return Sweep.model_validate(tree, strict=True)
    except ValidationError as error:
        places = [(".".join(cut(str(part), most=60) for part in f["loc"]), f) for f in error.errors(include_url=False)]
        faults = listed([f"{place}: {_fault(fault)}" for place, fault in places])
        raise ConfigError(f"{file} is not a valid sweep:\n{faults}") from None


def _fault(fault: ErrorDetails) -> str:
    place = fault["loc"]
    if fault["type"] == "extra_forbidden":
        if place == ("slurm",):
            return "no such field. Start sweeps from `sbatch --array`: calls share the work (docs/sweeps.md)."
        if place[-1] in Experiment.model_fields:
            return "no such field. Fields of the runs go below `base:`."
        return "no such field" + did_you_mean(str(place[-1]), (Sweep if len(place) == 1 else Search).model_fields)
    if fault["type"] == "missing" and place == ("base",):
        return "is missing: a config file's name, or a config."
    return fault["msg"].removeprefix("Value error, ")


def combinations(chosen: Sweep, file: Path, out: Path, overrides: Sequence[str] = (), scale: str = "full") -> list[Run]:
    """The runs of a sweep, equal ones once; raises ConfigError with the axis values of those that are not valid."""
    base = _base(chosen, file, overrides, scale)
    axes = {path: labelled(path, values) for path, values in chosen.axes.items()}
    if (count := math.prod(map(len, axes.values()))) > _RUNS:
        raise ConfigError(f"{file} has {count:,} combinations, more than {_RUNS:,}.")
    found: dict[str, Run] = {}
    faults: dict[str, list[str]] = {}
    for values in itertools.product(*(axis.items() for axis in axes.values())):
        labels = {path: label for path, (label, _) in zip(axes, values, strict=True)}
        told = ", ".join(f"{path}={label}" for path, label in labels.items()) or "the base"
        tree = with_values(base, {path: value for path, (_, value) in zip(axes, values, strict=True)})
        try:
            experiment = validate(tree | {"name": _name(chosen, axes, labels, tree)}, told)
            found.setdefault(experiment.hash, Run(told, experiment, out))
        except ConfigError as error:
            faults.setdefault(str(error).partition("\n")[2] or str(error), []).append(told)
    if faults:
        lines = [f"{file} has combinations that are no valid experiments; nothing was run."]
        for fault, where in list(faults.items())[:_SHOWN]:
            lines += [cut(where[0]) + (f" and {len(where) - 1} more:" if where[1:] else ":"), fault]
        raise ConfigError(cut("\n".join(lines), most=3500))
    _check_names(found.values())
    return list(found.values())


def _base(chosen: Sweep, file: Path, overrides: Sequence[str], scale: str) -> Tree:
    tree: Tree = {"extends": chosen.base} if isinstance(chosen.base, str) else dict(chosen.base)
    below = tree.pop("extends", [])
    for name in reversed([below] if isinstance(below, str) else below):
        tree = merged(read_tree(file.parent / name), tree)
    small = tree.pop("small", {})
    tree.pop("paper", None)
    tree = merged(tree, small) if scale == "small" else tree
    for text in overrides:
        if (path := text.partition("=")[0].strip()) in chosen.axes:
            raise ConfigError(
                f"--set {text} changes what the axis {path} sets. Use --set axes.{path}=[...] to change the axis."
            )
        tree = merged(tree, parse_override(text))
    return tree


def _name(chosen: Sweep, axes: Mapping[str, Mapping[str, Any]], labels: dict[str, str], tree: Tree) -> str:
    """A run's name, from the template or from the labels of its values."""
    short = {path: path.rpartition(".")[2] for path in labels}
    base, times = str(tree.get("name", "run")), Counter(short.values())
    if chosen.name is None:
        parts = [base]
        for path in labels:
            if len(axes[path]) > 1 and path not in _UNNAMED:
                speaks = isinstance(chosen.axes[path], dict) or any(isinstance(v, dict) for v in axes[path].values())
                parts.append(labels[path] if speaks else f"{short[path]}-{labels[path]}")
        return "-".join(parts)
    once = {short[path]: label for path, label in labels.items() if times[short[path]] == 1}
    words = labels | once | {"name": base}

    def fill(found: re.Match[str]) -> str:
        if found[1] not in words:
            raise ConfigError(f"  name: {{{found[1]}}} is no axis{did_you_mean(found[1], words)}")
        return words[found[1]]

    return re.sub(r"\{([^{}]*)\}", fill, chosen.name)


def _check_names(runs: Iterable[Run]) -> None:
    """Refuse runs that reports could not tell apart."""
    seen: dict[tuple[str, str, int], Run] = {}
    for run in runs:
        e = run.experiment
        other = seen.setdefault((e.name, e.data.name, e.seed), run)
        if other is not run:
            raise ConfigError(
                f"Two runs would be called {e.name!r} with seed {e.seed}: {cut(other.told)}, and {cut(run.told)}. "
                'Let `name` hold every axis that varies, as in "{method}-{lr}".'
            )


def with_values(tree: Tree, values: Mapping[str, Any]) -> Tree:
    """A tree with values laid over it at some paths; the path "." is the whole of it.

    Example:
        >>> with_values({"train": {"epochs": 3}}, {"train.optimizer.lr": 0.1, ".": {"seed": 1}})
        {'train': {'epochs': 3, 'optimizer': {'lr': 0.1}}, 'seed': 1}
    """
    for path, value in values.items():
        if path == "." and not isinstance(value, dict):
            raise ConfigError(f'The axis "." needs mappings of fields, got {brief(value)}.')
        for key in reversed(path.split(".") if path != "." else []):
            value = {key: value}
        tree = merged(tree, value)
    return tree


def labelled(path: str, values: Values) -> dict[str, Any]:
    """Values of an axis by short labels, equal values once.

    Example:
        >>> labelled("method", [{"kind": "Rank1", "members": 2}, {"kind": "Rank1", "members": 4}]).keys()
        dict_keys(['Rank1-members-2', 'Rank1-members-4'])
        >>> labelled("train.optimizer.lr", [0.1, "1e-1", 0.01])
        {'0.1': 0.1, '0.01': 0.01}
    """
    if not values:
        raise ConfigError(f"The axis {path} has no values.")
    if isinstance(values, dict):
        return {str(label): value for label, value in values.items()}
    kinds = Counter(str(value.get("kind")) for value in values if isinstance(value, dict))
    out: dict[str, Any] = {}
    for number, value in enumerate(values):
        label = _label(value, kinds)
        if isinstance(value, dict) and out.get(label, value) != value:
            label = f"{label}-{number}"
        out.setdefault(label, value)
    return out


def _label(value: Any, kinds: Counter[Any]) -> str:
    if isinstance(value, dict):
        kind = str(value["kind"]) if value.get("kind") else ""
        rest = [f"{key}-{_label(one, kinds)}" for key, one in value.items() if key != "kind"]
        return "-".join(rest if not kind else [kind, *rest] if kinds[kind] > 1 else [kind])
    if isinstance(value, list):
        return "-".join(_label(one, kinds) for one in value)
    try:  # YAML takes 1e-3, without a dot, for text
        return str(value) if isinstance(value, bool | int) else repr(float(value))
    except (TypeError, ValueError):
        return str(value)


def range_of(path: str, given: Values) -> dict[str, Any] | None:
    """A part of a space that is a range of numbers, in Optuna's words; None where values are listed.

    Example:
        >>> range_of("train.optimizer.lr", {"low": "1e-4", "high": 0.1, "log": True}), range_of("seed", [0, 1])
        ({'low': 0.0001, 'high': 0.1, 'log': True}, None)
    """
    if not isinstance(given, dict) or not {"low", "high"} & given.keys():
        return None
    if not {"low", "high"} <= given.keys() <= {"low", "high", "log", "step"}:
        raise ConfigError(
            f"search.space.{path} needs low and high, perhaps log or step, and nothing else; "
            f"got {cut(', '.join(given))}."
        )
    try:  # YAML takes 1e-3, without a dot, for text
        ends = {end: given[end] if isinstance(given[end], int) else float(given[end]) for end in ("low", "high")}
    except (TypeError, ValueError):
        raise ConfigError(
            f"The bounds of a search must be numbers, got {brief(given['low'])} and {brief(given['high'])}."
        ) from None
    if not ends["low"] < ends["high"] or (given.get("log") and (ends["low"] <= 0 or given.get("step"))):
        raise ConfigError(
            f"search.space.{path} needs low < high, with log also 0 < low and no step; got {brief(given)}."
        )
    return ends | {name: given[name] for name in ("log", "step") if given.get(name)}
