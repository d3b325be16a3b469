"""Runs side by side: means over seeds, bootstrap intervals, and paired differences to a baseline.

Everything is worked out from records; two calls with the same records and arguments give the same table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from slimbayes.report.comparison_table import Comparison, ComparisonRow, Difference, MeanScore
from slimbayes.report.groups import Group, LoadedRuns, Selection, load, main_set
from slimbayes.report.metric import HEADLINE, metric, printable
from slimbayes.report.record import Evaluation
from slimbayes.report.statistics import bootstrap_interval, mean, sign_flip_p

ROLES: tuple[str, ...] = get_args(Evaluation.model_fields["role"].annotation)
FEW = 10  # below so many seeds a percentile interval holds the mean less than nine times in ten (docs/report.md)
BySeed = dict[int, float]


def compare(
    runs: Sequence[Path | str],
    *,
    baseline: str | None = None,
    metrics: Sequence[str] | None = None,
    on: str = "test",
    severity: int | None = None,
    draws: int | None = None,
) -> Comparison:
    """Compare runs by name, with their seeds as replicates.

    Args:
        runs: run directories, record files, or directories that hold runs.
        baseline: a name; every other name gets its paired difference to it, over the seeds that both have.
        metrics: which ones; by default the usual ones that were recorded.
        on: "test", "validation", "corrupted" (mean over corruptions), "shift", "ood", or the name of an evaluated set.
        severity: of corruptions; by default all.
        draws: of each member; by default the most that all runs of a name have.

    Example:
        >>> import tempfile
        >>> from slimbayes.report.record import Cost, Evaluation, Parameters, Record
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name, seed, nll in [("plain", 0, 0.50), ("plain", 1, 0.54), ("rank1", 0, 0.40), ("rank1", 1, 0.46)]:
        ...     scores = [Evaluation(data="toy", role="test", draws=1, rows=10, metrics={"nll": nll})]
        ...     size, cost = Parameters(plain=1, total=1), Cost(train_seconds=1, seconds_per_epoch=1)
        ...     record = Record(name=name, method=name, data="toy", seed=seed, config={}, config_hash="", commands=[],
        ...                     parameters=size, cost=cost, evaluations=scores)
        ...     _ = (folder / f"{name}-{seed}.json").write_text(record.model_dump_json())
        >>> table = compare(sorted(folder.glob("*.json")), baseline="plain")
        >>> [(row.name, round(row.scores["nll"].mean, 2)) for row in table.rows]
        [('plain', 0.52), ('rank1', 0.43)]
        >>> round(table.rows[1].scores["nll"].difference.mean, 2)
        -0.09
    """
    loaded = load(runs)
    known = sorted({group.name for group in loaded.groups})
    baseline = None if baseline is None else printable(baseline)  # as the names of groups
    if baseline is not None and baseline not in known:
        raise ValueError(f"baseline={baseline!r} is not among the runs; needed one of {known}.")
    asked = Selection(severity=severity, draws=draws)
    rows, notes = [], list(loaded.notes)
    for data in loaded.data:
        groups = loaded.on(data)
        selection = _selection(groups, on, asked)
        shared, places = selection.shared_places(groups), selection.all_places(groups)
        if shared != places:
            notes.append(
                f"On {data!r} the runs share {len(shared)} of {len(places)} evaluated places "
                "(data, corruption, severity); only those are compared."
            )
        found = _rows(groups, replace(selection, places=shared), metrics, baseline)
        left_out = [group for group in groups if group.name not in {row.name for row in found}] if found else []
        notes += [f"{group.name!r} on {data!r} has no such evaluation and is left out." for group in left_out]
        rows += found
    if not rows:
        raise ValueError(_nothing(loaded, on, asked, metrics))
    scored = {name for row in rows for name in row.scores}
    names = tuple(metrics) if metrics is not None else tuple(name for name in HEADLINE if name in scored)
    notes += _warnings(rows, baseline)
    return Comparison(on, severity, draws, baseline, names, tuple(rows), tuple(notes), loaded.skipped)


def _selection(groups: Sequence[Group], on: str, asked: Selection) -> Selection:
    """The sets that `on` names, for the runs of one data set."""
    if on == "test":
        main = main_set(groups)
        return replace(asked, role="test", data=main.data if main.role == "test" else None)
    role = "corruption" if on == "corrupted" else on
    if role in ROLES:
        return replace(asked, role=role)
    return replace(asked, role=next((role for role in ROLES if on in Selection(role).sets(groups)), on), data=on)


def _rows(
    groups: Sequence[Group], selection: Selection, metrics: Sequence[str] | None, baseline: str | None
) -> list[ComparisonRow]:
    """A row for each group with any score, the best mean of each metric marked."""
    recorded = selection.metrics(groups)
    names = metrics if metrics is not None else [name for name in HEADLINE if name in recorded]
    values = {g.name: {name: seeds for name in names if (seeds := selection.by_seed(g, name))} for g in groups}
    rows = []
    for group in (group for group in groups if values[group.name]):
        base = values.get(baseline, {}) if baseline is not None and baseline != group.name else {}
        scores = {}
        for name, seeds in values[group.name].items():
            numbers = list(seeds.values())
            difference = _difference(seeds, base.get(name, {}))
            scores[name] = MeanScore(mean(numbers), bootstrap_interval(numbers), seeds, difference=difference)
        method, draws = group.records[0].method, selection.most_draws(group)
        rows.append(ComparisonRow(group.data, group.name, method, draws, scores))
    for name in names:
        rivals = [row.scores for row in rows if name in row.scores]
        for i in metric(name).best([scores[name].mean for scores in rivals]):
            rivals[i][name] = replace(rivals[i][name], best=True)
    return rows


def _difference(seeds: BySeed, base: BySeed) -> Difference | None:
    """Over the seeds that both have with a finite value; None where there are none."""
    gaps = {s: seeds[s] - base[s] for s in seeds if s in base and math.isfinite(seeds[s]) and math.isfinite(base[s])}
    values = list(gaps.values())
    if not gaps:
        return None
    return Difference(mean(values), bootstrap_interval(values), sign_flip_p(values), tuple(gaps))


def _warnings(rows: Sequence[ComparisonRow], baseline: str | None) -> Iterator[str]:
    counts = {len(score.seeds) for row in rows for score in row.scores.values()}
    if 1 in counts:
        yield "A single seed says nothing about the spread: it has no interval and no p-value."
    if any(1 < count < FEW for count in counts):
        yield (
            f"Fewer than {FEW} seeds: percentile bootstrap intervals are too short. "
            "They hold the mean of normal values 74 % of the time with 3 seeds, 85 % with 5."
        )
    for row in rows:
        odd = {seed for score in row.scores.values() for seed, value in score.seeds.items() if not math.isfinite(value)}
        if odd:
            yield (
                f"{row.name!r} on {row.data!r} has values that are not finite with seed "
                f"{', '.join(map(str, sorted(odd)))}; differences leave these seeds out."
            )
    pairs = max((len(s.difference.seeds) for row in rows for s in row.scores.values() if s.difference), default=0)
    if pairs > 1:
        yield (
            f"With {pairs} common seeds no sign-flip p-value can be below {2 / 2**pairs:.2g}; "
            "p-values are not corrected for the number of comparisons."
        )
    others = [row for row in rows if row.name != baseline]
    if baseline is not None and any(score.difference is None for row in others for score in row.scores.values()):
        yield f"Some rows share no seed or metric with {baseline!r} on their data set: they have no difference."


def _nothing(loaded: LoadedRuns, on: str, asked: Selection, metrics: Sequence[str] | None) -> str:
    every = [e for group in loaded.groups for record in group.records for e in record.evaluations]
    sets = sorted({f"{'corrupted' if e.role == 'corruption' else e.role} ({e.data})" for e in every})
    draws, names = sorted({e.draws for e in every}), sorted({name for e in every for name in e.metrics})
    chosen = None if metrics is None else list(metrics)
    return (
        f"no run has scores for on={on!r}, severity={asked.severity}, draws={asked.draws}, metrics={chosen}; the "
        f"records hold sets {', '.join(sets) or 'none'}; draws {draws}; metrics {', '.join(names) or 'none'}."
    )
