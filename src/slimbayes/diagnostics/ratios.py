"""log_ratios: the log importance ratios of a variational posterior, one for each draw.

    log r = log p(data | theta) + log p(theta) - log q(theta),      theta ~ q

theta is what the posteriors draw: all weights (and Gaussian biases) of mean-field and k-tied layers, the factors of rank-1
layers before they are clipped. Everything else, point-estimated weights, biases and norm parameters, counts as known. Without a
likelihood the mean ratio is -KL(q || prior), which is how this file is tested.

Sizes: K members, S draws of each, n draws held at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.distributions.families import Normal
from slimbayes.distributions.priors import EmpiricalBayes, HeNormal, TiedMean, prior_of_biases
from slimbayes.engine.passes import posteriors_of
from slimbayes.layers.base import BayesLayer
from slimbayes.layers.site import LinearMap
from slimbayes.posteriors.base import Posterior
from slimbayes.posteriors.factors import Factor
from slimbayes.posteriors.gaussian import GaussianPosterior
from slimbayes.posteriors.rank1 import Rank1Posterior
from slimbayes.prediction.sample import frozen, members

LogLikelihood = Callable[[nn.Module], Tensor]


@torch.no_grad()
def log_ratios(model: nn.Module, log_likelihood: LogLikelihood, draws: int = 1000, chunk: int = 16) -> Tensor:
    """log p(data, theta) - log q(theta) of draws from the posterior, in eval mode.

    Args:
        model: a model converted with Gaussian or rank-1 posteriors.
        log_likelihood: called with the model while draws are held, returns for each held draw the log-likelihood of all data,
            summed over the data and not averaged. `slimbayes.sample(model, x)` gives the outputs of the held draws.
        draws: S, draws from every member.
        chunk: at most so many draws of every member are held at a time.

    Shape: (K, S) in float64; `log_likelihood` returns (K n,) for n held draws of each member, as `sample` orders them.

    Example:
        >>> import slimbayes as sb
        >>> net = sb.bayesianize(nn.Linear(2, 1), sb.MeanField())
        >>> x, y = torch.randn(5, 2), torch.randn(5, 1)
        >>> log_ratios(net, lambda net: -0.5 * (sb.sample(net, x) - y).square().sum((1, 2)), draws=8).shape
        torch.Size([1, 8])
    """
    if draws < 1 or chunk < 1:
        raise ValueError(f"log_ratios needs draws >= 1 and chunk >= 1, got draws={draws!r}, chunk={chunk!r}.")
    count = members(model)
    if not posteriors_of(model):
        raise ValueError(
            "This model has no posterior, so there is nothing to weigh. Convert it with MeanField, KTied or Rank1."
        )
    flags = [(m, m.training) for m in model.modules()]
    model.eval()
    parts = []
    try:
        for start in range(0, draws, chunk):
            held = min(chunk, draws - start)
            with frozen(model, draws=held):
                likelihood = _checked(log_likelihood(model), held * count)
                parts.append((likelihood + _prior_minus_posterior(model, likelihood.device)).view(held, count).T)
    finally:
        for module, training in flags:
            module.training = training
    return torch.cat(parts, 1)


def _checked(likelihood: Any, needed: int) -> Tensor:
    if not isinstance(likelihood, Tensor) or likelihood.shape != (needed,):
        got = tuple(likelihood.shape) if isinstance(likelihood, Tensor) else type(likelihood).__name__
        raise ValueError(
            f"log_likelihood must return one number for each held draw, a tensor of shape ({needed},), got {got}. Sum the "
            f"log-likelihood of all data under each draw of sample(model, x), whose first axis is the draws'."
        )
    return likelihood.double()


def _prior_minus_posterior(model: nn.Module, device: torch.device) -> Tensor:
    """log p(theta) - log q(theta) of the held draws, summed over the whole model: (K n,)."""
    total: Any = 0.0
    for layer in model.modules():
        if isinstance(layer, BayesLayer):
            for site, posterior in layer.posterior.items():
                total = total + _terms(posterior, layer.linear_map(site)).to(device)
    return total


def _terms(posterior: Any, linear: LinearMap) -> Tensor:
    if isinstance(posterior, GaussianPosterior):
        return _gaussian_terms(posterior, linear)
    if isinstance(posterior, Rank1Posterior):
        return _rank1_terms(posterior)
    raise TypeError(
        f"{posterior.name}: the density of a {type(posterior).__name__}'s draws is not known here. log_ratios and k_hat work "
        f"with MeanField, KTied, MatrixNormal and Rank1."
    )


def _gaussian_terms(posterior: GaussianPosterior, linear: LinearMap) -> Tensor:
    drawn = posterior.values()
    fan_in = posterior.site.matrix[0]
    total = _gaussian(drawn.weight, linear.weight, posterior.log_scale(), posterior.prior, fan_in)
    if drawn.bias is not None:
        assert linear.bias is not None and posterior.bias_log_scale is not None
        log_scale = posterior._capped(posterior.bias_log_scale)
        total = total + _gaussian(drawn.bias, linear.bias, log_scale, prior_of_biases(posterior.prior), fan_in)
    return total


def _gaussian(deviation: Tensor, mean: Tensor, log_scale: Tensor, prior: Any, fan_in: int) -> Tensor:
    """Shape: deviation (n, ...) from the mean (...)."""
    deviation, mean, log_scale = deviation.double(), mean.double(), log_scale.double()
    log_q = -0.5 * (deviation * torch.exp(-log_scale)).square() - log_scale - 0.5 * math.log(2 * math.pi)
    log_p = _weight_prior(prior, mean, log_scale, fan_in).log_prob(mean + deviation)
    return (log_p - log_q).flatten(1).sum(1)


def _weight_prior(prior: Any, mean: Tensor, log_scale: Tensor, fan_in: int) -> Any:
    """The density behind a prior whose KL is all the core asks for."""
    if isinstance(prior, HeNormal):
        return Normal(0.0, math.sqrt(prior.gain / fan_in))
    if isinstance(prior, TiedMean):
        return Normal(mean, prior.scale)
    if isinstance(prior, EmpiricalBayes):
        moment = torch.exp(2 * log_scale).sum() + mean.square().sum()
        return Normal(0.0, ((moment + 2 * prior.rate) / (mean.numel() + 2 * prior.concentration + 2)).sqrt())
    return prior


def _rank1_terms(posterior: Rank1Posterior) -> Tensor:
    lines = posterior.noise.block
    factors: tuple[Factor, Factor] = (posterior.r, posterior.s)
    widths = [factor.width for factor in factors]
    total = lines.new_zeros(len(lines), dtype=torch.float64)
    for factor, noise in zip(factors, lines.split(widths, 1), strict=True):
        if factor.width:
            total = total + _factor_terms(posterior, factor, noise)
    return total


def _factor_terms(posterior: Posterior, factor: Factor, noise: Tensor) -> Tensor:
    of_members = factor.distribution()
    loc, scale = (
        posterior.current.pick(posterior, part.double(), len(noise)) for part in (of_members.loc, of_members.scale)
    )
    q = type(of_members)(loc, scale)
    x = q.rsample(noise.double().reshape(loc.shape))
    prior: Any = factor.prior
    return (prior.log_prob(x) - q.log_prob(x)).flatten(1).sum(1)
