"""Scores of predictions of real targets.

    RMSE               sqrt of the mean of (y - mean)^2
    LPD                mean of log p(y), p the mixture of all draws: log-mean-exp, not mean-log
    CRPS               mean of the continuous ranked probability score (see crps.py)
    IntervalCoverage   share of targets inside the central interval of the predictive distribution

A target of several dimensions counts as so many rows, as Chang et al. 2019 average them in Table 13. Where a distribution is
needed, give a Prediction with its samples kept, or tensors: values (M, N, ...) of M draws, and the standard deviation of the
noise around them, if any. Constant memory.

Sizes: M draws, N rows.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from slimbayes.metrics.crps import crps_mixture, crps_samples
from slimbayes.metrics.inputs import need_tensor
from slimbayes.metrics.streaming import Mean
from slimbayes.prediction.prediction import Prediction


class Draws(NamedTuple):
    """A mixture of normal distributions: means (M, N, ...), standard deviations of that shape or None for none, Prediction's shares (M,)."""

    values: Tensor
    scale: Tensor | None
    shares: Tensor | None


class RMSE(Mean):
    """Root mean squared error of the predictive mean.

    Shape: update(mean (N, ...) or a Prediction, target (N, ...)).

    Example:
        >>> metric = RMSE()
        >>> metric.update(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
        >>> round(float(metric.compute()), 4)
        1.4142
    """

    higher_is_better = False

    def __init__(self) -> None:
        super().__init__("squared_error")

    def update(self, mean: Prediction | Tensor, target: Tensor) -> None:
        """Take a batch."""
        if isinstance(mean, Prediction):
            need_real(mean)
            mean = mean.mean
        need_values("Predictions", mean, target)
        self.add((mean.double() - target.double()).square())

    def compute(self) -> Tensor:
        """The error over all rows so far, of all processes."""
        return super().compute().sqrt()


class LPD(Mean):
    """Log predictive density of the targets, in nats of the units they are given in.

    Shape: update(prediction, target (N, ...)), or update(values (M, N, ...), target, scale) with a scale above 0 that broadcasts.

    Example:
        >>> metric = LPD()
        >>> metric.update(torch.zeros(1, 3), torch.zeros(3), scale=10**0.5)  # precision 0.1, perfect means
        >>> round(float(metric.compute()), 4)
        -2.0702
    """

    higher_is_better = True

    def __init__(self) -> None:
        super().__init__("lpd")

    def update(self, prediction: Prediction | Tensor, target: Tensor, scale: float | Tensor | None = None) -> None:
        """Take a batch."""
        values, noise, shares = draws_of(prediction, target, scale)
        if noise is None or not bool((noise > 0).all()):
            raise ValueError(
                "A density needs observation noise: give scale > 0, the standard deviation around the draws, here or to predict."
            )
        logp = -0.5 * ((target - values) / noise).square() - noise.log() - 0.5 * math.log(2 * math.pi)
        if shares is None:
            self.add(logp.logsumexp(0) - math.log(len(logp)))
        else:
            self.add((logp + along(shares.log(), logp)).logsumexp(0))


class CRPS(Mean):
    """Continuous ranked probability score, in the targets' units; the absolute error of a single value without noise.

    Closed form for the normal mixture of draws with noise, sorted samples for draws without.

    Shape: update(prediction, target (N, ...)), or update(values (M, N, ...), target, scale) with a scale that broadcasts, or none.

    Example:
        >>> metric = CRPS()
        >>> metric.update(torch.tensor([[0.0], [2.0]]), torch.tensor([1.0]))
        >>> float(metric.compute())
        0.5
    """

    higher_is_better = False

    def __init__(self) -> None:
        super().__init__("crps")

    def update(self, prediction: Prediction | Tensor, target: Tensor, scale: float | Tensor | None = None) -> None:
        """Take a batch."""
        values, noise, shares = draws_of(prediction, target, scale)
        if noise is None:
            self.add(crps_samples(values, target, shares))
        else:
            self.add(crps_mixture(values, noise, target, shares))


