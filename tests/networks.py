"""The two image networks of the rank-1 paper, written out for counting parameters."""

import torch.nn.functional as F
from torch import Tensor, nn


class _WideBlock(nn.Module):
    """BN-ReLU-conv-BN-ReLU-conv, with a 1x1 projection of the raw input where shapes change."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(n_in), nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(n_out), nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False)
        changes = stride != 1 or n_in != n_out
        self.shortcut = nn.Conv2d(n_in, n_out, 1, stride, bias=False) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.relu(self.bn1(x)))
        return self.conv2(F.relu(self.bn2(y))) + self.shortcut(x)


def wrn(depth: int = 28, width: int = 10, classes: int = 10) -> nn.Module:
    """Wide ResNet, pre-activation: depth 6n + 4."""
    blocks, channels = (depth - 4) // 6, [16, 16 * width, 32 * width, 64 * width]
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False)]
    for group in range(3):
        for i in range(blocks):
            first = i == 0
            stride = 2 if first and group else 1
            layers.append(_WideBlock(channels[group] if first else channels[group + 1], channels[group + 1], stride))
    tail = [nn.BatchNorm2d(channels[-1]), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], classes)]
    return nn.Sequential(*layers, *tail)


class _Bottleneck(nn.Module):
    """1x1, 3x3 (which carries the stride: v1.5), 1x1; batch norm after every convolution."""

    def __init__(self, n_in: int, mid: int, stride: int) -> None:
        super().__init__()
        n_out = 4 * mid
        self.main = nn.Sequential(
            nn.Conv2d(n_in, mid, 1, bias=False), nn.BatchNorm2d(mid), nn.ReLU(),
            nn.Conv2d(mid, mid, 3, stride, 1, bias=False), nn.BatchNorm2d(mid), nn.ReLU(),
            nn.Conv2d(mid, n_out, 1, bias=False), nn.BatchNorm2d(n_out),
        )  # fmt: skip
        changes = stride != 1 or n_in != n_out
        project = nn.Sequential(nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out))
        self.shortcut = project if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.main(x) + self.shortcut(x))


def resnet50(classes: int = 1000) -> nn.Module:
    """ResNet-50 v1.5 in torchvision's layout."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    n_in = 64
    for stage, (mid, blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)]):
        for i in range(blocks):
            layers.append(_Bottleneck(n_in, mid, 2 if i == 0 and stage else 1))
            n_in = 4 * mid
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n_in, classes))
