"""The network behind an estimator: one of the user's, or of ours for tables; and the rows that it sees.

Sizes: N rows, B of a batch, S draws.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from slimbayes.distributions.families import Normal
from slimbayes.distributions.scales import dropout_scale
from slimbayes.posteriors.configs.base import Config
from slimbayes.posteriors.configs.rank1 import Rank1
from slimbayes.posteriors.configs.whole_modules import Ensemble
from slimbayes.prediction.averages import log_at
from slimbayes.tables import table_net
from slimbayes.train.likelihoods import LIKELIHOODS, LikelihoodName

Module = nn.Module | Callable[[int, int], nn.Module] | Sequence[int] | None


def build(
    module: Module, numbers: int, sizes: Sequence[int], outputs: int
) -> nn.Module:
    """A new network of so many outputs: a copy of a module, what a function gives, or dense layers of these widths."""
    if isinstance(module, nn.Module):
        return _checked(copy.deepcopy(module), numbers + len(sizes), outputs)
    if callable(module):
        made: Any = module(numbers + len(sizes), outputs)
        if not isinstance(made, nn.Module):
            raise TypeError(
                f"module(inputs, outputs) must give a torch.nn.Module, got {type(made).__name__}."
            )
        return _checked(made, numbers + len(sizes), outputs)
    widths = (128, 128) if module is None else module
    if isinstance(widths, str) or not all(
        isinstance(width, int) and width > 0 for width in widths
    ):
        raise ValueError(
            f"module must be a torch.nn.Module, a function that builds one or widths, got {module!r}."
        )
    return table_net(numbers, sizes, outputs, widths)


@torch.no_grad()
def _checked(network: nn.Module, inputs: int, outputs: int) -> nn.Module:
    """Refuse a network with another number of outputs, which would train as if there were more classes."""
    like = next(network.parameters(), torch.zeros(()))
    training = network.training
    try:
        found: Any = network.eval()(
            torch.zeros(1, inputs, dtype=like.dtype, device=like.device)
        )
    except RuntimeError:  # of other inputs: the pass over the rows says which
        return network
    finally:
        network.train(training)
    shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
    if shape != (1, outputs):
        raise ValueError(
            f"module must give {outputs} outputs for each row, (1, {outputs}) for one, got {shape}."
        )
    return network


class TableRows(NamedTuple):
    """Inputs (N, d), coded targets (N,) or (N, T) and weights (N,) of rows: arrays, or tensors for the network."""

    x: Any
    y: Any
    weight: Any

    def at(self, index: Any) -> "TableRows":
        return TableRows(self.x[index], self.y[index], self.weight[index])

    def batches(self, size: int) -> Iterator["TableRows"]:
        """Batches of nearly equal size in a random order: a last one of a single row would be all noise."""
        if size >= len(self.x):
            yield self
            return
        order = torch.randperm(len(self.x)).to(self.x.device)
        for index in order.tensor_split(math.ceil(len(self.x) / size)):
            yield self.at(index)


def join_equal_rows(x: np.ndarray, y: np.ndarray, weight: np.ndarray) -> TableRows:
    """Equal rows once, with their weights added: a row of weight two is a row given twice."""
    every = np.concatenate([x, y.reshape(len(y), -1)], 1)
    _, first, same = np.unique(every, axis=0, return_index=True, return_inverse=True)
    return TableRows(x[first], y[first], np.bincount(same.ravel(), weight))


def default_method(ours: bool) -> Rank1 | dict[str, Config]:
    """Rank-1 factors with wide starts and prior, and in networks of ours a head of its own for each member.

    Chosen by held-out likelihood on four small sets (benchmarks/tables.py --choose).
    """
    start, prior = Normal(1.0, 0.5), Normal(1.0, 0.3)
    factors = Rank1(
        members=8, mean_init=start, prior=prior, scale_init=dropout_scale(0.05)
    )
    return {"dense.*": factors, "head": Ensemble(members=8)} if ours else factors


def batch_size(rows: int) -> int:
    """Some twenty to forty steps an epoch, with 32 to 256 rows each.

    >>> batch_size(100), batch_size(2000), batch_size(100_000)
    (32, 64, 256)
    """
    return min(256, max(32, 2 ** round(math.log2(rows / 30))))


def log_likelihood(
    likelihood: LikelihoodName,
    outputs: Tensor,
    target: Tensor,
    scale: float | Tensor = 0.0,
) -> Tensor:
    """Log-likelihood of every row under every draw, which the likelihoods' own means leave no room to weigh.

    Shape: outputs (S, B, C), (S, B, T) or (S, B, T, 2), target (B,) or (B, T); returns (S, B).
    """
    first, second = LIKELIHOODS[likelihood].predictive(outputs, scale, None)
    if LIKELIHOODS[likelihood].discrete:
        return log_at(first, target)
    return -0.5 * (
        (target - first).square() / second + second.log() + math.log(2 * math.pi)
    ).sum(-1)
