"""From records to a table beside the paper's: `table.json` with every number, `table.md` to read. Nothing in them is typed by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from slimbayes.data import CORRUPTIONS
from slimbayes.files import write_text
from slimbayes.lab.config import Experiment
from slimbayes.lab.markdown import markdown
from slimbayes.lab.rows import UNITS, Row, Scale
from slimbayes.metrics.corruption import ALEXNET, corruption_errors
from slimbayes.report.record import Evaluation, Record

Numbers = dict[str, float]
_DROP = 5  # bins of at most so many rows are outliers (Chang et al. 2019, D.2)


@dataclass(frozen=True)
class Result:
    """One row with one seed: its run, record and numbers. Rows that train nothing have numbers alone."""

    row: Row
    seed: int
    numbers: Numbers
    record: Record | None = None
    folder: Path | None = None
    setting: str = ""
    files: tuple[str, ...] = ()  # of its diagnostics


@dataclass(frozen=True)
class Table:
    """What has been found so far of a table or figure, and which rows failed and why."""

    name: str
    scale: Scale
    rows: Sequence[Row]
    results: list[Result] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)


def draws_of(record: Record, asked: int | None) -> int:
    """The number of draws to report: that asked for, or the largest one below it, or the largest of all."""
    there = sorted({e.draws for e in record.evaluations if e.role == "test"})
    below = [n for n in there if asked is None or n <= asked]
    return (below or there)[-1]


def measured(record: Record, draws: int) -> Numbers:
    """Numbers of a record: test scores, means over corruptions (`corrupted_`) and members (`member_`), diversity, parameters."""
    tests = [e for e in record.evaluations if e.role == "test" and e.draws == draws]
    out: Numbers = {}
    for e in tests:
        out |= e.metrics | e.diversity
        out |= {f"member_{name}": fmean(one[name] for one in e.members) for name in (e.members[0] if e.members else ())}
    corrupted = [e for e in record.evaluations if e.role == "corruption" and e.draws == draws]
    for name in ("nll", "accuracy", "ece") if corrupted else ():
        out[f"corrupted_{name}"] = fmean(e.metrics[name] for e in corrupted)
    rates = error_rates(record, draws)
    if record.data.startswith("imagenet") and all(len(rates.get(c, ())) == 5 for c in CORRUPTIONS):
        out["corruption_error"] = corruption_errors({c: rates[c] for c in CORRUPTIONS}, ALEXNET).mce
    size = record.parameters
    return out | {"parameters": float(size.total), "overhead": size.total / size.plain - 1}


def error_rates(record: Record, draws: int) -> dict[str, list[float]]:
    """Top-1 errors by corruption, severity by severity."""
    found = [e for e in record.evaluations if e.role == "corruption" and e.draws == draws]
    out: dict[str, list[float]] = {}
    for e in sorted(found, key=lambda e: e.severity):
        out.setdefault(e.corruption or "", []).append(1 - e.metrics["accuracy"])
    return out


def relative_errors(result: Result, results: Iterable[Result]) -> Numbers:
    """Errors on corrupted rows in percent of another row's with the same seed (Chang et al. 2019, D.4); none where that is missing."""
    reference = result.row.paper.relative_to
    against = next((r for r in results if reference and r.row.stem == reference and r.seed == result.seed), None)
    if against is None or against.record is None or result.record is None:
        return {}
    ours, theirs = (
        error_rates(r.record, draws_of(r.record, r.row.paper.draws)) for r in (result, against) if r.record is not None
    )
    if not ours or any(not sum(rates) for rates in theirs.values()):
        return {}
    found = corruption_errors(ours, theirs)
    return {"corruption_error": found.mce} | {f"error_{name}": value for name, value in found.by_corruption.items()}


def calibration_errors(evaluation: Evaluation) -> Numbers:
    """Calibration errors of an evaluation without its bins of few rows; shares are of all rows."""
    curve = evaluation.reliability
    if curve is None:
        raise ValueError(
            f"The evaluation on {evaluation.data} has no reliability curve to take calibration errors from."
        )
    gaps = [(n, abs(a - c)) for n, a, c in zip(curve.count, curve.accuracy, curve.confidence, strict=True) if n > _DROP]
    return {
        "ece": sum(n * gap for n, gap in gaps) / evaluation.rows,
        "mce": max((gap for _, gap in gaps), default=math.nan),
    }


def told(experiment: Experiment, scale: Scale) -> str:
    """A run's setting in a line.

    Example:
        >>> from slimbayes.lab.rows import find
        >>> told(find("rank1/table2/mfvi")[0].experiment("small"), "small")
        "small: cifar10, up to 1,000 rows, wrn (depth 10, width 1), 3 epochs - not the paper's setting"
    """
    data, model = experiment.data, experiment.model
    sizes = {n: getattr(model, n) for n in type(model).model_fields if n != "kind"}
    shape = ", ".join(f"{n} {'-'.join(map(str, v)) if isinstance(v, tuple) else v}" for n, v in sizes.items())
    rows = f"up to {data.train_limit:,} rows" if data.train_limit else "all rows"
    text = f"{data.name}, {rows}, {model.kind}{f' ({shape})' if shape else ''}, {experiment.train.epochs:,} epochs"
    return f"{scale}: {text}" + (" - not the paper's setting" if scale == "small" else "")


def summary(table: Table) -> dict[str, Any]:
    """Everything of a table as JSON holds it: for each row ours (mean, standard error, number of seeds) and the paper's."""
    return {
        "name": table.name, "place": table.rows[0].paper.place, "scale": table.scale, "rows": [_entry(table, row) for row in table.rows],
        "failures": table.failures,
    }  # fmt: skip


def _entry(table: Table, row: Row) -> dict[str, Any]:
    mine = [r for r in table.results if r.row.name == row.name]
    numbers = [r.numbers | relative_errors(r, table.results) for r in mine]
    paper = row.paper
    record = mine[0].record if mine else None
    entry: dict[str, Any] = {
        "row": row.stem, "label": paper.row, "note": paper.note, "seeds": [r.seed for r in mine], "settings": sorted({r.setting for r in mine if r.setting}),
        "ours": _averages(numbers, paper.units), "paper": paper.numbers, "paper_errors": paper.errors, "units": paper.units,
        "shows": [*paper.numbers, *paper.shows], "runs": [r.folder.name for r in mine if r.folder], "files": [f for r in mine for f in r.files],
    }  # fmt: skip
    if record is not None:
        size = round(
            numbers[0].get("parameters", record.parameters.total)
        )  # a diagnostic may count another posterior than the record's
        entry |= {
            "method": record.method,
            "draws": draws_of(record, paper.draws),
            "parameters": size,
            "overhead": size / record.parameters.plain - 1,
        }
        entry["train_seconds"] = [round(r.record.cost.train_seconds, 1) for r in mine if r.record]
    return entry


def _averages(numbers: Sequence[Numbers], units: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Mean, standard error and number of seeds of each score; what is not finite is told in place of the mean."""
    out: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(n for one in numbers for n in one):
        values = [one[name] * UNITS[units.get(name, "")] for one in numbers if name in one]
        odd = sorted({str(value) for value in values if not math.isfinite(value)})
        error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 and not odd else None
        # JSON has no word for NaN or infinity: they are written as text.
        out[name] = {"mean": "/".join(odd) if odd else fmean(values), "error": error, "count": len(values)}
    return out


def write(table: Table, out: Path) -> Path:
    """Write both files into a folder and return the one to read."""
    found = summary(table)
    write_text(out / "table.json", json.dumps(found, indent=1) + "\n")
    write_text(out / "table.md", markdown(found))
    return out / "table.md"
