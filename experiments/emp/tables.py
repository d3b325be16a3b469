"""Tables 12 and 13 of the EMP paper beside our numbers, from the records that regression.py and variants.py write.

    python experiments/emp/tables.py        rewrites the tables in experiments/emp/README.md

Nothing here needs torch.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parents[1] / "results" / "emp"
METHODS = ("ECMP", "EMP", "Dropout", "Ensemble")
SCORES = {"rmse": "Table 12: root mean squared error", "lpd": "Table 13: log predictive density"}


class Printed(NamedTuple):
    """A set in the paper: its name and number of targets there, and (mean, standard error) for each of METHODS."""

    name: str
    targets: int
    rmse: tuple[tuple[float, float], ...]
    lpd: tuple[tuple[float, float], ...]


PAPER = {
    "bostonhousing": Printed(
        "Boston",
        1,
        ((3.48, 0.18), (3.56, 0.22), (3.97, 0.26), (4.29, 0.27)),
        ((-2.65, 0.05), (-2.70, 0.07), (-2.92, 0.11), (-2.81, 0.07)),
    ),
    "concrete": Printed(
        "Concrete",
        1,
        ((5.61, 0.14), (5.64, 0.15), (7.06, 0.19), (8.81, 0.15)),
        ((-3.46, 0.07), (-3.59, 0.08), (-4.60, 0.14), (-5.09, 0.13)),
    ),
    "energy": Printed(
        "Energy",
        2,
        ((1.35, 0.06), (1.24, 0.04), (2.63, 0.05), (3.40, 0.31)),
        ((-2.19, 0.01), (-2.15, 0.01), (-2.42, 0.01), (-2.58, 0.03)),
    ),
    "kin8nm": Printed(
        "Kin8nm",
        1,
        ((0.08, 0.00), (0.08, 0.00), (0.08, 0.00), (0.08, 0.00)),
        ((-2.07, 0.00), (-2.07, 0.00), (-2.07, 0.00), (-2.07, 0.00)),
    ),
    "naval-propulsion-plant": Printed(
        "Naval",
        2,
        ((0.00, 0.00), (0.00, 0.00), (0.01, 0.00), (0.01, 0.00)),
        ((-2.07, 0.00), (-2.07, 0.00), (-2.07, 0.00), (-2.07, 0.00)),
    ),
    "power-plant": Printed(
        "Power",
        1,
        ((4.24, 0.05), (4.29, 0.05), (4.07, 0.04), (4.04, 0.04)),
        ((-2.95, 0.02), (-2.99, 0.02), (-2.90, 0.01), (-2.87, 0.01)),
    ),
    "protein-tertiary-structure": Printed(
        "Protein",
        1,
        ((1.95, 0.06), (2.00, 0.07), (2.01, 0.07), (2.24, 0.06)),
        ((-2.26, 0.01), (-2.27, 0.01), (-2.27, 0.01), (-2.33, 0.01)),
    ),
    "wine-quality-red": Printed(
        "WineRed",
        1,
        ((0.60, 0.02), (0.62, 0.02), (0.63, 0.01), (0.88, 0.06)),
        ((-2.09, 0.00), (-2.09, 0.00), (-2.09, 0.00), (-2.14, 0.01)),
    ),
    "yacht": Printed(
        "Yacht",
        1,
        ((1.59, 0.23), (1.60, 0.28), (12.90, 1.26), (29.48, 5.14)),
        ((-2.25, 0.02), (-2.22, 0.05), (-10.79, 1.66), (-5.24, 0.36)),
    ),
}


def scores(record: dict[str, Any], data: str, method: str, score: str) -> list[float]:
    """A score of every split, in the order of the splits."""
    runs = [run for run in record["runs"] if (run["data"], run["method"]) == (data, method)]
    return [run[score] for run in sorted(runs, key=lambda run: run["split"])]


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean and its standard error; the error of a single value is NaN.

    >>> mean_and_error([1.0, 5.0, 9.0, 5.0])[0], mean_and_error([0.0, 2.0])
    (5.0, (1.0, 1.0))
    """
    mean, n = math.fsum(values) / len(values), len(values)
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n) if n > 1 else math.nan


