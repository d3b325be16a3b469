"""What benchmarks share: cells as JSON lines of a file, jobs that fill in what is missing, differences, and pages."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

Job = tuple[Any, ...]  # a function and its arguments

# --- lines of a file ---


def lines_of(file: Path) -> Iterator[dict[str, Any]]:
    """What a run has written; a line that was cut off is left out."""
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            yield json.loads(line)
        except ValueError:
            continue


class Cells:
    """The lines of a file, as they come."""

    def __init__(self, file: Path) -> None:
        self.file, self.lines = file, list(lines_of(file))
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists() and not file.read_bytes().endswith(b"\n"):
            file.write_bytes(file.read_bytes() + b"\n")  # its last line was cut off

    def add(self, lines: Sequence[Any]) -> None:
        with self.file.open("a") as out:
            out.writelines(json.dumps(line) + "\n" for line in lines)
        self.lines += lines


# --- jobs side by side ---


class Workers:
    """So many processes, each with one job at a time; one that met a fault starts anew, as a GPU asks for."""

    def __init__(self, count: int, begin: Callable[[], None] | None = None) -> None:
        self._begin = begin
        self.idle = [self._started() for _ in range(count)]
        self.running: dict[Future[Any], tuple[ProcessPoolExecutor, Job]] = {}

    def _started(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, get_context("spawn"), self._begin)

    def submit(self, job: Job) -> None:
        worker = self.idle.pop()
        self.running[worker.submit(*job)] = (worker, job)

    def ended(self) -> list[tuple[Job, Future[Any]]]:
        """Jobs that have ended since, at least one, with what came of them."""
        found = []
        for future in wait(self.running, return_when=FIRST_COMPLETED).done:
            worker, job = self.running.pop(future)
            if future.exception() is not None:
                worker.shutdown(wait=False)
                worker = self._started()
            self.idle.append(worker)
            found.append((job, future))
        return found

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in [*self.idle, *(worker for worker, _ in self.running.values())]:
            worker.shutdown(wait=False, cancel_futures=True)


def run_all(
    workers: Workers,
    jobs: Sequence[Job],
    keep: Callable[[list[Any]], None],
    until: float,
) -> bool:
    """Run jobs side by side, the first ones first, and keep the lists they give; whether all of them were run.

    None begins after `until`, by the monotonic clock. What fails has a second try, at the end.
    """
    left, lost, clean = list(jobs), list[Job](), True
    while left or workers.running:
        while left and workers.idle and time.monotonic() < until:
            workers.submit(left.pop(0))
        if not workers.running:
            return False
        for job, future in workers.ended():
            if future.exception() is not None:
                print(f"LOST: {job[1:3]} {str(future.exception())[:300]!r}", flush=True)
                clean = clean and job not in lost
                left += [job] if job not in lost else []
                lost.append(job)
            elif isinstance(future.result(), list):
                keep(future.result())
    return clean


# --- pages ---


class Paired(NamedTuple):
    """Mean difference of what two methods have in common, and half of its 95 % t interval, None of a single pair."""

    mean: float
    half: float | None

    @property
    def side(self) -> int:
        """-1 where the difference is below zero beyond its interval, 1 where it is above, else 0."""
        return (
            0
            if self.half is None or abs(self.mean) <= self.half
            else -1
            if self.mean < 0
            else 1
        )


def paired(ours: Mapping[Any, float], theirs: Mapping[Any, float]) -> Paired | None:
    """Ours less theirs, over the keys that both have; None where there are none."""
    differences = [
        ours[key] - theirs[key] for key in sorted(ours.keys() & theirs.keys())
    ]
    if len(differences) < 2:
        return Paired(differences[0], None) if differences else None
    from scipy.stats import (
        t as student,
    )  # takes as long as torch, and most of what is here does without

    error = stdev(differences) / len(differences) ** 0.5
    return Paired(
        mean(differences), error * float(student.ppf(0.975, len(differences) - 1))
    )


def table(rows: Sequence[Sequence[Any]]) -> list[str]:
    """Lines of a Markdown table, the head first."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return [lines[0].replace("|  |", "| |"), "|" + "---|" * len(rows[0]), *lines[1:]]


def between(text: str, marks: tuple[str, str], middle: str) -> str:
    """A page's text with something else between its marks."""
    before, _, rest = text.partition(marks[0])
    return before + marks[0] + middle + marks[1] + rest.partition(marks[1])[2]
