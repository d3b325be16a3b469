"""Tables as arrays of numbers: which columns are categories, what is missing, and how numbers are scaled; and all that
was learnt of it in a form that JSON holds, which a run needs to read other rows.

Sizes: N rows; d columns, of which c hold categories; T targets; w numbers after scaling (missing ones add columns that
say where). Read tables have their numbers first, then codes of categories: 0 stands for what is missing or unknown, 1,
2, ... for the categories seen in training.
"""

import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from typing import Any, Literal, Self

import narwhals as nw
import numpy as np
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    QuantileTransformer,
    StandardScaler,
)

from slimbayes.columns import (
    MISSING,
    MOST_EXACT,
    Column,
    Kind,
    column_kind,
    compound_text,
    is_compound,
    number_in,
)
from slimbayes.errors import SlimbayesWarning, brief, did_you_mean

Missing = Literal["refuse", "impute"]
Scaling = Literal["quantile", "standard", "none"]


def is_frame(X: Any) -> bool:
    """Whether columns have names and types of their own: a data frame of any library that narwhals knows."""
    return bool(nw.dependencies.is_into_dataframe(X))


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
            wanted: columns that are categories, by name or position, or "auto". Other columns of a DataFrame are what
                `column_kind` finds in them, those of arrays and mappings are numbers.
        """
        columns = _columns(X)
        self.names = list(columns)
        chosen = set(self._chosen(wanted, is_frame(X) or isinstance(X, Mapping)))
        if is_frame(X):
            for name, column in columns.items():
                if _kind(name, column, rows, name in chosen) == "word":
                    chosen.add(name)
        self.words = {
            name: _known(name, _words(name, column)[rows])
            for name, column in columns.items()
            if name in chosen
        }

    def read(
        self, X: Any, rows: Any = slice(None), unseen: Counter[str] | None = None
    ) -> np.ndarray:
        """Rows of a table as numbers and codes, (N, d); NaN where a number is missing and was not refused.

        Unknown categories that count as missing are added to `unseen` by column or, without it, told by a warning.
        """
        columns = dict(zip(self.names, _columns(X).values()))
        found: Counter[str] = Counter()
        numbers = [_numbers(name, columns[name])[rows] for name in self.numbers]
        codes = [
            self._codes(name, _words(name, columns[name])[rows], found)
            for name in self.words
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

    def _chosen(self, wanted: Any, named: bool) -> Iterator[str]:
        """The columns that are named as categories."""
        if isinstance(wanted, str) and wanted == "auto":
            return
        for one in wanted if isinstance(wanted, Sequence | np.ndarray) else [wanted]:
            if isinstance(one, str) and named and one in self.names:
                yield one
            elif (
                isinstance(one, int | np.integer)
                and not isinstance(one, bool)
                and 0 <= one < len(self.names)
            ):
                yield self.names[one]
            else:
                hint = (
                    did_you_mean(str(one), self.names)
                    if named
                    else f": X has {len(self.names)} columns."
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


def _columns(X: Any) -> dict[str, Any]:
    """Columns by name, those of arrays by position: narwhals' Series of frames, else arrays (N,)."""
    if isinstance(X, Mapping):
        return dict(X)
    if not is_frame(X):
        return {str(place): column for place, column in enumerate(X.T)}
    frame = nw.from_native(X, eager_only=True)
    found = {}
    for column in frame.iter_columns():
        if column.dtype == nw.Unknown:  # such as pandas' sparse columns
            column = nw.new_series(
                column.name, column.to_numpy(), backend=frame.implementation
            )
        found[str(column.name)] = column
    return found


def _kind(name: str, series: Any, rows: Any, named: bool) -> Kind:
    """What some rows of a DataFrame's column hold."""
    dtype = series.dtype
    if dtype.is_numeric() and (not dtype.is_integer() or _stays_exact(series)):
        return "word" if named else "number"
    categorical = isinstance(dtype, nw.Categorical | nw.Enum)
    column = Column(name, "row", declared=categorical)
    values = series.to_list()
    for row in np.arange(len(values))[rows].tolist():
        column.add(None if _is_missing(values[row]) else values[row], row)
    try:
        kind = column_kind(column, named)
    except ValueError as error:
        raise ValueError(_sentence(str(error))) from error
    if kind == "number" and column.numbers and dtype == nw.String:
        warnings.warn(
            f"Column {brief(name)} holds numbers as texts and is taken for numbers: name it in categorical_features "
            f"if it holds categories.",
            SlimbayesWarning,
            stacklevel=2,
        )
    return kind


def _stays_exact(series: Any) -> bool:
    """Whether float64 holds every whole number of a column."""
    ends = [series.min(), series.max()]
    return all(_is_missing(end) or abs(end) <= MOST_EXACT for end in ends)


def _numbers(name: str, column: Any) -> np.ndarray:
    """Numbers of a column (N,), NaN where they are missing."""
    if isinstance(column, nw.Series) and column.dtype.is_numeric():
        column = column.cast(nw.Float64).to_numpy()
    if isinstance(column, nw.Series) or np.asarray(column).dtype.kind in "OUST":
        values = np.array([_number(name, word) for word in _words(name, column)])
    else:
        values = np.asarray(column)
    values = values.astype(np.float64)
    if np.isinf(values).any():
        raise ValueError(
            f"Input X contains infinity in column {name!r}: clip it, or mark it as missing."
        )
    return values


def _number(name: str, value: Any) -> float:
    """A cell as a number, NaN where it is missing."""
    if value is None:
        return math.nan
    number = number_in(value) if isinstance(value, str) else None
    if isinstance(value, Real | Decimal):
        number = float(value)
    if number is None:
        raise ValueError(
            f"Column {name!r} must hold numbers, got {brief(value)}. "
            f"Name it in categorical_features if it holds categories."
        )
    return number


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


def _words(name: str, column: Any) -> np.ndarray:
    """Values as objects (N,), with None for everything that says "missing"."""
    framed = isinstance(column, nw.Series)
    values = column.to_list() if framed else np.asarray(column).tolist()
    out = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        if is_compound(value):
            raise ValueError(_sentence(compound_text(name)))
        unsaid = framed and isinstance(value, str) and value.lower() in MISSING
        out[row] = None if unsaid or _is_missing(value) else value
    return out


def _is_missing(value: Any) -> bool:
    """Whether a value is None, NaN, or what pandas has for these."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return not is_compound(value) and bool(value != value)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


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
