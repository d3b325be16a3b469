"""The KL of a mixture of members to a prior, for `Rank1(mixture_kl=...)`.

    q(t) = 1/K sum_k q_k(t)          t: all factors of the model; members are matched across layers

    "sum"    sum_k KL(q_k || p)              K networks with independent priors, judged by their average likelihood
    "mean"   1/K sum_k KL(q_k || p)          above KL(q || p), by log K at most, since the KL is convex
    "exact"  KL(q || p) = "mean" - I         I = 1/K sum_k E_k log(q_k(t) / q(t)) in [0, log K]: what t tells about k

With the average log-likelihood of members all three bound a log evidence from below: "sum" that of K networks, "mean"
and "exact" that of one network whose posterior is the mixture, "exact" more tightly. Only I has no closed form. One
draw from each member estimates it without bias; members far apart give log K and no noise. Biases of members are
points, no part of t.

Sizes: K members, or the least common multiple where layers have different numbers of them; F factors of a group.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slimbayes.distributions.sums import exact


def information(posteriors: Sequence[Any]) -> Tensor:
    """I of a mixture over several groups of independent factors, estimated with a draw from each member: a scalar.

    Args:
        posteriors: a distribution for each group, whose fields have shape (members, F).

    >>> from slimbayes.distributions.families import Normal
    >>> far = Normal(torch.tensor([[0.0], [100.0]]), torch.ones(2, 1))
    >>> information([far])  # log 2: a draw gives its member away
    tensor(0.6931)
    """
    total = math.lcm(*(len(q.loc) for q in posteriors))
    first = posteriors[0].loc
    density = torch.stack([_densities(q, total).to(first.device) for q in posteriors]).sum(0)
    return (density.diagonal() - density.logsumexp(0)).mean().to(first.dtype) + math.log(total)


def _densities(q: Any, total: int) -> Tensor:
    """log q_j of a draw from each q_k, summed over the factors of the group: (K, K) of [j, k]."""
    member = torch.arange(total, device=q.loc.device) % len(q.loc)
    every = type(q)(q.loc[member], q.scale[member])
    drawn = every.rsample(torch.randn_like(every.loc))
    lines = [type(q)(loc, scale).log_prob(drawn) for loc, scale in zip(every.loc, every.scale, strict=True)]
    return torch.stack([line.sum(1, dtype=exact(line)) for line in lines])
