"""The network of an experiment, what its outputs stand for, and its predictions and scores of rows.

Draws are functions of the run's seed and the set: equal weights, equal scores.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import slimbayes as sb
from slimbayes.engine.passes import posteriors_of
from slimbayes.posteriors.configs.base import Config
from slimbayes.prediction.draws import Networks
from slimbayes.prediction.predict import predict_prefixes
from slimbayes.prediction.prediction import Prediction
from slimbayes.seeds import key, seed_everything
from slimbayes.tables import WithNoise
from slimbayes.train.likelihoods import LIKELIHOODS, LikelihoodName
from slimbayes_lab.configs.experiment import Experiment
from slimbayes_lab.configs.own import PythonNet
from slimbayes_lab.data import Split
from slimbayes_lab.report.record import Evaluation, Role
from slimbayes_lab.runs.scores import (
    Scores,
    class_scores,
    curve_scores,
    regression_scores,
)
from slimbayes_lab.tasks.rows import Rows
from slimbayes_lab.tasks.task import Task, batches


class TooLarge(ValueError):
    """A network that would not fit into memory, or has more numbers than its checkpoint."""


class _SizesAlone(TorchFunctionMode):
    """Tensors are made without numbers, on the meta device, and not started; more than `most` numbers end it."""

    def __init__(self, most: float) -> None:
        super().__init__()
        self.most = most
        self.made = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        changed = args[0] if args else options.get("tensor")
        name = getattr(func, "__name__", "")
        # Starting values: on the meta device they would only take time.
        if isinstance(changed, Tensor) and name[-1:] == "_" and name[-2:] != "__":
            return changed
        out = func(*args, **options)
        if isinstance(out, Tensor) and not types:
            self.made += out.numel()
            if self.made > self.most:
                raise TooLarge
        return out


def check_size(make: Callable[[], nn.Module], most: float, told: str) -> None:
    """Refuse a network of more than `most` numbers before it takes any memory; `told` says why it is too large."""
    found: float = math.inf
    count = f"more than {most:,.0f}"
    try:
        # A parameter counts up to three times while it is made.
        with torch.device("meta"), _SizesAlone(4 * most + 1_000_000):
            found = sum(p.numel() for p in make().parameters())
            count = f"{found:,}"
    except TooLarge:
        pass
    if found > most:
        raise TooLarge(f"The network of the config has {count} numbers, {told}")


def _memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def total_draws(network: nn.Module, each: int) -> int:
    """How many draws to ask the library for, given those of each member.

    Configs, commands and records of the laboratory count the draws of each member, the library counts them all.
    """
    return each * sb.members(network)


def plain_network(
    experiment: Experiment,
    facts: Mapping[str, Any],
    data: str,
    file_size: int | None = None,
) -> nn.Module:
    """The network that a config names, filled with what the data say about it, before it says its noise.

    One that does not fit into memory is refused before it takes any; so is one of more numbers than `file_size`, the
    bytes of the files that hold its weights, if there are any.
    """
    if experiment.noise == "heteroscedastic" and _real(facts):
        facts = {**facts, "outputs": 2 * facts["outputs"]}
    make: Callable[[], nn.Module] = partial(experiment.model.network, facts, data)
    if isinstance(experiment.model, PythonNet):
        return make()
    if file_size is not None:
        told = f"but the files of its weights have only {file_size:,} bytes: they belong to another network."
        check_size(make, file_size, told)
    memory = _memory()
    told = f"and this machine has {memory / 1e9:,.0f} GB of memory: give `model` smaller sizes."
    check_size(make, memory / 4, told)
    return make()


def with_noise(
    experiment: Experiment, facts: Mapping[str, Any], network: nn.Module
) -> nn.Module:
    """A network of real targets that says their noise too, where a config has it learnt; others as they are."""
    if not isinstance(experiment.noise, str) or not _real(facts):
        return network
    return WithNoise(network, facts["outputs"], experiment.noise)


def _real(facts: Mapping[str, Any]) -> bool:
    return "outputs" in facts and "classes" not in facts


def build_network(
    experiment: Experiment, task: Task, network: nn.Module | None = None
) -> nn.Module:
    """The experiment's network, converted, as the seed starts it; or a given one, converted."""
    seed_everything(experiment.seed, "network")
    facts = task.fills()
    afresh = partial(plain_network, experiment, facts, task.name)
    plain, method = network or afresh(), experiment.method.build()
    include, exclude = experiment.include, experiment.exclude
    if isinstance(method, Config) and not (network or include or exclude):
        method = method.of_networks_from(afresh)
    built = sb.bayesianize(plain, method, include=include, exclude=exclude)
    return with_noise(experiment, facts, built)


