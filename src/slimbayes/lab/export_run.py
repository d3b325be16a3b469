"""`slimbayes export`: a finished run as one .pt2 or .onnx file, which predicts as `slimbayes predict` does.

The file takes rows as the run's data have them, and gives real targets in their own units. Rows of a table of one's own
are the exception: categories are codes and numbers are scaled, by what stands in the run's inputs.json, before the
file sees them; `slimbayes serve` does that, for the file has a copy of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.data import Split
from slimbayes.lab.evaluate import Predictor
from slimbayes.lab.execution import Execution
from slimbayes.lab.predict_file import read_predictor
from slimbayes.lab.seeds import key
from slimbayes.lab.task import Task
from slimbayes.prediction.export import Exported, export


class InUnits(nn.Module):
    """A run's network on rows as the data have them, with real targets in their own units, and in float64 where these
    have more digits than float32.

    Shape: (B, ...) -> (B, C) classes, (B, T) targets, or (B, T, 2) targets and raw noise scales.
    """

    def __init__(self, network: nn.Module, task: Task, noisy: bool) -> None:
        super().__init__()
        self.network, self.noisy = network, noisy
        tensors = {"mean": task.scaling.mean, "std": task.scaling.std, "y_mean": task.y_mean, "y_std": task.y_std}
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self.mean: Tensor | None
        self.std: Tensor
        self.y_mean: Tensor | None
        self.y_std: Tensor

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.network(x if self.mean is None else (x - self.mean) / self.std)
        if self.y_mean is None:
            return out
        if not self.noisy:
            return self.y_mean + self.y_std * out
        mean = self.y_mean + self.y_std * out[..., 0]
        return torch.stack([mean, out[..., 1].to(mean.dtype)], -1)  # of one type, which ONNX asks for


def export_run(run: Path, file: Path, draws: int = 16, accelerator: Any = "auto") -> Exported:
    """Write a finished run to a .pt2 or .onnx file, with the draws that `slimbayes predict` uses.

    Images are numbers in [0, 1]; `draws` are those of each member.
    """
    predictor = read_predictor(run, Execution(accelerator=accelerator).device)
    task, noisy = predictor.task, predictor.likelihood == "heteroscedastic_gaussian"
    scale = predictor.noise if task.y_std is None else predictor.noise * task.y_std
    return export(
        InUnits(predictor.network, task, noisy).to(predictor.device),
        _example(predictor),
        file,
        draws=draws,
        likelihood=predictor.likelihood,
        scale=scale,
        seed=key(predictor.experiment.seed, "evaluate", "predict"),
        notes={"classes": list(task.classes), "own": None if task.own is None else task.own.facts()},
    )


def _example(predictor: Predictor) -> Tensor:
    """Two rows like those of training."""
    assert isinstance(predictor.task.test, Split)
    like = predictor.task.test.x
    words = not like.is_floating_point() and not predictor.task.images
    return torch.zeros(2, *like.shape[1:], dtype=like.dtype if words else torch.float32, device=predictor.device)
