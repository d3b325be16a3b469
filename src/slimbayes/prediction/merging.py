"""merge: a member of a model at its mean, or the mean of all members, as a plain model.

Sizes: K members.
"""

import copy
from typing import Literal, TypeVar

import torch
from torch import nn

from slimbayes.convert.convert import debayesianize
from slimbayes.engine import passes
from slimbayes.engine.calls import total_draws
from slimbayes.prediction.sample import central_pass, posteriors_in, written

Model = TypeVar("Model", bound=nn.Module)


@torch.no_grad()
def merge(model: Model, member: int | Literal["mean"] = 0) -> Model:
    """A plain copy of a converted model whose weights are those of one member at its mean, or the mean of all members.

    Noise is gone: factors and weights are at their means (medians, of log-normal factors). The mean of members is that
    of their weights and biases, which for rank-1 methods is one network near all of them.

    Args:
        model: a converted model; it stays as it is.
        member: number of the member, or "mean".

    Example:
        >>> import slimbayes as sb
        >>> net = sb.bayesianize(nn.Linear(4, 3), sb.BatchEnsemble(members=2))
        >>> plain, x = merge(net, member=1), torch.randn(5, 4)
        >>> type(plain).__name__, bool(torch.allclose(plain(x), sb.sample(net, x)[1], atol=1e-6))
        ('Linear', True)
    """
    posteriors = posteriors_in(model)
    if not posteriors:
        return debayesianize(copy.deepcopy(model))
    members = total_draws(posteriors, 1)
    if member != "mean" and not (isinstance(member, int) and 0 <= member < members):
        raise ValueError(f'merge: member must be "mean" or a number from 0 to {members - 1}, got {member!r}.')
    new = central_pass(posteriors)
    if member != "mean":
        return passes.run(new.single(member), written, model)
    every = [passes.run(new.single(k), written, model) for k in range(members)]
    means = []
    for tensors in zip(*(plain.state_dict().values() for plain in every), strict=True):
        if tensors[0].is_floating_point():
            wide = torch.promote_types(tensors[0].dtype, torch.float32)
            means.append((tensors[0], torch.stack([t.to(wide) for t in tensors]).mean(0)))
    for own, mean in means:  # only now: what is tied is listed under each of its names
        own.copy_(mean)
    return every[0]
