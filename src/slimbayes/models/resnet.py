"""He et al.'s residual networks for ImageNet, which the rank-1 and the EMP paper use, under torchvision's names.

The names and shapes of all weights, the starting weights and the order of operations are torchvision's, so that its checkpoints
load strictly and give the same outputs. Bottlenecks have their stride on the 3 x 3 convolution ("v1.5").
"""

from collections import OrderedDict

import torch.nn.functional as F
from torch import Tensor, nn


def initialise_convolutions(model: nn.Module) -> None:
    """Start every convolution at Normal(0, sqrt(2 / fan-out)), in place; what else there is stays as torch starts it.

    Example:
        >>> layer = nn.Conv2d(32, 64, 3, bias=False)
        >>> initialise_convolutions(layer)
        >>> 0.9 < layer.weight.std().item() / (2 / (64 * 9)) ** 0.5 < 1.1
        True
    """
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions, each with batch norm; ReLU between them and after the sum.

    Shape: (B, inputs, H, W) -> (B, width, H / stride, W / stride), rounded up.
    """

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.downsample = _shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.downsample(x))


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions, each with batch norm; the last has four times the width of the others.

    Shape: (B, inputs, H, W) -> (B, 4 * width, H / stride, W / stride), rounded up.
    """

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.downsample = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + self.downsample(x))


def _resnet(
    block: type[BasicBlock] | type[Bottleneck], blocks: tuple[int, ...], classes: int, small_images: bool
) -> nn.Sequential:
    stem = nn.Conv2d(3, 64, 3, padding=1, bias=False) if small_images else nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
    layers: OrderedDict[str, nn.Module] = OrderedDict(conv1=stem, bn1=nn.BatchNorm2d(64), relu=nn.ReLU())
    if not small_images:
        layers["maxpool"] = nn.MaxPool2d(3, 2, padding=1)
    inputs = 64
    for i, count in enumerate(blocks):
        width, stage = 64 * 2**i, nn.Sequential()
        for j in range(count):
            stage.append(block(inputs, width, stride=2 if i > 0 and j == 0 else 1))
            inputs = width * block.expansion
        layers[f"layer{i + 1}"] = stage
    layers |= {"avgpool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(inputs, classes)}
    net = nn.Sequential(layers)
    initialise_convolutions(net)
    return net


def resnet18(classes: int = 1000, small_images: bool = False) -> nn.Sequential:
    """Two basic blocks in each of four stages; layers `conv1`, `bn1`, `layer1` to `layer4` and `fc`.

    Args:
        small_images: for images of about 32 x 32 start with a 3 x 3 convolution of stride 1 and no max pooling, instead of a
            7 x 7 one of stride 2 and pooling. Only the shape of `conv1` differs.

    Shape: (B, 3, H, W) -> (B, classes) logits.

    Example:
        >>> import torch
        >>> resnet18(classes=10, small_images=True)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    return _resnet(BasicBlock, (2, 2, 2, 2), classes, small_images)


def resnet34(classes: int = 1000, small_images: bool = False) -> nn.Sequential:
    """3, 4, 6 and 3 basic blocks; otherwise as `resnet18`.

    Shape: (B, 3, H, W) -> (B, classes) logits.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     sum(p.numel() for p in resnet34().parameters())
        21797672
    """
    return _resnet(BasicBlock, (3, 4, 6, 3), classes, small_images)


def resnet50(classes: int = 1000, small_images: bool = False) -> nn.Sequential:
    """3, 4, 6 and 3 bottlenecks: the rank-1 paper's network for ImageNet; otherwise as `resnet18`.

    Shape: (B, 3, H, W) -> (B, classes) logits.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     sum(p.numel() for p in resnet50().parameters())
        25557032
    """
    return _resnet(Bottleneck, (3, 4, 6, 3), classes, small_images)


def resnet101(classes: int = 1000, small_images: bool = False) -> nn.Sequential:
    """3, 4, 23 and 3 bottlenecks; otherwise as `resnet18`.

    Shape: (B, 3, H, W) -> (B, classes) logits.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     sum(p.numel() for p in resnet101().parameters())
        44549160
    """
    return _resnet(Bottleneck, (3, 4, 23, 3), classes, small_images)
