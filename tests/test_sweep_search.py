"""Searches: what is refused, pruning, trials that outlive the call that started them, and several calls at once."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("optuna")

from slimbayes.lab import supervise
from slimbayes.lab.axes import combinations, read_sweep
from slimbayes.lab.config_files import ConfigError, load
from slimbayes.lab.search import Searcher, study_folder
from slimbayes.lab.search_config import Search, check, distributions, value_of
from slimbayes.lab.supervise import members_of
from slimbayes.lab.sweep import sweep
from slimbayes.report.record import read

BASE = {
    "name": "try",
    "data": {"name": "digits", "train_limit": 160, "test_limit": 50, "validation": 0.2},
    "model": {"kind": "small_cnn", "width": 4},
    "method": {"kind": "Rank1", "members": 2},
    "train": {"epochs": 3, "batch": 64, "optimizer": {"kind": "AdamW", "lr": 0.01}},
}  # fmt: skip
RECORD = {
    "name": "fake", "method": "none", "data": "none", "seed": 0, "config_hash": "", "commands": [], "parameters": {"plain": 1, "total": 1},
    "cost": {"train_seconds": 1.0, "seconds_per_epoch": 1.0},
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
    (point,) = combinations(chosen, file)
    assert chosen.search is not None
    check(chosen.search, point.experiment)
    return Searcher(chosen.search, point.experiment, folder)


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
    with pytest.raises(ConfigError, match="share its journal"):
        sweep(write(tmp_path), tmp_path / "out", backend="slurm")


def test_all_combinations_are_checked_before_the_first_search(tmp_path: Path) -> None:
    file = write(tmp_path)
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"axes": {"data.validation": [0.1, 0.0]}}))
    with pytest.raises(ConfigError, match="set data.validation"):
        sweep(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_space_in_optuna_s_words() -> None:
    found = distributions(
        {
            "a": {"low": 1, "high": 8},
            "b": {"low": "1e-3", "high": 1, "log": True},
            "c": [2, 4],
            "d": {"low": 0.0, "high": 1.0, "step": 0.25},
        }
    )
    assert [type(one).__name__ for one in found.values()] == [
        "IntDistribution",
        "FloatDistribution",
        "CategoricalDistribution",
        "FloatDistribution",
    ]
    assert found["c"].choices == ("2", "4") and found["b"].log and found["d"].step == 0.25


def test_directions() -> None:
    assert Search(space={"seed": [1]}).aim == "minimize"
    assert Search(metric="validation_accuracy", space={"seed": [1]}).aim == "maximize"


def test_a_search_has_a_place_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(BASE))
    base, one = load(tmp_path / "c.yaml"), Search(space=SPACE)
    assert study_folder(one, base, tmp_path) == study_folder(
        one.model_copy(update={"trials": 99, "pruner": "none"}), base, tmp_path
    )
    others = [one.model_copy(update={"space": {"seed": [1]}}), one.model_copy(update={"metric": "validation_accuracy"})]
    assert len({study_folder(search, base, tmp_path) for search in (one, *others)}) == 3


def test_trials_are_functions_of_the_seed_and_of_the_trials_before(tmp_path: Path) -> None:
    asked = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        found = searcher(tmp_path / name)
        for number in range(3):
            # Another searcher for the third trial: a second process, or a second call.
            found = searcher(tmp_path / name) if number == 2 else found
            trial = found._new()
            asked.append(trial.params)
            found.study.tell(trial.number, float(number))
    assert asked[:3] == asked[3:] and asked[0] != asked[1]
    number = searcher(tmp_path / "a").experiment(7, {"train.optimizer.lr": 0.03, "method": "m"})
    assert number.name == "try-trial-0007" and number.train.optimizer.lr == 0.03 and number.method.kind == "MeanField"


def test_trials_of_dead_calls_are_taken_over_and_those_of_live_ones_are_not(tmp_path: Path) -> None:
    alive, later = searcher(tmp_path), searcher(tmp_path)
    with alive._at_work():
        trial = alive._new()
        trial.set_user_attr("worker", alive.me)
        assert later._left_behind() is None
    taken = later._left_behind()
    assert taken.number == trial.number and taken.params == trial.params
    half = later.study.ask()  # a call that died before it had drawn any values
    assert later._left_behind().number == trial.number
    later.study.tell(trial.number, 1.0)
    assert later._left_behind() is None and later.study.trials[half.number].state.name == "FAIL"


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


def test_a_hopeless_search_is_given_up_and_each_combination_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(supervise, "COMMAND", (sys.executable, "-c", "import sys; sys.exit('no luck today')"))
    file = write(tmp_path, trials=30)
    tree = yaml.safe_load(file.read_text()) | {"axes": {"seed": [0, 1]}}
    file.write_text(yaml.safe_dump(tree))
    assert sweep(file, tmp_path / "out", dry=True) == 0 and not (tmp_path / "out").exists()
    assert sweep(file, tmp_path / "out") == 2
    told = capsys.readouterr().out
    assert (
        told.count("5 runs: 5 failed") == 2 and "no luck today" in told and len(list((tmp_path / "out").iterdir())) == 2
    )


def command(file: Path, out: Path, *more: str) -> "subprocess.Popen[str]":
    words = ["sweep", str(file), "--out", str(out), "--accelerator", "cpu", *more]
    return subprocess.Popen(
        [sys.executable, "-m", "slimbayes.lab.command", *words],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def test_two_calls_a_kill_and_a_third_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two processes share a search of three trials; one is killed with a trial under way and the other takes it over. No trial is lost or doubled."""
    space = {"train.optimizer.lr": {"low": 1e-3, "high": 0.1, "log": True}}
    file = write(tmp_path, trials=3, pruner="none", space=space)
    first = command(file, tmp_path / "out")
    until = time.monotonic() + 90
    while not list(tmp_path.glob("out/*/*trial*/environment.json")):
        assert time.monotonic() < until and first.poll() is None, first.communicate()[0]
        time.sleep(0.05)
    children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    second = command(file, tmp_path / "out", "--jobs", "2")
    first.kill()
    told = second.communicate(timeout=150)[0]
    first.communicate()
    assert second.returncode == 0 and "3 runs: 3 finished" in told, told
    assert not any(members_of(int(pid)) for pid in children)
    (folder,) = (tmp_path / "out").iterdir()
    records = [read(path) for path in sorted(folder.glob("*trial*"))]
    assert [r.name for r in records] == [f"try-trial-{n:04d}" for n in range(3)]
    best = min(records, key=lambda r: r.curve[-1]["validation_nll"])
    assert load(folder / "best.yaml").hash == best.config_hash
    assert len(os.listdir(folder / ".workers")) <= 1  # of the one that was killed
    assert sweep(file, tmp_path / "out", accelerator="cpu") == 0  # nothing is left to do
    assert "3 runs: 3 finished" in capsys.readouterr().out


