"""Runs kept in one JSON-lines file: paths into it stand for the files that were put there."""

import json
import sys
from pathlib import Path

import pytest
from report_records import record
from slimbayes_lab.report import compare, kept
from slimbayes_lab.report.record import RecordError, read

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import paper_tables

RESULTS = Path(__file__).parents[3] / "lab" / "results"
PLACES = ("table1/a-01/record.json", "table1/table.json", "table2/b-02/record.json")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "paper.jsonl"
    kept.keep(file, {place: {"of": place} for place in PLACES})
    return file


def test_a_kept_run_reads_as_it_was_written_and_its_curve_to_six_digits(
    tmp_path: Path,
) -> None:
    made = record("rank1-cauchy", 1).model_copy(
        update={"curve": [{"epoch": 1, "loss": 0.123456789}, {"epoch": 2, "nll": 2e-9}]}
    )
    file = tmp_path / "paper.jsonl"
    kept.keep(file, {"table1/run/record.json": made.model_dump(mode="json")})
    found = read(file / "table1" / "run")
    assert found.curve == [{"epoch": 1, "loss": 0.123457}, {"epoch": 2, "nll": 2e-9}]
    assert found.model_copy(update={"curve": made.curve}) == made


def test_runs_below_a_place_are_compared_as_those_of_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "paper.jsonl"
    made = record("rank1-cauchy", 0).model_dump(mode="json")
    for name in ("plain", "rank1"):
        kept.keep(file, {f"table1/{name}/record.json": made | {"name": name}})
    kept.keep(file, {"table2/other/record.json": made | {"name": "other"}})
    names = [row.name for row in compare([file / "table1"]).rows]
    assert sorted(names) == ["plain", "rank1"]


@pytest.mark.parametrize(
    ("inside", "pattern", "places"),
    [
        ("", "**/*.json", PLACES),
        ("", "*.json", ()),
        ("", "*/*.json", PLACES[1:2]),
        ("", "**/record.json", PLACES[::2]),
        ("", "table1/*/record.json", PLACES[:1]),
        ("table1", "**/*.json", PLACES[:2]),
        ("table1", "*/record.json", PLACES[:1]),
        ("table", "**/*.json", ()),
    ],
)
def test_patterns_find_what_they_find_in_a_folder(
    file: Path, tmp_path: Path, inside: str, pattern: str, places: tuple[str, ...]
) -> None:
    assert kept.glob(file / inside, pattern) == [file / place for place in places]
    for place in PLACES:
        (tmp_path / "folder" / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / place).write_text("{}")
    folder = tmp_path / "folder"
    if (folder / inside).is_dir():
        assert kept.glob(folder / inside, pattern) == [folder / p for p in places]


def test_a_place_that_is_not_there_is_told(file: Path) -> None:
    assert kept.exists(file / "table1") and kept.exists(file / PLACES[0])
    assert kept.exists(file) and not kept.exists(file / "table3")
    assert not kept.exists(file.with_name("none.jsonl") / "table1")
    with pytest.raises(FileNotFoundError, match="no line of this place"):
        kept.load(file / "table3" / "table.json")
    with pytest.raises(RecordError, match="no line of this place"):
        read(file / "table3")


def test_keeping_again_replaces_a_line_and_leaves_the_others(file: Path) -> None:
    kept.keep(file, {PLACES[1]: {"of": "another"}})
    assert len(file.read_text().splitlines()) == 3
    assert kept.load(file / PLACES[1]) == {"of": "another"}
    assert kept.load(file / PLACES[0]) == {"of": PLACES[0]}


def test_a_folder_of_reproduce_is_kept_whole(tmp_path: Path) -> None:
    folder, made = tmp_path / "out", record("rank1-cauchy", 0)
    for place, content in {
        "table.json": {"name": "rank1/table1"},
        "diagnostics/a-0-draws.json": {"numbers": {"nll": 1.0}},
        "run/record.json": made.model_dump(mode="json"),
    }.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(json.dumps(content))
    paper_tables.take(folder, "rank1/table1", tmp_path)
    kept_folder = tmp_path / "rank1.jsonl" / "table1"
    assert read(kept_folder / "run").evaluations == made.evaluations
    assert kept.load(kept_folder / "diagnostics" / "a-0-draws.json")["numbers"] == {
        "nll": 1.0
    }
    with pytest.raises(ValueError, match="needed <paper>/<table>"):
        paper_tables.take(folder, "rank1", tmp_path)


@pytest.mark.parametrize("paper", paper_tables.PAPERS)
def test_pages_of_papers_are_made_of_the_kept_tables(paper: str) -> None:
    assert (RESULTS / f"{paper}.md").read_text() == paper_tables.page(paper)


def test_results_are_few_files() -> None:
    assert len([file for file in RESULTS.rglob("*") if file.is_file()]) <= 60
