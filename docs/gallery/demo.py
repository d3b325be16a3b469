"""What `make demo` prints, as a chart: five methods on clean and on corrupted digits.

python docs/gallery/demo.py        # writes docs/gallery/demo.png from lab/results/demo.json
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "lab/results/demo.json"
PICTURE = Path(__file__).with_suffix(".png")
PANELS = (  # title, score, what it is multiplied by
    ("accuracy on clean digits, %", "accuracy", 100),
    ("accuracy on corrupted digits, %", "corrupted_accuracy", 100),
    ("NLL on corrupted digits", "corrupted_nll", 1),
)


def main(out: Path = PICTURE) -> dict[str, int]:
    """Draw a small dot for each seed and a large one for their mean; returns the number of seeds by method."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for run in json.loads(RECORD.read_text())["runs"]:
        runs.setdefault(run["method"], []).append(run)
    figure = Figure(figsize=(10, 2.4), layout="constrained")
    panels = figure.subplots(1, len(PANELS), sharey=True)
    for panel, (title, score, unit) in zip(panels, PANELS, strict=True):
        for height, (name, some) in enumerate(runs.items()):
            values = [run[score] * unit for run in some]
            colour = "#b43018" if name == "plain" else "#2f6fb5"
            panel.plot(values, [height] * len(values), ".", color=colour, alpha=0.5)
            panel.plot(mean(values), height, "o", color=colour, markersize=8)
        plain = mean(run[score] * unit for run in runs["plain"])
        panel.axvline(plain, color="#b43018", linewidth=1, linestyle=":")
        panel.set_title(title, fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_xlim(95, 100)
    panels[0].set_yticks(range(len(runs)), list(runs))
    panels[0].invert_yaxis()
    figure.savefig(out, dpi=110)
    return {name: len(some) for name, some in runs.items()}


if __name__ == "__main__":
    print(main())
