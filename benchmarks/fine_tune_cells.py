"""Cells of benchmarks/fine_tune.py: what is measured of a method, the lines of a file, and jobs side by side."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
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


class Workers:
    """So many processes, each with one job at a time; one that met a fault starts anew, as a GPU asks for."""

    def __init__(self, count: int, begin: Callable[[], None]) -> None:
        self._begin = begin
        self.idle = [self._started() for _ in range(count)]
        self.running: dict[Future[Any], tuple[ProcessPoolExecutor, tuple[Any, ...]]] = {}

    def _started(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, get_context("spawn"), self._begin)

    def submit(self, job: tuple[Any, ...]) -> None:
        worker = self.idle.pop()
        self.running[worker.submit(*job)] = (worker, job)

    def ended(self) -> list[tuple[tuple[Any, ...], Future[Any]]]:
        """Jobs that have ended since, at least one, with what came of them."""
        found = []
        for future in wait(self.running, return_when=FIRST_COMPLETED).done:
            worker, job = self.running.pop(future)
            if future.exception() is not None:
                worker.shutdown(wait=False)
                worker = self._started()
            self.idle.append(worker)
            found.append((job, future))
        return found

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in [*self.idle, *(worker for worker, _ in self.running.values())]:
            worker.shutdown(wait=False, cancel_futures=True)


def run_all(workers: Workers, jobs: list[tuple[Any, ...]], cells: Cells, until: float) -> bool:
    """Run jobs side by side, the first ones first, and keep what they give; whether all of them were run.

    What fails has a second try, at the end.
    """
    left, lost, clean = list(jobs), list[tuple[Any, ...]](), True
    while left or workers.running:
        while left and workers.idle and time.monotonic() < until:
            workers.submit(left.pop(0))
        if not workers.running:
            return False
        for job, future in workers.ended():
            if future.exception() is not None:
                print(f"LOST: {job[1:3]} {str(future.exception())[:300]!r}", flush=True)
                clean = clean and job not in lost
                left += [job] if job not in lost else []
                lost.append(job)
            elif isinstance(future.result(), list):
                cells.add(future.result())
    return clean
