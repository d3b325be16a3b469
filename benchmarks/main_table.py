"""CIFAR's main tables: docs/cifar10.md, README's rows of them, docs/cifar10.svg and lab/experiments/cifar10/README.md from the records of their runs.

python benchmarks/main_table.py               from lab/results/cifar10.jsonl and cifar100.jsonl
python benchmarks/main_table.py take FOLDER   the same, after taking records from run directories in that folder
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from math import nan
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

from cells import between
from slimbayes_lab.configs.files import load, read_tree, row_names
from slimbayes_lab.papers.table import draws_of, scores_of_record
from slimbayes_lab.report import compare, kept
from slimbayes_lab.report.metric import mean, t_interval
from slimbayes_lab.report.record import Record, read

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "lab" / "results" / "cifar10.jsonl"
HUNDRED = ROOT / "lab" / "results" / "cifar100.jsonl"
TIMES = ROOT / "lab" / "results" / "benchmarks"
CONFIG = ROOT / "lab" / "experiments" / "cifar10" / "methods.yaml"
PLAIN, SMALL = (
    "plain",
    0.02,
)  # the share of parameters that a method may add and still be of the plain network's size
Scores = dict[int, dict[str, float]]  # by seed
MARKS = ("<!-- results -->\n", "<!-- /results -->\n")
COMMAND = 'slimbayes sweep lab/experiments/cifar10/methods.yaml --over "seed=[0, 1, 2, 3, 4]" --jobs 8'
COMMAND_100 = f"{COMMAND} --set data.name=cifar100 --set evaluate.ood=[cifar10] --set evaluate.shift=[]"
ENSEMBLE = "deep ensemble"
FEWEST = 3  # seeds that can decide anything
# Of a column: the score, its title, what it is multiplied by, decimals, and whether less is better.
COLUMNS = (
    ("nll", "NLL", 1, 3, True), ("accuracy", "accuracy, %", 100, 2, False), ("ece", "ECE", 1, 4, True),
    ("corrupted_nll", "corrupted NLL", 1, 3, True), ("corrupted_accuracy", "corrupted accuracy, %", 100, 1, False),
    ("human_nll", "CIFAR-10H NLL", 1, 3, True), ("ood_auroc", "OOD AUROC", 1, 3, False),
)  # fmt: skip

# --- records ---


def scores(record: Record) -> dict[str, float]:
    """What the table shows of a run."""
    draws = draws_of(record, None)
    found = scores_of_record(record, draws)
    for e in (e for e in record.evaluations if e.draws == draws):
        found |= {"human_nll": e.metrics["nll"]} if e.role == "shift" else {}
        found |= {"validation_nll": e.metrics["nll"]} if e.role == "validation" else {}
        found |= {"ood_auroc": e.metrics["auroc"]} if e.role == "ood" else {}
    return found


def methods(records: Sequence[Record]) -> dict[str, Scores]:
    found: dict[str, Scores] = {}
    for record in records:
        found.setdefault(record.name, {})[record.seed] = scores(record)
    return found


def take(folder: Path, results: Path = RESULTS.parent) -> None:
    """Keep the records of finished runs, <table>/<run>/record.json, at <table>/<name>-<seed>.json in lab/results/<data>.jsonl.

    Their commands name folders from runs/ on, and data by its folder's name: others run them elsewhere.
    """
    for file in sorted(folder.glob("**/record.json")):
        record = read(file)
        told = [
            re.sub(r"(?<!\S)[/~]\S*?(runs/\S+|[^/\s]+)(?!\S)", r"\1", line)
            for line in record.commands
        ]
        slug = re.sub(r"[^a-z0-9.]+", "-", record.name.lower())
        place = f"{file.parents[1].name}/{slug}-{record.seed}.json"
        told_anew = record.model_copy(update={"commands": told})
        content = {place: told_anew.model_dump(mode="json")}
        kept.keep(results / f"{record.data}.jsonl", content)


def kept_records(results: Path = RESULTS) -> list[Record]:
    """Records of methods.yaml, in the order of its rows, then by seed."""
    rows = row_names(read_tree(CONFIG))
    order = {load(f"{CONFIG}#{row}").name: place for place, row in enumerate(rows)}
    records = [read(file) for file in kept.glob(results, "methods/*.json")]
    return sorted(
        records, key=lambda record: (order.get(record.name, len(order)), record.seed)
    )


def kept_attempts(results: Path = RESULTS) -> list[Record]:
    """Records of moonshot.yaml."""
    return [read(file) for file in kept.glob(results, "moonshot/*.json")]


# --- tables ---


def difference(
    found: Mapping[str, Scores], name: str, score: str
) -> tuple[float, float] | None:
    """The 95 % interval of a method's differences from the plain network over the seeds that both have."""
    ours, plain = found[name], found.get(PLAIN, {})
    shared = [s for s in ours if s in plain and score in ours[s] and score in plain[s]]
    return (
        t_interval([ours[s][score] - plain[s][score] for s in shared])
        if len(shared) >= FEWEST
        else None
    )


