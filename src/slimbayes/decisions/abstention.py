"""Abstention: answer the rows a model is sure of, so that at most a given share of the answers is wrong.

Held-out rows are ranked by a score, the surest first. Of the m rows above the (m + 1)-th score the errors are binomial
with the risk above that score (Geifman & El-Yaniv 2017), so that many errors or fewer have probability at most delta if
the risk is too high. Numbers m are tried in a fixed order, upwards from several fixed starts that share delta, each
until its first failure (fixed-sequence testing, Angelopoulos et al. 2021); the largest m that held is taken. The risk
of all later answers is then at most `risk`, with probability 1 - delta over the held-out rows.

Sizes: N rows.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from slimbayes.prediction.prediction import Prediction
from slimbayes.train.likelihoods import likelihood_named

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
            by: "confidence" by default, of real targets "total" uncertainty; "distance" needs `predict(..., far=)`.
            tolerance: of real targets, the largest error that is no mistake.

        Shape: target (N,), or (N, ...) of real targets, where a row is wrong if any of its targets is.
        """
        if not (0 < risk < 1 and 0 < delta < 1):
            raise ValueError(f"risk and delta must lie strictly between 0 and 1, got {risk!r} and {delta!r}.")
        discrete = likelihood_named(prediction.likelihood).discrete
        by = by or ("confidence" if discrete else "total")
        wrong = _wrong(prediction, target, tolerance, discrete)
        score, order = _score(prediction, by).sort(descending=True, stable=True)
        errors = wrong[order].double().cumsum(0)
        n, best = len(score), 0
        least = math.ceil(math.log(delta / _STARTS) / math.log1p(-risk))  # without any error
        for j in range(_STARTS):
            for m in range(max(least, j * n // _STARTS), max(least, (j + 1) * n // _STARTS) + 1):
                if m > n or _log_tail(int(errors[m - 1]), m, risk) > math.log(delta / _STARTS):
                    break
                if m == n or bool(score[m] < score[m - 1]):  # equal rows are answered together
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
    if by not in ("confidence", "total", "aleatoric", "epistemic", "distance") or found is None:
        raise ValueError(f"by={by!r} is nothing this prediction has; 'distance' needs predict(..., far=).")
    found = found.double().flatten(1).sum(-1) if found.dim() > 1 else found.double()
    return found if by == "confidence" else -found


def _wrong(prediction: Prediction, target: Tensor, tolerance: float | None, discrete: bool) -> Tensor:
    if discrete:
        prediction.log_prob(target)  # refuses what is no label of these rows
        if target.dim() != 1:
            raise ValueError(f"One class for each row is needed, got targets of shape {tuple(target.shape)}.")
        return prediction.label != target
    if tolerance is None or not tolerance > 0:
        raise ValueError(f"tolerance says which error is a mistake and must be positive, got {tolerance!r}.")
    if target.shape != prediction.mean.shape:
        raise ValueError(f"Targets of shape {tuple(prediction.mean.shape)} are needed, got {tuple(target.shape)}.")
    if not bool(target.isfinite().all()):
        raise ValueError("Targets must be finite, got NaN or infinity: leave such rows out.")
    wrong = ~((target - prediction.mean).abs() <= tolerance)  # a NaN is no right answer
    return wrong.flatten(1).any(-1) if wrong.dim() > 1 else wrong


def _log_tail(errors: int, rows: int, risk: float) -> float:
    """Log of the probability of at most so many errors among so many rows, each wrong with probability `risk`."""
    k = torch.arange(errors + 1, dtype=torch.float64)
    n = torch.tensor(float(rows), dtype=torch.float64)
    ways = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    return float(torch.logsumexp(ways + k * math.log(risk) + (n - k) * math.log1p(-risk), 0))
