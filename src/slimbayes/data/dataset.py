"""What a reader gives: named splits of tensors in main memory, or folders of images that are decoded when asked for.

Sizes: N rows, C channels, H x W pixels, P features, T targets, L tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from slimbayes.data.folders import ImageFolder


@dataclass(frozen=True)
class Split:
    """Inputs and targets of one split, row by row.

    Shape: x is (N, C, H, W) uint8 for images, (N, P) for tables, (N, L) int64 for words, (N, T, L) int32 for bags of tokens; y is (N,) int64 labels, (N, classes)
    soft labels or (N, T) targets.

    Example:
        >>> split = Split(torch.zeros(2, 1, 28, 28, dtype=torch.uint8), torch.tensor([3, 7]))
        >>> len(split), split.to("cpu").y.tolist()
        (2, [3, 7])
    """

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(
                f"A split needs one target for each input, got {len(self.x)} inputs and {len(self.y)} targets."
            )

    def __len__(self) -> int:
        return len(self.y)

    def to(self, device: torch.device | str) -> Split:
        return Split(self.x.to(device), self.y.to(device))


@dataclass(frozen=True)
class Dataset:
    """A data set by name: its splits, the names of its classes (none for regression), the words of its vocabulary (text
    only) and the names of its inputs' columns (tables that say them).

    Example:
        >>> split = Split(torch.zeros(2, 1), torch.zeros(2, 1))
        >>> data = Dataset("toy", {"train": split, "test": split})
        >>> len(data.train), sorted(data.to("cpu").splits)
        (2, ['test', 'train'])
    """

    name: str
    splits: Mapping[str, Split | ImageFolder]
    classes: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()

    @property
    def train(self) -> Split:
        return self._tensors("train")

    @property
    def test(self) -> Split:
        return self._tensors("test")

    def to(self, device: torch.device | str) -> Dataset:
        """The same set with its tensors on `device`; image folders stay where they are."""
        return replace(self, splits={k: v.to(device) if isinstance(v, Split) else v for k, v in self.splits.items()})

    def _tensors(self, name: str) -> Split:
        split = self.splits.get(name)
        if split is None:
            raise ValueError(
                f"{self.name} has no split {name!r} here, it has: {', '.join(self.splits)}. Take one from `.splits`."
            )
        if not isinstance(split, Split):
            raise TypeError(f"{self.name} is decoded image by image: give splits[{name!r}] to a torch DataLoader.")
        return split


@dataclass(frozen=True)
class Part:
    """A split that is there but not read yet: counting its rows must be cheap."""

    count: Callable[[], int]
    read: Callable[[], Split | ImageFolder]


@dataclass(frozen=True)
class Found:
    """What a reader recognised in a folder. `files` are those it reads: what it gives may depend on nothing else. A set that is decoded image
    by image names none, and cannot be cached."""

    parts: Mapping[str, Part]
    classes: tuple[str, ...] = ()
    vocabulary: Callable[[], tuple[str, ...]] = tuple
    files: Callable[[], Sequence[Path]] = tuple
    columns: Callable[[], tuple[str, ...]] = tuple


@dataclass(frozen=True)
class Source:
    """One entry of the list of data sets.

    `folders` are looked for under the root in turn, and every reader tries each. A reader returns None where its files are not.
    `published` has the official number of rows of each split, `balanced` says whether every class has the same number of them.
    """

    name: str
    url: str
    layout: str
    folders: tuple[str, ...]
    readers: tuple[Callable[[Path], Found | None], ...]
    published: Mapping[str, int] = field(default_factory=dict)
    balanced: bool = False


def labels(values: Tensor, classes: int, file: Path, first: int = 0) -> Tensor:
    """Labels (N,) as int64, counted from `first`; one outside of the classes is an error that names the file and the record.

    Example:
        >>> labels(torch.tensor([0, 9], dtype=torch.uint8), 10, Path("t10k-labels"))
        tensor([0, 9])
    """
    values = values.long()
    wrong = ((values < first) | (values >= first + classes)).nonzero()
    if len(wrong):
        row = int(wrong[0, 0])
        raise ValueError(
            f"{file}, record {row}: label {int(values[row])} is not one of {first}..{first + classes - 1}."
        )
    return values
