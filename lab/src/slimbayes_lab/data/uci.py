"""The UCI regression sets and the standard splits of Hernandez-Lobato & Adams (2015).

Formats: <name>.npz with X (n, P) and y (n,) or (n, T), perhaps the benchmark's test_idx; <name>.csv with a line of
column names, the target in the last column, or both targets of Energy and Naval in the last two; Year's own file,
YearPredictionMSD.txt, with the target first and no names. The benchmark has one target of Energy (heating load) and of
Naval (compressor decay), the EMP paper both.

Sizes: n rows of a whole set, N training rows, M test rows, P features, T targets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slimbayes_lab.data.archives import read_npz
from slimbayes_lab.data.dataset import Dataset, Found, Split
from slimbayes_lab.data.table_files import column_names, number_blocks

# rows and features as published, and the number of standard splits
UCI = {
    "bostonhousing": (506, 13, 20), "concrete": (1030, 8, 20), "energy": (768, 8, 20), "kin8nm": (8192, 8, 20),
    "naval-propulsion-plant": (11934, 16, 20), "power-plant": (9568, 4, 20),
    "protein-tertiary-structure": (45730, 9, 5), "wine-quality-red": (1599, 11, 20), "yacht": (308, 6, 20),
    "year": (515345, 90, 1),
}  # fmt: skip
TWO_TARGETS = ("energy", "naval-propulsion-plant")
YEAR = "YearPredictionMSD.txt"


@dataclass(frozen=True)
class Regression:
    """One standard split: all standardised on the training rows, but test.y in its own units.

    A prediction f of y stands for y_mean + y_std * f.

    Shape: train.x (N, P), train.y (N, T), test.x (M, P), test.y (M, T), y_mean and y_std (T,), all float32.
    """

    train: Split
    test: Split
    y_mean: Tensor
    y_std: Tensor

    def to(self, device: torch.device | str) -> Regression:
        return Regression(
            self.train.to(device),
            self.test.to(device),
            self.y_mean.to(device),
            self.y_std.to(device),
        )


def uci(folder: Path, name: str) -> Found | None:
    """A UCI set, as the one split "all": x (n, P) and y (n, T), float32, in their own units."""
    table, arrays = folder / f"{name}.csv", folder / f"{name}.npz"
    if arrays.is_file():
        return _found(arrays, partial(_read_npz, arrays))
    if table.is_file():
        return _found(
            table, partial(_read_csv, table, name), lambda: _columns(table, name)[0]
        )
    if name == "year" and (year := folder / YEAR).is_file():
        return _found(year, partial(_read_year, year))
    return None


def _columns(table: Path, name: str) -> tuple[tuple[str, ...], int]:
    """The names of a table's features, and how many targets come after them."""
    names = column_names(table, header=True)
    targets = 2 if name in TWO_TARGETS and len(names) == UCI[name][1] + 2 else 1
    if len(names) <= targets:
        raise ValueError(
            f"{table} must have a line of two or more column names, then numbers, the target last."
        )
    return names[:-targets], targets


def _found(
    file: Path,
    read: Callable[[], Split],
    columns: Callable[[], tuple[str, ...]] = tuple,
) -> Found:
    return Found({"all": read}, files=lambda: [file], columns=columns)


def _read_npz(file: Path) -> Split:
    arrays = read_npz(file)
    if not {"X", "y"} <= set(arrays):
        raise ValueError(
            f"{file} must hold the arrays X and y, got {', '.join(arrays) or 'none'}."
        )
    x, y = arrays["X"], arrays["y"]
    y = y[:, None] if y.ndim == 1 else y
    if (
        x.ndim != 2
        or y.ndim != 2
        or len(x) != len(y)
        or x.dtype.kind not in "uif"
        or y.dtype.kind not in "uif"
    ):
        need = "X must be numbers (rows, features) and y (rows,) or (rows, targets)"
        raise ValueError(f"{file}: {need}, got {x.shape} and {y.shape}.")
    for index, rows in enumerate(arrays.get("test_idx", ())):
        if rows.tolist() != split_rows(len(x), index)[1].tolist():
            raise ValueError(
                f"{file}: row {index} of test_idx is not the standard split {index}."
            )
    return Split(_finite(x, "X", file), _finite(y, "y", file))