def likelihood_of(
    experiment: Experiment, task: Task, network: nn.Module
) -> LikelihoodName:
    """What a network's outputs stand for: real targets, with their noise or not, classes, or one logit for two.

    Two rows are run, so that a network whose outputs do not fit the targets is refused before it is trained.
    """
    if (
        not task.real
        and isinstance(experiment.train.noise, str)
        and experiment.data.source is None
    ):
        raise ValueError(
            f"train.noise is {experiment.noise}, but {task.name} has classes: noise is for real targets."
        )
    if not isinstance(task.train, Split):
        return "categorical"
    outputs = _outputs(task, task.train.x[:2], network)
    found: LikelihoodName = (
        "bernoulli" if outputs.dim() == 2 and len(task.classes) == 2 else "categorical"
    )
    if task.real:
        found = (
            "heteroscedastic_gaussian"
            if isinstance(experiment.noise, str)
            else "gaussian"
        )
    if task.train.y.dim() == (2 if task.real else 1):
        _check_outputs(task, tuple(outputs.shape[2:]), found)
    return found


def _check_outputs(task: Task, got: tuple[int, ...], found: LikelihoodName) -> None:
    """Refuse the outputs of a row, (...), that are not one for each class or target."""
    assert isinstance(task.train, Split)
    targets = task.train.y[0].numel()
    needed = {
        "bernoulli": (),
        "categorical": (len(task.classes),),
        "gaussian": (targets,),
    }.get(found, (targets, 2))
    if got != needed:
        what = f"{targets} targets" if task.real else f"{len(task.classes)} classes"
        name = "outputs" if task.real else "classes"
        raise ValueError(
            f"The network gives outputs of shape {got} for a row, but {task.name} has {what}: shape {needed} is "
            f"needed. A function of model.python is told the number if it takes an argument {name!r}."
        )


