"""All standard splits of a UCI set at once, for Tables 12 and 13 of the EMP paper (Appendix D.7).

    python benchmarks/uci_splits.py run --data DATA --out OUT --jobs 16 [--sets yacht,energy] [--minutes 9]
    python benchmarks/uci_splits.py table OUT                           what is there, beside the paper's numbers

The nets are so small that a step costs its overhead: the splits of a set train side by side, as blocks of one network
that share nothing but the picks of EMP. The loss is the sum over splits, so each trains as it would by itself (a test
compares); its settings are those of lab/experiments/emp/uci.yaml. With --device cuda an epoch is one recording.
OUT/<set>-<method>.json has the scores of each split. A call that is stopped, or out of minutes, goes on from a
checkpoint when it is made again.

Sizes: G splits, B rows of a batch, P features, H hidden units, T targets, S draws.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from slimbayes_lab.data import load, standard_split
from slimbayes_lab.data.uci import UCI
from slimbayes_lab.report import kept
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.engine import passes as engine
from slimbayes.engine.noise import key
from slimbayes.files import write_text

SETS = {
    "yacht": "yacht", "boston": "bostonhousing", "energy": "energy", "concrete": "concrete",
    "wine": "wine-quality-red", "kin8nm": "kin8nm", "power": "power-plant", "naval": "naval-propulsion-plant",
    "protein": "protein-tertiary-structure", "year": "year",
}  # fmt: skip
WIDE = ("protein", "year")  # 100 hidden units, the others 50
METHODS: dict[
    str, Any
] = {  # the ensemble has no posterior: its members are further blocks
    "ecmp": lambda: sb.ModelPatch(
        components=5, cross=True, patch="norm", init=0.2, tau=None
    ),
    "emp": lambda: sb.ModelPatch(components=5, patch="norm", init=0.2, tau=None),
    "dropout": lambda: sb.MCDropout(),
    "ensemble": lambda: sb.Deterministic(),
}
MEMBERS = 5
BATCH, RATE, DECAY, DROP, PRECISION, DRAWS = 100, 1e-3, 0.01, 0.005, 0.1, 10_000
_ROWS, _MINUTE = (
    100,
    60.0,
)  # test rows that are predicted together; seconds between checkpoints


class Blocks(nn.Module):
    """G dense layers side by side: (B, G n_in) -> (B, G n_out), each started as nn.Linear is."""

    def __init__(self, groups: int, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups, n_in, n_out))
        self.bias = nn.Parameter(torch.empty(groups, 1, n_out))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        limit = 1 / math.sqrt(self.weight.shape[1])
        for parameter in (self.weight, self.bias):
            nn.init.uniform_(parameter, -limit, limit)

    def forward(self, x: Tensor) -> Tensor:
        groups, n_in, _ = self.weight.shape
        rows = x.view(-1, groups, n_in).transpose(0, 1)
        return torch.baddbmm(self.bias, rows, self.weight).transpose(0, 1).flatten(1)


def network(
    method: str, groups: int, inputs: int, hidden: int, outputs: int
) -> nn.Module:
    """The net of D.7 for every split, converted: batch norm or dropout after the input and after the hidden layer."""

    def between(width: int) -> list[nn.Module]:
        if method == "ensemble":
            return []
        return [
            nn.Dropout(DROP) if method == "dropout" else nn.BatchNorm1d(groups * width)
        ]

    blocks = groups * (MEMBERS if method == "ensemble" else 1)
    layers = [
        *between(inputs),
        Blocks(blocks, inputs, hidden),
        nn.ReLU(),
        *between(hidden),
    ]
    return sb.bayesianize(
        nn.Sequential(*layers, Blocks(blocks, hidden, outputs)), METHODS[method]()
    )


def outputs_of(net: nn.Module, x: Tensor, like: Tensor) -> Tensor:
    """Outputs of a draw, or of all members, for inputs (B, G P), as (S, B, G, T) to meet targets (B, G, T)."""
    if list(engine.posteriors_of(net)):
        return sb.sample(net, x).view(-1, *like.shape)
    return (
        net(x.repeat(1, MEMBERS)).view(len(x), MEMBERS, *like.shape[1:]).transpose(0, 1)
    )


class Splits:
    """Rows of G splits of one set, side by side: x (N, G, P), y (N, G, T), and the same of the test rows."""

    def __init__(self, name: str, root: Path, device: str = "cpu") -> None:
        data, self.groups = load(f"uci/{name}", root), UCI[name][2]
        found = [standard_split(data, index) for index in range(self.groups)]
        self.x, self.y = (
            torch.stack([getattr(s.train, of) for s in found], 1).to(device)
            for of in "xy"
        )
        self.test_x, self.test_y = (
            torch.stack([getattr(s.test, of) for s in found], 1).to(device)
            for of in "xy"
        )
        self.mean, self.std = (
            torch.stack([getattr(s, of) for s in found]).to(device)
            for of in ("y_mean", "y_std")
        )
        self.sizes = (self.x.shape[2], self.y.shape[2])

    def epoch(self, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
        """Whole batches, (N, G P) and (N, G, T), each split in an order of its own; the last rows wait for another."""
        whole = len(self.x) - len(self.x) % min(BATCH, len(self.x))
        source = torch.Generator(self.x.device).manual_seed(key(seed, "order", epoch))
        order = torch.rand(
            len(self.x), self.groups, generator=source, device=self.x.device
        ).argsort(0)[:whole, :, None]
        x, y = (
            rows.gather(0, order.expand(-1, -1, rows.shape[2]))
            for rows in (self.x, self.y)
        )
        return x.flatten(1), y


def train_epoch(
    net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
) -> Tensor:
    """One epoch: the mean squared error over draws, rows and targets, summed over splits; that of the last batch."""
    for rows, targets in zip(x.split(BATCH), y.split(BATCH), strict=True):
        optimizer.zero_grad(set_to_none=True)
        loss = (outputs_of(net, rows, targets) - targets).square().mean() * y.shape[1]
        loss.backward()
        optimizer.step()
    return loss.detach()


@torch.no_grad()
def scores(
    net: nn.Module, data: Splits, draws: int, seed: int
) -> dict[str, list[float]]:
    """RMSE and log predictive density of each split, in the targets' own units, targets averaged over."""
    scale = (PRECISION**-0.5 / data.std).flatten()
    squares, densities = [], []
    for x, y in zip(data.test_x.split(_ROWS), data.test_y.split(_ROWS), strict=True):
        if list(engine.posteriors_of(net)):
            options: dict[str, Any] = {"chunk": 2**13, "seed": key(seed, "predict")}
            p = sb.predict(
                net,
                x.flatten(1),
                draws,
                likelihood="gaussian",
                likelihood_std=scale,
                **options,
            )
        else:
            p = sb.Prediction.from_outputs(
                outputs_of(net, x.flatten(1), y).flatten(2),
                "gaussian",
                likelihood_std=scale,
            )
        p = p.rescaled(data.mean.flatten(), data.std.flatten())
        squares.append((p.mean.view_as(y) - y).square().double())
        densities.append(p.log_prob(y.flatten(1)).view_as(y).double())
    means = torch.cat(squares).mean((0, 2)).sqrt(), torch.cat(densities).mean((0, 2))
    return {"rmse": means[0].tolist(), "lpd": means[1].tolist()}


