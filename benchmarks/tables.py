"""Estimators on tables: ours with their defaults beside a plain net, deep ensembles, TabM, boosted trees and processes.

    python benchmarks/tables.py --out results/benchmarks/tables.jsonl --data DIR [--workers 2] [--limit-seconds 600]
    python benchmarks/tables.py --choose ...      scores rows held out of training: to choose defaults, not as results

A line of the output is one cell: set x method x split; finished cells are skipped when it is run again. Splits are the
standard ones of UCI sets (DIR/uci) and seeded ones of scikit-learn's own. NLL and CRPS of real targets are in units of
the training targets' standard deviation. All choices of a method are made on rows of the training set.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.model_selection import GridSearchCV, cross_val_predict, train_test_split
from sklearn.preprocessing import StandardScaler

import slimbayes as sb
from slimbayes.metrics.crps import crps_mixture
from slimbayes.sklearn import BayesClassifier, BayesRegressor

UCI = [
    "bostonhousing", "concrete", "energy", "kin8nm", "naval-propulsion-plant", "power-plant",
    "protein-tertiary-structure", "wine-quality-red", "yacht",
]  # fmt: skip
OWN = {"diabetes": load_diabetes, "breast-cancer": load_breast_cancer, "wine": load_wine, "digits": load_digits}
SETS = [*UCI, *OWN]
MOST_ROWS = 4_000  # of training, so that four large sets do not take all the time


class Split(NamedTuple):
    """Rows to learn from and to be judged on; real targets in units of the former's deviation."""

    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    real: bool


def read(name: str, split: int, data: Path, choose: bool) -> Split:
    """One split of a set; with `choose`, a fifth of its training rows in place of the test rows."""
    real = name in UCI or name == "diabetes"
    if name in UCI:
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


# --- methods: each learns a split and gives log-probabilities of its test rows, or means and deviations of draws ---

Found = tuple[np.ndarray, np.ndarray] | np.ndarray
Method = Callable[[Split, int], Found]


def ours(**options: Any) -> Method:
    """Our estimators with a method, or their defaults."""

    def learn(split: Split, seed: int) -> Found:
        kind: Any = BayesRegressor if split.real else BayesClassifier
        found = kind(random_state=seed, **options).fit(split.x, split.y).prediction(split.test_x)
        if not split.real:
            return np.asarray(found.log_probs)
        return np.asarray(found.samples[..., 0]), np.asarray(found.noise[..., 0].sqrt())

    return learn


def tabm(members: int = 32) -> dict[str, Any]:
    """TabM (Gorishniy et al. 2025) on our dense layers: random signs at the first, ones later, heads of their own."""
    same = sb.BatchEnsemble(members=members, mean_init=sb.Point(1.0))
    return {"dense1": sb.BatchEnsemble(members=members), "head": sb.Ensemble(members=members), "dense.*": same}


def boosting(split: Split, seed: int) -> Found:
    """Gradient-boosted trees, chosen by cross-validation. Variances are a mixture of one number and of a second one's,
    both from residuals out of folds, in the share that is likeliest out of folds.
    """
    grid = {"learning_rate": [0.03, 0.1], "max_leaf_nodes": [7, 31]}
    if not split.real:
        trees = HistGradientBoostingClassifier(early_stopping=True, random_state=seed)
        search = GridSearchCV(trees, grid, cv=3, scoring="neg_log_loss").fit(split.x, split.y)
        return np.log(np.maximum(search.predict_proba(split.test_x), 1e-12))
    trees = HistGradientBoostingRegressor(early_stopping=True, max_iter=400, random_state=seed)
    best = GridSearchCV(trees, grid, cv=3).fit(split.x, split.y).best_estimator_
    squares = np.maximum((split.y - cross_val_predict(best, split.x, split.y, cv=5)) ** 2, 1e-6)
    spread = HistGradientBoostingRegressor(loss="gamma", early_stopping=True, max_leaf_nodes=7, learning_rate=0.03)
    folds = np.maximum(cross_val_predict(spread, split.x, squares, cv=5), 1e-6)
    shares = {share: share * squares.mean() + (1 - share) * folds for share in (0.0, 0.1, 0.5, 1.0)}  # of one variance
    share = min(shares, key=lambda share: (np.log(shares[share]) + squares / shares[share]).mean())
    variance = share * squares.mean() + (1 - share) * spread.fit(split.x, squares).predict(split.test_x)
    return best.predict(split.test_x)[None], np.sqrt(variance)[None]