def _finite(values: Any, what: str, file: Path) -> Tensor:
    tensor = torch.from_numpy(values.astype("float32"))
    if (wrong := (~tensor.isfinite()).nonzero()).numel():
        row, column = wrong[0].tolist()
        raise ValueError(
            f"{file}: {what} row {row}, column {column} is {values[row, column]}, not a finite number."
        )
    return tensor


def _read_csv(file: Path, name: str) -> Split:
    """The rows below the names of the columns."""
    (names, targets), rows = _columns(file, name), _numbers(file, header=True)
    return Split(rows[:, : len(names)], rows[:, -targets:])


def _read_year(file: Path) -> Split:
    """The Million Song subset as it is published: the year, then 90 features, without names."""
    got, width = len(column_names(file, header=False)), UCI["year"][1] + 1
    if got != width:
        raise ValueError(
            f"{file} must have {width} columns, the year and {width - 1} features, got {got}."
        )
    rows = _numbers(file, header=False)
    return Split(rows[:, 1:], rows[:, :1])


def _numbers(file: Path, header: bool) -> Tensor:
    """All rows of a table; memory is that of the numbers, however many lines there are."""
    values = bytearray()
    for block in number_blocks(file, header=header):
        values += block.tobytes()
    return torch.frombuffer(values, dtype=torch.float32).view(-1, block.shape[1])


def split_rows(rows: int, index: int) -> tuple[Tensor, Tensor]:
    """Training and test rows of standard split `index`, int64.

    The benchmark shuffles with numpy's old generator, seeded with 1, once for each split in turn, and trains on the
    first 90 %. numpy keeps that stream for good; it is the one source of randomness here that is not torch's.
    """
    if index < 0 or rows < 2:
        raise ValueError(
            f"A standard split needs an index from 0 on and two rows, got index {index} of {rows} rows."
        )
    generator = np.random.RandomState(1)
    for _ in range(index + 1):
        order = generator.permutation(rows)
    cut = round(rows * 0.9)
    return torch.from_numpy(order[:cut]), torch.from_numpy(order[cut:])


def standard_splits(name: str) -> int:
    """How many standard splits a set has."""
    return UCI.get(name.removeprefix("uci/"), (0, 0, 20))[2]


def check_index(data: Dataset, index: int) -> None:
    """Refuse a standard split that a set does not have."""
    limit = standard_splits(data.name)
    if not 0 <= index < limit:
        raise ValueError(
            f"{data.name} has the standard splits 0..{limit - 1}, got {index}."
        )


def standard_split(data: Dataset, index: int) -> Regression:
    """Standard split `index` of a UCI set, standardised. Features that are constant in the training rows become zero.

    Example:
        >>> x = torch.arange(20.0)[:, None]
        >>> split = standard_split(Dataset("toy", {"all": Split(x, 2 * x)}), 0)
        >>> len(split.train), len(split.test), round(float(split.train.y.std(correction=0)), 3)
        (18, 2, 1.0)
    """
    rows = data.splits.get("all")
    if not isinstance(rows, Split):
        raise ValueError(
            f'{data.name} is no table: standard splits are for sets such as load("uci/yacht").'
        )
    check_index(data, index)
    train, test = split_rows(len(rows), index)
    x, y = rows.x.double(), rows.y.double()
    x_mean, x_std = _moments(x[train])
    y_mean, y_std = _moments(y[train])
    return Regression(
        Split(
            ((x[train] - x_mean) / x_std).float(), ((y[train] - y_mean) / y_std).float()
        ),
        Split(((x[test] - x_mean) / x_std).float(), rows.y[test]),
        y_mean.float(),
        y_std.float(),
    )


def _moments(values: Tensor) -> tuple[Tensor, Tensor]:
    varies = values.amax(0) > values.amin(
        0
    )  # rounding can give a constant column a tiny standard deviation
    return values.mean(0), values.std(0, correction=0).where(varies, 1.0)
