"""Two gloo processes against one: the lab trains the same network, resumes it, and ends where a rank is lost."""

import os
import shutil
import signal
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import forks
import pytest
import slimbayes_lab.__main__ as door
import torch
import torch._dynamo  # FSDP2 needs it: imported once, not in both processes
import yaml
from lab_configs import BASE, CPU
from safetensors.torch import load_file
from slimbayes_lab import execution
from slimbayes_lab.command import app
from slimbayes_lab.configs.files import merged, validate
from slimbayes_lab.report import record
from slimbayes_lab.runs.fit import fit
from slimbayes_lab.runs.step import TrainingStep

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)
pytestmark = pytest.mark.slow

# No batch norm: its statistics are each process's own.
TREE: dict[str, Any] = merged(BASE, {
    "model": {"kind": "mlp", "hidden": [16]},
    "data": {"name": "digits", "train_limit": 200, "test_limit": 100, "validation": 0.25},
    "augment": {"kind": "pad_crop_flip", "pad": 1}, "train": {"epochs": 3, "clip": 1.0},
})  # fmt: skip
TREE["model"] = {"kind": "mlp", "hidden": [16]}
# Members without noise: processes draw noise of their own, which one process cannot. Crops are left out, since noise
# moves their generator.
SILENT: dict[str, Any] = merged(TREE, {"augment": None}) | {
    "method": {"kind": "BatchEnsemble", "members": 2}
}


def words(file: Path, out: Path, *more: object) -> list[str]:
    given = [
        "fit",
        file,
        "--accelerator",
        "cpu",
        "--devices",
        2,
        "--out",
        out,
        "--resume",
        *more,
    ]
    return [str(word) for word in given]


def one_of_two(rank: int, port: int, given: list[str]) -> None:
    """The command in one of two processes that something else has started, as Fabric calls it."""
    warnings.simplefilter("default")
    os.environ |= {
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    app(given)


def together(file: Path, out: Path, *more: object) -> tuple[bool, str]:
    """Whether both processes ended well, and what they said."""
    logs, port = [Path(f"{out}-{rank}.log") for rank in (0, 1)], forks.free_port()
    given = words(file, out, *more)
    started = [
        forks.start(one_of_two, rank, port, given, log=logs[rank]) for rank in (0, 1)
    ]
    codes = forks.exit_codes(started, 100)
    return codes == [0, 0], "".join(log.read_text() for log in logs)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    (folder / "c.yaml").write_text(yaml.safe_dump(TREE))
    (folder / "silent.yaml").write_text(yaml.safe_dump(SILENT))
    fit(validate(SILENT), folder / "one", CPU)
    return folder


def learned(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "base.safetensors") | load_file(
        run / "model" / "posterior.safetensors"
    )


def check_like(one: Path, run: Path) -> None:
    ours, theirs = learned(run), learned(one)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, atol=2e-6, rtol=1e-5)
    two, first = record.read(run), record.read(one)
    for a, b in zip(two.curve, first.curve, strict=True):
        assert {k: v for k, v in a.items() if "valid" not in k} == pytest.approx(
            {k: v for k, v in b.items() if "valid" not in k}, rel=1e-5
        )
    assert two.evaluations[0].metrics["nll"] == pytest.approx(
        first.evaluations[0].metrics["nll"], rel=1e-4
    )


def test_two_processes_learn_what_one_does(place: Path) -> None:
    """Copies of the network; that shards learn what copies do is said below."""
    well, said = together(place / "silent.yaml", place / "ddp", "--strategy", "ddp")
    assert well, said[-2000:]
    check_like(place / "one", place / "ddp")


def typed(given: list[str]) -> None:
    """The command as if it had been typed: Fabric reads how it was, to start the other process alike."""
    warnings.simplefilter("default")
    sys.argv = [str(door.__file__), *given]
    sys.modules["__main__"].__spec__ = None
    app(given)


@pytest.fixture(scope="module")
def noisy(place: Path) -> Path:
    """Two processes that draw noise, started by the command itself."""
    log = place / "noisy.log"
    given = words(place / "c.yaml", place / "noisy", "--strategy", "ddp")
    codes = forks.exit_codes([forks.start(typed, given, log=log)], 150)
    assert codes == [0], log.read_text()[-2000:]
    return place / "noisy"


SHARDS = ("--strategy", "fsdp", "--checkpoint-every", 4)


@pytest.fixture(scope="module")
def shards(place: Path) -> Path:
    well, said = together(place / "c.yaml", place / "shards", *SHARDS)
    assert well, said[-2000:]
    return place / "shards"


def test_two_processes_draw_and_learn_the_same_in_any_strategy(
    noisy: Path, shards: Path
) -> None:
    check_like(noisy, shards)


