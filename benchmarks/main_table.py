"""CIFAR's main tables: README.md, docs/cifar10.svg and experiments/cifar10/README.md from the records of their runs.

python benchmarks/main_table.py               from results/cifar10/{methods,tune,moonshot} and results/cifar100/methods
python benchmarks/main_table.py take FOLDER   the same, after taking records from run directories in that folder
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cells import between
from cifar_records import (
    CONFIG,
    HUNDRED,
    PLAIN,
    RESULTS,
    ROOT,
    SMALL,
    Scores,
    attempts,
    kept_attempts,
    kept_records,
    methods,
    summit,
    take,
)

from slimbayes.lab.config_files import load, read_tree
from slimbayes.lab.trees import row_names
from slimbayes.report import compare
from slimbayes.report.metric import mean, t_interval
from slimbayes.report.record import Record

MARKS = ("<!-- results -->\n", "<!-- /results -->\n")
COMMAND = 'slimbayes sweep experiments/cifar10/methods.yaml --over "seed=[0, 1, 2, 3, 4]" --jobs 8'
COMMAND_100 = f"{COMMAND} --set data.name=cifar100 --set evaluate.ood=[cifar10] --set evaluate.shift=[]"
ENSEMBLE = "deep ensemble"
FEWEST = 3  # seeds that can decide anything
# Of a column: the score, its title, what it is multiplied by, decimals, and whether less is better.
COLUMNS = (
    ("nll", "NLL", 1, 3, True), ("accuracy", "accuracy, %", 100, 2, False), ("ece", "ECE", 1, 4, True),
    ("corrupted_nll", "corrupted NLL", 1, 3, True), ("corrupted_accuracy", "corrupted accuracy, %", 100, 1, False),
    ("human_nll", "CIFAR-10H NLL", 1, 3, True), ("ood_auroc", "OOD AUROC", 1, 3, False),
)  # fmt: skip


def difference(found: Mapping[str, Scores], name: str, score: str) -> tuple[float, float] | None:
    """The 95 % interval of a method's differences from the plain network over the seeds that both have."""
    ours, plain = found[name], found.get(PLAIN, {})
    shared = [s for s in ours if s in plain and score in ours[s] and score in plain[s]]
    return t_interval([ours[s][score] - plain[s][score] for s in shared]) if len(shared) >= FEWEST else None


def better(found: Mapping[str, Scores], name: str, score: str, less: bool) -> bool | None:
    """Whether it is better than the plain network beyond noise, worse, or neither can be said."""
    interval = difference(found, name, score)
    if interval is None or interval[0] <= 0 <= interval[1]:
        return None
    return (interval[1] < 0) == less


def costs(results: Path = RESULTS) -> dict[str, float]:
    """What training a method takes, in epochs of the plain network, by epochs timed with the GPU to themselves."""
    if not (file := results / "cost.json").exists():
        return {}
    seconds = {one["case"]: one["seconds_per_epoch"] for one in json.loads(file.read_text())["results"]}
    rows = [(row, load(f"{CONFIG}#{row}")) for row in row_names(read_tree(CONFIG)) if row in seconds]
    return {one.name: one.train.epochs * seconds[row] / seconds[PLAIN] for row, one in rows}


def table(found: Mapping[str, Scores], cost: Mapping[str, float]) -> list[str]:
    shown = [column for column in COLUMNS if any(column[0] in one for mine in found.values() for one in mine.values())]
    heads = ["method", "more parameters", *(["cost"] if cost else []), *(column[1] for column in shown), "seeds"]
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
    for score, words in (("nll", "on clean images"), ("corrupted_nll", "on corrupted ones")):
        means = {name: mean([one[score] for one in mine.values()]) for name, mine in found.items()}
        best = min(means, key=lambda name: means[name])
        others = [name for name in found if name != PLAIN]
        sure = any(difference(found, name, score) for name in others)
        sides = {n: better(found, n, score, True) if sure else means[n] < means[PLAIN] for n in others}
        ahead, behind = ([n for n, side in sides.items() if side is want] for want in (True, False))
        first, noise = "" if best == PLAIN else f", plain {means[PLAIN]:.3f}", " beyond noise" if sure else ""
        out.append(
            f"By NLL {words} {best} is best ({means[best]:.3f}{first}). Better than plain{noise}: "
            f"{'; '.join(ahead) or 'none'}. Worse: {'; '.join(behind) or 'none'}."
        )
    out += _against_ensemble(found)
    few = [name for name in others if difference(found, name, "nll") is None]
    if not sure:
        out.insert(0, f"Fewer than {FEWEST} seeds are common to plain and any method: nothing is beyond noise yet.")
    elif few:
        out.append(f"Not judged yet, with fewer than {FEWEST} seeds: {'; '.join(few)}.")
    return " ".join(out)


