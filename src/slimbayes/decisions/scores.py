"""How strange a target looks to a prediction: the scores that conformal sets and intervals are made of.

Classes. "threshold": 1 - p_c (Sadinle et al. 2019), the smallest sets on average. "adaptive": the probability of all
classes that are more probable than c, and a random part of p_c itself (Romano et al. 2020), sets that grow with
difficulty.

Real targets. A score is |y - centre| / width, with the predictive mean as the centre and as the width the predictive
standard deviation ("scaled") or one ("absolute").

Sizes: N rows, C classes.
"""

from typing import Literal

import torch
from torch import Tensor

from slimbayes.engine.noise import Seed, key, seed_of
from slimbayes.prediction.prediction import Prediction
from slimbayes.train.likelihoods import likelihood_named

Kind = Literal["adaptive", "threshold", "scaled", "absolute"]
_KINDS = {True: ("adaptive", "threshold"), False: ("scaled", "absolute")}


def chosen(prediction: Prediction, kind: Kind | None) -> Kind:
    """The kind of score, by default the first that fits a prediction."""
    kinds = _KINDS[likelihood_named(prediction.likelihood).discrete]
    if kind is not None and kind not in kinds:
        raise ValueError(
            f"kind must be {kinds[0]!r} or {kinds[1]!r} for {prediction.likelihood} targets, got {kind!r}."
        )
    if prediction.by_member.dim() > 3 or (kinds[0] == "adaptive" and prediction.by_member.dim() != 3):
        raise ValueError(
            f"Rows are what is exchangeable: one class, or one line of real targets, for each row is needed; got "
            f"predictions of shape {tuple(prediction.by_member.shape[1:])}."
        )
    return kinds[0] if kind is None else kind  # type: ignore[return-value]


def is_discrete(kind: Kind) -> bool:
    return kind in _KINDS[True]


def of_classes(prediction: Prediction, kind: Kind, seed: Seed) -> Tensor:
    """The score of every class, (N, C), in float64."""
    p = prediction.log_probs.double().exp()
    if kind == "threshold":
        return 1 - p
    order = p.argsort(dim=-1, descending=True, stable=True)
    ranked = p.gather(-1, order)
    generator = torch.Generator(p.device).manual_seed(key(seed_of(seed), "conformal"))
    u = torch.rand(len(p), 1, generator=generator, device=p.device, dtype=p.dtype)
    before = ranked.cumsum(-1) - ranked
    return torch.empty_like(p).scatter_(-1, order, before + u * ranked)


def centre_and_width(prediction: Prediction, kind: Kind) -> tuple[Tensor, Tensor]:
    """Centres and widths (N, ...) of intervals."""
    centre = prediction.mean.double()
    if kind == "absolute":
        return centre, torch.ones_like(centre)
    width = prediction.std.double()
    if not bool((width > 0).all()):
        raise ValueError("Scaled residuals need an uncertainty above zero in every row; take kind='absolute'.")
    return centre, width


def of_targets(prediction: Prediction, target: Tensor, kind: Kind, seed: Seed) -> Tensor:
    """The score of each row's own target, (N, ...)."""
    if is_discrete(kind):
        prediction.log_prob(target)  # refuses what is no label of these rows
        return of_classes(prediction, kind, seed).gather(-1, target.long()[:, None])[:, 0]
    centre, width = centre_and_width(prediction, kind)
    if target.shape != centre.shape or not bool(target.isfinite().all()):
        raise ValueError(f"Finite targets of shape {tuple(centre.shape)} are needed, got {tuple(target.shape)}.")
    return (target.double() - centre).abs() / width


def need_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level must lie strictly between 0 and 1, got {level!r}.")