def run(
    name: str,
    method: str,
    root: Path,
    out: Path,
    epochs: int,
    draws: int,
    until: float,
    device: str = "cpu",
) -> str:
    """Train and judge one set with one method, or go on with it; says how far it came."""
    torch.set_num_threads(1)
    result, saved, begun = (
        out / f"{name}-{method}.json",
        out / f"{name}-{method}.pt",
        time.perf_counter(),
    )
    if result.exists() and json.loads(result.read_text())["epochs"] == epochs:
        return f"{name}-{method}: there already"
    data, seed = Splits(SETS[name], root, device), 0
    torch.manual_seed(key(seed, "start"))
    net = network(
        method, data.groups, data.sizes[0], 100 if name in WIDE else 50, data.sizes[1]
    ).to(device)
    optimizer = torch.optim.Adam(
        net.parameters(), lr=RATE, weight_decay=DECAY, fused=True
    )
    first, seconds, kept = 0, 0.0, begun
    if saved.exists():
        state = torch.load(saved, weights_only=True, map_location=device)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        first, seconds = state["epoch"], state["seconds"]
    train: Any = partial(train_epoch, net, optimizer)
    if device != "cpu":
        train = sb.recorded(train, net, optimizer)
    net.train()
    for epoch in range(first, epochs):
        torch.manual_seed(key(seed, "epoch", epoch))
        if not math.isfinite(float(train(*data.epoch(seed, epoch)))):
            raise FloatingPointError(
                f"{name}-{method}: the loss is not finite in epoch {epoch}."
            )
        late = time.time() > until
        if late or time.perf_counter() - kept > _MINUTE:
            kept, spent = time.perf_counter(), seconds + time.perf_counter() - begun
            state = {
                "net": net.state_dict(),
                "optimizer": optimizer.state_dict(),
                "epoch": epoch + 1,
                "seconds": spent,
            }
            torch.save(state, saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)
        if late:
            return f"{name}-{method}: {epoch + 1} of {epochs} epochs"
    seconds += time.perf_counter() - begun
    net.eval()
    found = scores(net, data, draws, seed)
    facts = {
        "set": name,
        "method": method,
        "targets": data.sizes[1],
        "epochs": epochs,
        "draws": draws,
    }
    facts |= {
        "seconds": round(seconds, 1),
        "device": device,
        "torch": torch.__version__,
        "seed": seed,
    }
    write_text(result, json.dumps(facts | found) + "\n")
    saved.unlink(missing_ok=True)
    return f"{name}-{method}: done in {seconds:.0f} s, {found['rmse'][0]:.3f}, {found['lpd'][0]:.3f}"


