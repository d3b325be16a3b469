"""Tables of what was measured, from lab/results/ and the docs' own pages, for the site and the README.

python docs/measured.py               # writes anew what README.md and docs/cost.md say between marks
python docs/measured.py take FOLDER   # the same, after taking the scores of `make demo` from its folder
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
from textwrap import fill
from typing import Any

from slimbayes_lab.report import kept

ROOT = Path(__file__).parents[1]
Rows = list[list[str]]


def table(rows: Rows) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


@cache
def defaults() -> tuple[Any, Mapping[tuple[str, str], str]]:
    """The record behind docs/recipes.md, and which candidate is a method's recipe from which start."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from defaults_page import Results, choice

    record = json.loads((ROOT / "lab/results/defaults/cells.json").read_text())
    return Results(record), choice(record)


def gains(method: str, start: str) -> tuple[float, float, int]:
    """NLL less the plain network's, mean over tasks, on clean and on shifted examples; tasks that are harmed."""
    found, chosen = defaults()
    name = chosen[method, start]
    clean, shifted = (
        mean(
            difference
            for task in found.tasks
            if (difference := found.difference(task, start, name, score)) is not None
        )
        for score in ("test_nll", "test_shifted_nll")
    )
    harmed = sum(found.harms(task, start, name) for task in found.tasks)
    return clean, shifted, harmed


def small_tasks(methods: Iterable[str]) -> str:
    """The recipes' scores beside a plain network's, from the record behind docs/recipes.md."""
    found, chosen = defaults()
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
            one = found.candidates[chosen[method, start]]
            clean, shifted, harmed = gains(method, start)
            rows.append(
                [
                    method,
                    start,
                    f"`{one['written']}`",
                    f"{one['temperature']:g}",
                    f"{clean:+.3f}",
                    f"{shifted:+.3f}",
                    f"{harmed} of {len(found.tasks)}",
                ]
            )
    if len(rows) == 1:
        return ""
    words = "Small real tasks (less is better; [recipes](../recipes.md) has each task and says how recipes were chosen):"
    return f"{words}\n\n{table(rows)}"


def cifar10(names: Iterable[str]) -> str:
    """Records of lab/results/cifar10.jsonl/methods, the most draws of each, averaged over seeds."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for file in kept.glob(ROOT / "lab/results/cifar10.jsonl/methods", "*.json"):
        record = kept.load(file)
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
    """Ratios of lab/results/benchmarks/gpu_h200.json to the plain network."""
    record = json.loads((ROOT / "lab/results/benchmarks/gpu_h200.json").read_text())
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


RECORDED = {  # names of cases and methods on docs/cost.md
    "GPT-2 small with a frozen base": ("gpt2", "rank-1, frozen base"),
    "ViT-B/16 with a frozen base": ("vit", "rank-1, frozen base"),
    "WRN-28-10": ("wrn-rank1", "rank-1 per example"),
    "GPT-2 small with all weights trained": ("gpt2", "rank-1, all trained"),
    "an MLP of 4 x 4096": ("mlp", "rank-1 per example, loss compiled"),
    "an LSTM": ("lstm", "rank-1 per example"),
}


def speed() -> str:
    """What docs/cost.md says of rank-1 steps that are recorded as CUDA graphs."""
    record = json.loads((ROOT / "lab/results/benchmarks/gpu_h200.json").read_text())
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
        f"**A rank-1 step costs {cost} times a plain one, recorded as one CUDA graph.** "
        f"{record['machine']['device']}, K = 4 members, as many rows as the plain network, steps as the lab and "
        f"`sb.recorded` run them, in ms: {'; '.join(each)} (`lab/results/benchmarks/gpu_h200.json`). "
        "Outside of a graph small steps wait for Python, Gaussians over all weights cost twice a plain step, and most "
        "of our own targets are missed or unclear: [performance](performance.md), generated, has every "
        "number next to its target and to rivals, and says what each miss is bound by."
    )


# --- parameters ---


@cache
def networks() -> list[tuple[str, Any]]:
    """Three networks of very different widths, without memory for their weights."""
    import torch
    from slimbayes_lab.models import resnet50
    from torch import nn

    with torch.device("meta"):
        # Twelve blocks of width 768 and an embedding that is the output layer, too.
        block = nn.TransformerEncoderLayer(
            768, 12, 3072, batch_first=True, norm_first=True
        )
        blocks = nn.TransformerEncoder(block, 12, enable_nested_tensor=False)
        return [
            ("ResNet-50", resnet50()),
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
    """What each method's page and docs/cost.md count, with defaults but for the members."""
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
            f"lab/results/ has nothing about {', '.join(f'{what}: {asked[what]}' for what in missing)}"
        )
    return "\n\n".join(parts.values())


