"""MIMIC-III tables, .csv or .csv.gz: in-hospital mortality of those there at the prediction time.

The tables lie in one folder. ADMISSIONS and PATIENTS are needed; diagnoses, procedures, prescriptions, ICU stays, labs
and charts, and the names of their items, are read where they are, line by line; memory holds one entry for each
admission and 28 bytes for each event that counts.

When an event is known decides whether it may be used, and some of these tables say it only roughly:

    codes           are assigned after discharge: they count from their own admission's discharge on, for later ones
    prescriptions   count from their start; where that is a day without an hour, from the day's end
    ICU stays       the first care unit, from the time of entry; the last one and the length are known too late
    labs, charts    from charttime on, as labs have no other time: for a lab this is when the specimen was taken, hours
                    before its result
    deaths          the outcome; a stay that ends before the prediction time, by discharge or death, is left out

What is known of a patient from before an admission has negative hours: see `aggregate_older_than` of `mortality`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from slimbayes_lab.data.dataset import Found
from slimbayes_lab.data.events import EventList
from slimbayes_lab.data.stays import (
    Stays,
    find_table,
    found_stays,
    mortality,
    number_of,
    open_rows,
    time_of,
)

SPLITS = ("train", "validation", "test")
_OLDEST = 90.0  # years: the dates of birth of older patients are shifted by centuries


NEEDED = ("ADMISSIONS", "PATIENTS")
OPTIONAL = (
    "DIAGNOSES_ICD",
    "PROCEDURES_ICD",
    "PRESCRIPTIONS",
    "LABEVENTS",
    "D_LABITEMS",
    "ICUSTAYS",
    "CHARTEVENTS",
    "D_ITEMS",
)


def mimic3(folder: Path | str, hours: float = 24.0, seed: int = 0) -> Stays:
    """Admissions that last `hours` at least, and what was known by then: `mortality` asks at that time.

    MIMIC has no official split: a seeded tenth of the patients is "validation", another "test", with all admissions.

    Example:
        >>> mimic3(Path("/nowhere"))
        Traceback (most recent call last):
        ...
        FileNotFoundError: /nowhere has no ADMISSIONS.csv or ADMISSIONS.csv.gz: it must hold ADMISSIONS and PATIENTS.
    """
    return _Reading(Path(folder).expanduser(), hours).stays(seed)


def first_day(folder: Path) -> Found | None:
    """For `load`: the first day in bags of an hour, the latest 128 tokens of each, and a bag for what came before."""
    files = {
        table: file
        for table in (*NEEDED, *OPTIONAL)
        if (file := find_table(folder, table)) is not None
    }
    if not files.keys() >= set(NEEDED):
        return None
    by_hour = partial(mortality, aggregate_older_than=24.0, tokens_per_bag=128)
    return found_stays(
        lambda: _Reading(folder, 24.0).stays(0),
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
    """The admissions, and the events so far that precede the prediction time of some of them."""

    def __init__(self, folder: Path, hours: float) -> None:
        if not hours > 0:
            raise ValueError(f"mimic3: hours must be positive, got {hours!r}.")
        self.folder, self.hours = folder, hours
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
        self.read_codes("DIAGNOSES_ICD", "diagnosis")
        self.read_codes("PROCEDURES_ICD", "procedure")
        self.read_prescriptions()
        self.read_care_units()
        self.read_measurements("LABEVENTS", "D_LABITEMS", "lab")
        self.read_measurements("CHARTEVENTS", "D_ITEMS", "chart")
        numbers = partial(torch.tensor, dtype=torch.int64, device="cpu")
        events = self.events.events(len(self.labels), tuple(self.features))
        return Stays(
            "mimic3",
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
        file = find_table(self.folder, table)
        if file is None and table in NEEDED:
            needed = " and ".join(NEEDED)
            raise FileNotFoundError(
                f"{self.folder} has no {table}.csv or {table}.csv.gz: it must hold {needed}."
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
            "ADMISSIONS",
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
        with self.rows("PATIENTS", "subject_id", "gender", "dob") as rows:
            for patient, gender, birth in rows:
                if patient in seen:
                    raise ValueError(f"patient {patient!r} is there twice.")
                seen.add(patient)
                born = time_of(birth)
                for stay in self.predicted.get(patient, ()):
                    age = (stay.start - born).days / 365.25
                    self.add([stay], stay.start, f"gender={gender}")
                    self.add([stay], stay.start, "age", min(_OLDEST, age))

    def read_codes(self, table: str, prefix: str) -> None:
        with self.rows(table, "subject_id", "hadm_id", "icd9_code") as rows:
            for patient, number, code in rows:
                admission = self.admissions.get(number)
                if admission is None or admission.patient != patient:
                    raise ValueError(
                        f"the table of admissions has no admission {number!r} of patient {patient!r}."
                    )
                later = [
                    stay
                    for stay in self.of(patient)
                    if code and admission.discharge <= stay.start
                ]
                self.add(later, admission.discharge, f"{prefix}/{code}")

    def read_prescriptions(self) -> None:
        with self.rows("PRESCRIPTIONS", "subject_id", "startdate", "drug") as rows:
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
        with self.rows("ICUSTAYS", "subject_id", "intime", "first_careunit") as rows:
            for patient, entered, unit in rows:
                self.add(
                    self.of(patient), time_of(entered), f"care unit/{unit.casefold()}"
                )

    def read_measurements(self, table: str, items: str, prefix: str) -> None:
        """Every measurement, named <prefix>/<item>/<unit>, with the item's label where there is one. It is left
        out where it does not say when it was taken."""
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
            "charttime",
        ) as rows:
            for patient, item, cell, unit, taken in rows:
                stays = self.of(patient)
                if taken:
                    self.add(stays, time_of(taken), name(item, unit), number_of(cell))
