"""benchmarks/conformal.py at a small size, and that docs/conformal.md shows its record."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import conformal

ROOT = Path(__file__).parents[2]


def test_the_page_shows_the_table_of_the_record() -> None:
    record = [conformal.Row(**row) for row in json.loads(conformal.RECORD.read_text())]
    assert conformal.table(record) in (ROOT / "docs" / "conformal.md").read_text()


@pytest.mark.slow
def test_scores_that_are_not_randomized_cover_a_row_alone_as_in_a_batch() -> None:
    model, X, y = conformal.curve(epochs=1)
    held, new = slice(0, 100), slice(100, 110)
    for scaled in (False, True):
        judge = conformal.intervals(model, scaled)(X[held], y[held])
        covered, size = judge(X[new], y[new])
        for i in range(10):
            one = slice(100 + i, 101 + i)
            alone, width = judge(X[one], y[one])
            assert bool(alone[0]) == bool(covered[i])
            assert width[0] == pytest.approx(size[i], rel=1e-6)
