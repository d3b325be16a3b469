"""Conformal: sets and intervals that hold the target with a given probability, whatever the model (Vovk et al. 2005).

For held-out and new rows that are exchangeable, with n held-out scores and k = ceil((n + 1) level), the k-th smallest
score bounds that of a new row with probability at least k / (n + 1) >= level, and at most k / (n + 1) without ties.
Given the held-out rows the coverage is Beta(k, n + 1 - k): a few points from the level for hundreds of rows.

CVPlus: sets and intervals from cross-validation, when there are too few rows to hold any out.

With K folds, each row i is scored by the model that was trained without its fold, k(i), and a new row by all K models
(Barber et al. 2021, CV+; for classes Romano et al. 2020):

    interval   [ floor((1 - level)(n + 1))-th smallest of c_k(i)(x) - R_i s_k(i)(x),
                 ceil(level (n + 1))-th smallest of c_k(i)(x) + R_i s_k(i)(x) ]          c: centre, s: width, R: score
    set        classes y with fewer than level (n + 1) rows i whose score is below that of y under model k(i)

It covers with probability at least 2 level - 1 - (1 - K/n) / (K + 1), and in practice about `level`.

Scores say how strange a target looks to a prediction.

Classes. "threshold": 1 - p_c (Sadinle et al. 2019), the smallest sets on average. "adaptive": the probability of all
classes that are more probable than c, and a random part of p_c itself (Romano et al. 2020), sets that grow with
difficulty.

Real targets. A score is |y - centre| / width, with the predictive mean as the centre and as the width the predictive
standard deviation ("scaled") or one ("absolute").

Sizes: N rows, n held-out rows, or those of all folds, K folds, C classes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from slimbayes.engine.noise import Seed, key, seed_of
from slimbayes.prediction.averages import check_level
from slimbayes.prediction.prediction import Prediction

Kind = Literal["adaptive", "threshold", "scaled", "absolute"]
_KINDS = {True: ("adaptive", "threshold"), False: ("scaled", "absolute")}


@dataclass(frozen=True, eq=False)
class Conformal:
    """Prediction sets and intervals from one held-out set (split conformal prediction).

    Attributes:
        level: the probability that a new row's target is covered.
        kind: the score, see `fit`.
        bound: the largest score that is covered: a number, or one for each of several real targets.
        rows: n.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> y = torch.randn(1000)
        >>> held_out = Prediction.from_outputs(torch.zeros(1, 1000), "gaussian", likelihood_std=2.0)  # twice too wide
        >>> low, high = Conformal.fit(held_out, y, level=0.9)(held_out[0])
        >>> high - low < 3.6  # of a standard normal 3.29
        tensor([True])
    """

    level: float
    kind: Kind
    bound: Tensor
    rows: int

    @classmethod
    def fit(
        cls,
        prediction: Prediction,
        target: Tensor,
        level: float = 0.9,
        kind: Kind | None = None,
        seed: Seed = 0,
    ) -> "Conformal":
        """From held-out rows: of those the model was trained on, or chosen by, the scores are too small.

        Args:
            prediction, target: of the held-out rows; targets as in `Prediction.log_prob`.
            level: the coverage to have.
            kind: of classes "adaptive" (the default) or "threshold"; of real targets "scaled" (the default) or
                "absolute"; see above.
            seed: for the random part of "adaptive".
        """
        check_level(level)
        kind = _kind_of(prediction, kind)
        found = _target_scores(prediction, target, kind, seed)
        n = len(found)
        k = math.ceil((n + 1) * level - 1e-9)  # 0.9 * 10 is a little more than 9
        if k > n:
            least = math.ceil(level / (1 - level) - 1e-9)
            raise ValueError(
                f"level={level!r} needs at least {least} held-out rows, got {n}: only everything is sure."
            )
        return cls(level, kind, found.sort(0).values[k - 1], n)

    def __call__(
        self, prediction: Prediction, seed: Seed = 1
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Which classes each row's set holds (N, C), boolean; or the ends (N, ...) of each row's interval.

        Args:
            seed: for the random part of "adaptive"; another one than in `fit`.
        """
        _kind_of(prediction, self.kind)
        if _is_discrete(self.kind):
            return _class_scores(prediction, self.kind, seed) <= self.bound
        centre, width = _centre_and_width(prediction, self.kind)
        return centre - self.bound * width, centre + self.bound * width


