"""The config of a planar flow over norm layers; posteriors/flow_patch.py says what it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from slimbayes.posteriors.checks import check_count, check_not_negative, check_positive
from slimbayes.posteriors.configs.base import SiteConfig
from slimbayes.posteriors.configs.model_patch import check_layers

if TYPE_CHECKING:
    from torch import nn


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
