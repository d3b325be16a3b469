"""Estimators on ten tables: ours with their defaults beside plain nets, ensembles, TabM, boosted trees and processes.

    python benchmarks/tables.py --out lab/results/benchmarks/tables.jsonl --data DIR [--workers 2] [--limit-seconds 600]
    python benchmarks/tables.py --out lab/results/benchmarks/tables.jsonl --page docs/tables.md     writes the page's tables
    python benchmarks/tables.py --choose ...      scores sets outside the table: to choose defaults, not as results

A line of the output is one cell: set x method x split; finished cells are skipped when it is run again. Splits are the
standard ones of UCI sets (DIR/uci) and seeded ones of scikit-learn's own. NLL and CRPS of real targets are in units of
the training targets' standard deviation. All choices of a method are made on rows of the training set. TabM is its
authors' package, which has to be importable: `pip install tabm` or its two files on PYTHONPATH.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from cells import Cells, Paired, Workers, between, lines_of, paired, run_all
from cells import table as markdown
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from sklearn.model_selection import train_test_split
from tables_rivals import (
    Found,
    Method,
    Split,
    boosting,
    deep_ensemble,
    ours,
    process,
    tabm,
    tuned_plain,
)

import slimbayes as sb
from slimbayes.metrics.functional import crps_mixture
from slimbayes.train.heteroscedastic import UNIT_NOISE

UCI = [
    "bostonhousing",
    "concrete",
    "energy",
    "power-plant",
    "wine-quality-red",
    "yacht",
]
OUTSIDE = [
    "kin8nm",
    "naval-propulsion-plant",
    "protein-tertiary-structure",
]  # defaults are chosen on these
OWN = {
    "diabetes": load_diabetes,
    "breast-cancer": load_breast_cancer,
    "wine": load_wine,
    "digits": load_digits,
}
SETS = [*UCI, *OWN]
MOST_ROWS = 4_000  # of training, so that large sets do not take all the time
SPLITS = 5
LEVEL = 0.9  # of the intervals whose coverage is counted


def read(name: str, split: int, data: Path, choose: bool) -> Split:
    """One split of a set; with `choose`, a fifth of its training rows in place of the test rows."""
    real = name not in OWN or name == "diabetes"
    if name not in OWN:
        file = np.load(data / "uci" / f"{name}.npz", allow_pickle=False)
        x, y, train, test = (
            file["X"],
            file["y"].ravel(),
            file["train_idx"][split],
            file["test_idx"][split],
        )
    else:
        x, y = OWN[name](return_X_y=True)
        strata = None if real else y
        train, test = train_test_split(
            np.arange(len(y)), test_size=0.1, random_state=split, stratify=strata
        )
    if choose:
        strata = None if real else y[train]
        train, test = train_test_split(
            train, test_size=0.2, random_state=split, stratify=strata
        )
    train = np.random.default_rng(split).permutation(train)[:MOST_ROWS]
    mean, std = (y[train].mean(), y[train].std()) if real else (0, 1)
    coded = (y - mean) / std if real else y
    return Split(x[train], coded[train], x[test], coded[test], real)


METHODS: dict[str, Method] = {
    "slimbayes": ours(),
    "plain": ours(method=sb.Deterministic()),
    "plain, tuned": tuned_plain,
    "deep ensemble": deep_ensemble,
    "boosted trees": boosting,
    "TabM": tabm,
    "Gaussian process": process,
}
OTHERS = ("boosted trees", "Gaussian process")  # whose noise is their own
CANDIDATES: dict[str, Method] = {
    "slimbayes, KL .1": ours(kl_weight=0.1),
    "slimbayes, decay 1e-4": ours(weight_decay=1e-4),
    "slimbayes, 10 % held out": ours(validation_fraction=0.1),
    "slimbayes, one noise": ours(noise="learned"),
    "mean-field He, KL .1": ours(
        method=sb.MeanField(prior=sb.HeNormal()), kl_weight=0.1, draws=16
    ),
}


# --- cells ---


def scores(split: Split, found: Found) -> dict[str, float]:
    """NLL, CRPS or Brier score, error or accuracy, and how often central intervals hold real targets."""
    if isinstance(found, tuple):
        means, scales = (torch.as_tensor(part, dtype=torch.float64) for part in found)
        y = torch.as_tensor(split.test_y, dtype=torch.float64)
        logp = torch.distributions.Normal(means, scales).log_prob(y).logsumexp(
            0
        ) - np.log(len(means))
        below = (
            torch.distributions.Normal(means, scales).cdf(y).mean(0)
        )  # as many targets lie in their intervals
        return {
            "nll": float(-logp.mean()),
            "crps": float(crps_mixture(means, scales, y).mean()),
            "rmse": float((means.mean(0) - y).square().mean().sqrt()),
            "coverage": float(((below - 0.5).abs() <= LEVEL / 2).double().mean()),
        }
    at = np.arange(len(found)), split.test_y
    brier = ((np.exp(found) - np.eye(found.shape[1])[split.test_y]) ** 2).sum(1).mean()
    return {
        "nll": float(-found[at].mean()),
        "brier": float(brier),
        "accuracy": float((found.argmax(1) == at[1]).mean()),
    }


def cell(
    name: str, method: str, split: int, data: Path, choose: bool
) -> list[dict[str, Any]]:
    """One line of the output."""
    torch.set_num_threads(1)
    line: dict[str, Any] = {"data": name, "method": method, "split": split}
    rows, start = read(name, split, data, choose), time.time()
    line |= {"rows": len(rows.x), "columns": rows.x.shape[1], "real": rows.real}
    line |= {"spread": UNIT_NOISE} if rows.real and method not in OTHERS else {}
    try:
        line |= scores(rows, (METHODS | CANDIDATES)[method](rows, split))
    except (ValueError, FloatingPointError, RuntimeError) as error:
        line["failed"] = str(error)[:200]
    return [line | {"seconds": round(time.time() - start, 2)}]


def outdated(line: dict[str, Any]) -> bool:
    """Whether a net learnt its noise within other bounds than nets do now."""
    return (
        bool(line.get("real"))
        and line["method"] not in OTHERS
        and line.get("spread") != UNIT_NOISE
    )


def missing_cells(args: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """Cells without a line yet."""
    done = {
        (line["data"], line["method"], line["split"])
        for line in lines_of(args.out)
        if not outdated(line)
    }
    # The splits of a method go together, those that are dear last: what is left over then is of one method.
    for method in args.methods:
        for split in range(args.splits):
            for name in args.sets:
                if (name, method, split) not in done:
                    yield name, method, split


# --- the page: what stands between the marks of docs/tables.md ---

MARKS = ("<!-- table -->\n", "<!-- end of table -->\n")
NAMES = {
    "nll": "NLL", "crps": "CRPS", "brier": "Brier score", "rmse": "RMSE", "accuracy": "accuracy",
    "coverage": "coverage of 90 % intervals", "seconds": "seconds",
}  # fmt: skip
LEAST = ("nll", "crps", "brier", "rmse")  # where less is better
OURS, PLAIN = "slimbayes", ("plain", "plain, tuned")
BySet = dict[
    tuple[str, str], dict[int, dict[str, Any]]
]  # cells by set and method, then by split


def page(text: str, lines: Sequence[str]) -> str:
    """The page's text with tables of these lines between its marks."""
    cells: BySet = {}
    for cell in map(json.loads, lines):
        cells.setdefault((cell["data"], cell["method"]), {})[cell["split"]] = cell
    parts = [reading(cells), *older(cells), against_plain(cells), verdicts(cells)]
    for real, scores in (
        (True, ("nll", "crps", "rmse", "coverage")),
        (False, ("nll", "brier", "accuracy")),
    ):
        parts += [table(cells, real, score) for score in scores]
    parts.append(table(cells, None, "seconds"))
    return between(text, MARKS, "\n".join(parts))


