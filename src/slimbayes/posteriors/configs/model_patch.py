"""The config of Ensemble Model Patching; posteriors/model_patch.py says where it goes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from slimbayes.errors import brief
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
