"""Hyper-parameter search with Optuna. Every trial is an ordinary run: a directory, a log, and a record when it has finished.

    out/search-<name>-<hash>/   journal.log   best.yaml   <name>-trial-0000-<hash>/   <name>-trial-0001-<hash>/   ...

The journal is a file, so several calls, on machines that share it, work on one search at once. A call that dies leaves its trials to the next one, which
continues them from their checkpoints. What a trial tries is a function of the search's seed and of the trials before it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from slimbayes.files import write_text
from slimbayes.lab.backends import Job, Pool, Result, job_of, prepare
from slimbayes.lab.board import Board, rows_of, show
from slimbayes.lab.config import Experiment
from slimbayes.lab.config_files import merged, validate
from slimbayes.lab.labels import at, labelled
from slimbayes.lab.run_folder import default_folder
from slimbayes.lab.search_config import Search, distributions, is_range, value_of
from slimbayes.lab.seeds import key

_HOPELESS = 5  # failures before the first trial that finishes, after which a search is given up


def search(
    chosen: Search,
    base: Experiment,
    out: Path,
    jobs: int = 1,
    dry: bool = False,
    words: Sequence[str] = (),
    gpus: tuple[str, ...] = (),
) -> int:
    """Search for good values of an experiment's fields (`check` them first); returns 1 if no trial has finished, else 0."""
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise ImportError('A search needs Optuna: pip install "slimbayes[sweep]"') from error

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder = study_folder(chosen, base, out)
    if dry and not (folder / "journal.log").exists():
        print(f"{folder}: {chosen.trials} trials, none of them begun")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    found = Searcher(chosen, base, folder, tuple(words), gpus)
    if not dry:
        found.run(jobs)
    found.show()
    return 0 if dry or found.best() is not None else 1


def study_folder(chosen: Search, base: Experiment, out: Path) -> Path:
    """Where a search lives: another space, metric or base is another search; more trials are not."""
    facts = [base.hash, chosen.metric, chosen.seed, chosen.space]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
    return out / f"search-{default_folder(base).name.rpartition('-')[0]}-{digest}"


