"""Searches: what is refused, pruning, trials that outlive the call that started them, and several calls at once."""

import fcntl
import json
import math
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import forks
import pytest
import yaml

pytest.importorskip("optuna")

from optuna.trial import FixedTrial, TrialState

from slimbayes.lab import launch
from slimbayes.lab.config_files import ConfigError, load
from slimbayes.lab.launch import Launcher
from slimbayes.lab.search import Searcher, new_epochs, value_of
from slimbayes.lab.sweep import sweep
from slimbayes.lab.sweep_config import Search, combinations, read_sweep
from slimbayes.report.record import read

BASE = {
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
SPACE = {
    "train.optimizer.lr": {"low": "1e-4", "high": 0.1, "log": True},
    "method": {"r": {"kind": "Rank1"}, "m": {"kind": "MeanField"}},
}


def write(folder: Path, base: dict[str, Any] | None = None, **search: Any) -> Path:
    file = folder / "search.yaml"
    file.write_text(yaml.safe_dump({"base": base or BASE, "search": {"space": SPACE, **search}}, sort_keys=False))
    return file


def searcher(folder: Path, **search: Any) -> Searcher:
    file = write(folder, **search)
    chosen = read_sweep(file)
    (run,) = combinations(chosen, file, folder)
    assert chosen.search is not None
    chosen.search.check(run.experiment)
    return Searcher(chosen.search, run, Launcher())


@pytest.mark.parametrize(
    ("search", "words"),
    [
        ({"metric": "test_nll"}, "would choose values by the test rows"),
        ({"metric": "valid_nll"}, "unknown metric 'valid_nll'"),
        ({"metric": "validation_ece"}, "scored by nll"),
        ({"metric": "validation_accuracy", "direction": "minimize"}, "better the other way"),
        ({"trials": 0}, "search.trials"),
        ({"trails": 3}, "did you mean 'trials'"),
        ({"space": {}}, "search.space"),
        ({"space": {"train.optimizer.lr": {"low": 0.1, "high": 0.01}}}, "low < high"),
        ({"space": {"train.optimizer.lr": {"low": 0, "high": 1.0, "log": True}}}, "0 < low"),
        ({"space": {"train.optimizer.lr": {"low": 0.1}}}, "needs low and high"),
        ({"space": {"train.optimizer.lr": {"low": "much", "high": 1}}}, "must be numbers, got 'much'"),
        (
            {"space": {"train.optimizer.lr": {"low": -0.1, "high": 0.1}}},
            "search.space.train.optimizer.lr = -0.1 is not a valid experiment",
        ),
        ({"space": {"train.optimiser.lr": [0.1]}}, "did you mean 'optimizer'"),
        ({"space": {"method": [{"kind": "Rang1"}]}}, "did you mean 'Rank1'"),
    ],
)
def test_wrong_searches_are_refused_before_anything_runs(tmp_path: Path, search: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sweep(write(tmp_path, **search), tmp_path / "out")
    assert words in str(caught.value) and not (tmp_path / "out").exists()


def test_validation_rows_are_needed_and_test_rows_must_be_allowed(tmp_path: Path) -> None:
    plain = BASE | {"data": {"name": "digits"}}
    with pytest.raises(ConfigError, match="set data.validation in the base"):
        sweep(write(tmp_path, plain), tmp_path / "out")
    sweep(write(tmp_path, plain, metric="test_nll", allow_test=True), tmp_path / "out", dry=True)


def test_all_combinations_are_checked_before_the_first_search(tmp_path: Path) -> None:
    file = write(tmp_path)
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"axes": {"data.validation": [0.1, 0.0]}}))
    with pytest.raises(ConfigError, match="set data.validation"):
        sweep(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_space_in_optuna_s_words(tmp_path: Path) -> None:
    space = {
        "train.epochs": {"low": 1, "high": 8},
        "train.optimizer.lr": {"low": "1e-3", "high": 1, "log": True},
        "method.members": [2, 4],
        "train.posterior_lr": {"low": 0.0, "high": 1.0, "step": 0.25},
    }
    study = searcher(tmp_path, space=space | {"train.posterior_lr": {"low": 0.5, "high": 1.0, "step": 0.25}})
    trial = study.study.ask()
    found = study.run_of(trial).experiment
    kinds = {path: type(one).__name__ for path, one in trial.distributions.items()}
    assert list(kinds.values()) == [
        "IntDistribution",
        "FloatDistribution",
        "CategoricalDistribution",
        "FloatDistribution",
    ]
    assert trial.distributions["method.members"].choices == ("2", "4")
    assert trial.distributions["train.optimizer.lr"].log and trial.distributions["train.posterior_lr"].step == 0.25
    assert found.method.members in (2, 4) and found.train.epochs == trial.params["train.epochs"]


def test_directions() -> None:
    assert Search(space={"seed": [1]}).aim == "minimize"
    assert Search(metric="validation_accuracy", space={"seed": [1]}).aim == "maximize"


def test_a_search_has_a_place_of_its_own(tmp_path: Path) -> None:
    one = searcher(tmp_path).folder
    assert searcher(tmp_path, trials=99, pruner="none").folder == one
    others = [searcher(tmp_path, space={"seed": [1]}), searcher(tmp_path, metric="validation_accuracy")]
    assert len({one, *(other.folder for other in others)}) == 3


def test_the_run_of_a_trial_is_named_by_its_values(tmp_path: Path) -> None:
    search = searcher(tmp_path)
    one = search.run_of(FixedTrial({"train.optimizer.lr": 0.03, "method": "m"}))
    assert one.experiment.train.optimizer.lr == 0.03 and one.experiment.method.kind == "MeanField"
    assert one.told == "lr=0.03, method=m" and one.experiment.name.startswith("try-trial-")
    same = search.run_of(FixedTrial({"method": "m", "train.optimizer.lr": 0.03}))
    other = search.run_of(FixedTrial({"train.optimizer.lr": 0.031, "method": "m"}))
    assert same.folder == one.folder and other.experiment.name != one.experiment.name


# --- with a stand-in for training: a run's metric is ten times its learning rate ---


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Trials end at once; returns the learning rates that were tried."""
    tried: list[float] = []

    def train(self: Launcher, run: Any, promising: Any = None) -> tuple[str, str]:
        if run.state == "finished":
            return "skipped", ""
        tried.append(run.experiment.train.optimizer.lr)
        run.folder.mkdir(parents=True, exist_ok=True)
        curve = [{"epoch": 1, "validation_nll": 10 * tried[-1]}]
        found = RECORD | {"curve": curve, "config": {"train": {}}, "config_hash": run.experiment.hash}
        (run.folder / "record.json").write_text(json.dumps(found))
        return "finished", ""

    monkeypatch.setattr(Launcher, "train", train)
    return tried


def test_a_search_can_be_repeated_and_continued(tmp_path: Path, quick: list[float]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        searcher(tmp_path / name, trials=4).run()
    assert quick[:4] == quick[4:] and len(set(quick)) == 4
    more = searcher(tmp_path / "a", trials=6)
    more.run()
    assert len(set(quick[:4] + quick[8:])) == 6, "a second call does not repeat the values of the first"
    (tmp_path / "c").mkdir()
    searcher(tmp_path / "c", trials=6).run()
    assert quick[10:] == quick[:4] + quick[8:10], "nor does it matter where the first one ended"
    best = more.best
    assert best is not None and best.value == pytest.approx(10 * min(quick[10:]))
    assert load(more.folder / "best.yaml").train.optimizer.lr == best.params["train.optimizer.lr"]
    searcher(tmp_path / "a", trials=6).run()
    assert len(quick) == 16


def test_values_that_are_wrong_together_end_the_search(tmp_path: Path, quick: list[float]) -> None:
    space = {"data.validation": [0.0], "train.early_stop": [{"patience": 1}]}
    with pytest.raises(ConfigError, match=r"the trial of validation=0.0.*\n.*early_stop watches validation rows"):
        searcher(tmp_path, space=space).run()
    assert not quick


def test_a_metric_that_is_not_finite_is_a_failure(tmp_path: Path, quick: list[float]) -> None:
    search = searcher(tmp_path, trials=1, metric="validation_accuracy")
    search.run()
    assert [row[1:] for row in search.rows().values()] == [("failed", "its metric is not finite")] and not search.best


def test_equal_values_are_trained_once(tmp_path: Path, quick: list[float]) -> None:
    search = searcher(tmp_path, trials=12, space={"train.optimizer.lr": [0.1, 0.01]})
    search.run()
    assert sorted(quick) == [0.01, 0.1] and len(search.counted()) == 12 and len(search.rows()) == 2


def test_what_a_dead_call_left_is_taken_up_and_what_a_live_one_does_is_not(tmp_path: Path, quick: list[float]) -> None:
    search = searcher(tmp_path, trials=3)
    trial = search.study.ask()
    run = search.run_of(trial)
    half = search.study.ask()  # a call that died before it had drawn any values
    with run.claimed():
        assert searcher(tmp_path, trials=3)._requeue() == 2
    later = searcher(tmp_path, trials=3)
    later.run()
    assert quick[0] == trial.params["train.optimizer.lr"] and len(quick) == 3
    assert [row[1] for row in later.rows().values()] == ["finished"] * 3
    assert later.study.trials[half.number].state == TrialState.RUNNING, "it may be asking right now"


def test_a_stopped_search_goes_on_with_the_same_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def stopped(self: Launcher, run: Any, promising: Any = None) -> tuple[str, str]:
        asked.append(run.experiment.train.optimizer.lr)
        self.stopped = True
        raise KeyboardInterrupt

    monkeypatch.setattr(Launcher, "train", stopped)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            searcher(tmp_path, trials=3).run()
    assert asked[0] == asked[1] and not searcher(tmp_path, trials=3).counted()


def test_epochs_are_told_once(tmp_path: Path) -> None:
    seen: set[int] = set()
    assert new_epochs(tmp_path, "validation_nll", seen) == []
    (tmp_path / "metrics.csv").write_text("epoch,validation_nll\n1,0.5\n2,nan\n")
    assert new_epochs(tmp_path, "validation_nll", seen) == [(1, 0.5)]
    (tmp_path / "metrics.csv").write_text("epoch,validation_nll\n1,0.5\n2,nan\n3,0.25\n")
    assert new_epochs(tmp_path, "validation_nll", seen) == [(3, 0.25)]


def test_the_value_is_of_the_weights_that_were_kept(tmp_path: Path) -> None:
    curve = [
        {"epoch": e, "validation_nll": nll, "validation_accuracy": acc}
        for e, nll, acc in ((1, 0.9, 0.1), (2, 0.5, 0.2), (3, 0.7, 0.3))
    ]
    for early, nll, accuracy in ((None, 0.7, 0.3), ({"patience": 1}, 0.5, 0.2)):
        (tmp_path / "record.json").write_text(
            json.dumps(RECORD | {"curve": curve, "config": {"train": {"early_stop": early}}})
        )
        assert value_of(tmp_path, Search(space=SPACE)) == nll
        assert value_of(tmp_path, Search(metric="validation_accuracy", space=SPACE)) == accuracy
    assert math.isnan(value_of(tmp_path, Search(metric="validation_rmse", space=SPACE)))


@pytest.mark.slow
def test_a_hopeless_search_is_given_up_and_each_combination_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(launch, "COMMAND", (sys.executable, "-c", "import sys; sys.exit('no luck today')"))
    file = write(tmp_path, trials=30)
    tree = yaml.safe_load(file.read_text()) | {"axes": {"seed": [0, 1]}}
    file.write_text(yaml.safe_dump(tree))
    assert sweep(file, tmp_path / "out", dry=True) == 0 and not (tmp_path / "out").exists()
    assert sweep(file, tmp_path / "out") == 2
    told = capsys.readouterr().out
    assert (
        told.count("5 runs: 5 failed") == 2 and "no luck today" in told and len(list((tmp_path / "out").iterdir())) == 2
    )


@pytest.mark.slow
def test_a_killed_call_and_a_second_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A call is killed with a trial under way; the next one continues it. No trial is lost or doubled."""
    space = {"train.optimizer.lr": {"low": 1e-3, "high": 0.1, "log": True}}
    file = write(tmp_path, trials=2, pruner="none", space=space)
    log = tmp_path / "log"
    first = forks.start(partial(sweep, accelerator="cpu"), file, tmp_path / "out", log=log)
    until = time.monotonic() + 90
    while not list(tmp_path.glob("out/*/*trial*/environment.json")):
        assert time.monotonic() < until and first.is_alive(), log.read_text()
        time.sleep(0.05)
    (begun,) = tmp_path.glob("out/*/*trial*")
    first.kill()
    first.join()
    while (begun / ".claim").exists() and not free(begun):
        time.sleep(0.1)
    assert sweep(file, tmp_path / "out", jobs=2, accelerator="cpu") == 0
    assert "2 runs: 2 finished" in capsys.readouterr().out
    (folder,) = (tmp_path / "out").iterdir()
    records = [read(path) for path in folder.glob("*trial*")]
    assert len(records) == 2 and read(begun).curve
    best = min(records, key=lambda r: r.curve[-1]["validation_nll"])
    assert load(folder / "best.yaml").hash == best.config_hash
    assert sweep(file, tmp_path / "out", accelerator="cpu") == 0  # nothing is left to do
    assert "2 runs: 2 finished" in capsys.readouterr().out


def free(folder: Path) -> bool:
    with open(folder / ".claim", "a") as claim:
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@pytest.mark.slow
def test_a_bad_trial_is_pruned_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One good trial, then one whose learning rate of 1e-7 leaves it at chance: it is stopped before its 60 epochs."""
    monkeypatch.setenv("COLUMNS", "200")
    base = BASE | {"train": BASE["train"] | {"epochs": 60}}  # type: ignore[operator]
    chosen = {"space": {"train.optimizer.lr": [0.02, "1e-7"]}, "startup": 1, "trials": 2}
    file = write(tmp_path, base, **chosen)
    read_file = read_sweep(file)
    (run,) = combinations(read_file, file, tmp_path / "out")
    assert read_file.search is not None
    queue = Searcher(read_file.search, run, Launcher()).study
    for label in ("0.02", "1e-07"):
        queue.enqueue_trial({"train.optimizer.lr": label})
    assert sweep(file, tmp_path / "out", accelerator="cpu") == 0
    assert "1 finished, 1 pruned" in capsys.readouterr().out
    (folder,) = (tmp_path / "out").iterdir()
    (pruned,) = [path for path in folder.glob("*trial*") if not (path / "record.json").exists()]
    assert len((pruned / "metrics.csv").read_text().splitlines()) < 61 and list(pruned.glob("checkpoints/step-*"))
