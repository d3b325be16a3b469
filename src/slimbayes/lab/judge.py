"""Asking a network about rows, batch by batch, and scoring its answers for several numbers of draws at once.

Noise is a function of the set and the batch, so equal weights give equal scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.lab.config import Evaluate, Experiment
from slimbayes.lab.evaluation_scores import RealScores, Scores, uncertainty
from slimbayes.lab.seeds import seed_everything
from slimbayes.lab.task import Rows, Task, batches
from slimbayes.prediction.predict import predict_prefixes
from slimbayes.prediction.prediction import Likelihood, Prediction
from slimbayes.report.record import Evaluation


@dataclass(frozen=True)
class Judge:
    """A network and how it is asked."""

    network: nn.Module
    task: Task
    likelihood: Likelihood
    experiment: Experiment
    workers: int = 0

    @property
    def chosen(self) -> Evaluate:
        return self.experiment.evaluate

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def predictions(
        self, rows: Rows, place: str, draws: Sequence[int]
    ) -> Iterator[tuple[dict[int, Prediction], Tensor]]:
        """Predictions by number of draws, and targets, batch by batch."""
        precision = torch.autocast(self.device.type, torch.bfloat16, enabled=self.experiment.train.precision == "bf16")
        for index, (x, y) in enumerate(batches(rows, self.chosen.batch, self.device, self.workers)):
            seed_everything(self.experiment.seed, "evaluate", place, index)
            x = self.task.scaling(x)
            if self.device.type == "cuda" and x.dim() == 4:
                x = x.contiguous(memory_format=torch.channels_last)
            with precision:
                found = predict_prefixes(self.network, x, draws, self.likelihood, self._noise())
            if not bool(found[max(found)].mean.isfinite().all()):
                raise FloatingPointError(
                    f"The network's outputs for {place} are NaN or infinite: training has diverged, lower the learning rate or clip gradients."
                )
            if self.task.y_mean is not None and self.task.y_std is not None:
                found = {n: p.rescaled(self.task.y_mean, self.task.y_std) for n, p in found.items()}
            yield found, y

    def _noise(self) -> float | Tensor:
        """Standard deviation of the noise in the units that the network was trained in."""
        if self.likelihood != "gaussian":
            return 0.0
        own = self.chosen.noise
        return (
            self.experiment.train.noise if own is None else own / (1.0 if self.task.y_std is None else self.task.y_std)
        )

    def scores(self) -> Scores | RealScores:
        if self.likelihood == "gaussian":
            return RealScores(self.device)
        return Scores(
            max(2, len(self.task.classes)),
            self.chosen.bins,
            sb.members(self.network),
            self.likelihood == "bernoulli",
            self.device,
            self.chosen.drop,
        )

    def judge(
        self, rows: Rows, draws: Sequence[int], data: str, role: Any, **about: Any
    ) -> tuple[list[Evaluation], dict[int, Tensor]]:
        """Evaluations of one set, one for each number of draws, and the rows' uncertainties."""
        place = f"{data} {role} {about}"
        tables = {count: self.scores() for count in draws}
        doubts: dict[int, list[Tensor]] = {count: [] for count in draws}
        for found, y in self.predictions(rows, place, draws):
            for count, prediction in found.items():
                tables[count].update(prediction, y)
                if self.likelihood != "gaussian":
                    doubts[count].append(uncertainty(prediction))
        curves = role in ("test", "shift")
        made = [
            Evaluation(data=data, role=role, draws=n, **about, **table.result(curves)) for n, table in tables.items()
        ]
        return made, {n: torch.cat(parts) for n, parts in doubts.items() if parts}

    def doubts(self, rows: Rows, place: str, draws: Sequence[int]) -> dict[int, Tensor]:
        """Uncertainties of unlabelled rows, by number of draws."""
        parts: dict[int, list[Tensor]] = {count: [] for count in draws}
        for found, _ in self.predictions(rows, place, draws):
            for count, prediction in found.items():
                parts[count].append(uncertainty(prediction))
        return {n: torch.cat(found) for n, found in parts.items()}


def judge_validation(
    network: nn.Module, task: Task, likelihood: Likelihood, experiment: Experiment, epoch: int
) -> dict[str, float]:
    """NLL, and accuracy or RMSE, of the validation rows after an epoch, with one draw of each member."""
    assert task.validation is not None
    judge = Judge(network, task, likelihood, experiment)
    if likelihood != "gaussian":
        (made,), _ = judge.judge(task.validation, [1], task.name, "validation", severity=0)
        return {f"validation_{name}": made.metrics[name] for name in ("nll", "accuracy")}
    total = torch.zeros(2, dtype=torch.float64, device=judge.device)
    for x, y in batches(task.validation, experiment.evaluate.batch, judge.device):
        seed_everything(experiment.seed, "validation", epoch)
        p = predict_prefixes(network, task.scaling(x), [1], likelihood, experiment.train.noise)[1]
        total += torch.stack([-p.log_prob(y).double().sum(), (p.mean - y).double().square().sum()])
    nll, square = (total / len(task.validation)).tolist()
    return {"validation_nll": nll, "validation_rmse": (square / task.validation.y[0].numel()) ** 0.5}
