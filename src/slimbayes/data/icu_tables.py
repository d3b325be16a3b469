"""eICU, the full database or its open demo: one row of physiology for each stay in intensive care, who died in hospital, and which hospital it was.

Tables: patient, apacheApsVar and apachePatientResult, .csv or .csv.gz. The inputs are the variables of the APACHE score, the worst values of the
first 24 hours in the unit, with age and sex; -1 is missing in these tables, and nan here. The outcome is the hospital mortality that
APACHE IVa was compared with. APACHE's own predictions, lengths of stay and all else of later hours are not inputs, and a stay whose time
in hospital ends before the prediction time is left out.

186 hospitals make a shift: `hospital_split` keeps some of them out of training altogether.

Sizes: N stays, P features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from slimbayes.data.csv_rows import find_table, number_of, rows
from slimbayes.data.dataset import Dataset, Found, Part, Split

VARIABLES = (
    "intubated", "vent", "dialysis", "eyes", "motor", "verbal", "meds", "urine", "wbc", "temperature", "respiratoryrate", "sodium", "heartrate",
    "meanbp", "ph", "hematocrit", "creatinine", "albumin", "pao2", "pco2", "bun", "glucose", "bilirubin", "fio2",
)  # fmt: skip
FEATURES = (*VARIABLES, "age", "male")
TABLES = ("patient", "apacheApsVar", "apachePatientResult")
_OUTCOMES = {"ALIVE": 0, "EXPIRED": 1}
_MISSING = -1.0
_OLDEST = "> 89"


@dataclass(frozen=True)
class IcuTable:
    """Stays in intensive care as rows of numbers.

    Shape: x (N, P) float32, nan where not measured; y (N,) int64, 1 for a death in hospital; stay, patient and hospital (N,) int64, the set's own
    numbers but for patients, who are numbered here.
    """

    x: Tensor
    y: Tensor
    stay: Tensor
    patient: Tensor
    hospital: Tensor
    features: tuple[str, ...] = FEATURES

    def __len__(self) -> int:
        return len(self.y)


def eicu(folder: Path | str, hours: float = 24.0) -> IcuTable:
    """All stays that have physiology and an outcome, and whose time in hospital reaches `hours` after admission to the unit.

    The APACHE variables cover 24 hours: fewer `hours` only let in stays that ended before they were complete.

    Example:
        >>> eicu(Path("/nowhere"))
        Traceback (most recent call last):
        ...
        FileNotFoundError: /nowhere has no patient.csv or patient.csv.gz: it must hold patient, apacheApsVar and apachePatientResult.
    """
    if not hours >= 0:
        raise ValueError(f"eicu: hours must be at least 0, got {hours!r}.")
    folder = Path(folder).expanduser()
    people, outcomes = _patients(folder), _outcomes(folder)
    kept: dict[str, tuple[list[float], int, str, str]] = {}
    seen = set()
    for place, (number, *cells) in _rows(folder, "apacheApsVar", ("patientunitstayid", *VARIABLES)):
        if number in seen or number not in people:
            raise ValueError(
                f"{place}: stay {number!r} {'is there twice' if number in seen else 'is not in the table patient'}."
            )
        seen.add(number)
        who, hospital, minutes, described = people[number]
        values = [_value(place, cell) for cell in cells]
        if number in outcomes and minutes >= 60 * hours:
            kept[number] = ([*values, *described], outcomes[number], who, hospital)
    names = {who: i for i, who in enumerate(sorted({row[2] for row in kept.values()}))}
    columns = (
        [row[1] for row in kept.values()],
        map(int, kept),
        [names[row[2]] for row in kept.values()],
        [int(row[3]) for row in kept.values()],
    )
    x = torch.tensor([row[0] for row in kept.values()], dtype=torch.float32, device="cpu").reshape(
        len(kept), len(FEATURES)
    )
    return IcuTable(x, *(torch.tensor(list(column), dtype=torch.int64, device="cpu") for column in columns))


def hospital_split(stays: IcuTable, share: float = 0.3, seed: int = 0) -> dict[str, Tensor]:
    """Rows "train", "test" and "shift": the last are all stays of a seeded `share` of the hospitals, the first two share the others.

    "test" has a fifth of the patients of the training hospitals, so that a loss on "shift" beyond that on "test" is the hospitals'. No patient is in
    two of them: who was in both kinds of hospitals counts for "shift" only.

    Shape: three tensors of row numbers, int64.

    Example:
        >>> hospitals = torch.arange(10).repeat_interleave(10)
        >>> stays = IcuTable(torch.zeros(100, 26), torch.zeros(100).long(), torch.arange(100), torch.arange(100), hospitals)
        >>> {name: len(rows) for name, rows in hospital_split(stays).items()}
        {'train': 56, 'test': 14, 'shift': 30}
    """
    if not 0 < share < 1:
        raise ValueError(f"hospital_split: share must lie between 0 and 1, got {share!r}.")
    generator = torch.Generator("cpu").manual_seed(seed)
    away = _draw(stays.hospital, share, generator)
    elsewhere = torch.isin(stays.hospital, away)
    home = ~elsewhere & ~torch.isin(stays.patient, stays.patient[elsewhere])
    tested = home & torch.isin(stays.patient, _draw(stays.patient[home], 0.2, generator))
    return {
        name: mask.nonzero().flatten()
        for name, mask in (("train", home & ~tested), ("test", tested), ("shift", elsewhere))
    }


def _draw(numbers: Tensor, share: float, generator: torch.Generator) -> Tensor:
    unique = numbers.unique()
    return unique[torch.randperm(len(unique), generator=generator, device="cpu")[: round(share * len(unique))]]


def standardised(stays: IcuTable, splits: Mapping[str, Tensor], name: str = "eicu") -> Dataset:
    """Splits with inputs that a network takes: scaled by mean and spread of the training rows, 0 where not measured, and for each feature a
    column that is 1 where it was measured.

    Shape: x (N, 2 P) float32, y (N,) int64.

    Example:
        >>> stays = IcuTable(torch.tensor([[1.0], [3.0], [math.nan]]), torch.tensor([0, 1, 0]), *torch.arange(9).view(3, 3), ("hr",))
        >>> standardised(stays, {"train": torch.tensor([0, 1]), "test": torch.tensor([2])}).splits["train"].x.tolist()
        [[-1.0, 1.0], [1.0, 1.0]]
    """
    if "train" not in splits:
        raise ValueError(
            f"standardised needs a split 'train' to take mean and spread from, got {', '.join(splits) or 'none'}."
        )
    known = ~stays.x.isnan()
    values, train = stays.x.double().nan_to_num(0.0), splits["train"]
    count = known[train].sum(0).clamp_min(1)
    mean = values[train].sum(0) / count
    centred = (values - mean) * known
    spread = (centred[train].square().sum(0) / count).sqrt()
    scaled = centred / spread.where(spread > 0, 1.0)
    x = torch.cat([scaled, known.double()], 1).float()
    return Dataset(
        name, {split: Split(x[chosen], stays.y[chosen]) for split, chosen in splits.items()}, ("survived", "died")
    )


def table(folder: Path) -> Found | None:
    """For `load`: splits "train", "test" and "shift" as `hospital_split` makes them, standardised."""
    files = [file for name in TABLES if (file := find_table(folder, name)) is not None]
    if len(files) < len(TABLES):
        return None

    @cache
    def data() -> Dataset:
        stays = eicu(folder)
        return standardised(stays, hospital_split(stays))

    parts = {
        split: Part(lambda s=split: len(data().splits[s]), lambda s=split: data().splits[s])
        for split in ("train", "test", "shift")
    }
    return Found(parts, ("survived", "died"), files=lambda: files)


# Tables ----------------------------------------------------------------------------------------------------------------


def _rows(folder: Path, name: str, columns: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    file = find_table(folder, name)
    if file is None:
        raise FileNotFoundError(
            f"{folder} has no {name}.csv or {name}.csv.gz: it must hold {', '.join(TABLES[:-1])} and {TABLES[-1]}."
        )
    return rows(file, columns)


def _patients(folder: Path) -> dict[str, tuple[str, str, float, list[float]]]:
    """Patient, hospital, minutes from admission to the unit until the end of the time in hospital, age and sex of each stay."""
    out: dict[str, tuple[str, str, float, list[float]]] = {}
    columns = ("patientunitstayid", "uniquepid", "hospitalid", "hospitaldischargeoffset", "age", "gender")
    for place, (number, who, hospital, minutes, age, gender) in _rows(folder, "patient", columns):
        if number in out or not (number.isdecimal() and hospital.isdecimal() and who):
            what = "is there twice" if number in out else "needs a number, a uniquepid and the number of a hospital"
            raise ValueError(f"{place}: stay {number!r} of patient {who!r} in hospital {hospital!r} {what}.")
        if math.isnan(end := number_of(place, minutes)):
            raise ValueError(f"{place}: stay {number!r} has no hospitaldischargeoffset.")
        years = 90.0 if age == _OLDEST else number_of(place, age)
        out[number] = who, hospital, end, [years, {"Male": 1.0, "Female": 0.0}.get(gender, math.nan)]
    return out


def _outcomes(folder: Path) -> dict[str, int]:
    """Whether each stay's patient died in hospital, from the rows of APACHE version IVa; those of version IV say the same."""
    out: dict[str, int] = {}
    for place, (number, version, outcome) in _rows(
        folder, "apachePatientResult", ("patientunitstayid", "apacheversion", "actualhospitalmortality")
    ):
        if outcome not in _OUTCOMES:
            raise ValueError(f"{place}: actualhospitalmortality {outcome!r} is not one of {', '.join(_OUTCOMES)}.")
        if version == "IVa":
            if number in out:
                raise ValueError(f"{place}: stay {number!r} is there twice in version IVa.")
            out[number] = _OUTCOMES[outcome]
    return out


def _value(place: str, cell: str) -> float:
    value = number_of(place, cell)
    return math.nan if value == _MISSING else value
