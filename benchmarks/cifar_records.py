"""The kept records of runs on CIFAR-10 and CIFAR-100, what pages show of them, and the attempts of moonshot.yaml in
experiments/cifar10: their table, and whether one reaches a deep ensemble."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import nan
from pathlib import Path
from typing import NamedTuple

from slimbayes.lab.config_files import load, read_tree
from slimbayes.lab.paper_table import draws_of, measured
from slimbayes.lab.trees import row_names
from slimbayes.report.metric import mean
from slimbayes.report.record import Record, read, write

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "cifar10"
HUNDRED = ROOT / "results" / "cifar100"
CONFIG = ROOT / "experiments" / "cifar10" / "methods.yaml"
PLAIN, SMALL = "plain", 0.02  # the share of parameters that a method may add and still be of the plain network's size
Scores = dict[int, dict[str, float]]  # by seed


def scores(record: Record) -> dict[str, float]:
    """What the table shows of a run."""
    draws = draws_of(record, None)
    found = measured(record, draws)
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
    """Keep the records of finished runs, <table>/<run>/record.json, as results/<data>/<table>/<name>-<seed>.json.

    Their commands name folders from runs/ on, and data by its folder's name: others run them elsewhere.
    """
    for file in sorted(folder.glob("**/record.json")):
        record = read(file)
        kept = results / record.data / file.parents[1].name
        kept.mkdir(parents=True, exist_ok=True)
        told = [re.sub(r"(?<!\S)[/~]\S*?(runs/\S+|[^/\s]+)(?!\S)", r"\1", line) for line in record.commands]
        slug = re.sub(r"[^a-z0-9.]+", "-", record.name.lower())
        write(kept / f"{slug}-{record.seed}.json", record.model_copy(update={"commands": told}))


def kept_records(results: Path = RESULTS) -> list[Record]:
    """Records of methods.yaml, in the order of its rows, then by seed."""
    rows = row_names(read_tree(CONFIG))
    order = {load(f"{CONFIG}#{row}").name: place for place, row in enumerate(rows)}
    records = [read(file) for file in sorted((results / "methods").glob("*.json"))]
    return sorted(records, key=lambda record: (order.get(record.name, len(order)), record.seed))


def kept_attempts(results: Path = RESULTS) -> list[Record]:
    """Records of moonshot.yaml."""
    return [read(file) for file in sorted((results / "moonshot").glob("*.json"))]


# --- moonshot.yaml ---

MOONSHOT = "slimbayes sweep experiments/cifar10/moonshot.yaml --over seed=[0]"
STARTS = ("moonshot-", "moonshot-long-")  # of the names of rows, by cost
ENSEMBLE = "ensemble"


class Budget(NamedTuple):
    """Attempts of one cost, best first by validation rows: means of their scores, epochs and seeds."""

    means: dict[str, dict[str, float]]
    epochs: dict[str, int]
    seeds: dict[str, int]

    @property
    def cost(self) -> str:
        return f"{self.epochs[PLAIN]} plain epochs" if PLAIN in self.epochs else "unknown: its plain network is missing"

    @property
    def small(self) -> list[str]:
        """Of nearly the plain network's size, its own rows left out."""
        return [n for n, m in self.means.items() if m["overhead"] <= SMALL and not n.startswith(PLAIN)]

    def shown(self, name: str) -> str:
        return f"{self.means[name]['nll']:.3f} and {self.means[name]['corrupted_nll']:.3f}"


def budgets(records: Sequence[Record]) -> Iterator[Budget]:
    """By cost, those of which something has been run."""
    for start in STARTS:
        own = [r for r in records if max((s for s in STARTS if r.name.startswith(s)), key=len) == start]
        found = {name.removeprefix(start): seeds for name, seeds in methods(own).items()}
        order = sorted(found, key=lambda name: _means(found[name])["validation_nll"])
        epochs = {r.name.removeprefix(start): r.config["train"]["epochs"] for r in own}
        if own:
            yield Budget({n: _means(found[n]) for n in order}, epochs, {n: len(found[n]) for n in order})


