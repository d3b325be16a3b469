"""Sweeps: which runs there are, what is refused before anything runs, and runs that survive kills and interrupts."""

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
from types import SimpleNamespace
from typing import Any

import forks
import pytest
import yaml
from slimbayes_lab.command import app
from slimbayes_lab.configs.files import ConfigError, load, validate
from slimbayes_lab.report.record import read
from slimbayes_lab.runs import process as launch
from slimbayes_lab.runs.folder import claim_run, open_run
from slimbayes_lab.runs.process import Run, train
from slimbayes_lab.runs.step import TrainingStep
from slimbayes_lab.sweep import combinations, sweep, visible_gpus
from typer.testing import CliRunner

FAKE = (sys.executable, str(Path(__file__).parents[1] / "fakes" / "fit.py"))
BASE = {
    "name": "try",
    "data": {"name": "digits", "train_limit": 128, "test_limit": 50},
    "model": {"kind": "small_cnn", "width": 4},
    "method": {"kind": "Rank1", "members": 2},
    "train": {"epochs": 2, "batch": 64, "optimizer": {"kind": "AdamW", "lr": 0.01}},
    "small": {"train": {"epochs": 1}},
}  # fmt: skip


def write(folder: Path, **tree: Any) -> Path:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({**BASE, **tree}, sort_keys=False))
    return file


def points(
    folder: Path,
    *over: str,
    overrides: tuple[str, ...] = (),
    scale: str = "full",
    **tree: Any,
) -> list[Run]:
    return combinations(write(folder, **tree), folder / "out", over, overrides, scale)


# --- which runs there are ---


def test_all_combinations_in_order(tmp_path: Path) -> None:
    methods = "method=[{kind: Rank1, members: 3}, {kind: Deterministic}]"
    found = points(tmp_path, "seed=[0, 1]", methods, "train.optimizer.lr=[0.1, 0.01]")
    assert [
        (p.experiment.seed, p.experiment.method.kind, p.experiment.train.optimizer.lr)
        for p in found
    ] == [
        (s, m, lr)
        for s in (0, 1)
        for m in ("Rank1", "Deterministic")
        for lr in (0.1, 0.01)
    ]
    assert found[0].experiment.method.members == 3
    assert {p.experiment.name for p in found} == {
        f"try-method-{m}-lr-{lr}"
        for m in ("Rank1-members-3", "Deterministic")
        for lr in ("0.1", "0.01")
    }
    assert len({p.experiment.hash for p in found}) == 8


def test_all_rows_of_a_file_or_one_of_them(tmp_path: Path) -> None:
    rows = {
        "plain": {"method": {"kind": "Deterministic"}},
        "many": {"method": {"members": 8}},
    }
    found = points(tmp_path, "seed=[0, 1]", name="net-{row}", rows=rows)
    assert [p.told for p in found] == [
        "plain, seed=0",
        "many, seed=0",
        "plain, seed=1",
        "many, seed=1",
    ]
    assert [p.experiment.name for p in found] == ["net-plain", "net-many"] * 2
    assert found[1].experiment.method.members == 8
    (one,) = combinations(Path(f"{tmp_path / 'config.yaml'}#plain"), tmp_path)
    assert one.experiment.hash == found[0].experiment.hash


def test_a_sweep_of_one_value_is_the_run_itself(tmp_path: Path) -> None:
    """The same config by `fit` and by `sweep` is one run, in one directory."""
    (point,) = points(tmp_path, "seed=[3]")
    assert point.experiment.hash == load(tmp_path / "config.yaml", ["seed=3"]).hash
    assert point.experiment.name == "try"


def test_a_mapping_with_the_same_kind_is_laid_over_it_and_another_kind_replaces_it(
    tmp_path: Path,
) -> None:
    found = points(tmp_path, "method=[{draws: member}, {kind: MeanField}]")
    assert (
        found[0].experiment.method.members == 2
        and found[1].experiment.method.kind == "MeanField"
    )


def test_equal_configs_run_once_and_close_ones_do_not(tmp_path: Path) -> None:
    assert len(points(tmp_path, "train.optimizer.lr=[0.1, 0.10, 0.2]")) == 2
    assert len(points(tmp_path, "seed=[1, 1]")) == 1
    assert len(points(tmp_path, "train.optimizer.lr=[0.12345678, 0.12345679]")) == 2