@dataclass
class Searcher:
    """A search under way: asks for trials, runs them, prunes them, and notes how they ended."""

    chosen: Search
    base: Experiment
    folder: Path
    words: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    me: str = field(default_factory=lambda: uuid.uuid4().hex)
    trials: dict[Job, Any] = field(default_factory=dict)  # under way here
    reported: dict[Job, int] = field(default_factory=dict)  # the last epoch that Optuna knows of
    pruned: set[Job] = field(default_factory=set)

    def __post_init__(self) -> None:
        import optuna
        from optuna.storages.journal import JournalFileBackend

        c = self.chosen
        median = c.pruner == "median" and c.metric.startswith("validation_")
        pruner: Any = optuna.pruners.MedianPruner(c.startup, c.warmup) if median else optuna.pruners.NopPruner()
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(self.folder / "journal.log")))
        self.study: Any = optuna.create_study(
            study_name=self.folder.name, storage=storage, direction=c.aim, pruner=pruner, load_if_exists=True
        )

    def run(self, jobs: int) -> None:
        """Work until there are as many trials as asked for. Trials of other calls that still run are left to them."""
        with self._at_work(), Board({}) as board, Pool(jobs, gpus=self.gpus, tell=board.tell) as pool:
            open_ = True
            while open_ or pool.running:
                while pool.free and (open_ := self._next(pool, board)):
                    pass
                for result in pool.ended():
                    self._note(result, board)
                self._prune(pool)
                time.sleep(0.1)

    # --- trials ---

    def _next(self, pool: Pool, board: Board) -> bool:
        """Start another trial: one that was left behind, or a new one. False when there is none to start."""
        with _locked(self.folder / ".lock"):
            trial = self._left_behind() or self._new()
            if trial is None:
                return False
            trial.set_user_attr("worker", self.me)
        if (twin := self._twin(trial)) is not None:
            self.study.tell(trial.number, twin.value)
            return True
        experiment = self.experiment(trial.number, trial.params)
        job = job_of(experiment, self.folder, self.words)
        prepare(job, experiment)
        before = self.study.get_trials(deepcopy=False)[trial.number].intermediate_values
        self.trials[job], self.reported[job] = trial, max(before, default=0)
        board.add(job, _told(trial.params), experiment.train.epochs)
        pool.add(job)
        return True

    def _new(self) -> Any:
        import optuna

        known = self.study.get_trials(deepcopy=False)
        states = Counter(t.state.name for t in known)
        if len(known) >= self.chosen.trials or (states["FAIL"] >= _HOPELESS and not states["COMPLETE"]):
            return None
        self.study.sampler = optuna.samplers.TPESampler(seed=key(self.chosen.seed, "trial", len(known)) % 2**32)
        return self.study.ask(distributions(self.chosen.space))

    def _left_behind(self) -> Any:
        """A trial whose call has died: it goes on here."""
        import optuna

        for trial in self.study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
            worker = trial.user_attrs.get("worker", "")
            if worker == self.me or self._alive(worker):
                continue
            if trial.params.keys() == self.chosen.space.keys():
                return optuna.trial.Trial(self.study, trial._trial_id)
            self.study.tell(trial.number, state=optuna.trial.TrialState.FAIL)  # died while it was being asked for
        return None

    def _twin(self, trial: Any) -> Any:
        """A finished trial of the same values: runs are functions of their configs, so it would end alike."""
        same = [
            t for t in self.study.get_trials(deepcopy=False) if t.state.name == "COMPLETE" and t.params == trial.params
        ]
        return same[0] if same else None

    def experiment(self, number: int, params: Mapping[str, Any]) -> Experiment:
        """The experiment of a trial."""
        tree = self.base.resolved
        for path, value in params.items():
            given = self.chosen.space[path]
            tree = merged(tree, at(path, value if is_range(path, given) else labelled(path, given)[value]))
        return validate(tree | {"name": f"{self.base.name}-trial-{number:04d}"}, f"trial {number} ({_told(params)})")

    def _prune(self, pool: Pool) -> None:
        if not self.chosen.metric.startswith("validation_"):
            return
        for job, trial in self.trials.items():
            for row in rows_of(job.folder):
                epoch, value = int(row["epoch"]), row.get(self.chosen.metric, math.nan)
                if epoch > self.reported[job] and math.isfinite(value) and job not in self.pruned:
                    trial.report(value, epoch)
                    self.reported[job] = epoch
                    if trial.should_prune():
                        self.pruned.add(job)
                        pool.stop(job)

    def _note(self, result: Result, board: Board) -> None:
        """Tell Optuna how a trial ended."""
        from optuna.trial import TrialState

        trial = self.trials.pop(result.job)
        if result.state == "finished":
            value = value_of(result.job.folder, self.chosen)
            self.study.tell(
                trial.number,
                value if math.isfinite(value) else None,
                TrialState.COMPLETE if math.isfinite(value) else TrialState.FAIL,
            )
            self._write_best()
        elif result.job in self.pruned:
            self.study.tell(trial.number, state=TrialState.PRUNED)
            board.tell(result.job, "pruned")
        else:
            trial.set_user_attr("reason", f"{result.reason} ({result.job.log})")
            self.study.tell(trial.number, state=TrialState.FAIL)

    # --- what is left behind ---

    def best(self) -> Any:
        """The best trial that has finished, or None."""
        done = [t for t in self.study.get_trials(deepcopy=False) if t.state.name == "COMPLETE"]
        return (min if self.chosen.aim == "minimize" else max)(done, key=lambda t: t.value, default=None)

    def _write_best(self) -> None:
        best = self.best()
        experiment = self.experiment(best.number, best.params)
        head = f"# {self.chosen.metric} {best.value!r}, the best so far, with {_told(best.params)}\n"
        write_text(self.folder / "best.yaml", head + yaml.safe_dump(experiment.resolved, sort_keys=False))

    def show(self) -> None:
        """Print all trials, and where the best config is."""
        from rich.console import Console

        rows = {}
        for t in self.study.get_trials(deepcopy=False):
            state = {
                "COMPLETE": "finished",
                "PRUNED": "pruned",
                "FAIL": "failed",
                "RUNNING": "unfinished",
                "WAITING": "new",
            }[t.state.name]
            remark = (
                f"{self.chosen.metric} {t.value:.5g}"
                if t.value is not None and state == "finished"
                else t.user_attrs.get("reason", "")
            )
            if t.params.keys() == self.chosen.space.keys():
                rows[job_of(self.experiment(t.number, t.params), self.folder)] = (_told(t.params), state, remark)
        show(rows)
        best = self.best()
        if best is not None:
            Console().print(
                f"best: {self.chosen.metric} {best.value:.5g} with {_told(best.params)}; {self.folder / 'best.yaml'}",
                soft_wrap=True,
                markup=False,
            )

    # --- several calls at once ---

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Hold a lock for as long as this call lives: others take over its trials when it is free."""
        file = self.folder / ".workers" / self.me
        file.parent.mkdir(exist_ok=True)
        with open(file, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
            file.unlink(missing_ok=True)

    def _alive(self, worker: str) -> bool:
        try:
            with open(self.folder / ".workers" / worker) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        except OSError as error:  # the lock is held, or there is none
            return isinstance(error, BlockingIOError)


def _told(params: Mapping[str, Any]) -> str:
    short = {path.rpartition(".")[2]: value for path, value in params.items()}
    named = short if len(short) == len(params) else params
    return ", ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in named.items()
    )


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with open(file, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
