"""What the fault suite is made of: a list of faults, counts of what became of them, and processes to inject them in."""

import multiprocessing
import os
import random
import resource
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lab_configs import CPU, X, dense, experiment
from slimbayes_lab.runs.fit import fit
from slimbayes_lab.runs.folder import RunError
from slimbayes_lab.runs.training import Diverged

import slimbayes as sb
from slimbayes.files import MARKER

NOTES = 20  # of lost faults that are kept
TOLD = (
    ValueError,
    TypeError,
    OSError,
    FloatingPointError,
    RunError,
    Diverged,
)  # errors that may be a refusal in words
LONGEST = 1500  # characters of a refusal: longer ones print what they refuse


@dataclass
class Count:
    """Faults of a kind: how many were injected, how many survived, why others were lost, and figures."""

    injected: int = 0
    survived: int = 0
    notes: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def add(self, survived: bool, note: str = "", times: int = 1) -> None:
        self.injected += times
        self.survived += times * survived
        if not survived and len(self.notes) < NOTES:
            self.notes.append(note[:250])


@dataclass(frozen=True)
class Fault:
    """A kind of fault: its words for the page, and what injects it in a folder, with dice."""

    title: str
    survival: str
    peers: str
    inject: Callable[[Path, random.Random], Count]


FAULTS: dict[str, Fault] = {}


def fault(
    title: str, survival: str, peers: str
) -> Callable[[Callable[[Path, random.Random], Count]], Any]:
    """Add a function to the suite under its own name."""

    def add(
        inject: Callable[[Path, random.Random], Count],
    ) -> Callable[[Path, random.Random], Count]:
        FAULTS[inject.__name__.replace("_", "-")] = Fault(
            title, survival, peers, inject
        )
        return inject

    return add


def injected(name: str, place: Path) -> Count:
    """Inject a kind of fault; a check that breaks is a fault lost, never one forgotten."""
    folder = place / name
    folder.mkdir(parents=True)
    try:
        count = FAULTS[name].inject(folder, random.Random(name))
    except Exception as error:
        count = Count()
        count.add(False, f"the check itself failed: {type(error).__name__}: {error}")
    shutil.rmtree(folder, ignore_errors=True)
    return count


@dataclass(frozen=True)
class Answer:
    """What a process did: gave a value, raised an error, or was late or killed."""

    kind: str
    value: Any = None
    message: str = ""

    def refused(self, *words: str) -> bool:
        """Whether it refused in a few words, one of these among them."""
        said = self.message.lower()
        return (
            self.kind == "refusal"
            and len(said) < LONGEST
            and any(word.lower() in said for word in words)
        )

    def __str__(self) -> str:
        return f"{self.kind}: {self.message[:200]}" if self.message else self.kind


def ask(
    run: Callable[..., Any],
    *args: Any,
    seconds: float = 20.0,
    file_size: int | None = None,
    memory: int = 2**30,
) -> Answer:
    """Call a function in a fork of this process and wait for its answer.

    Args:
        file_size: writes beyond so many bytes of a file fail, as on a full disk.
        memory: bytes that it may allocate.
    """
    ours, theirs = multiprocessing.get_context("fork").Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(
        target=_answer, args=(theirs, run, args, file_size, memory)
    )
    child.start()
    theirs.close()
    try:
        answer = (
            ours.recv()
            if ours.poll(seconds)
            else Answer("late", message=f"no answer after {seconds:g} s")
        )
    except EOFError:
        answer = Answer("killed")
    child.kill()
    child.join()
    return answer


def _answer(
    pipe: Connection,
    run: Callable[..., Any],
    args: tuple[Any, ...],
    file_size: int | None,
    memory: int,
) -> None:
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
    if file_size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    try:
        answer = Answer("value", run(*args))
    except Exception as error:
        kind = "refusal" if isinstance(error, TOLD) else "error"
        answer = Answer(kind, message=f"{type(error).__name__}: {error}"[: LONGEST + 1])
    pipe.send(answer)


def small_run(folder: Path) -> Path:
    """A finished run, with two checkpoints."""
    chosen = experiment(data={"train_limit": 100, "test_limit": 20})
    return fit(
        chosen, folder, CPU.__class__(accelerator="cpu", workers=0, checkpoint_every=1)
    )


def small_net(seed: int = 0) -> Any:
    """A converted network for rows of X."""
    import torch

    torch.manual_seed(seed)
    net = sb.bayesianize(dense(3), sb.Rank1(members=2))
    sb.predict(net, X[:2])
    return net


def entries(folder: Path) -> set[str]:
    """Names in a folder, hidden ones too, without the lock."""
    return {p.name for p in folder.iterdir()} - {MARKER}


def stopwatch() -> Callable[[], float]:
    start = time.monotonic()
    return lambda: time.monotonic() - start
