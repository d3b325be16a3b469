"""Tables as arrays of numbers: which columns are categories, what is missing, and how numbers are scaled; and all that
was learnt of it in a form that JSON holds, which a run needs to read other rows.

Sizes: N rows; d columns, of which c hold categories; T targets; w numbers after scaling (missing ones add columns that
say where). Read tables have their numbers first, then codes of categories: 0 stands for what is missing or unknown, 1,
2, ... for the categories seen in training.
"""

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, Self

import numpy as np
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, QuantileTransformer, StandardScaler

from slimbayes.errors import SlimbayesWarning, brief, did_you_mean

Missing = Literal["refuse", "impute"]
Scaling = Literal["quantile", "standard", "none"]


def is_frame(X: Any) -> bool:
    """Whether columns have names and types of their own: pandas, polars and their kin."""
    return hasattr(X, "columns") and hasattr(X, "__getitem__")


@dataclass
class Table:
    """What was learnt about a table's columns, and what its rows become before a network sees them.

    Args:
        wanted: "auto" takes the columns of a DataFrame that hold texts, booleans or categories; or names or positions.
        missing: "refuse" raises on missing values and unknown categories; "impute" fills numbers with their median,
            beside a column that says where, and gives categories one more value, which unknown ones are too: a
            warning tells how many.
        scaling: of numbers, as `scaler` says.
    """

    wanted: Any
    missing: Missing
    scaling: Scaling = "none"
    names: list[str] = field(default_factory=list)
    categories: list[int] = field(default_factory=list)
    words: list[list[Any]] = field(default_factory=list)  # of each column of categories, in the order of their codes
    steps: Any = None  # a scikit-learn pipeline, once scales are learnt, unless no column holds numbers

    @property
    def numbers(self) -> list[int]:
        """Positions of the columns that hold numbers."""
        return [j for j in range(len(self.names)) if j not in self.categories]

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many codes each category has."""
        return tuple(len(words) + 1 for words in self.words)

    def fit(self, X: Any, rows: Any = slice(None)) -> np.ndarray:
        """Learn the columns of a DataFrame, array or mapping from some of its rows, by default all, and read these."""
        frame = is_frame(X) or isinstance(X, Mapping)
        self.names = [str(name) for name in getattr(X, "columns", X)] if frame else list(map(str, range(X.shape[1])))
        if len(set(self.names)) < len(self.names):
            raise ValueError("X has two columns of one name: give each a name of its own.")
        self.categories = sorted(set(self._chosen(X, frame)))
        self.words = [self._known(j, set(_words(_column(X, j))[rows]) - {None}) for j in self.categories]
        return self.read(X, rows)

    def read(self, X: Any, rows: Any = slice(None), unseen: Counter[str] | None = None) -> np.ndarray:
        """Rows of a table as numbers and codes, (N, d); NaN where a number is missing and was not refused.

        Unknown categories that count as missing are added to `unseen` by column or, without it, told by a warning.
        """
        columns = [self._numbers(X, j)[rows] for j in self.numbers]
        found: Counter[str] = Counter()
        codes = [self._codes(k, _words(_column(X, j))[rows], found) for k, j in enumerate(self.categories)]
        read = np.stack([*columns, *codes], 1)
        if found and unseen is None:
            warnings.warn(self.unseen_text(found, len(read)), SlimbayesWarning, stacklevel=2)
        elif unseen is not None:
            unseen.update(found)
        if self.missing == "refuse":
            self._refuse(read)
        return read

    @staticmethod
    def unseen_text(unseen: Counter[str], rows: int) -> str:
        """What to say of unknown categories by column."""
        told = [f"{brief(name)} ({count:,} of {rows:,} rows)" for name, count in unseen.most_common(5)]
        more = f" and {len(unseen) - 5} more" if len(unseen) > 5 else ""
        return f"Categories that training did not see count as missing: in column {', '.join(told)}{more}."

    def _chosen(self, X: Any, frame: bool) -> Iterator[int]:
        """Positions of the columns that are categories."""
        if isinstance(self.wanted, str) and self.wanted == "auto":
            yield from [j for j, name in enumerate(self.names) if frame and _holds_words(X, j, name)]
            return
        for one in self.wanted if isinstance(self.wanted, Sequence | np.ndarray) else [self.wanted]:
            if isinstance(one, str) and frame and one in self.names:
                yield self.names.index(one)
            elif isinstance(one, int | np.integer) and not isinstance(one, bool) and 0 <= one < len(self.names):
                yield int(one)
            else:
                hint = did_you_mean(str(one), self.names) if frame else f": X has {len(self.names)} columns."
                raise ValueError(f"categorical_features names {brief(one)}, which X does not have{hint}")

    def _known(self, j: int, words: set[Any]) -> list[Any]:
        try:
            return sorted(words) or [""]
        except TypeError as error:
            kinds = ", ".join(sorted({type(word).__name__ for word in words}))
            raise TypeError(f"Column {self.names[j]!r} holds categories of several types: {kinds}.") from error

    def _codes(self, k: int, words: np.ndarray, unseen: Counter[str]) -> list[int]:
        """Codes (N,) of the words of a column; unknown ones are counted, or refused."""
        name, codes = self.names[self.categories[k]], {word: code for code, word in enumerate(self.words[k], 1)}
        codes[None] = 0
        if new := [word for word in words if word not in codes]:
            if self.missing == "refuse":
                raise ValueError(
                    f"Column {name!r} holds {brief(new[0])}, a category that training did not see. "
                    f"missing='impute' treats such values as missing."
                )
            unseen[name] += len(new)
        return [codes.get(word, 0) for word in words]

    def _numbers(self, X: Any, j: int) -> np.ndarray:
        column = _column(X, j)
        if column.dtype.kind in "OUST":
            words = _words(column)
            try:
                column = np.array([np.nan if word is None else float(word) for word in words])
            except (TypeError, ValueError):
                first = next((word for word in words if word is not None and not isinstance(word, Real)), None)
                raise ValueError(
                    f"Column {self.names[j]!r} must hold numbers, got {brief(first)}. "
                    f"Name it in categorical_features if it holds categories."
                ) from None
        column = column.astype(np.float64)
        if np.isinf(column).any():
            raise ValueError(f"Input X contains infinity in column {self.names[j]!r}: clip it, or mark it as missing.")
        return column

    def _refuse(self, read: np.ndarray) -> None:
        """Name the columns with missing values."""
        count = len(self.numbers)
        gaps = [*np.isnan(read[:, :count]).sum(0), *(read[:, count:] == 0).sum(0)]
        places = [*self.numbers, *self.categories]
        told = [f"{self.names[j]!r} ({int(gap)} of {len(read)})" for j, gap in zip(places, gaps) if gap]
        if told:
            raise ValueError(
                f"Input X contains NaN: values are missing in column {', '.join(told[:5])}"
                f"{f' and {len(told) - 5} more' if len(told) > 5 else ''}. missing='impute' fills them in."
            )

    def learn_scales(self, read: np.ndarray, seed: int = 0) -> None:
        """Learn scales from training rows (N, d + c), as `read` gives them."""
        count = len(self.numbers)
        if count:
            self.steps = scaler(self.scaling, self.missing, len(read), seed).fit(read[:, :count])

    @property
    def width(self) -> int:
        """Numbers of a row after scaling."""
        count = len(self.numbers)
        return self.steps.transform(np.zeros((1, count))).shape[1] if count else 0

    def prepare(self, read: np.ndarray, dtype: Any = np.float32) -> np.ndarray:
        """Rows (N, d + c) of `read` as the network takes them: (N, w + c)."""
        count = len(self.numbers)
        numbers = self.steps.transform(read[:, :count]) if count else read[:, :0]
        return np.concatenate([numbers, read[:, count:]], 1).astype(dtype)

    def facts(self) -> dict[str, Any]:
        """All that was learnt, as JSON holds it."""
        steps = {} if self.steps is None else self.steps.named_steps
        facts: dict[str, Any] = {
            "names": self.names, "missing": self.missing, "scaling": self.scaling,
            "categories": self.categories, "words": [list(map(str, words)) for words in self.words],
        }  # fmt: skip
        if (one := steps.get("simpleimputer")) is not None:
            facts |= {"fill": one.statistics_.tolist(), "gaps": one.indicator_.features_.tolist()}
        if (one := steps.get("quantiletransformer")) is not None:
            facts |= {"quantiles": one.quantiles_.tolist()}
        if (one := steps.get("standardscaler")) is not None:
            facts |= {"mean": one.mean_.tolist(), "scale": one.scale_.tolist()}
        return facts

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> Self:
        """What `facts` wrote down. Steps are fitted to rows that give them their shapes, then get their numbers."""
        learnt = list(facts["names"]), list(facts["categories"]), list(map(list, facts["words"]))
        table = cls(facts["categories"], facts["missing"], facts["scaling"], *learnt)
        count = len(table.numbers)
        if not count:
            return table
        quantiles = np.array(facts.get("quantiles", np.zeros((2, count))), dtype=np.float64)
        table.steps = scaler(table.scaling, table.missing, len(quantiles), 0)
        rows = np.zeros((2, count))
        if "fill" in facts:  # medians of themselves, and gaps where there were some
            rows[:] = facts["fill"]
            rows[1, facts["gaps"]] = np.nan
        for _, step in table.steps.steps:
            if isinstance(step, QuantileTransformer):
                step.set_params(n_quantiles=len(quantiles)).fit(quantiles)
                step.quantiles_ = quantiles
            else:
                step.fit(rows)
            if isinstance(step, StandardScaler):
                step.mean_, step.scale_ = np.array(facts["mean"]), np.array(facts["scale"])
                step.var_ = step.scale_**2
            assert not isinstance(step, SimpleImputer) or step.statistics_.tolist() == facts["fill"]
            rows = step.transform(rows)
        return table


def _column(X: Any, j: int) -> np.ndarray:
    return np.asarray(X[:, j] if isinstance(X, np.ndarray) else X[list(getattr(X, "columns", X))[j]])


def _holds_words(X: Any, j: int, name: str) -> bool:
    """Whether a DataFrame's column holds categories; dates are refused."""
    series = X[list(X.columns)[j]]
    if str(series.dtype).lower().startswith(("categor", "enum")):
        return True
    column = np.asarray(series)
    if column.dtype.kind in "mM":
        raise ValueError(
            f"Column {name!r} holds dates or durations: turn them into numbers first, such as days since a date."
        )
    if column.dtype.kind != "O":
        return column.dtype.kind in "USTb"
    return not all(word is None or (isinstance(word, Real) and not isinstance(word, bool)) for word in _words(column))


def _words(column: np.ndarray) -> np.ndarray:
    """Values as objects, with None for everything that says "missing"."""
    gone = ("NAType", "NaTType")
    words = [None if v is None or type(v).__name__ in gone or v != v else v for v in column.tolist()]
    out = np.empty(len(words), dtype=object)
    out[:] = words
    return out


def scaler(scaling: Scaling, missing: Missing, rows: int, seed: int) -> Any:
    """What fills in and scales columns of numbers.

    "quantile" maps each column to a normal distribution by its ranks, then to mean 0 and standard deviation 1, which
    keeps columns of two values from going to the ends of the normal; as many quantiles as TabM's preparation has.
    """
    steps: list[Any] = [SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True)]
    if scaling == "quantile":
        quantiles = min(rows, max(10, min(1000, rows // 30)))
        steps.append(QuantileTransformer(n_quantiles=quantiles, output_distribution="normal", random_state=seed))
    steps.append(FunctionTransformer() if scaling == "none" else StandardScaler())
    return make_pipeline(*(steps if missing == "impute" else steps[1:]))
