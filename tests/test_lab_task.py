"""Rows, their scaling and their crops."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from lab_configs import BASE, CPU, experiment

from slimbayes.data import Dataset, Split, load, prepare
from slimbayes.data.augment import picture_crop
from slimbayes.lab.config import Data
from slimbayes.lab.config_files import merged, validate
from slimbayes.lab.execution import Nobody
from slimbayes.lab.fit import Training
from slimbayes.lab.task import Scaling, open_task


def test_scaling_and_limits() -> None:
    task = open_task(experiment(data={"train_limit": None, "validation": 0.2}).data)
    assert (len(task.train), len(task.validation or ()), len(task.test)) == (800, 200, 100)
    assert isinstance(task.train, Split)
    scaled = task.scaling(task.train.x)
    assert float(scaled.mean()) == pytest.approx(0, abs=1e-5) and float(scaled.std(correction=0)) == pytest.approx(
        1, abs=1e-5
    )
    assert Scaling()(task.train.x).max() <= 1


def test_tables_of_ones_own_are_standardised() -> None:
    x = torch.randn(40, 3) * torch.tensor([1.0, 50.0, 0.0]) + torch.tensor([0.0, 300.0, 7.0])
    data = Dataset(
        "mine", {"train": Split(x, torch.arange(40) % 2), "test": Split(x[:5], torch.zeros(5, dtype=torch.int64))}
    )
    task = open_task(experiment(data={"name": "mine", "train_limit": None, "test_limit": None}).data, None, data)
    scaled = task.scaling(x)
    torch.testing.assert_close(scaled.mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(scaled.std(0, correction=0), torch.tensor([1.0, 1.0, 0.0]))


def test_a_table_of_ones_own_brings_its_names() -> None:
    rows = Split(torch.randn(6, 2), torch.arange(6) % 2)
    assert open_task(
        Data(name="mine"), None, Dataset("mine", {"train": rows, "test": rows}, columns=("a", "b"))
    ).columns == ("a", "b")


def test_a_cache_keeps_the_names(tmp_path: Path) -> None:
    (tmp_path / "yacht.csv").write_text("a, b,y\n1,2,3\n4,5,6\n")
    fresh = load("uci/yacht", tmp_path)
    prepare("uci/yacht", tmp_path)
    assert fresh.columns == load("uci/yacht", tmp_path).columns == ("a", "b")


def write_wide_pictures(root: Path, count: int = 8) -> None:
    """Pictures of 300 x 900 pixels: black, with a white left and a grey right third."""
    from PIL import Image

    pixels = np.zeros((300, 900, 3), np.uint8)
    pixels[:, :300], pixels[:, 600:] = 255, 128
    for split in ("train", "val"):
        for name in ("a", "b"):
            folder = root / "imagenet" / split / name
            folder.mkdir(parents=True)
            for i in range(count if split == "train" else 1):
                Image.fromarray(pixels).save(folder / f"{i}.png")


def training(root: Path, workers: int = 0) -> Training:
    tree = merged(BASE, {
        "data": {"name": "imagenet", "image_size": 28, "train_limit": None, "test_limit": None},
        "model": {"kind": "small_cnn", "width": 4}, "augment": {"kind": "resized_crop", "size": 28, "flip": False},
        "train": {"epochs": 1, "batch": 8}, "evaluate": {"batch": 2},
    })  # fmt: skip
    execution = replace(CPU, workers=workers, data_dir=root)
    return Training(validate(tree), root, execution, execution.fabric("32"), Nobody(), None, None)


def test_crops_of_a_wide_picture_show_its_sides(tmp_path: Path) -> None:
    write_wide_pictures(tmp_path)
    here = training(tmp_path)
    batches = [x for epoch in range(3) for x, _ in here._batches(epoch, 0)]
    x = torch.cat(batches)
    assert x.dtype == torch.uint8 and x.shape == (48, 3, 28, 28)
    left, right = (x == 255).any(1).flatten(1).any(1), (x == 128).any(1).flatten(1).any(1)
    assert 10 < int(left.sum()) < 48 and 10 < int(right.sum()) < 48
    assert not torch.equal(batches[0], batches[2]), "another epoch, other crops"
    rows, _ = here.stepper.rows((batches[0], torch.zeros(8, dtype=torch.long)))
    assert torch.equal(rows, here.task.scaling(batches[0])), "and none is cropped again"


def test_a_crop_does_not_depend_on_who_decodes_it(tmp_path: Path) -> None:
    write_wide_pictures(tmp_path, count=4)
    alone, helped = (next(training(tmp_path, workers)._batches(0, 0))[0] for workers in (0, 2))
    assert torch.equal(alone, helped)


def test_a_crop_of_all_is_the_picture_shrunk(tmp_path: Path) -> None:
    picture = torch.randint(0, 256, (3, 40, 40), dtype=torch.uint8)
    same = picture_crop(picture, 40, scale=(1.0, 1.0), ratio=(1.0, 1.0), flip=False)
    mirrored = {tuple(picture_crop(picture, 40, (1.0, 1.0), (1.0, 1.0)).flatten().tolist()) for _ in range(20)}
    assert torch.equal(same, picture) and mirrored == {tuple(p.flatten().tolist()) for p in (picture, picture.flip(2))}
    with pytest.raises(ValueError, match="scale"):
        picture_crop(picture, 8, scale=(0.0, 1.0))
