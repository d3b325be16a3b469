"""benchmarks/tables.py and fine_tune_tables.py score what they say and go on where they stopped; pages show it."""

import json
import math
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import fine_tune_tables
import tables
import tables_rivals

import slimbayes as sb

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "lab" / "results" / "benchmarks" / "tables.jsonl"


def split(y: list[float], real: bool) -> tables.Split:
    x = np.zeros((len(y), 1))
    return tables.Split(x, np.array(y), x, np.array(y), real)


def test_scores_have_their_closed_forms() -> None:
    normal = tables.scores(split([0.0, 0.0], True), (np.zeros((3, 2)), np.ones((3, 2))))
    assert normal["nll"] == pytest.approx(math.log(2 * math.pi) / 2)
    assert (
        normal["crps"] == pytest.approx((math.sqrt(2) - 1) / math.sqrt(math.pi))
        and normal["coverage"] == 1.0
    )
    edges = tables.scores(
        split([1.64, 1.65, -1.64, -1.65], True), (np.zeros((2, 4)), np.ones((2, 4)))
    )
    assert edges["coverage"] == 0.5  # 90 % of a normal lie within 1.645
    classes = tables.scores(split([0, 1], False), np.log([[0.75, 0.25], [0.75, 0.25]]))
    assert classes["nll"] == pytest.approx(-(math.log(0.75) + math.log(0.25)) / 2)
    assert (
        classes["brier"] == pytest.approx((2 * 0.25**2 + 2 * 0.75**2) / 2)
        and classes["accuracy"] == 0.5
    )


def test_rows_to_choose_by_are_no_test_rows() -> None:
    result = tables.read("diabetes", 0, Path(), choose=False)
    choice = tables.read("diabetes", 0, Path(), choose=True)
    tested = {row.tobytes() for row in result.test_x}
    assert not tested & {
        row.tobytes() for part in (choice.x, choice.test_x) for row in part
    }
    assert len(choice.x) + len(choice.test_x) == len(result.x)


def test_finished_cells_are_skipped(tmp_path: Path) -> None:
    out = tmp_path / "cells.jsonl"
    args = Namespace(out=out, splits=2, sets=["a", "b"], methods=["m"])
    assert list(tables.missing_cells(args)) == [
        ("a", "m", 0),
        ("b", "m", 0),
        ("a", "m", 1),
        ("b", "m", 1),
    ]
    assert not set(tables.SETS) & set(tables.OUTSIDE)
    out.write_text(json.dumps({"data": "b", "method": "m", "split": 0}) + "\n")
    assert list(tables.missing_cells(args)) == [
        ("a", "m", 0),
        ("a", "m", 1),
        ("b", "m", 1),
    ]
    out.write_text(
        json.dumps(
            {"data": "b", "method": "m", "split": 0, "real": True, "spread": 1.0}
        )
        + "\n"
    )
    assert ("b", "m", 0) in list(
        tables.missing_cells(args)
    )  # within other bounds of the noise


@pytest.mark.slow
def test_a_cell_is_a_line(tmp_path: Path) -> None:
    (line,) = tables.cell("wine", "boosted trees", 0, tmp_path, choose=False)
    assert 0 < line["nll"] < 1 and line["rows"] == 160
    assert (
        "too many rows"
        in tables.cell("digits", "Gaussian process", 0, tmp_path, choose=False)[0][
            "failed"
        ]
    )


def line(method: str, split: int, nll: float, crps: float = 1.0) -> str:
    cell = {
        "data": "a",
        "real": True,
        "method": method,
        "split": split,
        "nll": nll,
        "crps": crps,
        "seconds": 1.0,
    }
    return json.dumps(cell)


def test_the_page_says_what_the_lines_say() -> None:
    lines = [
        line("slimbayes", 0, 0.5),
        line("slimbayes", 1, 0.7),
        line("plain", 0, 0.75),
    ]
    lines.append(
        json.dumps(
            {
                "data": "a",
                "real": True,
                "method": "other",
                "split": 0,
                "failed": "no",
                "seconds": 9.0,
            }
        )
    )
    made = tables.page(
        "text\n<!-- table -->\nold\n<!-- end of table -->\nmore\n", lines
    )
    assert (
        "| a | **0.600** ± 0.100 | 0.750 | - |" in made
        and "old" not in made
        and "9.0" not in made
    )
    assert made.startswith("text\n") and made.endswith("more\n")
    assert (
        "a lower mean NLL than plain on 1 of 1 sets; and a lower mean CRPS than plain on 0 of 1 sets"
        in made
    )


