"""Runs side by side: means over seeds, bootstrap intervals, and paired differences to a baseline.

Everything is worked out from records; two calls with the same records and arguments give the same table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from slimbayes_lab.report.groups import (
    EvaluationSet,
    LoadedRuns,
    RunGroup,
    load,
    main_set,
)
from slimbayes_lab.report.metric import (
    MISSING,
    Metric,
    bootstrap_interval,
    mean,
    metric,
    printable,
    shown_in,
    sign_flip_p,
)
from slimbayes_lab.report.record import Frozen, Number, Role

if TYPE_CHECKING:
    from rich.table import Table


ROLES: tuple[str, ...] = get_args(Role)
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
        >>> from slimbayes_lab.report.record import Evaluation, ParameterCounts, Record, RunCost
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name, seed, nll in [("plain", 0, 0.50), ("plain", 1, 0.54), ("rank1", 0, 0.40), ("rank1", 1, 0.46)]:
        ...     scores = [Evaluation(data="toy", role="test", draws=1, rows=10, metrics={"nll": nll})]
        ...     size, cost = ParameterCounts(plain=1, total=1), RunCost(train_seconds=1, seconds_per_epoch=1)
        ...     record = Record(name=name, method=name, data="toy", seed=seed, config={}, config_hash="", commands=[],
        ...                     parameters=size, cost=cost, evaluations=scores)
        ...     _ = (folder / f"{name}-{seed}.json").write_text(record.model_dump_json())
        >>> round(compare(sorted(folder.glob("*.json")), baseline="plain").rows[1].scores["nll"].difference.mean, 2)
        -0.09
    """
    loaded = load(runs)
    known = sorted({group.name for group in loaded.groups})
    baseline = (
        None if baseline is None else printable(baseline)
    )  # as the names of groups
    if baseline is not None and baseline not in known:
        raise ValueError(
            f"baseline={baseline!r} is not among the runs; needed one of {known}."
        )
    asked = EvaluationSet(severity=severity, draws=draws)
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
        left_out = (
            [group for group in groups if group.name not in {row.name for row in found}]
            if found
            else []
        )
        notes += [
            f"{group.name!r} on {data!r} has no such evaluation and is left out."
            for group in left_out
        ]
        rows += found
    if not rows:
        raise ValueError(_nothing(loaded, on, asked, metrics))
    scored = {name for row in rows for name in row.scores}
    names = (
        tuple(metrics)
        if metrics is not None
        else tuple(name for name in shown_in("comparison") if name in scored)
    )
    notes += _warnings(rows, baseline)
    return Comparison(
        on=on, severity=severity, draws=draws, baseline=baseline, metrics=names, rows=tuple(rows), notes=tuple(notes),
        skipped=loaded.skipped,
    )  # fmt: skip


def _selection(
    groups: Sequence[RunGroup], on: str, asked: EvaluationSet
) -> EvaluationSet:
    """The sets that `on` names, for the runs of one data set."""
    if on == "test":
        main = main_set(groups)
        return replace(
            asked, role="test", data=main.data if main.role == "test" else None
        )
    role = "corruption" if on == "corrupted" else on
    if role in ROLES:
        return replace(asked, role=role)
    return replace(
        asked,
        role=next(
            (role for role in ROLES if on in EvaluationSet(role).sets(groups)), on
        ),
        data=on,
    )


