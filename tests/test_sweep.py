"""Sweeps: what a file stands for, what is refused before anything runs, and how runs on this machine survive kills and interruptions."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from slimbayes.lab import supervise
from slimbayes.lab.axes import combinations, read_sweep
from slimbayes.lab.backends import Job, Local, Pool, Result, job_of, prepare, state_of, visible_gpus
from slimbayes.lab.config_files import ConfigError, load
from slimbayes.lab.labels import labelled
from slimbayes.lab.supervise import members_of
from slimbayes.lab.sweep import sweep
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
    return combinations(read_sweep(file), file, overrides, scale)


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
    (point,) = combinations(read_sweep(file), file)
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


def test_gpus_are_handed_out_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5,7")
    assert visible_gpus("auto") == ("3", "5", "7") and visible_gpus("cpu") == ()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert visible_gpus("auto") == ()
    handed = []
    monkeypatch.setattr(
        "slimbayes.lab.backends.start", lambda job, environment: handed.append(environment["CUDA_VISIBLE_DEVICES"])
    )
    pool = Pool(4, gpus=("3", "5", "7"))
    for number in range(4):
        pool.add(Job(Path(str(number)), "", ()))
    assert handed == ["3", "5", "7", "3"]


# --- processes of this machine, with a stand-in for `fit` ---


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    monkeypatch.setattr(supervise, "COMMAND", FAKE)
    return lambda name, **plan: fake_job(tmp_path / name, **plan)


def fake_job(folder: Path, **plan: Any) -> Job:
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps({"hash": "abc", **plan}))
    return Job(folder, "abc", ("fit", "c.yaml", "--out", str(folder), "--resume"))


def starts(job: Job) -> list[tuple[float, int]]:
    lines = (job.folder / "starts").read_text().splitlines() if (job.folder / "starts").exists() else []
    return [(float(line.split()[0]), int(line.split()[1])) for line in lines]


def test_a_killed_run_is_tried_again_and_the_others_go_on(fake: Callable[..., Job]) -> None:
    killed = fake("killed", steps=6, die={"1": [3, -9], "2": [5, -9]})
    hopeless = fake("hopeless", die={"always": [2, -9]})
    wrong = fake("wrong", die={"always": [2, 1]})
    good = fake("good", helper=True)
    heard: list[tuple[str, str]] = []
    results = Local(2).run([killed, hopeless, wrong, good], lambda job, state: heard.append((job.folder.name, state)))
    assert [r.state for r in results] == ["finished", "failed", "failed", "finished"]
    assert [len(starts(job)) for job in (killed, hopeless, wrong, good)] == [3, 3, 1, 1]
    assert (
        results[1].reason == "was killed by SIGKILL, perhaps for want of memory"
        and results[2].reason == "RuntimeError: no such luck"
    )
    assert killed.log.read_text().count("--- ") == 3
    assert ("killed", "was killed by SIGKILL, started again") in heard and heard[-1][1] in ("finished", "failed")
    assert members_of(starts(good)[0][1]) == []


def test_never_more_than_so_many_at_once(fake: Callable[..., Job]) -> None:
    jobs = [fake(str(n), steps=5, pause=0.05) for n in range(6)]
    assert {r.state for r in Local(2).run(jobs)} == {"finished"}
    spans = [(starts(job)[0][0], float((job.folder / "ended").read_text())) for job in jobs]
    assert max(sum(a <= begin < b for a, b in spans) for begin, _ in spans) == 2


def test_a_command_that_ends_well_without_a_record_has_failed(fake: Callable[..., Job]) -> None:
    (result,) = Local().run([fake("other", hash="of another config")])
    assert result.state == "failed"


def test_states(fake: Callable[..., Job], tmp_path: Path) -> None:
    job = fake("a")
    assert state_of(job.folder, "abc") == "new"
    (job.folder / "environment.json").touch()
    assert state_of(job.folder, "abc") == "unfinished"
    (job.folder / "record.json").write_text("{")  # damaged
    assert state_of(job.folder, "abc") == "unfinished"
    Local().run([job])
    assert state_of(job.folder, "abc") == "finished" and state_of(job.folder, "abd") == "unfinished"


DRIVER = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
from slimbayes.lab import supervise
from slimbayes.lab.backends import Job, Local
from slimbayes.lab.sweep import _stoppable
supervise.COMMAND = (sys.executable, sys.argv[1])
with _stoppable():
    Local(2).run([Job(Path(f), "abc", ("fit", "c.yaml", "--out", f, "--resume")) for f in sys.argv[2:]])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_sweep_leaves_checkpoints_and_no_processes(tmp_path: Path, number: signal.Signals) -> None:
    jobs = [fake_job(tmp_path / str(n), steps=100_000) for n in range(3)]
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, FAKE[1], *(str(job.folder) for job in jobs)], stderr=subprocess.DEVNULL
    )
    until = time.monotonic() + 60
    while not all((job.folder / "checkpoints").exists() for job in jobs[:2]):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(60) != 0
    while not all((job.folder / "asked").exists() and not members_of(starts(job)[0][1]) for job in jobs[:2]):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert not starts(jobs[2])


# --- the real thing ---


def test_a_sweep_with_a_kill_a_failure_and_a_second_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kill one real run as soon as it has started; let one name data that are not there; then call again."""
    monkeypatch.setenv("COLUMNS", "200")
    file = write(tmp_path, axes={"data.name": ["digits", "cifar10"]})
    out = tmp_path / "out"
    first: list[int] = []
    plain = supervise.Group.__init__

    def killing(self: Any, words: Any, *more: Any) -> None:
        plain(self, words, *more)
        if not first:
            first.append(self.process.pid)
            time.sleep(1)
            os.killpg(self.process.pid, signal.SIGKILL)

    monkeypatch.setattr(supervise.Group, "__init__", killing)
    assert sweep(file, out, jobs=2, accelerator="cpu", data_dir=tmp_path / "none") == 1
    told = capsys.readouterr()
    assert "2 runs: 1 finished, 1 failed" in told.out and "log.txt" in told.out and "started again" in told.err
    folders = {
        p.experiment.data.name: job_of(p.experiment, out).folder
        for p in points(tmp_path, axes={"data.name": ["digits", "cifar10"]})
    }
    record = read(folders["digits"])
    assert record.name == "try" and len(record.curve) == 2
    assert (
        sweep(file, out, jobs=2, accelerator="cpu", data_dir=tmp_path / "none", overrides=["axes.data.name=[digits]"])
        == 0
    )
    assert "1 runs: 1 skipped" in capsys.readouterr().out


def test_preparing_a_run_keeps_its_hash(tmp_path: Path) -> None:
    (point,) = points(tmp_path)
    job = job_of(point.experiment, tmp_path)
    prepare(job, point.experiment)
    assert load(job.folder / "config.yaml").hash == job.hash
    assert Result(job, "finished").reason == ""
