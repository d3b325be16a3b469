"""A run in a process of its own, as sweeps and searches start it: `slimbayes fit ... --resume`.

That command leaves a finished run alone, continues an unfinished one, and refuses a run that another process trains.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slimbayes.untrusted import append_file, open_file
from slimbayes_lab.configs.experiment import Experiment
from slimbayes_lab.report.record import RecordError, read
from slimbayes_lab.runs.folder import RunError, claim_run, default_folder, write_config

# With -P, and SAFE for the processes that it starts in turn, a file that lies about in the current folder is never
# imported: `python -m` would look there first.
COMMAND = (sys.executable, "-P", "-m", "slimbayes_lab")
SAFE = {"PYTHONSAFEPATH": "1"}
STARTS = 3  # of a run that signals kill
STOPPED = 143  # exit code of a run that was asked to stop and left a checkpoint
GRACE = 60.0  # seconds that a run gets to write its checkpoint when it is asked to stop


@dataclass(frozen=True)
class Run:
    """One run: what it differs by in words, its experiment, and the folder of all run directories."""

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


def train(
    run: Run,
    words: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    wanted: Callable[[], bool] = lambda: True,
) -> tuple[str, str]:
    """Train a run unless it has finished; returns its state, and why it did not finish.

    Args:
        words: further words of the `slimbayes fit` command.
        environment: variables to set for it.
        wanted: asked again and again; once it says no, the run is asked to stop.
    """
    if run.state == "finished":
        return "skipped", ""
    try:
        claim_run(run.folder)
        write_config(run.folder, run.experiment)
        _say(run, "running")
        for start in range(STARTS):
            process = _process(run, words, os.environ | dict(environment or {}))
            state, reason = _outcome(run, _wait(process, wanted))
            if not reason.startswith("was killed"):
                break
            _say(run, f"{reason}, started again" if start < STARTS - 1 else reason)
    except (OSError, RunError) as error:
        state, reason = "failed", str(error)
    _say(run, state)
    return state, reason


def _process(
    run: Run, words: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    line = [
        "fit",
        str(run.folder / "config.yaml"),
        "--out",
        str(run.folder),
        "--resume",
        *words,
    ]
    # The kernel asks the run to stop when this call is gone, however it went.
    tied = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
    with append_file(run.folder / "log.txt") as log:
        log.write(
            f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} slimbayes {' '.join(line)}\n".encode()
        )
        log.flush()
        return subprocess.Popen(
            [*tied, *COMMAND, *line], env={**environment, **SAFE, "TYPER_STANDARD_TRACEBACK": "1"},
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def _wait(process: subprocess.Popen[bytes], wanted: Callable[[], bool]) -> int:
    """Wait for a run's end, or ask it to stop; returns its exit code."""
    go_on = True
    try:
        while process.poll() is None and go_on:
            time.sleep(0.1)
            go_on = wanted()
    finally:
        process.terminate()  # no effect on one that has ended
        try:
            code = process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
    return code if go_on or code == 0 else STOPPED


def _outcome(run: Run, code: int) -> tuple[str, str]:
    """A run's state by the exit code of its command, and why it did not finish."""
    if code == 0 and run.state == "finished":
        return "finished", ""
    if code == STOPPED:
        kept = any((run.folder / "checkpoints").glob("step-*"))
        return (
            "stopped",
            f"was asked to stop; {'its checkpoint is kept' if kept else 'there is no checkpoint yet'}",
        )
    if code < 0:
        memory = ", perhaps for want of memory" if code == -signal.SIGKILL else ""
        return "failed", f"was killed by {signal.Signals(-code).name}{memory}"
    log = run.folder / "log.txt"
    said = [line.strip() for line in _tail(log).splitlines()]
    return "failed", f"{[line for line in said if line][-1][:300]} ({log})"


def _tail(file: Path) -> str:
    """The last 64 kB of a text."""
    with open_file(file) as log:
        log.seek(max(0, os.fstat(log.fileno()).st_size - (1 << 16)))
        return log.read().decode("utf8", errors="replace")


def _say(run: Run, state: str) -> None:
    print(f"{run.folder.name}: {state}", file=sys.stderr, flush=True)
