"""Starting weights of the k-tied paper's networks, which become the posteriors' means (its Appendix D.2)."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

he_normal = partial(nn.init.kaiming_normal_, nonlinearity="relu")  # Normal(0, sqrt(2 / fan-in))


def initialise(model: nn.Module, kernel: Callable[[Tensor], Any] = he_normal) -> None:
    """Start every dense and convolutional kernel with `kernel` and every bias at zero, in place.

    Example:
        >>> layer = nn.Linear(3, 2)
        >>> initialise(layer)
        >>> bool(layer.bias.any())
        False
    """
    for layer in model.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            kernel(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
