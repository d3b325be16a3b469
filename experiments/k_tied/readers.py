"""Data of the k-tied experiments, as whole tensors on one device.

Sizes: N training rows, M test rows.
"""

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slimbayes.data import load


class Data:
    """Rows in [-1, 1] and their labels, split into train (N, inputs), (N,) and test (M, inputs), (M,)."""

    def __init__(self, x: np.ndarray, y: np.ndarray, test: int, device: torch.device) -> None:
        rows = torch.tensor(x, dtype=torch.float32, device=device)
        labels = torch.tensor(y, dtype=torch.long, device=device)
        self.x, self.test_x = rows[:-test], rows[-test:]
        self.y, self.test_y = labels[:-test], labels[-test:]

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """Training rows drawn with replacement."""
        rows = torch.randint(len(self.x), (size,), device=self.x.device)
        return self.x[rows], self.y[rows]


def digits(device: torch.device) -> Data:
    """scikit-learn's digits: 1,300 training and 497 test images of 64 pixels, in a fixed random order."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return Data(images[order] / 8 - 1, labels[order], 497, device)


def mnist(device: torch.device) -> Data:
    """50,000 training images of 784 pixels (the last 10,000 were the paper's validation set) and 10,000 test images.

    The published files lie in $SLIMBAYES_DATA/mnist, or in ../shared/data/mnist beside the checkout.
    """
    beside = Path(__file__).parents[3] / "shared" / "data"
    data = load("mnist", os.environ.get("SLIMBAYES_DATA", beside))
    images = [split.x.flatten(1).numpy() / 127.5 - 1 for split in (data.train, data.test)]
    labels = [split.y.numpy() for split in (data.train, data.test)]
    x, y = (np.concatenate([train[:50_000], test]) for train, test in (images, labels))
    return Data(x, y, 10_000, device)
