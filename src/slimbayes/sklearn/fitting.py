"""Training of a table's network: minibatches of Adam on the ELBO, stopped where held-out rows are predicted best.

loss = sum over the batch of w_i * nll_i / (B * mean w) + kl_weight * KL / sum of all w

Sizes: N rows, B of a batch, S draws.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from slimbayes.prediction.accumulate import log_at
from slimbayes.prediction.predict import predict
from slimbayes.prediction.sample import sample
from slimbayes.train.elbo import elbo
from slimbayes.train.likelihoods import LIKELIHOODS, LikelihoodName
from slimbayes.train.optim import param_groups


class Rows(NamedTuple):
    """Inputs (N, d), targets (N,) or (N, T) and weights (N,)."""

    x: Tensor
    y: Tensor
    weight: Tensor

    def at(self, index: Tensor) -> "Rows":
        return Rows(self.x[index], self.y[index], self.weight[index])


@dataclass
class Recipe:
    """How to train; the estimators describe the fields."""

    likelihood: LikelihoodName
    epochs: int
    batch_size: int | None
    lr: float
    weight_decay: float
    kl_weight: float
    patience: int
    scale: float | Tensor = 0.0  # of the noise, where it is given, or of its bounds


class Trainer:
    """A network in training, which may see its rows all at once (`fit`) or in parts (`epoch`)."""

    def __init__(self, network: nn.Module, recipe: Recipe) -> None:
        self.network, self.recipe = network, recipe
        groups = param_groups(network, recipe.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.lr, weight_decay=0.0, fused=True)
        self.seen = 0.0  # weight of all rows so far: the KL is shared out among them

    def fit(self, rows: Rows, held_out: Rows | None) -> list[float]:
        """Train until held-out rows have not been predicted better for `patience` epochs; returns their NLLs.

        The network then has the weights of its best epoch. Without held-out rows, all epochs are run.
        """
        curve: list[float] = []
        best: dict[str, Tensor] = {}
        self.seen = float(rows.weight.sum())
        for _ in range(self.recipe.epochs):
            self.epoch(rows)
            if held_out is None:
                continue
            curve.append(self.nll(held_out))
            if curve[-1] <= min(curve):
                best = copy.deepcopy(self.network.state_dict())
            elif len(curve) - curve.index(min(curve)) > self.recipe.patience:
                break
        if best:
            self.network.load_state_dict(best)
        return curve

    def epoch(self, rows: Rows) -> None:
        """Go over all rows once."""
        self.network.train()
        for batch in self._batches(rows):
            outputs = sample(self.network, batch.x)
            share = batch.weight / rows.weight.mean()
            nll = -(log_likelihood(self.recipe.likelihood, outputs, batch.y, self.recipe.scale).mean(0) * share).mean()
            terms = elbo(nll, self.network, max(1, round(self.seen)), self.recipe.kl_weight)
            self.optimizer.zero_grad()
            terms.loss.backward()
            nn.utils.clip_grad_norm_(self.network.parameters(), 1.0, error_if_nonfinite=True)
            self.optimizer.step()

    def nll(self, rows: Rows, draws: int = 4) -> float:
        """Mean negative log-likelihood of rows under the mixture of some draws, the same at every call."""
        found = predict(self.network, rows.x, draws, likelihood=self.recipe.likelihood, scale=self.recipe.scale, seed=0)
        logp = found.log_prob(rows.y)
        logp = logp.sum(-1) if logp.dim() > 1 else logp
        return float(-(logp * rows.weight).sum() / rows.weight.sum())

    def _batches(self, rows: Rows) -> Iterator[Rows]:
        """Batches of nearly equal size in a random order: a last one of a single row would be all noise."""
        count = len(rows.x)
        size = batch_size(count) if self.recipe.batch_size is None else self.recipe.batch_size
        if size >= count:
            yield rows
            return
        order = torch.randperm(count).to(rows.x.device)
        for index in order.tensor_split(math.ceil(count / size)):
            yield rows.at(index)


def batch_size(rows: int) -> int:
    """Some twenty to forty steps an epoch, with 32 to 256 rows each.

    >>> batch_size(100), batch_size(2000), batch_size(100_000)
    (32, 64, 256)
    """
    return min(256, max(32, 2 ** round(math.log2(rows / 30))))


def log_likelihood(likelihood: LikelihoodName, outputs: Tensor, target: Tensor, scale: float | Tensor = 0.0) -> Tensor:
    """Log-likelihood of every row under every draw, which the likelihoods' own means leave no room to weigh.

    Shape: outputs (S, B, C), (S, B, T) or (S, B, T, 2), target (B,) or (B, T); returns (S, B).

    Example:
        >>> log_likelihood("categorical", torch.zeros(2, 3, 4), torch.tensor([0, 1, 2])).exp()[0]
        tensor([0.2500, 0.2500, 0.2500])
    """
    first, second = LIKELIHOODS[likelihood].predictive(outputs, scale, None)
    if LIKELIHOODS[likelihood].discrete:
        return log_at(first, target)
    return -0.5 * ((target - first).square() / second + second.log() + math.log(2 * math.pi)).sum(-1)
