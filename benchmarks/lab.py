"""Seconds of an epoch in the lab, progress and logging included, and what augmentation takes of it.

    python benchmarks/lab.py [--epochs 5] [--only plain,rank1] [--modes graph,compile,eager] [--out FILE]
    python benchmarks/lab.py --config lab/experiments/cifar10/methods.yaml --jobs 12 --out lab/results/benchmarks/cost.json

50,000 random images of CIFAR's shape, WRN-16-4, batches of 128, SGD, crops and flips, bf16; the papers' own data would
take as long. Seconds are the median over epochs after the first; on a GPU one epoch more is profiled. With --jobs,
cases compile side by side and take turns when they are timed. Meant for a GPU; on a CPU pass --rows 512.
"""

import argparse
import fcntl
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from slimbayes_lab.configs.files import load, read_tree, row_names, validate
from slimbayes_lab.data import Dataset, Split, pad_crop_flip
from slimbayes_lab.execution import Execution
from slimbayes_lab.runs.fit import fit
from slimbayes_lab.runs.folder import environment
from slimbayes_lab.runs.watchers import Bars
from timing import kernels

RANK1 = {
    "kind": "Rank1",
    "members": 4,
    "prior": {"kind": "Normal", "loc": 1.0, "scale": 0.1},
    "mean_init": {"kind": "Normal", "loc": 1.0, "scale": 0.5},
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"method": {"kind": "Deterministic"}},
    "rank1": {"method": RANK1},
    "rank1-split": {"method": RANK1, "rows": "split"},
    "batchensemble": {"method": {"kind": "BatchEnsemble", "members": 4}},
    "emp": {
        "method": {
            "kind": "ModelPatch",
            "components": 5,
            "patch": "norm+output",
            "tau": None,
        }
    },
    "ecmp": {
        "method": {
            "kind": "ModelPatch",
            "components": 5,
            "cross": True,
            "patch": "norm+output",
            "tau": None,
        }
    },
    "ktied": {"method": {"kind": "KTied", "rank": 2}},
    "ktied-flipout": {"method": {"kind": "KTied", "rank": 2, "estimator": "flipout"}},
}
NETWORK = {"kind": "wrn", "depth": 16, "width": 4}
MODES = {"graph": (True, True), "compile": (True, False), "eager": (False, False)}


class Pausing(Bars):
    """Bars that call `after_first` between the first epoch and the second, and `after_last` when all are done.

    On a GPU the last of more than two epochs is profiled: `profile`.
    """

    def __init__(
        self,
        after_first: Callable[[], object] = lambda: None,
        after_last: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__()
        self.after_first, self.after_last, self.epochs = after_first, after_last, 0
        self.profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA]
        )
        self.profile: dict[str, Any] | None = None

    def move(self, done: int, note: str = "") -> None:
        super().move(done, note)
        if note:  # an epoch is over, and its time was taken
            self.epochs += 1
            if self.epochs == 1:
                self.after_first()
            look = torch.cuda.is_available()
            if (
                look
                and self.epochs > 1
                and done * (self.epochs + 1) == self.total * self.epochs
            ):
                self.profiler.start()
            if done == self.total:
                if look and self.epochs > 2:
                    torch.cuda.synchronize()
                    self.profiler.stop()
                    self.profile = kernels(self.profiler, 40)
                self.after_last()


def images(rows: int) -> Dataset:
    source = torch.Generator().manual_seed(0)
    x = torch.randint(256, (rows, 3, 32, 32), dtype=torch.uint8, generator=source)
    y = torch.randint(10, (rows,), generator=source)
    return Dataset(
        "random images",
        {"train": Split(x, y), "test": Split(x[:500], y[:500])},
        tuple(map(str, range(10))),
    )


def cases_of(config: Path) -> dict[str, dict[str, Any]]:
    """The methods of a config's rows."""
    found = {row: load(f"{config}#{row}") for row in row_names(read_tree(config))}
    return {
        row: {"method": one.resolved["method"], "rows": one.train.rows}
        for row, one in found.items()
    }