# --- README: which method, and the demo's result ---

DEMO = ROOT / "lab/results/demo.json"
OF_SMALL_TASKS = {  # a method's config: who takes it, its recipe, and what it costs
    "Rank1": ("inputs may shift", "rank-1 Normal", "vectors; four passes"),
    "BatchEnsemble": ("no KL is wanted", "BatchEnsemble", "vectors; four passes"),
    "Ensemble": ("memory is plenty", "deep ensemble", "networks; four passes"),
    "ModelPatch": ("steps must stay cheap", "EMP", "norm layers; one pass"),
}


def which() -> str:
    """README's table: where each method helps and what it costs."""
    rows = [
        ["take", "when", "NLL", "shifted NLL", "what is added; passes a training step"]
    ]
    for config, (when, recipe, cost) in OF_SMALL_TASKS.items():
        clean, shifted, _ = gains(recipe, "scratch")
        rows.append([f"`{config}`", when, f"{clean:+z.2f}", f"{shifted:+z.2f}", cost])
    clean, shifted = (_laplace(score) for score in ("NLL", "NLL, shifted"))
    rows.append(
        ["`laplace`", "it is trained already", clean, shifted, "a covariance; none"]
    )
    wide, _, small = more_parameters("rank-1, 4 members")
    sizes = [sum(p.numel() for p in net.parameters()) for _, net in networks()]
    assert wide is not None and small is not None
    text = (
        f"NLL less the plain network's (lower is better), mean of {len(defaults()[0].tasks)} small tasks at equal "
        "epochs with the settings of [recipes](docs/recipes.md), clean and shifted examples; four members, each of which "
        "sees every example (`sb.sample`; `net(x)` takes one pass). `laplace`: number of other tasks ([fine-tuning](docs/fine_tuning.md)). Rank-1 adds "
        f"{wide / sizes[0]:.1%} to the parameters of ResNet-50 and {small / sizes[2]:.1%} to those of an MLP "
        "64-256-10 ([cost](docs/cost.md), [all methods](docs/methods/index.md))."
    )
    return f"{table(rows)}\n\n{fill(text, 119)}"


def _laplace(score: str) -> str:
    """On how many tasks of docs/fine_tuning.md rank-1 Laplace is better than the plain network, and worse."""
    page = (ROOT / "docs/fine_tuning.md").read_text()
    row = re.search(
        rf"^\| rank-1 Laplace \| plain \| {score} \| (\d+) \| (\d+) \| (\d+) \|$",
        page,
        re.M,
    )
    assert row is not None, f"docs/fine_tuning.md has no row of {score}"
    better, level, worse = map(int, row.groups())
    return f"better on {better} of {better + level + worse}, worse on {worse}"


