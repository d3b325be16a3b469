"""Shifts: rotations against rot90 and scipy, frequencies against what was asked for."""

import pytest
import torch
from scipy import ndimage, stats

from slimbayes.data import feature_shift, label_shift, rotate


def test_right_angles_are_exact() -> None:
    images = torch.rand(3, 2, 9, 9, dtype=torch.float64)
    for k in range(-1, 5):
        torch.testing.assert_close(rotate(images, 90.0 * k), torch.rot90(images, k, (2, 3)), rtol=0, atol=1e-6)


def test_any_angle_is_that_of_scipy() -> None:
    image = torch.rand(1, 1, 21, 21, dtype=torch.float64)
    ours = rotate(image, 33.0)[0, 0].numpy()
    theirs = ndimage.rotate(image[0, 0].numpy(), 33.0, reshape=False, order=1, mode="constant")
    middle = slice(6, 15)  # whose neighbours all lie inside the image
    assert abs(ours[middle, middle] - theirs[middle, middle]).max() < 1e-6


def test_images_that_are_not_square_keep_their_shape() -> None:
    """A dot at (row, column) from the centre turns as a point of the plane does, whatever the sides."""
    image = torch.zeros(1, 1, 15, 25, dtype=torch.float64)
    image[0, 0, 7, 12 + 5] = 1.0  # five to the right
    turned = rotate(image, 90.0)[0, 0]
    assert turned.argmax() == (7 - 5) * 25 + 12  # five up


def test_every_image_may_have_its_own_angle_and_corners_are_filled() -> None:
    images = torch.ones(2, 1, 8, 8)
    out = rotate(images, torch.tensor([0.0, 45.0]), fill=0.5)
    torch.testing.assert_close(out[0], images[0])
    assert out[1, 0, 0, 0] == pytest.approx(0.5) and out[1, 0, 4, 4] == pytest.approx(1.0)


def test_classes_get_the_frequencies_that_were_asked_for() -> None:
    torch.manual_seed(0)
    labels = torch.randint(3, (500,))
    rows = label_shift(labels, [1.0, 2.0, 5.0], count=8000)
    counts = torch.bincount(labels[rows], minlength=3)
    assert stats.chisquare(counts.numpy(), [1000.0, 2000.0, 5000.0]).pvalue > 1e-4
    within = torch.bincount(rows[labels[rows] == 2], minlength=500)[labels == 2]
    assert stats.chisquare(within.numpy()).pvalue > 1e-4  # rows of a class are equally likely


def test_inputs_move_by_the_strength() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(200_000, 2, generator=generator) * torch.tensor([3.0, 1.0]) + 5.0
    moved = x[feature_shift(x, 0.7, column=0, generator=generator)]
    assert (moved[:, 0].mean() - 5.0) / 3.0 == pytest.approx(0.7, abs=0.05)
    assert moved[:, 0].std() == pytest.approx(3.0, rel=0.05)  # a tilted normal keeps its width
    still = x[feature_shift(x, 0.0, generator=generator)]
    assert still[:, 0].mean() == pytest.approx(5.0, abs=0.05)


def test_without_a_column_the_leading_component_moves() -> None:
    generator = torch.Generator().manual_seed(2)
    common = torch.randn(50_000, 1, generator=generator)
    x = torch.cat(
        [common + 0.1 * torch.randn(50_000, 2, generator=generator), torch.randn(50_000, 1, generator=generator)], 1
    )
    moved = x[feature_shift(x, 1.0, generator=generator)]
    assert moved[:, 0].mean() > 0.85 and moved[:, 1].mean() > 0.85 and abs(moved[:, 2].mean()) < 0.1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: rotate(torch.zeros(3, 4, 4), 1.0), "batch"),
        (lambda: rotate(torch.zeros(1, 3, 4, 4, dtype=torch.uint8), 1.0), "floating-point"),
        (lambda: label_shift(torch.tensor([0, 1]), [-1.0, 1.0]), "numbers from 0 on"),
        (lambda: label_shift(torch.tensor([0, 2]), [0.5, 0.5]), "class indices below 2"),
        (lambda: label_shift(torch.tensor([0, 0]), [0.5, 0.5]), "No row has class 1"),
        (lambda: feature_shift(torch.zeros(5), 1.0), "table"),
        (lambda: feature_shift(torch.rand(5, 2), 1.0, column=2), "column"),
        (lambda: feature_shift(torch.ones(5, 2), 1.0, column=0), "constant"),
    ],
)
def test_bad_input_is_refused_in_words(call, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
