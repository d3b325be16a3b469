"""What the two estimators share: checks of X, splits, training, partial training and predictions.

loss = sum over the batch of w_i * nll_i / (B * mean w) + kl_weight * KL / sum of all w

Sizes: N rows, B of a batch, d columns, T targets.
"""

import copy
import math
import warnings
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from numbers import Real
from typing import Any, Self, get_args

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.validation import (
    _check_sample_weight,
    _num_samples,
    check_consistent_length,
    check_is_fitted,
    validate_data,
)
from torch import nn

from slimbayes.convert.bayesianize import bayesianize
from slimbayes.errors import SlimbayesWarning, brief, did_you_mean
from slimbayes.prediction.predict import predict
from slimbayes.prediction.prediction import Prediction
from slimbayes.prediction.sample import members, sample
from slimbayes.sklearn.columns import Missing, Preparation, Scaling, is_frame
from slimbayes.sklearn.network import (
    TableRows,
    batch_size,
    default_method,
    join_equal_rows,
    log_likelihood,
)
from slimbayes.train.elbo import elbo
from slimbayes.train.likelihoods import LikelihoodName
from slimbayes.train.optim import param_groups

_EACH = 4  # draws of each member in a prediction, by default
_FEWEST = 40  # rows from which some are held out: fewer say little about when to stop


