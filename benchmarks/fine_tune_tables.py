"""Posteriors for a trained network beside the usual ways, on UCI's regressions: cells of docs/fine_tuning.md.

    python benchmarks/fine_tune_tables.py --data DATA --out OUT.jsonl [--workers 10] [--limit-seconds 500]

A network of two layers of 50 units is trained on a split (seed s takes split s, at most 4,000 rows, of which a tenth is
held out). Every method goes on from there. Each has two settings, and the standard deviation of its noise, to choose by
the NLL of the held-out rows; test rows choose nothing.

- plain: the network itself; nothing to choose but the noise.
- last-layer Laplace, rank-1 Laplace: one pass of `sb.laplace` over the training rows; linearised, in closed form. The
  former agrees with laplace-torch to six digits (tests/inference/test_laplace.py), which has settings by evidence, too.
- rank-1 fine-tuned: `sb.Rank1` of four members, train="posterior", a third of the base's steps, with the start and the
  rates that benchmarks/fine_tune_starts.py chose on other rows; two temperatures and priors.
- MC dropout: a new network, trained with dropout; 32 masks.
- deep ensemble: three more networks. LoRA ensemble: four times adapters of rank 4 of all layers, as many steps as
  rank-1's.

A cell is one JSON line: task, method, seed, metrics, seconds and bytes beyond the trained network. Shifted rows have
noise of half a standard deviation on every feature, or one feature moved by three. AUROC is of the standard deviation
of the mean, between test rows and rows drawn from Normal(0, 3^2). Targets are standardised.

Sizes: N rows, S draws or members.
"""

from __future__ import annotations

import argparse
import copy
import math
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from cells import Cells, Workers, run_all
from safetensors.torch import load_file
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.metrics.functional import crps_mixture

SETS = [
    "bostonhousing", "concrete", "energy", "kin8nm", "naval-propulsion-plant", "power-plant",
    "protein-tertiary-structure", "wine-quality-red", "yacht",
]  # fmt: skip
SEEDS, MEMBERS, MASKS, STEPS, BATCH, WIDTH, RANK, MOST_ROWS = (
    5,
    4,
    32,
    3000,
    64,
    50,
    4,
    4000,
)
FASTER = 100.0  # learning rate of posteriors' widths relative to that of their means
SETTINGS: dict[str, list[Any]] = {
    "plain": [None],
    "last-layer Laplace": ["layer", sb.Normal(0.0, 1.0)],  # priors
    "rank-1 Laplace": ["layer", sb.Normal(1.0, 0.2)],
    "rank-1 fine-tuned": [(0.1, 0.1), (1.0, 0.2)],  # temperatures and priors
    "MC dropout": [0.05, 0.2],  # rates
    "deep ensemble": [None],
    "LoRA ensemble": [3e-3, 1e-2],  # learning rates
}
Rows = tuple[Tensor, Tensor]
Predict = Callable[
    [Tensor], tuple[Tensor, Tensor]
]  # means (S, N), and variances (S, N) of them within a draw


class Data(NamedTuple):
    """Rows to train on, to choose by, to judge by; with features that moved; and rows that are none of them."""

    train: Rows
    held: Rows
    test: Rows
    shifted: dict[str, Rows]
    other: Tensor


class Fitted(NamedTuple):
    """A method's predictions, and what it keeps beside the base."""

    predict: Predict
    bytes: int


