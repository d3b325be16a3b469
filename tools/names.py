"""Compare the public names of this tree with those of commit 895e39d, which tools/names.tsv lists with what becomes of
each. It goes when the redesign is done.

    python tools/names.py list      the names of this tree, one line each: kind, name
    python tools/names.py check     what disagrees with the table; with --pending also what is still to be done
    python tools/names.py done      mark the pending rows whose change has landed

A row that "stays" must be in the tree. One that is "renamed" may be there under the old or the new name, one that is
"gone" may still be there, until its column `done` says "yes": then only the new name may be there, or none.
"""

import argparse
import csv
import functools
import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
import tomllib
import typing
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tools" / "names.tsv"
# Modules whose names are public, under the paths of 895e39d and those that the redesign gives them; for what goes to
# the laboratory see `places`.
MODULES = (
    "slimbayes", "slimbayes.schedules", "slimbayes.plot", "slimbayes.plotting", "slimbayes.metrics",
    "slimbayes.diagnostics", "slimbayes.decisions", "slimbayes.calibration", "slimbayes.kernels", "slimbayes.sklearn",
    "slimbayes.contrib.lightning", "slimbayes.contrib.transformers", "slimbayes.integrations.sklearn",
    "slimbayes.integrations.lightning", "slimbayes.integrations.transformers",
    "slimbayes.data", "slimbayes.models", "slimbayes.report", "slimbayes.lab.search",
)  # fmt: skip
# Names that pages of the docs take from modules that are not public as a whole.
FROM_DOCS = (
    "slimbayes.__version__", "slimbayes.distributions.families.Normal", "slimbayes.distributions.scales.widen",
    "slimbayes.engine.passes.Noise", "slimbayes.layers.base.BayesLayer", "slimbayes.layers.site.Site",
    "slimbayes.layers.site.own_value", "slimbayes.posteriors.base.WeightPosterior",
    "slimbayes.posteriors.base.WeightPosterior.realise", "slimbayes.posteriors.base.WeightPosterior.draw",
    "slimbayes.posteriors.configs.base.Config", "slimbayes.lab.runs.fit.fit", "slimbayes.lab.execution.Execution",
    "slimbayes.lab.configs.files.load", "slimbayes.lab.configs.files.read_tree",
    "slimbayes.lab.configs.files.row_names", "slimbayes.lab.configs.files.validate", "slimbayes.report.groups.load",
    "slimbayes.report.tables.reasons",
)  # fmt: skip
# Where the laboratory keeps what is looked at here: the first that exists.
COMMANDS = ("slimbayes_lab.cli:app", "slimbayes_lab.command:app", "slimbayes.lab.command:app")  # fmt: skip
RECORD = ("slimbayes_lab.run.record:Record", "slimbayes_lab.report.record:Record", "slimbayes.report.record:Record")  # fmt: skip
DATA_SETS = ("slimbayes_lab.data.sets:SOURCES", "slimbayes_lab.data.catalog:SOURCES", "slimbayes.data.catalog:SOURCES")  # fmt: skip
CORRUPTIONS = ("slimbayes_lab.data:CORRUPTIONS", "slimbayes.data:CORRUPTIONS")
MORE_CORRUPTIONS = ("slimbayes_lab.data:EXTRA", "slimbayes.data:EXTRA")
FILES = {"docs": ".md", "experiments": ".yaml", "examples": ".py"}

Row = dict[str, str]
Names = Iterator[tuple[str, str]]  # of a kind, and a name


def find(*paths: str, default: Any = None) -> Any:
    """What the first of some paths that exist leads to."""
    for path in paths:
        try:
            return pkgutil.resolve_name(path)
        except (ModuleNotFoundError, AttributeError) as error:
            missing = getattr(error, "name", "")
            if isinstance(error, ModuleNotFoundError) and not path.startswith(missing):
                raise  # a package that it needs is not installed
    return default


def places(paths: tuple[str, ...]) -> list[str]:
    """Paths, and for those that go to the laboratory where they are there."""
    laboratory = re.compile(r"slimbayes\.lab|slimbayes(?=\.(data|models|report)\b)")
    new = [laboratory.sub("slimbayes_lab", path) for path in paths]
    return list(dict.fromkeys([*paths, *new]))