def table(out: Path) -> str:
    """Markdown: mean and standard error over splits, ours above the paper's."""
    from slimbayes_lab.papers.rows import find

    lines = []
    for number, score in (("12", "rmse"), ("13", "lpd")):
        printed = {row.stem: row.paper for row in find(f"emp/table{number}")}
        lines += [
            f"Table {number}: {score.upper()}, mean ± standard error over splits",
            "",
        ]
        lines += [
            f"| set | targets | epochs | splits | {' | '.join(METHODS)} |",
            "|---|" + "---:|" * 7,
        ]
        for name in SETS:
            files = {m: out / f"{name}-{m}.json" for m in METHODS}
            found = {
                m: kept.load(file) for m, file in files.items() if kept.exists(file)
            }
            if not found:
                continue
            one = next(iter(found.values()))
            ours = [_mean(found[m][score]) if m in found else "-" for m in METHODS]
            lines.append(
                f"| {name} | {one['targets']} | {one['epochs']} | {len(one[score])} | {' | '.join(ours)} |"
            )
            paper = [printed[f"{name}-{m}"] for m in METHODS]
            theirs = [
                f"*{p.numbers[score]:.2f} ± {p.errors.get(score, math.nan):.2f}*"
                for p in paper
            ]
            lines.append(f"| *paper* | | | | {' | '.join(theirs)} |")
        lines.append("")
    return "\n".join(lines)


def _mean(values: list[float]) -> str:
    found = torch.tensor(values, dtype=torch.float64)
    digits = 4 if found.abs().max() < 0.1 else 2
    return f"{float(found.mean()):.{digits}f} ± {float(found.std() / math.sqrt(len(values))):.{digits}f}"


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    does = parser.add_subparsers(dest="does", required=True)
    does.add_parser("table").add_argument("out", type=Path)
    runs = does.add_parser("run")
    runs.add_argument("--data", type=Path, required=True)
    runs.add_argument("--out", type=Path, required=True)
    longest_first = [name for name in SETS if name != "year"][::-1]
    runs.add_argument(
        "--sets",
        default=",".join(longest_first),
        help="In the order in which they are begun.",
    )
    runs.add_argument("--methods", default=",".join(METHODS))
    runs.add_argument("--epochs", type=int, default=4000)
    runs.add_argument("--draws", type=int, default=DRAWS)
    runs.add_argument("--jobs", type=int, default=1)
    runs.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    runs.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="Leave checkpoints and end after so many.",
    )
    given = parser.parse_args(words)
    if given.does == "table":
        print(table(given.out))
        return
    given.out.mkdir(parents=True, exist_ok=True)
    until = time.time() + 60 * given.minutes
    asked = [(n, m) for n in given.sets.split(",") for m in given.methods.split(",")]
    how = given.data, given.out, given.epochs, given.draws, until, given.device
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
        told = [pool.submit(run, *one, *how) for one in asked]
        for one, (name, method) in zip(told, asked, strict=True):
            failed = one.exception()
            print(
                f"{name}-{method} failed: {failed}" if failed else one.result(),
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
