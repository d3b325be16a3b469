"""docs/coverage.md from docs/coverage.tsv: every item of the three papers, and where it is implemented and proven.

    python lab/tests/coverage_page.py         writes the page, and at the end of docs/deviations.md what is not whole; names
                                          targets that do not exist

Columns of the list, several targets in a cell parted by "; ":

    paper, place, item      which paper, where in it, what
    code                    file under src/slimbayes, lab/src/slimbayes_lab or the project, ":Class.method" or "#row of
                            a config" behind it
    test                    file under tests, tests/insides or lab/tests and function, as file:function
    against                 the independent source that the test compares with
    record                  file under lab/results, or a place in a file of kept runs
    lacks                   what is missing; of an item without code and test, why there is none
"""

import ast
import csv
import sys
from functools import cache
from pathlib import Path

from slimbayes_lab.configs.files import read_tree, row_names
from slimbayes_lab.report import kept

ROOT = Path(__file__).resolve().parents[2]
LIST, PAGE, DEVIATIONS = (
    ROOT / "docs" / name for name in ("coverage.tsv", "coverage.md", "deviations.md")
)
SOURCES = (ROOT / "src" / "slimbayes", ROOT / "lab" / "src" / "slimbayes_lab", ROOT)
TESTS = (ROOT / "tests", ROOT / "tests" / "insides", ROOT / "lab" / "tests")
OPEN = "## What is not whole, and why\n"
PAPERS = {
    "rank1": "Efficient and Scalable Bayesian Neural Nets with Rank-1 Factors (Dusenberry et al. 2020)",
    "k_tied": "The k-tied Normal Distribution (Swiatkowski et al. 2020)",
    "emp": "Ensemble Model Patching (Chang et al. 2019)",
}
COLUMNS = ["paper", "place", "item", "code", "test", "against", "record", "lacks"]
STATES = ("whole", "partly", "missing")
Row = dict[str, str]


def read_list(file: Path = LIST) -> list[Row]:
    """The lines of the list."""
    with file.open(newline="") as handle:
        return list(csv.DictReader(handle, delimiter="\t", quoting=csv.QUOTE_NONE))


def state(row: Row) -> str:
    """Whether an item is there, wholly or partly. What a test shows of a theorem needs no code of its own."""
    if not row["code"] and not row["test"]:
        return "missing"
    return "partly" if row["lacks"] else "whole"


def targets(cell: str) -> list[str]:
    return [target for target in cell.split("; ") if target]


def faults(row: Row) -> list[str]:
    """What is wrong with a line: targets that do not exist, claims without proof."""
    found = [f"no such code: {t}" for t in targets(row["code"]) if not _code_exists(t)]
    found += [f"no such test: {t}" for t in targets(row["test"]) if not _test_exists(t)]
    found += [
        f"no such record: {t}"
        for t in targets(row["record"])
        if not kept.exists(ROOT / t)
    ]
    if row["paper"] not in PAPERS or not row["place"] or not row["item"]:
        found.append("paper, place or item is not said")
    if state(row) == "missing" and not row["lacks"]:
        found.append("missing, and no word why")
    if state(row) != "missing" and not row["test"]:
        found.append("no test")
    return [f"{row['paper']} {row['place']}, {row['item']}: {fault}" for fault in found]


def _code_exists(target: str) -> bool:
    place, _, row = target.partition("#")
    name, _, member = place.partition(":")
    file = _first_file(name, SOURCES)
    if file is None or (row and row not in row_names(read_tree(file))):
        return False
    return not member or member in _names(file)


def _test_exists(target: str) -> bool:
    name, _, function = target.partition(":")
    file = _first_file(f"{name}.py", TESTS)
    return (
        file is not None and function.startswith("test_") and function in _names(file)
    )


def _first_file(name: str, folders: tuple[Path, ...]) -> Path | None:
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    return None


@cache
def _names(file: Path) -> set[str]:
    """Classes, functions and methods of a file, methods as Class.method."""
    tree = ast.parse(file.read_text())
    kinds = (ast.ClassDef, ast.FunctionDef)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    methods = {
        f"{c.name}.{m.name}"
        for c in classes
        for m in c.body
        if isinstance(m, ast.FunctionDef)
    }
    return {node.name for node in tree.body if isinstance(node, kinds)} | methods


def page(rows: list[Row]) -> str:
    """docs/coverage.md."""
    lines = [
        "# What of the three papers is here", "",
        "Generated from `coverage.tsv` by `make coverage` (lab/tests/coverage_page.py); a test holds every target. *Whole*:"
        " implemented and tested. *Partly*: what is missing is said, be it only a run at the paper's size."
        " *Missing*: not there. Files are under `src/slimbayes` or `lab/src/slimbayes_lab`, tests under `tests`, `tests/insides` or `lab/tests`.", "",
        "| | items | whole | partly | missing |", "|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    for name, title in [*PAPERS.items(), ("", "**together**")]:
        states = [state(row) for row in rows if name in ("", row["paper"])]
        lines.append(
            f"| {title} | {len(states)} | {' | '.join(str(states.count(one)) for one in STATES)} |"
        )
    for name, title in PAPERS.items():
        lines += [
            "",
            f"## {title}",
            "",
            "| where | what | | implemented in | proven by | against | record | lacks |",
        ]
        lines += ["|---|---|---|---|---|---|---|---|"]
        lines += [_line(row) for row in rows if row["paper"] == name]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    coded = [
        ", ".join(f"`{target}`" for target in targets(row[column]))
        for column in ("code", "test", "record")
    ]
    cells = [
        row["place"],
        row["item"],
        state(row),
        coded[0],
        coded[1],
        row["against"],
        coded[2],
        row["lacks"],
    ]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def open_items(rows: list[Row]) -> str:
    """The last section of docs/deviations.md: a line for each reason, with the items that are not whole for it."""
    lines = [
        OPEN,
        "Generated from `coverage.tsv`, like [coverage.md](coverage.md).",
        "",
        "| paper | why | what |",
    ]
    lines.append("|---|---|---|")
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if state(row) != "whole":
            reasons.setdefault((row["paper"], row["lacks"]), []).append(
                f"{row['item']} ({row['place']})"
            )
    lines += [
        f"| {paper} | {why} | {'; '.join(items)} |"
        for (paper, why), items in reasons.items()
    ]
    return "\n".join(lines) + "\n"


def deviations(rows: list[Row], text: str) -> str:
    """The page with that section as the list has it."""
    return text.partition(OPEN)[0] + open_items(rows)


def main() -> None:
    rows = read_list()
    PAGE.write_text(page(rows))
    DEVIATIONS.write_text(deviations(rows, DEVIATIONS.read_text()))
    wrong = [fault for row in rows for fault in faults(row)]
    print(*wrong, sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
