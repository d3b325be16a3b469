"""The network of an experiment, and what its outputs stand for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

import slimbayes as sb
from slimbayes.data import Split
from slimbayes.lab.config import Experiment
from slimbayes.lab.seeds import seed_everything
from slimbayes.lab.task import Task
from slimbayes.posteriors.base import Config
from slimbayes.train.likelihoods import LikelihoodName


def plain_network(experiment: Experiment, facts: Mapping[str, int], data: str) -> nn.Module:
    """The network that a config names, filled with what the data say about it."""
    chosen = experiment.model
    if missing := ", ".join(name for name in chosen.filled if name not in facts):
        raise ValueError(f"{chosen.kind} needs {missing}, which {data} does not say: it is no network for this data.")
    learned = experiment.train.noise == "learned"
    if learned and "outputs" not in chosen.filled:
        raise ValueError(f"train.noise is learned, but {chosen.kind} has no real outputs to learn it by.")
    sizes = {name: facts[name] * (2 if learned and name == "outputs" else 1) for name in chosen.filled}
    network: nn.Module = chosen.build(**sizes)
    # A mean and a raw scale for each target, as the likelihood takes them.
    return nn.Sequential(OrderedDict(net=network, pairs=nn.Unflatten(-1, (-1, 2)))) if learned else network


def build_network(experiment: Experiment, task: Task, network: nn.Module | None = None) -> nn.Module:
    """The experiment's network, converted, as the seed starts it; or a given one, converted."""
    seed_everything(experiment.seed, "network")
    afresh = partial(plain_network, experiment, task.fills(), task.name)
    plain, method = network or afresh(), experiment.method.build()
    include, exclude = experiment.include, experiment.exclude
    if isinstance(method, Config) and not (network or include or exclude):
        method = method.of_networks_from(afresh)
    built = sb.bayesianize(plain, method, include=include, exclude=exclude)
    if experiment.train.norm_statistics == "member":
        sb.bayesianize(built, sb.MemberNorm(members=sb.members(built)), exclude=exclude)
    return built


@torch.no_grad()
def likelihood_of(experiment: Experiment, task: Task, network: nn.Module) -> LikelihoodName:
    """What a network's outputs stand for: real targets, with their noise or not, classes, or one logit for two."""
    learned = experiment.train.noise == "learned"
    if task.real:
        return "heteroscedastic_gaussian" if learned else "gaussian"
    if learned:
        raise ValueError(f"train.noise is learned, but {task.name} has classes: noise is for real targets.")
    if not isinstance(task.train, Split):
        return "categorical"
    flag, state = network.training, torch.get_rng_state()
    network.eval()
    outputs = sb.sample(network, task.scaling(task.train.x[:2]).to(next(network.parameters()).device))
    network.train(flag)
    torch.set_rng_state(state)
    return "bernoulli" if outputs.dim() == 2 else "categorical"