def better(
    found: Mapping[str, Scores], name: str, score: str, less: bool
) -> bool | None:
    """Whether it is better than the plain network beyond noise, worse, or neither can be said."""
    interval = difference(found, name, score)
    if interval is None or interval[0] <= 0 <= interval[1]:
        return None
    return (interval[1] < 0) == less


def costs(results: Path = TIMES) -> dict[str, float]:
    """What training a method takes, in epochs of the plain network, by epochs timed with the GPU to themselves."""
    if not (file := results / "cost.json").exists():
        return {}
    seconds = {
        one["case"]: one["seconds_per_epoch"]
        for one in json.loads(file.read_text())["results"]
    }
    rows = [
        (row, load(f"{CONFIG}#{row}"))
        for row in row_names(read_tree(CONFIG))
        if row in seconds
    ]
    return {
        one.name: one.train.epochs * seconds[row] / seconds[PLAIN] for row, one in rows
    }


def table(found: Mapping[str, Scores], cost: Mapping[str, float]) -> list[str]:
    shown = [
        column
        for column in COLUMNS
        if any(column[0] in one for mine in found.values() for one in mine.values())
    ]
    heads = [
        "method",
        "more parameters",
        *(["cost"] if cost else []),
        *(column[1] for column in shown),
        "seeds",
    ]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    for name, mine in found.items():
        cells = []
        for score, _, unit, digits, less in shown:
            values = [one[score] * unit for one in mine.values() if score in one]
            mark = {True: " +", False: " -", None: ""}[better(found, name, score, less)]
            cells.append(f"{mean(values):.{digits}f}{mark}" if values else "")
        more = mean([one["overhead"] for one in mine.values()])
        cells[:0] = [f"{cost[name]:.0f}" if name in cost else ""] if cost else []
        lines.append(f"| {name} | {more:.1%} | {' | '.join(cells)} | {len(mine)} |")
    return lines


def reading(found: Mapping[str, Scores]) -> str:
    """What the table says, in sentences made from its numbers."""
    out = []
    for score, words in (
        ("nll", "on clean images"),
        ("corrupted_nll", "on corrupted ones"),
    ):
        means = {
            name: mean([one[score] for one in mine.values()])
            for name, mine in found.items()
        }
        best = min(means, key=lambda name: means[name])
        others = [name for name in found if name != PLAIN]
        sure = any(difference(found, name, score) for name in others)
        sides = {
            n: better(found, n, score, True) if sure else means[n] < means[PLAIN]
            for n in others
        }
        ahead, behind = (
            [n for n, side in sides.items() if side is want] for want in (True, False)
        )
        first, noise = (
            "" if best == PLAIN else f", plain {means[PLAIN]:.3f}",
            " beyond noise" if sure else "",
        )
        out.append(
            f"By NLL {words} {best} is best ({means[best]:.3f}{first}). Better than plain{noise}: "
            f"{'; '.join(ahead) or 'none'}. Worse: {len(behind)} of {len(others)}."
        )
    out += _against_ensemble(found)
    few = [name for name in others if difference(found, name, "nll") is None]
    if not sure:
        out.insert(
            0,
            f"Fewer than {FEWEST} seeds are common to plain and any method: nothing is beyond noise yet.",
        )
    elif few:
        out.append(f"Not judged yet, with fewer than {FEWEST} seeds: {'; '.join(few)}.")
    return " ".join(out)


