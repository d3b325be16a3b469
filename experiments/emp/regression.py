"""The EMP paper's regressions (Chang et al. 2019, Appendix D.7): ECMP, EMP, dropout and an explicit ensemble on UCI data.

    python experiments/emp/regression.py                                       yacht, three splits, as in the paper
    python experiments/emp/regression.py --data yacht concrete --splits $(seq 0 19) --workers 16 --data-dir DIR

Prints Tables 12 and 13 beside the paper's numbers and writes results/emp/<data>.json. Every run, a set's split with one method, has a
seed of its own, so neither the order of the runs nor the number of workers changes a number.

Sizes: S draws, K components or members, M test rows, P features, T targets.
"""

import argparse
import json
import math
import platform
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from readers import Split, Table, read, split
from tables import METHODS, RESULTS, show
from torch import Tensor, nn

import slimbayes as sb
from slimbayes import models

ROWS = 256  # test rows that are predicted at once: all their draws are kept for the density


@dataclass(frozen=True)
class Setting:
    """Everything that is chosen; README.md says which of it the paper leaves open."""

    epochs: int = 4000
    batch: int = 100
    lr: float = 1e-3  # Adam's default
    weight_decay: float = 0.01
    decay: Literal["l2", "decoupled"] = "l2"
    fit_precision: float = 2.0  # the loss is fit_precision / 2 times the squared error of standardised targets
    members: Literal["mean", "sum"] = "mean"  # how the losses of an ensemble's members are joined
    precision: float = 0.1  # tau_output of the density, in the targets' own units
    components: int = 5  # K, also of the ensemble
    scale: float = 0.2  # batch norm's scales start here
    rate: float = 0.005
    draws: int = 10_000  # S


class Job(NamedTuple):
    """One run."""

    table: Table
    index: int  # of the split
    method: str
    setting: Setting
    seed: int

    @property
    def hidden(self) -> int:
        return 100 if self.table.name.startswith("protein") else 50

    @property
    def steps(self) -> int:
        return self.setting.epochs * math.ceil(round(0.9 * len(self.table.x)) / self.setting.batch)


# Training --------------------------------------------------------------------------------------------------------------


def build(method: str, inputs: int, outputs: int, hidden: int, setting: Setting) -> nn.Module:
    """The paper's net for a method. Only batch norm is patched; the ensemble's nets have none, dropout's have dropout in its places."""
    if method == "Ensemble":
        return sb.bayesianize(
            models.regression_net(inputs, outputs, hidden, norm=False), sb.Ensemble(members=setting.components)
        )
    if method == "Dropout":
        first, last = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)
        net = nn.Sequential(nn.Dropout(setting.rate), first, nn.ReLU(), nn.Dropout(setting.rate), last)
        return sb.bayesianize(net, sb.MCDropout())
    # tau=None leaves the prior of all components to the one weight decay, as the paper does in practice (Appendix C.1).
    config = sb.ModelPatch(
        components=setting.components, cross=method == "ECMP", patch="norm", init=setting.scale, tau=None
    )
    return sb.bayesianize(models.regression_net(inputs, outputs, hidden), config)


def train(net: nn.Module, data: Split, setting: Setting) -> None:
    """Adam with one draw a step; the ensemble's members all see every batch."""
    groups = sb.param_groups(net, weight_decay=setting.weight_decay)
    optimizer = torch.optim.Adam(groups, lr=setting.lr, decoupled_weight_decay=setting.decay == "decoupled", fused=True)
    noise = torch.tensor(setting.fit_precision**-0.5)
    factor = sb.members(net) if setting.members == "sum" else 1
    net.train()
    for x, y in _batches(data, setting):
        optimizer.zero_grad()
        (factor * sb.gaussian(sb.sample(net, x), y, noise)).backward()
        optimizer.step()


def _batches(data: Split, setting: Setting) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(setting.epochs):
        order = torch.randperm(len(data.x))
        yield from zip(data.x[order].split(setting.batch), data.y[order].split(setting.batch), strict=True)


# Prediction ------------------------------------------------------------------------------------------------------------


def errors_and_densities(prediction: sb.Prediction, y: Tensor) -> tuple[Tensor, Tensor]:
    """Squared error of the predictive mean, and log density of each target under the mixture of all draws, logsumexp_s - log S.

    Shape: y (M, T); returns two tensors (M, T).
    """
    return (prediction.mean - y).square(), prediction.log_prob(y)


def evaluate(net: nn.Module, data: Split, setting: Setting) -> dict[str, float]:
    """RMSE and log predictive density in the targets' own units, averaged over rows and target dimensions."""
    draws = 1 if sb.members(net) > 1 else setting.draws  # an ensemble is K functions, each of which counts alike
    scale = setting.precision**-0.5 / data.y_std
    parts = []
    for x, y in zip(data.test_x.split(ROWS), data.test_y.split(ROWS), strict=True):
        prediction = sb.predict(net, x, draws=draws, chunk=2**16, likelihood="gaussian", scale=scale)
        parts.append(errors_and_densities(prediction.rescaled(data.y_mean, data.y_std), y))
    squares, densities = (torch.cat(part).double() for part in zip(*parts, strict=True))
    return {"rmse": squares.mean().sqrt().item(), "lpd": densities.mean().item()}


