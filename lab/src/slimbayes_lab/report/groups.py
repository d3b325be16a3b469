"""Records from disk, grouped: runs with one (data, name) are replicates that differ by seed. And which of their
evaluations are meant, averaged: the questions that charts, tables and comparisons share.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slimbayes_lab.report import kept
from slimbayes_lab.report.metric import mean, printable, sort_metrics
from slimbayes_lab.report.record import Evaluation, Record, RecordError, read

Place = tuple[
    str, str | None, int
]  # data, corruption, severity: what an evaluation is of


@dataclass(frozen=True)
class RunGroup:
    """The runs of one name on one data set, by seed. `colour` is the number of its looks on the page."""

    data: str
    name: str
    records: tuple[Record, ...]
    colour: int = 0

    @property
    def commands(self) -> list[str]:
        """The commands of all runs, each once."""
        return list(
            dict.fromkeys(
                command for record in self.records for command in record.commands
            )
        )


@dataclass(frozen=True)
class LoadedRuns:
    """What was read: groups, why records were left out, and what a reader should know about the rest."""

    groups: tuple[RunGroup, ...]
    skipped: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def data(self) -> list[str]:
        """The data sets, in order of appearance."""
        return list(dict.fromkeys(group.data for group in self.groups))

    def on(self, data: str) -> tuple[RunGroup, ...]:
        """The groups of one data set."""
        return tuple(group for group in self.groups if group.data == data)


def load(runs: Sequence[Path | str]) -> LoadedRuns:
    """Read and group records. A directory without a record stands for all runs below it. Damaged ones are left out."""
    paths = [file for run in runs for file in _expand(Path(run))]
    if not paths:
        raise ValueError(
            "got no runs; needed at least one run directory or record file."
        )
    kept: dict[tuple[str, str, int], tuple[Path, Record]] = {}
    skipped = []
    for path in paths:
        try:
            record = read(path)
        except RecordError as error:
            skipped.append(str(error))
            continue
        first, known = kept.setdefault(
            (record.data, record.name, record.seed), (path, record)
        )
        if known is not record:
            skipped.append(_twice(path, record, first, known))
    if not kept:
        raise RecordError(
            f"none of the {len(paths)} records can be used:\n" + "\n".join(skipped)
        )
    groups = _group([record for _, record in kept.values()])
    return LoadedRuns(groups, tuple(skipped), tuple(_notes(groups)))


def _expand(run: Path) -> list[Path]:
    """The run itself, or the runs below a directory that is none, or below a place in a file of kept runs."""
    if kept.is_kept(run) and run.suffix != ".json":
        return kept.records(run) or [run]
    if run.is_dir() and not (run / "record.json").exists():
        return sorted(file.parent for file in run.rglob("record.json")) or [run]
    return [run]


def _twice(path: Path, record: Record, first: Path, known: Record) -> str:
    if record.digest == known.digest:
        return f"{path} has the same results as {first} (name {record.name!r}, seed {record.seed}); it is counted once."
    return (
        f"{path} is another run of name {record.name!r}, seed {record.seed}, on {record.data!r}; {first} is used. "
        "Give one of them another name to see both."
    )


def _group(records: Sequence[Record]) -> tuple[RunGroup, ...]:
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        found.setdefault((record.data, record.name), []).append(record)
    # A name has one colour on the whole page, also when it appears under several data sets.
    colours = {
        name: i for i, name in enumerate(dict.fromkeys(name for _, name in found))
    }
    seeds = {
        key: tuple(sorted(runs, key=lambda run: run.seed))
        for key, runs in found.items()
    }
    shown = _distinct_names(colours)
    return tuple(
        RunGroup(data, shown[name], runs, colours[name])
        for (data, name), runs in seeds.items()
    )


def _distinct_names(names: Iterable[str]) -> dict[str, str]:
    """Names as they are shown; those that would read alike are numbered."""
    shown: dict[str, str] = {}
    for name in names:
        alike = itertools.chain(
            [printable(name)], (f"{printable(name)} ({i})" for i in itertools.count(2))
        )
        shown[name] = next(one for one in alike if one not in shown.values())
    return shown


def _notes(groups: Sequence[RunGroup]) -> Iterator[str]:
    for group in groups:
        if differing := _differences([record.config for record in group.records]):
            yield (
                f"The runs of {group.name!r} on {group.data!r} differ in more than their seed: "
                f"{'; '.join(differing[:4])}. Their mean is a mean of different things."
            )
        if early := [
            str(record.seed) for record in group.records if record.status != "finished"
        ]:
            yield f"{group.name!r} on {group.data!r} stopped early with seed {', '.join(early)}."
        for warning in dict.fromkeys(
            w for r in group.records if r.diagnostics for w in r.diagnostics.warnings
        ):
            yield f"{group.name!r} on {group.data!r}: {warning}"
    unknown = {
        group.name: _unknown([dict(_leaves(record.config)) for record in group.records])
        for group in groups
    }
    if fields := sorted(set().union(*unknown.values())):
        names = ", ".join(repr(name) for name, some in unknown.items() if some)
        yield (
            f"Some runs of {names} were made by a version without {', '.join(fields[:4])}: they are like the others if "
            f"that is at its default."
        )


def _differences(configs: Sequence[dict[str, Any]]) -> list[str]:
    """Config values that are not equal among replicates; anything called seed may differ, as may what is unknown."""
    flat = [dict(_leaves(config)) for config in configs]
    keys = [
        key
        for key in dict.fromkeys(itertools.chain.from_iterable(flat))
        if key not in _unknown(flat)
    ]
    values = {
        key: list(dict.fromkeys(leaves.get(key, "absent") for leaves in flat))
        for key in keys
    }
    return [
        f"{key} is {' or '.join(found)}"
        for key, found in values.items()
        if len(found) > 1
    ]


def _unknown(flat: Sequence[dict[str, str]]) -> set[str]:
    """Fields that some replicates lack beside others that they share: configs are recorded whole, so these were made
    by a version that had no such field."""
    some, common = (
        set(itertools.chain.from_iterable(flat)),
        {key for key in flat[0] if all(key in one for one in flat)},
    )
    shared = {_parent(key) for key in common}
    return {
        key
        for key in some - common
        if _parent(key) in shared and _of_one_kind(flat, key)
    }


def _parent(key: str) -> str:
    return key.rpartition(".")[0]


def _of_one_kind(flat: Sequence[dict[str, str]], key: str) -> bool:
    """Whether a field's mapping is of one kind everywhere, and the field not a mapping elsewhere."""
    kinds = {leaves.get(f"{_parent(key)}.kind") for leaves in flat}
    return len(kinds) == 1 and not any(
        other.startswith(f"{key}.") for leaves in flat for other in leaves
    )


