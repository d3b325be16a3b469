"""PhysioNet/Computing in Cardiology Challenge 2012: the first 48 hours of 12,000 stays in intensive care, and who died in hospital.

Formats: the official text, set-{a,b,c}/<RecordID>.txt (or any of the three) with Outcomes-{a,b,c}.txt; or challenge2012.npz.xz, the same
measurements as arrays. The challenge trained on set a, scored entries on b and ranked them on c: here "train", "validation" and "test".

-1 stands for a missing value throughout and gives no event; neither does a line without a parameter's name, of which set c has 2,403.
Gender, ICUType and MechVent are categories: each of their values is a feature without a value of its own. Scores and lengths of stay
from the outcome files are never features: they are known too late.

Sizes: E events, N stays, F features.
"""

from __future__ import annotations

import csv
import io
import math
import re
from array import array
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimbayes.data.archives import read_npz, read_xz, require
from slimbayes.data.dataset import Dataset, Found, Part
from slimbayes.data.health import Events, Stays, mortality

SETS = {"a": "train", "b": "validation", "c": "test"}
PACKED = "challenge2012.npz.xz"
_NUMBERS = (
    "ALP", "ALT", "AST", "Age", "Albumin", "BUN", "Bilirubin", "Cholesterol", "Creatinine", "DiasABP", "FiO2", "GCS", "Glucose", "HCO3", "HCT",
    "HR", "Height", "K", "Lactate", "MAP", "Mg", "NIDiasABP", "NIMAP", "NISysABP", "Na", "PaCO2", "PaO2", "Platelets", "RespRate", "SaO2",
    "SysABP", "Temp", "TroponinI", "TroponinT", "Urine", "WBC", "Weight", "pH",
)  # fmt: skip
_CATEGORIES = {"Gender": (0, 1), "ICUType": (1, 2, 3, 4), "MechVent": (0, 1)}
FEATURES = (*_NUMBERS, *(f"{name}={value}" for name, values in _CATEGORIES.items() for value in values))
_FEATURE = {name: number for number, name in enumerate(FEATURES)}
_MISSING = -1.0
_OUTCOMES = ["RecordID", "SAPS-I", "SOFA", "Length_of_stay", "Survival", "In-hospital_death"]
_TIME = re.compile(r"(\d{2,3}):([0-5]\d)")


def physionet2012(folder: Path) -> Stays:
    """All stays in a folder of either format. A line that is not of the format is an error that names file and line.

    Example:
        >>> physionet2012(Path("/nowhere"))
        Traceback (most recent call last):
        ...
        FileNotFoundError: /nowhere has neither challenge2012.npz.xz nor a folder set-a, set-b or set-c beside its Outcomes-a.txt, ...
    """
    if (folder / PACKED).is_file():
        return _read_packed(folder / PACKED)
    letters = [letter for letter in SETS if (folder / f"set-{letter}").is_dir()]
    if not letters:
        raise FileNotFoundError(f"{folder} has neither {PACKED} nor a folder set-a, set-b or set-c beside its Outcomes-a.txt, -b or -c.")
    return _read_text(folder, letters)


def bags(folder: Path) -> Found | None:
    """The set as `mortality` makes it by default: all 48 hours, one bag an hour, buckets from set a."""
    packed = (folder / PACKED).is_file()
    letters = [letter for letter in SETS if packed or (folder / f"set-{letter}").is_dir()]

    @cache
    def data() -> Dataset:
        return mortality(physionet2012(folder))

    def count(letter: str) -> int:
        if packed:
            return int((_arrays(folder / PACKED, "set")["set"] == ord(letter)).sum())
        return len(_outcomes(folder / f"Outcomes-{letter}.txt"))

    parts = {SETS[k]: Part(lambda k=k: count(k), lambda k=k: data().splits[SETS[k]]) for k in letters}
    return Found(parts, ("survived", "died"), lambda: data().vocabulary, lambda: _files(folder)) if parts else None


def _files(folder: Path) -> list[Path]:
    if (folder / PACKED).is_file():
        return [folder / PACKED]
    letters = [letter for letter in SETS if (folder / f"set-{letter}").is_dir()]
    return [file for k in letters for file in (folder / f"Outcomes-{k}.txt", *sorted((folder / f"set-{k}").glob("*.txt")))]


# The official text -----------------------------------------------------------------------------------------------------


