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
from sklearn.preprocessing import (
    FunctionTransformer,
    QuantileTransformer,
    StandardScaler,
)

from slimbayes.errors import SlimbayesWarning, brief, did_you_mean

Missing = Literal["refuse", "impute"]
Scaling = Literal["quantile", "standard", "none"]


def is_frame(X: Any) -> bool:
    """Whether columns have names and types of their own: pandas, polars and their kin."""
    return hasattr(X, "columns") and hasattr(X, "__getitem__")


@dataclass
class Preparation:
    """What was learnt about a table's columns, and what its rows become before a network sees them.

    Tables are DataFrames, arrays or mappings from names to columns; columns are told apart by their place, since an
    array without names may follow a DataFrame.

    Args:
        missing: "refuse" raises on missing values and unknown categories; "impute" fills numbers with their median,
            beside a column that says where, and gives categories one more value, which unknown ones are too: a
            warning tells how many.
        scaling: of numbers, as `scaler` says.
    """

    missing: Missing
    scaling: Scaling = "none"
    names: list[str] = field(default_factory=list)
    words: dict[str, list[Any]] = field(
        default_factory=dict
    )  # categories by column, in the order of their codes
    steps: Any = None  # a scikit-learn pipeline, once scales are learnt, unless no column holds numbers

    @property
    def numbers(self) -> list[str]:
        """Names of the columns that hold numbers."""
        return [name for name in self.names if name not in self.words]

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many codes each column of categories has."""
        return tuple(len(words) + 1 for words in self.words.values())

    def fit(self, X: Any, wanted: Any = "auto", rows: Any = slice(None)) -> None:
        """Learn names and categories from some rows of a table, by default all.

        Args:
            wanted: the columns that are categories, by name or position; "auto" takes those of a DataFrame that hold
                texts, booleans or categories.
        """
        named = is_frame(X) or isinstance(X, Mapping)
        self.names = (
            [str(name) for name in getattr(X, "columns", X)]
            if named
            else list(map(str, range(X.shape[1])))
        )
        if len(set(self.names)) < len(self.names):
            raise ValueError(
                "X has two columns of one name: give each a name of its own."
            )
        columns = dict(zip(self.names, _columns(X)))
        chosen = set(self._chosen(columns, wanted, named))
        self.words = {
            name: _known(name, _words(columns[name])[rows])
            for name in self.names
            if name in chosen
        }

    def read(
        self, X: Any, rows: Any = slice(None), unseen: Counter[str] | None = None
    ) -> np.ndarray:
        """Rows of a table as numbers and codes, (N, d); NaN where a number is missing and was not refused.

        Unknown categories that count as missing are added to `unseen` by column or, without it, told by a warning.
        """
        columns = dict(zip(self.names, _columns(X)))
        found: Counter[str] = Counter()
        numbers = [_numbers(name, columns[name])[rows] for name in self.numbers]
        codes = [
            self._codes(name, _words(columns[name])[rows], found) for name in self.words
        ]
        read = np.stack([*numbers, *codes], 1)
        if found and unseen is None:
            warnings.warn(
                self.unseen_text(found, len(read)), SlimbayesWarning, stacklevel=2
            )
        elif unseen is not None:
            unseen.update(found)
        if self.missing == "refuse":
            self._refuse(read)
        return read

    @staticmethod
    def unseen_text(unseen: Counter[str], rows: int) -> str:
        """What to say of unknown categories by column."""
        told = [
            f"{brief(name)} ({count:,} of {rows:,} rows)"
            for name, count in unseen.most_common(5)
        ]
        more = f" and {len(unseen) - 5} more" if len(unseen) > 5 else ""
        return f"Categories that training did not see count as missing: in column {', '.join(told)}{more}."

    def _chosen(
        self, columns: Mapping[str, Any], wanted: Any, named: bool
    ) -> Iterator[str]:
        """The columns that are categories."""
        if isinstance(wanted, str) and wanted == "auto":
            yield from [
                name
                for name, column in columns.items()
                if named and _holds_words(name, column)
            ]
            return
        for one in wanted if isinstance(wanted, Sequence | np.ndarray) else [wanted]:
            if isinstance(one, str) and named and one in columns:
                yield one
            elif (
                isinstance(one, int | np.integer)
                and not isinstance(one, bool)
                and 0 <= one < len(columns)
            ):
                yield self.names[one]
            else:
                hint = (
                    did_you_mean(str(one), self.names)
                    if named
                    else f": X has {len(columns)} columns."
                )
                raise ValueError(
                    f"categorical_features names {brief(one)}, which X does not have{hint}"
                )

    def _codes(self, name: str, words: np.ndarray, unseen: Counter[str]) -> list[int]:
        """Codes (N,) of the words of a column; unknown ones are counted, or refused."""
        codes = {None: 0} | {
            word: code for code, word in enumerate(self.words[name], 1)
        }
        if new := [word for word in words if word not in codes]:
            if self.missing == "refuse":
                raise ValueError(
                    f"Column {name!r} holds {brief(new[0])}, a category that training did not see. "
                    f"missing='impute' treats such values as missing."
                )
            unseen[name] += len(new)
        return [codes.get(word, 0) for word in words]

    def _refuse(self, read: np.ndarray) -> None:
        """Name the columns with missing values."""
        count = len(self.numbers)
        gaps = [*np.isnan(read[:, :count]).sum(0), *(read[:, count:] == 0).sum(0)]
        told = [
            f"{n!r} ({int(gap)} of {len(read)})"
            for n, gap in zip([*self.numbers, *self.words], gaps)
            if gap
        ]
        if told:
            raise ValueError(
                f"Input X contains NaN: values are missing in column {', '.join(told[:5])}"
                f"{f' and {len(told) - 5} more' if len(told) > 5 else ''}. missing='impute' fills them in."
            )

    def learn_scales(self, read: np.ndarray, seed: int = 0) -> None:
        """Learn scales from training rows (N, d + c), as `read` gives them."""
        count = len(self.numbers)
        if count:
            self.steps = scaler(self.scaling, self.missing, len(read), seed).fit(
                read[:, :count]
            )

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

    def to_dict(self) -> dict[str, Any]:
        """All that was learnt, as JSON holds it."""
        steps = {} if self.steps is None else self.steps.named_steps
        facts: dict[str, Any] = {
            "names": self.names, "missing": self.missing, "scaling": self.scaling,
            "categories": [self.names.index(name) for name in self.words],
            "words": [list(map(str, words)) for words in self.words.values()],
        }  # fmt: skip
        if (one := steps.get("simpleimputer")) is not None:
            facts |= {
                "fill": one.statistics_.tolist(),
                "gaps": one.indicator_.features_.tolist(),
            }
        if (one := steps.get("quantiletransformer")) is not None:
            facts |= {"quantiles": one.quantiles_.tolist()}
        if (one := steps.get("standardscaler")) is not None:
            facts |= {"mean": one.mean_.tolist(), "scale": one.scale_.tolist()}
        return facts

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> Self:
        """What `to_dict` wrote down. Steps are fitted to rows that give them their shapes, then get their numbers."""
        names = list(facts["names"])
        words = {
            names[j]: list(known)
            for j, known in zip(facts["categories"], facts["words"], strict=True)
        }
        made = cls(facts["missing"], facts["scaling"], names, words)
        if not made.numbers:
            return made
        quantiles = np.array(facts.get("quantiles", [[]]), dtype=np.float64)
        rows = np.zeros((max(2, len(quantiles)), len(made.numbers)))
        rows[1, facts.get("gaps", [])] = np.nan
        made.steps = scaler(made.scaling, made.missing, len(rows), 0)
        if "quantiles" in facts:
            made.steps.set_params(quantiletransformer__n_quantiles=len(quantiles))
        steps = made.steps.fit(rows).named_steps
        if "fill" in facts:
            steps["simpleimputer"].statistics_ = np.array(facts["fill"])
        if "quantiles" in facts:
            steps["quantiletransformer"].quantiles_ = quantiles
        if "mean" in facts:
            one = steps["standardscaler"]
            one.mean_, one.scale_ = np.array(facts["mean"]), np.array(facts["scale"])
            one.var_ = one.scale_**2
        return made


def _columns(X: Any) -> list[Any]:
    return (
        list(X.T)
        if isinstance(X, np.ndarray)
        else [X[name] for name in getattr(X, "columns", X)]
    )


def _numbers(name: str, column: Any) -> np.ndarray:
    """Numbers of a column (N,), NaN where they are missing."""
    values = np.asarray(column)
    if values.dtype.kind in "OUST":
        words = _words(column)
        try:
            values = np.array(
                [np.nan if word is None else float(word) for word in words]
            )
        except (TypeError, ValueError):
            first = next(
                (
                    word
                    for word in words
                    if word is not None and not isinstance(word, Real)
                ),
                None,
            )
            raise ValueError(
                f"Column {name!r} must hold numbers, got {brief(first)}. "
                f"Name it in categorical_features if it holds categories."
            ) from None
    values = values.astype(np.float64)
    if np.isinf(values).any():
        raise ValueError(
            f"Input X contains infinity in column {name!r}: clip it, or mark it as missing."
        )
    return values


def _known(name: str, words: np.ndarray) -> list[Any]:
    """The categories among a column's words, in their order."""
    found = set(words) - {None}
    try:
        return sorted(found) or [""]
    except TypeError as error:
        kinds = ", ".join(sorted({type(word).__name__ for word in found}))
        raise TypeError(
            f"Column {name!r} holds categories of several types: {kinds}."
        ) from error