def test_a_bad_trial_is_pruned_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One good trial, then one whose learning rate of 1e-7 leaves it at chance: it is stopped long before its 60 epochs."""
    monkeypatch.setenv("COLUMNS", "200")
    base = BASE | {"train": BASE["train"] | {"epochs": 60}}  # type: ignore[operator]
    out = tmp_path / "out"
    file = write(tmp_path, base, space={"train.optimizer.lr": [0.02, "1e-7"]}, startup=1, trials=2)
    monkeypatch.setattr(Searcher, "_new", _in_turn)
    assert sweep(file, out, accelerator="cpu") == 0
    told = capsys.readouterr().out
    assert "1 finished, 1 pruned" in told
    (folder,) = out.iterdir()
    pruned = next(folder.glob("*trial-0001*"))
    assert len((pruned / "metrics.csv").read_text().splitlines()) < 61
    assert list(pruned.glob("checkpoints/step-*")) and not (pruned / "record.json").exists()


def _in_turn(self: Searcher) -> Any:
    """Ask for 0.02 first and 1e-7 next, whatever the sampler would say."""
    number = len(self.study.get_trials())
    if number == 2:
        return None
    self.study.enqueue_trial({"train.optimizer.lr": ["0.02", "1e-07"][number]})
    return self.study.ask(distributions(self.chosen.space))
