"""Reading configs: YAML files that extend one another, `--set` overrides, and errors that name the path and the nearest valid word.

    load("rank1.yaml", ["train.lr=0.1", "seed=3"])

A file may say `extends: base.yaml` (or a list of files, relative to itself): its values are laid over theirs, mapping by mapping; a mapping
with another `kind` replaces the former one. It may hold `small:`, values that `--scale small` lays over all, and `paper:`, which only tables read.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

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
        both = isinstance(old, dict) and isinstance(value, Mapping)
        same = both and value.get("kind", old.get("kind")) == old.get("kind")  # type: ignore[union-attr]
        out[key] = merged(old, value) if same and isinstance(old, dict) else value
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
        faults = "\n".join(f"  {_told(fault)}" for fault in error.errors(include_url=False))
        raise ConfigError(f"{source} is not a valid experiment:\n{faults}") from error


def _told(fault: ErrorDetails) -> str:
    """One fault: its path, what is wrong, and the nearest valid word."""
    place = [str(part) for part in fault["loc"]]
    unknown = (
        len(place) - 1 if fault["type"] == "extra_forbidden" else None
    )  # the config's own word, however it is spelled
    path = (
        ".".join(
            part for i, part in enumerate(place) if i == unknown or place[i - 1 : i] == ["layers"] or not _is_tag(part)
        )
        or "(top)"
    )
    if fault["type"] == "extra_forbidden":
        return f"{path}: no such field{_nearest(place[-1], _fields_at(place[:-1]))}"
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


def _nearest(word: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(word.lower(), [n.lower() for n in names], n=1, cutoff=0.5)
    hint = next((f"; did you mean {n!r}?" for n in names if near and n.lower() == near[0]), ".")
    return f"{hint} Known: {', '.join(names)}." if names else "."


def _is_tag(part: str) -> bool:
    """Whether a part of pydantic's path is the tag of a union, which no config spells out."""
    return (
        part[:1].isupper() or part.startswith(("function-", "tagged-union", "constrained-")) or part in _network_names()
    )


def _network_names() -> set[str]:
    from slimbayes.lab.config import NETWORKS

    return {f.__name__ for f in NETWORKS} | {"pad_crop_flip", "resized_crop"}


def _fields_at(place: list[str]) -> list[str]:
    """Names of the fields of the model at a path of pydantic's: walks its JSON Schema."""
    schema = Experiment.model_json_schema()
    definitions = schema["$defs"]
    node: Any = schema
    for part in place:
        node = _step(node, part, definitions)
    node = _resolved(node, definitions)
    arms = [node, *(_resolved(arm, definitions) for arm in node.get("anyOf", ()))]  # a mapping, or null
    return [name for arm in arms for name in arm.get("properties", {}) if name != "format"]


def _resolved(node: Any, definitions: Tree) -> Any:
    while isinstance(node, dict) and "$ref" in node:
        node = definitions[node["$ref"].rsplit("/", 1)[1]]
    return node or {}


def _step(node: Any, part: str, definitions: Tree) -> Any:
    node = _resolved(node, definitions)
    if part in node.get("properties", {}):
        return node["properties"][part]
    for arm in [*node.get("oneOf", ()), *node.get("anyOf", ())]:
        found = _resolved(arm, definitions)
        if found.get("title") == part or part in (found.get("properties", {}).get("kind", {}).get("const"),):
            return found
        inner = _step(found, part, definitions) if "oneOf" in found or "properties" in found else {}
        if inner:
            return inner
    return node.get("additionalProperties", {}) if isinstance(node.get("additionalProperties"), dict) else {}
