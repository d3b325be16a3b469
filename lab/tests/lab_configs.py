"""Small experiments, data and networks for tests of the lab."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn import datasets
from slimbayes_lab.command import app
from slimbayes_lab.configs.experiment import Experiment
from slimbayes_lab.configs.files import merged, validate
from slimbayes_lab.data import Dataset, Split
from slimbayes_lab.execution import Execution
from slimbayes_lab.runs.step import TrainingStep
from torch import nn
from typer import testing
from typer.testing import CliRunner

datasets.load_digits = cache(
    datasets.load_digits
)  # a text that every run would read anew; what it gives is copied
testing._get_command = cache(
    testing._get_command
)  # the options of all commands, which every call would go through
CPU = Execution(accelerator="cpu", workers=0)
BASE: dict[str, Any] = {
    "name": "try",
    "data": {"name": "digits", "train_limit": 200, "test_limit": 100},
    "model": {"kind": "small_cnn", "width": 4},
    "method": {"kind": "Rank1", "members": 2},
    "train": {"epochs": 2, "batch": 50, "optimizer": {"kind": "AdamW", "lr": 0.01}},
    "evaluate": {"examples": 2},
}
# One of each method, as the lab would run it on the small network.
METHODS: dict[str, dict[str, Any]] = {
    "plain": {"kind": "Deterministic"},
    "rank1": {"kind": "Rank1", "members": 2},
    "rank1-cauchy": {
        "kind": "Rank1",
        "members": 2,
        "prior": {"kind": "Cauchy", "loc": 1.0, "scale": 0.1},
    },
    "batchensemble": {"kind": "BatchEnsemble", "members": 2},
    "mean-field": {"kind": "MeanField"},
    "2-tied": {"kind": "KTied", "rank": 2},
    "matrix-normal": {"kind": "MatrixNormal"},
    "emp": {"kind": "ModelPatch", "components": 3, "patch": "norm+output"},
    "ecmp": {"kind": "ModelPatch", "components": 3, "cross": True},
    "dropout": {"kind": "MCDropout", "before": "norm", "rate": 0.1},
    "drop-connect": {"kind": "DropConnect"},
    "ensemble": {"kind": "Ensemble", "members": 2},
    "mixture": {"kind": "Mixture", "components": 2},
    "member-norm": {
        "kind": "ByName",
        "layers": {
            "norm.*": {"kind": "MemberNorm", "members": 2},
            "conv.*|dense": {"kind": "BatchEnsemble", "members": 2},
        },
    },
    "by-name": {
        "kind": "ByName",
        "layers": {
            "norm.*": {"kind": "ModelPatch", "components": 2},
            "conv.*|dense": {"kind": "Rank1", "members": 2},
        },
    },
}


def experiment(**changes: Any) -> Experiment:
    return validate(merged(BASE, changes))


def regression(**changes: Any) -> dict[str, Any]:
    """The tree of a small network for yachts, with changes laid over it."""
    tree = merged(BASE, {
        "data": {"name": "uci/yacht", "train_limit": None, "test_limit": None},
        "model": {"kind": "regression_net", "hidden": 8}, "method": {"kind": "BatchEnsemble", "members": 2},
        "train": {"epochs": 2, "batch": 24, "noise": 0.1}, "evaluate": {"draws": [1]},
    })  # fmt: skip
    return merged(tree, changes)


def weights(run: Path) -> bytes:
    """What was learned, as stored: posterior and network."""
    return (run / "model" / "posterior.safetensors").read_bytes() + (
        run / "model" / "base.safetensors"
    ).read_bytes()


EVERY_STEP = Execution(accelerator="cpu", workers=0, checkpoint_every=1)


class Crash(BaseException):
    """As sudden as a kill, inside one process."""


def crash_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    real = TrainingStep.__call__

    def call(self: TrainingStep, batch: Any, step: int, *rest: Any) -> None:
        if step == steps:
            raise Crash
        real(self, batch, step, *rest)

    monkeypatch.setattr(TrainingStep, "__call__", call)


ONCE: dict[str, Any] = {"epochs": 1, "batch": 50}


MINE: dict[str, Any] = {
    "data": {"name": "mine", "train_limit": None, "test_limit": None},
    "model": {"kind": "mlp"},
}


X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))


def mine(x: torch.Tensor, y: torch.Tensor, *classes: str) -> Dataset:
    return Dataset(
        "mine", {"train": Split(x[:40], y[:40]), "test": Split(x[40:], y[40:])}, classes
    )


def dense(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs))


def call(*words: object) -> Any:
    """The command; an error that it does not tell in words is raised."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result
