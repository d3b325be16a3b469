"""The page's tables, from the groups of one data set: names down, scores across, mean ± standard error over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slimbayes.report.metric import MISSING, best, decimals, metric, shown
from slimbayes.report.resampling import mean, standard_error
from slimbayes.report.runs import Group
from slimbayes.report.scores import Where, by_seed, data_names, main_set, metric_names, settled, shared_places

FRONT = ("accuracy", "nll", "ece", "rmse", "lpd", "crps", "coverage95")  # of the summary
BEHIND = ("accuracy", "nll", "ece", "rmse", "lpd", "crps")  # the same under corruption, as the paper's cA, cNLL, cECE


@dataclass(frozen=True)
class Cell:
    """What a cell shows, and the number it sorts by; None sorts last."""

    text: str
    sort: float | str | None
    error: str = ""
    best: bool = False
    detail: str = ""  # a second line
    place: int | None = None  # of a name: its colour


@dataclass(frozen=True)
class Column:
    """A column's head. `over` is the heading it shares with its neighbours."""

    title: str
    over: str = ""
    arrow: str = ""
    advice: str = ""


@dataclass(frozen=True)
class Table:
    """A table that can be sorted by each column."""

    title: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]

    @property
    def spans(self) -> list[tuple[str, int]]:
        """The shared headings and how many columns each spans; empty where there is none."""
        spans: list[tuple[str, int]] = []
        for column in self.columns:
            if spans and spans[-1][0] == column.over:
                spans[-1] = (column.over, spans[-1][1] + 1)
            else:
                spans.append((column.over, 1))
        return spans if any(over for over, _ in spans) else []


def score_column(groups: Sequence[Group], where: Where, name: str, over: str = "") -> tuple[Column, list[Cell]]:
    """A metric on a set: the column's head and a cell for each group."""
    values = [list(by_seed(group, where, name).values()) for group in groups]
    means = [mean(numbers) for numbers in values]
    leading = best(name, means) if sum(bool(numbers) for numbers in values) > 1 else set()
    places, cells = decimals(name, means), []
    for i, numbers in enumerate(values):
        error = standard_error(numbers)
        value = means[i] if numbers and not math.isnan(means[i]) else None
        cells.append(
            Cell(
                shown(name, means[i], places) if numbers else MISSING,
                value,
                "" if error is None else shown(name, error, places),
                i in leading,
            )
        )
    known = metric(name)
    return Column(known.head, over, known.arrow, known.advice), cells


def _table(title: str, caption: str, groups: Sequence[Group], columns: Sequence[tuple[Column, list[Cell]]]) -> Table:
    """Names with their colours down the side. Only the first table of a page describes the methods."""
    details = [group.method if title == "Summary" and group.method != group.name else "" for group in groups]
    heads = [
        Cell(group.name, group.name.lower(), detail=detail, place=group.place) for group, detail in zip(groups, details)
    ]
    rows = tuple((heads[i], *(cells[i] for _, cells in columns)) for i in range(len(groups)))
    return Table(title, caption, (Column("Name"), *(head for head, _ in columns)), rows)


def _numbers(title: str, values: Sequence[int | None], over: str = "") -> tuple[Column, list[Cell]]:
    return Column(title, over), [Cell(MISSING if value is None else str(value), value) for value in values]


def summary(groups: Sequence[Group]) -> Table:
    """The table a reader looks at first."""
    main = main_set(groups)
    exact = [settled(group, main) for group in groups]
    known = metric_names(groups, main)
    columns = [score_column(groups, main, name, main.role.capitalize()) for name in FRONT if name in known]
    corrupted = replace(Where("corruption"), places=shared_places(groups, Where("corruption")))
    known = metric_names(groups, corrupted)
    columns += [score_column(groups, corrupted, name, "Corrupted") for name in BEHIND if name in known]
    columns.append(_growth(groups))
    columns += [
        _numbers("Seeds", [len(group.records) for group in groups], "Runs"),
        _numbers("Draws", [where.draws if where else None for where in exact], "Runs"),
    ]
    caption = "Mean ± standard error over seeds; one seed has no error. Bold is the best mean, which need not be a real difference."
    if known:
        caption += (
            f" Corrupted: mean over the {len(corrupted.places or ())} corruptions and severities that all runs share."
        )
    return _table("Summary", caption, groups, columns)