def demo_scores(folder: Path) -> list[dict[str, Any]]:
    """What README says of the runs of `make demo`, a mapping for each run."""
    runs = []
    for file in sorted(folder.glob("*/record.json")):
        record = json.loads(file.read_text())
        most = max(e["draws"] for e in record["evaluations"])
        judged = [e for e in record["evaluations"] if e["draws"] == most]
        of = {
            role: [e["metrics"] for e in judged if e["role"] == role]
            for role in ("test", "corruption", "ood")
        }
        runs.append(
            {
                "method": record["name"],
                "seed": record["seed"],
                "config_hash": record["config_hash"],
                "parameters": record["parameters"],
                "train_seconds": record["cost"]["train_seconds"],
                "passes": most,
                "accuracy": of["test"][0]["accuracy"],
                "nll": of["test"][0]["nll"],
                "corrupted_accuracy": mean(m["accuracy"] for m in of["corruption"]),
                "corrupted_nll": mean(m["nll"] for m in of["corruption"]),
                "ood_auroc": mean(m["auroc"] for m in of["ood"]),
            }
        )
    return runs


def take_demo(folder: Path) -> None:
    """Keep what README says of the runs of `make demo`."""
    if not (runs := demo_scores(folder)):
        raise ValueError(f"{folder} has no runs of `make demo`")
    kept = {"command": "make demo", "runs": runs}
    DEMO.write_text(json.dumps(kept, indent=1) + "\n")


def demo_means() -> dict[str, dict[str, float]]:
    """Means over seeds of what was kept, by method."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for run in json.loads(DEMO.read_text())["runs"]:
        runs.setdefault(run["method"], []).append(run)
    found = {}
    for method, some in runs.items():
        size = some[0]["parameters"]
        found[method] = {
            name: mean(run[name] for run in some)
            for name, value in some[0].items()
            if isinstance(value, int | float)
        } | {"seeds": len(some), "overhead": size["total"] / size["plain"] - 1}
    return found


def demo() -> str:
    """README's sentences on what `make demo` prints."""
    means = demo_means()
    plain, ours = means["plain"], means["rank-1 Cauchy"]
    behind = [
        name
        for name, one in means.items()
        if one["corrupted_nll"] > plain["corrupted_nll"]
    ]
    seconds = ours["train_seconds"] / plain["train_seconds"]
    text = (
        f"On digits that are corrupted, after training on clean ones, four rank-1 members raise the plain network's "
        f"accuracy from {plain['corrupted_accuracy']:.1%} to {ours['corrupted_accuracy']:.1%} and lower its NLL from "
        f"{plain['corrupted_nll']:.2f} to {ours['corrupted_nll']:.2f} (means of {ours['seeds']:.0f} seeds). That costs "
        f"{ours['overhead']:.1%} more parameters, {seconds:.1f} times the seconds of training and {ours['passes']:.0f} "
        f"passes per prediction. **Where it does not help:** on clean digits accuracy is {ours['accuracy']:.1%} "
        f"(plain {plain['accuracy']:.1%})"
    )
    if behind:
        text += f", and {' and '.join(behind)} is behind plain on corrupted ones"
    return fill(f"{text}.", 119)


# --- pages with marks ---


def pages() -> dict[str, dict[str, str]]:
    """What is generated between marks, by page."""
    chosen = (
        "rank-1, 4 members",
        "BatchEnsemble, 4 members",
        "2-tied",
        "mean-field",
        "deep ensemble, 4 members",
    )
    return {
        "README.md": {"which": which(), "demo": demo()},
        "docs/cost.md": {"parameters": parameters(chosen), "speed": speed()},
    }


def with_marks(page: str, texts: Mapping[str, str]) -> str:
    """A page with each text between its marks."""
    for name, text in texts.items():
        start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, found_start, rest = page.partition(start)
        _, found_end, after = rest.partition(end)
        if not (found_start and found_end):
            raise ValueError(f"the page has no marks <!-- {name} -->")
        page = f"{before}{start}{text}\n{end}{after}"
    return page


if __name__ == "__main__":
    if sys.argv[1:2] == ["take"]:
        take_demo(Path(sys.argv[2]))
    for name, texts in pages().items():
        file = ROOT / name
        file.write_text(with_marks(file.read_text(), texts))
