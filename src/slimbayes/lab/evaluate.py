"""What a trained network is judged on: test rows, corrupted ones, shifted ones and unfamiliar ones.

Draws are functions of the run's seed and the set: equal weights, equal scores.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.data import Split
from slimbayes.engine.passes import posteriors_of
from slimbayes.lab import judging
from slimbayes.lab.config import Experiment
from slimbayes.lab.execution import Execution, key, seed_everything
from slimbayes.lab.task import Rows, Task, batches, limited
from slimbayes.lab.watchers import Watcher
from slimbayes.prediction.draws import Networks
from slimbayes.prediction.predict import predict_prefixes
from slimbayes.prediction.prediction import Prediction
from slimbayes.report.record import Evaluation, Example
from slimbayes.train.likelihoods import LIKELIHOODS, LikelihoodName

_ENTROPY = 3  # column of what is noted about a row


class Predictor(NamedTuple):
    """A network and what it was trained for."""

    experiment: Experiment
    network: nn.Module
    task: Task
    likelihood: LikelihoodName

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    @property
    def discrete(self) -> bool:
        """Whether it predicts classes, not real numbers."""
        return LIKELIHOODS[self.likelihood].discrete

    @property
    def noise(self) -> float | Tensor:
        """Standard deviation of the noise in the units that the network was trained in."""
        own, units = self.experiment.evaluate.noise, self.task.y_std
        if LIKELIHOODS[self.likelihood].discrete:
            return 0.0
        return self.training_noise if own is None else own / (1.0 if units is None else units)

    @property
    def training_noise(self) -> float:
        """The same in training; one where the network says it, in units of the targets' deviation."""
        return 1.0 if isinstance(self.experiment.noise, str) else self.experiment.noise

    def asked_draws(self) -> list[int]:
        """The numbers of draws that the config asks for; of "exact" how many networks each member can be."""
        asked = self.experiment.evaluate.draws
        if not posteriors_of(self.network):
            return [1]
        return [self._networks] if asked == "exact" else sorted(set(asked))

    @property
    def _networks(self) -> int:
        """How many networks each member can be, where all are run; 0 where the config asks for draws."""
        if self.experiment.evaluate.draws != "exact":
            return 0
        return Networks(self.network, None, True, "auto", 0).count // sb.members(self.network)

    def predictions(
        self, rows: Rows, place: str, draws: Sequence[int], workers: int = 0, name: str = ""
    ) -> Iterator[tuple[dict[int, Prediction], Tensor]]:
        """Predictions by number of draws, and targets, batch by batch; the run's seed and `place` seed their draws."""
        found = batches(rows, self.experiment.evaluate.batch, self.device, workers)
        return self.predict_batches(found, name or place, place, draws)

    def predict_batches(
        self, found: Iterable[tuple[Tensor, Tensor]], name: str, place: str, draws: Sequence[int]
    ) -> Iterator[tuple[dict[int, Prediction], Tensor]]:
        """The same of batches of inputs and targets, as they come; errors call them `name`."""
        seed = key(self.experiment.seed, "evaluate", place)
        precision = torch.autocast(self.device.type, torch.bfloat16, enabled=self.experiment.train.precision == "bf16")
        first = 0
        for index, (raw, y) in enumerate(found):
            seed_everything(self.experiment.seed, "evaluate", place, index)
            x = self.task.scaling(raw.to(self.device))
            if self.device.type == "cuda" and x.dim() == 4:
                x = x.contiguous(memory_format=torch.channels_last)
            with precision:
                made = self._predict(x, draws, seed, first)
            self._check_finite(raw, made[max(made)].mean, name, first)
            if self.task.y_mean is not None and self.task.y_std is not None:
                made = {n: p.rescaled(self.task.y_mean, self.task.y_std) for n, p in made.items()}
            first += len(y)
            yield made, y

    def _predict(self, x: Tensor, draws: Sequence[int], seed: int, first: int) -> dict[int, Prediction]:
        if list(draws) != [self._networks]:
            return predict_prefixes(self.network, x, draws, self.likelihood, self.noise, seed, first, True)
        found = sb.predict(
            self.network, x, "exact", likelihood=self.likelihood, scale=self.noise, seed=seed, allow_nonfinite=True
        )
        return {draws[0]: found}

    def _check_finite(self, inputs: Tensor, outputs: Tensor, name: str, first: int) -> None:
        """Refuse outputs that are not finite, and say whose fault it is: the inputs', the weights' or their size's."""
        bad = (~outputs.isfinite()).flatten(1).any(1) if outputs.dim() > 1 else ~outputs.isfinite()
        if not bool(bad.any()):
            return
        row = int(bad.nonzero()[0])
        told = f"The network's outputs for {name}, row {first + row}, are NaN or infinite"
        if not bool(inputs[row].isfinite().all()):
            raise ValueError(f"{told}, as is that row's input. Fill it in or drop the row.")
        if not all(bool(t.isfinite().all()) for t in self.network.state_dict().values()):
            raise FloatingPointError(
                f"{told}: its weights are, for training has diverged. Lower the learning rate or clip gradients."
            )
        raise FloatingPointError(
            f"{told}: they overflow, although inputs and weights are finite. Training has diverged, or the row is far "
            f"from those of training: lower the learning rate, clip gradients, or look at that row."
        )

    def score(
        self,
        rows: Rows,
        draws: Sequence[int],
        data: str,
        role: Literal["test", "validation", "corruption", "shift", "ood"],
        about: Mapping[str, Any] | None = None,
        workers: int = 0,
        brief: bool = False,
    ) -> tuple[list[Evaluation], dict[int, Tensor]]:
        """Evaluations of one set by number of draws, and what `note` says of rows of classes, (N, 5).

        `brief` is for every epoch: likelihood and errors alone, and no notes.
        """
        about = dict(about or {})
        scores = {n: judging.curve_scores(self.discrete, self.device) if brief else self._scores() for n in draws}
        notes: dict[int, list[Tensor]] = {count: [] for count in draws}
        name = " ".join([data, role, *map(str, about.values())])
        for found, y in self.predictions(rows, f"{data} {role} {about}", draws, workers, name):
            for count, prediction in found.items():
                scores[count].update(prediction, y)
                if self.discrete and not brief:
                    notes[count].append(note(prediction, y))
        curves = role in ("test", "shift")
        made = [Evaluation(data=data, role=role, draws=n, **about, **s.result(curves)) for n, s in scores.items()]
        return made, {n: torch.cat(parts) for n, parts in notes.items() if parts}

    def _scores(self) -> judging.Scores:
        if not self.discrete:
            return judging.regression_scores(self.device)
        classes, chosen = max(2, len(self.task.classes)), self.experiment.evaluate
        binary, members = self.likelihood == "bernoulli", 1 if self._networks > 1 else sb.members(self.network)
        return judging.class_scores(classes, chosen.bins, members, binary, self.device, chosen.drop)

    def scores_after(self, epoch: int, workers: int = 0) -> dict[str, float]:
        """What a curve has of an epoch beside its losses, with one draw of each member: scores of validation rows, and
        of test rows where `train.snapshots` asks for them."""
        train, scores = self.experiment.train, {} if self.task.validation is None else self._validation(workers)
        if train.snapshots is None or not train.snapshots.due(epoch, train.epochs):
            return scores
        (made,), _ = self.score(self.task.test, [1], self.task.name, "test", workers=workers)
        scores |= {f"test_{name}": value for name, value in (made.metrics | made.diversity).items()}
        return scores | {f"member{k}_{name}": v for k, one in enumerate(made.members) for name, v in one.items()}

    def _validation(self, workers: int) -> dict[str, float]:
        """NLL, and accuracy or RMSE, of the validation rows in the units of training."""
        assert self.task.validation is not None
        chosen = self.experiment.evaluate.model_copy(update={"noise": None})
        experiment = self.experiment.model_copy(update={"evaluate": chosen})
        standardised = self._replace(task=replace(self.task, y_mean=None, y_std=None), experiment=experiment)
        rows, name = self.task.validation, self.task.name
        (made,), _ = standardised.score(rows, [1], name, "validation", workers=workers, brief=True)
        if not self.discrete:
            return {"validation_nll": -made.metrics["lpd"], "validation_rmse": made.metrics["rmse"]}
        return {f"validation_{name}": made.metrics[name] for name in ("nll", "accuracy")}


