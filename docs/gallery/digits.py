"""Does confidence hold when the pictures get worse? Handwritten digits, clean and noisy, plain and rank-1.

python docs/gallery/digits.py        # writes docs/gallery/digits.png
"""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.metrics import calibration

LEVELS = (0.0, 0.25, 0.5, 0.75, 1.0)
PICTURE = Path(__file__).with_suffix(".png")


def data() -> tuple[Tensor, Tensor]:
    images, classes = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images, dtype=torch.float32)[order] / 8 - 1, torch.tensor(
        classes
    )[order]


def fit(
    config: sb.Config, temperature: float, x: Tensor, y: Tensor, epochs: int
) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(64, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
    sb.bayesianize(net, config)
    optimizer = torch.optim.AdamW(sb.param_groups(net, weight_decay=1e-4), 2e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(100):
            loss = sb.elbo(
                sb.categorical(sb.sample(net, x[rows]), y[rows]),
                net,
                len(x),
                temperature=temperature,
            ).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return net.eval()


def main(out: Path = PICTURE, epochs: int = 30) -> dict[str, list[dict[str, float]]]:
    """Train both, draw the figure; returns their scores at each level of noise."""
    x, y = data()
    methods = {
        "plain": (sb.Deterministic(), 1.0),
        "rank-1 Cauchy": tuple(sb.recipe("rank-1 Cauchy", start="scratch")),
    }
    nets = {
        name: fit(*how, x[:1000], y[:1000], epochs) for name, how in methods.items()
    }
    noise = torch.randn(797, 64, generator=torch.Generator().manual_seed(1))
    found: dict[str, list[dict[str, float]]] = {name: [] for name in nets}
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    scores, accuracy, reliability = figure.subplots(1, 3)
    for (name, net), colour in zip(nets.items(), ("#d9731a", "#2f6fb5"), strict=True):
        for level in LEVELS:
            prediction = sb.predict(net, x[1000:] + level * noise, draws=32, seed=0)
            right = (prediction.label == y[1000:]).float()
            curve = calibration(prediction, y[1000:], bins=10, drop=5)
            nll = -float(prediction.log_prob(y[1000:]).mean())
            found[name].append(
                {"nll": nll, "accuracy": float(right.mean()), "ece": curve.ece}
            )
        scores.plot(
            LEVELS, [one["nll"] for one in found[name]], "o-", color=colour, label=name
        )
        accuracy.plot(
            LEVELS,
            [one["accuracy"] for one in found[name]],
            "o-",
            color=colour,
            label=name,
        )
        full = curve.count >= 5
        reliability.plot(
            curve.confidence[full], curve.accuracy[full], "o-", color=colour, label=name
        )
    reliability.plot([0, 1], [0, 1], "--", color="grey", linewidth=1)
    scores.set(
        title="negative log-likelihood", xlabel="noise on the pixels", ylim=(0, None)
    )
    accuracy.set(title="accuracy", xlabel="noise on the pixels", ylim=(0, 1.02))
    reliability.set(
        title=f"reliability at noise {LEVELS[-1]:g}",
        xlabel="confidence",
        ylabel="accuracy",
    )
    for panel in (scores, accuracy, reliability):
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False)
    figure.savefig(out, dpi=110)
    return found


if __name__ == "__main__":
    for name, levels in main().items():
        print(name, levels)
