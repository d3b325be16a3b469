"""A table with scikit-learn: intervals that hold what they promise, before and after conformal calibration.

python docs/gallery/table.py        # writes docs/gallery/table.png
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from mapie.conformity_scores import ResidualNormalisedScore
from mapie.regression import SplitConformalRegressor
from matplotlib.figure import Figure
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split

from slimbayes.sklearn import BayesRegressor

LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
PICTURE = Path(__file__).with_suffix(".png")


class PredictedStd(RegressorMixin, BaseEstimator):
    """The predictive standard deviation, for intervals that are wide where it is."""

    is_fitted = True

    def __init__(self, model: BayesRegressor) -> None:
        self.model = model

    def fit(self, X: object, y: object) -> PredictedStd:
        return self

    def predict(self, X: object) -> np.ndarray:
        return self.model.predict(X, return_std=True)[1]


def main(out: Path = PICTURE, epochs: int = 200) -> dict[str, list[float]]:
    """Fit, draw the figure; returns the share of test targets in intervals of each level."""
    rows, targets = load_diabetes(return_X_y=True)
    rest, test, y_rest, y = train_test_split(
        rows, targets, test_size=0.3, random_state=0
    )
    train, held, y_train, y_held = train_test_split(
        rest, y_rest, test_size=0.3, random_state=0
    )
    model = BayesRegressor(random_state=0, epochs=epochs).fit(train, y_train)

    covered: dict[str, list[float]] = {"as predicted": [], "conformal": []}
    for level in LEVELS:
        low, high = model.predict_interval(test, level=level)
        covered["as predicted"].append(float(np.mean((low <= y) & (y <= high))))
        rule = SplitConformalRegressor(
            model,
            confidence_level=level,
            conformity_score=ResidualNormalisedScore(PredictedStd(model), prefit=True),
            prefit=True,
        ).conformalize(held, y_held)
        low, high = rule.predict_interval(test)[1][:, :, 0].T
        covered["conformal"].append(float(np.mean((low <= y) & (y <= high))))

    low, high = model.predict_interval(test, level=0.9)
    mean = model.predict(test)
    order = np.argsort(mean)
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[2, 1])
    left.vlines(
        np.arange(len(order)),
        low[order],
        high[order],
        color="#2f6fb5",
        alpha=0.35,
        linewidth=3,
    )
    left.plot(mean[order], color="#2f6fb5", label="mean and 90 % interval")
    left.plot(y[order], ".", color="#d9731a", label="target")
    left.set(xlabel="test rows, by predicted mean", ylabel="disease progression")
    right.plot([0.45, 1], [0.45, 1], "--", color="grey", linewidth=1)
    for (name, shares), colour in zip(
        covered.items(), ("#d9731a", "#2f6fb5"), strict=True
    ):
        right.plot(LEVELS, shares, "o-", color=colour, label=name)
    right.set(xlabel="promised coverage", ylabel="share of test targets inside")
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, loc="upper left")
    figure.savefig(out, dpi=110)
    return covered


if __name__ == "__main__":
    for name, shares in main().items():
        print(name, dict(zip(LEVELS, shares, strict=True)))
