"""PhysioNet/CinC Challenge 2012: the first 48 hours of 12,000 stays in intensive care, and who died in hospital.

Formats: the official text, set-{a,b,c}/<RecordID>.txt (or any of the three) with Outcomes-{a,b,c}.txt; or
challenge2012.npz.xz, the same measurements as arrays, sorted by parameter, record and time:

    record_id, set, outcomes      of every record; `set` has the letter a, b or c as a byte
    param_names, count            of every parameter; `count` has its measurements in each record
    time_min, value_code          of every measurement; its value is value_table[value_code]

The challenge trained on set a, scored entries on b and ranked them on c: here "train", "validation" and "test".

-1 stands for a missing value throughout and gives no event; neither does a line without a parameter's name, of which
set c has 2,403. Gender, ICUType and MechVent are categories: each of their values is a feature without a value of its
own. Scores and lengths of stay from the outcome files are never features: they are known too late.

Sizes: E events, N stays.
"""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slimbayes_lab.data.archives import read_npz, read_xz
from slimbayes_lab.data.dataset import Found
from slimbayes_lab.data.events import EventList, Events
from slimbayes_lab.data.stays import Stays, found_stays, mortality, number_of, open_rows

SETS = {"a": "train", "b": "validation", "c": "test"}
PACKED = "challenge2012.npz.xz"
OUTCOMES = [
    "RecordID",
    "SAPS-I",
    "SOFA",
    "Length_of_stay",
    "Survival",
    "In-hospital_death",
]
CATEGORIES = {"Gender": (0, 1), "ICUType": (1, 2, 3, 4), "MechVent": (0, 1)}
FEATURES = (
    "ALP", "ALT", "AST", "Age", "Albumin", "BUN", "Bilirubin", "Cholesterol", "Creatinine", "DiasABP", "FiO2", "GCS",
    "Glucose", "HCO3", "HCT", "HR", "Height", "K", "Lactate", "MAP", "Mg", "NIDiasABP", "NIMAP", "NISysABP", "Na",
    "PaCO2", "PaO2", "Platelets", "RespRate", "SaO2", "SysABP", "Temp", "TroponinI", "TroponinT", "Urine", "WBC",
    "Weight", "pH",
    *(f"{name}={value}" for name, values in CATEGORIES.items() for value in values),
)  # fmt: skip
MISSING = -1.0
_NUMBER = {name: number for number, name in enumerate(FEATURES)}
_TIME = re.compile(r"(\d{2,3}):([0-5]\d)")


def physionet2012(folder: Path | str) -> Stays:
    """All stays in a folder of either format. What is not of the format is an error that names the file and the line.

    Example:
        >>> physionet2012(Path("/nowhere"))
        Traceback (most recent call last):
        ...
        FileNotFoundError: /nowhere has neither challenge2012.npz.xz nor set-a, set-b or set-c ...
    """
    folder = Path(folder).expanduser()
    if (folder / PACKED).is_file():
        return _read_packed(folder / PACKED)
    if not (letters := _letters(folder)):
        raise FileNotFoundError(
            f"{folder} has neither {PACKED} nor set-a, set-b or set-c beside its Outcomes-a.txt ..."
        )
    return _read_text(folder, letters)


def bags(folder: Path) -> Found | None:
    """For `load`: the set as `mortality` makes it by default: all 48 hours, one bag an hour, buckets from set a."""
    packed = (folder / PACKED).is_file()

    def files() -> list[Path]:
        texts = (
            (folder / f"Outcomes-{k}.txt", *sorted((folder / f"set-{k}").glob("*.txt")))
            for k in _letters(folder)
        )
        return (
            [folder / PACKED] if packed else [file for group in texts for file in group]
        )

    letters = list(SETS) if packed else _letters(folder)
    splits = [SETS[letter] for letter in letters]
    return (
        found_stays(partial(physionet2012, folder), mortality, splits, files)
        if letters
        else None
    )


def _letters(folder: Path) -> list[str]:
    return [letter for letter in SETS if (folder / f"set-{letter}").is_dir()]


def _event_of(name: str, value: float) -> tuple[int, float]:
    """Feature and value of a measurement; a category has no value."""
    category = name in CATEGORIES
    number = _NUMBER.get(f"{name}={value:g}" if category else name)
    if number is None:
        known = (
            f"one of {CATEGORIES[name]}"
            if category
            else "one of the challenge's parameters"
        )
        raise ValueError(
            f"{f'{name} {value:g}' if category else repr(name)} is not {known}."
        )
    return number, math.nan if category else value


# The official text ----------------------------------------------------------------------------------------------------


def _read_text(folder: Path, letters: list[str]) -> Stays:
    events, splits = EventList(), {}
    deaths: list[int] = []
    records: list[int] = []
    for letter in letters:
        outcomes = _outcomes(folder / f"Outcomes-{letter}.txt")
        _check_files(folder / f"set-{letter}", outcomes)
        splits[SETS[letter]] = torch.arange(
            len(records), len(records) + len(outcomes), device="cpu"
        )
        for record, died in outcomes.items():
            for hour, feature, value in _record(
                folder / f"set-{letter}" / f"{record}.txt", record
            ):
                events.append(len(records), hour, feature, value)
            records.append(record)
            deaths.append(died)
    record, times = Counter(records).most_common(1)[0] if records else (0, 1)
    if times > 1:
        raise ValueError(
            f"{folder}: record {record} is in two sets; a stay must be in one."
        )
    y, numbers = torch.tensor(deaths, device="cpu"), torch.tensor(records, device="cpu")
    return Stays(
        "physionet2012", events.events(len(records), FEATURES), y, numbers, splits
    )


