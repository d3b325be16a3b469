"""Diagnostics after every fit, from some rows of the run's own: what the record and the terminal show of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from slimbayes.data import Split
from slimbayes.diagnostics.check import check
from slimbayes.lab.evaluate import Predictor
from slimbayes.lab.run_folder import read_losses
from slimbayes.lab.seeds import seed_everything
from slimbayes.lab.task import Rows
from slimbayes.report.record import Diagnostics

_ROWS, _PICTURES = 128, 32  # that are looked at, and of folders, whose pictures are large


def diagnose_fit(predictor: Predictor, folder: Path, curve: Sequence[dict[str, float]]) -> Diagnostics:
    """Diagnostics of a trained network: KL, NLL and k-hat on training rows, label changes on test rows."""
    task, experiment = predictor.task, predictor.experiment
    seed_everything(experiment.seed, "diagnostics")
    (x, y), (unseen, _) = (_some(rows, predictor) for rows in (task.train, task.test))
    weight = curve[-1].get("kl_weight", 1.0) if curve else 1.0
    found = check(
        predictor.network, x, y, predictor.likelihood, predictor.training_noise, len(task.train), weight, unseen
    )
    skipped = sum(not math.isfinite(loss) for loss in read_losses(folder))
    warnings = found.warnings
    if skipped:
        warnings.append(f"The loss of {skipped} steps was not finite. Lower the learning rate or clip gradients.")
    return Diagnostics(**found.to_dict() | {"warnings": warnings}, nonfinite_steps=skipped)


def _some(rows: Rows, predictor: Predictor) -> tuple[Tensor, Tensor]:
    """Inputs as the network takes them and targets of a few rows, spread evenly."""
    most = _ROWS if isinstance(rows, Split) else _PICTURES
    index = torch.linspace(0, len(rows) - 1, min(most, len(rows))).long()
    if isinstance(rows, Split):
        x, y = rows.x[index.to(rows.x.device)], rows.y[index.to(rows.y.device)]
    else:
        x, y = torch.stack([rows[i][0] for i in index.tolist()]), rows.y[index]
    return predictor.task.scaling(x.to(predictor.device)), y.to(predictor.device)
