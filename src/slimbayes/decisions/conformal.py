"""Conformal: sets and intervals that hold the target with a given probability, whatever the model (Vovk et al. 2005).

For held-out and new rows that are exchangeable, with n held-out scores and k = ceil((n + 1) level), the k-th smallest
score bounds that of a new row with probability at least k / (n + 1) >= level, and at most k / (n + 1) without ties.
Given the held-out rows the coverage is Beta(k, n + 1 - k): a few points from the level for hundreds of rows.

Sizes: N rows, n held-out rows, C classes.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from slimbayes.decisions import scores
from slimbayes.decisions.scores import Kind
from slimbayes.engine.noise import Seed
from slimbayes.prediction.prediction import Prediction


@dataclass(frozen=True, eq=False)
class Conformal:
    """Prediction sets and intervals from one held-out set (split conformal prediction).

    Attributes:
        level: the probability that a new row's target is covered.
        kind: the score, see `fit`.
        bound: the largest score that is covered: a number, or one for each of several real targets.
        rows: n.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> y = torch.randn(1000)
        >>> held_out = Prediction.from_outputs(torch.zeros(1, 1000), "gaussian", scale=2.0)  # twice too wide
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
        cls, prediction: Prediction, target: Tensor, level: float = 0.9, kind: Kind | None = None, seed: Seed = 0
    ) -> "Conformal":
        """From held-out rows: of those the model was trained on, or chosen by, the scores are too small.

        Args:
            prediction, target: of the held-out rows; targets as in `Prediction.log_prob`.
            level: the coverage to have.
            kind: of classes "adaptive" (the default) or "threshold"; of real targets "scaled" (the default) or
                "absolute". See scores.py.
            seed: for the random part of "adaptive".
        """
        scores.need_level(level)
        kind = scores.chosen(prediction, kind)
        found = scores.of_targets(prediction, target, kind, seed)
        n = len(found)
        k = math.ceil((n + 1) * level - 1e-9)  # 0.9 * 10 is a little more than 9
        if k > n:
            least = math.ceil(level / (1 - level) - 1e-9)
            raise ValueError(f"level={level!r} needs at least {least} held-out rows, got {n}: only everything is sure.")
        return cls(level, kind, found.sort(0).values[k - 1], n)

    def __call__(self, prediction: Prediction, seed: Seed = 1) -> Tensor | tuple[Tensor, Tensor]:
        """Which classes each row's set holds (N, C), boolean; or the ends (N, ...) of each row's interval.

        Args:
            seed: for the random part of "adaptive"; another one than in `fit`.
        """
        scores.chosen(prediction, self.kind)
        if scores.is_discrete(self.kind):
            return scores.of_classes(prediction, self.kind, seed) <= self.bound
        centre, width = scores.centre_and_width(prediction, self.kind)
        return centre - self.bound * width, centre + self.bound * width
