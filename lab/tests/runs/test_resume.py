"""A run that is stopped, killed or crashes anywhere, and is resumed, ends in the same bits."""

import os
import random
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import forks
import pytest
from lab_configs import (
    CPU,
    EVERY_STEP,
    METHODS,
    Crash,
    call,
    crash_after,
    experiment,
    weights,
)
from slimbayes_lab.configs.experiment import Experiment
from slimbayes_lab.configs.files import merged
from slimbayes_lab.execution import Execution
from slimbayes_lab.report import record
from slimbayes_lab.runs import training
from slimbayes_lab.runs.checkpoints import latest_checkpoint
from slimbayes_lab.runs.fit import fit
from slimbayes_lab.runs.step import TrainingStep
from slimbayes_lab.runs.training import Stopped, Training

pytestmark = pytest.mark.usefixtures("unchecked_fits")


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["rank1-cauchy", "2-tied", "emp", "dropout", "ensemble", "member-norm"]
)
def test_a_run_killed_anywhere_and_resumed_ends_in_the_same_weights(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = experiment(
        method=METHODS[method], augment={"kind": "pad_crop_flip", "pad": 1}
    )
    whole = fit(chosen, tmp_path / "whole", CPU)
    place = random.Random(method).randrange(1, 8)
    with monkeypatch.context() as patch:
        crash_after(patch, place)
        with pytest.raises(Crash):
            fit(chosen, tmp_path / "cut", EVERY_STEP)
    cut = fit(chosen, tmp_path / "cut", EVERY_STEP, resume=True)
    assert weights(cut) == weights(whole)
    assert (cut / "metrics.csv").read_bytes() == (whole / "metrics.csv").read_bytes()
    assert (cut / "steps.csv").read_bytes() == (whole / "steps.csv").read_bytes()
    assert record.read(cut).digest == record.read(whole).digest


@pytest.mark.slow
def test_resuming_from_an_older_checkpoint_runs_the_lost_steps_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, every3 = (
        experiment(),
        Execution(accelerator="cpu", workers=0, checkpoint_every=3),
    )
    whole = fit(chosen, tmp_path / "whole", CPU)
    with monkeypatch.context() as patch:
        crash_after(patch, 5)
        with pytest.raises(Crash):
            fit(chosen, tmp_path / "cut", every3)
    found = latest_checkpoint(tmp_path / "cut" / "checkpoints")
    assert found is not None and found[1]["step"] == 3
    assert weights(fit(chosen, tmp_path / "cut", every3, resume=True)) == weights(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "train",
    [
        {"clip": 0.1},
        {"optimizer": {"kind": "SGD", "lr": 0.05}, "schedule": {"kind": "Step", "milestones": [0.5]}},
        {
            "early_stop": {"patience": 1}, "epochs": 4, "weight_decay": {"kernels": 0.1, "norms": 0.01},
            "schedule": {"kind": "Cosine", "warmup": 1},
        },
    ],
    ids=lambda train: "-".join(train),
)  # fmt: skip
def test_options_resume_bit_for_bit_too(
    train: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = experiment(train=train, data={"validation": 0.25})
    whole = fit(chosen, tmp_path / "whole", CPU)
    with monkeypatch.context() as patch:
        crash_after(patch, 4)
        with pytest.raises(Crash):
            fit(chosen, tmp_path / "cut", EVERY_STEP)
    cut = fit(chosen, tmp_path / "cut", EVERY_STEP, resume=True)
    assert weights(cut) == weights(whole)
    assert record.read(cut).digest == record.read(whole).digest


def fit_without_record(chosen: Experiment, folder: Path, resume: bool = False) -> None:
    """Fit, and be killed while what was learned is judged."""
    with (
        patch("slimbayes_lab.runs.fit.write_record", side_effect=Crash),
        pytest.raises(Crash),
    ):
        fit(chosen, folder, EVERY_STEP, resume=resume)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "epoch"),
    [
        ({"train": {"clip": 0.5}}, 4),
        ({"train": {"early_stop": {"patience": 3}}, "data": {"validation": 0.25}}, 3),
    ],
)
def test_many_resumes_in_a_row(
    changes: dict[str, Any], epoch: int, tmp_path: Path
) -> None:
    """Killed in an epoch, at its end, and while it was judged; other checkpoints each time, and moved in between."""
    chosen = experiment(**merged({"train": {"epochs": 3}}, changes))
    whole, folder = fit(chosen, tmp_path / "whole", CPU), tmp_path / "cut"
    for place, every in ((2, 1), (2 * epoch, 2), (2 * epoch + 1, 4)):
        with pytest.MonkeyPatch.context() as patched:
            crash_after(patched, place)
            with pytest.raises(Crash):
                fit(
                    chosen,
                    folder,
                    Execution(accelerator="cpu", workers=0, checkpoint_every=every),
                    resume=True,
                )
        folder = folder.rename(tmp_path / f"moved{place}")
    fit_without_record(chosen, folder, resume=True)
    assert (folder / "model").is_dir() and not (folder / "record.json").exists()
    fit(chosen, folder, CPU, resume=True)
    assert (
        weights(folder) == weights(whole)
        and record.read(folder).digest == record.read(whole).digest
    )
    for name in ("steps.csv", "metrics.csv"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "execution", [CPU, EVERY_STEP], ids=["no checkpoint", "empty file"]
)
def test_steps_are_written_down_once(execution: Execution, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        crash_after(patched, 6 if execution is CPU else 2)
        with pytest.raises(Crash):
            fit(experiment(), tmp_path / "run", execution)
    if execution is EVERY_STEP:
        (tmp_path / "run" / "steps.csv").write_text("")
    fit(experiment(), tmp_path / "run", execution, resume=True)
    assert [
        line.split(",")[0]
        for line in (tmp_path / "run" / "steps.csv").read_text().splitlines()
    ] == [
        "step",
        *map(str, range(8)),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("judged", [True, False])
def test_the_cost_is_that_of_all_of_a_run(judged: bool, tmp_path: Path) -> None:
    if judged:
        fit_without_record(experiment(), tmp_path / "run")
        fit(experiment(), tmp_path / "run", EVERY_STEP, resume=True)
    else:
        fit(experiment(), tmp_path / "run", CPU, judge=False)
        assert call("evaluate", tmp_path / "run", "--accelerator", "cpu").exit_code == 0
    cost = record.read(tmp_path / "run").cost
    assert cost.train_seconds > 0 and cost.seconds_per_epoch > 0


def test_processes_agree_when_to_save(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    late = SimpleNamespace(
        execution=Execution(strategy="fsdp"), step=20, saved_at=0.0, folder=Path("run"), _stop_asked=lambda: False,
        _save=lambda: saved.append(1),
        fabric=SimpleNamespace(world_size=2, global_rank=1, broadcast=lambda value: False),
    )  # fmt: skip
    monkeypatch.setattr(training.time, "monotonic", lambda: 1e6)
    Training._between_steps(late, epoch_ends=True)  # type: ignore[arg-type]
    assert not saved, "the first process says that it is not time yet"


@pytest.mark.slow
def test_a_request_to_stop_leaves_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = TrainingStep.__call__

    def call(self: TrainingStep, batch: Any, step: int, *rest: Any) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        real(self, batch, step, *rest)

    monkeypatch.setattr(TrainingStep, "__call__", call)
    with pytest.raises(Stopped, match="after step 3.*--resume"):
        fit(experiment(), tmp_path / "run", CPU)
    monkeypatch.undo()
    assert weights(fit(experiment(), tmp_path / "run", CPU, resume=True)) == weights(
        fit(experiment(), tmp_path / "whole", CPU)
    )


@pytest.mark.slow
def test_kill_nine_in_the_middle_of_writes(tmp_path: Path) -> None:
    """SIGKILL at random writes, again and again; then the run is let through."""
    draw = random.Random(1)
    every2 = Execution(accelerator="cpu", workers=0, checkpoint_every=2)
    chosen = experiment(method=METHODS["emp"], train={"epochs": 20}, model={"width": 2})
    whole, cut = fit(chosen, tmp_path / "whole", CPU), tmp_path / "cut"
    reached = [0]
    for _ in range(4):
        moment = draw.randint(60, 120)
        child = forks.start(
            forks.killed_at, moment, cut, fit, chosen, cut, every2, True
        )
        assert forks.exit_codes([child], seconds=100) == [-signal.SIGKILL]
        reached.append(latest_step(cut))
    assert reached == sorted(set(reached)), "each start goes on from a checkpoint"
    fit(chosen, cut, EVERY_STEP, resume=True)
    assert weights(cut) == weights(whole)
    assert record.read(cut).digest == record.read(whole).digest
    assert not [p for p in cut.rglob(".*") if p.name != ".slimbayes"], (
        "what killed writers left"
    )


def latest_step(run: Path) -> int:
    names = (
        sorted(p.name for p in (run / "checkpoints").glob("step-*"))
        if (run / "checkpoints").is_dir()
        else []
    )
    return int(names[-1].split("-")[1]) if names else 0
