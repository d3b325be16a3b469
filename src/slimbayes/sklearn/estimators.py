"""Bayesian neural nets with scikit-learn's interface.

Sizes: N rows, d columns, C classes, T targets.
"""

from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import Any, Self, cast

import numpy as np
import torch
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils import assert_all_finite
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, column_or_1d
from torch import nn

from slimbayes.errors import brief
from slimbayes.prediction.prediction import Prediction
from slimbayes.sklearn.base import TableEstimator
from slimbayes.sklearn.network import build, join_equal_rows
from slimbayes.tables import Noise, WithNoise
from slimbayes.train.likelihoods import LikelihoodName


class BayesClassifier(ClassifierMixin, TableEstimator):  # type: ignore[misc]
    """A Bayesian neural net that tells classes apart, with probabilities that know what the data did not show.

    Args:
        module: a torch.nn.Module of as many outputs as there are classes, which is copied; a function
            `(inputs, outputs) -> Module`; a tuple of hidden widths; or None for dense layers of 128 and 128 units.
            Categories reach the last two as embeddings, the others as columns of codes after the numbers.
        method: any config, or mapping from layers' names to configs, that `bayesianize` takes; by default rank-1
            factors of eight members, with a last layer for each in networks of ours.
        categorical_features: names or positions of columns that are categories, beside those of a DataFrame that hold
            texts, booleans or categories; "auto" adds none. What is refused otherwise may be named here.
        missing: "refuse" raises on missing values and on categories that training did not see; "impute" fills numbers
            with their median, beside a column that says where, and gives such categories a value of their own.
        scaling: of numbers: "quantile" (to a normal distribution, by ranks), "standard" or "none".
        epochs, batch_size, lr, weight_decay, kl_weight: of training with AdamW on the ELBO. By default batches have 32
            to 256 rows.
        validation_fraction: rows held out of training, if there are 40 or more; training stops when their likelihood
            has not risen for `patience` epochs, and takes the best epoch's weights.
        draws: number of draws of a prediction; by default four of each member.
        device: where to compute.
        random_state: seeds everything; a fitted estimator always predicts the same.
        verbose: whether `fit` shows its epochs in a progress bar, which needs tqdm.

    A row of `sample_weight` two counts as a row given twice.

    Attributes: `network_`, a converted model for everything else in slimbayes; `classes_`, `n_features_in_`,
    `feature_names_in_`, `validation_curve_`.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> BayesClassifier(epochs=30, random_state=0).fit(X, y).predict_proba(X[:2]).shape
        (2, 3)
    """

    def partial_fit(
        self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None
    ) -> Self:
        """One epoch over these rows; the first call learns columns and scales, and needs all `classes`."""
        return self._partial_fit(X, y, sample_weight, classes)

    def prediction(self, X: Any) -> Prediction:
        """Everything about the predictions of N rows: members, draws, aleatoric and epistemic uncertainty."""
        return self._predict(X, keep=True)

    def predict_proba(self, X: Any) -> np.ndarray:
        """Class probabilities (N, C), in the order of `classes_`."""
        return self._predict(X, keep=False).probs.cpu().double().numpy()

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Logs of class probabilities (N, C), also of those that are zero in double precision."""
        return self._predict(X, keep=False).log_probs.cpu().double().numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The most probable labels (N,)."""
        best = self.predict_proba(X).argmax(1)
        return cast(np.ndarray, self.classes_[best])

    def _learn_targets(self, y: Any, weight: np.ndarray, classes: Any) -> np.ndarray:
        labels = column_or_1d(y, warn=True)
        assert_all_finite(labels, input_name="y")
        try:
            check_classification_targets(labels)
            known = np.unique(labels)
        except TypeError:
            kinds = sorted({type(label).__name__ for label in labels.tolist()})
            raise ValueError(
                f"Labels must be of one type, got {', '.join(kinds)}; rows without one must go."
            ) from None
        self.classes_ = known if classes is None else np.unique(classes)
        counting = len(np.unique(labels[weight > 0]))
        if len(self.classes_) < 2 or (counting < 2 and classes is None):
            raise ValueError(
                f"Labels of at least two classes are needed, got {counting} class."
            )
        return self._code_targets(labels)

    def _code_targets(self, y: Any) -> np.ndarray:
        labels = column_or_1d(y, warn=True)
        codes = np.searchsorted(self.classes_, labels).clip(0, len(self.classes_) - 1)
        if (self.classes_[codes] != labels).any():
            other = np.asarray(labels[self.classes_[codes] != labels][0])
            raise ValueError(
                f"Label {brief(other.item())} is none of the classes: the first partial_fit needs all, as classes=."
            )
        return cast(np.ndarray, codes)

    def _meaning(self) -> tuple[LikelihoodName, float | torch.Tensor]:
        return "categorical", 0.0

    def _network(
        self, numbers: int, sizes: tuple[int, ...]
    ) -> tuple[nn.Module, nn.Module]:
        network = build(self.module, numbers, sizes, len(self.classes_))
        return network, network

    def _strata(self, y: np.ndarray, held: int) -> np.ndarray | None:
        counts = np.bincount(y, minlength=len(self.classes_))
        return (
            y if counts[counts > 0].min() > 1 and held >= len(self.classes_) else None
        )


