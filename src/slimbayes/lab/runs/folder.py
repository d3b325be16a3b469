"""The directory of a run, which says everything about it:

config.yaml     every choice, defaults written out       environment.json   commit, versions, hardware
metrics.csv     a line for each epoch                    steps.csv          losses of each step
checkpoints/    state between steps, the latest two      cost.json          seconds and memory that training took
posterior/      what was learned, alone                  model/             with the network's own weights
record.json     the Record of a finished run             inputs.json        what the network takes and gives
data.json       name and sha256 of the rows it read      SHA256SUMS         of the files of a finished run
.slimbayes      names of all these, and the run's lock   log.txt            what a sweep's run has said
"""

from __future__ import annotations

import csv
import fcntl
import hashlib
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from slimbayes.files import (
    MARKER,
    claim_folder,
    remove_drafts,
    write_json,
    write_text,
)
from slimbayes.lab.configs.experiment import Experiment
from slimbayes.lab.configs.files import ConfigError, read_tree, validate
from slimbayes.lab.configs.yaml_text import dump
from slimbayes.lab.runs.checkpoints import tidy_checkpoints
from slimbayes.report.record import note_unsealed
from slimbayes.untrusted import parse_json, read_file

_STEPS = "step,loss,nll,kl\n"
_SUMS = "SHA256SUMS"  # as sha256sum writes it: `sha256sum -c SHA256SUMS` looks too
_SEALED = (
    "config.yaml", "environment.json", "data.json", "metrics.csv", "steps.csv", "cost.json", "inputs.json",
    "record.json", "posterior/manifest.json", "model/manifest.json",
)  # fmt: skip


_BEGUN = (
    "config.yaml",
    "environment.json",
)  # what a run writes before it knows its data
_WRITTEN = (
    *_BEGUN, "data.json", "metrics.csv", "steps.csv", "cost.json", "inputs.json", "record.json", _SUMS, "posterior",
    "model", "checkpoints", "tensorboard", "log.txt",
)  # fmt: skip


class RunError(RuntimeError):
    """A run directory that cannot be used, and what to do about it."""


def default_folder(experiment: Experiment, root: Path | str = "runs") -> Path:
    """runs/<name>-<hash of the config>: equal configs meet in one directory."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", experiment.name).strip("-.")[:60] or "run"
    return Path(root) / f"{slug}-{experiment.hash}"


def claim_run(folder: Path) -> Path:
    """Make a run's directory, or refuse one that holds files with the names of a run's which no run wrote.

    Returns: the file that says so, which a run locks.
    """
    try:
        return claim_folder(folder, _WRITTEN)
    except FileExistsError as error:
        raise RunError(str(error)) from error


@contextmanager
def open_run(folder: Path, experiment: Experiment, resume: bool) -> Iterator[None]:
    """Make or reopen a run's directory and hold its lock. A new one whose data or network are refused is removed."""
    new = not folder.exists()
    try:
        marker = claim_run(folder)
        lock = open(marker, "a")  # noqa: SIM115 (held on to)
    except OSError as error:
        raise RunError(
            f"The run directory {folder} cannot be written to: {error.strerror}. Choose another with --out."
        ) from error
    with lock:
        try:
            _prepare(folder, experiment, resume, lock)
            yield
        except Exception:
            if (
                new and not (folder / "data.json").exists()
            ):  # which is written once both are known to do
                _remove_begun(folder)
            raise


def _remove_begun(folder: Path) -> None:
    """Remove what a run has written before it knows its data, and its directory if nothing else is in it."""
    for name in (*_BEGUN, MARKER):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def _prepare(folder: Path, experiment: Experiment, resume: bool, lock: IO[str]) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise RunError(f"{folder} is in use by another process.") from error
    begun = (folder / "config.yaml").exists()
    if begun and read_config(folder).hash != experiment.hash:
        raise RunError(
            f"{folder} holds a run of another config. Choose another directory with --out."
        )
    if begun and not resume and any((folder / "checkpoints").glob("step-*")):
        raise RunError(
            f"{folder} holds an unfinished run. Continue it with --resume, or choose another directory with --out."
        )
    remove_drafts(folder)
    tidy_checkpoints(folder / "checkpoints")
    unseal(folder)
    write_config(folder, experiment)
    write_json(folder / "environment.json", environment())


def write_config(folder: Path, experiment: Experiment) -> None:
    """Write an experiment, every default written out, into a run's directory."""
    write_text(folder / "config.yaml", dump(experiment.resolved))


def read_config(folder: Path) -> Experiment:
    """The experiment of a run's directory."""
    file = Path(folder) / "config.yaml"
    if not file.exists():
        raise RunError(f"{folder} is not a run directory: it has no config.yaml.")
    check_seal(folder, ["config.yaml"])
    try:
        return validate(read_tree(file), str(file))
    except ConfigError as error:
        raise RunError(str(error)) from error


# --- that it is whole, and of which data ---


def seal(folder: Path) -> None:
    """Write down the sha256 of every file of a run that has come to its end."""
    lines = []
    for name in _SEALED:
        if (folder / name).is_file():
            with open(folder / name, "rb") as file:
                lines.append(
                    f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n"
                )
    write_text(folder / _SUMS, "".join(lines))


