"""What configs of methods that pick among components share; `Mixture` describes the fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slimbayes.posteriors.checks import check_choice, check_count, check_not_negative
from slimbayes.posteriors.configs.base import SiteConfig

Draws = Literal["forward", "example"]
_INITS = ("copies", "fresh", "ones", "uniform")


@dataclass(frozen=True, kw_only=True)
class ComponentConfig(SiteConfig):
    """K components, how often each is picked, how they start, and the precisions of their prior."""

    components: int = 5
    probs: tuple[float, ...] | None = None
    learn_probs: bool = False
    draws: Draws = "forward"
    init: Literal["copies", "fresh", "ones", "uniform"] | float = "copies"
    jitter: float = 0.05
    tau: float | None = 1.0
    rho: float | None = None
    precision_shape: float | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_count(self, "components", self.components)
        check_choice(self, "draws", self.draws, ("forward", "example"))
        if not isinstance(self.init, (int, float)):
            check_choice(self, "init", self.init, _INITS)
        check_not_negative(self, "tau", self.tau, "is a precision and ")
        check_not_negative(self, "rho", self.rho, "is a precision and ")
        check_not_negative(self, "jitter", self.jitter)
        if self.precision_shape is not None and not (self.tau and self.precision_shape > 0 and self.rho != 0):
            given = f"got precision_shape={self.precision_shape!r}, tau={self.tau!r}, rho={self.rho!r}"
            raise ValueError(f"{name}: a Gamma prior needs a positive shape and positive means tau and rho; {given}.")
        if self.tau is None and self.rho is not None:
            alone = "without tau would leave only the weights to weight decay; give both or neither"
            raise ValueError(f"{name}: rho={self.rho!r} {alone}.")
        if self.probs is not None:
            self._check_probs(self.probs)

    def _check_probs(self, probs: tuple[float, ...]) -> None:
        name = type(self).__name__
        if not isinstance(probs, tuple):
            raise TypeError(f"{name}: probs must be a tuple of numbers, got {probs!r}.")
        if len(probs) != self.components or not min(probs) >= 0 or not abs(sum(probs) - 1) < 1e-6:
            needed = f"{self.components} numbers (one for each component), none negative, that sum to 1"
            raise ValueError(f"{name}: probs must be {needed}; got {probs}, whose sum is {sum(probs):.6g}.")
        if self.learn_probs and not min(probs) > 0:
            raise ValueError(f"{name}: a probability that starts at zero cannot be learned; got probs={probs}.")

    @property
    def shares(self) -> tuple[float, ...]:
        """How often each component is picked, at the start if that is learned."""
        return tuple(float(p) for p in self.probs or (1.0 / self.components,) * self.components)
