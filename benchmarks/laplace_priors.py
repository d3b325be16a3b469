"""Which prior `laplace` has by default, and what it does to predictions: a generated part of docs/fine_tuning.md.

    python benchmarks/laplace_priors.py FOLDER docs/fine_tuning.md     # with UCI's sets as .npz files of X and y

Classes: scikit-learn's digits with few labels, by a network of three layers and one of 22, its breast cancers and its
wines. Real targets: UCI. All priors are tried on validation rows, which neither train nor test, three seeds each,
linearised and sampled, which share a default: that of classes is the widest prior which is nowhere, in the mean over
seeds, more than 0.01 nats worse than the plain network. For real targets it is by evidence. Then test rows, clean and
shifted (noise of one standard deviation on every feature of classes; the first feature moved by five
standard deviations for real targets), are read with that choice, linearised.
"""

import copy
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from cells import between
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from torch import Tensor, nn

import slimbayes as sb

SEEDS, MARGIN = 3, 0.01
LAST: dict[str, Any] = {"over": "weights", "layers": "last"}
SCALES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
FACTORS: dict[str, dict[str, Any]] = {
    f"factors, Normal(1, {s:g})": {"prior": sb.Normal(1.0, s)} for s in SCALES
}
FACTORS["factors, by evidence"] = {"prior": "layer"}
METHODS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    **FACTORS,
    "last layer, by evidence": LAST,
}
MARKS = ("<!-- priors -->\n", "<!-- end of priors -->\n")
Rows = tuple[Tensor, Tensor]
Run = tuple[
    nn.Module, Rows, list[Rows]
]  # a trained network, its rows, and validation, clean and shifted rows


