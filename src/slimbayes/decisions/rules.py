"""Two numbers fitted to held-out rows: TemperatureScaling, how much surer or less sure all draws should be, and
Abstention, from which score on to answer, so that at most a given share of the answers is wrong.

Classes: each draw's logits are divided by T, then the draws are averaged. Real targets: noise and spread of the draws
around their mean are multiplied by T, so the mean stays and the standard deviation is T times as large. T minimises the
NLL of the held-out rows (Guo et al. 2017 for one network). The result is a whole Prediction, whose parts still add up.

Held-out rows are ranked by a score, the surest first. Of the m rows above the (m + 1)-th score the errors are binomial
with the risk above that score (Geifman & El-Yaniv 2017), so that many errors or fewer have probability at most delta if
the risk is too high. Numbers m are tried in a fixed order, upwards from several fixed starts that share delta, each
until its first failure (fixed-sequence testing, Angelopoulos et al. 2021); the largest m that held is taken. The risk
of all later answers is then at most `risk`, with probability 1 - delta over the held-out rows.

Sizes: S draws, K members, N rows, C classes.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from slimbayes.errors import SlimbayesWarning
from slimbayes.prediction.averages import member_mean, over_draws
from slimbayes.prediction.prediction import Prediction
from slimbayes.train.likelihoods import entropy

_LOWEST, _HIGHEST = 1e-2, 1e2


@dataclass(frozen=True)
class TemperatureScaling:
    """Predictions at another temperature; above 1 they are less sure.

    Attributes:
        temperature: T.

    Example:
        >>> p = Prediction.from_outputs(torch.tensor([[[4.0, 0.0]] * 4]))
        >>> scaled = TemperatureScaling.fit(p, torch.tensor([0, 0, 0, 1]))(p)  # 98 % sure, 75 % right
        >>> scaled.probs[0]
        tensor([0.7500, 0.2500])
    """

    temperature: float

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ValueError(
                f"temperature must be positive and finite, got {self.temperature!r}."
            )

    @classmethod
    def fit(cls, prediction: Prediction, target: Tensor) -> "TemperatureScaling":
        """The temperature between 0.01 and 100 at which held-out targets are most probable; a warning tells if that is
        one of the two.

        Shape: target as in `Prediction.log_prob`. The samples must have been kept.
        """
        wide = prediction.to(torch.float64)

        def nll(log_t: float) -> float:
            return -float(_tempered(wide, math.exp(log_t)).log_prob(target).mean())

        grid = torch.linspace(
            math.log(_LOWEST), math.log(_HIGHEST), 25, dtype=torch.float64
        ).tolist()
        values = [nll(t) for t in grid]
        if any(map(math.isnan, values)):
            raise ValueError(
                "Held-out predictions and targets must be numbers, got NaN: leave such rows out."
            )
        best = values.index(min(values))
        if best in (0, len(grid) - 1):
            warnings.warn(
                f"No temperature between {_LOWEST:g} and {_HIGHEST:g} is best, so {math.exp(grid[best]):g} was taken. "
                f"Held-out rows that are all predicted right leave it open, and outputs may be of a size far from 1.",
                SlimbayesWarning,
                stacklevel=2,
            )
        return cls(
            math.exp(_lowest(nll, grid[max(best - 1, 0)], grid[min(best + 1, 24)]))
        )

    def __call__(self, prediction: Prediction) -> Prediction:
        return _tempered(prediction, self.temperature)


def _lowest(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function of one valley is lowest: golden-section search."""
    ratio = (math.sqrt(5) - 1) / 2
    inner = [high - ratio * (high - low), low + ratio * (high - low)]
    values = [function(at) for at in inner]
    for _ in range(24):
        if values[0] < values[1]:
            high, inner = inner[1], [inner[1] - ratio * (inner[1] - low), inner[0]]
            values = [function(inner[0]), values[0]]
        else:
            low, inner = inner[0], [inner[1], inner[0] + ratio * (high - inner[0])]
            values = [values[1], function(inner[1])]
    return (low + high) / 2


def _tempered(prediction: Prediction, temperature: float) -> Prediction:
    draws = prediction.by_draw
    if draws is None:
        raise ValueError(
            "A temperature changes every draw; call predict(..., keep_samples=True)."
        )
    if not prediction.discrete:
        square = temperature**2
        return replace(
            prediction,
            by_member=prediction.mean
            + temperature * (prediction.by_member - prediction.mean),
            by_draw=prediction.mean + temperature * (draws - prediction.mean),
            noise=None if prediction.noise is None else square * prediction.noise,
            aleatoric=square * prediction.aleatoric,
            epistemic=square * prediction.epistemic,
        )
    logs = (draws / temperature).log_softmax(-1)

    def mean_entropy(of: Tensor) -> Tensor:
        each = over_draws(
            entropy(of), len(prediction.by_member), lambda draws: draws.mean(0)
        )
        return member_mean(each, prediction.weights)

    aleatoric = mean_entropy(logs)
    if (
        prediction.distance is not None
    ):  # what distance added to the draws' entropy is no noise: its share stays
        aleatoric = aleatoric * (prediction.aleatoric / mean_entropy(draws)).nan_to_num(
            1.0
        ).clamp(0, 1)
    return prediction.with_logs(logs, aleatoric)