def test_names_that_reports_would_mix_up_are_refused(tmp_path: Path) -> None:
    rows = {"a": {"train": {"epochs": 3}}, "b": {"train": {"epochs": 4}}}
    with pytest.raises(
        ConfigError,
        match=r"Two runs would be called 'try' with seed 0: a, and b. Let the file's",
    ):
        points(tmp_path, rows=rows)


def test_every_fault_is_told_with_its_values(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        points(
            tmp_path,
            "seed=[0, 1]",
            "method.kind=[Rank1, Rang1]",
            "train.optimizer.lr=[0.1, -1]",
        )
    told = str(caught.value)
    assert "nothing was run" in told
    assert (
        "seed=0, method.kind=Rank1, train.optimizer.lr=-1 and 1 more:" in told
        and "train.optimizer.lr: Input should be greater than 0, got -1" in told
    )
    assert "method.kind=Rang1" in told and "did you mean 'Rank1'" in told


@pytest.mark.parametrize("text", ["seed", "seed=3", "seed=[]", "=[1]", "seed={a: 1}"])
def test_values_that_are_no_list_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"--over needs path=\[value, ...\], such as"):
        points(tmp_path, text)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"base": "rank1.yaml"}, "base: no such field"),
        ({"axes": {"seed": [0]}}, "axes must be mappings from labels"),
    ],
)
def test_wrong_files_are_refused(
    tmp_path: Path, tree: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        points(tmp_path, **tree)


def test_overrides(tmp_path: Path) -> None:
    found = points(tmp_path, "seed=[0, 1]", overrides=("train.batch=16",))
    assert [p.experiment.train.batch for p in found] == [16, 16]
    assert [p.experiment.train.epochs for p in points(tmp_path, scale="small")] == [1]


def test_a_dry_run_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path)
    assert sweep(file, tmp_path / "out", ["seed=[0, 1]"], dry=True) == 0
    assert (
        not (tmp_path / "out").exists() and "2 runs: 2 new" in capsys.readouterr().out
    )
    with pytest.raises(ConfigError, match="got --jobs 0"):
        sweep(file, tmp_path / "out", jobs=0)


def test_the_command_s_exit_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = partial(CliRunner().invoke, app)
    words = [
        "sweep",
        str(write(tmp_path)),
        "--out",
        str(tmp_path / "out"),
        "--over",
        "seed=[0, 1]",
    ]
    listed = call([*words, "--dry-run"])
    assert listed.exit_code == 0 and "2 runs: 2 new" in listed.output
    wrong = call([*words, "--set", "train.epoch=3"])
    assert wrong.exit_code == 2 and "did you mean 'epochs'" in wrong.output
    monkeypatch.setattr(
        launch,
        "COMMAND",
        (sys.executable, "-c", "import sys; sys.exit('no luck today')"),
    )
    failed = call([*words, "--accelerator", "cpu"])
    assert failed.exit_code == 1 and "2 runs: 2 failed" in failed.output


# --- processes of this machine, with a stand-in for `fit` ---


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    monkeypatch.setattr(launch, "COMMAND", FAKE)
    return lambda name, **plan: fake_run(tmp_path, name, **plan)


def fake_run(out: Path, name: str, **plan: Any) -> Run:
    run = Run(
        name,
        validate({k: v for k, v in BASE.items() if k != "small"} | {"name": name}),
        out,
    )
    run.folder.mkdir()
    (run.folder / "plan.json").write_text(
        json.dumps({"hash": run.experiment.hash, **plan})
    )
    return run


def starts(run: Run) -> list[tuple[float, int]]:
    lines = (
        (run.folder / "starts").read_text().splitlines()
        if (run.folder / "starts").exists()
        else []
    )
    return [(float(line.split()[0]), int(line.split()[1])) for line in lines]


def all_of(runs: list[Run], jobs: int = 1) -> list[tuple[str, str]]:
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(train, runs))


def alive(pid: int) -> bool:
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            not in "ZX"
        )
    except OSError:
        return False


