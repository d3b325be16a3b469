"""The k-tied paper's MLP: dense layers with ReLU between them."""

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from slimbayes.models.initial import initialise


def mlp(inputs: int = 784, hidden: Sequence[int] = (400, 400), classes: int = 10) -> nn.Sequential:
    """784-400-400-10 with ReLU, the paper's MNIST network; layers `dense1`, `dense2`, ...

    Shape: (B, ...) with `inputs` numbers in each row -> (B, classes) logits.

    Example:
        >>> import torch
        >>> mlp()(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """
    sizes = [inputs, *hidden, classes]
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    for i in range(1, len(sizes)):
        if i > 1:
            layers[f"relu{i - 1}"] = nn.ReLU()
        layers[f"dense{i}"] = nn.Linear(sizes[i - 1], sizes[i])
    net = nn.Sequential(layers)
    initialise(net)
    return net
