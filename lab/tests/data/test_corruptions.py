"""Corruptions against slow NumPy, SciPy, Pillow and colorsys versions on the same draws, or against their moments
(F40)."""

import colorsys
import io
import itertools
import math
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from covering import each, pairwise
from PIL import Image
from scipy import ndimage
from slimbayes_lab.data import CORRUPTIONS, corrupt
from slimbayes_lab.data.corruptions import STRENGTHS, effects, filters, weather
from slimbayes_lab.data.corruptions.filters import RandomNumbers
from torch import Tensor

FIXED = (
    "defocus_blur",
    "zoom_blur",
    "brightness",
    "contrast",
    "pixelate",
    "jpeg_compression",
)
SHARED = Path(
    os.environ.get("SLIMBAYES_DATA", Path(__file__).parents[4] / "shared" / "data")
)
COLOURS = ((200, 10, 30), (10, 200, 30), (10, 30, 200), (90, 90, 90), (250, 240, 5))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def pictures(
    batch: int = 4, channels: int = 3, height: int = 32, width: int = 32
) -> Tensor:
    """Smooth shapes with some grain and full range, as bytes / 255."""
    grain = torch.randn(
        batch, channels, height, width, generator=seeded(7), device="cpu"
    )
    x = filters.gaussian(grain, 2.0) * 4 + 0.3 * filters.gaussian(grain, 0.6)
    x = (0.5 + 0.22 * x).clamp(0, 1)
    return (torch.round(x * 255) / 255).to(torch.get_default_device())


def numpy(x: Tensor) -> np.ndarray:
    return x.double().cpu().numpy()


def bytes_of(x: Tensor) -> np.ndarray:
    return np.round(numpy(x).transpose(1, 2, 0) * 255).astype(np.uint8)


