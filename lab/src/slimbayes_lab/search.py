"""Optuna and Ray Tune search over configs: their samplers, schedulers, storage and dashboards, our runs.

A trial is an ordinary run in out/<name>-<hash>: equal values are one run, and one that was stopped can be continued.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimbayes_lab.configs.files import ConfigError, load, with_values
from slimbayes_lab.report.record import read
from slimbayes_lab.runs.folder import read_curve
from slimbayes_lab.runs.process import Run, train

if TYPE_CHECKING:
    from optuna.trial import Trial

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
    run_trial = _trial_runner(config, out, metric, words)

    def objective(trial: Trial) -> float:
        from optuna.exceptions import TrialPruned

        def report(epoch: int, value: float) -> bool:
            trial.report(value, epoch)
            return not trial.should_prune()

        found = run_trial(suggest(trial), report)
        if found is None:
            raise TrialPruned
        return found

    return objective


def tune_trainable(
    config: Path | str,
    out: Path | str,
    metric: str = "validation_nll",
    words: Sequence[str] = (),
) -> Callable[[dict[str, Any]], None]:
    """A function for `ray.tune.Tuner`, whose space has paths of the config; arguments as of `optuna_objective`.

    Example:
        Tuner(tune_trainable("rank1.yaml", "runs"), param_space={"train.optimizer.lr": tune.loguniform(1e-4, 0.1)})
    """
    run_trial = _trial_runner(config, out, metric, words)

    def trainable(values: dict[str, Any]) -> None:
        from ray import tune

        def report(epoch: int, value: float) -> bool:
            tune.report(
                {"epoch": epoch, metric: value}
            )  # ends the run where the scheduler stops the trial
            return True

        run_trial(values, report)

    return trainable


def _trial_runner(
    config: Path | str, out: Path | str, metric: str, words: Sequence[str]
) -> Callable[[Values, Report], float | None]:
    """A function that trains a config with some values; returns its metric, None where a report said to stop."""
    base, place = load(config), Path(out).resolve()
    if metric not in ("validation_nll", "validation_accuracy", "validation_rmse"):
        raise ConfigError(
            f"metric must be validation_nll, validation_accuracy or validation_rmse, got {metric!r}."
        )
    if not base.data.validation:
        raise ConfigError(
            f"{metric} is of validation rows: set data.validation in {config}, to 0.1 say."
        )

    def run_trial(values: Values, report: Report) -> float | None:
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

    return run_trial


def epochs(folder: Path, metric: str) -> list[tuple[int, float]]:
    """A metric after each epoch that a run has noted, where it is finite."""
    return [
        (int(row["epoch"]), row[metric])
        for row in read_curve(folder)
        if math.isfinite(row.get(metric, math.nan))
    ]


def kept_value(folder: Path, metric: str) -> float:
    """A finished run's metric at the epoch whose weights it keeps: the last, or with early_stop that of least NLL."""
    record = read(folder)
    rows = [row for row in record.curve if metric in row]
    if record.config["train"].get("early_stop"):
        rows = sorted(rows, key=lambda row: -row["validation_nll"])
    return rows[-1][metric] if rows else math.nan