def _rows(
    groups: Sequence[RunGroup],
    selection: EvaluationSet,
    metrics: Sequence[str] | None,
    baseline: str | None,
) -> list[ComparisonRow]:
    """A row for each group with any score, the best mean of each metric marked."""
    recorded = selection.metrics(groups)
    names = (
        metrics
        if metrics is not None
        else [name for name in shown_in("comparison") if name in recorded]
    )
    values = {
        g.name: {name: seeds for name in names if (seeds := selection.by_seed(g, name))}
        for g in groups
    }
    rows = []
    for group in (group for group in groups if values[group.name]):
        base = (
            values.get(baseline, {})
            if baseline is not None and baseline != group.name
            else {}
        )
        scores = {}
        for name, seeds in values[group.name].items():
            numbers = list(seeds.values())
            difference = _difference(seeds, base.get(name, {}))
            interval = bootstrap_interval(numbers)
            scores[name] = MeanScore(
                mean=mean(numbers),
                interval=interval,
                seeds=seeds,
                difference=difference,
            )
        method, draws = group.records[0].method, selection.most_draws(group)
        rows.append(
            ComparisonRow(
                data=group.data,
                name=group.name,
                method=method,
                draws=draws,
                scores=scores,
            )
        )
    for name in names:
        rivals = [row.scores for row in rows if name in row.scores]
        for i in metric(name).best([scores[name].mean for scores in rivals]):
            rivals[i][name] = rivals[i][name].model_copy(update={"best": True})
    return rows


def _difference(seeds: BySeed, base: BySeed) -> Difference | None:
    """Over the seeds that both have with a finite value; None where there are none."""
    gaps = {
        s: seeds[s] - base[s]
        for s in seeds
        if s in base and math.isfinite(seeds[s]) and math.isfinite(base[s])
    }
    values = list(gaps.values())
    if not gaps:
        return None
    interval, p = bootstrap_interval(values), sign_flip_p(values)
    return Difference(mean=mean(values), interval=interval, p=p, seeds=tuple(gaps))


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
        odd = {
            seed
            for score in row.scores.values()
            for seed, value in score.seeds.items()
            if not math.isfinite(value)
        }
        if odd:
            yield (
                f"{row.name!r} on {row.data!r} has values that are not finite with seed "
                f"{', '.join(map(str, sorted(odd)))}; differences leave these seeds out."
            )
    pairs = max(
        (
            len(s.difference.seeds)
            for row in rows
            for s in row.scores.values()
            if s.difference
        ),
        default=0,
    )
    if pairs > 1:
        yield (
            f"With {pairs} common seeds no sign-flip p-value can be below {2 / 2**pairs:.2g}; "
            "p-values are not corrected for the number of comparisons."
        )
    others = [row for row in rows if row.name != baseline]
    if baseline is not None and any(
        score.difference is None for row in others for score in row.scores.values()
    ):
        yield f"Some rows share no seed or metric with {baseline!r} on their data set: they have no difference."


def _nothing(
    loaded: LoadedRuns, on: str, asked: EvaluationSet, metrics: Sequence[str] | None
) -> str:
    every = [
        e
        for group in loaded.groups
        for record in group.records
        for e in record.evaluations
    ]
    sets = sorted(
        {
            f"{'corrupted' if e.role == 'corruption' else e.role} ({e.data})"
            for e in every
        }
    )
    draws, names = (
        sorted({e.draws for e in every}),
        sorted({name for e in every for name in e.metrics}),
    )
    chosen = None if metrics is None else list(metrics)
    return (
        f"no run has scores for on={on!r}, severity={asked.severity}, draws={asked.draws}, metrics={chosen}; the "
        f"records hold sets {', '.join(sets) or 'none'}; draws {draws}; metrics {', '.join(names) or 'none'}."
    )


_LEGEND = "Mean over seeds [95 % bootstrap interval]."


class Difference(Frozen):
    """Mean of (this - baseline) over the common seeds, its 95 % bootstrap interval and its sign-flip p-value."""

    mean: Number
    interval: tuple[Number, Number] | None
    p: float | None
    seeds: tuple[int, ...]


class MeanScore(Frozen):
    """Mean over seeds with its 95 % bootstrap interval (None for one seed), each seed's value, and if it is best."""

    mean: Number
    interval: tuple[Number, Number] | None
    seeds: dict[int, Number]
    best: bool = False
    difference: Difference | None = None


class ComparisonRow(Frozen):
    """One name on one data set, with its score for each metric."""

    data: str
    name: str
    method: str
    draws: int | None
    scores: dict[str, MeanScore]


