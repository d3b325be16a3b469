"""Rivals of the estimators on tables: plain nets and ensembles of them, TabM, boosted trees, Gaussian processes.

Nets have the settings of their makers: ours, the plain net and its ensemble those of our estimators, TabM those of its
package. Where a method is tuned, its four settings are compared on rows of the training set: a second plain net by its
held-out rows, trees by cross-validation; a process by its marginal likelihood.

A method learns a split and gives log-probabilities (N, C) of its test rows, or means and deviations (S, N) of the S
draws, members or nets that its predictive distribution averages.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
)
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.model_selection import GridSearchCV, cross_val_predict, train_test_split
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.sklearn import BayesClassifier, BayesRegressor
from slimbayes.sklearn.columns import scaler
from slimbayes.sklearn.network import batch_size, log_likelihood
from slimbayes.train.likelihoods import LIKELIHOODS, LikelihoodName

GRID = [
    (lr, decay) for lr in (2e-3, 6e-3) for decay in (1e-2, 1e-4)
]  # the first is the estimators' own
MEMBERS, WIDTH, PATIENCE, EPOCHS = 5, 128, 16, 200
TABM = 2e-3, 3e-4  # learning rate and weight decay in the package's own example
MOST_OF_A_PROCESS = {True: 1_000, False: 600}  # rows, of real targets and of classes


class Split(NamedTuple):
    """Rows to learn from and to be judged on; real targets in units of the former's deviation."""

    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    real: bool


Found = tuple[np.ndarray, np.ndarray] | np.ndarray
Method = Callable[[Split, int], Found]


# --- nets ---


def estimator(split: Split, seed: int, **options: Any) -> Any:
    """One of our estimators, fitted."""
    kind: Any = BayesRegressor if split.real else BayesClassifier
    return kind(random_state=seed, **options).fit(split.x, split.y)


def found_by(model: Any, split: Split) -> Found:
    """What a fitted estimator says of the test rows."""
    found = model.prediction(split.test_x)
    if not split.real:
        return np.asarray(found.log_probs)
    return np.asarray(found.samples[..., 0]), np.asarray(found.noise[..., 0].sqrt())


def ours(**options: Any) -> Method:
    """Our estimators with their defaults, or with other options."""
    return lambda split, seed: found_by(estimator(split, seed, **options), split)


def plain(split: Split, seed: int, setting: tuple[float, float] = GRID[0]) -> Any:
    return estimator(
        split, seed, method=sb.Deterministic(), lr=setting[0], weight_decay=setting[1]
    )


def tuned_plain(split: Split, seed: int) -> Found:
    """A net like ours without a posterior, of the setting that predicts its held-out rows best."""
    tried = [plain(split, seed, setting) for setting in GRID]
    return found_by(min(tried, key=lambda model: min(model.validation_curve_)), split)


def deep_ensemble(split: Split, seed: int) -> Found:
    """Five plain nets, each with its own start, order of rows and held-out rows."""
    found = [found_by(plain(split, 1000 * i + seed), split) for i in range(MEMBERS)]
    if split.real:
        return np.concatenate([f[0] for f in found]), np.concatenate(
            [f[1] for f in found]
        )
    return np.asarray(torch.as_tensor(np.stack(found)).logsumexp(0) - math.log(MEMBERS))


# --- TabM (Gorishniy et al. 2025), by its authors' package ---


def tabm(split: Split, seed: int) -> Found:
    """TabM of 32 members and two blocks of 128 units; its rows, batches, noise and stopping are those of ours."""
    from tabm import TabM

    torch.manual_seed(seed)
    scale = scaler("quantile", "refuse", len(split.x), seed).fit(split.x)
    x, test = (
        torch.as_tensor(scale.transform(rows), dtype=torch.float32)
        for rows in (split.x, split.test_x)
    )
    y = (
        torch.as_tensor(split.y).float()
        if split.real
        else torch.as_tensor(split.y).long()
    )
    kept, held = train_test_split(
        torch.arange(len(y)),
        test_size=0.2,
        random_state=seed,
        stratify=None if split.real else split.y,
    )
    outputs = 2 if split.real else int(y.max()) + 1
    net = TabM.make(n_num_features=x.shape[1], d_out=outputs, n_blocks=2, d_block=WIDTH)
    _train(net, (x[kept], y[kept]), (x[held], y[held]), split.real, *TABM)
    with torch.no_grad():
        out = net.eval()(test).transpose(0, 1)
    if not split.real:
        return np.asarray(out.log_softmax(-1).logsumexp(0) - math.log(len(out)))
    mean, variance = LIKELIHOODS["heteroscedastic_gaussian"].predictive(
        out.unflatten(-1, (1, 2)), 1.0, None
    )
    return np.asarray(mean[..., 0]), np.asarray(variance[..., 0].sqrt())


