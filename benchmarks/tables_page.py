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

from cells import Paired, between, paired
from cells import table as markdown
from tables import METHODS, SETS, SPLITS, outdated

MARKS = ("<!-- table -->\n", "<!-- end of table -->\n")
NAMES = {
    "nll": "NLL", "crps": "CRPS", "brier": "Brier score", "rmse": "RMSE", "accuracy": "accuracy",
    "coverage": "coverage of 90 % intervals", "seconds": "seconds",
}  # fmt: skip
LEAST = ("nll", "crps", "brier", "rmse")  # where less is better
OURS, PLAIN = "slimbayes", ("plain", "plain, tuned")
Cells = dict[tuple[str, str], dict[int, dict[str, Any]]]  # by set and method, then by split


def page(text: str, lines: Sequence[str]) -> str:
    """The page's text with tables of these lines between its marks."""
    cells: Cells = {}
    for cell in map(json.loads, lines):
        cells.setdefault((cell["data"], cell["method"]), {})[cell["split"]] = cell
    parts = [reading(cells), *older(cells), against_plain(cells), verdicts(cells)]
    for real, scores in ((True, ("nll", "crps", "rmse", "coverage")), (False, ("nll", "brier", "accuracy"))):
        parts += [table(cells, real, score) for score in scores]
    parts.append(table(cells, None, "seconds"))
    return between(text, MARKS, "\n".join(parts))


def names(cells: Cells, real: bool | None = None) -> tuple[list[str], list[str]]:
    """The sets, of real targets or of classes or all, and the methods."""
    sets = {data for (data, _), found in cells.items() if real in (None, next(iter(found.values()))["real"])}
    return sorted(sets), list(dict.fromkeys(method for _, method in cells))


def values(cells: Cells, data: str, method: str, score: str) -> dict[int, float]:
    """A score by split, of the cells that did not fail."""
    found = cells.get((data, method), {})
    return {split: cell[score] for split, cell in found.items() if score in cell and "failed" not in cell}


def less(cells: Cells, data: str, method: str, rival: str, score: str) -> Paired | None:
    """How much less a method's score is than a rival's; None where they share no split."""
    return paired(*(values(cells, data, m, score) for m in (method, rival)))


def comparisons(cells: Cells, method: str, rival: str, score: str) -> dict[str, Paired]:
    found = {data: less(cells, data, method, rival, score) for data in names(cells)[0]}
    return {data: one for data, one in found.items() if one is not None}


def counted(found: dict[str, Paired]) -> str:
    """Wins / ties / losses."""
    sides = [one.side for one in found.values()]
    return " / ".join(str(sides.count(side)) for side in (-1, 0, 1))


def reading(cells: Cells) -> str:
    """What the counts say, in two sentences."""
    told = [f"a lower mean {NAMES[score]} than {ahead(cells, PLAIN, score)}" for score in ("nll", "crps")]
    others = [rival for rival in names(cells)[1] if rival not in (OURS, *PLAIN)]
    return (
        f"With their defaults, the estimators have {'; and '.join(told)}. "
        f"Their mean NLL is lower than that of {ahead(cells, others, 'nll')}.\n"
    )


def older(cells: Cells) -> list[str]:
    """What the record lacks, and nets that are not as they are now."""
    found = [cell for by_split in cells.values() for cell in by_split.values()]
    whole = len(SETS) * SPLITS
    had = {method: sum(cell["method"] == method for cell in found) for method in METHODS}
    lacking = [f"{method} has {count} of {whole} cells" for method, count in had.items() if count < whole]
    count = sum(outdated(cell) for cell in found)
    told = [f"The record is not whole: {', '.join(lacking)}.\n"] if lacking else []
    if count:
        told.append(
            f"{count} of these {len(found)} cells are of nets that learnt their noise within other bounds than now.\n"
        )
    return told


def ahead(cells: Cells, rivals: Sequence[str], score: str) -> str:
    """Of each rival, on how many sets; sets on which we are behind by more than the interval are named."""
    told = []
    for rival in rivals:
        found = comparisons(cells, OURS, rival, score)
        losses = [data for data, one in found.items() if one.side > 0]
        won = f"{rival.replace(', ', ' and ')} on {sum(one.mean < 0 for one in found.values())} of {len(found)} sets"
        told += (
            [won + (f" (behind by more than the interval on {', '.join(losses)})" if losses else "")] if found else []
        )
    return ", ".join(told) or "nothing that was run"


def against_plain(cells: Cells) -> str:
    """By how much our scores are less than those of plain nets, set by set."""
    columns = [(score, rival) for score in ("nll", "crps", "brier") for rival in PLAIN]
    rows = [["slimbayes less", *(f"{NAMES[score]}, {rival.replace(', ', ' and ')}" for score, rival in columns)]]
    for data in names(cells)[0]:
        rows.append([data, *(difference(less(cells, data, OURS, rival, score)) for score, rival in columns)])
    return "\n".join(markdown(rows)) + "\n"


def difference(found: Paired | None) -> str:
    """Bold where its interval excludes zero."""
    if found is None:
        return "-"
    text = f"{found.mean:+.3f}" + ("" if found.half is None else f" ± {found.half:.3f}")
    return f"**{text}**" if found.side else text


def verdicts(cells: Cells) -> str:
    """Wins, ties and losses of all methods against the plain net."""
    scores = ("nll", "crps", "brier")
    rows = [["wins / ties / losses against plain", *(NAMES[score] for score in scores)]]
    for method in names(cells)[1]:
        if method != PLAIN[0]:
            rows.append([method, *(counted(comparisons(cells, method, PLAIN[0], score)) for score in scores)])
    return "\n".join(markdown(rows)) + "\n"


def table(cells: Cells, real: bool | None, score: str) -> str:
    """One score of all methods on the sets of real targets, of classes, or all; the best mean of a row is bold."""
    sets, methods = names(cells, real)
    kind = {True: ", real targets", False: ", classes", None: ""}[real]
    rows = [[f"{NAMES[score]}{kind}", *methods]]
    for data in sets:
        means = {m: mean(v.values()) for m in methods if (v := values(cells, data, m, score))}
        judged = means.values() if score not in ("coverage", "seconds") else ()
        best = (min if score in LEAST else max)(judged, default=None)
        rows.append([data, *(entry(cells, data, m, score, means.get(m), best) for m in methods)])
    return "\n".join(markdown(rows)) + "\n"


def entry(cells: Cells, data: str, method: str, score: str, value: float | None, best: float | None) -> str:
    """Mean and standard error over splits, or a dash where a method does not fit."""
    if value is None:
        return "-"
    if score == "seconds":
        return f"{value:.1f}"
    found = list(values(cells, data, method, score).values())
    error = f" ± {stdev(found) / len(found) ** 0.5:.3f}" if len(found) > 1 else ""
    return f"**{value:.3f}**{error}" if value == best else f"{value:.3f}{error}"


if __name__ == "__main__":
    records, out = Path(sys.argv[1]), Path(sys.argv[2])
    out.write_text(page(out.read_text(), records.read_text().splitlines()))