@dataclass(frozen=True, eq=False)
class CVPlus:
    """Prediction sets and intervals from K models, each trained without one fold.

    Attributes:
        level: the probability aimed at.
        kind: the score, as in `Conformal.fit`.
        scores: of each fold's rows under the model that has not seen them, K tensors (n_k, ...).

    Example:
        >>> y = torch.randn(2, 200, generator=torch.Generator().manual_seed(0))
        >>> one = Prediction.from_outputs(torch.zeros(1, 200), "gaussian", likelihood_std=1.0)
        >>> folds = [one, one]  # two models, alike
        >>> low, high = CVPlus.fit(folds, list(y), level=0.9)([fold[0] for fold in folds])
        >>> bool(2.9 < high - low < 3.7)  # of a standard normal 3.29
        True
    """

    level: float
    kind: Kind
    scores: tuple[Tensor, ...]

    @classmethod
    def fit(
        cls,
        predictions: Sequence[Prediction],
        targets: Sequence[Tensor],
        level: float = 0.9,
        kind: Kind | None = None,
        seed: Seed = 0,
    ) -> "CVPlus":
        """From each fold's rows as the model trained without them predicts them, and their targets."""
        check_level(level)
        if len(predictions) != len(targets) or len(targets) < 2:
            got = f"{len(predictions)} predictions and {len(targets)} targets"
            raise ValueError(
                f"CVPlus needs a prediction and targets for each of at least two folds, got {got}."
            )
        for prediction in predictions:
            kind = _kind_of(prediction, kind)
        assert kind is not None
        found = tuple(
            _target_scores(p, y, kind, seed)
            for p, y in zip(predictions, targets, strict=True)
        )
        n = sum(map(len, found))
        if math.floor((1 - level) * (n + 1) + 1e-9) < 1:
            raise ValueError(
                f"level={level!r} needs at least {math.ceil(1 / (1 - level) - 1e-9) - 1} rows, got {n}."
            )
        return cls(level, kind, found)

    def __call__(
        self, predictions: Sequence[Prediction], seed: Seed = 1
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Which classes each row's set holds (N, C), or the ends of each row's interval (N, ...).

        Args:
            predictions: of the new rows, by each fold's model, in the order of the folds.
            seed: as in `Conformal`.
        """
        if len(predictions) != len(self.scores):
            needed = f"CVPlus was fitted to {len(self.scores)} folds and needs a prediction of each"
            raise ValueError(f"{needed}, got {len(predictions)} predictions.")
        for prediction in predictions:
            _kind_of(prediction, self.kind)
        if len(rows := {len(prediction) for prediction in predictions}) > 1:
            raise ValueError(
                f"Every fold's model must predict the same new rows, got numbers of rows {sorted(rows)}."
            )
        n = sum(map(len, self.scores))
        if _is_discrete(self.kind):
            below = torch.zeros_like(predictions[0].log_probs.double())
            for own, prediction in zip(self.scores, predictions, strict=True):
                found = _class_scores(prediction, self.kind, seed)
                below += torch.searchsorted(
                    own.sort().values, found
                )  # how many are smaller
            return below < self.level * (n + 1) - 1e-9
        lows, highs = [], []
        for own, prediction in zip(self.scores, predictions, strict=True):
            centre, width = _centre_and_width(prediction, self.kind)
            reach = own[:, None] * width
            lows.append(centre - reach)
            highs.append(centre + reach)
        first = math.floor((1 - self.level) * (n + 1) + 1e-9)
        last = math.ceil(self.level * (n + 1) - 1e-9)
        return torch.cat(lows).sort(0).values[first - 1], torch.cat(highs).sort(
            0
        ).values[last - 1]


# --- scores ---


def _kind_of(prediction: Prediction, kind: Kind | None) -> Kind:
    """The kind of score, by default the first that fits a prediction."""
    kinds = _KINDS[prediction.discrete]
    if kind is not None and kind not in kinds:
        raise ValueError(
            f"kind must be {kinds[0]!r} or {kinds[1]!r} for {prediction.likelihood} targets, got {kind!r}."
        )
    if prediction.by_member.dim() > 3 or (
        kinds[0] == "adaptive" and prediction.by_member.dim() != 3
    ):
        raise ValueError(
            f"Rows are what is exchangeable: one class, or one line of real targets, for each row is needed; got "
            f"predictions of shape {tuple(prediction.by_member.shape[1:])}."
        )
    if bool(prediction.by_member.isnan().any()):
        raise ValueError("Predictions must be numbers, got NaN: leave such rows out.")
    return kinds[0] if kind is None else kind  # type: ignore[return-value]


def _is_discrete(kind: Kind) -> bool:
    return kind in _KINDS[True]


def _class_scores(prediction: Prediction, kind: Kind, seed: Seed) -> Tensor:
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


def _centre_and_width(prediction: Prediction, kind: Kind) -> tuple[Tensor, Tensor]:
    """Centres and widths (N, ...) of intervals."""
    centre = prediction.mean.double()
    if kind == "absolute":
        return centre, torch.ones_like(centre)
    width = prediction.std.double()
    if not bool((width > 0).all()):
        raise ValueError(
            "Scaled residuals need an uncertainty above zero in every row; take kind='absolute'."
        )
    return centre, width


def _target_scores(
    prediction: Prediction, target: Tensor, kind: Kind, seed: Seed
) -> Tensor:
    """The score of each row's own target, (N, ...)."""
    if _is_discrete(kind):
        label = prediction.check_target(target).long()
        return _class_scores(prediction, kind, seed).gather(-1, label[:, None])[:, 0]
    centre, width = _centre_and_width(prediction, kind)
    if target.shape != centre.shape or not bool(target.isfinite().all()):
        raise ValueError(
            f"Finite targets of shape {tuple(centre.shape)} are needed, got {tuple(target.shape)}."
        )
    return (target.double() - centre).abs() / width
