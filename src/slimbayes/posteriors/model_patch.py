"""Ensemble Model Patching (Chang et al. 2019): K components on norm layers, and perhaps the first and last layer.

    EMP    Eq. 4   one pick for each patched layer: its weight and bias come from the same component
    ECMP   Eq. 5   one pick for every element

Everything else stays shared and a point estimate. The mechanism is `Mixture`; this file says where it goes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from slimbayes.layers import class_for, kind_of
from slimbayes.layers.base import sites_of
from slimbayes.posteriors.configs.model_patch import words


def patched(config: Any, model: nn.Module, offered: Mapping[str, nn.Module], named: bool) -> set[str] | None:
    """Names of the layers that a config's `patch` means: by default norms, or all that are offered by name (None)."""
    patch = config.patch or (None if named else "norm")
    asker = f"{type(config).__name__}(patch={patch!r})"
    return None if patch is None else chosen_layers(asker, patch, model, offered)


def chosen_layers(
    asker: str, value: str, model: nn.Module, offered: Mapping[str, nn.Module], scales: bool = True
) -> set[str]:
    """Names of the offered layers that a selection means; refuses one that means none, saying what was looked for and
    found.

    With `scales`, norm layers without any (affine=False) do not count.
    """
    named = words(value)
    if not named:
        found = {name for name in offered if re.fullmatch(value, name)}
        return found or _nothing(asker, f"layers whose whole name matches {value!r}", offered)
    found = set()
    for word in named:
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
