"""Figures of the runs themselves: training, members, draws and cost, from the groups of one data set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slimbayes.report.charts import Axis, Chart, Point, bars, lines, members
from slimbayes.report.figures import Figure, Variant, axis, menu, names_of
from slimbayes.report.metric import metric, ordered
from slimbayes.report.resampling import mean, standard_error
from slimbayes.report.runs import Group
from slimbayes.report.scores import Where, by_seed, draw_counts, find, main_set, metric_names, settled

CURVES = 8  # columns of the curve to choose from
POINTS = 600  # of all curves in one chart


def training(groups: Sequence[Group]) -> Figure | None:
    """What was logged after each epoch."""
    columns = ordered({key for g in groups for r in g.records for row in r.curve for key in row} - {"epoch", "step"})
    columns.sort(key=lambda name: {"loss": 0, "nll": 1, "kl": 2}.get(name, 3))
    most = max(20, min(60, POINTS // len(groups)))

    def chart(name: str) -> Chart:
        rows: list[Point] = [
            {"n": g.name, "x": epoch, "y": value} for g in groups for epoch, value in thin(_curve(g, name), most)
        ]
        return lines(
            rows, names_of(groups), Axis("Epoch"), Axis(metric(name).label, percent=metric(name).percent), dots=False
        )

    variants = menu(columns, chart, CURVES)
    caption = f"Mean over seeds at the epochs that all seeds have; long curves are thinned to {most} epochs."
    return Figure("Training", caption, variants, "Logged") if variants else None


def _curve(group: Group, name: str) -> list[tuple[float, float]]:
    """The mean over seeds at each epoch they share."""
    curves = [
        {row.get("epoch", float(i)): row[name] for i, row in enumerate(record.curve) if name in row}
        for record in group.records
    ]
    curves = [curve for curve in curves if curve]
    shared = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    return [(epoch, mean([curve[epoch] for curve in curves])) for epoch in shared]


def thin(rows: list[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most so many rows, evenly picked; the first and the last stay.

    Example:
        >>> thin([(0.0, 5.0), (1.0, 4.0), (2.0, 3.0), (3.0, 2.0), (4.0, 1.0)], 3)
        [(0.0, 5.0), (2.0, 3.0), (4.0, 1.0)]
    """
    if len(rows) <= most:
        return rows
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


def member_scores(groups: Sequence[Group]) -> Figure | None:
    """Each member by itself against the averaged prediction."""
    main = main_set(groups)
    found = []
    for group in groups:
        exact = settled(group, main)
        having = [e for record in group.records[:1] for e in find(record, exact) if e.members] if exact else []
        found += [(group, having[0])] if having else []

    def chart(name: str) -> Chart:
        rows: list[Point] = []
        for group, e in found:
            if name in e.metrics:
                rows += [
                    {"n": group.name, "kind": f"member {k}", "x": scores[name]}
                    for k, scores in enumerate(e.members[:32])
                    if name in scores
                ]
                rows.append({"n": group.name, "kind": "average", "x": e.metrics[name]})
        return members(rows, names_of([group for group, _ in found]), axis(name))

    variants = menu(ordered(name for _, e in found for scores in e.members for name in scores), chart)
    caption = "Ticks are members by themselves, the dot is the prediction averaged over all of them: the distance is what averaging buys. One run of each name, the lowest seed."
    return Figure("Members and their average", caption, variants, key=False) if variants else None


def draws(groups: Sequence[Group]) -> Figure | None:
    """What more draws buy."""
    main = main_set(groups)
    counts = {group.name: draw_counts(group, main) for group in groups}
    several = [group for group in groups if len(counts[group.name]) > 1]

    def chart(name: str) -> Chart:
        rows: list[Point] = []
        for group in several:
            for count in counts[group.name]:
                values = list(by_seed(group, Where(main.role, main.data, draws=count), name).values())
                error = standard_error(values) or 0.0
                rows += (
                    [
                        {
                            "n": group.name,
                            "x": count,
                            "y": mean(values),
                            "lo": mean(values) - error,
                            "hi": mean(values) + error,
                        }
                    ]
                    if values
                    else []
                )
        ticks = sorted({count for group in several for count in counts[group.name]})
        return lines(
            rows,
            names_of(several),
            Axis("Draws of each member", log=True, values=ticks),
            axis(name),
            band="standard error",
        )

    variants = menu(metric_names(several, main), chart) if several else ()
    caption = "Mean and standard error over seeds on the same rows. Prediction costs grow in proportion to draws; where the line is flat, further draws buy nothing."
    return Figure("Number of draws", caption, variants) if variants else None


def cost(groups: Sequence[Group]) -> Figure | None:
    """Parameters, time and memory."""
    amounts = [
        (
            "Parameters",
            "Parameters, relative to the plain network",
            lambda r: r.parameters.total / r.parameters.plain if r.parameters.plain else None,
        ),
        ("Training", "Seconds per epoch", lambda r: r.cost.seconds_per_epoch),
        ("Memory", "Peak memory, MiB", lambda r: r.cost.peak_memory / 2**20 if r.cost.peak_memory else None),
    ]
    variants = []
    for label, title, amount in amounts:
        rows = list(_means((group.name, [amount(record) for record in group.records]) for group in groups))
        if rows:
            variants.append(Variant(label, (bars(rows, names_of(groups), Axis(title, zero=True)),)))
    return Figure(
        "Cost of each method",
        "Mean over seeds. Times and memory compare only on one kind of machine: see the environment below.",
        tuple(variants),
        "Cost",
        key=False,
    )


def _means(values: Iterable[tuple[str, list[float | None]]]) -> Iterable[Point]:
    for name, amounts in values:
        known = [amount for amount in amounts if amount is not None]
        if known:
            yield {"n": name, "x": mean(known)}
