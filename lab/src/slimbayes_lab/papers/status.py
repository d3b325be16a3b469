"""Which rows of a table have records, at which scale, and why a record that looks like a row's is not.

A record belongs to a row if its hash is the config's. Any other record of the row's name is told with the fields that
differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, get_args

from slimbayes.errors import cut
from slimbayes_lab.configs.experiment import Experiment
from slimbayes_lab.configs.files import Scale
from slimbayes_lab.papers.rows import PaperRow, find, listings, roots
from slimbayes_lab.report import kept
from slimbayes_lab.report.record import Record, RecordError, read

SCALES: tuple[Scale, ...] = get_args(Scale)
_SHOWN = 4  # fields that differ


@dataclass
class RowStatus:
    """The seeds of a row that have records, by scale, and remarks about records that are not quite the row's."""

    row: str
    seeds: dict[str, list[int]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


def row_statuses(
    rows: Sequence[PaperRow],
    folders: Sequence[Path],
    records: Iterable[tuple[Path, Record]] | None = None,
) -> list[RowStatus]:
    """What records under some folders say about each of some rows; `records` are those, where they are read already."""
    out = {row.stem: RowStatus(row.stem) for row in rows}
    named: dict[
        str, list[tuple[PaperRow, Scale]]
    ] = {}  # a run is a row's only if it has its name, which hashes hold
    for row, scale in product((row for row in rows if row.trains), SCALES):
        named.setdefault(row.experiment(scale).name, []).append((row, scale))
    for file, record in _records(folders) if records is None else records:
        if record.name in named:
            alike = [
                (out[row.stem], scale, row.experiment(scale, record.seed))
                for row, scale in named[record.name]
            ]
            _place(alike, file, record)
    for row in (
        row for row in rows if not row.trains
    ):  # no run to have a record of: its table is all there is
        out[row.stem].seeds = _tabled(row, folders)
    return list(out.values())


def _tabled(row: PaperRow, folders: Sequence[Path]) -> dict[str, list[int]]:
    """Seeds by scale of a row that trains nothing, from tables that were written."""
    found: dict[str, set[int]] = {}
    for file in sorted(
        {file for folder in folders for file in kept.glob(folder, "**/table.json")}
    ):
        try:
            table = kept.load(file)
            if f"{row.name}/".startswith(f"{table['name']}/"):
                seeds = {
                    seed
                    for one in table["rows"]
                    if one["row"] == row.stem
                    for seed in one["seeds"]
                }
                found.setdefault(table["scale"], set()).update(seeds)
        except (OSError, ValueError, KeyError, TypeError):  # no table of ours
            continue
    return {scale: sorted(seeds) for scale, seeds in found.items()}


def _records(folders: Sequence[Path]) -> Iterable[tuple[Path, Record]]:
    for file in sorted(
        {file for folder in folders for file in kept.glob(folder, "**/*.json")}
    ):
        if file.name == "record.json" or (
            file.parent in folders and file.name != "table.json"
        ):
            try:
                yield file, read(file)
            except RecordError:
                continue


def _place(
    wanted: Sequence[tuple[RowStatus, Scale, Experiment]], file: Path, record: Record
) -> None:
    """Note a record with the rows whose config it has, or, where there is none, with the one that is nearest."""
    own = [one for one in wanted if one[2].hash == record.config_hash]
    for status, scale, _ in own:
        seeds = status.seeds.setdefault(scale, [])
        if record.seed not in seeds:
            seeds.append(record.seed)
    if own:
        return
    alike = [
        (differences(record.config, config.resolved), status)
        for status, _, config in wanted
    ]
    odd, nearest = min(alike, key=lambda one: len(one[0]))
    more = f" and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else ""
    why = f"it differs in {'; '.join(odd[:_SHOWN])}{more}"
    nearest.remarks.append(f"{file.parent.name or file.name} is another config: {why}")


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], path: str = ""
) -> list[str]:
    """Fields of two resolved configs that differ, as "path old -> new"; one that only one side has counts if it is set.

    Example:
        >>> differences({"train": {"epochs": 3, "clip": None}}, {"train": {"epochs": 5}})
        ['train.epochs 3 -> 5']
    """
    out = []
    for key in dict.fromkeys([*old, *new]):
        before, after, place = old.get(key), new.get(key), f"{path}{key}"
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            out += differences(before, after, f"{place}.")
        elif before != after:
            out.append(
                f"{place} {cut(str(before), most=40)} -> {cut(str(after), most=40)}"
            )
    return out


def status(name: str, out: Path | None = None) -> list[str]:
    """Lines that say which rows of a table have records: in `out` (runs/<name> by default), and in lab/results/."""
    table = "/".join(name.strip("/").split("/")[:2])
    rows = row_statuses(find(name), [*_results(table), out or Path("runs") / table])
    width = max(len(row.row) for row in rows) + 2
    lines = [f"{'row':<{width}}{'full':<24}small"]
    for row in rows:
        full, small = (_seeds(row.seeds.get(scale, [])) for scale in SCALES)
        lines.append(f"{row.row:<{width}}{full:<24}{small}")
    return lines + [remark for row in rows for remark in row.remarks]


def _seeds(seeds: list[int]) -> str:
    if not seeds:
        return "none"
    shown = ", ".join(map(str, sorted(seeds)[:8])) + (", ..." if len(seeds) > 8 else "")
    return f"seed{'s' if len(seeds) > 1 else ''} {shown}"


def _results(table: str) -> list[Path]:
    """Kept runs of a paper, beside the experiments: its tables share runs."""
    name = f"{table.partition('/')[0]}.jsonl"
    found = [root.parent / "results" / name for root in roots()]
    return list(dict.fromkeys(file.resolve() for file in found if file.is_file()))


def overview(folders: Sequence[Path] | None = None) -> list[str]:
    """A line for each table and figure: how many of its rows have records, by scale; in lab/results/, or in `folders`."""
    lines = [f"{'table or figure':<24}{'rows':>5}{'full':>6}{'small':>6}"]
    read_once = cache(
        lambda paper, where: list(_records(where))
    )  # the tables of a paper share its records
    for name in listings():
        where = tuple(_results(name) if folders is None else folders)
        rows = row_statuses(find(name), where, read_once(name.partition("/")[0], where))
        full, small = (
            sum(bool(row.seeds.get(scale)) for row in rows) for scale in SCALES
        )
        lines.append(f"{name:<24}{len(rows):>5}{full:>6}{small:>6}")
    return lines
