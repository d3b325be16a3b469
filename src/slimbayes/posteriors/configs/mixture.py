"""The config of the general family of Ensemble Model Patching; posteriors/mixture.py says what it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from slimbayes.posteriors.checks import check_choice, check_not_negative
from slimbayes.posteriors.configs.components import ComponentConfig, Draws

if TYPE_CHECKING:
    from slimbayes.layers.site import Kind, Site
    from slimbayes.posteriors.base import Posterior

Assignment = Literal["layer", "element", "input", "model"]


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
    def covers(self) -> tuple[Kind, ...]:
        return ("matrix", "table") if self.assignment == "input" else ("matrix", "table", "norm")

    def build(self, site: Site) -> Posterior:
        from slimbayes.posteriors.mixture import MixturePosterior

        return MixturePosterior(self, site)

    def describe(self) -> str:
        return f"Mixture({self.assignment}, components={self.components}{', zero' if self.zero else ''})"


def dropping(assignment: Assignment, rate: float, draws: Draws, tau: float | None, rho: float | None) -> Mixture:
    """The two components of dropout: the layer's own weight, and zero with probability `rate`."""
    probs = (1 - rate, rate)
    return Mixture(components=2, assignment=assignment, zero=True, probs=probs, draws=draws, tau=tau, rho=rho)
