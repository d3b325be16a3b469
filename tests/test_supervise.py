"""Supervision: jobs that die are started again as a whole, from their checkpoints, and end in the weights of a run that was never disturbed."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slimbayes.lab import supervise
from slimbayes.lab.supervise import Group, Supervisor, latest_step, members_of, run_folder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")
FAKE = (sys.executable, str(Path(__file__).parent / "fakes" / "fit.py"))
REPEATS = int(os.environ.get("SLIMBAYES_KILL_REPEATS", "2"))


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Supervisor]:
    monkeypatch.setattr(supervise, "COMMAND", FAKE)

    def make(restarts: int = 3, stall: float | None = None, grace: float = 5, **plan: Any) -> Supervisor:
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        return Supervisor(
            tmp_path, lambda: Group(["fit", "c.yaml", "--out", str(tmp_path), "--resume"]), restarts, stall, grace
        )

    return make


def starts(folder: Path) -> int:
    return len((folder / "starts").read_text().splitlines())


def pids(folder: Path) -> list[int]:
    return [int(line.split()[1]) for line in (folder / "starts").read_text().splitlines()]


def wait_for(found: Callable[[], Any], seconds: float = 60) -> Any:
    until = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < until, "it did not come to pass in time"
        time.sleep(0.02)
    return value


def test_a_job_that_makes_progress_is_started_again_as_often_as_it_dies(
    job: Callable[..., Supervisor], tmp_path: Path
) -> None:
    deaths = {str(n): [2 * n, -9 if n % 2 else 1] for n in range(1, 7)}
    assert job(restarts=1, steps=14, die=deaths).run() == 0
    assert starts(tmp_path) == 7 and (tmp_path / "ended").exists()


def test_it_gives_up_without_progress_and_says_so(
    job: Callable[..., Supervisor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert job(restarts=2, steps=9, every=5, die={"always": [3, -9]}).run() == 137
    assert starts(tmp_path) == 3
    told = capsys.readouterr().err
    assert (
        "killed by SIGKILL before its first checkpoint" in told and "3 times in a row" in told and "giving up" in told
    )


def test_progress_is_counted_from_one_death_to_the_next(job: Callable[..., Supervisor], tmp_path: Path) -> None:
    """Two deaths at the same place, a new checkpoint, two more: never three in a row."""
    deaths = {"1": [3, 1], "2": [3, 1], "3": [7, 1], "4": [7, 1]}
    assert job(restarts=2, steps=9, every=2, die=deaths).run() == 0
    assert starts(tmp_path) == 5


@pytest.mark.parametrize("code", [2, 3, 4, 143])
def test_ends_that_a_new_start_would_repeat_are_final(
    job: Callable[..., Supervisor], tmp_path: Path, code: int
) -> None:
    assert job(die={"always": [2, code]}).run() == code
    assert starts(tmp_path) == 1


def test_no_process_of_a_dead_job_survives(job: Callable[..., Supervisor], tmp_path: Path) -> None:
    supervisor = job(helper=True, steps=4, die={"1": [2, 1], "2": [3, -9]})
    assert supervisor.run() == 0
    assert starts(tmp_path) == 3
    assert [members_of(pid) for pid in pids(tmp_path)] == [[], [], []]


def test_a_job_that_hangs_is_ended_and_started_again(
    job: Callable[..., Supervisor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert job(stall=1.0, steps=4, hang=[1]).run() == 0
    assert starts(tmp_path) == 2 and "hangs" in capsys.readouterr().err


def test_a_slow_job_is_not_taken_for_a_hung_one(job: Callable[..., Supervisor], tmp_path: Path) -> None:
    assert job(stall=1.5, steps=5, pause=0.6).run() == 0
    assert starts(tmp_path) == 1


DRIVER = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
from slimbayes.lab import supervise
supervise.COMMAND = (sys.executable, sys.argv[1])
folder = Path(sys.argv[2])
group = lambda: supervise.Group(["fit", "c.yaml", "--out", str(folder), "--resume"])
sys.exit(supervise.Supervisor(folder, group, grace=float(sys.argv[3])).run())
"""


