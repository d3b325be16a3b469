"""What training reads of image folders: crops of full pictures, made where they are decoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from slimbayes.data.folders import ImageFolder, read_crop
from slimbayes.lab.config import Experiment
from slimbayes.lab.seeds import generator


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
        cut = self.crop(self.rows.paths[index], generator=generator(self.seed, "crop", self.epoch, index))
        return cut, int(self.rows.y[index])


def crops_pictures(experiment: Experiment) -> bool:
    """Whether the augmentation crops full pictures of image folders; others act on batches of their centres."""
    return experiment.augment is not None and experiment.augment.kind == "resized_crop"


def pictures(rows: ImageFolder, experiment: Experiment, epoch: int) -> ImageFolder | RandomCrops:
    """What an epoch's loader reads: pictures cropped at random, or as the folder itself reads them."""
    if experiment.augment is None or not crops_pictures(experiment):
        return rows
    crop = partial(read_crop, **experiment.augment.model_dump(exclude={"kind"}))
    return RandomCrops(rows, crop, experiment.seed, epoch)