def names(cells: BySet, real: bool | None = None) -> tuple[list[str], list[str]]:
    """The sets, of real targets or of classes or all, and the methods."""
    sets = {
        data
        for (data, _), found in cells.items()
        if real in (None, next(iter(found.values()))["real"])
    }
    return sorted(sets), list(dict.fromkeys(method for _, method in cells))


def values(cells: BySet, data: str, method: str, score: str) -> dict[int, float]:
    """A score by split, of the cells that did not fail."""
    found = cells.get((data, method), {})
    return {
        split: cell[score]
        for split, cell in found.items()
        if score in cell and "failed" not in cell
    }


def less(cells: BySet, data: str, method: str, rival: str, score: str) -> Paired | None:
    """How much less a method's score is than a rival's; None where they share no split."""
    return paired(*(values(cells, data, m, score) for m in (method, rival)))


def comparisons(cells: BySet, method: str, rival: str, score: str) -> dict[str, Paired]:
    found = {data: less(cells, data, method, rival, score) for data in names(cells)[0]}
    return {data: one for data, one in found.items() if one is not None}


def counted(found: dict[str, Paired]) -> str:
    """Wins / ties / losses."""
    sides = [one.side for one in found.values()]
    return " / ".join(str(sides.count(side)) for side in (-1, 0, 1))


def reading(cells: BySet) -> str:
    """What the counts say, in two sentences."""
    told = [
        f"a lower mean {NAMES[score]} than {ahead(cells, PLAIN, score)}"
        for score in ("nll", "crps")
    ]
    others = [rival for rival in names(cells)[1] if rival not in (OURS, *PLAIN)]
    return (
        f"With their defaults, the estimators have {'; and '.join(told)}. "
        f"Their mean NLL is lower than that of {ahead(cells, others, 'nll')}.\n"
    )


