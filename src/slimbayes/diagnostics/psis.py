"""How heavy the tail of importance ratios is, and so how far a variational posterior can be trusted.

    log r = log p(data | theta) + log p(theta) - log q(theta),      theta ~ q

theta is what the posteriors draw: all weights (and Gaussian biases) of mean-field and k-tied layers, the factors of
rank-1 layers before they are clipped. What is a point estimate counts as known. Without a likelihood the mean is -KL(q
|| prior).

The largest ratios follow a generalised Pareto distribution whose shape k decides which of their moments exist: the mean
if k < 1, the variance if k < 1/2. Draws from q can be reweighted to the true posterior only if k is small (Vehtari et
al. 2024), and a large k says that q misses mass of the posterior (Yao et al. 2018, "Yes, but did it work?").

    tail       the ceil(min(S / 5, 3 sqrt(S))) largest of S ratios, less the largest one outside
    fit        Zhang & Stephens 2009: the posterior mean of theta = -k / sigma on a grid under the profile likelihood,
               k = mean log(1 - theta x) with the sign that makes heavy tails positive
    prior      ten pseudo-observations at k = 1/2:  k <- (M k + 5) / (M + 10)

Sizes: K members, S draws, n draws held at a time, M ratios in the tail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from slimbayes.engine.passes import posteriors_of
from slimbayes.engine.sharing import evaluating
from slimbayes.prediction.sample import fixed_draws, members

LogLikelihood = Callable[[nn.Module], Tensor]
_LEAST = 25  # draws that leave five in the tail, the fewest a fit takes
_EACH = 1000  # draws of each member by default
_SMALLEST = math.log(torch.finfo(torch.float64).tiny)


@torch.no_grad()
def log_ratios(
    model: nn.Module,
    log_likelihood: LogLikelihood,
    draws: int | None = None,
    chunk: int = 16,
) -> Tensor:
    """log p(data, theta) - log q(theta) of draws from the posterior, in eval mode.

    Args:
        model: a model converted with `MeanField`, `KTied`, `MatrixNormal` or `Rank1`.
        log_likelihood: called with the model while draws are held, returns for each the log-likelihood of all data,
            summed, not averaged. `slimbayes.sample(model, x)` gives the outputs of the held draws.
        draws: S, the number of draws; by default 1000 for each member.
        chunk: at most so many draws are held at a time, but one of each member at least.

    Shape: (S,) in float64, draw j of member j mod K; `log_likelihood` returns (n,) for n held draws, as `sample` orders
    them.

    Example:
        >>> import slimbayes as sb
        >>> net = sb.bayesianize(nn.Linear(2, 1), sb.MeanField())
        >>> x, y = torch.randn(5, 2), torch.randn(5, 1)
        >>> log_ratios(net, lambda net: -0.5 * (sb.sample(net, x) - y).square().sum((1, 2)), draws=8).shape
        torch.Size([8])
    """
    if (draws is not None and draws < 1) or chunk < 1:
        raise ValueError(
            f"log_ratios needs draws >= 1 and chunk >= 1, got draws={draws!r}, chunk={chunk!r}."
        )
    if not posteriors_of(model):
        problem = "This model has no posterior, so there is nothing to weigh."
        raise ValueError(f"{problem} Convert it with MeanField, KTied or Rank1.")
    count = members(model)
    draws = _EACH * count if draws is None else draws
    chunk = max(chunk // count, 1) * count  # whole turns of all members
    parts = []
    with evaluating(model):
        for start in range(0, draws, chunk):
            held = min(chunk, draws - start)
            with fixed_draws(model, held):
                total: Any = log_likelihood(model)
                if not isinstance(total, Tensor) or total.shape != (held,):
                    got = (
                        tuple(total.shape)
                        if isinstance(total, Tensor)
                        else type(total).__name__
                    )
                    raise ValueError(
                        f"log_likelihood must return one number for each held draw, a tensor of shape "
                        f"({held},), got {got}. Sum the log-likelihood of all data under each draw of "
                        f"sample(model, x), whose first axis is the draws'."
                    )
                ratios = [ratio.to(total.device) for ratio in _density_ratios(model)]
                parts.append(sum(ratios, total.double()))
    return torch.cat(parts)


def _density_ratios(model: nn.Module) -> Iterator[Tensor]:
    """log p(theta) - log q(theta) of the held draws of each matrix: (n,)."""
    for posterior in posteriors_of(model):
        ratio = posterior.log_ratio()
        if ratio is None:
            raise TypeError(
                f"{posterior.name}: the density of a {type(posterior).__name__}'s draws is not known. log_ratios and "
                f"k_hat work with MeanField, KTied, MatrixNormal and Rank1."
            )
        yield ratio


# ArviZ fits the same numbers (the tests hold them to 1e-7) but would bring xarray and pandas for these thirty lines.
@torch.no_grad()
def pareto_k(log_ratios: Tensor) -> float:
    """Shape k of the generalised Pareto distribution that the largest importance ratios follow.

    Ratios that do not vary in the tail are bounded: -inf. A tail that spans more than float64 can hold, of which fewer
    than five ratios remain, is as heavy as can be: inf.

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
        raise ValueError(
            f"pareto_k needs a vector of at least {_LEAST} log ratios, got shape {tuple(ratios.shape)}."
        )
    if bool((ratios.isnan() | ratios.isposinf()).any()) or bool(
        ratios.isneginf().all()
    ):
        raise ValueError(
            "pareto_k needs finite log ratios (some may be -inf), got NaN, +inf, or nothing but -inf."
        )
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
    likelihood = count * (
        (-theta / shape).log() - shape - 1
    )  # of theta, the scale being maximised out
    weight = torch.softmax(likelihood.nan_to_num(nan=-math.inf), 0)
    k = float(torch.log1p(-(weight * theta).sum() * excess).mean())
    return (count * k + 10 * 0.5) / (count + 10)


