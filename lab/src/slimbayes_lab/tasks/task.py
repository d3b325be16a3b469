"""From a data set's name to what a network trains and is judged on: rows on the device and their scaling.

Sizes: N rows, C channels, T targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimbayes.seeds import generator
from slimbayes_lab.configs.experiment import Data, Experiment
from slimbayes_lab.data import Dataset, Split
from slimbayes_lab.data.folders import ImageFolder, read_crop, read_square
from slimbayes_lab.data.uci import check_index, split_rows
from slimbayes_lab.tasks.intake import data_digest, open_data
from slimbayes_lab.tasks.own_table import OwnTable, TableReader
from slimbayes_lab.tasks.rows import Rows, check_data, hold_out, limited

IMAGENET = (
    torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1),
    torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1),
)
SHARE = 7 / 8  # of the shorter side that tested pictures show: 224 of 256 pixels
_MANY = 1 << 23  # numbers of which no copy in float64 is made


@dataclass(frozen=True)
class Scaling:
    """How stored inputs become the network's: without the training rows' mean, divided by their deviation.

    Shape: mean and std are (C, 1, 1) for images, (P,) for tables of P features, None where inputs stay as they are.
    """

    mean: Tensor | None = None
    std: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype == torch.uint8:
            x = x.float() / 255
        elif x.is_floating_point() or self.mean is not None:
            x = x.float()
        return (
            x if self.mean is None or self.std is None else (x - self.mean) / self.std
        )

    def to(self, device: torch.device) -> Scaling:
        return replace(
            self, mean=_moved(self.mean, device), std=_moved(self.std, device)
        )


@dataclass(frozen=True)
class Task:
    """Rows to train and test on, and what they say about the network.

    `y_mean` and `y_std`, (T,), undo the scaling of real targets; test targets are in their own units.
    """

    name: str
    train: Rows
    test: Rows
    validation: Rows | None
    scaling: Scaling
    classes: tuple[str, ...] = ()
    vocabulary: int = 0
    y_mean: Tensor | None = None
    y_std: Tensor | None = None
    columns: tuple[str, ...] = ()  # names of a table's inputs, where the data say them
    reader: TableReader | None = None  # of a table of one's own
    sha256: str = ""  # of the rows as they were read (intake.py)

    @property
    def images(self) -> bool:
        return isinstance(self.train, ImageFolder) or (
            self.train.x.dim() == 4 and self.train.x.dtype == torch.uint8
        )

    @property
    def real(self) -> bool:
        """Whether targets are real numbers, not classes."""
        return isinstance(self.train, Split) and self.train.y.is_floating_point()

    def fills(self) -> dict[str, Any]:
        """Arguments of networks that the data decide."""
        if isinstance(self.train, ImageFolder):
            return {"classes": len(self.classes), "channels": 3}
        x, y = self.train.x, self.train.y
        if self.reader is not None:
            classes = {"classes": len(self.classes), "outputs": len(self.classes)}
            return self.reader.fills() | (
                {"outputs": y[0].numel()} if self.real else classes
            )
        facts = {"inputs": x[0].numel(), "vocabulary": self.vocabulary}
        facts |= (
            {"outputs": y[0].numel()} if self.real else {"classes": len(self.classes)}
        )
        return facts | (
            {"channels": x.shape[1], "size": x.shape[2]} if x.dim() == 4 else {}
        )

    def to(self, device: torch.device) -> Task:
        """The same with its tensors on a device; image folders stay where they are."""
        names = ("train", "test", "validation", "scaling", "y_mean", "y_std")
        return replace(
            self, **{name: _moved(getattr(self, name), device) for name in names}
        )

    def in_own_units(self, rows: Rows) -> Rows:
        """Rows with targets as they came: those of training and validation are standardised."""
        if self.y_mean is None or self.y_std is None:
            return rows
        assert isinstance(rows, Split)
        return Split(rows.x, self.y_mean + self.y_std * rows.y)


def _moved(value: Any, device: torch.device) -> Any:
    return value if value is None else value.to(device)


def open_task(
    chosen: Data, root: Path | str | None = None, dataset: Dataset | None = None
) -> Task:
    """The task of a config's data; `dataset` stands in for the named one. Rows that cannot be used are refused."""
    data, splits = open_data(chosen, root, dataset)
    check_data(data, splits, allow_nonfinite=chosen.missing == "impute")
    task = _from_splits(data, splits, chosen)
    for name, rows in (
        ("train", task.train),
        ("validation", task.validation),
        ("test", task.test),
    ):
        if rows is not None and not len(rows):
            raise ValueError(
                f"{data.name}: no rows are left in the {name} split; it has too few."
            )
    if task.real and dataset is None:
        task = _standardise_targets(task)
    if dataset is None and isinstance(data, OwnTable):
        task = _scale_table(task, data.reader)
    return replace(task, sha256=data_digest(data, splits))