def run(job: Job) -> dict[str, Any]:
    """Train and evaluate one net; times are those of the processor, which other work on the machine does not change."""
    torch.manual_seed(1000 * job.seed + job.index)
    data = split(job.table, job.index)
    net = build(job.method, data.x.shape[1], data.y.shape[1], job.hidden, job.setting)
    start = time.process_time()
    train(net, data, job.setting)
    middle = time.process_time()
    scores = evaluate(net, data, job.setting)
    times = {
        "ms_per_step": 1000 * (middle - start) / max(job.steps, 1),
        "predict_seconds": time.process_time() - middle,
    }
    return {"data": job.table.name, "split": job.index, "method": job.method} | scores | times


# All runs --------------------------------------------------------------------------------------------------------------


def run_all(jobs: list[Job], workers: int) -> Iterator[dict[str, Any]]:
    """Results as they come; with several workers each has one thread, and the longest runs start first."""
    if workers == 1:
        yield from map(run, jobs)
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures = [pool.submit(run, job) for job in sorted(jobs, key=lambda job: -job.steps)]
        for future in as_completed(futures):
            yield future.result()


def experiment(
    jobs: list[Job], workers: int, out: Path | None = None, earlier: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The record of all runs, written to a file after each of them; runs of an earlier record are kept and not repeated."""
    start, record = time.perf_counter(), _empty(jobs, workers)
    runs: list[dict[str, Any]] = []
    if earlier is not None:
        record, runs = _extended(earlier, record), earlier["runs"]
    done = {(r["data"], r["split"], r["method"]) for r in runs}
    jobs = [job for job in jobs if (job.table.name, job.index, job.method) not in done]
    sets, before, total = list(record["data"]), record["seconds"], len(runs) + len(jobs)
    for result in run_all(jobs, workers):
        runs = sorted([*runs, result], key=lambda r: (sets.index(r["data"]), r["split"], METHODS.index(r["method"])))
        record |= {"seconds": round(before + time.perf_counter() - start, 1), "runs": runs}
        if out is not None:
            write(record, out)
        told = f"rmse {result['rmse']:.3f}, lpd {result['lpd']:.3f}, {result['ms_per_step']:.2f} ms a step"
        print(f"{len(runs)}/{total} {result['data']} split {result['split']} {result['method']}: {told}", flush=True)
    return record


def _empty(jobs: list[Job], workers: int) -> dict[str, Any]:
    """Everything about a record but its runs."""
    tables = {job.table.name: job for job in jobs}
    return {
        "setting": asdict(jobs[0].setting),
        "seed": jobs[0].seed,
        "methods": [method for method in METHODS if method in {job.method for job in jobs}],
        "data": {
            name: {
                "rows": len(job.table.x),
                "features": job.table.x.shape[1],
                "targets": job.table.y.shape[1],
                "hidden": job.hidden,
            }
            for name, job in tables.items()
        },
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "slimbayes": sb.__version__},
        "workers": workers,
        "seconds": 0.0,
    }


def _extended(earlier: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """An earlier record with the sets and methods of a new one."""
    for key in ("setting", "seed"):
        if earlier[key] != record[key]:
            raise ValueError(
                f"--resume needs the same {key} as before: the file has {earlier[key]}, this run {record[key]}."
            )
    methods = [method for method in METHODS if method in {*earlier["methods"], *record["methods"]}]
    return earlier | {"data": earlier["data"] | record["data"], "methods": methods}


def write(record: dict[str, Any], out: Path) -> None:
    """Write to a neighbour and rename it, so that a run that is stopped leaves a whole file."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(out)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="The EMP paper's regressions on UCI data.")
    parser.add_argument("--data", nargs="+", default=["yacht"], help="names of sets, such as yacht or concrete")
    parser.add_argument(
        "--splits", nargs="+", type=int, default=[0, 1, 2], help="which of the standard splits; the benchmark has 20"
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--epochs", type=int, default=Setting.epochs)
    parser.add_argument("--draws", type=int, default=Setting.draws)
    parser.add_argument("--weight-decay", type=float, default=Setting.weight_decay)
    parser.add_argument(
        "--data-dir", type=Path, help="folder with uci/<name>.npz, before $SLIMBAYES_DATA and the shipped sets"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes, each with one thread")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, help="instead of results/emp/<data>.json, or regression.json for several sets"
    )
    parser.add_argument("--resume", action="store_true", help="keep the runs that the file has and add those it lacks")
    args = parser.parse_args(argv)
    setting = Setting(epochs=args.epochs, draws=args.draws, weight_decay=args.weight_decay)
    tables = [read(name, args.data_dir) for name in dict.fromkeys(args.data)]
    jobs = [
        Job(t, index, method, setting, args.seed)
        for t in tables
        for index in dict.fromkeys(args.splits)
        for method in args.methods
    ]
    out = args.out or RESULTS / f"{tables[0].name if len(tables) == 1 else 'regression'}.json"
    record = experiment(jobs, args.workers, out, json.loads(out.read_text()) if args.resume and out.exists() else None)
    print(f"\n{show(record)}\n\n{record['seconds']} seconds, written to {out}")
    return record


if __name__ == "__main__":
    main()
