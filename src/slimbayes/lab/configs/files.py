"""Reading configs: YAML files that extend one another, `--set` overrides, and errors that name path and nearest word.

    load("rank1.yaml", ["train.optimizer.lr=0.1", "seed=3"])

A file may say `extends: base.yaml` (or a list of files, relative to itself): its values are laid over theirs,
mapping by mapping; a mapping with another `kind` replaces the former one. It may hold `small:`, values that
`--scale small` lays over all, and `paper:`, which only tables read. Of a file with several experiments
(trees.py) `file.yaml#row` is one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from slimbayes.errors import brief, cut, did_you_mean
from slimbayes.lab.configs.choices import models_in
from slimbayes.lab.configs.experiment import FORMAT, Experiment
from slimbayes.lab.configs.own import fill_in
from slimbayes.lab.configs.trees import SEVERAL, SIZE, Tree, YamlError, parse, parts_of, row_names, row_parts
from slimbayes.lab.configs.trees import ConfigError as ConfigError
from slimbayes.lab.configs.trees import merged as merged
from slimbayes.untrusted import DEPTH, read_file

_SIDE = ("small", "paper")  # keys beside the experiment's own
_FILES = 100  # that one config may extend, and how far: ours have four, two deep
_FAR = 20
_SHOWN = 20  # faults in one message


def load(file: Path | str, overrides: Sequence[str] = (), scale: str = "full") -> Experiment:
    """The experiment of a YAML file.

    Args:
        overrides: "path=value" each, the value in YAML: "train.optimizer.lr=0.1", "evaluate.draws=[1, 4]".
        scale: "full", or "small" to lay the file's `small` values over the others.
    """
    tree = read_tree(Path(file))
    if names := row_names(tree):
        raise ConfigError(f"{file} holds {len(names)} experiments: name one of them, as in {file}#{cut(names[0])}.")
    small = tree.pop("small", {})
    tree.pop("paper", None)
    if scale == "small":
        tree = merged(tree, small)
    for override in overrides:
        tree = merged(tree, parse_override(override))
    return validate(tree, str(file))


def read_tree(file: Path) -> Tree:
    """A YAML file, or with "#row" at the end of its name a row of it, with what it extends laid under it."""
    return _read(file, (), {})


def _read(file: Path, above: tuple[Path, ...], known: dict[Path, Tree]) -> Tree:
    """`read_tree` of a file that those `above` extend; `known` keeps each file, so that it is read once."""
    try:
        file = file.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, names with NUL
        raise ConfigError(f"{brief(str(file))} is no file: {cut(str(error))}") from error
    if file in above:
        raise ConfigError(f"{file} extends itself, by way of {', '.join(p.name for p in above)}.")
    if file not in known:
        if len(known) >= _FILES or len(above) >= _FAR:
            raise ConfigError(f"{above[0]} extends more than {_FILES} files, or {_FAR} one after another.")
        known[file] = {}  # counts, also while it is being read
        known[file] = _with_below(file, above, known)
    return known[file]


def _with_below(file: Path, above: tuple[Path, ...], known: dict[Path, Tree]) -> Tree:
    whole, _, row = str(file).rpartition("#") if "#" in file.name[1:] else (str(file), "", "")
    tree = _read(Path(whole), (*above, file), known) if row else _parsed(file)
    try:
        parts = row_parts(tree, row) if row else []
    except ConfigError as error:
        raise ConfigError(f"{whole}: {error}") from error
    out: Tree = {}
    for below in (below for part in parts or [tree] for below in part.get("extends", []) if below[0] != "#"):
        out = merged(out, _read(Path(below), (*above, file), known))
    for part in [tree, *parts]:
        out = merged(out, {k: v for k, v in part.items() if k != "extends" and not (row and k in SEVERAL)})
    return out


def _parsed(file: Path) -> Tree:
    """What a file holds, the files that its parts extend as whole paths."""
    try:
        return _tree(file, read_file(file, SIZE).decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{cut(str(file))} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not valid YAML: byte {error.start:,} is no UTF-8.") from None
    except YamlError as error:
        raise ConfigError(f"{file} is not valid YAML: {error}.") from error
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


@lru_cache(maxsize=256)
def _tree(file: Path, text: str) -> Tree:
    """What a file with this text holds; rows of a table extend the same files many times over. Nobody changes it."""
    tree = parse(text)
    if not isinstance(tree, dict):
        raise ConfigError(f"it must hold a mapping of fields, got {type(tree).__name__}.")
    for key in (*_SIDE, *SEVERAL):
        if not isinstance(tree.get(key, {}), dict):
            raise ConfigError(f"{key} must be a mapping of fields, got {brief(tree[key])}.")
    for part in parts_of(tree):
        _resolve_below(part, file.parent, whole=part is tree)
    return tree


def _resolve_below(part: Tree, folder: Path, whole: bool) -> None:
    """Make what a part of a file extends a list of whole paths and of "#row"s."""
    given = part.pop("extends", [])
    below = [given] if isinstance(given, str) else given
    if not isinstance(below, list) or not all(isinstance(name, str) and name for name in below):
        raise ConfigError(f"extends must be a file, or a list of files, got {brief(given)}.")
    if whole and any(name[0] == "#" for name in below):
        raise ConfigError(f"it cannot extend a row of its own, got {brief(given)}.")
    if below:
        part["extends"] = [name if name[0] == "#" else str(folder / name) for name in below]


def parse_override(text: str) -> Tree:
    """The tree of one "path=value"."""
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"--set needs path=value, such as train.epochs=5, got {brief(text)}.")
    try:
        tree = parse(value)
    except YamlError as error:
        raise ConfigError(f"--set {cut(path)}: {brief(value)} is not a YAML value: {error}.") from error
    if path.count(".") >= DEPTH:
        raise ConfigError(f"--set {cut(path)}: no field is that deep.")
    return _nested(path.strip(), tree)


def _nested(path: str, value: Any) -> Tree:
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def _with_former_rules(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tree with the rules of its time: one that a run has written, which says everything, but not how members' losses
    join, is from when they were averaged.
    """
    train = tree.get("train")
    if not isinstance(train, Mapping) or "ensemble_loss" in train or not {"clip", "ema", "early_stop"} <= train.keys():
        return tree
    return {**tree, "train": {**train, "ensemble_loss": "mean"}}