class Recorded(RandomNumbers):
    """Keeps what it drew, for a slow version to use again."""

    def _keep(self, value: Tensor) -> Tensor:
        self.__dict__.setdefault("log", []).append(numpy(value))
        return value

    def normal(self, *shape: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
        return self._keep(super().normal(*shape, mean=mean, std=std))

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return self._keep(super().uniform(*shape, low=low, high=high))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five frost photos of one colour each and a sixth that must never be used."""
    folder = tmp_path_factory.mktemp("data") / "frost"
    folder.mkdir()
    for name, colour in zip((*weather.PHOTOS, "frost6.jpg"), (*COLOURS, (0, 0, 0))):
        Image.new("RGB", (300, 240), colour).save(
            folder / name, **({"quality": 100} if name.endswith("jpg") else {})
        )
    return folder


# F40: what holds for all --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_shape_dtype_range_levels_and_seed(name: str, photos: Path) -> None:
    for height, width, style in (
        (32, 32, None),
        (70, 45, None),
        (32, 32, "imagenet"),
        (70, 45, "cifar"),
    ):
        x = pictures(4, 3, height, width)
        before = x.clone()
        for severity in range(1, 6):
            y = corrupt(x, name, severity, seeded(severity), style, photos)
            assert (
                y.shape == x.shape
                and y.dtype == x.dtype
                and y.device == x.device
                and y.is_contiguous()
            )
            assert float(y.min()) >= 0 and float(y.max()) <= 1
            torch.testing.assert_close(y * 255, torch.round(y * 255), atol=1e-4, rtol=0)
            assert y.equal(corrupt(x, name, severity, seeded(severity), style, photos))
        assert x.equal(before)
    other = corrupt(x, name, 5, seeded(99), style, photos)
    assert other.equal(y) == (name in FIXED)


@pytest.mark.parametrize(("name", "style"), each(CORRUPTIONS, ["cifar", "imagenet"]))
def test_images_get_their_own_randomness(name: str, style: str, photos: Path) -> None:
    x = pictures(1).expand(12, -1, -1, -1)
    y = corrupt(x, name, 5, seeded(), style, photos)  # type: ignore[arg-type]
    apart = [not y[i].equal(y[0]) for i in range(1, 12)]
    assert (
        not any(apart) if name in FIXED else sum(apart) >= 6
    )  # frost may draw the same photo


@pytest.mark.slow
@pytest.mark.parametrize(
    ("style", "name"),
    each(
        ["cifar", "imagenet"],
        [
            "gaussian_noise",
            "shot_noise",
            "impulse_noise",
            "defocus_blur",
            "motion_blur",
            "zoom_blur",
            "contrast",
            "brightness",
            "jpeg_compression",
            "pixelate",
        ],
    ),
)
def test_change_grows_with_severity(name: str, style: str) -> None:
    x = pictures(16, 3, 64, 64)
    change = [
        float((corrupt(x, name, s, seeded(), style, quantize=False) - x).abs().mean())  # type: ignore[arg-type]
        for s in range(1, 6)
    ]
    # Pixelate keeps int(64 c) of 64 pixels: where that divides evenly images suffer less, whatever c says. CIFAR's
    # motion blurs 3 and 4 differ in radius alone, which at that sigma is hardly felt.
    slack = {"pixelate": 0.75, "motion_blur": 0.99}.get(name, 1.0)
    assert all(b > slack * a > 0 for a, b in itertools.pairwise(change)), change
    assert change[-1] > 1.2 * change[0]


@pytest.mark.parametrize("name", FIXED)
def test_batch_equals_images_one_by_one(name: str) -> None:
    x = pictures(5)
    for severity in (1, 5):
        singly = torch.cat(
            [corrupt(image, name, severity, quantize=False) for image in x.split(1)]
        )
        torch.testing.assert_close(
            corrupt(x, name, severity, quantize=False), singly, atol=1e-6, rtol=0
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype, photos: Path) -> None:
    x = pictures(2)
    for name in CORRUPTIONS:
        y = corrupt(x.to(dtype), name, 3, seeded(), frost_folder=photos)
        assert y.dtype == dtype and bool(((y >= 0) & (y <= 1)).all())
        if name in FIXED and dtype == torch.float16:  # fine enough to tell bytes apart
            assert float((y.float() - corrupt(x, name, 3)).abs().max()) < 2.6 / 255


def test_autocast_empty_batches_and_strides_do_not_matter() -> None:
    x = pictures(2)
    for name in ("defocus_blur", "jpeg_compression", "zoom_blur"):
        with torch.autocast(x.device.type, torch.bfloat16):
            assert corrupt(x, name, 3).equal(corrupt(x, name, 3))
            inside = corrupt(x, name, 3)
        assert inside.equal(corrupt(x, name, 3))
        assert corrupt(x.to(memory_format=torch.channels_last), name, 3).equal(inside)
        assert corrupt(x[:0], name, 3).shape == (0, 3, 32, 32)
    assert not corrupt(x.requires_grad_(), "contrast", 1).requires_grad


def test_style_follows_the_size() -> None:
    for side, style in ((64, "cifar"), (65, "imagenet")):
        x = pictures(1, 3, side, 40)
        assert corrupt(x, "contrast", 2).equal(corrupt(x, "contrast", 2, style=style))  # type: ignore[arg-type]


def test_quantize_rounds_down() -> None:
    x = pictures(2)
    fine = corrupt(x, "zoom_blur", 5, quantize=False)
    gap = (fine - corrupt(x, "zoom_blur", 5)) * 255
    assert float(gap.min()) > -2e-3 and 0.9 < float(gap.max()) < 1.001
    levels = torch.arange(256) / 255
    assert torch.equal(
        torch.round(filters.truncate_levels(levels) * 255), torch.arange(256.0)
    )


def test_every_name_has_five_strengths_in_both_styles() -> None:
    assert len(set(CORRUPTIONS)) == 15
    for table in STRENGTHS.values():
        assert set(table) == set(CORRUPTIONS) and all(
            len(rows) == 5 for rows in table.values()
        )


# Noise: moments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("style", "severity"), each(["cifar", "imagenet"], [1, 2, 3, 4, 5])
)
def test_noise_has_the_stated_moments(style: str, severity: int) -> None:
    def run(name: str, level: float) -> Tensor:
        return corrupt(
            torch.full((20, 3, 64, 64), level),
            name,
            severity,
            seeded(severity),
            style,
            quantize=False,
        )  # type: ignore[arg-type]

    def strength(name: str) -> float:
        return STRENGTHS[style][name][severity - 1][0]  # type: ignore[index]

    std = strength("gaussian_noise")
    y = run("gaussian_noise", 0.5)
    inside = math.erf(0.5 / std / 2**0.5)  # what the clip leaves alone
    if std < 0.15:  # clipping cannot be felt
        assert (
            abs(float(y.std()) / std - 1) < 0.01 and abs(float(y.mean()) - 0.5) < 0.002
        )
    assert abs(float(((y > 0) & (y < 1)).double().mean()) - inside) < 0.005
    photons = strength("shot_noise")
    y = run("shot_noise", 0.2)
    counts = y * photons
    torch.testing.assert_close(counts, counts.round(), atol=1e-4, rtol=0)
    if photons >= 12:  # fewer photons: the clip at 1 bites
        assert (
            abs(float(y.var()) / (0.2 / photons) - 1) < 0.02
            and abs(float(y.mean()) - 0.2) < 0.002
        )
    y = run("impulse_noise", 0.5)
    amount = strength("impulse_noise")
    for value in (0.0, 1.0):
        assert abs(float((y == value).double().mean()) - amount / 2) < 0.002
    assert bool(((y == 0) | (y == 1) | (y == 0.5)).all())


# Blurs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["cifar", "imagenet"])
def test_defocus_blur_against_scipy(style: str) -> None:
    x = pictures(2, 3, 40, 33)
    for severity in range(1, 6):
        radius, alias = STRENGTHS[style]["defocus_blur"][severity - 1]  # type: ignore[index]
        reach, soft = (8, 1) if radius <= 8 else (radius, 2)
        row = np.arange(-reach, reach + 1)
        disk = (row[:, None] ** 2 + row**2 <= radius**2).astype(float)
        bell = np.exp(-(np.arange(-soft, soft + 1) ** 2) / (2 * alias**2))
        bell /= bell.sum()
        kernel = ndimage.correlate(
            disk / disk.sum(), np.outer(bell, bell), mode="mirror"
        )
        want = ndimage.correlate(numpy(x), kernel[None, None], mode="mirror")
        got = corrupt(x, "defocus_blur", severity, style=style, quantize=False)  # type: ignore[arg-type]
        np.testing.assert_allclose(numpy(got), want.clip(0, 1), atol=5e-6)


def test_smoothing_wider_than_the_image_reflects_many_times() -> None:
    x = pictures(1, 1, 20, 13)
    want = ndimage.gaussian_filter(numpy(x)[0, 0], 17.0, mode="reflect", truncate=3)
    np.testing.assert_allclose(
        numpy(filters.gaussian(x, 17.0, "reflect", 3.0))[0, 0], want, atol=1e-6
    )


@pytest.mark.parametrize("size", [32, 45, 224])
def test_zoom_against_scipy(size: int) -> None:
    line = np.random.default_rng(0).random(size)
    factors = {
        f for table in STRENGTHS.values() for rows in table["zoom_blur"] for f in rows
    }
    for factor in sorted(factors | {1.75, 2.25, 3.0, 4.5}):
        crop = int(np.ceil(size / factor))
        start = (size - crop) // 2
        grown = ndimage.zoom(line[start : start + crop], factor, order=1)
        trim = (len(grown) - size) // 2
        want = grown[trim : trim + size]
        np.testing.assert_allclose(
            filters.zoom_matrix(size, factor).numpy() @ line,
            want,
            atol=1e-12,
            err_msg=str(factor),
        )


def test_zoom_blur_takes_numpys_factors() -> None:
    for stop, rows in zip(
        (1.06, 1.11, 1.16, 1.21, 1.26), STRENGTHS["cifar"]["zoom_blur"]
    ):
        np.testing.assert_array_equal(rows, np.arange(1, stop, 0.01))
    large = ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03))
    for (stop, step), rows in zip(large, STRENGTHS["imagenet"]["zoom_blur"]):
        np.testing.assert_array_equal(rows, np.arange(1, stop, step))
    x = pictures(1)
    factors = STRENGTHS["cifar"]["zoom_blur"][0]
    want = (x + sum(filters.zoom(x, f) for f in factors)) / (len(factors) + 1)
    torch.testing.assert_close(corrupt(x, "zoom_blur", 1, quantize=False), want)


@pytest.mark.parametrize("reach", [1, 2, 4])
def test_glass_moves_against_numpys_swap(reach: int) -> None:
    size = (20, 27)
    down, right = torch.randint(
        -reach, reach, (2, 3, *size), generator=seeded(reach), device="cpu"
    )
    image = np.random.default_rng(0).integers(0, 256, (*size, 3)).astype(np.uint8)
    for i in range(3):
        want = image.copy()
        for h in range(size[0] - reach, reach, -1):
            for w in range(size[1] - reach, reach, -1):
                h2, w2 = h + int(down[i, h, w]), w + int(right[i, h, w])
                want[h, w], want[h2, w2] = (
                    want[h2, w2],
                    want[h, w],
                )  # on views: the quirk
        index = effects.moved(down, right, reach)[i].numpy()
        np.testing.assert_array_equal(image.reshape(-1, 3)[index], want)


def slow_motion(x: np.ndarray, radius: int, sigma: float, angle: float) -> np.ndarray:
    weights = np.exp(-(np.arange(2 * radius + 1) ** 2) / (2 * sigma**2))
    out = np.zeros_like(x)
    far = 2 * radius + 1
    padded = np.pad(x, far, mode="edge")
    for i, weight in enumerate(weights / weights.sum()):
        dy, dx = (-int(np.ceil(i * f(angle) - 0.5)) for f in (np.sin, np.cos))
        out += (
            weight
            * padded[far - dy : far - dy + x.shape[0], far - dx : far - dx + x.shape[1]]
        )
    return out


def test_motion_against_a_loop() -> None:
    x = pictures(4, 2, 24, 31)
    angle = torch.tensor([-0.7, 0.0, 0.33, -2.1])
    for radius, sigma in ((6, 1.5), (20, 15.0)):
        got = numpy(filters.motion(x, radius, sigma, angle))
        for i, c in np.ndindex(4, 2):
            np.testing.assert_allclose(
                got[i, c],
                slow_motion(numpy(x)[i, c], radius, sigma, float(angle[i])),
                atol=1e-6,
            )


def test_motion_angles_fill_their_ranges() -> None:
    x = torch.zeros(400, 1, 4, 4)
    for function, name, low, high in (
        (effects.motion_blur, "motion_blur", -45, 45),
        (weather.snow, "snow", -135, -45),
    ):
        draw = Recorded(x, seeded())
        function(x, draw, *STRENGTHS["cifar"][name][0])
        angle = draw.log[-1]  # type: ignore[attr-defined]
        assert (
            angle.shape == (400,)
            and low <= angle.min() < low + 2
            and high - 2 < angle.max() <= high
        )


# Weather ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("severity", [1, 3, 5])
def test_snow_against_scipy(severity: int) -> None:
    x = pictures(3)
    draw = Recorded(x, seeded())
    got = numpy(weather.snow(x, draw, *STRENGTHS["cifar"]["snow"][severity - 1]))
    field, angle = draw.log  # type: ignore[attr-defined]
    _, _, factor, threshold, radius, sigma, mix = STRENGTHS["cifar"]["snow"][
        severity - 1
    ]
    crop = int(np.ceil(32 / factor))
    start = (32 - crop) // 2
    for i in range(3):
        grown = ndimage.zoom(
            field[i, 0, start : start + crop, start : start + crop], factor, order=1
        )
        trim = (len(grown) - 32) // 2
        flakes = grown[trim : trim + 32, trim : trim + 32]
        flakes = (
            np.floor(np.where(flakes < threshold, 0, flakes).clip(0, 1) * 255) / 255
        )
        flakes = (
            np.round(
                slow_motion(flakes, int(radius), sigma, np.deg2rad(angle[i])) * 255
            )
            / 255
        )
        image = numpy(x)[i]
        gray = 0.299 * image[0] + 0.587 * image[1] + 0.114 * image[2]
        want = (
            mix * image
            + (1 - mix) * np.maximum(image, gray * 1.5 + 0.5)
            + flakes
            + np.rot90(flakes, 2)
        )
        assert (
            np.mean(np.abs(got[i] - want) > 1e-5) < 0.01
            and np.abs(got[i] - want).max() < 2.1 / 255
        )  # ties of rounding


def test_plasma_against_a_loop() -> None:
    side, decay = 16, 1.75
    draw = Recorded(torch.zeros(1, dtype=torch.float64), seeded())
    got = numpy(weather.plasma(draw, 2, side, decay))
    log = iter(draw.log)  # type: ignore[attr-defined]
    clouds, step, wibble = np.zeros((2, side, side)), side, 100.0
    while step >= 2:
        half, n = step // 2, side // step
        for (top, left), around in (
            (
                (half, half),
                ((-half, -half), (-half, half), (half, -half), (half, half)),
            ),
            ((0, half), ((-half, 0), (half, 0), (0, -half), (0, half))),
            ((half, 0), ((-half, 0), (half, 0), (0, -half), (0, half))),
        ):
            noise = next(log)
            assert np.abs(noise).max() <= wibble**2 and (
                n < 8 or np.abs(noise).max() > 0.9 * wibble**2
            )
            for b, i, j in np.ndindex(2, n, n):
                y, x = top + i * step, left + j * step
                near = [
                    clouds[b, (y + dy) % side, (x + dx) % side] for dy, dx in around
                ]
                clouds[b, y, x] = np.mean(near) + noise[b, i, j]
        step, wibble = half, wibble / decay
    clouds -= clouds.min((1, 2), keepdims=True)
    np.testing.assert_allclose(
        got, clouds / clouds.max((1, 2), keepdims=True), atol=1e-12
    )


@pytest.mark.parametrize("style", ["cifar", "imagenet"])
def test_fog_keeps_each_image_below_its_maximum(style: str) -> None:
    x = pictures(6) * torch.linspace(0.2, 1, 6).view(-1, 1, 1, 1)
    for severity in range(1, 6):
        amount = STRENGTHS[style]["fog"][severity - 1][0]  # type: ignore[index]
        y = corrupt(x, "fog", severity, seeded(), style, quantize=False)  # type: ignore[arg-type]
        top = x.amax((1, 2, 3))
        assert bool((y.amax((1, 2, 3)) <= top * (1 + 1e-6)).all())
        cloud = (
            y * ((top + amount) / top).view(-1, 1, 1, 1) - x
        ) / amount  # the same for all channels
        assert float(cloud.min()) > -1e-4 and float(cloud.max()) < 1.0001
        assert float((cloud - cloud[:, :1]).abs().max()) < 1e-3


def test_frost_blends_with_one_of_five_photos(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = pictures(60)
    image, photo, _ = STRENGTHS["cifar"]["frost"][3]
    y = corrupt(x, "frost", 4, seeded(), frost_folder=photos, quantize=False)
    wanted = torch.tensor(COLOURS).view(5, 1, 3, 1, 1) / 255 * photo + image * x
    gaps = (y - wanted.clamp(0, 1)).abs().amax((2, 3, 4))  # (photo, image)
    assert float(gaps.amin(0).max()) < 2 * photo / 255  # two photos are JPEG files
    assert gaps.argmin(0).unique().numel() == 5
    monkeypatch.setenv("SLIMBAYES_DATA", str(photos.parent))
    assert corrupt(x, "frost", 4, seeded(), quantize=False).equal(y)


def test_frost_crops_are_whole_pieces_at_random_places() -> None:
    photo = torch.arange(40.0 * 50).view(1, 40, 50).expand(3, -1, -1)
    place = torch.rand(500, 2)
    place[0], place[1] = 0.0, 0.99999999
    crops = weather._crops(photo, place, 32, 24)
    start = crops[:, 0, 0, 0].long()
    rows, columns = start // 50, start % 50
    assert set(rows.tolist()) == set(range(8)) and set(columns.tolist()) == set(
        range(26)
    )  # the last start is never drawn
    for i in (0, 1, 7):
        assert crops[i].equal(
            photo[:, rows[i] : rows[i] + 32, columns[i] : columns[i] + 24]
        )


def test_frost_covers_images_larger_than_the_photos(photos: Path) -> None:
    x = pictures(2, 3, 260, 310)
    assert corrupt(x, "frost", 1, seeded(), frost_folder=photos).shape == x.shape


def test_frost_says_which_photos_are_missing(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLIMBAYES_DATA", raising=False)
    with pytest.raises(
        FileNotFoundError,
        match=r"frost1\.png.*frost_folder=.*SLIMBAYES_DATA/frost; it is not set",
    ):
        corrupt(pictures(1), "frost", 1)
    (tmp_path / "frost1.png").write_bytes((photos / "frost1.png").read_bytes())
    with pytest.raises(
        FileNotFoundError,
        match=r"lacks frost2\.png, frost3\.png, frost4\.jpg, frost5\.jpg",
    ):
        corrupt(pictures(1), "frost", 1, frost_folder=tmp_path)


def colours() -> Tensor:
    """Random colours, with black, white, gray, the primaries and their mixtures, as images (1, 3, 24, 24)."""
    corners = torch.tensor([[i >> 2 & 1, i >> 1 & 1, i & 1] for i in range(8)]).float()
    some = torch.cat([corners, corners * 0.5, torch.rand(560, 3)])
    return some.T.reshape(1, 3, 24, 24)


@pytest.mark.parametrize("style", ["cifar", "imagenet"])
def test_brightness_against_colorsys(style: str) -> None:
    x = colours()
    for severity in range(1, 6):
        (more,) = STRENGTHS[style]["brightness"][severity - 1]  # type: ignore[index]
        want = []
        for rgb in numpy(x)[0].reshape(3, -1).T:
            h, s, v = colorsys.rgb_to_hsv(*rgb)
            want.append(colorsys.hsv_to_rgb(h, s, min(v + more, 1)))
        got = corrupt(x, "brightness", severity, style=style, quantize=False)  # type: ignore[arg-type]
        np.testing.assert_allclose(numpy(got)[0].reshape(3, -1).T, want, atol=2e-6)


# Digital ------------------------------------------------------------------------------------------------------------


def test_contrast_keeps_channel_means_and_scales_deviations() -> None:
    x = pictures(4)
    for severity, factor in enumerate((0.75, 0.5, 0.4, 0.3, 0.15), 1):
        y = corrupt(x, "contrast", severity, quantize=False)
        torch.testing.assert_close(y.mean((2, 3)), x.mean((2, 3)), atol=1e-5, rtol=0)
        torch.testing.assert_close(
            y.std((2, 3)), factor * x.std((2, 3)), atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("border", ["reflect", "mirror", "nearest"])
def test_bilinear_against_scipy(border: str) -> None:
    x = pictures(2, 2, 17, 23).double()
    rows, columns = (
        torch.rand(2, 2, 17, 23, dtype=torch.float64) * 60 - 20
    )  # far outside on every side
    got = numpy(filters.bilinear(x, rows, columns, border))  # type: ignore[arg-type]
    for i, c in np.ndindex(2, 2):
        at = [numpy(rows[i]), numpy(columns[i])]
        np.testing.assert_allclose(
            got[i, c],
            ndimage.map_coordinates(numpy(x)[i, c], at, order=1, mode=border),
            atol=1e-9,
        )


@pytest.mark.parametrize("style", ["cifar", "imagenet"])
@pytest.mark.parametrize("size", [(32, 32), (40, 54)])
def test_elastic_against_scipy(style: str, size: tuple[int, int]) -> None:
    x = pictures(2, 3, *size).double()
    for severity in range(1, 6):
        draw = Recorded(x, seeded(severity))
        strength = STRENGTHS[style]["elastic_transform"][severity - 1]  # type: ignore[index]
        got = numpy(effects.elastic_transform(x, draw, *strength))
        offsets, fields = draw.log  # type: ignore[attr-defined]
        scale = min(size) * (244 / 224 if style == "imagenet" else 1)
        alpha, sigma, affine = (scale * c for c in strength[:3])
        assert 0.5 * affine < np.abs(offsets).max() <= affine
        for i in range(2):
            middle, side = np.array([size[0] // 2, size[1] // 2]), min(size) // 3
            corners = np.array(
                [middle + side, [middle[0] + side, middle[1] - side], middle - side],
                float,
            )
            ones = np.ones((3, 1))
            back = np.linalg.solve(
                np.hstack([corners + offsets[i], ones]), corners
            )  # new (x, y, 1) -> old (x, y)
            swap = back[[1, 0, 2]][:, ::-1]  # the same for (row, column)
            smooth = [
                f
                if sigma == 0
                else ndimage.gaussian_filter(f, sigma, mode="reflect", truncate=3)
                for f in fields[:, i]
            ]
            at = np.mgrid[: size[0], : size[1]] + alpha * np.array(smooth)
            for c in range(3):
                warped = ndimage.affine_transform(
                    numpy(x)[i, c], swap[:2].T, swap[2], order=1, mode="mirror"
                )
                want = ndimage.map_coordinates(warped, at, order=1, mode="reflect")
                np.testing.assert_allclose(got[i, c], want, atol=1e-8)


@pytest.mark.parametrize(
    ("style", "size"), each(["cifar", "imagenet"], [(32, 32), (45, 70), (224, 224)])
)
def test_pixelate_equals_pillow(style: str, size: tuple[int, int]) -> None:
    x = pictures(2, 3, *size)
    for severity in range(1, 6):
        (factor,) = STRENGTHS[style]["pixelate"][severity - 1]  # type: ignore[index]
        got = corrupt(x, "pixelate", severity, style=style)  # type: ignore[arg-type]
        for i in range(2):
            small = Image.fromarray(bytes_of(x[i])).resize(
                (int(size[1] * factor), int(size[0] * factor)), Image.Resampling.BOX
            )
            want = np.asarray(small.resize(size[::-1], Image.Resampling.BOX))
            np.testing.assert_array_equal(bytes_of(got[i]), want)


@pytest.mark.parametrize(
    ("style", "size", "channels"),
    pairwise(["cifar", "imagenet"], [(32, 32), (40, 33), (23, 50), (9, 46)], [1, 3]),
)
def test_jpeg_equals_pillow(style: str, size: tuple[int, int], channels: int) -> None:
    x = pictures(4, channels, *size)
    x[1] = torch.round(torch.rand_like(x[1]) * 255) / 255
    for severity in range(1, 6):
        (quality,) = STRENGTHS[style]["jpeg_compression"][severity - 1]  # type: ignore[index]
        got = corrupt(x, "jpeg_compression", severity, style=style)  # type: ignore[arg-type]
        for i in range(4):
            file = io.BytesIO()
            pixels = bytes_of(x[i])
            Image.fromarray(pixels[..., 0] if channels == 1 else pixels).save(
                file, "JPEG", quality=int(quality)
            )
            want = np.asarray(Image.open(file)).reshape(pixels.shape).astype(int)
            gap = np.abs(bytes_of(got[i]).astype(int) - want)
            assert gap.max() <= 1 and np.mean(gap > 0) < 2e-3, (
                quality,
                gap.max(),
                np.mean(gap > 0),
            )


# Made with OpenCV 5.0.0 from `wet_layer`: Canny(50, 150) as one number per row, and the relief before it meets depth.


# What is refused ----------------------------------------------------------------------------------------------------


def test_errors_say_what_was_got_and_needed() -> None:
    x = pictures(1)
    with pytest.raises(
        ValueError,
        match="Unknown corruption 'gausian_noise'; did you mean 'gaussian_noise'",
    ):
        corrupt(x, "gausian_noise", 1)
    for severity in (0, 6, 2.5, "3", True, None):
        with pytest.raises(ValueError, match=r"severity must be 1, 2, 3, 4 or 5, got"):
            corrupt(x, "fog", severity)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="Unknown style 'cifar10'; did you mean 'cifar'"
    ):
        corrupt(x, "fog", 1, style="cifar10")  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"got torch.uint8; bytes become that by images.float\(\) / 255"
    ):
        corrupt((x * 255).byte(), "fog", 1)
    with pytest.raises(TypeError, match="got ndarray"):
        corrupt(numpy(x), "fog", 1)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"needs images \(B, C, H, W\), got shape \(3, 32, 32\)"
    ):
        corrupt(x[0], "fog", 1)
    for wrong in (-0.1, 1.5, float("nan"), float("inf")):
        bad = x.clone()
        bad[0, 1, 2, 3] = wrong
        with pytest.raises(ValueError, match=r"values in \[0, 1\], got"):
            corrupt(bad, "fog", 1)
    with pytest.raises(ValueError, match="at least 3 x 3 pixels, got 2 x 5"):
        corrupt(pictures(1, 3, 2, 5), "elastic_transform", 1)


@pytest.mark.parametrize(("name", "channels"), each(CORRUPTIONS, [1, 2]))
def test_other_numbers_of_channels_work_or_are_refused(
    name: str, channels: int, photos: Path
) -> None:
    x = pictures(2, channels)
    coloured = (
        ("frost",)
        if channels == 1
        else ("frost", "snow", "brightness", "jpeg_compression")
    )
    if name in coloured:
        with pytest.raises(
            ValueError,
            match=rf"{name} needs images of .*3 channels .* got shape \(2, {channels}, 32, 32\)",
        ):
            corrupt(x, name, 3, frost_folder=photos)
        return
    y = corrupt(x, name, 3, seeded())
    assert y.shape == x.shape
    if channels == 1 and name in (
        "snow",
        "brightness",
        "fog",
        "contrast",
    ):  # the same as three equal channels
        colour = corrupt(x.expand(-1, 3, -1, -1), name, 3, seeded())
        torch.testing.assert_close(colour[:, :1], y, atol=1.01 / 255, rtol=0)


# Real photos --------------------------------------------------------------------------------------------------------


def test_real_photos(tmp_path: Path) -> None:
    sheets = SHARED / "cifar10" / "test-images.zip"
    if not sheets.is_file() or not (SHARED / "frost").is_dir():
        pytest.skip(f"NOT RUN: no CIFAR-10 and frost photos in {SHARED}")
    with (
        zipfile.ZipFile(sheets) as pack,
        Image.open(io.BytesIO(pack.read(sorted(pack.namelist())[0]))) as sheet,
    ):
        tiles = (
            np.asarray(sheet.convert("RGB"))
            .reshape(10, 32, 10, 32, 3)
            .transpose(0, 2, 4, 1, 3)
            .reshape(100, 3, 32, 32)
        )
    x = torch.tensor(tiles[:8]) / 255
    rows = []
    for name in CORRUPTIONS:
        row = [
            corrupt(x, name, s, seeded(s), frost_folder=SHARED / "frost")
            for s in range(1, 6)
        ]
        change = [float((y - x).abs().mean()) for y in row]
        assert all(0.0005 < c < 0.4 for c in change), (name, change)
        rows.append(torch.cat([x, *row], 3)[3])
    pixels = bytes_of(torch.cat(rows, 1))
    Image.fromarray(pixels).save(
        tmp_path / "corruptions.png"
    )  # rows: corruptions; columns: clean, severity 1 to 5
    assert pixels.shape == (15 * 32, 6 * 32, 3)
