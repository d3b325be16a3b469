"""The page's tables, from the groups of one data set: names down, scores across, mean ± standard error over seeds. And
why a method's NLL is above the plain network's, as far as records tell: what it lost on training rows, its KL, what it
was still learning, and what more draws gave it.

Captions stand in templates/page.html, as all else that the page says in sentences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import ClassVar

from slimbayes_lab.report.groups import CORRUPTED, EvaluationSet, RunGroup, main_set
from slimbayes_lab.report.metric import (
    MISSING,
    bootstrap_interval,
    mean,
    metric,
    shown_in,
    standard_error,
)
from slimbayes_lab.report.record import Record

FRONT = shown_in("summary")
BEHIND = tuple(
    name for name in FRONT if metric(name).better != "nearer"
)  # when corrupted: the paper's cA, cNLL, cECE


@dataclass(frozen=True)
class PageCell:
    """What a cell shows, and the number it sorts by; None sorts last."""

    text: str
    sort: float | None
    error: str = ""
    best: bool = False


@dataclass(frozen=True)
class PageColumn:
    """A column: its head, a cell for each group, and `over`, the heading it shares with its neighbours."""

    title: str
    cells: Sequence[PageCell]
    over: str = ""
    arrow: str = ""
    advice: str = ""


@dataclass(frozen=True)
class PageTable:
    """A table that can be sorted by each column; `shared` is how many corrupted sets its means are over."""

    kind: ClassVar = "table"
    title: str
    groups: Sequence[RunGroup]
    columns: Sequence[PageColumn]
    shared: int = 0

    @property
    def rows(self) -> list[tuple[RunGroup, tuple[PageCell, ...]]]:
        """The cells of each group."""
        return list(zip(self.groups, zip(*(column.cells for column in self.columns))))

    @property
    def spans(self) -> list[tuple[str, int]]:
        """The shared headings and how many columns each spans."""
        return [
            (over, len(list(under)))
            for over, under in groupby(column.over for column in self.columns)
        ]


def _scores(
    groups: Sequence[RunGroup], selection: EvaluationSet, name: str, over: str
) -> PageColumn:
    """A metric on the selected sets."""
    known = metric(name)
    values = [selection.values(group, name) for group in groups]
    means = [mean(numbers) for numbers in values]
    leading = known.best(means) if sum(map(bool, values)) > 1 else set()
    places, cells = known.decimals(means), []
    for i, numbers in enumerate(values):
        error = standard_error(numbers)
        cells.append(
            PageCell(
                known.text(means[i], places) if numbers else MISSING,
                None if math.isnan(means[i]) else means[i],
                "" if error is None else known.text(error, places),
                i in leading,
            )
        )
    return PageColumn(known.head, cells, over, known.arrow, known.advice)


def _integers(title: str, values: Sequence[int | None], over: str) -> PageColumn:
    cells = [
        PageCell(
            MISSING if value is None else f"{value:,}".replace(",", "\u2009"), value
        )
        for value in values
    ]
    return PageColumn(title, cells, over)


def summary(groups: Sequence[RunGroup]) -> PageTable:
    """The table a reader looks at first."""
    main = main_set(groups)
    known = main.metrics(groups)
    columns = [
        _scores(groups, main, name, main.role.capitalize())
        for name in FRONT
        if name in known
    ]
    corrupted = replace(CORRUPTED, places=CORRUPTED.shared_places(groups))
    known = corrupted.metrics(groups)
    columns += [
        _scores(groups, corrupted, name, "Corrupted")
        for name in BEHIND
        if name in known
    ]
    columns.append(_growth("Parameters", groups, "Size"))
    columns.append(_integers("Seeds", [len(group.records) for group in groups], "Runs"))
    columns.append(
        _integers("Draws", [main.most_draws(group) for group in groups], "Runs")
    )
    return PageTable("Summary", groups, columns, len(corrupted.places or ()))


def every_score(groups: Sequence[RunGroup]) -> PageTable | None:
    """All metrics of the main set that the summary leaves out."""
    main = main_set(groups)
    names = [name for name in main.metrics(groups) if name not in FRONT]
    columns = [_scores(groups, main, name, main.role.capitalize()) for name in names]
    return PageTable("Further scores", groups, columns) if columns else None


def other_sets(groups: Sequence[RunGroup]) -> PageTable | None:
    """Scores under natural shift, and on further test or validation sets."""
    roles = ("test", "shift", "validation")
    sets = [
        EvaluationSet(role, data)
        for role in roles
        for data in EvaluationSet(role).sets(groups)
    ]
    columns = [
        _scores(groups, other, name, f"{other.data} ({other.role})")
        for other in sets
        if other != main_set(groups)
        for name in other.metrics(groups)
        if name in FRONT
    ]
    return PageTable("Other sets", groups, columns) if columns else None


def unfamiliar(groups: Sequence[RunGroup]) -> PageTable | None:
    """Scores of telling unfamiliar inputs from test rows."""
    columns = [
        _scores(groups, EvaluationSet("ood", data), name, data)
        for data in EvaluationSet("ood").sets(groups)
        for name in EvaluationSet("ood", data).metrics(groups)
    ]
    return PageTable("Unfamiliar inputs", groups, columns) if columns else None


def cost(groups: Sequence[RunGroup]) -> PageTable:
    """Parameters, time and memory."""
    parameters = [group.records[0].parameters for group in groups]
    costs = [[record.cost for record in group.records] for group in groups]
    peaks = [
        [c.peak_memory for c in some if c.peak_memory is not None] for some in costs
    ]
    columns = [
        _integers("Plain", [size.plain for size in parameters], "Parameters"),
        _integers("Trained", [size.total for size in parameters], "Parameters"),
        _growth("Ratio", groups, "Parameters"),
        PageColumn(
            "Training",
            [_seconds([c.train_seconds for c in some]) for some in costs],
            "Time",
        ),
        PageColumn(
            "Epoch",
            [_seconds([c.seconds_per_epoch for c in some]) for some in costs],
            "Time",
        ),
        PageColumn(
            "Evaluation",
            [_seconds([c.evaluate_seconds for c in some]) for some in costs],
            "Time",
        ),
        PageColumn("Peak", [_bytes(some) for some in peaks], "Memory"),
    ]
    return PageTable("Cost", groups, columns)


def _growth(title: str, groups: Sequence[RunGroup], over: str) -> PageColumn:
    ratios = [group.records[0].parameters.growth for group in groups]
    return PageColumn(
        title,
        [
            PageCell(f"\u00d7 {r:.4g}", r) if r is not None else PageCell(MISSING, None)
            for r in ratios
        ],
        over,
    )


def _seconds(values: Sequence[float]) -> PageCell:
    value = mean(values)
    if not math.isfinite(value):
        return PageCell(MISSING, None)
    text = (
        f"{value / 3600:.1f} h"
        if value >= 5400
        else f"{value / 60:.1f} min"
        if value >= 90
        else f"{value:.3g} s"
    )
    return PageCell(text, value)


def _bytes(values: Sequence[int]) -> PageCell:
    if not values:
        return PageCell(MISSING, None)
    value = mean(values)
    return PageCell(
        f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB",
        value,
    )


PLAIN = "Deterministic"
_LATE = 0.1  # the end of training, as a share of its epochs


def reasons(groups: Sequence[RunGroup]) -> Iterator[str]:
    """A note about each method whose mean NLL is above that of the plain network on the same data."""
    for data in dict.fromkeys(group.data for group in groups):
        mine = [group for group in groups if group.data == data]
        judged = main_set(mine)
        plain = next(
            (group for group in mine if group.records[0].method == PLAIN), None
        )
        if plain is None:
            continue
        theirs = judged.by_seed(plain, "nll")
        for group in (group for group in mine if group is not plain):
            ours = judged.by_seed(group, "nll")
            differences = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
            if differences and mean(differences) > 0:
                told = f"{group.name!r} on {data!r} has an NLL of {mean(list(ours.values())):.3f} against "
                told += f"{mean(list(theirs.values())):.3f} of {plain.name!r}{_doubt(differences)}. "
                yield (
                    told
                    + _cause(group, plain, mean(differences))
                    + _draws(group, judged, mean(differences))
                )


def _doubt(differences: Sequence[float]) -> str:
    """What seeds say about a difference."""
    interval = bootstrap_interval(differences)
    if interval is None:
        return ", with one seed in common"
    return (
        f", within what {len(differences)} seeds differ by" if interval[0] <= 0 else ""
    )


def _cause(group: RunGroup, plain: RunGroup, gap: float) -> str:
    """Whether it fits less or predicts worse, and what keeps it from fitting."""
    ours, theirs = (mean([record.curve[-1].get("nll", math.nan) for record in one.records if record.curve])
                    for one in (group, plain))  # fmt: skip
    lost = ours - theirs
    if not math.isfinite(lost):
        return "The records hold no losses of training that could say why."
    both = f"a draw's NLL on training rows is {ours:.3f} against {theirs:.3f}"
    if lost < gap / 2:
        return f"It fits nearly as well ({both}) and predicts other rows worse: it overfits, or by chance."
    ends = [record.curve[-1] for record in group.records if record.curve]
    kl = mean([end.get("kl", 0.0) * end.get("kl_weight", 1.0) for end in ends])
    falling = mean([_late_fall(record) for record in group.records])
    if falling > lost / 2:
        epochs = len(group.records[0].curve)
        return f"It fits less ({both}), and was still learning: {falling:.3f} in the last tenth of {epochs} epochs."
    if kl > lost:
        return f"It fits less ({both}): its KL of {kl:.3f} a row outweighs that. A lower temperature weighs it less."
    return f"It fits less ({both}): the noise of its draws costs that; its KL is {kl:.3f} a row."


def _late_fall(record: Record) -> float:
    """By how much the training NLL fell at the end."""
    nll = [row["nll"] for row in record.curve if "nll" in row]
    late = max(1, round(_LATE * len(nll)))
    return nll[-1 - late] - nll[-1] if len(nll) > late else 0.0


def _draws(group: RunGroup, judged: EvaluationSet, gap: float) -> str:
    """What more draws gave it, where that is a good part of what is missing."""
    counts = judged.draw_counts(group)
    if len(counts) < 2:
        return ""
    few, many = (
        mean(replace(judged, draws=n).values(group, "nll")) for n in counts[-2:]
    )
    return (
        f" From {counts[-2]} to {counts[-1]} draws it gained {few - many:.3f}: take more."
        if few - many > gap / 4
        else ""
    )
