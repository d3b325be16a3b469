"""KL divergences to the priors, by torch's own, by series and by fine sums."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Cauchy, Gamma, MultivariateNormal, Normal
from torch.distributions import kl_divergence as divergence

import slimbayes as sb


def cauchy_quantile(noise: Tensor) -> Tensor:
    """Standard normal noise as standard Cauchy noise of the same quantile."""
    return torch.tan(0.5 * math.pi * torch.erf(noise / math.sqrt(2)))


def by_sums(log_density: Callable[[Tensor], Tensor], loc: Tensor, scale: Tensor) -> Any:
    """E log_density(x) under Normal(loc, scale), by the trapezoid rule."""
    z = torch.linspace(-12, 12, 6_001, dtype=loc.dtype)
    weight = Normal(0.0, 1.0).log_prob(z).exp()
    weight = weight / weight.sum()
    x = loc.unsqueeze(-1) + scale.unsqueeze(-1) * z
    return (weight * log_density(x)).sum(-1)


def expected_log_size(loc: Tensor, scale: Tensor) -> Tensor:
    """E log |x| under Normal(loc, scale), by the series of the noncentral chi square."""
    half = (loc / scale).square().unsqueeze(-1) / 2
    k = torch.arange(600, dtype=loc.dtype)
    poisson = (k * half.log() - half - torch.lgamma(k + 1)).exp()
    series = (poisson * torch.digamma(k + 0.5)).sum(-1)
    return scale.log() + 0.5 * (series + math.log(2))


def factor_divergence(family: str, loc: Tensor, scale: Tensor, prior: Any) -> Tensor:
    """KL of each factor to its prior."""
    entropy = scale.log() + 0.5 * math.log(2 * math.pi * math.e)
    of_prior = type(prior).__name__
    if family == "cauchy" and of_prior == "Cauchy":
        distance = (scale + prior.scale).square() + (loc - prior.loc).square()
        return (distance / (4 * scale * prior.scale)).log()
    constant = sb.LogUniform.constant
    if family == "cauchy" and of_prior == "LogUniform":
        # E log |x| = log |loc + i scale|; the entropy is log(4 pi scale)
        size = 0.5 * (loc.square() + scale.square()).log()
        return size + constant - (4 * math.pi * scale).log()
    if (family, of_prior) in (("normal", "Normal"), ("lognormal", "LogNormal")):
        return divergence(Normal(loc, scale), Normal(prior.loc, prior.scale))
    if (family, of_prior) == ("normal", "LogUniform"):
        return expected_log_size(loc, scale) + constant - entropy
    density = {
        "Normal": lambda x: Normal(prior.loc, prior.scale).log_prob(x),
        "Cauchy": lambda x: Cauchy(prior.loc, prior.scale).log_prob(x),
        "HalfCauchy": lambda x: Cauchy(0.0, prior.scale).log_prob(x) + math.log(2),
    }[of_prior]
    if family == "normal":
        return -by_sums(density, loc, scale) - entropy
    return -by_sums(lambda z: density(z.exp()), loc, scale) - entropy - loc


def full_divergence(means: Tensor, roots: Tensor, loc: Any, scale: float) -> Tensor:
    """KL of Normals with means (K, D) and covariances L L^T to independent ones."""
    size = means.shape[-1]
    loc = torch.as_tensor(loc, dtype=means.dtype).expand(size)
    total = torch.zeros(())
    for mean, root in zip(means, roots, strict=True):
        q = MultivariateNormal(mean, covariance_matrix=root @ root.mT)
        p = MultivariateNormal(loc, scale_tril=scale * torch.eye(size))
        total = total + divergence(q, p)
    return total


def weight_divergence(mean: Tensor, scale: Tensor, prior: Any, fan_in: int) -> Tensor:
    """KL of independent Normal weights to a prior, summed."""
    q = Normal(mean, scale)
    if isinstance(prior, sb.Normal):
        return divergence(q, Normal(prior.loc, prior.scale)).sum()
    if isinstance(prior, sb.HeNormal):
        return divergence(q, Normal(0.0, math.sqrt(prior.gain / fan_in))).sum()
    if isinstance(prior, sb.TiedMean):
        return divergence(q, Normal(mean, prior.scale)).sum()
    if isinstance(prior, sb.LaplacePrior):
        folded = scale * math.sqrt(2 / math.pi) * (-0.5 * (mean / scale).square()).exp()
        folded = folded + mean * torch.erf(mean / scale / math.sqrt(2))
        log_p = -folded / prior.scale - math.log(2 * prior.scale)
        return -(q.entropy() + log_p).sum()
    if isinstance(prior, sb.EmpiricalBayes):
        a, b = prior.concentration, prior.rate
        squares = (mean.square() + scale.square()).sum()
        v = (squares + 2 * b) / (mean.numel() + 2 * a + 2)
        inverse_gamma = Gamma(a, b).log_prob(1 / v) - 2 * v.log()
        return divergence(q, Normal(0.0, v.sqrt())).sum() - inverse_gamma
    assert isinstance(prior, sb.ScaleMixture)

    def density(x: Tensor) -> Tensor:
        wide = Normal(0.0, prior.wide).log_prob(x) + math.log(prior.mix)
        narrow = Normal(0.0, prior.narrow).log_prob(x) + math.log(1 - prior.mix)
        return torch.logaddexp(wide, narrow)

    return -(q.entropy() + by_sums(density, mean, scale)).sum()
