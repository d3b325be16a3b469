"""The k-tied experiment at reduced size: its findings in the direction they hold, and what it reports (F27, F29, F30)."""

import gzip
import importlib.util
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import slimbayes as sb

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "experiments" / "k_tied"


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    """experiments/k_tied/digits.py as a module of its own, with its folder on the path as when it is run."""
    spec = importlib.util.spec_from_file_location("k_tied_digits", FOLDER / "digits.py")
    module: Any = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.path.insert(0, str(FOLDER))
    sys.modules["k_tied_digits"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    yield module
    sys.path.remove(str(FOLDER))
    del sys.modules["k_tied_digits"]


# The experiment --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def record(script: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two of the four posteriors, two seeds, and gradients at one early step."""
    out = tmp_path_factory.mktemp("results") / "digits.json"
    whole = script.METHODS, script.SETTINGS["digits"]
    script.METHODS = {"mean-field": None, "2-tied": 2}
    script.SETTINGS["digits"] = replace(whole[1], seeds=2, snr_at=(50,))
    script.main(["--out", str(out)])
    script.METHODS, script.SETTINGS["digits"] = whole
    return json.loads(out.read_text())


def test_standard_deviations_are_of_low_rank_and_means_are_not(record: dict[str, Any]) -> None:
    """Finding (a). Eight seeds gave 0.993, 0.996, 0.971 against 0.3, 0.26, 0.18; shuffled, the same numbers explain less."""
    for name, low in {"dense1": 0.98, "dense2": 0.985, "dense3": 0.94}.items():
        shares = record["spectrum"][name]
        assert shares["scale 1"] > low
        assert shares["mean 2"] < 0.6
        # A matrix of similar positive numbers has one large singular value whatever their order; the order adds to it.
        assert 1 - shares["scale 2"] < 0.6 * (1 - shares["shuffled 2"])


def test_tied_gradients_are_less_noisy_early_on(record: dict[str, Any]) -> None:
    """Finding (b), for the median and the whole vector: eight seeds gave ratios of 13 to 22 and 50 to 100.

    The mean over parameters points the other way: weights of units that are nearly always off have a gradient that hardly
    varies, and a handful of them outweigh all others (1e9 against 1e8).
    """
    for seed in range(2):
        free, tied = (record["methods"][name]["snr"][seed][0] for name in ("mean-field", "2-tied"))
        assert tied["median"] > 5 * free["median"]
        assert tied["pooled"] > 15 * free["pooled"]
        assert tied["-elbo"] < free["-elbo"] - 0.3  # about 0.8 nats ahead after 50 steps


def test_the_head_start_is_that_of_a_doubled_rate(record: dict[str, Any]) -> None:
    """Under Adam log u + log v moves twice as fast as a free log sigma; mean-field at twice the rate keeps up with 2-tied."""
    for seed, control in enumerate(record["mean-field, scales at twice the rate"]):
        tied = record["methods"]["2-tied"]["snr"][seed][0]
        assert control[0]["-elbo"] == pytest.approx(tied["-elbo"], abs=0.3)
        assert control[0]["pooled"] < tied["pooled"] / 15  # though its gradients are as noisy as ever


def test_half_the_parameters_predict_as_well(record: dict[str, Any]) -> None:
    """Finding (c): over eight seeds the NLL differed by 0.009 on average, of 0.19, with a standard error near 0.01."""
    free, tied = record["methods"]["mean-field"], record["methods"]["2-tied"]
    assert (free["parameters"], tied["parameters"]) == (35_220, 18_768)
    assert tied["against mean-field"]["difference"] < 0.05
    assert free["nll"][0] < 0.25 and tied["nll"][0] < 0.26
    assert min(free["accuracy"][0], tied["accuracy"][0]) > 0.94
    assert tied["-elbo"][0] < free["-elbo"][0] + 0.05


def test_the_kept_results_are_those_of_the_present_setting(script: Any) -> None:
    kept = json.loads((ROOT / "results" / "k_tied" / "digits.json").read_text())
    assert kept["setting"] == json.loads(json.dumps(asdict(script.SETTINGS["digits"]))), (
        "run experiments/k_tied/digits.py"
    )
    assert list(kept["methods"]) == list(script.METHODS)
    assert "2-tied" in script.show(kept)


# What it reports -------------------------------------------------------------------------------------------------------


def test_signal_to_noise(script: Any) -> None:
    """F29: 1 + mean^2 / variance, never below 1, infinite without noise; 8/7 on average for pure noise in windows of ten."""
    g = torch.randn(10, 200_000)
    ratio = script.signal_to_noise(g)
    torch.testing.assert_close(ratio, 1 + g.double().mean(0).square() / g.double().var(0, unbiased=False))
    assert ratio.min() >= 1
    assert ratio.mean().item() == pytest.approx(8 / 7, abs=0.005)
    assert script.pooled(g) == pytest.approx(10 / 9, abs=0.005)
    assert script.signal_to_noise(torch.full((10, 1), 0.5)).item() == math.inf


def test_explained_variance(script: Any) -> None:
    """F27: shares sum to one, a product has one share, and what the first k leave is the error of the best rank-k matrix."""
    matrix = np.random.default_rng(0).uniform(1, 2, (9, 6))
    shares = script.explained(matrix)
    assert shares.sum() == pytest.approx(1) and (np.diff(shares) <= 0).all()
    assert script.explained(np.outer(np.arange(1, 4), np.arange(1, 6)))[0] == pytest.approx(1)
    u, s, v = np.linalg.svd(matrix)
    best = (u[:, :2] * s[:2]) @ v[:2]
    assert ((matrix - best) ** 2).sum() / (matrix**2).sum() == pytest.approx(shares[2:].sum())


def test_comparison_has_the_error_of_seeds_and_rows(script: Any) -> None:
    """Planted: rows scatter by 1, seeds by 0.5, around a difference of 0.3."""
    rng = np.random.default_rng(0)
    reference = rng.normal(size=(40, 500))
    other = reference + 0.3 + rng.normal(0, 1, (1, 500)) + rng.normal(0, 0.5, (40, 1))
    got = script.compare(other, reference)
    expected = math.hypot(1 / math.sqrt(500), 0.5 / math.sqrt(40))
    assert got["error"] == pytest.approx(expected, rel=0.25)
    assert abs(got["difference"] - 0.3) < 3 * expected
    assert script.compare(reference, reference) == {"difference": 0.0, "error": 0.0}


def test_annealing_staircase() -> None:
    """F30, Appendix D.4: steps of 100 batches at 5e-5 each; MNIST's 14,700 batches end at 0.73, not 1."""
    weight = sb.schedules.staircase(5e-5)
    assert [weight(t) for t in (0, 99, 100, 199, 20_000, 50_000)] == pytest.approx([0, 0, 0.005, 0.005, 1, 1])
    assert weight(14_699) == pytest.approx(0.73)


def test_evaluation_counts_the_whole_kl(script: Any) -> None:
    """-ELBO is the mean NLL of single draws and KL / N at full weight; the ensemble's NLL is below the former."""
    data, setting = script.digits(torch.device("cpu")), replace(script.SETTINGS["digits"], steps=60)
    net = script.build(2, setting, data, 0)
    script.train(net, setting, data)
    scores, rows = script.evaluate(net, setting, data)
    assert rows.shape == (497,) and rows.mean() == pytest.approx(scores["nll"], rel=1e-5)
    expected = scores["-elbo"] - sb.kl(net).item() / 1300
    draws = sb.categorical(sb.sample(net, data.test_x, draws=20), data.test_y).item()
    assert expected == pytest.approx(draws, rel=0.1)
    assert scores["nll"] < expected


def test_digits_split(script: Any) -> None:
    data = script.digits(torch.device("cpu"))
    assert data.x.shape == (1300, 64) and data.test_x.shape == (497, 64)
    assert data.x.min() == -1 and data.x.max() == 1 and set(data.test_y.tolist()) == set(range(10))
    x, y = data.batch(8)
    assert x.shape == (8, 64) and y.shape == (8,)


def test_mnist_reader(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small pair of idx files with the published headers."""
    rng, folder = np.random.default_rng(0), tmp_path / "mnist"
    folder.mkdir()
    images = {"train": rng.integers(0, 256, (60, 784), np.uint8), "t10k": rng.integers(0, 256, (10_000, 784), np.uint8)}
    for part, pixels in images.items():
        header = np.array([2051, len(pixels), 28, 28], ">i4").tobytes()
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + pixels.tobytes(), 1))
        labels = (
            np.array([2049, len(pixels)], ">i4").tobytes() + (np.arange(len(pixels)) % 10).astype(np.uint8).tobytes()
        )
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    monkeypatch.setenv("SLIMBAYES_DATA", str(tmp_path))
    data = script.mnist(torch.device("cpu"))
    assert data.x.shape == (60, 784) and data.test_x.shape == (10_000, 784)
    np.testing.assert_allclose(data.x.numpy(), images["train"] / 127.5 - 1, atol=1e-6)
    assert data.y[:12].tolist() == [*range(10), 0, 1]
