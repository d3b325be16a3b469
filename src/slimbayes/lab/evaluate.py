"""What a trained network is judged on: test rows, corrupted ones, shifted ones and unfamiliar ones.

Corruptions are functions of their name, severity and rows, draws of the run's seed and the set: equal weights, equal
scores.
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
from slimbayes.data import Split, corrupt, load
from slimbayes.engine.passes import posteriors_of
from slimbayes.lab.config import Evaluate, Experiment
from slimbayes.lab.evaluation_scores import Scores, class_scores, ood_scores, regression_scores
from slimbayes.lab.execution import Execution, Nobody, Watcher
from slimbayes.lab.intake import check_split
from slimbayes.lab.seeds import generator, key, seed_everything
from slimbayes.lab.task import Rows, Task, batches, limited
from slimbayes.prediction.predict import predict_prefixes
from slimbayes.prediction.prediction import Prediction
from slimbayes.report.record import Evaluation, Example
from slimbayes.train.likelihoods import LikelihoodName

_CHUNK = 1000  # images that are corrupted together: their random numbers depend on it
UNFAMILIAR = ("inverted", "shuffled")  # test images that are none any more
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
    def noise(self) -> float | Tensor:
        """Standard deviation of the noise in the units that the network was trained in."""
        own, units = self.experiment.evaluate.noise, self.task.y_std
        if self.likelihood != "gaussian":
            return 0.0
        return self.experiment.train.noise if own is None else own / (1.0 if units is None else units)

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
                made = predict_prefixes(self.network, x, draws, self.likelihood, self.noise, seed, first, True)
            self._check_finite(raw, made[max(made)].mean, name, first)
            if self.task.y_mean is not None and self.task.y_std is not None:
                made = {n: p.rescaled(self.task.y_mean, self.task.y_std) for n, p in made.items()}
            first += len(y)
            yield made, y

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
    ) -> tuple[list[Evaluation], dict[int, Tensor]]:
        """Evaluations of one set by number of draws, and what `note` says of rows of classes, (N, 5)."""
        about = dict(about or {})
        scores = {count: self._scores() for count in draws}
        notes: dict[int, list[Tensor]] = {count: [] for count in draws}
        name = " ".join([data, role, *map(str, about.values())])
        for found, y in self.predictions(rows, f"{data} {role} {about}", draws, workers, name):
            for count, prediction in found.items():
                scores[count].update(prediction, y)
                if self.likelihood != "gaussian":
                    notes[count].append(note(prediction, y))
        curves = role in ("test", "shift")
        made = [Evaluation(data=data, role=role, draws=n, **about, **s.result(curves)) for n, s in scores.items()]
        return made, {n: torch.cat(parts) for n, parts in notes.items() if parts}

    def _scores(self) -> Scores:
        if self.likelihood == "gaussian":
            return regression_scores(self.device)
        classes, chosen = max(2, len(self.task.classes)), self.experiment.evaluate
        binary, members = self.likelihood == "bernoulli", sb.members(self.network)
        return class_scores(classes, chosen.bins, members, binary, self.device, chosen.drop)

    def validation_scores(self) -> dict[str, float]:
        """NLL, and accuracy or RMSE, of the validation rows in the units of training, with one draw of each member."""
        assert self.task.validation is not None
        chosen = self.experiment.evaluate.model_copy(update={"noise": None})
        experiment = self.experiment.model_copy(update={"evaluate": chosen})
        standardised = self._replace(task=replace(self.task, y_mean=None, y_std=None), experiment=experiment)
        (made,), _ = standardised.score(self.task.validation, [1], self.task.name, "validation")
        if self.likelihood == "gaussian":
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
    check(chosen, task, execution)
    draws = sorted(set(chosen.draws)) if posteriors_of(predictor.network) else [1]
    made, familiar = predictor.score(task.test, draws, task.name, "test", workers=workers)
    if task.validation is not None:
        made += predictor.score(task.in_own_units(task.validation), draws, task.name, "validation")[0]
    for source, about, rows in _corrupted(predictor, execution, watcher or Nobody()):
        made += predictor.score(rows.to(predictor.device), draws, source, "corruption", about)[0]
    for name in chosen.shift:
        rows = limited(_fitting(name, task, execution), chosen.limit)
        made += predictor.score(rows.to(predictor.device), draws, name, "shift")[0]
    for name in chosen.ood:
        rows = _unfamiliar(name, predictor, execution).to(predictor.device)
        predictions = predictor.predictions(rows, f"ood {name}", draws)
        entropies = [{n: p.entropy.double() for n, p in found.items()} for found, _ in predictions]
        for n in draws:
            scores = ood_scores(familiar[n][:, _ENTROPY], torch.cat([entropy[n] for entropy in entropies]))
            made.append(Evaluation(data=name, role="ood", draws=n, rows=len(rows), metrics=scores))
    return made, _examples(task, familiar[draws[-1]], chosen.examples) if chosen.examples and familiar else []


def check(chosen: Evaluate, task: Task, execution: Execution) -> None:
    """Refuse sets that are not there or do not fit, before anything is trained."""
    if chosen.ood and task.real:
        raise ValueError(f"evaluate.ood asks for {chosen.ood[0]}, but {task.name} has real targets: it is for classes.")
    for name in (*chosen.shift, *chosen.ood):
        if name not in UNFAMILIAR:
            _fitting(name, task, execution)
    in_memory = task.images and isinstance(task.test, Split)
    if chosen.corruption_names and not in_memory:
        raise ValueError(f"evaluate.corruptions are for sets of images in memory; {task.name} is not one.")
    if set(chosen.ood) & set(UNFAMILIAR) and not in_memory:
        names = " and ".join(UNFAMILIAR)
        raise ValueError(f"evaluate.ood: {names} are made of images in memory; {task.name} has none.")


def _corrupted(
    predictor: Predictor, execution: Execution, watcher: Watcher
) -> Iterator[tuple[str, dict[str, Any], Split]]:
    """Test images under each corruption and severity: the published ones where they are at hand, else made here."""
    chosen, task, said = predictor.experiment.evaluate, predictor.task, set()
    pairs = [(name, severity) for name in chosen.corruption_names for severity in chosen.severities]
    if not pairs:
        return
    assert isinstance(task.test, Split)
    test = limited(task.test, chosen.limit)
    watcher.begin("corruptions", len(pairs))
    for done, (name, severity) in enumerate(pairs, 1):
        watcher.move(done)
        about = {"corruption": name, "severity": severity}
        if published := _published(task.name, name, severity, execution):
            yield f"{task.name}-c", about, limited(published, chosen.limit)
            continue
        try:
            yield task.name, about, _corrupt(test, name, severity, execution)
        except (ValueError, FileNotFoundError) as error:
            if name not in said:
                watcher.say(f"{name} is left out: {error}")
            said.add(name)


def _published(data: str, name: str, severity: int, execution: Execution) -> Split | None:
    if data not in ("cifar10", "cifar100"):
        return None
    try:
        rows = load(f"{data}-c", execution.data_dir, [f"{name}/{severity}"]).splits[f"{name}/{severity}"]
    except FileNotFoundError:
        return None
    except ValueError as error:
        if "has no split" in str(error):
            return None
        raise  # a damaged file is no reason to judge by other images
    assert isinstance(rows, Split)
    return rows


def _corrupt(test: Split, name: str, severity: int, execution: Execution) -> Split:
    folder = None if execution.data_dir is None else execution.data_dir / "frost"
    parts = []
    for index, images in enumerate(test.x.split(_CHUNK)):
        source = torch.Generator(images.device).manual_seed(key(0, "corrupt", name, severity, index))
        parts.append((corrupt(images.float() / 255, name, severity, source, frost_folder=folder) * 255).round().byte())
    return Split(torch.cat(parts), test.y)


def _fitting(name: str, task: Task, execution: Execution) -> Split:
    """Test rows of another set, of the same shape as the task's."""
    rows = load(name, execution.data_dir, ["test"]).splits["test"]
    if not isinstance(rows, Split):
        raise ValueError(f"{name} is decoded image by image; only sets in memory can be asked for here.")
    if isinstance(task.test, Split) and rows.x.shape[1:] != task.test.x.shape[1:]:
        shape, needed = tuple(rows.x.shape[1:]), tuple(task.test.x.shape[1:])
        raise ValueError(f"{name} has inputs of shape {shape}, but {task.name} has {needed}.")
    check_split(rows, f"{name}, test")
    return rows


def _unfamiliar(name: str, predictor: Predictor, execution: Execution) -> Split:
    """Rows of a set the network never saw, or test images with their colours inverted or their pixels shuffled."""
    limit, test = predictor.experiment.evaluate.limit, predictor.task.test
    if name not in UNFAMILIAR:
        return limited(_fitting(name, predictor.task, execution), limit)
    assert isinstance(test, Split)
    rows = limited(test, limit)
    if name == "inverted":
        return Split(255 - rows.x, rows.y)
    flat = rows.x.flatten(2)
    order = torch.rand(len(flat), 1, flat.shape[2], generator=generator(0, "shuffled")).argsort(2)
    return Split(flat.gather(2, order.expand_as(flat).to(flat.device)).view_as(rows.x), rows.y)


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
