"""What the configs of mixtures of components share; `Mixture` describes the fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slimbayes.posteriors.base import Config, check_choice, check_count

Draws = Literal["forward", "example"]
_INITS = ("copies", "fresh", "ones", "uniform")


@dataclass(frozen=True, kw_only=True)
class ComponentConfig(Config):
    """K components, how often each is picked, how they start, and the precisions of their prior."""

    components: int = 5
    probs: tuple[float, ...] | None = None
    learn_probs: bool = False
    draws: Draws = "forward"
    init: Literal["copies", "fresh", "ones", "uniform"] | float = "copies"
    jitter: float = 0.05
    tau: float | None = 1.0
    rho: float | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_count(self, "components", self.components)
        check_choice(self, "draws", self.draws, ("forward", "example"))
        if not isinstance(self.init, (int, float)):
            check_choice(self, "init", self.init, _INITS)
        for field in ("tau", "rho"):
            value = getattr(self, field)
            if value is not None and not value >= 0:
                raise ValueError(f"{name}: {field} is a precision and must not be negative, got {value!r}.")
        if self.tau is None and self.rho is not None:
            raise ValueError(
                f"{name}: rho={self.rho!r} without tau would leave only the weights to weight decay; give both or neither."
            )
        if not self.jitter >= 0:
            raise ValueError(f"{name}: jitter must not be negative, got {self.jitter!r}.")
        if self.probs is not None:
            probs = tuple(float(p) for p in self.probs)
            if len(probs) != self.components or not min(probs) >= 0 or not abs(sum(probs) - 1) < 1e-6:
                needed = f"{self.components} numbers (one for each component), none negative, that sum to 1"
                raise ValueError(f"{name}: probs must be {needed}; got {probs}, whose sum is {sum(probs):.6g}.")
            if self.learn_probs and not min(probs) > 0:
                raise ValueError(f"{name}: a probability that starts at zero cannot be learned; got probs={probs}.")
            object.__setattr__(self, "probs", probs)
