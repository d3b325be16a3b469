"""Reading configs: YAML files that extend one another, `--set` overrides, errors that name path and nearest valid word.

    load("rank1.yaml", ["train.optimizer.lr=0.1", "seed=3"])

A file may say `extends: base.yaml` (or a list of files, relative to itself): its values are laid over theirs, mapping
by mapping; a mapping with another `kind` replaces the former one. It may hold `small:`, values that `--scale small`
lays over all, and `paper:`, which only tables read.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from slimbayes.lab.choices import models_in
from slimbayes.lab.config import FORMAT, Experiment

Tree = dict[str, Any]
_SIDE = ("small", "paper")  # keys beside the experiment's own


class ConfigError(ValueError):
    """A config that cannot be read or is not valid; the message lists every fault with its path."""


def load(file: Path | str, overrides: Sequence[str] = (), scale: str = "full") -> Experiment:
    """The experiment of a YAML file.

    Args:
        overrides: "path=value" each, the value in YAML: "train.optimizer.lr=0.1", "evaluate.draws=[1, 4]".
        scale: "full", or "small" to lay the file's `small` values over the others.
    """
    tree = read_tree(Path(file))
    small = tree.pop("small", {})
    tree.pop("paper", None)
    if scale == "small":
        tree = merged(tree, small)
    for override in overrides:
        tree = merged(tree, parse_override(override))
    return validate(tree, str(file))


def read_tree(file: Path, seen: tuple[Path, ...] = ()) -> Tree:
    """A YAML file with what it extends laid under it."""
    file = file.resolve()
    if file in seen:
        raise ConfigError(f"{file} extends itself, by way of {', '.join(p.name for p in seen)}.")
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} must hold a mapping of fields, got {type(tree).__name__}.")
    given = tree.pop("extends", [])
    below = [given] if isinstance(given, str) else given
    if not isinstance(below, list) or not all(isinstance(name, str) for name in below):
        raise ConfigError(f"{file}: extends must be a file, or a list of files, got {given!r}.")
    for key in _SIDE:
        if not isinstance(tree.get(key, {}), dict):
            raise ConfigError(f"{file}: {key} must be a mapping of fields, got {tree[key]!r}.")
    out: Tree = {}
    for name in below:
        out = merged(out, read_tree(file.parent / name, (*seen, file)))
    return merged(out, tree)


def merged(below: Tree, above: Mapping[str, Any]) -> Tree:
    """Values of `above` laid over `below`, mapping by mapping; another `kind` replaces the whole mapping.

    Example:
        >>> merged({"a": {"x": 1, "y": 2}, "m": {"kind": "A", "p": 1}}, {"a": {"y": 3}, "m": {"kind": "B"}})
        {'a': {'x': 1, 'y': 3}, 'm': {'kind': 'B'}}
    """
    out = dict(below)
    for key, value in above.items():
        old = out.get(key)
        if isinstance(old, dict) and isinstance(value, Mapping):
            kind = old.get("kind")
            out[key] = merged(old, value) if value.get("kind", kind) == kind else value
        else:
            out[key] = value
    return out


def parse_override(text: str) -> Tree:
    """The tree of one "path=value".

    Example:
        >>> parse_override("train.optimizer.lr=1e-3")
        {'train': {'optimizer': {'lr': 0.001}}}
    """
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"--set needs path=value, such as train.epochs=5, got {text!r}.")
    try:
        tree = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {path}: {value!r} is not a YAML value.") from error
    if isinstance(tree, str):  # YAML wants a dot in 1e-3, people do not
        with contextlib.suppress(ValueError):
            tree = float(tree)
    for key in reversed(path.strip().split(".")):
        tree = {key: tree}
    return tree


def validate(tree: Mapping[str, Any], source: str = "the config") -> Experiment:
    """An experiment from a tree of plain values; raises ConfigError with every fault."""
    version = tree.get("format", FORMAT)
    if isinstance(version, int) and version > FORMAT:
        raise ConfigError(f"{source} has format {version}, made for a newer slimbayes; this one reads format {FORMAT}.")
    try:
        return Experiment.model_validate({k: v for k, v in tree.items() if k not in _SIDE})
    except ValidationError as error:
        faults = "\n".join(f"  {_describe(fault)}" for fault in error.errors(include_url=False))
        raise ConfigError(f"{source} is not a valid experiment:\n{faults}") from error


def _describe(fault: ErrorDetails) -> str:
    """One fault: its path, what is wrong, and the nearest valid word."""
    path, fields = _locate(fault["loc"], unknown=fault["type"] == "extra_forbidden")
    if fault["type"] == "extra_forbidden":
        return f"{path}: no such field{_nearest(str(fault['loc'][-1]), fields)}"
    if fault["type"] == "union_tag_invalid":
        context = fault["ctx"]
        known = [tag.strip().strip("'") for tag in context["expected_tags"].split(",")]
        return f"{path}.kind: unknown {context['tag']!r}{_nearest(str(context['tag']), known)}"
    if fault["type"] == "union_tag_not_found":
        return f"{path}: needs a `kind` that says which"
    if fault["type"] == "missing":
        return f"{path}: is missing"
    got = fault["input"]
    shown = "" if isinstance(got, dict | BaseModel) else f", got {got!r}"
    return f"{path}: {fault['msg'].removeprefix('Value error, ')}{shown}"


def _nearest(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word.lower(), [n.lower() for n in known], n=1, cutoff=0.5)
    hint = next((f"; did you mean {n!r}?" for n in known if near and n.lower() == near[0]), ".")
    return f"{hint} Known: {', '.join(known)}." if known else "."


def _locate(place: tuple[int | str, ...], unknown: bool) -> tuple[str, list[str]]:
    """A fault's path as the config spells it, without pydantic's words for arms of unions, and the known fields."""
    models: list[type[BaseModel]] = [Experiment]
    path, mapping = [], False
    for part in place[:-1] if unknown else place:
        field = next((m.model_fields[str(part)] for m in models if part in m.model_fields), None)
        if mapping or isinstance(part, int):  # a key of a mapping, a place in a list
            path.append(str(part))
            mapping = False
        elif field is not None:
            path.append(str(part))
            mapping = get_origin(field.annotation) is dict
            models = [m for source in (field.annotation, *field.metadata) for m in models_in(source)]
        else:  # the arm that `kind` chose, or the name of a class
            models = [m for m in models if part == m.__name__ or part in get_args(_kind(m))] or models
    known = list(dict.fromkeys(name for m in models for name in m.model_fields if name != "format"))
    return ".".join([*path, str(place[-1])] if unknown else path) or "(top)", known


def _kind(model: type[BaseModel]) -> Any:
    return model.model_fields["kind"].annotation if "kind" in model.model_fields else None
