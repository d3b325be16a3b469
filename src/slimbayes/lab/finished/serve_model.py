"""What a server asks: a finished run, or a file that `sb.export` wrote. Nothing is unpickled, unless a .pt2 file is
trusted.

Sizes: N rows, S draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slimbayes.data import Split
from slimbayes.errors import brief
from slimbayes.lab.configs.own import OwnCodeError, code_is_allowed
from slimbayes.lab.execution import Execution
from slimbayes.lab.finished.predict_file import Columns, check_and_fit, predicted
from slimbayes.lab.runs.folder import RunError
from slimbayes.lab.runs.trained import read_predictor
from slimbayes.lab.tasks.own_table import TableReader
from slimbayes.lab.tasks.rows import check_names
from slimbayes.prediction.export import SUMMARIES
from slimbayes.untrusted import check_regular, parse_json

_TYPES = {
    "float": "float32",
    "double": "float64",
    "int64": "int64",
    "int32": "int32",
    "uint8": "uint8",
}  # ONNX's
Named = dict[str, list[Any]]  # rows' values by column's name


class Served:
    """A model behind a server."""

    row: tuple[int, ...]  # shape of one
    draws: int | None = (
        None  # of each member by default, where a request may choose them
    )
    names: tuple[
        str, ...
    ] = ()  # of the columns of rows of numbers, where they have some
    reader: TableReader | None = None  # how rows of a table of one's own are read

    @property
    def columns(self) -> dict[str, str]:
        """What the columns of a row hold, by name, where rows have names."""
        return (
            dict.fromkeys(self.names, "number")
            if self.reader is None
            else dict(self.reader.kinds)
        )

    def check(self, rows: np.ndarray | Named) -> tuple[np.ndarray, tuple[str, ...]]:
        """Rows (N, ...), or values by column's name, as the model takes them, and what whoever asked should know of
        them; or a ValueError."""
        if self.reader is None:
            x = self.fitted(_array(rows, self.names))
            if len(bad := np.argwhere(~np.isfinite(x))):
                raise ValueError(
                    f"rows: row {bad[0, 0]} holds NaN or infinity, or a number beyond single precision."
                )
            return x, ()
        if not isinstance(rows, dict):
            some = {"number": 1.5, "word": "text", "date": "2024-01-31"}
            example = {name: some[kind] for name, kind in self.reader.kinds.items()}
            raise ValueError(
                f"rows: each must have its columns' names, as in {brief(example)}."
            )
        made, notes = self.reader.rows(rows)
        return made.numpy(), notes

    def fitted(self, rows: np.ndarray) -> np.ndarray:
        """Rows in the shape and type that the model takes, or a ValueError; infinite where a number is too large."""
        raise NotImplementedError

    def predict(self, rows: np.ndarray, draws: int, level: float | None) -> Columns:
        """Predictions by name, each of N values."""
        raise NotImplementedError


class RunModel(Served):
    """A finished run: its draws are the same for all rows and calls, so answers do not depend on who else asks."""

    def __init__(self, folder: Path, draws: int, accelerator: Any = "auto") -> None:
        self.predictor, self.draws = (
            read_predictor(folder, Execution(accelerator=accelerator).device),
            draws,
        )
        task = self.predictor.task
        assert isinstance(task.test, Split)
        self.row, self.names, self.reader = (
            tuple(task.test.x.shape[1:]),
            task.columns,
            task.reader,
        )
        self.predict(
            np.zeros((2, *self.row), np.float32), draws, None
        )  # rows are located before anyone waits

    def fitted(self, rows: np.ndarray) -> np.ndarray:
        return check_and_fit(torch.as_tensor(rows), self.predictor.task, "rows").numpy()

    def predict(self, rows: np.ndarray, draws: int, level: float | None) -> Columns:
        return next(
            predicted(self.predictor, [torch.as_tensor(rows)], "the rows", draws, level)
        )


class ExportedModel(Served):
    """What `sb.export` wrote, with the draws in it: `about` is what the file says of itself, `kind` the type of its
    input, and `run` the graph, rows (N, ...) to mean, aleatoric and epistemic uncertainty."""

    def __init__(
        self,
        file: Path,
        about: Any,
        kind: np.dtype[Any],
        run: Callable[[np.ndarray], Sequence[Any]],
    ) -> None:
        self.kind, self.run = kind, run
        try:
            (name,) = about["inputs"]
            self.row, outputs = (
                tuple(map(int, about["inputs"][name][1:])),
                tuple(about["outputs"]),
            )
            self.reader = TableReader.from_dict(about.get("own"))
        except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
            raise RunError(
                f"{file} was not written by sb.export, or takes several inputs."
            ) from error
        if outputs != SUMMARIES:
            raise RunError(
                f"{file} gives draws, no predictions: export it with likelihood=."
            )

    def fitted(self, rows: np.ndarray) -> np.ndarray:
        if rows.shape[1:] != self.row:
            raise ValueError(
                f"rows: each row must have shape {self.row}, got {rows.shape[1:]}."
            )
        with np.errstate(over="ignore", invalid="ignore"):
            cast = rows.astype(self.kind)
        if cast.dtype.kind != "f" and (cast != rows).any():
            raise ValueError(f"rows: whole numbers are needed, of {self.kind.name}.")
        return cast

    def predict(self, rows: np.ndarray, draws: int, level: float | None) -> Columns:
        return {
            name: np.asarray(values, np.float64)
            for name, values in zip(SUMMARIES, self.run(rows), strict=True)
        }


def open_onnx(file: Path) -> ExportedModel:
    """A graph that onnxruntime runs."""
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise ImportError(
            'An exported model needs onnxruntime: pip install "slimbayes[serve]"'
        ) from error
    check_regular(file)
    try:
        session = onnxruntime.InferenceSession(str(file))
    except Exception as error:  # its exceptions have no class in common
        raise RunError(
            f"{file} cannot be opened by onnxruntime: {brief(str(error))}."
        ) from error
    first = session.get_inputs()[0]
    try:
        about = parse_json(session.get_modelmeta().custom_metadata_map["slimbayes"])
        kind = np.dtype(_TYPES[first.type.removeprefix("tensor(").removesuffix(")")])
    except (KeyError, ValueError) as error:
        raise RunError(f"{file} was not written by sb.export.") from error
    return ExportedModel(
        file, about, kind, lambda rows: session.run(None, {first.name: rows})
    )


def open_pt2(file: Path) -> ExportedModel:
    """A graph that torch runs; opening such a file may run code of whoever wrote it."""
    if not code_is_allowed():
        raise OwnCodeError(
            f"{file}: torch may unpickle parts of a .pt2 file, which can run code. If you trust it, say --allow-code; "
            f"an .onnx file needs no trust."
        )
    check_regular(file)
    words = {"slimbayes.json": ""}
    try:
        program = torch.export.load(file, extra_files=words)
        about = parse_json(words["slimbayes.json"])
    except Exception as error:  # whatever torch meets in a file that is none
        raise RunError(
            f"{file} is no .pt2 file of sb.export: {brief(str(error))}."
        ) from error
    graph, given = program.module(), program.graph_signature.user_inputs[0]
    like = next(node.meta["val"] for node in program.graph.nodes if node.name == given)

    def run(rows: np.ndarray) -> Sequence[Any]:
        with torch.no_grad():
            return [
                found.cpu().numpy()
                for found in graph(torch.as_tensor(rows, device=like.device))
            ]

    return ExportedModel(
        file, about, torch.empty(0, dtype=like.dtype).numpy().dtype, run
    )


def _array(rows: np.ndarray | Named, names: Sequence[str]) -> np.ndarray:
    """Rows (N, ...): columns of numbers by these names or, if there are none, as they come; or a column of lists."""
    if isinstance(rows, np.ndarray):
        return rows
    if names:
        check_names("rows", list(rows), names)
    every = {name: np.asarray(rows[name]) for name in names or rows}
    for name, values in every.items():
        if values.dtype.kind not in "iuf":
            raise ValueError(
                f"rows: column {brief(name)} must hold numbers, and none may be missing."
            )
    first = next(iter(every.values()))
    return (
        first
        if len(every) == 1 and first.ndim > 1
        else np.stack(list(every.values()), 1)
    )


def open_model(path: Path, draws: int, accelerator: Any = "auto") -> Served:
    """The model of a run's folder, of an .onnx file or, if code is allowed, of a .pt2 file."""
    if path.suffix in (".onnx", ".pt2") and path.is_file():
        return open_onnx(path) if path.suffix == ".onnx" else open_pt2(path)
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path} is neither a run's folder nor an .onnx or .pt2 file."
        )
    return RunModel(path, draws, accelerator)
