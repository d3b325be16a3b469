"""He et al.'s residual networks for ImageNet, which the rank-1 and the EMP paper use, under torchvision's names.

Names and shapes of all weights, their start and the order of operations are torchvision's, so that its checkpoints load
strictly and give the same outputs. Bottlenecks have their stride on the 3 x 3 convolution ("v1.5").
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from slimbayes.models.feedforward import started

# As torchvision and the PyramidNet authors start convolutions, and leave the dense layer as torch starts it.
started_by_fan_out = partial(
    started, kernel=partial(nn.init.kaiming_normal_, mode="fan_out", nonlinearity="relu"), kinds=(nn.Conv2d,)
)


def stage(
    block: Callable[[int, int, int], nn.Module], inputs: int, outputs: Sequence[int], stride: int
) -> nn.Sequential:
    """A row of blocks (inputs, outputs, stride), each fed by the one before; only the first has the stride.

    Example:
        >>> [block.conv1.in_channels for block in stage(BasicBlock, 8, [16, 32], stride=2)]
        [8, 16]
    """
    sizes = [inputs, *outputs]
    return nn.Sequential(*(block(sizes[i], sizes[i + 1], stride if i == 0 else 1) for i in range(len(outputs))))


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions, each with batch norm; ReLU between them and after the sum.

    Shape: (B, inputs, H, W) -> (B, outputs, H / stride, W / stride), rounded up.
    """

    expansion = 1

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.downsample = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.downsample(x))


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions, each with batch norm; the last has four times the width of the others.

    Shape: (B, inputs, H, W) -> (B, outputs, H / stride, W / stride), rounded up.
    """

    expansion = 4

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        width = outputs // self.expansion
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
        outputs = 64 * 2**i * block.expansion
        layers[f"layer{i + 1}"] = stage(block, inputs, [outputs] * count, stride=1 if i == 0 else 2)
        inputs = outputs
    layers |= {"avgpool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(inputs, classes)}
    return started_by_fan_out(nn.Sequential(layers))


def resnet18(classes: int = 1000, small_images: bool = False) -> nn.Sequential:
    """Two basic blocks in each of four stages; layers `conv1`, `bn1`, `layer1` to `layer4` and `fc`.

    Args:
        small_images: for images of about 32 x 32 start with a 3 x 3 convolution of stride 1 and no max pooling, instead
            of a 7 x 7 one of stride 2 and pooling. Only the shape of `conv1` differs.

    Shape: (B, 3, H, W) -> (B, classes) logits.

    Example:
        >>> import torch
        >>> resnet18(classes=10, small_images=True)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    return _resnet(BasicBlock, (2, 2, 2, 2), classes, small_images)


def resnet50(classes: int = 1000, small_images: bool = False) -> nn.Sequential:
    """3, 4, 6 and 3 bottlenecks, the rank-1 paper's network for ImageNet; shapes and options as of `resnet18`.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     sum(p.numel() for p in resnet50().parameters())
        25557032
    """
    return _resnet(Bottleneck, (3, 4, 6, 3), classes, small_images)
