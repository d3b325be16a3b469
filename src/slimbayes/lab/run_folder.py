"""The directory of a run, which says everything about it:

config.yaml        every choice, defaults written out       environment.json   commit, versions, hardware
metrics.csv        a line for each epoch                    steps.csv          losses of each step
checkpoints/       state between steps, the latest two      posterior/, model/ what was learned: alone, and with the network's own weights
record.json        the Record, when the run has finished    inputs.json        what the network takes and gives, for predictions
"""

from __future__ import annotations

import fcntl
import json
import platform
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

import torch
import yaml

from slimbayes.files import write_text
from slimbayes.lab.config import Experiment
from slimbayes.lab.config_files import ConfigError, read_tree, validate


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
    if file.exists():
        if stored_experiment(folder).hash != experiment.hash:
            raise RunError(f"{folder} holds a run of another config. Choose another directory with --out.")
        if not resume and any((folder / "checkpoints").glob("step-*")):
            raise RunError(
                f"{folder} holds an unfinished run. Continue it with --resume, or choose another directory with --out."
            )
    write_text(file, yaml.safe_dump(experiment.resolved, sort_keys=False))
    write_text(folder / "environment.json", json.dumps(environment(), indent=1) + "\n")


def stored_experiment(folder: Path) -> Experiment:
    """The experiment of a run's directory."""
    file = Path(folder) / "config.yaml"
    if not file.exists():
        raise RunError(f"{folder} is not a run directory: it has no config.yaml.")
    try:
        return validate(read_tree(file), str(file))
    except ConfigError as error:
        raise RunError(str(error)) from error


def environment() -> dict[str, str]:
    """What a result may depend on beside its config: versions, commit, hardware."""
    facts = {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}
    for package in ("slimbayes", "torch", "numpy", "pytorch-lightning", "torchmetrics", "pydantic"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    facts["torch"] = torch.__version__
    facts |= {"cpu": _cpu(), "threads": str(torch.get_num_threads())}
    if torch.cuda.is_available():
        facts |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    return facts | _commit()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit() -> dict[str, str]:
    """The commit of the library's own checkout, where it runs from one."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "changed files": str(len(git("status", "--porcelain", "-uno").splitlines())),
        }
    except (OSError, subprocess.SubprocessError):
        return {}


def command() -> str:
    """The command line, as one would type it."""
    import shlex

    program = Path(sys.argv[0])
    # python -m slimbayes.lab.command is the same as slimbayes.
    name = "slimbayes" if program.parts[-2:] == ("lab", "command.py") else program.name
    return shlex.join([name, *sys.argv[1:]])
