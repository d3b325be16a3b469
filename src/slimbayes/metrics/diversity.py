"""How much the members of an ensemble differ, averaged over all K (K - 1) / 2 pairs i < j (Dusenberry et al. 2020, Fort et al. 2019).

    Disagreement             share of rows with argmax p_i != argmax p_j
    NormalisedDisagreement   disagreement / (error of the averaged probabilities + 1e-7)
    PairwiseKL               mean of sum_c p_i log(p_i / p_j) - p_i + p_j, in nats: one direction, as the rank-1 code
    CosineSimilarity         mean of p_i . p_j / (|p_i| |p_j|), which that code calls a distance: 1 for identical members

Members count equally, also those of a weighted Prediction, whose weights enter only the averaged probabilities. All but the
KL, by its direction, do not depend on the members' order. Constant memory.

Sizes: K members, N rows, C classes.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from slimbayes.metrics.inputs import labelled, member_logs, member_probabilities
from slimbayes.metrics.streaming import Mean, Streaming
from slimbayes.prediction.prediction import Prediction


def pair_mean(members: Tensor, compare: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Mean over pairs i < j of compare(member i, members j), for each row: (K, M, ...) to (M,)."""
    total = torch.zeros(members.shape[1], dtype=torch.float64, device=members.device)
    for i in range(len(members) - 1):
        total += compare(members[i], members[i + 1 :]).sum(0)
    return total / (len(members) * (len(members) - 1) / 2)


def disagreement(members: Tensor) -> Tensor:
    """Share of pairs whose most probable classes differ: (K, M, C) to (M,)."""
    return pair_mean(members.argmax(-1), torch.ne)


class Disagreement(Mean):
    """Share of pairs of members that predict different classes, in [0, 1]; 0 for identical members.

    Shape: update(members (K, N, C), or (K, N) of class one, or a Prediction).

    Example:
        >>> metric = Disagreement()
        >>> metric.update(torch.tensor([[[0.9, 0.1]], [[0.8, 0.2]], [[0.3, 0.7]]]))
        >>> round(float(metric.compute()), 4)
        0.6667
    """

    def __init__(self) -> None:
        super().__init__("disagreement")

    def update(self, members: Prediction | Tensor) -> None:
        """Take a batch."""
        self.add(disagreement(member_probabilities(members)))


class NormalisedDisagreement(Streaming):
    """Disagreement for each error the ensemble makes: a poor model's members differ easily.

    The error is that of the averaged probabilities, over all rows; 1e-7 is added to it, so that a perfect ensemble of identical
    members has 0.

    Shape: update(members (K, N, C), or (K, N) of class one, or a Prediction; target (N,)).

    Example:
        >>> metric = NormalisedDisagreement()
        >>> members = torch.tensor([[[0.9, 0.1], [0.9, 0.1]], [[0.8, 0.2], [0.3, 0.7]]])
        >>> metric.update(members, torch.tensor([0, 1]))
        >>> round(float(metric.compute()), 4)  # they differ on one of two rows, and the average errs on one of two
        1.0
    """

    disagreement_sum: Tensor
    wrong_sum: Tensor
    disagreement_rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("disagreement_sum", "wrong_sum", "disagreement_rows"):
            self.add_sum(name)

    def update(self, members: Prediction | Tensor, target: Tensor) -> None:
        """Take a batch."""
        each = member_probabilities(members)
        rows, label = labelled(members if isinstance(members, Prediction) else members.mean(0), target)
        self.add_to("disagreement_sum", disagreement(each).sum())
        self.add_to("wrong_sum", (rows.argmax(-1) != label).sum())
        self.add_to("disagreement_rows", len(rows))

    def compute(self) -> Tensor:
        """The ratio over all rows so far, of all processes."""
        self.need_some(self.disagreement_rows)
        return self.disagreement_sum / (self.wrong_sum + 1e-7 * self.disagreement_rows)


class PairwiseKL(Mean):
    """Kullback-Leibler divergence of later members from earlier ones, in nats; 0 for identical members.

    Of plain probabilities, infinite where a member gives none to a class that an earlier one thinks possible.

    Shape: update(members (K, N, C), or (K, N) of class one, or a Prediction).

    Example:
        >>> metric = PairwiseKL()
        >>> metric.update(torch.tensor([[[1.0, 0.0]], [[0.5, 0.5]]]))
        >>> round(float(metric.compute()), 4)
        0.6931
    """

    def __init__(self) -> None:
        super().__init__("pairwise_kl")

    def update(self, members: Prediction | Tensor) -> None:
        """Take a batch."""
        self.add(pair_mean(member_logs(members), kl))


def kl(logp: Tensor, logq: Tensor) -> Tensor:
    p, q = logp.exp(), logq.exp()
    return (torch.where(p > 0, p * (logp - logq), 0.0) - p + q).sum(-1)


class CosineSimilarity(Mean):
    """Cosine of the angle between members' probability vectors, in [0, 1]; 1 for identical members.

    Shape: update(members (K, N, C), or (K, N) of class one, or a Prediction).

    Example:
        >>> metric = CosineSimilarity()
        >>> metric.update(torch.tensor([[[1.0, 0.0]], [[0.5, 0.5]]]))
        >>> round(float(metric.compute()), 4)
        0.7071
    """

    def __init__(self) -> None:
        super().__init__("cosine")

    def update(self, members: Prediction | Tensor) -> None:
        """Take a batch."""
        directions = torch.nn.functional.normalize(member_probabilities(members).double(), dim=-1)
        self.add(pair_mean(directions, lambda p, q: (p * q).sum(-1)))