def _means(seeds: Scores) -> dict[str, float]:
    names = ("overhead", "validation_nll", "nll", "accuracy", "corrupted_nll")
    return {n: mean([one[n] for one in seeds.values() if n in one] or [nan]) for n in names}


def attempts(records: Sequence[Record]) -> str:
    """Every attempt, by cost, then best first by validation rows."""
    if not records:
        return f"Attempts of moonshot.yaml: none has been run yet. `{MOONSHOT}`\n"
    lines = ["| cost | attempt | more parameters | validation NLL | NLL | accuracy, % | corrupted NLL | seeds |"]
    lines.append("|---|---|" + "---:|" * 6)
    for budget in budgets(records):
        for name, m in budget.means.items():
            lines.append(
                f"| {budget.cost} | {name} | {m['overhead']:.1%} | {m['validation_nll']:.3f} | {m['nll']:.3f} | "
                f"{100 * m['accuracy']:.2f} | {m['corrupted_nll']:.3f} | {budget.seeds[name]} |"
            )
    title = f"Every attempt that was run, by cost, then by validation rows; `{MOONSHOT}`:"
    return "\n".join([title, "", *lines, "", *(f"- {_goal(budget)}" for budget in budgets(records))]) + "\n"


def _goal(budget: Budget) -> str:
    """Who is below the ensemble of the same cost, on clean and on corrupted images."""
    if ENSEMBLE not in budget.means:
        return f"Cost {budget.cost}: the deep ensemble has not been run, nothing can be said about the goal."
    sides: dict[tuple[bool, ...], list[str]] = {}
    for name in [PLAIN, *budget.small] if PLAIN in budget.means else budget.small:
        below = (budget.means[name][score] < budget.means[ENSEMBLE][score] for score in ("nll", "corrupted_nll"))
        sides.setdefault(tuple(below), []).append(name)
    words = {(True, True): "on both", (True, False): "on clean ones alone", (False, True): "on corrupted ones alone",
             (False, False): "on neither"}  # fmt: skip
    told = "; ".join(f"{text} {', '.join(sides[side])}" for side, text in words.items() if side in sides)
    reached = [name for name in sides.get((True, True), []) if name != PLAIN]
    return (
        f"Cost {budget.cost}: members of the deep ensemble train for {budget.epochs[ENSEMBLE]} epochs each, NLL "
        f"{budget.shown(ENSEMBLE)} on clean and corrupted images. Below it with at most {SMALL:.0%} more parameters: "
        f"{told or 'none'}. The goal, both with a method, is reached by {', '.join(reached) or 'none'}."
    )


def summit(records: Sequence[Record]) -> str:
    """A sentence about the largest cost: ensemble, plain network, and the attempt that validation rows choose."""
    budget = max(budgets(records), key=lambda one: one.epochs.get(PLAIN, 0), default=None)
    if budget is None or not {PLAIN, ENSEMBLE} <= set(budget.means):
        return ""
    own = f"none of the attempts with at most {SMALL:.0%} more parameters has been judged"
    if budget.small:
        own = f"{budget.shown(budget.small[0])} for {budget.small[0]}, which validation images choose of the attempts "
        own += f"with at most {SMALL:.0%} more parameters"
    seeds = min(budget.seeds.values())
    return (
        f"At the cost of {budget.cost}, where an ensemble's members train for {budget.epochs[ENSEMBLE]} each "
        f"({seeds} seed{'s' * (seeds > 1)}, on nine tenths of the images), NLL on clean and corrupted images is "
        f"{budget.shown(ENSEMBLE)} for the ensemble of four and {budget.shown(PLAIN)} for the plain network; {own} "
        f"([all of them](experiments/cifar10/README.md))."
    )
