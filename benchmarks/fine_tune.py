"""Posteriors by fine-tuning beside the usual ways, on images and text: the cells of docs/fine_tuning.md.

    python benchmarks/fine_tune.py --data DATA --work WORK --out OUT.jsonl [--workers 10] [--limit-seconds 200]

A base is trained once (two networks on CIFAR-100, a language model on IMDB's reviews), then every method takes it to a
new task with few labels, five seeds each. A seed draws the labels, starts the head and orders the batches. Each method
has four settings to choose from; the one of lowest NLL on 2,000 validation rows, with labels of a seed of their own, is
used for all five. Test rows choose nothing.

- plain: all weights, AdamW; MC dropout: the same with dropout in front of some layers.
- last-layer Laplace: of the plain network, a full covariance up to 1,024 weights, then a Kronecker product; linearised,
  64 draws.
- rank-1 Laplace: `sb.laplace` of the plain network, factors of all layers; linearised, 64 draws.
- rank-1 fine-tuned: `sb.Rank1` with four members over the frozen base, norms and a head. Either every row goes through
  all members, or each through one of them, which is a quarter of the work, for twice as many steps.
- deep ensemble: four plain networks; its first is "plain". All start from the same base.
- LoRA ensemble: four times adapters of rank 8 of all dense layers and convolutions, norms and a head.

A cell is one JSON line: task, method, seed (-1 where a setting was tried, which is `choice`), metrics, seconds from the
base on, bytes kept beside the base. A call that stops goes on where it was.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
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

MEMBERS, DRAWS = 4, 64
DROPPED = "conv2|fc|dense|o_proj|down_proj|score"  # layers whose inputs MC dropout drops
NORMS = r".*norm\d?|.*\.bn\d|.*\.downsample\.1"
LAST = {"over": "weights", "layers": "last"}
SETTINGS: dict[
    str, list[Any]
] = {  # rates; rates and shares; rates, temperatures and whether rows are split; rates; priors
    "plain": [1e-4, 3e-4, 1e-3, 3e-3],
    "MC dropout": [(3e-4, 0.1), (1e-3, 0.1), (3e-4, 0.3), (1e-3, 0.3)],
    "rank-1 fine-tuned": [(3e-3, 0.01, True), (1e-2, 0.01, True), (1e-2, 0.001, True), (1e-2, 0.001, False)],
    "LoRA ensemble": [3e-4, 1e-3, 3e-3, 1e-2],
    "last-layer Laplace": ["layer", 0.03, 0.1, 0.3],
    "rank-1 Laplace": [0.05, 0.1, 0.2, 0.4],
}
TRAINED, FITTED = list(SETTINGS)[:4], list(SETTINGS)[4:]
Predict = Callable[[Tensor], sb.Prediction]


def train(
    net: nn.Module, rows: Rows, task: Task, rate: float, seed: int, temperature: float = 1.0, split: bool = True
) -> None:
    """The same for all methods: AdamW, warm-up and cosine, cross-entropy and, of a posterior, its KL.

    With `split`, a bare call gives each row to one member.
    """
    torch.manual_seed(seed)
    bayes = any(hasattr(module, "posterior") for module in net.modules())
    groups = sb.param_groups(net, 1e-2) if bayes else [{"params": [p for p in net.parameters() if p.requires_grad]}]
    optimizer = torch.optim.AdamW(groups, rate, weight_decay=1e-2)
    plan = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, task.steps + 1, pct_start=0.1)
    net.train()
    for step, index in enumerate(batches(len(rows[0]), task.batch, task.steps, seed)):
        x, y = augmented(rows[0][index]), rows[1][index]
        if bayes:
            weight = min(1.0, 2 * step / task.steps)
            nll = sb.categorical(net(x)[None] if split else sb.sample(net, x), y)
            loss = sb.elbo(nll, net, len(rows[0]), weight, temperature=temperature).loss
        else:
            loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        plan.step()
    net.eval()


class Bench:
    """One task, with everything that its cells need."""

    def __init__(self, task: Task, work: Path, scale: Scale) -> None:
        steps = max(2, round(task.steps * scale.steps))
        self.task = replace(task, labels=min(task.labels, scale.tests), steps=steps)
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
        net = sb.bayesianize(self.net(10 * seed), sb.MCDropout(rate=setting[1]), include=DROPPED)
        train(net, self.rows(seed), self.task, setting[0], 10 * seed)
        return partial(predicted, net, draws=16), size(net.state_dict().values())

    def rank1(self, seed: int, setting: tuple[float, float, bool]) -> tuple[Predict, int]:
        """Rank-1 factors of all layers; norms train, too, as they do beside adapters."""
        config = sb.Rank1(members=MEMBERS, prior=sb.Normal(1.0, 0.1))
        head = rf"{self.head}|{NORMS}"
        net = sb.bayesianize(self.net(10 * seed), config, train="posterior+head", head=head)
        rate, temperature, split = setting
        task = replace(self.task, steps=self.task.steps * (2 if split else 1))
        train(net, self.rows(seed), task, rate, 10 * seed, temperature, split)
        return partial(predicted, net, draws=4), saved_size(net)

    def lora(self, seed: int, rate: float) -> tuple[Predict, int]:
        nets, kept = [], 0
        for member in range(MEMBERS):
            net = with_adapters(self.net(10 * seed + member), self.head)
            train(net, self.rows(seed), self.task, rate, 10 * seed + member)
            kept += size([p for p in net.parameters() if p.requires_grad]) + size(net.buffers())
            nets.append(net)
        return partial(predicted, sb.ensemble(nets)), kept

    def laplace(self, net: nn.Module, seed: int, method: str, setting: Any) -> tuple[Predict, int]:
        """A posterior around a plain network, by one pass over the labels as they are."""
        own, (x, y) = copy.deepcopy(net), self.rows(seed)
        last = method == "last-layer Laplace"
        prior = setting if isinstance(setting, str) else sb.Normal(0.0 if last else 1.0, setting)
        data = list(zip(x.split(250), y.split(250), strict=True))
        sb.laplace(own, data, prior=prior, **(LAST if last else {}))
        return partial(linearised, own), size(own.state_dict().values())


def predicted(net: nn.Module, x: Tensor, draws: int = 1) -> sb.Prediction:
    parts = [sb.predict(net, part, draws, keep_samples=False, seed=0) for part in x.split(1000)]
    return sb.Prediction.joined(parts)


def linearised(net: nn.Module, x: Tensor) -> sb.Prediction:
    return sb.Prediction.joined([sb.predict_linearised(net, part, draws=DRAWS, seed=0) for part in x.split(500)])


def size(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def saved_size(net: nn.Module) -> int:
    with tempfile.TemporaryDirectory() as folder:
        return sum(file.stat().st_size for file in sb.save(net, f"{folder}/adapter").rglob("*") if file.is_file())


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
    nlls = {f"nll {name}": -float(p.log_prob(y).mean()) for name, (p, y) in shifted.items()}
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


def cell(task: str, method: str, seed: int, metrics: dict[str, float], seconds: float, kept: int, **more: Any) -> Any:
    return {"task": task, "method": method, "seed": seed, "metrics": metrics, "seconds": seconds, "bytes": kept} | more


def deterministic(net: nn.Module) -> Predict:
    return partial(predicted, sb.bayesianize(copy.deepcopy(net), sb.Deterministic()))


def tried(task: str, method: str, work: Path, scale: Scale, choice: int) -> list[Any]:
    """One setting of a method that trains, on validation rows."""
    bench, setting, began = Bench(TASKS[task], work, scale), SETTINGS[method][choice], clock()
    if method == "plain":
        net, kept = bench.plain(99, setting)
        predict = deterministic(net)
    else:
        way = {"MC dropout": bench.dropout, "rank-1 fine-tuned": bench.rank1, "LoRA ensemble": bench.lora}[method]
        predict, kept = way(99, setting)
    return [
        cell(task, method, -1, {"nll": nll_of(predict, bench.material.valid)}, clock() - began, kept, choice=choice)
    ]


def tried_fits(task: str, work: Path, scale: Scale, rate: float) -> list[Any]:
    """All priors of both Laplace approximations, around one plain network, on validation rows."""
    bench = Bench(TASKS[task], work, scale)
    net, _ = bench.plain(99, rate)
    found = []
    for method in FITTED:
        for choice, setting in enumerate(SETTINGS[method]):
            began = clock()
            predict, kept = bench.laplace(net, 99, method, setting)
            metrics = {"nll": nll_of(predict, bench.material.valid)}
            found.append(cell(task, method, -1, metrics, clock() - began, kept, choice=choice))
    return found


def judged(task: str, work: Path, scale: Scale, seed: int, chosen: dict[str, int]) -> list[Any]:
    """All methods on the labels of one seed, on test rows."""
    bench, found = Bench(TASKS[task], work, scale), []
    setting = {method: SETTINGS[method][choice] for method, choice in chosen.items()}
    began = clock()
    net, kept = bench.plain(seed, setting["plain"])
    plain_seconds = clock() - began
    found.append(cell(task, "plain", seed, scores(deterministic(net), bench.material), plain_seconds, kept))
    for method in FITTED:
        began = clock()
        predict, own = bench.laplace(net, seed, method, setting[method])
        passed = clock() - began
        metrics = scores(predict, bench.material) | {"pass_seconds": passed}
        found.append(cell(task, method, seed, metrics, plain_seconds + passed, own))
    for method, way in (
        ("rank-1 fine-tuned", bench.rank1),
        ("MC dropout", bench.dropout),
        ("LoRA ensemble", bench.lora),
    ):
        began = clock()
        predict, own = way(seed, setting[method])
        seconds = clock() - began
        found.append(cell(task, method, seed, scores(predict, bench.material), seconds, own))
    began = clock()
    nets = [net, *(bench.plain(seed, setting["plain"], member)[0] for member in range(1, MEMBERS))]
    seconds = plain_seconds + clock() - began
    metrics = scores(partial(predicted, sb.ensemble(nets)), bench.material)
    found.append(cell(task, "deep ensemble", seed, metrics, seconds, MEMBERS * kept))
    return found


class Cells:
    """The lines of a file, as they come."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def add(self, lines: list[Any]) -> None:
        with self.file.open("a") as out:
            out.writelines(json.dumps(line) + "\n" for line in lines)
        self.lines += lines

    def has(self, task: str, method: str, seed: int, choice: int | None = None) -> bool:
        wanted = (task, method, seed, choice)
        return any((c["task"], c["method"], c["seed"], c.get("choice")) == wanted for c in self.lines)

    def best(self, task: str, method: str) -> int:
        """The setting of lowest NLL on validation rows; NaN never wins."""
        tries = [c for c in self.lines if (c["task"], c["method"], c["seed"]) == (task, method, -1)]
        return int(
            min(tries, key=lambda c: (c["metrics"]["nll"] != c["metrics"]["nll"], c["metrics"]["nll"]))["choice"]
        )


