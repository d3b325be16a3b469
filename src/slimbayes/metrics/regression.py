"""Scores of predictions of real targets.

A target of several dimensions counts as so many rows, as Chang et al. 2019 average them in Table 13. Where a
distribution is needed, give a Prediction with its samples kept, or tensors: values (M, N, ...) of M draws, and the
standard deviation of the noise around them, if any. Constant memory.

Sizes: M draws, N rows.
"""

import math

import torch
from torch import Tensor

from slimbayes.metrics.functional import crps_mixture, crps_samples, need_tensor
from slimbayes.metrics.streaming import Mean
from slimbayes.prediction.averages import (
    check_level,
    draw_shares,
    log_mean,
    mixture_below,
)
from slimbayes.prediction.prediction import Prediction

Scale = float | Tensor | None


class RMSE(Mean):
    """Root mean squared error of the predictive mean.

    Shape: update(mean (N, ...) or a Prediction, target (N, ...)).

    >>> round(float(RMSE()(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))), 4)
    1.4142
    """

    higher_is_better = False

    def update(self, mean: Prediction | Tensor, target: Tensor) -> None:
        if isinstance(mean, Prediction):
            _need_real(mean)
            mean = mean.mean
        _need_values("Predictions", mean, target)
        self.add((mean.double() - target.double()).square())

    def compute(self) -> Tensor:
        return super().compute().sqrt()


class LPD(Mean):
    """Log density of the targets under the mixture of all draws: log-mean-exp, not mean-log; in nats of their units.

    Shape: update(prediction, target (N, ...)), or update(values (M, N, ...), target, likelihood_std) with a positive
    likelihood_std that broadcasts.

    Example:
        >>> found = LPD()(torch.zeros(1, 3), torch.zeros(3), likelihood_std=10**0.5)
        >>> round(float(found), 4)  # precision 0.1, perfect means
        -2.0702
    """

    higher_is_better = True

    def update(
        self,
        prediction: Prediction | Tensor,
        target: Tensor,
        likelihood_std: Scale = None,
    ) -> None:
        values, noise, shares = mixture(prediction, target, likelihood_std)
        if not bool((noise > 0).all()):
            needed = "give likelihood_std > 0, the standard deviation around the draws, here or to predict"
            raise ValueError(f"A density needs observation noise: {needed}.")
        logp = (
            -0.5 * ((target - values) / noise).square()
            - noise.log()
            - 0.5 * math.log(2 * math.pi)
        )
        self.add(log_mean(logp, shares))


class CRPS(Mean):
    """Continuous ranked probability score, in the targets' units; the absolute error of a single value without noise.

    Closed form for the normal mixture of draws with noise, sorted samples for draws without.

    Shape: update(prediction, target (N, ...)), or update(values (M, N, ...), target, likelihood_std) with a
    likelihood_std that broadcasts, or None.

    >>> float(CRPS()(torch.tensor([[0.0], [2.0]]), torch.tensor([1.0])))
    0.5
    """

    higher_is_better = False

    def update(
        self,
        prediction: Prediction | Tensor,
        target: Tensor,
        likelihood_std: Scale = None,
    ) -> None:
        values, noise, shares = mixture(prediction, target, likelihood_std)
        noisy = bool((noise > 0).any())
        self.add(
            crps_mixture(values, noise, target, shares)
            if noisy
            else crps_samples(values, target, shares)
        )


class IntervalCoverage(Mean):
    """Share of targets in the central interval of the predictive distribution, which should be `level`.

    With noise, y is inside if (1 - level) / 2 <= F(y) <= (1 + level) / 2 with F the mixture's distribution function:
    as `Prediction.interval`. Without noise the interval is that of the samples' quantiles.

    Args:
        level: the interval's probability.

    Shape: update(prediction, target (N, ...)), or update(values (M, N, ...), target, likelihood_std) with a
    likelihood_std that broadcasts, or none, or update((low, high), target) with intervals of any origin, (N, ...) each.

    Example:
        >>> metric = IntervalCoverage(level=0.9)  # of the standard normal it ends at 1.645
        >>> float(metric(torch.zeros(1, 2), torch.tensor([1.6, 1.7]), likelihood_std=1.0))
        0.5
    """

    def __init__(self, level: float = 0.9) -> None:
        check_level(level)
        super().__init__(
            level.hex().translate(str.maketrans(".+-", "___"))
        )  # what a name of a state may hold
        self.level = level

    def update(
        self,
        prediction: Prediction | Tensor | tuple[Tensor, Tensor],
        target: Tensor,
        likelihood_std: Scale = None,
    ) -> None:
        if isinstance(prediction, tuple):
            for bound in prediction:
                _need_values("Interval bounds", bound, target)
            low, high = prediction
        else:
            values, noise, shares = mixture(prediction, target, likelihood_std)
            if bool((noise > 0).any()):
                self.add(
                    (mixture_below(target, values, noise, shares) - 0.5).abs()
                    <= self.level / 2
                )
                return
            if isinstance(prediction, Prediction):
                low, high = prediction.interval(self.level)
            else:
                low, high = (
                    values.quantile(0.5 + side * self.level / 2, 0) for side in (-1, 1)
                )
        self.add((low <= target) & (target <= high))


def mixture(
    prediction: Prediction | Tensor, target: Tensor, likelihood_std: Scale
) -> tuple[Tensor, Tensor, Tensor]:
    """The predictive mixture of normals, checked: means and scales (M, N, ...) and shares (M,) or (M, N), float64."""
    if isinstance(prediction, Prediction):
        _need_real(prediction)
        if likelihood_std is not None:
            raise ValueError(
                "A Prediction knows its noise: give likelihood_std to predict, not to update."
            )
        values, weights = prediction.samples, prediction.weights
        assert prediction.noise is not None  # kept with the samples
        noise = prediction.noise.sqrt().double()
    else:
        values, weights = need_tensor("Draws", prediction), None
        noise = torch.as_tensor(
            0.0 if likelihood_std is None else likelihood_std,
            dtype=torch.float64,
            device=values.device,
        )
    if values.dim() != target.dim() + 1 or len(values) == 0:
        got = f"{tuple(values.shape)} and {tuple(target.shape)}"
        raise ValueError(
            f"Draws (M, N, ...) and targets (N, ...) are needed, M >= 1, got shapes {got}."
        )
    _need_values(
        "Draws", values.abs().amax(0), target
    )  # of all draws at once: nan and infinity are still there
    if not bool(((noise >= 0) & noise.isfinite()).all()):
        raise ValueError("likelihood_std must be finite and not negative.")
    if noise.dim() > values.dim() or any(
        a not in (1, b) for a, b in zip(noise.shape[::-1], values.shape[::-1])
    ):
        got = f"the draws, shape {tuple(values.shape)}, got shape {tuple(noise.shape)}"
        raise ValueError(f"likelihood_std must broadcast against {got}.")
    return (
        values.double(),
        noise.expand_as(values),
        draw_shares(weights, values).double(),
    )


def _need_real(prediction: Prediction) -> None:
    if prediction.discrete:
        raise TypeError(
            f"A Prediction of real targets is needed, got one of {prediction.likelihood} targets."
        )


def _need_values(role: str, values: Tensor, target: Tensor) -> None:
    if (
        need_tensor(role, values).shape != need_tensor("Targets", target).shape
        or target.numel() == 0
    ):
        got = f"{tuple(values.shape)} and {tuple(target.shape)}"
        raise ValueError(
            f"{role} and targets need equal shapes (N, ...), N >= 1, got {got}."
        )
    for name, tensor in ((role, values), ("Targets", target)):
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} must be finite, got nan or infinity.")
