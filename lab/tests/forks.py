"""Processes that start at once: forks of this one, which has imported torch and the lab already."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch


def start(
    run: Callable[..., object], *args: object, log: Path | str = os.devnull
) -> BaseProcess:
    """Run a function in a fork of this process; what it says goes to a file. It ends with 1 if the function raises."""
    process = multiprocessing.get_context("fork").Process(
        target=_run, args=(run, args, log)
    )
    process.start()
    return process


def _run(run: Callable[..., object], args: tuple[object, ...], log: Path | str) -> None:
    with open(log, "w", buffering=1) as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        sys.stdout = sys.stderr = said
        torch.set_default_device(
            None
        )  # a fork cannot use its parent's GPU; "cpu" would look at every call of torch
        run(*args)


def killed_at(
    number: int, folder: Path, run: Callable[..., object], *args: object
) -> None:
    """Call a function in this process, which gets SIGKILL when it is about to write in a folder for the n-th time.

    A file that is opened, a name that is changed and one that is removed all count. Nothing depends on the clock.
    """
    left = [number]

    def count(event: str, about: tuple[object, ...]) -> None:
        if event in _TOUCHES and str(about[0]).startswith(str(folder)):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    run(*args)


_TOUCHES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def exit_codes(processes: list[BaseProcess], seconds: float) -> list[int | None]:
    """Wait for all of them, and kill those that are late: their codes are -9."""
    for process in processes:
        process.join(seconds)
    for process in processes:
        process.kill()
        process.join()
    return [process.exitcode for process in processes]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Popen:
    """`python -P -m slimbayes_lab WORDS` in a fork, for code that starts it by subprocess.Popen."""

    def __init__(self, words: list[str], **options: object) -> None:
        import lightning_fabric  # noqa: F401 (once, and not in each fork)

        self.process = start(_command, words[words.index("slimbayes_lab") + 1 :])
        self.terminate, self.kill = self.process.terminate, self.process.kill

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("slimbayes", timeout or 0.0)
        return self.process.exitcode


def _command(words: list[str]) -> None:
    """It ends at once: a thread that was forked would be waited for as one of a pool."""
    from slimbayes_lab.command import app

    try:
        app(words)
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
