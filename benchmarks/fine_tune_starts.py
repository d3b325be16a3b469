"""Where rank-1 factors start, and how warm, when a trained network is fine-tuned: a part of docs/fine_tuning.md.

    python benchmarks/fine_tune_starts.py --data DATA --out OUT.jsonl [--limit-seconds 500] [--page docs/fine_tuning.md]

A plain network is trained, then `bayesianize(net, Rank1(...), train="posterior")` goes on from there on the same rows,
for 300 steps. Tasks are scikit-learn's digits, cancers and wines with few labels (benchmarks/laplace_priors.py) and
UCI's regressions (benchmarks/fine_tune_tables.py), two seeds each. Candidates differ in the spread of the members'
means, the width of their factors, the temperature and the rate. The choice is made on validation rows, which neither
train nor test: the candidate that harms the fewest tasks, by more than 0.01 nats beyond the plain network, then the
lowest mean of differences, each within half a nat. A cell is one JSON line.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import fine_tune_tables as tables
import torch
from cells import Cells, between, table
from laplace_priors import classes
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.engine import passes

SEEDS, STEPS, MEMBERS, DRAWS, MARGIN, MOST = 2, 300, 4, 8, 0.01, 0.5
MARKS = ("<!-- starts -->\n", "<!-- end of starts -->\n")
Rows = tuple[Tensor, Tensor]


class Candidate(NamedTuple):
    """Standard deviations of the members' means and of their factors at the start, and of the prior; temperature; rates
    of means and, as a multiple of it, of widths; whether members have biases of their own, which have no prior.
    """

    spread: float
    width: float
    prior: float
    temperature: float
    rate: float
    faster: float
    bias: bool


CANDIDATES = [
    Candidate(0.2, 0.03, 0.1, 0.1, 1e-2, 1, True),  # the recipe's
    Candidate(0.03, 0.01, 0.1, 0.1, 1e-2, 1, True),
    Candidate(0.03, 0.01, 0.1, 0.1, 1e-2, 1, False),
    Candidate(0.03, 0.1, 0.1, 1.0, 1e-2, 1, False),
    Candidate(0.03, 0.03, 0.1, 1.0, 1e-2, 10, False),
    Candidate(0.03, 0.03, 0.1, 0.1, 1e-2, 10, False),
    Candidate(0.03, 0.03, 0.2, 1.0, 1e-2, 10, False),
    Candidate(0.2, 0.03, 0.1, 0.1, 1e-2, 10, False),
    Candidate(0.01, 0.01, 0.1, 1.0, 1e-3, 100, False),
    Candidate(0.01, 0.01, 0.2, 1.0, 1e-3, 100, False),
    Candidate(0.01, 0.01, 0.1, 0.1, 1e-3, 100, False),
]
SETS: dict[str, tuple[Callable[..., Any], int, int]] = {
    "digits, 50 labels": (load_digits, 50, 2),
    "digits, 200 labels": (load_digits, 200, 2),
    "digits, 800 labels": (load_digits, 800, 2),
    "cancer, 200 labels": (load_breast_cancer, 200, 2),
    "wines, 30 labels": (load_wine, 30, 2),
    "digits, 200 labels, 22 layers": (load_digits, 200, 21),
}
UCI = ("naval-propulsion-plant", "energy", "concrete", "wine-quality-red", "yacht")
TASKS = [*(f"UCI {name}" for name in UCI), *SETS]
Nlls = Callable[
    [nn.Module], list[float]
]  # of a network on validation, clean and shifted rows


class Case(NamedTuple):
    """A trained network, its rows, the NLL of a prediction, and how to score one."""

    net: nn.Module
    rows: Rows
    nll: Callable[[Tensor, Tensor], Tensor]
    scored: Callable[[nn.Module, int], list[float]]


def case(task: str, seed: int, folder: Path) -> Case:
    if task in SETS:
        made, labels, hidden = SETS[task]
        net, rows, tests = classes(made, labels, seed, hidden)
        return Case(net, rows, sb.categorical, partial(_classes_scored, tests))
    data = tables.read(task.removeprefix("UCI "), seed, folder)
    net = tables.base(data, seed, tables.STEPS)
    noise, _ = tables.best_noise(tables.together([net], data.held[0]), data.held[1])
    return Case(
        net,
        data.train,
        lambda out, y: sb.gaussian(out, y, noise),
        partial(_real_scored, data),
    )


def _classes_scored(tests: list[Rows], net: nn.Module, draws: int) -> list[float]:
    found = [
        sb.predict(net, x, draws * sb.members(net), seed=0).log_prob(y)
        for x, y in tests
    ]
    return [-float(one.mean()) for one in found]


def _real_scored(data: tables.Data, net: nn.Module, draws: int) -> list[float]:
    """With the noise that validation rows like best, as all methods have it."""
    predict = partial(tables.drawn, net, draws * sb.members(net))
    noise, held = tables.best_noise(predict(data.held[0]), data.held[1])
    moved = [tables.nll(predict(x), noise, y) for x, y in data.shifted.values()]
    return [held, tables.nll(predict(data.test[0]), noise, data.test[1]), mean(moved)]


def tuned(case: Case, chosen: Candidate, seed: int) -> nn.Module:
    """The network with rank-1 factors, fine-tuned with its base frozen."""
    torch.manual_seed(seed)
    config = sb.Rank1(
        members=MEMBERS, prior=sb.Normal(1.0, chosen.prior), mean_init=sb.Normal(1.0, chosen.spread),
        scale_init=chosen.width,
    )  # fmt: skip
    net = sb.bayesianize(copy.deepcopy(case.net), config, train="posterior").train()
    for p in passes.posteriors_of(net):
        if p.bias is not None:
            p.bias.requires_grad_(chosen.bias)  # which train="posterior" leaves alone
    groups = sb.param_groups(net, lr=chosen.rate, scale_lr_multiplier=chosen.faster)
    optimizer = torch.optim.Adam(groups, chosen.rate)
    rates = [group["lr"] for group in groups]
    plan = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rates, STEPS + 1, pct_start=0.1
    )
    for _ in range(STEPS):
        index = torch.randint(len(case.rows[0]), (min(64, len(case.rows[0])),))
        nll = case.nll(sb.sample(net, case.rows[0][index]), case.rows[1][index])
        optimizer.zero_grad()
        sb.elbo(
            nll, net, len(case.rows[0]), temperature=chosen.temperature
        ).loss.backward()
        optimizer.step()
        plan.step()
    return net.eval()


def cells(
    task: str, seed: int, folder: Path, left: list[Candidate | None]
) -> Iterator[dict[str, Any]]:
    """Lines of one trained network: itself (None) and fine-tuned by each candidate."""
    own = case(task, seed, folder)
    for chosen in left:
        began = time.perf_counter()
        if chosen is None:
            found = own.scored(
                sb.bayesianize(copy.deepcopy(own.net), sb.Deterministic()), 1
            )
        else:
            found = own.scored(tuned(own, chosen, seed), DRAWS)
        nlls = dict(zip(("valid", "clean", "shifted"), found, strict=True))
        yield {
            "task": task,
            "seed": seed,
            "candidate": chosen,
            "nll": nlls,
            "seconds": time.perf_counter() - began,
        }


# --- the page ---


def differences(
    lines: list[dict[str, Any]], of: str
) -> dict[Candidate, dict[str, float]]:
    """By candidate and task: the NLL less that of the plain network, mean over seeds that have both."""
    plain = {
        (c["task"], c["seed"]): c["nll"][of] for c in lines if c["candidate"] is None
    }
    found: dict[Candidate, dict[str, list[float]]] = {}
    for c in lines:
        if c["candidate"] is not None and (c["task"], c["seed"]) in plain:
            less = c["nll"][of] - plain[c["task"], c["seed"]]
            found.setdefault(Candidate(*c["candidate"]), {}).setdefault(
                c["task"], []
            ).append(less)
    return {
        chosen: {task: mean(values) for task, values in by.items()}
        for chosen, by in found.items()
    }


def rank(by_task: dict[str, float]) -> tuple[int, float]:
    """How many tasks are harmed, and the mean of differences, each within half a nat."""
    values = [value if value == value else math.inf for value in by_task.values()]
    return sum(value > MARGIN for value in values), mean(
        max(-MOST, min(MOST, value)) for value in values
    )


def page(text: str, lines: list[dict[str, Any]]) -> str:
    found = {of: differences(lines, of) for of in ("valid", "clean", "shifted")}
    most = max(map(len, found["valid"].values()), default=0)
    whole = [chosen for chosen, by in found["valid"].items() if len(by) == most]
    told = (
        f"{most} tasks, {SEEDS} seeds. NLL less that of the plain network, mean over tasks (each within half a nat) "
        "and the number of tasks that are worse by more than 0.01; the first row is the choice, by validation rows:"
    )
    rows = [
        [
            "means",
            "widths",
            "prior",
            "temperature",
            "rate",
            "of widths",
            "own biases",
            "validation",
            "test",
            "shifted",
        ]
    ]
    for one in sorted(whole, key=lambda one: rank(found["valid"][one])):
        starts = [
            f"Normal(1, {one.spread:g})",
            *(f"{n:g}" for n in (one.width, one.prior, one.temperature, one.rate)),
        ]
        rates = [f"x {one.faster:g}", "yes" if one.bias else "no"]
        rows.append(
            [
                *starts,
                *rates,
                *("{1:+.3f}, {0}".format(*rank(found[of][one])) for of in found),
            ]
        )
    return between(text, MARKS, "\n".join([told, "", *table(rows)]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-seconds", type=float, default=math.inf)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="The KL is")
    kept, end = Cells(args.out), time.monotonic() + args.limit_seconds
    done = {(c["task"], c["seed"], tuple(c["candidate"] or ())) for c in kept.lines}
    for seed, task in product(range(SEEDS), TASKS):
        left = [
            c for c in (None, *CANDIDATES) if (task, seed, tuple(c or ())) not in done
        ]
        for line in (
            cells(task, seed, args.data, left)
            if left and time.monotonic() < end
            else ()
        ):
            kept.add([line])
    if args.page:
        args.page.write_text(page(args.page.read_text(), kept.lines))


if __name__ == "__main__":
    main()
