"""Optimizers, learning rates and KL weights of a recipe. Rates are functions of the step alone, so nothing of them is saved."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from slimbayes.lab import recipes
from slimbayes.train import schedules
from slimbayes.train.optim import param_groups

Rate = Callable[[int], float]


def build_optimizer(chosen: recipes.Train, model: nn.Module, graph: bool = False) -> torch.optim.Optimizer:
    """The optimizer over a converted model's parameter groups; with `graph` its rates are tensors that a CUDA graph rereads."""
    o = chosen.optimizer
    decay = chosen.weight_decay
    groups = param_groups(
        model, decay.model_dump() if isinstance(decay, recipes.Decay) else decay, o.lr, chosen.posterior_lr
    )
    cuda = next(model.parameters()).is_cuda
    for group in groups:
        group["base_lr"] = group["lr"]
        if graph:
            group["lr"] = torch.tensor(group["lr"], device="cuda")
    options: dict[str, Any] = {"fused": True} if cuda else {}
    if isinstance(o, recipes.SGD):
        return torch.optim.SGD(groups, lr=o.lr, momentum=o.momentum, nesterov=o.nesterov and o.momentum > 0, **options)
    kind = torch.optim.AdamW if isinstance(o, recipes.AdamW) else torch.optim.Adam
    return kind(groups, lr=o.lr, betas=o.betas, eps=o.eps, capturable=graph, **options)


def set_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set every group's learning rate to its own base rate times a factor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(group["base_lr"] * factor)
        else:
            group["lr"] = group["base_lr"] * factor


def rate(chosen: recipes.Train, steps_per_epoch: int) -> Rate:
    """Learning rate as a multiple of the base rate, step by step.

    Example:
        >>> train = recipes.Train(epochs=10, optimizer={"kind": "SGD"}, schedule={"kind": "Step", "milestones": [0.5], "factor": 0.1})
        >>> [round(rate(train, 10)(step), 3) for step in (0, 49, 50, 99)]
        [1.0, 1.0, 0.1, 0.1]
    """
    s, total = chosen.schedule, chosen.epochs * steps_per_epoch
    if isinstance(s, recipes.OneCycle):
        return lambda step: _one_cycle(s, step, total)
    warm = round(s.warmup * steps_per_epoch)

    def factor(step: int) -> float:
        rise = min(1.0, (step + 1) / warm) if warm else 1.0
        if isinstance(s, recipes.Step):
            return rise * s.factor ** sum(step >= round(milestone * total, 6) for milestone in s.milestones)
        if isinstance(s, recipes.Cosine):
            done = min(1.0, max(0, step - warm) / max(1, total - warm))
            return rise * (s.end + (1 - s.end) * 0.5 * (1 + math.cos(math.pi * done)))
        return rise

    return factor


def _one_cycle(s: recipes.OneCycle, step: int, total: int) -> float:
    peak = s.rise * total
    if step < peak:
        return _half_cosine(1 / s.start, 1.0, step / peak)
    return _half_cosine(1.0, 1 / s.end, min(1.0, (step - peak) / max(1, total - peak)))


def _half_cosine(start: float, stop: float, done: float) -> float:
    return stop + (start - stop) * 0.5 * (1 + math.cos(math.pi * done))


def kl_weight(chosen: recipes.Train, steps_per_epoch: int) -> Rate:
    """The KL's weight, step by step."""
    k = chosen.kl
    if isinstance(k, recipes.LinearKL):
        return schedules.linear(max(1, round(k.share * chosen.epochs * steps_per_epoch)))
    if isinstance(k, recipes.StaircaseKL):
        return schedules.staircase(k.slope, k.every)
    return schedules.constant(k.weight)
