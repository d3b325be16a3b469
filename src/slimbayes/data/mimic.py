"""MIMIC-III tables, <NAME>.csv or <NAME>.csv.gz, in-hospital mortality of every admission that lasts until the prediction time.

Tables: ADMISSIONS and PATIENTS are needed; DIAGNOSES_ICD, PROCEDURES_ICD, PRESCRIPTIONS, LABEVENTS and CHARTEVENTS are read where they
are. They are streamed line by line; what stays in memory is one entry for each admission and 28 bytes for each event that counts.

When an event is known decides whether it may be used, and some of these tables say it only roughly:

    codes           are assigned after discharge: they count from the discharge of their own admission on, so only for later ones
    prescriptions   have a day but no hour: they count from the end of that day
    labs, charts    count from charttime on, which for a lab is when the specimen was taken, hours before its result
    deaths          the outcome; a stay that ends before the prediction time, by discharge or death, is left out

What is known of a patient from before an admission has negative hours in it; `mortality(..., aggregate_older_than=24.0)` gives it a bag.

Sizes: E events, N stays, F features.
"""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimbayes.data.health import Events, Stays

_LINE = 1 << 20  # characters: the longest honest line has a few thousand
_HOUR = timedelta(hours=1)
_OLDEST = 90.0  # years: the dates of birth of older patients are shifted by centuries


@dataclass
class _Admission:
    subject: str
    start: datetime
    discharge: datetime
    stay: int  # -1: it ended before the prediction time


@dataclass
class _Collector:
    """Events so far; each counts for every stay of its patient whose prediction time it precedes."""

    until: float
    stays: dict[str, list[_Admission]] = field(default_factory=lambda: defaultdict(list))  # of each subject
    features: dict[str, int] = field(default_factory=dict)
    patient: array[int] = field(default_factory=lambda: array("q"))
    hours: array[float] = field(default_factory=lambda: array("d"))
    feature: array[int] = field(default_factory=lambda: array("q"))
    value: array[float] = field(default_factory=lambda: array("f"))

    def add(self, subject: str, known: datetime, name: str, value: float = math.nan) -> None:
        for stay in self.stays[subject]:
            if stay.stay >= 0 and (hours := (known - stay.start) / _HOUR) <= self.until:
                self.add_to(stay, hours, name, value)

    def add_to(self, stay: _Admission, hours: float, name: str, value: float = math.nan) -> None:
        self.patient.append(stay.stay)
        self.hours.append(hours)
        self.feature.append(self.features.setdefault(name, len(self.features)))
        self.value.append(value)

    def events(self) -> Events:
        columns = ((self.patient, torch.int64), (self.hours, torch.float64), (self.feature, torch.int64), (self.value, torch.float32))
        tensors = (torch.frombuffer(a, dtype=t) if a else torch.empty(0, dtype=t, device="cpu") for a, t in columns)
        return Events(*tensors, 1 + max((a.stay for stays in self.stays.values() for a in stays), default=-1), tuple(self.features))


def mimic3(folder: Path, hours: float = 24.0, seed: int = 0) -> Stays:
    """Admissions that last `hours` at least, and what was known by then. Give `mortality` the same hours.

    MIMIC has no official split: a seeded tenth of the patients is "validation", another "test", with all of their admissions.

    Example:
        >>> mimic3(Path("/nowhere"))
        Traceback (most recent call last):
        ...
        FileNotFoundError: /nowhere has no ADMISSIONS.csv or ADMISSIONS.csv.gz: ...
    """
    if not hours > 0:
        raise ValueError(f"mimic3: hours must be positive, got {hours!r}.")
    collected = _Collector(hours)
    admissions, labels = _admissions(folder, collected)
    _patients(folder, collected)
    _codes(folder, collected, admissions)
    _prescriptions(folder, collected)
    for table, prefix in (("LABEVENTS", "lab"), ("CHARTEVENTS", "chart")):
        _measurements(folder, collected, table, prefix)
    kept = [(number, a.subject) for number, a in admissions.items() if a.stay >= 0]
    records = torch.tensor([int(number) for number, _ in kept], dtype=torch.int64, device="cpu")
    return Stays("mimic3", collected.events(), torch.tensor(labels, dtype=torch.int64, device="cpu"), records, _splits([s for _, s in kept], seed))


def _splits(subjects: list[str], seed: int) -> dict[str, Tensor]:
    """Stays by split; all stays of a patient in one."""
    unique = sorted(set(subjects))
    order = torch.randperm(len(unique), generator=torch.Generator("cpu").manual_seed(seed), device="cpu").tolist()
    rank, tenth = {unique[i]: place for place, i in enumerate(order)}, len(unique) // 10
    names = {s: "validation" if rank[s] < tenth else "test" if rank[s] < 2 * tenth else "train" for s in unique}
    rows = {name: [i for i, s in enumerate(subjects) if names[s] == name] for name in ("train", "validation", "test")}
    return {name: torch.tensor(indices, dtype=torch.int64, device="cpu") for name, indices in rows.items()}


# Tables ----------------------------------------------------------------------------------------------------------------


