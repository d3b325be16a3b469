"""The configs of the general family of Ensemble Model Patching (posteriors/mixture.py), and of DropConnect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from slimbayes.posteriors.configs.base import SiteConfig, check_choice, check_count, check_not_negative, check_rate

Draws = Literal["forward", "example"]
Assignment = Literal["layer", "element", "input", "model"]
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


@dataclass(frozen=True, kw_only=True)
class Mixture(ComponentConfig):
    """Weights that are picked from K components: the family that holds EMP, ECMP, dropout, DropConnect and ensembles.

    Args:
        components: K. The first is the layer's own weight.
        assignment: what shares one pick: the "layer", each "element", each "input" channel, or the "model" (K members).
        zero: fix the last component at zero.
        probs: probabilities of the components; uniform by default.
        learn_probs: train them, by straight-through Gumbel-softmax gradients; their divergence from uniform joins the
            KL.
        sigma: standard deviation of Gaussian noise around every component.
        draws: "forward" picks once for each draw of a pass (the paper), "example" for every row.
        init: how components start: "copies" of the layer's own weight; "fresh", as torch starts such a layer; for norm
            scales also "ones", "uniform" in [0, 1] or a number, which set the layer's own scale too and biases to zero.
        jitter: standard deviation of the noise on copies, relative to the root mean square of what is copied.
        tau, rho: prior precisions of weights and biases (rho is tau by default). None leaves the prior to weight decay.
        precision_shape: infers the precisions of each layer instead of fixing them, under Gamma priors of this shape
            whose means are tau and rho; the best q(tau) is known, so nothing is trained for it. None fixes them.

    Example:
        >>> import slimbayes as sb, torch
        >>> from torch import nn
        >>> dropout = sb.Mixture(components=2, assignment="input", zero=True, probs=(0.9, 0.1))
        >>> net = sb.bayesianize(nn.Linear(3, 2), dropout)
        >>> sb.sample(net, torch.randn(5, 3), draws=4).shape
        torch.Size([4, 5, 2])
    """

    assignment: Assignment = "layer"
    zero: bool = False
    sigma: float = 0.0
    builds: ClassVar[str] = "mixture.MixturePosterior"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "assignment", self.assignment, ("layer", "element", "input", "model"))
        if self.zero and self.components < 2:
            raise ValueError("Mixture: zero=True fixes the last component, so at least 2 are needed.")
        if self.assignment == "input" and not (self.zero and self.components == 2):
            raise ValueError("Mixture: assignment='input' is dropout's, with components=2 and zero=True; or 'element'.")
        if self.assignment == "model" and (self.learn_probs or self.draws == "example" or self.zero or self.probs):
            takes = "it takes no probs, zero or draws per example"
            raise ValueError(f"Mixture: assignment='model' has K members, each present in every sample: {takes}.")
        if self.zero and (self.probs or (0.0,))[-1] >= 1:
            raise ValueError("Mixture: the component at zero has probability one.")
        check_not_negative(self, "sigma", self.sigma)

    @property
    def members(self) -> int:  # type: ignore[override]
        return self.components if self.assignment == "model" else 1

    @property
    def covers(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("matrix", "table") if self.assignment == "input" else ("matrix", "table", "norm")

    def describe(self) -> str:
        return f"Mixture({self.assignment}, components={self.components}{', zero' if self.zero else ''})"


def dropping(assignment: Assignment, rate: float, draws: Draws, tau: float | None, rho: float | None) -> Mixture:
    """The two components of dropout: the layer's own weight, and zero with probability `rate`."""
    probs = (1 - rate, rate)
    return Mixture(components=2, assignment=assignment, zero=True, probs=probs, draws=draws, tau=tau, rho=rho)


@dataclass(frozen=True, kw_only=True)
class DropConnect(SiteConfig):
    """DropConnect (Wan et al. 2013) as variational inference: every weight is set to zero with probability `rate`, in
    eval mode too, and the others are divided by 1 - rate; biases are never dropped.

    Table 2 of Chang et al. 2019: K = 2, M_2 = 0, one pick for every weight.

    Args:
        rate: probability of dropping a weight.
        draws: "forward" drops once for each draw of a pass; "example" for every row, each with a weight matrix of its
            own.
        tau, rho: prior precisions of weights and biases, as in `Mixture`. By default the prior is left to weight decay.

    Example:
        >>> import slimbayes as sb, torch
        >>> net = sb.bayesianize(torch.nn.Linear(3, 2), DropConnect(rate=0.2))
        >>> sb.sample(net, torch.randn(5, 3), draws=4).shape
        torch.Size([4, 5, 2])
    """

    leaves_tables = "DropConnect leaves embeddings alone"

    rate: float = 0.1
    draws: Draws = "forward"
    tau: float | None = None
    rho: float | None = None

    def __post_init__(self) -> None:
        check_rate(self, "rate", self.rate)
        check_choice(self, "draws", self.draws, ("forward", "example"))
        self.resolved()

    def resolved(self) -> Mixture:
        return dropping("element", self.rate, self.draws, self.tau, self.rho)

    def describe(self) -> str:
        return f"DropConnect(rate={self.rate})"
