"""Tables of what was measured, from results/ and the docs' own pages, for the site and the README.

python docs/measured.py        # writes README's table of parameters and its times of steps anew
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).parents[1]
Rows = list[list[str]]


def table(rows: Rows) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def small_tasks(methods: Iterable[str]) -> str:
    """The recipes' scores beside a plain network's, from the record behind docs/recipes.md."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from defaults_page import Results, choice

    record = json.loads((ROOT / "results/defaults/cells.json").read_text())
    found, chosen = Results(record), choice(record)
    rows = [
        [
            "method",
            "start",
            "recipe",
            "temperature",
            "NLL less plain's",
            "shifted less plain's",
            "tasks harmed",
        ]
    ]
    for method in methods:
        for start in ("scratch", "trained"):
            if (method, start) not in chosen:
                continue
            name = chosen[method, start]
            clean, moved = (
                mean(
                    d
                    for t in found.tasks
                    if (d := found.difference(t, start, name, what)) is not None
                )
                for what in ("test_nll", "test_shifted_nll")
            )
            one = found.candidates[name]
            harmed = sum(found.harms(task, start, name) for task in found.tasks)
            rows.append(
                [
                    method,
                    start,
                    f"`{one['written']}`",
                    f"{one['temperature']:g}",
                    f"{clean:+.3f}",
                ]
            )
            rows[-1] += [f"{moved:+.3f}", f"{harmed} of {len(found.tasks)}"]
    if len(rows) == 1:
        return ""
    words = "Small real tasks (less is better; [recipes](../recipes.md) has each task and says how recipes were chosen):"
    return f"{words}\n\n{table(rows)}"


def cifar10(names: Iterable[str]) -> str:
    """Records of results/cifar10/methods, the most draws of each, averaged over seeds."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for file in sorted((ROOT / "results/cifar10/methods").glob("*.json")):
        record = json.loads(file.read_text())
        by_name.setdefault(record["name"], []).append(record)
    rows = [
        ["method", "seeds", "parameters", "accuracy", "NLL", "ECE", "corrupted NLL"]
    ]
    for name in (name for name in ("plain", *names) if name in by_name):
        accuracy, *others = (
            mean(column) for column in zip(*map(_scores, by_name[name]), strict=True)
        )
        total = by_name[name][0]["parameters"]["total"]
        rows.append(
            [
                name,
                str(len(by_name[name])),
                f"{total:,}",
                f"{accuracy:.1%}",
                *(f"{one:.3f}" for one in others),
            ]
        )
    if len(rows) < 3:
        return ""
    config = by_name["plain"][0]["config"]
    model, epochs = config["model"], config["train"]["epochs"]
    words = f"CIFAR-10, WRN-{model['depth']}-{model['width']}, all at the cost of {epochs} epochs of the plain network:"
    return f"{words}\n\n{table(rows)}"


def _scores(record: Mapping[str, Any]) -> tuple[float, ...]:
    most = max(e["draws"] for e in record["evaluations"])
    judged = [e for e in record["evaluations"] if e["draws"] == most]
    clean = next(e["metrics"] for e in judged if e["role"] == "test")
    corrupted = mean(e["metrics"]["nll"] for e in judged if e["role"] == "corruption")
    return clean["accuracy"], clean["nll"], clean["ece"], corrupted


def steps(prefixes: tuple[str, ...]) -> str:
    """Ratios of results/benchmarks/gpu_h200.json to the plain network."""
    record = json.loads((ROOT / "results/benchmarks/gpu_h200.json").read_text())
    rows = [["network", "mode", "method", "step", "prediction", "memory"]]
    for one in record["results"]:
        if one["method"].startswith(prefixes):
            ratios = [one.get(f"{what}_ratio") for what in ("train", "predict", "peak")]
            rows.append(
                [
                    one["sizes"],
                    one["mode"],
                    one["method"],
                    *("" if r is None else f"{r:.2f}" for r in ratios),
                ]
            )
    if len(rows) == 1:
        return ""
    device = record["machine"]["device"]
    return f"Time and memory over the plain network's, {device} ([all of it](../performance.md)):\n\n{table(rows)}"


RECORDED = {  # README's names of cases and methods
    "GPT-2 small with a frozen base": ("gpt2", "rank-1, frozen base"),
    "ViT-B/16 with a frozen base": ("vit", "rank-1, frozen base"),
    "WRN-28-10": ("wrn-rank1", "rank-1 per example"),
    "GPT-2 small with all weights trained": ("gpt2", "rank-1, all trained"),
    "an MLP of 4 x 4096": ("mlp", "rank-1 per example, loss compiled"),
    "an LSTM": ("lstm", "rank-1 per example"),
}


def speed() -> str:
    """README's sentences on rank-1 steps that are recorded as CUDA graphs."""
    record = json.loads((ROOT / "results/benchmarks/gpu_h200.json").read_text())
    found = {
        (one["case"], one["method"]): one
        for one in record["results"]
        if one["mode"] == "recorded"
    }
    ratios = [found[key]["train_ratio"] for key in RECORDED.values()]
    each = [
        f"{name} {found[key]['train_ms']:.1f} against {found[key[0], 'plain']['train_ms']:.1f}"
        for name, key in RECORDED.items()
    ]
    cost = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return (
        f"- **A rank-1 step costs {cost} times a plain one, recorded as one CUDA graph.** "
        f"{record['machine']['device']}, K = 4 members, as many rows as the plain network, steps as the lab and "
        f"`sb.recorded` run them, in ms: {'; '.join(each)} (`results/benchmarks/gpu_h200.json`). "
        "Outside of a graph small steps wait for Python, Gaussians over all weights cost twice a plain step, and most "
        "of our own targets are missed or unclear: [docs/performance.md](docs/performance.md), generated, has every "
        "number next to its target and to rivals, and says what each miss is bound by."
    )