def older(cells: BySet) -> list[str]:
    """What the record lacks, and nets that are not as they are now."""
    found = [cell for by_split in cells.values() for cell in by_split.values()]
    whole = len(SETS) * SPLITS
    had = {
        method: sum(cell["method"] == method for cell in found) for method in METHODS
    }
    lacking = [
        f"{method} has {count} of {whole} cells"
        for method, count in had.items()
        if count < whole
    ]
    count = sum(outdated(cell) for cell in found)
    told = [f"The record is not whole: {', '.join(lacking)}.\n"] if lacking else []
    if count:
        told.append(
            f"{count} of these {len(found)} cells are of nets that learnt their noise within other bounds than now.\n"
        )
    return told


def ahead(cells: BySet, rivals: Sequence[str], score: str) -> str:
    """Of each rival, on how many sets; sets on which we are behind by more than the interval are named."""
    told = []
    for rival in rivals:
        found = comparisons(cells, OURS, rival, score)
        losses = [data for data, one in found.items() if one.side > 0]
        won = f"{rival.replace(', ', ' and ')} on {sum(one.mean < 0 for one in found.values())} of {len(found)} sets"
        told += (
            [
                won
                + (
                    f" (behind by more than the interval on {', '.join(losses)})"
                    if losses
                    else ""
                )
            ]
            if found
            else []
        )
    return ", ".join(told) or "nothing that was run"


def against_plain(cells: BySet) -> str:
    """By how much our scores are less than those of plain nets, set by set."""
    columns = [(score, rival) for score in ("nll", "crps", "brier") for rival in PLAIN]
    rows = [
        [
            "slimbayes less",
            *(
                f"{NAMES[score]}, {rival.replace(', ', ' and ')}"
                for score, rival in columns
            ),
        ]
    ]
    for data in names(cells)[0]:
        rows.append(
            [
                data,
                *(
                    difference(less(cells, data, OURS, rival, score))
                    for score, rival in columns
                ),
            ]
        )
    return "\n".join(markdown(rows)) + "\n"


def difference(found: Paired | None) -> str:
    """Bold where its interval excludes zero."""
    if found is None:
        return "-"
    text = f"{found.mean:+.3f}" + ("" if found.half is None else f" ± {found.half:.3f}")
    return f"**{text}**" if found.side else text


def verdicts(cells: BySet) -> str:
    """Wins, ties and losses of all methods against the plain net."""
    scores = ("nll", "crps", "brier")
    rows = [["wins / ties / losses against plain", *(NAMES[score] for score in scores)]]
    for method in names(cells)[1]:
        if method != PLAIN[0]:
            rows.append(
                [
                    method,
                    *(
                        counted(comparisons(cells, method, PLAIN[0], score))
                        for score in scores
                    ),
                ]
            )
    return "\n".join(markdown(rows)) + "\n"


def table(cells: BySet, real: bool | None, score: str) -> str:
    """One score of all methods on the sets of real targets, of classes, or all; the best mean of a row is bold."""
    sets, methods = names(cells, real)
    kind = {True: ", real targets", False: ", classes", None: ""}[real]
    rows = [[f"{NAMES[score]}{kind}", *methods]]
    for data in sets:
        means = {
            m: mean(v.values()) for m in methods if (v := values(cells, data, m, score))
        }
        judged = means.values() if score not in ("coverage", "seconds") else ()
        best = (min if score in LEAST else max)(judged, default=None)
        rows.append(
            [data, *(entry(cells, data, m, score, means.get(m), best) for m in methods)]
        )
    return "\n".join(markdown(rows)) + "\n"


def entry(
    cells: BySet,
    data: str,
    method: str,
    score: str,
    value: float | None,
    best: float | None,
) -> str:
    """Mean and standard error over splits, or a dash where a method does not fit."""
    if value is None:
        return "-"
    if score == "seconds":
        return f"{value:.1f}"
    found = list(values(cells, data, method, score).values())
    error = f" ± {stdev(found) / len(found) ** 0.5:.3f}" if len(found) > 1 else ""
    return f"**{value:.3f}**{error}" if value == best else f"{value:.3f}{error}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--limit-seconds", type=float, default=float("inf"))
    parser.add_argument("--splits", type=int, default=SPLITS)
    parser.add_argument("--sets", nargs="*", default=SETS)
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--choose", action="store_true")
    parser.add_argument(
        "--page", type=Path, help="write its tables from --out, and run nothing"
    )
    args = parser.parse_args()
    if args.page:
        args.page.write_text(
            page(args.page.read_text(), args.out.read_text().splitlines())
        )
        return
    args.sets = OUTSIDE if args.choose and args.sets == SETS else args.sets
    args.methods = (
        list(METHODS | CANDIDATES) if args.methods == ["all"] else args.methods
    )
    if "TabM" in args.methods and find_spec("tabm") is None:
        raise SystemExit(
            "TabM needs its package: pip install tabm, or leave it out of --methods."
        )
    jobs = [(cell, *job, args.data, args.choose) for job in missing_cells(args)]
    with Workers(args.workers) as pool:
        run_all(pool, jobs, Cells(args.out).add, time.monotonic() + args.limit_seconds)


if __name__ == "__main__":
    main()
