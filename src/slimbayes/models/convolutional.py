"""The k-tied paper's LeNet: two convolutions, two dense layers.

The paper's text says 3 x 3 kernels. Its parameter counts need 5 x 5 ones, "same" padding and two 2 x 2 poolings, which is the
default here.
"""

from collections import OrderedDict

from torch import nn

from slimbayes.models.initial import initialise


def lenet(classes: int = 100, channels: int = 3, size: int = 32, kernel: int = 5) -> nn.Sequential:
    """Convolutions of 32 and 64 filters, each followed by ReLU and pooling, then dense layers of 512 and `classes` units.

    Layers `conv1`, `conv2`, `dense1`, `dense2`.

    Args:
        size: height and width of the images, a multiple of 4.
        kernel: 5 gives the paper's parameter counts, 3 is what its text says.

    Shape: (B, channels, size, size) -> (B, classes) logits.

    Example:
        >>> import torch
        >>> lenet()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 100])
    """
    if size % 4 or size < 4:
        raise ValueError(f"lenet halves images twice, so size must be a multiple of 4, got {size!r}.")
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(channels, 32, kernel, padding="same"),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(32, 64, kernel, padding="same"),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        dense1=nn.Linear(64 * (size // 4) ** 2, 512),
        relu3=nn.ReLU(),
        dense2=nn.Linear(512, classes),
    )
    net = nn.Sequential(layers)
    initialise(net)
    return net


def small_cnn(classes: int = 10, channels: int = 1, width: int = 32) -> nn.Sequential:
    """Three convolutions with batch norm, the later two of stride 2, and a dense layer: for small images and quick tries.

    Layers `conv1`, `norm1` to `conv3`, `norm3`, and `dense`; `width`, 2 `width` and 2 `width` filters.

    Shape: (B, channels, H, W) -> (B, classes) logits.

    Example:
        >>> import torch
        >>> small_cnn()(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    sizes = (channels, width, 2 * width, 2 * width)
    for i in range(1, 4):
        layers[f"conv{i}"] = nn.Conv2d(sizes[i - 1], sizes[i], 3, stride=1 if i == 1 else 2, padding=1, bias=False)
        layers[f"norm{i}"], layers[f"relu{i}"] = nn.BatchNorm2d(sizes[i]), nn.ReLU()
    layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "dense": nn.Linear(sizes[-1], classes)}
    net = nn.Sequential(layers)
    initialise(net)
    return net
