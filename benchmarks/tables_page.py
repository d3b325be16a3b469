"""docs/tables.md from the cells that benchmarks/tables.py wrote.

    python benchmarks/tables_page.py results/benchmarks/tables.jsonl docs/tables.md

Only what stands between the page's two marks is written; the rest is text.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

MARKS = ("<!-- table -->\n", "<!-- end of table -->\n")
SECOND = {"nll": "NLL", "crps": "CRPS", "brier": "Brier score"}
Cells = dict[tuple[str, str], list[dict[str, Any]]]


def page(text: str, lines: Sequence[str]) -> str:
    """The page's text with tables of these lines between its marks."""
    cells: Cells = {}
    for cell in map(json.loads, lines):
        cells.setdefault((cell["data"], cell["method"]), []).append(cell)
    before, _, rest = text.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    parts = [
        table(cells, real, score) for real, score in ((True, "nll"), (True, "crps"), (False, "nll"), (False, "brier"))
    ]
    return before + MARKS[0] + "\n".join([*parts, verdict(cells)]) + "\n" + MARKS[1] + after


def table(cells: Cells, real: bool, score: str) -> str:
    """One score of all methods on the sets of real targets or of classes; the best mean of a row is bold."""
    sets = sorted({data for (data, _), found in cells.items() if found[0]["real"] == real})
    methods = list(dict.fromkeys(method for _, method in cells))
    rows = [f"| {SECOND[score]}, {'real targets' if real else 'classes'} | {' | '.join(methods)} |"]
    rows.append("|---" * (len(methods) + 1) + "|")
    for data in sets:
        means = {m: average(cells, data, m, score) for m in methods}
        best = min((value for value in means.values() if value is not None), default=None)
        rows.append(f"| {data} | {' | '.join(entry(cells, data, m, score, means[m], best) for m in methods)} |")
    return "\n".join(rows) + "\n"


def average(cells: Cells, data: str, method: str, score: str) -> float | None:
    values = [cell[score] for cell in cells.get((data, method), []) if score in cell]
    return mean(values) if values else None


def entry(cells: Cells, data: str, method: str, score: str, value: float | None, best: float | None) -> str:
    """Mean and standard error over splits, or a dash where a method does not fit."""
    if value is None:
        return "-"
    values = [cell[score] for cell in cells[data, method] if score in cell]
    error = f" ± {stdev(values) / len(values) ** 0.5:.3f}" if len(values) > 1 else ""
    return f"**{value:.3f}**{error}" if value == best else f"{value:.3f}{error}"


def shared(cells: Cells, data: str, rival: str, score: str) -> tuple[float, float] | None:
    """Means of ours and a rival's over the splits that both have; None where there are none."""
    found = [{c["split"]: c[score] for c in cells.get((data, m), []) if score in c} for m in ("slimbayes", rival)]
    both = sorted(found[0].keys() & found[1].keys())
    return (mean(found[0][s] for s in both), mean(found[1][s] for s in both)) if both else None


def verdict(cells: Cells) -> str:
    """On how many sets our defaults are ahead of each other method, by the mean over splits that both have."""
    told = []
    for rival in dict.fromkeys(method for _, method in cells if method != "slimbayes"):
        for score in SECOND:
            pairs = [shared(cells, data, rival, score) for data in {data for data, _ in cells}]
            known = [pair for pair in pairs if pair is not None]
            if known:
                told.append((rival, SECOND[score], sum(ours < theirs for ours, theirs in known), len(known)))
    rivals = dict.fromkeys(rival for rival, *_ in told)
    lines = [f"- {r}: " + ", ".join(f"{s} {won} of {of}" for name, s, won, of in told if name == r) for r in rivals]
    return "Sets on which the defaults of `slimbayes` have the lower mean:\n\n" + "\n".join(lines)


if __name__ == "__main__":
    records, out = Path(sys.argv[1]), Path(sys.argv[2])
    out.write_text(page(out.read_text(), records.read_text().splitlines()))
