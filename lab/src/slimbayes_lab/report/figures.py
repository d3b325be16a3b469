"""The page's figures, from the groups of one data set. Each builder gives a figure, or None without data.

Their captions stand in templates/page.html, as all that the page says in sentences.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from slimbayes_lab.report.charts import (
    Axis,
    Chart,
    Names,
    Point,
    bars,
    boxes,
    intervals,
    lines,
    members,
    points,
)
from slimbayes_lab.report.groups import CORRUPTED, EvaluationSet, RunGroup, main_set
from slimbayes_lab.report.metric import (
    mean,
    metric,
    printable,
    sort_metrics,
    standard_error,
)
from slimbayes_lab.report.record import Evaluation, Record

MENU = 6  # at most so many metrics to choose from: each is a chart that the page must carry
CURVES = 8  # columns of the training curve to choose from
POINTS = 600  # of all training curves in one chart
_LOGGED = (
    "loss",
    "nll",
    "kl",
    "validation_nll",
    "validation_accuracy",
    "test_nll",
    "test_accuracy",
    "test_ece",
)
BINS = 15  # the caption says so too
KEPT = np.linspace(0.02, 1.0, 50)

Variant = tuple[
    str, tuple[Chart, ...]
]  # a choice of a figure's menu: its label, and charts that stand side by side


@dataclass(frozen=True)
class Figure:
    """A figure. `menu` says what its variants differ in, `key` asks for a key of names and colours."""

    kind: ClassVar = "figure"
    title: str
    variants: tuple[Variant, ...]
    menu: str = "Metric"
    key: bool = True

    @property
    def names(self) -> set[str]:
        """The names that appear in any of its charts."""
        return {
            str(row["n"])
            for _, charts in self.variants
            for chart in charts
            for row in chart.rows
        }


def _figure(
    title: str, variants: Iterable[Variant], menu: str = "Metric", key: bool = True
) -> Figure | None:
    kept = tuple(
        (label, charts)
        for label, charts in variants
        if any(chart.rows for chart in charts)
    )
    return Figure(title, kept, menu, key) if kept else None


def _by_metric(
    names: Sequence[str], draw: Callable[[str], Chart], most: int = MENU
) -> list[Variant]:
    """A choice for each metric, which `draw` makes from its name."""
    return [(metric(name).label, (draw(name),)) for name in names[:most]]


def _names(groups: Iterable[RunGroup]) -> Names:
    return {group.name: group.colour for group in groups}


def _axis(name: str) -> Axis:
    known = metric(name)
    return Axis(f"{known.label} {known.arrow}".strip(), percent=known.percent)


def _around(field: str, centre: float, spread: float) -> Point:
    return {field: centre, "lo": centre - spread, "hi": centre + spread}


def reliability(groups: Sequence[RunGroup]) -> Figure | None:
    """Accuracy by confidence, with the share of rows at each confidence; under corruption too where recorded."""
    main, names = main_set(groups), _names(groups)
    severities = sorted({e.severity for e in CORRUPTED.every(groups) if e.reliability})
    sets = {main.role.capitalize(): main} | {
        f"Severity {s}": replace(CORRUPTED, severity=s) for s in severities
    }
    sure, hit = (
        Axis(title, percent=True, domain=(0, 1)) for title in ("Confidence", "Accuracy")
    )
    share = Axis("Share of rows", percent=True, zero=True)
    variants = []
    for label, selection in sets.items():
        bins = [
            (group.name, *numbers)
            for group in groups
            for numbers in _bins(group, selection)
        ]
        accuracies: list[Point] = [
            {"n": name, "x": x, "y": y} for name, x, y, _ in bins
        ]
        shares: list[Point] = [
            {"n": name, "x": x, "y": part} for name, x, _, part in bins
        ]
        variants.append(
            (
                label,
                (
                    lines(accuracies, names, sure, hit, diagonal=True),
                    lines(shares, names, sure, share),
                ),
            )
        )
    return _figure("Reliability", variants, "Set")


def _bins(
    group: RunGroup, selection: EvaluationSet
) -> list[tuple[float, float, float]]:
    """(confidence, accuracy, share of rows) of equal bins, pooled over seeds and corruptions."""
    sums: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(3))
    for _, evaluation in selection.judged(group):
        if curve := evaluation.reliability:
            for confidence, accuracy, count in zip(
                curve.confidence, curve.accuracy, curve.count
            ):
                if count > 0 and math.isfinite(confidence) and math.isfinite(accuracy):
                    total = np.array([confidence * count, accuracy * count, count])
                    sums[min(int(confidence * BINS), BINS - 1)] += total
    rows = sum(float(total[2]) for total in sums.values())
    return [
        (float(c / n), float(a / n), float(n / rows))
        for _, (c, a, n) in sorted(sums.items())
    ]


def by_severity(groups: Sequence[RunGroup]) -> Figure | None:
    """Metric against severity with a band over corruption types: Figures 7 and 8 of the rank-1 paper."""
    main = main_set(groups)

    def draw(name: str) -> Chart:
        rows: list[Point] = []
        for group in groups:
            if clean := main.values(group, name):
                rows.append({"n": group.name, "x": 0, **_around("y", mean(clean), 0.0)})
            for severity, values in by_corruption(group, name).items():
                spread = (
                    float(np.std(values)) if np.isfinite(values).all() else math.nan
                )
                point = _around("y", mean(values), spread)
                if metric(name).percent:  # no share is below none or above all
                    point |= {"lo": max(point["lo"], 0.0), "hi": min(point["hi"], 1.0)}
                rows.append({"n": group.name, "x": severity, **point})
        severity_axis = Axis("Severity", values=sorted({int(row["x"]) for row in rows}))
        return lines(
            rows, _names(groups), severity_axis, _axis(name), band="standard deviation"
        )

    return _figure(
        "Scores under corruption", _by_metric(CORRUPTED.metrics(groups), draw)
    )


def corruption_boxes(groups: Sequence[RunGroup]) -> Figure | None:
    """Median and quartiles over corruption types at each severity: Figures 10 to 12 of the rank-1 paper."""

    def draw(name: str) -> Chart:
        rows: list[Point] = []
        for group in groups:
            for severity, values in by_corruption(group, name).items():
                if kept := [value for value in values if math.isfinite(value)]:
                    low, q1, mid, q3, high = map(
                        float, np.quantile(kept, [0, 0.25, 0.5, 0.75, 1])
                    )
                    box: Point = {
                        "low": low,
                        "q1": q1,
                        "mid": mid,
                        "q3": q3,
                        "high": high,
                    }
                    rows.append({"n": group.name, "x": severity, **box})
        return boxes(rows, _names(groups), "Severity", _axis(name))

    kinds = {e.corruption for e in CORRUPTED.every(groups)}
    variants = _by_metric(CORRUPTED.metrics(groups), draw) if len(kinds) > 1 else ()
    return _figure("Spread over corruption types", variants)


def by_corruption(group: RunGroup, name: str) -> dict[int, list[float]]:
    """For each severity, the mean over seeds of each corruption type."""
    found: dict[tuple[int, str], list[float]] = defaultdict(list)
    for _, evaluation in CORRUPTED.judged(group):
        if name in evaluation.metrics:
            found[evaluation.severity, evaluation.corruption or ""].append(
                evaluation.metrics[name]
            )
    severities: dict[int, list[float]] = defaultdict(list)
    for (severity, _), values in sorted(found.items()):
        severities[severity].append(mean(values))
    return severities


def unfamiliar(groups: Sequence[RunGroup]) -> Figure | None:
    """How well uncertainty tells unfamiliar inputs from test rows."""
    ood = EvaluationSet("ood")

    def draw(name: str) -> Chart:
        rows: list[Point] = []
        for data in ood.sets(groups):
            for group in groups:
                if values := replace(ood, data=data).values(group, name):
                    interval = _around("x", mean(values), standard_error(values) or 0.0)
                    rows.append({"g": printable(data), "n": group.name, **interval})
        return intervals(rows, _names(groups), _axis(name), "Unfamiliar set")

    return _figure("Unfamiliar inputs", _by_metric(ood.metrics(groups), draw))


def risk_coverage(groups: Sequence[RunGroup]) -> Figure | None:
    """Error among the rows the model is surest of."""
    rows: list[Point] = []
    for group in groups:
        curves = [
            e.risk_coverage
            for _, e in main_set(groups).judged(group)
            if e.risk_coverage
        ]
        grids = [
            np.interp(KEPT, c.coverage, c.risk, left=np.nan)
            for c in curves
            if len(c.coverage) > 1
        ]
        for share, risk in zip(KEPT, np.mean(grids, 0) if grids else ()):
            rows.append({"n": group.name, "x": float(share), "y": float(risk)})
    kept = Axis("Rows kept, the surest first", percent=True, domain=(0, 1))
    chart = lines(
        rows,
        _names(groups),
        kept,
        Axis("Error among them ↓", percent=True, zero=True),
        dots=False,
    )
    return _figure("Risk and coverage", [("", (chart,))])


def diversity(groups: Sequence[RunGroup]) -> Figure | None:
    """How much members differ against how good the model is: Figure 6 of the rank-1 paper."""
    main = main_set(groups)
    found = [
        (group.name, record.seed, e)
        for group in groups
        for record, e in main.judged(group)
        if e.diversity
    ]
    goods = [
        name
        for name in ("accuracy", "nll", "rmse", "lpd")
        if any(name in e.metrics for *_, e in found)
    ][:2]
    kinds = sort_metrics(kind for *_, e in found for kind in e.diversity)
    kinds.sort(
        key=lambda kind: kind != "normalised_disagreement"
    )  # the paper's measure first

    def draw(kind: str, good: str) -> Chart:
        having = [
            run for run in found if good in run[2].metrics and kind in run[2].diversity
        ]
        rows: list[Point] = [
            {"n": n, "seed": s, "x": e.metrics[good], "y": e.diversity[kind]}
            for n, s, e in having
        ]
        return points(rows, _names(groups), _axis(good), _axis(kind))

    variants = [
        (metric(kind).label, tuple(draw(kind, good) for good in goods))
        for kind in kinds
    ]
    return _figure("Diversity of members", variants, "Measure")


def checkpoints(groups: Sequence[RunGroup]) -> Figure | None:
    """The same on the way, after epochs whose test scores were kept (`train.snapshots`): Figure 6 as it is printed."""
    found = [
        (g.name, r.seed, row) for g in groups for r in g.records for row in r.curve
    ]
    kinds = [
        kind
        for kind in ("normalised_disagreement", "disagreement")
        if any(f"test_{kind}" in c for *_, c in found)
    ]

    def draw(kind: str, good: str) -> Chart:
        having = [
            point
            for point in found
            if {f"test_{kind}", f"test_{good}"} <= point[2].keys()
        ]
        rows: list[Point] = [
            {"n": n, "seed": s, "x": c[f"test_{good}"], "y": c[f"test_{kind}"]}
            for n, s, c in having
        ]
        return points(rows[:POINTS], _names(groups), _axis(good), _axis(kind))

    variants = [
        (metric(kind).label, tuple(draw(kind, good) for good in ("accuracy", "nll")))
        for kind in kinds
    ]
    return _figure("Diversity on the way", variants, "Measure")


def member_scores(groups: Sequence[RunGroup]) -> Figure | None:
    """Each member by itself against the averaged prediction."""
    found: list[tuple[RunGroup, Evaluation]] = []
    for group in groups:
        first = [
            e
            for record, e in main_set(groups).judged(group)
            if record is group.records[0] and e.members
        ]
        found += [(group, first[0])] if first else []

    def draw(name: str) -> Chart:
        rows: list[Point] = []
        for group, e in found:
            alone = [
                (f"member {k}", scores[name])
                for k, scores in enumerate(e.members[:32])
                if name in scores
            ]
            kinds = [*alone, ("average", e.metrics[name])] if name in e.metrics else []
            rows += [
                {"n": group.name, "kind": kind, "x": value} for kind, value in kinds
            ]
        return members(rows, _names(group for group, _ in found), _axis(name))

    names = sort_metrics(
        name for _, e in found for scores in e.members for name in scores
    )
    return _figure("Members and their average", _by_metric(names, draw), key=False)


def draws(groups: Sequence[RunGroup]) -> Figure | None:
    """What more draws buy."""
    main = main_set(groups)
    counts = {group.name: main.draw_counts(group) for group in groups}
    several = [group for group in groups if len(counts[group.name]) > 1]
    ticks = sorted({count for group in several for count in counts[group.name]})

    def draw(name: str) -> Chart:
        rows: list[Point] = []
        for group in several:
            for count in counts[group.name]:
                if values := replace(main, draws=count).values(group, name):
                    error = standard_error(values) or 0.0
                    rows.append(
                        {
                            "n": group.name,
                            "x": count,
                            **_around("y", mean(values), error),
                        }
                    )
        count_axis = Axis("Draws of each member", log=True, values=ticks)
        return lines(
            rows, _names(several), count_axis, _axis(name), band="standard error"
        )

    return _figure("Number of draws", _by_metric(main.metrics(several), draw))


def cost(groups: Sequence[RunGroup]) -> Figure | None:
    """Parameters, time and memory."""
    amounts: list[tuple[str, str, Callable[[Record], float | None]]] = [
        (
            "Parameters",
            "Parameters, relative to the plain network",
            lambda r: r.parameters.growth,
        ),
        ("Training", "Seconds per epoch", lambda r: r.cost.seconds_per_epoch),
        (
            "Memory",
            "Peak memory, MiB",
            lambda r: r.cost.peak_memory / 2**20 if r.cost.peak_memory else None,
        ),
    ]
    variants = []
    for label, title, amount in amounts:
        found = {
            g.name: [a for r in g.records if (a := amount(r)) is not None]
            for g in groups
        }
        rows: list[Point] = [
            {"n": name, "x": mean(values)} for name, values in found.items() if values
        ]
        variants.append((label, (bars(rows, _names(groups), Axis(title, zero=True)),)))
    return _figure("Cost of each method", variants, "Cost", key=False)


def training(groups: Sequence[RunGroup]) -> Figure | None:
    """What was logged after each epoch."""
    columns = sort_metrics(
        {key for g in groups for r in g.records for row in r.curve for key in row}
        - {"epoch", "step"}
    )
    columns.sort(
        key=lambda name: _LOGGED.index(name) if name in _LOGGED else len(_LOGGED)
    )
    most = max(20, min(60, POINTS // len(groups)))

    def draw(name: str) -> Chart:
        rows: list[Point] = [
            {"n": g.name, "x": e, "y": value}
            for g in groups
            for e, value in _curve(g, name, most)
        ]
        logged = Axis(metric(name).label, percent=metric(name).percent)
        return lines(rows, _names(groups), Axis("Epoch"), logged, dots=False)

    return _figure("Training", _by_metric(columns, draw, CURVES), "Logged")


def _curve(group: RunGroup, name: str, most: int) -> list[tuple[float, float]]:
    """(epoch, mean over seeds) at epochs that all seeds share: at most so many, the first and the last among them."""
    logged = [
        {
            row.get("epoch", float(i)): row[name]
            for i, row in enumerate(r.curve)
            if name in row
        }
        for r in group.records
    ]
    curves = [curve for curve in logged if curve]
    shared = sorted(set.intersection(*map(set, curves))) if curves else []
    if len(shared) > most:
        shared = [
            shared[round(i * (len(shared) - 1) / (most - 1))] for i in range(most)
        ]
    return [(epoch, mean([curve[epoch] for curve in curves])) for epoch in shared]
