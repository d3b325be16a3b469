"""An exported file computes what predict does, for every method, for any number of rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import METHODS
from torch import nn

import slimbayes as sb

# One of each kind of arithmetic in a graph; `--full-contract` exports all methods in both formats. Otherwise factors of
# a Cauchy and an ensemble go to ONNX together, as `members_of_a_head`.
PROGRAMS = ["mean-field", "ecmp", "mc-dropout"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "method" in metafunc.fixturenames:
        few = PROGRAMS if "program" in metafunc.function.__name__ else []
        metafunc.parametrize(
            "method", METHODS if metafunc.config.getoption("--full-contract") else few
        )


pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:.isinstance.treespec:FutureWarning", "ignore::UserWarning:torch.*"
    ),
]


def net(method: str = "rank1-cauchy") -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3)
    )
    return sb.bayesianize(layers, METHODS[method]).eval()


def summaries(model: nn.Module, x: torch.Tensor, draws: int = 3) -> list[np.ndarray]:
    found = sb.predict(model, x, draws=draws, seed=5)
    return [
        np.asarray(part) for part in (found.probs, found.aleatoric, found.epistemic)
    ]


def test_a_program_predicts_as_the_model_does(method: str, tmp_path: Path) -> None:
    model = net(method)
    made = sb.export(
        model,
        torch.randn(5, 4),
        tmp_path / "net.pt2",
        draws=3,
        seed=5,
        likelihood="categorical",
    )
    program = torch.export.load(made.path).module()
    for rows in (1, 2, 9):
        x = torch.randn(rows, 4)
        for got, want in zip(program(x), summaries(model, x), strict=True):
            np.testing.assert_allclose(got.detach(), want, atol=1e-5)


def check_onnx(model: nn.Module, tmp_path: Path) -> None:
    """The file's means and uncertainties of any number of rows are those of `predict`."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    made = sb.export(
        model,
        torch.randn(5, 4),
        tmp_path / "net.onnx",
        draws=3,
        seed=5,
        likelihood="categorical",
    )
    session = runtime.InferenceSession(str(made.path))
    for rows in (1, 2, 9):
        x = torch.randn(rows, 4)
        for got, want in zip(
            session.run(None, {"input": x.numpy()}), summaries(model, x), strict=True
        ):
            np.testing.assert_allclose(got, want, atol=1e-4)
    about = json.loads(session.get_modelmeta().custom_metadata_map["slimbayes"])
    assert about["likelihood"] == "categorical" and about["inputs"] == {
        "input": [None, 4]
    }


def test_onnx_predicts_as_the_model_does(method: str, tmp_path: Path) -> None:
    check_onnx(net(method), tmp_path)


def members_of_a_head() -> nn.Module:
    """As `slimbayes init` writes networks: factors, and a head of members."""
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
    )
    methods = {"0": METHODS["rank1-cauchy"], "3": sb.Ensemble(members=2, init="fresh")}
    return sb.bayesianize(layers, methods).eval()


def test_members_of_a_head_are_exported_one_by_one(tmp_path: Path) -> None:
    model, x = members_of_a_head(), torch.randn(5, 4)
    made = sb.export(
        model,
        x,
        tmp_path / "net.pt2",
        draws=2,
        seed=5,
        members=[1],
        likelihood="categorical",
    )
    mean, members = (
        torch.export.load(made.path).module()(x)[0],
        sb.predict(model, x, draws=2, seed=5).by_member.exp(),
    )
    np.testing.assert_allclose(mean.detach(), members[1], atol=1e-5)
    assert float((members[0] - members[1]).abs().max()) > 1e-2


def test_members_of_a_head_are_exported_to_onnx(tmp_path: Path) -> None:
    check_onnx(members_of_a_head(), tmp_path)


