"""Ensemble Model Patching (Chang et al. 2019): K components on norm layers, and perhaps the first and last layer.

    EMP    Eq. 4   one pick for each patched layer: its weight and bias come from the same component
    ECMP   Eq. 5   one pick for every element

Everything else stays shared and a point estimate. The mechanism is `Mixture`; this file says where it goes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from slimbayes.layers import class_for, kind_of
from slimbayes.layers.base import sites_of
from slimbayes.layers.site import Kind, Site
from slimbayes.posteriors.base import Posterior
from slimbayes.posteriors.components import ComponentConfig
from slimbayes.posteriors.mixture import Mixture, MixturePosterior


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
        probs, learn_probs, draws, init, jitter, tau, rho: as in `Mixture`. The paper's regressions start scales at
            init=0.2.

    Example:
        >>> import slimbayes as sb, torch
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

    @property
    def covers(self) -> tuple[Kind, ...]:
        return ("matrix", "table", "norm")

    def targets(self, model: nn.Module, offered: Mapping[str, nn.Module], named: bool) -> set[str] | None:
        patch = self.patch or (None if named else "norm")
        return None if patch is None else chosen_layers(f"ModelPatch(patch={patch!r})", patch, model, offered)

    def build(self, site: Site) -> Posterior:
        shared = {f.name: getattr(self, f.name) for f in fields(ComponentConfig)}
        return MixturePosterior(Mixture(assignment="element" if self.cross else "layer", **shared), site)

    def describe(self) -> str:
        return f"ModelPatch({'ECMP' if self.cross else 'EMP'}, components={self.components})"


def check_layers(config: object, field: str, value: str) -> None:
    """Refuse a selection that is neither words joined by "+" nor a regular expression."""
    if not _words(value):
        try:
            re.compile(value)
        except re.error as error:
            neither = "is neither norm, output, input nor a regular expression"
            raise ValueError(f"{type(config).__name__}: {field}={value!r} {neither}: {error}.") from error


def _words(value: str) -> list[str]:
    words = value.split("+")
    return words if set(words) <= {"norm", "output", "input"} else []


def chosen_layers(
    asker: str, value: str, model: nn.Module, offered: Mapping[str, nn.Module], scales: bool = True
) -> set[str]:
    """Names of the offered layers that a selection means; refuses one that means none, saying what was looked for and
    found.

    With `scales`, norm layers without any (affine=False) do not count.
    """
    words = _words(value)
    if not words:
        found = {name for name in offered if re.fullmatch(value, name)}
        return found or _nothing(asker, f"layers whose whole name matches {value!r}", offered)
    found = set()
    for word in words:
        if word == "norm":
            norms = {name: layer for name, layer in offered.items() if class_for(layer, ("norm",)) is not None}
            part = {name for name, layer in norms.items() if not scales or next(layer.parameters(), None) is not None}
            found |= part or _nothing(asker, f"norm layers{' with scales' if scales else ''}", offered)
        else:
            found |= _end_layer(asker, word, model, offered)
    return found


def _end_layer(asker: str, word: str, model: Any, offered: Mapping[str, nn.Module]) -> set[str]:
    """The first or the last dense or convolutional layer, in the order in which modules were assigned."""
    names = [name for name, layer in offered.items() if _is_dense(layer)]
    if not names:
        return _nothing(asker, f"an {word} layer (dense or convolutional)", offered)
    if word == "output" and callable(getattr(model, "get_classifier", None)):  # timm's models name theirs
        head = model.get_classifier()
        named = [name for name in names if offered[name] is head]
        names = named or names
    return {names[0] if word == "input" else names[-1]}


def _is_dense(layer: nn.Module) -> bool:
    """Whether a layer is one matrix applied to numbers: recurrent layers are several, embeddings are tables."""
    cls = class_for(layer, ("matrix",))
    return cls is not None and kind_of(layer) != "table" and len(sites_of(cls, layer)) == 1


def _nothing(asker: str, looked_for: str, offered: Mapping[str, nn.Module]) -> set[str]:
    kinds = sorted({type(layer).__name__ for layer in offered.values()})
    some = ", ".join(f"{n or '(model)'}" for n in list(offered)[:8])
    more = ", ..." if len(offered) > 8 else ""
    raise ValueError(
        f"{asker} looked for {looked_for} and found none. The layers on offer are of type {', '.join(kinds) or 'none'} "
        f'({some}{more}). Choose others with "norm", "output", "input" or a regular expression for names.'
    )
