"""Temperature: how much surer or less sure all draws should be, fitted to held-out rows.

Classes: each draw's logits are divided by T, then the draws are averaged. Real targets: noise and spread of the draws
around their mean are multiplied by T, so the mean stays and the standard deviation is T times as large. T minimises the
NLL of the held-out rows (Guo et al. 2017 for one network). The result is a whole Prediction, whose parts still add up.

Sizes: S draws, K members, N rows, C classes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slimbayes.prediction.accumulate import along_draws, log_mean
from slimbayes.prediction.prediction import Prediction
from slimbayes.train.likelihoods import entropy, likelihood_named

_LOWEST, _HIGHEST = 1e-2, 1e2


@dataclass(frozen=True)
class Temperature:
    """Predictions at another temperature; above 1 they are less sure.

    Attributes:
        temperature: T.

    Example:
        >>> p = Prediction.from_outputs(torch.tensor([[[4.0, 0.0]] * 4]))
        >>> scaled = Temperature.fit(p, torch.tensor([0, 0, 0, 1]))(p)  # 98 % sure, 75 % right
        >>> scaled.probs[0]
        tensor([0.7500, 0.2500])
    """

    temperature: float

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature must be positive and finite, got {self.temperature!r}.")

    @classmethod
    def fit(cls, prediction: Prediction, target: Tensor) -> "Temperature":
        """The temperature between 0.01 and 100 at which held-out targets are most probable.

        Shape: target as in `Prediction.log_prob`. The samples must have been kept.
        """
        wide = prediction.to(torch.float64)

        def nll(log_t: float) -> float:
            return -float(_tempered(wide, math.exp(log_t)).log_prob(target).mean())

        steps = 24
        grid = [math.log(_LOWEST) + i * math.log(_HIGHEST / _LOWEST) / steps for i in range(steps + 1)]
        values = [nll(t) for t in grid]
        if any(math.isnan(value) for value in values):
            raise ValueError("Held-out predictions and targets must be numbers, got NaN: leave such rows out.")
        best = min(range(len(grid)), key=values.__getitem__)
        return cls(math.exp(_lowest(nll, grid[max(best - 1, 0)], grid[min(best + 1, steps)])))

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
        raise ValueError("A temperature changes every draw; call predict(..., keep_samples=True).")
    members = len(prediction.by_member)
    if not likelihood_named(prediction.likelihood).discrete:
        square = temperature**2
        return replace(
            prediction,
            by_member=prediction.mean + temperature * (prediction.by_member - prediction.mean),
            by_draw=prediction.mean + temperature * (draws - prediction.mean),
            noise=None if prediction.noise is None else square * prediction.noise,
            aleatoric=square * prediction.aleatoric,
            epistemic=square * prediction.epistemic,
        )
    logs = (draws / temperature).log_softmax(-1)
    by_member = log_mean(logs.unflatten(0, (-1, members)))
    shares = prediction.weights

    def mean_entropy(of: Tensor) -> Tensor:
        each = entropy(of).unflatten(0, (-1, members)).mean(0)
        return each.mean(0) if shares is None else (along_draws(shares.to(each), each) * each).sum(0)

    aleatoric = mean_entropy(logs)
    if prediction.distance is not None:  # what distance added to the draws' entropy is no noise: its share stays
        aleatoric = aleatoric * (prediction.aleatoric / mean_entropy(draws)).nan_to_num(1.0).clamp(0, 1)
    epistemic = (entropy(log_mean(by_member, shares)) - aleatoric).clamp_min(0)
    return replace(prediction, by_draw=logs, by_member=by_member, aleatoric=aleatoric, epistemic=epistemic)
