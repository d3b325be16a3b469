"""Data of one's own between reading and training: scaled by what the training rows show. And how rows of a table become
the network's, which a run keeps to read others."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from slimbayes.data import Dataset, Split
from slimbayes.data.cells import Decimal, Kind, date_columns
from slimbayes.data.table_files import TABLES, Frame, column_names, frame_of, frames
from slimbayes.errors import SlimbayesWarning, brief
from slimbayes.lab.tasks.intake import check_names
from slimbayes.sklearn.columns import Table, unseen_text

if TYPE_CHECKING:
    from slimbayes.lab.tasks.task import Task


@dataclass(frozen=True)
class OwnColumns:
    """How rows of a table become the network's."""

    table: Table  # codes and scales
    passed: tuple[str, ...]  # columns that such a table may have, and that are not looked at
    kinds: Mapping[str, Kind]  # of the columns that are read
    header: bool  # whether a file's first line has names
    decimal: Decimal  # what parts a number's whole from its fraction in a file

    def fills(self) -> dict[str, Any]:
        """Arguments of networks that a table decides. Codes of categories are no inputs of a plain network."""
        sizes, width = self.table.sizes, self.table.width
        return {"numbers": width, "sizes": list(sizes)} | ({} if sizes else {"inputs": width})

    def facts(self) -> dict[str, Any]:
        facts = {"preparation": self.table.facts(), "passed": list(self.passed), "header": self.header}
        return facts | {"kinds": [list(pair) for pair in self.kinds.items()], "decimal": self.decimal}

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> Self:
        """What `facts` wrote down; runs of before there were dates have none."""
        found = Table.from_facts(facts["preparation"])
        words = {found.names[j] for j in found.categories}
        kinds: dict[str, Kind] = {name: "word" if name in words else "number" for name in found.names}
        kinds = dict(facts["kinds"]) if "kinds" in facts else kinds
        return cls(found, tuple(facts["passed"]), kinds, bool(facts["header"]), facts.get("decimal", "point"))

    def prepared(self, frame: Frame, unseen: Counter[str]) -> Tensor:
        """Columns as they were read, as the network takes them: float32 (n, w + c). Unknown categories that count as
        missing are added to `unseen`."""
        read = self.table.read(with_dates(frame, self.kinds, self.table.names), unseen=unseen)
        return torch.from_numpy(self.table.prepare(read))

    def rows(self, values: Mapping[str, Sequence[Any]]) -> tuple[Tensor, tuple[str, ...]]:
        """Rows of values by column's name as the network takes them, and what is to be said of them, or a ValueError
        that says what does not fit."""
        check_names("rows", list(values), list(self.kinds), self.passed)
        unseen: Counter[str] = Counter()
        try:
            made = self.prepared(frame_of(values, self.kinds), unseen)
        except ValueError as error:
            raise ValueError(say_as_config(error)) from error
        return made, (unseen_text(unseen, len(made)),) if unseen else ()

    def blocks(self, file: Path) -> Iterator[Tensor]:
        """Rows of a file as the network takes them, float32 (n, w + c), some at a time; a warning at the end tells of
        categories that training did not see."""
        if file.suffix.lower() not in TABLES:
            raise ValueError(f"{file}: the run was trained on a table, so rows come as {', '.join(TABLES)}.")
        names, here = column_names(file, self.header, self.decimal), {name: name for name in self.kinds}
        if not self.header and len(names) == len(here):  # without names and without the target: by their order
            here = dict(zip(here, names, strict=True))
        else:
            check_names(str(file), names, list(here), self.passed)
        first, unseen = 0, Counter[str]()
        for frame in frames(file, {here[name]: self.kinds[name] for name in here}, self.header, self.decimal):
            try:
                rows = self.prepared({name: frame[here[name]] for name in here}, unseen)
            except ValueError as error:
                last = first + len(next(iter(frame.values()))) - 1
                raise ValueError(f"{file}, rows {first} to {last}: {say_as_config(error)}") from error
            first += len(rows)
            yield rows
        if unseen:
            warnings.warn(f"{file}: {unseen_text(unseen, first)}", SlimbayesWarning, stacklevel=2)


@dataclass(frozen=True)
class OwnTable(Dataset):
    """A table of one's own: rows of numbers and codes, float64 (N, d + c), not scaled yet."""

    own: OwnColumns | None = None

    @property
    def named(self) -> tuple[object, ...]:
        assert self.own is not None
        return *super().named, tuple(map(tuple, self.own.table.words))


def with_dates(frame: Frame, kinds: Mapping[str, Kind], wanted: Sequence[str] | None = None) -> Frame:
    """Columns of these kinds, with numbers in place of dates; of those, the wanted ones, or all that vary."""
    found: dict[str, np.ndarray] = {}
    for name, kind in kinds.items():
        made = date_columns(name, frame[name]) if kind == "date" else {name: frame[name]}
        times = kind == "date" and bool(np.nan_to_num(frame[name] % 1).any())
        for key, values in made.items():
            if key in found or (kind == "date" and key in kinds):
                raise ValueError(f"column {brief(key)} has the name of a date's number: give it another.")
            if key in wanted if wanted is not None else times or ": day " not in key.removeprefix(name):
                found[key] = values
    return found


def say_as_config(error: Exception) -> str:
    """What `Table` says, with options called as in a config."""
    text = str(error).removeprefix("Input X contains NaN: ")
    return text.replace("missing='impute'", "data.missing: impute").replace("categorical_features", "data.categories")


def scale_table(task: Task, data: Dataset) -> Task:
    """A task of a table of one's own, scaled by the training rows."""
    assert isinstance(data, OwnTable) and data.own is not None and isinstance(task.train, Split)
    table = replace(data.own.table)
    table.learn_scales(task.train.x.numpy())

    def prepared(rows: Any) -> Any:
        return rows and Split(torch.from_numpy(table.prepare(rows.x.numpy())), rows.y)

    return replace(
        task,
        train=prepared(task.train),
        test=prepared(task.test),
        validation=prepared(task.validation),
        scaling=replace(task.scaling, mean=None, std=None),
        own=replace(data.own, table=table),
    )
