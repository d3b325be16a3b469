"""What the site makes by itself: the API's pages from api.py, tables of what was measured from lab/results/, links."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "slimbayes"

# --- the API, as api.py lists it ---

TITLES = {
    "convert": "Conversion and checkpoints",
    "posteriors": "Methods",
    "distributions": "Distributions and priors",
    "train": "Training",
    "prediction": "Prediction",
    "inference": "Posteriors of trained networks",
    "extending": "Extending, and what goes wrong",
}
MODULES = (
    "slimbayes.plot", "slimbayes.decisions", "slimbayes.metrics", "slimbayes.diagnostics", "slimbayes.sklearn",
    "slimbayes.contrib.transformers", "slimbayes.contrib.lightning", "slimbayes_lab.data", "slimbayes_lab.models",
)  # fmt: skip


def public_names(file: Path) -> dict[str, str]:
    """{name: module it is from} of a file's re-exports `from x import a as a`."""
    body = ast.parse(file.read_text()).body
    imports = [node for node in body if isinstance(node, ast.ImportFrom)]
    return {
        one.name: str(node.module)
        for node in imports
        for one in node.names
        if one.asname == one.name
    }


def grouped_names() -> dict[str, list[str]]:
    """Public names of `slimbayes` by package; modules have pages of their own."""
    groups: dict[str, list[str]] = {group: [] for group in TITLES}
    for name, module in public_names(SOURCE / "api.py").items():
        package = module.split(".")[1] if "." in module else ""
        if package:
            groups[package if package in TITLES else "extending"].append(name)
        elif name not in (module.split(".")[1] for module in MODULES):
            groups["extending"].append(name)
    return groups


def entry(owner: str, name: str) -> str:
    """The directive that documents a name."""
    found = getattr(importlib.import_module(owner), name)
    if inspect.ismodule(found):
        return f".. automodule:: {found.__name__}\n   :members:\n"
    if inspect.isclass(found):
        members = (
            "" if issubclass(found, tuple) else "   :members:\n"
        )  # a named tuple's docstring has its fields
        return f".. autoclass:: {owner}.{name}\n{members}"
    return f".. auto{'function' if callable(found) else 'data'}:: {owner}.{name}\n"


def names_of_module(module: str) -> list[str]:
    """Public classes and functions of a module: its own, or those its package hands on."""
    loaded = importlib.import_module(module)
    names = [name for name in dir(loaded) if not name.startswith("_")]
    found = {name: getattr(loaded, name) for name in names}
    return [
        name for name, value in found.items()
        if (inspect.isclass(value) or inspect.isfunction(value))
        and (value.__module__ == module if "." in module.partition(".")[2] else
             value.__module__.startswith(module) or name in public_names(Path(str(loaded.__file__))))
    ]  # fmt: skip


def write_api(folder: Path) -> None:
    """One page for each package, and an index; files that are right already stay as they are."""
    folder.mkdir(exist_ok=True)
    pages = {}
    for group, names in grouped_names().items():
        pages[group] = _titled(
            TITLES[group], [entry("slimbayes", name) for name in names]
        )
    for name in MODULES:
        module = name.partition(".")[2]
        entries = [f".. automodule:: {name}\n   :no-members:\n   :no-index:\n"]
        pages[module] = _titled(
            name, entries + [entry(name, one) for one in names_of_module(name)]
        )
    pages["index"] = _titled(
        "API", [".. toctree::\n\n" + "".join(f"   {page}\n" for page in pages)]
    )
    for name, text in pages.items():
        file = folder / f"{name}.rst"
        if not file.exists() or file.read_text() != text:
            file.write_text(text)


def _titled(title: str, entries: Iterable[str], line: str = "=") -> str:
    return "\n".join([title, line * len(title), "", *entries])


def say_arguments(
    app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """`Args: as in X, and`, with arguments below, becomes a sentence and a section."""
    start = next(
        (at for at, line in enumerate(lines) if re.match(r"\s*Args: \S", line)), None
    )
    if start is None:
        return
    end = start + 1
    while (
        end < len(lines)
        and lines[end].startswith("    ")
        and not re.match(r"\s+[\w, ]+: ", lines[end])
    ):
        end += 1
    sentence = " ".join(line.strip() for line in lines[start:end]).replace(
        "Args:", "Arguments:", 1
    )
    more = end < len(lines) and lines[end].startswith("    ")
    lines[start:end] = [sentence, "", *(["Args:"] if more else [])]


def tidy_docstring(
    app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """Docstrings are plain text with a little markup: stars and bars in them are stars and bars."""
    lines[:] = [
        line if line.lstrip().startswith((">>>", "...", ".. ")) else _plain(line)
        for line in lines
    ]


def plain_types(
    app: Any,
    what: str,
    name: str,
    thing: Any,
    options: Any,
    signature: str,
    returns: str,
) -> Any:
    """Aliases of types in unions, of which autodoc shows its own class."""
    return re.sub(
        r"TypeAliasForwardRef\('(\w+)'\)", r"\1", signature or ""
    ) or None, returns


def skip_foreign(
    app: Any, what: str, name: str, thing: Any, skip: bool, options: Any
) -> bool | None:
    """scikit-learn makes methods for classes of others, with links into its own pages."""
    return True if re.fullmatch(r"set_\w+_request", name) else None


def _plain(line: str) -> str:
    parts = line.split("`")
    parts[::2] = [
        re.sub(r"(?<!\\)([*|]|_(?=\W|$))", r"\\\1", part) for part in parts[::2]
    ]
    return "`".join(parts)


# --- links ---

UNDER_OTHERS = ("export",)  # pages below docs/howto/deploy.md


def keep_links_inside(app: Any, name: str, source: list[str]) -> None:
    """Files that are no part of the site are named instead of linked; pages that no list has get into the last one."""
    if name == "index":
        pages = {file.stem for file in ROOT.glob("docs/*.md")} - {
            "index",
            *UNDER_OTHERS,
        }
        others = sorted(
            page
            for page in pages
            if not re.search(rf"^(.*<)?{page}>?$", source[0], re.M)
        )
        source[0] = re.sub(
            r"```\s*$", "".join(f"{page}\n" for page in others) + "```\n", source[0]
        )
    depth = "../" * name.count("/")
    outside = re.compile(r"\[([^\]]*)\]\(" + re.escape(depth) + r"\.\./([^)]+)\)")
    source[0] = outside.sub(
        lambda m: f"`{m[2]}`" if m[1].strip("`") == m[2] else f"{m[1]} (`{m[2]}`)",
        source[0],
    )
