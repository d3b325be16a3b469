"""Which defaults hold: candidates for each method on small real tasks, from scratch and from a trained net.

    python benchmarks/defaults.py --pack DIR [--root DATA]           once: the arrays, from the data sets in DATA
    python benchmarks/defaults.py --data DIR --out FILE [--workers 16] [--limit-seconds 500] [--seeds 3] [--only REGEX]
                                  [--noise FLOOR,UNIT,MOST]  other bounds of the noise, for docs/distance.md
    python benchmarks/defaults.py --page FILE [FILE ...]             writes docs/recipes.md from finished cells

A cell is a task, a start, a candidate and a seed. Each writes one line of FILE; cells that are there are not run again.
Equal epochs for all, from scratch E, from a net trained for E epochs E / 2 more (the plain net as well). Candidates
are chosen by the NLL of validation rows; test rows are only reported.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cells import Cells, Workers, lines_of
from cells import run_all as run_jobs
from defaults_candidates import CANDIDATES
from defaults_page import STARTS, compact, page, write_record
from defaults_tasks import TASKS, Rows, Task, load, pack
from torch import nn

import slimbayes as sb
from slimbayes.train import heteroscedastic, likelihoods

RECORD = Path(__file__).parents[1] / "lab" / "results" / "defaults" / "cells.json"
EARLIER = RECORD.with_name(
    "earlier.json"
)  # rounds before, of which only the validation scores are shown
PAGE = Path(__file__).parents[1] / "docs" / "recipes.md"
DRAWS = 16  # of a prediction, over all members


class Cell(NamedTuple):
    """One training."""

    task: str
    start: str
    candidate: str
    seed: int


def cells(seeds: int, only: str) -> list[Cell]:
    """All cells, seed by seed: what a time limit cuts off is the last seeds."""
    every = [
        Cell(task, start, name, seed)
        for seed in range(seeds)
        for task in sorted(
            TASKS, key=lambda name: -_weight(TASKS[name])
        )  # the longest first
        for start in STARTS
        for name, candidate in CANDIDATES.items()
        if start in candidate.starts
    ]
    return [cell for cell in every if re.search(only, "/".join(map(str, cell)))]


def _weight(task: Task) -> float:
    slow = {"imdb": 2.0, "physionet": 2.0, "cifar2k": 6.0, "digits": 3.0, "demo": 6.0}
    return task.epochs * task.rows[0] / task.batch * slow.get(task.name, 1.0)


def run_cell(cell: Cell, data: Path, trained: Path) -> list[dict[str, Any]]:
    """The line of one cell, trained and judged; numbers that are not finite are kept as such, as text."""
    start, task, candidate = (
        time.process_time(),
        TASKS[cell.task],
        CANDIDATES[cell.candidate],
    )
    rows = load(task, data, cell.seed)
    torch.manual_seed(cell.seed)
    epochs, net = task.epochs, task.network()
    if cell.start == "trained":
        epochs, net = (
            max(1, task.epochs // 2),
            trained_net(task, rows["train"], cell.seed, trained),
        )
    torch.manual_seed(cell.seed + 1)
    config = candidate.config(net, cell.start)
    sb.bayesianize(net, config)
    result: dict[str, Any] = cell._asdict()
    try:
        if cell.start == "trained":
            result["converted"] = _scores(net, task, rows["validation"])[
                "nll"
            ]  # before any training
        result["kl"], result["train_nll"] = train(
            net, task, rows["train"], epochs, candidate.temperature, cell.seed
        )
        for part in ("validation", "test"):
            result |= {
                f"{part}_{name}": value
                for name, value in _scores(net, task, rows[part]).items()
            }
    except FloatingPointError as error:
        result["error"] = str(error)[:200]
    result["seconds"] = time.process_time() - start
    return [{k: _plain(v) for k, v in result.items()}]


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 5) if math.isfinite(value) else str(value)
    return value


def trained_net(task: Task, rows: Rows, seed: int, folder: Path) -> nn.Module:
    """A plain net of this seed trained for E epochs, from the folder if a cell before has left it there."""
    torch.manual_seed(seed)
    net, file = task.network(), folder / f"{task.name}-{seed}.pt"
    if file.exists():
        net.load_state_dict(torch.load(file, weights_only=True))
        return net
    wrapped = sb.bayesianize(copy.deepcopy(net), sb.Deterministic())
    train(wrapped, task, rows, task.epochs, 1.0, seed)
    own = file.with_suffix(f".{os.getpid()}")
    torch.save(sb.debayesianize(wrapped).state_dict(), own)
    own.rename(file)  # whole or not there: others may be looking
    net.load_state_dict(torch.load(file, weights_only=True))
    return net


def train(
    net: nn.Module, task: Task, rows: Rows, epochs: int, temperature: float, seed: int
) -> tuple[float, float]:
    """AdamW, a cosine, the KL annealed over half of training; returns KL and NLL per datum of the last epoch."""
    steps = len(rows.x) // task.batch
    optimizer = torch.optim.AdamW(sb.param_groups(net, task.decay, task.lr), lr=task.lr)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * steps)
    anneal, nll_of = (
        sb.schedules.linear(max(1, epochs * steps // 2)),
        likelihoods.LIKELIHOODS[task.likelihood].nll,
    )
    generator, step, last = torch.Generator().manual_seed(seed), 0, []
    net.train()
    for epoch in range(epochs):
        for at in torch.randperm(len(rows.x), generator=generator)[
            : steps * task.batch
        ].split(task.batch):
            optimizer.zero_grad()
            nll = nll_of(sb.sample(net, rows.x[at]), rows.y[at], "average", 1.0)
            terms = sb.elbo(nll, net, len(rows.x), kl_weight=temperature * anneal(step))
            terms.loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 10.0)
            optimizer.step()
            cosine.step()
            step += 1
            if epoch == epochs - 1:
                last.append((float(terms.kl), float(terms.nll)))
    kl, nll_mean = (sum(column) / len(last) for column in zip(*last, strict=True))
    return kl, nll_mean


def _scores(net: nn.Module, task: Task, rows: Rows) -> dict[str, float]:
    """NLL and error (share of wrong labels, or RMSE) on rows as they are and shifted."""
    found: dict[str, float] = {}
    members = sb.members(net)
    for prefix, x in (("", rows.x), ("shifted_", rows.shifted)):
        pred = sb.predict(
            net,
            x,
            draws=max(1, DRAWS // members) * members,
            likelihood=task.likelihood,
            likelihood_std=1.0,
            seed=0,
        )
        found[f"{prefix}nll"] = -float(pred.log_prob(rows.y).mean())
        if task.likelihood == "heteroscedastic_gaussian":
            found[f"{prefix}error"] = float((pred.mean - rows.y).square().mean().sqrt())
        else:
            found[f"{prefix}error"] = float((pred.label != rows.y).float().mean())
    return found


# --- running many ---


def done(file: Path) -> dict[Cell, dict[str, Any]]:
    """Finished cells of a file; a line that was cut off is run again."""
    return {
        Cell(*(row[name] for name in Cell._fields)): row
        for row in lines_of(file)
        if "run" not in row
    }


def run_all(
    waiting: Sequence[Cell],
    data: Path,
    out: Path,
    workers: int,
    seconds: float,
    noise: str = "",
) -> None:
    """Run cells, in this process or in others, for so many seconds."""
    kept, until = Cells(out), time.monotonic() + seconds
    kept.add([{"run": _made_by()}])

    def keep(rows: list[dict[str, Any]]) -> None:
        kept.add(rows)
        print(json.dumps(rows)[:150], file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as trained:
        jobs = [(run_cell, cell, data, Path(trained)) for cell in waiting]
        if workers > 1:
            with Workers(workers, partial(_set_up, noise)) as pool:
                run_jobs(pool, jobs, keep, until)
            return
        _set_up(noise)
        for run, *words in jobs:
            if time.monotonic() < until:
                keep(run(*words))


def _made_by() -> dict[str, str]:
    git = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    )
    commit = git.stdout.strip() or os.environ.get("COMMIT", "unknown")
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "slimbayes": sb.__version__,
    }
    return {
        "commit": commit,
        **versions,
        "processor": platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _set_up(noise: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if noise:
        bounds = map(float, noise.split(","))
        (
            heteroscedastic.LEAST_NOISE,
            heteroscedastic.UNIT_NOISE,
            heteroscedastic.MOST_NOISE,
        ) = bounds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pack", type=Path, metavar="DIR")
    parser.add_argument(
        "--root", type=Path, help="where the data sets are; by default $SLIMBAYES_DATA"
    )
    parser.add_argument("--data", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--limit-seconds", type=float, default=math.inf)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--page",
        type=Path,
        nargs="*",
        metavar="FILE",
        help="of these, or of the kept record",
    )
    parser.add_argument(
        "--noise",
        default="",
        metavar="FLOOR,UNIT,MOST",
        help="of heteroscedastic heads",
    )
    parser.add_argument(
        "--only", default="", help="regular expression for task/start/candidate/seed"
    )
    args = parser.parse_args(arguments)
    if args.pack:
        pack(args.pack, args.root)
    if args.page:
        write_record(compact(args.page, CANDIDATES), RECORD)
    if args.page is not None:
        PAGE.write_text(
            page(json.loads(RECORD.read_text()), json.loads(EARLIER.read_text()))
        )
    if args.out:
        finished = done(args.out)
        waiting = [
            cell for cell in cells(args.seeds, args.only) if cell not in finished
        ]
        print(f"{len(waiting)} cells to run, {len(finished)} done", file=sys.stderr)
        run_all(
            waiting, args.data, args.out, args.workers, args.limit_seconds, args.noise
        )


if __name__ == "__main__":
    main()
