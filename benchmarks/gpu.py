"""What Bayesian steps cost beside plain ones and rivals, and how that grows: every number of docs/performance.md.

    python benchmarks/gpu.py [--only REGEX] [--limit-seconds 520] [--out FILE] [--resume FILE]
    python benchmarks/gpu.py --table FILE      write docs/performance.md from a record
    python benchmarks/gpu.py --build           only fill the compiler's cache, while the machine is busy otherwise
    python benchmarks/gpu.py --resume FILE --again REGEX      measure some jobs of a record anew
    python benchmarks/gpu.py --sizes cpu       cases that a CPU can do (make bench); --sizes tiny for a look at all

A job is a case in one mode. Jobs that compile run in several processes at once, since compiling keeps one core busy and
no GPU; they time one after another, once all have compiled, for whatever else runs slows what is timed. Those that
still compile when half of the time is over are not waited for. Eager jobs follow, those that a record lacks first. The
record is written after every job, so that a run that is cut short keeps what it has, and --resume goes on from it. To
build, every variant is a job of its own, "case:compiled:method".
timing.py says how it is timed, gpu_cases.py what.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import gpu_cases
import gpu_rivals
import gpu_scale
import performance_page
import torch
from gpu_cases import CASES, Trial
from timing import Rows, alarm, machine, prepare, profile, race, words

ROOT = Path(__file__).parents[1]
LAB = ("plain", "rank1", "rank1-split", "batchensemble", "ktied-flipout")
ABSENT = "ModuleNotFoundError"  # of a rival: nothing to try again
BUILD_SECONDS = 150.0  # for one variant, compilation included


def job_names(sizes: str) -> list[str]:
    """ "case:mode" of everything, those that compile first."""
    cases = [f"{name}:{mode}" for name, case in CASES.items() if sizes in case.works for mode in case.modes]
    others = [] if sizes == "cpu" else ["lab:graph", *(f"scale-{name}:eager" for name in gpu_scale.SCALES)]
    return sorted(cases + others, key=lambda name: name.endswith(":eager"))


def build_names(names: Sequence[str]) -> list[str]:
    """ "case:mode:method" of what compiles: variants of targets first, since time may run out, then rivals and plain
    networks, which the same graphs serve in several cases.
    """
    aims = {(target.case, method) for target in performance_page.TARGETS for method in target.methods}
    pairs = [
        (name, method)
        for name in names
        if not name.endswith(":eager")
        for method in (LAB if name.startswith("lab:") else CASES[name.split(":")[0]].variants)
    ]
    once = {"wrn-batch", "wrn-gaussian", "pyramid-ecmp"}  # their plain networks are those of other cases
    pairs = [(name, method) for name, method in pairs if method != "plain" or name.split(":")[0] not in once]
    pairs.sort(key=lambda pair: (pair[0].split(":")[0], pair[1]) not in aims and pair[1] != "plain")
    return [f"{name}:{method}" for name, method in pairs]


# --- one job


class Job:
    """Runs one case in one mode and keeps its rows."""

    def __init__(self, name: str, sizes: str, device: torch.device, rounds: int, lock: Path | None) -> None:
        self.case, self.mode, *methods = name.split(":")
        self.methods = methods  # those to build; all where none is named
        self.sizes, self.device, self.rounds, self.lock = sizes, device, rounds, lock
        self.rows: Rows = {}
        self.graphs: Rows = {}  # the same variants as CUDA graphs
        self.text, self.has_turn, self.only_build, self.until = "", False, False, math.inf
        self.save: Callable[[], None] = lambda: None

    def run(self) -> None:
        kind = self.case.split("-")[0]
        {"lab": self.run_lab, "scale": self.run_scale}.get(kind, self.run_case)()

    def run_case(self) -> None:
        """A row for each variant: times and ratios of each kind, peak memory, and a profile."""
        case = CASES[self.case]
        device = torch.device(case.device) if case.device else self.device
        network, self.text = case.works[self.sizes], case.works[self.sizes].sizes
        gpu_cases.settle()
        builds = {
            name: partial(Trial, network, variant, device, self.mode == "compiled")
            for name, variant in case.variants.items()
            if (self.mode == "compiled" or not variant.whole) and (not self.methods or name in self.methods)
        }
        # Eager variants are built quickly, with work for the GPU that would slow what others time.
        with self.turn() if self.mode == "eager" else nullcontext():
            trials, self.rows = prepare(builds, Trial.train, device, self.patience)
            plain = self.rows.get("plain", {}).get("peak_mib")
            for row in self.rows.values():
                row["peak_ratio"] = row["peak_mib"] / plain if plain and row.get("peak_mib") else None
            ready = {
                kind: {name: work for name, trial in trials.items() if (work := self.warm(name, trial, kind))}
                for kind in case.kinds
            }
            self.built()
            for kind in () if self.only_build else case.kinds:
                for trial in trials.values():
                    trial.mode(kind)
                self.measure(self.rows, ready[kind], kind, device)
                if self.mode == "compiled" and device.type == "cuda":
                    self.graphs |= {name: self.graphs.get(name, {}) for name in ready[kind]}
                    with self.turn():
                        graphs = {name: work for name in ready[kind] if (work := self.record(name, trials[name], kind))}
                    self.measure(self.graphs, graphs, kind, device)

    def record(self, name: str, trial: Trial, kind: str) -> Callable[[], Any] | None:
        try:
            return trial.recorded(kind)
        except Exception as error:
            torch.cuda.synchronize()
            self.graphs[name][f"{kind}_error"] = words(error)
            return None

    def measure(self, rows: Rows, ready: Mapping[str, Callable[[], Any]], kind: str, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        with self.turn():
            for name, found in race(ready, "plain", device, self.rounds).items():
                rows[name] |= {f"{kind}_{key}": value for key, value in found.items()}
            for name, work in ready.items():
                rows[name][f"{kind}_profile"] = profile(work, device)
        self.save()

    def warm(self, name: str, trial: Trial, kind: str) -> Callable[[], Any] | None:
        """The work to time, after the compiler has seen it; None where it fails."""
        work = getattr(trial, kind)
        trial.mode(kind)
        try:
            with alarm(self.patience):
                for _ in range(3):
                    work()
        except Exception as error:
            self.rows[name][f"{kind}_error"] = words(error)
            return None
        return work

    @property
    def patience(self) -> float:
        """Seconds for a variant to build and compile; as long as it takes where nobody waits for it."""
        return BUILD_SECONDS if self.lock and not self.only_build else 0.0

    def run_scale(self) -> None:
        function, self.text = gpu_scale.SCALES[self.case.removeprefix("scale-")]
        with self.turn():
            self.rows = function(self.device, self.sizes == "tiny")

    def run_lab(self) -> None:
        """Seconds of an epoch; a short run first fills the compiler's cache."""
        import lab

        tiny = self.sizes == "tiny"
        self.text = f"{'WRN-10-1, eager' if tiny else 'WRN-16-4, the step as one CUDA graph'}, batches of 128"
        mode, network = ("eager", lab.NETWORK | {"depth": 10, "width": 1}) if tiny else ("graph", lab.NETWORK)
        small, large = lab.images(256), lab.images(256 if tiny else 50_000)
        for name in () if tiny else self.methods or LAB:
            lab.run(name, mode, small, 1, network)
        self.built()
        for name in () if self.only_build else LAB:
            with self.turn():
                found = lab.run(name, mode, large, 1 if tiny else 3, network)
            seconds, messages = found["seconds_per_epoch"], found["messages"]
            ratio = seconds / self.rows["plain"]["seconds"] if self.rows else 1.0
            self.rows[name] = {"seconds": seconds, "ratio": ratio, "messages": messages}
            self.save()

    def built(self) -> None:
        """Say that nothing is left to compile."""
        if self.lock:
            building(self.lock.parent, f"{self.case}:{self.mode}").unlink(missing_ok=True)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The right to keep the GPU busy, which one process has at a time."""
        if self.lock is None or self.has_turn:
            yield
            return
        while any(self.lock.parent.glob("building-*")) and time.time() < self.until:
            time.sleep(0.2)
        with self.lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.has_turn = True
            yield
        self.has_turn = False

    def results(self) -> list[dict[str, Any]]:
        setting = {"case": self.case, "sizes": self.text}
        return [
            setting | {"mode": mode, "method": name} | row
            for mode, rows in ((self.mode, self.rows), ("recorded", self.graphs))
            for name, row in rows.items()
        ]


def building(folder: Path, name: str) -> Path:
    """The file that is there while a job compiles."""
    return folder / f"building-{name.replace(':', '-')}"


def run_job(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of a job in this process, written to `args.part` as they come."""
    job = Job(name, args.sizes, torch.device(args.device), args.rounds, args.lock)

    def save() -> None:
        if args.part:
            write(args.part, job.results())

    job.save, job.only_build, job.until = save, args.build, args.until
    try:
        job.run()
    except Exception as error:  # a package that is missing, or a case that cannot be built: the others go on
        job.rows["all" if not job.rows else "rest"] = {"error": words(error)}
    save()
    return job.results()


