"""The network for tables: embeddings of categories, dense layers; and the noise of real targets.

Sizes: B rows, d columns of numbers, c columns of codes, T targets.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

Noise = float | Literal["heteroscedastic", "learned"]
# A scale by itself takes as many steps of Adam as it has learning rates to go; a network's outputs take far fewer.
_GAIN = 10.0


def table_net(
    numbers: int, sizes: Sequence[int], outputs: int, hidden: Sequence[int] = (128, 128)
) -> "TableNet":
    """Dense layers `dense1`, `dense2`, ... with ReLU and the last one, `head`; `table` embeds categories.

    Args:
        numbers: columns of numbers, d.
        sizes: how many codes each of the c columns of categories has.

    Shape: (B, d + c) numbers, then codes of categories -> (B, outputs).

    Example:
        >>> table_net(3, (4,), outputs=2)(torch.zeros(5, 4)).shape
        torch.Size([5, 2])
    """
    return TableNet(numbers, sizes, outputs, hidden)


class TableNet(nn.Sequential):
    """What `table_net` gives: a network whose copies in an ensemble start anew."""

    def __init__(
        self, numbers: int, sizes: Sequence[int], outputs: int, hidden: Sequence[int]
    ) -> None:
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
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(module.bias)
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
        self.words = nn.ModuleList(
            nn.Embedding(size, width) for size, width in zip(sizes, widths)
        )

    def init_weights(self) -> None:
        for table in self.words:
            nn.init.normal_(table.get_parameter("weight"), std=0.5)
            nn.init.zeros_(table.get_parameter("weight")[0])

    def forward(self, x: Tensor) -> Tensor:
        parts = [x[:, : self.numbers]]
        for j, table in enumerate(self.words):
            # Clamped, since whether rows keep apart is found out with other numbers than those of the table.
            parts.append(
                table(x[:, self.numbers + j].long().clamp(0, self.sizes[j] - 1))
            )
        return torch.cat(parts, 1)


class WithNoise(nn.Module):
    """A network of T real targets that says their noise too: means, and raw scales where these are not given.

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
            each = (
                "a mean and a raw scale for each"
                if needed > self.targets
                else "one for each"
            )
            raise ValueError(
                f"The network gives {out.shape[-1]} outputs for a row, but {needed} are needed: {each} of "
                f"{self.targets} targets (noise={self.noise!r})."
            )
        if self.noise == "heteroscedastic":
            return out.unflatten(-1, (self.targets, 2))
        if self.raw is None:
            return out
        return torch.stack([out, (_GAIN * self.raw).to(out.dtype).expand_as(out)], -1)
