"""Sweeps: every combination of values along some axes, each an ordinary run in a directory of its own.

    base: rank1.yaml                     # a file beside this one, or a config written out here
    axes:
      seed: [0, 1, 2]
      method: {rank1: {kind: Rank1, members: 4}, plain: {kind: Deterministic}}
      train.optimizer.lr: [0.1, 0.01]
    name: "{method}-{lr}"                # of each run; by default the base's name and the values of all axes but seeds and data sets

All combinations are checked before the first one runs. An axis is a path of the config (or "." for the whole of it) with a list of values, or with a
mapping from labels to values; mappings are laid over the base's as `extends` does. `search:` looks for good values instead, of each combination (search.py).
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from slimbayes.errors import did_you_mean
from slimbayes.lab.config import Experiment
from slimbayes.lab.config_files import ConfigError, Tree, merged, parse_override, read_tree, validate
from slimbayes.lab.labels import at, labelled
from slimbayes.lab.search_config import Search

_UNNAMED = ("seed", "data.name")  # runs that differ by these alone share a name: reports tell them apart
_SHOWN = 20  # faults in one message


class Sweep(BaseModel):
    """The file of a sweep."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    base: str | dict[str, Any]
    axes: dict[str, list[Any] | dict[str, Any]] = {}
    name: str | None = None
    slurm: dict[str, Any] = {}
    ray: dict[str, Any] = {}
    search: Search | None = None


@dataclass(frozen=True)
class Point:
    """One combination: the label of its value on each axis, and its experiment."""

    labels: tuple[tuple[str, str], ...]
    experiment: Experiment

    @property
    def told(self) -> str:
        return ", ".join(f"{path}={label}" for path, label in self.labels)


def read_sweep(file: Path, overrides: Sequence[str] = ()) -> Sweep:
    """A sweep's file with what it extends; raises ConfigError with every fault."""
    tree = read_tree(file)
    for text in overrides:
        path, _, value = text.partition("=")
        if path.startswith("axes."):
            tree = merged(tree, {"axes": {**tree.get("axes", {}), path.removeprefix("axes."): yaml.safe_load(value)}})
        else:
            tree = merged(tree, parse_override(text))
    try:
        return Sweep.model_validate(tree)
    except ValidationError as error:
        faults = [f"  {'.'.join(map(str, f['loc']))}: {_fault(f)}" for f in error.errors(include_url=False)]
        raise ConfigError("\n".join([f"{file} is not a valid sweep:", *dict.fromkeys(faults)])) from error


def _fault(fault: Any) -> str:
    if fault["type"] == "extra_forbidden":
        name = str(fault["loc"][-1])
        known = (Sweep if len(fault["loc"]) == 1 else Search).model_fields
        return "no such field" + (
            ". Fields of the runs go below `base:`." if name in Experiment.model_fields else did_you_mean(name, known)
        )
    if fault["type"] == "missing" and fault["loc"] == ("base",):
        return "is missing: a config file's name, or a config."
    return fault["msg"].removeprefix("Value error, ")


def combinations(chosen: Sweep, file: Path, overrides: Sequence[str] = (), scale: str = "full") -> list[Point]:
    """The experiments of a sweep, equal ones once; raises ConfigError naming the axis values of every one that is not valid."""
    base = _base(chosen, file, overrides, scale)
    for text in overrides:
        if (path := text.partition("=")[0].strip()) in chosen.axes:
            raise ConfigError(
                f"--set {text} changes what the axis {path} sets. Use --set axes.{path}=[...] to change the axis."
            )
    axes = {path: labelled(path, values) for path, values in chosen.axes.items()}
    found: dict[str, Point] = {}
    faults: dict[str, list[str]] = {}
    for values in itertools.product(*(axis.items() for axis in axes.values())):
        labels = dict(zip(axes, (label for label, _ in values), strict=True))
        tree = base
        for path, (_, value) in zip(axes, values, strict=True):
            tree = merged(tree, at(path, value))
        told = ", ".join(f"{path}={label}" for path, label in labels.items()) or "the base"
        try:
            experiment = validate(tree | {"name": _name(chosen, axes, labels, tree)}, told)
        except ConfigError as error:
            faults.setdefault(str(error).partition("\n")[2] or str(error), []).append(told)
        else:
            found.setdefault(experiment.hash, Point(tuple(labels.items()), experiment))
    if faults:
        raise ConfigError(_all_faults(file, faults))
    _check_names(found.values())
    return list(found.values())


def _base(chosen: Sweep, file: Path, overrides: Sequence[str], scale: str) -> Tree:
    tree = read_tree(file.parent / chosen.base) if isinstance(chosen.base, str) else dict(chosen.base)
    below = tree.pop("extends", [])
    for name in reversed([below] if isinstance(below, str) else below):
        tree = merged(read_tree(file.parent / name), tree)
    small = tree.pop("small", {})
    tree.pop("paper", None)
    tree = merged(tree, small) if scale == "small" else tree
    for text in overrides:
        tree = merged(tree, parse_override(text))
    return tree


def _name(chosen: Sweep, axes: Mapping[str, Mapping[str, Any]], labels: Mapping[str, str], tree: Tree) -> str:
    """A run's name, from the template or from the labels of its values."""
    base = str(tree.get("name", "run"))
    if chosen.name is None:
        varied = {p: label for p, label in labels.items() if len(axes[p]) > 1 and p not in _UNNAMED}
        plain = {
            p: isinstance(chosen.axes[p], Mapping) or any(isinstance(v, Mapping) for v in axes[p].values())
            for p in varied
        }
        return "-".join(
            [base, *(label if plain[p] else f"{p.rpartition('.')[2]}-{label}" for p, label in varied.items())]
        )
    short = Counter(path.rpartition(".")[2] for path in labels)
    words = (
        labels
        | {p.rpartition(".")[2]: label for p, label in labels.items() if short[p.rpartition(".")[2]] == 1}
        | {"name": base}
    )

    def fill(found: re.Match[str]) -> str:
        if found[1] not in words:
            raise ConfigError(f"  name: {{{found[1]}}} is no axis{did_you_mean(found[1], tuple(words))}")
        return words[found[1]]

    return re.sub(r"\{([^{}]*)\}", fill, chosen.name)


def _all_faults(file: Path, faults: Mapping[str, Sequence[str]]) -> str:
    lines = [f"{file} has combinations that are no valid experiments; nothing was run."]
    for fault, where in list(faults.items())[:_SHOWN]:
        more = f" and {len(where) - 1} more" if len(where) > 1 else ""
        lines += [f"{where[0]}{more}:", fault]
    return "\n".join(lines)


def _check_names(points: Iterable[Point]) -> None:
    """Refuse runs that reports could not tell apart."""
    seen: dict[str, Point] = {}
    for point in points:
        e = point.experiment
        other = seen.setdefault(json.dumps([e.name, e.data.name, e.seed]), point)
        if other is not point:
            raise ConfigError(
                f"Two runs would be called {e.name!r} with seed {e.seed}: {other.told}, and {point.told}. "
                f'Let `name` hold every axis that varies, as in "{{method}}-{{lr}}".'
            )