def _against_ensemble(found: Mapping[str, Scores]) -> list[str]:
    """Which methods of nearly the plain network's size are ahead of an ensemble, on clean and corrupted images."""
    if ENSEMBLE not in found:
        return []
    means = {
        name: [
            mean([one[score] for one in mine.values()])
            for score in ("nll", "corrupted_nll", "overhead")
        ]
        for name, mine in found.items()
    }
    clean, corrupted, _ = means[ENSEMBLE]
    small = [
        n
        for n, (a, b, more) in means.items()
        if n != PLAIN and more <= SMALL and a < clean and b < corrupted
    ]
    return [
        f"Of the methods with at most {SMALL:.0%} more parameters, {'; '.join(small) or 'none'} "
        f"{'is' if len(small) < 2 else 'are'} below the deep ensemble's means ({clean:.3f} and {corrupted:.3f}) on "
        f"both; at equal cost its four members train for a quarter of the epochs each."
    ]


def block(
    records: Sequence[Record], cost: Mapping[str, float] | None = None, longer: Sequence[Record] = (),
    hundred: Sequence[Record] = (),
) -> str:  # fmt: skip
    """What stands between the marks of docs/cifar10.md; `longer` are the attempts of moonshot.yaml, `hundred` runs on CIFAR-100."""
    found, cost = methods(records), costs() if cost is None else cost
    if PLAIN not in found:
        return f"The table of all methods on CIFAR-10 at equal cost has no records yet: `{COMMAND}`.\n"
    seeds = sorted({len(mine) for mine in found.values()})
    lines = [
        f"**Every method at one cost.** CIFAR-10, WRN-16-4, the cost of {_budget(records)} epochs of the plain network "
        f"for each, settings chosen on validation images with the same effort, four forward passes at test, "
        f"{'-'.join(map(str, sorted({seeds[0], seeds[-1]})))} seeds. + and -: better or worse than plain beyond noise "
        f"(95 % t interval of paired differences){'; cost: measured, in plain epochs' if cost else ''}. Corrupted: 15 "
        f"corruptions x 5 "
        f"severities; OOD: CIFAR-100 ([how](../lab/experiments/cifar10/README.md)).",
        "", *table(found, cost), "",
        "![NLL of every method on clean and corrupted images](cifar10.svg)", "",
        f"{reading(found)} {summit(longer)}".strip(), "",
        *([f"**The same settings on CIFAR-100** ([table](../lab/experiments/cifar10/README.md)). "
           f"{reading(methods(hundred))}", ""] if hundred else []),
        f"What the papers claim and what came out here: [reproduction](reproduction.md), "
        f"generated, as is this: `{COMMAND}`, then `make reproduction`.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


LEAD = ("nll", "accuracy", "corrupted_nll", "corrupted_accuracy")  # README's columns


def lead(records: Sequence[Record]) -> str:
    """What stands between README's marks: EMP beside the plain network, and what the whole table says against us."""
    found = methods(records)
    shown = [column for column in COLUMNS if column[0] in LEAD]
    heads = ["method", "more parameters", *(column[1] for column in shown)]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    for name in (PLAIN, "EMP"):
        mine = found[name].values()
        cells = [
            f"{mean([one[score] * unit for one in mine]):.{digits}f}"
            for score, _, unit, digits, _ in shown
        ]
        more = mean([one["overhead"] for one in mine])
        lines.append(f"| {name} | {more:.1%} | {' | '.join(cells)} |")
    others = [name for name in found if name != PLAIN]
    worse = [name for name in others if better(found, name, "nll", True) is False]
    ahead = [name for name in others if better(found, name, "nll", True)]
    rank1 = "rank-1 Normal"
    among = ""
    if rank1 in worse:
        nll = mean([one["nll"] for one in found[rank1].values()])
        among = f", {rank1} among them ({nll:.3f})"
    ood = [name for name in others if better(found, name, "ood_auroc", False)]
    text = (
        f"On clean images {_names(ahead)} has a lower NLL than plain beyond noise, and {len(worse)} of "
        f"{len(others)} have a higher one{among}; {_names(ood)} tells CIFAR-100's "
        f"images from CIFAR-10's better. [The whole table](docs/cifar10.md)."
    )
    before = (
        f"On CIFAR-10 (WRN-16-4, {len(found['EMP'])} seeds) EMP (`ModelPatch`) at plain's training time, with four "
        "passes per prediction:"
    )
    return "\n\n".join([fill(before, 119), "\n".join(lines), fill(text, 119)]) + "\n"


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) or "no method"


