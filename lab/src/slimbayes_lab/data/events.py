"""Health records as event sequences, and bags of tokens made from them, which `models.mortality_lstm` takes.

    events (patient, hours since admission, feature, value)  --Buckets-->  a token for each  --bag-->  ids (N, T, L)

A token is a feature and the quantile bucket of its value. Bags count back from the prediction time, as in the rank-1
paper: bag j holds what was seen j to j + 1 times `precision` hours before it, and what is older than a limit shares one
bag. Nothing later than the prediction time enters, neither the bags nor the quantiles.

Two deviations from the paper's (unpublished) pipeline: all features share one table of vectors instead of one table
each, and bags lie on a fixed grid in which a bag may be empty, so that a step of the LSTM is always the same time.

Sizes: E events, N patients, F features, Q buckets, T bags, L tokens in the fullest bag.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_AT_A_TIME = 500_000  # events that are sorted into bags together: sorting takes ten times the memory of what is sorted


@dataclass(frozen=True)
class Events:
    """What was recorded of N patients, in any order.

    Shape: patient and feature (E,) int64; hours (E,) float64, since admission, negative before it; value (E,) float32,
    nan where the event has no value (a diagnosis, a drug).

    Example:
        >>> who, what, value = torch.tensor([0, 1]), torch.tensor([0, 0]), torch.tensor([80.0, 95.0])
        >>> events = Events(who, torch.tensor([0.5, 30.0]).double(), what, value, 2, ("HR",))
        >>> len(events), len(events.until(24.0)), events.of(torch.tensor([1])).value.tolist()
        (2, 1, [95.0])
    """

    patient: Tensor
    hours: Tensor
    feature: Tensor
    value: Tensor
    patients: int  # N: also those without an event
    features: tuple[str, ...]

    def __post_init__(self) -> None:
        shapes = [tuple(column.shape) for column in self._columns()]
        if len(set(shapes)) > 1 or self.patient.dim() != 1:
            raise ValueError(
                f"Events need a patient, time, feature and value each, got the shapes {shapes}."
            )
        if (
            self.hours.dtype != torch.float64
        ):  # else minutes fall on the wrong side of a bag's edge
            raise ValueError(f"Events: hours must be float64, got {self.hours.dtype}.")
        last = len(self.features) - 1
        for what, wrong in (
            (
                f"patient is not one of 0..{self.patients - 1}",
                (self.patient < 0) | (self.patient >= self.patients),
            ),
            (
                f"feature is not one of 0..{last}",
                (self.feature < 0) | (self.feature > last),
            ),
            ("time is not finite", ~self.hours.isfinite()),
            ("value is not finite; without a value it is nan", self.value.isinf()),
        ):
            if wrong.any():
                raise ValueError(f"Event {int(wrong.nonzero()[0, 0])}: its {what}.")

    def __len__(self) -> int:
        return len(self.patient)

    def until(self, hours: float) -> Events:
        """The events at or before that many hours since admission."""
        return self.where(self.hours <= hours)

    def of(self, patients: Tensor) -> Events:
        """The events of some patients, int64 indices without repeats, who are then numbered in that order."""
        if len(patients.unique()) != len(patients):
            raise ValueError(
                f"Patients must be named once, got {len(patients) - len(patients.unique())} repeats."
            )
        number = torch.full(
            (self.patients,), -1, dtype=torch.int64, device=self.patient.device
        )
        number[patients] = torch.arange(len(patients), device=self.patient.device)
        chosen = self.where(number[self.patient] >= 0)
        return Events(
            number[chosen.patient],
            chosen.hours,
            chosen.feature,
            chosen.value,
            len(patients),
            self.features,
        )

    def where(self, keep: Tensor) -> Events:
        """The events at which `keep`, (E,) bool, is true."""
        if bool(keep.all()):  # no copy of what may be most of the memory
            return self
        patient, hours, feature, value = (column[keep] for column in self._columns())
        return Events(patient, hours, feature, value, self.patients, self.features)

    def _columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.patient, self.hours, self.feature, self.value


class EventList:
    """Events that are read one by one, 28 bytes each."""

    def __init__(self) -> None:
        self.patient, self.hours, self.feature, self.value = (
            array("q"),
            array("d"),
            array("q"),
            array("f"),
        )

    def append(self, patient: int, hours: float, feature: int, value: float) -> None:
        self.patient.append(patient)
        self.hours.append(hours)
        self.feature.append(feature)
        self.value.append(value)

    def events(self, patients: int, features: tuple[str, ...]) -> Events:
        def column(values: array[Any], dtype: torch.dtype) -> Tensor:
            return (
                torch.frombuffer(values, dtype=dtype)
                if values
                else torch.empty(0, dtype=dtype, device="cpu")
            )

        patient, feature = (
            column(values, torch.int64) for values in (self.patient, self.feature)
        )
        hours, value = (
            column(self.hours, torch.float64),
            column(self.value, torch.float32),
        )
        return Events(patient, hours, feature, value, patients, features)


@dataclass(frozen=True)
class Buckets:
    """Quantile edges of every feature's values. Fit them on training patients only.

    Token 0 is padding. Feature f has the Q + 1 tokens from 1 + f (Q + 1) on: the first for an event without a value,
    then its buckets from low to high. A value on an edge belongs to the bucket above it, so equal values never part.

    Shape: edges (F, Q - 1) float32; +inf where training patients had no value: any later one is in the lowest bucket.

    Example:
        >>> rates, none = torch.tensor([60.0, 70.0, 90.0, 110.0]), torch.zeros(4).long()
        >>> heart = Events(none, torch.arange(4.0).double(), none, rates, 1, ("HR",))
        >>> buckets = Buckets.fit(heart, hours=48.0, count=2)
        >>> buckets.edges.tolist(), buckets.vocabulary, buckets.tokens(heart).tolist(), buckets.names()
        ([[80.0]], 4, [2, 2, 3, 3], ('', 'HR', 'HR/0', 'HR/1'))
    """

    edges: Tensor
    features: tuple[str, ...]

    @classmethod
    def fit(cls, events: Events, hours: float = 48.0, count: int = 5) -> Buckets:
        """Quantiles of what training patients show up to the prediction time; the paper has `count` 5."""
        if count < 1:
            raise ValueError(f"Buckets: count must be at least 1, got {count!r}.")
        seen = events.until(hours)
        seen = seen.where(~seen.value.isnan())
        edges = torch.full(
            (len(events.features), count - 1), math.inf, device=seen.value.device
        )
        # Sorted by feature, then value: torch.quantile stops at 16 million numbers, and would scan all each time.
        order = seen.value.argsort()
        order = order[seen.feature[order].argsort(stable=True)]
        values, sizes = (
            seen.value[order],
            seen.feature.bincount(minlength=len(events.features)),
        )
        starts = sizes.cumsum(0) - sizes
        for feature in sizes.nonzero().flatten().tolist():
            at = (
                torch.arange(1, count, dtype=torch.float64, device=values.device)
                / count
                * (int(sizes[feature]) - 1)
            )
            low, high = (
                values[starts[feature] + at.floor().long()],
                values[starts[feature] + at.ceil().long()],
            )
            edges[feature] = torch.lerp(low, high, at.frac().float())
        return cls(edges, events.features)

    @property
    def vocabulary(self) -> int:
        """Number of tokens, padding included."""
        return 1 + len(self.features) * (self.edges.shape[1] + 2)

    def names(self) -> tuple[str, ...]:
        """The name of every token: "" for padding, then "HR", "HR/0", "HR/1", ..."""
        buckets = range(self.edges.shape[1] + 1)
        return (
            "",
            *(
                name
                for f in self.features
                for name in (f, *(f"{f}/{bucket}" for bucket in buckets))
            ),
        )

    def tokens(self, events: Events) -> Tensor:
        """The token of each event, (E,) int64."""
        if events.features != self.features:
            raise ValueError(
                f"Buckets of {len(self.features)} features cannot read events of other features."
            )
        bucket = torch.zeros_like(
            events.feature
        )  # edges at or below the value, one edge of all features at a time
        for edge in self.edges.unbind(1):
            bucket += events.value >= edge[events.feature]
        none = events.value.isnan()
        return (
            1
            + events.feature * (self.edges.shape[1] + 2)
            + (bucket + 1).masked_fill(none, 0)
        )


def bag(
    events: Events,
    buckets: Buckets,
    hours: float = 48.0,
    precision: float = 1.0,
    aggregate_older_than: float | None = None,
    tokens_per_bag: int | None = None,
) -> Tensor:
    """Tokens by patient and time, oldest bag first, padded with 0: the mask is `tokens != 0`.

    Args:
        hours: prediction time, since admission. Events after it are left out.
        precision: hours in a bag (the paper has 24). The oldest bag also takes the rest.
        aggregate_older_than: hours before the prediction time; older events share one more bag, which comes first.
            None: there is no such bag, and what happened before admission joins the oldest.
        tokens_per_bag: keep only this many, the latest. None keeps all; L is then the fullest bag's number.

    Shape: returns (N, T, L) int32, which an embedding takes as it is; T = ceil(min(hours, aggregate_older_than) /
    precision), plus 1 with the bag of older events.

    Example:
        >>> zeros, at = torch.zeros(3).long(), torch.tensor([0.0, 1.5, 2.1]).double()
        >>> beats = Events(zeros, at, zeros, torch.full((3,), 80.0), 1, ("HR",))
        >>> bag(beats, Buckets.fit(beats, count=1), hours=2.0).tolist()
        [[[2], [2]]]
    """
    limit = hours if aggregate_older_than is None else min(aggregate_older_than, hours)
    if not (
        hours > 0
        and precision > 0
        and limit > 0
        and (tokens_per_bag is None or tokens_per_bag > 0)
    ):
        got = (hours, precision, aggregate_older_than, tokens_per_bag)
        raise ValueError(
            f"bag: hours, precision, aggregate_older_than and tokens_per_bag must be positive, got {got}."
        )
    events = events.until(hours)
    fine, history = (
        math.ceil(limit / precision - 1e-9),
        int(aggregate_older_than is not None),
    )
    age = hours - events.hours
    index = (
        ((age + 1e-9) / precision).long().clamp_max(fine - 1)
    )  # 1e-9: minutes as hours do not divide evenly
    if history:
        index = index.masked_fill(age > limit + 1e-9, fine)
    steps = fine + history
    place = events.patient * steps + (steps - 1 - index)
    sizes = place.bincount(minlength=events.patients * steps)
    fullest = max(1, int(sizes.max()) if len(sizes) else 0)
    out = torch.zeros(
        len(sizes),
        min(fullest, tokens_per_bag or fullest),
        dtype=torch.int32,
        device=place.device,
    )
    step = max(1, math.ceil(len(sizes) / math.ceil((len(place) + 1) / _AT_A_TIME)))
    for first in range(0, len(sizes), step):
        mine, rows = (
            (place >= first) & (place < first + step),
            slice(first, first + step),
        )
        part = events.where(mine)
        _fill(
            out[rows],
            buckets.tokens(part),
            place[mine] - first,
            part.hours,
            sizes[rows],
        )
    return out.view(events.patients, steps, out.shape[1])


def _fill(
    out: Tensor, tokens: Tensor, place: Tensor, hours: Tensor, sizes: Tensor
) -> None:
    """Tokens (E,) into the rows of `out` (places, L) that they belong to, in the order of time."""
    order = hours.argsort(stable=True)
    order = order[place[order].argsort(stable=True)]
    tokens, place = tokens[order], place[order]
    starts = (
        sizes.cumsum(0) - sizes + (sizes - out.shape[1]).clamp_min(0)
    )  # of those kept, the latest
    column = torch.arange(len(tokens), device=tokens.device) - starts[place]
    kept = column >= 0
    out[place[kept], column[kept]] = tokens[kept].int()