def test_methods_are_paired_by_split_with_student_s_intervals() -> None:
    """Differences -1, -2, -3 have mean -2 and 4.303 / sqrt 3 on each side; an unpaired comparison would see 100s."""
    lines = [line("slimbayes", s, 100.0 * s) for s in range(4)]
    lines += [line("plain", s, 100.0 * s + 1 + s) for s in range(3)]
    lines += [line("plain, tuned", s, 100.0 * s - 1) for s in range(2)]
    made = tables.page("".join(tables.MARKS), lines)
    assert "| a | -2.000 ± 2.484 | **+1.000 ± 0.000** |" in made
    assert (
        "plain and tuned on 0 of 1 sets (behind by more than the interval on a)" in made
    )
    assert (
        "| slimbayes | 0 / 1 / 0 |" in made
        and "| plain, tuned | 1 / 0 / 0 |" not in made
    )


@pytest.mark.slow
def test_rivals_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each beats a constant on a line; TabM only where its package is installed."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 2))
    y = x[:, 0] + 0.1 * rng.normal(size=120)
    rows = tables.Split(x[:90], y[:90], x[90:], y[90:], True)
    monkeypatch.setattr(tables_rivals, "EPOCHS", 15)
    monkeypatch.setattr(tables_rivals, "MEMBERS", 2)
    found = {"process": tables_rivals.process, "ensemble": tables_rivals.deep_ensemble}
    for name, method in found.items():
        assert tables.scores(rows, method(rows, 0))["crps"] < 0.3, name
    pytest.importorskip("tabm", reason="tabm is not installed")
    assert tables.scores(rows, tables_rivals.tabm(rows, 0))["crps"] < 0.3


def test_noise_of_trained_networks_is_the_likeliest() -> None:
    y = torch.tensor([[0.3], [-0.3]])
    still = torch.zeros(1, 2)
    noise, least = fine_tune_tables.best_noise((still, still), y)
    assert noise == pytest.approx(0.3, rel=0.05) and least == pytest.approx(
        math.log(0.3) + 0.5 * math.log(2 * math.pi) + 0.5, abs=1e-2
    )
    wide = fine_tune_tables.nll((still, still + 0.05), 0.2, y)
    assert wide == pytest.approx(
        fine_tune_tables.nll((still, still), 0.3, y)
    )  # variances add: 0.05 + 0.04 = 0.09
    assert (
        fine_tune_tables.auroc(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]))
        == 0.875
    )


@pytest.mark.slow
def test_every_way_from_a_trained_network_is_a_line(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100, 3))
    (tmp_path / "uci").mkdir()
    index = np.arange(100, dtype=np.uint16)[None]
    arrays = {
        "X": x,
        "y": x[:, :1] ** 2,
        "train_idx": index[:, :80],
        "test_idx": index[:, 80:],
    }
    np.savez(tmp_path / "uci" / "yacht.npz", **arrays)
    with pytest.warns(sb.SlimbayesWarning, match="KL"):
        lines = fine_tune_tables.cells(
            "yacht", 0, tmp_path, list(fine_tune_tables.SETTINGS), steps=12
        )
    by = {line["method"]: line for line in lines}
    assert list(by) == list(fine_tune_tables.SETTINGS)
    assert by["plain"]["bytes"] == 0 and by["plain"]["metrics"]["auroc"] == 0.5
    net = sum(p.numel() for p in fine_tune_tables.network(3).parameters()) * 4
    assert (
        by["deep ensemble"]["bytes"] == 3 * net
        and 0 < by["LoRA ensemble"]["bytes"] < 4 * net
    )
    assert by["rank-1 Laplace"]["metrics"]["rmse"] == pytest.approx(
        by["plain"]["metrics"]["rmse"], rel=1e-4
    )
    assert all(
        math.isfinite(value) for line in lines for value in line["metrics"].values()
    )


@pytest.mark.skipif(
    not RECORD.exists(),
    reason="lab/results/benchmarks/tables.jsonl has not been written",
)
def test_docs_show_the_record() -> None:
    text = (ROOT / "docs" / "tables.md").read_text()
    assert text == tables.page(text, RECORD.read_text().splitlines())
