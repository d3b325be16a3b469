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

So has a normal whose precision tau is inferred under a Gamma prior (`marginal_cost`; Chang et al. 2019, C.1: tau, rho
and tau_out may be variational parameters, too):

    E_q[tau] S / 2 - n/2 E_q[log tau] + KL(q(tau) || Gamma(a, a / mean))        n elements, S their expected square

is least at q(tau) = Gamma(a + n/2, b + S/2), b = a / mean: what is left of it is a function of S alone, so that no
parameter has to be trained for tau. For large a it is the fixed precision's tau S / 2.

Sizes: K members, or the least common multiple where layers have different numbers of them; F factors of a group.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slimbayes.distributions.families import (
    Cauchy,
    Distribution,
    LogNormal,
    LogUniform,
    Normal,
    Point,
    check_pair,
    log_of,
)
from slimbayes.distributions.joining import needs_autograd
from slimbayes.distributions.scales import scale_from_rho, widen
from slimbayes.distributions.sums import sum_dtype


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


def summed_kl(
    family: type[Distribution],
    prior: Any,
    locs: Sequence[Tensor],
    rhos: Sequence[Tensor],
    loc: Tensor | None = None,
    rho: Tensor | None = None,
) -> Tensor:
    """KL of many factors under one prior, summed over all elements: a scalar. Pairs of one family take a third of the
    operations that autograd would.

    Args:
        family: of the posteriors, whose scales are `scale_from_rho` of `rhos`.
        locs, rhos: parameters, each (K, p, channels) with the same K and p.
        loc, rho: where they are side by side already, (K, p, sum of channels): gradients go through these, which may
            have older values.

    >>> rho = torch.full((1, 1, 2), 0.541325)  # of scale 1
    >>> summed_kl(Normal, Normal(1.0, 1.0), [torch.zeros(1, 1, 2)], [rho]).round(decimals=4)  # two halves
    tensor(1.)
    """
    # A pair that is known has a location and a scale.
    known = (family, type(prior)) in _SLOPES and {
        type(prior.loc),
        type(prior.scale),
    } <= {int, float}
    if known and not needs_autograd(locs[0]):
        roots = (*locs, *rhos) if loc is None or rho is None else (loc, rho)
        return _apply(family, prior, (locs, rhos), *roots)
    q: Any = family
    return kl(
        q(widen(torch.cat(list(locs), 2)), scale_from_rho(torch.cat(list(rhos), 2))),
        prior,
    ).sum()


class _Of(NamedTuple):
    """Locations and scales of factors, which nobody has to check."""

    loc: Tensor
    scale: Tensor


class _SummedKL(torch.autograd.Function):
    """Of parameters that autograd does not see: gradients are those of `roots`, the same or what has joined them."""

    @staticmethod
    def forward(
        ctx: Any, family: Any, prior: Any, parameters: Any, *roots: Tensor
    ) -> Tensor:
        locs, rhos = parameters
        loc, rho = torch.cat(locs, 2), torch.cat(rhos, 2)
        loc, rho, scale = widen(loc), widen(rho), scale_from_rho(rho)
        ctx.save_for_backward(loc, rho, scale, *locs, *rhos)
        ctx.pair, ctx.apart = (family, prior), len(roots) > 2
        return _SLOPES[family, type(prior)][0](_Of(loc, scale), prior)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (loc, rho, scale, *parameters), (family, prior) = ctx.saved_tensors, ctx.pair
        half = len(parameters) // 2
        if torch.is_grad_enabled():  # a derivative of the derivative is wanted
            loc, rho = torch.cat(parameters[:half], 2), torch.cat(parameters[half:], 2)
            total = kl(family(widen(loc), scale_from_rho(rho)), prior).sum()
            wanted = [t for t in (loc, rho) if t.requires_grad]
            found = iter(
                torch.autograd.grad(total, wanted, gradients[0], create_graph=True)
            )
            by_loc, by_rho = (
                next(found) if t.requires_grad else torch.zeros_like(t)
                for t in (loc, rho)
            )
        else:
            by_loc, by_scale = _SLOPES[family, type(prior)][1](
                _Of(loc, scale), prior, gradients[0]
            )
            by_rho = torch.ops.aten.softplus_backward(by_scale, rho, 1, 20)
        if not ctx.apart:
            return None, None, None, by_loc, by_rho
        sizes = [p.shape[2] for p in parameters[:half]]
        return None, None, None, *by_loc.split(sizes, 2), *by_rho.split(sizes, 2)


# Past what Function.apply does in Python for tensors of torch.func, which never come here.
_apply: Any = super(torch.autograd.Function, _SummedKL).apply


def _sum_normal(q: Any, p: Any) -> Tensor:
    ratio, distance = (q.scale / p.scale).square_(), (q.loc - p.loc).div_(p.scale)
    logs = ratio.log()
    return ratio.sub_(1).sub_(logs).addcmul_(distance, distance).sum().mul_(0.5)


