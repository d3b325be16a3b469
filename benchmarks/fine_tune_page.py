"""The generated part of docs/fine_tuning.md, from the cells of benchmarks/fine_tune.py and fine_tune_tables.py.

    python benchmarks/fine_tune_page.py docs/fine_tuning.md lab/results/benchmarks/fine_tune.jsonl ...

Only what stands between the page's two marks is written; the rest is text.
"""

import json
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from cells import between, paired
from cells import table as markdown

MARKS = ("<!-- fine-tuning -->\n", "<!-- end of fine-tuning -->\n")
OURS = ("rank-1 fine-tuned", "rank-1 after plain", "rank-1 Laplace")
METHODS = (
    "plain",
    *OURS,
    "last-layer Laplace",
    "MC dropout",
    "LoRA ensemble",
    "deep ensemble",
)
SCORES = {
    "nll": "NLL",
    "shifted_nll": "NLL, shifted",
    "ece": "ECE",
    "auroc": "OOD AUROC",
}
Value = Callable[[dict[str, Any]], float]
Cells = dict[tuple[str, str], dict[int, dict[str, Any]]]


def read(lines: Sequence[str]) -> Cells:
    """By task and method, then by seed; cells of tried settings have seed -1 and do not count."""
    cells: Cells = {}
    for cell in map(json.loads, lines):
        if cell["seed"] >= 0:
            cells.setdefault((cell["task"], cell["method"]), {})[cell["seed"]] = cell
    return cells


def page(text: str, lines: Sequence[str]) -> str:
    """The page's text with tables of these lines between its marks."""
    cells = read(lines)
    parts = [
        table(cells, title, score(name), name == "auroc")
        for name, title in SCORES.items()
    ]
    parts.append(table(cells, "seconds", lambda cell: float(cell["seconds"])))
    parts.append(table(cells, "MB kept", lambda cell: cell["bytes"] / 1e6))
    return between(text, MARKS, "\n".join([verdict(cells), *parts]))


def score(name: str) -> Value:
    return lambda cell: float(cell["metrics"].get(name, float("nan")))


def values(cells: Cells, task: str, method: str, of: Value) -> dict[int, float]:
    """A number of each seed that has it."""
    found = {seed: of(cell) for seed, cell in cells.get((task, method), {}).items()}
    return {seed: value for seed, value in found.items() if value == value}


def seeds(cells: Cells) -> str:
    counts = [len(found) for found in cells.values()]
    least, most = min(counts, default=0), max(counts, default=0)
    return str(most) if least == most else f"{least} to {most}"


def spent(what: str) -> Value:
    """Seconds or bytes of a method; of a pass over a network that is there anyway those of the pass."""
    return lambda cell: float(cell["metrics"].get(f"pass_{what}", cell[what]))


def tasks_of(cells: Cells) -> list[str]:
    return list(dict.fromkeys(task for task, _ in cells))


def table(cells: Cells, title: str, of: Value, most: bool = False) -> str:
    """Means and standard errors over seeds, tasks by methods; the best mean of a row is bold."""
    methods = [method for method in METHODS if any(method == own for _, own in cells)]
    rows = [[title, *methods]]
    for task in tasks_of(cells):
        found = {
            method: list(values(cells, task, method, of).values()) for method in methods
        }
        means = {method: mean(of) for method, of in found.items() if of}
        if not means:
            continue
        best = (max if most else min)(means.values())
        rows.append([task, *(entry(found[m], means.get(m) == best) for m in methods)])
    return "\n".join(markdown(rows)) + "\n" if rows[1:] else ""


def entry(found: Sequence[float], best: bool) -> str:
    if not found:
        return "-"
    shown = f"**{number(mean(found))}**" if best else number(mean(found))
    error = stdev(found) / len(found) ** 0.5 if len(found) > 1 else 0.0
    return (
        f"{shown} ± {error:.0f}"
        if error >= 1
        else f"{shown} ± {error:.1g}"
        if error
        else shown
    )


def number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def compared(cells: Cells, task: str, ours: str, rival: str, of: Value) -> str | None:
    """ "ahead", "behind" or "level": whether a 95 % interval of the paired difference over seeds holds zero. None where
    fewer than two seeds have both. Less is better.
    """
    found = paired(*(values(cells, task, method, of) for method in (ours, rival)))
    return (
        None
        if found is None or found.half is None
        else ("level", "behind", "ahead")[found.side]
    )


def counted(cells: Cells, ours: str, rival: str, name: str) -> dict[str, list[str]]:
    """Tasks by how they went."""
    out: dict[str, list[str]] = {"ahead": [], "level": [], "behind": []}
    for task in tasks_of(cells):
        found = compared(cells, task, ours, rival, score(name))
        if found is not None:
            out[found].append(task)
    return out


def verdict(cells: Cells) -> str:
    """The goal, point by point, as the cells have it."""
    told = (
        f"{len(tasks_of(cells))} tasks, {seeds(cells)} seeds each. Paired by seed; ahead or behind where a 95 % "
        f"interval of the difference leaves zero out, else level; numbers of tasks:"
    )
    rows: list[list[Any]] = [["", "against", "score", "ahead", "level", "behind"]]
    for ours, rival, name in product(OURS, METHODS, ("nll", "shifted_nll")):
        found = counted(cells, ours, rival, name)
        if rival not in OURS and any(found.values()):
            rows.append([ours, rival, SCORES[name], *map(len, found.values())])
    goals = [goal(cells, ours) for ours in OURS if any(ours == own for _, own in cells)]
    return "\n".join([told, "", *markdown(rows), "", *goals]) + "\n"


def goal(cells: Cells, ours: str) -> str:
    """One paragraph: is the goal met?"""
    worse = counted(cells, ours, "plain", "nll")["behind"]
    held = [
        f"no worse than plain on clean NLL: {'met' if not worse else 'missed on ' + '; '.join(worse)}"
    ]
    for name in ("nll", "shifted_nll"):
        found = counted(cells, ours, "last-layer Laplace", name)
        won, of = len(found["ahead"]), sum(map(len, found.values()))
        held.append(
            f"ahead of last-layer Laplace, {SCORES[name]}: {'met' if won == of else f'on {won} of {of} tasks'}"
        )
    for what, of_cell in (("time", spent("seconds")), ("storage", spent("bytes"))):
        shares = [
            mean(mine.values()) / mean(theirs.values())
            for task in tasks_of(cells)
            if (mine := values(cells, task, ours, of_cell))
            and (theirs := values(cells, task, "deep ensemble", of_cell))
        ]
        if shares:
            said = f"{min(shares):.2f} to {max(shares):.2f} of a deep ensemble's {what}"
            held.append(
                f"a tenth of the cost: {said}, {'met' if max(shares) <= 0.1 else 'missed'}"
            )
    return f"Goal, {ours}: {'. '.join(part[0].upper() + part[1:] for part in held)}.\n"


if __name__ == "__main__":
    out = Path(sys.argv[1])
    found = [
        line
        for file in sys.argv[2:]
        if Path(file).exists()
        for line in Path(file).read_text().splitlines()
    ]
    out.write_text(page(out.read_text(), found))
