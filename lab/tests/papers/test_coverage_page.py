"""The list of what the papers describe: every target exists, and the page is that of the list."""

import csv
from collections import Counter

import pytest
from coverage_page import (
    COLUMNS,
    DEVIATIONS,
    LIST,
    PAGE,
    PAPERS,
    deviations,
    faults,
    page,
    read_list,
    state,
)

ROWS = read_list()


@pytest.mark.slow
def test_every_target_of_the_list_exists() -> None:
    assert [fault for row in ROWS for fault in faults(row)] == []


def test_the_list_is_whole() -> None:
    """As many lines as items were found in the papers, each once, in the papers' order, with all columns."""
    with LIST.open(newline="") as handle:
        lines = list(csv.reader(handle, delimiter="\t", quoting=csv.QUOTE_NONE))
    assert lines[0] == COLUMNS and {len(line) for line in lines} == {len(COLUMNS)}
    assert len(ROWS) >= 240
    assert [
        paper for paper, _ in Counter(row["paper"] for row in ROWS).items()
    ] == list(PAPERS)
    assert (
        max(Counter((row["paper"], row["place"], row["item"]) for row in ROWS).values())
        == 1
    )


def test_what_is_called_whole_is_proven_against_something() -> None:
    """Or it is no more than a setting that a config holds."""
    bare = [row["item"] for row in ROWS if state(row) == "whole" and not row["against"]]
    assert all(
        row["code"].startswith("lab/experiments/")
        for row in ROWS
        if row["item"] in bare
    ), bare


def test_the_page_is_made_from_the_list() -> None:
    assert PAGE.read_text() == page(ROWS)


def test_every_item_that_is_not_whole_says_why_among_the_deviations() -> None:
    text = DEVIATIONS.read_text()
    assert text == deviations(ROWS, text)
    for row in ROWS:
        assert state(row) == "whole" or (
            row["lacks"] in text and f"{row['item']} ({row['place']})" in text
        )


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"code": "posteriors/rank1.py:Rank1Posterior.fly"}, "no such code"),
        ({"code": "lab/experiments/rank1/table2.yaml#rank3"}, "no such code"),
        ({"test": "test_rank1_paper:test_nothing"}, "no such test"),
        ({"test": "test_rank1_paper:noisy"}, "no such test"),
        ({"record": "lab/results/rank1.jsonl/none"}, "no such record"),
        ({"test": ""}, "no test"),
        ({"code": "", "test": "", "lacks": ""}, "no word why"),
        ({"item": ""}, "is not said"),
    ],
)
def test_a_line_that_points_nowhere_is_found(
    change: dict[str, str], fault: str
) -> None:
    assert not faults(ROWS[0])
    assert any(fault in found for found in faults(ROWS[0] | change))
