"""A finished run as diagnostics see it, and the scores of its network, or of a changed one, with standard errors.

Sizes: S draws, N rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.data import Split
from slimbayes.lab.evaluate import Predictor
from slimbayes.lab.execution import Execution
from slimbayes.lab.fit import load_run
from slimbayes.lab.paper_table import Numbers
from slimbayes.metrics.probabilities import labelled
from slimbayes.models import keras_count
from slimbayes.report.record import Evaluation, Record, read

_DROP = 5  # bins of at most so many rows are outliers (Chang et al. 2019, D.2)


@dataclass(frozen=True)
class Case:
    """A finished run (or none), how to reach it, and what to do with it; `picture` is where a plot may be written."""

    folder: Path | None
    picture: Path | None
    draws: int = 1
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    execution: Execution = Execution()  # noqa: RUF009 (frozen)

    @cached_property
    def loaded(self) -> Predictor:
        assert self.folder is not None
        return load_run(self.folder, self.execution)

    @cached_property
    def record(self) -> Record:
        assert self.folder is not None
        return read(self.folder)

    @property
    def rows(self) -> Split:
        """Rows that scores are of, in their own units: the test rows, or with `rows: validation` those held out."""
        task, held_out = self.loaded[2], self.options.get("rows") == "validation"
        found = task.validation if held_out else task.test
        if not isinstance(found, Split):
            raise ValueError(f"{task.name} has no such rows in memory: set data.validation, or leave `rows` out.")
        rows = task.in_own_units(found) if held_out else found  # test rows are in their own units already
        assert isinstance(rows, Split)
        return rows

    def draw(self, make: Callable[[], Any]) -> None:
        """Write a plot, where one is asked for and matplotlib is installed."""
        if self.picture is None:
            return
        try:
            figure = make()
        except ImportError:
            return
        figure.savefig(self.picture, dpi=100)


def scores(case: Case, network: nn.Module) -> Numbers:
    """Scores of a network under the run's own evaluation, with the ELBO per row at full KL weight.

    With a number comes its standard error: `_sem` over test rows, which is what the k-tied paper prints (0.15 % for an
    accuracy of 97.6 % of 10,000 rows), and `_sem_draws` over draws, which is what its captions say.
    """
    task = case.loaded.task
    (made,), _ = case.loaded._replace(network=network).score(case.rows, [case.draws], task.name, "validation")
    with torch.no_grad():
        kl = float(sb.kl(network)) / len(task.train)
        by_draw, by_row = _log_likelihoods(case, network)
    alone = -float(by_draw.mean())
    numbers = {**made.metrics, "neg_elbo": alone + kl, "draw_nll": alone, "kl": kl}
    errors = {"neg_elbo": by_draw.mean(0), **by_row}
    numbers |= {f"{name}_sem": _standard_error(rows) for name, rows in errors.items() if name in numbers}
    if len(by_draw) > 1:
        numbers["neg_elbo_sem_draws"] = _standard_error(by_draw.mean(1))
    if "brier" in numbers:  # TensorFlow Probability's Brier score
        numbers |= {"brier_shifted": numbers["brier"] - 1, "brier_shifted_sem": numbers["brier_sem"]}
    return numbers | {"parameters": float(keras_count(network) - case.options.get("uncounted", 0))}


def _standard_error(values: Tensor) -> float:
    return float(values.double().std() / math.sqrt(len(values)))


@torch.no_grad()
def _log_likelihoods(case: Case, network: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-likelihoods of rows in their own units under each draw, (S, N), and scores of each row, (N,), by name."""
    predictor = case.loaded._replace(network=network)
    experiment = predictor.experiment
    evaluate = experiment.evaluate.model_copy(update={"noise": None})  # the ELBO's noise is that of training
    predictor = predictor._replace(experiment=experiment.model_copy(update={"evaluate": evaluate}))
    by_draw: list[Tensor] = []
    by_row: dict[str, list[Tensor]] = {}
    for found, y in predictor.predictions(case.rows, "elbo", [case.draws]):
        p = found[case.draws]
        logs = p.draw_log_prob(y)
        by_draw.append(logs.flatten(2).sum(-1) if logs.dim() > 2 else logs)
        if not predictor.task.real and y.dim() == 1:
            probs, label = labelled(p, y)
            off = probs - nn.functional.one_hot(label, probs.shape[-1])
            by_row.setdefault("brier", []).append(off.square().sum(-1))
            by_row.setdefault("nll", []).append(-p.log_prob(y))
            by_row.setdefault("accuracy", []).append((p.label == y).double())
    return torch.cat(by_draw, 1), {name: torch.cat(parts) for name, parts in by_row.items()}


def calibration_errors(evaluation: Evaluation) -> Numbers:
    """Calibration errors of an evaluation without its bins of few rows; shares are of all rows."""
    curve = evaluation.reliability
    if curve is None:
        raise ValueError(
            f"The evaluation on {evaluation.data} has no reliability curve to take calibration errors from."
        )
    gaps = [(n, abs(a - c)) for n, a, c in zip(curve.count, curve.accuracy, curve.confidence, strict=True) if n > _DROP]
    return {
        "ece": sum(n * gap for n, gap in gaps) / evaluation.rows,
        "mce": max((gap for _, gap in gaps), default=math.nan),
    }