def process(split: Split, seed: int) -> Found:
    """A Gaussian process with a length scale for each column, where there are at most 1,600 rows (600 of classes)."""
    if len(split.x) > (1600 if split.real else 600):
        raise ValueError("too many rows")
    scaler = StandardScaler().fit(split.x)
    x, test = scaler.transform(split.x), scaler.transform(split.test_x)
    kernel = ConstantKernel() * RBF(np.ones(x.shape[1]) * x.shape[1] ** 0.5, (1e-1, 1e4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not split.real:
            model: BaseEstimator = GaussianProcessClassifier(kernel, random_state=seed).fit(x, split.y)
            return np.log(np.maximum(model.predict_proba(test), 1e-12))
        model = GaussianProcessRegressor(kernel + WhiteKernel(0.1, (1e-6, 1e1)), random_state=seed).fit(x, split.y)
        mean, std = model.predict(test, return_std=True)
    return mean[None], std[None]


METHODS: dict[str, Method] = {
    "slimbayes": ours(),
    "plain": ours(method=sb.Deterministic()),
    "deep ensemble": ours(method=sb.Ensemble(members=8)),
    "TabM": ours(method=tabm()),
    "rank-1": ours(method=sb.Rank1(members=8)),
    "BatchEnsemble": ours(method=sb.BatchEnsemble(members=8)),
    "2-tied": ours(method=sb.KTied(prior=sb.HeNormal()), kl_weight=0.1, draws=16),
    "boosted trees": boosting,
    "Gaussian process": process,
}
CANDIDATES: dict[str, Method] = {
    "slimbayes, KL .1": ours(kl_weight=0.1),
    "slimbayes, decay 1e-4": ours(weight_decay=1e-4),
    "slimbayes, 10 % held out": ours(validation_fraction=0.1),
    "slimbayes, one noise": ours(noise="learned"),
    "TabM, 8 members": ours(method=tabm(8)),
    "mean-field He, KL .1": ours(method=sb.MeanField(prior=sb.HeNormal()), kl_weight=0.1, draws=16),
}


# --- cells ---


def scores(split: Split, found: Found) -> dict[str, float]:
    """NLL and CRPS or Brier score of a prediction, and its error."""
    if isinstance(found, tuple):
        means, scales = (torch.as_tensor(part, dtype=torch.float64) for part in found)
        y = torch.as_tensor(split.test_y, dtype=torch.float64)
        logp = torch.distributions.Normal(means, scales).log_prob(y).logsumexp(0) - np.log(len(means))
        rmse = float((means.mean(0) - y).square().mean().sqrt())
        return {"nll": float(-logp.mean()), "crps": float(crps_mixture(means, scales, y).mean()), "rmse": rmse}
    at = np.arange(len(found)), split.test_y
    brier = ((np.exp(found) - np.eye(found.shape[1])[split.test_y]) ** 2).sum(1).mean()
    return {"nll": float(-found[at].mean()), "brier": float(brier), "error": float((found.argmax(1) != at[1]).mean())}


def cell(name: str, method: str, split: int, data: Path, choose: bool) -> dict[str, Any]:
    """One line of the output."""
    torch.set_num_threads(1)
    line: dict[str, Any] = {"data": name, "method": method, "split": split}
    rows, start = read(name, split, data, choose), time.time()
    line |= {"rows": len(rows.x), "columns": rows.x.shape[1], "real": rows.real}
    try:
        line |= scores(rows, (METHODS | CANDIDATES)[method](rows, split))
    except (ValueError, FloatingPointError, RuntimeError) as error:
        line["failed"] = str(error)[:200]
    return line | {"seconds": round(time.time() - start, 2)}


def missing_cells(args: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """Cells without a line yet, whole splits first."""
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    done = {(line["data"], line["method"], line["split"]) for line in map(json.loads, lines)}
    for split in range(args.splits):
        for name in args.sets:
            for method in args.methods:
                if (name, method, split) not in done:
                    yield name, method, split


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--limit-seconds", type=float, default=float("inf"))
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--sets", nargs="*", default=SETS)
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--choose", action="store_true")
    args = parser.parse_args()
    args.methods = list(METHODS | CANDIDATES) if args.methods == ["all"] else args.methods
    end, waiting, running = time.time() + args.limit_seconds, missing_cells(args), {}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool, open(args.out, "a") as out:
        while True:
            while len(running) < args.workers and time.time() < end and (job := next(waiting, None)):
                running[pool.submit(cell, *job, args.data, args.choose)] = job
            if not running:
                return
            done = next(as_completed(running))
            running.pop(done)
            out.write(json.dumps(done.result()) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
