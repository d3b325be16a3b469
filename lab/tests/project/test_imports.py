"""What the laboratory may import: names that are public in the library, and its own folders one way."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "slimbayes_lab"
# Modules of the library whose names are public beside those of `slimbayes` itself.
PUBLIC = {
    "slimbayes", "slimbayes.errors", "slimbayes.files", "slimbayes.untrusted", "slimbayes.seeds", "slimbayes.tables",
    "slimbayes.metrics", "slimbayes.diagnostics", "slimbayes.sklearn", "slimbayes.train.schedules",
}  # fmt: skip


LAB = [
    "models",
    "data",
    "report",
    "configs",
    "execution",
    "tasks",
    "runs",
    "finished",
    "papers",
    "search",
    "sweep",
    "run_commands",
    "command",
]


@pytest.mark.parametrize("part", LAB)
def test_imports_within_the_lab_point_one_way(part: str) -> None:
    files = [
        *(SOURCE / part).rglob("*.py"),
        *SOURCE.glob(f"{part}.py"),
    ]
    named = [
        (file.name, parts[1])
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom)
        and (parts := (node.module or "").split("."))[:2] == ["slimbayes", "lab"]
    ]
    assert files and {other for _, other in named} <= set(LAB[: LAB.index(part) + 1]), (
        named
    )
