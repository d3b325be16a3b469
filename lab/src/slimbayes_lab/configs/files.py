"""Reading configs: YAML files that extend one another, `--set` overrides, and errors that name path and nearest word.

    load("rank1.yaml", ["train.optimizer.lr=0.1", "seed=3"])

A file may say `extends: base.yaml` (or a list of files, relative to itself): its values are laid over theirs,
mapping by mapping; a mapping with another `kind` replaces the former one. It may hold `small:`, values that
`--scale small` lays over all, and `paper:`, which only tables read. A file may hold several experiments as rows, which
`table.yaml#row` names:

name: "digits-{row}"                            {row} stands for the row's name, {posterior} for its label on that axis
train: {epochs: 30}                             values of all rows
axes:                                           each label with each: the rows are mnist-1-tied, mnist-2-tied, ...
  data: {mnist: {extends: networks.yaml#mnist}}
  posterior: {1-tied: {method: {rank: 1}}, 2-tied: {method: {rank: 2}}}
rows:                                           what is a single row's; without axes, all rows there are
  mnist-2-tied: {train: {epochs: 40}}
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from slimbayes.errors import brief, cut, did_you_mean
from slimbayes.untrusted import DEPTH, read_file
from slimbayes_lab.configs.choices import describe_faults
from slimbayes_lab.configs.experiment import FORMAT, Experiment
from slimbayes_lab.configs.own import fill_in
from slimbayes_lab.configs.yaml_text import SIZE, YamlError, parse

Tree = dict[str, Any]
Scale = Literal[
    "full", "small"
]  # small: with what a file has under `small` laid over it
_SIDE = ("small", "paper")  # keys beside the experiment's own
_SEVERAL = ("rows", "axes")  # keys of files that hold several experiments
_ROWS = 10_000  # of one file; the longest table of a paper has forty
_PARTS = 200  # laid over one another for one row
_FILES = 100  # that one config may extend, and how far: ours have four, two deep
_FAR = 20


class ConfigError(ValueError):
    """A config that cannot be read or is not valid; the message lists every fault with its path."""


def load(
    file: Path | str, overrides: Sequence[str] = (), scale: Scale = "full"
) -> Experiment:
    """The experiment of a YAML file.

    Args:
        overrides: "path=value" each, the value in YAML: "train.optimizer.lr=0.1", "evaluate.draws=[1, 4]".
        scale: "full", or "small" to lay the file's `small` values over the others.
    """
    tree = read_tree(Path(file))
    if names := row_names(tree):
        raise ConfigError(
            f"{file} holds {len(names)} experiments: name one of them, as in {file}#{cut(names[0])}."
        )
    if scale == "small":
        tree = merged(tree, tree.get("small", {}))
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
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # links in a circle, names with NUL
        raise ConfigError(
            f"{brief(str(file))} is no file: {cut(str(error))}"
        ) from error
    if file in above:
        raise ConfigError(
            f"{file} extends itself, by way of {', '.join(p.name for p in above)}."
        )
    if file not in known:
        if len(known) >= _FILES or len(above) >= _FAR:
            raise ConfigError(
                f"{above[0]} extends more than {_FILES} files, or {_FAR} one after another."
            )
        known[file] = {}  # counts, also while it is being read
        known[file] = _with_below(file, above, known)
    return known[file]


def _with_below(file: Path, above: tuple[Path, ...], known: dict[Path, Tree]) -> Tree:
    """From the bottom up: what the row's parts extend, the file itself on what it extends, the row's parts."""
    whole, _, row = (
        str(file).rpartition("#") if "#" in file.name[1:] else (str(file), "", "")
    )
    tree = _read(Path(whole), (*above, file), known) if row else _parsed(file)
    try:
        parts = _row_parts(tree, row) if row else []
    except ConfigError as error:
        raise ConfigError(f"{whole}: {error}") from error
    out: Tree = {}
    for below in (
        below
        for part in parts or [tree]
        for below in part.get("extends", [])
        if below[0] != "#"
    ):
        out = merged(out, _read(Path(below), (*above, file), known))
    for part in [tree, *parts]:
        out = merged(
            out,
            {
                k: v
                for k, v in part.items()
                if k != "extends" and not (row and k in _SEVERAL)
            },
        )
    return out


def _parsed(file: Path) -> Tree:
    """What a file holds, the files that its parts extend as whole paths."""
    try:
        return _tree(file, read_file(file, SIZE).decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(
            f"{cut(str(file))} cannot be read: {error.strerror}."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is not valid YAML: byte {error.start:,} is no UTF-8."
        ) from None
    except YamlError as error:
        raise ConfigError(f"{file} is not valid YAML: {error}.") from error
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


@lru_cache(maxsize=256)
def _tree(file: Path, text: str) -> Tree:
    """What a file with this text holds; rows of a table extend the same files many times over. Nobody changes it."""
    tree = parse(text)
    if not isinstance(tree, dict):
        raise ConfigError(
            f"it must hold a mapping of fields, got {type(tree).__name__}."
        )
    for key in (*_SIDE, *_SEVERAL):
        if not isinstance(tree.get(key, {}), dict):
            raise ConfigError(
                f"{key} must be a mapping of fields, got {brief(tree[key])}."
            )
    for part in _parts_of(tree):
        _resolve_below(part, file.parent, whole=part is tree)
    return tree


def _resolve_below(part: Tree, folder: Path, whole: bool) -> None:
    """Make what a part of a file extends a list of whole paths and of "#row"s."""
    given = part.pop("extends", [])
    below = [given] if isinstance(given, str) else given
    if not isinstance(below, list) or not all(
        isinstance(name, str) and name for name in below
    ):
        raise ConfigError(
            f"extends must be a file, or a list of files, got {brief(given)}."
        )
    if whole and any(name[0] == "#" for name in below):
        raise ConfigError(f"it cannot extend a row of its own, got {brief(given)}.")
    if below:
        part["extends"] = [
            name if name[0] == "#" else str(folder / name) for name in below
        ]


# --- rows of a file ---


def row_names(tree: Tree) -> list[str]:
    """Names of a file's rows, in order: labels of the axes joined by hyphens, or the keys of `rows`."""
    rows = list(tree.get("rows", {}))
    names = list(_grid(tree)) or rows
    if odd := [name for name in rows if name not in names]:
        raise ConfigError(
            f"rows.{cut(odd[0])} is no combination of the axes{did_you_mean(odd[0], names)}"
        )
    return names


