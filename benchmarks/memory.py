"""How much memory predict takes above the model, the inputs and the result.

    python benchmarks/memory.py [--what library] [--rows 1000000] [--features 8] [--out FILE]

library   a small dense network, rows from one tensor and from a DataLoader, without keeping samples

Each case runs in a process of its own; peaks are of resident memory (ru_maxrss) above what was there before predict.
"""

import argparse
import json
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import slimbayes as sb

MIB = 2**20
Case = Callable[[argparse.Namespace], dict[str, Any]]


def peak() -> float:
    """The most memory this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def network(features: int) -> nn.Module:
    """Dense layers of 64 units and ten classes, with four members."""
    torch.manual_seed(0)
    layers = (nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return sb.bayesianize(nn.Sequential(*layers), sb.Rank1(members=4))


def loaded(rows: int, features: int, batch: int = 1024) -> Iterator[Tensor]:
    """Batches that exist only while they are used."""
    source = torch.Generator().manual_seed(0)
    for start in range(0, rows, batch):
        yield torch.randn(min(batch, rows - start), features, generator=source)


def library(form: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """predict(keep_samples=False) on rows from a tensor or from batches."""
    model = network(chosen.features)
    sb.predict(model, torch.randn(64, chosen.features), seed=0)  # what torch loads on first use
    x: Any = loaded(chosen.rows, chosen.features)
    if form == "tensor":
        x = torch.randn(chosen.rows, chosen.features)
    before, start = peak(), time.perf_counter()
    pred = sb.predict(model, x, draws=chosen.draws, keep_samples=False, seed=0)
    seconds = time.perf_counter() - start
    tensors = (pred.by_member, pred.aleatoric, pred.epistemic)
    result = sum(t.numel() * t.element_size() for t in tensors) / MIB
    return {"above_start_mib": peak() - before, "result_mib": result, "seconds": seconds}


# What can be measured, and in which forms; each gives above_start_mib, result_mib and seconds.
WHAT: dict[str, dict[str, Case]] = {
    "library": {"tensor": partial(library, "tensor"), "batches": partial(library, "batches")}
}


def measured(form: str, chosen: argparse.Namespace, out: Any) -> None:
    torch.set_num_threads(1)
    out.put(WHAT[chosen.what][form](chosen))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=sorted(WHAT), default="library")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--features", type=int, default=8)
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    found, context = {}, multiprocessing.get_context("spawn")
    for form in WHAT[chosen.what]:
        queue = context.Queue()
        process = context.Process(target=measured, args=(form, chosen, queue))
        process.start()
        numbers = queue.get()
        process.join()
        above = numbers["above_start_mib"] - numbers["result_mib"]
        found[form] = {name: round(value, 2) for name, value in (numbers | {"above_result_mib": above}).items()}
    text = json.dumps({"what": chosen.what, "rows": chosen.rows, "features": chosen.features, **found}, indent=2)
    print(text)
    if chosen.out:
        chosen.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