def note(prediction: Prediction, y: Tensor) -> Tensor:
    """Target, predicted class, its probability, entropy and epistemic part of it, of each row: (N, 5)."""
    p, target = prediction, y.argmax(-1) if y.is_floating_point() else y
    return torch.stack([column.double() for column in (target, p.label, p.confidence, p.entropy, p.epistemic)], 1)


def evaluate(
    predictor: Predictor, execution: Execution, watcher: Watcher | None = None
) -> tuple[list[Evaluation], list[Example]]:
    """All evaluations that a config asks for, and the rows it is most and least sure of."""
    task, chosen, workers = predictor.task, predictor.experiment.evaluate, execution.workers
    judging.check(chosen, task, execution)
    draws = predictor.asked_draws()
    made, familiar = predictor.score(task.test, draws, task.name, "test", workers=workers)
    if task.validation is not None:
        rows = task.in_own_units(task.validation)
        made += predictor.score(rows, draws, task.name, "validation", workers=workers)[0]
    for source, about, rows in judging.corrupted(predictor.experiment, task, execution, watcher or Watcher()):
        made += predictor.score(rows.to(predictor.device), draws, source, "corruption", about, workers)[0]
    for name in chosen.shift:
        shifted = limited(judging.fitting(name, task, execution), chosen.limit)
        made += predictor.score(shifted.to(predictor.device), draws, name, "shift")[0]
    for name in chosen.ood:
        strange = judging.unfamiliar(name, chosen.limit, task, execution).to(predictor.device)
        predictions = predictor.predictions(strange, f"ood {name}", draws)
        entropies = [{n: p.entropy.double() for n, p in found.items()} for found, _ in predictions]
        for n in draws:
            scores = judging.ood_scores(familiar[n][:, _ENTROPY], torch.cat([entropy[n] for entropy in entropies]))
            made.append(Evaluation(data=name, role="ood", draws=n, rows=len(strange), metrics=scores))
    return made, _examples(task, familiar[draws[-1]], chosen.examples) if chosen.examples and familiar else []


