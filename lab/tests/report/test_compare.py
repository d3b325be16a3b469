"""Comparisons: what is averaged, which seeds are paired, what is marked, and what is told to the reader."""

import json
import math
import subprocess
import sys

import pytest
import report_records
import torch
from report_records import record, regression, save
from rich.console import Console
from slimbayes_lab.report import compare
from slimbayes_lab.report.metric import (
    KNOWN,
    bootstrap_interval,
    metric,
    shown_in,
    sign_flip_p,
)
from slimbayes_lab.report.record import Evaluation, RecordError
from slimbayes_lab.runs.scores import class_scores, regression_scores


def run(name, seed, data="toy", **metrics):
    return record(
        name,
        seed,
        data=data,
        evaluations=[
            Evaluation(data="toy", role="test", draws=1, rows=9, metrics=metrics)
        ],
        epochs=1,
        pictures=0,
    )


def grid(name, seed, cells, draws=4):
    """A run with a corrupted set for each (corruption, severity): value."""
    sets = [
        Evaluation(
            data="c",
            role="corruption",
            corruption=kind,
            severity=level,
            draws=draws,
            rows=9,
            metrics={"nll": value},
        )
        for (kind, level), value in cells.items()
    ]
    return record(name, seed, data="toy", evaluations=sets, epochs=1, pictures=0)


@pytest.fixture
def two(tmp_path):
    """Five seeds of a baseline and four of them of another, with one seed of its own."""
    base = [
        run("base", seed, nll=0.50 + 0.01 * seed, accuracy=0.9) for seed in range(5)
    ]
    other = [
        run("other", seed, nll=0.45 + 0.02 * seed, accuracy=0.9 + 0.001 * seed)
        for seed in (1, 2, 3, 4, 9)
    ]
    return save(tmp_path, *base, *other)


@pytest.mark.slow
def test_means_intervals_and_paired_differences(two):
    table = compare(two, baseline="base")
    base, other = table.rows
    assert (
        base.scores["nll"].mean == pytest.approx(0.52)
        and base.scores["nll"].difference is None
    )
    assert base.scores["nll"].interval == bootstrap_interval(
        [0.50, 0.51, 0.52, 0.53, 0.54]
    )
    gap = other.scores["nll"].difference
    gaps = [
        0.45 + 0.02 * seed - (0.50 + 0.01 * seed) for seed in (1, 2, 3, 4)
    ]  # seed 9 has no partner
    assert gap.seeds == (1, 2, 3, 4) and gap.mean == pytest.approx(sum(gaps) / 4)
    assert (
        gap.interval == pytest.approx(bootstrap_interval(gaps))
        and gap.p == sign_flip_p(gaps) == 2 / 2**4
    )
    assert any("below 0.12" in note for note in table.notes)


@pytest.mark.slow
def test_the_best_is_marked_by_direction(two):
    scores = {row.name: row.scores for row in compare(two).rows}
    assert scores["base"]["nll"].best and not scores["other"]["nll"].best
    assert scores["other"]["accuracy"].best and not scores["base"]["accuracy"].best


def test_every_score_of_a_record_is_known():
    """Others would be shown by their bare name, without a direction."""
    cpu = torch.device("cpu")
    made = [class_scores(10, 15, 2, binary, cpu) for binary in (True, False)] + [
        regression_scores(cpu)
    ]
    names = {
        name
        for one in made
        for group in (one.whole, one.soft, one.diversity, one.uncertainty)
        for name in group
    }
    assert {"accuracy", "auroc", "crps", "entropy", "soft_nll"} <= names <= set(KNOWN)


def test_directions_are_known_for_all_headline_metrics():
    assert all(metric(name).better for name in shown_in("comparison"))
    assert (
        metric("coverage95").best([0.90, 0.97, 0.85]) == {1}
        and metric("entropy").best([0.1, 0.2]) == set()
        and metric("nll").best([0.2]) == set()
    )
    assert metric("nll").best([math.nan, math.inf]) == set() and metric(
        "accuracy"
    ).best([0.9, 0.9, 0.1]) == {0, 1}


def test_one_seed_has_no_interval_and_says_so(tmp_path):
    table = compare(
        save(tmp_path, run("a", 0, nll=0.1), run("b", 0, nll=0.2)), baseline="a"
    )
    score = table.rows[1].scores["nll"]
    assert (
        score.interval is None
        and score.difference.interval is None
        and score.difference.p is None
    )
    assert (
        any("single seed" in note for note in table.notes)
        and "[" not in table.to_markdown().splitlines()[4]
    )


