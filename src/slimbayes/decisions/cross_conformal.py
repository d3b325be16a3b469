"""CVPlus: sets and intervals from cross-validation, when there are too few rows to hold any out.

With K folds, each row i is scored by the model that was trained without its fold, k(i), and a new row by all K models
(Barber et al. 2021, CV+; for classes Romano et al. 2020):

    interval   [ floor((1 - level)(n + 1))-th smallest of c_k(i)(x) - R_i s_k(i)(x),
                 ceil(level (n + 1))-th smallest of c_k(i)(x) + R_i s_k(i)(x) ]          c: centre, s: width, R: score
    set        classes y with fewer than level (n + 1) rows i whose score is below that of y under model k(i)

It covers with probability at least 2 level - 1 - (1 - K/n) / (K + 1), and in practice about `level`.

Sizes: K folds, n rows of all folds, N new rows, C classes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slimbayes.decisions import scores
from slimbayes.decisions.scores import Kind
from slimbayes.engine.noise import Seed
from slimbayes.prediction.prediction import Prediction


@dataclass(frozen=True, eq=False)
class CVPlus:
    """Prediction sets and intervals from K models, each trained without one fold.

    Attributes:
        level: the probability aimed at.
        kind: the score, as in `Conformal.fit`.
        scores: of each fold's rows under the model that has not seen them, K tensors (n_k, ...).

    Example:
        >>> import torch
        >>> y = torch.randn(2, 200, generator=torch.Generator().manual_seed(0))
        >>> folds = [Prediction.from_outputs(torch.zeros(1, 200), "gaussian", scale=1.0)] * 2  # two models, alike
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
        scores.need_level(level)
        if len(predictions) != len(targets) or len(targets) < 2:
            got = f"{len(predictions)} predictions and {len(targets)} targets"
            raise ValueError(f"CVPlus needs a prediction and targets for each of at least two folds, got {got}.")
        kind = scores.chosen(predictions[0], kind)
        found = tuple(scores.of_targets(p, y, kind, seed) for p, y in zip(predictions, targets, strict=True))
        n = sum(map(len, found))
        if math.floor((1 - level) * (n + 1) + 1e-9) < 1:
            raise ValueError(f"level={level!r} needs at least {math.ceil(1 / (1 - level) - 1e-9) - 1} rows, got {n}.")
        return cls(level, kind, found)

    def __call__(self, predictions: Sequence[Prediction], seed: Seed = 1) -> Tensor | tuple[Tensor, Tensor]:
        """Which classes each row's set holds (N, C), or the ends of each row's interval (N, ...).

        Args:
            predictions: of the new rows, by each fold's model, in the order of the folds.
            seed: as in `Conformal`.
        """
        if len(predictions) != len(self.scores):
            got = f"{len(predictions)} predictions"
            raise ValueError(
                f"CVPlus was fitted to {len(self.scores)} folds and needs a prediction of each, got {got}."
            )
        n = sum(map(len, self.scores))
        if scores.is_discrete(self.kind):
            below = torch.zeros_like(predictions[0].log_probs.double())
            for own, prediction in zip(self.scores, predictions, strict=True):
                found = scores.of_classes(prediction, self.kind, seed)
                below += torch.searchsorted(own.sort().values, found)  # how many are smaller
            return below < self.level * (n + 1) - 1e-9
        lows, highs = [], []
        for own, prediction in zip(self.scores, predictions, strict=True):
            centre, width = scores.centre_and_width(prediction, self.kind)
            reach = own[:, None] * width
            lows.append(centre - reach)
            highs.append(centre + reach)
        first = math.floor((1 - self.level) * (n + 1) + 1e-9)
        last = math.ceil(self.level * (n + 1) - 1e-9)
        return torch.cat(lows).sort(0).values[first - 1], torch.cat(highs).sort(0).values[last - 1]
