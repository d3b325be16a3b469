"""Step times of the k-tied paper's Table 4: a network of two dense layers under point, mean-field and 2-tied posteriors.

    python benchmarks/k_tied.py [--device cuda] [--cases paper,wide] [--modes eager,compile] [--rounds 20] [--out FILE]

A step is draw, forward, KL, backward and Adam, one draw per batch. Methods take turns, so that whatever else the machine does
slows them alike: milliseconds are medians over rounds, a ratio is the median of ratios to the point estimate within a round.
The paper measured 2.00 ms for the point estimate, 7.17 for mean-field and 6.14 for 2-tied (TensorFlow, reparameterization):
ratios of 3.6 and 3.1.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import slimbayes as sb

PRIOR = sb.Normal(0.0, 0.2)
METHODS: dict[str, sb.Config] = {
    "point": sb.Deterministic(),
    "mean-field reparam": sb.MeanField(prior=PRIOR),
    "mean-field flipout": sb.MeanField(prior=PRIOR, estimator="flipout"),
    "mean-field local": sb.MeanField(prior=PRIOR, estimator="local"),
    "2-tied reparam": sb.KTied(rank=2, prior=PRIOR),
    "2-tied flipout": sb.KTied(rank=2, prior=PRIOR, estimator="flipout"),
    "2-tied local": sb.KTied(rank=2, prior=PRIOR, estimator="local"),
}


@dataclass(frozen=True)
class Case:
    """A network inputs-hidden-outputs and the rows of its batch."""

    inputs: int
    hidden: int
    outputs: int
    rows: int

    def __str__(self) -> str:
        return f"{self.inputs}-{self.hidden}-{self.outputs}, {self.rows} rows"


# "paper" is the Keras tutorial network of Table 4 with its batch of 32; in "wide" arithmetic outweighs overhead.
CASES = {
    "cpu": {"paper": Case(784, 128, 10, 32), "wide": Case(1024, 1024, 10, 256)},
    "cuda": {"paper": Case(784, 128, 10, 32), "wide": Case(4096, 4096, 4096, 4096)},
}


class Trial:
    """One network under one method; `step` is what is timed. bfloat16 autocast on a GPU."""

    def __init__(self, case: Case, config: sb.Config, device: torch.device, compiled: bool) -> None:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(case.inputs, case.hidden), nn.ReLU(), nn.Linear(case.hidden, case.outputs))
        self.model = sb.bayesianize(plain, config).to(device)
        self.x = torch.randn(case.rows, case.inputs, device=device)
        self.y = torch.randint(case.outputs, (case.rows,), device=device)
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4, fused=True)
        self.objective = torch.compile(self._objective) if compiled else self._objective

    def _objective(self) -> Tensor:
        return sb.elbo(sb.categorical(sb.sample(self.model, self.x), self.y), self.model, num_data=60_000).loss

    def step(self) -> None:
        with self.autocast:
            loss = self.objective()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def milliseconds(trial: Trial, device: torch.device, repeats: int = 5) -> float:
    """Mean time of a step over a few in a row, so that on a GPU launches overlap as they do in training."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        trial.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / repeats


def prepare(case: Case, config: sb.Config, device: torch.device, compiled: bool) -> tuple[Trial, float | None]:
    """A warm trial and, on a GPU, the peak memory of its step in MiB without that of other trials."""
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    trial = Trial(case, config, device, compiled)
    for _ in range(3):
        trial.step()
    if device.type != "cuda":
        return trial, None
    torch.cuda.reset_peak_memory_stats()
    trial.step()
    torch.cuda.synchronize()
    return trial, (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(case: Case, device: torch.device, compiled: bool, rounds: int) -> dict[str, dict[str, Any]]:
    """{method: {parameters, ms, ratio, peak_mib}}, or {method: {error}} where a method could not be run."""
    torch.compiler.reset()
    torch._dynamo.config.recompile_limit = 64  # all methods share the code that is compiled
    trials: dict[str, Trial] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name, config in METHODS.items():
        try:
            trials[name], peak = prepare(case, config, device, compiled)
        except Exception as error:  # no compiler, not enough memory: the other methods can still be timed
            rows[name] = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"}
        else:
            rows[name] = {"parameters": sum(p.numel() for p in trials[name].model.parameters()), "peak_mib": peak}
    times: dict[str, list[float]] = {name: [] for name in trials}
    for _ in range(rounds):
        for name, trial in trials.items():
            times[name].append(milliseconds(trial, device))
    point = times.get("point", [float("nan")] * rounds)
    for name, taken in times.items():
        ratios = [a / b for a, b in zip(taken, point, strict=True)]
        rows[name] |= {"ms": statistics.median(taken), "ratio": statistics.median(ratios)}
    return rows


def machine(device: torch.device) -> dict[str, Any]:
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    versions = {"torch": torch.__version__, "python": platform.python_version(), "slimbayes": sb.__version__}
    return {"device": chip, "cores": os.cpu_count(), "threads": torch.get_num_threads()} | versions


def show(name: str, case: Case, mode: str, rows: dict[str, dict[str, Any]]) -> None:
    print(f"\n{name}, {mode}: {case}")
    print(f"  {'':20}{'parameters':>12}{'step ms':>10}{'x point':>9}{'peak MiB':>10}")
    for method, r in rows.items():
        if "error" in r:
            print(f"  {method:20}{r['error']}")
            continue
        peak = "-" if r["peak_mib"] is None else f"{r['peak_mib']:.0f}"
        print(f"  {method:20}{r['parameters']:12,}{r['ms']:10.3f}{r['ratio']:9.2f}{peak:>10}")
    sys.stdout.flush()


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="Step times of point, mean-field and 2-tied networks (Table 4).")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=list(CASES))
    parser.add_argument("--cases", default="paper,wide", help="comma-separated: paper, wide")
    parser.add_argument("--modes", default="eager,compile", help="comma-separated: eager, compile")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="write the results as JSON to this file")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    record: dict[str, Any] = {"machine": machine(device), "rounds": args.rounds, "results": []}
    print(" ".join(f"{k}={v}" for k, v in record["machine"].items()))
    for name in args.cases.split(","):
        for mode in args.modes.split(","):
            case = CASES[args.device][name]
            rows = measure(case, device, mode == "compile", args.rounds)
            show(name, case, mode, rows)
            record["results"] += [
                {"case": name, "sizes": str(case), "mode": mode, "method": m} | r for m, r in rows.items()
            ]
            if args.out:  # after every case: a run that is cut short keeps what it has
                args.out.write_text(json.dumps(record, indent=1) + "\n")
    return record


if __name__ == "__main__":
    main()
