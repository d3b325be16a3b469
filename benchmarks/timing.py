"""What the benchmarks of steps share: variants that take turns, peak memory, the machine, and a table of results.

Variants take turns in every round, so that whatever else the machine does slows them alike: milliseconds are medians
over rounds, a ratio is the median of the ratios to a reference within a round.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

import slimbayes as sb

Rows = dict[str, dict[str, Any]]  # numbers by method, or {"error": words}
T = TypeVar("T")


def milliseconds(work: Callable[[], Any], device: torch.device) -> float:
    """Mean time of a call: of five on a GPU, so that launches overlap as they do in training."""
    repeats = 5 if device.type == "cuda" else 1
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    _synchronize(device)
    return 1e3 * (time.perf_counter() - start) / repeats


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def race(works: Mapping[str, Callable[[], Any]], reference: str, device: torch.device, rounds: int) -> Rows:
    """{name: {ms, ratio}} after two rounds to warm up; without the reference, ratios are NaN."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for i in range(rounds + 2):
        for name, work in works.items():
            spent = milliseconds(work, device)
            times[name] += [spent] if i >= 2 else []
    base = times.get(reference, [float("nan")] * rounds)
    ratios = {name: statistics.median(a / b for a, b in zip(spent, base, strict=True)) for name, spent in times.items()}
    return {name: {"ms": statistics.median(spent), "ratio": ratios[name]} for name, spent in times.items()}


def prepare(
    builds: Mapping[str, Callable[[], T]], step: Callable[[T], Any], device: torch.device
) -> tuple[dict[str, T], Rows]:
    """Trials that run, and {name: {peak_mib}} of a warm step (None on a CPU), or {name: {error}} where one fails."""
    trials: dict[str, T] = {}
    rows: Rows = {}
    for name, build in builds.items():
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        try:
            trial = build()
            for _ in range(3):
                step(trial)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
                step(trial)
                torch.cuda.synchronize()
        except Exception as error:  # no compiler, not enough memory: the others can still be timed
            rows[name] = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"}
            continue
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20 if device.type == "cuda" else None
        trials[name], rows[name] = trial, {"peak_mib": peak}
    return trials, rows


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers depend on."""
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    versions = {"torch": torch.__version__, "python": platform.python_version(), "slimbayes": sb.__version__}
    return {"device": chip, "cores": os.cpu_count(), "threads": torch.get_num_threads()} | versions


def run_cases(
    cases: Mapping[str, Mapping[str, Any]],
    methods: Sequence[str],
    measure: Callable[[Any, torch.device, bool, int, Sequence[str]], Rows],
    columns: Mapping[str, tuple[str, str]],
    argv: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Measure the cases of a device, eagerly and compiled; print a table of each, and write all to --out.

    A case has `sizes`, a text. `columns`: heading and format of each number, such as {"ms": ("step ms", ".2f")}.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=list(cases))
    parser.add_argument("--cases", default=",".join(cases["cpu"]), help="comma-separated")
    parser.add_argument("--modes", default="eager,compile", help="comma-separated")
    parser.add_argument("--methods", default=",".join(methods), help="comma-separated")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="write the results as JSON to this file")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    record: dict[str, Any] = {"machine": machine(device), "rounds": args.rounds, "results": []}
    print(" ".join(f"{key}={value}" for key, value in record["machine"].items()))
    for name in args.cases.split(","):
        for mode in args.modes.split(","):
            case = cases[args.device][name]
            rows = measure(case, device, mode == "compile", args.rounds, args.methods.split(","))
            show(f"{name}, {mode}: {case.sizes}", rows, columns)
            setting = {"case": name, "mode": mode, "sizes": case.sizes}
            record["results"] += [setting | {"method": method} | row for method, row in rows.items()]
            if args.out:  # after every case: a run that is cut short keeps what it has
                args.out.write_text(json.dumps(record, indent=1) + "\n")
    return record


def show(title: str, rows: Rows, columns: Mapping[str, tuple[str, str]]) -> None:
    """Print a table, a line for each method."""
    print(f"\n{title}\n  {'':22}" + "".join(f"{heading:>12}" for heading, _ in columns.values()))
    for method, row in rows.items():
        cells = (f"{'-' if row[key] is None else format(row[key], style):>12}" for key, (_, style) in columns.items())
        print(f"  {method:22}" + (row["error"] if "error" in row else "".join(cells)), flush=True)