def begin() -> None:
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True


def run_all(pool: ProcessPoolExecutor, jobs: list[tuple[Any, ...]], cells: Cells, until: float) -> bool:
    """Run jobs side by side, the first ones first, and keep what they give; whether all of them were run."""
    left, running, clean = list(jobs), set[Future[Any]](), True
    workers: int = pool._max_workers  # type: ignore[attr-defined]
    while left or running:
        while left and len(running) < workers and time.monotonic() < until:
            running.add(pool.submit(*left.pop(0)))
        if not running:
            return False
        done, running = wait(running, return_when=FIRST_COMPLETED)
        for job in done:
            if job.exception() is not None:
                print(f"LOST: {job.exception()!r}", flush=True)
                clean = False
            elif isinstance(job.result(), list):
                cells.add(job.result())
    return clean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "work", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--limit-seconds", type=float, default=600.0)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="a trial of the code: tiny networks, few steps")
    args = parser.parse_args()
    scale, until, work = SMOKE if args.smoke else FULL, time.monotonic() + args.limit_seconds, args.work
    work.mkdir(parents=True, exist_ok=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    cells, tasks = Cells(args.out), args.tasks
    bases = list(dict.fromkeys(TASKS[task].base for task in tasks))
    kinds = {"text" if base == "llama" else "images" for base in bases}
    began = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {what}", flush=True)

    with ProcessPoolExecutor(args.workers, get_context("spawn"), begin) as pool:
        run_all(pool, [(prepare, kind, args.data, work, scale) for kind in sorted(kinds)], cells, until)
        say("data")
        run_all(pool, [(train_base, b, work, scale) for b in bases if not (work / f"{b}.pt").exists()], cells, until)
        say("bases")
        tries = [(tried, task, m, work, scale, i) for task in tasks for m in TRAINED for i in range(4)]
        run_all(pool, [job for job in tries if not cells.has(job[1], job[2], -1, job[5])], cells, until)
        say("settings")
        fits = [
            (tried_fits, task, work, scale, SETTINGS["plain"][cells.best(task, "plain")])
            for task in tasks
            if not cells.has(task, FITTED[-1], -1, 3)
        ]
        run_all(pool, fits, cells, until)
        say("priors")
        chosen = {task: {method: cells.best(task, method) for method in SETTINGS} for task in tasks}
        jobs = [(judged, task, work, scale, seed, chosen[task]) for seed in range(args.seeds) for task in tasks]
        done = run_all(pool, [j for j in jobs if not cells.has(j[1], "deep ensemble", j[4])], cells, until)
        say("all cells are there" if done else "STOPPED: call again to go on")


if __name__ == "__main__":
    main()
