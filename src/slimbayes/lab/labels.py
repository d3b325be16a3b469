"""Values of an axis, or of a search, by the short labels that name runs; and putting a value at its place in a config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from slimbayes.lab.config_files import ConfigError, Tree


def at(path: str, value: Any) -> Tree:
    """A tree with one value at a path; "." is the whole of it.

    Example:
        >>> at("train.optimizer.lr", 0.1)
        {'train': {'optimizer': {'lr': 0.1}}}
    """
    if path == ".":
        if not isinstance(value, Mapping):
            raise ConfigError(f'The axis "." needs mappings of fields, got {value!r}.')
        return dict(value)
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def labelled(path: str, values: Sequence[Any] | Mapping[str, Any]) -> dict[str, Any]:
    """Values of an axis by short labels, equal values once.

    Example:
        >>> labelled("method", [{"kind": "Rank1", "members": 2}, {"kind": "Rank1", "members": 4}, {"kind": "MeanField"}])
        {'Rank1-members-2': {'kind': 'Rank1', 'members': 2}, 'Rank1-members-4': {'kind': 'Rank1', 'members': 4}, 'MeanField': {'kind': 'MeanField'}}
        >>> labelled("train.optimizer.lr", [0.1, "1e-1", 0.01])
        {'0.1': 0.1, '0.01': 0.01}
    """
    if not values:
        raise ConfigError(f"The axis {path} has no values.")
    if isinstance(values, Mapping):
        return {str(label): value for label, value in values.items()}
    kinds = Counter(value.get("kind") for value in values if isinstance(value, Mapping))
    out: dict[str, Any] = {}
    for number, value in enumerate(values):
        label = _label(value, kinds)
        out.setdefault(
            label if out.get(label, value) == value or not isinstance(value, Mapping) else f"{label}-{number}", value
        )
    return out


def _label(value: Any, kinds: Counter[Any]) -> str:
    if isinstance(value, Mapping):
        kind = value.get("kind")
        rest = [f"{key}-{_label(one, kinds)}" for key, one in value.items() if key != "kind"]
        return "-".join([str(kind), *rest] if kind and kinds[kind] > 1 else [str(kind)] if kind else rest)
    if isinstance(value, list):
        return "-".join(_label(one, kinds) for one in value)
    try:  # YAML takes 1e-3, without a dot, for text
        return str(value) if isinstance(value, bool | int) else repr(float(value))
    except (TypeError, ValueError):
        return str(value)
