"""SLURM (through submitit's local executor) and Ray: jobs that are preempted or lose their worker go on from their checkpoints."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from slimbayes.lab.backends import Job, job_of
from slimbayes.lab.clusters import Call, Ray, Slurm
from slimbayes.lab.config_files import ConfigError, validate
from slimbayes.lab.sweep import sweep
from slimbayes.report.record import read

submitit = pytest.importorskip("submitit")
FAKE = Path(__file__).parent / "fakes" / "fit.py"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    """Jobs whose command is the stand-in, also in processes that others start."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        f"import sys\nfrom slimbayes.lab import supervise\nsupervise.COMMAND = (sys.executable, {str(FAKE)!r})\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{site}:{os.environ.get('PYTHONPATH', '')}")

    def make(name: str, **plan: Any) -> Job:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "plan.json").write_text(json.dumps({"hash": "abc", **plan}))
        return Job(folder, "abc", ("fit", "c.yaml", "--out", str(folder), "--resume"))

    return make


def starts(job: Job) -> list[int]:
    file = job.folder / "starts"
    return [int(line.split()[1]) for line in file.read_text().splitlines()] if file.exists() else []


def wait_for(found: Callable[[], Any], seconds: float = 60) -> Any:
    until = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < until, "it did not come to pass in time"
        time.sleep(0.05)
    return value


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_jobs_through_submitit(fake: Callable[..., Job], tmp_path: Path) -> None:
    jobs = [fake("good"), fake("wrong", die={"always": [2, 1]})]
    heard: list[str] = []
    results = Slurm(tmp_path / "submitit", 2, {"cluster": "local", "timeout_min": 2}).run(
        jobs, lambda job, state: heard.append(state)
    )
    assert [r.state for r in results] == ["finished", "failed"] and results[1].reason == "RuntimeError: no such luck"
    assert "running" in heard and {"finished", "failed"} <= set(heard)


@pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")
def test_a_preempted_job_is_queued_again_and_goes_on(fake: Callable[..., Job], tmp_path: Path) -> None:
    """What SLURM does before a preemption or a time limit: a signal to the task. The run writes a checkpoint, and the next start continues it."""
    job = fake("run", steps=120, pause=0.05, every=1000)  # no checkpoint of its own accord
    executor = submitit.AutoExecutor(folder=str(tmp_path / "submitit"), cluster="local")
    executor.update_parameters(timeout_min=2)
    handle = executor.submit(Call(), job)
    (pid,) = wait_for(lambda: starts(job))
    time.sleep(0.5)
    os.kill(parent_of(pid), submitit.JobEnvironment._usr_sig())
    assert handle.result() == 0
    assert (job.folder / "asked").exists() and len(starts(job)) == 2
    (checkpoint,) = (job.folder / "checkpoints").iterdir()
    assert 0 < int(checkpoint.name[5:]) < 120 and read(job.folder).config_hash == "abc"


def test_a_real_sweep_through_submitit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = {
        "name": "try", "data": {"name": "digits", "train_limit": 128, "test_limit": 50}, "model": {"kind": "small_cnn", "width": 4},
        "method": {"kind": "Rank1"}, "train": {"epochs": 1, "batch": 64, "optimizer": {"kind": "AdamW"}},
    }  # fmt: skip
    file = tmp_path / "sweep.yaml"
    file.write_text(
        yaml.safe_dump({"base": base, "axes": {"seed": [4]}, "slurm": {"cluster": "local", "timeout_min": 3}})
    )
    assert sweep(file, tmp_path / "out", backend="slurm", accelerator="cpu") == 0
    assert "1 runs: 1 finished" in capsys.readouterr().out
    job = job_of(validate(base | {"seed": 4}), tmp_path / "out")
    assert read(job.folder).seed == 4 and "fit" in job.log.read_text()


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with SLURM's commands; returns the folder of their state."""
    programs, state = tmp_path / "programs", tmp_path / "slurm"
    programs.mkdir()
    state.mkdir()
    for name in ("sbatch", "srun", "sacct", "scontrol"):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE.parent / "slurm.py"} {name} "$@"\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(state))
    return state


@pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")
def test_slurm_s_jobs_outlive_the_sweep_and_are_found_again(
    fake: Callable[..., Job], slurm: Path, tmp_path: Path
) -> None:
    jobs = [fake("a", steps=150, pause=0.05, every=1000), fake("b", steps=150, pause=0.05)]
    backend = Slurm(tmp_path / "submitit", 2, {"timeout_min": 30})

    def stop(job: Job, state: str) -> None:
        if all(starts(job) for job in jobs):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backend.run(jobs, stop)
    (pid,) = starts(jobs[0])
    time.sleep(0.3)
    os.kill(
        parent_of(pid), submitit.JobEnvironment._usr_sig()
    )  # what scancel --signal does: the job is preempted meanwhile
    assert [r.state for r in backend.run(jobs)] == ["finished", "finished"]
    assert len(list(slurm.glob("*.sh"))) == 1  # one submission, an array of two
    assert [len(starts(job)) for job in jobs] == [2, 1] and (jobs[0].folder / "asked").exists()


@pytest.fixture
def ray() -> Iterator[Any]:
    found = pytest.importorskip(
        "ray", reason='RAY IS NOT INSTALLED: the ray backend is not tested here; pip install "slimbayes[ray]"'
    )
    yield found
    found.shutdown()


@pytest.mark.filterwarnings("ignore")
def test_jobs_through_ray_and_a_lost_worker(
    ray: Any, fake: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that looks after a run is killed: Ray starts the job again, which waits for the former run's checkpoint and goes on from it."""
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    good, lost = fake("good"), fake("lost", steps=100, pause=0.05, every=1000)
    wrong = fake("wrong", die={"always": [2, 1]})

    def kill() -> None:
        (pid,) = wait_for(lambda: starts(lost))
        time.sleep(0.5)
        os.kill(parent_of(pid), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    results = Ray(2).run([lost, good, wrong])
    killer.join()
    assert [r.state for r in results] == ["finished", "finished", "failed"] and results[
        2
    ].reason == "RuntimeError: no such luck"
    assert len(starts(lost)) == 2 and (lost.folder / "asked").exists()
    assert len(list((lost.folder / "checkpoints").iterdir())) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [({}, 'Could not detect "srun"'), ({"cluster": "local", "gpus": 3}, "gpus"), ({"cluster": "cloud"}, "cloud")],
)
def test_wrong_slurm_settings_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], words: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=words):
        Slurm(tmp_path, 1, options).run([Job(tmp_path, "", ())])


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r'pip install "slimbayes\[ray\]"'):
        Ray().run([])