def read(name: str, seed: int, folder: Path) -> Data:
    """A standard split, standardised by its training rows."""
    file = np.load(folder / "uci" / f"{name}.npz", allow_pickle=False)
    x, y = (
        torch.as_tensor(file[part], dtype=torch.float64).reshape(len(file["X"]), -1)
        for part in ("X", "y")
    )
    source = torch.Generator().manual_seed(seed)
    known = torch.as_tensor(file["train_idx"][seed].astype(np.int64))
    known, test = (
        known[torch.randperm(len(known), generator=source)][:MOST_ROWS],
        file["test_idx"][seed].astype(int),
    )
    held, train = known[: len(known) // 10], known[len(known) // 10 :]
    spread = [v[train].std(0) for v in (x, y)]  # naval has columns of one value
    x, y = (
        (v - v[train].mean(0)) / s.where(s > 1e-9, 1.0)
        for v, s in zip((x, y), spread, strict=True)
    )
    x, y = x.float(), y[:, :1].float()
    clean = x[torch.as_tensor(test)]
    noisy = clean + 0.5 * torch.randn(clean.shape, generator=source)
    moved = clean.clone()
    moved[
        torch.arange(len(moved)),
        torch.randint(moved.shape[1], (len(moved),), generator=source),
    ] += 3
    other = 3 * torch.randn(clean.shape, generator=source)
    target = y[torch.as_tensor(test)]
    shifted = {"noisy": (noisy, target), "moved": (moved, target)}
    return Data(
        (x[train], y[train]), (x[held], y[held]), (clean, target), shifted, other
    )


# --- methods ---


def network(inputs: int, dropout: float = 0.0) -> nn.Sequential:
    hidden = [
        nn.Linear(inputs, WIDTH),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
    ]
    return nn.Sequential(*hidden, nn.Dropout(dropout), nn.Linear(WIDTH, 1))


def train(
    net: nn.Module,
    rows: Rows,
    steps: int,
    rate: float,
    seed: int,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """AdamW with warm-up and cosine, for all methods."""
    torch.manual_seed(seed)
    groups = sb.param_groups(net, 1e-2, rate, scale_lr_multiplier=FASTER)
    optimizer = torch.optim.AdamW(groups, rate, weight_decay=0.0)
    plan = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [group["lr"] for group in groups], steps + 1, pct_start=0.1
    )
    net.train()
    for _ in range(steps):
        index = torch.randint(len(rows[0]), (BATCH,))
        optimizer.zero_grad()
        loss(rows[0][index], rows[1][index]).backward()
        optimizer.step()
        plan.step()
    net.eval()


def fitted(net: nn.Module, rows: Rows, steps: int, rate: float, seed: int) -> nn.Module:
    train(net, rows, steps, rate, seed, lambda x, y: (net(x) - y).square().mean())
    return net


def base(data: Data, seed: int, steps: int, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    return fitted(
        network(data.train[0].shape[1], dropout), data.train, steps, 3e-3, seed
    )


def laplace(net: nn.Module, data: Data, setting: Any, last: bool) -> Fitted:
    options: dict[str, Any] = {"over": "weights", "layers": "last"} if last else {}
    sb.laplace(net, [data.train], "gaussian", prior=setting, **options)

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        found = sb.predict_linearised(net, x, "gaussian")
        return found.mean[:, 0][None], found.epistemic[:, 0][None]

    with (
        tempfile.TemporaryDirectory() as folder
    ):  # as it is saved: correlations in half precision
        kept = load_file(sb.save(net, f"{folder}/posterior") / "posterior.safetensors")
    return Fitted(predict, size(kept.values()))


def fine_tuned(
    net: nn.Module, data: Data, setting: Any, seed: int, steps: int, noise: float
) -> Fitted:
    (temperature, prior), count = setting, len(data.train[0])
    config = sb.Rank1(
        members=MEMBERS,
        prior=sb.Normal(1.0, prior),
        mean_init=sb.Normal(1.0, 0.01),
        scale_init=0.01,
    )
    sb.bayesianize(net, config, train="posterior")

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return sb.elbo(
            sb.gaussian(sb.sample(net, x), y, noise),
            net,
            count,
            temperature=temperature,
        ).loss

    train(net, data.train, steps // 3, 1e-3, seed, loss)
    return Fitted(
        partial(drawn, net, MASKS // MEMBERS * MEMBERS),
        size(p for p in net.parameters() if p.requires_grad),
    )


class Adapter(nn.Module):
    """A dense layer that stays, plus a product of two thin matrices that trains and starts at zero."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.up(self.down(x))
        return out


def lora(net: nn.Module, data: Data, rate: float, seed: int, steps: int) -> Fitted:
    members = []
    for member in range(MEMBERS):
        torch.manual_seed(100 * seed + member)
        layers = [
            Adapter(m) if isinstance(m, nn.Linear) else m
            for m in copy.deepcopy(net).children()
        ]
        members.append(
            fitted(
                nn.Sequential(*layers),
                data.train,
                steps // 3,
                rate,
                100 * seed + member,
            )
        )
    return Fitted(
        partial(together, members),
        size(p for m in members for p in m.parameters() if p.requires_grad),
    )


def drawn(net: nn.Module, draws: int, x: Tensor) -> tuple[Tensor, Tensor]:
    means = sb.predict(net, x, draws, likelihood="gaussian", seed=0).samples[..., 0]
    return means, torch.zeros_like(means)


@torch.no_grad()
def together(nets: list[nn.Module], x: Tensor) -> tuple[Tensor, Tensor]:
    means = torch.stack([net(x)[:, 0] for net in nets])
    return means, torch.zeros_like(means)


def size(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def fit(
    method: str,
    net: nn.Module,
    data: Data,
    setting: Any,
    seed: int,
    steps: int,
    noise: float,
) -> Fitted:
    """A method's posterior, from the trained network on, which stays as it is."""
    own = copy.deepcopy(net)
    if method == "plain":
        return Fitted(partial(together, [own]), 0)
    if method.endswith("Laplace"):
        return laplace(own, data, setting, method.startswith("last"))
    if method == "rank-1 fine-tuned":
        return fine_tuned(own, data, setting, seed, steps, noise)
    if method == "MC dropout":
        own = base(data, seed, steps, setting)
        return Fitted(
            partial(drawn, sb.bayesianize(own, sb.MCDropout()), MASKS),
            size(own.parameters()),
        )
    if method == "LoRA ensemble":
        return lora(own, data, setting, seed, steps)
    others = [
        base(data, 100 * (member + 1) + seed, steps) for member in range(1, MEMBERS)
    ]
    return Fitted(
        partial(together, [own, *others]),
        size(p for other in others for p in other.parameters()),
    )


# --- scores ---


def log_density(means: Tensor, variances: Tensor, noise: float, y: Tensor) -> Tensor:
    """Of targets (N, 1) under a mixture of S Gaussians."""
    each = torch.distributions.Normal(means, (variances + noise**2).sqrt()).log_prob(
        y[:, 0]
    )
    return each.logsumexp(0) - math.log(len(each))


def nll(found: tuple[Tensor, Tensor], noise: float, y: Tensor) -> float:
    return -float(log_density(*found, noise, y).mean())


def best_noise(found: tuple[Tensor, Tensor], y: Tensor) -> tuple[float, float]:
    """The noise of lowest NLL, and that NLL."""
    tried = [
        (nll(found, noise, y), noise)
        for noise in np.geomspace(0.003, 3.0, 100).tolist()
    ]
    least, noise = min(tried)
    return noise, least


def auroc(inside: Tensor, outside: Tensor) -> float:
    """How often a row from outside has the higher score; ties count half."""
    both = outside[:, None] - inside[None]
    return float((both > 0).float().mean() + (both == 0).float().mean() / 2)


def scores(predict: Predict, data: Data, noise: float) -> dict[str, float]:
    began = time.perf_counter()
    means, variances = predict(data.test[0])
    seconds, y = time.perf_counter() - began, data.test[1]
    scale = (variances + noise**2).sqrt()
    below = torch.distributions.Normal(means, scale).cdf(y[:, 0]).mean(0)
    moved = {
        f"nll {name}": nll(predict(x), noise, target)
        for name, (x, target) in data.shifted.items()
    }
    unsure = [
        (m.var(0, correction=0) + v.mean(0)).sqrt()
        for m, v in ((means, variances), predict(data.other))
    ]
    return {
        "nll": nll((means, variances), noise, y),
        "rmse": float((means.mean(0) - y[:, 0]).square().mean().sqrt()),
        "crps": float(
            crps_mixture(means.double(), scale.double(), y[:, 0].double()).mean()
        ),
        "coverage": float(((below - 0.5).abs() <= 0.45).float().mean()),
        **moved,
        "shifted_nll": sum(moved.values()) / len(moved),
        "auroc": auroc(*unsure),
        "predict_seconds": seconds,
        "noise": noise,
    }


def cells(
    name: str, seed: int, folder: Path, methods: list[str], steps: int
) -> list[dict[str, Any]]:
    """Lines of all methods on one split: each with the setting and the noise that its held-out rows like best."""
    torch.set_num_threads(1)
    data, found = read(name, seed, folder), []
    began = time.perf_counter()
    net = base(data, seed, steps)
    trained = time.perf_counter() - began
    noise, _ = best_noise(together([net], data.held[0]), data.held[1])
    for method in methods:
        tried = []
        for choice, setting in enumerate(SETTINGS[method]):
            began = time.perf_counter()
            one = fit(method, net, data, setting, seed, steps, noise)
            seconds = time.perf_counter() - began
            own, least = best_noise(one.predict(data.held[0]), data.held[1])
            tried.append((least, choice, own, seconds, one))
        _, choice, own, seconds, one = min(tried, key=lambda t: t[:2])
        line: dict[str, Any] = {"task": f"UCI {name}", "method": method, "seed": seed}
        line |= {
            "metrics": scores(one.predict, data, own),
            "seconds": 0.0 if method == "plain" else seconds,
        }
        found.append(
            line | {"bytes": one.bytes, "choice": choice, "base_seconds": trained}
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--limit-seconds", type=float, default=math.inf)
    parser.add_argument("--sets", nargs="*", default=SETS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="of the base; fewer only try the code"
    )
    args = parser.parse_args()
    kept, jobs = Cells(args.out), []
    done = {(line["task"], line["seed"], line["method"]) for line in kept.lines}
    for seed, name in product(range(args.seeds), args.sets):
        if left := [m for m in SETTINGS if (f"UCI {name}", seed, m) not in done]:
            jobs.append((cells, name, seed, args.data, left, args.steps))
    with Workers(args.workers) as pool:
        run_all(pool, jobs, kept.add, time.monotonic() + args.limit_seconds)


if __name__ == "__main__":
    main()
