"""What Bayesian steps cost beside plain ones and rivals, and how that grows: every number of docs/performance.md.

    python benchmarks/gpu.py [--only REGEX] [--limit-seconds 520] [--out FILE] [--resume FILE]
    python benchmarks/gpu.py --table FILE      write docs/performance.md from a record, and from cpu.json beside it
    python benchmarks/gpu.py --build           only fill the compiler's cache, while the machine is busy otherwise
    python benchmarks/gpu.py --resume FILE --again REGEX      measure some jobs of a record anew
    python benchmarks/gpu.py --sizes cpu       cases that a CPU can do (make bench); --sizes tiny for a look at all

A job is a case in all its modes, in a process of its own. First all that compile do, side by side, and build what they
time, since that keeps one core each busy and hardly the GPU; then one after another has the machine to itself. Whoever
still compiles when two fifths of the time are over is not waited for. What a record lacks comes first, then what is of
an earlier version, tables of growth last. The record is written whenever a job has more to say, so that a run that is
cut short keeps what it has, and --resume goes on from it. To build, every variant is a job of its own,
"case:compiled:method".
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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import gpu_cases
import gpu_scale
import performance_page
import torch
from gpu_cases import CASES, Case, Trial, Work
from timing import Rows, alarm, machine, prepare, profile, race, versions, words

ROOT = Path(__file__).parents[1]
LAB = ("plain", "rank1", "rank1-split", "batchensemble", "ktied-flipout")
RIVALS = ("torch-uncertainty", "bayesian-torch", "peft", "transformers", "timm")
ABSENT = "ModuleNotFoundError"  # of a rival: nothing to try again
BUILD_SECONDS = 150.0  # for one variant, compilation included
COMPILING = (
    0.4  # of the time: then those that are ready are timed, whoever else compiles
)


def job_names(sizes: str) -> list[str]:
    """ "case:mode" of everything, those that compile first."""
    cases = [
        f"{name}:{mode}"
        for name, case in CASES.items()
        if sizes in case.works
        for mode in case.modes
    ]
    others = (
        []
        if sizes == "cpu"
        else ["lab:graph", *(f"scale-{name}:eager" for name in gpu_scale.SCALES)]
    )
    return sorted(cases + others, key=lambda name: name.endswith(":eager"))


def build_names(names: Sequence[str]) -> list[str]:
    """ "case:mode:method" of what compiles: variants of targets first, since time may run out, then rivals and plain
    networks, which the same graphs serve in several cases.
    """
    aims = {
        (target.case, method)
        for target in performance_page.TARGETS
        for method in target.methods
    }
    pairs = [
        (name, method)
        for name in names
        if not name.endswith(":eager")
        for method in (
            LAB if name.startswith("lab:") else CASES[name.split(":")[0]].variants
        )
    ]
    once = {
        "wrn-batch",
        "wrn-gaussian",
        "pyramid-ecmp",
    }  # their plain networks are those of other cases
    pairs = [
        (name, method)
        for name, method in pairs
        if method != "plain" or name.split(":")[0] not in once
    ]
    pairs.sort(
        key=lambda pair: (
            (pair[0].split(":")[0], pair[1]) not in aims and pair[1] != "plain"
        )
    )
    return [f"{name}:{method}" for name, method in pairs]


# --- one job


class Job:
    """Runs one case in some modes, "case:mode,mode", or "case:mode:method", and keeps its rows."""

    def __init__(
        self,
        name: str,
        sizes: str,
        device: torch.device,
        rounds: int,
        lock: Path | None,
    ) -> None:
        self.name = name
        self.case, modes, *self.methods = name.split(
            ":"
        )  # methods: all where none is named
        self.modes = modes.split(",")
        self.sizes, self.device, self.rounds, self.lock = sizes, device, rounds, lock
        self.rows: dict[
            str, Rows
        ] = {}  # by mode; "recorded" are the compiled variants as CUDA graphs
        self.text, self.has_turn, self.only_build, self.until, self.rank = (
            "",
            False,
            False,
            math.inf,
            0,
        )
        self.save: Callable[[], None] = lambda: None

    def run(self) -> None:
        kind = self.case.split("-")[0]
        {"lab": self.run_lab, "scale": self.run_scale}.get(kind, self.run_case)()

    def run_case(self) -> None:
        """A row for each variant and mode: times and ratios of each kind, peak memory, and a profile."""
        case = CASES[self.case]
        device = torch.device(case.device) if case.device else self.device
        network, self.text = case.works[self.sizes], case.works[self.sizes].sizes
        gpu_cases.settle()
        built = {mode: self.build(case, network, mode, device) for mode in self.modes}
        self.save()
        self.built()
        for mode in (
            sorted(built, reverse=True) if not self.only_build else ()
        ):  # eager, then compiled
            trials, works = built.pop(mode)
            with self.turn():
                self.measure(mode, case, trials, works, device)
            del trials, works

    def build(self, case: Case, network: Work, mode: str, device: torch.device) -> Any:
        """Trials of a mode by method, and by kind what is to be timed of them, warm."""
        builds = {
            name: partial(Trial, network, variant, device, mode == "compiled")
            for name, variant in case.variants.items()
            if (mode == "compiled" or name == "plain" or not variant.whole)
            and (not self.methods or name in self.methods)
        }
        trials, rows = prepare(builds, Trial.train, device, self.patience)
        self.rows[mode] = rows
        plain = rows.get("plain", {}).get("peak_mib")
        for row in rows.values():
            row["peak_ratio"] = (
                row["peak_mib"] / plain if plain and row.get("peak_mib") else None
            )
        works = {
            kind: {
                name: work
                for name, trial in trials.items()
                if (work := self.warm(rows[name], trial, kind))
            }
            for kind in case.kinds
        }
        return trials, works

    def measure(
        self, mode: str, case: Case, trials: Any, works: Any, device: torch.device
    ) -> None:
        for kind in case.kinds:
            for trial in trials.values():
                trial.mode(kind)
            self.time(self.rows[mode], works[kind], kind, device)
            for name, work in works[kind].items():
                if case.variants[name].ours or name == "plain":
                    self.rows[mode][name][f"{kind}_profile"] = profile(work, device)
            self.save()
            if mode == "compiled" and device.type == "cuda":
                graphs = self.rows.setdefault("recorded", {})
                graphs |= {name: graphs.get(name, {}) for name in works[kind]}
                ready = {
                    name: work
                    for name in works[kind]
                    if (work := self.record(graphs[name], trials[name], kind))
                }
                self.time(graphs, ready, kind, device)
                self.save()

    def record(
        self, row: dict[str, Any], trial: Trial, kind: str
    ) -> Callable[[], Any] | None:
        try:
            return trial.recorded(kind)
        except Exception as error:
            torch.cuda.synchronize()
            row[f"{kind}_error"] = words(error)
            return None

    def time(
        self,
        rows: Rows,
        ready: Mapping[str, Callable[[], Any]],
        kind: str,
        device: torch.device,
    ) -> None:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        for name, found in race(ready, "plain", device, self.rounds).items():
            rows[name] |= {f"{kind}_{key}": value for key, value in found.items()}

    def warm(
        self, row: dict[str, Any], trial: Trial, kind: str
    ) -> Callable[[], Any] | None:
        """The work to time, after the compiler has seen it; None where it fails."""
        work = getattr(trial, kind)
        trial.mode(kind)
        try:
            with alarm(self.patience):
                for _ in range(3):
                    work()
        except Exception as error:
            row[f"{kind}_error"] = words(error)
            return None
        return work

    @property
    def patience(self) -> float:
        """Seconds for a variant to build and compile; as long as it takes where nobody waits for it."""
        return BUILD_SECONDS if self.lock and not self.only_build else 0.0

    def run_scale(self) -> None:
        function, self.text = gpu_scale.SCALES[self.case.removeprefix("scale-")]
        with self.turn():
            self.rows["eager"] = function(self.device, self.sizes == "tiny")

    def run_lab(self) -> None:
        """Seconds of an epoch. The first compiles and records the step; the others wait for their turn."""
        import lab

        tiny = self.sizes == "tiny"
        what = "WRN-10-1, eager" if tiny else "WRN-16-4, the step as one CUDA graph"
        self.text = (
            f"{what}, batches of 128, 50,000 made-up pictures of CIFAR-10's shape"
        )
        mode, network = (
            ("eager", lab.NETWORK | {"depth": 10, "width": 1})
            if tiny
            else ("graph", lab.NETWORK)
        )
        data, epochs = (
            lab.images(256 if tiny else 50_000),
            1 if self.only_build else 2 if tiny else 4,
        )
        for name in self.methods or LAB:
            with ExitStack() as stack:
                bars = lab.Pausing(
                    lambda: self.built() or stack.enter_context(self.turn()),
                    stack.close,
                )
                found = lab.run(name, mode, data, epochs, network, bars=bars)
            row = {"seconds": found["seconds_per_epoch"], "messages": found["messages"]}
            row |= (
                {
                    "seconds_profile": found["profile"],
                    "seconds_ms": 1e3 * row["seconds"],
                }
                if found["profile"]
                else {}
            )
            self.rows.setdefault("graph", {})[name] = row
            self.save()

    def built(self) -> None:
        """Say that nothing is left to compile."""
        if self.lock:
            mark(self.lock.parent, "building", self.name).unlink(missing_ok=True)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The right to keep the machine busy, which one process has at a time, those of a lower rank first."""
        if self.lock is None or self.has_turn:
            yield
            return
        folder, mine = (
            self.lock.parent,
            mark(self.lock.parent, f"waiting-{self.rank:03d}", self.name),
        )
        mine.touch()
        while any(folder.glob("building-*")) and time.time() < self.until:
            time.sleep(0.2)
        with self.lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            while min(folder.glob("waiting-*"), default=mine) < mine:
                fcntl.flock(file, fcntl.LOCK_UN)
                time.sleep(0.1)
                fcntl.flock(file, fcntl.LOCK_EX)
            self.has_turn = True
            try:
                yield
            finally:
                self.has_turn = False
                mine.unlink(missing_ok=True)

    def results(self) -> list[dict[str, Any]]:
        setting = {"case": self.case, "sizes": self.text}
        every = (
            (mode, name, row)
            for mode, rows in self.rows.items()
            for name, row in rows.items()
        )
        return [
            setting | {"mode": mode, "method": name} | row for mode, name, row in every
        ]