def _from_splits(data: Dataset, splits: Sequence[str], chosen: Data) -> Task:
    train, test, *named = (
        (data.splits[name] for name in splits)
        if len(splits) > 1
        else _standard_split(data, chosen)
    )
    train, test = (
        limited(train, chosen.train_limit, chosen.seed),
        limited(test, chosen.test_limit, chosen.seed),
    )
    kept, held = (train, named[0]) if named else _validation(train, chosen)
    if isinstance(kept, Split) and isinstance(test, Split):
        return _in_memory(data, kept, test, held, chosen)
    for rows in (kept, held, test):
        if isinstance(rows, ImageFolder):
            rows.read = partial(read_square, size=chosen.image_size, share=SHARE)
    return Task(data.name, kept, test, held, Scaling(*IMAGENET), data.classes)


def _standard_split(data: Dataset, chosen: Data) -> Iterator[Rows]:
    """Training and test rows of a UCI set."""
    check_index(data, chosen.split)
    rows = data.splits["all"]
    return (rows.pick(index) for index in split_rows(len(rows), chosen.split))


def _in_memory(
    data: Dataset, kept: Split, test: Split, held: Rows | None, chosen: Data
) -> Task:
    every = [kept, test, *([held] if isinstance(held, Split) else [])]
    words = (
        0
        if kept.x.is_floating_point() or kept.x.dtype == torch.uint8
        else _highest(rows.x for rows in every)
    )
    classes = data.classes
    if not classes and not kept.y.is_floating_point():
        classes = tuple(
            map(str, range(_highest(rows.y for rows in every if rows.y.dim() == 1)))
        )
    vocabulary = max(len(data.vocabulary), words)
    scaling = _scaling(kept.x, chosen.scaling)
    return Task(
        data.name, kept, test, held, scaling, classes, vocabulary, columns=data.columns
    )


def _highest(numbers: Iterable[Tensor]) -> int:
    """How many whole numbers from zero on there are."""
    return max(int(some.max()) for some in numbers) + 1


