"""Two gloo processes against one: the lab trains the same network, resumes it, and stops all processes on a NaN."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lab_configs import BASE, CPU
from safetensors.torch import load_file

from slimbayes.lab.config_files import merged, validate
from slimbayes.lab.fit import fit
from slimbayes.report import record

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)

# No batch norm: its statistics are each process's own.
TREE: dict[str, Any] = merged(BASE, {
    "model": {"kind": "mlp", "hidden": [16]},
    "data": {"name": "digits", "train_limit": 200, "test_limit": 100, "validation": 0.25},
    "augment": {"kind": "pad_crop_flip", "pad": 1}, "train": {"epochs": 3, "clip": 1.0},
})  # fmt: skip
TREE["model"] = {"kind": "mlp", "hidden": [16]}
# Members without noise: processes draw noise of their own, which one process cannot. Crops are left out, since noise
# moves their generator.
SILENT: dict[str, Any] = merged(TREE, {"augment": None}) | {"method": {"kind": "BatchEnsemble", "members": 2}}


def words(file: Path, out: Path, *more: object) -> list[str]:
    given = ["fit", str(file), "--accelerator", "cpu", "--out", str(out), "--resume", *map(str, more)]
    return [sys.executable, "-m", "slimbayes.lab.command", *given]


def together(file: Path, out: Path, *more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words(file, out, "--devices", 2, *more), capture_output=True, text=True, timeout=150)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    (folder / "c.yaml").write_text(yaml.safe_dump(TREE))
    (folder / "silent.yaml").write_text(yaml.safe_dump(SILENT))
    fit(validate(SILENT), folder / "one", CPU)
    return folder


def learned(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "base.safetensors") | load_file(run / "model" / "posterior.safetensors")


def check_like(one: Path, run: Path) -> None:
    ours, theirs = learned(run), learned(one)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, atol=2e-6, rtol=1e-5)
    two, first = record.read(run), record.read(one)
    for a, b in zip(two.curve, first.curve, strict=True):
        assert {k: v for k, v in a.items() if "valid" not in k} == pytest.approx(
            {k: v for k, v in b.items() if "valid" not in k}, rel=1e-5
        )
    assert two.evaluations[0].metrics["nll"] == pytest.approx(first.evaluations[0].metrics["nll"], rel=1e-4)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_learn_what_one_does(strategy: str, place: Path) -> None:
    done = together(place / "silent.yaml", place / strategy, "--strategy", strategy)
    assert done.returncode == 0, done.stderr[-2000:]
    check_like(place / "one", place / strategy)


@pytest.fixture(scope="module")
def noisy(place: Path) -> Path:
    """Two processes that draw noise."""
    done = together(place / "c.yaml", place / "noisy", "--strategy", "ddp")
    assert done.returncode == 0, done.stderr[-2000:]
    return place / "noisy"


def test_two_processes_draw_and_learn_the_same_in_any_strategy(place: Path, noisy: Path) -> None:
    done = together(place / "c.yaml", place / "noisy-shards", "--strategy", "fsdp")
    assert done.returncode == 0, done.stderr[-2000:]
    check_like(noisy, place / "noisy-shards")


def test_a_sharded_run_resumes_from_its_checkpoint(place: Path) -> None:
    """Without the latest checkpoint and all that came of it, the one before it leads to the same end."""
    words_ = ("--strategy", "fsdp", "--checkpoint-every", 4, "--no-evaluate")
    assert together(place / "c.yaml", place / "shards", *words_).returncode == 0
    before = learned(place / "shards")
    steps = sorted((place / "shards" / "checkpoints").iterdir())
    shutil.rmtree(steps[-1])
    shutil.rmtree(place / "shards" / "model")
    done = together(place / "c.yaml", place / "shards", *words_)
    assert done.returncode == 0, done.stderr[-2000:]
    for name, value in before.items():
        assert torch.equal(learned(place / "shards")[name], value), name


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    """A longer run of two processes that nobody disturbs."""
    (place / "long.yaml").write_text(yaml.safe_dump(merged(TREE, {"train": {"epochs": 15}})))
    done = together(place / "long.yaml", place / "whole", "--strategy", "ddp", "--no-evaluate")
    assert done.returncode == 0, done.stderr[-2000:]
    return place / "whole"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")
def test_torchrun_restarts_a_group_that_lost_a_rank_and_it_ends_in_the_same_bits(place: Path, whole: Path) -> None:
    """The rank that writes checkpoints is killed once: torchrun ends the other, starts both again, and they go on."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    config, out = str(place / "long.yaml"), place / "torchrun"
    job = subprocess.Popen(
        [*launcher, "--max-restarts", "1", "-m", "slimbayes.lab.command", "fit", config, "--out", str(out),
         "--accelerator", "cpu", "--checkpoint-every", "2", "--no-evaluate"],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    deadline = time.monotonic() + 90
    while not list((out / "checkpoints").glob("step-*[0-9]")) and time.monotonic() < deadline:
        time.sleep(0.05)
    ranks = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    first = next(p for p in ranks if b"\0RANK=0\0" in b"\0" + Path(f"/proc/{p}/environ").read_bytes())
    os.kill(int(first), signal.SIGKILL)
    told = job.communicate(timeout=150)[0]
    assert job.returncode == 0, told[-2000:]
    assert "Resuming after step" in told, "the second start goes on from a checkpoint"
    for name, value in learned(whole).items():
        assert torch.equal(learned(out)[name], value), name
    assert (out / "metrics.csv").read_bytes() == (whole / "metrics.csv").read_bytes()


def test_a_batch_that_cannot_be_shared_out_is_refused(place: Path) -> None:
    done = together(place / "c.yaml", place / "odd", "--strategy", "ddp", "--set", "train.batch=25")
    assert done.returncode != 0 and "cannot be shared out among 2 processes" in done.stderr + done.stdout
    assert json.loads((place / "one" / "environment.json").read_text())["python"]