def _growth(groups: Sequence[Group]) -> tuple[Column, list[Cell]]:
    ratios = [
        group.records[0].parameters.total / group.records[0].parameters.plain
        if group.records[0].parameters.plain
        else math.nan
        for group in groups
    ]
    return Column("Parameters", "Size"), [
        Cell(f"\u00d7 {ratio:.4g}", ratio) if math.isfinite(ratio) else Cell(MISSING, None) for ratio in ratios
    ]


def every_score(groups: Sequence[Group]) -> Table | None:
    """All metrics of the main set that the summary leaves out, and how much members differ."""
    main = main_set(groups)
    names = [name for name in metric_names(groups, main) if name not in FRONT]
    columns = [score_column(groups, main, name, main.role.capitalize()) for name in names]
    return (
        _table("Further scores", "Mean ± standard error over seeds, on the same rows as the summary.", groups, columns)
        if columns
        else None
    )


def other_sets(groups: Sequence[Group]) -> Table | None:
    """Scores under natural shift, and on further test or validation sets."""
    main = main_set(groups)
    sets = [Where(role, data) for role in ("test", "shift", "validation") for data in data_names(groups, role)]
    columns = [
        score_column(groups, where, name, f"{where.data} ({where.role})")
        for where in sets if (where.role, where.data) != (main.role, main.data)
        for name in metric_names(groups, where) if name in FRONT
    ]  # fmt: skip
    return (
        _table(
            "Other sets",
            "Mean ± standard error over seeds. Validation rows took part in choices; test and shifted rows did not.",
            groups,
            columns,
        )
        if columns
        else None
    )


def unfamiliar(groups: Sequence[Group]) -> Table | None:
    """Scores of telling unfamiliar inputs from test rows."""
    columns = [
        score_column(groups, Where("ood", data), name, data)
        for data in data_names(groups, "ood")
        for name in metric_names(groups, Where("ood", data))
    ]
    return _table("Unfamiliar inputs", "Mean ± standard error over seeds.", groups, columns) if columns else None


def cost(groups: Sequence[Group]) -> Table:
    """Parameters, time and memory."""
    records = [group.records for group in groups]
    columns = [
        (Column("Plain", "Parameters"), [_count(r[0].parameters.plain) for r in records]),
        (Column("Trained", "Parameters"), [_count(r[0].parameters.total) for r in records]),
        _growth(groups),
        (Column("Training", "Time"), [_seconds([run.cost.train_seconds for run in r]) for r in records]),
        (Column("Epoch", "Time"), [_seconds([run.cost.seconds_per_epoch for run in r]) for r in records]),
        (Column("Evaluation", "Time"), [_seconds([run.cost.evaluate_seconds for run in r]) for r in records]),
        (
            Column("Peak", "Memory"),
            [_bytes([run.cost.peak_memory for run in r if run.cost.peak_memory is not None]) for r in records],
        ),
    ]
    columns[2] = (Column("Ratio", "Parameters"), columns[2][1])
    return _table(
        "Cost",
        "Mean over seeds; an epoch is the median of its run. Peak memory is the device's on a GPU, the process's on a CPU.",
        groups,
        columns,
    )


def _count(number: int) -> Cell:
    return Cell(f"{number:,}".replace(",", "\u2009"), number)


def _seconds(values: Sequence[float]) -> Cell:
    value = mean(values)
    if not math.isfinite(value):
        return Cell(MISSING, None)
    text = f"{value / 3600:.1f} h" if value >= 5400 else f"{value / 60:.1f} min" if value >= 90 else f"{value:.3g} s"
    return Cell(text, value)


def _bytes(values: Sequence[int]) -> Cell:
    if not values:
        return Cell(MISSING, None)
    value = mean(values)
    return Cell(f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB", value)
