"""Faults of one process of several: kill -9 and SIGSTOP of a rank that torchrun has started."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from fault_suite import Count, fault
from fault_training import ends_alike
from lab_configs import BASE

from slimbayes.lab.configs.files import merged

LIMIT = 30.0  # seconds until the job trains again
SEEDS = (11, 12, 13)  # of three jobs, each of which suffers five faults
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 6 -m slimbayes fit"
TREE: dict[str, Any] = merged(BASE, {"train": {"epochs": 60}}) | {
    "model": {"kind": "mlp", "hidden": [16]}
}


class Job:
    """A training run of two processes under torchrun, and what it printed."""

    def __init__(self, place: Path, name: str) -> None:
        self.out, self.log, config = (
            place / name,
            place / f"{name}.log",
            place / "config.yaml",
        )
        config.write_text(yaml.safe_dump(TREE))
        self.token = f"{os.getpid()}-{name}"
        words = [
            *TORCHRUN.split(),
            config,
            "--accelerator",
            "cpu",
            "--out",
            self.out,
            "--checkpoint-every",
            "3",
        ]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *map(str, words)],
                env=os.environ | {"FAULT_JOB": self.token},
                stdout=log,
                stderr=log,
            )

    @property
    def step(self) -> int:
        """The latest checkpoint's."""
        return max(
            (int(p.name[5:]) for p in self.out.glob("checkpoints/step-*[0-9]")),
            default=0,
        )

    def reaches(self, step: int, seconds: float) -> bool:
        late = time.monotonic() + seconds
        while self.step < step:
            if time.monotonic() > late or self.process.poll() is not None:
                return False
            time.sleep(0.01)
        return True

    def processes(self) -> dict[str, int]:
        """Those that are alive, by rank; torchrun's own is ""."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                pairs = (
                    pair.partition("=")
                    for pair in (folder / "environ").read_text().split("\0")
                )
                variables = {name: value for name, _, value in pairs}
            except OSError:
                continue  # it has ended, or is another user's
            if variables.get("FAULT_JOB") == self.token:
                found[variables.get("RANK", "")] = int(folder.name)
        return found

    def suffer(self, number: signal.Signals, dice: random.Random) -> tuple[bool, float]:
        """Send a signal to a rank some steps from here: was it named, and seconds until the next new checkpoint."""
        rank = dice.choice("01")
        if not self.reaches(self.step + dice.randrange(2, 30), 120):
            return False, float("inf")
        pid, said = self.processes()[rank], self.log.stat().st_size
        os.kill(pid, number)
        start = time.monotonic()
        again = self.reaches(
            self.step + 4, 120
        )  # the second one from here: the first may just be under way
        seconds = time.monotonic() - start if again else float("inf")
        return f"Rank {rank} (process {pid} on" in self.log.read_text()[said:], seconds

    def ends(self) -> bool:
        try:
            return self.process.wait(120) == 0
        except subprocess.TimeoutExpired:
            self.process.kill()
            return False


@fault(
    "two processes under torchrun, one of them killed (10) or stopped (5) at a random step",
    "it is named, the job trains again within 30 s, ends in the same weights and record, and leaves no process",
    "torchrun restarts in place; with gloo, as shipped, 5 of 7 kills went well, one hung 200 s, one failed; a stopped "
    "process is waited for until the group's timeout, and nobody is named",
)
def ranks(place: Path, dice: random.Random) -> Count:
    count, seconds = Count(), {"killed": [], "stopped": []}  # type: ignore[var-annotated]
    whole = Job(place, "whole")
    assert whole.ends(), whole.log.read_text()[-500:]
    for seed in SEEDS:
        dice, job = random.Random(seed), Job(place, f"job-{seed}")
        order = (
            [signal.SIGKILL] * 4 + [signal.SIGSTOP]
            if seed == SEEDS[0]
            else [signal.SIGKILL] * 3 + [signal.SIGSTOP] * 2
        )
        dice.shuffle(order)
        found = [(number, *job.suffer(number, dice)) for number in order]
        alike = job.ends() and ends_alike(job.out, whole.out)
        time.sleep(1)
        orphans = job.processes()
        for number, named, took in found:
            seconds["killed" if number == signal.SIGKILL else "stopped"].append(
                round(took, 1)
            )
            note = f"seed {seed}, {number.name}: named {named}, {took:.1f} s, same end {alike}, left {orphans}"
            count.add(named and took <= LIMIT and alike and not orphans, note)
        for pid in orphans.values():
            os.kill(pid, signal.SIGKILL)
    count.figures = {
        f"seconds until it trained again, {how}": sorted(values)
        for how, values in seconds.items()
    }
    return count
