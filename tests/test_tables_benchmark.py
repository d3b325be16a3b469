"""benchmarks/tables.py scores what it says, goes on where it stopped, and the page is what its lines say."""

import json
import math
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import tables
import tables_page

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "results" / "benchmarks" / "tables.jsonl"


def split(y: list[float], real: bool) -> tables.Split:
    x = np.zeros((len(y), 1))
    return tables.Split(x, np.array(y), x, np.array(y), real)


def test_scores_have_their_closed_forms() -> None:
    normal = tables.scores(split([0.0, 0.0], True), (np.zeros((3, 2)), np.ones((3, 2))))
    assert normal["nll"] == pytest.approx(math.log(2 * math.pi) / 2)
    assert normal["crps"] == pytest.approx((math.sqrt(2) - 1) / math.sqrt(math.pi))
    classes = tables.scores(split([0, 1], False), np.log([[0.75, 0.25], [0.75, 0.25]]))
    assert classes["nll"] == pytest.approx(-(math.log(0.75) + math.log(0.25)) / 2)
    assert classes["brier"] == pytest.approx((2 * 0.25**2 + 2 * 0.75**2) / 2) and classes["error"] == 0.5


def test_rows_to_choose_by_are_no_test_rows() -> None:
    result = tables.read("diabetes", 0, Path(), choose=False)
    choice = tables.read("diabetes", 0, Path(), choose=True)
    tested = {row.tobytes() for row in result.test_x}
    assert not tested & {row.tobytes() for part in (choice.x, choice.test_x) for row in part}
    assert len(choice.x) + len(choice.test_x) == len(result.x)


def test_finished_cells_are_skipped(tmp_path: Path) -> None:
    out = tmp_path / "cells.jsonl"
    args = Namespace(out=out, splits=2, sets=["a", "b"], methods=["m"])
    assert list(tables.missing_cells(args)) == [("a", "m", 0), ("b", "m", 0), ("a", "m", 1), ("b", "m", 1)]
    out.write_text(json.dumps({"data": "b", "method": "m", "split": 0}) + "\n")
    assert list(tables.missing_cells(args)) == [("a", "m", 0), ("a", "m", 1), ("b", "m", 1)]


def test_a_cell_is_a_line(tmp_path: Path) -> None:
    line = tables.cell("wine", "boosted trees", 0, tmp_path, choose=False)
    assert 0 < line["nll"] < 1 and line["rows"] == 160
    assert "too many rows" in tables.cell("digits", "Gaussian process", 0, tmp_path, choose=False)["failed"]


def test_the_page_says_what_the_lines_say() -> None:
    common = {"data": "a", "real": True, "split": 0}
    lines = [
        json.dumps(common | {"method": m, "nll": nll, "crps": 1.0}) for m, nll in (("slimbayes", 0.5), ("plain", 0.75))
    ]
    lines.append(json.dumps(common | {"method": "slimbayes", "split": 1, "nll": 0.7, "crps": 1.0}))
    lines.append(json.dumps(common | {"method": "other", "failed": "no"}))
    made = tables_page.page("text\n<!-- table -->\nold\n<!-- end of table -->\nmore\n", lines)
    assert "| a | **0.600** ± 0.100 | 0.750 | - |" in made and "old" not in made
    assert made.startswith("text\n") and made.endswith("more\n")
    assert "- plain: NLL 1 of 1, CRPS 0 of 1" in made


@pytest.mark.skipif(not RECORD.exists(), reason="results/benchmarks/tables.jsonl has not been written")
def test_docs_show_the_record() -> None:
    text = (ROOT / "docs" / "tables.md").read_text()
    assert text == tables_page.page(text, RECORD.read_text().splitlines())