def _logp(out: Tensor, y: Tensor, real: bool) -> Tensor:
    """Log-likelihoods (k, B) of outputs (B, k, C) or (B, k, 2)."""
    out = out.transpose(0, 1)
    name: LikelihoodName = "heteroscedastic_gaussian" if real else "categorical"
    return log_likelihood(
        name, out.unflatten(-1, (1, 2)) if real else out, y[:, None] if real else y, 1.0
    )


def _train(
    net: nn.Module, rows: Any, held: Any, real: bool, lr: float, decay: float
) -> None:
    """Each member learns by its own loss; the net keeps the weights that predict held-out rows best."""
    optimizer = torch.optim.AdamW(net.parameters(), lr, weight_decay=decay, fused=True)
    curve: list[float] = []
    best: dict[str, Tensor] = {}
    while len(curve) < EPOCHS and (
        not curve or len(curve) - 1 - curve.index(min(curve)) < PATIENCE
    ):
        net.train()
        for x, y in _batches(*rows):
            optimizer.zero_grad()
            (-_logp(net(x), y, real).mean()).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)
            optimizer.step()
        with torch.no_grad():
            logp = _logp(net.eval()(held[0]), held[1], real)
        curve.append(float(-(logp.logsumexp(0) - math.log(len(logp))).mean()))
        if curve[-1] <= min(curve):
            best = copy.deepcopy(net.state_dict())
    net.load_state_dict(best)


def _batches(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for index in torch.randperm(len(x)).tensor_split(
        math.ceil(len(x) / batch_size(len(x)))
    ):
        yield x[index], y[index]


# --- others ---


def boosting(split: Split, seed: int) -> Found:
    """Boosted trees of the best of four settings in three folds. The noise of real targets is Gaussian: its variance is
    a mixture of one number and of a second one's, both from residuals out of folds, in the share likeliest there.
    """
    grid = {"learning_rate": [0.03, 0.1], "max_leaf_nodes": [7, 31]}
    if not split.real:
        trees = HistGradientBoostingClassifier(early_stopping=True, random_state=seed)
        search = GridSearchCV(trees, grid, cv=3, scoring="neg_log_loss").fit(
            split.x, split.y
        )
        return np.log(np.maximum(search.predict_proba(split.test_x), 1e-12))
    trees = HistGradientBoostingRegressor(
        early_stopping=True, max_iter=400, random_state=seed
    )
    best = GridSearchCV(trees, grid, cv=3).fit(split.x, split.y).best_estimator_
    squares = np.maximum(
        (split.y - cross_val_predict(best, split.x, split.y, cv=5)) ** 2, 1e-6
    )
    spread = HistGradientBoostingRegressor(
        loss="gamma",
        early_stopping=True,
        max_leaf_nodes=7,
        learning_rate=0.03,
        random_state=seed,
    )
    folds = np.maximum(cross_val_predict(spread, split.x, squares, cv=5), 1e-6)
    shares = {
        share: share * squares.mean() + (1 - share) * folds
        for share in (0.0, 0.1, 0.5, 1.0)
    }  # of one variance
    share = min(
        shares,
        key=lambda share: (np.log(shares[share]) + squares / shares[share]).mean(),
    )
    variance = share * squares.mean() + (1 - share) * spread.fit(
        split.x, squares
    ).predict(split.test_x)
    return best.predict(split.test_x)[None], np.sqrt(variance)[None]


def process(split: Split, seed: int) -> Found:
    """A Gaussian process on few rows: a length scale for each column with real targets, one for all with classes."""
    if len(split.x) > MOST_OF_A_PROCESS[split.real]:
        raise ValueError("too many rows")
    scale = StandardScaler().fit(split.x)
    x, test = scale.transform(split.x), scale.transform(split.test_x)
    lengths = np.full(x.shape[1] if split.real else 1, x.shape[1] ** 0.5)
    kernel = ConstantKernel() * RBF(lengths, (1e-1, 1e4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not split.real:
            model: BaseEstimator = GaussianProcessClassifier(
                kernel, random_state=seed
            ).fit(x, split.y)
            return np.log(np.maximum(model.predict_proba(test), 1e-12))
        model = GaussianProcessRegressor(
            kernel + WhiteKernel(0.1, (1e-6, 1e1)), random_state=seed
        ).fit(x, split.y)
        mean, std = model.predict(test, return_std=True)
    return mean[None], std[None]
