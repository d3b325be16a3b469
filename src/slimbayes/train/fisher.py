"""Fisher information of each likelihood in a network's outputs f, as square roots: vectors v with sum v v^T = F.

    exact       a few fixed vectors for each row and position
    sampled     scores d log p(y | f) / d f of targets y drawn from the model itself, whose outer products average to F;
                those of many positions may be added up, as they are independent with mean zero

For class and binary logits and for Gaussian means F is the Hessian of -log p; for noise scales it is its expectation.

Sizes: B rows, C classes.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from slimbayes.train.heteroscedastic import noise_slope


@dataclass(frozen=True)
class Fisher:
    """Square roots of the information of outputs (B, ...) under a noise scale, each of the shape of the outputs.

    Attributes:
        roots: all that are needed for exact information.
        score: one, of targets drawn from the model.
    """

    roots: Callable[[Tensor, float], Iterator[Tensor]]
    score: Callable[[Tensor, float], Tensor]

    @staticmethod
    def count(outputs: Tensor) -> int:
        """How many roots outputs of this shape have."""
        return math.prod(outputs.shape[1:])


def _class_roots(logits: Tensor, scale: float) -> Iterator[Tensor]:
    """sqrt(p_c) (e_c - p) of every class and position: diag(p) - p p^T is the sum of their outer products."""
    probs = logits.softmax(-1)
    for place in _places(probs[..., 0]):
        for c in range(probs.shape[-1]):
            unit = torch.zeros_like(probs)
            unit[..., c] = 1.0
            yield place.unsqueeze(-1) * probs[..., c : c + 1].sqrt() * (unit - probs)


def _places(like: Tensor) -> Iterator[Tensor]:
    """One after another the positions (B, ...) of a row, as ones among zeros."""
    for j in range(math.prod(like.shape[1:])):
        place = torch.zeros_like(like)
        place.view(len(like), -1)[:, j] = 1.0
        yield place


def _class_score(logits: Tensor, scale: float) -> Tensor:
    probs = logits.softmax(-1)
    drawn = torch.multinomial(probs.flatten(0, -2), 1).view(*probs.shape[:-1], 1)
    return torch.zeros_like(probs).scatter(-1, drawn, 1.0) - probs


def _diagonal(
    root: Callable[[Tensor, float], Tensor],
) -> Callable[[Tensor, float], Iterator[Tensor]]:
    """Roots of information that is a diagonal with these square roots."""

    def roots(outputs: Tensor, scale: float) -> Iterator[Tensor]:
        found = root(outputs, scale)
        yield from (place * found for place in _places(outputs))

    return roots


def _noise_root(outputs: Tensor, scale: float) -> Tensor:
    slope, noise = noise_slope(outputs, scale)
    return torch.stack([1 / noise, math.sqrt(2) * slope / noise], -1)


def _noise_score(outputs: Tensor, scale: float) -> Tensor:
    slope, noise = noise_slope(outputs, scale)
    drawn = torch.randn_like(noise)
    return torch.stack([drawn / noise, (drawn.square() - 1) * slope / noise], -1)


CLASSES = Fisher(_class_roots, _class_score)
BINARY = Fisher(
    _diagonal(lambda logits, scale: (logits.sigmoid() * (1 - logits.sigmoid())).sqrt()),
    lambda logits, scale: torch.bernoulli(logits.sigmoid()) - logits.sigmoid(),
)
MEANS = Fisher(
    _diagonal(lambda f, scale: torch.ones_like(f) / scale),
    lambda f, scale: torch.randn_like(f) / scale,
)
MEANS_AND_SCALES = Fisher(_diagonal(_noise_root), _noise_score)
