"""The record of benchmarks/defaults.py as one compact file, the choice that follows from it, and docs/recipes.md.

A candidate's score on a task is its NLL less the plain net's, same start and seed, averaged over seeds and kept within
one nat. Candidates are chosen by validation rows: who harms the fewest tasks, then by the mean score, in which harm
counts three times what helps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean, median
from typing import Any

from cells import lines_of, table

STARTS = ("scratch", "trained")
WORDS = {"scratch": "from scratch", "trained": "from a trained net"}
HARM, MOST, NOISE = (
    3.0,
    1.0,
    0.02,
)  # what harm counts; nats that one task can count; nats below which nobody argues
MOST_SEEDS = 0.75  # all of up to three, three of four
ENOUGH = 0.9  # of the plain net's trainings, for a candidate that can be chosen
_WHAT = ("test_nll", "test_shifted_nll")
COLUMNS = (
    "task", "start", "candidate", "seed", "converted", "kl", "train_nll", "validation_nll", "validation_error",
    "validation_shifted_nll", "validation_shifted_error", "test_nll", "test_error", "test_shifted_nll",
    "test_shifted_error", "error", "seconds",
)  # fmt: skip

USE = """
```python
import torch, slimbayes as sb

net, x, y = torch.nn.Linear(4, 3), torch.randn(32, 4), torch.randint(3, (32,))
config, temperature = sb.recipe("2-tied", start="trained")  # or "scratch"
net = sb.bayesianize(net, config)
loss = sb.elbo(
    sb.categorical(sb.sample(net, x), y), net, num_data=1_000, temperature=temperature
).loss
```

