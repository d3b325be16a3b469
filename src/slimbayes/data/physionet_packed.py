"""The PhysioNet challenge of 2012 as arrays, challenge2012.npz.xz: measurements sorted by parameter, record and time. See physionet.py.

    record_id, set, outcomes      of every record; `set` has the letter a, b or c as a byte
    param_names, count            of every parameter; `count` has its measurements in each record
    time_min, value_code          of every measurement; its value is value_table[value_code]

Sizes: E measurements, N stays.
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimbayes.data.archives import read_npz, read_xz, require
from slimbayes.data.health import Events, Stays
from slimbayes.data.physionet_features import CATEGORIES, FEATURES, MISSING, OUTCOMES, SETS, event_of

PACKED = "challenge2012.npz.xz"
NAMES = (
    "record_id",
    "set",
    "param_names",
    "count",
    "time_min",
    "value_code",
    "value_table",
    "outcomes",
    "outcome_names",
)


class _Unpacked(io.BytesIO):
    """A file in memory whose name in messages is that of the file it came from."""

    def __init__(self, file: Path) -> None:
        super().__init__(read_xz(file))
        self.file = file

    def __str__(self) -> str:
        return str(self.file)


def _arrays(file: Path, *names: str) -> dict[str, Any]:
    return read_npz(_Unpacked(file), *names)


def set_sizes(file: Path) -> dict[str, int]:
    """How many stays each split has."""
    letters = _arrays(file, "set")["set"]
    return {split: int((letters == ord(letter)).sum()) for letter, split in SETS.items()}


def read_packed(file: Path) -> Stays:
    """All stays. The columns of the events are filled parameter by parameter: there is never a second copy of them."""
    arrays = _arrays(file, *NAMES)
    _check_packed(file, arrays)
    counts, total = arrays["count"].astype("int64"), len(arrays["time_min"])
    stays = torch.arange(counts.shape[1], device="cpu")
    columns = [
        torch.empty(total, dtype=dtype, device="cpu")
        for dtype in (torch.int64, torch.float64, torch.int64, torch.float32)
    ]
    begin = done = 0
    for name, count in zip(arrays["param_names"].tolist(), counts):
        part, begin = slice(begin, begin + int(count.sum())), begin + int(count.sum())
        value = torch.from_numpy(arrays["value_table"][arrays["value_code"][part]])
        hours = torch.from_numpy(arrays["time_min"][part].astype("float64")) / 60
        feature, measured = _features(f"{file}, parameter {name}", name, value)
        kept = value != MISSING
        room = slice(done, done := done + int(kept.sum()))
        for column, values in zip(
            columns, (torch.repeat_interleave(stays, torch.from_numpy(count)), hours, feature, measured)
        ):
            column[room] = values[kept]
    labels, letters = torch.from_numpy(arrays["outcomes"][:, -1].astype("int64")), torch.from_numpy(arrays["set"])
    splits = {split: (letters == ord(letter)).nonzero().flatten() for letter, split in SETS.items()}
    events = Events(*(column[:done] for column in columns), len(stays), FEATURES)
    return Stays("physionet2012", events, labels, torch.from_numpy(arrays["record_id"].astype("int64")), splits)


def _features(place: str, name: str, value: Tensor) -> tuple[Tensor, Tensor]:
    """Features and values of the measurements of one parameter, as `event_of` gives them one by one."""
    if name not in CATEGORIES:
        return torch.full(value.shape, event_of(place, name, 0.0)[0], device="cpu"), value
    feature = torch.zeros(value.shape, dtype=torch.int64, device="cpu")
    for category in value[value != MISSING].unique().tolist():
        feature[value == category] = event_of(place, name, category)[0]
    return feature, torch.full_like(value, math.nan)


def _check_packed(file: Path, arrays: dict[str, Any]) -> None:
    numpy = require("numpy")
    counts, events, stays = arrays["count"], len(arrays["time_min"]), len(arrays["record_id"])
    for name, fits, need in (
        ("count", counts.shape == (len(arrays["param_names"]), stays) and int(counts.sum()) == events, "one number for each parameter and record, that add up to the events"),
        ("value_code", len(arrays["value_code"]) == events and (not events or int(arrays["value_code"].max()) < len(arrays["value_table"])), "an index of value_table for each event"),
        ("value_table", bool(numpy.isfinite(arrays["value_table"]).all()), "finite numbers"),
        ("set", len(arrays["set"]) == stays and set(arrays["set"].tolist()) <= set(map(ord, SETS)), "the letter a, b or c for each record"),
        ("outcome_names", arrays["outcome_names"].tolist() == OUTCOMES, ", ".join(OUTCOMES)),
        ("outcomes", arrays["outcomes"].shape == (stays, 6) and set(arrays["outcomes"][:, -1].tolist()) <= {0, 1}, "six columns, the last 0 or 1"),
        ("record_id", numpy.array_equal(arrays["record_id"], arrays["outcomes"][:, 0]) and len(set(arrays["record_id"].tolist())) == stays, "the RecordIDs of outcomes, each once"),
    ):  # fmt: skip
        if not fits:
            raise ValueError(f"{file}: the array {name} must hold {need}.")
