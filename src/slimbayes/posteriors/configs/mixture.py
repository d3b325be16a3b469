"""The configs of the general family of Ensemble Model Patching (posteriors/mixture.py), of its cases, and of a planar
flow (posteriors/flow_patch.py) that goes where they go: to norms, and perhaps the ends of a network.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from slimbayes.errors import brief
from slimbayes.posteriors.configs.base import (
    Count,
    NotNegative,
    Positive,
    Precision,
    Rate,
    SiteConfig,
    Whole,
)

if TYPE_CHECKING:
    from torch import nn


Draws = Literal["forward", "example"]
Assignment = Literal["layer", "element", "input", "model"]


@dataclass(frozen=True, kw_only=True)
class ComponentConfig(SiteConfig):
    """K components, how often each is picked, how they start, and the precisions of their prior."""

    components: Count = 5
    probs: tuple[float, ...] | None = None
    learn_probs: bool = False
    draws: Draws = "forward"
    init: Literal["copies", "fresh", "ones", "uniform"] | float = "copies"
    jitter: NotNegative = 0.05
    tau: Precision | None = 1.0
    rho: Precision | None = None
    precision_shape: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        if self.precision_shape is not None and not (
            self.tau and self.precision_shape > 0 and self.rho != 0
        ):
            given = f"got precision_shape={self.precision_shape!r}, tau={self.tau!r}, rho={self.rho!r}"
            raise ValueError(
                f"{name}: a Gamma prior needs a positive shape and positive means tau and rho; {given}."
            )
        if self.tau is None and self.rho is not None:
            alone = "without tau would leave only the weights to weight decay; give both or neither"
            raise ValueError(f"{name}: rho={self.rho!r} {alone}.")
        probs = self.shares if self.probs is None else self.probs
        if not isinstance(probs, tuple):
            raise TypeError(f"{name}: probs must be a tuple of numbers, got {probs!r}.")
        if (
            len(probs) != self.components
            or not min(probs) >= 0
            or not abs(sum(probs) - 1) < 1e-6
        ):
            needed = f"{self.components} numbers (one for each component), none negative, that sum to 1"
            raise ValueError(
                f"{name}: probs must be {needed}; got {probs}, whose sum is {sum(probs):.6g}."
            )
        if self.learn_probs and not min(probs) > 0:
            raise ValueError(
                f"{name}: a probability that starts at zero cannot be learned; got probs={probs}."
            )

    @property
    def shares(self) -> tuple[float, ...]:
        """How often each component is picked, at the start if that is learned."""
        return tuple(
            float(p) for p in self.probs or (1.0 / self.components,) * self.components
        )


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
    sigma: NotNegative = 0.0
    builds: ClassVar[str] = "mixture.MixturePosterior"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.zero and self.components < 2:
            raise ValueError(
                "Mixture: zero=True fixes the last component, so at least 2 are needed."
            )
        if self.assignment == "input" and not (self.zero and self.components == 2):
            raise ValueError(
                "Mixture: assignment='input' is dropout's, with components=2 and zero=True; or 'element'."
            )
        if self.assignment == "model" and (
            self.learn_probs or self.draws == "example" or self.zero or self.probs
        ):
            takes = "it takes no probs, zero or draws per example"
            raise ValueError(
                f"Mixture: assignment='model' has K members, each present in every sample: {takes}."
            )
        if self.zero and (self.probs or (0.0,))[-1] >= 1:
            raise ValueError("Mixture: the component at zero has probability one.")

    @property
    def members(self) -> int:  # type: ignore[override]
        return self.components if self.assignment == "model" else 1

    @property
    def covers(self) -> tuple[str, ...]:  # type: ignore[override]
        return (
            ("matrix", "table")
            if self.assignment == "input"
            else ("matrix", "table", "norm")
        )

    def describe(self) -> str:
        return f"Mixture({self.assignment}, components={self.components}{', zero' if self.zero else ''})"


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
    main_field: ClassVar[str] = "rate"
    rate: Rate = 0.1
    draws: Draws = "forward"
    tau: float | None = None
    rho: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.resolved()  # checks tau and rho

    def resolved(self) -> Mixture:
        return Mixture(
            components=2,
            assignment="element",
            zero=True,
            probs=(1 - self.rate, self.rate),
            draws=self.draws,
            tau=self.tau,
            rho=self.rho,
        )


def check_layers(config: object, field: str, value: str) -> None:
    """Refuse a selection that is neither words joined by "+" nor a regular expression."""
    if not words(value):
        try:
            re.compile(value)
        except (re.error, OverflowError, RecursionError) as error:
            neither = "is neither norm, output, input nor a regular expression"
            raise ValueError(
                f"{type(config).__name__}: {field}={brief(value)} {neither}: {error}."
            ) from error


def words(value: str) -> list[str]:
    """A selection of layers by words; none if it is a regular expression."""
    given = value.split("+")
    return given if set(given) <= {"norm", "output", "input"} else []


Layers = Annotated[str, check_layers]


@dataclass(frozen=True, kw_only=True)
class ModelPatch(ComponentConfig):
    """EMP, or with `cross=True` ECMP: a categorical mixture of K components on the layers that matter most for their
    size.

    Args:
        components: K, in each patched layer.
        cross: pick a component for every element (ECMP) instead of one for the layer (EMP).
        patch: which layers: "norm", "output" and "input" (the first and the last dense or convolutional layer), joined
            by "+", or a regular expression for their names. By default the norm layers, or whatever `include` or a
            mapping's pattern picks.
        probs, learn_probs, draws, init, jitter, tau, rho, precision_shape: as in `Mixture`. The paper's regressions
            start scales at init=0.2.

    Example:
        >>> import slimbayes as sb, torch
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        >>> net = sb.bayesianize(net, ModelPatch(components=5, patch="norm+output"))
        >>> [row.status for row in sb.summary(net).rows]
        ['skipped', 'converted', 'converted']
    """

    cross: bool = False
    patch: Layers | None = None
    covers = ("matrix", "table", "norm")

    def targets(
        self, model: nn.Module, offered: Mapping[str, nn.Module], named: bool
    ) -> set[str] | None:
        from slimbayes.posteriors.target_layers import layers_to_patch

        return layers_to_patch(self, model, offered, named)

    def resolved(self) -> Mixture:
        shared = {f.name: getattr(self, f.name) for f in fields(ComponentConfig)}
        return Mixture(assignment="element" if self.cross else "layer", **shared)

    def describe(self) -> str:
        return f"ModelPatch({'ECMP' if self.cross else 'EMP'}, components={self.components})"


@dataclass(frozen=True, kw_only=True)
class FlowPatch(SiteConfig):
    """A normalizing flow over the scales and biases of each norm layer; everything else stays a point estimate.

    Args:
        steps: planar steps of the flow; none leaves an independent normal for each scale and bias.
        patch: which norm layers, a regular expression for their names; all of them by default, or what `include` or a
            mapping's pattern picks.
        scale_init: standard deviation that the flow's base starts with.
        tau, rho: prior precisions of scales and biases, as in `ModelPatch`; rho is tau by default.
        samples: draws that the KL is averaged over, fresh ones whenever it is asked for.

    Example:
        >>> import slimbayes as sb, torch
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        >>> net = sb.bayesianize(net, FlowPatch(steps=4))
        >>> sb.sample(net, torch.randn(5, 3), draws=6).shape
        torch.Size([6, 5, 2])
    """

    steps: Whole = 4
    patch: Layers | None = None
    scale_init: Positive = 0.05
    tau: Precision = 1.0
    rho: Precision | None = None
    samples: Count = 8
    covers = ("norm",)
    targets = ModelPatch.targets  # type: ignore[assignment]
    main_field: ClassVar[str] = "steps"
    builds: ClassVar[str] = "flow_patch.FlowPosterior"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("tau", self.tau), ("rho", self.rho)):
            if value == 0:
                raise ValueError(
                    f"FlowPatch: {name} is the precision of a normal prior and must be positive, got 0."
                )