def batches(
    rows: Rows, size: int, device: torch.device, workers: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows in order, so many at a time, on a device."""
    if isinstance(rows, Split):
        yield from (
            (x.to(device), y.to(device))
            for x, y in zip(rows.x.split(size), rows.y.split(size), strict=True)
        )
        return
    loader = torch.utils.data.DataLoader(
        rows, size, num_workers=workers, pin_memory=device.type == "cuda"
    )
    for x, y in loader:
        yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)


def _standardise_targets(task: Task) -> Task:
    """The same with targets of training and validation scaled by the training rows'."""
    assert isinstance(task.train, Split)
    y = task.train.y
    mean, std = _moments(y, y.dtype)
    if bool((same := y.amax(0) == y.amin(0)).any()):
        raise ValueError(
            f"{task.name}: the target is {float(mean[same][0]):g} in all training rows."
        )

    def scaled(rows: Any) -> Any:
        return rows and Split(rows.x, ((rows.y - mean) / std).float())

    return replace(
        task,
        train=scaled(task.train),
        validation=scaled(task.validation),
        y_mean=mean,
        y_std=std,
    )


def _scale_table(task: Task, reader: TableReader) -> Task:
    """The same with rows of a table as its reader prepares them, by scales of the training rows."""
    assert isinstance(task.train, Split)
    reader.preparation.learn_scales(task.train.x.numpy())

    def prepared(rows: Any) -> Any:
        return rows and Split(
            torch.from_numpy(reader.preparation.prepare(rows.x.numpy())), rows.y
        )

    rows = {
        name: prepared(getattr(task, name)) for name in ("train", "test", "validation")
    }
    return replace(task, **rows, scaling=Scaling(), reader=reader)


def _moments(
    values: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each column; one that does not vary is divided by one. A few columns at a time where there
    are millions of rows, and without numbers that are not finite, where these are allowed."""
    if values.numel() > _MANY and values.shape[1] > 1:
        means, stds = zip(
            *(_moments(column, dtype) for column in values.split(1, dim=1)), strict=True
        )
        return torch.cat(means), torch.cat(stds)
    wide = values.double()
    if not bool(
        wide.sum(0).isfinite().all()
    ):  # no sum of float32 numbers leaves float64's range
        wide = wide.where(wide.isfinite(), torch.nan)
        mean = wide.nanmean(0)
        std = (wide - mean).square().nanmean(0).sqrt().nan_to_num(0)
        return mean.nan_to_num(0).to(dtype), std.to(dtype).clamp_min(1e-6)
    return wide.mean(0).to(dtype), wide.std(0, correction=0).where(
        wide.amax(0) > wide.amin(0), 1.0
    ).to(dtype)


def _validation(rows: Rows, chosen: Data) -> tuple[Rows, Rows | None]:
    """Rows to train on, and those held out of them if any are asked for."""
    if isinstance(chosen.validation, str):
        raise ValueError(
            f"{chosen.name} is one table without a split {chosen.validation!r}: give a share to hold out."
        )
    return (
        hold_out(rows, "validation", chosen.validation, chosen)
        if chosen.validation
        else (rows, None)
    )


def _scaling(x: Tensor, kind: str) -> Scaling:
    """Moments of training rows, of each feature or channel; of images in pieces, for they may be memory maps."""
    if kind == "standard" and x.is_floating_point() and x.dim() == 2:
        return Scaling(*_moments(x))
    if kind == "unit" or x.dtype != torch.uint8 or x.dim() != 4:
        return Scaling()
    if kind == "signed":
        return Scaling(
            torch.full((x.shape[1], 1, 1), 0.5), torch.full((x.shape[1], 1, 1), 0.5)
        )
    sums, count = (
        torch.zeros(2, x.shape[1], dtype=torch.float64),
        x.numel() // x.shape[1],
    )
    for piece in x.split(5000):
        values = piece.double() / 255
        sums += torch.stack([values.sum((0, 2, 3)), values.square().sum((0, 2, 3))])
    mean, square = sums / count
    std = (square - mean**2).clamp_min(1e-12).sqrt()
    return Scaling(mean.float().view(-1, 1, 1), std.float().view(-1, 1, 1))


# --- crops of full pictures, made where they are decoded ---


@dataclass(frozen=True)
class RandomCrops(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """An image folder in one epoch, cropped from the full pictures, before they become a batch without their sides.

    A row's crop depends on seed, epoch and row alone, not on who decodes it.
    """

    rows: ImageFolder
    crop: Callable[..., Tensor]
    seed: int
    epoch: int

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        cut = self.crop(
            self.rows.paths[index],
            generator=generator(self.seed, "crop", self.epoch, index),
        )
        return cut, int(self.rows.y[index])


def crops_pictures(experiment: Experiment) -> bool:
    """Whether the augmentation crops full pictures of image folders; others act on batches of their centres."""
    return experiment.augment is not None and experiment.augment.kind == "resized_crop"


def pictures(
    rows: ImageFolder, experiment: Experiment, epoch: int
) -> ImageFolder | RandomCrops:
    """What an epoch's loader reads: pictures cropped at random, or as the folder itself reads them."""
    if experiment.augment is None or not crops_pictures(experiment):
        return rows
    crop = partial(read_crop, **experiment.augment.model_dump(exclude={"kind"}))
    return RandomCrops(rows, crop, experiment.seed, epoch)
