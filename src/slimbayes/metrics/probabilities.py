"""What metrics of classes accept: probabilities from a Prediction or a tensor, checked and brought to one shape.

A binary probability p stands for the two classes (1 - p, p), so every metric of classes has one definition. Scores that
take logs ask for logs: a Prediction has them where float32 has rounded a probability to zero.

Sizes: N rows, C classes, K members, M = N times further dimensions, such as pixels.
"""

import torch
from torch import Tensor

from slimbayes.prediction.prediction import Prediction
from slimbayes.train.targets import check_labels

Classes = Prediction | Tensor  # a Prediction of classes, probabilities (N, ..., C), or those of class one (N,)


def class_probabilities(probs: Classes) -> Tensor:
    """Probabilities with the classes last, (N, ..., C)."""
    if isinstance(probs, Prediction):
        return _checked(probs.log_probs.exp())
    return _two_classes(probs) if need_tensor("Probabilities", probs).dim() == 1 else _checked(probs)


def class_logs(probs: Classes) -> Tensor:
    """Logs of what `class_probabilities` gives, (N, ..., C), in float64."""
    return probs.log_probs.double() if isinstance(probs, Prediction) else class_probabilities(probs).double().log()


def labelled(probs: Classes, target: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities (M, C) and class indices (M,).

    Shape: probs (N, ..., C) with target (N, ...), or both (N,) for two classes.
    """
    given = probs.probs if isinstance(probs, Prediction) else need_tensor("Probabilities", probs)
    binary = probs.likelihood == "bernoulli" if isinstance(probs, Prediction) else probs.dim() == 1
    rows = given.shape if binary else given.shape[:-1]
    if given.dim() == 0 or need_tensor("Targets", target).shape != rows or target.numel() == 0:
        raise ValueError(
            f"Probabilities (N, ..., C) and targets (N, ...) are needed, or both (N,) for two classes, with N >= 1, "
            f"got shapes {tuple(given.shape)} and {tuple(target.shape)}."
        )
    check_labels(target, None if binary else given.shape[-1])
    return class_probabilities(probs).flatten(0, -2), target.long().flatten()


def member_probabilities(members: Classes) -> Tensor:
    """Class probabilities of K >= 2 members (K, M, C), from a Prediction, (K, N, ..., C), or (K, N) of class one."""
    given = members.member_probs if isinstance(members, Prediction) else need_tensor("Member probabilities", members)
    if given.dim() < 2 or given.numel() == 0 or len(given) < 2:
        needed = "Probabilities (K, N, C) of K >= 2 members are needed, with N >= 1"
        raise ValueError(f"{needed}, got shape {tuple(given.shape)}.")
    if isinstance(members, Prediction):
        return _checked(members.by_member.exp()).flatten(1, -2)
    return (_two_classes(given) if given.dim() == 2 else _checked(given)).flatten(1, -2)


def need_tensor(role: str, value: Tensor) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{role} must be a tensor, got {type(value).__name__}.")
    return value


def _two_classes(probs: Tensor) -> Tensor:
    _check_range(probs)
    return torch.stack([1 - probs, probs], -1)


def _checked(probs: Tensor) -> Tensor:
    _check_range(probs)
    off = (probs.double().sum(-1) - 1).abs() > _slack(probs)
    if bool(off.any()):
        raise ValueError(f"The probabilities of a row must sum to 1, got {probs[off][0].double().sum().item():.4f}.")
    return probs


def _check_range(probs: Tensor) -> None:
    if not probs.is_floating_point():
        raise ValueError(f"Probabilities of a floating type are needed, got dtype {probs.dtype}.")
    wrong = ~((probs >= 0) & (probs <= 1 + _slack(probs)))  # written so that nan is wrong too
    if bool(wrong.any()):
        got = probs[wrong][0].item()
        raise ValueError(f"Probabilities must lie in [0, 1], got {got!r}; logits need a softmax first.")


def _slack(probs: Tensor) -> float:
    return max(1e-3, torch.finfo(probs.dtype).eps)
