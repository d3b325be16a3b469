"""The estimators obey scikit-learn, read tables as they come, and say what they cannot read."""

import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any
from unittest import SkipTest

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_iris
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator
from slimbayes_lab.models import table_net
from torch import nn

import slimbayes as sb
from slimbayes.errors import SlimbayesWarning
from slimbayes.sklearn import BayesClassifier, BayesRegressor

QUICK: dict[str, Any] = {
    "module": (8,),
    "method": sb.Rank1(members=2),
    "batch_size": 512,
    "lr": 0.05,
    "draws": 4,
}
SEEDED = QUICK | {"epochs": 8, "random_state": 0}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@pytest.mark.parametrize(
    ("estimator", "epochs"), [(BayesClassifier, 6), (BayesRegressor, 25)]
)
def test_scikit_learn_approves(estimator: Any, epochs: int) -> None:
    """`check_classifiers_train` and `check_regressors_train` need a good fit; the others any."""
    for one, check in estimator_checks_generator(estimator(**QUICK)):
        with suppress(
            SkipTest
        ):  # array APIs, for which scikit-learn wants another package
            check(
                one.set_params(
                    epochs=epochs if check.func.__name__.endswith("s_train") else 1
                )
            )


def line(rows: int = 80, noise: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(rows, 2))
    return X, 3 * X[:, 0] + noise * rng.normal(size=rows) + 100


def frame(rows: int = 60) -> Any:
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    return pandas.DataFrame(
        {
            "size": rng.normal(size=rows),
            "colour": rng.choice(["red", "green", "blue"], rows),
            "new": rng.choice([True, False], rows),
            "kind": pandas.Categorical(rng.integers(0, 3, rows)),
        }
    )


def colours(table: Any) -> np.ndarray:
    return np.where(np.asarray(table["colour"]) == "red", "warm", "cold")


@pytest.mark.slow
def test_searches_pipelines_and_calibration_take_an_estimator() -> None:
    X, y = line()
    pipeline = make_pipeline(
        StandardScaler(), BayesRegressor(**SEEDED | {"epochs": 20})
    )
    search = GridSearchCV(
        pipeline, {"bayesregressor__noise": ["learned", 0.1]}, cv=2
    ).fit(X, y)
    assert search.best_score_ > 0.9
    assert cross_val_score(search.best_estimator_, X, y, cv=2).min() > 0.9
    X, y = load_iris(return_X_y=True)
    model = CalibratedClassifierCV(
        BayesClassifier(**SEEDED | {"epochs": 20}), cv=2
    ).fit(X, y)
    assert model.score(X, y) > 0.9


@pytest.mark.slow
def test_a_pickle_and_a_clone_predict_the_same_and_torch_s_generator_is_left_alone() -> (
    None
):
    X, y = line()
    state = torch.get_rng_state()
    model = BayesRegressor(**SEEDED).fit(X, y)
    mean, std = model.predict(X, return_std=True)
    assert torch.equal(state, torch.get_rng_state())
    for other in (pickle.loads(pickle.dumps(model)), clone(model).fit(X, y)):
        again = other.predict(X, return_std=True)
        np.testing.assert_array_equal(again[0], mean)
        np.testing.assert_array_equal(again[1], std)


@pytest.mark.slow
def test_a_weight_of_two_is_a_row_given_twice() -> None:
    X, y = line(50)
    weight = np.arange(50) % 3
    weighed = BayesRegressor(**SEEDED).fit(X, y, weight)
    repeated = BayesRegressor(**SEEDED).fit(X.repeat(weight, 0), y.repeat(weight))
    np.testing.assert_array_equal(weighed.predict(X), repeated.predict(X))
    plain = BayesRegressor(**SEEDED).fit(X, y)
    assert np.abs(plain.predict(X) - weighed.predict(X)).max() > 1e-3