def _holds_words(name: str, column: Any) -> bool:
    """Whether a DataFrame's column holds categories; dates are refused."""
    if str(column.dtype).lower().startswith(("categor", "enum")):
        return True
    values = np.asarray(column)
    if values.dtype.kind in "mM":
        raise ValueError(
            f"Column {name!r} holds dates or durations: turn them into numbers first, such as days since a date."
        )
    if values.dtype.kind != "O":
        return values.dtype.kind in "USTb"
    return not all(
        word is None or (isinstance(word, Real) and not isinstance(word, bool))
        for word in _words(column)
    )


def _words(column: Any) -> np.ndarray:
    """Values as objects, with None for everything that says "missing"."""
    gone = ("NAType", "NaTType")
    words = [
        None if v is None or type(v).__name__ in gone or v != v else v
        for v in np.asarray(column).tolist()
    ]
    out = np.empty(len(words), dtype=object)
    out[:] = words
    return out


def scaler(scaling: Scaling, missing: Missing, rows: int, seed: int) -> Any:
    """What fills in and scales columns of numbers.

    "quantile" maps each column to a normal distribution by its ranks, then to mean 0 and standard deviation 1, which
    keeps columns of two values from going to the ends of the normal; as many quantiles as TabM's preparation has.
    """
    steps: list[Any] = [
        SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True)
    ]
    if scaling == "quantile":
        quantiles = min(rows, max(10, min(1000, rows // 30)))
        steps.append(
            QuantileTransformer(
                n_quantiles=quantiles, output_distribution="normal", random_state=seed
            )
        )
    steps.append(FunctionTransformer() if scaling == "none" else StandardScaler())
    return make_pipeline(*(steps if missing == "impute" else steps[1:]))
