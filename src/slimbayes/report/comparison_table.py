"""The table that `compare` gives: typed, and written as Markdown, JSON or a table for the terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slimbayes.report.metric import MISSING, decimals, metric, shown

if TYPE_CHECKING:
    from rich.table import Table

Interval = tuple[float, float]


@dataclass(frozen=True)
class Difference:
    """Mean of (this - baseline) over the common seeds, its 95 % bootstrap interval and its sign-flip p-value."""

    mean: float
    interval: Interval | None
    p: float | None
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Score:
    """Mean over seeds with its 95 % bootstrap interval (None for one seed), the value of each seed, and whether it is the best."""

    mean: float
    interval: Interval | None
    seeds: dict[int, float]
    best: bool = False
    difference: Difference | None = None


@dataclass(frozen=True)
class Row:
    """One name on one data set, with its score for each metric."""

    data: str
    name: str
    method: str
    draws: int | None
    scores: dict[str, Score]


@dataclass(frozen=True)
class Comparison:
    """What was compared and how it came out. `notes` say what a careful reader must know, `skipped` what could not be read."""

    on: str
    severity: int | None
    draws: int | None
    baseline: str | None
    metrics: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """What was compared, in a line."""
        parts = [
            self.on,
            *([f"severity {self.severity}"] if self.severity is not None else []),
            *([f"{self.draws} draws"] if self.draws is not None else []),
        ]
        return f"Comparison on {', '.join(parts)}" + (
            f"; differences to {self.baseline}" if self.baseline is not None else ""
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; NaN and infinity as text, as in records."""
        return {
            "on": self.on, "severity": self.severity, "draws": self.draws, "baseline": self.baseline, "metrics": list(self.metrics),
            "rows": [
                {"data": row.data, "name": row.name, "method": row.method, "draws": row.draws, "scores": {key: _score(score) for key, score in row.scores.items()}}
                for row in self.rows
            ],
            "notes": list(self.notes), "skipped": list(self.skipped),
        }  # fmt: skip

    def to_json(self) -> str:
        """`to_dict` as text, the same bytes for the same table."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False, ensure_ascii=False)

    def to_markdown(self) -> str:
        """A Markdown table and the notes; the best mean of each metric on each data set is bold."""
        head = self._head()
        lines = [
            f"**{_quiet(self.title)}**",
            "",
            f"| {' | '.join(map(_quiet, head))} |",
            "|" + "---|" * 2 + "---:|" * (len(head) - 2),
        ]
        for row in self.rows:
            # Only the first two cells come from records; the others are numbers, whose brackets need no escape.
            cells = [
                _quiet(text) if i < 2 else f"**{text}**" if strong else text
                for i, (text, strong) in enumerate(self._cells(row))
            ]
            lines.append(f"| {' | '.join(cells)} |")
        told = [*self.notes, *(f"Left out: {reason}" for reason in self.skipped)]
        return (
            "\n".join(
                [*lines, "", "Mean over seeds [95 % bootstrap interval].", *(f"- {_quiet(note)}" for note in told)]
            )
            + "\n"
        )

    def render(self) -> Table:
        """A table for the terminal, with the notes below it; text from records is never taken for markup."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        told = [
            "Mean over seeds [95 % bootstrap interval].",
            *self.notes,
            *(f"Left out: {reason}" for reason in self.skipped),
        ]
        table = Table(
            title=Text(self.title),
            caption=Text("\n".join(told)),
            caption_justify="left",
            title_justify="left",
            box=box.SIMPLE_HEAD,
        )
        for i, head in enumerate(self._head()):
            table.add_column(Text(head), justify="left" if i < 2 else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(text, style="bold green" if strong else "") for text, strong in self._cells(row)))
        return table

    def _head(self) -> list[str]:
        heads = ["Data", "Name", "Draws", "Seeds"]
        for name in self.metrics:
            known = metric(name)
            heads += [
                f"{known.head} {known.arrow}".strip(),
                *([f"Δ {known.head}", "p"] if self.baseline is not None else []),
            ]
        return heads

    def _cells(self, row: Row) -> Iterator[tuple[str, bool]]:
        """The texts of a row, and whether each is the best of its column."""
        yield row.data, False
        yield row.name, False
        yield "" if row.draws is None else str(row.draws), False
        yield str(max((len(score.seeds) for score in row.scores.values()), default=0)), False
        for name in self.metrics:
            score = row.scores.get(name)
            places = decimals(name, [other.scores[name].mean for other in self.rows if name in other.scores])
            yield (
                (MISSING if score is None else _text(name, score.mean, score.interval, places)),
                bool(score and score.best),
            )
            if self.baseline is not None:
                gap = score.difference if score else None
                yield (MISSING if gap is None else _text(name, gap.mean, gap.interval, places + 1)), False
                yield (MISSING if gap is None or gap.p is None else f"{gap.p:.3g}"), False


def _text(name: str, value: float, interval: Interval | None, places: int) -> str:
    return shown(name, value, places) + (
        f" [{shown(name, interval[0], places)}, {shown(name, interval[1], places)}]" if interval else ""
    )


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _score(score: Score) -> dict[str, Any]:
    gap = score.difference
    return {
        "mean": _plain(score.mean), "interval": score.interval and list(score.interval),
        "seeds": {str(seed): _plain(value) for seed, value in score.seeds.items()}, "best": score.best,
        "difference": gap and {"mean": gap.mean, "interval": gap.interval and list(gap.interval), "p": gap.p, "seeds": list(gap.seeds)},
    }  # fmt: skip


def _quiet(text: str) -> str:
    """Text that Markdown shows as it is: no markup, no HTML, no new cell."""
    for sign in "\\`*_[]<>|":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())