@pytest.mark.slow
def test_a_row_of_weight_zero_is_absent() -> None:
    """Neither its category nor its gap is known, and nothing about it moves the fit."""
    table = frame()
    y, weight = colours(table), np.ones(60)
    table.loc[0, "colour"], table.loc[1, "size"], weight[:2] = "mauve", np.nan, 0
    model = BayesClassifier(**SEEDED).fit(table, y, weight)
    rest = BayesClassifier(**SEEDED).fit(table[2:], y[2:])
    np.testing.assert_array_equal(
        model.predict_proba(table[2:]), rest.predict_proba(table[2:])
    )
    with pytest.raises(
        ValueError, match="'mauve', a category that training did not see"
    ):
        model.predict(table[:1])


@pytest.mark.slow
def test_parts_after_a_fit_do_not_forget_it() -> None:
    """The KL is shared out among all rows so far: two more would otherwise pull the posterior to its prior."""
    X, y = line(400)
    model = BayesRegressor(**SEEDED | {"epochs": 60, "scaling": "standard"}).fit(X, y)
    before = model.score(X, y)
    for _ in range(40):
        model.partial_fit(X[:2], y[:2])
    assert model.seen_ == 480
    assert before > 0.95 and model.score(X, y) > 0.95


def test_members_of_an_ensemble_start_as_the_table_s_network_does() -> None:
    net = sb.bayesianize(
        table_net(3, (4,), outputs=2, hidden=(256,)), sb.Ensemble(members=2)
    )  # without a warning
    first, second = (
        layer.weight.detach()
        for layer in (net.dense1, net.posterior.members.others[0].dense1)
    )
    assert (
        not torch.equal(first, second)
        and abs(float(first.std() / second.std()) - 1) < 0.1
    )
    assert not net.posterior.members.others[0].table.words[0].weight[0].any()


def test_early_stopping_keeps_the_best_epoch() -> None:
    X, y = line(60, noise=2.0)
    model = BayesRegressor(**SEEDED | {"epochs": 60, "patience": 3, "lr": 0.2}).fit(
        X, y
    )
    curve = model.validation_curve_
    assert len(curve) < 60 and np.argmin(curve) == len(curve) - 4
    short = BayesRegressor(
        **SEEDED | {"epochs": len(curve) - 3, "patience": 3, "lr": 0.2}
    ).fit(X, y)
    np.testing.assert_array_equal(short.predict(X), model.predict(X))


@pytest.mark.slow
def test_progress_is_shown_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    X, y = line()
    silent = BayesRegressor(**SEEDED).fit(X, y)
    assert capsys.readouterr() == ("", "")
    shown = BayesRegressor(verbose=True, **SEEDED).fit(X, y)
    told = capsys.readouterr().err
    assert "BayesRegressor" in told and "8/8" in told and "validation_nll=" in told
    np.testing.assert_array_equal(shown.predict(X), silent.predict(X))


def test_progress_without_tqdm_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match="verbose=True .* pip install tqdm"):
        BayesRegressor(verbose=True, **SEEDED).fit(*line())


@pytest.mark.parametrize("noise", ["learned", "heteroscedastic", 2.0])
def test_noise_is_found_in_the_units_of_the_target(noise: Any) -> None:
    X, y = line(400, noise=2.0)
    model = BayesRegressor(
        **SEEDED
        | {"noise": noise, "epochs": 60, "kl_weight": 0.1, "scaling": "standard"}
    ).fit(X, y)
    _, std = model.predict(X, return_std=True)
    assert abs(float(np.median(std)) / 2.0 - 1) < 0.3
    low, high = model.predict_interval(X, level=0.8)
    assert 0.7 < ((low < y) & (y < high)).mean() < 0.9
    scale = model.prediction(X).aleatoric.sqrt()
    assert noise != 2.0 or torch.allclose(scale, torch.full_like(scale, 2.0), rtol=1e-3)


@pytest.mark.slow
def test_several_targets() -> None:
    X, y = line()
    model = BayesRegressor(**SEEDED | {"epochs": 40, "scaling": "standard"}).fit(
        X, np.stack([y, -10 * y], 1)
    )
    mean, std = model.predict(X, return_std=True)
    assert mean.shape == std.shape == (80, 2)
    assert model.score(X, np.stack([y, -10 * y], 1)) > 0.9


