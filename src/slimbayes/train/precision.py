"""OutputPrecision: a Gaussian likelihood whose precision tau_out is inferred with the network (Chang et al. 2019, C.1).

    -E_q[log N(y; f, 1/tau)] = E_q[tau] / 2 (y - f)^2 - E_q[log tau] / 2 + log(2 pi) / 2         q(tau) = Gamma(a, b)

Sizes: S draws, B rows, T targets.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributions import Gamma, kl_divergence

from slimbayes.distributions.kl import marginal_cost
from slimbayes.distributions.scales import widen
from slimbayes.train.optim import described


class OutputPrecision(nn.Module):
    """q(tau_out) = Gamma(a, b), one for all targets, under a Gamma prior; give its parameters to the optimizer, too.

    Args:
        shape: of the Gamma prior; small for one that says little.
        mean: of the prior, in the units that the network is trained in.

    Example:
        >>> import slimbayes as sb
        >>> net, noise = sb.bayesianize(nn.Linear(3, 1), sb.MeanField()), OutputPrecision()
        >>> x, y = torch.randn(8, 3), torch.randn(8, 1)
        >>> loss = noise.nll(sb.sample(net, x), y) + (sb.kl(net) + noise.kl()) / 8
        >>> loss.backward()
        >>> sb.predict(net, x, likelihood="gaussian", likelihood_std=noise.likelihood_std).std.shape
        torch.Size([8, 1])
    """

    def __init__(self, shape: float = 1.0, mean: float = 1.0) -> None:
        super().__init__()
        if not (
            shape > 0 and mean > 0 and math.isfinite(shape) and math.isfinite(mean)
        ):
            raise ValueError(
                f"OutputPrecision: shape and mean must be positive, got {shape!r} and {mean!r}."
            )
        self.prior = (shape, shape / mean)
        self.log_shape = nn.Parameter(torch.tensor(math.log(shape)))
        self.log_rate = nn.Parameter(torch.tensor(math.log(shape / mean)))

    def nll(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Mean over rows and draws of the expected negative log-likelihood, summed over targets.

        Shape: outputs (S, B, ...), target (B, ...); returns ().
        """
        if outputs.shape[1:] != target.shape:
            needed = tuple(outputs.shape[1:])
            raise ValueError(
                f"A target of shape {needed} is needed for these outputs, got {tuple(target.shape)}."
            )
        shape, rate = self.log_shape.exp(), self.log_rate.exp()
        error = (outputs - target).square()
        each = 0.5 * (
            shape / rate * error
            - torch.digamma(shape)
            + self.log_rate
            + math.log(2 * math.pi)
        )
        return each.flatten(2).sum(-1).mean() if each.dim() > 2 else each.mean()

    def kl(self) -> Tensor:
        """KL(q(tau_out) || prior), to be added to the model's."""
        q = Gamma(
            self.log_shape.exp(), self.log_rate.exp(), validate_args=False
        )  # to look would wait for a device
        return kl_divergence(q, Gamma(*self.prior, validate_args=False))

    @property
    def precision(self) -> Tensor:
        """E_q[tau_out]."""
        return (self.log_shape - self.log_rate).exp().detach()

    @property
    def likelihood_std(self) -> Tensor:
        """The standard deviation of the noise that belongs to it, for `predict`."""
        return self.precision.rsqrt()


def shared_precision(
    model: nn.Module, shape: float = 1.0, tau: float = 1.0, rho: float | None = None
) -> Tensor:
    """The prior terms of Eq. 6 for shared weights and biases, with precisions that are inferred for each of them: what
    `l2(model, shared_weights=tau / 2, shared_biases=rho / 2)` is for fixed ones. Divide it by the number of data.

    Args:
        shape: of the Gamma priors.
        tau, rho: their means, for weights and for biases; rho is tau by default.

    Example:
        >>> import slimbayes as sb
        >>> net = sb.bayesianize(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), sb.ModelPatch(precision_shape=1.0))
        >>> bool((sb.kl(net) + shared_precision(net)).isfinite())
        True
    """
    means = {True: tau, False: tau if rho is None else rho}
    shared = [p for p in described(model) if p.role == "weight" and not p.in_kl]
    terms = [
        marginal_cost(
            widen(p.parameter).square().sum(),
            p.parameter.numel(),
            shape,
            means[p.is_weight],
        )
        for p in shared
    ]
    return sum(terms, torch.zeros((), device=next(model.parameters()).device))
