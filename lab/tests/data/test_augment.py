"""Augmentation: every result is a crop that a slow loop finds, at places that are evenly spread."""

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from slimbayes_lab.data.folders import pad_crop_flip, resized_crop


def numbered(batch: int, height: int = 5, width: int = 6) -> torch.Tensor:
    """Images whose every pixel has a number of its own, from one on."""
    return torch.arange(1, batch * 2 * height * width + 1).view(batch, 2, height, width)


@pytest.mark.parametrize("flip", [False, True])
def test_every_result_is_one_of_the_crops_of_its_padded_image(flip: bool) -> None:
    torch.manual_seed(0)
    images = numbered(200)
    out = pad_crop_flip(images, pad=2, flip=flip)
    assert out.shape == images.shape and out.dtype == images.dtype
    seen = []
    for image, result in zip(images, out, strict=True):
        padded = F.pad(image, (2, 2, 2, 2))
        crops = {
            (i, j, f): padded[:, i : i + 5, j : j + 6].flip(2)
            if f
            else padded[:, i : i + 5, j : j + 6]
            for i in range(5)
            for j in range(5)
            for f in (0, 1)
        }
        found = [key for key, crop in crops.items() if torch.equal(crop, result)]
        assert len(found) == 1
        seen.append(found[0])
    assert {f for *_, f in seen} == ({0, 1} if flip else {0})


def test_places_and_mirrors_are_evenly_spread() -> None:
    torch.manual_seed(1)
    image = torch.zeros(1, 1, 5, 5)
    image[0, 0, 2, 1] = 1.0
    out = pad_crop_flip(image.expand(5000, -1, -1, -1), pad=1)
    where = out.flatten(1).argmax(1)
    counts = torch.bincount(where, minlength=25)
    # Rows 1 to 3 and, with mirrors, columns 0 to 2 and 2 to 4: column 2 is reached both ways.
    expected = torch.zeros(5, 5, dtype=torch.float64)
    for row in (1, 2, 3):
        for column, share in ((0, 1), (1, 1), (2, 2), (3, 1), (4, 1)):
            expected[row, column] = share / 18
    assert not counts[expected.flatten() == 0].any()
    kept = expected.flatten() > 0
    assert (
        stats.chisquare(
            counts[kept].numpy(), 5000 * expected.flatten()[kept].numpy()
        ).pvalue
        > 1e-4
    )


def test_no_padding_and_no_flip_change_nothing() -> None:
    images = numbered(3)
    assert torch.equal(pad_crop_flip(images, pad=0, flip=False), images)


def test_a_generator_decides_alone() -> None:
    images = torch.rand(6, 3, 8, 8)
    one, two = (torch.Generator().manual_seed(5) for _ in range(2))
    torch.manual_seed(0)
    first = pad_crop_flip(images, generator=one)
    torch.manual_seed(1)
    assert torch.equal(first, pad_crop_flip(images, generator=two))
    assert not torch.equal(first, pad_crop_flip(images, generator=two))
    assert torch.equal(
        resized_crop(images, 4, generator=one),
        resized_crop(images, 4, generator=_after(first_uses=2)),
    )


def _after(first_uses: int) -> torch.Generator:
    """A generator in the state that `one` had: it has been used for one batch of crops."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(first_uses - 1):
        pad_crop_flip(torch.rand(6, 3, 8, 8), generator=generator)
    return generator


def test_whole_images_of_their_own_shape_come_back_resized() -> None:
    images = torch.rand(4, 3, 12, 12, dtype=torch.float64)
    out = resized_crop(images, 12, scale=(1.0, 1.0), ratio=(1.0, 1.0), flip=False)
    torch.testing.assert_close(out, images, rtol=0, atol=1e-6)
    larger = resized_crop(images, 30, scale=(1.0, 1.0), ratio=(1.0, 1.0), flip=False)
    torch.testing.assert_close(
        larger, F.interpolate(images, size=30, mode="bilinear"), rtol=0, atol=1e-6
    )


@pytest.mark.slow
def test_every_result_is_a_crop_that_interpolate_would_resize() -> None:
    torch.manual_seed(2)
    images = torch.rand(12, 1, 7, 9, dtype=torch.float64)
    out = resized_crop(images, 5, scale=(0.2, 0.8))
    for image, result in zip(images, out, strict=True):
        best = float("inf")
        for top in range(7):
            for left in range(9):
                for bottom in range(top + 1, 8):
                    for right in range(left + 1, 10):
                        crop = F.interpolate(
                            image[None, :, top:bottom, left:right],
                            size=5,
                            mode="bilinear",
                        )[0]
                        best = min(
                            best,
                            float((crop - result).abs().max()),
                            float((crop.flip(2) - result).abs().max()),
                        )
        assert best < 1e-5


@pytest.mark.slow
def test_areas_and_shapes_are_those_asked_for() -> None:
    """The gradient of a ramp tells how much of the image a crop shows."""
    torch.manual_seed(3)
    ramp = torch.linspace(0, 1, 100).view(1, 1, 1, 100).expand(1000, 1, 100, 100)
    both = torch.cat([ramp, ramp.transpose(2, 3)], 1).contiguous()
    out = resized_crop(both, 50, scale=(0.25, 0.25), ratio=(0.5, 2.0), flip=False)
    wide = (out[:, 0, 0, -2] - out[:, 0, 0, 1]) / 47 * 50
    tall = (out[:, 1, -2, 0] - out[:, 1, 1, 0]) / 47 * 50
    assert (wide * tall).mean() == pytest.approx(0.25, rel=0.05)
    ratio = (wide / tall).log2()
    assert ratio.min() > -1.1 and ratio.max() < 1.1
    assert stats.kstest(ratio.numpy(), stats.uniform(-1, 2).cdf).statistic < 0.05


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: pad_crop_flip(torch.rand(3, 8, 8)), "batch"),
        (lambda: pad_crop_flip(torch.rand(1, 3, 8, 8), pad=-1), "pad"),
        (lambda: resized_crop(torch.rand(1, 3, 8, 8), 4, scale=(0.0, 1.0)), "scale"),
        (lambda: resized_crop(torch.rand(1, 3, 8, 8), 4, ratio=(2.0, 1.0)), "ratio"),
    ],
)
def test_bad_input_is_refused_in_words(call, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        call()


def test_integers_cannot_be_resized() -> None:
    with pytest.raises(TypeError, match="divide by 255"):
        resized_crop(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), 4)