# --- parameters ---


@cache
def networks() -> list[tuple[str, Any]]:
    """Three networks of very different widths, without memory for their weights."""
    import torch
    from torch import nn

    import slimbayes as sb

    with torch.device("meta"):
        # Twelve blocks of width 768 and an embedding that is the output layer, too.
        block = nn.TransformerEncoderLayer(
            768, 12, 3072, batch_first=True, norm_first=True
        )
        blocks = nn.TransformerEncoder(block, 12, enable_nested_tensor=False)
        return [
            ("ResNet-50", sb.models.resnet50()),
            (
                "GPT-2-like",
                nn.Sequential(nn.Embedding(50257, 768), blocks, nn.LayerNorm(768)),
            ),
            (
                "MLP 64-256-10",
                nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)),
            ),
        ]


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
    chosen = [name for name in configs() if methods is None or name in methods]
    columns = [["more parameters", *chosen]]
    for place, (name, net) in enumerate(networks()):
        plain = sum(p.numel() for p in net.parameters())
        more = [more_parameters(method)[place] for method in chosen]
        columns.append(
            [
                f"{name}, {plain:,}",
                *("no norms" if n is None else f"{n / plain:+.1%}" for n in more),
            ]
        )
    return table([list(row) for row in zip(*columns, strict=True)])


@cache
def more_parameters(method: str) -> list[int | None]:
    """What a method adds to each of the networks, None where there is nothing to patch."""
    import slimbayes as sb

    config = configs()[method]
    return [
        sb.estimate_cost(net, config).extra_parameters if _fits(config, net) else None
        for _, net in networks()
    ]


def _fits(config: Any, net: Any) -> bool:
    """Whether there is anything to patch."""
    return "patch" not in vars(config) or any(
        "Norm" in type(module).__name__ for module in net.modules()
    )


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


KINDS = {
    "tables": of_page,
    "parameters": parameters,
    "tasks": small_tasks,
    "cifar10": cifar10,
    "steps": steps,
}


def measured(asked: Mapping[str, str]) -> str:
    """Markdown of all that is asked for; what nobody measured is said."""
    parts = {
        what: KINDS[what](tuple(name.strip() for name in names.split(";")))
        for what, names in asked.items()
    }
    missing = [what for what, text in parts.items() if not text]
    if missing:
        raise ValueError(
            f"results/ has nothing about {', '.join(f'{what}: {asked[what]}' for what in missing)}"
        )
    return "\n\n".join(parts.values())


def with_tables(readme: str) -> str:
    """README with its table of parameters and its times of steps made anew."""
    chosen = (
        "rank-1, 4 members",
        "BatchEnsemble, 4 members",
        "2-tied",
        "mean-field",
        "deep ensemble, 4 members",
    )
    for name, text in (("parameters", parameters(chosen)), ("speed", speed())):
        readme = re.sub(
            rf"(?s)(<!-- {name} -->\n).*?(<!-- /{name} -->)",
            rf"\1{text}\n\2",
            readme,
            count=1,
        )
    return readme


if __name__ == "__main__":
    (ROOT / "README.md").write_text(with_tables((ROOT / "README.md").read_text()))