@pytest.mark.slow
def test_parts_are_learnt_one_after_another() -> None:
    X, y = load_iris(return_X_y=True)
    model = BayesClassifier(**SEEDED)
    for part in range(30):
        model.partial_fit(X[part % 3 :: 3], y[part % 3 :: 3], classes=[0, 1, 2])
    assert model.score(X, y) > 0.9
    pickle.loads(pickle.dumps(model)).partial_fit(X[:10], y[:10])
    with pytest.raises(ValueError, match="Label 7 is none of the classes"):
        model.partial_fit(X, y + 7)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_categories_of_a_frame_get_embeddings(library: str) -> None:
    table = frame()
    y = colours(table)
    if library == "polars":
        polars = pytest.importorskip("polars")
        table = polars.DataFrame({name: table[name].to_list() for name in table})
        table = table.with_columns(
            polars.col("kind").cast(polars.String).cast(polars.Categorical)
        )
    model = BayesClassifier(**SEEDED | {"epochs": 20}).fit(table, y)
    assert model.table_.sizes == (4, 3, 4) and list(model.feature_names_in_) == [
        "size",
        "colour",
        "new",
        "kind",
    ]
    assert model.score(table, y) > 0.95
    assert model.predict(table)[0] in ("warm", "cold")


FRAMES = ["pandas", "polars", "pyarrow"]


def made(library: str, columns: dict[str, list[Any]]) -> Any:
    module = pytest.importorskip(library)
    return module.table(columns) if library == "pyarrow" else module.DataFrame(columns)


@pytest.mark.parametrize("library", FRAMES)
def test_the_library_of_a_frame_changes_nothing(library: str) -> None:
    rng = np.random.default_rng(0)
    sizes, colours = rng.normal(size=60).tolist(), rng.choice(["red", "blue"], 60)
    columns = {
        "size": [None if row == 3 else size for row, size in enumerate(sizes)],
        "colour": [None if row == 4 else str(one) for row, one in enumerate(colours)],
    }
    y = [f"{one} thing" for one in colours]
    settings = SEEDED | {"missing": "impute"}
    expected = BayesClassifier(**settings).fit(made("pandas", columns), y)
    model = BayesClassifier(**settings).fit(made(library, columns), y)
    assert list(model.feature_names_in_) == ["size", "colour"]
    np.testing.assert_array_equal(
        model.predict_proba(made(library, columns)),
        expected.predict_proba(made("pandas", columns)),
    )


@pytest.mark.parametrize("library", FRAMES)
def test_exact_decimals_are_numbers(library: str) -> None:
    exact = [Decimal(row) / 8 for row in range(40)]
    floats = [float(one) for one in exact]
    y = np.arange(40.0)
    model = BayesRegressor(**SEEDED).fit(made(library, {"price": exact}), y)
    assert model.table_.sizes == ()
    same = BayesRegressor(**SEEDED).fit(made(library, {"price": floats}), y)
    np.testing.assert_array_equal(
        model.predict(made(library, {"price": exact})),
        same.predict(made(library, {"price": floats})),
    )


def test_sparse_columns_are_numbers() -> None:
    pandas = pytest.importorskip("pandas")
    y = np.arange(40.0)
    sparse = pandas.DataFrame({"it": pandas.arrays.SparseArray(y)})
    model = BayesRegressor(**SEEDED).fit(sparse, y)
    same = BayesRegressor(**SEEDED).fit(pandas.DataFrame({"it": y}), y)
    np.testing.assert_array_equal(model.predict(sparse), same.predict(sparse))


REFUSED: dict[str, tuple[Callable[[int], Any], str]] = {
    "dates": (lambda i: date(2024, 1, 1) + timedelta(i), "days since a date"),
    "moments": (lambda i: datetime(2024, 1, 1) + timedelta(i), "days since a date"),
    "durations": (lambda i: timedelta(hours=i), "or durations"),
    "lists": (lambda i: [i, i], "structures or bytes"),
    "structures": (lambda i: {"a": i}, "structures or bytes"),
    "money": (lambda i: f"${i},200", "take the signs out, or name it in categorical"),
    "names": (lambda i: f"name {i}", "50 different texts in 50 rows"),
    "ids": (lambda i: 2**60 + i, "beyond 2.53.*categorical_features"),
}


