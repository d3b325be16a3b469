"""Data sets of other packages: rows as torchvision and Hugging Face give them."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from slimbayes.data.adapters import as_split

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 6, 5, 3), dtype=np.uint8)


class Pairs:
    """torchvision's way: length and items, PIL images unless a transform says otherwise."""

    def __init__(self, transform: Any = None) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> tuple[Any, int]:
        image = Image.fromarray(PIXELS[i])
        return (self.transform(image) if self.transform else image), i % 3


def test_pairs_of_pil_images_and_labels() -> None:
    split = as_split(Pairs())
    assert split.x.dtype == torch.uint8 and torch.equal(split.x, torch.from_numpy(PIXELS).permute(0, 3, 1, 2))
    assert split.y.tolist() == [0, 1, 2, 0] and split.y.dtype == torch.int64


def test_a_transform_is_respected() -> None:
    split = as_split(Pairs(lambda image: torch.from_numpy(np.array(image)).float().mean()))
    torch.testing.assert_close(split.x, torch.from_numpy(PIXELS).float().mean((1, 2, 3)))


def test_dictionaries_with_usual_and_with_other_names() -> None:
    rows = [{"img": Image.fromarray(PIXELS[i, :, :, 0]), "fine_label": i, "note": "x"} for i in range(4)]
    split = as_split(rows)
    assert torch.equal(split.x[:, 0], torch.from_numpy(PIXELS[..., 0])) and split.y.tolist() == [0, 1, 2, 3]
    table = [{"features": [1.0 * i, 2.0], "outcome": 0.5 * i} for i in range(3)]
    split = as_split(table, inputs="features", targets="outcome")
    assert split.x.tolist() == [[0.0, 2.0], [1.0, 2.0], [2.0, 2.0]] and split.y.dtype == torch.float32


def test_a_tensor_dataset() -> None:
    x, y = torch.randn(5, 2), torch.arange(5)
    split = as_split(torch.utils.data.TensorDataset(x, y))
    assert torch.equal(split.x, x) and torch.equal(split.y, y)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "no rows"),
        ([3], "Row 0 must be an"),
        ([{"a": 1, "b": 2}], "keys a, b; say with inputs="),
        ([(torch.zeros(2), 0), (torch.zeros(3), 0)], "Row 1 has an input of shape"),
        ([("text", 0)], "Row 0 has an input of type str"),
        ([(torch.zeros(2), "cat")], "Row 0 has a target of type str"),
    ],
)
def test_rows_that_do_not_fit_are_named(rows: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        as_split(rows)