@torch.no_grad()
def _outputs(task: Task, rows: Tensor, network: nn.Module) -> Tensor:
    """Draws' outputs (S, B, ...) of some rows, without a trace in flags and generators."""
    flag = network.training
    network.eval()
    try:
        with torch.random.fork_rng(devices=[]):
            outputs: Tensor = sb.sample(
                network, task.scaling(rows).to(next(network.parameters()).device)
            )
    finally:
        network.train(flag)
    return outputs


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
    def noise(self) -> float:
        """Standard deviation of real targets' noise in the units that the network was trained in."""
        return 0.0 if self.discrete else self.training_noise

    @property
    def training_noise(self) -> float:
        """The same in training; one where the network says it, in units of the targets' deviation."""
        return 1.0 if isinstance(self.experiment.noise, str) else self.experiment.noise

    def asked_draws(self) -> list[int]:
        """The numbers of draws that the config asks for; of "exact" how many networks each member can be."""
        asked = self.experiment.evaluate.draws
        if not posteriors_of(self.network):
            return [1]
        return [self._exact_draws] if asked == "exact" else sorted(set(asked))

    @property
    def _exact_draws(self) -> int:
        """The number of draws that stands for "exact": how many networks each member can be. 0: draws are asked for."""
        if self.experiment.evaluate.draws != "exact":
            return 0
        return Networks(
            self.network, None, True, "auto", 0
        ).predicted_members // sb.members(self.network)

    def predictions(
        self,
        rows: Rows,
        place: str,
        draws: Sequence[int],
        workers: int = 0,
        name: str = "",
    ) -> Iterator[tuple[dict[int, Prediction], Tensor]]:
        """Predictions by number of draws, and targets, batch by batch; the run's seed and `place` seed their draws."""
        found = batches(rows, self.experiment.evaluate.batch, self.device, workers)
        return self.predict_batches(found, name or place, place, draws)

    def predict_batches(
        self,
        found: Iterable[tuple[Tensor, Tensor]],
        name: str,
        place: str,
        draws: Sequence[int],
    ) -> Iterator[tuple[dict[int, Prediction], Tensor]]:
        """The same of batches of inputs and targets, as they come; errors call them `name`."""
        seed = key(self.experiment.seed, "evaluate", place)
        precision = torch.autocast(
            self.device.type,
            torch.bfloat16,
            enabled=self.experiment.train.precision == "bf16",
        )
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
                made = {
                    n: p.rescaled(self.task.y_mean, self.task.y_std)
                    for n, p in made.items()
                }
            first += len(y)
            yield made, y

    def _predict(
        self, x: Tensor, draws: Sequence[int], seed: int, first: int
    ) -> dict[int, Prediction]:
        if list(draws) != [
            self._exact_draws
        ]:  # draws, among them the one of each epoch's scores
            totals = {total_draws(self.network, n): n for n in draws}
            made = predict_prefixes(
                self.network,
                x,
                list(totals),
                self.likelihood,
                self.noise,
                seed,
                first,
                True,
            )
            return {totals[total]: prediction for total, prediction in made.items()}
        found = sb.predict(
            self.network,
            x,
            "exact",
            likelihood=self.likelihood,
            likelihood_std=self.noise,
            seed=seed,
            allow_nonfinite=True,
        )
        return {draws[0]: found}

    def _check_finite(
        self, inputs: Tensor, outputs: Tensor, name: str, first: int
    ) -> None:
        """Refuse outputs that are not finite, and say whose fault it is: the inputs', the weights' or their size's."""
        bad = (
            (~outputs.isfinite()).flatten(1).any(1)
            if outputs.dim() > 1
            else ~outputs.isfinite()
        )
        if not bool(bad.any()):
            return
        row = int(bad.nonzero()[0])
        told = (
            f"The network's outputs for {name}, row {first + row}, are NaN or infinite"
        )
        if not bool(inputs[row].isfinite().all()):
            raise ValueError(
                f"{told}, as is that row's input. Fill it in or drop the row."
            )
        if not all(
            bool(t.isfinite().all()) for t in self.network.state_dict().values()
        ):
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
        role: Role,
        about: Mapping[str, Any] | None = None,
        workers: int = 0,
        brief: bool = False,
        note: Callable[[int, Prediction, Tensor], None] | None = None,
    ) -> list[Evaluation]:
        """Evaluations of one set, for each number of draws.

        `brief` is for every epoch: likelihood and errors alone. `note` is called with each batch: draws, prediction
        and targets.
        """
        about = dict(about or {})
        scores = {
            n: curve_scores(self.discrete, self.device) if brief else self._scores()
            for n in draws
        }
        name = " ".join([data, role, *map(str, about.values())])
        for found, y in self.predictions(
            rows, f"{data} {role} {about}", draws, workers, name
        ):
            for count, prediction in found.items():
                scores[count].update(prediction, y)
                if note is not None:
                    note(count, prediction, y)
        curves = role in ("test", "shift")
        return [
            Evaluation(data=data, role=role, draws=n, **about, **s.result(curves))
            for n, s in scores.items()
        ]

    def _scores(self) -> Scores:
        if not self.discrete:
            return regression_scores(self.device)
        chosen = self.experiment.evaluate
        members = 1 if self._exact_draws > 1 else sb.members(self.network)
        binary = self.likelihood == "bernoulli"
        return class_scores(
            max(2, len(self.task.classes)),
            chosen.bins,
            members,
            binary,
            self.device,
        )

    def scores_after(self, epoch: int, workers: int = 0) -> dict[str, float]:
        """What a curve has of an epoch beside its losses, with one draw of each member: scores of validation rows, and
        of test rows where `train.snapshots` asks for them."""
        train, scores = (
            self.experiment.train,
            {} if self.task.validation is None else self._validation(workers),
        )
        if train.snapshots is None or not train.snapshots.due(epoch, train.epochs):
            return scores
        (made,) = self.score(
            self.task.test, [1], self.task.name, "test", workers=workers
        )
        scores |= {
            f"test_{name}": value
            for name, value in (made.metrics | made.diversity).items()
        }
        return scores | {
            f"member{k}_{name}": v
            for k, one in enumerate(made.members)
            for name, v in one.items()
        }

    def _validation(self, workers: int) -> dict[str, float]:
        """NLL, and accuracy or RMSE, of the validation rows in the units of training."""
        assert self.task.validation is not None
        standardised = self._replace(task=replace(self.task, y_mean=None, y_std=None))
        rows, name = self.task.validation, self.task.name
        (made,) = standardised.score(
            rows, [1], name, "validation", workers=workers, brief=True
        )
        if not self.discrete:
            return {
                "validation_nll": -made.metrics["lpd"],
                "validation_rmse": made.metrics["rmse"],
            }
        return {
            f"validation_{name}": made.metrics[name] for name in ("nll", "accuracy")
        }
