"""Checks of a config's fields: each names the owner, the field, what it got and what it needs."""

from slimbayes.distributions.families import Distribution
from slimbayes.errors import brief, did_you_mean

MOST = 1_000_000


def check_choice(owner: object, field: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuse a value outside a closed set, naming the nearest valid choice."""
    if value not in allowed:
        raise ValueError(
            f"{type(owner).__name__}: unknown {field} {brief(value)}{did_you_mean(str(value)[:80], allowed)}"
        )


def check_rate(owner: object, field: str, value: object) -> None:
    """Refuse anything but a number in [0, 1)."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1:
        raise ValueError(f"{type(owner).__name__}: {field} must lie in [0, 1), got {brief(value)}.")


def check_count(owner: object, field: str, value: object) -> None:
    """Refuse anything but a whole number of at least one, and such as no memory holds."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{type(owner).__name__}: {field} must be a whole number of at least 1, got {brief(value)}.")
    if value > MOST:
        raise ValueError(f"{type(owner).__name__}: {field} must be {MOST:,} at most, got {brief(value)}.")


def check_positive(owner: object, field: str, value: float) -> None:
    """Refuse zero, numbers below it and NaN."""
    if not value > 0:
        raise ValueError(f"{type(owner).__name__}: {field} must be positive, got {brief(value)}.")


def check_not_negative(owner: object, field: str, value: float | None, what: str = "") -> None:
    """Refuse numbers below zero; `what` says what the number is. None is left alone."""
    if value is not None and not value >= 0:
        raise ValueError(f"{type(owner).__name__}: {field} {what}must not be negative, got {brief(value)}.")


def check_number(owner: object, field: str, value: object) -> None:
    """Refuse what is neither a number nor None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        got = f"{type(value).__name__} {brief(value)}"
        raise TypeError(f"{type(owner).__name__}: {field} must be a number or None, got {got}.")


def check_distribution(owner: object, field: str, value: object) -> None:
    """Refuse what is neither a distribution nor None."""
    if value is not None and not isinstance(value, Distribution):
        example = f" Write {field}=Normal(1.0, {value!r})." if isinstance(value, (int, float)) else ""
        needed, got = "a distribution such as Normal(1.0, 0.1), or None", f"{type(value).__name__} {brief(value)}"
        raise TypeError(f"{type(owner).__name__}: {field} must be {needed}, got {got}.{example}")
