"""What the prior of a Laplace approximation does to predictions: the two tables of docs/fine_tuning.md.

    python benchmarks/laplace_priors.py FOLDER     # with UCI's sets as .npz files of X and y

Classes: scikit-learn's digits, few labels; NLL on other digits, clean and noisy. Real targets: UCI; NLL on test rows,
and on the same with the first feature moved by five standard deviations. Means over seeds; all read on test rows.
"""

import copy
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import slimbayes as sb

SEEDS = 3
LAST = {"over": "weights", "layers": "last"}
CLASSES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "factors, Normal(1, 0.1)": {"prior": sb.Normal(1.0, 0.1)},
    "factors, Normal(1, 0.2)": {"prior": sb.Normal(1.0, 0.2)},
    "factors, Normal(1, 0.5)": {"prior": sb.Normal(1.0, 0.5)},
    "factors, by evidence": {"prior": "layer"},
    "last layer, by evidence": LAST,
}
REAL = {name: CLASSES[name] for name in CLASSES if "0.1" not in name and "0.5" not in name}
Rows = tuple[Tensor, Tensor]


def trained(
    sizes: list[int], rows: Rows, loss: Callable[[Tensor, Tensor], Tensor], epochs: int, seed: int
) -> nn.Module:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for n_in, n_out in pairwise(sizes):
        layers += [nn.Linear(n_in, n_out), nn.ReLU()]
    net = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3, weight_decay=1e-2)
    for _ in range(epochs):
        for index in torch.randperm(len(rows[0])).split(64):
            optimizer.zero_grad()
            loss(net(rows[0][index]), rows[1][index]).backward()
            optimizer.step()
    return net.eval()


def judged(
    net: nn.Module, likelihood: Any, train: Rows, tests: list[Rows], options: dict[str, Any] | None
) -> list[float]:
    """NLL on each set of test rows."""
    own = copy.deepcopy(net)
    if options is None:
        noise = (net(train[0]) - train[1]).square().mean().sqrt().item() if likelihood == "gaussian" else 0.0
        sb.bayesianize(own, sb.Deterministic())
        found = [sb.predict(own, x, likelihood=likelihood, scale=noise) for x, _ in tests]
    else:
        fit = sb.laplace(own, [train], likelihood, **options)
        draws = None if likelihood == "gaussian" else 100
        found = [sb.predict_linearised(own, x, likelihood, scale=fit.noise, draws=draws, seed=0) for x, _ in tests]
    return [-float(p.log_prob(y).mean()) for p, (_, y) in zip(found, tests, strict=True)]


def digits(labels: int, seed: int) -> tuple[nn.Module, Rows, list[Rows]]:
    images, classes = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 8 - 1, torch.tensor(classes)[order]
    train, (x, y) = (x[:labels], y[:labels]), (x[1000:], y[1000:])
    noisy = x + torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
    epochs = 12800 // labels  # as many steps for each number of labels
    return trained([64, 64, 64, 10], train, nn.functional.cross_entropy, epochs, seed), train, [(x, y), (noisy, y)]


def uci(file: Path, seed: int) -> tuple[nn.Module, Rows, list[Rows]]:
    held = np.load(file)
    x, y = (torch.tensor(held[name], dtype=torch.float32).reshape(len(held["X"]), -1) for name in ("X", "y"))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    x, y, size = x[order], y[order, :1], int(0.9 * len(x))
    x, y = ((v - v[:size].mean(0)) / (v[:size].std(0) + 1e-6) for v in (x, y))
    far = x[size:].clone()
    far[:, 0] += 5
    net = trained([x.shape[1], 50, 50, 1], (x[:size], y[:size]), nn.functional.mse_loss, 60, seed)
    return net, (x[:size], y[:size]), [(x[size:], y[size:]), (far, y[size:])]


def table(likelihood: str, methods: dict[str, Any], cases: dict[str, Callable[[int], Any]]) -> None:
    print(f"| | {' | '.join(cases)} |\n|---{'|---' * len(cases)}|")
    built = {name: [make(seed) for seed in range(SEEDS)] for name, make in cases.items()}
    for method, options in methods.items():
        scores = [
            [judged(net, likelihood, train, tests, options) for net, train, tests in runs] for runs in built.values()
        ]
        cells = [" / ".join(f"{mean(line):.3g}" for line in zip(*case, strict=True)) for case in scores]
        print(f"| {method} | {' | '.join(cells)} |", flush=True)
    print()


def main(folder: Path) -> None:
    table("categorical", CLASSES, {f"{n} labels": lambda seed, n=n: digits(n, seed) for n in (50, 200, 800)})
    sets = ("concrete", "energy", "wine-quality-red", "bostonhousing")
    table("gaussian", REAL, {name: lambda seed, n=name: uci(folder / f"{n}.npz", seed) for name in sets})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