def _admissions(folder: Path, collected: _Collector) -> tuple[dict[str, _Admission], list[int]]:
    out: dict[str, _Admission] = {}
    labels: list[int] = []
    columns = ("subject_id", "hadm_id", "admittime", "dischtime", "deathtime", "hospital_expire_flag", "admission_type", "admission_location")
    for place, (subject, number, start, discharge, death, died, *described) in _rows(folder, "ADMISSIONS", columns, needed=True):
        if number in out or not number.isdecimal() or died not in ("0", "1"):
            what = "is there twice" if number in out else "needs a number, and hospital_expire_flag of 0 or 1"
            raise ValueError(f"{place}: admission {number!r} with hospital_expire_flag {died!r} {what}.")
        began, ended = _time(place, start), _time(place, discharge)
        last = min(ended, _time(place, death)) if death else ended
        stays = last - began > collected.until * _HOUR
        out[number] = admission = _Admission(subject, began, ended, len(labels) if stays else -1)
        collected.stays[subject].append(admission)
        if stays:
            labels.append(int(died))
            for name, value in zip(columns[-2:], described):
                collected.add_to(admission, 0.0, f"{name}={value}")
    return out, labels


def _patients(folder: Path, collected: _Collector) -> None:
    seen = set()
    for place, (subject, gender, birth) in _rows(folder, "PATIENTS", ("subject_id", "gender", "dob"), needed=True):
        if subject in seen:
            raise ValueError(f"{place}: patient {subject!r} is there twice.")
        seen.add(subject)
        born = _time(place, birth)
        for stay in (a for a in collected.stays.get(subject, ()) if a.stay >= 0):
            collected.add_to(stay, 0.0, f"gender={gender}")
            collected.add_to(stay, 0.0, "age", min(_OLDEST, (stay.start - born).days / 365.25))


def _codes(folder: Path, collected: _Collector, admissions: dict[str, _Admission]) -> None:
    for table, prefix in (("DIAGNOSES_ICD", "diagnosis"), ("PROCEDURES_ICD", "procedure")):
        for place, (subject, number, code) in _rows(folder, table, ("subject_id", "hadm_id", "icd9_code")):
            admission = admissions.get(number)
            if admission is None or admission.subject != subject:
                raise ValueError(f"{place}: ADMISSIONS has no admission {number!r} of patient {subject!r}.")
            for later in collected.stays[subject]:
                if code and later.stay >= 0 and admission.discharge <= later.start:
                    collected.add_to(later, (admission.discharge - later.start) / _HOUR, f"{prefix}/{code}")


def _prescriptions(folder: Path, collected: _Collector) -> None:
    for place, (subject, day, drug) in _rows(folder, "PRESCRIPTIONS", ("subject_id", "startdate", "drug")):
        _check_subject(place, subject, collected)
        if day:
            known = _time(place, day)
            midnight = known.hour == known.minute == known.second == 0
            collected.add(subject, known + timedelta(days=1) if midnight else known, f"drug/{drug.casefold()}")


def _measurements(folder: Path, collected: _Collector, table: str, prefix: str) -> None:
    columns = ("subject_id", "itemid", "charttime", "valuenum", "valueuom")
    for place, (subject, item, charted, number, unit) in _rows(folder, table, columns):
        _check_subject(place, subject, collected)
        if charted:
            collected.add(subject, _time(place, charted), f"{prefix}/{item}/{unit.casefold()}", _number(place, number))


# Cells -----------------------------------------------------------------------------------------------------------------


def _check_subject(place: str, subject: str, collected: _Collector) -> None:
    if subject not in collected.stays:
        raise ValueError(f"{place}: ADMISSIONS has no patient {subject!r}.")


def _time(place: str, cell: str) -> datetime:
    try:
        if len(cell) == 19:  # fromisoformat alone would also take a bare date or a zone
            return datetime.fromisoformat(cell)
    except ValueError:
        pass
    raise ValueError(f"{place}: {cell!r} is not a time such as 2164-10-23 21:09:00.")


def _number(place: str, cell: str) -> float:
    if not cell:
        return math.nan
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not abs(value) < 1e38:  # float32 holds it
        raise ValueError(f"{place}: {cell!r} is not a finite number.")
    return value


def _rows(folder: Path, table: str, columns: tuple[str, ...], needed: bool = False) -> Iterator[tuple[str, list[str]]]:
    """The named cells of every line, with its place for messages. Column names may be in capitals, as in the full set."""
    file = next((f for f in (folder / f"{table}.csv", folder / f"{table}.csv.gz") if f.is_file()), None)
    if file is None:
        if needed:
            raise FileNotFoundError(f"{folder} has no {table}.csv or {table}.csv.gz: it must hold ADMISSIONS and PATIENTS.")
        return
    count = 1
    try:
        with _open(file) as stream:
            lines = csv.reader(_lines(stream, file), strict=True)
            names = [name.casefold() for name in next(lines, [])]
            if missing := [c for c in columns if c not in names]:
                raise ValueError(f"{file}, line 1: the columns {', '.join(missing)} are missing.")
            picks = [names.index(c) for c in columns]
            for line in lines:
                count = lines.line_num
                if len(line) != len(names):
                    raise ValueError(f"{file}, line {count}: {len(line)} cells, but there are {len(names)} column names.")
                yield f"{file}, line {count}", [line[i] for i in picks]
    except (csv.Error, EOFError, OSError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{file}, after line {count}: damaged or cut short: {error}") from error


def _open(file: Path) -> Any:
    return gzip.open(file, "rt", encoding="utf8", newline="") if file.suffix == ".gz" else file.open(encoding="utf8", newline="")


def _lines(stream: Any, file: Path) -> Iterator[str]:
    while line := stream.readline(_LINE):
        if len(line) == _LINE:
            raise ValueError(f"{file}: a line has more than {_LINE:,} characters.")
        yield line