def run(
    name: str, mode: str, data: Dataset, epochs: int, network: dict[str, Any] = NETWORK,
    cases: Mapping[str, Mapping[str, Any]] = CASES, bars: Pausing | None = None,
) -> dict[str, Any]:  # fmt: skip
    case, (compiled, graph) = cases[name], MODES[mode]
    cuda = torch.cuda.is_available()
    train = {
        "epochs": epochs, "batch": 128, "rows": case.get("rows", "tile"), "optimizer": {"kind": "SGD", "lr": 0.1},
        "schedule": {"kind": "Cosine"}, "weight_decay": 4e-4, "precision": "bf16" if cuda else "32",
        "kl": {"kind": "Linear"},
    }  # fmt: skip
    experiment = validate({
        "name": name, "data": {"name": "random images"}, "model": network,
        "method": case["method"], "augment": {"kind": "pad_crop_flip", "pad": 4}, "train": train,
        "evaluate": {"examples": 0},
    })  # fmt: skip
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        with bars or Pausing() as bars:
            fit(
                experiment,
                Path(folder) / "run",
                Execution(compile=compiled, graph=graph),
                dataset=data,
                watcher=bars,
            )
        cost = json.loads((Path(folder) / "run" / "cost.json").read_text())
        curve = [
            float(line.split(",")[2])
            for line in (Path(folder) / "run" / "metrics.csv")
            .read_text()
            .splitlines()[1:]
        ]
    every = cost["epoch_seconds"]
    seconds = sorted(every[1 : -1 if bars.profile else None] or every)
    torch._dynamo.reset()
    return {
        "case": name, "mode": mode, "seconds_per_epoch": seconds[len(seconds) // 2], "epochs": every,
        "losses": curve, "whole_run": time.perf_counter() - start, "peak_memory": cost["peak_memory"],
        "messages": bars.messages, "profile": bars.profile,
    }  # fmt: skip


def augmentation(data: Dataset) -> float:
    """Seconds that crops and flips of one epoch take on the GPU, replayed as a graph."""
    x = (data.train.x[:128].cuda().float() / 255).contiguous(
        memory_format=torch.channels_last
    )
    pad_crop_flip(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pad_crop_flip(x)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(len(data.train) // 128):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument(
        "--config", type=Path, help="time the methods of its rows instead"
    )
    parser.add_argument("--only")
    parser.add_argument("--modes", default="graph")
    parser.add_argument(
        "--jobs", type=int, default=1, help="cases that compile side by side"
    )
    parser.add_argument(
        "--lock", type=Path, help=argparse.SUPPRESS
    )  # how this script calls itself
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    data, cases = images(args.rows), cases_of(args.config) if args.config else CASES
    names = args.only.split(",") if args.only else list(cases)
    record: dict[str, Any] = {
        "environment": environment(),
        "rows": args.rows,
        "results": [],
    }
    if torch.cuda.is_available() and not args.lock:
        record["augmentation_seconds_per_epoch"] = augmentation(data)
    with ExitStack() as stack, ThreadPoolExecutor(args.jobs) as pool:

        def alone(job: tuple[str, str]) -> dict[str, Any]:
            """A case in a process of its own, which waits for the lock when it is to be timed."""
            words = [
                sys.executable,
                __file__,
                "--only",
                job[1],
                "--modes",
                job[0],
                "--lock",
                str(lock),
            ]
            words += ["--epochs", str(args.epochs), "--rows", str(args.rows)]
            words += ["--config", str(args.config)] if args.config else []
            text = subprocess.run(
                words, check=True, stdout=subprocess.PIPE, text=True
            ).stdout
            return json.loads(text.splitlines()[-1])  # type: ignore[no-any-return]

        def here(job: tuple[str, str]) -> dict[str, Any]:
            held = ExitStack()
            bars = Pausing(lambda: held.enter_context(_locked(args.lock)), held.close)
            return run(job[1], job[0], data, args.epochs, cases=cases, bars=bars)

        lock = (
            args.lock
            or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "lock"
        )
        jobs = [(mode, name) for mode in args.modes.split(",") for name in names]
        for found in pool.map(alone, jobs) if args.jobs > 1 else map(here, jobs):
            record["results"].append(found)
            print(json.dumps(found), flush=True)
            if args.out:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(record, indent=1) + "\n")


@contextmanager
def _locked(file: Path | None) -> Iterator[None]:
    """The right to time, which one process has at a time."""
    with ExitStack() as stack:
        if file:
            fcntl.flock(stack.enter_context(file.open("w")), fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    main()