@pytest.mark.parametrize(
    ("scale", "file"), [(0.5, "net.pt2"), (torch.tensor([0.5, 2.0]), "net.onnx")]
)
def test_real_targets_are_exported(
    scale: Any, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model = sb.bayesianize(nn.Linear(4, 2), sb.Rank1(members=2, scale_init=0.3)).eval()
    made = sb.export(
        model,
        torch.randn(5, 4),
        tmp_path / file,
        draws=2,
        likelihood="gaussian",
        likelihood_std=scale,
    )
    assert not capsys.readouterr().out
    x = torch.randn(7, 4)
    found = sb.predict(
        model, x, draws=2, likelihood="gaussian", likelihood_std=scale, seed=0
    )
    if file.endswith("pt2"):
        got = [part.detach() for part in torch.export.load(made.path).module()(x)]
    else:
        got = runtime.InferenceSession(str(made.path)).run(None, {"input": x.numpy()})
    for one, want in zip(
        got, (found.mean, found.aleatoric, found.epistemic), strict=True
    ):
        np.testing.assert_allclose(one, want, atol=1e-5)


def test_rows_may_lie_along_another_dimension(tmp_path: Path) -> None:
    class Steps(nn.Module):
        """Steps first, as torch's recurrent layers have them."""

        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.RNN(4, 6), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(self.cell(x)[0][-1])

    model = sb.bayesianize(
        Steps(), sb.Rank1(members=2, scale_init=0.3), batch_dim=1
    ).eval()
    made = sb.export(
        model,
        torch.randn(2, 3, 4),
        tmp_path / "net.pt2",
        draws=3,
        seed=5,
        likelihood="categorical",
    )
    assert made.inputs == {"input": [2, None, 4]}
    program = torch.export.load(made.path).module()
    for rows in (1, 7):
        x = torch.randn(2, rows, 4)
        for got, want in zip(program(x), summaries(model, x), strict=True):
            np.testing.assert_allclose(got.detach(), want, atol=1e-5)


def test_classes_of_pixels_lie_where_they_are_said_to(tmp_path: Path) -> None:
    model, x = (
        sb.bayesianize(nn.Conv2d(2, 3, 1), sb.Rank1(members=2, scale_init=0.3)).eval(),
        torch.randn(4, 2, 5, 5),
    )
    options: Any = {"draws": 2, "seed": 5, "likelihood": "categorical"}
    with pytest.raises(ValueError, match="Give class_dim=2"):
        sb.export(model, x, tmp_path / "net.pt2", **options)
    made = sb.export(model, x, tmp_path / "net.pt2", **options, class_dim=2)
    found = sb.predict(model, x, **options, class_dim=2)
    mean, aleatoric, _ = torch.export.load(made.path).module()(x)
    np.testing.assert_allclose(mean.detach(), found.probs, atol=1e-5)
    np.testing.assert_allclose(aleatoric.detach(), found.aleatoric, atol=1e-5)


def test_noise_as_an_input_decides_the_draws(tmp_path: Path) -> None:
    model, x = net(), torch.randn(6, 4)
    made = sb.export(model, x, tmp_path / "net.pt2", draws=4, noise="input")
    assert made.outputs == ("draws",) and made.draws == 4
    program: Any = torch.export.load(made.path).module()
    shape = made.inputs["noise"]
    first, second = (program(x, torch.full(shape, value)) for value in (0.0, 1.0))
    assert first.shape == (4, 6, 3)
    torch.testing.assert_close(
        first[0], first[2]
    )  # two draws of one member without noise
    assert float((first - second).detach().abs().max()) > 1e-3


def test_some_members(tmp_path: Path) -> None:
    model, x = net("batch-ensemble"), torch.randn(6, 4)
    made = sb.export(model, x, tmp_path / "net.pt2", members=[1])
    got = torch.export.load(made.path).module()(x)
    with sb.fixed_draws(model, seed=0):
        torch.testing.assert_close(got, sb.sample(model, x)[1:2])


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    x = torch.randn(4, 4)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"path": tmp_path / "net.pt"}, ".onnx and .pt2"),
        ({"draws": 0}, "at least one draw"),
        ({"members": [2]}, "members 0 to 1"),
        ({"members": []}, "members is empty"),
        ({"example": x[:1]}, "two rows"),
        ({"likelihood": "poisson"}, "Unknown likelihood"),
    ]
    for options, told in wrong:
        with pytest.raises(ValueError, match=told):
            sb.export(
                **{"model": net(), "example": x, "path": tmp_path / "net.pt2"} | options
            )
    with pytest.raises(ValueError, match="use noise='fixed'"):
        sb.export(net("mc-dropout"), x, tmp_path / "net.pt2", noise="input")
    with pytest.raises(ValueError, match="has not been converted"):
        sb.export(nn.Linear(4, 3), x, tmp_path / "net.pt2")
    assert not list(tmp_path.iterdir())


class _Decides(nn.Module):
    """A network whose forward depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if x.sum() > 0 else -self.layer(x)


def test_what_torch_cannot_export_is_told_in_words(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = sb.bayesianize(_Decides(), sb.Rank1(members=2))
    with pytest.raises(
        ValueError,
        match="torch cannot write this model as a graph for net.pt2: Could not guard",
    ) as told:
        sb.export(model, torch.randn(5, 4), tmp_path / "net.pt2")
    assert "by values" in str(told.value) and len(str(told.value)) < 500
    out, err = capfd.readouterr()
    assert "forward" not in out + err and not list(tmp_path.iterdir())