# --- Python ---


def python_names() -> Names:
    for path in places(MODULES):
        if (module := find(path)) is None:
            continue
        yield "module", path
        for name in dir(module):
            value = getattr(module, name)
            if not name.startswith("_") and is_own(value, module):
                yield from described(f"{path}.{name}", value)
    for path in places(FROM_DOCS):
        if find(path) is not None:
            yield "import", path


def is_own(value: Any, module: Any) -> bool:
    """Whether a module defines a name, or as a package gathers it from the rest of ours."""
    home = getattr(value, "__module__", None)
    is_package = hasattr(module, "__path__")
    if inspect.ismodule(value) or value is typing.TYPE_CHECKING:
        return False
    if home is None:
        return is_package
    return home.startswith("slimbayes") if is_package else home == module.__name__


def described(path: str, value: Any) -> Names:
    """A name with its arguments; of a class also methods and properties."""
    if inspect.isclass(value):
        yield "class", path
        yield from arguments(path, value)
        for name in sorted(member_names(value)):
            yield from described(f"{path}.{name}", getattr(value, name))
    elif inspect.isroutine(value):
        yield "function", path
        yield from arguments(path, value)
    elif isinstance(value, property | functools.cached_property):
        yield "property", path
    elif path.rpartition(".")[2].isupper():
        yield "constant", path


def member_names(value: type) -> set[str]:
    """Names that a class and its private parents of ours define; public parents have rows of their own."""
    library = importlib.import_module("slimbayes")
    found: set[str] = set()
    for parent in value.__mro__:
        is_public = getattr(library, parent.__name__, None) is parent
        is_helper = parent.__module__ == "slimbayes.metrics.streaming"
        is_ours = parent.__module__.startswith("slimbayes") and not is_helper
        if parent is value or (is_ours and not is_public):
            found |= {name for name in vars(parent) if not name.startswith("_")}
    return found


def arguments(path: str, value: Any) -> Names:
    for evaluated in (True, False):  # some annotations name what is not imported
        with suppress(NameError, ValueError):
            parameters = inspect.signature(value, eval_str=evaluated).parameters
            break
    else:
        return
    for name, parameter in parameters.items():
        is_open = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if name != "self" and not is_open:
            yield "argument", f"{path}({name})"
            for choice in literals(parameter.annotation):
                yield "value", f"{path}({name}={choice})"


def literals(annotation: Any) -> list[str]:
    """The words that an annotation allows."""
    if typing.get_origin(annotation) is typing.Literal:
        return [str(choice) for choice in typing.get_args(annotation)]
    parts = typing.get_args(annotation)
    return [word for part in parts for word in literals(part)]


# --- the laboratory ---


def laboratory_names() -> Names:
    import typer
    from typer.testing import CliRunner

    app = find(*COMMANDS)
    yield from command_names(typer.main.get_command(app), "slimbayes")
    schema = CliRunner().invoke(app, ["config", "schema"]).output
    yield from field_names(json.loads(schema), "config")
    yield from field_names(find(*RECORD).model_json_schema(), "record")
    for name in find(*DATA_SETS):
        yield "data set", f"data set {name}"
    for name in (*find(*CORRUPTIONS), *find(*MORE_CORRUPTIONS, default=())):
        yield "corruption", f"corruption {name}"


def command_names(command: Any, path: str) -> Names:
    yield "command", path
    for option in command.params:
        for word in (*option.opts, *option.secondary_opts):
            yield "option", f"{path} {word}"
    for name, child in getattr(command, "commands", {}).items():
        yield from command_names(child, f"{path} {name}")


