"""The small tasks that defaults are chosen on: real data, a network each, and a shifted copy of every row.

A pack is a folder with one npz for each task: x, y and shifted, all of one length; `pack` writes it once from the data
sets themselves, so that a machine without them can run. Sizes: N rows of a pack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import slimbayes_lab.data
import slimbayes_lab.models
import torch
from torch import Tensor, nn

from slimbayes.train.likelihoods import LikelihoodName

CORRUPTIONS = (
    "gaussian_noise",
    "impulse_noise",
    "defocus_blur",
    "contrast",
    "elastic_transform",
    "pixelate",
)


@dataclass(frozen=True)
class Task:
    """What is learned, by which network, for how long: the same for every method."""

    name: str
    likelihood: LikelihoodName
    network: Callable[[], nn.Module]
    rows: tuple[int, int, int]  # of training, validation and test
    epochs: int
    batch: int = 64
    lr: float = 5e-3
    decay: float = 0.01  # AdamW multiplies it with the rate
    file: str = ""  # of the pack, if it is another task's


class Reader(nn.Module):
    """An LSTM over a sequence (of words, if there is a vocabulary), and a dense layer on its last output."""

    def __init__(self, inputs: int, units: int, vocabulary: int = 0) -> None:
        super().__init__()
        self.embedding = (
            nn.Embedding(vocabulary, inputs) if vocabulary else nn.Identity()
        )
        self.lstm = nn.LSTM(inputs, units, batch_first=True)
        self.dense = nn.Linear(units, 1)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.lstm(self.embedding(x))
        return self.dense(outputs[:, -1]).squeeze(-1)


def mlp(inputs: int, outputs: int, norm: bool, width: int = 50) -> nn.Module:
    """Two hidden layers, with batch norm if asked for, started as torch starts them."""
    layers: list[nn.Module] = [nn.Flatten()]
    for size in (inputs, width):
        layers += [
            nn.Linear(size, width),
            *([nn.BatchNorm1d(width)] if norm else []),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def _table(
    name: str, inputs: int, rows: tuple[int, int, int], epochs: int, norm: bool = False
) -> Task:
    return Task(
        name, "heteroscedastic_gaussian", lambda: mlp(inputs, 2, norm), rows, epochs
    )


TASKS = {
    task.name: task
    for task in (
        _table("bostonhousing", 13, (355, 75, 76), 60, norm=True),
        _table("concrete", 8, (720, 155, 155), 50),
        _table("energy", 8, (540, 114, 114), 60),
        _table("kin8nm", 8, (1500, 300, 1000), 25),
        _table("power-plant", 4, (1500, 300, 1000), 25, norm=True),
        _table("wine-quality-red", 11, (1100, 250, 249), 35, norm=True),
        _table("yacht", 6, (216, 46, 46), 100),
        Task(
            "cancer", "categorical", lambda: mlp(30, 2, norm=True), (370, 100, 99), 50
        ),
        Task(
            "digits",
            "categorical",
            lambda: slimbayes_lab.models.small_cnn(10, 1, 8),
            (1000, 300, 497),
            25,
            50,
        ),
        Task(
            "demo",
            "categorical",
            lambda: slimbayes_lab.models.small_cnn(10, 1, 16),
            (1137, 300, 360),
            30,
            50,
            0.01,
            0.5,
            "digits",
        ),
        Task(
            "mnist2k",
            "categorical",
            lambda: mlp(784, 10, norm=False, width=64),
            (2000, 500, 1500),
            15,
        ),
        Task(
            "cifar2k",
            "categorical",
            lambda: slimbayes_lab.models.small_cnn(10, 3, 8),
            (2000, 500, 1000),
            8,
        ),
        Task("physionet", "bernoulli", lambda: Reader(41, 24), (1500, 500, 1000), 10),
        Task("imdb", "bernoulli", lambda: Reader(16, 16, 2000), (2000, 500, 1000), 8),
    )
}


@dataclass(frozen=True)
class Rows:
    """Inputs, the same inputs shifted, and targets."""

    x: Tensor
    shifted: Tensor
    y: Tensor


def load(task: Task, folder: Path, seed: int) -> dict[str, Rows]:
    """Training, validation and test rows of a seed; tables and targets that are real are standardised by training."""
    with np.load(folder / f"{task.file or task.name}.npz") as arrays:
        x, y, shifted = (
            torch.from_numpy(arrays[name]) for name in ("x", "y", "shifted")
        )
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[
        : sum(task.rows)
    ]
    parts = dict(
        zip(("train", "validation", "test"), order.split(list(task.rows)), strict=True)
    )
    words = x.dtype in (torch.int16, torch.int64)
    x, shifted = (
        t.long() if words else t.float() / (255 if t.dtype == torch.uint8 else 1)
        for t in (x, shifted)
    )
    if not words:
        axes = tuple(
            a for a in range(x.dim()) if a != (1 if x.dim() == 2 else x.dim())
        )  # one scale for a picture
        mean, std = (
            x[parts["train"]].mean(axes),
            x[parts["train"]].std(axes).clamp_min(1e-3),
        )
        x, shifted = (x - mean) / std, (shifted - mean) / std
        if x.dim() == 2:  # a table: every feature is off by noise of half its spread
            shifted = x + 0.5 * torch.randn(
                x.shape, generator=torch.Generator().manual_seed(seed)
            )
    if task.likelihood == "heteroscedastic_gaussian":
        y = y.float()
        y = (y - y[parts["train"]].mean(0)) / y[parts["train"]].std(0)
    y = y.float() if task.likelihood == "bernoulli" else y
    return {name: Rows(x[at], shifted[at], y[at]) for name, at in parts.items()}


# --- writing a pack ---


def pack(folder: Path, root: Path | None) -> None:
    """Write the arrays of all tasks, from the data sets in `root`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, task in TASKS.items():
        if task.likelihood == "heteroscedastic_gaussian":
            data = slimbayes_lab.data.load(f"uci/{name}", root=root).splits["all"]
            save(folder, name, data.x, data.y[:, 0], data.x)
    from sklearn.datasets import load_breast_cancer, load_digits

    cancer, digits = load_breast_cancer(), load_digits()
    save(
        folder,
        "cancer",
        torch.tensor(cancer.data).float(),
        torch.tensor(cancer.target),
        torch.tensor(cancer.data).float(),
    )
    _save_pictures(
        folder,
        "digits",
        torch.tensor(digits.images).float()[:, None] / 16,
        torch.tensor(digits.target),
    )
    mnist = slimbayes_lab.data.load("mnist", root=root).train
    some = slice(0, sum(TASKS["mnist2k"].rows))
    _save_pictures(
        folder,
        "mnist2k",
        mnist.x[some].float().view(-1, 1, 28, 28) / 255,
        mnist.y[some],
    )
    cifar = slimbayes_lab.data.load("cifar10", root=root).train
    some = slice(0, sum(TASKS["cifar2k"].rows))
    small = nn.functional.avg_pool2d(cifar.x[some].float() / 255, 2)
    _save_pictures(folder, "cifar2k", small, cifar.y[some])
    _save_reviews(folder, root)
    _save_stays(folder, root)


