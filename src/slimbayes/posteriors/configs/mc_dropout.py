"""The config of MC dropout; posteriors/mc_dropout.py says what it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from slimbayes.posteriors.configs.base import SiteConfig, check_choice, check_rate
from slimbayes.posteriors.configs.mixture import Mixture, dropping
from slimbayes.posteriors.configs.model_patch import check_layers

if TYPE_CHECKING:
    from torch import nn

    from slimbayes.layers.site import Site
    from slimbayes.posteriors.base import Posterior


@dataclass(frozen=True, kw_only=True)
class MCDropout(SiteConfig):
    """Dropout that is part of the posterior: active in eval mode, drawn afresh for every row by `sample`, one mask for
    all rows under each draw of `predict` and `frozen`.

    Args:
        rate: probability of dropping a unit; by default a dropout layer's own, and 0.005 (the paper's) elsewhere.
        before: None turns on the model's own dropout layers, or acts on the inputs of the layers that `include` or a
            mapping's pattern picks. "norm", "output", "input", joined by "+", or a regular expression put dropout in
            front of those layers.
        unit: "element" drops every number on its own (nn.Dropout); "channel" drops whole channels (nn.Dropout2d), or
            the same inputs at all positions. A dropout layer of the model keeps its own unit.
        tau, rho: prior precisions, for matrices with unit="channel" (Eq. 2). By default the prior is left to weight
            decay.

    Example:
        >>> import slimbayes as sb, torch
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.1), nn.Linear(8, 2))
        >>> pred = sb.predict(sb.bayesianize(net, MCDropout()), torch.randn(5, 3), draws=20)
        >>> bool((pred.epistemic > 0).all())
        True
    """

    rate: float | None = None
    before: str | None = None
    unit: Literal["element", "channel"] = "element"
    tau: float | None = None
    rho: float | None = None

    def __post_init__(self) -> None:
        if self.rate is not None:
            check_rate(self, "rate", self.rate)
        check_choice(self, "unit", self.unit, ("element", "channel"))
        if self.before is not None:
            check_layers(self, "before", self.before)
        if self.tau is not None and self.unit != "channel":
            raise ValueError(
                "MCDropout: tau needs unit='channel', where a draw is a weight matrix; "
                "use weight decay with unit='element'."
            )
        self.resolved()  # checks tau and rho

    def resolved(self) -> Mixture:
        """Of whole channels in front of a matrix."""
        return dropping("input", 0.005 if self.rate is None else self.rate, "example", self.tau, self.rho)

    covers = ("matrix", "table", "norm", "dropout")

    def targets(self, model: nn.Module, offered: Mapping[str, nn.Module], named: bool) -> set[str] | None:
        from slimbayes.posteriors.mc_dropout import own_dropout
        from slimbayes.posteriors.model_patch import chosen_layers

        if self.before is not None:
            return chosen_layers(f"MCDropout(before={self.before!r})", self.before, model, offered, scales=False)
        return None if named else own_dropout(model, offered)

    def build(self, site: Site) -> Posterior:
        from slimbayes.posteriors.mc_dropout import DropoutPosterior

        if site.kind in ("matrix", "table") and self.unit == "channel":
            return super().build(site)
        return DropoutPosterior(self, site)

    def describe(self) -> str:
        return f"MCDropout(rate={'own or 0.005' if self.rate is None else self.rate})"