def mark(folder: Path, what: str, name: str) -> Path:
    """The file that is there while a job compiles, or waits for its turn."""
    return folder / f"{what}-{re.sub('[^a-z0-9-]', '-', name)}"


def run_job(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of a job in this process, written to `args.part` as they come."""
    job = Job(name, args.sizes, torch.device(args.device), args.rounds, args.lock)

    def save() -> None:
        if args.part:
            write(args.part, job.results())

    job.save, job.only_build, job.until, job.rank = (
        save,
        args.build,
        args.until,
        args.rank,
    )
    try:
        job.run()
    except Exception as error:  # a package that is missing, or a case that cannot be built: the others go on
        for mode in job.modes:
            if not timed(job.rows.get(mode, {}).values()):
                job.rows.setdefault(mode, {})[
                    "rest" if job.rows.get(mode) else "all"
                ] = {"error": words(error)}
    save()
    return job.results()


# --- all jobs


def timed(rows: Iterable[dict[str, Any]]) -> bool:
    """Whether any of these rows has a time."""
    return any(key.endswith("_ms") or key == "seconds" for row in rows for key in row)


class Record:
    """What is written to --out whenever a job has more to say."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.out, self.guard, self.start = args.out, threading.Lock(), time.time()
        self.data: dict[str, Any] = {
            "machine": machine(torch.device(args.device)) | versions(*RIVALS),
            "sizes": args.sizes, "rounds": args.rounds, "seconds": 0.0, "results": [], "not_run": [],
        }  # fmt: skip
        if args.resume:
            self._go_on(json.loads(args.resume.read_text()), args.again)
        self.good = {
            f"{row['case']}:{row['mode']}"
            for row in self.data["results"]
            if timed([row])
        }
        again = (
            r
            for r in self.data["results"]
            if r.get("older") or not r.get("error", ABSENT).startswith(ABSENT)
        )
        self.done = self.good - {f"{row['case']}:{row['mode']}" for row in again}

    def _go_on(self, old: dict[str, Any], again: str) -> None:
        here = self.data["machine"] | {"sizes": self.data["sizes"]}
        for key, value in (
            old["machine"] | {"sizes": old["sizes"]}
        ).items():  # numbers of a page are of one machine
            if key in ("device", "sizes") and value != here[key]:
                raise SystemExit(
                    f"--resume: its {key} is {value}, here it is {here[key]}."
                )
            again = again if here.get(key) == value else "."
        # Rows are of an earlier version, of us or of others, until they are measured anew.
        self.data["results"] = [
            row | {"older": True}
            if again and re.search(again, f"{row['case']}:{row['mode']}")
            else row
            for row in old["results"]
        ]
        self.data["seconds"] = 0.0 if again else old["seconds"]
        self.start -= self.data["seconds"]

    def add(self, name: str, rows: list[dict[str, Any]], ended: bool = True) -> None:
        """Rows of a job, in place of those it had; what fails or has no time yet displaces nothing."""

        def place(row: dict[str, Any]) -> tuple[str, str, str]:
            return row["case"], row["mode"], row["method"]

        with self.guard:
            new = {place(row): row for row in rows if timed([row])}
            modes = {key[:2] for key in new}
            kept = [
                row for row in self.data["results"]
                if place(row) not in new and not (row["method"] in ("all", "rest") and place(row)[:2] in modes)
            ]  # fmt: skip
            there = {place(row) for row in kept} | {
                (*place(row)[:2], "all") for row in kept if timed([row])
            }
            other = (
                {place(row): row for row in rows if place(row) not in new}
                if ended
                else {}
            )
            self.data["results"] = [
                *kept,
                *new.values(),
                *(row for key, row in other.items() if key not in there),
            ]
            self.data["not_run"] += [
                f"{', '.join(key)}: {row['error']}"
                for key, row in other.items()
                if key in there and "error" in row
            ]
            self.data["not_run"] += (
                [] if rows or not ended else [f"{name}: no time was left"]
            )
            self.data["seconds"] = round(time.time() - self.start, 1)
            if ended:
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
        numbers = (
            f"{key} {value:.3g}"
            for key, value in row.items()
            if isinstance(value, float)
        )
        print(
            "   ",
            row["method"].ljust(32),
            row.get("error") or "  ".join(numbers),
            flush=True,
        )


def run_apart(
    name: str,
    rank: int,
    args: argparse.Namespace,
    record: Record,
    folder: Path,
    deadline: float,
) -> None:
    """Run a job in a process of its own, and keep the rows it has when time is up."""
    part = mark(folder, "part", name)
    if time.time() > deadline - 5:
        record.add(name, [])
        return
    command = [
        sys.executable,
        __file__,
        "--job",
        name,
        "--part",
        part,
        "--lock",
        folder / "lock",
        "--rank",
        rank,
    ]
    command += [
        "--until",
        deadline - (1 - COMPILING) * args.limit_seconds,
        *(["--build"] if args.build else []),
    ]
    command += ["--sizes", args.sizes, "--device", args.device, "--rounds", args.rounds]
    # Several processes compile at once; each starts as many helpers as this.
    environment = os.environ | {
        "TORCHINDUCTOR_COMPILE_THREADS": "3",
        "OMP_NUM_THREADS": "2",
    }
    with (args.out.with_suffix(".log") if args.out else folder / "log").open(
        "a"
    ) as log:
        process = subprocess.Popen(
            [str(word) for word in command],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    seen, why = 0.0, ""
    while process.poll() is None and not why:
        time.sleep(0.5)
        if part.exists() and part.stat().st_mtime != seen:
            seen = part.stat().st_mtime
            record.add(name, json.loads(part.read_text()), ended=False)
        if time.time() > deadline:
            os.killpg(process.pid, signal.SIGKILL)
            why = "no time was left"
    process.wait()
    why = why or (
        f"the process ended with {process.returncode}" if process.returncode else ""
    )
    for file in folder.glob(f"*-{mark(folder, '', name).name[1:]}"):
        if not file.name.startswith("part"):
            file.unlink(missing_ok=True)
    rows = json.loads(part.read_text()) if part.exists() else []
    case, modes = name.split(":")[:2]
    for mode in modes.split(",") if why else ():
        mine = [row for row in rows if row["mode"] == mode]
        if not timed(mine) or mode == "compiled":
            method = "rest" if mine else "all"
            rows.append(
                {
                    "case": case,
                    "mode": mode,
                    "sizes": "",
                    "method": method,
                    "error": why,
                }
            )
    record.add(name, rows)


def job_list(names: Sequence[str], good: Collection[str]) -> list[tuple[str, int]]:
    """Jobs "case:mode,mode" of some "case:mode", with their ranks: who lacks a time in some mode first, growth last."""
    modes: dict[str, list[str]] = {}
    for name in names:
        case, mode = name.split(":")
        modes.setdefault(case, []).append(mode)
    jobs = [f"{case}:{','.join(some)}" for case, some in modes.items() if case != "lab"]
    jobs += [f"lab:graph:{method}" for method in LAB if "lab" in modes]

    def key(job: str) -> tuple[bool, bool]:
        case, some = job.split(":")[:2]
        return case.startswith("scale"), all(
            f"{case}:{mode}" in good for mode in some.split(",")
        )

    ranks = {job: rank for rank, job in enumerate(sorted(jobs, key=key))}
    return [(job, ranks[job]) for job in jobs]


def run_all(names: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    record, deadline = Record(args), time.time() + args.limit_seconds
    todo = [name for name in names if name not in record.done]
    jobs = (
        [(name, 0) for name in build_names(names)]
        if args.build
        else job_list(todo, record.good)
    )
    if args.workers == 0:
        for name, _ in sorted(jobs, key=lambda job: job[1]):
            record.add(name, run_job(name, args) if time.time() < deadline else [])
        return record.data
    late = sorted(
        [job for job in jobs if job[0].endswith(":eager")], key=lambda job: job[1]
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(args.workers) as many,
    ):
        work = partial(
            run_apart, args=args, record=record, folder=Path(folder), deadline=deadline
        )
        early = [job for job in jobs if job not in late]
        for name, _ in early if not args.build else ():
            mark(Path(folder), "building", name).touch()
        first = [many.submit(work, *job) for job in early]
        wait(
            first,
            None
            if args.build
            else max(
                0.0, deadline - (1 - COMPILING) * args.limit_seconds - time.time()
            ),
        )
        with ThreadPoolExecutor(min(2, args.workers)) as few:
            later = [few.submit(work, *job) for job in late]
        for done in (*first, *later):
            done.result()
    return record.data


def main(argv: Sequence[str] | None = None) -> dict[str, Any] | None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help='a regular expression for "case:mode"'
    )
    parser.add_argument(
        "--sizes",
        default="gpu" if torch.cuda.is_available() else "cpu",
        choices=("gpu", "cpu", "tiny"),
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--limit-seconds", type=float, default=520.0)
    parser.add_argument(
        "--workers",
        type=int,
        help="processes that compile at once; 0 runs all in this one",
    )
    parser.add_argument("--build", action="store_true", help="time nothing")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--resume",
        type=Path,
        help="a record: what it has, of this version and whole, is not run again",
    )
    parser.add_argument(
        "--again",
        default="",
        help="a regular expression for what of it is of an earlier version",
    )
    parser.add_argument(
        "--table",
        type=Path,
        help="write the page from this record, and measure nothing",
    )
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "performance.md")
    parser.add_argument("--until", type=float, default=math.inf, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    for name in ("--job", "--part", "--lock"):  # how this script calls itself
        parser.add_argument(
            name, type=str if name == "--job" else Path, help=argparse.SUPPRESS
        )
    args = parser.parse_args(argv)
    if args.table:
        files = [args.table, *args.table.parent.glob("cpu.json")]
        args.page.write_text(
            performance_page.page(*(json.loads(file.read_text()) for file in files))
        )
        return None
    if args.job:
        run_job(args.job, args)
        return None
    if args.workers is None:
        args.workers = (
            min(12, os.cpu_count() or 2) if args.sizes == "gpu" else 0
        )  # each holds memory of the GPU
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    return run_all(
        [name for name in job_names(args.sizes) if re.search(args.only, name)], args
    )


if __name__ == "__main__":
    main()
