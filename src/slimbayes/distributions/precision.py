"""Precisions that are inferred with the rest: a Gamma prior on tau, and the Gamma q(tau) that is best for it.

    E_q[tau] S / 2 - n/2 E_q[log tau] + KL(q(tau) || Gamma(a, a / mean))        n elements, S their expected square

is least at q(tau) = Gamma(a + n/2, b + S/2), b = a / mean: what is left of it is `collapsed`, a function of S alone, so
that no parameter has to be trained for tau. For large a it is the fixed precision's tau S / 2. (Chang et al. 2019, C.1:
tau, rho and tau_out may be variational parameters, too.)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def collapsed(square: Tensor, count: int, shape: float, mean: float) -> Tensor:
    """What a normal of unknown precision costs: minus the log of its evidence, up to the terms of tau = mean.

    Shape: square (), the expected sum of squares of `count` elements; returns ().

    Example:
        >>> fixed = 0.5 * 2.0 * torch.tensor(3.0)  # tau S / 2
        >>> round(float(collapsed(torch.tensor(3.0), 4, shape=1e6, mean=2.0) - fixed), 3)
        0.0
    """
    rate, more = shape / mean, shape + count / 2
    # log Gamma(a) - log Gamma(a + n/2) + a log(1 + S / 2b) + n/2 log(b + S/2), and n/2 log(mean) to meet tau S / 2
    constant = math.lgamma(shape) - math.lgamma(more) + count / 2 * (math.log(rate) + math.log(mean))
    return more * torch.log1p(square / (2 * rate)) + constant


def posterior(square: Tensor, count: int, shape: float, mean: float) -> tuple[Tensor, Tensor]:
    """Shape and rate of the best q(tau).

    Example:
        >>> a, b = posterior(torch.tensor(3.0), 4, shape=1.0, mean=2.0)
        >>> float(a), float(b)
        (3.0, 2.0)
    """
    return square.new_tensor(shape + count / 2), shape / mean + square / 2


def gamma_kl(shape: Tensor, rate: Tensor, prior_shape: float, prior_rate: float) -> Tensor:
    """KL(Gamma(shape, rate) || Gamma(prior_shape, prior_rate)).

    Example:
        >>> round(float(gamma_kl(torch.tensor(2.0), torch.tensor(3.0), 2.0, 3.0)), 6)
        0.0
    """
    digamma = torch.digamma(shape)
    return (
        (shape - prior_shape) * digamma
        - torch.lgamma(shape)
        + math.lgamma(prior_shape)
        + prior_shape * (rate.log() - math.log(prior_rate))
        + shape * (prior_rate / rate - 1)
    )
