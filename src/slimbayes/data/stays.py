"""Hospital stays with an outcome, and the data sets that are made of them: bags of tokens, and who died.

Sizes: N stays, T bags, L tokens in the fullest bag of all splits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from slimbayes.data.dataset import Dataset, Found, Split
from slimbayes.data.events import Buckets, Events, bag

CLASSES = ("survived", "died")


@dataclass(frozen=True)
class Stays:
    """Hospital stays with an outcome, and which of them belong to which split.

    Shape: labels (N,) int64, 1 for a death in hospital; records (N,) int64, the set's own numbers; splits (n,) int64.
    """

    name: str
    events: Events
    labels: Tensor
    records: Tensor
    splits: Mapping[str, Tensor]
    hours: float = 48.0  # prediction time, since admission

    def __post_init__(self) -> None:
        sizes = self.events.patients, len(self.labels), len(self.records)
        if len(set(sizes)) > 1:
            raise ValueError(f"{self.name}: {sizes[0]} stays, {sizes[1]} labels, {sizes[2]} record numbers.")


def mortality(
    stays: Stays,
    hours: float | None = None,
    precision: float = 1.0,
    aggregate_older_than: float | None = None,
    count: int = 5,
    tokens_per_bag: int | None = None,
) -> Dataset:
    """Tokens and labels of every split, with `count` buckets from the split "train". Other arguments as in `bag`.

    `hours` is the stays' own prediction time by default.

    Shape: x (N, T, L) int32, with one L for all splits; y (N,) int64.

    Example:
        >>> import torch
        >>> from slimbayes.data.events import EventList
        >>> beats = EventList()
        >>> beats.append(0, 0.0, 0, 60.0), beats.append(1, 0.0, 0, 90.0)
        (None, None)
        >>> splits = {"train": torch.tensor([0]), "test": torch.tensor([1])}
        >>> stays = Stays("toy", beats.events(2, ("HR",)), torch.tensor([0, 1]), torch.tensor([7, 8]), splits)
        >>> data = mortality(stays, hours=24.0, precision=6.0)
        >>> data.train.x.shape, data.test.y.tolist(), len(data.vocabulary)
        (torch.Size([1, 4, 1]), [1], 7)
    """
    if "train" not in stays.splits:
        raise ValueError(f"{stays.name} has no split 'train' to fit buckets on, it has: {', '.join(stays.splits)}.")
    hours = stays.hours if hours is None else hours
    buckets = Buckets.fit(stays.events.of(stays.splits["train"]), hours, count)
    bags = {
        name: bag(stays.events.of(rows), buckets, hours, precision, aggregate_older_than, tokens_per_bag)
        for name, rows in stays.splits.items()
    }
    fullest = max(tokens.shape[2] for tokens in bags.values())
    splits = {
        name: Split(F.pad(tokens, (0, fullest - tokens.shape[2])), stays.labels[stays.splits[name]])
        for name, tokens in bags.items()
    }
    return Dataset(stays.name, splits, CLASSES, buckets.names())


def outcomes(
    stays: Callable[[], Stays],
    default: Callable[[Stays], Dataset],
    splits: Sequence[str],
    files: Callable[[], Sequence[Path]],
) -> Found:
    """For `load`: the splits of a set that `mortality` makes from files, with bags as it comes in by default."""

    @cache
    def data() -> Dataset:
        return default(stays())

    read = {split: partial(lambda name: data().splits[name], split) for split in splits}
    return Found(read, CLASSES, lambda: data().vocabulary, files, stays=stays)
