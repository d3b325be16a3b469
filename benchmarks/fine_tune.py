"""Posteriors by fine-tuning beside the usual ways, on images and text: the cells of docs/fine_tuning.md.

    python benchmarks/fine_tune.py --data DATA --work WORK --out OUT.jsonl [--workers 8] [--limit-seconds 200]
        [--only "WRN|ResNet"]

A base is trained once (two networks on CIFAR-100, a language model on IMDB's reviews), then every method takes it to a
new task with few labels, five seeds each. A seed draws the labels, starts the head and orders the batches. Each method
has two settings to choose from, plain three, rank-1 fine-tuned four (two rates, two priors); the one of lowest
NLL on 2,000 validation rows, with labels of a seed of their own, is used for all five (of LoRA's ensemble with two
members). Test rows choose nothing. All train in bfloat16 (autocast) and predict in single precision.

- plain: all weights, AdamW; MC dropout: the same with dropout in front of some layers.
- last-layer Laplace: of the plain network, a full covariance up to 1,024 weights, then a Kronecker product; linearised,
  64 draws.
- rank-1 Laplace: `sb.laplace` of the plain network, factors of all layers; linearised, 64 draws.
- rank-1 fine-tuned: `sb.Rank1` with four members over the frozen base, norms and a head. Each row goes through one
  member; batches have twice as many rows.
- rank-1 after plain: the same over the plain network, all of it frozen, for half as many steps again.
- deep ensemble: four plain networks; its first is "plain". All start from the same base.
- LoRA ensemble: four times adapters of rank 8 of all dense layers and convolutions, norms and a head.

A cell is one JSON line: task, method, seed (-1 where a setting was tried, which is `choice`), metrics, seconds from the
base on, bytes kept beside the base. A call that stops goes on where it was.
"""

from __future__ import annotations

import argparse
import copy
import re
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import cells
import torch
from cells import Workers, run_all
from fine_tune_tasks import (
    DEVICE,
    FULL,
    HEADS,
    SMOKE,
    TASKS,
    Material,
    Rows,
    Scale,
    Task,
    augmented,
    batches,
    labelled,
    material_of,
    prepare,
    started,
    train_base,
    with_adapters,
)  # fmt: skip
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.metrics import AUROC, calibration

Predict = Callable[[Tensor], sb.Prediction]
MEMBERS, DRAWS, TEMPERATURE = 4, 64, 0.1
WIDTHS = 0.1  # learning rate of posteriors' widths
DROPPED = (
    "conv2|fc|dense|o_proj|down_proj|score"  # layers whose inputs MC dropout drops
)
NORMS = r".*norm\d?|.*\.bn\d|.*\.downsample\.1"
LAST = {"over": "weights", "layers": "last"}
SETTINGS: dict[str, list[Any]] = {
    "plain": [3e-5, 1e-4, 3e-4],  # rates
    "MC dropout": [(1e-4, 0.1), (3e-4, 0.3)],  # rates and shares
    "rank-1 fine-tuned": list(product([3e-3, 1e-2], [0.1, 0.2])),  # rates and priors
    "LoRA ensemble": [1e-3, 3e-3],  # rates
    "last-layer Laplace": ["layer", 0.1],  # priors
    "rank-1 Laplace": [0.15, 0.3],
    "rank-1 after plain": [0.1, 0.2],
}
TRAINED, FITTED = list(SETTINGS)[:4], list(SETTINGS)[4:]


# --- what is measured ---