def test_corrupted_is_a_mean_over_what_all_runs_share(tmp_path):
    cells = {("fog", 1): 1.0, ("fog", 2): 2.0, ("snow", 1): 3.0, ("snow", 2): 4.0}
    more = cells | {("rain", 2): 99.0}
    paths = save(tmp_path, grid("a", 0, cells), grid("b", 0, more))
    table = compare(paths, on="corrupted")
    assert [row.scores["nll"].mean for row in table.rows] == [2.5, 2.5]
    assert any("4 of 5" in note for note in table.notes)
    assert [
        row.scores["nll"].mean
        for row in compare(paths, on="corrupted", severity=2).rows
    ] == [3.0, 3.0]


def test_draws_are_the_most_that_a_name_shares_unless_chosen(tmp_path):
    def drawn(seed, *counts):
        sets = [
            Evaluation(
                data="t",
                role="test",
                draws=count,
                rows=9,
                metrics={"nll": float(count)},
            )
            for count in counts
        ]
        return record("a", seed, data="toy", evaluations=sets, epochs=1, pictures=0)

    paths = save(tmp_path, drawn(0, 1, 4, 16), drawn(1, 1, 4))
    assert (
        compare(paths).rows[0].draws == 4
        and compare(paths).rows[0].scores["nll"].mean == 4
    )
    assert compare(paths, draws=1).rows[0].scores["nll"].mean == 1
    assert compare(paths, draws=16).rows[0].scores["nll"].seeds == {0: 16.0}


def test_other_sets_and_real_targets(tmp_path):
    paths = save(
        tmp_path, record("rank1-cauchy", 0, corruptions=0), regression("k-tied", 0)
    )
    assert set(compare(paths, on="ood").rows[0].scores) == {"auroc", "aucpr", "fpr95"}
    only = compare(paths, on="street numbers").rows[0].scores["auroc"].mean
    both = compare(paths, on="ood").rows[0].scores["auroc"].mean
    assert only > both  # the other set is harder
    rows = compare(paths).rows
    assert [row.data for row in rows] == ["synthetic-10", "synthetic-line"] and set(
        rows[1].scores
    ) == {
        "rmse",
        "lpd",
        "crps",
        "coverage95",
    }


def test_data_sets_are_not_mixed(tmp_path):
    paths = save(
        tmp_path,
        *(
            run(name, seed, data, nll=value)
            for data in ("one", "two")
            for name, value in (("a", 0.1), ("b", 0.2))
            for seed in (0, 1)
        ),
    )
    table = compare(paths, baseline="a")
    assert [(row.data, row.name, row.scores["nll"].best) for row in table.rows] == [
        ("one", "a", True),
        ("one", "b", False),
        ("two", "a", True),
        ("two", "b", False),
    ]
    assert all(
        row.scores["nll"].difference.mean == pytest.approx(0.1)
        for row in table.rows
        if row.name == "b"
    )


def test_values_that_are_not_finite_are_told(tmp_path):
    paths = save(
        tmp_path,
        *(run("a", seed, nll=0.1) for seed in range(3)),
        run("b", 0, nll=math.nan),
        run("b", 1, nll=0.2),
        run("b", 2, nll=0.4),
    )
    table = compare(paths, baseline="a")
    score = table.rows[1].scores["nll"]
    assert (
        math.isnan(score.mean)
        and score.interval is None
        and not score.best
        and score.difference.seeds == (1, 2)
    )
    assert any("not finite" in note and "seed 0" in note for note in table.notes)
    assert json.loads(table.to_json())["rows"][1]["scores"]["nll"]["mean"] == "nan"


def test_mistakes_are_explained(two, tmp_path):
    with pytest.raises(
        ValueError,
        match=r"baseline='bse' is not among the runs; needed one of \['base', 'other'\]",
    ):
        compare(two, baseline="bse")
    with pytest.raises(
        ValueError,
        match=r"no run has scores for on='shift'.*the records hold sets test \(toy\)",
    ):
        compare(two, on="shift")
    with pytest.raises(ValueError, match="metrics accuracy, nll"):
        compare(two, metrics=["nl"])
    with pytest.raises(ValueError, match="got no runs"):
        compare([])
    with pytest.raises(RecordError, match="none of the 1 records"):
        compare([tmp_path / "absent"])


