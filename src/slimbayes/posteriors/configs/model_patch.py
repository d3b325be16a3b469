"""The configs of methods for norms and the ends of a network: Ensemble Model Patching, and a planar flow.

posteriors/model_patch.py says where they go, posteriors/flow_patch.py what the flow is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

from slimbayes.errors import brief
from slimbayes.posteriors.configs.base import SiteConfig, check_count, check_not_negative, check_positive
from slimbayes.posteriors.configs.mixture import ComponentConfig, Mixture

if TYPE_CHECKING:
    from torch import nn


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
    patch: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patch is not None:
            check_layers(self, "patch", self.patch)

    covers = ("matrix", "table", "norm")

    def targets(self, model: nn.Module, offered: Mapping[str, nn.Module], named: bool) -> set[str] | None:
        from slimbayes.posteriors.model_patch import patched

        return patched(self, model, offered, named)

    def resolved(self) -> Mixture:
        shared = {f.name: getattr(self, f.name) for f in fields(ComponentConfig)}
        return Mixture(assignment="element" if self.cross else "layer", **shared)

    def describe(self) -> str:
        return f"ModelPatch({'ECMP' if self.cross else 'EMP'}, components={self.components})"


def check_layers(config: object, field: str, value: str) -> None:
    """Refuse a selection that is neither words joined by "+" nor a regular expression."""
    if not words(value):
        try:
            re.compile(value)
        except (re.error, OverflowError, RecursionError) as error:
            neither = "is neither norm, output, input nor a regular expression"
            raise ValueError(f"{type(config).__name__}: {field}={brief(value)} {neither}: {error}.") from error


def words(value: str) -> list[str]:
    """A selection of layers by words; none if it is a regular expression."""
    given = value.split("+")
    return given if set(given) <= {"norm", "output", "input"} else []


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

    steps: int = 4
    patch: str | None = None
    scale_init: float = 0.05
    tau: float = 1.0
    rho: float | None = None
    samples: int = 8
    builds: ClassVar[str] = "flow_patch.FlowPosterior"

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or isinstance(self.steps, bool) or self.steps < 0:
            raise ValueError(f"FlowPatch: steps must be a whole number that is not negative, got {self.steps!r}.")
        check_count(self, "samples", self.samples)
        check_positive(self, "scale_init", self.scale_init)
        for name, value in (("tau", self.tau), ("rho", self.rho)):
            check_not_negative(self, name, value, "is a precision and ")
            if value == 0:
                raise ValueError(f"FlowPatch: {name} is the precision of a normal prior and must be positive, got 0.")
        if self.patch is not None:
            check_layers(self, "patch", self.patch)

    covers = ("norm",)

    def targets(self, model: nn.Module, offered: Mapping[str, nn.Module], named: bool) -> set[str] | None:
        from slimbayes.posteriors.model_patch import patched

        return patched(self, model, offered, named)

    def describe(self) -> str:
        return f"FlowPatch(steps={self.steps})"
