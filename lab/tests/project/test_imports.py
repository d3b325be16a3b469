"""What the laboratory may import: names that are public in the library, and its own folders one way."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "slimbayes_lab"
# Modules of the library whose names are public beside those of `slimbayes` itself.
PUBLIC = {
    "slimbayes", "slimbayes.columns", "slimbayes.diagnostics", "slimbayes.errors", "slimbayes.files",
    "slimbayes.metrics", "slimbayes.seeds", "slimbayes.sklearn", "slimbayes.tables", "slimbayes.untrusted",
}  # fmt: skip
# What the laboratory still takes from inside the library. The list only gets shorter.
EXCEPTIONS = {
    "slimbayes.diagnostics.check",
    "slimbayes.diagnostics.sites",
    "slimbayes.diagnostics.spectra",
    "slimbayes.distributions.families",
    "slimbayes.distributions.scales",
    "slimbayes.engine.passes",
    "slimbayes.metrics.corruption",
    "slimbayes.metrics.functional",
    "slimbayes.metrics.streaming",
    "slimbayes.posteriors",
    "slimbayes.posteriors.configs.base",
    "slimbayes.prediction.draws",
    "slimbayes.prediction.export",
    "slimbayes.prediction.predict",
    "slimbayes.prediction.prediction",
    "slimbayes.prediction.sample",
    "slimbayes.sklearn.columns",
    "slimbayes.train",
    "slimbayes.train.elbo",
    "slimbayes.train.likelihoods",
    "slimbayes.train.optim",
    "slimbayes.train.recorded",
}


def library_modules(file: Path) -> set[str]:
    """Modules of the library that a file imports from."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return {name for name in found if name.split(".")[0] == "slimbayes"}


def test_the_laboratory_imports_public_names_and_a_list_of_exceptions() -> None:
    files = SOURCE.rglob("*.py")
    found = set().union(*(library_modules(file) for file in files))
    assert found - PUBLIC == EXCEPTIONS


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