@dataclass(eq=False, repr=False)
class TableEstimator(BaseEstimator):  # type: ignore[misc]
    """A Bayesian neural net for tables; `BayesClassifier` and `BayesRegressor` say what the parameters are."""

    module: Any = None
    method: Any = None
    _: KW_ONLY
    categorical_features: Any = "auto"
    missing: Any = "refuse"
    scaling: Any = "quantile"
    epochs: Any = 200
    batch_size: Any = None
    lr: Any = 2e-3
    weight_decay: Any = 1e-2
    kl_weight: Any = 1.0
    validation_fraction: Any = 0.2
    patience: Any = 16
    draws: Any = None
    device: Any = "cpu"
    random_state: Any = None
    verbose: Any = False
    table_: Preparation = field(init=False)
    network_: nn.Module = field(init=False)
    seed_: int = field(init=False)

    # --- what a classifier and a regressor do differently ---

    @abstractmethod
    def _meaning(self) -> tuple[LikelihoodName, float | torch.Tensor]:
        """What the network's outputs mean, and the scale of the noise, or of its bounds, in standardised units."""

    @abstractmethod
    def _learn_targets(self, y: Any, weight: np.ndarray, classes: Any) -> np.ndarray:
        """Learn classes, unless they are given, or mean and deviation, of the training targets and code them."""

    @abstractmethod
    def _code_targets(self, y: Any) -> np.ndarray:
        """Targets as the network sees them."""

    @abstractmethod
    def _network(
        self, numbers: int, sizes: tuple[int, ...]
    ) -> tuple[nn.Module, nn.Module]:
        """A new network, and the part of it that gets posteriors."""

    @abstractmethod
    def _strata(self, y: np.ndarray, held: int) -> np.ndarray | None:
        """What `held` rows should have in the shares that all rows have."""

    # --- training ---

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on a table (N, d) and labels (N,) of any type, or real targets (N,) or (N, T)."""
        known = self._begin(X, y, sample_weight)
        self.seen_ = known.weight.sum()  # of all rows so far, for `partial_fit`
        kept, held = self._split(known)
        self.__dict__.pop("optimizer_", None)
        with self._seeded():
            self._make_network()
            self.validation_curve_ = self._train(
                self._rows(kept), None if held is None else self._rows(held)
            )
        return self._end()

    def _partial_fit(
        self, X: Any, y: Any, sample_weight: Any, classes: Any = None
    ) -> Self:
        """One epoch over these rows, at the first call with a new network."""
        new = not hasattr(self, "network_")
        if new:
            known = self._begin(X, y, sample_weight, classes)
        else:
            weight, rows = self._weights(X, y, sample_weight)
            known = join_equal_rows(
                self._read(X, False, rows), self._code_targets(y)[rows], weight[rows]
            )
            self.network_.float()
        with self._seeded():
            if new:
                self._make_network()
            if not hasattr(self, "optimizer_"):
                self.optimizer_ = self._optimizer()
            self.seen_ = known.weight.sum() + (0.0 if new else self.seen_)
            self._epoch(self.optimizer_, self._rows(known), float(self.seen_))
            self.seed_ = int(
                torch.randint(2**31 - 1, ())
            )  # of the next part, and of predictions until then
        return self._end()

    def _begin(
        self, X: Any, y: Any, sample_weight: Any, classes: Any = None
    ) -> TableRows:
        """Learn everything about the columns and targets of a training set."""
        if y is None:
            raise ValueError(
                f"{type(self).__name__} requires y to be passed, but the target y is None."
            )
        self._check_parameters()
        self.seed_ = int(check_random_state(self.random_state).randint(2**31 - 1))
        weight, rows = self._weights(X, y, sample_weight)
        x = self._read(X, True, rows)
        known = join_equal_rows(
            x, self._learn_targets(y, weight, classes)[rows], weight[rows]
        )
        self.table_.learn_scales(known.x, self.seed_)
        return known

    def _end(self) -> Self:
        # In double precision a row's prediction does not depend on how many others it is asked with. Modules of
        # others may hold single precision somewhere inside.
        if self._ours and torch.device(self.device).type == "cpu":
            self.network_.double()
        self.network_.eval()
        return self

    def _make_network(self) -> None:
        network, part = self._network(self.table_.width, self.table_.sizes)
        bayesianize(
            part, default_method(self._ours) if self.method is None else self.method
        )
        self.network_ = network.to(self.device)

    def _optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            param_groups(self.network_, self.weight_decay),
            lr=self.lr,
            weight_decay=0.0,
            fused=True,
        )

    def _train(self, rows: TableRows, held_out: TableRows | None) -> list[float]:
        """Train until held-out rows have not been predicted better for `patience` epochs; returns their NLLs.

        The network then has the weights of its best epoch. Without held-out rows, all epochs are run.
        """
        optimizer = self._optimizer()
        curve: list[float] = []
        best: dict[str, torch.Tensor] = {}
        with self._progress() as epochs:
            for _ in epochs:
                self._epoch(optimizer, rows, float(rows.weight.sum()))
                if held_out is None:
                    continue
                curve.append(self._nll(held_out))
                if self.verbose:
                    epochs.set_postfix(validation_nll=curve[-1], best=min(curve))
                if curve[-1] <= min(curve):
                    best = copy.deepcopy(self.network_.state_dict())
                elif len(curve) - curve.index(min(curve)) > self.patience:
                    break
        if best:
            self.network_.load_state_dict(best)
        return curve

    def _progress(self) -> AbstractContextManager[Any]:
        """The numbers of the epochs, behind a progress bar if `verbose`."""
        if not self.verbose:
            return nullcontext(range(self.epochs))
        try:
            from tqdm.auto import trange
        except ModuleNotFoundError as error:
            raise ImportError(
                "verbose=True shows progress with tqdm: pip install tqdm"
            ) from error
        bar: AbstractContextManager[Any] = trange(
            self.epochs, desc=type(self).__name__, unit="epoch"
        )
        return bar

    def _epoch(
        self, optimizer: torch.optim.Optimizer, rows: TableRows, seen: float
    ) -> None:
        """Go over all rows once; the KL is shared out among the weight of all rows that were seen."""
        likelihood, scale = self._meaning()
        self.network_.train()
        for batch in rows.batches(self.batch_size or batch_size(len(rows.x))):
            outputs = sample(self.network_, batch.x)
            share = batch.weight / rows.weight.mean()
            nll = -(
                log_likelihood(likelihood, outputs, batch.y, scale).mean(0) * share
            ).mean()
            terms = elbo(nll, self.network_, max(1, round(seen)), self.kl_weight)
            optimizer.zero_grad()
            terms.loss.backward()
            nn.utils.clip_grad_norm_(
                self.network_.parameters(), 1.0, error_if_nonfinite=True
            )
            optimizer.step()

    def _nll(self, rows: TableRows) -> float:
        """Mean negative log-likelihood of rows under the mixture of some draws, the same at every call."""
        likelihood, scale = self._meaning()
        draws = _EACH * members(self.network_)
        logp = predict(
            self.network_,
            rows.x,
            draws,
            likelihood=likelihood,
            likelihood_std=scale,
            seed=0,
        ).log_prob(rows.y)
        logp = logp.sum(-1) if logp.dim() > 1 else logp
        return float(-(logp * rows.weight).sum() / rows.weight.sum())

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        """Let everything random follow from the seed, and leave torch's own generators as they were."""
        with (
            torch.random.fork_rng(
                [self.device] if torch.device(self.device).type == "cuda" else []
            ),
            warnings.catch_warnings(),
        ):
            if (
                self.method is None
            ):  # chosen with its KL, which is large beside few rows: no advice is needed
                warnings.simplefilter("ignore", SlimbayesWarning)
            torch.manual_seed(self.seed_)
            yield

    def _split(self, known: TableRows) -> tuple[TableRows, TableRows | None]:
        """Rows to train on and, where there are enough, rows that say when to stop."""
        count = round(self.validation_fraction * len(known.x))
        if len(known.x) < _FEWEST or count == 0:
            return known, None
        strata = self._strata(known.y, count)
        rows = np.arange(len(known.x))
        kept, held = train_test_split(
            rows, test_size=count, random_state=self.seed_, stratify=strata
        )
        return known.at(kept), known.at(held)

    @property
    def _ours(self) -> bool:
        """Whether the network is one of ours, not the user's."""
        return self.module is None or isinstance(self.module, tuple | list)

    # --- rows ---

    def _read(self, X: Any, reset: bool, rows: Any = slice(None)) -> np.ndarray:
        """Rows of X as numbers and codes, after scikit-learn's checks of its shape and names."""
        auto = (
            isinstance(self.categorical_features, str)
            and self.categorical_features == "auto"
        )
        only_numbers = auto if reset else not self.table_.words
        if only_numbers and not is_frame(X):
            X = validate_data(
                self, X, reset=reset, dtype=np.float64, ensure_all_finite="allow-nan"
            )
        else:
            X = X if is_frame(X) else np.asarray(X, dtype=object)
            if len(X.shape) != 2 or not all(X.shape):
                raise ValueError(
                    f"X must be a table with rows and columns, got an array of shape {X.shape}."
                )
            validate_data(self, X, reset=reset, skip_check_array=True)
        if reset:
            self.table_ = Preparation(self.missing, self.scaling)
            self.table_.fit(X, self.categorical_features, rows)
        return self.table_.read(X, rows)

    def _weights(
        self, X: Any, y: Any, sample_weight: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """Weights of all rows, and which rows count: one that weighs nothing is as good as absent."""
        rows = np.empty((_num_samples(y), 1))
        check_consistent_length(X, rows)
        if not len(rows):
            raise ValueError("X must be a table with rows and columns, got 0 rows.")
        weight = _check_sample_weight(
            sample_weight, rows, dtype=np.float64, ensure_non_negative=True
        )
        if not weight.any():
            raise ValueError(
                "sample_weight is zero for all rows: at least one must count."
            )
        return weight, weight > 0

    def _rows(self, known: TableRows) -> TableRows:
        target = torch.as_tensor(known.y, device=self.device)
        weight = torch.as_tensor(known.weight, dtype=torch.float32, device=self.device)
        return TableRows(
            self._inputs(known.x),
            target.float() if target.is_floating_point() else target,
            weight,
        )

    def _inputs(self, x: np.ndarray) -> torch.Tensor:
        """Numbers scaled and filled in, then codes, in the network's precision."""
        dtype = next(
            (p.dtype for p in self.network_.parameters() if p.is_floating_point()),
            torch.float32,
        )
        return torch.as_tensor(
            self.table_.prepare(x, np.float64), dtype=dtype, device=self.device
        )

    # --- predictions ---

    def _predict(self, X: Any, keep: bool) -> Prediction:
        """Predictions of rows; their draws are kept only if asked, which many rows may have no room for."""
        check_is_fitted(self, "network_")
        x = self._inputs(self._read(X, False))
        likelihood, scale = self._meaning()
        how: dict[str, Any] = {
            "likelihood": likelihood,
            "likelihood_std": scale,
            "keep_samples": keep,
            "seed": self.seed_,
        }
        draws = _EACH * members(self.network_) if self.draws is None else self.draws
        return predict(self.network_, x, draws, **how)

    def _check_parameters(self) -> None:
        for name, choices in (
            ("missing", get_args(Missing)),
            ("scaling", get_args(Scaling)),
        ):
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(
                    f"{name}={brief(value)} is not known{did_you_mean(str(value), choices)}"
                )
        whole = {"epochs": self.epochs, "patience": self.patience}
        optional = {"batch_size": self.batch_size, "draws": self.draws}
        whole |= {name: n for name, n in optional.items() if n is not None}
        for name, value in whole.items():
            if (
                not isinstance(value, int | np.integer)
                or isinstance(value, bool)
                or value < 1
            ):
                raise ValueError(
                    f"{name} must be a whole number of at least 1, got {value!r}."
                )
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(
                f"validation_fraction must lie in [0, 1), got {self.validation_fraction!r}."
            )
        for name in ("lr", "weight_decay", "kl_weight"):
            value = getattr(self, name)
            if not isinstance(value, Real) or not 0 <= float(value) < math.inf:
                raise ValueError(
                    f"{name} must be a number that is not negative, got {brief(value)}."
                )
        try:
            torch.empty(0, device=self.device)
        except (
            RuntimeError,
            AssertionError,
        ) as error:  # torch built without the device asserts
            raise ValueError(
                f"device={brief(self.device)} is not there ({error}): use device='cpu'."
            ) from error

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self.missing == "impute"
        tags.input_tags.categorical = True
        return tags