def _leaves(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key != "seed":
                yield from _leaves(inner, f"{where}.{key}" if where else str(key))
    else:
        yield where, json.dumps(value, default=str)


@dataclass(frozen=True)
class EvaluationSet:
    """Which evaluations are meant: those of a role, narrowed where a field is not None.

    Unless `draws` is given, a group is judged at the largest number of draws that all its runs have.

    Example:
        >>> foggy = Evaluation(data="c", role="corruption", corruption="fog", severity=3, draws=1, rows=9, metrics={})
        >>> EvaluationSet("corruption").fits(foggy), EvaluationSet("corruption", severity=2).fits(foggy)
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

    def every(self, groups: Iterable[RunGroup]) -> list[Evaluation]:
        """All evaluations that are meant, at any number of draws."""
        return [
            e
            for group in groups
            for record in group.records
            for e in record.evaluations
            if self.fits(e)
        ]

    def draw_counts(self, group: RunGroup) -> list[int]:
        """The numbers of draws that all runs of a group have; runs without any such evaluation have no say."""
        found = [
            {e.draws for e in record.evaluations if self.fits(e)}
            for record in group.records
        ]
        return sorted(set.intersection(*filter(None, found))) if any(found) else []

    def most_draws(self, group: RunGroup) -> int | None:
        """The number of draws a group is judged at; None where it has nothing there."""
        return max(self.draw_counts(group), default=None)

    def judged(self, group: RunGroup) -> list[tuple[Record, Evaluation]]:
        """Runs of a group with the evaluations they are judged by."""
        draws = self.most_draws(group)
        exact = replace(self, draws=draws)
        runs = group.records if draws is not None else ()
        return [
            (record, e) for record in runs for e in record.evaluations if exact.fits(e)
        ]

    def by_seed(self, group: RunGroup, name: str) -> dict[int, float]:
        """A metric for each seed, averaged over the evaluations that are meant; seeds without it are left out."""
        found: dict[int, list[float]] = {}
        for record, evaluation in self.judged(group):
            if name in evaluation.metrics:
                found.setdefault(record.seed, []).append(evaluation.metrics[name])
        return {seed: mean(values) for seed, values in found.items()}

    def values(self, group: RunGroup, name: str) -> list[float]:
        """The same without the seeds."""
        return list(self.by_seed(group, name).values())

    def metrics(self, groups: Iterable[RunGroup]) -> list[str]:
        """The metrics that any run has there, in the order of the tables."""
        return sort_metrics(
            name for evaluation in self.every(groups) for name in evaluation.metrics
        )

    def sets(self, groups: Iterable[RunGroup]) -> list[str]:
        """The names of the evaluated sets, in order of appearance."""
        return list(dict.fromkeys(evaluation.data for evaluation in self.every(groups)))

    def all_places(self, groups: Iterable[RunGroup]) -> frozenset[Place]:
        """The places that any run has."""
        return frozenset(map(_place, self.every(groups)))

    def shared_places(self, groups: Iterable[RunGroup]) -> frozenset[Place]:
        """The places that every run with any of them has: only a mean over the same things compares."""
        found: dict[tuple[str, int], set[Place]] = {}
        for group in groups:
            for record, evaluation in self.judged(group):
                found.setdefault((record.name, record.seed), set()).add(
                    _place(evaluation)
                )
        return frozenset(set.intersection(*found.values())) if found else frozenset()


CORRUPTED = EvaluationSet("corruption")


def main_set(groups: Sequence[RunGroup]) -> EvaluationSet:
    """The set that a page judges by: the first test set, or the first validation set where nobody tested."""
    for role in ("test", "validation"):
        if names := EvaluationSet(role).sets(groups):
            return EvaluationSet(role, names[0])
    return EvaluationSet("test")


def _place(evaluation: Evaluation) -> Place:
    return evaluation.data, evaluation.corruption, evaluation.severity
