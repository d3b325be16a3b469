"""From the record of a run to the numbers of a row, under the names that papers' tables use."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from slimbayes.data import CORRUPTIONS
from slimbayes.lab.papers import PaperRow
from slimbayes.metrics.corruption import ALEXNET, corruption_errors
from slimbayes.report.record import Evaluation, Record

Numbers = dict[str, float]
_DROP = 5  # bins of at most so many rows are outliers (Chang et al. 2019, D.2)


@dataclass(frozen=True)
class RowResult:
    """One row with one seed: its run, record and numbers. Rows that train nothing have numbers alone."""

    row: PaperRow
    seed: int
    numbers: Numbers
    record: Record | None = None
    folder: Path | None = None
    setting: str = ""
    files: tuple[str, ...] = ()  # of its diagnostics


def draws_of(record: Record, asked: int | None) -> int:
    """The number of draws to report: that asked for, or the largest one below it, or the largest of all."""
    there = sorted({e.draws for e in record.evaluations if e.role == "test"})
    below = [n for n in there if asked is None or n <= asked]
    return (below or there)[-1]


def measured(record: Record, draws: int) -> Numbers:
    """Scores of test rows, means over corruptions (`corrupted_`) and members (`member_`), diversity, parameters."""
    out: Numbers = {}
    for e in (e for e in record.evaluations if e.role == "test" and e.draws == draws):
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


def relative_errors(result: RowResult, results: Iterable[RowResult]) -> Numbers:
    """Errors on corrupted rows in percent of another row's with the same seed (Chang et al. 2019, D.4).

    Nothing where that row has not been run.
    """
    wanted = (result.row.paper.relative_to, result.seed)
    against = next((other for other in results if (other.row.stem, other.seed) == wanted), None)
    if against is None or against.record is None or result.record is None:
        return {}
    ours = error_rates(result.record, draws_of(result.record, result.row.paper.draws))
    theirs = error_rates(against.record, draws_of(against.record, against.row.paper.draws))
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
