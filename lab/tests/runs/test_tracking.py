"""train.track: columns of the curve against their definitions, and runs that are stopped inside of the window."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from slimbayes_lab.configs.files import validate
from slimbayes_lab.execution import Execution
from slimbayes_lab.finished.diagnose import Case
from slimbayes_lab.papers.diagnostics import diagnose
from slimbayes_lab.report.record import read
from slimbayes_lab.runs.fit import fit
from slimbayes_lab.runs.step import Tracker
from slimbayes_lab.runs.trained import load_run
from slimbayes_lab.runs.training import Stopped
from slimbayes_lab.runs.watchers import Watcher
from torch import nn

import slimbayes as sb
from slimbayes.diagnostics import spectrum

pytestmark = pytest.mark.usefixtures("unchecked_fits")
CPU = Execution(accelerator="cpu")


def experiment(**train: Any) -> Any:
    return validate(
        {
            "name": "tracked",
            "data": {
                "name": "digits",
                "train_limit": 150,
                "test_limit": 50,
                "validation": 0.2,
                "held_out": "last",
            },
            "model": {"kind": "mlp", "hidden": [8]},
            "method": {"kind": "KTied", "rank": 1},
            "train": {
                "epochs": 2,
                "batch": 10,
                "optimizer": {"kind": "Adam", "lr": 0.02},
                **train,
            },
            "evaluate": {"examples": 0},
        },
        "test",
    )


class StopAt(Watcher):
    def __init__(self, step: int) -> None:
        self.step = step

    def move(self, done: int, note: str = "") -> None:
        if done == self.step:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
def test_columns_are_those_of_the_definitions_and_training_does_not_notice(
    tmp_path: Path,
) -> None:
    tracked = fit(experiment(track=["scales", "snr"]), tmp_path / "tracked", CPU)
    plain = fit(experiment(), tmp_path / "plain", CPU)
    one, two = (load_run(folder, CPU).network for folder in (tracked, plain))
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            one.state_dict().values(), two.state_dict().values(), strict=True
        )
    )
    row = read(tracked).curve[-1]
    for name in ("dense1", "dense2"):
        site = spectrum(one)[name]
        assert row[f"scales_1.{name}.weight"] == pytest.approx(site.first(1))
        assert row[f"scales_2.{name}.weight"] == pytest.approx(site.first(2))
        assert row[f"snr.{name}"] >= 1 and row[f"snr_median.{name}"] >= 1
    scales = one.dense1.posterior["weight"].scale().detach()
    assert row["mean_scale.dense1.weight"] == pytest.approx(
        float(scales.mean()), rel=1e-5
    )

    for at, expected in ((0.5, 12), (1.0, 24)):
        numbers, _ = diagnose(
            "tracked", Case(tracked, options={"layer": "dense1", "at": at})
        )
        curve = next(row for row in read(tracked).curve if row["step"] == expected)
        assert numbers["step"] == expected and numbers["snr"] == curve["snr.dense1"]
        assert numbers["neg_elbo"] == pytest.approx(
            curve["validation_nll"] + curve["kl"]
        )
    with pytest.raises(
        ValueError, match="has noted nothing of 'dense1': set train.track"
    ):
        diagnose("tracked", Case(plain, options={"layer": "dense1"}))


@pytest.mark.slow
def test_a_run_stopped_inside_of_the_window_ends_with_the_same_curve(
    tmp_path: Path,
) -> None:
    chosen = experiment(track=["snr"])
    whole = read(fit(chosen, tmp_path / "whole", CPU)).curve
    with pytest.raises(Stopped):
        fit(
            chosen, tmp_path / "stopped", CPU, watcher=StopAt(17)
        )  # five steps of the second window of ten are done
    assert read(fit(chosen, tmp_path / "stopped", CPU, resume=True)).curve == whole


def test_the_ratio_is_that_of_an_epochs_last_ten_steps() -> None:
    net = sb.bayesianize(nn.Sequential(nn.Linear(2, 2)), sb.MatrixNormal())
    tracker = Tracker(experiment(track=["snr"]), net, steps_per_epoch=13)
    posterior = net[0].posterior["weight"]
    torch.manual_seed(0)
    gradients = torch.randn(13, 4, dtype=torch.float64) + 1
    for step, numbers in enumerate(gradients):
        posterior.log_u.grad = numbers[:2].view(2, 1).float()
        posterior.log_v.grad = numbers[2:].view(2, 1).float()
        tracker.after(26 + step)
    last = gradients[3:].float().double()
    expected = (last.square().mean(0) / last.var(0, correction=0)).mean()
    assert tracker.columns()["snr.0"] == pytest.approx(float(expected), rel=1e-6)
    assert tracker.state() == {}


def test_what_cannot_be_tracked_is_refused_before_training() -> None:
    plain = sb.bayesianize(nn.Sequential(nn.Linear(2, 2)), sb.BatchEnsemble())
    for what in ("scales", "snr"):
        with pytest.raises(ValueError, match="has a Gaussian posterior"):
            Tracker(experiment(track=[what]), plain, 5)
    with pytest.raises(ValueError, match="needs two steps in an epoch"):
        Tracker(experiment(track=["snr"]), plain, 1)