def _slopes_normal(q: Any, p: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    small = gradient / p.scale**2
    return (q.loc - p.loc).mul_(small), (q.scale * small).sub_(gradient / q.scale)


def _slopes_cauchy(q: Any, p: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    wider, distance, product = q.scale - p.scale, q.loc - p.loc, q.scale * (2 * p.scale)
    inner = (wider.square() + distance.square()) / (2 * product)
    slope = gradient / (1 + inner)
    return slope * distance / product, slope * (wider / product - inner / q.scale)


def _kl_normal(q: Any, p: Any) -> Tensor:
    ratio = (q.scale / p.scale) ** 2
    # x - log1p-style grouping: (ratio - 1 - log ratio) / 2 stays accurate and non-negative near ratio = 1.
    return 0.5 * (ratio - 1 - ratio.log()) + 0.5 * ((q.loc - p.loc) / p.scale) ** 2


def _kl_cauchy(q: Any, p: Any) -> Tensor:
    # log(((a+b)^2 + d^2) / (4ab)) written with log1p: exact zero at q = p, no cancellation beside it.
    return torch.log1p(
        ((q.scale - p.scale) ** 2 + (q.loc - p.loc) ** 2) / (4 * q.scale * p.scale)
    )


def _kl_lognormal_normal(q: Any, p: Any) -> Tensor:
    mean = torch.exp(q.loc + 0.5 * q.scale**2)
    # E(x - loc)^2 as squared bias + variance: the plain second moment cancels in float32
    square = (mean - p.loc) ** 2 + mean**2 * torch.expm1(q.scale**2)
    cross = 0.5 * square / p.scale**2 + log_of(p.scale) + 0.5 * math.log(2 * math.pi)
    return cross - _entropy(q)


def _kl_cauchy_loguniform(q: Any, p: Any) -> Tensor:
    # E log|x| = log(loc^2 + scale^2) / 2 and the entropy is log(4 pi scale)
    return (
        0.5 * torch.log1p((q.loc / q.scale) ** 2) - math.log(4 * math.pi) + p.constant
    )


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
    every = type(q)(q.loc.unsqueeze(-1), q.scale.unsqueeze(-1))
    # a log-uniform's log|x| is half of a Cauchy's log(x^2 + scale^2) at scale zero, and so is what its pole adds
    correction = _pole_correction(a, b) * (0.5 if isinstance(p, LogUniform) else 1.0)
    return -(weight * p.log_prob(every.rsample(z))).sum(-1) - _entropy(q) - correction


def _pole(q: Any, p: Any) -> tuple[Tensor, Tensor]:
    """Where a Cauchy's pole loc + i scale lies in the rule's variable: a + i b."""
    real, imag = (
        torch.as_tensor(getattr(p, name, 0.0)).to(q.loc) for name in ("loc", "scale")
    )
    if isinstance(q, LogNormal):
        real, imag = 0.5 * torch.log(real**2 + imag**2), torch.atan2(imag, real)
    # Beyond 40 a node's weight is zero, and beyond 4 so is e^(-2 pi b / h).
    return ((real - q.loc) / q.scale).clamp(-40, 40), (imag / q.scale).clamp(max=4.0)


def _pole_correction(a: Tensor, b: Tensor) -> Tensor:
    """What a rule of step h adds by stepping over poles z0 = a +- i b: 2 h Re phi(z0) log(1 + e^(-2 pi b / h))."""
    phi = torch.exp(0.5 * (b**2 - a**2)) / math.sqrt(2 * math.pi)
    return (
        2
        * _STEP
        * phi
        * torch.cos(a * b)
        * torch.log1p(torch.exp(-2 * math.pi * b / _STEP))
    )


_CLOSED_FORMS: dict[tuple[type, type], Callable[[Any, Any], Tensor]] = {
    (Normal, Normal): _kl_normal,
    (LogNormal, LogNormal): _kl_normal,
    (Cauchy, Cauchy): _kl_cauchy,
    (Cauchy, LogUniform): _kl_cauchy_loguniform,
    (LogNormal, Normal): _kl_lognormal_normal,
}

# The sum of a divergence over elements, and its derivatives by locations and scales.
_SLOPES: dict[
    tuple[type, type],
    tuple[Callable[[Any, Any], Tensor], Callable[..., tuple[Tensor, Tensor]]],
] = {
    (Normal, Normal): (_sum_normal, _slopes_normal),
    (LogNormal, LogNormal): (_sum_normal, _slopes_normal),
    (Cauchy, Cauchy): (lambda q, p: _kl_cauchy(q, p).sum(), _slopes_cauchy),
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

    def densities(q: Any) -> Tensor:
        """log q_j of a draw from each q_k, summed over the factors of the group: (K, K) of [j, k]."""
        member = torch.arange(total, device=q.loc.device) % len(q.loc)
        every = type(q)(q.loc[member], q.scale[member])
        drawn = every.rsample(torch.randn_like(every.loc))
        lines = [
            type(q)(loc, scale).log_prob(drawn)
            for loc, scale in zip(every.loc, every.scale, strict=True)
        ]
        return torch.stack([line.sum(1, dtype=sum_dtype(line)) for line in lines])

    first = posteriors[0].loc
    density = torch.stack([densities(q).to(first.device) for q in posteriors]).sum(0)
    return (density.diagonal() - density.logsumexp(0)).mean().to(
        first.dtype
    ) + math.log(total)


def marginal_cost(square: Tensor, count: int, shape: float, mean: float) -> Tensor:
    """What a normal of unknown precision costs: minus the log of its evidence, up to the terms of tau = mean.

    Shape: square (), the expected sum of squares of `count` elements; returns ().

    Example:
        >>> fixed = 0.5 * 2.0 * torch.tensor(3.0)  # tau S / 2
        >>> round(float(marginal_cost(torch.tensor(3.0), 4, shape=1e6, mean=2.0) - fixed), 3)
        0.0
    """
    rate, more = shape / mean, shape + count / 2
    # log Gamma(a) - log Gamma(a + n/2) + a log(1 + S / 2b) + n/2 log(b + S/2), and n/2 log(mean) to meet tau S / 2
    constant = (
        math.lgamma(shape)
        - math.lgamma(more)
        + count / 2 * (math.log(rate) + math.log(mean))
    )
    return more * torch.log1p(square / (2 * rate)) + constant
