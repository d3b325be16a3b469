"""Searches: what Optuna and Ray Tune are told, and trials that are ordinary runs."""

import importlib
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
import pytest
import yaml
from slimbayes_lab import search
from slimbayes_lab.configs.files import ConfigError
from slimbayes_lab.runs import process
from slimbayes_lab.search import (
    Run,
    epochs,
    kept_value,
    optuna_objective,
    tune_trainable,
)

optuna = pytest.importorskip("optuna")

BASE: dict[str, Any] = {
    "name": "try",
    "data": {"name": "digits", "train_limit": 160, "test_limit": 50, "validation": 0.2},
    "model": {"kind": "small_cnn", "width": 4},
    "method": {"kind": "Rank1", "members": 2},
    "train": {"epochs": 3, "batch": 64, "optimizer": {"kind": "AdamW", "lr": 0.01}},
}  # fmt: skip
RECORD = {
    "name": "fake", "method": "none", "data": "none", "seed": 0, "config_hash": "", "commands": [],
    "parameters": {"plain": 1, "total": 1}, "cost": {"train_seconds": 1.0, "seconds_per_epoch": 1.0},
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(BASE))
    return file


def rates(trial: Any) -> dict[str, Any]:
    return {"train.optimizer.lr": trial.suggest_float("lr", 1e-4, 0.1, log=True)}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Runs end at once, their metric at each epoch ten times their rate; returns the rates that were tried."""
    tried: list[float] = []

    def train(run: Run, words: Any, wanted: Callable[[], bool]) -> tuple[str, str]:
        if run.state == "finished":
            return "skipped", ""
        tried.append(run.experiment.train.optimizer.lr)
        run.folder.mkdir(parents=True, exist_ok=True)
        curve = [{"epoch": epoch, "validation_nll": 10 * tried[-1]} for epoch in (1, 2)]
        for so_far in (1, 2):
            lines = [
                f"{row['epoch']},{row['validation_nll']}" for row in curve[:so_far]
            ]
            (run.folder / "metrics.csv").write_text(
                "\n".join(["epoch,validation_nll", *lines]) + "\n"
            )
            if (
                so_far == 1 and not wanted()
            ):  # nobody looks between the last epoch and the end
                return "stopped", "was asked to stop"
        found = RECORD | {
            "curve": curve,
            "config": {"train": {}},
            "config_hash": run.experiment.hash,
        }
        (run.folder / "record.json").write_text(json.dumps(found))
        return "finished", ""

    monkeypatch.setattr(search, "train", train)
    return tried


def test_wrong_searches_are_refused(tmp_path: Path, config: Path) -> None:
    with pytest.raises(
        ConfigError, match="metric must be validation_nll, .* got 'test_nll'"
    ):
        optuna_objective(config, tmp_path, rates, "test_nll")
    config.write_text(yaml.safe_dump(BASE | {"data": {"name": "digits"}}))
    with pytest.raises(
        ConfigError, match="set data.validation in .*config.yaml, to 0.1 say"
    ):
        tune_trainable(config, tmp_path)


@pytest.mark.slow
def test_an_optuna_study(tmp_path: Path, config: Path, quick: list[float]) -> None:
    study = optuna.create_study(
        storage=f"sqlite:///{tmp_path}/search.db",
        sampler=optuna.samplers.RandomSampler(0),
    )
    study.optimize(optuna_objective(config, tmp_path / "runs", rates), n_trials=4)
    assert study.best_value == pytest.approx(10 * min(quick)) and study.best_params[
        "lr"
    ] == min(quick)
    assert [list(trial.intermediate_values) for trial in study.trials] == [[1, 2]] * 4
    assert len(list((tmp_path / "runs").iterdir())) == 4
    study.enqueue_trial(study.trials[0].params)
    study.optimize(optuna_objective(config, tmp_path / "runs", rates), n_trials=1)
    assert len(quick) == 4 and study.trials[-1].value == study.trials[0].value, (
        "equal values are trained once"
    )


def test_a_pruned_trial(tmp_path: Path, config: Path, quick: list[float]) -> None:
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=0.5))
    for lr in (0.01, 0.09):
        study.enqueue_trial({"lr": lr})
    study.optimize(optuna_objective(config, tmp_path / "runs", rates), n_trials=2)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED"]
    assert list(study.trials[1].intermediate_values) == [1]


def test_values_that_are_wrong_end_the_search_and_failures_need_not(
    tmp_path: Path, config: Path, quick: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    study = optuna.create_study()
    wrong = optuna_objective(
        config, tmp_path, lambda trial: {"train.optimiser.lr": 1.0}
    )
    with pytest.raises(
        ConfigError,
        match="train.optimiser.lr=1.0 is not a valid experiment:\n.*did you mean",
    ):
        study.optimize(wrong, n_trials=1)
    study.optimize(
        optuna_objective(config, tmp_path, rates, "validation_accuracy"),
        n_trials=1,
        catch=RuntimeError,
    )
    monkeypatch.setattr(
        search, "train", lambda *given, **more: ("failed", "no luck today")
    )
    with pytest.raises(RuntimeError, match="no luck today"):
        study.optimize(optuna_objective(config, tmp_path, rates), n_trials=1)
    assert [trial.state.name for trial in study.trials] == ["FAIL"] * 3


def test_a_trainable_for_ray_tune_reports_epochs(
    tmp_path: Path, config: Path, quick: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "fakes"))
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    ray = importlib.import_module("ray")  # tests/fakes/ray.py
    tune_trainable(config, tmp_path / "runs")({"seed": 3, "train.optimizer.lr": 0.25})
    monkeypatch.delitem(sys.modules, "ray")
    assert ray.tune.reported == [
        {"epoch": 1, "validation_nll": 2.5},
        {"epoch": 2, "validation_nll": 2.5},
    ]
    (folder,) = (tmp_path / "runs").iterdir()
    assert quick == [0.25] and folder.name.startswith("try-")


def test_epochs_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    assert epochs(tmp_path, "validation_nll") == []
    (tmp_path / "metrics.csv").write_text(
        "epoch,validation_nll\n1,0.5\n2,nan\n3,0.25\n"
    )
    assert epochs(tmp_path, "validation_nll") == [(1, 0.5), (3, 0.25)]


def test_the_value_is_of_the_weights_that_were_kept(tmp_path: Path) -> None:
    curve = [
        {"epoch": e, "validation_nll": nll, "validation_accuracy": acc}
        for e, nll, acc in ((1, 0.9, 0.1), (2, 0.5, 0.2), (3, 0.7, 0.3))
    ]
    for early, nll, accuracy in ((None, 0.7, 0.3), ({"patience": 1}, 0.5, 0.2)):
        (tmp_path / "record.json").write_text(
            json.dumps(
                RECORD | {"curve": curve, "config": {"train": {"early_stop": early}}}
            )
        )
        assert kept_value(tmp_path, "validation_nll") == nll
        assert kept_value(tmp_path, "validation_accuracy") == accuracy
    assert math.isnan(kept_value(tmp_path, "validation_rmse"))


@pytest.mark.slow
def test_a_real_trial_is_pruned_and_leaves_a_checkpoint(
    tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rate of 1e-7 leaves it at chance: it is stopped, for its million epochs would take hours."""
    monkeypatch.setattr(
        process,
        "subprocess",
        SimpleNamespace(**vars(subprocess) | {"Popen": forks.Popen}),
    )
    config.write_text(
        yaml.safe_dump(BASE | {"train": BASE["train"] | {"epochs": 1_000_000}})
    )
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=1.0))

    def space(trial):
        return {"train.optimizer.lr": trial.suggest_categorical("lr", [1e-7])}

    study.optimize(
        optuna_objective(
            config, tmp_path / "runs", space, words=["--accelerator", "cpu"]
        ),
        n_trials=1,
    )
    assert [trial.state.name for trial in study.trials] == ["PRUNED"]
    (pruned,) = (tmp_path / "runs").iterdir()
    assert list(pruned.glob("checkpoints/step-*"))
