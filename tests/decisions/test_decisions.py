"""Temperatures and abstention: against closed forms, slow loops and exact laws."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import slimbayes as sb
from slimbayes.decisions import Abstention, TemperatureScaling

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
            lambda p, y: TemperatureScaling(0.0),
            "temperature must be positive and finite, got 0.0",
        ),
        (
            lambda p, y: TemperatureScaling(2.0)(
                sb.Prediction(**{**vars(p), "by_draw": None})
            ),
            "keep_samples=True",
        ),
    ],
)
def test_what_cannot_be_promised_is_refused(call: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call(classes(torch.randn(N, C)), torch.randint(C, (N,)))
