"""`slimbayes stack RUN`: weigh the members or components of a trained run by its validation rows, in a run of its own.

The new directory is a copy of the old one, but for the weights in posterior/ and model/, its name and its record; the
old run stays as it is.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from torch import Tensor

import slimbayes as sb
from slimbayes.data import Split
from slimbayes.files import write_text
from slimbayes.lab.config_files import validate
from slimbayes.lab.execution import Execution, Watcher
from slimbayes.lab.fit import load_run, write_record
from slimbayes.lab.run_folder import RunError, seal
from slimbayes.lab.seeds import key
from slimbayes.lab.yaml_text import dump

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

    Example:
        >>> stack_run(Path("runs/emp-0123456789ab"), None, Execution(), Nobody())  # doctest: +SKIP
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


def lines(weights: dict[str, Tensor]) -> list[str]:
    """The weights of each layer, in lines of 80 characters at most.

    Example:
        >>> import torch
        >>> lines({"": torch.tensor([0.25, 0.75])})
        ['(the model)                      0.250 0.750']
    """
    out = []
    for name, values in weights.items():
        shown = [f"{value:.3f}" for value in values.tolist()]
        label = name or "(the model)"
        label = label if len(label) <= 32 else f"…{label[-31:]}"
        out.append(f"{label:<32} " + " ".join(shown[:7]) + (f" … {len(shown)}" if len(shown) > 7 else ""))
    return out