def _budget(records: Sequence[Record]) -> int:
    epochs: list[int] = [
        record.config["train"]["epochs"] for record in records if record.name == PLAIN
    ]
    return epochs[0]


def cifar_page(results: Path = RESULTS) -> str:
    """What stands between the marks of lab/experiments/cifar10/README.md."""
    parts = []
    runs = {name: kept.glob(results / name, "*.json") for name in ("methods", "tune")}
    if runs["methods"]:
        for on in ("test", "corrupted", "shift", "ood"):
            parts.append(compare(runs["methods"], baseline=PLAIN, on=on).to_markdown())
    else:
        parts.append("There are no records of methods.yaml yet.\n")
    if runs["tune"]:
        shown = compare(
            runs["tune"], on="validation", metrics=["nll", "accuracy", "ece"]
        ).to_markdown()
        parts.append(f"Candidates of tune.yaml, by validation rows:\n\n{shown}")
    parts += [
        hundred_page(kept_records(results.parent / HUNDRED.name)),
        attempts(kept_attempts(results)),
    ]
    return "\n".join(parts) + "\n"


def hundred_page(records: Sequence[Record]) -> str:
    """The same methods on CIFAR-100."""
    found = methods(records)
    if PLAIN not in found:
        return f"There are no records of CIFAR-100 yet: `{COMMAND_100}`\n"
    return "\n".join([
        f"**CIFAR-100.** Every setting is the one chosen on CIFAR-10, {_budget(records)} plain epochs' cost, none was "
        f"chosen on CIFAR-100; OOD: CIFAR-10's test images. + and -: better or worse than plain beyond noise. "
        f"`{COMMAND_100}`",
        "", *table(found, {}), "", reading(found),
    ]) + "\n"  # fmt: skip


