"""The directory of a run, which says everything about it:

config.yaml     every choice, defaults written out       environment.json   commit, versions, hardware
metrics.csv     a line for each epoch                    steps.csv          losses of each step
checkpoints/    state between steps, the latest two      cost.json          seconds and memory that training took
posterior/      what was learned, alone                  model/             with the network's own weights
record.json     the Record of a finished run             inputs.json        what the network takes and gives
"""

from __future__ import annotations

import csv
import fcntl
import platform
import re
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

import torch
import yaml
from torch import Tensor

from slimbayes.files import write_json, write_text
from slimbayes.lab.config import Experiment
from slimbayes.lab.config_files import ConfigError, read_tree, validate

_STEPS = "step,loss,nll,kl\n"


class RunError(RuntimeError):
    """A run directory that cannot be used, and what to do about it."""


def default_folder(experiment: Experiment, root: Path | str = "runs") -> Path:
    """runs/<name>-<hash of the config>: equal configs meet in one directory."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", experiment.name).strip("-.")[:60] or "run"
    return Path(root) / f"{slug}-{experiment.hash}"


def open_run(folder: Path, experiment: Experiment, resume: bool) -> IO[str]:
    """Make or reopen a run's directory; returns a lock that lasts as long as the process or until it is closed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "a")  # noqa: SIM115 (held on to)
    except OSError as error:
        raise RunError(
            f"The run directory {folder} cannot be written to: {error.strerror}. Choose another with --out."
        ) from error
    try:
        _prepare(folder, experiment, resume, lock)
    except BaseException:
        lock.close()
        raise
    return lock


def _prepare(folder: Path, experiment: Experiment, resume: bool, lock: IO[str]) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise RunError(f"{folder} is in use by another process.") from error
    file = folder / "config.yaml"
    if file.exists() and stored_experiment(folder).hash != experiment.hash:
        raise RunError(f"{folder} holds a run of another config. Choose another directory with --out.")
    if file.exists() and not resume and any((folder / "checkpoints").glob("step-*")):
        raise RunError(
            f"{folder} holds an unfinished run. Continue it with --resume, or choose another directory with --out."
        )
    write_text(file, yaml.safe_dump(experiment.resolved, sort_keys=False))
    write_json(folder / "environment.json", environment())


def stored_experiment(folder: Path) -> Experiment:
    """The experiment of a run's directory."""
    file = Path(folder) / "config.yaml"
    if not file.exists():
        raise RunError(f"{folder} is not a run directory: it has no config.yaml.")
    try:
        return validate(read_tree(file), str(file))
    except ConfigError as error:
        raise RunError(str(error)) from error


# --- what is written down while it trains ---


def append_steps(file: Path, first: int, losses: Tensor) -> None:
    """Add the loss, nll and KL of steps from `first` on, (steps, 3), to steps.csv."""
    new = not file.exists()
    with open(file, "a", encoding="utf8") as handle:
        handle.write(_STEPS if new else "")
        for step, (loss, nll, kl) in enumerate(losses.tolist(), first):
            handle.write(f"{step},{loss!r},{nll!r},{kl!r}\n")


def forget_steps(file: Path, first: int) -> None:
    """Drop the lines of step `first` and later ones, which will be run again."""
    if file.exists():
        # A power loss may have left any part of it, or nothing.
        lines = [line for line in file.read_text(errors="replace").splitlines(keepends=True) if line.endswith("\n")]
        numbers = ((line.split(",", 1)[0], line) for line in lines)
        kept = [line for number, line in numbers if number.isdecimal() and int(number) < first]
        write_text(file, "".join([_STEPS, *kept]))


def read_curve(folder: Path) -> list[dict[str, float]]:
    """The lines of metrics.csv, one for each epoch."""
    file = folder / "metrics.csv"
    if not file.exists():
        return []
    with open(file, newline="") as handle:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(handle)]


def tensorboard(folder: Path, row: dict[str, float]) -> None:
    """Add an epoch's line to the curves for TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard")) as writer:
        for name in row.keys() - {"epoch", "step"}:
            writer.add_scalar(name, row[name], int(row["step"]))


# --- where it ran ---


def environment() -> dict[str, str]:
    """What a result may depend on beside its config: versions, commit, hardware."""
    facts = {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}
    for package in ("slimbayes", "torch", "numpy", "pytorch-lightning", "torchmetrics", "pydantic"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    facts |= {"torch": torch.__version__, "cpu": _cpu(), "threads": str(torch.get_num_threads())}
    if torch.cuda.is_available():
        facts |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    try:
        facts |= {"commit": _git("rev-parse", "HEAD")}
        facts |= {"changed files": str(len(_git("status", "--porcelain", "-uno").splitlines()))}
    except (OSError, subprocess.SubprocessError):
        pass  # it does not run from a checkout
    return facts


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _git(*words: str) -> str:
    """What git says about the library's own checkout."""
    here = Path(__file__).parent
    done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def command() -> str:
    """The command line, as one would type it."""
    program = Path(sys.argv[0])
    # python -m slimbayes and python -m slimbayes.lab.command are the same as slimbayes.
    same = program.parts[-2:] in {("slimbayes", "__main__.py"), ("lab", "command.py")}
    name = "slimbayes" if same else program.name
    return shlex.join([name, *sys.argv[1:]])