def validate(tree: Mapping[str, Any], source: str = "the config") -> Experiment:
    """An experiment from a tree of plain values; raises ConfigError with every fault."""
    version = tree.get("format", FORMAT)
    if isinstance(version, int) and version > FORMAT:
        raise ConfigError(
            f"{source} has format {brief(version)}, made for a newer slimbayes; this one reads format {FORMAT}."
        )
    try:
        # As JSON, where strict types still take lists for tuples: a number is no truth value, and no text.
        written = json.dumps(_whole(fill_in(_with_former_rules({k: v for k, v in tree.items() if k not in _SIDE}))))
        return Experiment.model_validate_json(written, strict=True)
    except ValidationError as error:
        faults = list_faults([_describe(fault) for fault in error.errors(include_url=False)])
        raise ConfigError(f"{source} is not a valid experiment:\n{faults}") from None


def with_values(tree: Tree, values: Mapping[str, Any]) -> Experiment:
    """The experiment of a tree with values laid over it at some paths, such as "train.optimizer.lr"."""
    for path, value in values.items():
        tree = merged(tree, _nested(path, value))
    return validate(tree, ", ".join(f"{path}={value}" for path, value in values.items()))


def _whole(value: Any) -> Any:
    """2.0 as 2, which strict types take for a count and for a number alike."""
    if isinstance(value, dict):
        return {key: _whole(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_whole(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def list_faults(faults: list[str]) -> str:
    """Faults as lines, each and all of them in bounds."""
    lines = [f"  {cut(fault, most=1000)}" for fault in dict.fromkeys(faults)]
    return "\n".join(lines[:_SHOWN] + ([f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []))


def _describe(fault: ErrorDetails) -> str:
    """One fault: its path, what is wrong, and the nearest valid word."""
    place = tuple(cut(part, most=60) if isinstance(part, str) else part for part in fault["loc"])
    path, fields = _locate(place, unknown=fault["type"] == "extra_forbidden")
    if fault["type"] == "extra_forbidden":
        return f"{path}: no such field{did_you_mean(str(fault['loc'][-1]), fields)}"
    if fault["type"] == "union_tag_invalid":
        context = fault["ctx"]
        known = [tag.strip().strip("'") for tag in context["expected_tags"].split(",")]
        return f"{path}.kind: unknown {brief(context['tag'])}{did_you_mean(str(context['tag']), known)}"
    if fault["type"] == "union_tag_not_found":
        return f"{path}: needs a `kind` that says which"
    if fault["type"] == "missing":
        return f"{path}: is missing"
    got = fault["input"]
    shown = "" if isinstance(got, dict | BaseModel) else f", got {brief(got)}"
    return f"{path}: {fault['msg'].removeprefix('Value error, ')}{shown}"


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
