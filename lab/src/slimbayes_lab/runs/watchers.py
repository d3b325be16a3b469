"""Whoever looks on while a run works: nobody, or a terminal with progress bars."""

from __future__ import annotations

import time
from typing import Self

from rich import progress
from rich.console import Console


class Watcher:
    """Whoever looks on; this one says nothing."""

    def begin(self, what: str, total: int, done: int = 0) -> None: ...

    def move(self, done: int, note: str = "") -> None: ...

    def say(self, message: str) -> None: ...


# --- a terminal ---

_PAUSE = 0.1  # seconds between two looks: a step may take a millisecond


class Bars(Watcher):
    """A watcher that draws a bar for each stretch of work. Use it as a context."""

    def __init__(self, title: str = "") -> None:
        self.console = Console(stderr=True)
        self.progress = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[note]}", style="dim", markup=False),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.title, self.looked, self.total = title, 0.0, 0
        self.task: progress.TaskID | None = None
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
        if self.task is not None and (
            note or done == self.total or now - self.looked > _PAUSE
        ):
            self.looked = now
            self.progress.update(self.task, completed=done)
            if note:
                self.progress.update(self.task, note=note)

    def say(self, message: str) -> None:
        self.messages.append(message)
        self.console.print(message, style="yellow", highlight=False, markup=False)
