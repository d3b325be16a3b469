"""A posterior for a network that is trained already: two moons, one pass of Laplace, and distance.

python docs/gallery/trained.py        # writes docs/gallery/trained.png
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from matplotlib.figure import Figure
from sklearn.datasets import make_moons
from torch import Tensor, nn

import slimbayes as sb

PICTURE = Path(__file__).with_suffix(".png")


def trained(x: Tensor, y: Tensor, steps: int) -> nn.Module:
    """The network you have: nothing of it is Bayesian."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )
    optimizer = torch.optim.AdamW(net.parameters(), 5e-3, weight_decay=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net.eval()


def main(out: Path = PICTURE, steps: int = 400, side: int = 80) -> dict[str, float]:
    """Draw the figure; returns confidence, and distance, at its edge, far from all rows."""
    points, classes = make_moons(300, noise=0.12, random_state=0)
    x, y = torch.tensor(points, dtype=torch.float32), torch.tensor(classes)
    base = trained(x, y, steps)
    across, up = torch.meshgrid(
        torch.linspace(-3, 4, side), torch.linspace(-2.5, 3, side), indexing="xy"
    )
    grid = torch.stack([across, up], -1).reshape(-1, 2)

    plain = sb.bayesianize(copy.deepcopy(base), sb.Deterministic())
    laplace = copy.deepcopy(base)
    sb.laplace(laplace, [(x, y)], prior=sb.Normal(1.0, 0.5))
    near = sb.distance(plain, [(x, y)])
    shown = {
        "the trained network": sb.predict(plain, grid),
        "Laplace, linearised": sb.predict_linearised(laplace, grid, draws=100, seed=0),
    }
    distance = sb.predict(plain, grid, distance=near).distance
    figure = Figure(figsize=(12, 3.7), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    edge = (
        (grid[:, 0] < -2.5)
        | (grid[:, 0] > 3.5)
        | (grid[:, 1] < -2)
        | (grid[:, 1] > 2.5)
    )
    for panel, (name, prediction) in zip(panels, shown.items(), strict=False):
        sure = prediction.confidence.reshape(side, side)
        drawn = panel.contourf(
            across, up, sure, levels=torch.linspace(0.5, 1, 11), cmap="Blues"
        )
        panel.set_title(f"confidence: {name}")
    remote = panels[2].contourf(
        across,
        up,
        distance.reshape(side, side),
        levels=torch.linspace(0, 1, 11),
        cmap="Greys",
    )
    panels[2].set_title("distance from the training rows")
    for panel in panels:
        for kind, colour in ((0, "#d9731a"), (1, "#2e8540")):
            panel.plot(*x[y == kind].T, ".", color=colour, markersize=4)
        panel.set(xticks=[], yticks=[])
    figure.colorbar(drawn, ax=panels[:2])
    figure.colorbar(remote, ax=panels[2])
    figure.savefig(out, dpi=110)
    sure = {
        name: float(prediction.confidence[edge].mean())
        for name, prediction in shown.items()
    }
    return {**sure, "distance": float(distance[edge].mean())}


if __name__ == "__main__":
    print(main())
