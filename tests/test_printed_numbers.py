"""What the tables' files say was printed stands in the papers, in that order; needs the papers' texts."""

import os
import re
from pathlib import Path

import pytest
from paper_rows import FOLDER, ROOT, ROWS

from slimbayes.data import CORRUPTIONS
from slimbayes.lab.papers import PaperRow, find

PAPERS = {"rank1": "rank1-bnn.txt", "k_tied": "k-tied-normal.txt", "emp": "ensemble-model-patching.txt"}


def _text(paper: str) -> str:
    folder = Path(os.environ.get("SLIMBAYES_PAPERS", ROOT.parent / "shared" / "papers"))
    file = folder / PAPERS[paper]
    if not file.is_file():
        pytest.skip(f"the paper's text is not at {file}")
    return re.sub(r"\s+", " ", file.read_text(encoding="utf8").replace(r"\pm", "±").replace("$", ""))


def _pattern(numbers: list[float]) -> str:
    """These numbers one after another, whatever zeros, signs and words of fewer than 30 letters stand between."""
    return r"[^\d]{1,30}".join(
        rf"{re.escape(f'{abs(value):g}' if value < 1e4 else f'{value:,.0f}')}0*(?:\.0*)?%?(?!\d)" for value in numbers
    )


SPOTS = [
    f"rank1/{t}/{r}"
    for t in ("table1", "table2", "table3")
    for r in ("deterministic", "batch-ensemble", "rank1-gaussian", "rank1-cauchy")
]
SPOTS += [f"emp/table4/{r}" for r in ("emp", "emp-norm", "ecmp", "ecmp-norm", "dropout", "vanilla")] + [
    f"emp/table5/{r}" for r in ("emp", "ecmp", "dropout")
]
SPOTS += [f"emp/table{t}/imagenet-{s}" for t in (9, 10, 11) for s in (1, 20, 100, 200)]
SPOTS += [f"rank1/table8/rank1-gaussian-{s}" for s in (1, 4, 25)]


@pytest.mark.parametrize("name", SPOTS)
def test_numbers_stand_in_the_paper_in_this_order(name: str) -> None:
    (row,) = find(name, [FOLDER])
    numbers = [v for k, v in row.paper.numbers.items() if k != "parameters"]
    assert re.search(_pattern(numbers), _text(name.split("/")[0])), f"{numbers} is not a line of the paper"


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.name.startswith("k_tied") and row.paper.errors], ids=lambda row: row.name
)
def test_numbers_and_errors_of_the_k_tied_paper(row: PaperRow) -> None:
    numbers, errors = row.paper.numbers, row.paper.errors
    text = _text("k_tied")
    for name, error in errors.items():
        found = rf"{re.escape(f'{numbers[name]:g}')}(?:\.0)?0* ± {re.escape(f'{error:g}')}0*(?!\d)"
        assert re.search(found, text), f"{name} {numbers[name]} ± {error} is not in the paper"


@pytest.mark.parametrize("table", ["emp/table12", "emp/table13"])
def test_regressions_stand_in_the_paper_set_by_set(table: str) -> None:
    """The four methods' numbers of a set, in the order of the paper's columns, once errors are left out."""
    rows = find(table, [FOLDER])
    text = re.sub(r"± ?(N/A|[\d.]+)", "", re.sub(r"</?b>|\\\\", "", _text("emp")))
    for start in range(0, len(rows), 4):
        values = [next(iter(row.paper.numbers.values())) for row in rows[start : start + 4]]
        found = r"[\s-]+".join(re.escape(f"{abs(value):.2f}") for value in values)
        assert re.search(found, text), f"{rows[start].name}: {values} is not a line of the paper"


def test_corruptions_of_table_5_are_all_fifteen() -> None:
    (row,) = find("emp/table5/emp", [FOLDER])
    assert [n.removeprefix("error_") for n in row.paper.numbers][1:] == list(CORRUPTIONS)
