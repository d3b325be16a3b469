"""Imports point one way: what a package may know of the others is written here once."""

import ast
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "slimbayes"
# From the bottom up; each may import those before it, unless `APART` says less.
ORDER = [
    "errors", "untrusted", "files", "kernels", "engine", "distributions", "layers", "posteriors", "train", "convert",
    "prediction", "decisions", "inference", "metrics", "diagnostics", "plot", "models", "data", "report", "api",
    "sklearn", "lab", "contrib", "__main__",
]  # fmt: skip
APART = {
    "report": {"errors", "files", "untrusted"},  # reads records alone, without torch
    "data": {"errors", "files", "untrusted"},
    "metrics": {"errors", "prediction", "train"},  # see predictions and tensors
}


@cache
def imports(file: Path) -> set[str]:
    """Packages of ours that a file imports, those inside functions too, but not those for type checkers alone."""
    tree = ast.parse(file.read_text())
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "slimbayes":
            parts = (node.module or "").split(".")
            found |= {parts[1]} if len(parts) > 1 else {name.name for name in node.names}
        if isinstance(node, ast.Import):
            found |= {
                [*name.name.split("."), "api"][1] for name in node.names if name.name.split(".")[0] == "slimbayes"
            }
    return {name if name in ORDER else "api" for name in found}


@cache
def packages() -> dict[str, list[Path]]:
    out: dict[str, list[Path]] = {}
    for file in sorted(SOURCE.rglob("*.py")):
        out.setdefault(file.relative_to(SOURCE).parts[0].removesuffix(".py"), []).append(file)
    out.pop("__init__")
    return out


def test_every_package_has_its_place() -> None:
    assert sorted(packages()) == sorted(ORDER)


@pytest.mark.slow
@pytest.mark.parametrize("package", ORDER)
def test_imports_point_one_way(package: str) -> None:
    allowed = APART.get(package, set(ORDER[: ORDER.index(package)])) | {package}
    wrong = {
        f"{file.relative_to(SOURCE)} imports {other}"
        for file in packages()[package]
        for other in imports(file) - allowed
    }
    assert not wrong


LAB = ["configs", "execution", "tasks", "runs", "finished", "papers", "search", "sweep", "run_commands", "command"]


@pytest.mark.parametrize("part", LAB)
def test_imports_within_the_lab_point_one_way(part: str) -> None:
    files = [*(SOURCE / "lab" / part).rglob("*.py"), *(SOURCE / "lab").glob(f"{part}.py")]
    named = [
        (file.name, parts[2])
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (parts := (node.module or "").split("."))[:2] == ["slimbayes", "lab"]
    ]
    assert files and {other for _, other in named} <= set(LAB[: LAB.index(part) + 1]), named


@pytest.mark.slow
def test_no_two_public_classes_have_one_name() -> None:
    """A reader who meets a name knows which class it is."""
    trees = [ast.parse(file.read_text()) for file in sorted(SOURCE.rglob("*.py"))]
    names = [node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    assert not {name for name in names if names.count(name) > 1 and not name.startswith("_")}
