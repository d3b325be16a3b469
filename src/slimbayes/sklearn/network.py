"""The network behind an estimator: one of the user's, or dense layers with embeddings of categories.

Sizes: B rows, d columns of numbers, c columns of codes.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from slimbayes.models.feedforward import started

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
        self.add_module("head", Head(width, outputs))
        self.init_weights()

    def init_weights(self) -> None:
        """Start anew, as the members of an ensemble do."""
        started(self, kinds=(nn.Linear,))
        for module in self.modules():
            if isinstance(module, Head | Embedded):
                module.init_weights()


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

    Example:
        >>> Targets(nn.Linear(3, 2), 2, noise=0.5)(torch.zeros(4, 3)).shape
        torch.Size([4, 2])
    """

    def __init__(self, network: nn.Module, targets: int, noise: Noise) -> None:
        super().__init__()
        self.network, self.targets = network, targets
        self.raw: nn.Parameter | None = None
        self.noise, self.gain = noise, _GAIN
        if noise == "learned":
            self.raw = nn.Parameter(torch.zeros(targets))

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
        out = out.unflatten(-1, (self.targets,))
        if self.raw is None:
            return out
        return torch.stack([out, (self.gain * self.raw).to(out.dtype).expand_as(out)], -1)


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
        return _checked(copy.deepcopy(module), numbers + len(sizes), outputs)
    if callable(module):
        made: Any = module(numbers + len(sizes), outputs)
        if not isinstance(made, nn.Module):
            raise TypeError(f"module(inputs, outputs) must give a torch.nn.Module, got {type(made).__name__}.")
        return _checked(made, numbers + len(sizes), outputs)
    widths = default if module is None else module
    if isinstance(widths, str) or not all(isinstance(width, int) and width > 0 for width in widths):
        raise ValueError(f"module must be a torch.nn.Module, a function that builds one or widths, got {module!r}.")
    return TableNet(numbers, sizes, widths, outputs)


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