def _examples(task: Task, notes: Tensor, wanted: int) -> list[Example]:
    """Test rows the network is most and least sure of, by the entropy of its prediction."""
    names, table = task.classes or ("0", "1"), notes.cpu()
    order = table[:, _ENTROPY].sort(stable=True).indices
    count = min(wanted, len(order) // 2)
    made = []
    sides: tuple[tuple[Literal["most", "least"], Tensor], ...] = (("most", order), ("least", order.flip(0)))
    for sure, index in ((sure, index) for sure, side in sides for index in side[:count].tolist()):
        truth, label, confidence, entropy, epistemic = table[index].tolist()
        made.append(Example(
            index=index, sure=sure, label=names[int(truth)], predicted=names[int(label)], confidence=confidence,
            entropy=entropy, epistemic=epistemic, image=_picture(task.test, index),
        ))  # fmt: skip
    return made


def _picture(rows: Rows, index: int) -> str | None:
    """A row's image as a PNG data URL; None where rows are no images of bytes."""
    if not isinstance(rows, Split) or rows.x.dtype != torch.uint8 or rows.x.dim() != 4 or rows.x.shape[1] not in (1, 3):
        return None
    from PIL import Image

    pixels = rows.x[index].permute(1, 2, 0).cpu().numpy()
    out = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(out, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
