"""Recipes are what the record of benchmarks/defaults.py chooses, by validation rows; docs/recipes.md is that record."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import defaults
import defaults_page
from defaults_candidates import CANDIDATES
from defaults_tasks import TASKS, Task, load, mlp

import slimbayes as sb
from slimbayes.posteriors.configs import RECIPES

RECORD: dict[str, Any] = json.loads(defaults.RECORD.read_text())


def test_recipes_are_what_the_record_chooses() -> None:
    chosen = defaults_page.choice(RECORD)
    assert {key for key in chosen if key[0] not in ("plain", "deep ensemble")} == {
        (method, start) for method, by_start in RECIPES.items() for start in by_start
    }
    for (method, start), name in chosen.items():
        if method in RECIPES:
            found, one = sb.recipe(method, start), RECORD["candidates"][name]  # type: ignore[arg-type]
            assert (found.config, found.temperature) == (
                sb.config_from_dict(one["config"]),
                one["temperature"],
            ), name


@pytest.mark.slow
def test_the_page_in_docs_is_made_of_the_record() -> None:
    assert defaults.PAGE.read_text() == defaults_page.page(
        RECORD, json.loads(defaults.EARLIER.read_text())
    )


def test_recipes_of_unknown_methods_and_starts_are_told() -> None:
    with pytest.raises(ValueError, match="did you mean 'rank-1 Normal'"):
        sb.recipe("rank1 normal", start="scratch")
    with pytest.raises(ValueError, match="'scratch' or 'trained', got 'fine-tune'"):
        sb.recipe("EMP", start="fine-tune")  # type: ignore[arg-type]


# The choice -----------------------------------------------------------------------------------------------------------


def cell(
    task: str, candidate: str, validation: Any, test: Any = 0.0, seed: int = 0
) -> list[Any]:
    row = dict.fromkeys(defaults_page.COLUMNS, 0.0) | {
        "task": task,
        "start": "scratch",
        "candidate": candidate,
    }
    return list(
        (row | {"seed": seed, "validation_nll": validation, "test_nll": test}).values()
    )


def record(*cells: list[Any]) -> dict[str, Any]:
    kinds = {
        name: {"method": name.split("-")[0], "temperature": 1.0, "written": name}
        for name in ("plain", "a-1", "a-2")
    }
    return {
        "runs": [],
        "candidates": kinds,
        "columns": list(defaults_page.COLUMNS),
        "cells": list(cells),
    }


def test_who_harms_least_is_chosen_and_test_rows_do_not_count() -> None:
    plain = [cell("x", "plain", 1.0), cell("y", "plain", 1.0)]
    helps, mixed = (
        [cell("x", "a-1", 0.9), cell("y", "a-1", 0.9)],
        [cell("x", "a-2", 0.1), cell("y", "a-2", 1.05)],
    )
    assert (
        defaults_page.choice(record(*plain, *helps, *mixed))["a", "scratch"] == "a-1"
    )  # a-2 has the better mean
    better = [
        cell("x", "a-2", 0.5, test=9.0),
        cell("y", "a-2", 1.015, test=9.0),
    ]  # within the noise
    assert (
        defaults_page.choice(record(*plain, *helps, *better))["a", "scratch"] == "a-2"
    )  # (-.5 + .045) / 2
    both = (
        [cell("x", "a-1", 0.9), cell("y", "a-1", 1.05)],
        [cell("x", "a-2", 0.6), cell("y", "a-2", 1.2)],
    )
    assert (
        defaults_page.choice(record(*plain, *both[0], *both[1]))["a", "scratch"]
        == "a-1"
    )  # harm counts three times


def test_the_page_says_why_a_method_loses() -> None:
    def text(train: float, kl: float) -> str:
        lost = dict(
            zip(defaults_page.COLUMNS, cell("x", "a-1", 0.9, test=0.3), strict=True)
        )
        lost |= {"train_nll": train, "kl": kl}
        return defaults_page.page(record(cell("x", "plain", 1.0), list(lost.values())))

    worse = "| a | from scratch | x | 1 of 1 seeds | +0.300 | +0.250 | 0.500 |"
    assert f"{worse} harm: its KL keeps it from fitting |" in text(0.25, 0.5)
    assert "the noise of its draws keeps it from fitting" in text(0.25, 0.1)
    assert "it fits as well and predicts worse" in text(0.01, 0.5)
    assert "members that share weights learn more slowly" in text(0.25, 0.0)


def test_one_task_counts_a_nat_at_most_and_what_failed_as_much() -> None:
    found = defaults_page.Results(
        record(cell("x", "plain", 1.0), cell("x", "a-1", 1e7), cell("x", "a-2", None))
    )
    assert found.score("scratch", "a-1") == found.score("scratch", "a-2") == 3.0
    assert (
        defaults_page.Results(
            record(cell("x", "plain", 9.0), cell("x", "a-1", 1.0))
        ).score("scratch", "a-1")
        == -1.0
    )


def test_harm_is_told_only_where_nearly_all_seeds_agree() -> None:
    seeds = [(1.0, 1.3), (1.0, 1.1)]
    rows = [
        cell("x", n, 0.0, pair[i], seed)
        for seed, pair in enumerate(seeds)
        for i, n in enumerate(("plain", "a-1"))
    ]
    assert defaults_page.Results(record(*rows)).harms("x", "scratch", "a-1")
    rows[3] = cell("x", "a-1", 0.0, 0.99, 1)
    assert not defaults_page.Results(record(*rows)).harms("x", "scratch", "a-1")
    assert "1.145 " in defaults_page.page(
        record(*rows)
    ) and "1.145 !" not in defaults_page.page(record(*rows))
    four = [
        cell("x", n, 0.0, v, seed)
        for seed in range(4)
        for n, v in (("plain", 1.0), ("a-1", 1.1 if seed else 0.0))
    ]
    assert defaults_page.Results(record(*four)).harms(
        "x", "scratch", "a-1"
    )  # one plain net that failed hides nothing
    four[3] = cell("x", "a-1", 0.0, 0.99, 1)
    assert not defaults_page.Results(record(*four)).harms("x", "scratch", "a-1")
    assert (
        "| x | 2 of 4 seeds | +0.045 | +0.000 | 0.000 | no harm by the rule above; "
        in defaults_page.page(record(*four))
    )


# The cells ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A task of sixty rows."""
    rng = np.random.default_rng(0)
    x = rng.normal(3.0, 2.0, (60, 2)).astype(np.float32)
    np.savez(tmp_path / "tiny.npz", x=x, y=x.sum(1), shifted=x)
    task = Task(
        "tiny",
        "heteroscedastic_gaussian",
        lambda: mlp(2, 2, norm=True, width=4),
        (40, 10, 10),
        2,
        20,
    )
    monkeypatch.setitem(TASKS, "tiny", task)
    return tmp_path


