"""Reading configs: YAML files that extend one another, `--set` overrides, and errors that name path and nearest word.

    load("rank1.yaml", ["train.optimizer.lr=0.1", "seed=3"])

A file may say `extends: base.yaml` (or a list of files, relative to itself): its values are laid over theirs,
mapping by mapping; a mapping with another `kind` replaces the former one. It may hold `small:`, values that
`--scale small` lays over all, and `paper:`, which only tables read. Of a file with several experiments
(config_rows.py) `file.yaml#row` is one.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from slimbayes.lab.choices import models_in
from slimbayes.lab.config import FORMAT, Experiment
from slimbayes.lab.config_rows import SEVERAL, Tree, parts_of, row_names, row_parts
from slimbayes.lab.config_rows import ConfigError as ConfigError
from slimbayes.lab.config_rows import merged as merged

_SAFE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # tables are long: the one in C takes a tenth of the time
_SIDE = ("small", "paper")  # keys beside the experiment's own


def load(file: Path | str, overrides: Sequence[str] = (), scale: str = "full") -> Experiment:
    """The experiment of a YAML file.

    Args:
        overrides: "path=value" each, the value in YAML: "train.optimizer.lr=0.1", "evaluate.draws=[1, 4]".
        scale: "full", or "small" to lay the file's `small` values over the others.
    """
    tree = read_tree(Path(file))
    if names := row_names(tree):
        raise ConfigError(f"{file} holds {len(names)} experiments: name one of them, as in {file}#{names[0]}.")
    small = tree.pop("small", {})
    tree.pop("paper", None)
    if scale == "small":
        tree = merged(tree, small)
    for override in overrides:
        tree = merged(tree, parse_override(override))
    return validate(tree, str(file))


def read_tree(file: Path, seen: tuple[Path, ...] = ()) -> Tree:
    """A YAML file, or with "#row" at the end of its name a row of it, with what it extends laid under it."""
    file = file.resolve()
    if file in seen:
        raise ConfigError(f"{file} extends itself, by way of {', '.join(p.name for p in seen)}.")
    whole, _, row = str(file).rpartition("#") if "#" in file.name[1:] else (str(file), "", "")
    tree = read_tree(Path(whole), seen) if row else _parsed(file)
    try:
        parts = row_parts(tree, row) if row else []
    except ConfigError as error:
        raise ConfigError(f"{whole}: {error}") from error
    out: Tree = {}
    for below in (below for part in parts or [tree] for below in part.get("extends", []) if below[0] != "#"):
        out = merged(out, read_tree(Path(below), (*seen, file)))
    for part in [tree, *parts]:
        out = merged(out, {k: v for k, v in part.items() if k != "extends" and not (row and k in SEVERAL)})
    return out


@lru_cache(maxsize=256)
def _loaded(text: str) -> Any:
    """What a YAML text holds; rows of a table extend the same files many times over."""
    return yaml.load(text, _SAFE_LOADER)


def _parsed(file: Path) -> Tree:
    """What a file holds, the files that its parts extend as whole paths."""
    try:
        tree = copy.deepcopy(_loaded(file.read_text(encoding="utf8")))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} must hold a mapping of fields, got {type(tree).__name__}.")
    for key in (*_SIDE, *SEVERAL):
        if not isinstance(tree.get(key, {}), dict):
            raise ConfigError(f"{file}: {key} must be a mapping of fields, got {tree[key]!r}.")
    try:
        parts = parts_of(tree)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    for part in parts:
        given = part.pop("extends", [])
        below = [given] if isinstance(given, str) else given
        if not isinstance(below, list) or not all(isinstance(name, str) and name for name in below):
            raise ConfigError(f"{file}: extends must be a file, or a list of files, got {given!r}.")
        if part is tree and any(name[0] == "#" for name in below):
            raise ConfigError(f"{file} cannot extend a row of its own, got {given!r}.")
        if below:
            part["extends"] = [name if name[0] == "#" else str(file.parent / name) for name in below]
    return tree


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
