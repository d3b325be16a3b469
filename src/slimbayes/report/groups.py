"""Records from disk, grouped: runs with one (data, name) are replicates that differ by seed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimbayes.report.metric import printable
from slimbayes.report.record import Record, RecordError, read


@dataclass(frozen=True)
class Group:
    """The runs of one name on one data set, by seed. `place` is its number on the page: it gives the colour."""

    data: str
    name: str
    records: tuple[Record, ...]
    place: int = 0

    @property
    def commands(self) -> list[str]:
        """The commands of all runs, each once."""
        return list(dict.fromkeys(command for record in self.records for command in record.commands))


@dataclass(frozen=True)
class LoadedRuns:
    """What was read: groups, why records were left out, and what a reader should know about the rest."""

    groups: tuple[Group, ...]
    skipped: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def data(self) -> list[str]:
        """The data sets, in order of appearance."""
        return list(dict.fromkeys(group.data for group in self.groups))

    def on(self, data: str) -> tuple[Group, ...]:
        """The groups of one data set."""
        return tuple(group for group in self.groups if group.data == data)


def load(runs: Sequence[Path | str]) -> LoadedRuns:
    """Read and group records. A directory without a record stands for all runs below it. Damaged ones are left out.

    Example:
        >>> load([])
        Traceback (most recent call last):
        ...
        ValueError: got no runs; needed at least one run directory or record file.
    """
    paths = [file for run in runs for file in _expand(Path(run))]
    if not paths:
        raise ValueError("got no runs; needed at least one run directory or record file.")
    kept: dict[tuple[str, str, int], tuple[Path, Record]] = {}
    skipped = []
    for path in paths:
        try:
            record = read(path)
        except RecordError as error:
            skipped.append(str(error))
            continue
        first, known = kept.setdefault((record.data, record.name, record.seed), (path, record))
        if known is not record:
            skipped.append(_twice(path, record, first, known))
    if not kept:
        raise RecordError(f"none of the {len(paths)} records can be used:\n" + "\n".join(skipped))
    groups = _group([record for _, record in kept.values()])
    return LoadedRuns(groups, tuple(skipped), tuple(_notes(groups)))


def _expand(run: Path) -> list[Path]:
    """The run itself, or the runs below a directory that is none."""
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


def _group(records: Sequence[Record]) -> tuple[Group, ...]:
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        found.setdefault((record.data, record.name), []).append(record)
    # A name has one colour on the whole page, also when it appears under several data sets.
    places = {name: i for i, name in enumerate(dict.fromkeys(name for _, name in found))}
    seeds = {key: tuple(sorted(runs, key=lambda run: run.seed)) for key, runs in found.items()}
    return tuple(Group(data, printable(name), runs, places[name]) for (data, name), runs in seeds.items())


def _notes(groups: Sequence[Group]) -> Iterator[str]:
    for group in groups:
        if differing := _differences([record.config for record in group.records]):
            yield (
                f"The runs of {group.name!r} on {group.data!r} differ in more than their seed: "
                f"{'; '.join(differing[:4])}. Their mean is a mean of different things."
            )
        if early := [str(record.seed) for record in group.records if record.status != "finished"]:
            yield f"{group.name!r} on {group.data!r} stopped early with seed {', '.join(early)}."
        for warning in dict.fromkeys(w for r in group.records if r.diagnostics for w in r.diagnostics.warnings):
            yield f"{group.name!r} on {group.data!r}: {warning}"


def _differences(configs: Sequence[dict[str, Any]]) -> list[str]:
    """Config values that are not equal among replicates; anything called seed may differ."""
    flat = [dict(_leaves(config)) for config in configs]
    keys = dict.fromkeys(itertools.chain.from_iterable(flat))
    values = {key: list(dict.fromkeys(leaves.get(key, "absent") for leaves in flat)) for key in keys}
    return [f"{key} is {' or '.join(found)}" for key, found in values.items() if len(found) > 1]


def _leaves(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key != "seed":
                yield from _leaves(inner, f"{where}.{key}" if where else str(key))
    else:
        yield where, json.dumps(value, default=str)
