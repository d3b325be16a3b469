"""Searching for good values around a run with Optuna. Every trial is an ordinary run.

    out/search-<name>-<hash>/   journal.log   best.yaml   <name>-trial-<hash>/   <name>-trial-<hash>/   ...

The journal is Optuna's storage: calls on machines that see it work on one search. What a call leaves undone when it
stops or dies, the next one continues. Equal values are one run, since runs are functions of their configs.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import threading
import time
from collections import Counter
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from slimbayes.files import write_text
from slimbayes.lab.files import validate
from slimbayes.lab.launch import Launcher, Run
from slimbayes.lab.seeds import key
from slimbayes.lab.sweep_config import Search, labelled, range_of, with_values
from slimbayes.report.record import read

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import BaseTrial, FrozenTrial, Trial

_HOPELESS = 5  # failures before the first trial that finishes, after which a search is given up
_STATES = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "unfinished"}


class Searcher:
    """A search around one run: trains runs with the values that Optuna chooses, and tells it how they ended."""

    def __init__(self, chosen: Search, base: Run, launcher: Launcher) -> None:
        self.chosen, self.base, self.launcher = chosen, base, launcher
        # Another space, metric or base is another search; more trials are not.
        facts = [base.experiment.hash, chosen.metric, chosen.seed, chosen.space]
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
        self.folder = base.out / f"search-{base.folder.name.rpartition('-')[0]}-{digest}"
        self.journal, self.writing = self.folder / "journal.log", threading.Lock()

    @cached_property
    def study(self) -> Study:
        try:
            import optuna
            from optuna.storages.journal import JournalFileBackend
        except ModuleNotFoundError as error:
            raise ImportError('A search needs Optuna: pip install "slimbayes[sweep]"') from error

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.folder.mkdir(parents=True, exist_ok=True)

        class Sampler(optuna.samplers.TPESampler):
            """TPE whose values are functions of the seed and of the trials before, in any thread and call."""

            def sample_independent(self, study: Study, trial: FrozenTrial, name: str, among: BaseDistribution) -> Any:
                tpe = optuna.samplers.TPESampler(seed=key(c.seed, "trial", trial.number, name) % 2**32)
                return tpe.sample_independent(study, trial, name, among)

        c, storage = self.chosen, optuna.storages.JournalStorage(JournalFileBackend(str(self.journal)))
        median = c.pruner == "median" and c.metric.startswith("validation_")
        return optuna.create_study(
            study_name=self.folder.name, storage=storage, direction=c.aim, sampler=Sampler(), load_if_exists=True,
            pruner=optuna.pruners.MedianPruner(c.startup, c.warmup) if median else optuna.pruners.NopPruner(),
        )  # fmt: skip

    def run(self) -> None:
        """Work until there are as many trials as asked for; those that other calls are at work on are left to them."""
        todo = self._requeue()
        if todo > 0:
            jobs = min(todo, self.launcher.jobs)
            self.study.optimize(self._objective, todo, n_jobs=jobs, catch=RuntimeError, callbacks=[self._after_trial])

    def counted(self) -> list[FrozenTrial]:
        """Trials with values that have ended or are under way; not those that a call left undone."""
        known = [t for t in self.study.get_trials(deepcopy=False) if t.params.keys() == self.chosen.space.keys()]
        return [t for t in known if t.state.name != "WAITING" and (t.state.name != "FAIL" or "reason" in t.user_attrs)]

    def _requeue(self) -> int:
        """Queue trials whose call died; returns how many trials are to do."""
        from optuna.trial import TrialState

        for trial in self.counted():
            if trial.state == TrialState.RUNNING:
                with self.run_of(trial).claimed() as claim:
                    if claim is not None:  # no call is at work on it
                        self.study.tell(trial.number, state=TrialState.FAIL)
                        self.study.enqueue_trial(trial.params)
        return self.chosen.trials - len(self.counted())

    def _objective(self, trial: Trial) -> float:
        """Train a trial's run; returns its metric."""
        from optuna.exceptions import TrialPruned

        run, seen = self.run_of(trial), set[int]()

        def promising() -> bool:
            new = new_epochs(run.folder, self.chosen.metric, seen)
            for epoch, value in new:
                trial.report(value, epoch)
            return not (new and trial.should_prune())

        try:
            while (ended := self.launcher.train(run, promising))[0] == "running" and not self.launcher.stopped:
                time.sleep(1)  # for another trial of the same values
        finally:
            if self.launcher.stopped and run.state != "finished":
                self.study.enqueue_trial(trial.params)  # for the next call
        if run.state == "finished" and math.isfinite(value := value_of(run.folder, self.chosen)):
            return value
        if self.launcher.stopped:
            raise RuntimeError("stopped")
        if ended[0] == "stopped":
            raise TrialPruned
        trial.set_user_attr("reason", ended[1] or "its metric is not finite")
        raise RuntimeError("failed")

    def _after_trial(self, study: Study, trial: FrozenTrial) -> None:
        states = Counter(t.state.name for t in self.counted())
        hopeless = states["FAIL"] >= _HOPELESS and not states["COMPLETE"]
        if hopeless or states.total() >= self.chosen.trials or self.launcher.stopped:
            study.stop()
        with self.writing:
            self.write_best()

    def run_of(self, trial: BaseTrial) -> Run:
        """The run of a trial; of values that are listed Optuna sees the labels."""
        values: dict[str, Any] = {}
        for path, given in self.chosen.space.items():
            bounds = range_of(path, given)
            if bounds is None:
                values[path] = labelled(path, given)[trial.suggest_categorical(path, list(labelled(path, given)))]
            elif isinstance(bounds["low"], int) and isinstance(bounds["high"], int):
                values[path] = trial.suggest_int(path, **bounds)
            else:
                values[path] = trial.suggest_float(path, **bounds)
        experiment = validate(with_values(self.base.experiment.resolved, values), f"the trial of {told(trial)}")
        name = f"{experiment.name}-trial-{experiment.hash[:6]}"
        return Run(told(trial), experiment.model_copy(update={"name": name}), self.folder)

    @property
    def best(self) -> FrozenTrial | None:
        """The best trial that has finished."""
        return next(iter(self.study.best_trials), None)

    def write_best(self) -> None:
        """Write the config of the best trial so far."""
        if (best := self.best) is not None:
            head = f"# {self.chosen.metric} {best.value!r}, the best so far, with {told(best)}\n"
            tree = self.run_of(best).experiment.resolved
            write_text(self.folder / "best.yaml", head + yaml.safe_dump(tree, sort_keys=False))

    def rows(self) -> dict[Path, tuple[str, str, str]]:
        """All trials by their run directories: values in words, state, remark."""
        out = {}
        for trial in self.counted():
            found = f"{self.chosen.metric} {trial.value:.5g}" if trial.state.name == "COMPLETE" else ""
            remark = found or trial.user_attrs.get("reason", "")
            out[self.run_of(trial).folder] = (told(trial), _STATES[trial.state.name], remark)
        return out