def _outcomes(file: Path) -> dict[int, int]:
    """Whether each record's patient died in hospital, in the file's order."""
    out: dict[int, int] = {}
    with open_rows(file, OUTCOMES) as rows:
        for record, *_, died in rows:
            if not record.isdecimal() or died not in ("0", "1"):
                raise ValueError(
                    f"expected a RecordID and a death of 0 or 1, got {record!r} and {died!r}."
                )
            if int(record) in out:
                raise ValueError(f"record {record} is there twice.")
            out[int(record)] = int(died)
    return out


def _check_files(folder: Path, outcomes: dict[int, int]) -> None:
    here, needed = (
        {file.name for file in folder.glob("*.txt")},
        {f"{record}.txt" for record in outcomes},
    )
    if missing := sorted(needed - here):
        raise ValueError(
            f"{folder}: {missing[0]} is missing, as are {len(missing) - 1} more of the records."
        )
    if extra := sorted(here - needed):
        raise ValueError(
            f"{folder}: {extra[0]} has no outcome, nor have {len(extra) - 1} more files."
        )


def _record(file: Path, record: int) -> Iterator[tuple[float, int, float]]:
    """Hour, feature and value of every event of a stay."""
    named = 0
    with open_rows(file, ("Time", "Parameter", "Value")) as rows:
        for time, name, cell in rows:
            clock, value = _TIME.fullmatch(time), number_of(cell)
            if clock is None or math.isnan(value):
                raise ValueError(
                    f"expected hh:mm, a parameter and a number, got {time!r}, {name!r} and {cell!r}."
                )
            if name == "RecordID":
                named += 1
                if value != record or named > 1:
                    raise ValueError(
                        f"RecordID {cell}; the file must say {record}, once."
                    )
            elif name and value != MISSING:
                yield (60 * int(clock[1]) + int(clock[2])) / 60, *_event_of(name, value)
    if not named:
        raise ValueError(
            f"{file}: no line says RecordID {record}; the file is cut short or not of this set."
        )


# Arrays ---------------------------------------------------------------------------------------------------------------


def _read_packed(file: Path) -> Stays:
    names = (
        "record_id",
        "set",
        "param_names",
        "count",
        "time_min",
        "value_code",
        "value_table",
        "outcomes",
    )
    arrays = read_npz(file, *names, "outcome_names", content=io.BytesIO(read_xz(file)))
    _check_packed(file, arrays)
    counts = torch.from_numpy(arrays["count"].astype("int64"))
    who = (
        torch.arange(counts.shape[1], device="cpu")
        .repeat(len(counts))
        .repeat_interleave(counts.flatten())
    )
    hours = torch.from_numpy(arrays["time_min"].astype("float64") / 60)
    value = torch.from_numpy(arrays["value_table"][arrays["value_code"]])
    by_parameter = zip(
        arrays["param_names"].tolist(), value.split(counts.sum(1).tolist()), strict=True
    )
    parts = [_features(file, name, values) for name, values in by_parameter]
    kept = value != MISSING
    feature, measured = (torch.cat(column)[kept] for column in zip(*parts, strict=True))
    events = Events(
        who[kept], hours[kept], feature, measured, counts.shape[1], FEATURES
    )
    letters = torch.from_numpy(arrays["set"])
    splits = {
        split: (letters == ord(letter)).nonzero().flatten()
        for letter, split in SETS.items()
    }
    deaths, records = (
        torch.from_numpy(a.astype("int64"))
        for a in (arrays["outcomes"][:, -1], arrays["record_id"])
    )
    return Stays("physionet2012", events, deaths, records, splits)


def _features(
    file: Path, name: str, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and values of the measurements of one parameter, as `_event_of` gives them one by one."""
    try:
        if name not in CATEGORIES:
            return torch.full(value.shape, _event_of(name, 0.0)[0], device="cpu"), value
        feature = torch.zeros(value.shape, dtype=torch.int64, device="cpu")
        for category in value[value != MISSING].unique().tolist():
            feature[value == category] = _event_of(name, category)[0]
        return feature, torch.full_like(value, math.nan)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _check_packed(file: Path, arrays: dict[str, Any]) -> None:
    counts, codes, table, outcomes = (
        arrays[name] for name in ("count", "value_code", "value_table", "outcomes")
    )
    records, sets, total = (
        arrays["record_id"].tolist(),
        arrays["set"].tolist(),
        len(arrays["time_min"]),
    )
    shape = (len(arrays["param_names"]), len(records))
    named = outcomes.shape == (len(records), 6)
    indexed = len(codes) == total and bool((codes < len(table)).all())
    unique = (
        named
        and outcomes[:, 0].tolist() == records
        and len(set(records)) == len(records)
    )
    for name, fits, need in (
        (
            "count",
            counts.shape == shape and int(counts.sum()) == total,
            "a number for each parameter and record",
        ),
        ("value_code", indexed, "an index of value_table for each event"),
        ("value_table", abs(table).max(initial=0.0) < 1e38, "finite numbers"),
        (
            "set",
            len(sets) == len(records) and set(sets) <= set(map(ord, SETS)),
            "the letter a, b or c for each record",
        ),
        (
            "outcome_names",
            arrays["outcome_names"].tolist() == OUTCOMES,
            ", ".join(OUTCOMES),
        ),
        (
            "outcomes",
            named and set(outcomes[:, -1].tolist()) <= {0, 1},
            "six columns, the last 0 or 1",
        ),
        ("record_id", unique, "the RecordIDs"),
    ):
        if not fits:
            raise ValueError(f"{file}: the array {name} must hold {need}.")
