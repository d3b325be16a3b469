"""The noise of a heteroscedastic head: from the network's raw output to a scale that the targets' spread bounds."""

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from slimbayes.engine.blocks import is_exporting
from slimbayes.errors import SlimbayesWarning

# Of a heteroscedastic head, in units of the targets' standard deviation: its bounds, and what a softplus of one is.
LEAST_NOISE, MOST_NOISE, UNIT_NOISE = (0.03, 3.0, 0.3)


def noise_scale(raw: Tensor, spread: float | Tensor = 1.0) -> Tensor:
    """The noise scale behind a raw network output, between 0.03 and 3 times the targets' spread.

    It is the softplus of the output, in units of 0.3 of the spread, added in quadrature to the floor. A network that
    fits its training rows ever better would otherwise shrink the noise there without end, and one mistake elsewhere
    then costs any number of nats. The unit makes the noise start at a fifth of the spread. docs/distance.md has what
    other floors and units cost and gain on held-out rows.

    Shape: raw (...), spread broadcasts against it; returns (...).

    Example:
        >>> noise_scale(torch.tensor([-100.0, 0.0, 100.0]), spread=2.0)
        tensor([0.0600, 0.4195, 6.0003])
    """
    # written out in graphs that are exported: onnxruntime has no softplus of float64
    out = (
        raw.relu() + torch.log1p((-raw.abs()).exp())
        if is_exporting()
        else F.softplus(raw)
    )
    wide = MOST_NOISE * torch.tanh(UNIT_NOISE * out / MOST_NOISE)
    return spread * (LEAST_NOISE**2 + wide.square()).sqrt()


def noise_slope(outputs: Tensor, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    """d noise / d raw, and the noise scale."""
    raw, noise = outputs[..., 1], noise_scale(outputs[..., 1], spread)
    wide = torch.tanh(UNIT_NOISE * F.softplus(raw) / MOST_NOISE)
    return spread**2 * MOST_NOISE * wide / noise * UNIT_NOISE * (
        1 - wide.square()
    ) * raw.sigmoid(), noise


def noise_unit(scale: float | Tensor) -> float | Tensor:
    """The unit of noise: the targets' spread that a prediction was given; 1, with a warning, where none was (0.0)."""
    if isinstance(scale, Tensor) or scale:
        return scale
    warnings.warn(
        "heteroscedastic_gaussian needs likelihood_std, the targets' standard deviation as in training: without, noise "
        "is in units of 1. Say likelihood_std=1.0 if the targets were standardised.",
        SlimbayesWarning,
        stacklevel=2,
    )
    return 1.0


def check_spread(target: Tensor, spread: Tensor) -> None:
    """Warn where targets are in other units than a heteroscedastic head was told: its noise is bounded by their spread.

    Few targets say little about it.
    """
    if len(target) < 32:
        return
    deviations = target.double().std(
        0
    )  # of each target by itself: several may be in different units
    each = torch.broadcast_to(spread.to(deviations), target.shape).mean(0)
    odd = ~((0.1 * each < deviations) & (deviations < 10 * each))
    if bool(odd.any()):
        found, told = float(deviations[odd].flatten()[0]), float(each[odd].flatten()[0])
        warnings.warn(
            f"Targets have the standard deviation {found:.3g}, but likelihood_std={told:.3g} bounds their noise to "
            f"[{LEAST_NOISE * told:.3g}, {MOST_NOISE * told:.3g}]: standardise them, or give likelihood_std= in training "
            f"and in predict.",
            stacklevel=3,
        )
