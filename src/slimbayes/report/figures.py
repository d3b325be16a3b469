"""Figures of how good the predictions are, from the groups of one data set. Each builder gives a figure, or None without data."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from slimbayes.report.charts import Axis, Chart, Names, Point, boxes, intervals, lines, points
from slimbayes.report.metric import metric, ordered
from slimbayes.report.record import Reliability
from slimbayes.report.resampling import mean, standard_error
from slimbayes.report.runs import Group
from slimbayes.report.scores import Where, by_seed, data_names, find, main_set, metric_names, settled

MENU = 6  # at most so many metrics to choose from: each is a chart that the page must carry
BINS = 15
KEPT = np.linspace(0.02, 1.0, 50)


@dataclass(frozen=True)
class Variant:
    """One choice of a figure's menu: its charts stand side by side."""

    label: str
    charts: tuple[Chart, ...]


@dataclass(frozen=True)
class Figure:
    """A figure with its caption. `key` asks for a key of names and colours."""

    title: str
    caption: str
    variants: tuple[Variant, ...]
    menu: str = "Metric"
    key: bool = True

    @property
    def names(self) -> set[str]:
        """The names that appear in any of its charts."""
        return {str(row["n"]) for variant in self.variants for chart in variant.charts for row in chart.rows}


def names_of(groups: Sequence[Group]) -> Names:
    """Names and their places on the page."""
    return {group.name: group.place for group in groups}


def axis(name: str, **more: bool) -> Axis:
    """The axis of a metric."""
    known = metric(name)
    return Axis(f"{known.label} {known.arrow}".strip(), percent=known.percent, **more)


def menu(names: Sequence[str], chart: Callable[[str], Chart | None], most: int = MENU) -> tuple[Variant, ...]:
    """A variant for each metric that has something to show."""
    charts = [(metric(name).label, chart(name)) for name in names[:most]]
    return tuple(Variant(label, (made,)) for label, made in charts if made is not None and made.rows)


def reliability(groups: Sequence[Group]) -> Figure | None:
    """Accuracy by confidence, with the share of rows at each confidence; under corruption too where it was recorded."""
    main, shifted = main_set(groups), Where("corruption")
    severities = sorted({e.severity for g in groups for r in g.records for e in find(r, shifted) if e.reliability})
    sets = [
        (main.role.capitalize(), main),
        *((f"Severity {severity}", replace(shifted, severity=severity)) for severity in severities),
    ]
    variants = []
    for label, where in sets:
        binned = {group.name: _binned(group, where) for group in groups}
        rows: list[Point] = [
            {"n": name, "x": x, "y": y, "s": share} for name, bins in binned.items() for x, y, share in bins
        ]
        if rows:
            sure = Axis("Confidence", percent=True, domain=(0, 1))
            diagram = lines(rows, names_of(groups), sure, Axis("Accuracy", percent=True, domain=(0, 1)), diagonal=True)
            shares: list[Point] = [{"n": row["n"], "x": row["x"], "y": row["s"]} for row in rows]
            variants.append(
                Variant(
                    label,
                    (diagram, lines(shares, names_of(groups), sure, Axis("Share of rows", percent=True, zero=True))),
                )
            )
    caption = (
        f"First: accuracy of the rows in each of {BINS} bins of confidence; a calibrated model lies on the dashed line, an overconfident one below it. "
        "Second: how many rows have that confidence. Bins with few rows are noisy. Rows of all seeds are pooled."
    )
    return Figure("Reliability", caption, tuple(variants), "Set") if variants else None


def _binned(group: Group, where: Where) -> list[tuple[float, float, float]]:
    """(confidence, accuracy, share of rows) of equal bins, pooled over seeds and corruptions."""
    exact = settled(group, where)
    found = [e.reliability for record in group.records for e in find(record, exact) if e.reliability] if exact else []
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for curve in found:
        for confidence, accuracy, count in _bins(curve):
            total = sums[min(int(confidence * BINS), BINS - 1)]
            for i, amount in enumerate((confidence * count, accuracy * count, count)):
                total[i] += amount
    rows = sum(total[2] for total in sums.values())
    return [(c / n, a / n, n / rows) for _, (c, a, n) in sorted(sums.items())]


def _bins(curve: Reliability) -> list[tuple[float, float, int]]:
    triples = zip(curve.confidence, curve.accuracy, curve.count)
    return [(c, a, n) for c, a, n in triples if n > 0 and math.isfinite(c) and math.isfinite(a)]


def by_severity(groups: Sequence[Group]) -> Figure | None:
    """Metric against severity with a band over corruption types: Figures 7 and 8 of the rank-1 paper."""
    where = Where("corruption")
    main = main_set(groups)

    def chart(name: str) -> Chart:
        rows: list[Point] = []
        for group in groups:
            clean = list(by_seed(group, main, name).values())
            if clean:
                rows.append({"n": group.name, "x": 0, "y": mean(clean), "lo": mean(clean), "hi": mean(clean)})
            for severity, values in _types(group, name).items():
                centre, spread = mean(values), float(np.std(values)) if np.isfinite(values).all() else math.nan
                rows.append({"n": group.name, "x": severity, "y": centre, "lo": centre - spread, "hi": centre + spread})
        severities = sorted({int(row["x"]) for row in rows})
        return lines(rows, names_of(groups), Axis("Severity", values=severities), axis(name), band="standard deviation")

    variants = menu(metric_names(groups, where), chart)
    caption = (
        "Mean over seeds and corruption types; severity 0 is the clean set. The band is one standard deviation over corruption types: "
        "it says how uneven corruptions are, not how uncertain the mean is."
    )
    return Figure("Scores under corruption", caption, variants) if variants else None