def size(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def saved_size(net: nn.Module) -> int:
    with tempfile.TemporaryDirectory() as folder:
        return sum(
            file.stat().st_size
            for file in sb.save(net, f"{folder}/adapter").rglob("*")
            if file.is_file()
        )


def nll_of(predict: Predict, rows: Rows) -> float:
    return -float(predict(rows[0]).log_prob(rows[1]).mean())


def scores(predict: Predict, material: Material) -> dict[str, float]:
    """NLL, ECE, accuracy and seconds on clean rows, NLL and ECE on shifted ones, and how well entropy tells others."""
    began = clock()
    clean = predict(material.clean[0])
    seconds = clock() - began
    target = material.clean[1]
    found = {
        "nll": -float(clean.log_prob(target).mean()),
        "ece": calibration(clean, target).ece,
        "accuracy": float((clean.label == target).float().mean()),
        "predict_seconds": seconds,
    }
    shifted = {name: (predict(x), y) for name, (x, y) in material.shifted.items()}
    nlls = {
        f"nll {name}": -float(p.log_prob(y).mean()) for name, (p, y) in shifted.items()
    }
    eces = [calibration(p, y).ece for p, y in shifted.values()]
    other = predict(material.other)
    metric = AUROC()
    for p, is_other in ((clean, 0), (other, 1)):
        metric.update(p.total.cpu(), torch.full((len(p.total),), is_other))
    return (
        found
        | nlls
        | {
            "shifted_nll": sum(nlls.values()) / len(nlls),
            "shifted_ece": sum(eces) / len(eces),
            "auroc": float(metric.compute()),
        }
    )


def clock() -> float:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class Cells(cells.Cells):
    """Those of tasks, methods and seeds."""

    def has(self, task: str, method: str, seed: int, choice: int | None = None) -> bool:
        wanted = (task, method, seed, choice)
        return any(
            (c["task"], c["method"], c["seed"], c.get("choice")) == wanted
            for c in self.lines
        )

    def best(self, task: str, method: str) -> int:
        """The setting of lowest NLL on validation rows; NaN never wins; without any try it is the first."""
        tries = [
            c
            for c in self.lines
            if (c["task"], c["method"], c["seed"]) == (task, method, -1)
        ]
        found = min(
            tries,
            key=lambda c: (
                c["metrics"]["nll"] != c["metrics"]["nll"],
                c["metrics"]["nll"],
            ),
            default={},
        )
        return int(found.get("choice", 0))


# --- methods ---


def train(net: nn.Module, rows: Rows, task: Task, rate: float, seed: int) -> None:
    """The same for all methods: AdamW, warm-up and cosine, cross-entropy and, of a posterior, its KL.

    A bare call gives each row to one member.
    """
    torch.manual_seed(seed)
    bayes = any(hasattr(module, "posterior") for module in net.modules())
    if bayes:
        groups = sb.param_groups(net, 1e-2, rate, scale_lr_multiplier=WIDTHS / rate)
    else:
        groups = [
            {"params": [p for p in net.parameters() if p.requires_grad], "lr": rate}
        ]
    optimizer = torch.optim.AdamW(groups, rate, weight_decay=1e-2)
    rates = [group["lr"] for group in groups]
    plan = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rates, task.steps + 1, pct_start=0.1
    )
    net.train()
    for step, index in enumerate(batches(len(rows[0]), task.batch, task.steps, seed)):
        with torch.autocast(DEVICE, torch.bfloat16):
            logits = net(augmented(rows[0][index])).float()
        if bayes:
            nll = sb.categorical(logits[None], rows[1][index])
            weight = min(1.0, 2 * step / task.steps)
            loss = sb.elbo(nll, net, len(rows[0]), weight, temperature=TEMPERATURE).loss
        else:
            loss = nn.functional.cross_entropy(logits, rows[1][index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        plan.step()
    net.eval()


class Bench:
    """One task, with everything that its cells need."""

    def __init__(self, task: Task, work: Path, scale: Scale) -> None:
        steps = max(2, round(task.steps * scale.steps))
        self.task = replace(task, labels=min(task.labels, scale.rows), steps=steps)
        self.work, self.scale, self.head = work, scale, HEADS[task.base]
        self.material: Material = material_of(task.base, work)

    def net(self, seed: int) -> nn.Module:
        return started(self.task.base, self.work, self.scale, seed)

    def rows(self, seed: int) -> Rows:
        return labelled(self.material, self.task, seed)

    def plain(self, seed: int, rate: float, member: int = 0) -> tuple[nn.Module, int]:
        net = self.net(10 * seed + member)
        train(net, self.rows(seed), self.task, rate, 10 * seed + member)
        return net, size(net.state_dict().values())

    def dropout(self, seed: int, setting: tuple[float, float]) -> tuple[Predict, int]:
        net = sb.bayesianize(
            self.net(10 * seed), sb.MCDropout(rate=setting[1]), include=DROPPED
        )
        train(net, self.rows(seed), self.task, setting[0], 10 * seed)
        return partial(predicted, net, draws=16), size(net.state_dict().values())

    def rank1(self, seed: int, setting: tuple[float, float]) -> tuple[Predict, int]:
        """Rank-1 factors of all layers; norms train, too, as they do beside adapters."""
        rate, prior = setting
        head = rf"{self.head}|{NORMS}"
        net = sb.bayesianize(
            self.net(10 * seed), factors(prior), train="posterior+head", head=head
        )
        train(
            net,
            self.rows(seed),
            replace(self.task, batch=2 * self.task.batch),
            rate,
            10 * seed,
        )
        return partial(predicted, net, draws=4 * MEMBERS), saved_size(net)

    def lora(
        self, seed: int, rate: float, members: int = MEMBERS
    ) -> tuple[Predict, int]:
        nets, kept = [], 0
        for member in range(members):
            net = with_adapters(self.net(10 * seed + member), self.head)
            train(net, self.rows(seed), self.task, rate, 10 * seed + member)
            kept += size([p for p in net.parameters() if p.requires_grad]) + size(
                net.buffers()
            )
            nets.append(net)
        return partial(predicted, sb.ensemble(nets)), kept

    def way(self, method: str) -> Callable[[int, Any], tuple[Predict, int]]:
        return {
            "MC dropout": self.dropout,
            "rank-1 fine-tuned": self.rank1,
            "LoRA ensemble": self.lora,
        }[method]

    def fitted(
        self, net: nn.Module, seed: int, method: str, setting: Any
    ) -> tuple[Predict, int]:
        """A posterior around a plain network: by one pass over the labels as they are, or half as many steps again."""
        own, (x, y) = copy.deepcopy(net), self.rows(seed)
        if method == "rank-1 after plain":
            sb.bayesianize(own, factors(setting), train="posterior")
            task = replace(
                self.task, steps=self.task.steps // 2, batch=2 * self.task.batch
            )
            train(own, (x, y), task, 1e-3, 10 * seed)
            return partial(predicted, own, draws=4 * MEMBERS), size(
                net.state_dict().values()
            ) + saved_size(own)
        last = method == "last-layer Laplace"
        prior = (
            setting
            if isinstance(setting, str)
            else sb.Normal(0.0 if last else 1.0, setting)
        )
        data = list(zip(x.split(250), y.split(250), strict=True))
        sb.laplace(own, data, prior=prior, **(LAST if last else {}))
        return partial(linearised, own), size(net.state_dict().values()) + saved_size(
            own
        )


def factors(prior: float) -> sb.Rank1:
    """Members that begin near the base."""
    return sb.Rank1(
        members=MEMBERS,
        prior=sb.Normal(1.0, prior),
        mean_init=sb.Normal(1.0, 0.01),
        scale_init=0.01,
    )


def predicted(net: nn.Module, x: Tensor, draws: int | None = None) -> sb.Prediction:
    parts = [
        sb.predict(net, part, draws, keep_samples=False, seed=0)
        for part in x.split(1000)
    ]
    return sb.Prediction.joined(parts)


def linearised(net: nn.Module, x: Tensor) -> sb.Prediction:
    return sb.Prediction.joined(
        [sb.predict_linearised(net, part, draws=DRAWS, seed=0) for part in x.split(500)]
    )


def cell(
    task: str,
    method: str,
    seed: int,
    metrics: dict[str, float],
    seconds: float,
    kept: int,
    **more: Any,
) -> Any:
    return {
        "task": task,
        "method": method,
        "seed": seed,
        "metrics": metrics,
        "seconds": seconds,
        "bytes": kept,
    } | more


def deterministic(net: nn.Module) -> Predict:
    return partial(predicted, sb.bayesianize(copy.deepcopy(net), sb.Deterministic()))


def tried(task: str, method: str, work: Path, scale: Scale, choice: int) -> list[Any]:
    """One setting of a method that trains, on validation rows."""
    bench, setting, began = (
        Bench(TASKS[task], work, scale),
        SETTINGS[method][choice],
        clock(),
    )
    if method == "plain":
        net, kept = bench.plain(99, setting)
        predict = deterministic(net)
    else:
        predict, kept = (
            bench.lora(99, setting, 2)
            if method == "LoRA ensemble"
            else bench.way(method)(99, setting)
        )
    return [
        cell(
            task,
            method,
            -1,
            {"nll": nll_of(predict, bench.material.valid)},
            clock() - began,
            kept,
            choice=choice,
        )
    ]


def tried_fits(task: str, work: Path, scale: Scale, rate: float) -> list[Any]:
    """All priors of what is fitted around a plain network, on validation rows."""
    bench = Bench(TASKS[task], work, scale)
    net, _ = bench.plain(99, rate)
    found = []
    for method in FITTED:
        for choice, setting in enumerate(SETTINGS[method]):
            began = clock()
            predict, kept = bench.fitted(net, 99, method, setting)
            metrics = {"nll": nll_of(predict, bench.material.valid)}
            found.append(
                cell(task, method, -1, metrics, clock() - began, kept, choice=choice)
            )
    return found


def judged(
    task: str, method: str, work: Path, scale: Scale, seed: int, setting: Any
) -> list[Any]:
    """A method that trains on its own, on the labels of one seed and on test rows."""
    bench, began = Bench(TASKS[task], work, scale), clock()
    predict, kept = bench.way(method)(seed, setting)
    seconds = clock() - began
    return [
        cell(
            task,
            method,
            seed,
            scores(predict, bench.material),
            seconds,
            kept,
            setting=repr(setting),
        )
    ]


def judged_plain(
    task: str, work: Path, scale: Scale, seed: int, setting: dict[str, Any]
) -> list[Any]:
    """The plain network, what is fitted around it, and the ensemble of which it is the first."""
    bench, found, began = Bench(TASKS[task], work, scale), [], clock()
    net, kept = bench.plain(seed, setting["plain"])
    plain_seconds = clock() - began
    found.append(
        cell(
            task,
            "plain",
            seed,
            scores(deterministic(net), bench.material),
            plain_seconds,
            kept,
        )
    )
    for method in FITTED:
        began = clock()
        predict, own = bench.fitted(net, seed, method, setting[method])
        passed = clock() - began
        metrics = scores(predict, bench.material) | {
            "pass_seconds": passed,
            "pass_bytes": own - kept,
        }
        found.append(
            cell(
                task,
                method,
                seed,
                metrics,
                plain_seconds + passed,
                own,
                setting=repr(setting[method]),
            )
        )
    began = clock()
    nets = [
        net,
        *(
            bench.plain(seed, setting["plain"], member)[0]
            for member in range(1, MEMBERS)
        ),
    ]
    seconds = plain_seconds + clock() - began
    metrics = scores(partial(predicted, sb.ensemble(nets)), bench.material)
    found.append(cell(task, "deep ensemble", seed, metrics, seconds, MEMBERS * kept))
    return found


def begin() -> None:
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True


def judgements(
    kept: Cells, tasks: list[str], seeds: int, work: Path, scale: Scale
) -> list[tuple[Any, ...]]:
    """What is left to run on test rows, seed by seed."""
    jobs: list[tuple[Any, ...]] = []
    for seed, task in product(range(seeds), tasks):
        chosen = {
            method: SETTINGS[method][kept.best(task, method)] for method in SETTINGS
        }
        if not kept.has(task, "deep ensemble", seed):
            jobs.append((judged_plain, task, work, scale, seed, chosen))
        own = [m for m in TRAINED[1:] if not kept.has(task, m, seed)]
        jobs += [(judged, task, m, work, scale, seed, chosen[m]) for m in own]
    return jobs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("data", "work", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--limit-seconds", type=float, default=600.0)
    parser.add_argument(
        "--only", default="", help="tasks whose names this regular expression finds"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="a trial of the code: tiny networks, few steps",
    )
    args = parser.parse_args()
    scale, until, work = (
        SMOKE if args.smoke else FULL,
        time.monotonic() + args.limit_seconds,
        args.work,
    )
    work.mkdir(parents=True, exist_ok=True)
    kept, tasks = (
        Cells(args.out),
        [task for task in TASKS if re.search(args.only, task)],
    )
    bases = list(dict.fromkeys(TASKS[task].base for task in tasks))
    kinds = {"text" if base == "llama" else "images" for base in bases}
    began = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {what}", flush=True)

    with Workers(args.workers, begin) as pool:
        run_all(
            pool,
            [(prepare, kind, args.data, work, scale) for kind in sorted(kinds)],
            kept.add,
            until,
        )
        say("data")
        run_all(
            pool,
            [
                (train_base, b, work, scale)
                for b in bases
                if not (work / f"{b}.pt").exists()
            ],
            kept.add,
            until,
        )
        say("bases")
        tries = [
            (tried, t, m, work, scale, i)
            for t in tasks
            for m in TRAINED
            for i in range(len(SETTINGS[m]))
        ]
        run_all(
            pool,
            [job for job in tries if not kept.has(job[1], job[2], -1, job[5])],
            kept.add,
            until,
        )
        say("settings")
        rates = {task: SETTINGS["plain"][kept.best(task, "plain")] for task in tasks}
        fits = [
            (tried_fits, t, work, scale, rates[t])
            for t in tasks
            if not kept.has(t, FITTED[-1], -1, 1)
        ]
        run_all(pool, fits, kept.add, until)
        say("priors")
        done = run_all(
            pool, judgements(kept, tasks, args.seeds, work, scale), kept.add, until
        )
        say("all cells are there" if done else "STOPPED: call again to go on")


if __name__ == "__main__":
    main()
