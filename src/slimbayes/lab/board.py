"""Showing the runs of a sweep: a table that is kept up to date in a terminal, plain lines elsewhere, and the table at the end."""

from __future__ import annotations

import csv
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from slimbayes.lab.backends import Job

_COLOURS = {
    "finished": "green",
    "skipped": "dim",
    "failed": "red",
    "stopped": "yellow",
    "unfinished": "yellow",
    "pruned": "dim",
}
_ENDS = ("finished", "failed", "stopped", "pruned")
_ROWS = 20  # runs under way that are listed


class Board:
    """Hears of jobs and shows those under way. Use it as a context.

    Args:
        jobs: what each job is, in words, and its epochs.
        done: runs that had finished before.
    """

    def __init__(self, jobs: Mapping[Job, tuple[str, int]], done: int = 0, console: Console | None = None) -> None:
        self.jobs, self.done = dict(jobs), done
        self.states: dict[Job, str] = {}
        self.begun: dict[Job, float] = {}
        self.console = console or Console(stderr=True)
        self.live = Live(get_renderable=self._view, console=self.console, refresh_per_second=2, transient=True)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.console.is_terminal:
            self.live.stop()

    def add(self, job: Job, told: str, epochs: int) -> None:
        self.jobs[job] = (told, epochs)

    def tell(self, job: Job, state: str) -> None:
        """Note a job's state: "running", how it ended, or what a cluster calls it."""
        if self.states.get(job) == state:
            return
        self.states[job] = state
        self.begun.setdefault(job, time.monotonic())
        if not self.console.is_terminal:
            # Plain: run names may look like markup.
            self.console.print(f"{job.folder.name}: {state}", markup=False, highlight=False, soft_wrap=True)

    def _view(self) -> Group:
        counts = Counter(self.states.values())
        waiting = len(self.jobs) - len(self.states)
        line = ", ".join(
            [f"{self.done} skipped"] * bool(self.done)
            + [f"{n} {state}" for state, n in counts.items()]
            + [f"{waiting} waiting"] * bool(waiting)
        )
        table = Table("run", "what", "state", "epoch", "loss", "minutes", box=None)
        under_way = [job for job in list(self.states) if self.states[job] not in _ENDS]
        for job in under_way[:_ROWS]:
            last = rows_of(job.folder)[-1:] or [{}]
            epoch = f"{last[0].get('epoch', 0):.0f} / {self.jobs[job][1]}"
            minutes = f"{(time.monotonic() - self.begun[job]) / 60:.1f}"
            table.add_row(
                job.folder.name,
                self.jobs[job][0],
                self.states[job],
                epoch,
                f"{last[0].get('loss', float('nan')):.4f}",
                minutes,
            )
        return Group(table, line)


def rows_of(folder: Path) -> list[dict[str, float]]:
    """The epochs that a run has noted so far."""
    try:
        with open(folder / "metrics.csv", newline="") as handle:
            return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(handle)]
    except (OSError, ValueError):
        return []


def show(rows: Mapping[Job, tuple[str, str, str]], console: Console | None = None) -> None:
    """Print a table of runs, each with what it is, its state and a remark, and a line of counts."""
    from rich.text import Text

    console = console or Console()
    table = Table("run", "what", "state", "remark")
    for job, (told, state, remark) in rows.items():
        table.add_row(
            Text(job.folder.name, overflow="fold"),
            Text(told, overflow="fold"),
            Text(state, _COLOURS.get(state, "")),
            Text(remark, overflow="fold"),
        )
    console.print(table)
    counts = Counter(state for _, state, _ in rows.values())
    console.print(f"{len(rows)} runs: {', '.join(f'{n} {state}' for state, n in counts.items())}", highlight=False)
