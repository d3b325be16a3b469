"""Accuracy and proper scores of predicted classes, and how much the members of an ensemble differ about them.

All but the last four take a Prediction, probabilities (N, ..., C), or probabilities (N,) of class one, which stand for
(1 - p, p): the Brier score of two classes is twice (p - y)^2. Memory is constant.

Members' differences are averaged over all pairs i < j (Dusenberry et al. 2020, Fort et al. 2019). Members count
equally, also those of a weighted Prediction, whose weights enter only the averaged probabilities. All but the KL, by
its direction, do not depend on the members' order.

Sizes: K members, N rows, C classes, M = N times further dimensions.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from slimbayes.metrics.functional import (
    Classes,
    class_logs,
    labelled,
    member_probabilities,
    need_tensor,
)
from slimbayes.metrics.streaming import Mean, Streaming
from slimbayes.prediction.prediction import Prediction


class Accuracy(Mean):
    """Share of rows whose most probable class is the target; the first class wins a tie.

    Shape: update(probs (N, ..., C), target (N, ...)), or both (N,).

    >>> float(Accuracy()(torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 0])))
    0.5
    """

    higher_is_better = True

    def update(self, probs: Classes, target: Tensor) -> None:
        rows, label = labelled(probs, target)
        self.add(rows.argmax(-1) == label)


class TopK(Mean):
    """Share of rows whose target is among the k most probable classes; of equal probabilities the first classes count.

    Args:
        k: how many guesses; no more than there are classes.

    Shape: update(probs (N, ..., C), target (N, ...)).

    >>> float(TopK(k=2)(torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]), torch.tensor([1, 2])))
    0.5
    """

    higher_is_better = True

    def __init__(self, k: int = 5) -> None:
        if k < 1:
            raise ValueError(f"TopK needs k >= 1, got k={k!r}.")
        super().__init__(str(k))
        self.k = k

    def update(self, probs: Classes, target: Tensor) -> None:
        rows, label = labelled(probs, target)
        if self.k > rows.shape[-1]:
            raise ValueError(
                f"TopK with k={self.k} needs at least as many classes, got {rows.shape[-1]}."
            )
        mine = rows.gather(-1, label[:, None])
        earlier = torch.arange(rows.shape[-1], device=rows.device) < label[:, None]
        self.add(((rows > mine) | (rows == mine) & earlier).sum(-1) < self.k)


class NLL(Mean):
    """Negative log-likelihood -log p_y under the mixture of all draws, in nats (Dusenberry et al. 2020, Eq. 14).

    Finite at any logits for a Prediction, which has log-probabilities; infinite for a probability rounded to zero.

    Shape: update(probs (N, ..., C), target (N, ...)), or both (N,).

    >>> round(float(NLL()(torch.tensor([[0.5, 0.5], [0.5, 0.5]]), torch.tensor([0, 1]))), 4)
    0.6931
    """

    higher_is_better = False

    def update(self, probs: Classes, target: Tensor) -> None:
        _, label = labelled(probs, target)
        self.add(-class_logs(probs).flatten(0, -2).gather(-1, label[:, None]))


class Brier(Mean):
    """Brier score: squared distance of the probabilities from the target's corner of the simplex.

    Args:
        convention: "standard" is sum_c (p_c - 1[c = y])^2, from 0 to 2. "tfp" is sum_c p_c^2 - 2 p_y, one less, as
            TensorFlow Probability computes it and the tables of the k-tied Normal print it.

    Shape: update(probs (N, ..., C), target (N, ...)), or both (N,).

    Example:
        >>> metric, tfp = Brier(), Brier(convention="tfp")
        >>> for m in (metric, tfp):
        ...     m.update(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
        >>> float(metric.compute()), float(tfp.compute())
        (0.5, -0.5)
    """

    higher_is_better = False

    def __init__(self, convention: Literal["standard", "tfp"] = "standard") -> None:
        if convention not in ("standard", "tfp"):
            raise ValueError(
                f"convention must be 'standard' or 'tfp', got {convention!r}."
            )
        super().__init__(convention)
        self.offset = 1.0 if convention == "tfp" else 0.0

    def update(self, probs: Classes, target: Tensor) -> None:
        rows, label = labelled(probs, target)
        off = rows.double() - torch.nn.functional.one_hot(label, rows.shape[-1])
        self.add(off.square().sum(-1) - self.offset)


class SoftLabelNLL(Mean):
    """Cross-entropy -sum_c q_c log p_c of the predictions under many people's labels q, in nats (Peterson et al. 2019).

    Each row counts once, however many people judged it. The least possible value is the mean entropy of the labels.

    Shape: update(probs (N, ..., C), labels (N, ..., C)): counts or probabilities of each class, scaled here to sum to
    one; for binary probabilities (N,), labels (N, 2).

    >>> round(float(SoftLabelNLL()(torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[25, 25, 0]]))), 4)  # 50 people
    1.0397
    """

    higher_is_better = False

    def update(self, probs: Classes, labels: Tensor) -> None:
        logs = class_logs(probs)
        if need_tensor("Labels", labels).shape != logs.shape or labels.numel() == 0:
            needed = (
                f"the probabilities' shape {tuple(logs.shape)} and at least one row"
            )
            raise ValueError(f"Labels need {needed}, got {tuple(labels.shape)}.")
        share = labels.double()
        wrong = ~((share >= 0) & share.isfinite())
        if bool(wrong.any()):
            got = labels[wrong][0].item()
            raise ValueError(
                f"Labels must be counts or probabilities, not negative and finite, got {got!r}."
            )
        people = share.sum(-1, keepdim=True)
        if bool((people == 0).any()):
            needed = "a class with a count or probability above zero"
            raise ValueError(f"Each row of labels needs {needed}, got a row of zeros.")
        self.add(-torch.where(share > 0, share / people * logs, 0.0).sum(-1))


def pair_mean(members: Tensor, compare: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Mean over pairs i < j of compare(member i, members j), for each row: (K, M, ...) to (M,)."""
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
        rows, label = labelled(
            members if isinstance(members, Prediction) else members.mean(0), target
        )
        wrong = (rows.argmax(-1) != label).double()
        self.add_to(
            "disagreed_wrong_rows",
            torch.stack([differ.sum(), wrong.sum(), torch.ones_like(wrong).sum()]),
        )

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
        logs = (
            members.by_member.double().flatten(1, -2)
            if isinstance(members, Prediction)
            else rows.log()
        )

        def divergence(logp: Tensor, logq: Tensor) -> Tensor:
            p, q = logp.exp(), logq.exp()
            return (torch.where(p > 0, p * (logp - logq), 0.0) - p + q).sum(-1)

        self.add(pair_mean(logs, divergence))


class CosineSimilarity(Mean):
    """Cosine of the angle between members' probability vectors, in [0, 1]; 1 for identical members.

    The rank-1 code calls it a distance.

    Shape: update(members (K, N, C), or (K, N) of class one, or a Prediction).

    >>> round(float(CosineSimilarity()(torch.tensor([[[1.0, 0.0]], [[0.5, 0.5]]]))), 4)
    0.7071
    """

    def update(self, members: Classes) -> None:
        directions = torch.nn.functional.normalize(
            member_probabilities(members).double(), dim=-1
        )
        self.add(pair_mean(directions, lambda p, q: (p * q).sum(-1)))
