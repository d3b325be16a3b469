"""Which layers a method goes to unless the user names them (`Config.targets`): norms and the ends of a network, which
Ensemble Model Patching (Chang et al. 2019) patches and drops in front of; the model's own dropout layers; batch norms.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from slimbayes.layers import LAYERS, class_for, kind_of
from slimbayes.layers.base import registered_class, sites_of
from slimbayes.layers.dropout import functional_dropout
from slimbayes.layers.norm import BayesNorm
from slimbayes.posteriors.configs.mixture import words

_ROW = "its statistics are those of one row: members have their own already"
_WHY = {
    "row": _ROW,
    "channel": f"{_ROW}; running ones, if it keeps any, are shared",
    "batch": "",
}


def layers_to_patch(
    config: Any, model: nn.Module, offered: Mapping[str, nn.Module], named: bool
) -> set[str] | None:
    """Names of the layers that a config's `patch` means: by default norms, or all that are offered by name (None)."""
    patch = config.patch or (None if named else "norm")
    asker = f"{type(config).__name__}(patch={patch!r})"
    return None if patch is None else chosen_layers(asker, patch, model, offered)


def chosen_layers(
    asker: str,
    value: str,
    model: nn.Module,
    offered: Mapping[str, nn.Module],
    scales: bool = True,
) -> set[str]:
    """Names of the offered layers that a selection means; refuses one that means none, saying what was looked for and
    found.

    With `scales`, norm layers without any (affine=False) do not count.
    """
    named = words(value)
    if not named:
        found = {name for name in offered if re.fullmatch(value, name)}
        return found or _nothing(
            asker, f"layers whose whole name matches {value!r}", offered
        )
    found = set()
    for word in named:
        if word == "norm":
            norms = {
                name: layer
                for name, layer in offered.items()
                if class_for(layer, ("norm",)) is not None
            }
            part = {
                name
                for name, layer in norms.items()
                if not scales or next(layer.parameters(), None) is not None
            }
            found |= part or _nothing(
                asker, f"norm layers{' with scales' if scales else ''}", offered
            )
        else:
            found |= _end_layer(asker, word, model, offered)
    return found


def _end_layer(
    asker: str, word: str, model: Any, offered: Mapping[str, nn.Module]
) -> set[str]:
    """The first or the last dense or convolutional layer, in the order in which modules were assigned."""

    def is_dense(layer: nn.Module) -> bool:
        """Whether a layer is one matrix applied to numbers: recurrent layers are several, embeddings are tables."""
        cls = class_for(layer, ("matrix",))
        return (
            cls is not None
            and kind_of(layer) != "table"
            and len(sites_of(cls, layer)) == 1
        )

    names = [name for name, layer in offered.items() if is_dense(layer)]
    if not names:
        return _nothing(asker, f"an {word} layer (dense or convolutional)", offered)
    if word == "output" and callable(
        getattr(model, "get_classifier", None)
    ):  # timm's models name theirs
        head = model.get_classifier()
        named = [name for name in names if offered[name] is head]
        names = named or names
    return {names[0] if word == "input" else names[-1]}


def _nothing(asker: str, looked_for: str, offered: Mapping[str, nn.Module]) -> set[str]:
    kinds = sorted({type(layer).__name__ for layer in offered.values()})
    some = ", ".join(f"{n or '(model)'}" for n in list(offered)[:8])
    more = ", ..." if len(offered) > 8 else ""
    raise ValueError(
        f"{asker} looked for {looked_for} and found none. The layers on offer are of type {', '.join(kinds) or 'none'} "
        f'({some}{more}). Choose others with "norm", "output", "input" or a regular expression for names.'
    )


def own_dropout(model: nn.Module, offered: Mapping[str, nn.Module]) -> set[str]:
    """Names of a model's own dropout layers; refuses a model without any, and says where dropout could go."""
    found = {
        name
        for name, layer in offered.items()
        if class_for(layer, ("dropout",)) is not None
    }
    if found:
        return found
    functional = "; ".join(
        f"{name or '(the model itself)'} {what}"
        for name, what in functional_dropout(model).items()
    )
    inside = (
        f" Dropout inside a forward was found, which cannot be converted: {functional}."
    )
    inside = f"{inside} Make it an nn.Dropout layer." if functional else ""
    kinds = ", ".join(
        plain.__name__ for plain, cls in LAYERS.items() if cls.bayes_kind == "dropout"
    )
    raise ValueError(
        f"MCDropout() looked for dropout layers ({kinds}) in this {type(model).__name__} and found none."
        f'{inside} Put dropout in front of layers with before="norm" (as the EMP paper does), '
        f'"output" or a regular expression.'
    )


def batch_norms(offered: Mapping[str, nn.Module]) -> set[str]:
    """Names of the batch norms among the layers on offer, converted or not; refuses a model without any."""
    found = {name for name, layer in offered.items() if _statistics(layer) == "batch"}
    if not found:
        kinds = (
            ", ".join(sorted({type(layer).__name__ for layer in offered.values()}))
            or "no layers"
        )
        norms = [cls for cls in LAYERS.values() if issubclass(cls, BayesNorm)]
        known = ", ".join(
            cls.plain.__name__ for cls in norms if cls.statistics == "batch"
        )
        raise ValueError(
            f"MemberNorm looked for batch norm ({known}) and found none among: {kinds}."
        )
    return found


def why_no_batch_norm(layer: nn.Module) -> str:
    """Why members of a norm layer are not kept apart; nothing if they are."""
    if isinstance(layer, nn.SyncBatchNorm):
        return "its statistics are those of all processes; MemberNorm keeps to the rows of one"
    return _WHY.get(_statistics(layer), "")


def _statistics(layer: nn.Module) -> str:
    """What a norm's statistics are taken over; nothing for other layers."""
    known = registered_class(layer)
    return (
        known.statistics if known is not None and issubclass(known, BayesNorm) else ""
    )
