"""Residual networks that normalise before they convolve: Wide ResNet, PyramidNet and the k-tied paper's "ResNet-18"."""

from collections import OrderedDict
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from slimbayes.models.feedforward import started
from slimbayes.models.resnet import stage, started_by_fan_out


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
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

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
    layers: OrderedDict[str, nn.Module] = OrderedDict(stem=nn.Conv2d(3, 16, 3, padding=1, bias=False))
    inputs = 16
    for i in range(3):
        outputs = 16 * 2**i * width
        layers[f"group{i + 1}"] = stage(WideBlock, inputs, [outputs] * blocks, stride=1 if i == 0 else 2)
        inputs = outputs
    layers |= {"norm": nn.BatchNorm2d(inputs), "relu": nn.ReLU(), "pool": nn.AdaptiveAvgPool2d(1)}
    return started(nn.Sequential(layers | {"flatten": nn.Flatten(), "dense": nn.Linear(inputs, classes)}))


class PyramidBlock(nn.Module):
    """Norm, convolution, norm, ReLU, convolution, norm; the shortcut pads missing channels with zeros.

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
        raise ValueError(f"pyramidnet: alpha adds filters, so it must not be negative, got {alpha!r}.")
    filters = [round(16 + alpha * i / (3 * blocks)) for i in range(3 * blocks + 1)]
    stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
    layers: OrderedDict[str, nn.Module] = OrderedDict(conv1=stem, bn1=nn.BatchNorm2d(16))
    for i in range(3):
        inputs, *outputs = filters[i * blocks : (i + 1) * blocks + 1]
        layers[f"layer{i + 1}"] = stage(PyramidBlock, inputs, outputs, stride=1 if i == 0 else 2)
    layers |= {"bn_final": nn.BatchNorm2d(filters[-1]), "relu_final": nn.ReLU(), "avgpool": nn.AdaptiveAvgPool2d(1)}
    return started_by_fan_out(nn.Sequential(layers | {"flatten": nn.Flatten(), "fc": nn.Linear(filters[-1], classes)}))


def _keras_norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)  # Keras counts the part that stays, 0.99


class ProjectingBlock(nn.Module):
    """Norm, ReLU, convolution, twice; the shortcut projects what the first ReLU gives.

    Shape: (B, inputs, H, W) -> (B, outputs, H / stride, W / stride), rounded up.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = _keras_norm(inputs), _keras_norm(outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1 if stride == 1 else 0)
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
    layers: OrderedDict[str, nn.Module] = OrderedDict(stem=nn.Conv2d(3, 64, 3, padding=1))
    for i, (inputs, outputs, stride) in enumerate([(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)], start=1):
        layers[f"block{i}"] = ProjectingBlock(inputs, outputs, stride)
    layers |= {"norm": _keras_norm(512), "relu": nn.ReLU(), "pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
    kernel = partial(nn.init.normal_, mean=0.0, std=0.1)
    return started(nn.Sequential(layers | {"dense": nn.Linear(512, classes)}), kernel)
