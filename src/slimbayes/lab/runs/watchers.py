"""Whoever looks on while a run works: nobody, a terminal with progress bars, or the processes that train with it, which
look after one another: who is lost or stopped is named, and the others leave.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import torch
from rich import progress
from rich.console import Console

from slimbayes.lab.execution import noting_signals


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


# --- the other processes ---
#
# A collective waits for every rank, so one that is gone would keep the others until the process group's patience ends.
# Each rank therefore writes a line twice a second, from a thread of its own, to .ranks/<rank> in the run directory, and
# reads those of the others. On its own machine it also asks the kernel, which knows who is stopped. Whoever finds a
# rank missing says so, ends the stopped process, which no polite signal reaches, and leaves with an error; torchrun's
# restarts do the rest. Loading, compiling and long steps are no reason: threads write on meanwhile.

TICK = 0.5  # seconds between two looks
SILENCE = {
    "gone": 2.0,
    "stopped": 5.0,
    "far": 60.0,
    "running": float("inf"),
}  # seconds to bear, by a rank's state
HOST = socket.gethostname()


class Heartbeat(NamedTuple):
    """What a rank last wrote: a number that grows, the job's token, its process, and what it was doing."""

    beat: int
    job: str
    pid: int
    host: str
    doing: str


class Ranks(Watcher):
    """A watcher that hears of a rank's steps and tells the other ranks. Use it as a context.

    Args:
        folder: the run directory, which all processes see.
        job: differs from one start to the next, the same in all processes.
        watcher: hears all this one hears.
    """

    def __init__(
        self, folder: Path, rank: int, world: int, job: str, watcher: Watcher
    ) -> None:
        self.place, self.rank, self.watcher = folder / ".ranks", rank, watcher
        self.others = [other for other in range(world) if other != rank]
        self.beat, self.own = 0, Heartbeat(0, job, os.getpid(), HOST, "start-up")
        self.heard: dict[int, Heartbeat] = {}
        self.silent = dict.fromkeys(
            self.others, 0.0
        )  # seconds: counted in looks, so that a pause of all is none
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    @classmethod
    def of(cls, fabric: Any, folder: Path, watcher: Watcher) -> Ranks:
        """The ranks of a process group; every process of it calls this."""
        if fabric.global_rank == 0:
            shutil.rmtree(folder / ".ranks", ignore_errors=True)
        job = fabric.broadcast(
            f"{os.getpid()}-{time.time_ns()}"
        )  # after it nobody reads a former start's lines
        return cls(folder, fabric.global_rank, fabric.world_size, job, watcher)

    def __enter__(self) -> Self:
        if self.others:
            self._write()  # before the first collective: from then on all know of all
            self.thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.over.set()
        if not self.others:
            return
        self.thread.join()
        if error is None:
            (self.place / str(self.rank)).unlink(missing_ok=True)
            with suppress(OSError):
                self.place.rmdir()  # by the last one
        elif isinstance(error, torch.distributed.DistError) or "gloo" in str(error):
            with noting_signals(
                []
            ):  # torchrun asks this process to go at the same moment
                for _ in range(10):
                    if lost := self._missing(gone=0.0):
                        self._end(*lost)
                    time.sleep(TICK / 10)

    # --- what a rank does ---

    def begin(self, what: str, total: int, done: int = 0) -> None:
        self.watcher.begin(what, total, done)

    def move(self, done: int, note: str = "") -> None:
        self.own = self.own._replace(doing=f"step {done}")
        self.watcher.move(done, note)

    def say(self, message: str) -> None:
        self.watcher.say(message)

    def _write(self) -> None:
        self.beat += 1
        with suppress(
            OSError
        ):  # a full disk has its own message; meanwhile nobody is found missing by it
            self.place.mkdir(exist_ok=True)
            (self.place / str(self.rank)).write_text(
                json.dumps(self.own._replace(beat=self.beat))
            )

    # --- what the others do ---

    def _watch(self) -> None:
        while not self.over.wait(TICK):
            self._write()
            if lost := self._missing():
                self._end(*lost)

    def _missing(self, gone: float = SILENCE["gone"]) -> tuple[int, str] | None:
        """Look once: the rank that has been missing for the longest time, if any, and its state."""
        found = {}
        for rank in self.others:
            line = self._read(rank)
            if line is None:
                continue
            self.silent[rank] = (
                self.silent[rank] + TICK
                if self.heard.get(rank, line).beat == line.beat
                else 0.0
            )
            self.heard[rank] = line
            state = _state(line)
            if self.silent[rank] >= (SILENCE | {"gone": gone})[state]:
                found[rank] = state
        rank = max(found, key=lambda other: self.silent[other], default=-1)
        return (rank, found[rank]) if found else None

    def _read(self, rank: int) -> Heartbeat | None:
        try:
            line = Heartbeat(*json.loads((self.place / str(rank)).read_text()))
        except OSError:
            return None  # not there yet, or no longer
        except (ValueError, TypeError):
            return self.heard.get(rank)  # just being written, perhaps for ever
        return line if line.job == self.own.job else None

    def _end(self, rank: int, state: str) -> None:
        """Say who is missing, make sure that it is gone, and leave."""
        line = self.heard[rank]
        how = {"gone": "is gone", "stopped": "is stopped and was killed"}.get(
            state, "has been silent for a minute"
        )
        print(
            f"Rank {rank} (process {line.pid} on {line.host}) {how}; it was last heard of in {line.doing}, rank "
            f"{self.rank} is in {self.own.doing}. The job ends here: torchrun --max-restarts starts it again from its "
            f"latest checkpoint.",
            file=sys.stderr,
            flush=True,
        )
        if state == "stopped":
            with suppress(ProcessLookupError):
                os.kill(line.pid, signal.SIGKILL)
        # At once: the main thread may wait in a collective, and what is left of the group may keep Python from ending.
        os._exit(1)


def _state(line: Heartbeat) -> Literal["gone", "stopped", "far", "running"]:
    """How a rank's process is; of other machines nothing is known, and only those that train must be heard."""
    if line.host != HOST:
        return "far" if line.doing.startswith("step") else "running"
    try:
        os.kill(line.pid, 0)
        code = Path(f"/proc/{line.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return "gone"
    except OSError:
        return "running"  # no /proc here
    return "gone" if code in "ZX" else "stopped" if code in "Tt" else "running"
