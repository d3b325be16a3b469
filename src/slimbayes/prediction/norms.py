"""refresh_norms: batch-norm statistics that fit the draws a prediction is made of.

Training keeps one running average over all draws. Where noise is shared by a batch, each draw sees statistics of its
own, and their average fits none of them.

Sizes: S draws, K members.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from slimbayes.convert.bayesianize import bayesianize
from slimbayes.convert.members import ensemble
from slimbayes.engine.noise import Seed, seed_of
from slimbayes.engine.state import copy_modules
from slimbayes.posteriors.configs.base import Deterministic
from slimbayes.prediction.batches import batches_of
from slimbayes.prediction.checks import check_draws
from slimbayes.prediction.draws import member_weights
from slimbayes.prediction.sample import (
    converted_posteriors,
    fixed_draws,
    materialize,
    members,
    sample,
)

Model = TypeVar("Model", bound=nn.Module)


@torch.no_grad()
def refresh_norms(
    model: Model,
    x: Any,
    per: Literal["posterior", "draw"] = "posterior",
    draws: int | None = None,
    inputs: int | None = None,
    seed: Seed = None,
) -> Model:
    """A copy of a converted model whose batch norms have statistics of these rows, under draws of its posterior.

    Every batch counts alike, as in `torch.optim.swa_utils.update_bn`; all else runs in eval mode. The model itself is
    left as it is.

    Args:
        model: a converted model with batch norm.
        x: training inputs, as `predict` takes them: a tensor, or a loader whose targets are ignored. Two rows and more
            in every batch.
        per: "posterior" has one set of statistics for all draws (and one for each member where `MemberNorm` keeps them
            apart): after weights were averaged, fine-tuned or loaded from elsewhere. "draw" writes S
            draws out, each with statistics of its own, and joins them as an `ensemble`: for mean-field and k-tied
            posteriors with estimator "reparam" on networks with batch norm. It has the parameters of S networks.
        draws: S, of each batch, or in all with per="draw"; by default one for each member.
        inputs, seed: as in `predict`; with per="draw" the functions are those of `predict` with that seed.

    Example:
        >>> import slimbayes as sb
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        >>> net, x = sb.bayesianize(net, sb.MeanField()), torch.randn(64, 4)
        >>> fitted = refresh_norms(net, x, per="draw", draws=8)
        >>> sb.predict(fitted, x).samples.shape
        torch.Size([8, 64, 3])
    """
    if per not in ("posterior", "draw"):
        raise ValueError(
            f"refresh_norms: per must be 'posterior' or 'draw', got {per!r}."
        )
    check_draws("refresh_norms", draws)
    if not _norms(model):
        raise ValueError(
            "refresh_norms found no batch norm with running statistics: there is nothing to refresh."
        )
    first = seed_of(seed)
    if per == "draw" and converted_posteriors(model):
        return _by_draw(model, x, draws, inputs, first)
    fitted = copy_modules(model)
    with _measuring([fitted]):
        for number, (args, kwargs) in enumerate(batches_of(fitted, x, None, inputs)):
            sample(fitted, *args, draws=draws, seed=first + number, **kwargs)
    return fitted


def _by_draw(
    model: Model, x: Any, draws: int | None, inputs: int | None, seed: int
) -> Model:
    total = members(model) if draws is None else int(draws)
    with fixed_draws(model, total, seed):
        nets = [materialize(model, draw=j) for j in range(total)]
    with _measuring(nets):
        for args, kwargs in batches_of(
            model, x, None, inputs
        ):  # once: a loader may shuffle, an iterator ends
            for net in nets:
                net(*args, **kwargs)
    if len(nets) == 1:
        return bayesianize(nets[0], Deterministic())
    joined, weights = ensemble(nets), member_weights(model)
    if weights is not None:  # draw j belongs to member j mod K
        own: Any = joined.posterior["members"]  # type: ignore[index]
        shares = weights[torch.arange(total) % len(weights)]
        if not shares.any():
            raise ValueError(
                f"All of the first {total} members have weight zero: ask for more draws."
            )
        own.weights.copy_(shares / shares.sum())
    return joined


def _norms(model: nn.Module) -> list[_BatchNorm]:
    return [
        m
        for m in model.modules()
        if isinstance(m, _BatchNorm) and m.track_running_stats
    ]


@contextmanager
def _measuring(nets: Sequence[nn.Module]) -> Iterator[None]:
    """Batch norms forget their statistics and average those of every batch to come; all else is in eval mode."""
    flags = [(m, m.training) for net in nets for m in net.modules()]
    norms = [norm for net in nets for norm in _norms(net)]
    momenta = [norm.momentum for norm in norms]
    for net in nets:
        net.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a cumulative average
        for module in norm.modules():  # members' statistics move in train mode too
            module.training = True
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for module, training in flags:
            module.training = training
