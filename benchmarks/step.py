"""What a Bayesian step costs: its time over a plain network's on the same number of rows.

    python benchmarks/step.py [--device cuda] [--cases mlp,conv,lstm] [--modes eager,compile]
                              [--methods plain,batchensemble] [--rounds 20] [--out FILE]

A training step is draw, forward, KL, backward and optimizer; a prediction is draw and forward, in eval mode without gradients.
The plain network gets K * B different rows; K members get B rows each, all of them. Methods take turns, so that whatever else
the machine does slows them alike: milliseconds are medians over rounds, a ratio is the median of the ratios within a round.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor, nn

import slimbayes as sb
from slimbayes import models

K = 4  # members; the plain network's rows are K times the batch
METHODS: dict[str, sb.Config] = {
    "plain": sb.Deterministic(),
    "rank1 draws=example": sb.Rank1(members=K),
    "rank1 draws=member": sb.Rank1(members=K, draws="member"),
    "batchensemble": sb.BatchEnsemble(members=K),
}


def mlp(width: int, layers: int = 4) -> nn.Module:
    hidden = [m for _ in range(layers - 1) for m in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, width))


class LSTMClassifier(nn.Module):
    def __init__(self, inputs: int, units: int, classes: int = 10) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(inputs, units, batch_first=True), nn.Linear(units, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


@dataclass(frozen=True)
class Case:
    """A network and the rows it is timed on."""

    sizes: str
    build: Callable[[], nn.Module]
    row: tuple[int, ...]  # shape of one row of the input
    rows: int  # K * B


# CPU sizes keep the whole run near two minutes, most of it compiling; CUDA sizes let arithmetic outweigh kernel launches.
CASES = {
    "cpu": {
        "mlp": Case("4 x 512, 256 rows", partial(mlp, 512), (512,), 256),
        "conv": Case("WRN-10-1, 32 rows of 16x16", partial(models.wrn, 10, 1), (3, 16, 16), 32),
        "lstm": Case("128 units, T=16, 128 rows", partial(LSTMClassifier, 32, 128), (16, 32), 128),
    },
    "cuda": {
        "mlp": Case("4 x 4096, 4096 rows, bf16", partial(mlp, 4096), (4096,), 4096),
        "conv": Case(
            "WRN-28-10, 512 rows of 32x32, bf16, channels-last", partial(models.wrn, 28, 10), (3, 32, 32), 512
        ),
        "lstm": Case("512 units, T=64, 512 rows, bf16", partial(LSTMClassifier, 128, 512), (64, 128), 512),
    },
}


class Trial:
    """One network under one method: `train` and `predict` are what is timed."""

    def __init__(self, case: Case, config: sb.Config, device: torch.device, compiled: bool) -> None:
        torch.manual_seed(0)
        layout = torch.channels_last if device.type == "cuda" and len(case.row) == 3 else torch.preserve_format
        self.model = sb.bayesianize(case.build(), config).to(device=device, memory_format=layout)
        batch = case.rows // sb.members(self.model)
        self.x = torch.randn(batch, *case.row, device=device).to(memory_format=layout)
        self.y = torch.randint(10, (batch,), device=device)
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
        self.optimizer = torch.optim.Adam(sb.param_groups(self.model), lr=1e-4, fused=True)
        # The model alone is compiled: factors are drawn before it runs, so noise is not inlined into kernels over activations.
        # Sizes change between methods only: dynamic=False keeps the compiler from making later methods' sizes symbolic.
        self.call = torch.compile(self.model, dynamic=False) if compiled else self.model

    def train(self) -> None:
        self.model.train()
        with self.autocast:
            nll = sb.categorical(sb.sample(self.call, self.x), self.y)
        loss = sb.elbo(nll, self.model, num_data=50_000).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def predict(self) -> Tensor:
        self.model.eval()
        with self.autocast:
            return sb.sample(self.call, self.x)


def milliseconds(work: Callable[[], Any], device: torch.device) -> float:
    """Mean time of a call: five on a GPU, so that launches overlap as they do in training."""
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(5):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 5


def prepare(case: Case, config: sb.Config, device: torch.device, compiled: bool) -> tuple[Trial, float | None]:
    """A warm trial, and the peak memory of its training step in MiB, other trials' memory not counted (CUDA)."""
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    trial = Trial(case, config, device, compiled)
    for _ in range(3):
        trial.predict()
        trial.train()
    if device.type != "cuda":
        return trial, None
    torch.cuda.reset_peak_memory_stats()
    trial.train()
    torch.cuda.synchronize()
    return trial, (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(
    case: Case, device: torch.device, compiled: bool = False, rounds: int = 20, methods: Sequence[str] = tuple(METHODS)
) -> dict[str, dict[str, Any]]:
    """Time every method on one case: {method: {train_ms, train_ratio, predict_ms, predict_ratio, peak_mib}}."""
    if compiled:
        torch.compiler.reset()
        # All methods share the code that is compiled, and each adds two versions; past the default 8 they would run eagerly.
        torch._dynamo.config.recompile_limit = 64
        # torch 2.11 fails an assertion of its own where this fuses batch norm's sums over rows with a factor's over positions.
        if hasattr(torch._inductor.config.triton, "mix_order_reduction"):
            torch._inductor.config.triton.mix_order_reduction = False
    trials, peaks, failed = {}, {}, {}
    for name in methods:
        try:
            trials[name], peaks[name] = prepare(case, METHODS[name], device, compiled)
        except Exception as error:  # no compiler, not enough memory: the other methods can still be timed
            failed[name] = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"}
    times: dict[tuple[str, str], list[float]] = {(n, kind): [] for n in trials for kind in ("train", "predict")}
    for _ in range(rounds):
        for (name, kind), taken in times.items():
            taken.append(milliseconds(getattr(trials[name], kind), device))
    return failed | {name: _row(name, times) | {"peak_mib": peaks[name]} for name in trials}


def _row(name: str, times: dict[tuple[str, str], list[float]]) -> dict[str, float]:
    row = {}
    for kind in ("train", "predict"):
        row[f"{kind}_ms"] = statistics.median(times[name, kind])
        plain = times.get(("plain", kind), [float("nan")])
        row[f"{kind}_ratio"] = statistics.median(a / b for a, b in zip(times[name, kind], plain, strict=False))
    return row


def machine(device: torch.device) -> dict[str, Any]:
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    versions = {"torch": torch.__version__, "python": platform.python_version(), "slimbayes": sb.__version__}
    return {"device": chip, "cores": os.cpu_count(), "threads": torch.get_num_threads()} | versions


def show(name: str, case: Case, mode: str, results: dict[str, dict[str, Any]]) -> None:
    print(f"\n{name}, {mode}: {case.sizes}")
    print(f"  {'':22}{'step ms':>10}{'x plain':>9}{'predict ms':>12}{'x plain':>9}{'peak MiB':>10}")
    for method, r in results.items():
        if "error" in r:
            print(f"  {method:22}{r['error']}")
            continue
        peak = "-" if r["peak_mib"] is None else f"{r['peak_mib']:.0f}"
        step, predict = (
            f"{r['train_ms']:10.2f}{r['train_ratio']:9.2f}",
            f"{r['predict_ms']:12.2f}{r['predict_ratio']:9.2f}",
        )
        print(f"  {method:22}{step}{predict}{peak:>10}")
    sys.stdout.flush()


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="Time of Bayesian steps over plain ones on the same number of rows.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=list(CASES))
    parser.add_argument("--cases", default="mlp,conv,lstm", help="comma-separated: mlp, conv, lstm")
    parser.add_argument("--modes", default="eager,compile", help="comma-separated: eager, compile")
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated: " + ", ".join(METHODS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="write the results as JSON to this file")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    record: dict[str, Any] = {"machine": machine(device), "members": K, "rounds": args.rounds, "results": []}
    print(" ".join(f"{k}={v}" for k, v in record["machine"].items()))
    for name in args.cases.split(","):
        for mode in args.modes.split(","):
            case = CASES[args.device][name]
            results = measure(case, device, mode == "compile", args.rounds, args.methods.split(","))
            show(name, case, mode, results)
            setting = {"case": name, "mode": mode, "sizes": case.sizes, "rows": case.rows}
            record["results"] += [setting | {"method": m} | r for m, r in results.items()]
            if args.out:  # after every case: a run that is cut short keeps what it has
                args.out.write_text(json.dumps(record, indent=1) + "\n")
    return record


if __name__ == "__main__":
    main()