@dataclass(eq=False, repr=False)
class BayesRegressor(RegressorMixin, TableEstimator):  # type: ignore[misc]
    """A Bayesian neural net for real targets, with the noise it learnt and its doubt about the weights.

    Args: as in `BayesClassifier`; a module has T outputs, or 2 T with heteroscedastic noise (mean and raw scale of each
        target in turn), and
        noise: "heteroscedastic" is a function of the row, "learned" one number for each target, and a number the
            standard deviation in the target's units.

    Example:
        >>> X = np.linspace(-1, 1, 64)[:, None]
        >>> model = BayesRegressor(epochs=30, random_state=0).fit(X, X[:, 0] ** 2)
        >>> mean, std = model.predict(X, return_std=True)
        >>> low, high = model.predict_interval(X, level=0.9)
        >>> mean.shape, bool((std > 0).all()), bool((low < high).all())
        ((64,), True, True)
    """

    _: KW_ONLY
    noise: Any = "heteroscedastic"

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """One epoch over these rows; the first call learns columns and scales, of the targets too."""
        return self._partial_fit(X, y, sample_weight)

    def prediction(self, X: Any) -> Prediction:
        """Everything about the predictions of N rows, (N, T) in the targets' units."""
        return self._in_units(self._predict(X, keep=True))

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Means (N,) or (N, T) and, if asked, standard deviations, with noise and doubt about the weights."""
        found = self._in_units(self._predict(X, keep=False))
        return (
            (self._shaped(found.mean), self._shaped(found.std))
            if return_std
            else self._shaped(found.mean)
        )

    def predict_interval(
        self, X: Any, level: float = 0.9
    ) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper ends of central intervals that hold a new target with this probability."""
        low, high = self.prediction(X).interval(level)
        return self._shaped(low), self._shaped(high)

    def _in_units(self, found: Prediction) -> Prediction:
        return found.rescaled(
            torch.as_tensor(self.y_mean_), torch.as_tensor(self.y_std_)
        )

    def _shaped(self, values: torch.Tensor) -> np.ndarray:
        return (values if self._many else values[:, 0]).cpu().double().numpy()

    def _learn_targets(self, y: Any, weight: np.ndarray, classes: Any) -> np.ndarray:
        targets = self._checked(y)
        self._many = targets.ndim == 2
        rows = targets.reshape(len(targets), -1)
        counted = join_equal_rows(
            rows[weight > 0], rows[weight > 0][:, :0], weight[weight > 0]
        )
        self.y_mean_ = np.average(counted.x, axis=0, weights=counted.weight)
        std = np.sqrt(
            np.average((counted.x - self.y_mean_) ** 2, axis=0, weights=counted.weight)
        )
        self.y_std_ = np.where(std > 0, std, 1.0)
        return self._code_targets(targets)

    def _code_targets(self, y: Any) -> np.ndarray:
        targets = self._checked(y)
        rows = targets.reshape(len(targets), -1)
        if (targets.ndim == 2) != self._many or rows.shape[1] != len(self.y_mean_):
            raise ValueError(
                f"y must have {len(self.y_mean_)} targets, as in training, got shape {targets.shape}."
            )
        return cast(np.ndarray, (rows - self.y_mean_) / self.y_std_)

    @staticmethod
    def _checked(y: Any) -> np.ndarray:
        return cast(
            np.ndarray,
            check_array(y, ensure_2d=False, dtype=np.float64, input_name="y"),
        )

    def _network(
        self, numbers: int, sizes: tuple[int, ...]
    ) -> tuple[nn.Module, nn.Module]:
        targets, noise = len(self.y_mean_), cast(Noise, self.noise)
        if noise not in ("heteroscedastic", "learned") and not (
            isinstance(noise, Real) and noise > 0
        ):
            wanted = "'heteroscedastic', 'learned' or a positive standard deviation"
            raise ValueError(f"noise must be {wanted}, got {noise!r}.")
        network = build(
            self.module,
            numbers,
            sizes,
            targets * (2 if noise == "heteroscedastic" else 1),
        )
        return WithNoise(network, targets, noise), network

    def _meaning(self) -> tuple[LikelihoodName, float | torch.Tensor]:
        network = cast(
            WithNoise, self.network_
        )  # as fitted: `set_params` changes the next fit, not this one
        if isinstance(network.noise, str):
            return "heteroscedastic_gaussian", 1.0
        return "gaussian", torch.as_tensor(network.noise / self.y_std_)

    def _strata(self, y: np.ndarray, held: int) -> None:
        return None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.target_tags.single_output = True
        return tags