def test_rows_are_split_apart_and_standardised_by_training_rows(pack: Path) -> None:
    rows = load(TASKS["tiny"], pack, seed=1)
    torch.testing.assert_close(
        rows["train"].x.mean(0), torch.zeros(2), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(rows["train"].y.std(), torch.tensor(1.0))
    every = torch.cat([part.x for part in rows.values()])
    assert len(every.unique(dim=0)) == 60 and not torch.equal(
        every, torch.cat([p.shifted for p in rows.values()])
    )
    assert not torch.equal(load(TASKS["tiny"], pack, seed=2)["test"].x, rows["test"].x)


@pytest.mark.slow
def test_cells_are_run_once_and_again_where_a_line_was_cut_off(pack: Path) -> None:
    out = pack / "out.jsonl"
    words = [
        "--data",
        str(pack),
        "--out",
        str(out),
        "--seeds",
        "1",
        "--only",
        "tiny/.*/(plain|kt-he)/",
    ]
    defaults.main(words)
    lines = out.read_text().splitlines()
    found = {
        tuple(row[n] for n in ("start", "candidate")): row
        for row in map(json.loads, lines[1:])
    }
    assert set(found) == {
        (start, name) for start in ("scratch", "trained") for name in ("plain", "kt-he")
    }
    assert all(
        math.isfinite(row["test_nll"]) and row["kl"] >= 0 for row in found.values()
    )
    assert found["trained", "kt-he"]["kl"] > 0 == found["trained", "plain"]["kl"]
    out.write_text("\n".join([*lines[:-1], lines[-1][:50]]))
    defaults.main(words)
    assert len(defaults.done(out)) == 4
    again = {
        k: v
        for k, v in defaults.done(out)[
            defaults.Cell("tiny", "trained", "kt-he", 0)
        ].items()
        if k != "seconds"
    }
    assert again == {
        k: v for k, v in found["trained", "kt-he"].items() if k != "seconds"
    }
    defaults.main([*words, "--limit-seconds", "0"])
    assert len(defaults_page.compact([out], CANDIDATES)["cells"]) == 4