def unseal(folder: Path) -> None:
    """Drop what `seal` wrote: files are about to change, and a run that is killed meanwhile is none that ended."""
    (folder / _SUMS).unlink(missing_ok=True)


def check_seal(folder: Path, names: Sequence[str]) -> None:
    """Refuse files that changed since the run ended; runs that have not ended, and older ones, have no such sums."""
    if not (folder / _SUMS).exists():
        if (folder / "record.json").exists():
            note_unsealed("Runs without SHA256SUMS")
        return
    lines = (folder / _SUMS).read_text(errors="replace").splitlines()
    known = {
        name: digest for digest, _, name in (line.partition("  ") for line in lines)
    }
    for name in names:
        file = folder / name
        if not file.exists() and name not in known:
            continue
        if (
            not file.exists()
            or known.get(name) != hashlib.sha256(file.read_bytes()).hexdigest()
        ):
            raise RunError(
                f"{file} is damaged, or was changed after the run: it does not fit {folder / _SUMS}. Restore it from a "
                f"copy, or remove {_SUMS} if the change is meant."
            )


def check_data_of(folder: Path, name: str, sha256: str) -> str:
    """Refuse data other than those a run has read; returns what to say about a run that did not write them down."""
    try:
        known: Any = parse_json(read_file(folder / "data.json"))["sha256"]
    except FileNotFoundError:
        return f"{folder} does not say which data it has read, so it was not compared with those of {name} here."
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{folder / 'data.json'} is damaged: {error!r}. Restore it from a copy."
        ) from error
    if known != sha256:
        raise RunError(
            f"{folder} is a run on other data: its rows have the sha256 {str(known)[:16]}..., those of {name} here "
            f"{sha256[:16]}.... Give the --data-dir it was trained with, or choose another directory with --out."
        )
    return ""


# --- what is written down while it trains ---


def append_steps(file: Path, first: int, losses: Tensor) -> None:
    """Add the loss, nll and KL of steps from `first` on, (steps, 3), to steps.csv."""
    lines = [
        f"{step},{loss!r},{nll!r},{kl!r}\n"
        for step, (loss, nll, kl) in enumerate(losses.tolist(), first)
    ]
    new = not file.exists()
    try:
        with open(file, "a", encoding="utf8") as handle:
            handle.write("".join([_STEPS if new else "", *lines]))
    except OSError as error:  # a full disk names no file itself
        raise OSError(error.errno, error.strerror, str(file)) from error


def forget_steps(file: Path, first: int) -> None:
    """Drop the lines of step `first` and later ones, which will be run again."""
    if file.exists():
        # A power loss may have left any part of it, or nothing.
        lines = [
            line
            for line in file.read_text(errors="replace").splitlines(keepends=True)
            if line.endswith("\n")
        ]
        numbers = ((line.split(",", 1)[0], line) for line in lines)
        kept = [
            line
            for number, line in numbers
            if number.isdecimal() and int(number) < first
        ]
        write_text(file, "".join([_STEPS, *kept]))


def read_curve(folder: Path, name: str = "metrics.csv") -> list[dict[str, float]]:
    """The lines of metrics.csv, one for each epoch, or of steps.csv, one for each step."""
    if not (folder / name).exists():
        return []
    with open(folder / name, newline="") as handle:
        return [
            {name: float(value) for name, value in row.items() if value}
            for row in csv.DictReader(handle)
        ]


def tensorboard(folder: Path, row: dict[str, float]) -> None:
    """Add an epoch's line to the curves for TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard")) as writer:
        for name in row.keys() - {"epoch", "step"}:
            writer.add_scalar(name, row[name], int(row["step"]))


# --- where it ran ---


@cache
def environment() -> Mapping[str, str]:
    """What a result may depend on beside its config: versions, commit, hardware; as they were when first asked for."""
    facts = {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }
    for package in (
        "slimbayes",
        "torch",
        "numpy",
        "pytorch-lightning",
        "torchmetrics",
        "pydantic",
    ):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    facts |= {
        "torch": torch.__version__,
        "cpu": _cpu(),
        "threads": str(torch.get_num_threads()),
    }
    if torch.cuda.is_available():
        facts |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    try:
        facts |= {"commit": _git("rev-parse", "HEAD")}
        facts |= {
            "changed files": str(
                len(_git("status", "--porcelain", "-uno").splitlines())
            )
        }
    except (OSError, subprocess.SubprocessError):
        pass  # it does not run from a checkout
    return facts


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(
            line.split(":", 1)[1].strip()
            for line in lines
            if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _git(*words: str) -> str:
    """What git says about the library's own checkout."""
    here = Path(__file__).parent
    done = subprocess.run(
        ["git", *words],
        cwd=here,
        capture_output=True,
        text=True,
        timeout=10,
        check=True,
    )
    return done.stdout.strip()


def command() -> str:
    """The command line, as one would type it."""
    program = Path(sys.argv[0])
    # python -m slimbayes and python -m slimbayes.lab.command are the same as slimbayes.
    same = program.parts[-2:] in {("slimbayes", "__main__.py"), ("lab", "command.py")}
    name = "slimbayes" if same else program.name
    return shlex.join([name, *sys.argv[1:]])
