"""Tables of measurements, which can have hundreds of millions of rows, gathered as events of stays.

    Collector       the stays of every patient, and the events so far
    add_table       one table of measurements into it: by duckdb where that is installed, else line by line

Both ways give the same events. The quick one has no messages of its own: where it meets anything odd, the slow one reads the file and says which
line is wrong, or that none is.

Sizes: E events, N stays.
"""

from __future__ import annotations

import importlib
import math
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import torch

from slimbayes.data import csv_rows, quick_tables
from slimbayes.data.health import Events

HOUR = timedelta(hours=1)
COLUMNS = ("subject_id", "itemid", "valuenum", "valueuom")


@dataclass
class Admission:
    """One stay in hospital. `stay` is its row among those that are predicted; -1: it ended before the prediction time."""

    subject: str
    start: datetime
    discharge: datetime
    stay: int


@dataclass
class Collector:
    """Events so far; each counts for every stay of its patient whose prediction time it precedes."""

    until: float
    stays: dict[str, list[Admission]] = field(default_factory=lambda: defaultdict(list))  # of each subject
    features: dict[str, int] = field(default_factory=dict)
    patient: array[int] = field(default_factory=lambda: array("q"))
    hours: array[float] = field(default_factory=lambda: array("d"))
    feature: array[int] = field(default_factory=lambda: array("q"))
    value: array[float] = field(default_factory=lambda: array("f"))

    def add(self, subject: str, known: datetime, name: str, value: float = math.nan) -> None:
        for stay in self.stays[subject]:
            if stay.stay >= 0 and (hours := (known - stay.start) / HOUR) <= self.until:
                self.add_to(stay, hours, name, value)

    def add_to(self, stay: Admission, hours: float, name: str, value: float = math.nan) -> None:
        self.patient.append(stay.stay)
        self.hours.append(hours)
        self.feature.append(self.number(name))
        self.value.append(value)

    def number(self, name: str) -> int:
        return self.features.setdefault(name, len(self.features))

    def check_subject(self, place: str, subject: str) -> None:
        if subject not in self.stays:
            raise ValueError(f"{place}: the table of admissions has no patient {subject!r}.")

    def events(self) -> Events:
        columns = (
            (self.patient, torch.int64),
            (self.hours, torch.float64),
            (self.feature, torch.int64),
            (self.value, torch.float32),
        )
        tensors = (torch.frombuffer(a, dtype=t) if a else torch.empty(0, dtype=t, device="cpu") for a, t in columns)
        return Events(
            *tensors,
            1 + max((a.stay for stays in self.stays.values() for a in stays), default=-1),
            tuple(self.features),
        )


def quick_reader() -> Any:
    """duckdb, or None: the one place that decides which way a table is read."""
    try:
        return importlib.import_module("duckdb")
    except ImportError:
        return None


def add_table(collected: Collector, file: Path, prefix: str, times: Sequence[str], labels: Mapping[str, str]) -> None:
    """Every measurement of a file, named <prefix>/<item>/<unit>, with the item's label where there is one.

    A measurement is known at the latest of the columns `times`, of which the first says when it was taken; it is left out where that is empty.
    """
    duckdb = quick_reader()
    if duckdb is not None:
        try:
            with quick_tables.open_table(duckdb, file, (*COLUMNS, *times), collected.stays, collected.until) as table:
                _add_quickly(collected, table, prefix, labels)
            return
        except quick_tables.Stumbled:
            pass  # nothing was added yet
    _add_lines(collected, file, prefix, times, labels)


def _add_lines(collected: Collector, file: Path, prefix: str, times: Sequence[str], labels: Mapping[str, str]) -> None:
    for place, (subject, item, number, unit, taken, *later) in csv_rows.rows(file, (*COLUMNS, *times)):
        collected.check_subject(place, subject)
        if taken:
            known = max(csv_rows.time_of(place, cell) for cell in (taken, *later) if cell)
            collected.add(subject, known, name_of(prefix, item, unit, labels), csv_rows.number_of(place, number))


def _add_quickly(collected: Collector, table: quick_tables.Table, prefix: str, labels: Mapping[str, str]) -> None:
    numbers = [collected.number(name_of(prefix, item, unit, labels)) for item, unit in table.pairs()]
    for piece in table.pieces(numbers):
        for column, values in zip((collected.patient, collected.hours, collected.feature, collected.value), piece):
            column.frombytes(values.tobytes())


def name_of(prefix: str, item: str, unit: str, labels: Mapping[str, str]) -> str:
    """The name of a feature.

    Example:
        >>> name_of("lab", "50912", "mg/dL", {"50912": "Creatinine"}), name_of("chart", "7", "", {})
        ('lab/50912 creatinine/mg/dl', 'chart/7/')
    """
    label = labels.get(item, "")
    return f"{prefix}/{item}{' ' if label else ''}{label.casefold()}/{unit.casefold()}"
