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
import itertools
import os
import platform
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

import slimbayes
from slimbayes.errors import cut
from slimbayes.files import (
    MARKER,
    claim_folder,
    remove_drafts,
    replacing,
    write_json,
    write_text,
)
from slimbayes.untrusted import VALUES, append_file, open_file, parse_json, read_file
from slimbayes_lab.configs.experiment import Experiment
from slimbayes_lab.configs.files import ConfigError, read_tree, validate
from slimbayes_lab.configs.yaml_text import dump
from slimbayes_lab.report.record import note_unsealed
from slimbayes_lab.runs.checkpoints import tidy_checkpoints

_STEPS = "step,loss,nll,kl\n"
_CURVES = 1 << 30  # bytes: ten million steps
_LINE = 1 << 16  # bytes of one line, which has a hundred numbers at most
_COLUMNS = 1000
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
        lock = append_file(claim_run(folder))
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


def _prepare(
    folder: Path, experiment: Experiment, resume: bool, lock: IO[bytes]
) -> None:
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
            with open_file(folder / name) as file:
                lines.append(
                    f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n"
                )
    write_text(folder / _SUMS, "".join(lines))


def unseal(folder: Path) -> None:
    """Drop what `seal` wrote: files are about to change, and a run that is killed meanwhile is none that ended."""
    (folder / _SUMS).unlink(missing_ok=True)


def check_seal(folder: Path, names: Sequence[str]) -> None:
    """Refuse files that changed since the run ended; runs that have not ended, and older ones, have no such sums."""
    try:
        sums = read_file(folder / _SUMS)
    except FileNotFoundError:
        if (folder / "record.json").exists():
            note_unsealed("Runs without SHA256SUMS")
        return
    except OSError as error:
        raise RunError(f"{folder / _SUMS} cannot be read: {error.strerror}.") from error
    lines = sums.decode(errors="replace").splitlines()
    known = {
        name: digest for digest, _, name in (line.partition("  ") for line in lines)
    }
    for name in names:
        if _sha256(folder / name) != known.get(name):
            raise RunError(
                f"{folder / name} is damaged, or was changed after the run: it does not fit {folder / _SUMS}. Restore "
                f"it from a copy, or remove {_SUMS} if the change is meant."
            )


def _sha256(file: Path) -> str | None:
    """The sha256 of a file of a run; None where it is not there."""
    try:
        return hashlib.sha256(read_file(file)).hexdigest()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror}.") from error


def check_data_of(folder: Path, name: str, sha256: str) -> str:
    """Refuse data other than those a run has read; returns what to say about a run that did not write them down."""
    try:
        known: Any = parse_json(read_file(folder / "data.json"))["sha256"]
    except FileNotFoundError:
        return f"{folder} does not say which data it has read, so it was not compared with those of {name} here."
    except (OSError, ValueError, KeyError, TypeError) as error:
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
        with append_file(file) as handle:
            handle.write("".join([_STEPS if new else "", *lines]).encode())
    except OSError as error:  # a full disk names no file itself
        raise OSError(error.errno, error.strerror, str(file)) from error


def forget_steps(file: Path, first: int) -> None:
    """Drop the lines of step `first` and later ones, which will be run again."""
    try:
        with open_file(file, _CURVES) as stream, replacing(file) as draft:
            kept = itertools.chain([_STEPS.encode()], _steps_before(stream, first))
            with open(draft, "wb") as out:
                out.writelines(kept)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror}.") from error


def _steps_before(stream: IO[bytes], first: int) -> Iterator[bytes]:
    """Whole lines of steps before `first`; a power loss may have left any part of the file, or nothing."""
    while line := stream.readline(_LINE):
        number = line.partition(b",")[0]
        whole = line.endswith(b"\n") and number.isdigit() and len(number) < 20
        if whole and int(number) < first:
            yield line


def read_curve(folder: Path) -> list[dict[str, float]]:
    """The lines of metrics.csv, one for each epoch."""
    curve, values = [], 0
    for row in read_rows(folder / "metrics.csv", "epoch"):
        curve.append(row)
        values += len(row)
        if values > VALUES:
            raise RunError(f"{folder / 'metrics.csv'} has more than {VALUES:,} values.")
    return curve


def read_rows(file: Path, needed: str) -> Iterator[dict[str, float]]:
    """The lines of metrics.csv or steps.csv, one at a time; the column `needed` must have a number in each."""
    try:
        with open_file(file, _CURVES) as stream:
            rows = csv.DictReader(_lines(stream))
            if len(rows.fieldnames or ()) > _COLUMNS:
                raise ValueError(f"it has more than {_COLUMNS:,} columns")
            for row in rows:
                if not row.get(needed) or None in row:
                    raise ValueError(f"line {rows.line_num} does not fit its columns")
                yield {name: float(value) for name, value in row.items() if value}
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror}.") from error
    except (csv.Error, ValueError) as error:
        raise RunError(f"{file} is damaged: {cut(str(error))}.") from error


def _lines(stream: IO[bytes]) -> Iterator[str]:
    while line := stream.readline(_LINE):
        yield line.decode(errors="replace")


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
    return facts | _commit()


def _commit() -> dict[str, str]:
    """The commit of the library's own checkout, and how many files of it have changed; nothing where it is installed.

    An installed library often lies inside another project's checkout, whose commit says nothing about it and whose
    settings may name programs for git to run.
    """
    root = Path(slimbayes.__file__).resolve().parents[2]
    if not _is_checkout(root):
        return {}
    try:
        toplevel, commit = _git(root, "rev-parse", "--show-toplevel", "HEAD").split(
            "\n"
        )
        if Path(toplevel).resolve() != root:
            return {}
        changed = _git(
            root, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules"
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}
    return {"commit": commit, "changed files": str(len(changed.splitlines()))}


def _is_checkout(root: Path) -> bool:
    """Whether a folder is this project's own checkout: its git folder or file, its package, and its name."""
    package = root / "src" / "slimbayes"
    here = Path(slimbayes.__file__).resolve().parent
    if not (root / ".git").exists() or package != here:
        return False
    try:
        project = tomllib.loads(read_file(root / "pyproject.toml").decode())["project"]
        return bool(project["name"] == "slimbayes")
    except (OSError, ValueError, LookupError, TypeError):
        return False


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


def _git(root: Path, *words: str) -> str:
    """What git says about a checkout, whose hooks, monitors and pagers do not run."""
    # A hook of another project, which runs this, has variables that lead git there.
    clean = {name: v for name, v in os.environ.items() if not name.startswith("GIT_")}
    clean |= {
        "GIT_CEILING_DIRECTORIES": str(root.parent),  # look no further up
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
    }
    settings = (
        "core.fsmonitor=false",
        f"core.hooksPath={os.devnull}",
        f"core.attributesFile={os.devnull}",  # which filters files go through
    )
    options = [part for setting in settings for part in ("-c", setting)]
    done = subprocess.run(
        ["git", "--no-pager", *options, *words],
        cwd=root,
        env=clean,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=10,
        check=True,
    )
    return done.stdout.strip()


def command() -> str:
    """The command line, as one would type it."""
    program = Path(sys.argv[0])
    # python -m slimbayes_lab is the same as slimbayes.
    same = program.parts[-2:] == ("slimbayes_lab", "__main__.py")
    name = "slimbayes" if same else program.name
    return shlex.join([name, *sys.argv[1:]])
