"""Sweeps: what a file stands for, what is refused before anything runs, and runs that survive kills and interrupts."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from slimbayes.lab import launch
from slimbayes.lab.command import app
from slimbayes.lab.config_files import ConfigError, load, validate
from slimbayes.lab.launch import Launcher, Run
from slimbayes.lab.sweep import _visible_gpus, sweep, tune_trainable
from slimbayes.lab.sweep_config import combinations, labelled, read_sweep
from slimbayes.report.record import read

FAKE = (sys.executable, str(Path(__file__).parent / "fakes" / "fit.py"))
BASE = {
    "name": "try",
    "data": {"name": "digits", "train_limit": 128, "test_limit": 50},
    "model": {"kind": "small_cnn", "width": 4},
    "method": {"kind": "Rank1", "members": 2},
    "train": {"epochs": 2, "batch": 64, "optimizer": {"kind": "AdamW", "lr": 0.01}},
    "small": {"train": {"epochs": 1}},
}  # fmt: skip


def write(folder: Path, **tree: Any) -> Path:
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump({"base": BASE, **tree}, sort_keys=False))
    return file


def points(folder: Path, overrides: tuple[str, ...] = (), scale: str = "full", **tree: Any) -> list[Any]:
    file = write(folder, **tree)
    return combinations(read_sweep(file), file, folder / "out", overrides, scale)


# --- the file ---


def test_all_combinations_in_order(tmp_path: Path) -> None:
    axes = {
        "seed": [0, 1],
        "method": [{"kind": "Rank1", "members": 3}, {"kind": "Deterministic"}],
        "train.optimizer.lr": [0.1, 0.01],
    }
    found = points(tmp_path, axes=axes)
    assert [(p.experiment.seed, p.experiment.method.kind, p.experiment.train.optimizer.lr) for p in found] == [
        (s, m, lr) for s in (0, 1) for m in ("Rank1", "Deterministic") for lr in (0.1, 0.01)
    ]
    assert found[0].experiment.method.members == 3
    assert {p.experiment.name for p in found} == {
        f"try-{m}-lr-{lr}" for m in ("Rank1", "Deterministic") for lr in ("0.1", "0.01")
    }
    assert len({p.experiment.hash for p in found}) == 8


def test_a_sweep_of_one_value_is_the_run_itself(tmp_path: Path) -> None:
    """The same config by `fit` and by `sweep` is one run, in one directory."""
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE))
    file = tmp_path / "sweep.yaml"
    file.write_text("base: base.yaml\naxes: {seed: [3]}\n")
    (point,) = combinations(read_sweep(file), file, tmp_path)
    assert point.experiment.hash == load(tmp_path / "base.yaml", ["seed=3"]).hash


def test_a_mapping_with_the_base_s_kind_is_laid_over_it_and_another_kind_replaces_it(tmp_path: Path) -> None:
    found = points(tmp_path, axes={"method": {"few": {"draws": "member"}, "other": {"kind": "MeanField"}}})
    assert found[0].experiment.method.members == 2 and found[1].experiment.method.kind == "MeanField"
    assert [p.experiment.name for p in found] == ["try-few", "try-other"]


def test_an_axis_over_the_whole_config(tmp_path: Path) -> None:
    axes = {".": {"wide": {"model": {"width": 8}, "train": {"epochs": 3}}, "narrow": {"model": {"width": 2}}}}
    found = points(tmp_path, axes=axes)
    assert [(p.experiment.model.width, p.experiment.train.epochs) for p in found] == [(8, 3), (2, 2)]


def test_equal_configs_run_once(tmp_path: Path) -> None:
    assert len(points(tmp_path, axes={"train.optimizer.lr": [0.1, "1e-1", 0.10, 0.2]})) == 2
    assert len(points(tmp_path, axes={"seed": [1, 1]})) == 1


def test_close_values_are_not_equal(tmp_path: Path) -> None:
    assert len(points(tmp_path, axes={"train.optimizer.lr": [0.12345678, 0.12345679]})) == 2


def test_nested_mappings_get_labels_of_their_own() -> None:
    priors = [{"kind": "Rank1", "prior": {"kind": "Normal", "scale": s}} for s in (0.1, 0.2)]
    assert len(labelled("method", priors)) == 2


def test_names(tmp_path: Path) -> None:
    axes = {"seed": [0, 1], "method": {"a": {"kind": "Rank1"}, "b": {"kind": "MeanField"}}, "train.optimizer.lr": [0.1]}
    found = points(tmp_path, axes=axes, name="{method}-{lr}-{train.optimizer.lr} of {name}")
    assert [p.experiment.name for p in found[:2]] == ["a-0.1-0.1 of try", "b-0.1-0.1 of try"]
    assert [p.experiment.name for p in points(tmp_path, axes={"data.name": ["digits"], "seed": [0, 1]})] == [
        "try",
        "try",
    ]


def test_name_stands_for_the_base_s_name_beside_an_axis_of_data_names(tmp_path: Path) -> None:
    found = points(tmp_path, axes={"data.name": ["digits", "mnist"]}, name="{name} on {data.name}")
    assert [p.experiment.name for p in found] == ["try on digits", "try on mnist"]


def test_names_that_reports_would_mix_up_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"Two runs would be called 'same' with seed 0: train.optimizer.lr=0.1, and train.optimizer.lr=0.2",
    ):
        points(tmp_path, axes={"train.optimizer.lr": [0.1, 0.2]}, name="same")
    with pytest.raises(ConfigError, match=r"\{metod\} is no axis; did you mean 'method'"):
        points(tmp_path, axes={"method": {"a": {"kind": "Rank1"}}}, name="{metod}")


def test_a_name_cannot_reach_into_objects(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no axis"):
        points(tmp_path, axes={"seed": [0]}, name="{seed.__class__.__mro__}")


def test_every_fault_is_told_with_its_axis_value(tmp_path: Path) -> None:
    axes = {
        "seed": [0, 1],
        "method": {"good": {"kind": "Rank1"}, "bad": {"kind": "Rang1"}},
        "train.optimizer.lr": [0.1, -1],
    }
    with pytest.raises(ConfigError) as caught:
        points(tmp_path, axes=axes)
    told = str(caught.value)
    assert "nothing was run" in told
    assert (
        "seed=0, method=good, train.optimizer.lr=-1 and 1 more:" in told
        and "train.optimizer.lr: Input should be greater than 0, got -1" in told
    )
    assert "method=bad" in told and "did you mean 'Rank1'" in told


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"axis": {}}, "axis: no such field; did you mean 'axes'"),
        ({"model": {}}, "model: no such field. Fields of the runs go below `base:`"),
        ({"base": 3}, "base"),
        ({"base": "nowhere.yaml"}, "nowhere.yaml cannot be read"),
        ({"axes": {"seed": []}}, "The axis seed has no values"),
        ({"axes": {"seed": 3}}, "axes.seed"),
        ({"axes": {"train.epoch": [3]}}, "did you mean 'epochs'"),
        ({"axes": {".": [3]}}, "needs mappings of fields"),
        ({"slurm": {}}, "sbatch --array"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, tree: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        points(tmp_path, **tree)
    assert words in str(caught.value)


def test_overrides(tmp_path: Path) -> None:
    assert [p.experiment.train.batch for p in points(tmp_path, ("train.batch=16",), axes={"seed": [0, 1]})] == [16, 16]
    assert [p.experiment.train.epochs for p in points(tmp_path, scale="small")] == [1]
    file = write(tmp_path, axes={"seed": [0, 1, 2]})
    assert list(read_sweep(file, ["axes.train.optimizer.lr=[0.1, 0.2]", "axes.seed=[7]"]).axes.items()) == [
        ("seed", [7]),
        ("train.optimizer.lr", [0.1, 0.2]),
    ]
    with pytest.raises(ConfigError, match=r"Use --set axes.seed="):
        points(tmp_path, ("seed=3",), axes={"seed": [0, 1]})


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, axes={"seed": [0, 1]})
    assert sweep(file, tmp_path / "out", dry=True) == 0
    assert not (tmp_path / "out").exists() and "2 runs: 2 new" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="got --jobs 0"):
        sweep(file, tmp_path / "out", jobs=0)


def test_the_command_s_exit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = partial(CliRunner().invoke, app)
    file, out = str(write(tmp_path, axes={"seed": [0, 1]})), str(tmp_path / "out")
    listed = call(["sweep", file, "--out", out, "--dry-run"])
    assert listed.exit_code == 0 and "2 runs: 2 new" in listed.output
    wrong = call(["sweep", file, "--out", out, "--set", "train.epoch=3"])
    assert wrong.exit_code == 2 and "did you mean 'epochs'" in wrong.output
    assert call(["sweep", file, "--out", out, "--backend", "slurm"]).exit_code == 2
    monkeypatch.setattr(launch, "COMMAND", (sys.executable, "-c", "import sys; sys.exit('no luck today')"))
    failed = call(["sweep", file, "--out", out, "--accelerator", "cpu"])
    assert failed.exit_code == 1 and "2 runs: 2 failed" in failed.output
    monkeypatch.setitem(sys.modules, "ray", None)
    assert call(["sweep", file, "--out", out, "--backend", "ray", "--accelerator", "cpu"]).exit_code == 3


# --- processes of this machine, with a stand-in for `fit` ---


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    monkeypatch.setattr(launch, "COMMAND", FAKE)
    return lambda name, **plan: fake_run(tmp_path, name, **plan)


def fake_run(out: Path, name: str, **plan: Any) -> Run:
    run = Run(name, validate({k: v for k, v in BASE.items() if k != "small"} | {"name": name}), out)
    run.folder.mkdir()
    (run.folder / "plan.json").write_text(json.dumps({"hash": run.experiment.hash, **plan}))
    return run


def starts(run: Run) -> list[tuple[float, int]]:
    lines = (run.folder / "starts").read_text().splitlines() if (run.folder / "starts").exists() else []
    return [(float(line.split()[0]), int(line.split()[1])) for line in lines]


def all_of(runs: list[Run], jobs: int = 1, **options: Any) -> list[tuple[str, str]]:
    launcher = Launcher(jobs=jobs, **options)
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(launcher.train, runs))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_killed_run_is_tried_again_and_the_others_go_on(
    fake: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    killed = fake("killed", steps=6, die={"1": [3, -9], "2": [5, -9]})
    hopeless = fake("hopeless", die={"always": [2, -9]})
    wrong = fake("wrong", die={"always": [2, 1]})
    runs = [killed, hopeless, wrong, fake("good")]
    ended = all_of(runs, jobs=2)
    assert [state for state, _ in ended] == ["finished", "failed", "failed", "finished"]
    assert [len(starts(run)) for run in runs] == [3, 3, 1, 1]
    assert ended[1][1].startswith("was killed by SIGKILL, perhaps for want of memory")
    assert ended[2][1].startswith("RuntimeError: no such luck") and "log.txt" in ended[2][1]
    assert (killed.folder / "log.txt").read_text().count("--- ") == 3
    told = capsys.readouterr().err
    assert told.count("started again") == 4 and f"{killed.folder.name}: finished" in told


@pytest.mark.slow
def test_never_more_than_so_many_at_once(fake: Callable[..., Run]) -> None:
    runs = [fake(str(n), steps=5, pause=0.05) for n in range(6)]
    assert {state for state, _ in all_of(runs, jobs=2)} == {"finished"}
    spans = [(starts(run)[0][0], float((run.folder / "ended").read_text())) for run in runs]
    assert max(sum(a <= begin < b for a, b in spans) for begin, _ in spans) == 2


def test_a_command_that_ends_well_without_a_record_has_failed(fake: Callable[..., Run]) -> None:
    assert all_of([fake("other", hash="of another config")])[0][0] == "failed"


def test_a_folder_that_cannot_be_written_fails_one_run_only(fake: Callable[..., Run], tmp_path: Path) -> None:
    blocked, good = fake("blocked"), fake("good")
    (blocked.folder / "config.yaml").mkdir()
    assert [state for state, _ in all_of([blocked, good])] == ["failed", "finished"]


def test_states(fake: Callable[..., Run]) -> None:
    run = fake("a")
    assert run.state == "new"
    (run.folder / "environment.json").touch()
    assert run.state == "unfinished"
    (run.folder / "record.json").write_text("{")  # damaged
    assert run.state == "unfinished"
    assert all_of([run]) == [("finished", "")] and run.state == "finished"
    assert all_of([run]) == [("skipped", "")]


def test_a_run_is_left_to_the_call_that_is_at_work_on_it(fake: Callable[..., Run]) -> None:
    run = fake("a")
    with run.claimed():
        assert all_of([run]) == [("running", "another call is at work on it")] and not starts(run)
    assert all_of([run])[0][0] == "finished"


@pytest.mark.slow
def test_gpus_are_handed_out_one_by_one(monkeypatch: pytest.MonkeyPatch, fake: Callable[..., Run]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5,7")
    assert _visible_gpus("auto") == ("3", "5", "7") and _visible_gpus("cpu") == ()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert _visible_gpus("auto") == ()
    runs = [fake(str(n), pause=0.2) for n in range(4)]
    all_of(runs, jobs=4, gpus=("3", "5", "7"))
    assert sorted((run.folder / "gpu").read_text() for run in runs) == ["3", "3", "5", "7"]


DRIVER = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
from slimbayes.lab import launch
from slimbayes.lab.sweep import sweep
launch.COMMAND = (sys.executable, sys.argv[1])
sweep(Path(sys.argv[2]), Path(sys.argv[3]), jobs=2, accelerator="cpu")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_sweep_leaves_checkpoints_and_no_processes(tmp_path: Path, number: signal.Signals) -> None:
    runs = points(tmp_path, axes={"seed": [0, 1, 2]})
    for run in runs:
        run.folder.mkdir(parents=True)
        (run.folder / "plan.json").write_text(json.dumps({"steps": 100_000, "hash": run.experiment.hash}))
    words = [sys.executable, "-c", DRIVER, FAKE[1], str(tmp_path / "sweep.yaml"), str(tmp_path / "out")]
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not all((run.folder / "checkpoints").exists() for run in runs[:2]):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(60) != 0
    while not all((run.folder / "asked").exists() and not alive(starts(run)[0][1]) for run in runs[:2]):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert not starts(runs[2])


@pytest.mark.slow
def test_two_calls_share_the_work(fake: Callable[..., Run]) -> None:
    """Each of six runs is started once, and each call finishes some of them."""
    runs = [fake(str(n), steps=5, pause=0.05) for n in range(6)]
    with ThreadPoolExecutor(2) as pool:
        calls = list(pool.map(all_of, [runs, runs]))
    assert [len(starts(run)) for run in runs] == [1] * 6 and {run.state for run in runs} == {"finished"}
    assert all(("finished", "") in ended for ended in calls)
    assert sum(state == "finished" for ended in calls for state, _ in ended) == 6
    assert {state for ended in calls for state, _ in ended} <= {"finished", "skipped", "running"}


def test_a_run_that_will_not_stop_is_killed(fake: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE", 0.5)
    deaf = fake("deaf", deaf=True, steps=10_000)
    assert Launcher().train(deaf, lambda: not (deaf.folder / "checkpoints").exists())[0] == "stopped"
    assert not (deaf.folder / "asked").exists() and not alive(starts(deaf)[0][1])


# --- Ray, or a stand-in for the little that is used of it ---


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Any:
    """tests/fakes/ray.py, imported as `ray`."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "fakes"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    found = importlib.import_module("ray")
    yield found
    sys.modules.pop("ray")