def figure(found: Mapping[str, Scores]) -> str:
    """NLL of clean and of corrupted images, a dot and the span of its seeds for each method, plain as a line."""
    high = 60 + 24 * len(found)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 {high}" font-family="sans-serif" font-size="13">',
        f'<rect width="800" height="{high}" fill="white"/>',
    ]
    for row, name in enumerate(found):
        parts.append(
            f'<text x="150" y="{44 + 24 * row}" text-anchor="end">{name}</text>'
        )
    for left, score, title in (
        (170, "nll", "NLL, clean"),
        (510, "corrupted_nll", "NLL, corrupted"),
    ):
        parts += _panel(found, score, title, left, high)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    found: Mapping[str, Scores], score: str, title: str, left: int, high: int
) -> Iterator[str]:
    """A row of dots for each method, from `left` on 260 wide."""
    values = {
        name: [one[score] for one in mine.values() if score in one]
        for name, mine in found.items()
    }
    spans = {name: (min(v), max(v)) for name, v in values.items() if v}
    least, most = (
        min(span[0] for span in spans.values()),
        max(span[1] for span in spans.values()),
    )

    def x(value: float) -> float:
        return left + 10 + 240 * (value - least) / max(most - least, 1e-9)

    at = x(mean(values[PLAIN]))
    yield f'<text x="{left}" y="18" font-weight="bold">{title}</text>'
    yield f'<path d="M{at:.1f} 26V{high - 26}" stroke="#b43018" stroke-dasharray="3 3"/>'
    for row, (name, (low, top)) in enumerate(spans.items()):
        y, colour = 40 + 24 * row, "#b43018" if name == PLAIN else "#4854cc"
        yield f'<path d="M{x(low):.1f} {y}H{x(top):.1f}" stroke="{colour}" stroke-width="2"/>'
        yield f'<circle cx="{x(mean(values[name])):.1f}" cy="{y}" r="4.5" fill="{colour}"/>'
    for share in (0.0, 0.5, 1.0):
        value = least + share * (most - least)
        yield f'<text x="{x(value):.1f}" y="{high - 8}" text-anchor="middle" fill="#666">{value:.2f}</text>'


# --- moonshot.yaml: attempts to reach a deep ensemble ---

MOONSHOT = "slimbayes sweep lab/experiments/cifar10/moonshot.yaml --over seed=[0]"
STARTS = ("moonshot-", "moonshot-long-")  # of the names of rows, by cost
_ENSEMBLE = "ensemble"


class Budget(NamedTuple):
    """Attempts of one cost, best first by validation rows: means of their scores, epochs and seeds."""

    means: dict[str, dict[str, float]]
    epochs: dict[str, int]
    seeds: dict[str, int]

    @property
    def cost(self) -> str:
        return (
            f"{self.epochs[PLAIN]} plain epochs"
            if PLAIN in self.epochs
            else "unknown: its plain network is missing"
        )

    @property
    def small(self) -> list[str]:
        """Of nearly the plain network's size, its own rows left out."""
        return [
            n
            for n, m in self.means.items()
            if m["overhead"] <= SMALL and not n.startswith(PLAIN)
        ]

    def shown(self, name: str) -> str:
        return (
            f"{self.means[name]['nll']:.3f} and {self.means[name]['corrupted_nll']:.3f}"
        )


def budgets(records: Sequence[Record]) -> Iterator[Budget]:
    """By cost, those of which something has been run."""
    for start in STARTS:
        own = [
            r
            for r in records
            if max((s for s in STARTS if r.name.startswith(s)), key=len) == start
        ]
        found = {
            name.removeprefix(start): seeds for name, seeds in methods(own).items()
        }
        order = sorted(found, key=lambda name: _means(found[name])["validation_nll"])
        epochs = {r.name.removeprefix(start): r.config["train"]["epochs"] for r in own}
        if own:
            yield Budget(
                {n: _means(found[n]) for n in order},
                epochs,
                {n: len(found[n]) for n in order},
            )


def _means(seeds: Scores) -> dict[str, float]:
    names = ("overhead", "validation_nll", "nll", "accuracy", "corrupted_nll")
    return {
        n: mean([one[n] for one in seeds.values() if n in one] or [nan]) for n in names
    }


