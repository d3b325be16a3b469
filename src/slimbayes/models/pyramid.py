"""PyramidNet with basic blocks (Han et al. 2017), the EMP paper's network for CIFAR-100.

Every block is a little wider than the one before; nothing is projected: shortcuts pad missing channels with zeros. Names of the
weights and their start are those of the authors' torch code.
"""

from collections import OrderedDict

import torch.nn.functional as F
from torch import Tensor, nn

from slimbayes.models.resnet import initialise_convolutions


class PyramidBlock(nn.Module):
    """Norm, convolution, norm, ReLU, convolution, norm; no activation before the first convolution or after the sum.

    Shape: (B, inputs, H, W) -> (B, outputs, H / stride, W / stride), rounded up.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(outputs), nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        # Odd sizes round up here as they do in the convolution of stride 2.
        self.pool = nn.Identity() if stride == 1 else nn.AvgPool2d(2, ceil_mode=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(self.bn1(x))
        y = self.bn3(self.conv2(F.relu(self.bn2(y))))
        missing = y.shape[1] - x.shape[1]
        return y + F.pad(self.pool(x), (0, 0, 0, 0, 0, missing))


def pyramidnet(depth: int = 110, alpha: float = 270, classes: int = 100) -> nn.Sequential:
    """Stem of 16 filters and three groups of blocks, whose i-th block of all has 16 + alpha * i / (number of blocks) filters.

    Layers `conv1`, `bn1`, `layer1` to `layer3`, `bn_final` and `fc`.

    Args:
        depth: 6 n + 2 for n blocks in each group: 8, 14, 20, ..., 110, ...
        alpha: how many filters the last block has beyond the stem's 16. Numbers of filters are rounded.

    Shape: (B, 3, H, W) -> (B, classes) logits.

    Example:
        >>> import torch
        >>> pyramidnet(depth=8, alpha=12)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 100])
    """
    blocks, rest = divmod(depth - 2, 6)
    if rest or blocks < 1:
        raise ValueError(
            f"pyramidnet has n blocks in each group, so depth must be 6 n + 2 (8, 14, ..., 110), got {depth!r}."
        )
    if alpha < 0:
        raise ValueError(f"pyramidnet: alpha adds filters, so it must not be negative, got {alpha!r}.")
    stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
    layers: OrderedDict[str, nn.Module] = OrderedDict(conv1=stem, bn1=nn.BatchNorm2d(16))
    inputs = 16
    for i in range(3):
        group = nn.Sequential()
        for j in range(blocks):
            outputs = round(16 + alpha * (i * blocks + j + 1) / (3 * blocks))
            group.append(PyramidBlock(inputs, outputs, stride=2 if i > 0 and j == 0 else 1))
            inputs = outputs
        layers[f"layer{i + 1}"] = group
    layers |= {"bn_final": nn.BatchNorm2d(inputs), "relu_final": nn.ReLU(), "avgpool": nn.AdaptiveAvgPool2d(1)}
    layers |= {"flatten": nn.Flatten(), "fc": nn.Linear(inputs, classes)}
    net = nn.Sequential(layers)
    initialise_convolutions(net)
    return net
