"""Carrying out the runs of sweeps and searches: each is `slimbayes fit ... --resume` in a process of its own.

That command leaves a finished run alone and continues an unfinished one, so any call that sees a run's directory may
start it, as often as it likes. Whether the run has finished is read there; a lock there says whether a call is at work.

Optuna and Ray Tune search over configs with it: their samplers, schedulers, storage and dashboards, our runs. A trial
is an ordinary run in out/<name>-<hash>: equal values are one run, and one that was stopped can be continued.
"""

from __future__ import annotations

import fcntl
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import yaml

from slimbayes.files import write_text
from slimbayes.lab.configs.experiment import Experiment
from slimbayes.lab.configs.files import ConfigError, load, with_values
from slimbayes.lab.runs.folder import default_folder, read_curve
from slimbayes.report.record import RecordError, read

if TYPE_CHECKING:
    from optuna.trial import Trial


COMMAND = (sys.executable, "-m", "slimbayes.lab.command")
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


def train(
    run: Run,
    words: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    wanted: Callable[[], bool] = lambda: True,
) -> tuple[str, str]:
    """Train a run unless it has finished or another call holds it; returns its state, and why it did not finish.

    Args:
        words: further words of the `slimbayes fit` command.
        environment: variables to set for it.
        wanted: asked again and again; once it says no, the run is asked to stop.
    """
    try:
        with run.claimed() as claim:
            if run.state == "finished":
                return "skipped", ""
            if claim is None:
                return "running", "another call is at work on it"
            write_text(run.folder / "config.yaml", yaml.safe_dump(run.experiment.resolved, sort_keys=False))
            _say(run, "running")
            for start in range(STARTS):
                process = _process(run, words, os.environ | dict(environment or {}), claim)
                state, reason = _outcome(run, _wait(process, wanted))
                if not reason.startswith("was killed"):
                    break
                _say(run, f"{reason}, started again" if start < STARTS - 1 else reason)
    except OSError as error:
        state, reason = "failed", str(error)
    _say(run, state)
    return state, reason


def _process(run: Run, words: Sequence[str], environment: Mapping[str, str], claim: IO[str]) -> subprocess.Popen[bytes]:
    line = ["fit", str(run.folder / "config.yaml"), "--out", str(run.folder), "--resume", *words]
    # The kernel asks the run to stop when this call is gone, however it went.
    tied = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
    with open(run.folder / "log.txt", "ab") as log:
        log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} slimbayes {' '.join(line)}\n".encode())
        log.flush()
        return subprocess.Popen(
            [*tied, *COMMAND, *line], env={**environment, "TYPER_STANDARD_TRACEBACK": "1"},
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, pass_fds=[claim.fileno()],
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
        return "stopped", f"was asked to stop; {'its checkpoint is kept' if kept else 'there is no checkpoint yet'}"
    if code < 0:
        memory = ", perhaps for want of memory" if code == -signal.SIGKILL else ""
        return "failed", f"was killed by {signal.Signals(-code).name}{memory}"
    log = run.folder / "log.txt"
    said = [line.strip() for line in log.read_text(encoding="utf8", errors="replace").splitlines()]
    return "failed", f"{[line for line in said if line][-1][:300]} ({log})"


def _say(run: Run, state: str) -> None:
    print(f"{run.folder.name}: {state}", file=sys.stderr, flush=True)


Values = Mapping[str, Any]  # by paths of a config
Report = Callable[[int, float], bool]  # an epoch and its metric; says whether to go on


def optuna_objective(
    config: Path | str,
    out: Path | str,
    suggest: Callable[[Trial], Values],
    metric: str = "validation_nll",
    words: Sequence[str] = (),
) -> Callable[[Trial], float]:
    """A function for `optuna.Study.optimize`: trains a config with a trial's values, and reports after each epoch.

    Args:
        out: folder of the run directories.
        suggest: from a trial to values by paths of the config.
        metric: validation_nll, validation_accuracy or validation_rmse; the config needs `data.validation`.
        words: further words of the `slimbayes fit` commands.

    Example:
        study = optuna.create_study(storage="sqlite:///search.db", study_name="lr", load_if_exists=True)
        space = lambda trial: {"train.optimizer.lr": trial.suggest_float("lr", 1e-4, 0.1, log=True)}
        study.optimize(optuna_objective("rank1.yaml", "runs", space), n_trials=30, catch=RuntimeError)
    """
    search = _search(config, out, metric, words)

    def objective(trial: Trial) -> float:
        from optuna.exceptions import TrialPruned

        def report(epoch: int, value: float) -> bool:
            trial.report(value, epoch)
            return not trial.should_prune()

        found = search(suggest(trial), report)
        if found is None:
            raise TrialPruned
        return found

    return objective


def tune_trainable(
    config: Path | str, out: Path | str, metric: str = "validation_nll", words: Sequence[str] = ()
) -> Callable[[dict[str, Any]], None]:
    """A function for `ray.tune.Tuner`, whose space has paths of the config; arguments as of `optuna_objective`.

    Example:
        Tuner(tune_trainable("rank1.yaml", "runs"), param_space={"train.optimizer.lr": tune.loguniform(1e-4, 0.1)})
    """
    search = _search(config, out, metric, words)

    def trainable(values: dict[str, Any]) -> None:
        from ray import tune

        def report(epoch: int, value: float) -> bool:
            tune.report({"epoch": epoch, metric: value})  # ends the run where the scheduler stops the trial
            return True

        search(values, report)

    return trainable


def _search(
    config: Path | str, out: Path | str, metric: str, words: Sequence[str]
) -> Callable[[Values, Report], float | None]:
    """A function that trains a config with some values; returns its metric, None where a report said to stop."""
    base, place = load(config), Path(out).resolve()
    if metric not in ("validation_nll", "validation_accuracy", "validation_rmse"):
        raise ConfigError(f"metric must be validation_nll, validation_accuracy or validation_rmse, got {metric!r}.")
    if not base.data.validation:
        raise ConfigError(f"{metric} is of validation rows: set data.validation in {config}, to 0.1 say.")

    def search(values: Values, report: Report) -> float | None:
        run = Run("", with_values(base.resolved, values), place)
        told = 0

        def promising() -> bool:
            nonlocal told
            new = epochs(run.folder, metric)[told:]
            told += len(new)
            return all([report(epoch, value) for epoch, value in new])

        state, reason = train(run, words, wanted=promising)
        if state == "stopped":
            return None
        promising()
        value = kept_value(run.folder, metric) if run.state == "finished" else math.nan
        if not math.isfinite(value):
            raise RuntimeError(reason or f"{run.folder}: its {metric} is not finite.")
        return value

    return search


def epochs(folder: Path, metric: str) -> list[tuple[int, float]]:
    """A metric after each epoch that a run has noted, where it is finite."""
    return [(int(row["epoch"]), row[metric]) for row in read_curve(folder) if math.isfinite(row.get(metric, math.nan))]


def kept_value(folder: Path, metric: str) -> float:
    """A finished run's metric at the epoch whose weights it keeps: the last, or with early_stop that of least NLL."""
    record = read(folder)
    rows = [row for row in record.curve if metric in row]
    if record.config["train"].get("early_stop"):
        rows = sorted(rows, key=lambda row: -row["validation_nll"])
    return rows[-1][metric] if rows else math.nan