By = Literal["confidence", "total", "aleatoric", "epistemic", "distance"]
_STARTS = 8


@dataclass(frozen=True)
class Abstention:
    """Which rows to answer.

    Attributes:
        by: what rows are ranked by.
        threshold: rows whose `by` is beyond it are answered: above for a confidence, below for an uncertainty.
        risk: the share of wrong answers that is promised.
        answered: the share of held-out rows that would have been answered; 0 if no threshold keeps the promise.

    Example:
        >>> p = Prediction.from_outputs(torch.tensor([[[9.0, 0.0]] * 150 + [[0.1, 0.0]] * 50]))
        >>> y = torch.tensor([0] * 150 + [0, 1] * 25)  # right where it is sure
        >>> rule = Abstention.fit(p, y, risk=0.05)
        >>> rule.answered, int(rule(p).sum())
        (0.75, 150)
    """

    by: By
    threshold: float
    risk: float
    answered: float

    @classmethod
    def fit(
        cls,
        prediction: Prediction,
        target: Tensor,
        risk: float = 0.05,
        delta: float = 0.05,
        by: By | None = None,
        tolerance: float | None = None,
    ) -> "Abstention":
        """From held-out rows and their targets.

        Args:
            risk: the largest share of wrong answers.
            delta: probability, over the held-out rows, that the promise fails.
            by: "confidence" by default, of real targets "total" uncertainty; "distance" needs `predict(...,
                distance=)`.
            tolerance: of real targets, the largest error that is no mistake.

        Shape: target (N,), or (N, ...) of real targets, where a row is wrong if any of its targets is.
        """
        if not (0 < risk < 1 and 0 < delta < 1):
            raise ValueError(
                f"risk and delta must lie strictly between 0 and 1, got {risk!r} and {delta!r}."
            )
        by = by or ("confidence" if prediction.discrete else "total")
        wrong = _wrong(prediction, target, tolerance)
        score, order = _score(prediction, by).sort(descending=True)
        errors = wrong[order].double().cumsum(0)
        n, best = len(score), 0
        least = math.ceil(
            math.log(delta / _STARTS) / math.log1p(-risk)
        )  # without any error
        for j in range(_STARTS):
            for m in range(
                max(least, j * n // _STARTS), max(least, (j + 1) * n // _STARTS) + 1
            ):
                if m < n and not bool(score[m] < score[m - 1]):
                    continue  # equal rows are answered together: none of them counts before the last
                if m > n or _log_tail(int(errors[m - 1]), m, risk) > math.log(
                    delta / _STARTS
                ):
                    break
                best = m
        if best == 0:
            return cls(by, math.inf if by == "confidence" else -math.inf, risk, 0.0)
        last = -math.inf if best == n else float(score[best])
        return cls(by, last if by == "confidence" else -last, risk, best / n)

    def __call__(self, prediction: Prediction) -> Tensor:
        """Which rows to answer, (N,) boolean."""
        threshold = self.threshold if self.by == "confidence" else -self.threshold
        return _score(prediction, self.by) > threshold


def _score(prediction: Prediction, by: By) -> Tensor:
    """How sure a prediction is of each row, (N,)."""
    found = getattr(prediction, by, None)
    if (
        by not in ("confidence", "total", "aleatoric", "epistemic", "distance")
        or found is None
    ):
        raise ValueError(
            f"by={by!r} is nothing this prediction has; 'distance' needs predict(..., distance=)."
        )
    found = found.double().flatten(1).sum(-1) if found.dim() > 1 else found.double()
    return found if by == "confidence" else -found


def _wrong(prediction: Prediction, target: Tensor, tolerance: float | None) -> Tensor:
    if prediction.discrete:
        target = prediction.check_target(target)
        if target.dim() != 1:
            raise ValueError(
                f"One class for each row is needed, got targets of shape {tuple(target.shape)}."
            )
        return prediction.label != target
    if tolerance is None or not tolerance > 0:
        raise ValueError(
            f"tolerance says which error is a mistake and must be positive, got {tolerance!r}."
        )
    if target.shape != prediction.mean.shape:
        raise ValueError(
            f"Targets of shape {tuple(prediction.mean.shape)} are needed, got {tuple(target.shape)}."
        )
    if not bool(target.isfinite().all()):
        raise ValueError(
            "Targets must be finite, got NaN or infinity: leave such rows out."
        )
    wrong = ~((target - prediction.mean).abs() <= tolerance)  # a NaN is no right answer
    return wrong.flatten(1).any(-1) if wrong.dim() > 1 else wrong


def _log_tail(errors: int, rows: int, risk: float) -> float:
    """Log of the probability of at most so many errors among so many rows, each wrong with probability `risk`."""
    counts = torch.arange(errors + 1, dtype=torch.float64)
    return float(
        torch.distributions.Binomial(rows, counts.new_tensor(risk))
        .log_prob(counts)
        .logsumexp(0)
    )
