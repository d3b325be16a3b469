"""Which rows of a table have records, at which scale, and why a record that looks like a row's is not.

A record belongs to a row if its hash is the config's, or, where the rule of hashes has changed since, if the config
that it holds has that hash today. Any other record of the row's name is told with the fields that differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from slimbayes.errors import cut
from slimbayes.lab.config import Experiment
from slimbayes.lab.config_files import ConfigError, validate
from slimbayes.lab.papers import PaperRow, Scale, find, roots
from slimbayes.report.record import Record, RecordError, read

SCALES: tuple[Scale, ...] = get_args(Scale)
_SHOWN = 4  # fields that differ


@dataclass
class KeptRow:
    """The seeds of a row that have records, by scale, and remarks about records that are not quite the row's."""

    row: str
    seeds: dict[str, list[int]] = field(default_factory=dict)
    older: int = 0  # found by their config, under another rule of hashes
    remarks: list[str] = field(default_factory=list)


def kept_rows(name: str, folders: Sequence[Path], experiments: Sequence[Path] | None = None) -> list[KeptRow]:
    """What records under some folders say about each row of a table.

    Example:
        >>> [(row.row, row.seeds) for row in kept_rows("rank1/table8/deep-*", [])]
        [('deep-ensemble-5', {}), ('deep-ensemble-10', {})]
    """
    rows = [row for row in find(name, experiments) if row.trains]
    out = {row.stem: KeptRow(row.stem) for row in rows}
    for file, record in _records(folders):
        _place(rows, out, file, record)
    return list(out.values())


def _records(folders: Sequence[Path]) -> Iterable[tuple[Path, Record]]:
    for file in sorted({file for folder in folders for file in folder.glob("**/*.json")}):
        if file.name == "record.json" or file.parent in folders:
            try:
                yield file, read(file)
            except RecordError:
                continue


def by_hash(folder: Path) -> dict[str, Path]:
    """Run directories in a folder by the hash that the config of their record has today."""
    found = {}
    for file, record in _records([folder]):
        present, _ = _present(record)
        found[present.hash if present else record.config_hash] = file.parent
    return found


def _place(rows: Sequence[PaperRow], out: Mapping[str, KeptRow], file: Path, record: Record) -> None:
    present, fault = _present(record)
    alike: list[tuple[str, list[str]]] = []
    taken = False
    for row in rows:
        for scale in SCALES:
            wanted = row.experiment(scale, record.seed)
            if wanted.hash in (record.config_hash, present and present.hash):
                seeds = out[row.stem].seeds.setdefault(scale, [])
                if record.seed not in seeds:
                    seeds.append(record.seed)
                    out[row.stem].older += wanted.hash != record.config_hash
                taken = True
            elif wanted.name == record.name:
                alike.append((row.stem, differences(record.config, wanted.resolved)))
    if not taken and alike:
        stem, odd = min(alike, key=lambda one: len(one[1]))
        more = f" and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else ""
        why = (
            f"its config is not valid any more: {fault}" if fault else f"it differs in {'; '.join(odd[:_SHOWN])}{more}"
        )
        out[stem].remarks.append(f"{file.parent.name or file.name} is another config: {why}")


def _present(record: Record) -> tuple[Experiment | None, str]:
    """The record's own config as it reads today, or what is wrong with it."""
    try:
        return validate(record.config), ""
    except ConfigError as error:
        return None, cut(" ".join(str(error).split()), most=200)


def differences(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "") -> list[str]:
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
            out.append(f"{place} {cut(str(before), most=40)} -> {cut(str(after), most=40)}")
    return out


def status(name: str, out: Path | None = None, folders: Sequence[Path] | None = None) -> list[str]:
    """Lines that say which rows of a table have records: in `out` (runs/<name> by default), and in results/.

    Example:
        >>> status("rank1/table8/deep-ensemble-5", Path("/nowhere"), folders=[])[0].split()
        ['row', 'full', 'small']
    """
    table = "/".join(name.strip("/").split("/")[:2])
    if folders is None:
        kept = [root.parent / "results" / table.partition("/")[0] for root in roots()]  # tables share runs
        folders = list(dict.fromkeys(folder.resolve() for folder in kept if folder.is_dir()))
    rows = kept_rows(name, [*folders, out or Path("runs") / table])
    width = max(len(row.row) for row in rows) + 2 if rows else 5
    lines = [f"{'row':<{width}}{'full':<24}small"]
    for row in rows:
        cells = [_seeds(row.seeds.get(scale, [])) for scale in SCALES]
        lines.append(f"{row.row:<{width}}{cells[0]:<24}{cells[1]}".rstrip())
    if older := sum(row.older for row in rows):
        lines.append(f"{older} of them are from before hashes left defaults out, and were found by their configs.")
    return lines + [remark for row in rows for remark in row.remarks]


def _seeds(seeds: list[int]) -> str:
    if not seeds:
        return "none"
    shown = ", ".join(map(str, sorted(seeds)[:8])) + (", ..." if len(seeds) > 8 else "")
    return f"seed{'s' if len(seeds) > 1 else ''} {shown}"
