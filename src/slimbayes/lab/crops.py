"""Random crops of decoded pictures, taken before they become a batch of one size that has lost their sides."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slimbayes.data.augment import picture_crop
from slimbayes.data.folders import ImageFolder, decode
from slimbayes.lab.config import Experiment
from slimbayes.lab.seeds import generator


def crops_pictures(experiment: Experiment) -> bool:
    """Whether the augmentation cuts image folders' pictures itself; others act on batches of their centres."""
    return experiment.augment is not None and experiment.augment.kind == "resized_crop"


@dataclass(frozen=True)
class Crops(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """An image folder in one epoch. A row's crop depends on seed, epoch and row alone, not on who decodes it."""

    rows: ImageFolder
    crop: partial[Tensor]
    seed: int
    epoch: int

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        cut = self.crop(decode(self.rows.paths[index]), generator=generator(self.seed, "crop", self.epoch, index))
        return cut, int(self.rows.y[index])


def crops(rows: ImageFolder, experiment: Experiment, epoch: int) -> ImageFolder | Crops:
    """What an epoch's loader reads: pictures cropped at random, or as the folder's own transform leaves them."""
    if not crops_pictures(experiment):
        return rows
    options: dict[str, Any] = experiment.augment.model_dump(exclude={"kind"})
    return Crops(rows, partial(picture_crop, **options), experiment.seed, epoch)
