"""Estimators on ten tables: ours with their defaults beside plain nets, ensembles, TabM, boosted trees and processes.

    python benchmarks/tables.py --out results/benchmarks/tables.jsonl --data DIR [--workers 2] [--limit-seconds 600]
    python benchmarks/tables.py --choose ...      scores sets outside the table: to choose defaults, not as results

A line of the output is one cell: set x method x split; finished cells are skipped when it is run again. Splits are the
standard ones of UCI sets (DIR/uci) and seeded ones of scikit-learn's own. NLL and CRPS of real targets are in units of
the training targets' standard deviation. All choices of a method are made on rows of the training set. TabM is its
authors' package, which has to be importable: `pip install tabm` or its two files on PYTHONPATH.
"""

import argparse
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cells import Cells, Workers, lines_of, run_all
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from sklearn.model_selection import train_test_split
from tables_rivals import Found, Method, Split, boosting, deep_ensemble, ours, process, tabm, tuned_plain

import slimbayes as sb
from slimbayes.metrics.functional import crps_mixture
from slimbayes.train.likelihoods import UNIT_NOISE

UCI = ["bostonhousing", "concrete", "energy", "power-plant", "wine-quality-red", "yacht"]
OUTSIDE = ["kin8nm", "naval-propulsion-plant", "protein-tertiary-structure"]  # defaults are chosen on these
OWN = {"diabetes": load_diabetes, "breast-cancer": load_breast_cancer, "wine": load_wine, "digits": load_digits}
SETS = [*UCI, *OWN]
MOST_ROWS = 4_000  # of training, so that large sets do not take all the time
SPLITS = 5
LEVEL = 0.9  # of the intervals whose coverage is counted


def read(name: str, split: int, data: Path, choose: bool) -> Split:
    """One split of a set; with `choose`, a fifth of its training rows in place of the test rows."""
    real = name not in OWN or name == "diabetes"
    if name not in OWN:
        file = np.load(data / "uci" / f"{name}.npz", allow_pickle=False)
        x, y, train, test = file["X"], file["y"].ravel(), file["train_idx"][split], file["test_idx"][split]
    else:
        x, y = OWN[name](return_X_y=True)
        strata = None if real else y
        train, test = train_test_split(np.arange(len(y)), test_size=0.1, random_state=split, stratify=strata)
    if choose:
        strata = None if real else y[train]
        train, test = train_test_split(train, test_size=0.2, random_state=split, stratify=strata)
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
    "mean-field He, KL .1": ours(method=sb.MeanField(prior=sb.HeNormal()), kl_weight=0.1, draws=16),
}


# --- cells ---


def scores(split: Split, found: Found) -> dict[str, float]:
    """NLL, CRPS or Brier score, error or accuracy, and how often central intervals hold real targets."""
    if isinstance(found, tuple):
        means, scales = (torch.as_tensor(part, dtype=torch.float64) for part in found)
        y = torch.as_tensor(split.test_y, dtype=torch.float64)
        logp = torch.distributions.Normal(means, scales).log_prob(y).logsumexp(0) - np.log(len(means))
        below = torch.distributions.Normal(means, scales).cdf(y).mean(0)  # as many targets lie in their intervals
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


def cell(name: str, method: str, split: int, data: Path, choose: bool) -> list[dict[str, Any]]:
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
    return bool(line.get("real")) and line["method"] not in OTHERS and line.get("spread") != UNIT_NOISE


def missing_cells(args: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """Cells without a line yet."""
    done = {(line["data"], line["method"], line["split"]) for line in lines_of(args.out) if not outdated(line)}
    # The splits of a method go together, those that are dear last: what is left over then is of one method.
    for method in args.methods:
        for split in range(args.splits):
            for name in args.sets:
                if (name, method, split) not in done:
                    yield name, method, split


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--limit-seconds", type=float, default=float("inf"))
    parser.add_argument("--splits", type=int, default=SPLITS)
    parser.add_argument("--sets", nargs="*", default=SETS)
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--choose", action="store_true")
    args = parser.parse_args()
    args.sets = OUTSIDE if args.choose and args.sets == SETS else args.sets
    args.methods = list(METHODS | CANDIDATES) if args.methods == ["all"] else args.methods
    if "TabM" in args.methods and find_spec("tabm") is None:
        raise SystemExit("TabM needs its package: pip install tabm, or leave it out of --methods.")
    jobs = [(cell, *job, args.data, args.choose) for job in missing_cells(args)]
    with Workers(args.workers) as pool:
        run_all(pool, jobs, Cells(args.out).add, time.monotonic() + args.limit_seconds)


if __name__ == "__main__":
    main()
