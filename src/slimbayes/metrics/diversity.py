"""How much the members of an ensemble differ, averaged over all pairs i < j (Dusenberry et al. 2020, Fort et al. 2019).

Members count equally, also those of a weighted Prediction, whose weights enter only the averaged probabilities. All but
the KL, by its direction, do not depend on the members' order. Constant memory.

Sizes: K members, N rows, C classes, M = N times further dimensions.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from slimbayes.metrics.probabilities import Classes, labelled, member_probabilities
from slimbayes.metrics.streaming import Mean, Streaming
from slimbayes.prediction.prediction import Prediction


def pair_mean(members: Tensor, compare: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Mean over pairs i < j of compare(member i, members j), for each row: (K, M, ...) to (M,).

    Example:
        >>> pair_mean(torch.tensor([[0, 1], [0, 0]]), torch.ne)
        tensor([0., 1.], dtype=torch.float64)
    """
    total = torch.zeros(members.shape[1], dtype=torch.float64, device=members.device)
    for i in range(len(members) - 1):
        total += compare(members[i], members[i + 1 :]).sum(0)
    return total / (len(members) * (len(members) - 1) / 2)


class Disagreement(Mean):
    """Share of pairs of members that predict different classes, in [0, 1]; 0 for identical members.

    Shape: update(members (K, N, C), or (K, N) of class one, or a Prediction).

    >>> round(float(Disagreement()(torch.tensor([[[0.9, 0.1]], [[0.8, 0.2]], [[0.3, 0.7]]]))), 4)
    0.6667
    """

    def update(self, members: Classes) -> None:
        self.add(pair_mean(member_probabilities(members).argmax(-1), torch.ne))


class NormalisedDisagreement(Streaming):
    """Disagreement for each error the ensemble makes: a poor model's members differ easily.

    The error is that of the averaged probabilities, plus 1e-7, so that a perfect ensemble of identical members has 0.

    Shape: update(members (K, N, C), or (K, N) of class one, or a Prediction; target (N,)).

    Example:
        >>> metric = NormalisedDisagreement()
        >>> members = torch.tensor([[[0.9, 0.1], [0.9, 0.1]], [[0.8, 0.2], [0.3, 0.7]]])
        >>> metric.update(members, torch.tensor([0, 1]))
        >>> round(float(metric.compute()), 4)  # they differ on one of two rows, and the average errs on one of two
        1.0
    """

    disagreed_wrong_rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_sum("disagreed_wrong_rows", 3)

    def update(self, members: Classes, target: Tensor) -> None:
        differ = pair_mean(member_probabilities(members).argmax(-1), torch.ne)
        rows, label = labelled(members if isinstance(members, Prediction) else members.mean(0), target)
        wrong = (rows.argmax(-1) != label).double()
        self.add_to("disagreed_wrong_rows", torch.stack([differ.sum(), wrong.sum(), torch.ones_like(wrong).sum()]))

    def compute(self) -> Tensor:
        disagreed, wrong, rows = self.disagreed_wrong_rows
        self.need_rows(rows)
        return disagreed / (wrong + 1e-7 * rows)


class PairwiseKL(Mean):
    """KL divergence sum_c p_i log(p_i / p_j) of later members from earlier ones, in nats; 0 for identical members.

    One direction, as the rank-1 code. Infinite where a member rules out what an earlier one thinks possible.

    Shape: update(members (K, N, C), or (K, N) of class one, or a Prediction).

    >>> round(float(PairwiseKL()(torch.tensor([[[1.0, 0.0]], [[0.5, 0.5]]]))), 4)
    0.6931
    """

    def update(self, members: Classes) -> None:
        rows = member_probabilities(members).double()
        self.add(
            pair_mean(members.by_member.double().flatten(1, -2) if isinstance(members, Prediction) else rows.log(), _kl)
        )


def _kl(logp: Tensor, logq: Tensor) -> Tensor:
    p, q = logp.exp(), logq.exp()
    return (torch.where(p > 0, p * (logp - logq), 0.0) - p + q).sum(-1)


class CosineSimilarity(Mean):
    """Cosine of the angle between members' probability vectors, in [0, 1]; 1 for identical members.

    The rank-1 code calls it a distance.

    Shape: update(members (K, N, C), or (K, N) of class one, or a Prediction).

    >>> round(float(CosineSimilarity()(torch.tensor([[[1.0, 0.0]], [[0.5, 0.5]]]))), 4)
    0.7071
    """

    def update(self, members: Classes) -> None:
        directions = torch.nn.functional.normalize(member_probabilities(members).double(), dim=-1)
        self.add(pair_mean(directions, lambda p, q: (p * q).sum(-1)))