def _read_text(folder: Path, letters: list[str]) -> Stays:
    patient, feature, hours, value = array("q"), array("q"), array("d"), array("f")
    labels: list[int] = []
    records: list[int] = []
    splits = {}
    for letter in letters:
        outcomes = _outcomes(folder / f"Outcomes-{letter}.txt")
        _check_files(folder / f"set-{letter}", outcomes)
        splits[SETS[letter]] = torch.arange(len(records), len(records) + len(outcomes), device="cpu")
        for record, died in outcomes.items():
            for hour, number, measured in _record(folder / f"set-{letter}" / f"{record}.txt", record):
                patient.append(len(records))
                hours.append(hour)
                feature.append(number)
                value.append(measured)
            records.append(record)
            labels.append(died)
    if len(set(records)) != len(records):
        again = Counter(records).most_common(1)[0][0]
        raise ValueError(f"{folder}: record {again} is in two sets; a stay must be in one.")
    columns = (_tensor(patient, torch.int64), _tensor(hours, torch.float64), _tensor(feature, torch.int64), _tensor(value, torch.float32))
    return Stays(
        "physionet2012", Events(*columns, len(records), FEATURES), torch.tensor(labels, device="cpu"), torch.tensor(records, device="cpu"), splits
    )


def _tensor(values: array[Any], dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype, device="cpu")


def _rows(file: Path, names: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Each line after that of the column names, with its place for messages."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing.")
    with file.open(newline="", encoding="utf8", errors="replace") as stream:
        lines = csv.reader(stream, strict=True)
        try:
            if (first := next(lines, [])) != names:
                raise ValueError(f"{file}, line 1: expected the column names {','.join(names)}, got {','.join(first)!r}.")
            for line in lines:
                if len(line) != len(names):
                    raise ValueError(f"{file}, line {lines.line_num}: {len(line)} cells, expected {','.join(names)}.")
                yield f"{file}, line {lines.line_num}", line
        except csv.Error as error:
            raise ValueError(f"{file}, line {lines.line_num}: {error}.") from error


def _outcomes(file: Path) -> dict[int, int]:
    """Whether each record's patient died in hospital, in the file's order."""
    out: dict[int, int] = {}
    for place, line in _rows(file, _OUTCOMES):
        if not line[0].isdecimal() or line[-1] not in ("0", "1"):
            raise ValueError(f"{place}: expected a RecordID and an In-hospital_death of 0 or 1, got {line[0]!r} and {line[-1]!r}.")
        if int(line[0]) in out:
            raise ValueError(f"{place}: record {line[0]} is there twice.")
        out[int(line[0])] = int(line[-1])
    return out


def _check_files(folder: Path, outcomes: dict[int, int]) -> None:
    here, needed = {file.name for file in folder.glob("*.txt")}, {f"{record}.txt" for record in outcomes}
    if here != needed:
        missing, extra = sorted(needed - here), sorted(here - needed)
        what = f"{missing[0]} is missing" if missing else f"{extra[0]} has no outcome"
        raise ValueError(f"{folder}: {what}; {len(missing)} records of the outcome file have no file, {len(extra)} files no outcome.")


def _record(file: Path, record: int) -> Iterator[tuple[float, int, float]]:
    """Hour, feature and value of every event of a stay."""
    named = 0
    for place, (time, name, cell) in _rows(file, ["Time", "Parameter", "Value"]):
        clock = _TIME.fullmatch(time)
        value = _number(cell)
        if clock is None or value is None:
            raise ValueError(f"{place}: expected hh:mm, a parameter and a finite number, got {time!r}, {name!r} and {cell!r}.")
        if name == "RecordID":
            named += 1
            if value != record or named > 1:
                raise ValueError(f"{place}: RecordID {cell}; the file must say {record}, once.")
        elif name and value != _MISSING:
            yield (60 * int(clock[1]) + int(clock[2])) / 60, *_event(place, name, value)
    if not named:
        raise ValueError(f"{file}: no line says RecordID {record}; the file is cut short or not of this set.")


def _number(cell: str) -> float | None:
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if abs(value) < 1e38 and "_" not in cell else None  # float32 holds it, and Python's 1_000 is none


