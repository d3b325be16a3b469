"""select: keep some members of a converted model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from slimbayes.convert.convert import Model, conversions_of
from slimbayes.engine import passes
from slimbayes.engine.calls import total_draws
from slimbayes.engine.modules import changed
from slimbayes.layers.base import Converted


@torch.no_grad()
def select(model: Model, members: Sequence[int]) -> Model:
    """Keep these members of a converted model, in this order, in place, and return it.

    The first one becomes member 0, whose biases (of `MemberNorm` and `Ensemble` all parameters) are the model's own:
    where it was another, the base model changes with it, so save with base=True.

    Args:
        members: numbers of at least one member, each once.

    Example:
        >>> import slimbayes as sb
        >>> net, x = sb.bayesianize(nn.Linear(4, 3), sb.BatchEnsemble(members=4)), torch.randn(5, 4)
        >>> before = sb.sample(net, x)
        >>> torch.equal(sb.sample(select(net, [3, 1]), x), before[[3, 1]])
        True
    """
    conversions = conversions_of(model)
    posteriors: list[Any] = passes.posteriors_of(model)
    total, chosen = total_draws(posteriors, 1), list(members)
    if not chosen or len(set(chosen)) < len(chosen) or not all(isinstance(k, int) and 0 <= k < total for k in chosen):
        raise ValueError(f"select needs different numbers of members from 0 to {total - 1}, got {chosen!r}.")
    for p in posteriors:
        own = [k % p.members for k in chosen]
        if p.members > 1 and not p.selectable:
            raise ValueError(f"{p.name} ({type(p).__name__}): its members cannot be told apart from its parameters.")
        if p.members > 1 and len(set(own)) < len(own):
            raise ValueError(f"{p.name} has {p.members} members, of which {chosen!r} are not different ones.")
    for p in posteriors:
        if p.members > 1:
            layers = [m for m in model.modules() if isinstance(m, Converted) and m is not p.layer]
            tied = [layer for layer in layers if any(own is p for own in layer.posterior.values())]
            p.select([k % p.members for k in chosen], tied)
    changed()
    for root, conversion in conversions:
        for d in conversion.decisions:
            layer = _found(model, ".".join(part for part in (root, d.name) if part))
            if d.config is not None and isinstance(layer, Converted) and d.config.members > 1:
                d.config = replace(d.config, members=len(chosen))  # type: ignore[type-var]
    return model


def _found(model: nn.Module, name: str) -> nn.Module | None:
    return dict(model.named_modules()).get(name)
