"""How steps are timed: variants that take turns, peak memory, what the GPU was busy with, and the machine.

Variants take turns in every round, so that whatever else the machine does slows them alike: milliseconds are medians
over rounds, a ratio is the median of the ratios to a reference within a round. On a GPU its own events are read.
"""

import gc
import importlib.metadata
import os
import platform
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch._dynamo.utils
from torch.autograd import DeviceType

import slimbayes as sb

Rows = dict[str, dict[str, Any]]  # numbers by method, or {"error": words}
T = TypeVar("T")
TURN_MS = 40.0  # a variant's turn repeats its work for about as long, so that launches overlap as they do in training


def milliseconds(
    work: Callable[[], Any], device: torch.device, repeats: int = 1
) -> float:
    """Mean time of a call."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        return 1e3 * (time.perf_counter() - start) / repeats
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def race(
    works: Mapping[str, Callable[[], Any]],
    reference: str,
    device: torch.device,
    rounds: int,
    seconds: float = 1.5,
) -> Rows:
    """{name: {ms, ratio, spread}} of so many rounds; once `seconds` are over, five are enough.

    The spread is the distance between the quartiles of the ratio. Without the reference there are neither.
    """
    for work in works.values():
        work()
    least = 4 if device.type == "cuda" else 1
    repeats = {
        n: max(least, min(20, round(TURN_MS / milliseconds(work, device))))
        for n, work in works.items()
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    stop = time.perf_counter() + seconds
    for i in range(rounds):
        for name, work in works.items():
            times[name].append(milliseconds(work, device, repeats[name]))
        if i >= 4 and time.perf_counter() > stop:
            break
    out: Rows = {
        name: {"ms": statistics.median(spent)} for name, spent in times.items()
    }
    for name, spent in times.items() if reference in times else ():
        ratios = [a / b for a, b in zip(spent, times[reference], strict=True)]
        quartiles = (
            statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        )
        out[name] |= {
            "ratio": statistics.median(ratios),
            "spread": quartiles[2] - quartiles[0],
        }
    return out


def prepare(
    builds: Mapping[str, Callable[[], T]],
    step: Callable[[T], Any],
    device: torch.device,
    limit: float = 0.0,
) -> tuple[dict[str, T], Rows]:
    """Trials that run, and {name: {peak_mib}} of a warm step (None on a CPU), or {name: {error}} where one fails or
    takes longer than `limit` seconds to build and compile.
    """
    trials: dict[str, T] = {}
    rows: Rows = {}
    for name, build in builds.items():
        gc.collect()  # what is given back only later would make the peak too small
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        start, breaks = time.perf_counter(), graph_breaks()
        try:
            with alarm(limit):
                trial = build()
                for _ in range(3):
                    step(trial)
                peak = peak_mib(lambda: step(trial), device, before)  # noqa: B023 - called at once
        except (
            Exception
        ) as error:  # no compiler, not enough memory: the others can still be timed
            rows[name] = {"error": words(error)}
            continue
        trials[name] = trial
        rows[name] = {"peak_mib": peak, "build_seconds": time.perf_counter() - start}
        rows[name]["graph_breaks"] = graph_breaks() - breaks
        if device.type == "cuda":
            torch.cuda.empty_cache()  # others build beside us
    return trials, rows


def graph_breaks() -> int:
    """How often the compiler gave up on a graph so far and let Python go on: more than none is not one graph."""
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def words(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


@contextmanager
def alarm(seconds: float, error: type[BaseException] = TimeoutError) -> Iterator[None]:
    """Raise TimeoutError inside after so many seconds; 0 for never."""
    if not seconds:
        yield
        return

    def ring(*_: Any) -> None:
        raise error(f"not ready after {seconds:.0f} seconds")

    old = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def peak_mib(
    work: Callable[[], Any], device: torch.device, before: int | None = None
) -> float | None:
    """Most memory during a call, above `before` or above what was taken when it began; None on a CPU."""
    if device.type != "cuda":
        work()
        return None
    before = torch.cuda.memory_allocated() if before is None else before
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def profile(work: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """What one call keeps a GPU busy with: milliseconds and number of kernels, and the longest of them. On a CPU the
    number of operations. {"error": words} where it cannot be told.
    """
    try:
        return _profile(work, device)
    except (
        Exception
    ) as error:  # a machine may not let us look; the times stand without it
        return {"error": words(error)}


def _profile(work: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    cuda = device.type == "cuda"
    activity = (
        torch.profiler.ProfilerActivity.CUDA
        if cuda
        else torch.profiler.ProfilerActivity.CPU
    )
    with torch.profiler.profile(activities=[activity]) as found:
        work()
        if cuda:
            torch.cuda.synchronize()
    if cuda:
        return kernels(found)
    events = [e for e in found.key_averages() if e.device_type == DeviceType.CPU]
    return {"kernels": sum(e.count for e in events if e.key.startswith("aten::"))}


def kernels(found: torch.profiler.profile, shown: int = 8) -> dict[str, Any]:
    """What a profile that has ended saw on the GPU."""
    events = [
        e for e in found.key_averages()
        if e.device_type == DeviceType.CUDA and not getattr(e, "is_user_annotation", False)
    ]  # fmt: skip
    longest = sorted(events, key=lambda e: -e.self_device_time_total)[:shown]
    return {
        "busy_ms": sum(e.self_device_time_total for e in events) / 1e3,
        "kernels": sum(e.count for e in events),
        "longest": [
            [e.key[:80], e.count, e.self_device_time_total / 1e3] for e in longest
        ],
    }


def versions(*packages: str) -> dict[str, str]:
    """Of those installed."""
    found, names = (
        {},
        importlib.metadata.packages_distributions(),
    )  # some are imported under another name
    for name in packages:
        try:
            found[name] = importlib.metadata.version(names.get(name, [name])[0])
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers depend on."""
    chip = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor() or platform.machine()
    )
    versions = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "slimbayes": sb.__version__,
    }
    return {
        "device": chip,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    } | versions
