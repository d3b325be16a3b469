"""Temperatures, conformal sets and intervals, abstention: against closed forms, slow loops and exact laws."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import slimbayes as sb
from slimbayes.decisions import Abstention, Conformal, CVPlus, TemperatureScaling

S, N, C = 4, 200, 3


def real(mean: Tensor, scale: Any = 1.0) -> sb.Prediction:
    return sb.Prediction.from_outputs(mean[None], "gaussian", likelihood_std=scale)


def classes(logits: Tensor) -> sb.Prediction:
    return sb.Prediction.from_outputs(logits[None] if logits.dim() == 2 else logits)


# TemperatureScaling ---------------------------------------------------------------------------------------------------


def test_the_temperature_of_one_normal_is_the_root_mean_square_residual() -> None:
    mean, y = torch.randn(N).double(), torch.randn(N).double()
    found = TemperatureScaling.fit(real(mean, 0.5), y)
    assert found.temperature == pytest.approx(
        float(((y - mean) / 0.5).square().mean().sqrt()), rel=1e-4
    )
    scaled = found(real(mean, 0.5))
    torch.testing.assert_close(scaled.mean, mean)
    torch.testing.assert_close(
        scaled.std, torch.full_like(mean, 0.5 * found.temperature)
    )


def test_rows_that_leave_the_temperature_open_are_told_of() -> None:
    sure = sb.Prediction.from_outputs(torch.tensor([[[2.0, 0.0]] * 5]))
    with pytest.warns(
        sb.SlimbayesWarning,
        match="No temperature between 0.01 and 100 is best, so 0.01 was taken",
    ):
        low = TemperatureScaling.fit(sure, torch.zeros(5, dtype=torch.long))
    with pytest.warns(sb.SlimbayesWarning, match="so 100 was taken"):
        high = TemperatureScaling.fit(sure, torch.ones(5, dtype=torch.long))
    assert low.temperature < 0.02 and high.temperature > 50


def test_the_temperature_of_classes_undoes_logits_that_were_sharpened() -> None:
    logits = (
        2 * torch.randn(4000, C, generator=torch.Generator().manual_seed(0)).double()
    )
    y = torch.multinomial(
        logits.softmax(-1), 1, generator=torch.Generator().manual_seed(1)
    )[:, 0]
    assert TemperatureScaling.fit(classes(3 * logits), y).temperature == pytest.approx(
        3, rel=0.1
    )
    draws = torch.stack([3 * logits, 3 * logits + 1])  # a constant changes nothing
    assert TemperatureScaling.fit(classes(draws), y).temperature == pytest.approx(
        3, rel=0.1
    )


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_a_prediction_at_a_temperature_is_that_of_the_scaled_outputs(
    likelihood: Any,
) -> None:
    """Classes: as if all logits had been divided. One stays as it was; parts add up; the NLL is lowest at the fit."""
    outputs = (
        3 * torch.randn(S, N, *(() if likelihood != "categorical" else (C,))).double()
    )
    y = (
        outputs[0].argmax(-1)
        if likelihood == "categorical"
        else (outputs[0] > 0).long()
    ) * (torch.rand(N) > 0.3)
    y = y if likelihood != "gaussian" else torch.randn(N).double()
    options: Any = {"members": 2, "likelihood_std": 0.1, "weights": [0.25, 0.75]}
    pred = sb.Prediction.from_outputs(outputs, likelihood, **options)
    for name in ("mean", "aleatoric", "epistemic", "by_draw"):
        torch.testing.assert_close(
            getattr(TemperatureScaling(1.0)(pred), name), getattr(pred, name)
        )
    fitted = TemperatureScaling.fit(pred, y)
    best = -fitted(pred).log_prob(y).mean()
    for factor in (0.9, 1.1):
        assert (
            best
            < -TemperatureScaling(factor * fitted.temperature)(pred).log_prob(y).mean()
        )
    if likelihood != "gaussian":
        other = sb.Prediction.from_outputs(outputs / 2, likelihood, **options)
        for name in ("mean", "aleatoric", "epistemic", "member_mean"):
            torch.testing.assert_close(
                getattr(TemperatureScaling(2.0)(pred), name), getattr(other, name)
            )


# Conformal ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("n", "level"), [(50, 0.9), (99, 0.9), (30, 0.5)])
def test_coverage_given_the_held_out_rows_has_its_exact_law(
    n: int, level: float
) -> None:
    """Beta(k, n + 1 - k) for scores without ties, by a Kolmogorov-Smirnov test over 300 held-out sets."""
    generator = torch.Generator().manual_seed(n)
    k = math.ceil((n + 1) * level - 1e-9)
    found = []
    for _ in range(300):
        y = torch.randn(n, generator=generator).double()
        low, high = Conformal.fit(real(torch.zeros(n).double(), 0.3), y, level)(
            real(torch.zeros(1).double(), 0.3)
        )
        found.append(stats.norm.cdf(float(high)) - stats.norm.cdf(float(low)))
    assert stats.kstest(found, stats.beta(k, n + 1 - k).cdf).pvalue > 1e-3
    assert np.mean(found) == pytest.approx(
        k / (n + 1), abs=4 * stats.beta(k, n + 1 - k).std() / math.sqrt(300)
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adaptive", "threshold"])
@pytest.mark.parametrize("sharp", [0.3, 4.0])
def test_sets_cover_however_wrong_the_model_is(kind: Any, sharp: float) -> None:
    """Too sure or not sure enough: the share of covered labels over 150 held-out sets is k / (n + 1), to four standard
    errors.
    """
    generator, n, new, level = torch.Generator().manual_seed(0), 60, 200, 0.8
    shares = []
    for trial in range(150):
        logits = 1.5 * torch.randn(n + new, 5, generator=generator).double()
        y = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        pred = classes(sharp * logits)
        sets = Conformal.fit(pred[:n], y[:n], level, kind, seed=2 * trial)(
            pred[n:], seed=2 * trial + 1
        )
        assert isinstance(sets, Tensor) and sets.shape == (new, 5)
        shares.append(float(sets.gather(1, y[n:, None]).double().mean()))
    exact = math.ceil((n + 1) * level) / (n + 1)
    assert np.mean(shares) == pytest.approx(
        exact, abs=4 * np.std(shares) / math.sqrt(len(shares))
    )


def test_adaptive_scores_are_the_mass_above_a_class_and_sets_grow_with_doubt() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.3, 0.3], [0.98, 0.01, 0.01]]).double()
    found = sb.decisions.conformal._class_scores(classes(p.log()), "adaptive", 0)
    lowest, highest = torch.tensor([0.0, 0.5, 0.8]), torch.tensor([0.5, 0.8, 1.0])
    assert bool(((found[0] >= lowest) & (found[0] <= highest)).all())
    pred = classes(p[[0, 1, 2] * 50].log())
    rule = Conformal.fit(pred, torch.multinomial(p[[0, 1, 2] * 50], 1)[:, 0], 0.9)
    sets = rule(pred)
    assert isinstance(sets, Tensor)
    size = sets.double().sum(-1).reshape(50, 3).mean(0)
    assert size[2] + 0.5 < size[0] and size[2] + 0.5 < size[1]


def test_each_of_several_real_targets_has_its_own_bound() -> None:
    y = torch.randn(500, 2).double() * torch.tensor([1.0, 10.0])
    low, high = Conformal.fit(real(torch.zeros(500, 2).double()), y, 0.9, "absolute")(
        real(torch.zeros(1, 2).double())
    )
    width = (high - low)[0] / 2
    expected = y.abs().sort(0).values[math.ceil(501 * 0.9) - 1]
    torch.testing.assert_close(width, expected)


# CV+ ------------------------------------------------------------------------------------------------------------------


def test_cv_plus_intervals_and_sets_equal_their_definition() -> None:
    """Barber et al. 2021, Eq. of CV+, and Romano et al. 2020, Algorithm 2, row by row and class by class."""
    level, folds, each, new = 0.8, 3, 7, 5
    n = folds * each
    centres, y = torch.randn(folds, each).double(), torch.randn(folds, each).double()
    ahead = torch.randn(folds, new).double()
    rule = CVPlus.fit([real(c) for c in centres], list(y), level, "absolute")
    low, high = rule([real(c) for c in ahead])
    for j in range(new):
        ends = [
            sorted(
                float(ahead[k, j] + sign * (y[k, i] - centres[k, i]).abs())
                for k in range(folds)
                for i in range(each)
            )
            for sign in (-1, 1)
        ]
        assert float(low[j]) == pytest.approx(
            ends[0][math.floor((1 - level) * (n + 1)) - 1]
        )
        assert float(high[j]) == pytest.approx(ends[1][math.ceil(level * (n + 1)) - 1])
    logits, labels = (
        torch.randn(folds, each, C).double(),
        torch.randint(C, (folds, each)),
    )
    later = torch.randn(folds, new, C).double()
    sets = CVPlus.fit([classes(z) for z in logits], list(labels), level, "threshold")(
        [classes(z) for z in later]
    )
    p, q = logits.softmax(-1), later.softmax(-1)
    for j in range(new):
        for c in range(C):
            below = sum(
                float(1 - p[k, i, labels[k, i]]) < float(1 - q[k, j, c])
                for k in range(folds)
                for i in range(each)
            )
            assert bool(sets[j, c]) == (below < level * (n + 1))


@pytest.mark.slow
def test_cv_plus_covers_at_least_what_it_promises() -> None:
    """Means of the other folds as models, 200 data sets: coverage above 2 level - 1, and near the level."""
    generator, hits, level, folds, each = (
        torch.Generator().manual_seed(3),
        0,
        0.9,
        4,
        10,
    )
    for _ in range(200):
        data = torch.randn(folds * each + 1, generator=generator).double()
        parts = data[:-1].view(folds, each)
        means = [(parts.sum() - part.sum()) / (each * (folds - 1)) for part in parts]
        rule = CVPlus.fit([real(m.expand(each)) for m in means], list(parts), level)
        low, high = rule([real(m.expand(1)) for m in means])
        hits += bool((low <= data[-1]) & (data[-1] <= high))
    assert stats.binom.cdf(hits, 200, 2 * level - 1 - 1 / (folds + 1)) > 1e-3
    assert stats.binomtest(hits, 200, level).pvalue > 1e-3


# Abstention -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_promise_of_abstention_fails_no_more_often_than_delta() -> None:
    """Confidences c uniform on (1/2, 1) of which a share 0.8 (1 - c) is wrong: the risk above t is 0.4 (1 - t)."""
    generator, risk, failed, trials, answered = (
        torch.Generator().manual_seed(0),
        0.15,
        0,
        80,
        [],
    )
    for _ in range(trials):
        c = 0.5 + 0.5 * torch.rand(400, generator=generator).double()
        wrong = torch.rand(400, generator=generator) < 0.8 * (1 - c)
        pred = classes(torch.stack([c, 1 - c], -1).log())
        rule = Abstention.fit(pred, wrong.long(), risk=risk, delta=0.1)
        failed += 0.4 * (1 - max(rule.threshold, 0.5)) > risk
        answered.append(rule.answered)
    assert failed <= stats.binom.ppf(0.999, trials, 0.1)
    assert 0.25 < np.mean(answered) < 0.75  # of the 0.75 that have this risk


def test_abstention_takes_any_uncertainty_and_says_when_nothing_can_be_promised() -> (
    None
):
    noise = torch.cat([torch.full((300,), 0.1), torch.full((100,), 5.0)]).double()
    y = noise * torch.randn(400, generator=torch.Generator().manual_seed(0)).double()
    pred = real(torch.zeros(400).double(), noise)
    rule = Abstention.fit(pred, y, risk=0.05, tolerance=0.5)
    assert (
        torch.equal(rule(pred), noise < 1)
        and rule.answered == 0.75
        and rule.by == "total"
    )
    everything = Abstention.fit(pred, 0 * y, risk=0.05, tolerance=0.5)
    assert bool(everything(pred).all()) and everything.answered == 1
    few = Abstention.fit(
        pred[:20], 0 * y[:20], risk=0.05, tolerance=0.5
    )  # 20 rows say too little
    assert few.answered == 0 and not bool(few(pred).any())


@pytest.mark.parametrize("errors_first", [False, True])
def test_rows_that_are_equally_sure_are_judged_together_in_whatever_order(
    errors_first: bool,
) -> None:
    """Just enough rows for three errors; one row less promises nothing. A less sure half that is wrong is left out."""
    enough = next(n for n in range(9, 999) if stats.binom.cdf(3, n, 0.05) <= 0.05 / 8)
    for rows, answered in ((enough, 1), (enough - 1, 0)):
        wrong = (
            (torch.arange(rows) < 3).long()
            if errors_first
            else (torch.arange(rows) >= rows - 3).long()
        )
        sure, unsure = (
            torch.tensor([[p, 1 - p]]).log().expand(rows, 2) for p in (0.8, 0.6)
        )
        assert (
            Abstention.fit(classes(sure), wrong, risk=0.05, delta=0.05).answered
            == answered
        )
        both = Abstention.fit(
            classes(torch.cat([unsure, sure])),
            torch.cat([1 - wrong, wrong]),
            risk=0.05,
            delta=0.05,
        )
        assert both.answered == answered / 2


# Refused --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (
            lambda p, y: Conformal.fit(p[:8], y[:8], 0.9),
            "level=0.9 needs at least 9 held-out rows, got 8",
        ),
        (
            lambda p, y: Conformal.fit(p, y, 1.0),
            "level must lie strictly between 0 and 1, got 1.0",
        ),
        (
            lambda p, y: Conformal.fit(p, y, kind="scaled"),
            "kind must be 'adaptive' or 'threshold'.*got 'scaled'",
        ),
        (
            lambda p, y: Conformal.fit(p, y[1:]),
            r"shape \(200,\) is needed.*got \(199,\)",
        ),
        (lambda p, y: Conformal.fit(p, y + 5), "from 0 to 2, got"),
        (
            lambda p, y: CVPlus.fit([p], [y]),
            "at least two folds, got 1 predictions and 1 targets",
        ),
        (
            lambda p, y: CVPlus.fit([p[:4]] * 2, [y[:4]] * 2),
            "level=0.9 needs at least 9 rows, got 8",
        ),
        (
            lambda p, y: CVPlus.fit([p] * 2, [y] * 2)([p]),
            "2 folds and needs a prediction of each, got 1",
        ),
        (
            lambda p, y: CVPlus.fit([p] * 2, [y] * 2)([p, p[0]]),
            r"the same new rows, got numbers of rows \[1, 200\]",
        ),
        (
            lambda p, y: CVPlus.fit([p] * 2, [y] * 2)([real(torch.zeros(3))] * 2),
            "kind must be 'scaled' or 'absolute'",
        ),
        (
            lambda p, y: CVPlus.fit([p, real(torch.zeros(200))], [y] * 2),
            "kind must be 'scaled' or 'absolute'",
        ),
        (
            lambda p, y: Conformal.fit(p, y)(classes(torch.full((1, 2, C), torch.nan))),
            "got NaN: leave such rows out",
        ),
        (
            lambda p, y: Abstention.fit(p, y, risk=0.0),
            "risk and delta must lie strictly between",
        ),
        (
            lambda p, y: Abstention.fit(p, y, by="distance"),
            "by='distance' is nothing this prediction has",
        ),
        (
            lambda p, y: Abstention.fit(real(torch.zeros(3)), torch.zeros(3)),
            "tolerance says which error",
        ),
        (
            lambda p, y: Conformal.fit(real(torch.zeros(30), 0.0), torch.zeros(30)),
            "take kind='absolute'",
        ),
        (
            lambda p, y: TemperatureScaling(0.0),
            "temperature must be positive and finite, got 0.0",
        ),
        (
            lambda p, y: TemperatureScaling(2.0)(
                sb.Prediction(**{**vars(p), "by_draw": None})
            ),
            "keep_samples=True",
        ),
        (
            lambda p, y: Conformal.fit(
                classes(torch.zeros(1, 9, 4, C)), torch.zeros(9, 4)
            ),
            "Rows are what is",
        ),
    ],
)
def test_what_cannot_be_promised_is_refused(call: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call(classes(torch.randn(N, C)), torch.randint(C, (N,)))