@pytest.mark.parametrize("library", FRAMES)
@pytest.mark.parametrize("kind", REFUSED)
def test_columns_that_are_no_features_are_refused(kind: str, library: str) -> None:
    cell, told = REFUSED[kind]
    table = made(library, {"it": [cell(row) for row in range(50)]})
    with pytest.raises(ValueError, match=f"^Column 'it' holds .*{told}"):
        BayesRegressor(**SEEDED).fit(table, np.arange(50.0))
    if kind in ("lists", "structures"):
        return
    model = BayesRegressor(categorical_features=["it"], **SEEDED | {"epochs": 1})
    assert model.fit(table, np.arange(50.0)).table_.sizes == (51,)


@pytest.mark.parametrize("library", FRAMES)
def test_a_column_may_not_change_its_kind_after_training(library: str) -> None:
    y = np.arange(40.0)
    numbers = made(library, {"it": [row / 2 for row in range(40)]})
    model = BayesRegressor(**SEEDED | {"epochs": 1}).fit(numbers, y)
    with pytest.raises(ValueError, match="Column 'it' must hold numbers"):
        model.predict(made(library, {"it": [date(2024, 1, 1)] * 40}))
    words = made(library, {"it": ["a", "b"] * 20})
    model = BayesRegressor(**SEEDED | {"epochs": 1}).fit(words, y)
    with pytest.raises(ValueError, match="Column 'it' holds lists"):
        model.predict(made(library, {"it": [["a"], ["b"]] * 20}))


def test_columns_of_one_name_are_refused() -> None:
    pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    twice = [
        pandas.DataFrame(np.zeros((40, 2)), columns=["it", "it"]),
        pyarrow.Table.from_arrays([pyarrow.array(np.zeros(40))] * 2, ["it", "it"]),
    ]
    for table in twice:
        with pytest.raises(ValueError, match="unique column names.*\n.*'it' 2 times"):
            BayesRegressor(**SEEDED).fit(table, np.arange(40.0))


def spoilt(column: str, value: Any) -> Any:
    table = frame().astype({column: object})
    table.loc[3, column] = value
    return table


@pytest.mark.parametrize(
    ("column", "value", "told"),
    [
        (
            "colour",
            "mauve",
            "Column 'colour' holds 'mauve', a category that training did not see",
        ),
        ("colour", None, r"missing in column 'colour' \(1 of 60\).*impute"),
        ("size", np.nan, r"contains NaN.*'size' \(1 of 60\)"),
        ("size", "large", "Column 'size' must hold numbers, got 'large'"),
        ("size", np.inf, "contains infinity in column 'size'"),
    ],
)
def test_cells_that_cannot_be_read_are_named(
    column: str, value: Any, told: str
) -> None:
    table = frame()
    model = BayesClassifier(**SEEDED | {"epochs": 1}).fit(table, colours(table))
    with pytest.raises(ValueError, match=told):
        model.predict(spoilt(column, value))


def test_categories_of_several_types_are_refused() -> None:
    with pytest.raises(
        TypeError, match="Column 'colour' holds categories of several types: int, str"
    ):
        BayesClassifier(**SEEDED).fit(spoilt("colour", 7), colours(frame()))


def test_columns_must_be_those_of_training() -> None:
    table = frame()
    model = BayesClassifier(**SEEDED | {"epochs": 1}).fit(table, colours(table))
    with pytest.raises(ValueError, match="same order"):
        model.predict(table[["colour", "size", "new", "kind"]])
    with pytest.raises(ValueError, match="now missing"):
        model.predict(table[["size", "colour"]])
    with pytest.raises(ValueError, match="Column 'day' holds dates"):
        model.fit(table.assign(day=np.datetime64("2020-01-01")), colours(table))


@pytest.mark.slow
def test_what_is_missing_is_filled_in_when_asked() -> None:
    table = spoilt("colour", None)
    table.loc[:20, "size"] = np.nan
    y = colours(frame())
    with pytest.raises(ValueError, match="impute"):
        BayesClassifier(**SEEDED).fit(table, y)
    model = BayesClassifier(missing="impute", **SEEDED | {"epochs": 20}).fit(table, y)
    assert model.score(table, y) > 0.95
    assert next(iter(model.network_.parameters())).shape[1] > 1
    with pytest.warns(
        SlimbayesWarning,
        match=r"did not see count as missing: in column 'colour' \(1 of 60 rows\)",
    ):
        assert np.isfinite(model.predict_proba(spoilt("colour", "mauve"))).all()