@dataclass(frozen=True)
class KHat:
    """Pareto shapes of a variational posterior's importance ratios. `str()` gives a sentence, `to_dict()` plain data.

    Attributes:
        members: k of each member: every member is an approximation of its own.
        draws: S, the fewest draws that a member had.

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
    def verdict(self) -> Literal["reliable", "unreliable", "failed"]:
        """Up to the threshold "reliable", up to 1 "unreliable"; beyond it not even the mean ratio exists: "failed"."""
        return (
            "reliable"
            if self.k <= self.threshold
            else "unreliable"
            if self.k <= 1
            else "failed"
        )

    def to_dict(self) -> dict[str, Any]:
        derived = {"k": self.k, "threshold": self.threshold, "verdict": self.verdict}
        return {"members": list(self.members), "draws": self.draws} | derived

    def __str__(self) -> str:
        return f"k-hat {self.k:.2f} from {self.draws} draws, threshold {self.threshold:.2f}: {self.verdict}"


def k_hat(
    model: nn.Module,
    log_likelihood: LogLikelihood,
    draws: int | None = None,
    chunk: int = 16,
) -> KHat:
    """Judge a variational posterior by the tail of p(data, theta) / q(theta) over its draws.

    The ratio is that of the joint density of all drawn weights: it grows with their number, and for networks of more
    than a few hundred weights "failed" is the rule. It speaks of the weights, not of the predictions. The members of a
    rank-1 model, which have biases of their own, are judged one by one.

    Args: as in `log_ratios`; at least 25 draws of each member.

    Example:
        >>> import slimbayes as sb
        >>> net = sb.bayesianize(nn.Linear(2, 1), sb.MeanField(scale_init=0.1))
        >>> x, y = torch.randn(50, 2), torch.randn(50, 1)
        >>> def log_likelihood(net):
        ...     return -0.5 * (sb.sample(net, x) - y).square().sum((1, 2))
        >>> round(k_hat(net, log_likelihood, draws=500).threshold, 2)
        0.63
    """
    count = members(model)
    if draws is not None and draws < _LEAST * count:
        raise ValueError(
            f"k_hat needs at least {_LEAST} draws of each of {count} members, {_LEAST * count} in all, got "
            f"draws={draws!r}."
        )
    ratios = log_ratios(model, log_likelihood, draws, chunk)
    shapes = tuple(pareto_k(ratios[k::count]) for k in range(count))
    return KHat(shapes, len(ratios) // count)
