"""Config trees: laying one over another, and files that hold several experiments as rows, which `table.yaml#row` names.

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
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from slimbayes.errors import brief, cut, did_you_mean

Tree = dict[str, Any]
SEVERAL = ("rows", "axes")  # keys of files that hold several experiments
_ROWS = 10_000  # of one file; the longest table of a paper has forty
_PARTS = 200  # laid over one another for one row


class ConfigError(ValueError):
    """A config that cannot be read or is not valid; the message lists every fault with its path."""


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


def row_names(tree: Tree) -> list[str]:
    """Names of a file's rows, in order: labels of the axes joined by hyphens, or the keys of `rows`.

    Example:
        >>> row_names({"axes": {"data": {"mnist": {}, "imdb": {}}, "rank": {"1": {}, "2": {}}}})
        ['mnist-1', 'mnist-2', 'imdb-1', 'imdb-2']
    """
    rows = list(tree.get("rows", {}))
    names = list(_grid(tree)) or rows
    if odd := [name for name in rows if name not in names]:
        raise ConfigError(f"rows.{cut(odd[0])} is no combination of the axes{did_you_mean(odd[0], names)}")
    return names


def parts_of(tree: Tree) -> list[Tree]:
    """All trees of a file that may extend others: the file's own, its rows and the values on its axes."""
    several = [*tree.get("axes", {}).values(), tree.get("rows", {})]
    if not all(isinstance(one, dict) and all(isinstance(label, str) for label in one) for one in several):
        raise ConfigError("rows and axes must be mappings from labels, which are text, to fields.")
    parts = [tree, *(part for one in several for part in one.values())]
    if odd := [part for part in parts if not isinstance(part, dict)]:
        raise ConfigError(f"each row and each value on an axis must be a mapping of fields, got {brief(odd[0])}.")
    for paper in (part.get("paper", {}) for part in parts):
        if not isinstance(paper, dict) or not isinstance(paper.get("row", ""), str):
            raise ConfigError(f"paper must be a mapping of fields, and its row text, got {brief(paper)}.")
    return parts


def row_parts(tree: Tree, name: str) -> list[Tree]:
    """What is laid over a file's own values for a row: its values on the axes, then those of its own.

    A part that extends "#other", another row of the file, comes after the parts of that one. Printed labels
    (`paper.row`) of several axes are joined by commas.

    Example:
        >>> row_parts({"rows": {"a": {"seed": 1}, "b": {"extends": ["#a"], "name": "{row}"}}}, "b")
        [{'seed': 1}, {'extends': ['#a'], 'name': '{row}'}, {'name': 'b'}]
    """
    names = row_names(tree)
    if name not in names:
        raise ConfigError(f"There is no row {brief(name)}{did_you_mean(name, names)}")
    labels = _grid(tree).get(name, {})
    along = [tree["axes"][axis][label] for axis, label in labels.items()]
    printed = [part["paper"]["row"] for part in along if "row" in part.get("paper", {})]
    joined = [{"paper": {"row": ", ".join(printed)}}] if printed else []
    parts = _with_rows([*along, *joined, tree.get("rows", {}).get(name, {})], tree, (name,))
    words = {"row": name, **labels}
    given = [str(part["name"]) for part in [tree, *parts] if "name" in part]
    return [*parts, *({"name": re.sub(r"\{(\w+)\}", lambda w: words.get(w[1], w[0]), text)} for text in given[-1:])]


def _grid(tree: Tree) -> dict[str, dict[str, str]]:
    """For each name of a row its label on each axis; nothing where there are no axes."""
    axes = tree.get("axes", {})
    if (count := math.prod(map(len, axes.values()))) > _ROWS:
        raise ConfigError(f"the axes have {brief(count)} combinations, more than {_ROWS:,}.")
    chosen = [dict(zip(axes, labels, strict=True)) for labels in itertools.product(*axes.values())] if axes else []
    return {"-".join(labels.values()): labels for labels in chosen}


def _with_rows(parts: Sequence[Tree], tree: Tree, seen: tuple[str, ...]) -> list[Tree]:
    out: list[Tree] = []
    for part in parts:
        for other in (name[1:] for name in part.get("extends", []) if name.startswith("#")):
            if other in seen or other not in tree.get("rows", {}):
                raise ConfigError(
                    f"rows.{cut(seen[-1])} extends #{cut(other)}, which is no row of the file, or extends it in turn."
                )
            out += _with_rows([tree["rows"][other]], tree, (*seen, other))
        out.append(part)
        if len(out) > _PARTS:
            raise ConfigError(f"rows.{cut(seen[0])} extends more than {_PARTS} others, counted as often as named.")
    return out
