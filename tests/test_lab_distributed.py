"""Two gloo processes against one: the lab trains the same network, resumes it, and stops all processes on a NaN."""

import json
import os
import shutil
import subprocess
import sys
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


MORTAL = """
import os, runpy, signal, sys, threading, time
from pathlib import Path

def die(checkpoints):
    while not list(checkpoints.glob("step-*[0-9]")):
        time.sleep(0.002)
    os.kill(os.getpid(), signal.SIGKILL)

mortal = sys.argv.pop(1)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == mortal:
    threading.Thread(target=die, args=[Path(sys.argv[-1], "checkpoints")], daemon=True).start()
runpy.run_module("slimbayes.lab.command", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_torchrun_restarts_a_group_that_lost_a_rank_and_it_ends_in_the_same_bits(
    rank: str, place: Path, noisy: Path
) -> None:
    """A rank kills itself after the first checkpoint: torchrun ends the other, starts both again, and they go on."""
    (place / "mortal.py").write_text(MORTAL)
    out = place / f"torchrun-{rank}"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    fit_words = [
        "fit",
        place / "c.yaml",
        "--accelerator",
        "cpu",
        "--checkpoint-every",
        2,
        "--no-evaluate",
        "--out",
        out,
    ]
    command = [*launcher, place / "mortal.py", rank, *fit_words]
    # Else a second start may read addresses of the first one: torchrun gives both the same store.
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    given = [str(word) for word in command]
    done = subprocess.run(given, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[:6000]
    assert "Resuming after step" in done.stdout + done.stderr, "the second start goes on from a checkpoint"
    for name, value in learned(noisy).items():
        assert torch.equal(learned(out)[name], value), name
    assert (out / "metrics.csv").read_bytes() == (noisy / "metrics.csv").read_bytes()


def test_a_batch_that_cannot_be_shared_out_is_refused(place: Path) -> None:
    done = together(place / "c.yaml", place / "odd", "--strategy", "ddp", "--set", "train.batch=25")
    assert done.returncode != 0 and "cannot be shared out among 2 processes" in done.stderr + done.stdout
    assert json.loads((place / "one" / "environment.json").read_text())["python"]
