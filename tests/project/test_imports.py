"""Imports point one way: what a package may know of the others is written here once."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "slimbayes"
LABORATORY = ROOT / "lab" / "src" / "slimbayes_lab"
# From the bottom up; each may import those before it, unless `APART` says less.
ORDER = [
    "errors", "untrusted", "files", "columns", "seeds", "kernels", "engine", "distributions", "layers", "posteriors",
    "train", "convert", "prediction", "decisions", "inference", "metrics", "diagnostics", "plot", "tables", "api",
    "sklearn", "contrib",
]  # fmt: skip
APART = {
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
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] == "slimbayes"
        ):
            parts = (node.module or "").split(".")
            found |= (
                {parts[1]} if len(parts) > 1 else {name.name for name in node.names}
            )
        if isinstance(node, ast.Import):
            found |= {
                [*name.name.split("."), "api"][1]
                for name in node.names
                if name.name.split(".")[0] == "slimbayes"
            }
    return {name if name in ORDER else "api" for name in found}


@cache
def packages() -> dict[str, list[Path]]:
    out: dict[str, list[Path]] = {}
    for file in sorted(SOURCE.rglob("*.py")):
        out.setdefault(
            file.relative_to(SOURCE).parts[0].removesuffix(".py"), []
        ).append(file)
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


def test_the_library_never_imports_the_laboratory() -> None:
    wrong = [
        file.name
        for file in SOURCE.rglob("*.py")
        if re.search(r"^ *(from|import) slimbayes_lab", file.read_text(), re.M)
    ]
    assert not wrong


@pytest.mark.slow
def test_no_two_public_classes_have_one_name() -> None:
    """A reader who meets a name knows which class it is."""
    trees = [ast.parse(file.read_text()) for file in sorted(SOURCE.rglob("*.py"))]
    names = [
        node.name
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    ]
    assert not {
        name for name in names if names.count(name) > 1 and not name.startswith("_")
    }


# --- the pages that explain the source ---

DOCS = ROOT / "docs"


def test_the_design_lists_the_packages_in_this_order() -> None:
    table = (
        (DOCS / "design.md")
        .read_text()
        .partition("## Where things live")[2]
        .partition("\n## ")[0]
    )
    assert [
        name.removesuffix("/") for name in re.findall(r"^\| `([\w/]+)`", table, re.M)
    ] == ORDER


@cache
def names_in(file: Path) -> set[str]:
    """What a file defines or names: functions, classes, methods, fields."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    found = {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    found |= {
        n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    return found | {n.attr for n in nodes if isinstance(n, ast.Attribute)}


@pytest.mark.parametrize("page", ["design.md", "internals.md", "limits.md"])
def test_pages_name_what_is_there(page: str) -> None:
    """`file.py: name`, `module.name`, and paths of files."""
    text = (DOCS / page).read_text()
    sources = [*SOURCE.rglob("*.py"), *LABORATORY.rglob("*.py")]
    files = {str(f.relative_to(ROOT)): f for f in sources}
    ends = {
        name: [f for path, f in files.items() if f"/{path}".endswith(f"/{name}")]
        for name in re.findall(r"[\w/]+\.py", text)
    }
    missing = [
        name for name, found in ends.items() if not found and not (ROOT / name).exists()
    ]
    for name, function in re.findall(r"([\w/]+\.py): (\w+(?:\.\w+)*)", text):
        missing += [
            f"{name}: {part}"
            for part in function.split(".")
            if not any(part in names_in(f) for f in ends[name])
        ]
    stems = {
        f.stem: f
        for f in files.values()
        if f.parent.name in ("engine", "posteriors", "prediction")
    }
    for module, name in re.findall(r"`(\w+)\.(\w+)", text):
        if module in stems and name != "py" and name not in names_in(stems[module]):
            missing.append(f"{module}.{name}")
    assert not missing