def attempts(records: Sequence[Record]) -> str:
    """Every attempt, by cost, then best first by validation rows."""
    if not records:
        return f"Attempts of moonshot.yaml: none has been run yet. `{MOONSHOT}`\n"
    lines = [
        "| cost | attempt | more parameters | validation NLL | NLL | accuracy, % | corrupted NLL | seeds |"
    ]
    lines.append("|---|---|" + "---:|" * 6)
    for budget in budgets(records):
        for name, m in budget.means.items():
            lines.append(
                f"| {budget.cost} | {name} | {m['overhead']:.1%} | {m['validation_nll']:.3f} | {m['nll']:.3f} | "
                f"{100 * m['accuracy']:.2f} | {m['corrupted_nll']:.3f} | {budget.seeds[name]} |"
            )
    title = (
        f"Every attempt that was run, by cost, then by validation rows; `{MOONSHOT}`:"
    )
    return (
        "\n".join(
            [
                title,
                "",
                *lines,
                "",
                *(f"- {_goal(budget)}" for budget in budgets(records)),
            ]
        )
        + "\n"
    )


def _goal(budget: Budget) -> str:
    """Who is below the ensemble of the same cost, on clean and on corrupted images."""
    if _ENSEMBLE not in budget.means:
        return f"Cost {budget.cost}: the deep ensemble has not been run, nothing can be said about the goal."
    sides: dict[tuple[bool, ...], list[str]] = {}
    for name in [PLAIN, *budget.small] if PLAIN in budget.means else budget.small:
        below = (
            budget.means[name][score] < budget.means[_ENSEMBLE][score]
            for score in ("nll", "corrupted_nll")
        )
        sides.setdefault(tuple(below), []).append(name)
    words = {(True, True): "on both", (True, False): "on clean ones alone", (False, True): "on corrupted ones alone",
             (False, False): "on neither"}  # fmt: skip
    told = "; ".join(
        f"{text} {', '.join(sides[side])}"
        for side, text in words.items()
        if side in sides
    )
    reached = [name for name in sides.get((True, True), []) if name != PLAIN]
    return (
        f"Cost {budget.cost}: members of the deep ensemble train for {budget.epochs[_ENSEMBLE]} epochs each, NLL "
        f"{budget.shown(_ENSEMBLE)} on clean and corrupted images. Below it with at most {SMALL:.0%} more parameters: "
        f"{told or 'none'}. The goal, both with a method, is reached by {', '.join(reached) or 'none'}."
    )


def summit(records: Sequence[Record]) -> str:
    """A sentence about the largest cost: ensemble, plain network, and the attempt that validation rows choose."""
    budget = max(
        budgets(records), key=lambda one: one.epochs.get(PLAIN, 0), default=None
    )
    if budget is None or not {PLAIN, _ENSEMBLE} <= set(budget.means):
        return ""
    own = (
        f"none of the attempts with at most {SMALL:.0%} more parameters has been judged"
    )
    if budget.small:
        own = f"{budget.shown(budget.small[0])} for {budget.small[0]}, which validation images choose of the attempts "
        own += f"with at most {SMALL:.0%} more parameters"
    seeds = min(budget.seeds.values())
    return (
        f"At the cost of {budget.cost}, where an ensemble's members train for {budget.epochs[_ENSEMBLE]} each "
        f"({seeds} seed{'s' * (seeds > 1)}, on nine tenths of the images), NLL on clean and corrupted images is "
        f"{budget.shown(_ENSEMBLE)} for the ensemble of four and {budget.shown(PLAIN)} for the plain network; {own} "
        f"([all of them](../lab/experiments/cifar10/README.md))."
    )


def main(words: Sequence[str]) -> None:
    if words[:1] == ["take"]:
        take(Path(words[1]))
    records = kept_records()
    shown = block(records, longer=kept_attempts(), hundred=kept_records(HUNDRED))
    for file, middle in (
        (ROOT / "README.md", lead(records)),
        (ROOT / "docs" / "cifar10.md", shown),
        (CONFIG.with_name("README.md"), cifar_page()),
    ):
        file.write_text(between(file.read_text(), MARKS, middle))
    if records:
        (ROOT / "docs" / "cifar10.svg").write_text(figure(methods(records)))
    print(
        f"{len(records)} records: README.md, docs/cifar10.md, lab/experiments/cifar10/README.md"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
