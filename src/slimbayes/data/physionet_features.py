"""The measurements of the PhysioNet challenge of 2012, as features. See physionet.py.

-1 stands for a missing value throughout. Gender, ICUType and MechVent are categories: each of their values is a feature without a value of
its own. Scores and lengths of stay from the outcome files are never features: they are known too late.
"""

from __future__ import annotations

import math

SETS = {"a": "train", "b": "validation", "c": "test"}
PACKED = "challenge2012.npz.xz"
_NUMBERS = (
    "ALP", "ALT", "AST", "Age", "Albumin", "BUN", "Bilirubin", "Cholesterol", "Creatinine", "DiasABP", "FiO2", "GCS", "Glucose", "HCO3", "HCT",
    "HR", "Height", "K", "Lactate", "MAP", "Mg", "NIDiasABP", "NIMAP", "NISysABP", "Na", "PaCO2", "PaO2", "Platelets", "RespRate", "SaO2",
    "SysABP", "Temp", "TroponinI", "TroponinT", "Urine", "WBC", "Weight", "pH",
)  # fmt: skip
CATEGORIES = {"Gender": (0, 1), "ICUType": (1, 2, 3, 4), "MechVent": (0, 1)}
FEATURES = (*_NUMBERS, *(f"{name}={value}" for name, values in CATEGORIES.items() for value in values))
_FEATURE = {name: number for number, name in enumerate(FEATURES)}
MISSING = -1.0
OUTCOMES = ["RecordID", "SAPS-I", "SOFA", "Length_of_stay", "Survival", "In-hospital_death"]


def event_of(place: str, name: str, value: float) -> tuple[int, float]:
    """Feature and value of a measurement; a category has no value."""
    category = name in CATEGORIES
    number = _FEATURE.get(f"{name}={value:g}" if category else name)
    if number is None:
        known = f"one of {CATEGORIES[name]}" if category else "one of the challenge's parameters"
        raise ValueError(f"{place}: {f'{name} {value:g}' if category else repr(name)} is not {known}.")
    return number, math.nan if category else value
