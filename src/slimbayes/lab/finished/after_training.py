"""What can be made of a finished run: a diagnosis, a stacked run, a file that predicts.

`slimbayes diagnose RUN` is everything the diagnostics say of it, as plain data and as lines of 80 characters. What a
posterior cannot be asked (a spectrum of picks, a k-hat without a density) is said in a line of its own.

`slimbayes stack RUN` weighs its members or components by its validation rows, in a run of its own, whose directory is a
copy of the old one, but for the weights in posterior/ and model/, its name and its record; the old run stays as it is.

`slimbayes export RUN` writes one .pt2 or .onnx file, which predicts as `slimbayes predict` does. It takes rows as the
run's data have them, and gives real targets in their own units. Rows of a table of one's own are the exception:
categories are codes and numbers are scaled, by what stands in the run's inputs.json, before the file sees them;
`slimbayes serve` does that, for the file has a copy of it.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.data import Split
from slimbayes.diagnostics.check import lines as check_lines
from slimbayes.diagnostics.sites import gaussian_sites
from slimbayes.files import write_text
from slimbayes.lab.configs.files import validate
from slimbayes.lab.configs.trees import dump
from slimbayes.lab.execution import Execution, key
from slimbayes.lab.finished.diagnose import Case, elbo, snr, spectrum, truncation
from slimbayes.lab.runs.fit import diagnose_fit, load_run, write_record
from slimbayes.lab.runs.folder import RunError, read_curve, seal
from slimbayes.lab.runs.inputs import read_predictor
from slimbayes.lab.runs.predictor import Predictor
from slimbayes.lab.runs.watchers import Watcher
from slimbayes.lab.tasks.task import Task
from slimbayes.prediction.export import Exported, export

WIDTH = 80
_NAME = 26  # characters of a layer's name
_SCORES = ("neg_elbo", "draw_nll", "kl", "nll", "accuracy", "ece", "mce", "rmse", "lpd", "crps")
_SHOWN = ("neg_elbo", "nll", "accuracy", "ece", "rmse", "lpd")  # scores of truncated posteriors
_LABELS = {"neg_elbo": "-ELBO", "draw_nll": "NLL of a draw", "kl": "KL"}


def diagnose_run(run: Path, execution: Execution, draws: int = 16) -> dict[str, Any]:
    """Look at a finished run: ELBO, scores and calibration of its test rows, the check of its fit with k-hat, spectrum,
    scales cut to ranks 1 to 3 where its matrices have them, and the noise of gradients. `draws` are of each member.
    """
    case = Case(run, run, draws, execution=execution)
    experiment, network, task, _ = case.loaded
    found: dict[str, Any] = {"run": experiment.name, "method": experiment.method_text, "data": task.name}
    found |= {"draws": draws, "notes": []}

    def add(name: str, ask: Callable[[], Any]) -> None:
        try:
            found[name] = ask()
        except (ValueError, TypeError, NotImplementedError, ArithmeticError) as error:
            found["notes"].append(f"{name}: {error}")

    add("scores", lambda: elbo(case)[0])
    add("check", lambda: dict(diagnose_fit(case.loaded, run, read_curve(run))))
    try:
        narrowest = min(min(p.site.matrix) for p in gaussian_sites(network).values())
    except ValueError as error:
        found["notes"].append(f"spectrum, truncation and SNR: {error}")
        return found
    add("spectrum", lambda: spectrum(replace(case, picture=None))[1])
    for rank in (rank for rank in (1, 2, 3) if rank <= narrowest):
        cut = replace(case, options={"rank": rank})
        add(f"rank {rank}", lambda: truncation(cut)[0])  # noqa: B023 (called at once)
    add("snr", lambda: snr(case)[1])
    return found


def diagnosis_lines(found: Mapping[str, Any]) -> list[str]:
    """What was found in lines of at most 80 characters."""
    fold = textwrap.TextWrapper(WIDTH, subsequent_indent="    ", break_on_hyphens=False)
    return [line for whole in _lines(found) for line in fold.wrap(whole) or [whole]]


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"{found['run']}: {found['method']}, {found['data']}"
    if scores := found.get("scores"):
        yield ""
        yield f"Test rows, {found['draws']} draws of each member (± standard error over rows)"
        for name in (name for name in _SCORES if name in scores):
            error = f" ± {scores[f'{name}_sem']:.4f}" if f"{name}_sem" in scores else ""
            yield f"  {_LABELS.get(name, name):<16}{scores[name]:>12.4f}{error}"
    if check := found.get("check"):
        yield ""
        yield "Fit, on some training rows (128 at most)"
        yield from (f"  {line}" for line in check_lines(check, "rmse" in found.get("scores", {})))
        yield from (f"  ! {warning}" for warning in check["warnings"])
    yield from _gaussian(found)
    if found["notes"]:
        yield ""
        yield from (f"Not asked: {note}" for note in found["notes"])


def _gaussian(found: Mapping[str, Any]) -> Iterator[str]:
    """What only posteriors with means and scales have."""
    if spectra := found.get("spectrum"):
        yield ""
        yield "Share of the variance that the first singular values explain"
        yield f"  {'weight':<{_NAME}} {'matrix':>11}  scales: 1      2      3  means: 1"
        for name, one in spectra.items():
            sums = [sum(one["scales"][:k]) for k in (1, 2, 3)]
            shape = "x".join(map(str, one["shape"]))
            shown = " ".join(f"{share:6.4f}" for share in sums)
            yield f"  {_column(name, _NAME)} {shape:>11}   {shown}    {one['means'][0]:6.4f}"
    cut = {name: scores for name, scores in found.items() if name.startswith("rank ")}
    if cut:
        names = [name for name in _SHOWN if any(name in scores for scores in cut.values())]
        yield ""
        yield "Scales cut to a rank"
        yield "  " + f"{'':<10}" + "".join(f"{_LABELS.get(name, name):>12}" for name in names)
        for label, scores in {"as trained": found.get("scores", {}), **cut}.items():
            cells = "".join(f"{scores[name]:>12.4f}" if name in scores else f"{'-':>12}" for name in names)
            yield f"  {label:<10}{cells}"
    if ratios := found.get("snr"):
        yield ""
        yield "Signal-to-noise ratio of the gradients of scales, ten batches, as trained"
        yield f"  {'layer':<{_NAME}} {'mean':>12} {'median':>12}"
        for name, mean in ratios["mean"].items():
            yield f"  {_column(name, _NAME)} {mean:>12.4g} {ratios['median'][name]:>12.4g}"


def _column(name: str, width: int) -> str:
    """A layer's name in a column: its end, where it is long."""
    return f"{name if len(name) <= width else '…' + name[1 - width :]:<{width}}"


