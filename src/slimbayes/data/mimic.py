"""MIMIC-III and MIMIC-IV tables, .csv or .csv.gz: in-hospital mortality of those there at the prediction time.

MIMIC-III has its tables in one folder (ADMISSIONS, PATIENTS, ...), MIMIC-IV in the folders hosp and icu. Admissions and
patients are needed; diagnoses, procedures, prescriptions, ICU stays, labs and charts, and the names of their items, are
read where they are, line by line; memory holds one entry for each admission and 28 bytes for each event that counts.

When an event is known decides whether it may be used, and some of these tables say it only roughly:

    codes           are assigned after discharge: they count from their own admission's discharge on, for later ones
    prescriptions   count from their start; where that is a day without an hour, as in MIMIC-III, from the day's end
    ICU stays       the first care unit, from the time of entry; the last one and the length are known too late
    labs, charts    MIMIC-IV: from storetime on, when a result could be seen. MIMIC-III: from charttime on, as its labs
                    have no other; for a lab this is when the specimen was taken, hours before its result
    deaths          the outcome; a stay that ends before the prediction time, by discharge or death, is left out

What is known of a patient from before an admission has negative hours: see `aggregate_older_than` of `mortality`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from slimbayes.data.dataset import Found
from slimbayes.data.events import EventList
from slimbayes.data.stays import (
    Stays,
    find_table,
    found_stays,
    mortality,
    number_of,
    open_rows,
    time_of,
)

SPLITS = ("train", "validation", "test")
_OLDEST = 90.0  # years: the dates of birth of older patients are shifted by centuries, or their age is given as 91


@dataclass(frozen=True)
class Release:
    """Where a release keeps its tables, and how it calls the columns that the other calls otherwise."""

    name: str
    tables: Mapping[str, str]
    birth: tuple[str, ...]
    code: tuple[str, ...]
    prescribed: str
    measured: tuple[str, ...]  # when a measurement was taken, and when it could be seen


_NEEDED = ("admissions", "patients")
_HOSP = (
    "admissions",
    "patients",
    "diagnoses_icd",
    "procedures_icd",
    "prescriptions",
    "labevents",
    "d_labitems",
)
_ICU = ("icustays", "chartevents", "d_items")
MIMIC3 = Release(
    "mimic3",
    {t: t.upper() for t in (*_HOSP, *_ICU)},
    ("dob",),
    ("icd9_code",),
    "startdate",
    ("charttime",),
)
MIMIC4 = Release(
    "mimic4", {t: f"hosp/{t}" for t in _HOSP} | {t: f"icu/{t}" for t in _ICU},
    ("anchor_age", "anchor_year"), ("icd_code", "icd_version"), "starttime", ("charttime", "storetime"),
)  # fmt: skip


def mimic3(folder: Path | str, hours: float = 24.0, seed: int = 0) -> Stays:
    """Admissions that last `hours` at least, and what was known by then: `mortality` asks at that time.

    MIMIC has no official split: a seeded tenth of the patients is "validation", another "test", with all admissions.

    Example:
        >>> mimic3(Path("/nowhere"))
        Traceback (most recent call last):
        ...
        FileNotFoundError: /nowhere has no ADMISSIONS.csv or ADMISSIONS.csv.gz: it must hold ADMISSIONS and PATIENTS.
    """
    return _Reading(MIMIC3, Path(folder).expanduser(), hours).stays(seed)


def mimic4(folder: Path | str, hours: float = 24.0, seed: int = 0) -> Stays:
    """As `mimic3`, of MIMIC-IV: the folder that holds hosp and icu.

    Example:
        >>> mimic4(Path("/nowhere"))
        Traceback (most recent call last):
        ...
        FileNotFoundError: /nowhere has no hosp/admissions.csv or hosp/admissions.csv.gz: ...
    """
    return _Reading(MIMIC4, Path(folder).expanduser(), hours).stays(seed)


def first_day(folder: Path, release: Release) -> Found | None:
    """For `load`: the first day in bags of an hour, the latest 128 tokens of each, and a bag for what came before."""
    files = {
        name: file
        for name, table in release.tables.items()
        if (file := find_table(folder, table)) is not None
    }
    if not files.keys() >= set(_NEEDED):
        return None
    by_hour = partial(mortality, aggregate_older_than=24.0, tokens_per_bag=128)
    return found_stays(
        lambda: _Reading(release, folder, 24.0).stays(0),
        by_hour,
        SPLITS,
        lambda: [*files.values()],
    )


@dataclass(frozen=True)
class Admission:
    """One stay in hospital. `row` is its place among those that are predicted; -1: it ended before that time."""

    patient: str
    start: datetime
    discharge: datetime
    row: int


class _Reading:
    """A release's admissions, and the events so far that precede the prediction time of some of them."""

    def __init__(self, release: Release, folder: Path, hours: float) -> None:
        if not hours > 0:
            raise ValueError(f"{release.name}: hours must be positive, got {hours!r}.")
        self.release, self.folder, self.hours = release, folder, hours
        self.admissions: dict[str, Admission] = {}
        self.predicted: defaultdict[str, list[Admission]] = defaultdict(
            list
        )  # of each patient who was ever admitted
        self.records: list[int] = []
        self.labels: list[int] = []
        self.features: dict[str, int] = {}
        self.events = EventList()
        self.read_admissions()

    def stays(self, seed: int) -> Stays:
        """All that the tables hold."""
        self.read_patients()
        self.read_codes("diagnoses_icd", "diagnosis")
        self.read_codes("procedures_icd", "procedure")
        self.read_prescriptions()
        self.read_care_units()
        self.read_measurements("labevents", "d_labitems", "lab")
        self.read_measurements("chartevents", "d_items", "chart")
        numbers = partial(torch.tensor, dtype=torch.int64, device="cpu")
        events = self.events.events(len(self.labels), tuple(self.features))
        return Stays(
            self.release.name,
            events,
            numbers(self.labels),
            numbers(self.records),
            self.split(seed),
            self.hours,
        )

    def split(self, seed: int) -> dict[str, Tensor]:
        """Rows by split; all stays of a patient in one."""
        owners = [a.patient for a in self.admissions.values() if a.row >= 0]
        patients = sorted(set(owners))
        order = torch.randperm(
            len(patients),
            generator=torch.Generator("cpu").manual_seed(seed),
            device="cpu",
        ).tolist()
        tenth = len(patients) // 10
        names = (
            ["validation"] * tenth
            + ["test"] * tenth
            + ["train"] * (len(patients) - 2 * tenth)
        )
        place = {patients[i]: name for i, name in zip(order, names)}
        rows = {
            name: [row for row, owner in enumerate(owners) if place[owner] == name]
            for name in SPLITS
        }
        return {
            name: torch.tensor(chosen, dtype=torch.int64, device="cpu")
            for name, chosen in rows.items()
        }

    def rows(
        self, table: str, *columns: str
    ) -> AbstractContextManager[Iterator[tuple[str, ...]]]:
        """The cells of a table, of which there are none where the table is not, and may be left out."""
        file, name = (
            find_table(self.folder, self.release.tables[table]),
            self.release.tables[table],
        )
        if file is None and table in _NEEDED:
            both = " and ".join(self.release.tables[needed] for needed in _NEEDED)
            raise FileNotFoundError(
                f"{self.folder} has no {name}.csv or {name}.csv.gz: it must hold {both}."
            )
        return nullcontext(iter(())) if file is None else open_rows(file, columns)

    def add(
        self,
        stays: list[Admission],
        known: datetime,
        feature: str,
        value: float = math.nan,
    ) -> None:
        """An event of every stay whose prediction time it precedes."""
        for stay in stays:
            if (hours := (known - stay.start).total_seconds() / 3600) <= self.hours:
                number = self.features.setdefault(feature, len(self.features))
                self.events.append(stay.row, hours, number, value)

    def of(self, patient: str) -> list[Admission]:
        if patient not in self.predicted:
            raise ValueError(f"the table of admissions has no patient {patient!r}.")
        return self.predicted[patient]

    def read_admissions(self) -> None:
        described = ("admission_type", "admission_location")
        times = ("admittime", "dischtime", "deathtime")
        with self.rows(
            "admissions",
            "subject_id",
            "hadm_id",
            *times,
            "hospital_expire_flag",
            *described,
        ) as rows:
            for patient, number, start, discharge, death, died, *cells in rows:
                if (
                    number in self.admissions
                    or not number.isdecimal()
                    or died not in ("0", "1")
                ):
                    what = (
                        "is there twice"
                        if number in self.admissions
                        else "needs a number, and a flag of 0 or 1"
                    )
                    raise ValueError(
                        f"admission {number!r} with hospital_expire_flag {died!r} {what}."
                    )
                began, ended = time_of(start), time_of(discharge)
                last = min(ended, time_of(death)) if death else ended
                row = (
                    len(self.labels)
                    if last - began > timedelta(hours=self.hours)
                    else -1
                )
                self.admissions[number] = stay = Admission(patient, began, ended, row)
                listed = self.predicted[
                    patient
                ]  # also for patients without a stay that is predicted: they are known
                if row >= 0:
                    listed.append(stay)
                    self.records.append(int(number))
                    self.labels.append(int(died))
                    for name, cell in zip(described, cells):
                        self.add([stay], began, f"{name}={cell}")

    def read_patients(self) -> None:
        seen = set()
        with self.rows("patients", "subject_id", "gender", *self.release.birth) as rows:
            for patient, gender, *birth in rows:
                if patient in seen:
                    raise ValueError(f"patient {patient!r} is there twice.")
                seen.add(patient)
                born = _born(birth)
                for stay in self.predicted.get(patient, ()):
                    age = (
                        (stay.start - born).days / 365.25
                        if isinstance(born, datetime)
                        else stay.start.year - born
                    )
                    self.add([stay], stay.start, f"gender={gender}")
                    self.add([stay], stay.start, "age", min(_OLDEST, age))

    def read_codes(self, table: str, prefix: str) -> None:
        with self.rows(table, "subject_id", "hadm_id", *self.release.code) as rows:
            for patient, number, code, *edition in rows:
                admission = self.admissions.get(number)
                if admission is None or admission.patient != patient:
                    raise ValueError(
                        f"the table of admissions has no admission {number!r} of patient {patient!r}."
                    )
                name = "/".join(
                    (prefix, *edition, code)
                )  # one code can mean two things in ICD-9 and ICD-10
                later = [
                    stay
                    for stay in self.of(patient)
                    if code and admission.discharge <= stay.start
                ]
                self.add(later, admission.discharge, name)

    def read_prescriptions(self) -> None:
        with self.rows(
            "prescriptions", "subject_id", self.release.prescribed, "drug"
        ) as rows:
            for patient, start, drug in rows:
                stays = self.of(patient)
                if start:
                    known = time_of(start)
                    midnight = known.hour == known.minute == known.second == 0
                    self.add(
                        stays,
                        known + timedelta(days=1) if midnight else known,
                        f"drug/{drug.casefold()}",
                    )

    def read_care_units(self) -> None:
        with self.rows("icustays", "subject_id", "intime", "first_careunit") as rows:
            for patient, entered, unit in rows:
                self.add(
                    self.of(patient), time_of(entered), f"care unit/{unit.casefold()}"
                )

    def read_measurements(self, table: str, items: str, prefix: str) -> None:
        """Every measurement, named <prefix>/<item>/<unit>, with the item's label where there is one; it is known at the
        latest of its times, and left out where it does not say when it was taken."""
        with self.rows(items, "itemid", "label") as rows:
            labels = {
                item: f" {label.casefold()}" if label else "" for item, label in rows
            }

        @cache  # these tables have hundreds of millions of lines
        def name(item: str, unit: str) -> str:
            return f"{prefix}/{item}{labels.get(item, '')}/{unit.casefold()}"

        with self.rows(
            table,
            "subject_id",
            "itemid",
            "valuenum",
            "valueuom",
            *self.release.measured,
        ) as rows:
            for patient, item, cell, unit, taken, *stored in rows:
                stays = self.of(patient)
                if taken:
                    known = time_of(taken)
                    for moment in filter(None, stored):
                        known = max(known, time_of(moment))
                    self.add(stays, known, name(item, unit), number_of(cell))


def _born(cells: list[str]) -> datetime | float:
    """The date of birth, or the year of it by the age in some (shifted) year."""
    if len(cells) == 1:
        return time_of(cells[0])
    age, year = map(number_of, cells)
    if not (age >= 0 and year > 0):
        raise ValueError(
            f"anchor_age {cells[0]!r} and anchor_year {cells[1]!r} must be numbers from 0 on."
        )
    return year - age
