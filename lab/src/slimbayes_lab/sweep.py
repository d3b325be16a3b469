"""Running many experiments: every row of a config's file, each with every combination of some values.

    slimbayes sweep table.yaml --over "seed=[0, 1, 2]" --over "train.optimizer.lr=[0.1, 0.01]" --jobs 4

Each run is a process of its own, `jobs` at a time. Searches are in search.py.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slimbayes.errors import brief, cut
from slimbayes_lab.configs.files import (
    ConfigError,
    Scale,
    load,
    parse_override,
    read_tree,
    row_names,
    with_values,
)
from slimbayes_lab.execution import signals_to
from slimbayes_lab.runs.process import Run, train

_UNNAMED = (
    "seed",
    "data.name",
)  # runs that differ by these alone share a name: reports tell them apart
_COLOURS = {
    "finished": "green",
    "skipped": "dim",
    "failed": "red",
    "stopped": "yellow",
    "left": "yellow",
}
MOST = 10_000  # combinations
_SHOWN = 20  # faults in one message


def sweep(
    config: Path, out: Path, over: Sequence[str] = (), jobs: int = 1, dry: bool = False,
    overrides: Sequence[str] = (), scale: Scale = "full", data_dir: Path | None = None, accelerator: str = "auto",
    compile: bool | None = None, limit_seconds: float = math.inf,
) -> int:  # fmt: skip
    """Run all combinations, seed by seed; returns how many failed or were left. Runs that have finished are skipped.

    Args:
        config: a YAML file, all of whose rows are run, or one row of it: "table.yaml#row".
        out: folder of the run directories.
        over: "path=[value, ...]", values of a field that are each combined with those of the others.
        jobs: runs at a time.
        dry: list the runs and how far each is, and do nothing.
        overrides: "path=value" for every run.
        scale: "small" lays the file's `small` values over the others.
        compile: whether networks are compiled, as in `slimbayes fit`.
        limit_seconds: when the call ends: runs under way are then asked to stop and keep a checkpoint, and none begins
            that would take longer than is left, if it took as long as the longest that finished in this call.
    """
    if jobs < 1:
        raise ConfigError(
            f"A sweep runs at least one job at a time, got --jobs {jobs}."
        )
    if not limit_seconds > 0:  # NaN neither
        raise ConfigError(f"--limit-seconds must be positive, got {limit_seconds}.")
    runs = combinations(config, out, over, overrides, scale)
    if dry:
        _show([(run, run.state, "") for run in runs])
        return 0
    words = ["--accelerator", accelerator]
    if data_dir:
        words += ["--data-dir", str(data_dir)]
    if compile is not None:
        words.append("--compile" if compile else "--no-compile")
    gpus = visible_gpus(accelerator)
    slots = SimpleQueue[dict[str, str]]()
    for number in range(jobs):
        slots.put({"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if gpus else {})
    end = time.monotonic() + limit_seconds
    longest = 0.0  # seconds of a run that finished

    def work(run: Run) -> tuple[Run, str, str]:
        nonlocal longest
        slot = slots.get()
        start = time.monotonic()
        try:
            if start + longest >= end and run.state != "finished":
                return run, "left", "there was no time for it: call again to go on"
            state, reason = train(run, words, slot, goes_on)
            if state == "finished":
                longest = max(longest, time.monotonic() - start)
            return run, state, reason
        finally:
            slots.put(slot)

    def goes_on() -> bool:
        return not stopped.is_set() and time.monotonic() < end

    with _stopping() as stopped, ThreadPoolExecutor(jobs) as pool:
        ended = list(pool.map(work, runs))
    _show(ended)
    return sum(state not in ("finished", "skipped") for _, state, _ in ended)


def combinations(
    config: Path,
    out: Path,
    over: Sequence[str] = (),
    overrides: Sequence[str] = (),
    scale: Scale = "full",
) -> list[Run]:
    """The runs of a sweep, equal ones once; raises ConfigError with every one that is not valid."""
    rows = row_names(read_tree(Path(config)))
    axes = [[(path, value) for value in values] for path, values in map(_axis, over)]
    count = max(len(rows), 1) * math.prod(len(axis) for axis in axes)
    if count > MOST:
        raise ConfigError(f"The sweep has {count:,} combinations, more than {MOST:,}.")
    found: dict[str, Run] = {}
    faults: dict[str, list[str]] = {}
    base_of = cache(
        lambda row: load(f"{config}#{row}" if row else config, overrides, scale)
    )
    for row, *values in itertools.product(rows or [""], *axes):
        told = (
            ", ".join(
                [*filter(None, [row]), *(f"{path}={value}" for path, value in values)]
            )
            or "the config"
        )
        try:
            base = base_of(row)
            labels = [
                _label(path, value) for path, value in values if path not in _UNNAMED
            ]
            experiment = with_values(
                base.resolved, {"name": "-".join([base.name, *labels]), **dict(values)}
            )
            found.setdefault(experiment.hash, Run(told, experiment, out))
        except ConfigError as error:
            faults.setdefault(str(error).partition("\n")[2] or str(error), []).append(
                told
            )
    if faults:
        lines = [
            f"{config} has combinations that are no valid experiments; nothing was run."
        ]
        for fault, where in list(faults.items())[:_SHOWN]:
            lines += [
                where[0] + (f" and {len(where) - 1} more:" if where[1:] else ":"),
                fault,
            ]
        raise ConfigError(cut("\n".join(lines), most=3500))
    _check_names(found.values())
    return sorted(
        found.values(), key=lambda run: run.experiment.seed
    )  # what is cut short has whole seeds


def _axis(text: str) -> tuple[str, list[Any]]:
    """Path and values of "path=[value, ...]"."""
    path, _, values = text.partition("=")
    found = parse_override(f"values={values}")["values"]
    if not isinstance(found, list) or not found or not path.strip():
        raise ConfigError(
            f'--over needs path=[value, ...], such as "seed=[0, 1, 2]", got {brief(text)}.'
        )
    return path.strip(), found


def _label(path: str, value: Any) -> str:
    """A value in a run's name: lr-0.1, method-Rank1-members-4."""
    words = re.findall(r"[\w.+-]+", str(value).replace("'kind'", ""))
    return "-".join([path.rpartition(".")[2], *words])