def drive(folder: Path, grace: float = 20, **plan: Any) -> "subprocess.Popen[str]":
    (folder / "plan.json").write_text(json.dumps({"steps": 10_000, **plan}))
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, FAKE[1], str(folder), str(grace)], text=True, stderr=subprocess.PIPE
    )
    wait_for(lambda: latest_step(folder) > 2)
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_to_stop_is_passed_on_and_final(tmp_path: Path, number: signal.Signals) -> None:
    process = drive(tmp_path, helper=True)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == 143 and (tmp_path / "asked").exists() and starts(tmp_path) == 1
    assert members_of(pids(tmp_path)[0]) == []


def test_a_job_that_will_not_stop_is_killed_after_a_while(tmp_path: Path) -> None:
    process = drive(tmp_path, grace=1, deaf=True)
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 143 and members_of(pids(tmp_path)[0]) == [] and not (tmp_path / "asked").exists()


def test_a_job_stops_with_a_checkpoint_when_its_supervisor_is_killed(tmp_path: Path) -> None:
    process = drive(tmp_path)
    process.kill()
    process.communicate(timeout=30)
    wait_for(lambda: (tmp_path / "asked").exists() and not members_of(pids(tmp_path)[0]), 20)


def test_the_run_directory_is_read_from_the_command_line(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(json.dumps(TINY))
    assert run_folder(["fit", str(config), "--set", "seed=1", "--out=there", "--devices", "2"]) == Path("there")
    own = run_folder(["fit", str(config), "--set", "seed=1"])
    assert own.parent == Path("runs") and own.name.startswith("try-")
    assert own != run_folder(["fit", str(config)])


def test_settings_of_the_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SLIMBAYES_STALL_SECONDS", "soon")
    assert supervise._setting("SLIMBAYES_STALL_SECONDS", 0) == 0 and "soon" in capsys.readouterr().err
    monkeypatch.setenv("SLIMBAYES_STALL_SECONDS", "90")
    assert supervise._setting("SLIMBAYES_STALL_SECONDS", 0) == 90


# --- two real ranks ---

TINY = {
    "name": "try",
    "data": {"name": "digits"},
    "model": {"kind": "small_cnn", "width": 4},
    "method": {"kind": "Rank1", "members": 2},
    "train": {"epochs": 2, "batch": 64, "optimizer": {"kind": "AdamW", "lr": 0.01}},
}  # fmt: skip


def fit_words(folder: Path) -> list[str]:
    config = folder.parent / "config.yaml"
    config.write_text(json.dumps(TINY))
    return [
        "fit", str(config), "--out", str(folder), "--accelerator", "cpu", "--devices", "2", "--strategy", "ddp", "--checkpoint-every", "5", "--no-evaluate"
    ]  # fmt: skip


def weights(folder: Path) -> str:
    return hashlib.sha256((folder / "model" / "base.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    subprocess.run([*supervise.COMMAND, *fit_words(folder)], check=True, capture_output=True, timeout=120)
    return weights(folder)


@pytest.mark.parametrize("repeat", range(REPEATS))
def test_a_lost_rank_changes_nothing(tmp_path: Path, undisturbed: str, repeat: int) -> None:
    """SIGKILL, or SIGSTOP every third time, one of two ranks at a random step."""
    rng, folder, halt = random.Random(repeat), tmp_path / "run", repeat % 3 == 2
    environment = {**os.environ, "SLIMBAYES_STALL_SECONDS": "20" if halt else ""}
    words = [*supervise.COMMAND, *fit_words(folder), "--supervise"]
    process = subprocess.Popen(words, env=environment, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    target = rng.choice([5, 10, 15, 20])
    wait_for(lambda: latest_step(folder) >= target, 90)
    ranks = sorted(ranks_of(process.pid))
    assert len(ranks) == 2
    # The first process starts the second one, so that has the higher number.
    os.kill(ranks[(repeat + 1) % 2], signal.SIGSTOP if halt else signal.SIGKILL)
    told = process.communicate(timeout=150)[1]
    assert process.returncode == 0, told
    assert "starting all of it again" in told
    assert weights(folder) == undisturbed
    assert not any(alive(pid) for pid in ranks)


def ranks_of(supervisor: int) -> list[int]:
    leaders = [int(p) for p in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()]
    return [pid for leader in leaders for pid in members_of(leader)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