def test_categories_by_position() -> None:
    X = np.array([["a", 1.0], ["b", 2.0]] * 20, dtype=object)
    model = BayesClassifier(categorical_features=[0], **SEEDED).fit(
        X, X[:, 0].astype(str)
    )
    assert model.score(X, X[:, 0].astype(str)) == 1.0
    for wrong, told in (([2], "X has 2 columns"), (["a"], "names 'a'")):
        with pytest.raises(ValueError, match=told):
            BayesClassifier(categorical_features=wrong, **SEEDED).fit(
                X, X[:, 0].astype(str)
            )


@pytest.mark.slow
def test_modules_of_one_s_own() -> None:
    X, y = line()
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    for module in (net, lambda inputs, outputs: nn.Linear(inputs, outputs)):
        model = BayesRegressor(
            **SEEDED | {"module": module, "epochs": 40, "scaling": "standard"}
        ).fit(X, y)
        assert model.score(X, y) > 0.9
    assert not hasattr(net, "_slimbayes")  # it was copied
    with pytest.raises(TypeError, match=r"must give a torch.nn.Module, got int"):
        BayesRegressor(module=lambda inputs, outputs: 3).fit(X, y)
    with pytest.raises(
        ValueError,
        match=r"must give 2 outputs for each row, \(1, 2\) for one, got \(1, 1\)",
    ):
        BayesRegressor(module=nn.Linear(2, 1)).fit(X, y)
    with pytest.raises(
        ValueError, match=r"must give 2 outputs for each row, .* got \(1, 5\)"
    ):
        BayesClassifier(module=nn.Linear(2, 5)).fit(X, y > 100)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"epochs": 0}, "epochs must be a whole number of at least 1"),
        ({"missing": "drop"}, "missing='drop' is not known"),
        ({"scaling": "quantiles"}, "did you mean 'quantile'"),
        ({"noise": "none"}, "noise must be"),
        ({"noise": -1.0}, "noise must be"),
        ({"module": (8, -1)}, "module must be"),
        ({"validation_fraction": 1.0}, "validation_fraction"),
        ({"lr": -1.0}, "lr must be a number that is not negative, got -1.0"),
        ({"weight_decay": "much"}, "weight_decay must be a number"),
        ({"device": "meta3"}, "device='meta3' is not there"),
    ],
)
def test_wrong_parameters_are_told(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        BayesRegressor(**SEEDED | wrong).fit(*line())


@pytest.mark.parametrize("other", [1, None])
def test_labels_of_two_types_are_told(other: Any) -> None:
    X, _ = line(40)
    with pytest.raises(ValueError, match=f"of one type, got .*{type(other).__name__}"):
        BayesClassifier(**SEEDED).fit(X, np.array(["a", other] * 20, dtype=object))


@pytest.mark.slow
def test_noise_that_is_learnt_goes_far_below_the_targets_spread() -> None:
    """A tenth of it, the likelihood's own floor, would cost more than a nat where targets have hardly any noise."""
    X, y = line(300, noise=0.0)
    model = BayesRegressor(
        **SEEDED | {"epochs": 100, "scaling": "standard", "kl_weight": 0.01}
    ).fit(X, y)
    scale = model.prediction(X).aleatoric.sqrt() / y.std()
    assert 0.03 <= float(scale.min()) < 0.08


@pytest.mark.parametrize("noise", [0.02, 0.5, 30.0])
def test_a_fixed_noise_is_the_noise(noise: float) -> None:
    """Also one below the floor and above the ceiling of noise that a network learns."""
    X, y = line(60)
    model = BayesRegressor(**SEEDED | {"noise": noise, "epochs": 2}).fit(X, y)
    scale = model.prediction(X).aleatoric.sqrt()
    assert torch.allclose(scale, torch.full_like(scale, noise), rtol=1e-4)
