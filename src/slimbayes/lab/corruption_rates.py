"""Errors on corrupted rows: from a record, and in percent of another network's (mCE and rmCE)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slimbayes.metrics.corruption import corruption_errors
from slimbayes.report.record import Record


def error_rates(record: Record, draws: int) -> dict[str, Any]:
    """Top-1 errors: "clean", of test rows, and by corruption, severity by severity."""
    tests = [e.metrics for e in record.evaluations if e.role == "test" and e.draws == draws]
    out: dict[str, Any] = {"clean": 1 - tests[0]["accuracy"]} if tests and "accuracy" in tests[0] else {}
    found = [e for e in record.evaluations if e.role == "corruption" and e.draws == draws]
    for e in sorted(found, key=lambda e: e.severity):
        out.setdefault(e.corruption or "", []).append(1 - e.metrics["accuracy"])
    return out


def corruption_against(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, float]:
    """Mean corruption error (mCE), that of each corruption, and the relative one (rmCE) where it has a meaning."""
    absolute = corruption_errors(ours, {name: rates for name, rates in theirs.items() if name != "clean"})
    out = {"corruption_error": absolute.mce}
    out |= {f"error_{name}": value for name, value in absolute.by_corruption.items()}
    # A reference that corruption does not harm has nothing to be relative to.
    harmed = all(sum(rates) > len(rates) * theirs["clean"] + 1e-9 for name, rates in theirs.items() if name != "clean")
    if harmed:
        relative = corruption_errors(ours, theirs)
        out |= {"relative_corruption_error": relative.rmce}
        out |= {f"relative_error_{name}": value for name, value in relative.relative_by_corruption.items()}
    return out