@pytest.mark.slow
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
    assert (
        ended[2][1].startswith("RuntimeError: no such luck")
        and "log.txt" in ended[2][1]
    )
    assert (killed.folder / "log.txt").read_text().count("--- ") == 3
    told = capsys.readouterr().err
    assert (
        told.count("started again") == 4 and f"{killed.folder.name}: finished" in told
    )


def test_a_command_that_ends_well_without_a_record_has_failed(
    fake: Callable[..., Run],
) -> None:
    assert all_of([fake("other", hash="of another config")])[0][0] == "failed"


def test_a_folder_that_cannot_be_written_fails_one_run_only(
    fake: Callable[..., Run], tmp_path: Path
) -> None:
    blocked, good = fake("blocked"), fake("good")
    (blocked.folder / "config.yaml").mkdir()
    assert [state for state, _ in all_of([blocked, good])] == ["failed", "finished"]


def test_states(fake: Callable[..., Run]) -> None:
    run = fake("a")
    assert run.state == "new"
    claim_run(run.folder)
    (run.folder / "environment.json").touch()
    assert run.state == "unfinished"
    (run.folder / "record.json").write_text("{")  # damaged
    assert run.state == "unfinished"
    assert all_of([run]) == [("finished", "")] and run.state == "finished"
    assert all_of([run]) == [("skipped", "")]


def planned(folder: Path, *over: str, **plan: Any) -> list[Run]:
    """Runs of a sweep whose stand-ins have plans."""
    runs = points(folder, *over)
    for run in runs:
        run.folder.mkdir(parents=True)
        (run.folder / "plan.json").write_text(
            json.dumps({"hash": run.experiment.hash, **plan})
        )
    return runs


@pytest.mark.slow
def test_jobs_and_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more runs at a time than jobs, and each job with a GPU of its own."""
    monkeypatch.setattr(launch, "COMMAND", FAKE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert visible_gpus("auto") == ()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5,7")
    assert visible_gpus("auto") == ("3", "5", "7") and visible_gpus("cpu") == ()
    runs = planned(tmp_path, "seed=[0, 1, 2, 3, 4, 5]", together=4)
    assert (
        sweep(
            tmp_path / "config.yaml",
            tmp_path / "out",
            ["seed=[0, 1, 2, 3, 4, 5]"],
            jobs=4,
        )
        == 0
    )
    spans = [
        (starts(run)[0][0], float((run.folder / "ended").read_text())) for run in runs
    ]
    assert max(sum(a <= begin < b for a, b in spans) for begin, _ in spans) == 4
    assert sorted((run.folder / "gpu").read_text() for run in runs[:4]) == [
        "3",
        "3",
        "5",
        "7",
    ]


def test_a_limit_stops_what_runs_and_begins_nothing_that_would_not_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs of 30 seconds, but for the second, which goes on until it is asked to stop; by a clock of the test's own."""
    now, begun = [0.0], list[int]()

    def running(
        run: Run, words: Any, slot: Any, wanted: Callable[[], bool]
    ) -> tuple[str, str]:
        begun.append(run.experiment.seed)
        for _ in range(300 if run.experiment.seed == 1 else 30):
            if not wanted():
                return "stopped", "was asked to stop"
            now[0] += 1
        return "finished", ""

    monkeypatch.setattr(
        "slimbayes_lab.sweep.time", SimpleNamespace(monotonic=lambda: now[0])
    )
    monkeypatch.setattr("slimbayes_lab.sweep.train", running)
    call = partial(sweep, write(tmp_path), tmp_path / "out", accelerator="cpu")
    assert call(["seed=[0, 2, 3, 4]"], limit_seconds=100) == 1 and begun == [
        0,
        2,
        3,
    ]  # ten seconds are left
    assert "4 runs: 3 finished, 1 left" in capsys.readouterr().out
    assert (
        call(["seed=[0, 1, 2]"], limit_seconds=100) == 2
        and begun[3:] == [0, 1]
        and now[0] == 190
    )
    assert "3 runs: 1 finished, 1 stopped, 1 left" in capsys.readouterr().out
    assert call(["seed=[1]"]) == 0
    for never in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="--limit-seconds must be positive"):
            call(["seed=[5]"], limit_seconds=never)


