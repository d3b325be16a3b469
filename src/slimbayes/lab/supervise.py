"""Starting a training job again when it dies, from its latest checkpoint, and ending it with all of its processes.

    slimbayes fit config.yaml --devices 2 --supervise

The whole job is started again, not the process that was lost: the others may wait for it in a collective for ever. Nothing of the former job is left
alive by then. Two settings come from the environment:

    SLIMBAYES_RESTARTS        give up after so many deaths in a row without a new checkpoint, 3 by default
    SLIMBAYES_STALL_SECONDS   also end and restart a job whose run directory has not changed for so long; never by default
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

GRACE = 60.0  # seconds that a job gets to write its checkpoint when it is asked to stop
STOPPED = 143  # exit code of a job that was asked to stop and left a checkpoint
# Exit codes that another start would only repeat: done, a wrong call, missing data or files, a loss that is not finite, a stop.
FINAL = (0, 2, 3, 4, 130, STOPPED)
COMMAND = (sys.executable, "-m", "slimbayes.lab.command")  # as a module, so that further ranks can be started alike
# The kernel asks the job to stop when whoever started it is gone, killed or not. Set in between, since code in a forked child of a process with threads may hang.
_TIED = (
    "import ctypes,os,sys;ctypes.CDLL(None).prctl(1,15);"
    "sys.exit(143) if os.getppid()!=int(sys.argv[1]) else os.execv(sys.argv[2],sys.argv[2:])"
)


class Group:
    """A `slimbayes` command under way, with every process that it starts: they are asked to stop, and ended, together.

    Args:
        words: the command line after `slimbayes`.
        log: file that its output is added to; the terminal by default.
        environment: variables to set beside those of this process.
    """

    def __init__(
        self, words: Sequence[str], log: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self.asked = False
        command = [*COMMAND, *words]
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), *command]
        variables = {**os.environ, **(environment or {})}
        if log is None:
            self.process = subprocess.Popen(command, env=variables, start_new_session=True)
        else:
            with open(log, "ab") as handle:
                self.process = subprocess.Popen(
                    command,
                    env=variables,
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    stdout=handle,
                    stderr=subprocess.STDOUT,
                )

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self.process.poll()

    def ask(self) -> None:
        """Ask all of its processes to stop, once: a second request would hit a process that is on its way out."""
        if not self.asked and self.poll() is None:
            self.asked = True
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGCONT)  # a process that was halted hears the first signal with this one only

    def signal(self, number: int) -> None:
        """Send a signal to all of its processes."""
        with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
            os.killpg(self.process.pid, number)

    def end(self, grace: float = GRACE) -> int:
        """Ask it to stop, wait, and kill what is left of it. Returns the exit code."""
        self.ask()
        until = time.monotonic() + grace
        while self.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        return self.kill()

    def kill(self) -> int:
        """Kill all of its processes and wait until none is left. Returns the exit code."""
        self.signal(signal.SIGKILL)
        while self.poll() is None:
            time.sleep(0.02)
        until = time.monotonic() + 10
        while members_of(self.process.pid) and time.monotonic() < until:
            self.signal(signal.SIGKILL)
            time.sleep(0.02)
        return self.process.returncode


def members_of(group: int) -> list[int]:
    """Processes of a process group that are still alive; on Linux only, elsewhere none are found."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, _, own = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(own) == group and state not in "ZX":
            found.append(int(entry.name))
    return found


def told(code: int) -> str:
    """An exit code in words.

    Example:
        >>> told(-9), told(1)
        ('was killed by SIGKILL', 'ended with exit code 1')
    """
    known = {number.value: number.name for number in signal.Signals}
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {known.get(-code, f'signal {-code}')}"


def latest_step(folder: Path) -> int:
    """The step of a run's latest checkpoint; -1 without one."""
    names = [path.name.removeprefix("step-") for path in (folder / "checkpoints").glob("step-*[0-9]")]
    return max((int(name) for name in names if name.isdigit()), default=-1)


