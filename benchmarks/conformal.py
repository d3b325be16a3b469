"""Measure how often MAPIE's sets and intervals around our estimators hold the target.

python benchmarks/conformal.py        # prints the table of docs/conformal.md and writes it as JSON

One model is trained. Then its other rows are divided at random again and again: into 100 held-out rows that
conformalize and new ones. Coverage is counted over new rows predicted in one batch, and over some predicted alone.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from mapie.classification import SplitConformalClassifier
from mapie.conformity_scores import ResidualNormalisedScore
from mapie.regression import SplitConformalRegressor
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from slimbayes.sklearn import BayesClassifier, BayesRegressor

LEVEL = 0.9
HELD_OUT = 100
NEW = 200
RECORD = Path(__file__).parents[1] / "lab" / "results" / "benchmarks" / "conformal.json"
# Maps held-out rows, their targets and new rows to a function of some new rows and
# their targets: whether each target is covered, and the size of each set or interval.
Conformalize = Callable[..., Callable[..., tuple[np.ndarray, np.ndarray]]]


@dataclass(frozen=True)
class Row:
    """A line of the table: coverage in a batch and of rows predicted alone, mean size."""

    data: str
    score: str
    batch: float
    alone: float
    size: float


class PredictedStd(RegressorMixin, BaseEstimator):
    """The predictive standard deviation, for intervals that are wide where it is."""

    is_fitted = True

    def __init__(self, model: BayesRegressor) -> None:
        self.model = model

    def fit(self, X: np.ndarray, y: np.ndarray) -> "PredictedStd":
        return self

    def predict(self, X: np.ndarray) -> np.ndarray:
        return self.model.predict(X, return_std=True)[1]


def digits(epochs: int) -> tuple[BayesClassifier, np.ndarray, np.ndarray]:
    """Return a classifier of 400 digits, and the other rows."""
    X, y = load_digits(return_X_y=True)
    X_train, X_rest, y_train, y_rest = train_test_split(
        X, y, train_size=400, random_state=0, stratify=y
    )
    model = BayesClassifier(random_state=0, epochs=epochs).fit(X_train, y_train)
    return model, X_rest, y_rest


def curve(epochs: int) -> tuple[BayesRegressor, np.ndarray, np.ndarray]:
    """Return a regression on 400 rows whose noise grows with the second column."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (1800, 2))
    y = X[:, 0] ** 2 + 0.1 * (1 + X[:, 1] ** 2) * rng.normal(size=len(X))
    model = BayesRegressor(random_state=0, epochs=epochs).fit(X[:400], y[:400])
    return model, X[400:], y[400:]


def sets(
    model: BayesClassifier, score: str, seed: int | None, last: bool | str = True
) -> Conformalize:
    def conformalize(X_held: np.ndarray, y_held: np.ndarray):
        rule = SplitConformalClassifier(
            model, confidence_level=LEVEL, conformity_score=score, random_state=seed
        ).conformalize(X_held, y_held)

        def judge(X: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            options = {"include_last_label": last}
            found = rule.predict_set(X, conformity_score_params=options)[1][:, :, 0]
            return found[np.arange(len(y)), y], found.sum(1)

        return judge

    return conformalize


def intervals(model: BayesRegressor, scaled: bool) -> Conformalize:
    def conformalize(X_held: np.ndarray, y_held: np.ndarray):
        score = "absolute"
        if scaled:
            score = ResidualNormalisedScore(PredictedStd(model), prefit=True)
        rule = SplitConformalRegressor(
            model, confidence_level=LEVEL, conformity_score=score, prefit=True
        ).conformalize(X_held, y_held)

        def judge(X: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            low, high = rule.predict_interval(X)[1][:, :, 0].T
            return (low <= y) & (y <= high), high - low

        return judge

    return conformalize


def own_intervals(model: BayesRegressor) -> Conformalize:
    """The model's own intervals, which need no held-out rows."""

    def judge(X: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        low, high = model.predict_interval(X, level=LEVEL)
        return (low <= y) & (y <= high), high - low

    return lambda X_held, y_held: judge


def measure(
    X: np.ndarray, y: np.ndarray, conformalize: Conformalize, splits: int, alone: int
) -> tuple[float, float, float]:
    """Return coverage in batches, coverage of rows alone, and the mean size."""
    batch, single, sizes = [], [], []
    for split in range(splits):
        order = np.random.default_rng(split).permutation(len(X))
        held, new = order[:HELD_OUT], order[HELD_OUT : HELD_OUT + NEW]
        judge = conformalize(X[held], y[held])
        covered, size = judge(X[new], y[new])
        batch.append(covered.mean())
        sizes.append(size.mean())
        for i in new[:alone]:
            single.append(judge(X[i : i + 1], y[i : i + 1])[0].mean())
    return float(np.mean(batch)), float(np.mean(single)), float(np.mean(sizes))


def rows(splits: int, alone: int, epochs: int) -> Iterator[Row]:
    model, X, y = digits(epochs)
    for name, conformalize in {
        "`lac`": sets(model, "lac", None),
        "`aps`": sets(model, "aps", None),
        "`aps`, randomized, `random_state=None`": sets(
            model, "aps", None, "randomized"
        ),
        "`aps`, randomized, `random_state=0`": sets(model, "aps", 0, "randomized"),
    }.items():
        yield Row("digits", name, *measure(X, y, conformalize, splits, alone))
    model, X, y = curve(epochs)
    for name, conformalize in {
        "`absolute`": intervals(model, scaled=False),
        "by the predicted standard deviation": intervals(model, scaled=True),
        "`predict_interval`, without MAPIE": own_intervals(model),
    }.items():
        yield Row("curve", name, *measure(X, y, conformalize, splits, alone))


def table(measured: list[Row]) -> str:
    lines = [
        "| data | score | in batches | alone | mean size |",
        "|---|---|---|---|---|",
    ]
    for row in measured:
        lines.append(
            f"| {row.data} | {row.score} | {row.batch:.3f} | {row.alone:.3f} "
            f"| {row.size:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--splits", type=int, default=100)
    parser.add_argument("--alone", type=int, default=10, help="rows of each split")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RECORD)
    given = parser.parse_args()
    measured = list(rows(given.splits, given.alone, given.epochs))
    given.out.write_text(json.dumps([asdict(row) for row in measured], indent=1) + "\n")
    print(table(measured))


if __name__ == "__main__":
    main()