def test_a_checkpoint_that_is_kept_is_there(tmp_path: Path) -> None:
    (run,) = planned(tmp_path, "seed=[0]")
    assert launch._outcome(run, launch.STOPPED) == (
        "stopped",
        "was asked to stop; there is no checkpoint yet",
    )
    (run.folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert launch._outcome(run, launch.STOPPED) == (
        "stopped",
        "was asked to stop; its checkpoint is kept",
    )


def test_a_name_that_looks_like_a_number_reaches_the_run_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run,) = combinations(write(tmp_path), tmp_path / "out", overrides=["name='1e3'"])
    monkeypatch.setattr(launch, "COMMAND", ("false",))
    train(run)
    assert load(run.folder / "config.yaml").hash == run.experiment.hash


def swept(folder: Path) -> None:
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # background jobs of a shell ignore it
    launch.COMMAND = FAKE
    sweep(
        folder / "config.yaml",
        folder / "out",
        ["seed=[0, 1, 2]"],
        jobs=2,
        accelerator="cpu",
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_sweep_leaves_checkpoints_and_no_processes(
    tmp_path: Path, number: signal.Signals
) -> None:
    runs = planned(tmp_path, "seed=[0, 1, 2]", steps=100_000)
    process = forks.start(swept, tmp_path)
    until = time.monotonic() + 60
    while not all((run.folder / "checkpoints").exists() for run in runs[:2]):
        assert time.monotonic() < until and process.is_alive()
        time.sleep(0.05)
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode not in (0, None)
    while not all(
        (run.folder / "asked").exists() and not alive(starts(run)[0][1])
        for run in runs[:2]
    ):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert not starts(runs[2])


def test_a_run_that_will_not_stop_is_killed(
    fake: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "GRACE", 0.5)
    deaf = fake("deaf", deaf=True, steps=10_000)
    assert (
        train(deaf, wanted=lambda: not (deaf.folder / "checkpoints").exists())[0]
        == "stopped"
    )
    assert not (deaf.folder / "asked").exists() and not alive(starts(deaf)[0][1])


# --- the real thing ---


@pytest.mark.slow
def test_a_run_that_another_process_trains_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    file, out = write(tmp_path), tmp_path / "out"
    (run,) = points(tmp_path)
    with open_run(run.folder, run.experiment, resume=True):
        before = {path.name for path in run.folder.iterdir()}
        assert sweep(file, out, accelerator="cpu") == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "is in use by another process" in told and "1 runs: 1 failed" in told
    assert {path.name for path in run.folder.iterdir()} - before == {"log.txt"}


@pytest.mark.slow
def test_a_sweep_with_a_kill_and_a_second_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real run is killed before its second step and started again; then call again. Forks import nothing."""
    monkeypatch.setenv("COLUMNS", "200")
    file, out = write(tmp_path), tmp_path / "out"
    started = list[forks.Popen]()
    real_start, real_step = launch._process, TrainingStep.__call__

    def start(*given: Any) -> Any:
        started.append(real_start(*given))  # type: ignore[arg-type]
        return started[-1]

    def step(self: TrainingStep, batch: Any, number: int, *rest: Any) -> None:
        if number == 1 and not started:  # in the first fork, made before it was noted
            os.kill(os.getpid(), signal.SIGKILL)
        real_step(self, batch, number, *rest)

    monkeypatch.setattr(
        launch,
        "subprocess",
        SimpleNamespace(**vars(subprocess) | {"Popen": forks.Popen}),
    )
    monkeypatch.setattr(launch, "_process", start)
    monkeypatch.setattr(TrainingStep, "__call__", step)
    assert sweep(file, out, accelerator="cpu") == 0
    told = capsys.readouterr()
    assert (
        "1 runs: 1 finished" in told.out
        and "was killed by SIGKILL" in told.err
        and "started again" in told.err
        and len(started) == 2
    )
    (digits,) = points(tmp_path)
    record = read(digits.folder)
    assert record.name == "try" and len(record.curve) == 2
    assert sweep(file, out, accelerator="cpu") == 0
    assert "1 runs: 1 skipped" in capsys.readouterr().out
    assert load(digits.folder / "config.yaml").hash == digits.experiment.hash
