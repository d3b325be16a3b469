"""Who counts as missing: a process that is gone or stopped, and one far away that trained and fell silent."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from slimbayes.lab.execution import Execution
from slimbayes.lab.runs import watchers as module
from slimbayes.lab.runs.watchers import HOST, Heartbeat, Ranks, Watcher

LOOKS = int(max(s for s in module.SILENCE.values() if s < 1e9) / module.TICK) + 2


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a process, and wait until it is: a signal takes its time."""
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


class Left(BaseException):
    """The process would have ended here."""


@pytest.fixture
def leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr("os._exit", leave)


def rank_0(folder: Path, line: Heartbeat | str) -> Ranks:
    """Rank 0 of two, and what the other wrote last."""
    (folder / ".ranks").mkdir()
    (folder / ".ranks" / "1").write_text(
        line if isinstance(line, str) else json.dumps(line)
    )
    return Ranks(folder, 0, 2, "now", Watcher())


def found(watching: Ranks, looks: int = LOOKS) -> tuple[int, str] | None:
    return next((lost for _ in range(looks) if (lost := watching._missing())), None)


@pytest.mark.parametrize("doing", ["start-up", "step 7"])
def test_a_silent_process_that_runs_is_waited_for(
    doing: str, tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    """It may load, compile or hold Python's lock; the process group's own patience ends that."""
    assert found(rank_0(tmp_path, Heartbeat(3, "now", other.pid, HOST, doing))) is None


def test_a_stopped_process_is_named_and_killed(
    tmp_path: Path,
    other: subprocess.Popen[bytes],
    leaves: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    watching = rank_0(tmp_path, Heartbeat(3, "now", other.pid, HOST, "step 7"))
    stop(other)
    assert found(watching, 5) is None, "a debugger may stop it for a moment"
    lost = found(watching)
    assert lost == (1, "stopped")
    with pytest.raises(Left):
        watching._end(*lost)
    message = capsys.readouterr().err
    assert (
        f"Rank 1 (process {other.pid} on {HOST}) is stopped and was killed" in message
        and "step 7" in message
    )
    assert other.wait(5) == -signal.SIGKILL


def test_one_that_is_stopped_in_the_middle_of_a_line_is_found(
    tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    watching = rank_0(tmp_path, Heartbeat(3, "now", other.pid, HOST, "step 7"))
    assert watching._missing() is None
    (tmp_path / ".ranks" / "1").write_text("[4, ")
    stop(other)
    assert found(watching) == (1, "stopped")


def test_one_that_left_in_order_is_not_missed(
    tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    watching = rank_0(tmp_path, Heartbeat(3, "now", other.pid, HOST, "step 7"))
    assert watching._missing() is None
    (tmp_path / ".ranks" / "1").unlink()
    other.kill()
    assert found(watching) is None


def test_one_that_writes_again_was_not_missing(
    tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    watching = rank_0(tmp_path, Heartbeat(3, "now", other.pid, HOST, "step 7"))
    stop(other)
    for beat in range(LOOKS):
        (tmp_path / ".ranks" / "1").write_text(
            json.dumps(Heartbeat(beat, "now", other.pid, HOST, "step 7"))
        )
        assert watching._missing() is None


def test_a_process_that_is_gone_is_named_instead_of_the_collective_it_broke(
    tmp_path: Path,
    other: subprocess.Popen[bytes],
    leaves: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    watching = rank_0(tmp_path, Heartbeat(3, "now", other.pid, HOST, "step 7"))
    other.kill()
    other.wait()  # a signal takes its time
    with pytest.raises(Left), watching:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")
    assert f"Rank 1 (process {other.pid} on {HOST}) is gone" in capsys.readouterr().err


def test_another_error_is_left_as_it_is(
    tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    other.kill()
    with (
        pytest.raises(RuntimeError, match="^mine$"),
        rank_0(tmp_path, Heartbeat(3, "now", other.pid, HOST, "step 7")),
    ):
        raise RuntimeError("mine")


def test_a_far_process_must_be_heard_once_it_trains(tmp_path: Path) -> None:
    watching = rank_0(tmp_path, Heartbeat(3, "now", 1, "elsewhere", "start-up"))
    assert found(watching) is None
    (tmp_path / ".ranks" / "1").write_text(
        json.dumps(Heartbeat(4, "now", 1, "elsewhere", "step 1"))
    )
    assert found(watching) == (1, "far")


@pytest.mark.parametrize(
    "line",
    ["", "{", "[1, 2]", json.dumps(Heartbeat(3, "before", 2**22 + 1, HOST, "step 7"))],
)
def test_lines_of_a_former_start_or_half_a_line_say_nothing(
    line: str, tmp_path: Path
) -> None:
    assert found(rank_0(tmp_path, line)) is None


def test_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TICK", 0.01)
    with Ranks(tmp_path, 0, 2, "now", Watcher()) as watching:
        watching.move(5)
        while (
            not (watching.place / "0").exists()
            or "step 5" not in (watching.place / "0").read_text()
        ):
            pass
    assert list(tmp_path.iterdir()) == []


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
        dist,
        "TCPStore",
        lambda *place, **options: made.append((*place, options["is_master"])),
    )
    monkeypatch.setattr(dist, "PrefixStore", lambda name, store: made.append(name))
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda kind, **o: made.append((kind, o["rank"], o["world_size"])),
    )
    Execution(accelerator="cpu", devices=2)._meet()
    assert made == [("there", 29, False), "start 3", ("gloo", 1, 2)]
