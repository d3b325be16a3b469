# ruff: noqa: RUF001 (signs of mathematics)
"""The three pictures of docs/concepts.md.

python docs/pictures/draw.py        # writes rank1.png, tied.png and patches.png beside this file
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

BLUE, ORANGE, GREY = "#2f6fb5", "#d9731a", "#9a9a9a"
HERE = Path(__file__).parent


def matrix(
    panel: Any, values: np.ndarray, title: str, limit: float, cmap: str = "RdBu"
) -> None:
    low = 0.0 if cmap == "Blues" else -limit
    panel.imshow(
        values, cmap=cmap, vmin=low, vmax=limit, aspect="equal", interpolation="nearest"
    )
    panel.set_title(title, fontsize=12)
    panel.set(xticks=[], yticks=[])


def sign(panel: Any, text: str) -> None:
    panel.text(0.5, 0.5, text, ha="center", va="center", fontsize=22)
    panel.axis("off")


def rank1(rng: np.random.Generator) -> Figure:
    """Two draws of W o r s^T from one W."""
    weight = rng.normal(size=(8, 12))
    figure = Figure(figsize=(10.5, 4.4), layout="constrained")
    rows = figure.subplots(2, 7, width_ratios=[12, 1.6, 1.6, 1.6, 12, 1.6, 12])
    for draw, panels in enumerate(rows, 1):
        r, s = rng.normal(1, 0.45, (8, 1)), rng.normal(1, 0.45, (1, 12))
        matrix(panels[0], weight, "W: one for all draws", 2.5)
        matrix(panels[2], r, f"r, draw {draw}", 2.5)
        matrix(panels[4], s, f"sᵀ, draw {draw}", 2.5)
        matrix(panels[6], weight * r * s, f"W′, draw {draw}", 2.5)
        for at, text in ((1, "∘"), (3, "×"), (5, "=")):
            sign(panels[at], text)
    return figure


def tied(rng: np.random.Generator) -> Figure:
    """A matrix of scales, and the sum of two outer products."""
    u, v = rng.gamma(2.0, 0.5, (10, 2)), rng.gamma(2.0, 0.5, (14, 2))
    u[:, 1] *= np.linspace(0, 2, 10)
    v[:, 1] *= np.linspace(2, 0, 14)
    first, second = u[:, :1] @ v[:, :1].T, u[:, 1:] @ v[:, 1:].T
    limit = float((first + second).max())
    figure = Figure(figsize=(10.5, 2.3), layout="constrained")
    panels = figure.subplots(1, 7, width_ratios=[14, 3, 14, 2, 14, 2, 14])
    matrix(
        panels[0],
        (first + second) * rng.lognormal(0, 0.35, first.shape),
        "σ, mean-field: 10 · 14",
        limit,
        "Blues",
    )
    sign(panels[1], "≈")
    matrix(panels[2], first + second, "σ, 2-tied: 2 (10 + 14)", limit, "Blues")
    sign(panels[3], "=")
    matrix(panels[4], first, "u₁ v₁ᵀ", limit, "Blues")
    sign(panels[5], "+")
    matrix(panels[6], second, "u₂ v₂ᵀ", limit, "Blues")
    return figure


def patches() -> Figure:
    """Layers in a row; patched ones have three components, and two draws go through different ones."""
    figure = Figure(figsize=(10.5, 3.2), layout="constrained")
    panel = figure.subplots()
    layers = ["conv", "norm", "conv", "norm", "conv", "norm", "dense"]
    for at, name in enumerate(layers):
        heights = (0.0, 1.0, 2.0) if name == "norm" else (1.0,)
        for height in heights:
            tall = 0.62 if name == "norm" else 1.7
            box = FancyBboxPatch(
                (2 * at - 0.45, height - tall / 2), 0.9, tall, boxstyle="round,pad=0.05",
                facecolor="#dce8f5" if name == "norm" else "#eeeeee", edgecolor=BLUE if name == "norm" else GREY,
            )  # fmt: skip
            panel.add_patch(box)
            panel.text(2 * at, height, name, ha="center", va="center", fontsize=11)
    for picks, colour, shift in (((2, 0, 1), ORANGE, 0.16), ((0, 0, 2), BLUE, -0.16)):
        chosen = iter(picks)
        across, up = [-1.2], [1 + shift]
        for at, name in enumerate(layers):
            height = next(chosen) if name == "norm" else 1
            across += [2 * at - 0.55, 2 * at + 0.55]
            up += [height + shift] * 2
        panel.plot(
            [*across, 2 * len(layers) - 0.8],
            [*up, 1 + shift],
            color=colour,
            linewidth=2,
            alpha=0.85,
            zorder=0.5,
        )
    panel.text(-1.3, 1.42, "two draws", ha="center", fontsize=11)
    panel.set(xlim=(-2, 2 * len(layers)), ylim=(-0.6, 2.6))
    panel.axis("off")
    return figure


def main(out: Path = HERE) -> None:
    figures = {
        "rank1": rank1(np.random.default_rng(3)),
        "tied": tied(np.random.default_rng(1)),
        "patches": patches(),
    }
    for name, figure in figures.items():
        figure.savefig(out / f"{name}.png", dpi=110)


if __name__ == "__main__":
    main()
