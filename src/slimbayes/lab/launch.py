"""Carrying out the runs of a sweep: each is `slimbayes fit ... --resume` in a process of its own.

That command leaves a finished run alone and continues an unfinished one, so any call that sees a run's directory may
start it, as often as it likes. Whether the run has finished is read there; a lock there says whether a call is at work.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO

import yaml

from slimbayes.files import write_text
from slimbayes.lab.config import Experiment
from slimbayes.lab.run_folder import default_folder
from slimbayes.report.record import RecordError, read

COMMAND = (sys.executable, "-m", "slimbayes.lab.command")
STARTS = 3  # of a run that signals kill
STOPPED = 143  # exit code of a run that was asked to stop and left a checkpoint
GRACE = 60.0  # seconds that a run gets to write its checkpoint when it is asked to stop


@dataclass(frozen=True)
class Run:
    """One run of a sweep: its values in words, its experiment, and the folder of all run directories."""

    told: str
    experiment: Experiment
    out: Path

    @property
    def folder(self) -> Path:
        return default_folder(self.experiment, self.out)

    @property
    def state(self) -> str:
        """How far it is: finished, unfinished or new."""
        with suppress(RecordError):
            if read(self.folder).config_hash == self.experiment.hash:
                return "finished"
        return "unfinished" if (self.folder / "environment.json").exists() else "new"

    @contextmanager
    def claimed(self) -> Iterator[IO[str] | None]:
        """Hold the run; None where another call does. A call that dies lets go of it when its process has ended."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".claim", "a") as claim:
            try:
                fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
            else:
                yield claim


class Launcher:
    """Trains runs as processes of this machine, in as many threads as there are jobs.

    Args:
        words: further words of the `slimbayes fit` commands.
        gpus: handed out among the jobs; without any, they share what there is.
    """

    def __init__(self, words: tuple[str, ...] = (), jobs: int = 1, gpus: tuple[str, ...] = ()) -> None:
        self.words, self.jobs, self.stopped = words, jobs, False
        self.slots: SimpleQueue[dict[str, str]] = SimpleQueue()  # variables of the environment
        for number in range(jobs):
            self.slots.put({"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if gpus else {})

    def train(self, run: Run, promising: Callable[[], bool] = lambda: True) -> tuple[str, str]:
        """Train a run unless it has finished or another call holds it; returns its state, and why it did not finish.

        Args:
            promising: asked again and again; once it says no, the run is asked to stop.
        """
        slot = self.slots.get()
        try:
            with run.claimed() as claim:
                if run.state == "finished":
                    return "skipped", ""
                if claim is None:
                    return "running", "another call is at work on it"
                write_text(run.folder / "config.yaml", yaml.safe_dump(run.experiment.resolved, sort_keys=False))
                _say(run, "running")
                for start in range(STARTS):
                    state, reason = _outcome(run, self._wait(self._process(run, slot, claim), promising))
                    if not reason.startswith("was killed"):
                        break
                    _say(run, f"{reason}, started again" if start < STARTS - 1 else reason)
        except OSError as error:
            state, reason = "failed", str(error)
        finally:
            self.slots.put(slot)
        _say(run, state)
        return state, reason

    def _process(self, run: Run, slot: dict[str, str], claim: IO[str]) -> subprocess.Popen[bytes]:
        words = ["fit", str(run.folder / "config.yaml"), "--out", str(run.folder), "--resume", *self.words]
        # The kernel asks the run to stop when this call is gone, however it went.
        tied = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
        with open(run.folder / "log.txt", "ab") as log:
            log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} slimbayes {' '.join(words)}\n".encode())
            log.flush()
            return subprocess.Popen(
                [*tied, *COMMAND, *words], env=os.environ | {"TYPER_STANDARD_TRACEBACK": "1"} | slot,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, pass_fds=[claim.fileno()],
            )  # fmt: skip

    def _wait(self, process: subprocess.Popen[bytes], promising: Callable[[], bool]) -> int:
        """Wait for a run's end, or ask it to stop; returns its exit code."""
        wanted = True
        try:
            while process.poll() is None and wanted:
                time.sleep(0.1)
                wanted = promising() and not self.stopped
        finally:
            process.terminate()  # no effect on one that has ended
            try:
                code = process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
        return code if wanted or code == 0 else STOPPED

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Upon Ctrl-C, SIGTERM and SIGHUP, unless they are ignored, ask all runs to stop, and end as by Ctrl-C."""

        def ask(number: int, frame: object) -> None:
            self.stopped = True
            raise KeyboardInterrupt

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        former = {n: signal.signal(n, ask) for n in numbers if signal.getsignal(n) != signal.SIG_IGN}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)


def _outcome(run: Run, code: int) -> tuple[str, str]:
    """A run's state by the exit code of its command, and why it did not finish."""
    if code == 0 and run.state == "finished":
        return "finished", ""
    if code == STOPPED:
        return "stopped", "was asked to stop; its checkpoint is kept"
    if code < 0:
        memory = ", perhaps for want of memory" if code == -signal.SIGKILL else ""
        return "failed", f"was killed by {signal.Signals(-code).name}{memory}"
    log = run.folder / "log.txt"
    said = [line.strip() for line in log.read_text(encoding="utf8", errors="replace").splitlines()]
    return "failed", f"{[line for line in said if line][-1][:300]} ({log})"


def _say(run: Run, state: str) -> None:
    print(f"{run.folder.name}: {state}", file=sys.stderr, flush=True)
