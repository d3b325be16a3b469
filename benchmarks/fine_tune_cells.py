"""Cells of benchmarks/fine_tune.py: what is measured of a method, the lines of a file, and jobs side by side."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from fine_tune_tasks import DEVICE, Material, Rows
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.metrics import AUROC, calibration

Predict = Callable[[Tensor], sb.Prediction]


def size(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def saved_size(net: nn.Module) -> int:
    with tempfile.TemporaryDirectory() as folder:
        return sum(file.stat().st_size for file in sb.save(net, f"{folder}/adapter").rglob("*") if file.is_file())


def nll_of(predict: Predict, rows: Rows) -> float:
    return -float(predict(rows[0]).log_prob(rows[1]).mean())


def scores(predict: Predict, material: Material) -> dict[str, float]:
    """NLL, ECE, accuracy and seconds on clean rows, NLL and ECE on shifted ones, and how well entropy tells others."""
    began = clock()
    clean = predict(material.clean[0])
    seconds = clock() - began
    target = material.clean[1]
    found = {
        "nll": -float(clean.log_prob(target).mean()),
        "ece": calibration(clean, target).ece,
        "accuracy": float((clean.label == target).float().mean()),
        "predict_seconds": seconds,
    }
    shifted = {name: (predict(x), y) for name, (x, y) in material.shifted.items()}
    nlls = {f"nll {name}": -float(p.log_prob(y).mean()) for name, (p, y) in shifted.items()}
    eces = [calibration(p, y).ece for p, y in shifted.values()]
    other = predict(material.other)
    metric = AUROC()
    for p, is_other in ((clean, 0), (other, 1)):
        metric.update(p.total.cpu(), torch.full((len(p.total),), is_other))
    return (
        found
        | nlls
        | {
            "shifted_nll": sum(nlls.values()) / len(nlls),
            "shifted_ece": sum(eces) / len(eces),
            "auroc": float(metric.compute()),
        }
    )


def clock() -> float:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class Cells:
    """The lines of a file, as they come."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def add(self, lines: list[Any]) -> None:
        with self.file.open("a") as out:
            out.writelines(json.dumps(line) + "\n" for line in lines)
        self.lines += lines

    def has(self, task: str, method: str, seed: int, choice: int | None = None) -> bool:
        wanted = (task, method, seed, choice)
        return any((c["task"], c["method"], c["seed"], c.get("choice")) == wanted for c in self.lines)

    def best(self, task: str, method: str) -> int:
        """The setting of lowest NLL on validation rows; NaN never wins; without any try it is the first."""
        tries = [c for c in self.lines if (c["task"], c["method"], c["seed"]) == (task, method, -1)]
        found = min(tries, key=lambda c: (c["metrics"]["nll"] != c["metrics"]["nll"], c["metrics"]["nll"]), default={})
        return int(found.get("choice", 0))


def run_all(pool: ProcessPoolExecutor, jobs: list[tuple[Any, ...]], cells: Cells, until: float) -> bool:
    """Run jobs side by side, the first ones first, and keep what they give; whether all of them were run."""
    left, running, clean = list(jobs), set[Future[Any]](), True
    workers: int = pool._max_workers  # type: ignore[attr-defined]
    while left or running:
        while left and len(running) < workers and time.monotonic() < until:
            running.add(pool.submit(*left.pop(0)))
        if not running:
            return False
        done, running = wait(running, return_when=FIRST_COMPLETED)
        for job in done:
            if job.exception() is not None:
                print(f"LOST: {job.exception()!r}", flush=True)
                clean = False
            elif isinstance(job.result(), list):
                cells.add(job.result())
    return clean
