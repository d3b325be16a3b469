"""A converted model changed again: `select` keeps some members, `said_again` serves a conversion in another's place."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from slimbayes.convert.convert import Conversion, Model, conversions_of, decisions_of
from slimbayes.convert.training import freeze
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
    conversions_of(model)  # refuses a plain model
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
    for _, layer, d in decisions_of(model):
        if d.config is not None and isinstance(layer, Converted) and d.config.members > 1:
            d.config = replace(d.config, members=len(chosen))  # type: ignore[type-var]
    return model


def said_again(model: nn.Module) -> Callable[..., None]:
    """What a model's conversions say beside their methods: where rows lie, what trains and is saved. The function that
    is returned says it of a conversion that takes their place.
    """
    found = conversions_of(model)
    saved, heads = (
        [f"{root}.{name}".strip(".") for root, c in found for name in getattr(c, of)] for of in ("saved", "heads")
    )
    batch_dim = next((c.batch_dim for _, c in found if c.batch_dim is not None), None)
    frozen = any(c.frozen for _, c in found)

    def say(converted: nn.Module, freezing: bool = True) -> None:
        new: Conversion = converted.__dict__["_slimbayes"]
        new.batch_dim, new.saved, new.heads = batch_dim, saved, heads
        new.frozen = freeze(converted, heads) if frozen and freezing else []

    return say
