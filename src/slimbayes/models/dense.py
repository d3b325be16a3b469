"""Dense networks with ReLU: the k-tied paper's MLP, and the EMP paper's regression net and 100-layer MLP."""

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


def regression_net(inputs: int, outputs: int = 1, hidden: int = 50, norm: bool = True) -> nn.Sequential:
    """The EMP paper's net for its ten regression data sets (Appendix D.7): batch norm after the input and the hidden layer.

    Layers `norm1`, `dense1`, `relu`, `norm2`, `dense2`. Scales of batch norm start at 0.2, as the paper says; the dense layers
    start as torch starts them.

    Args:
        hidden: the paper has 100 units for Year and Protein, 50 for the others.
        norm: False leaves both batch norms out, as in the paper's explicit ensemble.

    Shape: (B, inputs) -> (B, outputs).

    Example:
        >>> import torch
        >>> regression_net(13)(torch.randn(4, 13)).shape
        torch.Size([4, 1])
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        norm1=nn.BatchNorm1d(inputs),
        dense1=nn.Linear(inputs, hidden),
        relu=nn.ReLU(),
        norm2=nn.BatchNorm1d(hidden),
        dense2=nn.Linear(hidden, outputs),
    )
    for name in ("norm1", "norm2"):
        if norm:
            nn.init.constant_(layers[name].weight, 0.2)
        else:
            del layers[name]
    return nn.Sequential(layers)


def deep_mlp(inputs: int = 1, width: int = 100, depth: int = 100) -> nn.Sequential:
    """The MLP of the EMP paper's Table 3, where it only counts parameters: dense layers without biases, `width` units in each.

    Layers `dense1`, `norm1`, `relu1`, `dense2`, ...: batch norm and ReLU follow every dense layer but the last. All start as
    torch starts them. That the last has `width` outputs and no layer a bias is what the paper's counts need; its text says
    L = 100, H = 100.

    Shape: (B, inputs) -> (B, width).

    Example:
        >>> sum(p.numel() for p in deep_mlp().parameters())
        1009900
    """
    if depth < 1:
        raise ValueError(f"deep_mlp: depth must be at least 1 dense layer, got {depth!r}.")
    layers: OrderedDict[str, nn.Module] = OrderedDict(dense1=nn.Linear(inputs, width, bias=False))
    for i in range(1, depth):
        layers |= {f"norm{i}": nn.BatchNorm1d(width), f"relu{i}": nn.ReLU()}
        layers[f"dense{i + 1}"] = nn.Linear(width, width, bias=False)
    return nn.Sequential(layers)