def _event(place: str, name: str, value: float) -> tuple[int, float]:
    """Feature and value of a measurement; a category has no value."""
    category = name in _CATEGORIES
    number = _FEATURE.get(f"{name}={value:g}" if category else name)
    if number is None:
        known = f"one of {_CATEGORIES[name]}" if category else "one of the challenge's parameters"
        raise ValueError(f"{place}: {f'{name} {value:g}' if category else repr(name)} is not {known}.")
    return number, math.nan if category else value


# The packed arrays -----------------------------------------------------------------------------------------------------


class _Unpacked(io.BytesIO):
    """A file in memory whose name in messages is that of the file it came from."""

    def __init__(self, file: Path) -> None:
        super().__init__(read_xz(file))
        self.file = file

    def __str__(self) -> str:
        return str(self.file)


def _arrays(file: Path, *names: str) -> dict[str, Any]:
    return read_npz(_Unpacked(file), *names)


def _read_packed(file: Path) -> Stays:
    names = ("record_id", "set", "param_names", "count", "time_min", "value_code", "value_table", "outcomes", "outcome_names")
    arrays = _arrays(file, *names)
    _check_packed(file, arrays)
    counts = arrays["count"].astype("int64")
    stays, ends = torch.arange(counts.shape[1], device="cpu"), counts.sum(1).cumsum()
    columns: list[list[Tensor]] = [[], [], [], []]
    for name, count, end in zip(arrays["param_names"].tolist(), counts, ends.tolist()):
        part = slice(end - int(count.sum()), end)
        value = torch.from_numpy(arrays["value_table"][arrays["value_code"][part]])
        hours = torch.from_numpy(arrays["time_min"][part].astype("float64")) / 60
        feature, measured = _features(f"{file}, parameter {name}", name, value)
        kept = value != _MISSING
        patient = torch.repeat_interleave(stays, torch.from_numpy(count))
        for column, values in zip(columns, (patient, hours, feature, measured)):
            column.append(values[kept])
    patient, hours, feature, measured = (torch.cat(column) for column in columns)
    labels, letters = torch.from_numpy(arrays["outcomes"][:, -1].astype("int64")), torch.from_numpy(arrays["set"])
    splits = {split: (letters == ord(letter)).nonzero().flatten() for letter, split in SETS.items()}
    records = torch.from_numpy(arrays["record_id"].astype("int64"))
    return Stays("physionet2012", Events(patient, hours, feature, measured, len(stays), FEATURES), labels, records, splits)


def _features(place: str, name: str, value: Tensor) -> tuple[Tensor, Tensor]:
    """Features and values of the measurements of one parameter, as `_event` gives them one by one."""
    if name not in _CATEGORIES:
        return torch.full(value.shape, _event(place, name, 0.0)[0], device="cpu"), value
    feature = torch.zeros(value.shape, dtype=torch.int64, device="cpu")
    for category in value[value != _MISSING].unique().tolist():
        feature[value == category] = _event(place, name, category)[0]
    return feature, torch.full_like(value, math.nan)


def _check_packed(file: Path, arrays: dict[str, Any]) -> None:
    numpy = require("numpy")
    counts, events, stays = arrays["count"], len(arrays["time_min"]), len(arrays["record_id"])
    for name, fits, need in (
        ("count", counts.shape == (len(arrays["param_names"]), stays) and int(counts.sum()) == events, "one number for each parameter and record, that add up to the events"),
        ("value_code", len(arrays["value_code"]) == events and (not events or int(arrays["value_code"].max()) < len(arrays["value_table"])), "an index of value_table for each event"),
        ("value_table", bool(numpy.isfinite(arrays["value_table"]).all()), "finite numbers"),
        ("set", len(arrays["set"]) == stays and set(arrays["set"].tolist()) <= set(map(ord, SETS)), "the letter a, b or c for each record"),
        ("outcome_names", arrays["outcome_names"].tolist() == _OUTCOMES, ", ".join(_OUTCOMES)),
        ("outcomes", arrays["outcomes"].shape == (stays, 6) and set(arrays["outcomes"][:, -1].tolist()) <= {0, 1}, "six columns, the last 0 or 1"),
        ("record_id", numpy.array_equal(arrays["record_id"], arrays["outcomes"][:, 0]) and len(set(arrays["record_id"].tolist())) == stays, "the RecordIDs of outcomes, each once"),
    ):  # fmt: skip
        if not fits:
            raise ValueError(f"{file}: the array {name} must hold {need}.")