def test_calls_of_ray_s_workers_share_the_work(
    tmp_path: Path, ray: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "COMMAND", FAKE)
    runs = points(tmp_path, axes={"seed": [0, 1, 2]}, ray={"address": "there", "num_gpus": 1})
    for run, plan in zip(runs, ({}, {"die": {"always": [2, 1]}}, {}), strict=True):
        run.folder.mkdir(parents=True)
        (run.folder / "plan.json").write_text(json.dumps({"hash": run.experiment.hash, **plan}))
    assert sweep(tmp_path / "sweep.yaml", tmp_path / "out", "ray", jobs=2, accelerator="cpu") == 1
    assert "3 runs: 2 finished, 1 unfinished" in capsys.readouterr().out
    assert ray.heard == [
        ("init", "there"),
        ("options", {"num_cpus": 1, "max_retries": 2, "num_gpus": 1}),
        ("shutdown",),
    ]


def test_a_trainable_for_ray_tune_reports_epochs(tmp_path: Path, ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE))

    def train(self: Launcher, run: Run, report: Callable[[], bool]) -> tuple[str, str]:
        run.folder.mkdir(parents=True)
        for epochs in ("1,0.5\n", "1,0.5\n2,0.4\n"):
            (run.folder / "metrics.csv").write_text("epoch,validation_nll\n" + epochs)
            assert report()
        seeds.append(run.experiment.seed)
        return "failed", "no such luck"

    seeds: list[int] = []
    monkeypatch.setattr(Launcher, "train", train)
    with pytest.raises(RuntimeError, match="no such luck"):
        tune_trainable(tmp_path / "base.yaml", tmp_path / "out")({"seed": 3, "train.optimizer.lr": 0.1})
    assert seeds == [3]
    assert ray.tune.reported == [{"epoch": 1, "validation_nll": 0.5}, {"epoch": 2, "validation_nll": 0.4}]