class Comparison(Frozen):
    """What was compared and how it came out. `notes` tell a reader what to mind, `skipped` what could not be read."""

    on: str
    severity: int | None
    draws: int | None
    baseline: str | None
    metrics: tuple[str, ...]
    rows: tuple[ComparisonRow, ...]
    notes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """What was compared, in a line."""
        title = f"Comparison on {self.on}"
        title += f", severity {self.severity}" if self.severity is not None else ""
        title += f", {self.draws} draws" if self.draws is not None else ""
        return title + (
            f"; differences to {self.baseline}" if self.baseline is not None else ""
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; NaN and infinity as text, as in records."""
        return self.model_dump(mode="json")

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, allow_nan=False, ensure_ascii=False)

    def to_markdown(self) -> str:
        """A Markdown table and the notes; the best mean of each metric on each data set is bold."""
        heads = self._heads()
        lines = [
            f"**{_escaped(self.title)}**",
            "",
            f"| {' | '.join(map(_escaped, heads))} |",
        ]
        lines.append("|" + "---|" * 2 + "---:|" * (len(heads) - 2))
        for row in self.rows:
            # Data and name come from records; the others are numbers, whose brackets need no escape.
            numbers = [
                f"**{text}**" if best else text for text, best in self._numbers(row)
            ]
            lines.append(
                f"| {' | '.join([_escaped(row.data), _escaped(row.name), *numbers])} |"
            )
        return (
            "\n".join(
                [
                    *lines,
                    "",
                    _LEGEND,
                    *(f"- {_escaped(note)}" for note in self._all_notes()),
                ]
            )
            + "\n"
        )

    def render(self) -> Table:
        """A table for the terminal, with the notes below it; text from records is never taken for markup."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        caption = Text("\n".join([_LEGEND, *self._all_notes()]))
        table = Table(title=Text(self.title), caption=caption, box=box.SIMPLE_HEAD)
        table.title_justify = table.caption_justify = "left"
        for i, head in enumerate(self._heads()):
            table.add_column(
                Text(head), justify="left" if i < 2 else "right", overflow="fold"
            )
        for row in self.rows:
            numbers = (
                Text(text, style="bold green" if best else "")
                for text, best in self._numbers(row)
            )
            table.add_row(Text(row.data), Text(row.name), *numbers)
        return table

    def _all_notes(self) -> list[str]:
        return [*self.notes, *(f"Left out: {reason}" for reason in self.skipped)]

    def _heads(self) -> list[str]:
        heads = ["Data", "Name", "Draws", "Seeds"]
        for known in map(metric, self.metrics):
            heads.append(f"{known.head} {known.arrow}".strip())
            heads += [f"Δ {known.head}", "p"] if self.baseline is not None else []
        return heads

    def _numbers(self, row: ComparisonRow) -> Iterator[tuple[str, bool]]:
        """The texts of a row behind its name, and whether each is the best of its column."""
        yield "" if row.draws is None else str(row.draws), False
        yield str(max(len(score.seeds) for score in row.scores.values())), False
        for known in map(metric, self.metrics):
            score = row.scores.get(known.name)
            places = known.decimals(
                other.scores[known.name].mean
                for other in self.rows
                if known.name in other.scores
            )
            yield _text(known, score, places), bool(score and score.best)
            if self.baseline is not None:
                gap = score.difference if score else None
                yield _text(known, gap, places + 1), False
                yield MISSING if gap is None or gap.p is None else f"{gap.p:.3g}", False


def _text(known: Metric, score: MeanScore | Difference | None, places: int) -> str:
    if score is None:
        return MISSING
    ends = [known.text(end, places) for end in score.interval or ()]
    return known.text(score.mean, places) + (f" [{', '.join(ends)}]" if ends else "")


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is: no markup, no HTML, no new cell."""
    for sign in "\\`*_[]<>|":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())