def field_names(root: dict[str, Any], start: str) -> Names:
    """Fields of a JSON schema by their paths; a kind that some field can choose has its fields under its own name."""
    left, seen = [(start, root)], {start}
    while left:
        path, schema = left.pop()
        for name, field in schema.get("properties", {}).items():
            yield f"{start} field", f"{path}.{name}"
            text = json.dumps({key: field[key] for key in field if key != "default"})
            listed = re.findall(r'"enum": (\[.*?\])', text)
            alone = re.findall(r'"const": ("[^"]*"|\d+)', text)
            for choices in (*listed, f"[{', '.join(alone)}]"):
                for choice in json.loads(choices):
                    yield f"{start} value", f"{path}.{name}={choice}"
            for part in re.findall(r'"\$ref": "#/\$defs/(\w+)"', text):
                definition = root["$defs"][part]
                is_kind = "kind" in definition.get("properties", {})
                place = f"{start}.{part}" if is_kind else f"{path}.{name}"
                if place not in seen:
                    seen.add(place)
                    left.append((place, definition))


# --- files ---


def file_names() -> Names:
    for file in (ROOT / "pyproject.toml", ROOT / "lab" / "pyproject.toml"):
        if file.exists():
            project = tomllib.loads(file.read_text())["project"]
            yield "distribution", f"distribution {project['name']}"
            for extra in project["optional-dependencies"]:
                yield "extra", f"{project['name']}[{extra}]"
    for line in re.findall(r"^\.PHONY:(.*)", (ROOT / "Makefile").read_text(), re.M):
        for target in line.split():
            yield "make", f"make {target}"
    listed = ["git", "ls-files", *FILES, *(f"lab/{folder}" for folder in FILES)]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    for path in done.stdout.splitlines():
        name = path.removeprefix("lab/")  # where a file is kept is no promise
        folder = name.partition("/")[0]
        if name.endswith(FILES[folder]):
            yield folder, name


def names() -> dict[str, str]:
    """Every public name of this tree, and its kind."""
    found = [*python_names(), *laboratory_names(), *file_names()]
    return {name: kind for kind, name in found}


# --- the table ---


def read() -> list[Row]:
    with TABLE.open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def is_there(row: Row, tree: dict[str, str]) -> bool:
    """Whether a name is in the tree; what goes may have moved to the laboratory before."""
    name = row["name"]
    paths = places((name,)) if row["state"] == "gone" else [name]
    return any(path in tree for path in paths)


def fault(row: Row, tree: dict[str, str]) -> str:
    """What is wrong with a row of the table; nothing if it agrees with the tree."""
    old, new, done = is_there(row, tree), row["new"] in tree, row["done"] == "yes"
    if row["state"] == "stays":
        return "" if old else "should stay, and is missing"
    if row["state"] not in ("renamed", "gone") or not row["reason"]:
        return "has a row without a state that is known, or without a reason"
    if done and old:
        return f"is still there, though its row says that it is {row['state']}"
    if row["state"] == "renamed" and not new and (done or not old):
        return f"is missing, and so is its new name, {row['new'] or 'which is empty'}"
    return ""


def faults(rows: list[Row], tree: dict[str, str]) -> list[str]:
    found = [(row, fault(row, tree)) for row in rows]
    said = [f"{row['kind']} {row['name']} {what}" for row, what in found if what]
    known = [row["name"] for row in rows]
    twice = {name for name in known if known.count(name) > 1}
    return said + [f"{name} has two rows" for name in sorted(twice)]


def pending(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["state"] != "stays" and row["done"] != "yes"]


def mark_done(rows: list[Row], tree: dict[str, str]) -> None:
    for row in pending(rows):
        if not is_there(row, tree) and not fault(row, tree):
            row["done"] = "yes"
    with TABLE.open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0], delimiter="\t", lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("command", choices=("list", "check", "done"))
    parser.add_argument("--pending", action="store_true")
    options = parser.parse_args()
    tree = names()
    if options.command == "list":
        print(*(f"{kind}\t{name}" for name, kind in tree.items()), sep="\n")
        return 0
    rows = read()
    if options.command == "done":
        mark_done(rows, tree)
    for row in pending(rows) if options.pending else []:
        print(f"pending: {row['name']} -> {row['new'] or 'gone'}; {row['reason']}")
    wrong = faults(rows, tree)
    print(*wrong, sep="\n")
    print(f"{len(rows)} names, {len(wrong)} wrong, {len(pending(rows))} pending")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
