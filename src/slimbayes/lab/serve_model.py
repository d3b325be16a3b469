"""What a server asks: a finished run, or an ONNX file that `sb.export` wrote. Nothing of either is unpickled.

Sizes: N rows, S draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from slimbayes.data import Split
from slimbayes.errors import brief
from slimbayes.lab.execution import Execution
from slimbayes.lab.predict_file import fitted, own_columns, read_predictor
from slimbayes.lab.predict_input import check_names
from slimbayes.lab.predict_output import LABEL, as_columns, class_names
from slimbayes.lab.run_folder import RunError
from slimbayes.untrusted import check_regular, parse_json

if TYPE_CHECKING:
    from slimbayes.lab.own_task import OwnColumns

_TYPES = {
    f"tensor({name})": np.dtype(kind)
    for name, kind in {
        "float": "float32",
        "double": "float64",
        "int64": "int64",
        "int32": "int32",
        "uint8": "uint8",
    }.items()
}
Columns = dict[str, list[Any]]
Named = dict[str, list[Any]]  # rows' values by column's name


class Served(Protocol):
    """A model behind a server."""

    @property
    def row(self) -> tuple[int, ...]:
        """Shape of one row."""

    @property
    def columns(self) -> dict[str, str]:
        """What the columns of a row hold, by name, where rows have names."""

    @property
    def draws(self) -> int | None:
        """Draws of each member by default, where a request may choose them."""

    def check(self, rows: np.ndarray | Named) -> np.ndarray:
        """Rows (N, ...), or values by column's name, as the model takes them, or a ValueError."""

    def predict(self, rows: np.ndarray, draws: int, level: float | None) -> Columns:
        """Predictions by name, each of N values."""


class RunModel:
    """A finished run: its draws are the same for all rows and calls, so answers do not depend on who else asks."""

    def __init__(self, folder: Path, draws: int, accelerator: Any = "auto") -> None:
        self.predictor, self.draws = read_predictor(folder, Execution(accelerator=accelerator).device), draws
        assert isinstance(self.predictor.task.test, Split)
        self.row = tuple(self.predictor.task.test.x.shape[1:])
        self.predict(np.zeros((2, *self.row), np.float32), draws, None)  # rows are located before anyone waits

    @property
    def columns(self) -> dict[str, str]:
        task = self.predictor.task
        return dict.fromkeys(task.columns, "number") if task.own is None else dict(task.own.kinds)

    def check(self, rows: np.ndarray | Named) -> np.ndarray:
        task = self.predictor.task
        if task.own is not None:
            return _own_rows(rows, task.own)
        x = fitted(torch.as_tensor(_array(rows, task.columns)), task, "rows")
        _refuse_infinite(x.numpy())
        return x.numpy()

    def predict(self, rows: np.ndarray, draws: int, level: float | None) -> Columns:
        x, classes = torch.as_tensor(rows), self.predictor.task.classes
        batches = [(x, x.new_zeros(len(x)))]
        made, _ = next(self.predictor.predict_batches(batches, "the rows", "predict", [draws]))
        columns = as_columns(made[draws], classes, level)
        names = class_names(classes, len(columns))
        return {k: [names[i] for i in v.tolist()] if k == LABEL else v.tolist() for k, v in columns.items()}


class OnnxModel:
    """An exported graph with the draws it was written with; onnxruntime runs it."""

    draws: int | None = None

    def __init__(self, file: Path) -> None:
        try:
            import onnxruntime
        except ModuleNotFoundError as error:
            raise ImportError('An exported model needs onnxruntime: pip install "slimbayes[serve]"') from error
        check_regular(file)
        try:
            self.session = onnxruntime.InferenceSession(str(file))
        except Exception as error:  # its exceptions have no class in common
            raise RunError(f"{file} cannot be opened by onnxruntime: {brief(str(error))}.") from error
        try:
            about = parse_json(self.session.get_modelmeta().custom_metadata_map["slimbayes"])
            (self.name,), self.likelihood = about["inputs"], about["likelihood"]
            self.row, outputs = tuple(map(int, about["inputs"][self.name][1:])), tuple(about["outputs"])
            self.kind = _TYPES[self.session.get_inputs()[0].type]
            self.own = None if about.get("own") is None else own_columns(about["own"])
        except (KeyError, ValueError, TypeError, AttributeError, IndexError, AssertionError) as error:
            raise RunError(f"{file} was not written by sb.export, or takes several inputs.") from error
        if outputs != ("mean", "aleatoric", "epistemic"):
            raise RunError(f"{file} gives draws, no predictions: export it with likelihood=.")

    @property
    def columns(self) -> dict[str, str]:
        return {} if self.own is None else dict(self.own.kinds)

    def check(self, rows: np.ndarray | Named) -> np.ndarray:
        if self.own is not None:
            return _own_rows(rows, self.own)
        rows = _array(rows, ())
        if rows.shape[1:] != self.row:
            raise ValueError(f"rows: each row must have shape {self.row}, got {rows.shape[1:]}.")
        with np.errstate(over="ignore", invalid="ignore"):
            cast = rows.astype(self.kind)
        _refuse_infinite(cast)
        if cast.dtype.kind != "f" and (cast != rows).any():
            raise ValueError(f"rows: whole numbers are needed, of {self.kind.name}.")
        return cast

    def predict(self, rows: np.ndarray, draws: int, level: float | None) -> Columns:
        mean, aleatoric, epistemic = self.session.run(None, {self.name: rows})
        names = ("mean", "aleatoric", "epistemic")
        return {name: values.tolist() for name, values in zip(names, (mean, aleatoric, epistemic), strict=True)}


def _own_rows(rows: np.ndarray | Named, own: OwnColumns) -> np.ndarray:
    """Rows of a table of one's own, by column's name, as its network takes them."""
    if not isinstance(rows, dict):
        some = {"number": 1.5, "word": "text", "date": "2024-01-31"}
        example = {name: some[kind] for name, kind in own.kinds.items()}
        raise ValueError(f"rows: each must have its columns' names, as in {brief(example)}.")
    return own.rows(rows).numpy()


def _array(rows: np.ndarray | Named, names: Sequence[str]) -> np.ndarray:
    """Rows (N, ...): columns of numbers by these names or, if there are none, as they come; or a column of lists."""
    if isinstance(rows, np.ndarray):
        return rows
    if names:
        check_names("rows", list(rows), names)
    every = {name: np.asarray(rows[name]) for name in names or rows}
    for name, values in every.items():
        if values.dtype.kind not in "iuf":
            raise ValueError(f"rows: column {brief(name)} must hold numbers, and none may be missing.")
    first = next(iter(every.values()))
    return first if len(every) == 1 and first.ndim > 1 else np.stack(list(every.values()), 1)


def _refuse_infinite(rows: np.ndarray) -> None:
    """Also numbers that single precision has no place for."""
    bad = np.argwhere(~np.isfinite(rows))
    if len(bad):
        raise ValueError(f"rows: row {bad[0, 0]} holds NaN or infinity, or a number beyond single precision.")


def open_model(path: Path, draws: int, accelerator: Any = "auto") -> Served:
    """The model of a run's folder or of an .onnx file."""
    if path.suffix == ".onnx":
        return OnnxModel(path)
    if path.suffix == ".pt2":
        raise RunError(f"{path}: a .pt2 file may hold pickles, so it is not served. Export to .onnx instead.")
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is neither a run's folder nor an .onnx file.")
    return RunModel(path, draws, accelerator)
