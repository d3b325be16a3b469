"""Wide ResNets (Zagoruyko and Komodakis 2016), the rank-1 paper's networks for CIFAR.

Convolutions of stride 2 pad all sides alike, as the authors' torch code does; the rank-1 paper's TensorFlow code pads images of
even size below and to the right only.
"""

from collections import OrderedDict

import torch.nn.functional as F
from torch import Tensor, nn

from slimbayes.models.initial import initialise


class WideBlock(nn.Module):
    """Norm, ReLU, convolution, twice; where shapes change the shortcut projects the block's input as it comes.

    Shape: (B, inputs, H, W) -> (B, outputs, H / stride, W / stride), rounded up.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.relu(self.norm1(x)))
        y = self.conv2(F.relu(self.norm2(y)))
        return y + self.shortcut(x)


def wrn(depth: int = 28, width: int = 10, classes: int = 10) -> nn.Sequential:
    """Wide ResNet, by default WRN-28-10: a stem of 16 filters and three groups of 16, 32 and 64 times `width` filters.

    Layers `stem`, `group1` to `group3`, `norm` and `dense`. Kernels start at Normal(0, sqrt(2 / fan-in)), biases at zero.

    Args:
        depth: 6 n + 4 for n blocks in each group: 10, 16, 22, 28, ...

    Shape: (B, 3, H, W) -> (B, classes) logits.

    Example:
        >>> import torch
        >>> wrn(depth=10, width=1)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    blocks, rest = divmod(depth - 4, 6)
    if rest or blocks < 1:
        raise ValueError(
            f"wrn has n blocks in each group, so depth must be 6 n + 4 (10, 16, 22, 28, ...), got {depth!r}."
        )
    if width < 1:
        raise ValueError(f"wrn: width must be at least 1, got {width!r}.")
    layers: OrderedDict[str, nn.Module] = OrderedDict(stem=nn.Conv2d(3, 16, 3, padding=1, bias=False))
    inputs = 16
    for i in range(3):
        outputs, group = 16 * 2**i * width, nn.Sequential()
        for j in range(blocks):
            group.append(WideBlock(inputs, outputs, stride=2 if i > 0 and j == 0 else 1))
            inputs = outputs
        layers[f"group{i + 1}"] = group
    layers |= {
        "norm": nn.BatchNorm2d(inputs),
        "relu": nn.ReLU(),
        "pool": nn.AdaptiveAvgPool2d(1),
        "flatten": nn.Flatten(),
    }
    layers["dense"] = nn.Linear(inputs, classes)
    net = nn.Sequential(layers)
    initialise(net)
    return net