def cell(mean: float, error: float) -> str:
    """Two digits after the point, as the paper prints.

    >>> cell(0.9612, 0.0312), cell(1.5, math.nan)
    ('0.96 ± 0.03', '1.50')
    """
    return f"{mean:.2f}" if math.isnan(error) else f"{mean:.2f} ± {error:.2f}"


def table(record: dict[str, Any], score: str) -> list[str]:
    """One of the paper's tables as markdown: for each set our row and, below it, the paper's."""
    methods = record["methods"]
    lines = [
        f"| dataset | size | features, targets | splits | {' | '.join(methods)} |",
        "|---|---:|---|---|" + "---:|" * len(methods),
    ]
    for data, size in record["data"].items():
        values = {method: scores(record, data, method, score) for method in methods}
        counts = sorted({len(v) for v in values.values()})
        if counts == [0]:  # a run that was stopped before it came to this set
            continue
        ours = [cell(*mean_and_error(v)) if v else "" for v in values.values()]
        count = "-".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        shape = f"{size['features']}, {size['targets']}"
        printed = PAPER.get(data)
        lines.append(
            f"| {printed.name if printed else data} | {size['rows']:,} | {shape} | {count} | {' | '.join(ours)} |"
        )
        if printed:
            theirs = dict(zip(METHODS, getattr(printed, score), strict=True))
            shape = f"{size['features']}, {printed.targets}"
            lines.append(
                f"| *paper* | | {shape} | | {' | '.join(cell(*theirs[m]) if m in theirs else '' for m in methods)} |"
            )
    return lines


def show(record: dict[str, Any]) -> str:
    """Both tables, and what a training step and a prediction took."""
    blocks = [
        [f"{title}, mean ± standard error over splits", "", *table(record, score)] for score, title in SCORES.items()
    ]
    return "\n\n".join("\n".join(block) for block in [*blocks, times(record)])


def times(record: dict[str, Any]) -> list[str]:
    """Milliseconds of a training step and seconds of a whole prediction, means over all runs, by method."""
    lines = ["| | " + " | ".join(record["methods"]) + " |", "|---|" + "---:|" * len(record["methods"])]
    for label, key, digits in (
        ("ms per training step", "ms_per_step", 2),
        ("seconds to predict", "predict_seconds", 2),
    ):
        columns = [[run[key] for run in record["runs"] if run["method"] == method] for method in record["methods"]]
        lines.append(
            f"| {label} | " + " | ".join(f"{math.fsum(c) / len(c):.{digits}f}" if c else "" for c in columns) + " |"
        )
    return lines


def show_variants(record: dict[str, Any]) -> str:
    """RMSE and LPD of every reading in one table."""
    lines = [f"| reading | | {' | '.join(METHODS)} |", "|---|---|" + "---:|" * len(METHODS)]
    for name, part in record["variants"].items():
        data = next(iter(part["data"]))
        for score in SCORES:
            values = [scores(part, data, method, score) for method in METHODS]
            label = name if score == "rmse" else ""
            lines.append(
                f"| {label} | {score.upper()} | {' | '.join(cell(*mean_and_error(v)) if v else '' for v in values)} |"
            )
    return "\n".join(lines)


def section(file: Path) -> str:
    """A record as a part of the README: where it comes from, then its tables."""
    record = json.loads(file.read_text())
    first = next(iter(record["variants"].values())) if "variants" in record else record
    setting = first["setting"]
    origin = f"`results/emp/{file.name}`: {setting['epochs']:,} epochs, S = {setting['draws']:,}, seed {first['seed']}."
    return f"{origin}\n\n{show_variants(record) if 'variants' in record else show(record)}"


def page(text: str, folder: Path = RESULTS) -> str:
    """The README with every block between `<!-- name.json -->` and `<!-- end -->` written anew from that record."""
    parts = text.split("<!-- ")
    for i, part in enumerate(parts[1:], 1):
        name = part.split(" -->")[0]
        if name.endswith(".json"):
            found = section(folder / name) if (folder / name).exists() else "Not run yet."
            parts[i] = f"{name} -->\n\n{found}\n\n"
    return "<!-- ".join(parts)


if __name__ == "__main__":
    readme = FOLDER / "README.md"
    readme.write_text(page(readme.read_text()))
    print(readme.read_text())
