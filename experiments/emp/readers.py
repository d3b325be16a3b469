"""Data of the regression experiment: UCI sets and the benchmark's standard splits (Hernandez-Lobato & Adams 2015).

Sizes: n rows of a whole set, N training rows, M test rows, P features, T targets.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slimbayes.data import uci as tables

SHIPPED = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Table:
    """One whole set: x (n, P) and y (n, T) in their own units."""

    name: str
    x: np.ndarray
    y: np.ndarray


@dataclass(frozen=True)
class Split:
    """One split: x (N, P), y (N, T) and test_x (M, P), standardised on the training rows; test_y (M, T) in its own units.

    A prediction f of y stands for y_mean + y_std * f, both of shape (T,).
    """

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    y_mean: Tensor
    y_std: Tensor


def read(name: str, folder: Path | None = None) -> Table:
    """A set by name: `uci/<name>.npz` with arrays X and y in `folder` or $SLIMBAYES_DATA, or else the copy that is shipped here."""
    places = [Path(place) for place in (folder, os.environ.get("SLIMBAYES_DATA")) if place]
    files = [place / inside / f"{name}.npz" for place in places for inside in ("uci", "")]
    for file in files:
        if file.exists():
            return _from_npz(name, file)
    shipped = SHIPPED / f"{name}.csv"
    if shipped.exists():
        rows = np.loadtxt(shipped, delimiter=",", skiprows=1)
        return Table(name, rows[:, :-1], rows[:, -1:])
    looked = ", ".join(str(file) for file in [*files, shipped])
    here = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.csv")))
    raise FileNotFoundError(
        f"No data for {name!r}: looked for {looked}. Give --data-dir DIR, or set SLIMBAYES_DATA, where DIR/uci/{name}.npz holds the "
        f"arrays X (rows, features) and y (rows,) or (rows, targets). Shipped with the experiment: {here}."
    )


def _from_npz(name: str, file: Path) -> Table:
    with np.load(file) as arrays:
        if not {"X", "y"} <= set(arrays.files):
            raise ValueError(f"{file} must hold the arrays X and y, got {', '.join(arrays.files) or 'none'}.")
        x, y = arrays["X"].astype(np.float64), arrays["y"].astype(np.float64)
        y = y[:, None] if y.ndim == 1 else y
        if x.ndim != 2 or y.ndim != 2 or len(x) != len(y):
            raise ValueError(
                f"{file}: X must be (rows, features) and y (rows,) or (rows, targets), got {x.shape} and {y.shape}."
            )
        if "test_idx" in arrays.files:  # a file that brings the benchmark's indices along must agree with ours
            for index, rows in enumerate(arrays["test_idx"]):
                if not np.array_equal(rows, split_rows(len(x), index)[1]):
                    raise ValueError(f"{file}: its split {index} is not the standard one that split_rows draws.")
    return Table(name, x, y)


def split_rows(n: int, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Training and test rows of standard split `index`."""
    train, test = tables.split_rows(n, index)
    return train.numpy(), test.numpy()


def split(table: Table, index: int) -> Split:
    """Standard split `index` as float32 tensors. Features that are constant in the training rows become zero."""
    train, test = split_rows(len(table.x), index)
    x_mean, x_std = _moments(table.x[train])
    y_mean, y_std = _moments(table.y[train])

    def tensor(values: np.ndarray) -> Tensor:
        return torch.tensor(values, dtype=torch.float32)

    return Split(
        tensor((table.x[train] - x_mean) / x_std),
        tensor((table.y[train] - y_mean) / y_std),
        tensor((table.x[test] - x_mean) / x_std),
        tensor(table.y[test]),
        tensor(y_mean),
        tensor(y_std),
    )


def _moments(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    varies = np.ptp(values, 0) > 0  # rounding can give a constant column a tiny standard deviation
    return values.mean(0), np.where(varies, values.std(0), 1.0)
