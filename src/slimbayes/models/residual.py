"""The k-tied paper's "ResNet-18": the residual network of TensorFlow Probability's cifar10_bnn example.

It has one block in each of its four stages where He et al. have two, a projection in every block (the example compares the
number of filters with the image's height, so that even the first block projects), and a bias on every convolution. Batch norm
has Keras's constants. The example never updates its moving statistics; here they are used as batch norm means them.
"""

from collections import OrderedDict
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from slimbayes.models.initial import initialise


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)  # Keras counts the part that stays, 0.99


class PreactivationBlock(nn.Module):
    """Norm, ReLU, convolution, twice; the shortcut projects what the first ReLU gives.

    Shape: (B, inputs, H, W) -> (B, outputs, H / stride, W / stride), rounded up.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = _norm(inputs), _norm(outputs)
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
    """Stem, four pre-activation blocks of 64, 128, 256 and 512 filters, average pooling and a dense layer: 14 kernels.

    Kernels start at Normal(0, 0.1), biases at zero, as in the example.

    Shape: (B, 3, H, W) -> (B, classes) logits.

    Example:
        >>> import torch
        >>> small_resnet()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict(stem=nn.Conv2d(3, 64, 3, padding=1))
    inputs = 64
    for i, (outputs, stride) in enumerate([(64, 1), (128, 2), (256, 2), (512, 2)], start=1):
        layers[f"block{i}"] = PreactivationBlock(inputs, outputs, stride)
        inputs = outputs
    layers |= {"norm": _norm(inputs), "relu": nn.ReLU(), "pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
    layers["dense"] = nn.Linear(inputs, classes)
    net = nn.Sequential(layers)
    initialise(net, partial(nn.init.normal_, mean=0.0, std=0.1))
    return net