class Residual(nn.Module):
    """Blocks of two layers that add to what goes in, behind a norm each."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        width, blocks = sizes[1], (len(sizes) - 3) // 2
        self.first = nn.Linear(sizes[0], width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, width),
                nn.ReLU(),
                nn.Linear(width, width),
            )
            for _ in range(blocks)
        )
        self.last = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, sizes[-1]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def trained(
    sizes: list[int],
    rows: Rows,
    loss: Callable[[Tensor, Tensor], Tensor],
    epochs: int,
    seed: int,
) -> nn.Module:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for n_in, n_out in pairwise(sizes):
        layers += [nn.Linear(n_in, n_out), nn.ReLU()]
    net = nn.Sequential(*layers[:-1]) if len(sizes) < 10 else Residual(sizes)
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3, weight_decay=1e-2)
    for _ in range(epochs):
        for index in torch.randperm(len(rows[0])).split(64):
            optimizer.zero_grad()
            loss(net(rows[0][index]), rows[1][index]).backward()
            optimizer.step()
    return net.eval()


def judged(
    net: nn.Module,
    train: Rows,
    tests: list[Rows],
    likelihood: Any,
    options: dict[str, Any] | None,
) -> list[float]:
    """NLL on each set of rows, and on the first by sampling."""
    own = copy.deepcopy(net)
    if options is None:
        noise = (
            (net(train[0]) - train[1]).square().mean().sqrt().item()
            if likelihood == "gaussian"
            else 0.0
        )
        sb.bayesianize(own, sb.Deterministic())
        found = [
            sb.predict(own, x, likelihood=likelihood, likelihood_std=noise)
            for x, _ in tests
        ]
        sampled = found[0]
    else:
        fit = sb.laplace(own, [train], likelihood, **options)
        draws = None if likelihood == "gaussian" else 100
        found = [
            sb.predict_linearised(
                own,
                x,
                likelihood,
                likelihood_std=fit.likelihood_std,
                draws=draws,
                seed=0,
            )
            for x, _ in tests
        ]
        sampled = sb.predict(
            own,
            tests[0][0],
            100,
            likelihood=likelihood,
            likelihood_std=fit.likelihood_std,
            seed=0,
        )
    rows = zip([*found, sampled], [*tests, tests[0]], strict=True)
    return [-float(p.log_prob(y).mean()) for p, (_, y) in rows]


def classes(made: Callable[..., Any], labels: int, seed: int, hidden: int = 2) -> Run:
    """So many labels of one of scikit-learn's sets; a quarter of the rest are validation rows."""
    features, targets = made(return_X_y=True)
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(seed))
    x, y = (
        torch.tensor(features, dtype=torch.float32)[order],
        torch.tensor(targets)[order],
    )
    spread = x[:labels].std(0)
    x = ((x - x[:labels].mean(0)) / torch.where(spread > 0, spread, 1.0)).clamp(-5, 5)
    held = labels + (len(x) - labels) // 4
    noisy = x[held:] + torch.randn(
        x[held:].shape, generator=torch.Generator().manual_seed(seed)
    )
    epochs = max(12800 // labels, 1)  # as many steps for each number of labels
    train = x[:labels], y[:labels]
    net = trained(
        [x.shape[1], *[64] * hidden, int(y.max()) + 1],
        train,
        nn.functional.cross_entropy,
        epochs,
        seed,
    )
    return (
        net,
        train,
        [(x[labels:held], y[labels:held]), (x[held:], y[held:]), (noisy, y[held:])],
    )


def uci(file: Path, seed: int) -> Run:
    """Eight tenths of the rows train, one is for validation, one for testing."""
    held = np.load(file)
    x, y = (
        torch.tensor(held[name], dtype=torch.float32).reshape(len(held["X"]), -1)
        for name in ("X", "y")
    )
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    x, y, size, end = x[order], y[order, :1], int(0.8 * len(x)), int(0.9 * len(x))
    x, y = ((v - v[:size].mean(0)) / (v[:size].std(0) + 1e-6) for v in (x, y))
    far = x[end:].clone()
    far[:, 0] += 5
    net = trained(
        [x.shape[1], 50, 50, 1], (x[:size], y[:size]), nn.functional.mse_loss, 60, seed
    )
    return (
        net,
        (x[:size], y[:size]),
        [(x[size:end], y[size:end]), (x[end:], y[end:]), (far, y[end:])],
    )


def part(title: str, likelihood: str, cases: dict[str, Callable[[int], Run]]) -> str:
    """The choice on validation rows, then a table of test rows."""
    runs = {name: [make(seed) for seed in range(SEEDS)] for name, make in cases.items()}
    scores = {  # by method and case, means over seeds
        method: {
            name: np.mean([judged(*run, likelihood, options) for run in own], 0)
            for name, own in runs.items()
        }
        for method, options in METHODS.items()
    }
    gains = {
        m: [
            [scores[m][name][way] - scores["plain"][name][way] for name in cases]
            for way in (0, 3)
        ]
        for m in FACTORS
    }
    held = [m for m in list(FACTORS)[:-1] if max(map(max, gains[m])) <= MARGIN]
    chosen = list(FACTORS)[-1] if likelihood == "gaussian" else held[-1]
    lines = [
        f"{title}, NLL on validation rows less that of the plain network, mean and worst of the tasks:",
        "",
        "| | linearised | sampled |\n|---|---|---|",
        *(
            f"| {m} | {' | '.join(f'{mean(g):+.3f}, {max(g):+.3f}' for g in gains[m])} |"
            for m in FACTORS
        ),
        "",
        f"{title}, by default **{chosen}**, on test rows, NLL on clean / shifted ones, linearised:",
        "",
        f"| | {' | '.join(cases)} |",
        f"|---{'|---' * len(cases)}|",
    ]
    for method in dict.fromkeys(
        ("plain", chosen, "factors, by evidence", "last layer, by evidence")
    ):
        cells = " | ".join(
            f"{scores[method][name][1]:.3g} / {scores[method][name][2]:.3g}"
            for name in cases
        )
        lines.append(f"| {method} | {cells} |")
    return "\n".join(lines) + "\n"


def main(folder: Path, page: Path) -> None:
    sets = {"digits": load_digits, "cancer": load_breast_cancer, "wines": load_wine}
    few = {"digits": (50, 200, 800), "cancer": (50, 200), "wines": (30, 90)}
    labels: dict[str, Callable[[int], Run]] = {
        f"{name}, {n} labels": partial(classes, sets[name], n)
        for name, sizes in few.items()
        for n in sizes
    }
    for n in (200, 800):
        labels[f"digits, {n} labels, 22 layers"] = partial(
            classes, load_digits, n, hidden=21
        )
    names = ("concrete", "energy", "wine-quality-red", "bostonhousing", "yacht")
    real: dict[str, Callable[[int], Run]] = {
        name: partial(uci, folder / f"{name}.npz") for name in names
    }
    found = [
        part("Classes", "categorical", labels),
        part("Real targets", "gaussian", real),
    ]
    page.write_text(between(page.read_text(), MARKS, "\n".join(found)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
