"""PhysioNet/Computing in Cardiology Challenge 2012: the first 48 hours of 12,000 stays in intensive care, and who died in hospital.

Formats: the official text, set-{a,b,c}/<RecordID>.txt (or any of the three) with Outcomes-{a,b,c}.txt; or challenge2012.npz.xz, the same
measurements as arrays. The challenge trained on set a, scored entries on b and ranked them on c: here "train", "validation" and "test".

-1 stands for a missing value throughout and gives no event; neither does a line without a parameter's name, of which set c has 2,403.

Sizes: E events, N stays, F features.
"""

from __future__ import annotations

import csv
import re
from array import array
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimbayes.data.dataset import Dataset, Found, Part
from slimbayes.data.health import Events, Stays, mortality
from slimbayes.data.physionet_features import FEATURES, MISSING, OUTCOMES, SETS, event_of
from slimbayes.data.physionet_packed import PACKED, read_packed, set_sizes

_TIME = re.compile(r"(\d{2,3}):([0-5]\d)")


def physionet2012(folder: Path | str) -> Stays:
    """All stays in a folder of either format. A line that is not of the format is an error that names file and line.

    Example:
        >>> physionet2012(Path("/nowhere"))
        Traceback (most recent call last):
        ...
        FileNotFoundError: /nowhere has neither challenge2012.npz.xz nor a folder set-a, set-b or set-c beside its Outcomes-a.txt, ...
    """
    folder = Path(folder).expanduser()
    if (folder / PACKED).is_file():
        return read_packed(folder / PACKED)
    letters = [letter for letter in SETS if (folder / f"set-{letter}").is_dir()]
    if not letters:
        raise FileNotFoundError(
            f"{folder} has neither {PACKED} nor a folder set-a, set-b or set-c beside its Outcomes-a.txt, -b or -c."
        )
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
            return set_sizes(folder / PACKED)[SETS[letter]]
        return len(_outcomes(folder / f"Outcomes-{letter}.txt"))

    parts = {SETS[k]: Part(lambda k=k: count(k), lambda k=k: data().splits[SETS[k]]) for k in letters}
    return Found(parts, ("survived", "died"), lambda: data().vocabulary, lambda: _files(folder)) if parts else None


def _files(folder: Path) -> list[Path]:
    if (folder / PACKED).is_file():
        return [folder / PACKED]
    letters = [letter for letter in SETS if (folder / f"set-{letter}").is_dir()]
    return [
        file for k in letters for file in (folder / f"Outcomes-{k}.txt", *sorted((folder / f"set-{k}").glob("*.txt")))
    ]


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
    columns = (
        _tensor(patient, torch.int64),
        _tensor(hours, torch.float64),
        _tensor(feature, torch.int64),
        _tensor(value, torch.float32),
    )
    return Stays(
        "physionet2012",
        Events(*columns, len(records), FEATURES),
        torch.tensor(labels, device="cpu"),
        torch.tensor(records, device="cpu"),
        splits,
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
                raise ValueError(
                    f"{file}, line 1: expected the column names {','.join(names)}, got {','.join(first)!r}."
                )
            for line in lines:
                if len(line) != len(names):
                    raise ValueError(f"{file}, line {lines.line_num}: {len(line)} cells, expected {','.join(names)}.")
                yield f"{file}, line {lines.line_num}", line
        except csv.Error as error:
            raise ValueError(f"{file}, line {lines.line_num}: {error}.") from error


def _outcomes(file: Path) -> dict[int, int]:
    """Whether each record's patient died in hospital, in the file's order."""
    out: dict[int, int] = {}
    for place, line in _rows(file, OUTCOMES):
        if not line[0].isdecimal() or line[-1] not in ("0", "1"):
            raise ValueError(
                f"{place}: expected a RecordID and an In-hospital_death of 0 or 1, got {line[0]!r} and {line[-1]!r}."
            )
        if int(line[0]) in out:
            raise ValueError(f"{place}: record {line[0]} is there twice.")
        out[int(line[0])] = int(line[-1])
    return out


def _check_files(folder: Path, outcomes: dict[int, int]) -> None:
    here, needed = {file.name for file in folder.glob("*.txt")}, {f"{record}.txt" for record in outcomes}
    if here != needed:
        missing, extra = sorted(needed - here), sorted(here - needed)
        what = f"{missing[0]} is missing" if missing else f"{extra[0]} has no outcome"
        raise ValueError(
            f"{folder}: {what}; {len(missing)} records of the outcome file have no file, {len(extra)} files no outcome."
        )


def _record(file: Path, record: int) -> Iterator[tuple[float, int, float]]:
    """Hour, feature and value of every event of a stay."""
    named = 0
    for place, (time, name, cell) in _rows(file, ["Time", "Parameter", "Value"]):
        clock = _TIME.fullmatch(time)
        value = _number(cell)
        if clock is None or value is None:
            raise ValueError(
                f"{place}: expected hh:mm, a parameter and a finite number, got {time!r}, {name!r} and {cell!r}."
            )
        if name == "RecordID":
            named += 1
            if value != record or named > 1:
                raise ValueError(f"{place}: RecordID {cell}; the file must say {record}, once.")
        elif name and value != MISSING:
            yield (60 * int(clock[1]) + int(clock[2])) / 60, *event_of(place, name, value)
    if not named:
        raise ValueError(f"{file}: no line says RecordID {record}; the file is cut short or not of this set.")


def _number(cell: str) -> float | None:
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if abs(value) < 1e38 and "_" not in cell else None  # float32 holds it, and Python's 1_000 is none