class IntervalCoverage(Mean):
    """Share of targets in the central interval of the predictive distribution, which should be `level`.

    With noise, y is inside if (1 - level) / 2 <= F(y) <= (1 + level) / 2 with F the mixture's distribution function: exact, where
    `Prediction.interval` draws noise. Without noise the interval is that of the samples' quantiles.

    Args:
        level: the interval's probability.

    Shape: update(prediction, target (N, ...)), or update(values (M, N, ...), target, scale) with a scale that broadcasts, or none,
    or update((low, high), target) with intervals of any origin, (N, ...) each.

    Example:
        >>> metric = IntervalCoverage(level=0.9)
        >>> metric.update(torch.zeros(1, 2), torch.tensor([1.6, 1.7]), scale=1.0)  # the interval ends at 1.645
        >>> float(metric.compute())
        0.5
    """

    def __init__(self, level: float = 0.9) -> None:
        if not 0 < level < 1:
            raise ValueError(f"level must lie strictly between 0 and 1, got {level!r}.")
        super().__init__(f"covered_{level.hex().translate(str.maketrans('.+-', '___'))}")
        self.level = level

    def update(
        self,
        prediction: Prediction | Tensor | tuple[Tensor, Tensor],
        target: Tensor,
        scale: float | Tensor | None = None,
    ) -> None:
        """Take a batch."""
        if isinstance(prediction, tuple):
            low, high = prediction
            for bound in prediction:
                need_values("Interval bounds", bound, target)
        else:
            values, noise, shares = draws_of(prediction, target, scale)
            if noise is not None:
                below = torch.special.ndtr((target - values) / noise.clamp_min(torch.finfo(noise.dtype).tiny))
                cdf = below.mean(0) if shares is None else torch.tensordot(shares, below, 1)
                self.add((cdf - 0.5).abs() <= self.level / 2)
                return
            if isinstance(prediction, Prediction):
                low, high = prediction.interval(self.level)
            else:
                low, high = values.quantile(0.5 - self.level / 2, 0), values.quantile(0.5 + self.level / 2, 0)
        self.add((low <= target) & (target <= high))


def draws_of(prediction: Prediction | Tensor, target: Tensor, scale: float | Tensor | None) -> Draws:
    """Means, noise and shares of the draws, checked, in float64; noise of zero everywhere is none."""
    shares = None
    if isinstance(prediction, Prediction):
        need_real(prediction)
        if scale is not None:
            raise ValueError("A Prediction knows its noise: give scale to predict, not to update.")
        values, shares = prediction.samples, prediction.weights
        assert prediction.noise is not None  # kept with the samples
        noise = prediction.noise.sqrt()
        if shares is not None:
            each = len(values) // len(shares)
            shares = shares.to(values.device, torch.float64).repeat(each) / each
    else:
        values = prediction
        noise = torch.as_tensor(
            0.0 if scale is None else scale, dtype=torch.float64, device=need_tensor("Draws", values).device
        )
    if values.dim() != target.dim() + 1 or len(values) == 0:
        raise ValueError(
            f"Draws (M, N, ...) and targets (N, ...) are needed, M >= 1, got shapes {tuple(values.shape)} and {tuple(target.shape)}."
        )
    need_values("Draws", values[0], target)
    if not bool(values.isfinite().all()):
        raise ValueError("Draws must be finite, got nan or infinity.")
    if not bool(((noise >= 0) & noise.isfinite()).all()):
        raise ValueError("scale must be finite and not negative.")
    try:
        noise = noise.double().expand_as(values)
    except RuntimeError:
        raise ValueError(
            f"scale must broadcast against the draws, shape {tuple(values.shape)}, got shape {tuple(noise.shape)}."
        ) from None
    return Draws(values.double(), noise if bool((noise > 0).any()) else None, shares)


def need_real(prediction: Prediction) -> None:
    if "gaussian" not in prediction.likelihood:
        raise TypeError(f"A Prediction of real targets is needed, got one of {prediction.likelihood} targets.")


def need_values(role: str, values: Tensor, target: Tensor) -> None:
    if need_tensor(role, values).shape != need_tensor("Targets", target).shape or target.numel() == 0:
        raise ValueError(
            f"{role} and targets need equal shapes (N, ...), N >= 1, got {tuple(values.shape)} and {tuple(target.shape)}."
        )
    for name, tensor in ((role, values), ("Targets", target)):
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} must be finite, got nan or infinity.")


def along(factors: Tensor, values: Tensor) -> Tensor:
    """Factors (M,) shaped to meet values (M, N, ...)."""
    return factors.reshape(-1, *[1] * (values.dim() - 1))
