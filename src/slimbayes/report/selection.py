"""Picks evaluations out of records and averages them: the questions that charts, tables and comparisons share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from slimbayes.report.groups import Group
from slimbayes.report.metric import ordered
from slimbayes.report.record import Evaluation, Record
from slimbayes.report.statistics import mean

Place = tuple[str, str | None, int]  # data, corruption, severity: what an evaluation is of


@dataclass(frozen=True)
class Selection:
    """Which evaluations are meant: those of a role, narrowed where a field is not None.

    Unless `draws` is given, a group is judged at the largest number of draws that all its runs have.

    Example:
        >>> foggy = Evaluation(data="c", role="corruption", corruption="fog", severity=3, draws=1, rows=9, metrics={})
        >>> Selection("corruption").fits(foggy), Selection("corruption", severity=2).fits(foggy)
        (True, False)
    """

    role: str = "test"
    data: str | None = None
    severity: int | None = None
    draws: int | None = None
    places: frozenset[Place] | None = None

    def fits(self, evaluation: Evaluation) -> bool:
        """Whether an evaluation is meant."""
        return (
            evaluation.role == self.role
            and self.data in (None, evaluation.data)
            and self.severity in (None, evaluation.severity)
            and self.draws in (None, evaluation.draws)
            and (self.places is None or _place(evaluation) in self.places)
        )

    def every(self, groups: Iterable[Group]) -> list[Evaluation]:
        """All evaluations that are meant, at any number of draws."""
        return [e for group in groups for record in group.records for e in record.evaluations if self.fits(e)]

    def draw_counts(self, group: Group) -> list[int]:
        """The numbers of draws that all runs of a group have; runs without any such evaluation have no say."""
        found = [{e.draws for e in record.evaluations if self.fits(e)} for record in group.records]
        return sorted(set.intersection(*filter(None, found))) if any(found) else []

    def most_draws(self, group: Group) -> int | None:
        """The number of draws a group is judged at; None where it has nothing there."""
        return max(self.draw_counts(group), default=None)

    def judged(self, group: Group) -> list[tuple[Record, Evaluation]]:
        """Runs of a group with the evaluations they are judged by."""
        draws = self.most_draws(group)
        exact = replace(self, draws=draws)
        runs = group.records if draws is not None else ()
        return [(record, e) for record in runs for e in record.evaluations if exact.fits(e)]

    def by_seed(self, group: Group, name: str) -> dict[int, float]:
        """A metric for each seed, averaged over the evaluations that are meant; seeds without it are left out."""
        found: dict[int, list[float]] = {}
        for record, evaluation in self.judged(group):
            if name in evaluation.metrics:
                found.setdefault(record.seed, []).append(evaluation.metrics[name])
        return {seed: mean(values) for seed, values in found.items()}

    def metrics(self, groups: Iterable[Group]) -> list[str]:
        """The metrics that any run has there, in the order of the tables."""
        return ordered(name for evaluation in self.every(groups) for name in evaluation.metrics)

    def sets(self, groups: Iterable[Group]) -> list[str]:
        """The names of the evaluated sets, in order of appearance."""
        return list(dict.fromkeys(evaluation.data for evaluation in self.every(groups)))

    def all_places(self, groups: Iterable[Group]) -> frozenset[Place]:
        """The places that any run has."""
        return frozenset(map(_place, self.every(groups)))

    def shared_places(self, groups: Iterable[Group]) -> frozenset[Place]:
        """The places that every run with any of them has: only a mean over the same things compares."""
        found: dict[tuple[str, int], set[Place]] = {}
        for group in groups:
            for record, evaluation in self.judged(group):
                found.setdefault((record.name, record.seed), set()).add(_place(evaluation))
        return frozenset(set.intersection(*found.values())) if found else frozenset()


CORRUPTED = Selection("corruption")


def main_set(groups: Sequence[Group]) -> Selection:
    """The set that a page judges by: the first test set, or the first validation set where nobody tested."""
    for role in ("test", "validation"):
        if names := Selection(role).sets(groups):
            return Selection(role, names[0])
    return Selection("test")


def _place(evaluation: Evaluation) -> Place:
    return evaluation.data, evaluation.corruption, evaluation.severity