def save(folder: Path, name: str, x: Tensor, y: Tensor, shifted: Tensor) -> None:
    np.savez_compressed(
        folder / f"{name}.npz", x=x.numpy(), y=y.numpy(), shifted=shifted.numpy()
    )


def _save_pictures(folder: Path, name: str, x: Tensor, y: Tensor) -> None:
    """Each sixth of the pictures gets another corruption, of severity 3."""
    shifted = x.clone()
    for i, corruption in enumerate(CORRUPTIONS):
        generator = torch.Generator().manual_seed(i)
        shifted[i :: len(CORRUPTIONS)] = slimbayes_lab.data.corrupt(
            x[i :: len(CORRUPTIONS)], corruption, 3, generator
        )
    save(
        folder,
        name,
        *((255 * t).round().byte() if t is not y else t for t in (x, y, shifted)),
    )


def _save_reviews(folder: Path, root: Path | None) -> None:
    """The last forty words of reviews, of the two thousand commonest; shifted: a third of them is any other word."""
    data, task = slimbayes_lab.data.load("imdb", root=root).train, TASKS["imdb"]
    generator = torch.Generator().manual_seed(0)
    some = torch.randperm(len(data.y), generator=generator)[: sum(task.rows)]
    x = data.x[some, -40:].long()
    x = torch.where(x < 2000, x, 2)
    other = torch.randint(3, 2000, x.shape, generator=generator)
    shifted = torch.where(
        (torch.rand(x.shape, generator=generator) < 0.33) & (x > 2), other, x
    )
    save(folder, "imdb", x.short(), data.y[some], shifted.short())


def _save_stays(folder: Path, root: Path | None) -> None:
    """Means of 41 parameters in eight windows of six hours, missing ones zero; shifted: half are missing everywhere."""
    import io
    import lzma

    from slimbayes_lab.data.catalog import root_folder

    with lzma.open(
        root_folder(root) / "physionet2012" / "challenge2012.npz.xz"
    ) as file:
        a: Any = np.load(io.BytesIO(file.read()))
    total = sum(TASKS["physionet"].rows)
    count = a["count"].astype(np.int64)
    param = np.repeat(np.arange(41), count.sum(1))
    record = np.concatenate([np.repeat(np.arange(count.shape[1]), c) for c in count])
    value, window = (
        a["value_table"][a["value_code"]].astype(float),
        np.minimum(a["time_min"] // 360, 7),
    )
    known = (record < total) & (value >= 0)
    at = (record[known], window[known], param[known])
    sums, counts = np.zeros((total, 8, 41)), np.zeros((total, 8, 41))
    np.add.at(sums, at, value[known])
    np.add.at(counts, at, 1)
    seen = counts > 0
    values = np.where(seen, sums / np.maximum(counts, 1), np.nan)
    low, high = np.nanpercentile(values, [1, 99], axis=(0, 1))
    values = np.clip(values, low, high)
    x = np.nan_to_num(
        (values - np.nanmean(values, (0, 1)))
        / np.maximum(np.nanstd(values, (0, 1)), 1e-6)
    )
    lost = np.random.default_rng(0).random((total, 1, 41)) < 0.5
    died = a["outcomes"][:total, 5]
    half = [torch.from_numpy(v.astype(np.float16)) for v in (x, np.where(lost, 0.0, x))]
    save(folder, "physionet", half[0], torch.from_numpy(died.astype(np.int64)), half[1])
