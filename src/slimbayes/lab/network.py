"""The network of an experiment, and what its outputs stand for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.data import Split
from slimbayes.lab.config import Experiment
from slimbayes.lab.execution import seed_everything
from slimbayes.lab.task import Task
from slimbayes.posteriors.base import Config
from slimbayes.train.likelihoods import LikelihoodName


def plain_network(experiment: Experiment, facts: Mapping[str, Any], data: str) -> nn.Module:
    """The network that a config names, filled with what the data say about it, before it says its noise."""
    if experiment.noise == "heteroscedastic" and _real(facts):
        facts = {**facts, "outputs": 2 * facts["outputs"]}
    network: nn.Module = experiment.model.network(facts, data)
    return network


def with_noise(experiment: Experiment, facts: Mapping[str, Any], network: nn.Module) -> nn.Module:
    """A network of real targets that says their noise too, where a config has it learnt; others as they are."""
    if not isinstance(experiment.noise, str) or not _real(facts):
        return network
    from slimbayes.sklearn.network import Targets  # needs scikit-learn, which other networks do without

    return Targets(network, facts["outputs"], experiment.noise)


def _real(facts: Mapping[str, Any]) -> bool:
    return "outputs" in facts and "classes" not in facts


def build_network(experiment: Experiment, task: Task, network: nn.Module | None = None) -> nn.Module:
    """The experiment's network, converted, as the seed starts it; or a given one, converted."""
    seed_everything(experiment.seed, "network")
    facts = task.fills()
    afresh = partial(plain_network, experiment, facts, task.name)
    plain, method = network or afresh(), experiment.method.build()
    include, exclude = experiment.include, experiment.exclude
    if isinstance(method, Config) and not (network or include or exclude):
        method = method.of_networks_from(afresh)
    built = sb.bayesianize(plain, method, include=include, exclude=exclude)
    if experiment.train.norm_statistics == "member":
        sb.bayesianize(built, sb.MemberNorm(members=sb.members(built)), exclude=exclude)
    return with_noise(experiment, facts, built)


def likelihood_of(experiment: Experiment, task: Task, network: nn.Module) -> LikelihoodName:
    """What a network's outputs stand for: real targets, with their noise or not, classes, or one logit for two.

    Two rows are run, so that a network whose outputs do not fit the targets is refused before it is trained.
    """
    if not task.real and isinstance(experiment.train.noise, str) and experiment.data.source is None:
        raise ValueError(f"train.noise is {experiment.noise}, but {task.name} has classes: noise is for real targets.")
    if not isinstance(task.train, Split):
        return "categorical"
    outputs = _outputs(task, task.train.x[:2], network)
    found: LikelihoodName = "bernoulli" if outputs.dim() == 2 and len(task.classes) == 2 else "categorical"
    if task.real:
        found = "heteroscedastic_gaussian" if isinstance(experiment.noise, str) else "gaussian"
    if task.train.y.dim() == (2 if task.real else 1):
        _check_outputs(task, tuple(outputs.shape[2:]), found)
    return found


def _check_outputs(task: Task, got: tuple[int, ...], found: LikelihoodName) -> None:
    """Refuse the outputs of a row, (...), that are not one for each class or target."""
    assert isinstance(task.train, Split)
    targets = task.train.y[0].numel()
    needed = {"bernoulli": (), "categorical": (len(task.classes),), "gaussian": (targets,)}.get(found, (targets, 2))
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
    flag, state = network.training, torch.get_rng_state()
    network.eval()
    try:
        outputs: Tensor = sb.sample(network, task.scaling(rows).to(next(network.parameters()).device))
    finally:
        network.train(flag)
        torch.set_rng_state(state)
    return outputs