def corruption_boxes(groups: Sequence[Group]) -> Figure | None:
    """Median and quartiles over corruption types at each severity: Figures 10 to 12 of the rank-1 paper."""

    def chart(name: str) -> Chart:
        rows: list[Point] = []
        for group in groups:
            for severity, values in _types(group, name).items():
                kept = [value for value in values if math.isfinite(value)]
                if kept:
                    low, q1, mid, q3, high = map(float, np.quantile(kept, [0, 0.25, 0.5, 0.75, 1]))
                    rows.append(
                        {"n": group.name, "x": severity, "low": low, "q1": q1, "mid": mid, "q3": q3, "high": high}
                    )
        return boxes(rows, names_of(groups), "Severity", axis(name))

    kinds = {e.corruption for g in groups for r in g.records for e in find(r, Where("corruption"))}
    variants = menu(metric_names(groups, Where("corruption")), chart) if len(kinds) > 1 else ()
    caption = f"Each box holds the middle half of {len(kinds)} corruption types, its line is the median, its whiskers reach the easiest and the hardest type. Seeds are averaged first."
    return Figure("Spread over corruption types", caption, variants) if variants else None


def _types(group: Group, name: str) -> dict[int, list[float]]:
    """For each severity, the mean over seeds of each corruption type."""
    exact = settled(group, Where("corruption"))
    found: dict[tuple[int, str], list[float]] = defaultdict(list)
    for record in group.records if exact else ():
        for evaluation in find(record, exact):
            if name in evaluation.metrics:
                found[evaluation.severity, evaluation.corruption or ""].append(evaluation.metrics[name])
    types: dict[int, list[float]] = defaultdict(list)
    for (severity, _), values in sorted(found.items()):
        types[severity].append(mean(values))
    return types


def diversity(groups: Sequence[Group]) -> Figure | None:
    """How much members differ against how good the model is: Figure 6 of the rank-1 paper."""
    main = main_set(groups)
    found = [
        (group.name, record.seed, e)
        for group in groups if (exact := settled(group, main))
        for record in group.records for e in find(record, exact) if e.diversity
    ]  # fmt: skip
    goods = [name for name in ("accuracy", "nll", "rmse", "lpd") if any(name in e.metrics for _, _, e in found)][:2]
    kinds = ordered(kind for _, _, e in found for kind in e.diversity)
    kinds = sorted(kinds, key=lambda kind: kind != "normalised_disagreement")  # the paper's measure first

    def chart(kind: str, good: str) -> Chart:
        rows: list[Point] = [
            {"n": name, "seed": seed, "x": e.metrics[good], "y": e.diversity[kind]}
            for name, seed, e in found
            if good in e.metrics and kind in e.diversity
        ]
        return points(rows, names_of(groups), axis(good), axis(kind))

    variants = tuple(Variant(metric(kind).label, tuple(chart(kind, good) for good in goods)) for kind in kinds)
    caption = "A point for each run. Disagreement is the share of rows on which two members predict different classes, averaged over pairs; divided by the error it does not reward weak members for being random. Better models lie higher and further along the arrow."
    return Figure("Diversity of members", caption, variants, "Measure") if goods and variants else None


def risk_coverage(groups: Sequence[Group]) -> Figure | None:
    """Error among the rows the model is surest of."""
    rows: list[Point] = []
    for group in groups:
        exact = settled(group, main_set(groups))
        curves = (
            [e.risk_coverage for record in group.records for e in find(record, exact) if e.risk_coverage]
            if exact
            else []
        )
        grids = [
            np.interp(KEPT, curve.coverage, curve.risk, left=np.nan) for curve in curves if len(curve.coverage) > 1
        ]
        for share, risk in zip(KEPT, np.mean(grids, 0) if grids else ()):
            rows.append({"n": group.name, "x": float(share), "y": float(risk)})
    chart = lines(
        rows,
        names_of(groups),
        Axis("Rows kept, the surest first", percent=True, domain=(0, 1)),
        Axis("Error among them ↓", percent=True, zero=True),
        dots=False,
    )
    caption = "Error when the model may decline the rows it is least sure of. A curve that stays low for longer knows better what it does not know. Mean over seeds."
    return Figure("Risk and coverage", caption, (Variant("", (chart,)),)) if chart.rows else None


def unfamiliar(groups: Sequence[Group]) -> Figure | None:
    """How well uncertainty tells unfamiliar inputs from test rows."""
    sets = data_names(groups, "ood")

    def chart(name: str) -> Chart:
        rows: list[Point] = []
        for data in sets:
            for group in groups:
                values = list(by_seed(group, Where("ood", data), name).values())
                error = standard_error(values) or 0.0
                rows += (
                    [
                        {
                            "g": data,
                            "n": group.name,
                            "x": mean(values),
                            "lo": mean(values) - error,
                            "hi": mean(values) + error,
                        }
                    ]
                    if values
                    else []
                )
        return intervals(rows, names_of(groups), axis(name), "Unfamiliar set")

    variants = menu(metric_names(groups, Where("ood")), chart)
    caption = "How well the model's uncertainty separates unfamiliar inputs from the test rows: mean and standard error over seeds. AUROC 0.5 is chance."
    return Figure("Unfamiliar inputs", caption, variants) if variants else None
