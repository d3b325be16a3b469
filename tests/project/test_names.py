"""The table of public names agrees with the tree, and would say so if it did not."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "tools" / "names.py"


@pytest.fixture(scope="module")
def names() -> ModuleType:
    spec = importlib.util.spec_from_file_location("names", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(state: str, new: str = "", done: str = "", reason: str = "why") -> Any:
    told = {"state": state, "new": new, "reason": reason, "done": done}
    return {"kind": "function", "name": "old", **told}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of packages that others import
def test_every_public_name_is_what_the_table_says(names: ModuleType) -> None:
    assert names.faults(names.read(), names.names()) == []


@pytest.mark.parametrize(
    ("row", "tree"),
    [
        (row("stays"), "old"),
        (row("renamed", "new"), "old"),
        (row("renamed", "new"), "new"),
        (row("renamed", "new", "yes"), "new"),
        (row("gone"), "old"),
        (row("gone"), ""),
        (row("gone", done="yes"), ""),
    ],
)
def test_a_tree_that_agrees_is_let_pass(names: ModuleType, row: Any, tree: str) -> None:
    assert names.faults([row], {tree: "function"}) == []


@pytest.mark.parametrize(
    ("row", "tree"),
    [
        (row("stays"), "new"),
        (row("renamed", "new"), "other"),
        (row("renamed", "new", "yes"), "old"),
        (row("renamed"), "other"),
        (row("gone", done="yes"), "old"),
        (row("gone", reason=""), "old"),
        (row("lost"), "old"),
    ],
)
def test_a_tree_that_disagrees_is_told(names: ModuleType, row: Any, tree: str) -> None:
    (told,) = names.faults([row], {tree: "function"})
    assert told.startswith("function old ")


def test_what_goes_is_also_looked_for_in_the_laboratory(names: ModuleType) -> None:
    gone = row("gone", done="yes") | {"name": "slimbayes_lab.data.mimic4"}
    assert names.faults([gone], {"slimbayes_lab.data.mimic4": "function"})


def test_a_name_with_two_rows_is_told(names: ModuleType) -> None:
    twice = [row("stays"), row("gone")]
    assert names.faults(twice, {"old": "function"}) == ["old has two rows"]


def test_rows_whose_change_has_landed_are_marked(
    names: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "TABLE", tmp_path / "names.tsv")
    rows = [row("renamed", "new"), row("gone"), row("renamed", "other")]
    names.mark_done(rows, {"new": "function"})
    assert [line["done"] for line in names.read()] == ["yes", "yes", ""]
