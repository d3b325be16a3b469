"""Cells of benchmarks/fine_tune.py: what is measured of a method, and which are there."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable

import cells
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


class Cells(cells.Cells):
    """Those of tasks, methods and seeds."""

    def has(self, task: str, method: str, seed: int, choice: int | None = None) -> bool:
        wanted = (task, method, seed, choice)
        return any((c["task"], c["method"], c["seed"], c.get("choice")) == wanted for c in self.lines)

    def best(self, task: str, method: str) -> int:
        """The setting of lowest NLL on validation rows; NaN never wins; without any try it is the first."""
        tries = [c for c in self.lines if (c["task"], c["method"], c["seed"]) == (task, method, -1)]
        found = min(tries, key=lambda c: (c["metrics"]["nll"] != c["metrics"]["nll"], c["metrics"]["nll"]), default={})
        return int(found.get("choice", 0))
