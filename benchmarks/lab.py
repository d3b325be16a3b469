"""Seconds of an epoch in the lab, progress and logging included, and what augmentation takes of it.

    python benchmarks/lab.py [--epochs 5] [--only plain,rank1] [--modes graph,compile,eager] [--out FILE]
    python benchmarks/lab.py --config experiments/cifar10/methods.yaml --rows 12800 --out results/cifar10/cost.json

50,000 random images of CIFAR's shape, WRN-16-4, batches of 128, SGD, crops and flips, bf16; the papers' own data would
take as long. Seconds are the median over epochs after the first. Meant for a GPU; on a CPU pass --rows 512.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from slimbayes.data import Dataset, Split, pad_crop_flip
from slimbayes.lab.config_files import load, read_tree, validate
from slimbayes.lab.execution import Execution
from slimbayes.lab.fit import fit
from slimbayes.lab.run_folder import environment
from slimbayes.lab.trees import row_names
from slimbayes.lab.watchers import Bars

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
    "emp": {"method": {"kind": "ModelPatch", "components": 5, "patch": "norm+output", "tau": None}},
    "ecmp": {"method": {"kind": "ModelPatch", "components": 5, "cross": True, "patch": "norm+output", "tau": None}},
    "ktied": {"method": {"kind": "KTied", "rank": 2}},
    "ktied-flipout": {"method": {"kind": "KTied", "rank": 2, "estimator": "flipout"}},
}
NETWORK = {"kind": "wrn", "depth": 16, "width": 4}
MODES = {"graph": (True, True), "compile": (True, False), "eager": (False, False)}


class Pausing(Bars):
    """Bars that call `after_first` between the first epoch and the second, and `after_last` when all are done."""

    def __init__(self, after_first: Callable[[], object], after_last: Callable[[], object]) -> None:
        super().__init__()
        self.after_first, self.after_last, self.epochs = after_first, after_last, 0

    def move(self, done: int, note: str = "") -> None:
        super().move(done, note)
        if note:  # an epoch is over, and its time was taken
            self.epochs += 1
            if self.epochs == 1:
                self.after_first()
            if done == self.total:
                self.after_last()


def images(rows: int) -> Dataset:
    source = torch.Generator().manual_seed(0)
    x = torch.randint(256, (rows, 3, 32, 32), dtype=torch.uint8, generator=source)
    y = torch.randint(10, (rows,), generator=source)
    return Dataset("random images", {"train": Split(x, y), "test": Split(x[:500], y[:500])}, tuple(map(str, range(10))))


def cases_of(config: Path) -> dict[str, dict[str, Any]]:
    """The methods of a config's rows."""
    found = {row: load(f"{config}#{row}") for row in row_names(read_tree(config))}
    return {row: {"method": one.resolved["method"], "rows": one.train.rows} for row, one in found.items()}


def run(
    name: str, mode: str, data: Dataset, epochs: int, network: dict[str, Any] = NETWORK,
    cases: Mapping[str, Mapping[str, Any]] = CASES, bars: Bars | None = None,
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
        with bars or Bars() as bars:
            fit(experiment, Path(folder) / "run", Execution(compile=compiled, graph=graph), dataset=data, watcher=bars)
        cost = json.loads((Path(folder) / "run" / "cost.json").read_text())
        curve = [
            float(line.split(",")[2]) for line in (Path(folder) / "run" / "metrics.csv").read_text().splitlines()[1:]
        ]
    seconds = sorted(cost["epoch_seconds"][1:] or cost["epoch_seconds"])
    torch._dynamo.reset()
    return {
        "case": name, "mode": mode, "seconds_per_epoch": seconds[len(seconds) // 2], "epochs": cost["epoch_seconds"],
        "losses": curve, "whole_run": time.perf_counter() - start, "peak_memory": cost["peak_memory"],
        "messages": bars.messages,
    }  # fmt: skip


def augmentation(data: Dataset) -> float:
    """Seconds that crops and flips of one epoch take on the GPU, replayed as a graph."""
    x = (data.train.x[:128].cuda().float() / 255).contiguous(memory_format=torch.channels_last)
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--config", type=Path, help="time the methods of its rows instead")
    parser.add_argument("--only")
    parser.add_argument("--modes", default="graph")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    data, cases = images(args.rows), cases_of(args.config) if args.config else CASES
    record: dict[str, Any] = {"environment": environment(), "rows": args.rows, "results": []}
    if torch.cuda.is_available():
        record["augmentation_seconds_per_epoch"] = augmentation(data)
    for mode in args.modes.split(","):
        for name in args.only.split(",") if args.only else cases:
            record["results"].append(run(name, mode, data, args.epochs, cases=cases))
            print(json.dumps(record["results"][-1]), flush=True)
            if args.out:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
