"""Data of one's own between reading and training: scaled by what the training rows show."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor

from slimbayes.data import Dataset, Split
from slimbayes.data.cells import Decimal, Kind
from slimbayes.data.table_files import TABLES, Frame, column_names, frame_of, frames
from slimbayes.errors import SlimbayesWarning
from slimbayes.lab.own_data import OwnTable, told, with_dates
from slimbayes.lab.predict_input import check_names
from slimbayes.sklearn.columns import Preparation, unseen_text

if TYPE_CHECKING:
    from slimbayes.lab.config import Data
    from slimbayes.lab.task import Task


@dataclass(frozen=True)
class OwnColumns:
    """How rows of a table become the network's.

    Attributes:
        preparation: codes and scales.
        passed: columns that such a table may have, and that are not looked at.
        kinds: what the columns that are read hold.
        header: whether a file's first line has names.
        decimal: what parts a number's whole from its fraction in a file.
    """

    preparation: Preparation
    passed: tuple[str, ...]
    kinds: Mapping[str, Kind]
    header: bool
    decimal: Decimal

    def fills(self) -> dict[str, Any]:
        """Arguments of networks that a table decides. Codes of categories are no inputs of a plain network."""
        sizes = self.preparation.table.sizes
        return {"numbers": self.preparation.width, "sizes": list(sizes)} | (
            {} if sizes else {"inputs": self.preparation.width}
        )

    def facts(self) -> dict[str, Any]:
        facts = {"preparation": self.preparation.facts(), "passed": list(self.passed), "header": self.header}
        return facts | {"kinds": [list(pair) for pair in self.kinds.items()], "decimal": self.decimal}

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> Self:
        """What `facts` wrote down; runs of before there were dates have none."""
        found = Preparation.from_facts(facts["preparation"])
        words = {found.table.names[j] for j in found.table.categories}
        kinds: dict[str, Kind] = {name: "word" if name in words else "number" for name in found.table.names}
        kinds = dict(facts["kinds"]) if "kinds" in facts else kinds
        return cls(found, tuple(facts["passed"]), kinds, bool(facts["header"]), facts.get("decimal", "point"))

    def prepared(self, frame: Frame, unseen: Counter[str]) -> Tensor:
        """Columns as they were read, as the network takes them: float32 (n, w + c). Unknown categories that count as
        missing are added to `unseen`."""
        table = self.preparation.table
        read = table.read(with_dates(frame, self.kinds, table.names), unseen=unseen)
        return torch.from_numpy(self.preparation(read))

    def rows(self, values: Mapping[str, Sequence[Any]]) -> tuple[Tensor, tuple[str, ...]]:
        """Rows of values by column's name as the network takes them, and what is to be said of them, or a ValueError
        that says what does not fit."""
        check_names("rows", list(values), list(self.kinds), self.passed)
        unseen: Counter[str] = Counter()
        try:
            made = self.prepared(frame_of(values, self.kinds), unseen)
        except ValueError as error:
            raise ValueError(told(error)) from error
        return made, (unseen_text(unseen, len(made)),) if unseen else ()


def table_blocks(file: Path, own: OwnColumns) -> Iterator[Tensor]:
    """Rows of a table's file as the network takes them, float32 (n, w + c), block by block; a warning at the end tells
    of categories that training did not see."""
    if file.suffix.lower() not in TABLES:
        raise ValueError(f"{file}: the run was trained on a table, so rows come as {', '.join(TABLES)}.")
    names, needed = column_names(file, own.header, own.decimal), list(own.kinds)
    here = {name: name for name in needed}
    if not own.header and len(names) == len(needed):  # without names and without the target: by their order
        here = dict(zip(needed, names, strict=True))
    else:
        check_names(str(file), names, needed, own.passed)
    return _prepared_blocks(file, own, here)


def _prepared_blocks(file: Path, own: OwnColumns, here: Mapping[str, str]) -> Iterator[Tensor]:
    first, unseen = 0, Counter[str]()
    for frame in frames(file, {here[name]: kind for name, kind in own.kinds.items()}, own.header, own.decimal):
        try:
            rows = own.prepared({name: frame[here[name]] for name in own.kinds}, unseen)
        except ValueError as error:
            last = first + len(next(iter(frame.values()))) - 1
            raise ValueError(f"{file}, rows {first} to {last}: {told(error)}") from error
        first += len(rows)
        yield rows
    if unseen:
        warnings.warn(f"{file}: {unseen_text(unseen, first)}", SlimbayesWarning, stacklevel=2)


def finished(task: Task, data: Dataset, chosen: Data) -> Task:
    """A task of one's own data, with real targets standardised and tables scaled, both by the training rows."""
    if task.real:
        task = _standardised(task)
    if not isinstance(data, OwnTable):
        return task
    assert data.table is not None and isinstance(task.train, Split)
    scaling: Literal["quantile", "standard", "none"] = "none"
    if chosen.scaling in ("quantile", "standard"):
        scaling = chosen.scaling
    preparation = Preparation.learnt(data.table, scaling, task.train.x.numpy())

    def prepared(rows: Any) -> Any:
        return rows and Split(torch.from_numpy(preparation(rows.x.numpy())), rows.y)

    return replace(
        task,
        train=prepared(task.train),
        test=prepared(task.test),
        validation=prepared(task.validation),
        scaling=replace(task.scaling, mean=None, std=None),
        own=OwnColumns(preparation, data.passed, data.kinds, data.header, data.decimal),
    )


def _standardised(task: Task) -> Task:
    assert isinstance(task.train, Split)
    wide = task.train.y.double()
    mean, std = wide.mean(0), wide.std(0, correction=0)
    if bool((std == 0).any()):
        raise ValueError(f"{task.name}: the target is {float(mean[std == 0][0]):g} in all training rows.")
    mean, std = mean.to(task.train.y.dtype), std.to(task.train.y.dtype)

    def scaled(rows: Any) -> Any:
        return rows and Split(rows.x, ((rows.y - mean) / std).float())

    return replace(task, train=scaled(task.train), validation=scaled(task.validation), y_mean=mean, y_std=std)
