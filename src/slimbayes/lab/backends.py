"""What carries out the runs of a sweep: processes of this machine here, SLURM and Ray in clusters.py.

    results = Local(slots=4).run(jobs)

A job is a command line: `slimbayes fit <folder>/config.yaml --out <folder> --resume`. That command leaves a finished run alone and continues an
unfinished one, so a backend may start a job as often as it likes, and whether it has finished is read from its run directory. Output goes to
`log.txt` there.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import yaml

from slimbayes.files import write_text
from slimbayes.lab.config import Experiment
from slimbayes.lab.run_folder import default_folder
from slimbayes.lab.supervise import STOPPED, Group, told
from slimbayes.report.record import RecordError, read

Ended = Literal["finished", "skipped", "failed", "stopped"]
Told = Callable[["Job", str], None]
RETRIES = 2  # further starts of a job that a signal killed


@dataclass(frozen=True)
class Job:
    """One run: its directory, the hash of its config, and the words after `slimbayes` that carry it out."""

    folder: Path
    hash: str
    words: tuple[str, ...]

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"


@dataclass(frozen=True)
class Result:
    """How a job ended, and why it did not finish."""

    job: Job
    state: Ended
    reason: str = ""


class Backend(Protocol):
    """Runs jobs to their end; `tell` hears of each change of a job's state."""

    def run(self, jobs: Sequence[Job], tell: Told = lambda job, state: None) -> list[Result]: ...


def job_of(experiment: Experiment, out: Path, words: Sequence[str] = ()) -> Job:
    """The job that carries out an experiment."""
    folder = default_folder(experiment, out)
    return Job(folder, experiment.hash, ("fit", str(folder / "config.yaml"), "--out", str(folder), "--resume", *words))


def prepare(job: Job, experiment: Experiment) -> None:
    """Make a job's directory with its config."""
    job.folder.mkdir(parents=True, exist_ok=True)
    write_text(job.folder / "config.yaml", yaml.safe_dump(experiment.resolved, sort_keys=False))


def state_of(folder: Path, hash: str) -> Literal["finished", "unfinished", "new"]:
    """How far a run directory is with the config of a hash.

    Example:
        >>> state_of(Path("/nowhere"), "0123456789ab")
        'new'
    """
    with suppress(RecordError):
        if read(folder).config_hash == hash:
            return "finished"
    return "unfinished" if (folder / "environment.json").exists() else "new"


def result_of(job: Job, code: int) -> Result:
    """How a job ended whose command ended with an exit code."""
    if code == 0 and state_of(job.folder, job.hash) == "finished":
        return Result(job, "finished")
    if code == STOPPED:
        return Result(job, "stopped", "was asked to stop; its checkpoint is kept")
    if code < 0:
        memory = ", perhaps for want of memory" if code == -signal.SIGKILL else ""
        return Result(job, "failed", told(code) + memory)
    return Result(job, "failed", _last_words(job.log) or told(code))


def _last_words(log: Path) -> str:
    """What a command said last: the message below its traceback, or its last line."""
    try:
        lines = log.read_text(encoding="utf8", errors="replace")[-4000:].splitlines()
    except OSError:
        return ""
    said = [line.strip() for line in lines if line.strip()]
    below = next(
        (said[i + 1 :] for i in reversed(range(len(said))) if said[i].lstrip("[]:rank0123456789 ").startswith("╰")),
        said[-1:],
    )
    return " ".join(below)[:300]


def start(job: Job, environment: Mapping[str, str] | None = None) -> Group:
    """Start a job's command; waits a little for a former one of the same run that is still writing its checkpoint."""
    _wait_until_free(job.folder)
    with open(job.log, "ab") as handle:
        handle.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} slimbayes {' '.join(job.words)}\n".encode())
    return Group(job.words, job.log, {"COLUMNS": "200", "NO_COLOR": "1", **(environment or {})})


def _wait_until_free(folder: Path, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while (folder / ".lock").exists() and time.monotonic() < until:
        with open(folder / ".lock", "a") as lock, suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.2)


@dataclass
class _Slot:
    job: Job
    group: Group
    starts: int = 1


@dataclass
class Pool:
    """Jobs under way as processes of this machine, looked after by one thread. Use it as a context: leaving it stops them all.

    A job that a signal kills is started again, up to `retries` times. With several GPUs, each slot has one of its own.
    """

    slots: int
    retries: int = RETRIES
    gpus: tuple[str, ...] = ()
    tell: Told = lambda job, state: None
    running: dict[int, _Slot] = field(default_factory=dict)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            for slot in self.running.values():  # all are asked before any is waited for
                slot.group.ask()
            for slot in self.running.values():
                slot.group.end()
                self.tell(slot.job, "stopped")
        finally:  # a second Ctrl-C does not wait
            for slot in self.running.values():
                slot.group.kill()
            self.running.clear()

    @property
    def free(self) -> int:
        return self.slots - len(self.running)

    def add(self, job: Job) -> None:
        """Start a job in a free slot."""
        number = next(n for n in range(self.slots) if n not in self.running)
        self.running[number] = _Slot(job, self._start(job, number))
        self.tell(job, "running")

    def _start(self, job: Job, number: int) -> Group:
        return start(job, {"CUDA_VISIBLE_DEVICES": self.gpus[number % len(self.gpus)]} if self.gpus else None)

    def stop(self, job: Job) -> None:
        """Ask a job to write a checkpoint and stop; `ended` will have it."""
        for slot in self.running.values():
            if slot.job == job:
                slot.starts = self.retries + 1
                slot.group.ask()

    def ended(self) -> list[Result]:
        """Jobs that have ended since the last call. Those that were killed are started again first."""
        out = []
        for number, slot in list(self.running.items()):
            code = slot.group.poll()
            if code is None:
                continue
            slot.group.kill()  # what it may have left behind
            if code < 0 and slot.starts <= self.retries:
                self.tell(slot.job, f"{told(code)}, started again")
                slot.group, slot.starts = self._start(slot.job, number), slot.starts + 1
                continue
            del self.running[number]
            out.append(result_of(slot.job, code))
            self.tell(slot.job, out[-1].state)
        return out


def visible_gpus(accelerator: str) -> tuple[str, ...]:
    """GPUs to hand out among jobs; none where there is one at most, which they share."""
    if accelerator == "cpu":
        return ()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        import torch

        named = ",".join(map(str, range(torch.cuda.device_count())))
    found = tuple(name.strip() for name in named.split(",") if name.strip())
    return found if len(found) > 1 else ()


@dataclass(frozen=True)
class Local:
    """Processes of this machine, `slots` at a time."""

    slots: int = 1
    gpus: tuple[str, ...] = ()

    def run(self, jobs: Sequence[Job], tell: Told = lambda job, state: None) -> list[Result]:
        waiting, results = list(jobs), dict[Job, Result]()
        with Pool(self.slots, gpus=self.gpus, tell=tell) as pool:
            while waiting or pool.running:
                while waiting and pool.free:
                    pool.add(waiting.pop(0))
                results |= {result.job: result for result in pool.ended()}
                time.sleep(0.05)
        return [results[job] for job in jobs]
