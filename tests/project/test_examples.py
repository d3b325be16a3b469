"""The demo runs end to end, and the demo's own measures are right."""

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

ROOT = Path(__file__).parents[2]


def load(path: str) -> ModuleType:
    name = f"script_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    return load("examples/digits.py")


@pytest.fixture(scope="module")
def run(
    demo: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path]:
    """All of it, on fewer digits and with fewer draws."""
    out = tmp_path_factory.mktemp("demo") / "new folder" / "digits.png"
    x_train, y_train, x, y = demo.digits()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            demo, "digits", lambda: (x_train[:800], y_train[:800], x[:60], y[:60])
        )
        patch.setattr(demo, "DRAWS", 1)
        return demo.main(epochs=2, out=out), out


@pytest.mark.slow
def test_demo_draws_a_picture(run: tuple[dict[str, Any], Path]) -> None:
    from matplotlib.image import imread

    pixels = imread(run[1])
    assert pixels.shape[0] > 600 and pixels.shape[1] > 1000
    assert pixels[..., :3].std() > 0.05  # not a blank page


@pytest.mark.slow
def test_demo_metrics_are_finite_and_in_range(run: tuple[dict[str, Any], Path]) -> None:
    results = run[0]
    assert set(results) == {"plain", "rank-1"}
    for method in results.values():
        for scores in method["scores"].values():
            assert 0 <= scores["accuracy"] <= 1 and 0 <= scores["ece"] <= 1
            assert 0 <= scores["nll"] < math.inf
        assert all(
            0 <= value <= 1
            for kinds in method["auroc"].values()
            for value in kinds.values()
        )
        assert (
            method["scores"]["clean"]["accuracy"] > 0.3
        )  # two epochs are enough to beat chance, 0.1


@pytest.mark.slow
def test_demo_counts_the_rank1_parameters(run: tuple[dict[str, Any], Path]) -> None:
    channels = [(1, 32), (32, 64), (64, 64), (1024, 128), (128, 10)]
    # 4 members x (location, scale) for each input and output channel, and three more biases.
    extra = sum(8 * (i + o) + 3 * o for i, o in channels)
    assert run[0]["rank-1"]["parameters"] == run[0]["plain"]["parameters"] + extra


@pytest.mark.parametrize(
    ("probs", "target", "expected"),
    [
        ([[1.0, 0.0]], [0], 0.0),  # sure and right: the last bin is closed
        ([[1.0, 0.0]], [1], 1.0),  # sure and wrong
        (
            [[0.75, 0.25]] * 4,
            [0, 0, 0, 1],
            0.0,
        ),  # right three times in four, as claimed
        ([[0.75, 0.25]] * 4, [1, 1, 1, 1], 0.75),
        (
            [[1.0, 0.0], [1.0, 0.0], [0.6, 0.4], [0.6, 0.4]],
            [0, 1, 0, 0],
            0.5 * 0.5 + 0.5 * 0.4,
        ),  # two bins of equal weight
        (
            [[0.95, 0.05], [0.99, 0.01]],
            [0, 1],
            0.47,
        ),  # one bin: the mean confidence 0.97 against one half
    ],
)
def test_demo_calibration_error(
    demo: ModuleType, probs: list[list[float]], target: list[int], expected: float
) -> None:
    assert demo.ece(torch.tensor(probs), torch.tensor(target)) == pytest.approx(
        expected, abs=1e-6
    )


def test_demo_calibration_error_equals_a_slow_loop(demo: ModuleType) -> None:
    probs, target = torch.randn(500, 10).mul(2).softmax(1), torch.randint(10, (500,))
    confidence, label = probs.double().max(1)
    expected = 0.0
    for b in range(15):
        inside = (confidence >= b / 15) & (confidence < (b + 1) / 15)
        if inside.any():
            gap = (label[inside] == target[inside]).double().mean() - confidence[
                inside
            ].mean()
            expected += float(inside.double().mean() * gap.abs())
    assert demo.ece(probs, target) == pytest.approx(expected, abs=1e-9)


def test_demo_separation_is_an_auroc(demo: ModuleType) -> None:
    import slimbayes as sb

    sure = sb.Prediction.from_outputs(torch.tensor([[[9.0, 0.0], [8.0, 0.0]]]))
    unsure = sb.Prediction.from_outputs(torch.tensor([[[0.1, 0.0], [0.2, 0.0]]]))
    assert demo.separation(sure, unsure, "total") == 1.0
    assert demo.separation(unsure, sure, "total") == 0.0
    assert demo.separation(sure, sure, "total") == 0.5


@pytest.mark.slow
def test_the_lab_s_demo_writes_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own table, with fewer rows of data, channels and corruptions."""
    demo = load("examples/demo.py")
    tree = yaml.safe_load(demo.CONFIGS.read_text())
    tree["data"] |= {"train_limit": 100, "test_limit": 50}
    tree["model"]["width"] = 4
    tree["evaluate"] |= {"corruptions": ["fog", "pixelate"], "severities": [5]}
    (tmp_path / "digits.yaml").write_text(yaml.safe_dump(tree))
    monkeypatch.setattr(demo, "CONFIGS", tmp_path / "digits.yaml")
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "demo.py",
            "--out",
            str(tmp_path),
            "--epochs",
            "1",
            "--seeds",
            "1",
            "--jobs",
            "1",
        ],
    )
    demo.main()
    assert "report.html" in capsys.readouterr().out.replace("\n", "")
    page = (tmp_path / "report.html").read_text()
    assert all(
        name in page
        for name in ("plain", "rank-1 Cauchy", "BatchEnsemble", "2-tied Normal", "ECMP")
    )


@pytest.mark.slow
def test_the_fine_tuning_example_runs() -> None:
    found = load("examples/fine_tuning.py").main(steps=40, draws=6, chains=2)
    assert set(found) >= {
        "plain",
        "rank-1 posterior and head",
        "Laplace, linearised",
        "SGHMC chains",
    }
    assert all(
        0 < scores["nll"] < 6 for method in found.values() for scores in method.values()
    )
    assert found["Laplace, sampled"]["noisy"]["nll"] < found["plain"]["noisy"]["nll"]