def test_a_sharded_run_resumes_from_its_checkpoint(place: Path, shards: Path) -> None:
    """Without the latest checkpoint and all that came of it, the one before it leads to the same end."""
    run = place / "again"
    shutil.copytree(shards, run)
    steps = sorted((run / "checkpoints").iterdir())
    for gone in (steps[-1], run / "model"):
        shutil.rmtree(gone)
    (run / "record.json").unlink()
    before = learned(shards)
    well, said = together(place / "c.yaml", run, *SHARDS, "--no-evaluate")
    assert well and "Resuming after step 8" in said, said[-2000:]
    for name, value in before.items():
        assert torch.equal(learned(run)[name], value), name


def die_after_a_checkpoint(folder: Path, number: int) -> None:
    """Let this process send itself a signal at the first step after a new checkpoint."""
    before = set(folder.glob("step-*[0-9]"))
    take_step = TrainingStep.__call__

    def step(self: TrainingStep, *given: Any) -> None:
        if not before.issuperset(folder.glob("step-*[0-9]")):
            os.kill(os.getpid(), number)
        take_step(self, *given)

    TrainingStep.__call__ = step  # type: ignore[method-assign]


def mortal(given: list[str]) -> None:
    """The command; at the first start rank 1 kills itself after a checkpoint."""
    warnings.simplefilter("default")
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        die_after_a_checkpoint(Path(given[-1], "checkpoints"), signal.SIGKILL)
    app(given, standalone_mode=False)


def torchrun(given: list[str]) -> None:
    """What `torchrun --standalone --nproc-per-node=2 --max-restarts=1` does, with forks for processes."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    place = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": "two"}
    config = LaunchConfig(1, 1, 2, max_restarts=1, start_method="fork", **place)
    elastic_launch(config, mortal)(given)


def test_torchrun_starts_a_job_again_whose_rank_was_killed_and_it_ends_in_the_same_bits(
    place: Path, noisy: Path
) -> None:
    out, log = place / "torchrun", place / "torchrun.log"
    options = [
        "--accelerator",
        "cpu",
        "--checkpoint-every",
        "2",
        "--no-evaluate",
        "--out",
    ]
    given = ["fit", str(place / "c.yaml"), *options, str(out)]
    codes = forks.exit_codes([forks.start(torchrun, given, log=log)], 100)
    said = log.read_text()
    assert codes == [0], said[-3000:]
    assert "Resuming after step" in said
    for name, value in learned(noisy).items():
        assert torch.equal(learned(out)[name], value), name
    assert (out / "metrics.csv").read_bytes() == (noisy / "metrics.csv").read_bytes()


def doomed(rank: int, port: int, given: list[str], out: Path, number: int) -> None:
    """One of two processes, of which the second sends itself a signal after a checkpoint."""
    if rank == 1:
        die_after_a_checkpoint(out / "checkpoints", number)
    try:
        one_of_two(rank, port, given)
    except RuntimeError as error:
        print(error)
        raise


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_whose_peer_is_gone_or_stopped_ends_with_an_error(
    place: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before the process group's timeout where the peer still has its connection."""
    monkeypatch.setattr(execution, "PATIENCE", timedelta(seconds=8))
    out, port = place / f"doomed-{number.name}", forks.free_port()
    logs = [Path(f"{out}-{rank}.log") for rank in (0, 1)]
    options = ("--strategy", "ddp", "--checkpoint-every", 2, "--set", "train.epochs=99")
    given = words(place / "c.yaml", out, *options)
    left, lost = (
        forks.start(doomed, rank, port, given, out, number, log=logs[rank])
        for rank in (0, 1)
    )
    codes = forks.exit_codes([left], 100)
    assert forks.exit_codes([lost], 0) == [-signal.SIGKILL]
    assert codes == [1], logs[0].read_text()[-2000:]
    assert "gloo" in logs[0].read_text()
    assert list(out.glob("checkpoints/step-*")), "--resume goes on from there"


def test_a_batch_that_cannot_be_shared_out_is_refused(place: Path) -> None:
    well, said = together(
        place / "c.yaml", place / "odd", "--strategy", "ddp", "--set", "train.batch=25"
    )
    assert not well and "cannot be shared out among 2 processes" in said


def test_every_start_of_a_job_meets_under_a_name_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the store that torchrun keeps: a process that opened another there would meet nobody."""
    for name, value in {
        "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "there", "MASTER_PORT": "29", "RANK": "1",
        "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "3",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    made: list[Any] = []
    monkeypatch.setattr(
        torch.distributed,
        "TCPStore",
        lambda *place, **options: made.append((*place, options["is_master"])),
    )
    monkeypatch.setattr(
        torch.distributed, "PrefixStore", lambda name, store: made.append(name)
    )
    monkeypatch.setattr(
        torch.distributed,
        "init_process_group",
        lambda kind, **o: made.append((kind, o["rank"], o["world_size"])),
    )
    execution.Execution(accelerator="cpu", devices=2)._meet()
    assert made == [("there", 29, False), "start 3", ("gloo", 1, 2)]