def _parts_of(tree: Tree) -> list[Tree]:
    """All trees of a file that may extend others: the file's own, its rows and the values on its axes."""
    several = [*tree.get("axes", {}).values(), tree.get("rows", {})]
    if not all(
        isinstance(one, dict) and all(isinstance(label, str) for label in one)
        for one in several
    ):
        raise ConfigError(
            "rows and axes must be mappings from labels, which are text, to fields."
        )
    parts = [tree, *(part for one in several for part in one.values())]
    if odd := [part for part in parts if not isinstance(part, dict)]:
        raise ConfigError(
            f"each row and each value on an axis must be a mapping of fields, got {brief(odd[0])}."
        )
    for paper in (part.get("paper", {}) for part in parts):
        if not isinstance(paper, dict) or not isinstance(paper.get("row", ""), str):
            raise ConfigError(
                f"paper must be a mapping of fields, and its row text, got {brief(paper)}."
            )
    return parts


def _row_parts(tree: Tree, name: str) -> list[Tree]:
    """What is laid over a file's own values for a row: its values on the axes, then those of its own.

    A part that extends "#other", another row of the file, comes after the parts of that one. Printed labels
    (`paper.row`) of several axes are joined by commas.
    """
    names = row_names(tree)
    if name not in names:
        raise ConfigError(f"There is no row {brief(name)}{did_you_mean(name, names)}")
    labels = _grid(tree).get(name, {})
    along = [tree["axes"][axis][label] for axis, label in labels.items()]
    printed = [part["paper"]["row"] for part in along if "row" in part.get("paper", {})]
    joined = [{"paper": {"row": ", ".join(printed)}}] if printed else []
    parts = _with_rows(
        [*along, *joined, tree.get("rows", {}).get(name, {})], tree, (name,)
    )
    words = {"row": name, **labels}
    given = [str(part["name"]) for part in [tree, *parts] if "name" in part]
    return [
        *parts,
        *(
            {"name": re.sub(r"\{(\w+)\}", lambda w: words.get(w[1], w[0]), text)}
            for text in given[-1:]
        ),
    ]