In the lab the temperature is where the KL's weight ends: `train: {kl: {kind: Linear, share: 0.5, weight: 0.01}}`. Below
1 it is a tempered posterior, no longer Bayes' rule: with far more weights than data the KL at 1 outweighs the
likelihood.
"""


def compact(files: Iterable[Path], candidates: Mapping[str, Any]) -> dict[str, Any]:
    """All finished cells of some files as one table; of a cell that is there twice the last counts."""
    runs: list[dict[str, str]] = []
    cells: dict[tuple[Any, ...], dict[str, Any]] = {}
    for file in files:
        for row in lines_of(file):
            if "run" in row:
                runs += [row["run"]] if row["run"] not in runs else []
            else:
                cells[tuple(row[name] for name in COLUMNS[:4])] = row
    used = {key[2] for key in cells}
    rows = [[cells[key].get(name) for name in COLUMNS] for key in sorted(cells)]
    described = {
        name: one.describe() for name, one in candidates.items() if name in used
    }
    return {
        "runs": runs,
        "candidates": described,
        "columns": list(COLUMNS),
        "cells": rows,
    }


def write_record(record: Mapping[str, Any], file: Path) -> None:
    """One line for each cell."""
    head = {name: value for name, value in record.items() if name != "cells"}
    lines = ",\n".join(
        json.dumps(row, separators=(",", ":")) for row in record["cells"]
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(head)[:-1] + ', "cells": [\n' + lines + "\n]}\n")


class Results:
    """Cells by task, start and candidate, and what they say beside the plain net."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        rows = [
            dict(zip(record["columns"], row, strict=True)) for row in record["cells"]
        ]
        self.candidates = record["candidates"]
        self.cells: dict[tuple[str, str, str], dict[int, dict[str, Any]]] = {}
        for row in rows:
            self.cells.setdefault((row["task"], row["start"], row["candidate"]), {})[
                row["seed"]
            ] = row
        self.tasks = sorted({row["task"] for row in rows})

    def differences(
        self, task: str, start: str, candidate: str, what: str
    ) -> list[float]:
        """A number less the plain net's for every seed both have; a training that failed is a nat worse."""
        plain = self.cells.get((task, start, "plain"), {})
        found = self.cells.get((task, start, candidate), {})
        return [
            _less(found[seed][what], plain[seed][what])
            for seed in found
            if seed in plain
        ]

    def difference(
        self, task: str, start: str, candidate: str, what: str
    ) -> float | None:
        every = self.differences(task, start, candidate, what)
        return mean(every) if every else None

    def behind(
        self, task: str, start: str, candidate: str, what: str = "test_nll"
    ) -> bool:
        """Worse by more than NOISE in the median: one failed plain net hides nothing."""
        every = self.differences(task, start, candidate, what)
        return bool(every) and median(every) > NOISE

    def harms(
        self, task: str, start: str, candidate: str, what: str = "test_nll"
    ) -> bool:
        """Behind, and worse with MOST_SEEDS."""
        every = self.differences(task, start, candidate, what)
        return self.behind(task, start, candidate, what) and sum(
            d > 0 for d in every
        ) >= MOST_SEEDS * len(every)

    def harmed(self, start: str, candidate: str, what: str = "test_nll") -> list[str]:
        return [task for task in self.tasks if self.harms(task, start, candidate, what)]

    def score(
        self, start: str, candidate: str, what: str = "validation_nll"
    ) -> float | None:
        """Mean over the tasks that the plain net and the candidate have; harm counts more."""
        each = [self.difference(task, start, candidate, what) for task in self.tasks]
        known = [d for d in each if d is not None]
        return mean(d if d < 0 else HARM * d for d in known) if known else None

    def trainings(self, start: str, candidate: str) -> int:
        return sum(
            len(seeds)
            for (_, s, c), seeds in self.cells.items()
            if (s, c) == (start, candidate)
        )

    def of_method(self, method: str, start: str) -> list[str]:
        """The method's candidates for a start, best first; those that lost a first round have few trainings."""
        enough = ENOUGH * self.trainings(start, "plain")
        own = [name for name, one in self.candidates.items() if one["method"] == method]
        own = [name for name in own if self.trainings(start, name) >= enough]
        scored = {
            name: score
            for name in own
            if (score := self.score(start, name)) is not None
        }
        return sorted(
            scored,
            key=lambda name: (
                len(self.harmed(start, name, "validation_nll")),
                scored[name],
            ),
        )

    def methods(self, start: str) -> list[str]:
        every = dict.fromkeys(one["method"] for one in self.candidates.values())
        return [method for method in every if self.of_method(method, start)]

    def mean_of(self, task: str, start: str, candidate: str, what: str) -> float | None:
        """Over the seeds that the plain net has, too."""
        plain, found = (
            self.cells.get((task, start, "plain"), {}),
            self.cells.get((task, start, candidate), {}),
        )
        values = [row[what] for seed, row in found.items() if seed in plain]
        return (
            mean(values)
            if values and all(isinstance(v, float | int) for v in values)
            else None
        )


def _less(value: Any, plain: Any) -> float:
    """value - plain, within MOST either way; what is not a number is as bad as can be."""
    if not isinstance(value, float | int):
        return MOST
    if not isinstance(plain, float | int):
        return -MOST
    return max(-MOST, min(MOST, value - plain))