def test_a_damaged_record_is_left_out_and_told(two):
    (two[0] / "record.json").write_text('{"format": 99}')
    table = compare(two)
    assert (
        table.rows[0].scores["nll"].seeds.keys() == {1, 2, 3, 4}
        and "newer slimbayes" in table.skipped[0]
    )
    assert "Left out:" in table.to_markdown()


def test_a_directory_stands_for_its_runs_and_twins_count_once(two, tmp_path):
    assert compare([tmp_path]).rows == compare(two).rows
    (twin := tmp_path / "twin").mkdir()
    (twin / "record.json").write_text((two[0] / "record.json").read_text())
    table = compare([*two, twin])
    assert table.rows == compare(two).rows and "counted once" in table.skipped[0]
    (twin / "record.json").write_text(run("base", 0, nll=0.9).model_dump_json())
    assert "another run of name 'base', seed 0" in compare([*two, twin]).skipped[0]


def test_replicates_that_differ_in_more_than_the_seed_are_told(tmp_path):
    one, two = run("a", 0, nll=0.1), run("a", 1, nll=0.2)
    two = two.model_copy(update={"config": {**two.config, "train": {"epochs": 7}}})
    assert any(
        "train.epochs is 1 or 7" in note
        for note in compare(save(tmp_path, one, two)).notes
    )


HOSTILE = "<b>|`x`\n[red]\\"


def test_text_from_records_is_no_markup(tmp_path):
    table = compare(
        save(tmp_path, run(HOSTILE, 0, nll=0.1), run("b", 0, nll=0.2)), baseline=HOSTILE
    )
    lines = [line for line in table.to_markdown().splitlines() if line.startswith("|")]
    bare = [line.replace("\\\\", "").replace("\\|", "") for line in lines]
    assert len(lines) == 4 and {line.count("|") for line in bare} == {
        bare[0].count("|")
    }
    assert "\\<b\\>" in lines[2] and "<b>" not in lines[2]
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table.render())
    assert "[red]" in console.export_text()
    console.file.close()


def test_the_same_records_give_the_same_table(two):
    table = compare(two, baseline="base")
    assert table.to_json() == compare(two, baseline="base").to_json()
    assert json.loads(table.to_json()) == table.to_dict()


def test_rendered_tables_hold_all_columns(two):
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(compare(two, baseline="base").render())
    text = console.export_text()
    console.file.close()
    assert all(
        word in text
        for word in (
            "Accuracy, % ↑",
            "Δ NLL",
            "p",
            "base",
            "other",
            "Mean over seeds",
            "0.520 [0.508, 0.532]",
        )
    )


@pytest.mark.slow
def test_neither_the_package_nor_a_comparison_needs_torch_or_vega(two):
    code = f"""
import sys
import slimbayes_lab.report
assert not {{"torch", "altair", "vl_convert", "numpy"}} & set(sys.modules)
slimbayes_lab.report.compare({[str(path) for path in two]!r}, baseline="base").to_markdown()
assert not {{"torch", "altair", "vl_convert"}} & set(sys.modules)
import slimbayes_lab.report.page
assert not {{"torch", "altair"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_made_up_records_are_deterministic():
    assert (
        report_records.record("rank1-cauchy", 1, corruptions=1).digest
        == report_records.record("rank1-cauchy", 1, corruptions=1).digest
    )


def test_runs_of_an_older_version_are_told_apart_from_runs_with_other_settings(
    tmp_path,
):
    def configured(seed, config):
        return run("a", seed, nll=0.5).model_copy(update={"config": config})

    def notes(folder, old, new):
        return " ".join(
            compare(
                save(tmp_path / folder, configured(0, old), configured(1, new))
            ).notes
        )

    added = notes(
        "added", {"data": {"test": 0.2}}, {"data": {"test": 0.2, "dates": "refuse"}}
    )
    assert (
        "Some runs of 'a' were made by a version without data.dates" in added
        and "different things" not in added
    )
    for name, old, new in (
        ("value", {"data": {"test": 0.2}}, {"data": {"test": 0.3}}),
        ("kind", {"method": {"kind": "A", "p": 1}}, {"method": {"kind": "B", "q": 1}}),
        (
            "nothing",
            {"data": {"test": 0.2, "prior": None}},
            {"data": {"test": 0.2, "prior": {"scale": 1}}},
        ),
    ):
        told = notes(name, old, new)
        assert (
            "Their mean is a mean of different things" in told
            and "by a version" not in told
        ), name