class Supervisor:
    """Runs a job to its end, through deaths.

    Args:
        folder: its run directory, where progress is seen.
        start: starts the job, continuing from the latest checkpoint.
        restarts: give up after so many deaths in a row without a new checkpoint.
        stall: seconds without a change in the run directory after which the job counts as hung; None never.
    """

    def __init__(
        self,
        folder: Path,
        start: Callable[[], Group],
        restarts: int = 3,
        stall: float | None = None,
        grace: float = GRACE,
    ) -> None:
        self.folder, self.start, self.restarts, self.stall, self.grace = folder, start, restarts, stall, grace
        self.asked = False  # to stop

    def run(self) -> int:
        """Start the job until it ends in a way that another start would not change; returns its last exit code."""
        fruitless = 0
        with _signals(self._ask):
            while not self.asked:
                before = latest_step(self.folder)
                code = self._once()
                if self.asked and code < 0:
                    break
                if self.asked or code in FINAL:
                    return code
                step = latest_step(self.folder)
                fruitless = 0 if step > before else fruitless + 1
                where = f"after the checkpoint of step {step}" if step >= 0 else "before its first checkpoint"
                if fruitless > self.restarts:
                    _say(
                        f"The job {told(code)} {where}, {fruitless} times in a row without a new checkpoint: giving up."
                    )
                    return code if code > 0 else 128 - code
                _say(f"The job {told(code)} {where}; starting all of it again.")
                time.sleep(min(fruitless, 10))
        return STOPPED

    def _ask(self) -> None:
        self.asked = True

    def _once(self) -> int:
        """One start, to its end; all of its processes are gone afterwards."""
        group = self.start()
        changed, seen = time.monotonic(), _traces(self.folder)
        try:
            while group.poll() is None:
                time.sleep(0.1)
                if self.asked:
                    return group.end(self.grace)
                if self.stall and (now := _traces(self.folder)) != seen:
                    changed, seen = time.monotonic(), now
                if self.stall and time.monotonic() - changed > self.stall:
                    _say(
                        f"Nothing in {self.folder} has changed for {self.stall:g} seconds: one of the job's processes hangs. Ending all of them."
                    )
                    group.kill()
                    return -signal.SIGKILL
        finally:
            code = group.kill()
        return code


def supervise_command(words: list[str]) -> int:
    """Run `slimbayes fit ...` (the words after `slimbayes`) under supervision; returns its last exit code."""
    try:
        folder = run_folder(words)
    except ValueError as error:  # a ConfigError, whose module would load torch
        _say(str(error))
        return 2
    kept = [word for word in words if word not in ("--resume", "--supervise")]
    restarts, stall = _setting("SLIMBAYES_RESTARTS", 3), _setting("SLIMBAYES_STALL_SECONDS", 0)
    return Supervisor(folder, lambda: Group([*kept, "--resume"]), int(restarts), stall or None).run()


def run_folder(words: Sequence[str]) -> Path:
    """The run directory of a `slimbayes fit` command line.

    Example:
        >>> run_folder(["fit", "config.yaml", "--out", "here", "--devices", "2"])
        PosixPath('here')
    """
    import typer

    from slimbayes.lab.command import app

    whole: Any = typer.main.get_command(app)
    given = whole.commands["fit"].make_context("fit", [word for word in words[1:] if word != "--supervise"]).params
    if given["out"] is not None:
        return Path(given["out"])
    from slimbayes.lab.config_files import load
    from slimbayes.lab.run_folder import default_folder

    return default_folder(load(given["config"], given["overrides"] or (), given["scale"]))


def _traces(folder: Path) -> frozenset[tuple[str, int]]:
    """What a run at work changes: its files and checkpoints, with their times. Not its log, where a hung job may complain."""
    found = set()
    for path in [*folder.glob("*"), *folder.glob("checkpoints/*")]:
        with suppress(OSError):  # it may go at any moment
            found.add((path.name, path.stat().st_mtime_ns if path.name != "log.txt" else 0))
    return frozenset(found)


def _setting(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    with suppress(ValueError):
        if 0 <= (value := float(text or default)) < float("inf"):
            return value
    _say(f"{name} must be a number of at least 0, got {text!r}; it is left at {default:g}.")
    return default


def _say(message: str) -> None:
    print(f"slimbayes: {message}", file=sys.stderr, flush=True)


@contextmanager
def _signals(ask: Callable[[], None]) -> Iterator[None]:
    """Call `ask` on SIGTERM, SIGINT and SIGHUP, unless they are ignored, as by nohup."""
    heard = [
        number
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN
    ]
    former = {number: signal.signal(number, lambda *_: ask()) for number in heard}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
