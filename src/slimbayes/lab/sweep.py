"""Running a sweep: all combinations of its file, or a search around each of them.

Calls on machines that see the same `out` share the work, however they were started: by hand, `sbatch --array` or Ray.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slimbayes.lab.files import ConfigError, load, validate
from slimbayes.lab.launch import Launcher, Run
from slimbayes.lab.search import Searcher, new_epochs, told
from slimbayes.lab.sweep_config import combinations, read_sweep, with_values

_OWN = ("axes.", "search.", "ray.")  # overrides of the sweep itself, not of its runs
_COLOURS = {"finished": "green", "skipped": "dim", "pruned": "dim", "failed": "red", "stopped": "yellow"}


def sweep(
    config: Path, out: Path, backend: Literal["local", "ray"] = "local", jobs: int = 1, dry: bool = False,
    overrides: Sequence[str] = (), scale: str = "full", data_dir: Path | None = None, accelerator: str = "auto",
) -> int:  # fmt: skip
    """Run a sweep's file; returns how many of its runs, or searches, failed. Runs that have finished are skipped.

    Args:
        out: folder of the run directories.
        jobs: runs at a time.
        dry: list the runs and how far each is, and do nothing.
        overrides: "path=value" for every run, or for the sweep itself: "axes.seed=[0]", "search.trials=5".
        scale: "small" lays the base's `small` values over the others.

    Example:
        >>> sweep(Path("sweep.yaml"), Path("runs"), jobs=4)  # doctest: +SKIP
        0
    """
    if jobs < 1:
        raise ConfigError(f"A sweep runs at least one job at a time, got --jobs {jobs}.")
    own = [text for text in overrides if text.startswith(_OWN)]
    chosen = read_sweep(config, own)
    runs = combinations(chosen, config, out, [text for text in overrides if text not in own], scale)
    for run in runs:
        if chosen.search is not None:
            chosen.search.check(run.experiment)
    data = () if data_dir is None else ("--data-dir", str(data_dir))
    launcher = Launcher(("--accelerator", accelerator, *data), jobs, _visible_gpus(accelerator))
    if backend == "ray" and not dry:
        places = config.resolve(), out.resolve(), data_dir and data_dir.resolve()
        call = partial(sweep, *places[:2], "local", 1, False, overrides, scale, places[2], accelerator)
        _on_ray(call, jobs, chosen.ray)
    work = backend == "local" and not dry
    with launcher.stopping():
        if chosen.search is None:
            failed = _grid(runs, launcher, work)
        else:
            failed = sum(_search(Searcher(chosen.search, run, launcher), work) for run in runs)
    return 0 if dry else failed


def _grid(runs: Sequence[Run], launcher: Launcher, work: bool) -> int:
    """Run all combinations, or only list them; returns how many have not finished."""
    if work:
        with ThreadPoolExecutor(launcher.jobs) as pool:
            ended = list(pool.map(launcher.train, runs))
    else:
        ended = [(run.state, "") for run in runs]
    _show({run.folder: (run.told, state, reason) for run, (state, reason) in zip(runs, ended, strict=True)})
    return sum(state not in ("finished", "skipped", "running") for state, _ in ended)


def _search(search: Searcher, work: bool) -> bool:
    """Search around one combination, or only list its trials; says whether none has finished."""
    if work:
        search.run()
    if not search.journal.exists():
        print(f"{search.folder}: {search.chosen.trials} trials, none of them begun")
        return True
    _show(search.rows())
    if (best := search.best) is not None:
        what = f"{search.chosen.metric} {best.value:.5g} with {told(best)}"
        Console().print(f"best: {what}; {search.folder / 'best.yaml'}", soft_wrap=True, markup=False)
    return best is None


def _show(rows: Mapping[Path, tuple[str, str, str]]) -> None:
    """Print a table of run directories, each with its values, its state and a remark, and a line of counts."""
    table = Table("run", "what", "state", "remark")
    for folder, (what, state, remark) in rows.items():
        cells = [Text(text, overflow="fold") for text in (folder.name, what, state, remark)]
        cells[2].stylize(_COLOURS.get(state, ""))
        table.add_row(*cells)
    Console().print(table)
    counts = Counter(state for _, state, _ in rows.values())
    Console().print(f"{len(rows)} runs: {', '.join(f'{n} {state}' for state, n in counts.items())}", highlight=False)


def _visible_gpus(accelerator: str) -> tuple[str, ...]:
    """GPUs to hand out among runs; none where there is one at most, which they share."""
    if accelerator == "cpu":
        return ()
    import torch

    every = ",".join(map(str, range(torch.cuda.device_count())))
    found = tuple(name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",") if name.strip())
    return found if len(found) > 1 else ()


def _on_ray(call: Callable[[], int], jobs: int, options: Mapping[str, Any]) -> None:
    """Make the same call in several of Ray's workers, which share the work; those that are lost are made again."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ImportError('The ray backend needs Ray: pip install "slimbayes[ray]"') from error

    given = {"num_cpus": 1, "max_retries": 2, **options}
    ray.init(address=given.pop("address", None), log_to_driver=False)
    try:
        work = ray.remote(**given)(lambda: call())  # a plain function: Ray refuses others
        ray.get([work.remote() for _ in range(jobs)])
    finally:
        ray.shutdown()


def tune_trainable(
    config: Path, out: Path, metric: str = "validation_nll", words: tuple[str, ...] = ()
) -> Callable[[dict[str, Any]], None]:
    """A function for ray.tune.Tuner: trains a config with values at its paths, and reports a metric after each epoch.

    Args:
        out: folder of the run directories, which all machines see.
        words: further words of the `slimbayes fit` commands.

    Example:
        Tuner(tune_trainable("rank1.yaml", "runs"), param_space={"train.optimizer.lr": tune.loguniform(1e-4, 0.1)})
    """
    base, place = load(config).resolved, Path(out).resolve()

    def train(values: dict[str, Any]) -> None:
        from ray import tune

        run, seen = Run("", validate(with_values(base, values)), place), set[int]()

        def report() -> bool:
            for epoch, value in new_epochs(run.folder, metric, seen):
                tune.report({"epoch": epoch, metric: value})  # ends the run where the scheduler stops the trial
            return True

        _, reason = Launcher(words).train(run, report)
        report()
        if run.state != "finished":
            raise RuntimeError(reason)

    return train
