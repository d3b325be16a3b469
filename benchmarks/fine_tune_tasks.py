"""Data and base networks of benchmarks/fine_tune.py: CIFAR-100 to CIFAR-10, and reviews to their sentiment.

Everything is made once and kept in a working folder: images and words as tensors, and the bases' weights.

Sizes: N rows, L words.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import slimbayes_lab.data
import slimbayes_lab.models
import torch
from slimbayes_lab.data import corrupt, load, pad_crop_flip
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORDS, PAD, UNKNOWN = 8000, 0, 2  # the vocabulary; words past it are unknown
SHIFTS = (
    "gaussian_noise",
    "defocus_blur",
    "fog",
    "contrast",
)  # of CIFAR-10-C, severity 3
SHORT = 16  # words of a short review
Rows = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """So many labels for one of the bases, and how long all methods train on them."""

    name: str
    base: str
    labels: int
    steps: int
    batch: int = 100


@dataclass(frozen=True)
class Scale:
    """How much of everything: of the whole benchmark, or of a trial of its code."""

    epochs: dict[str, int]
    tests: int = 2000
    shifted: int = 500
    steps: float = 1.0
    width: int = 4
    rows: int = 50_000


FULL = Scale({"wrn": 16, "resnet": 16, "llama": 15})
SMOKE = Scale(
    {"wrn": 1, "resnet": 1, "llama": 1},
    tests=60,
    shifted=20,
    steps=0.02,
    width=1,
    rows=200,
)
TASKS = {
    task.name: task
    for task in (
        Task("WRN-16-4, 1 %", "wrn", 500, 150),
        Task("WRN-16-4, 10 %", "wrn", 5000, 300),
        Task("ResNet, 1 %", "resnet", 500, 150),
        Task("ResNet, 10 %", "resnet", 5000, 300),
        Task("IMDB, 200", "llama", 200, 150),
        Task("IMDB, 2,000", "llama", 2000, 300),
    )
}


@dataclass(frozen=True)
class Material:
    """Rows to draw labels from, rows to choose settings by, and test rows: clean, shifted in several ways, and ones of
    another kind.
    """

    pool: Rows
    valid: Rows
    clean: Rows
    shifted: dict[str, Rows]
    other: Tensor

    def to(self, device: str) -> Material:
        move = lambda rows: (rows[0].to(device), rows[1].to(device))  # noqa: E731
        shifted = {name: move(rows) for name, rows in self.shifted.items()}
        return Material(
            move(self.pool),
            move(self.valid),
            move(self.clean),
            shifted,
            self.other.to(device),
        )


def labelled(material: Material, task: Task, seed: int) -> Rows:
    """The labels of one seed, drawn from the pool."""
    order = torch.randperm(
        len(material.pool[0]), generator=torch.Generator().manual_seed(1000 + seed)
    )
    index = order[: task.labels].to(material.pool[0].device)
    return material.pool[0][index], material.pool[1][index]


def prepare(kind: str, data: Path, work: Path, scale: Scale) -> None:
    """Write what the tasks of "images" or "text" need into the working folder."""
    file = work / f"{kind}.pt"
    if not file.exists():
        made = _images(data, scale) if kind == "images" else _text(data, scale)
        torch.save(made, work / f"{kind}.tmp")
        (work / f"{kind}.tmp").rename(file)


@cache
def material_of(base: str, work: Path) -> Material:
    kept = torch.load(
        work / ("text.pt" if base == "llama" else "images.pt"), weights_only=False
    )
    return Material(*kept["material"]).to(DEVICE)


def _apart(x: Tensor, y: Tensor, valid: int) -> tuple[Rows, Rows]:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return (x[order[valid:]], y[order[valid:]]), (x[order[:valid]], y[order[:valid]])


def _images(data: Path, scale: Scale) -> dict[str, Any]:
    ten, hundred = load("cifar10", data), load("cifar100", data)
    pool, valid = _apart(ten.train.x, ten.train.y, min(2000, scale.tests))
    clean = ten.test.x[: scale.tests], ten.test.y[: scale.tests]
    some = clean[0][: scale.shifted].to(DEVICE).float() / 255
    shifted = {}
    for name in SHIFTS:
        found = corrupt(some, name, 3, torch.Generator().manual_seed(0))
        shifted[name] = (
            (found * 255).round().to(torch.uint8).cpu(),
            clean[1][: scale.shifted],
        )
    rows = hundred.train.x[: scale.rows], hundred.train.y[: scale.rows]
    other = hundred.test.x[: 2 * scale.shifted]
    return {"material": (pool, valid, clean, shifted, other), "base": rows}


def _text(data: Path, scale: Scale) -> dict[str, Any]:
    imdb = load("imdb", data)
    (x, y), (test_x, test_y) = (
        (torch.where(s.x < WORDS, s.x, UNKNOWN), s.y) for s in (imdb.train, imdb.test)
    )
    pool, valid = _apart(x, y, min(2000, scale.tests))
    order = torch.randperm(len(test_x), generator=torch.Generator().manual_seed(0))[
        : scale.tests
    ]
    clean = test_x[order], test_y[order]
    some = clean[0][: 2 * scale.shifted], clean[1][: 2 * scale.shifted]
    short = torch.where(
        torch.arange(some[0].shape[1]) < some[0].shape[1] - SHORT, PAD, some[0]
    )
    shifted = {"short": (short, some[1]), "shuffled": (_shuffled(some[0]), some[1])}
    seen = x[x > UNKNOWN]
    picked = torch.randint(
        len(seen), some[0].shape, generator=torch.Generator().manual_seed(2)
    )
    other = torch.where(
        some[0] > UNKNOWN, seen[picked], some[0]
    )  # words at random, as frequent as in reviews
    return {
        "material": (pool, valid, clean, shifted, other),
        "base": (x[: scale.rows], y[: scale.rows]),
    }


def _shuffled(words: Tensor) -> Tensor:
    """The words of each review in another order; pads stay in front."""
    keys = torch.rand(words.shape, generator=torch.Generator().manual_seed(1))
    return words.gather(1, torch.where(words == PAD, keys - 2, keys).argsort(1))


class Images(nn.Module):
    """A network of images (N, 3, 32, 32) of bytes; augments them where it trains."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(
            ((x.float() / 255 - 0.47) / 0.25).contiguous(
                memory_format=torch.channels_last
            )
        )


