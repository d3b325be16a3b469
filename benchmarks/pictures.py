"""Images per second of ImageNet-like folders: the lab's training and test pictures beside torchvision's pipeline.

    python benchmarks/pictures.py --pictures 50000 --workers 1 --out lab/results/benchmarks/pictures.json

Pictures of 500 x 375 pixels are written as JPEG files into ten class folders, then read by a DataLoader of the same
batches and workers: `RandomResizedCrop(224)` and a flip, and `Resize(256)`, `CenterCrop(224)`. Pipelines take turns on
ten slices of the folder, each goes first in every other one, and files are read once before, so that neither the disk
nor what else the machine does favours one. `--each` reads only so many of a slice. The third pipeline is what one
writes with Pillow alone: convert, crop, resize, transpose, array. Without torchvision the lab is timed beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image
from slimbayes_lab.configs.files import validate
from slimbayes_lab.data.folders import ImageFolder, read_square
from slimbayes_lab.tasks.task import pictures
from torch.utils.data import DataLoader, Subset

SIZE, BATCH, DISTINCT = 224, 100, 200


def write_pictures(folder: Path, count: int) -> None:
    """Smooth noise with grain, some 60 kB each; so many files, of `DISTINCT` contents."""
    rng = np.random.default_rng(0)
    stored = []
    for _ in range(min(count, DISTINCT)):
        coarse = Image.fromarray(
            rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        ).resize((500, 375))
        grain = np.asarray(coarse, np.int16) + rng.integers(
            -8, 9, (375, 500, 3), dtype=np.int16
        )
        file = folder / "one.jpg"
        Image.fromarray(grain.clip(0, 255).astype(np.uint8)).save(file, quality=85)
        stored.append(file.read_bytes())
    file.unlink()
    for i in range(count):
        place = folder / f"n{i % 10:02}" / f"{i:06}.JPEG"
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(stored[i % len(stored)])


def ours(folder: Path) -> dict[str, Any]:
    """Data sets of the lab: an epoch's random crops, and test squares."""
    rows = ImageFolder(folder)
    tree = {
        "name": "timing", "data": {"name": "imagenet"}, "model": {"kind": "resnet50"}, "method": {"kind": "Rank1"},
        "augment": {"kind": "resized_crop", "size": SIZE}, "train": {"epochs": 1, "optimizer": {"kind": "SGD"}},
    }  # fmt: skip
    test = ImageFolder(folder)
    test.read = partial(read_square, size=SIZE, share=7 / 8)
    return {"train": pictures(rows, validate(tree), 0), "test": test}


def torchvisions(folder: Path) -> dict[str, Any]:
    """The same two of torchvision, as its reference scripts have them; none without torchvision."""
    try:
        from torchvision import datasets, transforms  # type: ignore[import-not-found]
    except ModuleNotFoundError:
        return {}
    crop = [transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip()]
    centre = [transforms.Resize(256), transforms.CenterCrop(SIZE)]
    made = {}
    for name, steps in (("train", crop), ("test", centre)):
        made[name] = datasets.ImageFolder(
            str(folder), transforms.Compose([*steps, transforms.PILToTensor()])
        )
    return made


class WithPillow(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """The same crops by hand: Pillow's calls one after another, and torch's random numbers."""

    def __init__(self, folder: Path, random: bool) -> None:
        rows = ImageFolder(folder)
        self.paths, self.y, self.random = rows.paths, rows.y.tolist(), random

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        picture = Image.open(self.paths[index]).convert("RGB")
        picture = _random_crop(picture) if self.random else _centre(picture)
        return torch.from_numpy(np.array(picture)).permute(
            2, 0, 1
        ).contiguous(), self.y[index]


def _random_crop(picture: Image.Image) -> Image.Image:
    width, height = picture.size
    for _ in range(10):
        area, shape, *corner, side = torch.rand(5).tolist()
        area, shape = (0.08 + 0.92 * area) * width * height, (3 / 4) * (16 / 9) ** shape
        wide, tall = round((area * shape) ** 0.5), round((area / shape) ** 0.5)
        if wide <= width and tall <= height:
            left, top = (
                int(corner[0] * (width - wide + 1)),
                int(corner[1] * (height - tall + 1)),
            )
            cut = picture.crop((left, top, left + wide, top + tall)).resize(
                (SIZE, SIZE), Image.Resampling.BILINEAR
            )
            return cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if side < 0.5 else cut
    return _centre(picture)


def _centre(picture: Image.Image) -> Image.Image:
    width, height = picture.size
    ratio = 256 / min(width, height)
    small = picture.resize(
        (round(width * ratio), round(height * ratio)), Image.Resampling.BILINEAR
    )
    left, top = (small.width - SIZE) // 2, (small.height - SIZE) // 2
    return small.crop((left, top, left + SIZE, top + SIZE))


def by_hand(folder: Path) -> dict[str, Any]:
    return {"train": WithPillow(folder, True), "test": WithPillow(folder, False)}


def rate(rows: Any, index: range, workers: int) -> float:
    """Images per second of some rows, the loader's start included."""
    start, seen = time.perf_counter(), 0
    for x, _ in DataLoader(Subset(rows, index), BATCH, num_workers=workers):
        seen += len(x)
    return seen / (time.perf_counter() - start)


def measure(
    folder: Path, count: int, workers: int, each: int | None, slices: int = 10
) -> dict[str, Any]:
    """Medians over slices, by pipeline and purpose, and their ratios."""
    found: dict[str, dict[str, list[float]]] = {}
    makers: dict[str, Callable[[Path], dict[str, Any]]] = {
        "slimbayes": ours, "torchvision": torchvisions, "pillow": by_hand,
    }  # fmt: skip
    sets = {name: make(folder) for name, make in makers.items()}
    part = max(1, count // slices)
    for number in range(slices):
        index = range(number * part, number * part + min(part, each or part))
        for i in index:
            sets["slimbayes"]["test"].paths[i].read_bytes()
        for purpose in ("train", "test"):
            for name, made in list(sets.items())[:: 1 if number % 2 else -1]:
                if purpose in made:
                    got = rate(made[purpose], index, workers)
                    found.setdefault(purpose, {}).setdefault(name, []).append(got)
    out: dict[str, Any] = {
        p: {name: round(median(r), 1) for name, r in by.items()}
        for p, by in found.items()
    }
    for by in out.values():
        by |= {
            f"slimbayes/{name}": round(by["slimbayes"] / value, 3)
            for name, value in by.items()
            if name in makers
        }
        del by["slimbayes/slimbayes"]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--pictures", type=int, default=50_000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--each", type=int, help="pictures that are read of each tenth; by default all"
    )
    parser.add_argument(
        "--folder", type=Path, help="where pictures are, or are written and kept"
    )
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not any(folder.iterdir()):
            write_pictures(folder, chosen.pictures)
        about = {
            "pictures": chosen.pictures, "each": chosen.each, "workers": chosen.workers,
            "cores": len(os.sched_getaffinity(0)), "machine": platform.machine(),
            "torch": torch.__version__, "pillow": version("pillow"),
        }  # fmt: skip
        found = about | {
            "images_per_second": measure(
                folder, chosen.pictures, chosen.workers, chosen.each
            )
        }
    print(json.dumps(found, indent=1))
    if chosen.out:
        chosen.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
