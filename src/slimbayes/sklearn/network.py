"""The network behind an estimator: one of the user's, or dense layers with embeddings of categories.

Sizes: B rows, d columns of numbers, c columns of codes.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from slimbayes.models.feedforward import started
from slimbayes.train.likelihoods import LEAST_NOISE, MOST_NOISE

Noise = float | Literal["heteroscedastic", "learned"]
Module = nn.Module | Callable[[int, int], nn.Module] | Sequence[int] | None


# A scale by itself takes as many steps of Adam as it has learning rates to go; a network's outputs take far fewer.
_GAIN = 10.0


class TableNet(nn.Sequential):
    """Dense layers `dense1`, `dense2`, ... with ReLU and the last one, `head`; `table` embeds categories.

    Shape: (B, d + c) numbers, then codes of categories -> (B, outputs).

    Example:
        >>> TableNet(2, (3, 5), hidden=(8,), outputs=4)(torch.zeros(6, 4)).shape
        torch.Size([6, 4])
    """

    def __init__(self, numbers: int, sizes: Sequence[int], hidden: Sequence[int], outputs: int) -> None:
        table = Embedded(numbers, sizes)
        super().__init__()
        if sizes:
            self.add_module("table", table)
        width = table.width
        for i, units in enumerate(hidden, 1):
            self.add_module(f"dense{i}", nn.Linear(width, units))
            self.add_module(f"relu{i}", nn.ReLU())
            width = units
        head = Head(width, outputs)
        self.add_module("head", head)
        started(self, kinds=(nn.Linear,))
        head.init_weights()


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
        tables = [nn.Embedding(size, width) for size, width in zip(sizes, widths)]
        for table in tables:
            nn.init.normal_(table.weight, std=0.5)
            nn.init.zeros_(table.weight[0])
        self.words = nn.ModuleList(tables)

    def forward(self, x: Tensor) -> Tensor:
        parts = [x[:, : self.numbers]]
        for j, table in enumerate(self.words):
            # Clamped, since whether rows keep apart is found out with other numbers than those of the table.
            parts.append(table(x[:, self.numbers + j].long().clamp(0, self.sizes[j] - 1)))
        return torch.cat(parts, 1)


class Targets(nn.Module):
    """Outputs of a network as means and raw noise scales of T real targets.

    Args:
        noise: "heteroscedastic" takes both from the network's 2 T outputs; "learned" adds one scale for each target,
            which is trained; a number is a fixed standard deviation, in the units of the outputs, from 0.1 to 10.

    Shape: (B, T) or (B, 2 T) -> (B, T, 2).

    Example:
        >>> Targets(nn.Linear(3, 2), 2, noise=0.5)(torch.zeros(4, 3)).shape
        torch.Size([4, 2, 2])
    """

    def __init__(self, network: nn.Module, targets: int, noise: Noise | Tensor) -> None:
        super().__init__()
        self.network, self.targets = network, targets
        self.raw: nn.Parameter | None = None
        self.gain = 1.0
        if not isinstance(noise, str):
            self.raw = nn.Parameter(_raw_scale(torch.as_tensor(noise)).expand(targets).clone(), requires_grad=False)
        elif noise == "learned":
            self.raw, self.gain = nn.Parameter(torch.zeros(targets)), _GAIN

    def forward(self, x: Tensor) -> Tensor:
        out = self.network(x)
        if self.raw is None:
            return out.unflatten(-1, (self.targets, 2))
        out = out.unflatten(-1, (self.targets,))
        return torch.stack([out, (self.gain * self.raw).to(out.dtype).expand_as(out)], -1)


def _raw_scale(scale: Tensor) -> Tensor:
    """The raw output that `noise_scale` makes this scale of, or the nearest that it can make."""
    scale = scale.clamp(1.0001 * LEAST_NOISE, 0.9999 * MOST_NOISE)
    wide = (scale.double().square() - LEAST_NOISE**2).sqrt()
    return (MOST_NOISE * torch.atanh(wide / MOST_NOISE)).expm1().log().float()


def table_net(numbers: int, sizes: Sequence[int], outputs: int, hidden: Sequence[int] = (128, 128)) -> TableNet:
    """Dense layers for tables with so many columns of numbers, and columns of so many categories each.

    Example:
        >>> table_net(2, (3,), outputs=1)(torch.zeros(4, 3)).shape
        torch.Size([4, 1])
    """
    return TableNet(numbers, sizes, hidden, outputs)


def build(module: Module, numbers: int, sizes: Sequence[int], outputs: int, default: Sequence[int]) -> nn.Module:
    """A new network of so many outputs: a copy of a module, what a function gives, or dense layers of these widths."""
    if isinstance(module, nn.Module):
        return copy.deepcopy(module)
    if callable(module):
        made: Any = module(numbers + len(sizes), outputs)
        if not isinstance(made, nn.Module):
            raise TypeError(f"module(inputs, outputs) must give a torch.nn.Module, got {type(made).__name__}.")
        return made
    widths = default if module is None else module
    if isinstance(widths, str) or not all(isinstance(width, int) and width > 0 for width in widths):
        raise ValueError(f"module must be a torch.nn.Module, a function that builds one or widths, got {module!r}.")
    return TableNet(numbers, sizes, widths, outputs)
