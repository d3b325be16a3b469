"""What a reader gives: named splits of tensors in main memory, or folders of images that are decoded when asked for.

Sizes: N rows, C channels, H x W pixels, P features, T targets, L tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from slimbayes_lab.data.folders import ImageFolder

if TYPE_CHECKING:
    from slimbayes_lab.data.stays import Stays

_INPUTS, _TARGETS = (
    ("image", "img", "x", "pixel_values", "input_ids"),
    ("label", "labels", "y", "target", "fine_label"),
)


@dataclass(frozen=True)
class Split:
    """Inputs and targets of one split, row by row.

    Shape: x is (N, C, H, W) uint8 for images, (N, P) for tables, (N, L) int64 for words, (N, T, L) int32 for bags of
    tokens; y is (N,) int64 labels, (N, classes) soft labels or (N, T) targets.

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
                f"A split needs a target each, got {len(self.x)} inputs and {len(self.y)} targets."
            )

    def __len__(self) -> int:
        return len(self.y)

    def pick(self, index: Tensor) -> Self:
        """The same with some of its rows, in that order."""
        return replace(self, x=self.x[index], y=self.y[index])

    def to(self, device: torch.device | str) -> Split:
        return Split(self.x.to(device), self.y.to(device))


@dataclass(frozen=True)
class Dataset:
    """A data set by name: its splits, its classes (none for regression), the words of a text's vocabulary and the names
    of a table's columns.

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
    def named(self) -> tuple[object, ...]:
        """What tells sets of equal numbers apart: the names of classes and columns."""
        return self.classes, self.columns

    @property
    def train(self) -> Split:
        return self._tensors("train")

    @property
    def test(self) -> Split:
        return self._tensors("test")

    def to(self, device: torch.device | str) -> Dataset:
        """The same set with its tensors on `device`; image folders stay where they are."""
        return replace(
            self, splits={name: rows.to(device) for name, rows in self.splits.items()}
        )

    def _tensors(self, name: str) -> Split:
        split = self.splits.get(name)
        if split is None:
            raise ValueError(
                f"{self.name} has no split {name!r} here, it has: {', '.join(self.splits)}."
            )
        if not isinstance(split, Split):
            raise TypeError(
                f"{self.name} is decoded image by image: give splits[{name!r}] to a torch DataLoader."
            )
        return split


@dataclass(frozen=True)
class Found:
    """What a reader recognised in a folder: functions that read it. `files` are those they read: what they give may
    depend on nothing else. A set that is decoded image by image names none."""

    splits: Mapping[str, Callable[[], Split | ImageFolder]]
    classes: tuple[str, ...] = ()
    vocabulary: Callable[[], tuple[str, ...]] = tuple
    files: Callable[[], Sequence[Path]] = tuple
    columns: Callable[[], tuple[str, ...]] = tuple
    stays: Callable[[], Stays] | None = None  # of health records, before they are bags

    @classmethod
    def of_files(
        cls,
        read: Callable[..., Split],
        files: Mapping[str, Sequence[Path]],
        classes: tuple[str, ...],
        *more: Path,
    ) -> Self | None:
        """Splits that `read` makes of some files each: if one of them is there, all must be. `more` are files that
        classes were read from."""

        def whole(paths: Sequence[Path]) -> Split:
            if missing := next((path for path in paths if not path.is_file()), None):
                raise FileNotFoundError(
                    f"{missing} is missing, though other files of the set are there."
                )
            return read(*paths)

        splits = {
            s: partial(whole, paths)
            for s, paths in files.items()
            if any(path.is_file() for path in paths)
        }
        here = [path for path in (*chain(*files.values()), *more) if path.is_file()]
        return cls(splits, classes, files=lambda: here) if splits else None


def labels(values: Any, classes: int, file: Path, first: int = 0) -> Tensor:
    """Labels (N,) as int64, from numbers that count from `first`; any other is an error that names file and record."""
    if values.ndim != 1 or (
        not isinstance(values, Tensor) and values.dtype.kind not in "ui"
    ):
        got = f"{values.dtype} of shape {tuple(values.shape)}"
        raise ValueError(f"{file}: labels must be whole numbers (n,), got {got}.")
    numbers = (
        values.long()
        if isinstance(values, Tensor)
        else torch.from_numpy(values.astype("int64"))
    )
    wrong = ((numbers < first) | (numbers >= first + classes)).nonzero()
    if len(wrong):
        row, last = int(wrong[0, 0]), first + classes - 1
        raise ValueError(
            f"{file}, record {row}: label {int(numbers[row])} is not one of {first}..{last}."
        )
    return numbers


def as_split(
    dataset: Any, inputs: str | None = None, targets: str | None = None
) -> Split:
    """All rows of another package's data set as tensors in main memory.

    Args:
        dataset: rows that are (input, target) pairs, as torchvision's data sets have, or dictionaries, as Hugging
            Face's. Inputs may be PIL images, arrays or tensors, all of one size, after the data set's own transform.
        inputs, targets: the keys of dictionaries; by default the first of the usual names that is there.

    Shape: images without a transform become uint8 (N, C, H, W); targets int64 (N,), float32 if they are real numbers.

    Example:
        >>> rows = [{"img": torch.zeros(3, 8, 8), "label": k % 2} for k in range(5)]
        >>> split = as_split(rows)
        >>> split.x.shape, split.y.tolist()
        (torch.Size([5, 3, 8, 8]), [0, 1, 0, 1, 0])
    """
    rows: Iterable[Any] = (
        dataset
        if hasattr(dataset, "__iter__")
        else (dataset[i] for i in range(len(dataset)))
    )
    pairs = [_pair(row, number, inputs, targets) for number, row in enumerate(rows)]
    if not pairs:
        raise ValueError("The data set has no rows.")
    sizes = [tuple(x.shape) for x, _ in pairs]
    if odd := next((i for i, size in enumerate(sizes) if size != sizes[0]), None):
        raise ValueError(
            f"Row {odd} has an input of shape {sizes[odd]}, row 0 one of {sizes[0]}; resize them first."
        )
    return Split(torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs]))


def _pair(
    row: Any, number: int, inputs: str | None, targets: str | None
) -> tuple[Tensor, Tensor]:
    if hasattr(row, "keys"):
        row = [
            row[_key(row, inputs, _INPUTS, "inputs", number)],
            row[_key(row, targets, _TARGETS, "targets", number)],
        ]
    if not isinstance(row, tuple | list) or len(row) != 2:
        raise ValueError(
            f"Row {number} must be an (input, target) pair or a dictionary, got {type(row).__name__}."
        )
    x, y = (
        _tensor(value, f"Row {number} has {what}")
        for value, what in zip(row, ("an input", "a target"))
    )
    return x, y.float() if y.is_floating_point() else y.long()


def _key(
    row: Any, wanted: str | None, usual: tuple[str, ...], argument: str, number: int
) -> str:
    found = (
        wanted
        if wanted is not None
        else next((name for name in usual if name in row), None)
    )
    if found is None or found not in row:
        keys = ", ".join(map(str, row.keys()))
        raise ValueError(
            f"Row {number} has the keys {keys}; say with {argument}= which of them to take."
        )
    return found


def _tensor(value: Any, place: str) -> Tensor:
    try:
        if hasattr(value, "getbands"):  # a PIL image
            pixels = torch.from_numpy(np.array(value))
            return pixels[None] if pixels.dim() == 2 else pixels.permute(2, 0, 1)
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{place} of type {type(value).__name__}, which is no image, array or tensor."
        ) from error
