"""What a terminal shows: progress bars of long work, plain lines where there is no terminal, and a run's scores."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from slimbayes.report.record import Record, read

_SHOWN = ("accuracy", "nll", "ece", "rmse", "lpd", "crps", "auroc", "fpr95")
_PAUSE = 0.1  # seconds between two looks: a step may take a millisecond


class Bars:
    """A watcher that draws a bar for each stretch of work. Use it as a context."""

    def __init__(self, title: str = "") -> None:
        self.console = Console(stderr=True)
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", style="dim", markup=False),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.title, self.looked, self.total = title, 0.0, 0
        self.task: TaskID | None = None
        self.messages: list[str] = []

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def begin(self, what: str, total: int, done: int = 0) -> None:
        self.total = total
        label = f"{self.title} {what}".strip()
        self.task = self.progress.add_task(label, total=total, completed=done, note="")
        if not self.console.is_terminal:
            self.console.print(f"{label}: {total} steps", markup=False)

    def move(self, done: int, note: str = "") -> None:
        now = time.monotonic()
        if self.task is not None and (note or done == self.total or now - self.looked > _PAUSE):
            self.looked = now
            self.progress.update(self.task, completed=done)
            if note:
                self.progress.update(self.task, note=note)

    def say(self, message: str) -> None:
        self.messages.append(message)
        self.console.print(message, style="yellow", highlight=False, markup=False)


def print_scores(folder: Path) -> None:
    """Print a table of what a finished run's record says about its rows.

    Example:
        >>> print_scores(Path("runs/rank1-0123456789ab"))  # doctest: +SKIP
    """
    record = read(folder)
    rows = [e for e in record.evaluations if e.role in ("test", "shift", "ood")]
    names = list(dict.fromkeys(n for e in rows for n in e.metrics if n in _SHOWN))
    table = Table(title=Text(f"{record.name}: {record.method}"))
    for column in ("rows", "draws", *names):
        table.add_column(column, justify="right" if column != "rows" else "left")
    for e in rows:
        cells = [f"{e.metrics[n]:.4f}" if n in e.metrics else "" for n in names]
        table.add_row(Text(f"{e.data} ({e.role})"), str(e.draws), *cells)
    console = Console()
    console.print(table)
    print_diagnostics(record, console)
    print(f"record: {folder / 'record.json'}")


def print_diagnostics(record: Record, console: Console) -> None:
    """Print what a record says about its posterior, and what to do about it."""
    from slimbayes.diagnostics.check import lines

    if record.diagnostics is None:
        return
    for line in lines(dict(record.diagnostics)):
        console.print(line, highlight=False, markup=False)
    if record.diagnostics.nonfinite_steps:
        console.print(f"steps that were not finite: {record.diagnostics.nonfinite_steps}", highlight=False)
    for warning in record.diagnostics.warnings:
        console.print(f"! {warning}", style="yellow", highlight=False, markup=False)
