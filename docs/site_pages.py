"""What the site makes by itself: the API's pages from api.py, tables of what was measured from results/, links.

python docs/site_pages.py        # writes README's table of parameters anew
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "slimbayes"
Rows = list[list[str]]

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
    "plot", "decisions", "metrics", "diagnostics", "data", "models", "sklearn", "contrib.transformers",
    "contrib.lightning",
)  # fmt: skip


def public_names(file: Path) -> dict[str, str]:
    """{name: module it is from} of a file's re-exports `from x import a as a`."""
    body = ast.parse(file.read_text()).body
    imports = [node for node in body if isinstance(node, ast.ImportFrom)]
    return {one.name: str(node.module) for node in imports for one in node.names if one.asname == one.name}


def grouped_names() -> dict[str, list[str]]:
    """Public names of `slimbayes` by package; modules have pages of their own."""
    groups: dict[str, list[str]] = {group: [] for group in TITLES}
    for name, module in public_names(SOURCE / "api.py").items():
        package = module.split(".")[1] if "." in module else ""
        if package:
            groups[package if package in TITLES else "extending"].append(name)
        elif name not in (module.partition(".")[0] for module in MODULES):
            groups["extending"].append(name)
    return groups


def entry(owner: str, name: str) -> str:
    """The directive that documents a name."""
    found = getattr(importlib.import_module(owner), name)
    if inspect.ismodule(found):
        return f".. automodule:: {found.__name__}\n   :members:\n"
    if inspect.isclass(found):
        members = "" if issubclass(found, tuple) else "   :members:\n"  # a named tuple's docstring has its fields
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
        and (value.__module__ == module if "." in module.removeprefix("slimbayes.") else
             value.__module__.startswith(module) or name in public_names(Path(str(loaded.__file__))))
    ]  # fmt: skip


def write_api(folder: Path) -> None:
    """One page for each package, and an index; files that are right already stay as they are."""
    folder.mkdir(exist_ok=True)
    pages = {}
    for group, names in grouped_names().items():
        pages[group] = _titled(TITLES[group], [entry("slimbayes", name) for name in names])
    for module in MODULES:
        name = f"slimbayes.{module}"
        entries = [f".. automodule:: {name}\n   :no-members:\n   :no-index:\n"]
        pages[module] = _titled(name, entries + [entry(name, one) for one in names_of_module(name)])
    pages["index"] = _titled("API", [".. toctree::\n\n" + "".join(f"   {page}\n" for page in pages)])
    for name, text in pages.items():
        file = folder / f"{name}.rst"
        if not file.exists() or file.read_text() != text:
            file.write_text(text)


def _titled(title: str, entries: Iterable[str], line: str = "=") -> str:
    return "\n".join([title, line * len(title), "", *entries])


