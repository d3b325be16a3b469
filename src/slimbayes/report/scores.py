"""Picks evaluations out of records and averages them: the questions that charts, tables and comparisons share.

A set is a role ("test", "validation", "corruption", "shift", "ood"), narrowed by the name of its data, a severity or a corruption.
Unless told otherwise, a group is judged at the largest number of draws that all its runs have on that set.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slimbayes.report.metric import ordered
from slimbayes.report.record import Evaluation, Record
from slimbayes.report.resampling import mean
from slimbayes.report.runs import Group

Place = tuple[str, str | None, int]  # data, corruption, severity


@dataclass(frozen=True)
class Where:
    """Which evaluations are meant; None leaves a choice open. `places`, where given, is all that counts."""

    role: str = "test"
    data: str | None = None
    severity: int | None = None
    corruption: str | None = None
    draws: int | None = None
    places: frozenset[Place] | None = None

    def fits(self, evaluation: Evaluation) -> bool:
        """Whether an evaluation is meant."""
        return (
            evaluation.role == self.role
            and self.data in (None, evaluation.data)
            and self.severity in (None, evaluation.severity)
            and self.corruption in (None, evaluation.corruption)
            and self.draws in (None, evaluation.draws)
            and (self.places is None or place(evaluation) in self.places)
        )


def place(evaluation: Evaluation) -> Place:
    """What an evaluation is of, whatever the number of draws."""
    return evaluation.data, evaluation.corruption, evaluation.severity


def find(record: Record, where: Where) -> list[Evaluation]:
    """The evaluations of a run that are meant."""
    return [evaluation for evaluation in record.evaluations if where.fits(evaluation)]


def draw_counts(group: Group, where: Where) -> list[int]:
    """The numbers of draws that all runs of a group have; runs without any such evaluation have no say."""
    found = [{evaluation.draws for evaluation in find(record, where)} for record in group.records]
    return sorted(set.intersection(*filter(None, found))) if any(found) else []


def settled(group: Group, where: Where) -> Where | None:
    """The same place with the number of draws decided; None where the group has nothing there."""
    counts = draw_counts(group, where)
    return Where(where.role, where.data, where.severity, where.corruption, counts[-1], where.places) if counts else None


def by_seed(group: Group, where: Where, name: str) -> dict[int, float]:
    """A metric for each seed, averaged over the evaluations that are meant; seeds without it are left out."""
    exact = settled(group, where)
    found = (
        {record.seed: [e.metrics[name] for e in find(record, exact) if name in e.metrics] for record in group.records}
        if exact
        else {}
    )
    return {seed: mean(values) for seed, values in found.items() if values}


def metric_names(groups: Iterable[Group], where: Where) -> list[str]:
    """The metrics that any run has there, in the order of the tables."""
    return ordered(
        name for group in groups for record in group.records for e in find(record, where) for name in e.metrics
    )


def data_names(groups: Iterable[Group], role: str) -> list[str]:
    """The evaluated sets of a role, in order of appearance."""
    return list(
        dict.fromkeys(e.data for group in groups for record in group.records for e in find(record, Where(role)))
    )


def main_set(groups: Sequence[Group]) -> Where:
    """The set that a page judges by: the first test set, or the first validation set where nobody tested."""
    for role in ("test", "validation"):
        if names := data_names(groups, role):
            return Where(role, names[0])
    return Where("test")


def shared_places(groups: Iterable[Group], where: Where) -> frozenset[Place]:
    """The places that every run with any of them has: only a mean over the same things compares."""
    found = []
    for group in groups:
        exact = settled(group, where)
        found += [{place(e) for e in find(record, exact)} for record in group.records] if exact else []
    found = [places for places in found if places]
    return frozenset(set.intersection(*found)) if found else frozenset()


def all_places(groups: Iterable[Group], where: Where) -> frozenset[Place]:
    """The places that any run has."""
    return frozenset(place(e) for group in groups for record in group.records for e in find(record, where))
