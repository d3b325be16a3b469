"""Rows that a network trains and is judged on: how some of them are taken, and which are refused.

Sizes: N rows, P columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, Self, TypeVar

import torch
from torch import Tensor

from slimbayes.errors import brief
from slimbayes.seeds import generator
from slimbayes_lab.configs.experiment import Data
from slimbayes_lab.data import Dataset, Split
from slimbayes_lab.data.folders import ImageFolder

Rows = Split | ImageFolder
_AT_ONCE = 1 << 20  # numbers that are looked at together


class _Rows(Protocol):
    """Either of `Rows`, where it must come out as what went in."""

    def __len__(self) -> int: ...

    def pick(self, index: Tensor) -> Self: ...


R = TypeVar("R", bound=_Rows)


def limited(rows: R, limit: int | None, seed: int = 0) -> R:
    """At most `limit` rows, drawn without replacement but kept in order."""
    if limit is None or limit >= len(rows):
        return rows
    return rows.pick(
        torch.randperm(len(rows), generator=generator(seed, "limit"))[:limit]
        .sort()
        .values
    )


def hold_out(
    rows: R, what: Literal["test", "validation"], share: float, chosen: Data
) -> tuple[R, R]:
    """Rows to train on and a share that is held out, drawn or the last ones, both in their order."""
    held = round(len(rows) * share)
    if held in (0, len(rows)):
        fault = "leaves nothing to train on" if held else "holds none out"
        raise ValueError(f"data.{what}={share} of {len(rows)} rows {fault}.")
    order = torch.randperm(len(rows), generator=generator(chosen.seed, what))
    if chosen.held_out == "last":
        order = torch.arange(len(rows) - 1, -1, -1)
    return rows.pick(order[held:].sort().values), rows.pick(order[:held].sort().values)


# --- rows that cannot be trained or judged on ---


def check_data(
    data: Dataset, splits: Sequence[str], allow_nonfinite: bool = False
) -> None:
    """Refuse rows that are empty, not finite, of different widths, or whose labels are out of range or all alike.

    The error names the data set, the split, and the row and column where there is one, counted from zero.

    Args:
        splits: the names of those that are used; the first is trained on.
        allow_nonfinite: let inputs be NaN or infinite; targets never may.
    """
    shapes = {}
    for name in splits:
        rows, place = data.splits[name], f"{data.name}, {name}"
        if not len(rows):
            raise ValueError(f"{data.name}: the {name} split has no rows.")
        if isinstance(rows, ImageFolder):
            continue
        check_split(
            rows, place, data.columns, len(data.classes) or None, allow_nonfinite
        )
        shapes[name] = tuple(rows.x.shape[1:])
    if len(set(shapes.values())) > 1:
        told = " and ".join(
            f"{name} rows of shape {shape}" for name, shape in shapes.items()
        )
        raise ValueError(f"{data.name} has {told}: they must be alike.")
    first = data.splits[splits[0]]
    if (
        isinstance(first, Split)
        and _is_label(first.y)
        and int(first.y.min()) == int(first.y.max())
    ):
        raise ValueError(
            f"{data.name}, {splits[0]}: all {len(first):,} labels are {int(first.y[0])}, and there is nothing to learn "
            f"from one class."
        )


def check_split(
    rows: Split,
    place: str,
    columns: Sequence[str] = (),
    classes: int | None = None,
    allow_nonfinite: bool = False,
) -> None:
    """Refuse one split whose inputs or targets are no finite numbers, or whose labels are not below `classes`."""
    for what, values in (("inputs", rows.x), ("targets", rows.y)):
        if not isinstance(values, Tensor) or values.is_complex():
            got = values.dtype if isinstance(values, Tensor) else type(values).__name__
            raise TypeError(
                f"{place}: {what} must be a tensor of real numbers, got {got}."
            )
    if not rows.x.numel():
        raise ValueError(
            f"{place}: rows have no columns, got inputs of shape {tuple(rows.x.shape)}."
        )
    if not allow_nonfinite:
        _refuse_nonfinite(
            rows.x, place, "input", "Fill it in or drop the row.", columns
        )
    _refuse_nonfinite(rows.y, place, "target", "Fill it in or drop the row.")
    if _is_label(rows.y):
        bad = (rows.y < 0) if classes is None else (rows.y < 0) | (rows.y >= classes)
        if len(found := bad.nonzero()):
            row = int(found[0, 0])
            allowed = "0 or more" if classes is None else f"one of 0..{classes - 1}"
            raise ValueError(
                f"{place} row {row}: the label {int(rows.y[row])} is not {allowed}. Drop such rows."
            )


def _is_label(y: Tensor) -> bool:
    return not y.is_floating_point() and y.dim() == 1


def _refuse_nonfinite(
    values: Tensor, place: str, what: str, remedy: str, columns: Sequence[str] = ()
) -> None:
    """Name the first number that is not finite, if there is one."""
    if not values.is_floating_point():
        return
    size = max(1, _AT_ONCE // max(1, values[:1].numel()))
    for start in range(0, len(values), size):
        bad = (~values[start : start + size].isfinite()).nonzero()
        if len(bad):
            row, *rest = bad[0].tolist()
            value = float(values[start + row][tuple(rest)])
            raise ValueError(
                f"{place} row {start + row}{_column(rest, columns)}: the {what} is {value}. {remedy}"
            )


def _column(index: Sequence[int], columns: Sequence[str]) -> str:
    if not index:
        return ""
    if len(index) == 1:
        return f", column {columns[index[0]]!r}" if columns else f", column {index[0]}"
    return f", at {tuple(index)}"


def check_names(
    place: str, names: Sequence[str], needed: Sequence[str], ignored: Sequence[str] = ()
) -> None:
    """Refuse columns unless all that are needed are there, once, and no others but those that may be passed over."""
    faults = {
        "missing": [name for name in needed if name not in names],
        "not known to the run": [
            name for name in names if name not in needed and name not in ignored
        ],
        "there twice": sorted({name for name in names if names.count(name) > 1}),
    }
    if message := "; ".join(
        f"{what}: {', '.join(map(brief, found[:10]))}"
        for what, found in faults.items()
        if found
    ):
        known = ", ".join(map(brief, needed[:50]))
        raise ValueError(
            f"{place}: columns {message}. The run was trained on {known}: name these, in any order."
        )