# --- all jobs


class Record:
    """What is written to --out after every job."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.out, self.guard, self.start = args.out, threading.Lock(), time.time()
        self.data: dict[str, Any] = {
            "machine": machine(torch.device(args.device)) | gpu_rivals.versions(),
            "sizes": args.sizes, "rounds": args.rounds, "seconds": 0.0, "results": [], "not_run": [],
        }  # fmt: skip
        failed: set[str] = set()
        if args.resume:
            old = json.loads(args.resume.read_text())
            for key in ("machine", "sizes"):  # numbers of one page come from one machine
                if old[key] != self.data[key]:
                    raise SystemExit(f"--resume: its {key} is {old[key]}, here it is {self.data[key]}.")
            again = (row for row in old["results"] if not row.get("error", ABSENT).startswith(ABSENT))
            failed = {f"{row['case']}:{row['mode']}" for row in again}
            mark = {"older": True} if args.again else {}  # of an earlier version, until it is measured anew
            self.data["results"] = [row | mark for row in old["results"]]
            self.start -= old["seconds"]
        self.known = {f"{row['case']}:{row['mode']}" for row in self.data["results"]}
        anew = {name for name in self.known if args.again and re.search(args.again, name)}
        self.done = self.known - failed - anew

    def add(self, name: str, rows: list[dict[str, Any]]) -> None:
        with self.guard:
            anew = {(row["case"], row["mode"]) for row in rows if "error" not in row}
            self.data["results"] = [row for row in self.data["results"] if (row["case"], row["mode"]) not in anew]
            self.data["results"] += rows if anew or name not in self.known else []
            self.data["not_run"] += [] if rows else [name]
            self.data["seconds"] = round(time.time() - self.start, 1)
            show(name, rows)
            if self.out:
                write(self.out, self.data)


def write(file: Path, data: Any) -> None:
    """Whole or not at all: the process may be killed at any time."""
    new = file.with_name(f".{file.name}")
    new.write_text(json.dumps(data, indent=1) + "\n")
    new.replace(file)


def show(name: str, rows: list[dict[str, Any]]) -> None:
    print(f"{name}: {rows[0]['sizes'] if rows else 'not run'}")
    for row in rows:
        numbers = (f"{key} {value:.3g}" for key, value in row.items() if isinstance(value, float))
        print("   ", row["method"].ljust(32), row.get("error") or "  ".join(numbers), flush=True)


def run_apart(name: str, args: argparse.Namespace, folder: Path, deadline: float) -> list[dict[str, Any]]:
    """The rows of a job run in a process of its own; those it had when time was up."""
    part = folder / f"{name.replace(':', '-')}.json"
    if time.time() > deadline - 5:
        return []
    command = [sys.executable, __file__, "--job", name, "--part", part, "--lock", folder / "lock"]
    command += ["--until", deadline - args.limit_seconds / 2, *(["--build"] if args.build else [])]
    command += ["--sizes", args.sizes, "--device", args.device, "--rounds", args.rounds]
    if not name.endswith(":eager") and not args.build:
        building(folder, name).touch()
    # Several processes compile at once; each starts as many helpers as this.
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "2"}
    with (args.out.with_suffix(".log") if args.out else folder / "log").open("a") as log:
        process = subprocess.Popen(
            [str(word) for word in command], env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            process.wait(max(0.0, deadline - time.time()))
            why = f"the process ended with {process.returncode}" if process.returncode else ""
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            why = "no time was left"
    building(folder, name).unlink(missing_ok=True)
    rows = json.loads(part.read_text()) if part.exists() else []
    if why:
        case, mode = name.split(":")[:2]
        rows.append({"case": case, "mode": mode, "sizes": "", "method": "rest" if rows else "all", "error": why})
    return rows


def run_all(names: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    record, deadline = Record(args), time.time() + args.limit_seconds
    names = build_names(names) if args.build else [name for name in names if name not in record.done]
    names.sort(key=lambda name: name in record.known)
    if args.workers == 0:
        for name in names:
            record.add(name, run_job(name, args) if time.time() < deadline else [])
        return record.data
    eager = [name for name in names if name.endswith(":eager")]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.workers) as many:
        work = partial(run_apart, args=args, folder=Path(folder), deadline=deadline)
        jobs = [many.submit(lambda name: record.add(name, work(name)), name) for name in names if name not in eager]
        wait(jobs, None if args.build else max(0.0, deadline - args.limit_seconds / 2 - time.time()))
        with ThreadPoolExecutor(min(2, args.workers)) as few:
            list(few.map(lambda name: record.add(name, work(name)), eager))
    return record.data


def main(argv: Sequence[str] | None = None) -> dict[str, Any] | None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help='a regular expression for "case:mode"')
    parser.add_argument(
        "--sizes", default="gpu" if torch.cuda.is_available() else "cpu", choices=("gpu", "cpu", "tiny")
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--limit-seconds", type=float, default=520.0)
    parser.add_argument("--workers", type=int, help="processes that compile at once; 0 runs all in this one")
    parser.add_argument("--build", action="store_true", help="time nothing")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume", type=Path, help="a record: jobs it has without errors are not run again")
    parser.add_argument("--again", default="", help="a regular expression for jobs of that record to run all the same")
    parser.add_argument("--table", type=Path, help="write the page from this record, and measure nothing")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "performance.md")
    parser.add_argument("--until", type=float, default=math.inf, help=argparse.SUPPRESS)
    for name in ("--job", "--part", "--lock"):  # how this script calls itself
        parser.add_argument(name, type=str if name == "--job" else Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.table:
        args.page.write_text(performance_page.page(json.loads(args.table.read_text())))
        return None
    if args.job:
        run_job(args.job, args)
        return None
    if args.workers is None:
        args.workers = min(6, (os.cpu_count() or 2) * 3 // 4) if args.sizes == "gpu" else 0
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    return run_all([name for name in job_names(args.sizes) if re.search(args.only, name)], args)


if __name__ == "__main__":
    main()