def _against_ensemble(found: Mapping[str, Scores]) -> list[str]:
    """Which methods of nearly the plain network's size are ahead of an ensemble, on clean and corrupted images."""
    if ENSEMBLE not in found:
        return []
    means = {
        name: [mean([one[score] for one in mine.values()]) for score in ("nll", "corrupted_nll", "overhead")]
        for name, mine in found.items()
    }
    clean, corrupted, _ = means[ENSEMBLE]
    small = [n for n, (a, b, more) in means.items() if n != PLAIN and more <= SMALL and a < clean and b < corrupted]
    return [
        f"Of the methods with at most {SMALL:.0%} more parameters, {'; '.join(small) or 'none'} "
        f"{'is' if len(small) < 2 else 'are'} below the deep ensemble's means ({clean:.3f} and {corrupted:.3f}) on "
        f"both; at equal cost its four members train for a quarter of the epochs each."
    ]


def block(
    records: Sequence[Record], cost: Mapping[str, float] | None = None, longer: Sequence[Record] = (),
    hundred: Sequence[Record] = (),
) -> str:  # fmt: skip
    """What stands between README's marks; `longer` are the attempts of moonshot.yaml, `hundred` runs on CIFAR-100."""
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
        f"severities; OOD: CIFAR-100 ([how](experiments/cifar10/README.md)).",
        "", *table(found, cost), "",
        "![NLL of every method on clean and corrupted images](docs/cifar10.svg)", "",
        f"{reading(found)} {summit(longer)}".strip(), "",
        *([f"**The same settings on CIFAR-100** ([table](experiments/cifar10/README.md)). "
           f"{reading(methods(hundred))}", ""] if hundred else []),
        f"What the papers claim and what came out here: [docs/reproduction.md](docs/reproduction.md), "
        f"generated, as is this: `{COMMAND}`, then `make reproduction`.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _budget(records: Sequence[Record]) -> int:
    epochs: list[int] = [record.config["train"]["epochs"] for record in records if record.name == PLAIN]
    return epochs[0]


def cifar_page(results: Path = RESULTS) -> str:
    """What stands between the marks of experiments/cifar10/README.md."""
    parts = []
    kept = {name: sorted((results / name).glob("*.json")) for name in ("methods", "tune")}
    if kept["methods"]:
        for on in ("test", "corrupted", "shift", "ood"):
            parts.append(compare(kept["methods"], baseline=PLAIN, on=on).to_markdown())
    else:
        parts.append("There are no records of methods.yaml yet.\n")
    if kept["tune"]:
        shown = compare(kept["tune"], on="validation", metrics=["nll", "accuracy", "ece"]).to_markdown()
        parts.append(f"Candidates of tune.yaml, by validation rows:\n\n{shown}")
    parts += [hundred_page(kept_records(results.parent / HUNDRED.name)), attempts(kept_attempts(results))]
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
        parts.append(f'<text x="150" y="{44 + 24 * row}" text-anchor="end">{name}</text>')
    for left, score, title in ((170, "nll", "NLL, clean"), (510, "corrupted_nll", "NLL, corrupted")):
        parts += _panel(found, score, title, left, high)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(found: Mapping[str, Scores], score: str, title: str, left: int, high: int) -> Iterator[str]:
    """A row of dots for each method, from `left` on 260 wide."""
    values = {name: [one[score] for one in mine.values() if score in one] for name, mine in found.items()}
    spans = {name: (min(v), max(v)) for name, v in values.items() if v}
    least, most = min(span[0] for span in spans.values()), max(span[1] for span in spans.values())

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


def main(words: Sequence[str]) -> None:
    if words[:1] == ["take"]:
        take(Path(words[1]))
    records = kept_records()
    shown = block(records, longer=kept_attempts(), hundred=kept_records(HUNDRED))
    for file, middle in ((ROOT / "README.md", shown), (CONFIG.with_name("README.md"), cifar_page())):
        file.write_text(between(file.read_text(), MARKS, middle))
    if records:
        (ROOT / "docs" / "cifar10.svg").write_text(figure(methods(records)))
    print(f"{len(records)} records: README.md, experiments/cifar10/README.md")


if __name__ == "__main__":
    main(sys.argv[1:])
