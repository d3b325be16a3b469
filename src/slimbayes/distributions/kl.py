"""KL divergences between the families.

Closed forms wherever one exists. The mixed pairs (a normal or log-normal posterior under a heavy-tailed prior, a normal
one under a log-uniform) integrate log p over the posterior with a fixed quadrature: deterministic, differentiable, no
sampling noise.

A mixture of K members has one, too (`information`; `Rank1(mixture_kl=...)`):

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
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from slimbayes.distributions.families import Cauchy, Distribution, LogNormal, LogUniform, Normal, Point, log_of
from slimbayes.distributions.families import check_pair as check_pair
from slimbayes.distributions.sums import by_hand, exact


def kl(q: Distribution, p: Distribution) -> Tensor:
    """KL(q || p), elementwise.

    Args:
        q: posterior whose fields are tensors of one shape.
        p: prior; its fields are floats or tensors that broadcast against q's.

    Shape: that of q's fields. `Point` posteriors give zeros (the paper places no prior where it places no posterior).

    >>> kl(Cauchy(torch.tensor(1.5), torch.tensor(0.001)), Cauchy(1.0, 0.1)).round(decimals=2)
    tensor(6.4800)
    """
    check_pair(type(q), type(p))
    if isinstance(q, Point):
        return torch.zeros_like(torch.as_tensor(q.loc))
    return _CLOSED_FORMS.get((type(q), type(p)), _kl_by_quadrature)(q, p)


def summed_kl(q: Distribution, p: Distribution) -> Tensor:
    """KL(q || p), summed over elements: a scalar. Two Normals take half of the operations that autograd would.

    >>> summed_kl(Normal(torch.zeros(2), torch.ones(2)), Normal(1.0, 1.0))  # two halves
    tensor(1.)
    """
    if (
        type(q) is Normal
        and type(p) is Normal
        and isinstance(p.loc, (int, float))
        and isinstance(p.scale, (int, float))
    ):
        loc: Any = q.loc
        if not by_hand(loc):
            return _NormalKL.apply(loc, q.scale, p.loc, p.scale)
    return kl(q, p).sum()


class _NormalKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loc: Tensor, scale: Tensor, mean: float, width: float) -> Tensor:
        ctx.save_for_backward(loc, scale)
        ctx.prior = mean, width
        ratio, distance = (scale / width).square_(), (loc - mean).div_(width)
        logs = ratio.log()
        return ratio.sub_(1).sub_(logs).addcmul_(distance, distance).sum().mul_(0.5)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (loc, scale), (mean, width) = ctx.saved_tensors, ctx.prior
        small = gradients[0] / width**2
        return (loc - mean) * small, scale * small - gradients[0] / scale, None, None


def _kl_normal(q: Any, p: Any) -> Tensor:
    ratio = (q.scale / p.scale) ** 2
    # x - log1p-style grouping: (ratio - 1 - log ratio) / 2 stays accurate and non-negative near ratio = 1.
    return 0.5 * (ratio - 1 - ratio.log()) + 0.5 * ((q.loc - p.loc) / p.scale) ** 2


def _kl_cauchy(q: Any, p: Any) -> Tensor:
    # log(((a+b)^2 + d^2) / (4ab)) written with log1p: exact zero at q = p, no cancellation beside it.
    return torch.log1p(((q.scale - p.scale) ** 2 + (q.loc - p.loc) ** 2) / (4 * q.scale * p.scale))


def _kl_lognormal_normal(q: Any, p: Any) -> Tensor:
    mean = torch.exp(q.loc + 0.5 * q.scale**2)
    # E(x - loc)^2 as squared bias + variance: the plain second moment cancels in float32
    square = (mean - p.loc) ** 2 + mean**2 * torch.expm1(q.scale**2)
    cross = 0.5 * square / p.scale**2 + log_of(p.scale) + 0.5 * math.log(2 * math.pi)
    return cross - _entropy(q)


def _kl_cauchy_loguniform(q: Any, p: Any) -> Tensor:
    # E log|x| = log(loc^2 + scale^2) / 2 and the entropy is log(4 pi scale)
    return 0.5 * torch.log1p((q.loc / q.scale) ** 2) - math.log(4 * math.pi) + p.constant


def _entropy(q: Any) -> Tensor:
    gaussian = q.scale.log() + 0.5 * math.log(2 * math.pi * math.e)
    return gaussian + q.loc if isinstance(q, LogNormal) else gaussian


_STEP = 17 / 128  # of the quadrature, in posterior scales


def _kl_by_quadrature(q: Any, p: Any) -> Tensor:
    # Trapezoid rule for E over N(0, 1): spectrally accurate, and better than Gauss-Hermite when the prior is narrower
    # than the posterior, all the more once its poles are accounted for. They lie midway between two nodes: none meets
    # the log's singularity, and what the correction leaves out is odd around them.
    a, b = _pole(q, p)
    nodes = torch.arange(-64, 65, dtype=q.loc.dtype, device=q.loc.device) * _STEP
    z = (torch.remainder(a, _STEP) - 0.5 * _STEP).unsqueeze(-1) + nodes
    weight = torch.softmax(-0.5 * z**2, -1)
    wide = type(q)(q.loc.unsqueeze(-1), q.scale.unsqueeze(-1))
    # a log-uniform's log|x| is half of a Cauchy's log(x^2 + scale^2) at scale zero, and so is what its pole adds
    excess = _excess(a, b) * (0.5 if isinstance(p, LogUniform) else 1.0)
    return -(weight * p.log_prob(wide.rsample(z))).sum(-1) - _entropy(q) - excess


def _pole(q: Any, p: Any) -> tuple[Tensor, Tensor]:
    """Where a Cauchy's pole loc + i scale lies in the rule's variable: a + i b."""
    real, imag = (torch.as_tensor(getattr(p, name, 0.0)).to(q.loc) for name in ("loc", "scale"))
    if isinstance(q, LogNormal):
        real, imag = 0.5 * torch.log(real**2 + imag**2), torch.atan2(imag, real)
    # Beyond 40 a node's weight is zero, and beyond 4 so is e^(-2 pi b / h).
    return ((real - q.loc) / q.scale).clamp(-40, 40), (imag / q.scale).clamp(max=4.0)


def _excess(a: Tensor, b: Tensor) -> Tensor:
    """What a rule of step h adds by stepping over poles z0 = a +- i b: 2 h Re phi(z0) log(1 + e^(-2 pi b / h))."""
    phi = torch.exp(0.5 * (b**2 - a**2)) / math.sqrt(2 * math.pi)
    return 2 * _STEP * phi * torch.cos(a * b) * torch.log1p(torch.exp(-2 * math.pi * b / _STEP))


_CLOSED_FORMS: dict[tuple[type, type], Callable[[Any, Any], Tensor]] = {
    (Normal, Normal): _kl_normal,
    (LogNormal, LogNormal): _kl_normal,
    (Cauchy, Cauchy): _kl_cauchy,
    (Cauchy, LogUniform): _kl_cauchy_loguniform,
    (LogNormal, Normal): _kl_lognormal_normal,
}


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
