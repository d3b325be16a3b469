"""Members of a model: `ensemble` joins networks as such, `keep_members` keeps some of them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from slimbayes.convert.bayesianize import (
    Model,
    bayesianize,
    conversions_of,
    decisions_of,
)
from slimbayes.engine import passes
from slimbayes.engine.calls import count_members
from slimbayes.engine.modules import discard_plans
from slimbayes.layers.base import Converted
from slimbayes.posteriors.base import Posterior
from slimbayes.posteriors.configs.whole_modules import Ensemble
from slimbayes.posteriors.ensemble import shapes_of


def ensemble(models: Sequence[Model]) -> Model:
    """Join networks of one architecture, trained or built apart, into a deep ensemble: the first, with the others in.

    Args:
        models: two or more modules of one type whose parameters and buffers have the same names and shapes. They are
            not copied.

    Example:
        >>> import slimbayes as sb
        >>> nets = [nn.Linear(4, 3) for _ in range(5)]
        >>> pred = sb.predict(ensemble(nets), torch.randn(7, 4))
        >>> pred.member_probs.shape
        torch.Size([5, 7, 3])
    """
    if len(models) < 2:
        raise ValueError(f"ensemble needs at least two models, got {len(models)}.")
    first = models[0]
    shapes = shapes_of(first)
    for i, other in enumerate(models):
        theirs = shapes_of(other)
        differ = sorted(
            n for n in shapes.keys() | theirs.keys() if shapes.get(n) != theirs.get(n)
        )
        again = any(other is former for former in models[:i])
        if type(other) is not type(first) or differ or again:
            what = f"is a {type(other).__name__} that differs in {', '.join(differ[:5]) or 'its type'}"
            what = "is the same object as one before" if again else what
            raise ValueError(
                f"ensemble needs separate models like the first ({type(first).__name__}), but model {i} {what}."
            )
    bayesianize(first, Ensemble(members=len(models), init="copies"))
    posterior: Any = passes.posteriors_of(first)[0]
    posterior.others = nn.ModuleList(models[1:])
    posterior.train(first.training)
    return first


@torch.no_grad()
def keep_members(model: Model, members: Sequence[int]) -> Model:
    """Keep these members of a converted model, in this order, in place, and return it.

    The first one becomes member 0, whose biases (of `MemberNorm` and `Ensemble` all parameters) are the model's own:
    where it was another, the base model changes with it, so save with base=True.

    Args:
        members: numbers of at least one member, each once.

    Example:
        >>> import slimbayes as sb
        >>> net, x = sb.bayesianize(nn.Linear(4, 3), sb.BatchEnsemble(members=4)), torch.randn(5, 4)
        >>> before = sb.sample(net, x)
        >>> torch.equal(sb.sample(keep_members(net, [3, 1]), x), before[[3, 1]])
        True
    """
    conversions_of(model)  # refuses a plain model
    posteriors: list[Any] = passes.posteriors_of(model)
    total, chosen = count_members(posteriors), list(members)
    if (
        not chosen
        or len(set(chosen)) < len(chosen)
        or not all(isinstance(k, int) and 0 <= k < total for k in chosen)
    ):
        raise ValueError(
            f"keep_members needs different numbers of members from 0 to {total - 1}, got {chosen!r}."
        )
    for p in posteriors:
        own = [k % p.members for k in chosen]
        if p.members > 1 and type(p).keep_members is Posterior.keep_members:
            raise ValueError(
                f"{p.name} ({type(p).__name__}): its members cannot be told apart from its parameters."
            )
        if p.members > 1 and len(set(own)) < len(own):
            raise ValueError(
                f"{p.name} has {p.members} members, of which {chosen!r} are not different ones."
            )
    for p in posteriors:
        if p.members > 1:
            layers = [
                m
                for m in model.modules()
                if isinstance(m, Converted) and m is not p.layer
            ]
            tied = [
                layer
                for layer in layers
                if any(own is p for own in layer.posterior.values())
            ]
            p.keep_members([k % p.members for k in chosen], tied)
    discard_plans()
    for _, layer, d in decisions_of(model):
        if (
            d.config is not None
            and isinstance(layer, Converted)
            and d.config.members > 1
        ):
            d.config = replace(d.config, members=len(chosen))  # type: ignore[type-var]
    return model
