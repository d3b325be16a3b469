"""Schedules, functions from the step (0, 1, ...): of the KL's weight, and of what is trained in coordinate descent."""

from collections.abc import Callable
from typing import Literal

Schedule = Callable[[int], float]


def constant(weight: float = 1.0) -> Schedule:
    """The same weight at every step.

    >>> constant()(0)
    1.0
    """
    return lambda step: weight


def linear(steps: int) -> Schedule:
    """Rise from 1/steps at step 0 to 1 at step `steps` - 1 (rank-1 nets: 80 % of training on CIFAR, two thirds on
    ImageNet).

    >>> linear(4)(0), linear(4)(3), linear(4)(100)
    (0.25, 1.0, 1.0)
    """
    if steps < 1:
        raise ValueError(f"linear needs at least one step, got {steps!r}.")
    return lambda step: min(1.0, (step + 1) / steps)


def staircase(slope: float, every: int = 100) -> Schedule:
    """Rise by slope * every at each multiple of `every` steps, up to 1 (k-tied Normal, Appendix D.4: slope 5e-5 or
    5e-6).

    >>> staircase(5e-5)(99), staircase(5e-5)(100), staircase(5e-5)(20_000)
    (0.0, 0.005, 1.0)
    """
    if slope <= 0 or every < 1:
        raise ValueError(
            f"staircase needs a positive slope and every >= 1, got slope={slope!r}, every={every!r}."
        )
    return lambda step: min(1.0, slope * every * (step // every))


def alternating(every: int) -> Callable[[int], Literal["shared", "patch"]]:
    """Coordinate descent (Chang et al. 2019, C.2): shared parameters are trained for so many steps, then those of the
    patches, in turn. `param_groups(..., apart=True)` tells them apart: give the groups of the other part a rate
    of zero.

    >>> [alternating(2)(step) for step in range(5)]
    ['shared', 'shared', 'patch', 'patch', 'shared']
    """
    if every < 1:
        raise ValueError(
            f"alternating needs phases of at least one step, got {every!r}."
        )
    return lambda step: "patch" if step // every % 2 else "shared"
