"""pareto_k and k_hat: how heavy the tail of importance ratios is, and so how far a variational posterior can be trusted.

The largest ratios follow a generalised Pareto distribution whose shape k decides which of their moments exist: the mean if
k < 1, the variance if k < 1/2. Draws from q can be reweighted to the true posterior only if k is small (Vehtari et al. 2024),
and a large k says that q misses mass of the posterior (Yao et al. 2018, "Yes, but did it work?").

    tail       the ceil(min(S / 5, 3 sqrt(S))) largest of S ratios, less the largest one outside
    fit        Zhang & Stephens 2009: the posterior mean of theta = -k / sigma on a grid under the profile likelihood,
               k = mean log(1 - theta x) with the sign that makes heavy tails positive
    prior      ten pseudo-observations at k = 1/2:  k <- (M k + 5) / (M + 10)

Sizes: K members, S draws of each, M ratios in the tail.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from slimbayes.diagnostics.ratios import LogLikelihood, log_ratios

Verdict = Literal["reliable", "unreliable", "failed"]
_LEAST = 25  # draws that leave five in the tail, the fewest a fit takes
_SMALLEST = math.log(torch.finfo(torch.float64).tiny)


@torch.no_grad()
def pareto_k(log_ratios: Tensor) -> float:
    """Shape k of the generalised Pareto distribution that the largest importance ratios follow.

    Ratios that do not vary in the tail are bounded: -inf. A tail that spans more than float64 can hold, of which fewer than
    five ratios remain, is as heavy as can be: inf.

    Args:
        log_ratios: logs of at least 25 ratios, up to any constant; -inf stands for a ratio of zero.

    Shape: (S,).

    Example:
        >>> u = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
        >>> round(pareto_k(-0.5 * u.log()), 2)  # 1 / sqrt(u): a Pareto tail with k = 1/2
        0.5
    """
    ratios = torch.as_tensor(log_ratios).detach().double()
    if ratios.dim() != 1 or len(ratios) < _LEAST:
        raise ValueError(f"pareto_k needs a vector of at least {_LEAST} log ratios, got shape {tuple(ratios.shape)}.")
    if bool((ratios.isnan() | ratios.isposinf()).any()) or bool(ratios.isneginf().all()):
        raise ValueError("pareto_k needs finite log ratios (some may be -inf), got NaN, +inf, or nothing but -inf.")
    ordered = (ratios - ratios.max()).sort().values
    tail = math.ceil(min(len(ratios) / 5, 3 * math.sqrt(len(ratios))))
    edge = max(float(ordered[-tail - 1]), _SMALLEST)
    beyond = ordered[-tail:]
    if float(beyond[-1] - beyond[0]) <= 1e-12 * max(1.0, float(ratios.max().abs())):
        return -math.inf
    excess = beyond[beyond > edge].exp() - math.exp(edge)
    return math.inf if len(excess) < 5 else _generalised_pareto_shape(excess)


def _generalised_pareto_shape(excess: Tensor) -> float:
    """Zhang & Stephens' estimate of k from sorted, positive exceedances (M,), shrunk towards 1/2."""
    count = len(excess)
    grid = 30 + int(math.sqrt(count))
    steps = torch.arange(1, grid + 1, dtype=excess.dtype, device=excess.device)
    quartile = excess[int(count / 4 + 0.5) - 1]
    theta = 1 / excess[-1] + (1 - (grid / (steps - 0.5)).sqrt()) / (3 * quartile)
    shape = torch.log1p(-theta[:, None] * excess).mean(1)
    likelihood = count * ((-theta / shape).log() - shape - 1)  # of theta, the scale being maximised out
    weight = torch.softmax(likelihood.nan_to_num(nan=-math.inf), 0)
    k = float(torch.log1p(-(weight * theta).sum() * excess).mean())
    return (count * k + 10 * 0.5) / (count + 10)


@dataclass(frozen=True)
class KHat:
    """Pareto shapes of a variational posterior's importance ratios. `str()` gives a sentence, `to_dict()` plain data.

    Attributes:
        members: k of each member: every member is an approximation of its own.
        draws: S, the draws of each member.

    Example:
        >>> print(KHat((0.31,), 1000))
        k-hat 0.31 from 1000 draws, threshold 0.67: reliable
    """

    members: tuple[float, ...]
    draws: int

    @property
    def k(self) -> float:
        """The largest of the members' shapes."""
        return max(self.members)

    @property
    def threshold(self) -> float:
        """Above min(1 - 1 / log10 S, 0.7), S draws are too few to reweight with."""
        return min(1 - 1 / math.log10(self.draws), 0.7)

    @property
    def verdict(self) -> Verdict:
        """Up to the threshold "reliable", up to 1 "unreliable"; beyond it not even the mean ratio exists: "failed"."""
        return "reliable" if self.k <= self.threshold else "unreliable" if self.k <= 1 else "failed"

    def to_dict(self) -> dict[str, Any]:
        return {
            "k": self.k,
            "members": list(self.members),
            "draws": self.draws,
            "threshold": self.threshold,
            "verdict": self.verdict,
        }

    def __str__(self) -> str:
        return f"k-hat {self.k:.2f} from {self.draws} draws, threshold {self.threshold:.2f}: {self.verdict}"


def k_hat(model: nn.Module, log_likelihood: LogLikelihood, draws: int = 1000, chunk: int = 16) -> KHat:
    """Judge a variational posterior by the tail of p(data, theta) / q(theta) over its draws.

    The ratio is that of the joint density of all drawn weights: it grows with their number, and for networks of more than a few
    hundred weights "failed" is the rule. It speaks of the weights, not of the predictions. What is a point estimate counts as
    known, and the members of a rank-1 model, which have biases of their own, are judged one by one.

    Args:
        model: a model converted with `MeanField`, `KTied`, `MatrixNormal` or `Rank1`.
        log_likelihood: called with the model while draws are held, returns for each held draw the log-likelihood of all data,
            summed over the data and not averaged. `slimbayes.sample(model, x)` gives the outputs of the held draws.
        draws: S, draws from every member, at least 25.
        chunk: at most so many draws of every member are held at a time.

    Example:
        >>> import slimbayes as sb
        >>> net = sb.bayesianize(nn.Linear(2, 1), sb.MeanField(scale_init=0.1))
        >>> x, y = torch.randn(50, 2), torch.randn(50, 1)
        >>> def log_likelihood(net):
        ...     return -0.5 * (sb.sample(net, x) - y).square().sum((1, 2))
        >>> round(k_hat(net, log_likelihood, draws=500).threshold, 2)
        0.63
    """
    if draws < _LEAST:
        raise ValueError(f"k_hat needs at least {_LEAST} draws, got draws={draws!r}.")
    ratios = log_ratios(model, log_likelihood, draws, chunk)
    return KHat(tuple(pareto_k(member) for member in ratios), draws)
