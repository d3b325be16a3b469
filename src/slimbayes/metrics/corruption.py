"""How much a classifier suffers from corrupted inputs, against a reference (Hendrycks & Dietterich 2019).

With E_cs the top-1 error under corruption c at severity s, and E_clean the error without,

    CE_c  = 100 * sum_s E_cs             / sum_s Eref_cs                      mCE:  its mean over corruptions
    rCE_c = 100 * sum_s (E_cs - E_clean) / sum_s (Eref_cs - Eref_clean)       rmCE: its mean over corruptions

Chang et al. 2019, appendix D.4, print E_clean where the reference's clean error must stand, and take it once where each
severity needs it. The reference is AlexNet in ImageNet-C and rank-1 BNNs, the plain network in ensemble model patching.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

Rates = Mapping[str, float | Sequence[float]]

ALEXNET_CLEAN = (
    0.435  # top-1 error without corruption (Hendrycks & Dietterich 2019, Table 1)
)
# Published as means over the five severities, which is all that CE_c depends on, without the clean error.
ALEXNET: dict[str, tuple[float, ...]] = {
    name: (mean,) * 5
    for name, mean in {
        "gaussian_noise": 0.886428, "shot_noise": 0.894468, "impulse_noise": 0.922640, "defocus_blur": 0.819880,
        "glass_blur": 0.826268, "motion_blur": 0.785948, "zoom_blur": 0.798360, "snow": 0.866816, "frost": 0.826572,
        "fog": 0.819324, "brightness": 0.564592, "contrast": 0.853204, "elastic_transform": 0.646056,
        "pixelate": 0.717840, "jpeg_compression": 0.606500,
    }.items()
}  # fmt: skip


class CorruptionErrors(NamedTuple):
    """Errors in percent of the reference's: 100 is as bad as the reference, less is better.

    Attributes:
        mce: mean corruption error.
        rmce: the same of what corruption adds to the clean error; nan if the reference has no clean error.
        by_corruption: the corruption error of each corruption.
        relative_by_corruption: the relative one; empty if the reference has no clean error.
    """

    mce: float
    rmce: float
    by_corruption: dict[str, float]
    relative_by_corruption: dict[str, float]


def corruption_errors(errors: Rates, reference: Rates) -> CorruptionErrors:
    """Mean corruption error and its relative form.

    Args:
        errors: top-1 error rates, as fractions, of each corruption at every severity, and the "clean" one.
        reference: the same of the network to compare with. Without "clean", as `ALEXNET`, there is no relative error;
            `{**ALEXNET, "clean": ALEXNET_CLEAN}` has one.

    Example:
        >>> plain = {"clean": 0.2, "fog": [0.3, 0.5], "snow": [0.4, 0.6]}
        >>> result = corruption_errors({"clean": 0.2, "fog": [0.25, 0.35], "snow": [0.4, 0.6]}, plain)
        >>> round(result.mce, 2), round(result.rmce, 2)
        (87.5, 75.0)
    """
    ours, theirs = _severities("errors", errors), _severities("reference", reference)
    if not ours or ours.keys() != theirs.keys():
        only = f"only in errors: {sorted(ours.keys() - theirs)}, only in reference: {sorted(theirs.keys() - ours)}"
        raise ValueError(
            f"errors and reference need the same corruptions, at least one; {only}."
        )
    for name in ours:
        if len(ours[name]) != len(theirs[name]):
            got = f"errors has {len(ours[name])} severities, reference {len(theirs[name])}"
            raise ValueError(f"{name}: {got}; they must agree.")
    absolute = {name: _ratio(name, ours[name], theirs[name], 0.0, 0.0) for name in ours}
    if "clean" not in reference:
        return CorruptionErrors(fmean(absolute.values()), math.nan, absolute, {})
    if "clean" not in errors:
        raise ValueError(
            'The reference has a "clean" error rate, so errors needs one too.'
        )
    clean, reference_clean = (
        _rate("errors", "clean", errors["clean"]),
        _rate("reference", "clean", reference["clean"]),
    )
    relative = {
        name: _ratio(name, ours[name], theirs[name], clean, reference_clean)
        for name in ours
    }
    return CorruptionErrors(
        fmean(absolute.values()), fmean(relative.values()), absolute, relative
    )


def _severities(role: str, rates: Rates) -> dict[str, list[float]]:
    """Checked error rates of each corruption, one per severity, without the clean one."""
    found = {}
    for name, values in rates.items():
        if name == "clean":
            continue
        if not isinstance(values, Iterable):
            needed = "a sequence of error rates is needed, one per severity"
            raise TypeError(f"{role}, {name}: {needed}, got {values!r}.")
        found[name] = [_rate(role, name, value) for value in values]
        if not found[name]:
            raise ValueError(
                f"{role}, {name}: an error rate for at least one severity is needed, got none."
            )
    return found


def _rate(role: str, name: str, value: Any) -> float:
    rate = float(value)
    if not 0 <= rate <= 1:
        raise ValueError(
            f"{role}, {name}: an error rate must be a fraction between 0 and 1, got {value!r}."
        )
    return rate


def _ratio(
    name: str,
    ours: list[float],
    theirs: list[float],
    clean: float,
    reference_clean: float,
) -> float:
    needed = math.fsum(error - reference_clean for error in theirs)
    if (
        needed <= 1e-12
    ):  # zero up to rounding; below it, more errors would mean a smaller ratio
        what, advice = "zero", ""
        if reference_clean:
            what = f"on average no more than its clean rate {reference_clean:g}"
            advice = '; leave "clean" out of the reference to get the mean corruption error alone'
        got = f"the reference's error rates {theirs} are {what}"
        raise ValueError(f"{name}: {got}, so there is nothing to compare with{advice}.")
    return 100 * math.fsum(error - clean for error in ours) / needed
