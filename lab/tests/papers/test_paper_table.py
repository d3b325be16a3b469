"""From records to the numbers of a row, and diagnostics on known cases."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from slimbayes_lab.finished.diagnose import Case
from slimbayes_lab.papers.diagnostics import calibration_errors, diagnose
from slimbayes_lab.papers.rows import Claim, find, listings
from slimbayes_lab.papers.table import (
    Reproduction,
    RowResult,
    averages,
    draws_of,
    markdown,
    relative_errors,
    scores_of_record,
)
from slimbayes_lab.report.record import (
    Evaluation,
    ParameterCounts,
    Record,
    Reliability,
    RunCost,
)
from slimbayes_lab.runs.predictor import Predictor

from slimbayes.metrics import ALEXNET


def record(
    accuracy: float,
    corrupted: dict[tuple[str, int], float],
    draws: tuple[int, ...] = (1, 4),
    **more: Any,
) -> Record:
    evaluations = [
        Evaluation(
            data="d",
            role="test",
            draws=n,
            rows=100,
            metrics={"accuracy": accuracy, "nll": 1.0 / n},
            **more,
        )
        for n in draws
    ]
    evaluations += [
        Evaluation(
            data="d",
            role="corruption",
            corruption=name,
            severity=s,
            draws=n,
            rows=100,
            metrics={"accuracy": a, "nll": 2.0, "ece": 0.1},
        )
        for (name, s), a in corrupted.items()
        for n in draws
    ]
    return Record(
        name="r",
        method="m",
        data="d",
        seed=0,
        config={},
        config_hash="h",
        commands=[],
        parameters=ParameterCounts(plain=100, total=150),
        evaluations=evaluations,
        cost=RunCost(train_seconds=1.0, seconds_per_epoch=1.0),
    )


def test_measured_numbers_of_a_record() -> None:
    made = record(
        0.8,
        {("fog", 1): 0.6, ("fog", 3): 0.4},
        members=[{"nll": 1.0}, {"nll": 3.0}],
        diversity={"disagreement": 0.2},
    )
    assert (
        draws_of(made, None) == 4 and draws_of(made, 3) == 1 and draws_of(made, 1) == 1
    )
    found = scores_of_record(made, 4)
    assert (
        found["nll"] == 0.25
        and found["corrupted_accuracy"] == pytest.approx(0.5)
        and found["member_nll"] == 2.0
    )
    assert found["overhead"] == 0.5 and found["disagreement"] == 0.2


def test_records_of_real_targets_have_no_errors() -> None:
    made = record(0.8, {})
    real = [
        e.model_copy(update={"metrics": {"rmse": 1.5, "lpd": -2.0}})
        for e in made.evaluations
    ]
    found = scores_of_record(made.model_copy(update={"evaluations": real}), 4)
    assert found["rmse"] == 1.5 and "corruption_error" not in found


def test_the_error_of_one_seed_is_that_over_rows_where_a_diagnostic_has_it() -> None:
    one = averages(
        [{"accuracy": 0.9, "accuracy_sem": 0.003, "nll": 0.2}], {"accuracy": "%"}
    )
    assert (
        one["accuracy"]["error"] == pytest.approx(0.3) and one["nll"]["error"] is None
    )
    two = averages([{"nll": 0.2, "nll_sem": 0.1}, {"nll": 0.4, "nll_sem": 0.1}], {})
    assert two["nll"]["error"] == pytest.approx(
        0.1
    )  # over seeds: a deviation of 0.141 over the root of two


def test_corruption_errors_relative_to_another_row() -> None:
    rows = {row.stem: row for row in find("emp/table5")}
    plain = RowResult(
        rows["vanilla"],
        0,
        {},
        record(0.8, {("fog", 1): 0.6, ("fog", 3): 0.4, ("snow", 1): 0.5}),
    )
    other = RowResult(
        rows["emp"],
        0,
        {},
        record(0.8, {("fog", 1): 0.7, ("fog", 3): 0.5, ("snow", 1): 0.75}),
    )
    found = relative_errors(other, [plain, other])
    assert found["error_fog"] == pytest.approx(80.0) and found[
        "error_snow"
    ] == pytest.approx(50.0)
    assert found["corruption_error"] == pytest.approx(65.0)
    # What corruption adds to a clean error of 0.2: (0.1 + 0.3) / (0.2 + 0.4) in fog and 0.05 / 0.3 in snow.
    assert found["relative_corruption_error"] == pytest.approx(
        100 * (0.4 / 0.6 + 0.05 / 0.3) / 2
    )
    assert relative_errors(other, [other]) == {}
    table = Reproduction(
        "emp/table5", "small", [rows["emp"], rows["vanilla"]], [plain, other]
    ).summary()
    assert table["rows"][1]["ours"]["corruption_error"]["mean"] == pytest.approx(100.0)
    assert "97.8" in markdown(table)


def test_imagenet_is_compared_with_alexnet() -> None:
    mean = {name: rates[0] for name, rates in ALEXNET.items()}
    half = record(
        1 - 0.3,
        {(name, s): 1 - rate / 2 for name, rate in mean.items() for s in range(1, 6)},
    )
    found = scores_of_record(half.model_copy(update={"data": "imagenet"}), 4)
    assert found["corruption_error"] == pytest.approx(50.0)
    relative = [(rate / 2 - 0.3) / (rate - 0.435) for rate in mean.values()]
    assert found["relative_corruption_error"] == pytest.approx(100 * sum(relative) / 15)
    assert "corruption_error" not in scores_of_record(half, 4), (
        "AlexNet knows ImageNet alone"
    )


def test_validation_rows_have_columns_of_their_own() -> None:
    made = record(0.8, {})
    held = Evaluation(
        data="d", role="validation", draws=4, rows=5, metrics={"nll": 0.7, "aucpr": 0.3}
    )
    found = scores_of_record(
        made.model_copy(update={"evaluations": [*made.evaluations, held]}), 4
    )
    assert (
        found["validation_nll"] == 0.7
        and found["validation_aucpr"] == 0.3
        and found["nll"] == 0.25
    )
    assert not any(name.startswith("validation_") for name in scores_of_record(made, 4))


def test_real_targets_have_no_error_rates() -> None:
    made = record(0.8, {})
    real = [e.model_copy(update={"metrics": {"rmse": 2.0}}) for e in made.evaluations]
    assert (
        scores_of_record(made.model_copy(update={"evaluations": real}), 4)["rmse"]
        == 2.0
    )


def test_claims_are_judged_by_paired_differences() -> None:
    """Seeds differ by far more than rows do: only pairs show it."""
    base = {seed: {"nll": 0.1 * seed, "accuracy": 0.5} for seed in range(8)}
    low = {
        seed: {"nll": 0.1 * seed - 0.01, "accuracy": 0.5 + 0.01 * (-1) ** seed}
        for seed in range(8)
    }
    rows = {"base": base, "low": low}

    def judge(better, than, score):
        return Claim(better=better, than=than, score=score).judged(rows)

    assert judge("low", "base", "nll")["verdict"] == "holds"
    assert judge("low", "base", "nll")["difference"] == pytest.approx(-0.01)
    assert (
        judge("base", "low", "nll")["verdict"]
        == "does not hold: it is the other way round"
    )
    assert judge("low", "base", "accuracy")["verdict"] == "undecided"
    assert judge("low", "base", "ece")["verdict"] == "not run"
    one = Claim(better="low", than="base", score="nll").judged(
        {"base": {0: base[0]}, "low": {0: low[0]}}
    )
    assert one["verdict"] == "one seed, which agrees" and one["interval"] is None
    for theirs, word in (
        ({0: low[0], 1: low[1]}, "agree"),
        ({0: low[0], 1: {"nll": 0.2}}, "do not both agree"),
    ):
        two = Claim(better="low", than="base", score="nll").judged(
            {"base": base, "low": theirs}
        )
        assert two["verdict"] == f"two seeds, which {word}"
    apart = {
        seed: {"nll": base[seed]["nll"] - gap}
        for seed, gap in enumerate((0.01, 0.1, 0.2))
    }
    three = Claim(better="low", than="base", score="nll").judged(
        {"base": base, "low": apart}
    )
    assert (
        three["verdict"] == "undecided"
    )  # on one side, which chance alone does once in four times
    odd = {0: {"nll": float("nan")}, 1: {"nll": 0.0}}
    assert (
        "not finite"
        in Claim(better="a", than="b", score="nll").judged({"a": odd, "b": base})[
            "verdict"
        ]
    )
    with pytest.raises(ValueError, match="kl_weight"):
        _ = Claim(better="a", than="b", score="kl_weight").sign


def test_a_table_has_intervals_and_what_became_of_the_claims() -> None:
    rows = {row.stem: row for row in find("rank1/table4")}
    results = [
        RowResult(rows[name], seed, {"nll": level + 0.004 * seed})
        for name, level in (("deterministic", 0.33), ("rank1-gaussian", 0.31))
        for seed in range(4)
    ]
    table = Reproduction("rank1/table4", "full", list(rows.values()), results).summary()
    shown = markdown(table)
    assert (
        "| 0.336 [0.332, 0.340] |" in shown
        and "*0.213*" in shown
        and "*0.446*" in shown
    )
    better = "- Rank-1 BNN, Gaussian better than Deterministic in nll: **holds**, -0.02 [-0.02, -0.02] over 4 seeds"
    assert (
        better in shown
        and "Deterministic better than Fully-Bayesian in nll: **not run**" in shown
    )


def test_printed_counts_keep_their_digits() -> None:
    table = Reproduction("k_tied/table5", "full", find("k_tied/table5")).summary()
    assert "*9,814,026*" in markdown(table)
    assert "*36.5M*" in markdown(
        Reproduction("rank1/table2", "full", find("rank1/table2")).summary()
    )


@pytest.mark.parametrize("name", listings())
def test_claims_name_rows_and_scores_that_are_there(name: str) -> None:
    rows = {row.stem: row for row in find(name)}
    for claim in next(iter(rows.values())).paper.claims:
        assert {claim.better, claim.than} <= rows.keys() and claim.sign in (-1, 1)
        papers = [rows[row].paper for row in (claim.better, claim.than)]
        assert all(claim.score in (*paper.numbers, *paper.shows) for paper in papers)
        printed = [
            paper.numbers[claim.score]
            for paper in papers
            if claim.score in paper.numbers
        ]
        assert len(printed) != 2 or claim.sign * (printed[0] - printed[1]) > 0, (
            "the paper prints otherwise"
        )


def test_calibration_errors_leave_out_small_bins() -> None:
    curve = Reliability(
        confidence=[0.5, 0.9, 0.7], accuracy=[0.4, 0.8, 0.0], count=[40, 50, 5]
    )
    made = Evaluation(
        data="d", role="test", draws=1, rows=95, metrics={}, reliability=curve
    )
    found = calibration_errors(made)
    assert found["ece"] == pytest.approx((40 * 0.1 + 50 * 0.1) / 95) and found[
        "mce"
    ] == pytest.approx(0.1)


def test_the_density_of_perfect_predictions_is_the_papers_constant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.5 log(0.1 / 2 pi) = -2.07, which the paper prints where errors are small (Kin8nm, Naval)."""
    from types import SimpleNamespace

    from slimbayes_lab.data import Split
    from slimbayes_lab.tasks.task import Scaling

    import slimbayes as sb

    net = sb.bayesianize(
        torch.nn.Sequential(torch.nn.BatchNorm1d(1), torch.nn.Linear(1, 1)),
        sb.ModelPatch(jitter=0.0, patch="norm"),
    ).eval()
    torch.nn.init.ones_(net[1].weight)
    torch.nn.init.zeros_(net[1].bias)
    x = torch.linspace(-1, 1, 20)[:, None]
    mean, std = torch.tensor([5.0]), torch.tensor([3.0])
    y = mean + std * net[1](net[0](x)).detach()
    task = SimpleNamespace(
        test=Split(x, y), y_mean=mean, y_std=std, scaling=Scaling(), name="toy"
    )
    experiment = SimpleNamespace(seed=0, evaluate=SimpleNamespace(batch=7))
    monkeypatch.setattr(
        Case,
        "loaded",
        property(lambda self: Predictor(experiment, net, task, "gaussian")),
    )
    numbers, _ = diagnose(
        "density", Case(tmp_path, draws=5, options={"precision": 0.1})
    )
    assert numbers["lpd"] == pytest.approx(
        0.5 * math.log(0.1 / (2 * math.pi)), abs=1e-5
    )
    assert numbers["rmse"] == pytest.approx(0.0, abs=1e-5)


def test_unknown_diagnostics_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="Unknown diagnostic 'spectrm'; did you mean 'spectrum'"
    ):
        diagnose("spectrm", Case(None))
