"""What notebooks show: short reprs, tables, plots, progress."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import slimbayes as sb

N, C = 40, 3


def classes(members: int = 2) -> tuple[sb.Prediction, torch.Tensor]:
    return sb.Prediction.from_outputs(
        torch.randn(4, N, C), members=members
    ), torch.arange(N) % C


def real(targets: tuple[int, ...] = ()) -> tuple[sb.Prediction, torch.Tensor]:
    pred = sb.Prediction.from_outputs(
        torch.randn(4, N, *targets), "gaussian", members=2, likelihood_std=0.5
    )
    return pred, torch.randn(N, *targets)


@pytest.mark.parametrize(
    "pred", [classes()[0], real()[0], real((2,))[0], classes()[0][:1], real()[0][:8]]
)
def test_a_prediction_is_one_line_and_a_short_table(pred: sb.Prediction) -> None:
    told = repr(pred)
    assert len(told) < 200 and "\n" not in told
    parts = re.search(r"mean \w+ (\S+) = (\S+) aleatoric \+ (\S+) epistemic", told)
    assert parts is not None
    assert [float(p) for p in parts.groups()] == pytest.approx(
        [float(t.mean()) for t in (pred.total, pred.aleatoric, pred.epistemic)],
        rel=1e-2,
    )
    page = pred._repr_html_()
    assert page.count("<tr>") == 1 + min(len(pred), 8) + (len(pred) > 8)
    assert (f"and {len(pred) - 8} more" in page) == (len(pred) > 8)
    assert len(page) < 6000


def test_tables_of_predictions_have_named_columns() -> None:
    pred, _ = classes()
    assert list(pred._columns()) == [
        "label",
        "confidence",
        "entropy",
        "aleatoric",
        "epistemic",
        "p_0",
        "p_1",
        "p_2",
    ]
    assert torch.equal(pred._columns()["p_1"], pred.probs[:, 1])
    assert list(real((2,))[0]._columns())[3:6] == ["epistemic_0", "mean_1", "std_1"]
    pixels = sb.Prediction.from_outputs(torch.zeros(2, 5, 7, C))
    with pytest.raises(
        ValueError, match=r"one line of them, for each row; got shape \(5, 7\)"
    ):
        pixels._columns()
    assert pixels._repr_html_() == f"<code>{pixels!r}</code>"
    pandas = pytest.importorskip("pandas")
    frame = pred.to_pandas()
    assert isinstance(frame, pandas.DataFrame) and frame.shape == (N, 8)


def test_predictions_that_do_not_belong_together_are_not_joined() -> None:
    with pytest.raises(
        ValueError,
        match="need one likelihood, draws and fields alike; got categorical with 4 draws",
    ):
        sb.Prediction.joined([classes()[0], real()[0]])
    assert [len(row) for row in classes()[0]] == [1] * N  # iteration ends


def test_a_summary_is_one_line_and_a_table() -> None:
    net = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3))
    found = sb.summary(sb.bayesianize(net, sb.Rank1(members=2)))
    assert repr(found).startswith(
        "Summary(1 of 2 layers converted; 55 -> 86 parameters (+56.36%);"
    )
    assert str(found).endswith(repr(found)[8:-1])
    page = found._repr_html_()
    assert page.count("<tr>") == 3 and "<td>Embedding</td>" in page


def test_progress_is_a_line_on_stderr_and_nothing_by_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    net = sb.bayesianize(nn.Linear(3, C), sb.Rank1())
    loader = DataLoader(TensorDataset(torch.randn(N, 3)), batch_size=16)
    pred = sb.predict(net, loader, seed=0, progress=True)
    told = capsys.readouterr().err
    assert told.split("\r")[-1].startswith(
        "predict: 40 of 40 (100%) rows, "
    ) and told.endswith("\n")
    assert "16 of 40 (40%) rows" in told
    sb.predict(net, iter([torch.randn(5, 3)]), progress=True)
    assert "predict: 5 rows, " in capsys.readouterr().err
    torch.testing.assert_close(sb.predict(net, loader, seed=0).probs, pred.probs)
    assert capsys.readouterr().err == ""


# Plots: what they draw is what the numbers say ------------------------------------------------------------------------


@pytest.fixture
def axes(tmp_path: Path) -> Any:
    pytest.importorskip("matplotlib")

    def drawn(figure: Any) -> Any:
        figure.savefig(tmp_path / "figure.png", dpi=30)
        assert (tmp_path / "figure.png").read_bytes()[:4] == b"\x89PNG"
        return figure.axes

    return drawn


@pytest.mark.slow
def test_bands_are_the_intervals_over_x(axes: Any) -> None:
    pred, y = real()
    x = torch.randn(N, 1)
    (panel,) = axes(pred.plot(y, x))
    mean, dots = panel.get_lines()
    order = x[:, 0].argsort()
    torch.testing.assert_close(torch.tensor(mean.get_xdata()), x[order, 0])
    torch.testing.assert_close(
        torch.tensor(mean.get_ydata()), pred.mean[order].double()
    )
    torch.testing.assert_close(torch.tensor(dots.get_ydata()), y[order].double())
    low, high = pred.interval(0.9)
    edge = torch.tensor(panel.collections[0].get_paths()[0].vertices)
    assert float(edge[:, 1].min()) == pytest.approx(float(low.min()), rel=1e-5)
    assert float(edge[:, 1].max()) == pytest.approx(float(high.max()), rel=1e-5)
    assert len(axes(real((2,))[0].plot())) == 2
    with pytest.raises(ValueError, match=r"x and target of \(3,\) and None"):
        sb.plot.bands(pred, torch.zeros(3))


@pytest.mark.slow
def test_entropies_are_shown_by_correctness(axes: Any) -> None:
    pred, y = classes()
    (panel,) = axes(pred.plot(y))
    wrong = int((pred.label != y).sum())
    labels = panel.get_legend_handles_labels()[1]
    assert labels[0].startswith(f"right ({N - wrong}, ") and labels[1].startswith(
        f"wrong ({wrong}, "
    )
    assert sum(bar.get_height() for bar in panel.patches) == pytest.approx(
        2
    )  # each group's shares
    assert len(axes(pred.plot())) == 1
    sure = sb.Prediction.from_outputs(torch.tensor([[[90.0, 0.0]] * 5]))
    axes(sure.plot(torch.zeros(5).long()))  # nobody is wrong, no entropy at all


@pytest.mark.slow
def test_reliability_has_the_bins_of_the_calibration_error(axes: Any) -> None:
    pred, y = classes()
    upper, lower = axes(sb.plot.reliability(pred, y, bins=10))
    found = sb.metrics.calibration(pred, y, bins=10, drop=0)
    assert upper.get_title() == f"ECE {found.ece:.3f}"
    assert [bar.get_height() for bar in lower.patches] == found.count[
        found.count > 0
    ].tolist()
    torch.manual_seed(0)
    sound = sb.Prediction.from_outputs(
        torch.zeros(3, 4000),
        "gaussian",
        likelihood_std=1.0,
        members=3,
        weights=[0.5, 0.3, 0.2],
    )
    upper, _ = axes(sb.plot.reliability(sound, torch.randn(4000)))
    curve = torch.tensor(upper.get_lines()[1].get_ydata())
    assert float((curve - torch.linspace(0, 1, 101)).abs().max()) < 0.03
    near = sb.distance(
        sb.bayesianize(nn.Linear(1, 1), sb.Rank1()),
        [(torch.randn(30, 1), torch.randn(30, 1))],
        "gaussian",
    )
    net = sb.bayesianize(nn.Linear(1, 1), sb.Rank1())
    far = sb.predict(
        net,
        3 * torch.randn(50, 1),
        likelihood="gaussian",
        likelihood_std=1.0,
        distance=near,
    )
    axes(sb.plot.reliability(far, torch.randn(50, 1)))


@pytest.mark.slow
def test_risk_and_coverage(axes: Any) -> None:
    pred = sb.Prediction.from_outputs(
        torch.tensor([[[3.0, 0.0], [2.0, 0.0], [1.0, 0.0], [0.5, 0.0]]])
    )
    (panel,) = axes(sb.plot.risk_coverage(pred, torch.tensor([0, 0, 1, 0])))
    assert list(panel.get_lines()[0].get_ydata()) == pytest.approx([0, 0, 1 / 3, 1 / 4])
    equal = sb.Prediction.from_outputs(
        torch.tensor([[[1.0, 0.0]] * 4])
    )  # the right ones first says nothing
    (panel,) = axes(sb.plot.risk_coverage(equal, torch.tensor([0, 0, 1, 1])))
    assert list(panel.get_lines()[0].get_ydata()) == pytest.approx([0.5] * 4)
    two, y = real((2,))
    (panel,) = axes(sb.plot.risk_coverage(two, y))
    last = float(panel.get_lines()[0].get_ydata()[-1])
    assert last == pytest.approx(float((two.mean - y).square().mean().sqrt()), rel=1e-5)


@pytest.mark.slow
def test_disagreement_is_pair_by_pair(axes: Any) -> None:
    outputs = torch.tensor([[[2.0, 0.0], [2.0, 0.0]], [[2.0, 0.0], [0.0, 2.0]]])
    panel = axes(sb.plot.disagreement(sb.Prediction.from_outputs(outputs, members=2)))[
        0
    ]
    assert panel.images[0].get_array().tolist() == [[0.0, 0.5], [0.5, 0.0]]
    means = sb.Prediction.from_outputs(
        torch.tensor([[0.0, 0.0], [3.0, 4.0]]), "gaussian", members=2
    )
    assert axes(sb.plot.disagreement(means))[0].images[0].get_array()[
        0, 1
    ] == pytest.approx(12.5**0.5)
    with pytest.raises(ValueError, match="at least two, got 1"):
        sb.plot.disagreement(classes(1)[0])


@pytest.mark.slow
@pytest.mark.parametrize("config", [sb.Rank1(members=2), sb.MeanField(), sb.KTied()])
def test_posterior_scales_have_a_box_for_each_layer(axes: Any, config: Any) -> None:
    net = sb.bayesianize(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)), config)
    (panel,) = axes(sb.plot.posterior_scales(net))
    assert [label.get_text() for label in panel.get_yticklabels()] == [
        "1.weight",
        "0.weight",
    ]
    assert (
        "1 more are not shown"
        in axes(sb.plot.posterior_scales(net, most=1))[0].get_xlabel()
    )
    with pytest.raises(ValueError, match="no posterior with scales"):
        sb.plot.posterior_scales(sb.bayesianize(nn.Linear(3, 2), sb.BatchEnsemble()))


def test_a_notebook_shows_a_figure_without_pyplot() -> None:
    pytest.importorskip("matplotlib")
    shown: Any = classes()[0].plot()
    assert shown._repr_png_().startswith(b"\x89PNG")