class Reviews(nn.Module):
    """A classifier of transformers over word numbers (N, L), padded in front."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(
            input_ids=x, attention_mask=(x != PAD).long(), use_cache=False
        ).logits


def augmented(x: Tensor) -> Tensor:
    """Crops and flips of images; words as they are."""
    return pad_crop_flip(x) if x.dim() == 4 else x


def network(base: str, classes: int, scale: Scale) -> nn.Module:
    """A network of images by its name, or a language model of transformers for no classes, else a classifier."""
    if base == "wrn":
        return Images(slimbayes_lab.models.wrn(16, scale.width, classes))
    if base == "resnet":
        return Images(slimbayes_lab.models.resnet18(classes, small_images=True))
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=64 * scale.width, intermediate_size=128 * scale.width, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128, pad_token_id=PAD, bos_token_id=1,
        eos_token_id=None, num_labels=max(classes, 2), attn_implementation="sdpa", tie_word_embeddings=True,
    )  # fmt: skip
    return (
        Reviews(LlamaForSequenceClassification(config))
        if classes
        else LlamaForCausalLM(config)
    )


HEADS = {"wrn": "inner.dense", "resnet": "inner.fc", "llama": "inner.score"}


def started(base: str, work: Path, scale: Scale, seed: int) -> nn.Module:
    """The base with a head for the new classes, which starts by the seed."""
    torch.manual_seed(seed)
    net = network(base, 2 if base == "llama" else 10, scale)
    kept = torch.load(work / f"{base}.pt", weights_only=True)
    if base == "llama":
        own = {
            f"inner.{name}": value
            for name, value in kept.items()
            if name.startswith("model.")
        }
    else:
        own = {
            name: value
            for name, value in kept.items()
            if not name.startswith(HEADS[base])
        }
    missing = net.load_state_dict(own, strict=False).missing_keys
    assert all(name.startswith(HEADS[base]) for name in missing), missing[:3]
    return net.to(DEVICE)


def train_base(base: str, work: Path, scale: Scale) -> float:
    """Train a base from scratch and keep its weights; its accuracy, or nats per word, on rows of the last batches."""
    rows = torch.load(
        work / ("text.pt" if base == "llama" else "images.pt"), weights_only=False
    )["base"]
    x, y = rows[0].to(DEVICE), rows[1].to(DEVICE)
    torch.manual_seed(0)
    net = network(base, 0 if base == "llama" else 100, scale).to(DEVICE).train()
    batch = 256 if base == "llama" else 512
    steps = scale.epochs[base] * max(len(x) // batch, 1)
    if base == "llama":
        optimizer: Any = torch.optim.AdamW(net.parameters(), 2e-3, weight_decay=0.05)
    else:
        optimizer = torch.optim.SGD(
            net.parameters(), 0.2, momentum=0.9, weight_decay=5e-4, nesterov=True
        )
    plan = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, optimizer.param_groups[0]["lr"], steps + 1, pct_start=0.2
    )
    loss = torch.zeros(())
    for index in batches(len(x), batch, steps, 0):
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = (
                _next_word(net, x[index])
                if base == "llama"
                else _classes(net, augmented(x[index]), y[index])
            )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        optimizer.step()
        plan.step()
    torch.save(net.state_dict(), work / f"{base}.tmp")
    (work / f"{base}.tmp").rename(work / f"{base}.pt")
    return float(loss.detach())


def batches(rows: int, size: int, steps: int, seed: int) -> Iterator[Tensor]:
    """Rows of so many batches, epoch by epoch in a new order; the rest of an epoch is left out."""
    source, size, order = (
        torch.Generator().manual_seed(seed),
        min(size, rows),
        torch.zeros(0, dtype=torch.long),
    )
    for _ in range(steps):
        if len(order) < size:
            order = torch.randperm(rows, generator=source).to(DEVICE)
        yield order[:size]
        order = order[size:]


def _classes(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(net(x), y)


def _next_word(net: nn.Module, x: Tensor) -> Tensor:
    logits = net(input_ids=x, attention_mask=(x != PAD).long(), use_cache=False).logits
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), x[:, 1:].flatten(), ignore_index=PAD
    )


class Adapter(nn.Module):
    """LoRA (Hu et al. 2022) beside a frozen layer, as peft has it: of a convolution the first factor is a convolution
    of its shape to `rank` channels, the second one of 1 x 1. The second starts at zero.
    """

    def __init__(self, layer: nn.Linear | nn.Conv2d, rank: int) -> None:
        super().__init__()
        self.layer = layer
        if isinstance(layer, nn.Conv2d):
            shape: Any = (layer.kernel_size, layer.stride, layer.padding)
            self.down: nn.Module = nn.Conv2d(
                layer.in_channels, rank, *shape, bias=False
            )
            self.up: Any = nn.Conv2d(rank, layer.out_channels, 1, bias=False)
        else:
            self.down = nn.Linear(layer.in_features, rank, bias=False)
            self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 2 * self.up(self.down(x))


def with_adapters(net: nn.Module, head: str, rank: int = 8) -> nn.Module:
    """The network, frozen but for adapters of its dense layers and convolutions, its norms and its head."""
    for name, p in net.named_parameters():
        p.requires_grad_(
            name.startswith(head)
            or "norm" in name
            or ".bn" in name
            or ".downsample.1" in name
        )
    for name, layer in list(net.named_modules()):
        if isinstance(layer, (nn.Linear, nn.Conv2d)) and name != head:
            parent, _, last = name.rpartition(".")
            setattr(net.get_submodule(parent), last, Adapter(layer, rank).to(DEVICE))
    return net
