"""MIMIC-III and MIMIC-IV tables, .csv or .csv.gz: in-hospital mortality of every admission that lasts until the prediction time.

MIMIC-III has its tables in one folder (ADMISSIONS, PATIENTS, ...), MIMIC-IV in the folders hosp and icu (hosp/admissions, hosp/patients, ...). Admissions
and patients are needed; diagnoses, procedures, prescriptions, ICU stays, labs and charts, and the names of their items, are read where
they are. They are streamed; what stays in memory is one entry for each admission and 28 bytes for each event that counts.

When an event is known decides whether it may be used, and some of these tables say it only roughly:

    codes           are assigned after discharge: they count from the discharge of their own admission on, so only for later ones
    prescriptions   count from their start; where that is a day without an hour, as in MIMIC-III, from the end of that day
    ICU stays       the first care unit, from the time of entry; the last one and the length are known too late
    labs, charts    MIMIC-IV: from storetime on, when a result could be seen. MIMIC-III: from charttime on, since its labs have no other; for
                    a lab this is when the specimen was taken, hours before its result
    deaths          the outcome; a stay that ends before the prediction time, by discharge or death, is left out

What is known of a patient from before an admission has negative hours in it; `mortality(..., aggregate_older_than=24.0)` gives it a bag.

Sizes: E events, N stays, F features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from slimbayes.data.csv_rows import find_table, number_of, rows, time_of
from slimbayes.data.dataset import Dataset, Found, Part
from slimbayes.data.health import Stays, mortality
from slimbayes.data.measurements import HOUR, Admission, Collector, add_table

_OLDEST = 90.0  # years: the dates of birth of older patients are shifted by centuries, or their age is given as 91


@dataclass(frozen=True)
class _Version:
    """Where a version keeps its tables, and how it calls the columns that the other calls otherwise."""

    name: str
    tables: Mapping[str, str]
    birth: tuple[str, ...]
    code: tuple[str, ...]
    prescribed: str
    measured: tuple[str, ...]

    def file(self, folder: Path, table: str) -> Path | None:
        return find_table(folder, self.tables[table])

    def rows(
        self, folder: Path, table: str, columns: Sequence[str], needed: bool = False
    ) -> Iterator[tuple[str, list[str]]]:
        file = self.file(folder, table)
        if file is None and needed:
            both = " and ".join(self.tables[name] for name in ("admissions", "patients"))
            raise FileNotFoundError(
                f"{folder} has no {self.tables[table]}.csv or {self.tables[table]}.csv.gz: it must hold {both}."
            )
        return rows(file, columns) if file is not None else iter(())


_HOSP = ("admissions", "patients", "diagnoses_icd", "procedures_icd", "prescriptions", "labevents", "d_labitems")
_ICU = ("icustays", "chartevents", "d_items")
_THREE = _Version(
    "mimic3", {t: t.upper() for t in (*_HOSP, *_ICU)}, ("dob",), ("icd9_code",), "startdate", ("charttime",)
)
_FOUR = _Version(
    "mimic4", {t: f"hosp/{t}" for t in _HOSP} | {t: f"icu/{t}" for t in _ICU},
    ("anchor_age", "anchor_year"), ("icd_code", "icd_version"), "starttime", ("charttime", "storetime"),
)  # fmt: skip


def mimic3(folder: Path | str, hours: float = 24.0, seed: int = 0) -> Stays:
    """Admissions that last `hours` at least, and what was known by then. Give `mortality` the same hours.

    MIMIC has no official split: a seeded tenth of the patients is "validation", another "test", with all of their admissions.

    Example:
        >>> mimic3(Path("/nowhere"))
        Traceback (most recent call last):
        ...
        FileNotFoundError: /nowhere has no ADMISSIONS.csv or ADMISSIONS.csv.gz: ...
    """
    return _read(_THREE, Path(folder).expanduser(), hours, seed)


def mimic4(folder: Path | str, hours: float = 24.0, seed: int = 0) -> Stays:
    """As `mimic3`, of MIMIC-IV: the folder that holds hosp and icu.

    Example:
        >>> mimic4(Path("/nowhere"))
        Traceback (most recent call last):
        ...
        FileNotFoundError: /nowhere has no hosp/admissions.csv or hosp/admissions.csv.gz: ...
    """
    return _read(_FOUR, Path(folder).expanduser(), hours, seed)


def bags3(folder: Path) -> Found | None:
    """MIMIC-III for `load`: see `_bags`."""
    return _bags(_THREE, folder)


def bags4(folder: Path) -> Found | None:
    """MIMIC-IV for `load`: see `_bags`."""
    return _bags(_FOUR, folder)


def _bags(version: _Version, folder: Path) -> Found | None:
    """The first day in bags of an hour, the latest 128 tokens of each, and one more bag for all that was known before."""
    if version.file(folder, "admissions") is None or version.file(folder, "patients") is None:
        return None

    @cache
    def data() -> Dataset:
        return mortality(_read(version, folder, 24.0, 0), 24.0, 1.0, aggregate_older_than=24.0, tokens_per_bag=128)

    @cache
    def sizes() -> dict[str, int]:  # of the admissions alone, without a look at the large tables
        admissions, _ = _admissions(version, folder, Collector(24.0))
        return {
            name: len(rows)
            for name, rows in _splits([a.subject for a in admissions.values() if a.stay >= 0], 0).items()
        }

    parts = {
        split: Part(lambda s=split: sizes()[s], lambda s=split: data().splits[s])
        for split in ("train", "validation", "test")
    }
    files = [file for table in version.tables if (file := version.file(folder, table)) is not None]
    return Found(parts, ("survived", "died"), lambda: data().vocabulary, lambda: files)


def _read(version: _Version, folder: Path, hours: float, seed: int) -> Stays:
    if not hours > 0:
        raise ValueError(f"{version.name}: hours must be positive, got {hours!r}.")
    collected = Collector(hours)
    admissions, labels = _admissions(version, folder, collected)
    _patients(version, folder, collected)
    _codes(version, folder, collected, admissions)
    _prescriptions(version, folder, collected)
    _care_units(version, folder, collected)
    for table, items, prefix in (("labevents", "d_labitems", "lab"), ("chartevents", "d_items", "chart")):
        if (file := version.file(folder, table)) is not None:
            names = {item: label for _, (item, label) in version.rows(folder, items, ("itemid", "label"))}
            add_table(collected, file, prefix, version.measured, names)
    kept = [(number, a.subject) for number, a in admissions.items() if a.stay >= 0]
    records = torch.tensor([int(number) for number, _ in kept], dtype=torch.int64, device="cpu")
    return Stays(
        version.name,
        collected.events(),
        torch.tensor(labels, dtype=torch.int64, device="cpu"),
        records,
        _splits([s for _, s in kept], seed),
    )


def _splits(subjects: list[str], seed: int) -> dict[str, Tensor]:
    """Stays by split; all stays of a patient in one."""
    unique = sorted(set(subjects))
    order = torch.randperm(len(unique), generator=torch.Generator("cpu").manual_seed(seed), device="cpu").tolist()
    rank, tenth = {unique[i]: place for place, i in enumerate(order)}, len(unique) // 10
    names = {s: "validation" if rank[s] < tenth else "test" if rank[s] < 2 * tenth else "train" for s in unique}
    chosen = {name: [i for i, s in enumerate(subjects) if names[s] == name] for name in ("train", "validation", "test")}
    return {name: torch.tensor(indices, dtype=torch.int64, device="cpu") for name, indices in chosen.items()}


# Tables ----------------------------------------------------------------------------------------------------------------


def _admissions(version: _Version, folder: Path, collected: Collector) -> tuple[dict[str, Admission], list[int]]:
    out: dict[str, Admission] = {}
    labels: list[int] = []
    columns = (
        "subject_id",
        "hadm_id",
        "admittime",
        "dischtime",
        "deathtime",
        "hospital_expire_flag",
        "admission_type",
        "admission_location",
    )
    for place, (subject, number, start, discharge, death, died, *described) in version.rows(
        folder, "admissions", columns, needed=True
    ):
        if number in out or not number.isdecimal() or died not in ("0", "1"):
            what = "is there twice" if number in out else "needs a number, and hospital_expire_flag of 0 or 1"
            raise ValueError(f"{place}: admission {number!r} with hospital_expire_flag {died!r} {what}.")
        began, ended = time_of(place, start), time_of(place, discharge)
        last = min(ended, time_of(place, death)) if death else ended
        stays = last - began > collected.until * HOUR
        out[number] = admission = Admission(subject, began, ended, len(labels) if stays else -1)
        collected.stays[subject].append(admission)
        if stays:
            labels.append(int(died))
            for name, value in zip(columns[-2:], described):
                collected.add_to(admission, 0.0, f"{name}={value}")
    return out, labels


def _patients(version: _Version, folder: Path, collected: Collector) -> None:
    seen = set()
    for place, (subject, gender, *birth) in version.rows(
        folder, "patients", ("subject_id", "gender", *version.birth), needed=True
    ):
        if subject in seen:
            raise ValueError(f"{place}: patient {subject!r} is there twice.")
        seen.add(subject)
        born = _born(place, birth)
        for stay in (a for a in collected.stays.get(subject, ()) if a.stay >= 0):
            age = (stay.start - born).days / 365.25 if isinstance(born, datetime) else stay.start.year - born
            collected.add_to(stay, 0.0, f"gender={gender}")
            collected.add_to(stay, 0.0, "age", min(_OLDEST, age))


def _born(place: str, cells: list[str]) -> datetime | float:
    """The date of birth, or the year of it by the age in some (shifted) year."""
    if len(cells) == 1:
        return time_of(place, cells[0])
    age, year = (number_of(place, cell) for cell in cells)
    if not (age >= 0 and year > 0):
        raise ValueError(f"{place}: anchor_age {cells[0]!r} and anchor_year {cells[1]!r} must be numbers from 0 on.")
    return year - age


def _codes(version: _Version, folder: Path, collected: Collector, admissions: dict[str, Admission]) -> None:
    for table, prefix in (("diagnoses_icd", "diagnosis"), ("procedures_icd", "procedure")):
        for place, (subject, number, code, *edition) in version.rows(
            folder, table, ("subject_id", "hadm_id", *version.code)
        ):
            admission = admissions.get(number)
            if admission is None or admission.subject != subject:
                raise ValueError(
                    f"{place}: the table of admissions has no admission {number!r} of patient {subject!r}."
                )
            for later in collected.stays[subject]:
                if (
                    code and later.stay >= 0 and admission.discharge <= later.start
                ):  # one code can mean two things in ICD-9 and ICD-10
                    collected.add_to(
                        later, (admission.discharge - later.start) / HOUR, "/".join((prefix, *edition, code))
                    )


def _prescriptions(version: _Version, folder: Path, collected: Collector) -> None:
    for place, (subject, start, drug) in version.rows(
        folder, "prescriptions", ("subject_id", version.prescribed, "drug")
    ):
        collected.check_subject(place, subject)
        if start:
            known = time_of(place, start)
            midnight = known.hour == known.minute == known.second == 0
            collected.add(subject, known + timedelta(days=1) if midnight else known, f"drug/{drug.casefold()}")


def _care_units(version: _Version, folder: Path, collected: Collector) -> None:
    for place, (subject, entered, unit) in version.rows(folder, "icustays", ("subject_id", "intime", "first_careunit")):
        collected.check_subject(place, subject)
        collected.add(subject, time_of(place, entered), f"care unit/{unit.casefold()}")
