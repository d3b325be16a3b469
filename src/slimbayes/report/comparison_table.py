"""The table that `compare` gives: typed, and written as Markdown, JSON or a table for the terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from slimbayes.report.metric import MISSING, Metric, metric
from slimbayes.report.statistics import Interval

if TYPE_CHECKING:
    from rich.table import Table

_LEGEND = "Mean over seeds [95 % bootstrap interval]."


@dataclass(frozen=True)
class Difference:
    """Mean of (this - baseline) over the common seeds, its 95 % bootstrap interval and its sign-flip p-value."""

    mean: float
    interval: Interval | None
    p: float | None
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class MeanScore:
    """Mean over seeds with its 95 % bootstrap interval (None for one seed), each seed's value, and if it is best."""

    mean: float
    interval: Interval | None
    seeds: dict[int, float]
    best: bool = False
    difference: Difference | None = None


@dataclass(frozen=True)
class ComparisonRow:
    """One name on one data set, with its score for each metric."""

    data: str
    name: str
    method: str
    draws: int | None
    scores: dict[str, MeanScore]


@dataclass(frozen=True)
class Comparison:
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
        return title + (f"; differences to {self.baseline}" if self.baseline is not None else "")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; NaN and infinity as text, as in records."""
        plain: dict[str, Any] = _json_value(asdict(self))
        return plain

    def to_json(self) -> str:
        """`to_dict` as text, the same bytes for the same table."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False, ensure_ascii=False)

    def to_markdown(self) -> str:
        """A Markdown table and the notes; the best mean of each metric on each data set is bold."""
        heads = self._heads()
        lines = [f"**{_escaped(self.title)}**", "", f"| {' | '.join(map(_escaped, heads))} |"]
        lines.append("|" + "---|" * 2 + "---:|" * (len(heads) - 2))
        for row in self.rows:
            # Data and name come from records; the others are numbers, whose brackets need no escape.
            numbers = [f"**{text}**" if best else text for text, best in self._numbers(row)]
            lines.append(f"| {' | '.join([_escaped(row.data), _escaped(row.name), *numbers])} |")
        return "\n".join([*lines, "", _LEGEND, *(f"- {_escaped(note)}" for note in self._all_notes())]) + "\n"

    def render(self) -> Table:
        """A table for the terminal, with the notes below it; text from records is never taken for markup."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        caption = Text("\n".join([_LEGEND, *self._all_notes()]))
        table = Table(title=Text(self.title), caption=caption, box=box.SIMPLE_HEAD)
        table.title_justify = table.caption_justify = "left"
        for i, head in enumerate(self._heads()):
            table.add_column(Text(head), justify="left" if i < 2 else "right", overflow="fold")
        for row in self.rows:
            numbers = (Text(text, style="bold green" if best else "") for text, best in self._numbers(row))
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
            places = known.decimals(other.scores[known.name].mean for other in self.rows if known.name in other.scores)
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


def _json_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _json_value(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is: no markup, no HTML, no new cell."""
    for sign in "\\`*_[]<>|":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())
