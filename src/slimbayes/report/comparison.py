"""Runs side by side: means over seeds, bootstrap intervals, and paired differences to a baseline.

Everything is worked out from records; two calls with the same records and arguments give the same table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from slimbayes.report.comparison_table import Comparison, Difference, Row, Score
from slimbayes.report.metric import HEADLINE, best, printable
from slimbayes.report.record import Evaluation
from slimbayes.report.resampling import bootstrap_interval, mean, sign_flip_p
from slimbayes.report.runs import Group, Runs, load
from slimbayes.report.scores import (
    Where,
    all_places,
    by_seed,
    data_names,
    main_set,
    metric_names,
    settled,
    shared_places,
)

ROLES: tuple[str, ...] = get_args(Evaluation.model_fields["role"].annotation)
FEW = 10  # below so many seeds a percentile interval holds the mean less than nine times in ten (docs/report.md)


def compare(
    runs: Sequence[Path | str],
    *,
    baseline: str | None = None,
    metrics: Sequence[str] | None = None,
    on: str = "test",
    severity: int | None = None,
    draws: int | None = None,
    resamples: int = 10_000,
    seed: int = 0,
) -> Comparison:
    """Compare runs by name, with their seeds as replicates.

    Args:
        runs: run directories, record files, or directories that hold runs.
        baseline: a name; every other name gets its paired difference to it, over the seeds that both have.
        metrics: which ones; by default the usual ones that were recorded.
        on: "test", "validation", "corrupted" (mean over corruptions), "shift", "ood", or the name of an evaluated set.
        severity: of corruptions; by default all.
        draws: of each member; by default the most that all runs of a name have.
        resamples, seed: of the bootstrap.

    Example:
        >>> import tempfile
        >>> from slimbayes.report.record import Cost, Evaluation, Parameters, Record
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name, seed, nll in [("plain", 0, 0.50), ("plain", 1, 0.54), ("rank1", 0, 0.40), ("rank1", 1, 0.46)]:
        ...     scores = [Evaluation(data="toy", role="test", draws=1, rows=10, metrics={"nll": nll})]
        ...     record = Record(name=name, method=name, data="toy", seed=seed, config={}, config_hash="", commands=[],
        ...                     parameters=Parameters(plain=1, total=1), cost=Cost(train_seconds=1, seconds_per_epoch=1), evaluations=scores)
        ...     _ = (folder / f"{name}-{seed}.json").write_text(record.model_dump_json())
        >>> table = compare(sorted(folder.glob("*.json")), baseline="plain")
        >>> [(row.name, round(row.scores["nll"].mean, 2)) for row in table.rows]
        [('plain', 0.52), ('rank1', 0.43)]
        >>> round(table.rows[1].scores["nll"].difference.mean, 2)
        -0.09
    """
    loaded = load(runs)
    baseline = None if baseline is None else printable(baseline)  # as the names of groups
    if baseline is not None and baseline not in {group.name for group in loaded.groups}:
        raise ValueError(
            f"baseline={baseline!r} is not among the runs; needed one of {sorted({group.name for group in loaded.groups})}."
        )
    where = Where(severity=severity, draws=draws)
    notes = list(loaded.notes)
    rows = [
        row
        for data in loaded.data
        for row in _rows(loaded.on(data), on, where, metrics, baseline, (resamples, seed), notes)
    ]
    if not rows:
        raise ValueError(_nothing(loaded, on, where, metrics))
    shown = list(dict.fromkeys(name for row in rows for name in row.scores))
    names = tuple(metrics) if metrics is not None else tuple(sorted(shown, key=HEADLINE.index))
    return Comparison(
        on,
        severity,
        draws,
        baseline,
        names,
        tuple(rows),
        tuple(notes + list(_warnings(rows, baseline))),
        loaded.skipped,
    )


def _where(groups: Sequence[Group], on: str, where: Where) -> Where:
    """The set that `on` names, for the runs of one data set."""
    if on == "test":
        main = main_set(groups)
        return replace(where, role="test", data=main.data if main.role == "test" else None)
    role = "corruption" if on in ("corrupted", "corruption") else on
    if role in ROLES:
        return replace(where, role=role)
    return replace(where, role=next((role for role in ROLES if on in data_names(groups, role)), on), data=on)


def _rows(
    groups: Sequence[Group],
    on: str,
    where: Where,
    metrics: Sequence[str] | None,
    baseline: str | None,
    bootstrap: tuple[int, int],
    notes: list[str],
) -> list[Row]:
    where = _where(groups, on, where)
    places, union = shared_places(groups, where), all_places(groups, where)
    if places != union:
        notes.append(
            f"On {groups[0].data!r} the runs share {len(places)} of {len(union)} evaluated places (data, corruption, severity); only those are compared."
        )
    where = replace(where, places=places)
    recorded = metric_names(groups, where)
    names = list(metrics) if metrics is not None else [name for name in HEADLINE if name in recorded]
    values = {group.name: {name: by_seed(group, where, name) for name in names} for group in groups}
    base = values.get(baseline) if baseline else None
    rows = [
        _row(group, where, values[group.name], None if group.name == baseline else base, bootstrap)
        for group in groups
        if any(values[group.name].values())
    ]
    notes += (
        [
            f"{g.name!r} on {g.data!r} has no such evaluation and is left out."
            for g in groups
            if not any(values[g.name].values())
        ]
        if rows
        else []
    )
    return _marked(rows, names)


def _row(
    group: Group,
    where: Where,
    values: dict[str, dict[int, float]],
    base: dict[str, dict[int, float]] | None,
    bootstrap: tuple[int, int],
) -> Row:
    exact = settled(group, where)
    scores = {}
    for name, seeds in values.items():
        if seeds:
            numbers = list(seeds.values())
            interval = bootstrap_interval(numbers, resamples=bootstrap[0], seed=bootstrap[1])
            scores[name] = Score(
                mean(numbers), interval, seeds, False, _difference(seeds, base[name], bootstrap) if base else None
            )
    return Row(group.data, group.name, group.method, exact.draws if exact else None, scores)


def _difference(seeds: dict[int, float], base: dict[int, float], bootstrap: tuple[int, int]) -> Difference | None:
    """Over the seeds that both have with a finite value; None where there are none."""
    common = [seed for seed in seeds if seed in base and math.isfinite(seeds[seed]) and math.isfinite(base[seed])]
    if not common:
        return None
    gaps = [seeds[seed] - base[seed] for seed in common]
    return Difference(
        mean(gaps),
        bootstrap_interval(gaps, resamples=bootstrap[0], seed=bootstrap[1]),
        sign_flip_p(gaps, seed=bootstrap[1]),
        tuple(common),
    )


def _marked(rows: list[Row], names: Sequence[str]) -> list[Row]:
    """The same rows with the best mean of each metric marked."""
    for name in names:
        having = [i for i, row in enumerate(rows) if name in row.scores]
        for i in best(name, [rows[i].scores[name].mean for i in having]):
            row = rows[having[i]]
            rows[having[i]] = replace(row, scores={**row.scores, name: replace(row.scores[name], best=True)})
    return rows


def _warnings(rows: Sequence[Row], baseline: str | None) -> Iterator[str]:
    counts = {len(score.seeds) for row in rows for score in row.scores.values()}
    if 1 in counts:
        yield "A single seed says nothing about the spread: it has no interval and no p-value."
    if any(1 < count < FEW for count in counts):
        yield f"Fewer than {FEW} seeds: percentile bootstrap intervals are too short. They hold the mean of normal values 74 % of the time with 3 seeds, 85 % with 5."
    for row in rows:
        odd = sorted(
            {seed for score in row.scores.values() for seed, value in score.seeds.items() if not math.isfinite(value)}
        )
        if odd:
            yield f"{row.name!r} on {row.data!r} has values that are not finite with seed {', '.join(map(str, odd))}; differences leave these seeds out."
    pairs = {len(score.difference.seeds) for row in rows for score in row.scores.values() if score.difference}
    if pairs and max(pairs) > 1:
        yield f"With {max(pairs)} common seeds no sign-flip p-value can be below {2 / 2 ** max(pairs):.2g}; p-values are not corrected for the number of comparisons."
    if baseline is not None and any(
        row.name != baseline and any(score.difference is None for score in row.scores.values()) for row in rows
    ):
        yield f"Some rows share no seed or metric with {baseline!r} on their data set: they have no difference."


def _nothing(loaded: Runs, on: str, where: Where, metrics: Sequence[str] | None) -> str:
    every = [e for group in loaded.groups for record in group.records for e in record.evaluations]
    sets = sorted({f"{'corrupted' if e.role == 'corruption' else e.role} ({e.data})" for e in every})
    draws, names = sorted({e.draws for e in every}), sorted({name for e in every for name in e.metrics})
    asked = f"on={on!r}, severity={where.severity}, draws={where.draws}, metrics={None if metrics is None else list(metrics)}"
    return f"no run has scores for {asked}; the records hold sets {', '.join(sets) or 'none'}; draws {draws}; metrics {', '.join(names) or 'none'}."