_LEFT = ("checkpoints", "record.json", "SHA256SUMS", ".lock", ".claim", "log.txt")


def stack_run(
    run: Path, out: Path | None, execution: Execution, watcher: Watcher, draws: int = 200
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
    if folder.exists() and any(folder.iterdir()):
        raise RunError(f"{folder} is there already. Choose another directory with --out.")
    x, y, seed = task.scaling(task.validation.x), task.validation.y, key(experiment.seed, "stack")
    weights = sb.stack(network, x, y, draws, likelihood=likelihood, scale=predictor.noise, seed=seed)
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns(*_LEFT), dirs_exist_ok=True)
    experiment = validate(experiment.resolved | {"name": f"{experiment.name}-stacked"}, str(run))
    write_text(folder / "config.yaml", dump(experiment.resolved))
    sb.save(network, folder / "posterior")
    sb.save(network, folder / "model", base=True)
    write_record(folder, predictor._replace(experiment=experiment), execution, watcher)
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
        out.append(f"{_column(name or '(the model)', 32)} {' '.join(shown[:7])}{more}")
    return out


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
        notes={"classes": list(task.classes), "own": None if task.reader is None else task.reader.to_dict()},
    )


def _example(predictor: Predictor) -> Tensor:
    """Two rows like those of training."""
    assert isinstance(predictor.task.test, Split)
    like = predictor.task.test.x
    words = not like.is_floating_point() and not predictor.task.images
    return torch.zeros(2, *like.shape[1:], dtype=like.dtype if words else torch.float32, device=predictor.device)