def choice(record: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """The chosen candidate of each method and start."""
    found = Results(record)
    return {
        (method, start): found.of_method(method, start)[0]
        for start in STARTS
        for method in found.methods(start)
    }


# --- the page ---


def page(record: Mapping[str, Any], earlier: Mapping[str, Any] | None = None) -> str:
    """docs/recipes.md; `earlier` rounds are only listed."""
    found, chosen = Results(record), choice(record)
    seeds = len({row[3] for row in record["cells"]})
    counts = [
        len(found.cells.get((task, start, "plain"), {}))
        for task in found.tasks
        for start in STARTS
    ]
    lines = [
        "# Recipes: what to use when",
        "",
        "Generated by `python benchmarks/defaults.py --page FILE ...`; do not edit.",
        "",
        *USE.strip().splitlines(),
        "",
        f"{len(record['cells'])} trainings: {len(found.tasks)} small real tasks ({', '.join(found.tasks)}), up to "
        f"{seeds} seeds, equal epochs; from scratch, and from a plain net that was trained as long before. Tables have "
        f"a heteroscedastic head. Shifted rows: tables with noise of half a feature's spread, pictures with six "
        f"corruptions of severity 3, reviews with a third of their words replaced, stays with half of their parameters "
        f"missing. {_versions(record)}.",
        "",
        f"Candidates were chosen by the NLL of validation rows, less the plain net's of the same seed, within "
        f"{MOST:.0f} nat for each task: first who harms the fewest tasks, then by the mean, in which harm counts "
        f"{HARM:.0f} times what helps. Only candidates with {ENOUGH:.0%} of the plain net's trainings can be chosen. "
        f"What follows are test rows. A method harms a task "
        f"if its NLL is above the plain net's with {MOST_SEEDS:.0%} of the seeds at least, and in the median by more "
        f"than {NOISE}.",
        "",
        f"Read with care: a task has {min(counts)} to {max(counts)} seeds, which with so few rows leaves harm and gain "
        f"in doubt. 'Ahead by' is the validation score's lead over the method's next candidate; where it is a "
        f"few hundredths another seed could choose the other, below zero the next one harms more tasks. Candidates "
        f"of this round were made up after the validation scores of earlier ones were known.",
        *(line for remark in record.get("remarks", ()) for line in ("", remark)),
    ]
    for start in (start for start in STARTS if found.methods(start)):
        lines += [
            "",
            f"## {WORDS[start].capitalize()}",
            "",
            _reading(found, chosen, start),
            "",
        ]
        lines += _choices(found, chosen, start)
        for what, words in (
            ("test_nll", "NLL of test rows"),
            ("test_shifted_nll", "NLL of shifted test rows"),
        ):
            lines += [
                "",
                f"{words}; **bold** where no worse than plain by more than {NOISE}, ! where it harms:",
                "",
            ]
            lines += _by_task(found, chosen, start, what)
    lines += [
        "",
        f"## Where the plain net stays ahead by more than {NOISE}, and why",
        "",
        *_reasons(found, chosen),
    ]
    lines += ["", "## Every candidate", "", *_every(found, chosen)]
    if earlier:
        lines += [
            "",
            "Of earlier rounds, on the tasks with classes alone, up to 2 seeds: the noise of real targets had ",
        ]
        lines[-1] += f"other bounds then. {_versions(earlier)}."
        lines += ["", *_every(Results(earlier), {})]
    return "\n".join(lines) + "\n"


def _versions(record: Mapping[str, Any]) -> str:
    return "; ".join(
        f"torch {run['torch']}, commit {run['commit'][:7]}, {run['date']}"
        for run in record["runs"]
    )


def _reading(found: Results, chosen: Mapping[tuple[str, str], str], start: str) -> str:
    """What the tables say, in three sentences."""
    methods = [method for method in found.methods(start) if method != "plain"]
    harmed = {m: len(found.harmed(start, chosen[m, start])) for m in methods}
    safe = [m for m in methods if not harmed[m]]
    best = [
        min(methods, key=lambda m: _mean(found, start, chosen[m, start], what))
        for what in _WHAT
    ]
    others = ", ".join(f"{m} {n}" for m, n in harmed.items() if n)
    return (
        f"No task is harmed by {', '.join(safe) or 'none of them'}; tasks harmed by the others, of "
        f"{len(found.tasks)}: {others or 'none'}. Best on test rows as they are, on average: {best[0]}; on shifted "
        f"ones: {best[1]}."
    )


def _lead(found: Results, method: str, start: str) -> str:
    """How far the chosen candidate's validation score is ahead of the next one's."""
    scores = [
        found.score(start, name) or 0.0 for name in found.of_method(method, start)
    ]
    return f"{scores[1] - scores[0]:.3f}" if len(scores) > 1 else ""


def _mean(found: Results, start: str, name: str, what: str) -> float:
    """Mean difference to the plain net over tasks."""
    each = [found.difference(task, start, name, what) for task in found.tasks]
    return mean(d for d in each if d is not None)


def _choices(
    found: Results, chosen: Mapping[tuple[str, str], str], start: str
) -> list[str]:
    head = [
        "method",
        "recipe",
        "temperature",
        "ahead by",
        "NLL less plain's",
        "harms",
        "shifted less plain's",
    ]
    rows = [[*head, "better when shifted"]]
    for method in found.methods(start):
        name = chosen[method, start]
        shifted = [found.difference(t, start, name, _WHAT[1]) for t in found.tasks]
        harmed = found.harmed(start, name)
        one, (clean, moved) = (
            found.candidates[name],
            (_mean(found, start, name, what) for what in _WHAT),
        )
        rows.append(
            [
                method,
                f"`{one['written']}`",
                f"{one['temperature']:g}",
                _lead(found, method, start),
            ]
        )
        rows[-1] += [f"{clean:+.3f}", ", ".join(harmed) or "none", f"{moved:+.3f}"]
        rows[-1].append(
            f"{sum(d is not None and d < 0 for d in shifted)} of {len(shifted)}"
        )
    return table(rows)


def _by_task(
    found: Results, chosen: Mapping[tuple[str, str], str], start: str, what: str
) -> list[str]:
    rows = [["method", *found.tasks]]
    for method in found.methods(start):
        name = chosen[method, start]
        rows.append(
            [method, *(_cell(found, task, start, name, what) for task in found.tasks)]
        )
    return table(rows)


def _cell(found: Results, task: str, start: str, name: str, what: str) -> str:
    value, difference = (
        found.mean_of(task, start, name, what),
        found.difference(task, start, name, what),
    )
    if value is None or difference is None:
        return "failed" if (task, start, name) in found.cells else ""
    text = f"{value:.3f}" if abs(value) < 100 else f"{value:.1e}"
    if found.harms(task, start, name, what):
        return f"{text} !"
    return f"**{text}**" if name != "plain" and difference <= NOISE else text


def _reasons(found: Results, chosen: Mapping[tuple[str, str], str]) -> list[str]:
    """Tasks that chosen candidates are behind on, and whether they fit the training rows less or predict others
    worse."""
    head = [
        "method",
        "start",
        "task",
        "worse with",
        "NLL less plain's, median",
        "of training rows",
        "KL a row",
        "so",
    ]
    rows = [head]
    for (method, start), name in chosen.items():
        for task in (task for task in found.tasks if found.behind(task, start, name)):
            every, fit = (
                found.differences(task, start, name, what)
                for what in ("test_nll", "train_nll")
            )
            kl = (found.mean_of(task, start, name, "kl") or 0.0) * found.candidates[
                name
            ]["temperature"]
            seeds = f"{sum(d > 0 for d in every)} of {len(every)} seeds"
            rows.append(
                [
                    method,
                    WORDS[start],
                    task,
                    seeds,
                    f"{median(every):+.3f}",
                    f"{median(fit):+.3f}",
                    f"{kl:.3f}",
                ]
            )
            why = _reason(median(every), median(fit), kl)
            rows[-1].append(
                f"harm: {why}"
                if found.harms(task, start, name)
                else f"no harm by the rule above; {why}"
            )
    return table(rows) if rows[1:] else ["Nowhere."]


def _reason(gap: float, fit: float, kl: float) -> str:
    """Why it loses: what it loses on test rows, what it loses on training rows, and the weighted KL, per row."""
    if fit < gap / 2:
        return "it fits as well and predicts worse: overfitting, or chance"
    if not kl:
        return "members that share weights learn more slowly"
    return (
        "its KL keeps it from fitting"
        if kl > fit
        else "the noise of its draws keeps it from fitting"
    )


def _every(found: Results, chosen: Mapping[tuple[str, str], str]) -> list[str]:
    """Validation scores of all candidates, and how many tasks each harms."""
    rows = [
        [
            "candidate",
            *(f"{WORDS[start]}: score, harmed" for start in STARTS),
            "config",
            "temperature",
        ]
    ]
    for name, one in found.candidates.items():
        cells = []
        for start in STARTS:
            score = found.score(start, name)
            harmed = len(found.harmed(start, name, "validation_nll"))
            text = "" if score is None else f"{score:+.3f}, {harmed}"
            cells.append(
                f"**{text}**" if chosen.get((one["method"], start)) == name else text
            )
        rows.append([name, *cells, f"`{one['written']}`", f"{one['temperature']:g}"])
    return table(rows)