def _grid(tree: Tree) -> dict[str, dict[str, str]]:
    """For each name of a row its label on each axis; nothing where there are no axes."""
    axes = tree.get("axes", {})
    if (count := math.prod(map(len, axes.values()))) > _ROWS:
        raise ConfigError(
            f"the axes have {brief(count)} combinations, more than {_ROWS:,}."
        )
    chosen = (
        [
            dict(zip(axes, labels, strict=True))
            for labels in itertools.product(*axes.values())
        ]
        if axes
        else []
    )
    return {"-".join(labels.values()): labels for labels in chosen}


def _with_rows(parts: Sequence[Tree], tree: Tree, seen: tuple[str, ...]) -> list[Tree]:
    """Parts of a row, before each those of the rows that it extends; `seen` are the rows that led here."""
    out: list[Tree] = []
    for part in parts:
        for other in (
            name[1:] for name in part.get("extends", []) if name.startswith("#")
        ):
            if other in seen or other not in tree.get("rows", {}):
                raise ConfigError(
                    f"rows.{cut(seen[-1])} extends #{cut(other)}, which is no row of the file, or extends it in turn."
                )
            out += _with_rows([tree["rows"][other]], tree, (*seen, other))
        out.append(part)
        if len(out) > _PARTS:
            raise ConfigError(
                f"rows.{cut(seen[0])} extends more than {_PARTS} others, counted as often as named."
            )
    return out


# --- values laid over one another ---


def merged(below: Tree, above: Mapping[str, Any]) -> Tree:
    """Values of `above` laid over `below`, mapping by mapping; another `kind` replaces the whole mapping.

    Example:
        >>> merged({"a": {"x": 1, "y": 2}, "m": {"kind": "A", "p": 1}}, {"a": {"y": 3}, "m": {"kind": "B"}})
        {'a': {'x': 1, 'y': 3}, 'm': {'kind': 'B'}}
    """
    out = dict(below)
    for key, value in above.items():
        old = out.get(key)
        if (
            isinstance(old, dict)
            and isinstance(value, Mapping)
            and value.get("kind", old.get("kind")) == old.get("kind")
        ):
            value = merged(old, value)
        out[key] = value
    return out


def parse_override(text: str) -> Tree:
    """The tree of one "path=value"."""
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise ConfigError(
            f"--set needs path=value, such as train.epochs=5, got {brief(text)}."
        )
    try:
        tree = parse(value)
    except YamlError as error:
        raise ConfigError(
            f"--set {cut(path)}: {brief(value)} is not a YAML value: {error}."
        ) from error
    if path.count(".") >= DEPTH:
        raise ConfigError(f"--set {cut(path)}: no field is that deep.")
    return _nested(path.strip(), tree)


def _nested(path: str, value: Any) -> Tree:
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


# --- from a tree to an experiment ---


def validate(tree: Mapping[str, Any], source: str = "the config") -> Experiment:
    """An experiment from a tree of plain values; raises ConfigError with every fault."""
    version = tree.get("format", FORMAT)
    if isinstance(version, int) and version > FORMAT:
        raise ConfigError(
            f"{source} has format {brief(version)}, made for a newer slimbayes; this one reads format {FORMAT}."
        )
    try:
        # As JSON, where strict types still take lists for tuples: a number is no truth value, and no text.
        written = json.dumps(
            _whole(fill_in({k: v for k, v in tree.items() if k not in _SIDE}))
        )
        return Experiment.model_validate_json(written, strict=True)
    except ValidationError as error:
        raise ConfigError(
            f"{source} is not a valid experiment:\n{describe_faults(error, Experiment)}"
        ) from None


def with_values(tree: Tree, values: Mapping[str, Any]) -> Experiment:
    """The experiment of a tree with values laid over it at some paths, such as "train.optimizer.lr"."""
    for path, value in values.items():
        tree = merged(tree, _nested(path, value))
    return validate(
        tree, ", ".join(f"{path}={value}" for path, value in values.items())
    )


def _whole(value: Any) -> Any:
    """2.0 as 2, which strict types take for a count and for a number alike."""
    if isinstance(value, dict):
        return {key: _whole(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_whole(inner) for inner in value]
    return (
        int(value)
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53
        else value
    )
