"""The network behind an estimator: one of the user's, or dense layers with embeddings of categories; and the rows that
it sees.

Sizes: N rows, B of a batch, d columns of numbers, c columns of codes, S draws.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from slimbayes.distributions.families import Normal, dropout_scale
from slimbayes.models.feedforward import start_kernels
from slimbayes.posteriors.base import Config
from slimbayes.posteriors.configs.rank1 import Rank1
from slimbayes.posteriors.configs.whole_modules import Ensemble
from slimbayes.prediction.accumulate import log_at
from slimbayes.train.likelihoods import LIKELIHOODS, LikelihoodName

Noise = float | Literal["heteroscedastic", "learned"]
Module = nn.Module | Callable[[int, int], nn.Module] | Sequence[int] | None


# A scale by itself takes as many steps of Adam as it has learning rates to go; a network's outputs take far fewer.
_GAIN = 10.0


class TableNet(nn.Sequential):
    """Dense layers `dense1`, `dense2`, ... with ReLU and the last one, `head`; `table` embeds categories, of which
    `sizes` says how many codes each column has.

    Shape: (B, d + c) numbers, then codes of categories -> (B, outputs).
    """

    def __init__(self, numbers: int, sizes: Sequence[int], outputs: int, hidden: Sequence[int] = (128, 128)) -> None:
        table = Embedded(numbers, sizes)
        super().__init__()
        if sizes:
            self.add_module("table", table)
        width = table.width
        for i, units in enumerate(hidden, 1):
            self.add_module(f"dense{i}", nn.Linear(width, units))
            self.add_module(f"relu{i}", nn.ReLU())
            width = units
        self.add_module("head", Head(width, outputs))
        self.init_weights()

    def init_weights(self) -> None:
        """Start anew, as the members of an ensemble do."""
        start_kernels(self, kinds=(nn.Linear,))
        for module in self.modules():
            if isinstance(module, Head | Embedded):
                module.init_weights()


table_net = TableNet  # as configs call it


class Head(nn.Linear):
    """A last layer that starts with outputs of about one, and its copies in an ensemble too."""

    def init_weights(self) -> None:
        nn.init.normal_(self.weight, std=self.in_features**-0.5)
        nn.init.zeros_(self.bias)


class Embedded(nn.Module):
    """Numbers as they are, and codes of categories as vectors of some 1.6 n^0.56 numbers for n of them.

    Shape: (B, d + c) -> (B, width).
    """

    def __init__(self, numbers: int, sizes: Sequence[int]) -> None:
        super().__init__()
        widths = [min(16, round(1.6 * size**0.56)) for size in sizes]
        self.numbers, self.width = numbers, numbers + sum(widths)
        self.sizes = tuple(sizes)
        self.words = nn.ModuleList(nn.Embedding(size, width) for size, width in zip(sizes, widths))

    def init_weights(self) -> None:
        for table in self.words:
            nn.init.normal_(table.get_parameter("weight"), std=0.5)
            nn.init.zeros_(table.get_parameter("weight")[0])

    def forward(self, x: Tensor) -> Tensor:
        parts = [x[:, : self.numbers]]
        for j, table in enumerate(self.words):
            # Clamped, since whether rows keep apart is found out with other numbers than those of the table.
            parts.append(table(x[:, self.numbers + j].long().clamp(0, self.sizes[j] - 1)))
        return torch.cat(parts, 1)


class Targets(nn.Module):
    """Outputs of a network as means of T real targets, and raw noise scales where these are not given.

    Args:
        noise: "heteroscedastic" takes both from the network's 2 T outputs; "learned" adds one scale for each target,
            which is trained; a number is a standard deviation that needs no scale.

    Shape: (B, T) or (B, 2 T) -> (B, T, 2), or (B, T) where the noise is a number.
    """

    def __init__(self, network: nn.Module, targets: int, noise: Noise) -> None:
        super().__init__()
        self.network, self.targets, self.noise = network, targets, noise
        self.raw = nn.Parameter(torch.zeros(targets)) if noise == "learned" else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.network(x)
        needed = self.targets * (2 if self.noise == "heteroscedastic" else 1)
        if out.shape[-1] != needed:
            each = "a mean and a raw scale for each" if needed > self.targets else "one for each"
            raise ValueError(
                f"The network gives {out.shape[-1]} outputs for a row, but {needed} are needed: {each} of "
                f"{self.targets} targets (noise={self.noise!r})."
            )
        if self.noise == "heteroscedastic":
            return out.unflatten(-1, (self.targets, 2))
        if self.raw is None:
            return out
        return torch.stack([out, (_GAIN * self.raw).to(out.dtype).expand_as(out)], -1)


def build(module: Module, numbers: int, sizes: Sequence[int], outputs: int) -> nn.Module:
    """A new network of so many outputs: a copy of a module, what a function gives, or dense layers of these widths."""
    if isinstance(module, nn.Module):
        return _checked(copy.deepcopy(module), numbers + len(sizes), outputs)
    if callable(module):
        made: Any = module(numbers + len(sizes), outputs)
        if not isinstance(made, nn.Module):
            raise TypeError(f"module(inputs, outputs) must give a torch.nn.Module, got {type(made).__name__}.")
        return _checked(made, numbers + len(sizes), outputs)
    widths = (128, 128) if module is None else module
    if isinstance(widths, str) or not all(isinstance(width, int) and width > 0 for width in widths):
        raise ValueError(f"module must be a torch.nn.Module, a function that builds one or widths, got {module!r}.")
    return TableNet(numbers, sizes, outputs, widths)


@torch.no_grad()
def _checked(network: nn.Module, inputs: int, outputs: int) -> nn.Module:
    """Refuse a network with another number of outputs, which would train as if there were more classes."""
    like = next(network.parameters(), torch.zeros(()))
    training = network.training
    try:
        found: Any = network.eval()(torch.zeros(1, inputs, dtype=like.dtype, device=like.device))
    except RuntimeError:  # of other inputs: the pass over the rows says which
        return network
    finally:
        network.train(training)
    shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
    if shape != (1, outputs):
        raise ValueError(f"module must give {outputs} outputs for each row, (1, {outputs}) for one, got {shape}.")
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
    factors = Rank1(members=8, mean_init=start, prior=prior, scale_init=dropout_scale(0.05))
    return {"dense.*": factors, "head": Ensemble(members=8)} if ours else factors


def batch_size(rows: int) -> int:
    """Some twenty to forty steps an epoch, with 32 to 256 rows each.

    >>> batch_size(100), batch_size(2000), batch_size(100_000)
    (32, 64, 256)
    """
    return min(256, max(32, 2 ** round(math.log2(rows / 30))))


def log_likelihood(likelihood: LikelihoodName, outputs: Tensor, target: Tensor, scale: float | Tensor = 0.0) -> Tensor:
    """Log-likelihood of every row under every draw, which the likelihoods' own means leave no room to weigh.

    Shape: outputs (S, B, C), (S, B, T) or (S, B, T, 2), target (B,) or (B, T); returns (S, B).
    """
    first, second = LIKELIHOODS[likelihood].predictive(outputs, scale, None)
    if LIKELIHOODS[likelihood].discrete:
        return log_at(first, target)
    return -0.5 * ((target - first).square() / second + second.log() + math.log(2 * math.pi)).sum(-1)