def _check_names(runs: Iterable[Run]) -> None:
    """Refuse runs that reports could not tell apart."""
    seen: dict[tuple[str, str, int], Run] = {}
    for run in runs:
        e = run.experiment
        other = seen.setdefault((e.name, e.data.name, e.seed), run)
        if other is not run:
            raise ConfigError(
                f"Two runs would be called {e.name!r} with seed {e.seed}: {other.told}, and {run.told}. "
                'Let the file\'s `name` tell its rows apart, as in "digits-{row}".'
            )


def _show(ended: Sequence[tuple[Run, str, str]]) -> None:
    """Print a table of runs, each with its state and a remark, and a line of counts."""
    table = Table("run", "what", "state", "remark")
    for run, state, remark in ended:
        cells = [
            Text(text, overflow="fold")
            for text in (run.folder.name, run.told, state, remark)
        ]
        cells[2].stylize(_COLOURS.get(state, ""))
        table.add_row(*cells)
    Console().print(table)
    counts = Counter(state for _, state, _ in ended)
    Console().print(
        f"{len(ended)} runs: {', '.join(f'{n} {state}' for state, n in counts.items())}",
        highlight=False,
    )


def visible_gpus(accelerator: str) -> tuple[str, ...]:
    """GPUs to hand out among runs; none where there is one at most, which they share."""
    if accelerator == "cpu":
        return ()
    import torch

    every = ",".join(map(str, range(torch.cuda.device_count())))
    found = tuple(
        name.strip()
        for name in os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",")
        if name.strip()
    )
    return found if len(found) > 1 else ()


@contextmanager
def _stopping() -> Iterator[Event]:
    """An event that Ctrl-C, SIGTERM and SIGHUP set, unless they are ignored; the work then ends as by Ctrl-C."""
    stopped = Event()

    def ask(number: int, frame: object) -> None:
        stopped.set()
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with signals_to(
        ask, *(n for n in numbers if signal.getsignal(n) != signal.SIG_IGN)
    ):
        yield stopped
