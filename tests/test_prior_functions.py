"""Functions of implicit priors against a direct simulation in numpy and closed forms (Appendix D.1 of the EMP paper)."""

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from slimbayes.diagnostics import prior_functions as module
from slimbayes.diagnostics.prior_functions import plot_prior_functions, prior_functions

METHODS: Any = ("dropout", "emp", "ecmp")
HIDDEN, BIAS, WEIGHT = 100, 20**0.5, 5**0.5


def simulate(method: str, x: np.ndarray, functions: int, rate: float = 0.5) -> np.ndarray:
    """The formula itself: y = B + sum_h W_h sign(b_h + w_h x), with masks for dropout; a pick of iid components is one of them."""
    rng = np.random.default_rng(0)
    out = []
    for _ in range(functions):
        w, big_w = rng.normal(0, WEIGHT, (2, HIDDEN))
        b, big_b = rng.normal(0, BIAS, HIDDEN), rng.normal(0, BIAS)
        if method == "dropout":
            w, big_w = w * (rng.random(HIDDEN) >= rate), big_w * (rng.random(HIDDEN) >= rate)
        out.append(big_b + np.sign(b + np.outer(x, w)) @ big_w)
    return np.array(out)


def steps(values: torch.Tensor) -> torch.Tensor:
    return (values.diff(dim=1).abs() > 1e-4).sum(1).double()


@pytest.mark.parametrize("method", METHODS)
def test_values_are_those_of_the_formula(method: Any) -> None:
    """Distributions at three points, and their differences between points, agree with the direct simulation."""
    x = torch.tensor([-3.0, 0.0, 1.0])
    got, expected = prior_functions(method, x, functions=600).numpy(), simulate(method, x.numpy(), 4000)
    for i in range(3):
        assert stats.ks_2samp(got[:, i], expected[:, i]).pvalue > 0.005
    for i, j in ((0, 1), (1, 2)):
        assert stats.ks_2samp(got[:, i] - got[:, j], expected[:, i] - expected[:, j]).pvalue > 0.005
    variance = BIAS**2 + HIDDEN * WEIGHT**2 * (0.5 if method == "dropout" else 1.0)
    np.testing.assert_allclose(got.var(0), variance, rtol=4 * math.sqrt(2 / len(got)))
    assert abs(got.mean()) < 4 * math.sqrt(variance / len(got))


@pytest.mark.parametrize("method", METHODS)
def test_a_quarter_of_the_steps_survives_dropout(method: Any) -> None:
    """Steps lie at -b/w, a Cauchy variable of scale bias_std / weight_std; with w and W each dropped half of the time a quarter is seen."""
    x, functions = torch.linspace(-5, 5, 20_001, dtype=torch.float64), 12
    inside = 2 / math.pi * math.atan(5 / (BIAS / WEIGHT))
    share = inside * (0.25 if method == "dropout" else 1.0)
    counted = steps(prior_functions(method, x, functions=functions)).mean().item()
    error = math.sqrt(HIDDEN * share * (1 - share) / functions)
    assert (
        abs(counted - HIDDEN * share) < 4 * error + 0.02 * HIDDEN * share
    )  # two steps may fall between the same two points


def test_rate_and_standard_deviations() -> None:
    """Nothing dropped leaves every step; the second reading of the paper is the first one stretched."""
    x = torch.linspace(-1e4, 1e4, 3)
    everything = prior_functions("dropout", x, functions=200, rate=0.0)
    np.testing.assert_allclose(everything.var(0).numpy(), 520, rtol=0.4)
    wide = prior_functions("emp", x, functions=200, bias_std=20.0, weight_std=5.0)
    np.testing.assert_allclose(wide.var(0).numpy(), 400 + 100 * 25, rtol=0.4)
    assert steps(prior_functions("dropout", x, rate=0.99999)).sum() == 0
    assert prior_functions("emp", x, functions=0).shape == (0, 3)


def test_same_seed_same_functions_each_its_own() -> None:
    x = torch.linspace(-2, 2, 50)
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(prior_functions("emp", x, functions=4))
    assert torch.equal(*drawn)
    assert len({tuple(line.tolist()) for line in drawn[0]}) == 4


def test_errors_say_what_is_needed() -> None:
    with pytest.raises(ValueError, match="unknown method 'dropuot'; did you mean 'dropout'"):
        prior_functions("dropuot", torch.zeros(3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"vector of real numbers x, got shape \(3, 1\)"):
        prior_functions("emp", torch.zeros(3, 1))
    with pytest.raises(ValueError, match="rate must lie in"):
        prior_functions("dropout", torch.zeros(3), rate=1.0)


def test_picture(tmp_path: Path) -> None:
    """Two panels with the paper's methods, three lines in each, on the same axes."""
    figure = plot_prior_functions(tmp_path / "figure.png", points=401)
    left, right = figure.axes
    assert left.get_title().startswith("dropout") and right.get_title().startswith("EMP")
    assert [len(axes.lines) for axes in figure.axes] == [3, 3] and left.get_ylim() == right.get_ylim()
    assert (tmp_path / "figure.png").read_bytes()[:4] == b"\x89PNG"



def test_matplotlib_is_named_when_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="plot_prior_functions needs matplotlib"):
        module.plot_prior_functions(tmp_path / "figure.png")