def test_without_ray_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r'pip install "slimbayes\[ray\]"'):
        sweep(write(tmp_path), tmp_path / "out", "ray", accelerator="cpu")


# --- the real thing ---


@pytest.mark.slow
def test_a_sweep_with_a_kill_a_failure_and_a_second_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kill one real run as soon as it has started; let one name data that are not there; then call again."""
    monkeypatch.setenv("COLUMNS", "200")
    file = write(tmp_path, axes={"data.name": ["digits", "cifar10"]})
    out = tmp_path / "out"
    plain, first = Launcher._process, list[int]()

    def killing(*given: Any) -> Any:
        process = plain(*given)
        if not first:
            first.append(process.pid)
            time.sleep(1)
            os.kill(process.pid, signal.SIGKILL)
        return process

    monkeypatch.setattr(Launcher, "_process", killing)
    assert sweep(file, out, jobs=2, accelerator="cpu", data_dir=tmp_path / "none") == 1
    told = capsys.readouterr()
    assert "2 runs: 1 finished, 1 failed" in told.out and "log.txt" in told.out and "started again" in told.err
    assert "cifar10" in told.out and "Traceback" not in told.out
    digits = next(run for run in points(tmp_path, axes={"data.name": ["digits", "cifar10"]}))
    record = read(digits.folder)
    assert record.name == "try" and len(record.curve) == 2
    again = {"jobs": 2, "accelerator": "cpu", "data_dir": tmp_path / "none"}
    assert sweep(file, out, overrides=["axes.data.name=[digits]"], **again) == 0
    assert "1 runs: 1 skipped" in capsys.readouterr().out
    assert load(digits.folder / "config.yaml").hash == digits.experiment.hash
