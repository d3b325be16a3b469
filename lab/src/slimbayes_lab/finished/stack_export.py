"""What can be made of a finished run: a stacked run, a file that predicts.

`slimbayes stack RUN` weighs its members or components by its validation rows, in a run of its own, whose directory is a
copy of the old one, but for the weights in posterior/ and model/, its name and its record; the old run stays as it is.

`slimbayes export RUN` writes one .pt2 or .onnx file, which predicts as `slimbayes predict` does. It takes rows as the
run's data have them, and gives real targets in their own units. Rows of a table of one's own are the exception:
categories are codes and numbers are scaled, by what stands in the run's inputs.json, before the file sees them;
the file has a copy of that.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.files import MARKER
from slimbayes.prediction.export import Exported, export
from slimbayes.seeds import key
from slimbayes_lab.configs.files import validate
from slimbayes_lab.data import Split
from slimbayes_lab.execution import Execution
from slimbayes_lab.finished.diagnose import layer_column
from slimbayes_lab.runs.fit import write_record
from slimbayes_lab.runs.folder import RunError, claim_run, seal, write_config
from slimbayes_lab.runs.predictor import Predictor, total_draws
from slimbayes_lab.runs.trained import load_run, read_predictor, save_network
from slimbayes_lab.runs.watchers import Watcher
from slimbayes_lab.tasks.task import Task

_LEFT = (
    "checkpoints",
    "record.json",
    "SHA256SUMS",
    MARKER,
    "log.txt",
)  # behind, where a run is copied


def stack_run(
    run: Path,
    out: Path | None,
    execution: Execution,
    watcher: Watcher,
    draws: int = 200,
) -> tuple[Path, dict[str, Tensor]]:
    """Stack a run (`slimbayes.stack`) on the rows that its training held out, evaluate it, and write its record.

    Args:
        run: of an `Ensemble`, or of `ModelPatch` with one pick for each layer; its config has `data.validation`.
        out: the new run directory; <run>-stacked by default.
        draws: networks that are looked at, for `ModelPatch`.

    Returns: the directory, and the weights by layer.
    """
    predictor = load_run(run, execution)
    experiment, network, task, likelihood = predictor
    if not isinstance(task.validation, Split):
        raise ValueError(
            f"{run} held no rows out in training that could weigh its parts: train it with data.validation=0.1, say."
        )
    folder = out or run.with_name(f"{run.name}-stacked")
    if os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        raise RunError(
            f"{folder} is there already. Choose another directory with --out."
        )
    x, y, seed = (
        task.scaling(task.validation.x),
        task.validation.y,
        key(experiment.seed, "stack"),
    )
    weights = sb.stack(
        network,
        x,
        y,
        draws,
        likelihood=likelihood,
        likelihood_std=predictor.noise,
        seed=seed,
    )
    claim_run(folder)
    shutil.copytree(
        run, folder, ignore=shutil.ignore_patterns(*_LEFT), dirs_exist_ok=True
    )
    experiment = validate(
        experiment.resolved | {"name": f"{experiment.name}-stacked"}, str(run)
    )
    write_config(folder, experiment)
    save_network(folder, network)
    write_record(
        folder,
        experiment,
        predictor._replace(experiment=experiment),
        execution,
        watcher,
    )
    seal(folder)
    return folder, weights


def weight_lines(weights: dict[str, Tensor]) -> list[str]:
    """The weights of each layer, in lines of 80 characters at most.

    Example:
        >>> import torch
        >>> weight_lines({"": torch.tensor([0.25, 0.75])})
        ['(the model)                      0.250 0.750']
    """
    out = []
    for name, values in weights.items():
        shown = [f"{value:.3f}" for value in values.tolist()]
        more = f" … {len(shown)}" if len(shown) > 7 else ""
        out.append(
            f"{layer_column(name or '(the model)', 32)} {' '.join(shown[:7])}{more}"
        )
    return out


class InUnits(nn.Module):
    """A run's network on rows as the data have them, with real targets in their own units, and in float64 where these
    have more digits than float32.

    Shape: (B, ...) -> (B, C) classes, (B, T) targets, or (B, T, 2) targets and raw noise scales.
    """

    def __init__(self, network: nn.Module, task: Task, noisy: bool) -> None:
        super().__init__()
        self.network, self.noisy = network, noisy
        tensors = {
            "mean": task.scaling.mean,
            "std": task.scaling.std,
            "y_mean": task.y_mean,
            "y_std": task.y_std,
        }
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self.mean: Tensor | None
        self.std: Tensor
        self.y_mean: Tensor | None
        self.y_std: Tensor

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.network(
            x if self.mean is None else (x - self.mean) / self.std
        )
        if self.y_mean is None:
            return out
        if not self.noisy:
            return self.y_mean + self.y_std * out
        mean = self.y_mean + self.y_std * out[..., 0]
        return torch.stack(
            [mean, out[..., 1].to(mean.dtype)], -1
        )  # of one type, which ONNX asks for


def export_run(
    run: Path, file: Path, execution: Execution, draws: int = 16
) -> Exported:
    """Write a finished run to a .pt2 or .onnx file, with the draws that `slimbayes predict` uses.

    Images are numbers in [0, 1]; `draws` are those of each member.
    """
    predictor = read_predictor(run, execution.device)
    task, noisy = predictor.task, predictor.likelihood == "heteroscedastic_gaussian"
    scale = predictor.noise if task.y_std is None else predictor.noise * task.y_std
    return export(
        InUnits(predictor.network, task, noisy).to(predictor.device),
        _example(predictor),
        file,
        draws=total_draws(predictor.network, draws),
        likelihood=predictor.likelihood,
        likelihood_std=scale,
        seed=key(predictor.experiment.seed, "evaluate", "predict"),
        notes={
            "classes": list(task.classes),
            "own": None if task.reader is None else task.reader.to_dict(),
        },
    )


def _example(predictor: Predictor) -> Tensor:
    """Two rows like those of training."""
    assert isinstance(predictor.task.test, Split)
    like = predictor.task.test.x
    words = not like.is_floating_point() and not predictor.task.images
    return torch.zeros(
        2,
        *like.shape[1:],
        dtype=like.dtype if words else torch.float32,
        device=predictor.device,
    )