def new_epochs(folder: Path, metric: str, seen: set[int]) -> list[tuple[int, float]]:
    """A metric after each epoch that a run has noted since the last call, where it is finite; adds them to `seen`."""
    with suppress(OSError, ValueError), open(folder / "metrics.csv", newline="") as handle:
        found = [(int(row["epoch"]), float(row.get(metric) or math.nan)) for row in csv.DictReader(handle)]
        new = [(epoch, value) for epoch, value in found if epoch not in seen and math.isfinite(value)]
        seen.update(epoch for epoch, _ in new)
        return new
    return []


def value_of(folder: Path, chosen: Search) -> float:
    """A finished run's metric: of the epoch whose weights were kept, or of the test rows with the most draws."""
    record = read(folder)
    role, _, score = chosen.metric.partition("_")
    if role == "test":
        scores = [e for e in record.evaluations if e.role == "test" and score in e.metrics]
        return max(scores, key=lambda e: e.draws).metrics[score] if scores else math.nan
    rows = [row for row in record.curve if chosen.metric in row]
    if record.config["train"].get("early_stop"):  # keeps the weights of the epoch with the lowest NLL
        rows = sorted(rows, key=lambda row: -row["validation_nll"])
    return rows[-1][chosen.metric] if rows else math.nan


def told(trial: BaseTrial) -> str:
    """A trial's values in words: lr=0.01235, members=4."""
    short = {path.rpartition(".")[2]: value for path, value in trial.params.items()}
    named = short if len(short) == len(trial.params) else trial.params
    return ", ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in named.items()
    )