def say_arguments(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """`Args: as in X, and`, with arguments below, becomes a sentence and a section."""
    start = next((at for at, line in enumerate(lines) if re.match(r"\s*Args: \S", line)), None)
    if start is None:
        return
    end = start + 1
    while end < len(lines) and lines[end].startswith("    ") and not re.match(r"\s+[\w, ]+: ", lines[end]):
        end += 1
    sentence = " ".join(line.strip() for line in lines[start:end]).replace("Args:", "Arguments:", 1)
    more = end < len(lines) and lines[end].startswith("    ")
    lines[start:end] = [sentence, "", *(["Args:"] if more else [])]


def tidy_docstring(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text with a little markup: stars and bars in them are stars and bars."""
    lines[:] = [line if line.lstrip().startswith((">>>", "...", ".. ")) else _plain(line) for line in lines]


def skip_foreign(app: Any, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """scikit-learn makes methods for classes of others, with links into its own pages."""
    return True if re.fullmatch(r"set_\w+_request", name) else None


def _plain(line: str) -> str:
    parts = line.split("`")
    parts[::2] = [re.sub(r"(?<!\\)([*|]|_(?=\W|$))", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


# --- links ---

UNDER_OTHERS = ("export", "serving")  # pages below docs/howto/deploy.md


def keep_links_inside(app: Any, name: str, source: list[str]) -> None:
    """Files that are no part of the site are named instead of linked; pages that no list has get into the last one."""
    if name == "index":
        pages = {file.stem for file in ROOT.glob("docs/*.md")} - {"index", *UNDER_OTHERS}
        others = sorted(page for page in pages if not re.search(rf"^(.*<)?{page}>?$", source[0], re.M))
        source[0] = re.sub(r"```\s*$", "".join(f"{page}\n" for page in others) + "```\n", source[0])
    depth = "../" * name.count("/")
    outside = re.compile(r"\[([^\]]*)\]\(" + re.escape(depth) + r"\.\./([^)]+)\)")
    source[0] = outside.sub(lambda m: f"`{m[2]}`" if m[1].strip("`") == m[2] else f"{m[1]} (`{m[2]}`)", source[0])


# --- what was measured ---


def table(rows: Rows) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def small_tasks(methods: Iterable[str]) -> str:
    """The recipes' scores beside a plain network's, from the record behind docs/recipes.md."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from defaults_page import Results, choice

    record = json.loads((ROOT / "results/defaults/cells.json").read_text())
    found, chosen = Results(record), choice(record)
    rows = [["method", "start", "recipe", "temperature", "NLL less plain's", "shifted less plain's", "tasks harmed"]]
    for method in methods:
        for start in ("scratch", "trained"):
            if (method, start) not in chosen:
                continue
            name = chosen[method, start]
            clean, moved = (
                mean(d for t in found.tasks if (d := found.difference(t, start, name, what)) is not None)
                for what in ("test_nll", "test_shifted_nll")
            )
            one = found.candidates[name]
            harmed = sum(found.harms(task, start, name) for task in found.tasks)
            rows.append([method, start, f"`{one['written']}`", f"{one['temperature']:g}", f"{clean:+.3f}"])
            rows[-1] += [f"{moved:+.3f}", f"{harmed} of {len(found.tasks)}"]
    if len(rows) == 1:
        return ""
    words = (
        "Small real tasks (less is better; [recipes](../recipes.md) has each task and says how recipes were chosen):"
    )
    return f"{words}\n\n{table(rows)}"


def cifar10(names: Iterable[str]) -> str:
    """Records of results/cifar10, the most draws of each, averaged over seeds."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for file in sorted((ROOT / "results/cifar10").glob("*.json")):
        record = json.loads(file.read_text())
        by_name.setdefault(record["name"], []).append(record)
    rows = [["method", "seeds", "parameters", "accuracy", "NLL", "ECE", "corrupted NLL", "seconds per epoch"]]
    for name in (name for name in ("plain", *names) if name in by_name):
        accuracy, *others = (mean(column) for column in zip(*map(_scores, by_name[name]), strict=True))
        total = by_name[name][0]["parameters"]["total"]
        rows.append([name, str(len(by_name[name])), f"{total:,}", f"{accuracy:.1%}", *(f"{one:.3f}" for one in others)])
    if len(rows) < 3:
        return ""
    config = by_name["plain"][0]["config"]
    words = f"CIFAR-10, WRN-{config['model']['depth']}-{config['model']['width']}, {config['train']['epochs']} epochs:"
    return f"{words}\n\n{table(rows)}"


def _scores(record: Mapping[str, Any]) -> tuple[float, ...]:
    most = max(e["draws"] for e in record["evaluations"])
    judged = [e for e in record["evaluations"] if e["draws"] == most]
    clean = next(e["metrics"] for e in judged if e["role"] == "test")
    corrupted = mean(e["metrics"]["nll"] for e in judged if e["role"] == "corruption")
    return clean["accuracy"], clean["nll"], clean["ece"], corrupted, record["cost"]["seconds_per_epoch"]


def steps(prefixes: tuple[str, ...]) -> str:
    """Ratios of results/benchmarks/gpu_h200.json to the plain network."""
    record = json.loads((ROOT / "results/benchmarks/gpu_h200.json").read_text())
    rows = [["network", "mode", "method", "step", "prediction", "memory"]]
    for one in record["results"]:
        if one["method"].startswith(prefixes):
            ratios = [one.get(f"{what}_ratio") for what in ("train", "predict", "peak")]
            rows.append([one["sizes"], one["mode"], one["method"], *("" if r is None else f"{r:.2f}" for r in ratios)])
    if len(rows) == 1:
        return ""
    device = record["machine"]["device"]
    return f"Time and memory over the plain network's, {device} ([all of it](../performance.md)):\n\n{table(rows)}"


# --- parameters ---


def networks() -> Iterator[tuple[str, Any]]:
    """Three networks of very different widths, without memory for their weights."""
    import torch
    from torch import nn

    import slimbayes as sb

    with torch.device("meta"):
        yield "ResNet-50", sb.models.resnet50()
        # Twelve blocks of width 768 and an embedding that is the output layer, too.
        block = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True, norm_first=True)
        blocks = nn.TransformerEncoder(block, 12, enable_nested_tensor=False)
        yield "GPT-2-like", nn.Sequential(nn.Embedding(50257, 768), blocks, nn.LayerNorm(768))
        yield "MLP 64-256-10", nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def configs() -> dict[str, Any]:
    """What each method's page and README's table count, with defaults but for the members."""
    import slimbayes as sb

    return {
        "rank-1, 4 members": sb.Rank1(members=4),
        "BatchEnsemble, 4 members": sb.BatchEnsemble(members=4),
        "2-tied": sb.KTied(rank=2),
        "mean-field": sb.MeanField(),
        "EMP of norms, 5 components": sb.ModelPatch(components=5),
        "DropConnect": sb.DropConnect(rate=0.1),
        "deep ensemble, 4 members": sb.Ensemble(members=4),
    }


def parameters(methods: Iterable[str] | None = None) -> str:
    """Parameters that `sb.summary` counts before and after, in percent."""
    import slimbayes as sb

    chosen = {name: config for name, config in configs().items() if methods is None or name in methods}
    columns = [["more parameters", *chosen]]
    for name, net in networks():
        plain = sum(p.numel() for p in net.parameters())
        columns.append([f"{name}, {plain:,}"])
        for config in chosen.values():
            more = sb.estimate_cost(net, config).extra_parameters if _fits(config, net) else None
            columns[-1].append("no norms" if more is None else f"{more / plain:+.1%}")
    return table([list(row) for row in zip(*columns, strict=True)])


def _fits(config: Any, net: Any) -> bool:
    """Whether there is anything to patch."""
    return "patch" not in vars(config) or any("Norm" in type(module).__name__ for module in net.modules())


def of_page(asked: tuple[str, ...]) -> str:
    """The tables of `page; word`: those below the page's heading with that word, each with the sentence before it."""
    file, word = asked
    sections = re.split(r"^## ", (ROOT / "docs" / file).read_text(), flags=re.M)
    section = next((text for text in sections if word in text.partition("\n")[0]), "")
    paragraphs = re.split(r"\n\n+", section)
    found = [
        f"{before.replace(chr(10), ' ').split('. ')[-1]}\n\n{text.strip()}"
        for before, text in pairwise(paragraphs)
        if text.startswith("|")
    ]
    return "\n\n".join(found)


KINDS = {"tables": of_page, "parameters": parameters, "tasks": small_tasks, "cifar10": cifar10, "steps": steps}


def measured(asked: Mapping[str, str]) -> str:
    """Markdown of all that is asked for; what nobody measured is said."""
    parts = {what: KINDS[what](tuple(name.strip() for name in names.split(";"))) for what, names in asked.items()}
    missing = [what for what, text in parts.items() if not text]
    if missing:
        raise ValueError(f"results/ has nothing about {', '.join(f'{what}: {asked[what]}' for what in missing)}")
    return "\n\n".join(parts.values())


def with_table(readme: str) -> str:
    """README with its table of parameters made anew."""
    chosen = ("rank-1, 4 members", "BatchEnsemble, 4 members", "2-tied", "mean-field", "deep ensemble, 4 members")
    return re.sub(
        r"(?s)(<!-- parameters -->\n).*?(<!-- /parameters -->)", rf"\1{parameters(chosen)}\n\2", readme, count=1
    )


if __name__ == "__main__":
    (ROOT / "README.md").write_text(with_table((ROOT / "README.md").read_text()))
