"""The kept records of CIFAR-10's runs, and what pages show of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from slimbayes.lab.config_files import load, read_tree
from slimbayes.lab.paper_table import draws_of, measured
from slimbayes.lab.trees import row_names
from slimbayes.report.record import Record, read, write

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "cifar10"
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


def take(folder: Path, results: Path = RESULTS) -> None:
    """Keep the records of finished runs, <table>/<run>/record.json, as results/cifar10/<table>/<name>-<seed>.json.

    Their commands name folders from runs/ on, and data by its folder's name: others run them elsewhere.
    """
    for file in sorted(folder.glob("**/record.json")):
        record, kept = read(file), results / file.parents[1].name
        kept.mkdir(parents=True, exist_ok=True)
        told = [re.sub(r"(?<!\S)[/~]\S*?(runs/\S+|[^/\s]+)(?!\S)", r"\1", line) for line in record.commands]
        slug = re.sub(r"[^a-z0-9.]+", "-", record.name.lower())
        write(kept / f"{slug}-{record.seed}.json", record.model_copy(update={"commands": told}))


def kept_records() -> list[Record]:
    """Records of methods.yaml, in the order of its rows, then by seed."""
    rows = row_names(read_tree(CONFIG))
    order = {load(f"{CONFIG}#{row}").name: place for place, row in enumerate(rows)}
    records = [read(file) for file in sorted((RESULTS / "methods").glob("*.json"))]
    return sorted(records, key=lambda record: (order.get(record.name, len(order)), record.seed))


def kept_attempts(results: Path = RESULTS) -> list[Record]:
    """Records of moonshot.yaml."""
    return [read(file) for file in sorted((results / "moonshot").glob("*.json"))]
