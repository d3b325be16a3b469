"""Residual networks. He et al.'s for ImageNet, which the rank-1 and the EMP paper use, under torchvision's names; and
those that normalise before they convolve: Wide ResNet, PyramidNet and the k-tied paper's "ResNet-18".

Names and shapes of all weights of the first, their start and the order of operations are torchvision's, so that its
checkpoints load strictly and give the same outputs. Bottlenecks have their stride on the 3 x 3 convolution ("v1.5").
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from slimbayes_lab.models.feedforward import start_kernels

# As torchvision and the PyramidNet authors start convolutions, and leave the dense layer as torch starts it.
started_by_fan_out = partial(
    start_kernels,
    kernel=partial(nn.init.kaiming_normal_, mode="fan_out", nonlinearity="relu"),
    kinds=(nn.Conv2d,),
)


def stage(
    block: Callable[[int, int, int], nn.Module],
    inputs: int,
    outputs: Sequence[int],
    stride: int,
) -> nn.Sequential:
    """A row of blocks (inputs, outputs, stride), each fed by the one before; only the first has the stride."""
    sizes = [inputs, *outputs]
    return nn.Sequential(
        *(
            block(sizes[i], sizes[i + 1], stride if i == 0 else 1)
            for i in range(len(outputs))
        )
    )


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
    )


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions, each with batch norm; ReLU between them and after the sum.

    Shape: (B, inputs, H, W) -> (B, outputs, H / stride, W / stride), rounded up.
    """

    expansion = 1

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = (
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.conv2, self.bn2 = (
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
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
        self.conv1, self.bn1 = (
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.conv2, self.bn2 = (
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.conv3, self.bn3 = (
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.downsample = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + self.downsample(x))


def _resnet(
    block: type[BasicBlock] | type[Bottleneck],
    blocks: tuple[int, ...],
    classes: int,
    small_images: bool,
) -> nn.Sequential:
    stem = (
        nn.Conv2d(3, 64, 3, padding=1, bias=False)
        if small_images
        else nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
    )
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=stem, bn1=nn.BatchNorm2d(64), relu=nn.ReLU()
    )
    if not small_images:
        layers["maxpool"] = nn.MaxPool2d(3, 2, padding=1)
    inputs = 64
    for i, count in enumerate(blocks):
        outputs = 64 * 2**i * block.expansion
        layers[f"layer{i + 1}"] = stage(
            block, inputs, [outputs] * count, stride=1 if i == 0 else 2
        )
        inputs = outputs
    layers |= {
        "avgpool": nn.AdaptiveAvgPool2d(1),
        "flatten": nn.Flatten(),
        "fc": nn.Linear(inputs, classes),
    }
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


class WideBlock(nn.Module):
    """Norm, ReLU, convolution, twice; where shapes change the shortcut projects the block's input as it comes.

    Convolutions of stride 2 pad all sides alike, as the authors' torch code does; the rank-1 paper's TensorFlow code
    pads images of even size below and to the right only.

    Shape: (B, inputs, H, W) -> (B, outputs, H / stride, W / stride), rounded up.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        same = inputs == outputs and stride == 1
        self.shortcut = (
            nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.relu(self.norm1(x)))
        y = self.conv2(F.relu(self.norm2(y)))
        return y + self.shortcut(x)


def wrn(depth: int = 28, width: int = 10, classes: int = 10) -> nn.Sequential:
    """Wide ResNet (Zagoruyko and Komodakis 2016), by default WRN-28-10, the rank-1 paper's network for CIFAR.

    A stem of 16 filters and three groups of 16, 32 and 64 times `width` filters: layers `stem`, `group1` to `group3`,
    `norm` and `dense`. Kernels start at Normal(0, sqrt(2 / fan-in)), biases at zero.

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
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        stem=nn.Conv2d(3, 16, 3, padding=1, bias=False)
    )
    inputs = 16
    for i in range(3):
        outputs = 16 * 2**i * width
        layers[f"group{i + 1}"] = stage(
            WideBlock, inputs, [outputs] * blocks, stride=1 if i == 0 else 2
        )
        inputs = outputs
    layers |= {
        "norm": nn.BatchNorm2d(inputs),
        "relu": nn.ReLU(),
        "pool": nn.AdaptiveAvgPool2d(1),
    }
    return start_kernels(
        nn.Sequential(
            layers | {"flatten": nn.Flatten(), "dense": nn.Linear(inputs, classes)}
        )
    )


class PyramidBlock(nn.Module):
    """Norm, convolution, norm, ReLU, convolution, norm; the shortcut pads missing channels with zeros.

    Shape: (B, inputs, H, W) -> (B, outputs, H / stride, W / stride), rounded up.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = (
            nn.BatchNorm2d(inputs),
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
        )
        self.bn2, self.conv2 = (
            nn.BatchNorm2d(outputs),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        )
        self.bn3 = nn.BatchNorm2d(outputs)
        # Odd sizes round up here as they do in the convolution of stride 2.
        self.pool = nn.Identity() if stride == 1 else nn.AvgPool2d(2, ceil_mode=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(self.bn1(x))
        y = self.bn3(self.conv2(F.relu(self.bn2(y))))
        missing = y.shape[1] - x.shape[1]
        return y + F.pad(self.pool(x), (0, 0, 0, 0, 0, missing))


def pyramidnet(
    depth: int = 110, alpha: float = 270, classes: int = 100
) -> nn.Sequential:
    """PyramidNet with basic blocks (Han et al. 2017), the EMP paper's network for CIFAR-100.

    A stem of 16 filters and three groups, whose i-th block of all has 16 + alpha * i / (number of blocks) filters:
    layers `conv1`, `bn1`, `layer1` to `layer3`, `bn_final` and `fc`, named and started as in the authors' torch code.

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
        raise ValueError(
            f"pyramidnet: alpha adds filters, so it must not be negative, got {alpha!r}."
        )
    filters = [round(16 + alpha * i / (3 * blocks)) for i in range(3 * blocks + 1)]
    stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=stem, bn1=nn.BatchNorm2d(16)
    )
    for i in range(3):
        inputs, *outputs = filters[i * blocks : (i + 1) * blocks + 1]
        layers[f"layer{i + 1}"] = stage(
            PyramidBlock, inputs, outputs, stride=1 if i == 0 else 2
        )
    layers |= {
        "bn_final": nn.BatchNorm2d(filters[-1]),
        "relu_final": nn.ReLU(),
        "avgpool": nn.AdaptiveAvgPool2d(1),
    }
    return started_by_fan_out(
        nn.Sequential(
            layers | {"flatten": nn.Flatten(), "fc": nn.Linear(filters[-1], classes)}
        )
    )


def _keras_norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(
        channels, eps=1e-3, momentum=0.01
    )  # Keras counts the part that stays, 0.99


class ProjectingBlock(nn.Module):
    """Norm, ReLU, convolution, twice; the shortcut projects what the first ReLU gives.

    Shape: (B, inputs, H, W) -> (B, outputs, H / stride, W / stride), rounded up.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = _keras_norm(inputs), _keras_norm(outputs)
        self.conv1 = nn.Conv2d(
            inputs, outputs, 3, stride, padding=1 if stride == 1 else 0
        )
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(x))
        y = x
        if self.conv1.stride[0] == 2:
            # TensorFlow's "same" padding of an even size at stride 2 pads below and to the right only.
            height, width = x.shape[-2:]
            y = F.pad(x, (width % 2, 1, height % 2, 1))
        y = self.conv2(F.relu(self.norm2(self.conv1(y))))
        return y + self.shortcut(x)


def small_resnet(classes: int = 10) -> nn.Sequential:
    """The k-tied paper's "ResNet-18", from TensorFlow Probability's cifar10_bnn example: 14 kernels.

    Stem, four blocks of 64, 128, 256 and 512 filters, average pooling and a dense layer. He et al. have two blocks in
    each stage. Every block projects (the example compares the number of filters with the image's height) and every
    convolution has a bias. Kernels start at Normal(0, 0.1), biases at zero. The example never updates batch norm's
    moving statistics; here they are used as batch norm means them.

    Shape: (B, 3, H, W) -> (B, classes) logits.

    Example:
        >>> import torch
        >>> small_resnet()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        stem=nn.Conv2d(3, 64, 3, padding=1)
    )
    for i, (inputs, outputs, stride) in enumerate(
        [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)], start=1
    ):
        layers[f"block{i}"] = ProjectingBlock(inputs, outputs, stride)
    layers |= {
        "norm": _keras_norm(512),
        "relu": nn.ReLU(),
        "pool": nn.AdaptiveAvgPool2d(1),
        "flatten": nn.Flatten(),
    }
    kernel = partial(nn.init.normal_, mean=0.0, std=0.1)
    return start_kernels(
        nn.Sequential(layers | {"dense": nn.Linear(512, classes)}), kernel
    )
