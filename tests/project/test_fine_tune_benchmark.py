"""benchmarks/fine_tune.py chooses on validation rows, and the page says what its lines say."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import fine_tune
import fine_tune_page as pages
import fine_tune_starts as starts
import fine_tune_tasks as tasks

ROOT = Path(__file__).parents[2]
RECORDS = [
    ROOT / "lab" / "results" / "benchmarks" / name
    for name in ("fine_tune.jsonl", "fine_tune_tables.jsonl")
]


def line(method: str, seed: int, nll: float, **more: Any) -> str:
    cell = {
        "task": "a",
        "method": method,
        "seed": seed,
        "metrics": {"nll": nll, "shifted_nll": 2 * nll},
    }
    return json.dumps(cell | {"seconds": 1.0, "bytes": 1e6} | more)


def test_differences_are_paired_by_seed() -> None:
    plain = [line("plain", seed, 10.0 * seed) for seed in range(3)]
    ahead = [
        line("rank-1 Laplace", seed, 10.0 * seed - 1 - 0.1 * seed) for seed in range(3)
    ]
    level = [
        line("rank-1 fine-tuned", seed, 10.0 * seed + (-1) ** seed) for seed in range(3)
    ]
    cells = pages.read([*plain, *ahead, *level, line("plain", -1, 0.0, choice=0)])
    assert (
        pages.compared(cells, "a", "rank-1 Laplace", "plain", pages.score("nll"))
        == "ahead"
    )
    assert (
        pages.compared(cells, "a", "plain", "rank-1 Laplace", pages.score("nll"))
        == "behind"
    )
    assert (
        pages.compared(cells, "a", "rank-1 fine-tuned", "plain", pages.score("nll"))
        == "level"
    )
    assert pages.compared(cells, "a", "MC dropout", "plain", pages.score("nll")) is None
    text = pages.page(
        f"before\n{pages.MARKS[0]}old\n{pages.MARKS[1]}after\n", [*plain, *ahead]
    )
    assert (
        text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    )
    assert (
        "| rank-1 Laplace | plain | NLL | 1 | 0 | 0 |" in text
        and "clean NLL: met" in text
    )
    worse = [line("rank-1 Laplace", seed, 10.0 * seed + 1) for seed in range(3)]
    assert "clean NLL: missed on a" in pages.page(
        "".join(pages.MARKS), [*plain, *worse]
    )


def test_the_page_is_what_the_lines_say() -> None:
    text = (ROOT / "docs" / "fine_tuning.md").read_text()
    lines = [
        entry
        for file in RECORDS
        if file.exists()
        for entry in file.read_text().splitlines()
    ]
    if not lines:
        pytest.skip("no records of benchmarks/fine_tune.py")
    assert text == pages.page(text, lines)


def test_starts_are_what_their_lines_say_and_are_chosen_by_validation_rows_alone() -> (
    None
):
    text = (ROOT / "docs" / "fine_tuning.md").read_text()
    lines = [
        json.loads(entry)
        for entry in (ROOT / "lab/results/benchmarks/fine_tune_starts.jsonl")
        .read_text()
        .splitlines()
    ]
    assert text == starts.page(text, lines)
    a, b = starts.CANDIDATES[:2]
    nll = lambda valid, test: {"valid": valid, "clean": test, "shifted": test}  # noqa: E731
    tried = [(None, nll(1.0, 1.0)), (a, nll(1.1, 0.0)), (b, nll(0.99, 5.0))]
    made = [{"task": "t", "seed": 0, "candidate": c, "nll": n} for c, n in tried]
    rows = starts.page("".join(starts.MARKS), made).splitlines()
    assert (
        "| -0.010, 0 | +0.500, 1 |" in rows[5]
        and "| +0.100, 1 | -0.500, 0 |" in rows[6]
    )


def test_the_setting_of_least_validation_nll_is_chosen(tmp_path: Path) -> None:
    file = tmp_path / "cells.jsonl"
    tried = [
        line("plain", -1, nll, choice=i)
        for i, nll in enumerate([0.5, float("nan"), 0.3])
    ]
    file.write_text("\n".join([*tried, line("plain", 0, 0.1)]) + "\n")
    cells = fine_tune.Cells(file)
    assert cells.best("a", "plain") == 2
    assert (
        cells.has("a", "plain", -1, 1)
        and cells.has("a", "plain", 0)
        and not cells.has("a", "plain", 1)
    )


def test_labels_are_no_rows_to_choose_by_and_differ_between_seeds() -> None:
    x = torch.arange(100)
    pool, valid = tasks._apart(x, x, 20)
    assert not set(pool[0].tolist()) & set(valid[0].tolist()) and len(pool[0]) == 80
    material = tasks.Material(pool, valid, pool, {}, x)
    task = tasks.Task("t", "wrn", 10, 1)
    picked = [
        set(tasks.labelled(material, task, seed)[0].tolist()) for seed in (0, 0, 1)
    ]
    assert picked[0] == picked[1] != picked[2] and len(picked[0]) == 10


def test_adapters_start_as_the_base_and_train_alone() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 5),
        nn.Linear(5, 2),
    )
    x = torch.randn(2, 3, 4, 4)
    before = net(x)
    tasks.with_adapters(net, head="4", rank=2)
    assert torch.equal(net(x), before)
    trains = {name for name, p in net.named_parameters() if p.requires_grad}
    assert trains == {
        "0.down.weight",
        "0.up.weight",
        "3.down.weight",
        "3.up.weight",
        "4.weight",
        "4.bias",
    }


def test_shuffled_reviews_keep_their_words() -> None:
    words = torch.tensor([[0, 0, 5, 6, 7, 8, 9], [3, 4, 5, 6, 7, 8, 9]])
    shuffled = tasks._shuffled(words)
    assert torch.equal(shuffled.sort(1).values, words) and not torch.equal(
        shuffled, words
    )
    assert shuffled[0, :2].tolist() == [0, 0]
