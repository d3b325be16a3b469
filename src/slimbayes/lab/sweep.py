"""Running sweeps: every combination of a file's axes is an ordinary run in a directory of its own (axes.py has the file, backends.py what runs them).

    slimbayes sweep sweep.yaml --out runs --jobs 4

Call it again to go on: runs that have finished are skipped, the others continue from their latest checkpoints.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from slimbayes.lab.axes import Point, Sweep, combinations, read_sweep
from slimbayes.lab.backends import Backend, Job, Local, Result, job_of, prepare, state_of, visible_gpus
from slimbayes.lab.board import Board, show
from slimbayes.lab.config_files import ConfigError
from slimbayes.lab.search_config import Search, check

Where = Literal["local", "slurm", "ray"]
_OWN = ("axes.", "search.", "slurm.", "ray.")  # overrides of the sweep itself, not of its runs


def sweep(
    config: Path,
    out: Path,
    backend: Where = "local",
    jobs: int = 1,
    dry: bool = False,
    overrides: Sequence[str] = (),
    scale: str = "full",
    data_dir: Path | None = None,
    accelerator: str = "auto",
) -> int:
    """Run a sweep's file; returns how many of its runs did not finish. Runs that have finished are skipped.

    Args:
        out: folder of the run directories.
        jobs: runs at a time.
        dry: list the runs and how far each is, and do nothing.
        overrides: "path=value" for every run, or for the sweep itself: "axes.seed=[0]", "search.trials=5".
        scale: "small" lays the base's `small` values over the others.
    """
    if jobs < 1:
        raise ConfigError(f"A sweep runs at least one job at a time, got --jobs {jobs}.")
    own = [text for text in overrides if text.startswith(_OWN)]
    chosen = read_sweep(Path(config), own)
    points = combinations(chosen, Path(config), [text for text in overrides if text not in own], scale)
    out = Path(out) if backend == "local" else Path(out).resolve()
    data = () if data_dir is None else ("--data-dir", str(data_dir if backend == "local" else Path(data_dir).resolve()))
    words = ("--accelerator", accelerator, *data)
    if chosen.search is not None:
        if backend != "local":
            raise ConfigError(
                "A search runs its trials on the machine it is started on. Start the same command on several machines: they share its journal."
            )
        return _search_all(chosen.search, points, out, jobs, dry, words, visible_gpus(accelerator))
    planned = {job_of(point.experiment, out, words): point for point in points}
    if dry:
        show({job: (point.told, state_of(job.folder, job.hash), "") for job, point in planned.items()})
        return 0
    with _stoppable():
        results = run_all(planned, _backend(backend, chosen, out, jobs, accelerator))
    show({r.job: (planned[r.job].told, r.state, f"{r.reason} ({r.job.log})" if r.reason else "") for r in results})
    return sum(result.state in ("failed", "stopped") for result in results)


def _search_all(
    chosen: Search,
    points: Sequence[Point],
    out: Path,
    jobs: int,
    dry: bool,
    words: Sequence[str],
    gpus: tuple[str, ...],
) -> int:
    """Search around each combination, one after another; returns how many searches found nothing."""
    from slimbayes.lab.search import search

    for point in points:
        check(chosen, point.experiment)
    with _stoppable():
        return sum(search(chosen, point.experiment, out, jobs, dry, words, gpus) for point in points)


def run_all(planned: Mapping[Job, Point], backend: Backend) -> list[Result]:
    """Run what has not finished, in the order given."""
    done = [job for job in planned if state_of(job.folder, job.hash) == "finished"]
    todo = [job for job in planned if job not in done]
    for job in todo:
        prepare(job, planned[job].experiment)
    with Board({job: (planned[job].told, planned[job].experiment.train.epochs) for job in todo}, len(done)) as board:
        results = backend.run(todo, board.tell) if todo else []
    return [Result(job, "skipped") for job in done] + results


def _backend(name: Where, chosen: Sweep, out: Path, jobs: int, accelerator: str) -> Backend:
    if name == "local":
        return Local(jobs, visible_gpus(accelerator))
    from slimbayes.lab.clusters import Ray, Slurm

    return Slurm(out / ".submitit", jobs, chosen.slurm) if name == "slurm" else Ray(jobs, chosen.ray)


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM ends a sweep as Ctrl-C does: its runs are asked to stop and leave checkpoints. Signals that are ignored, as by nohup, stay so."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    heard = [n for n in (signal.SIGTERM, signal.SIGHUP) if main and signal.getsignal(n) != signal.SIG_IGN]
    former = {number: signal.signal(number, interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
