"""Data and networks of one's own in a config.

data: {csv: houses.csv, target: price, test: 0.2}
model: {python: "my_package.nets:build", args: {width: 64}}
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from slimbayes.columns import (
    FEW,
    Column,
    Decimal,
    Kind,
    column_kind,
    hardly_repeats,
    refuse_signs,
)
from slimbayes.errors import brief, did_you_mean
from slimbayes_lab.configs.choices import Options


def _no_controls(text: str) -> str:
    if not text.isprintable():
        raise ValueError("is no path: it holds characters that cannot be printed")
    return text


def _function(text: str) -> str:
    module, _, name = text.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), name]):
        raise ValueError("must name a function as package.module:function")
    return text


PathText = Annotated[
    str, Field(min_length=1, max_length=4000), AfterValidator(_no_controls)
]
ColumnName = Annotated[str, Field(min_length=1, max_length=1000)]
SOURCES = ("csv", "parquet", "npz", "images")
_OF_TABLES = ("target", "header", "categories", "drop", "missing", "decimal", "dates")


class OwnFiles(Options):
    """Data of one's own: one of `csv`, `parquet`, `npz` and `images` instead of a known name. Paths are looked up from
    where the command runs, then from the data folder.

    Attributes:
        csv, parquet: a table. Columns of numbers are scaled, of texts and truth values embedded as categories.
        npz: arrays x and y, or x_train, y_train, x_test and y_test.
        images: a folder with a folder of pictures for each class; or with two such folders, train and test.
        target: the column that is predicted; in a table without names they are called 1, 2, ...
        task: "classes" or "regression"; by default what the target shows: texts are classes, fractions real numbers.
        header: whether a csv's first line has names; by default it has if none of its cells is a number.
        categories: columns of numbers that are categories too.
        drop: columns that are left out.
        missing: "refuse" missing values, or "impute": numbers get their median, beside a column that says where, and
            categories one more value, which also stands for those that training did not see.
        decimal: what parts a number's whole from its fraction in a csv.
        dates: "refuse" columns of dates, or "encode" them: days since 1970, and sine and cosine of the year, of the
            week and, where there are times, of the day.
        test: share of the rows that is tested on, where the data do not say; drawn by `seed`, or the last.
    """

    csv: PathText | None = None
    parquet: PathText | None = None
    npz: PathText | None = None
    images: PathText | None = None
    target: ColumnName | None = None
    task: Literal["classes", "regression"] | None = None
    header: bool | None = None
    categories: tuple[ColumnName, ...] = ()
    drop: tuple[ColumnName, ...] = ()
    missing: Literal["refuse", "impute"] = "refuse"
    decimal: Decimal = "point"
    dates: Literal["refuse", "encode"] = "refuse"
    test: Annotated[float, Field(gt=0, lt=1)] = 0.2

    @property
    def source(self) -> tuple[str, str] | None:
        """What kind of file the data are, and its path; None for a set with a name."""
        return next(
            (
                (kind, path)
                for kind in SOURCES
                if (path := getattr(self, kind)) is not None
            ),
            None,
        )

    @property
    def table(self) -> bool:
        """Whether the data are a table of one's own."""
        return self.csv is not None or self.parquet is not None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [kind for kind in SOURCES if getattr(self, kind) is not None]
        if len(given) > 1:
            raise ValueError(
                f"{' and '.join(given)} are both given: data come from one of them."
            )
        if self.table and self.target is None:
            raise ValueError(
                f"{given[0]} needs target, the name of the column to predict."
            )
        for name in () if self.table else _OF_TABLES:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is for tables: csv or parquet.")
        for name in () if given else ("task", "test"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} is for data of your own: {', '.join(SOURCES)}."
                )
        return self


# --- what the columns of a table are taken for ---

_IN_A_CONFIG = {
    "missing='impute'": "data.missing: impute",
    "categorical_features": "data.categories",
    "turn them into numbers": "say data.dates: encode, turn them into numbers",
    "leave it out": "leave it out with data.drop",
    "say which mark it has where it is read": "set data.decimal to comma or point, as the file has it",
}


def feature_kind(
    column: Column, path: Path, categories: Sequence[str] = (), dates: bool = False
) -> Kind:
    """Whether a column is numbers, categories or, where they are taken, dates; what is neither is refused."""
    try:
        return column_kind(column, column.name in categories, dates)
    except ValueError as error:
        raise ValueError(f"{path}, {say_as_config(error)}") from error


def say_as_config(error: Exception) -> str:
    """What the library says of a column, with options called as in a config."""
    text = str(error).removeprefix("Input X contains NaN: ")
    for word, here in _IN_A_CONFIG.items():
        text = text.replace(word, here)
    return text


def target_is_class(column: Column, path: Path, task: str | None) -> bool:
    """Whether a target is a class: as `task` says, or as its values show."""
    place = f"{path}, column {brief(column.name)}, the target,"
    if column.missing:
        do = (
            "drop these rows"
            if column.values
            else "choose another one (a comma at the end of each line makes one)"
        )
        raise ValueError(
            f"{place} is missing in {column.missing if column.values else 'all'} rows: {do}."
        )
    if len(column.values) == 1:
        raise ValueError(
            f"{place} is {brief(next(iter(column.values)))} in all rows: nothing is to be learnt."
        )
    if task != "classes":
        try:
            refuse_signs(column, place, "say data.task: classes")
        except ValueError as error:
            raise ValueError(say_as_config(error)) from error
    if task == "regression" and column.kind != "number":
        line, cell = column.odd
        raise ValueError(
            f"{place} must hold numbers for data.task: regression, got {brief(cell)} in line {line}."
        )
    if task is not None:
        return task == "classes"
    if column.kind == "date" or (column.kind == "word" and hardly_repeats(column)):
        held = (
            "dates"
            if column.kind == "date"
            else f"{hardly_repeats(column)}, too many for classes"
        )
        raise ValueError(
            f"{place} holds {held}. Choose another column, or say data.task: classes if it is meant."
        )
    if column.kind == "word" or len(column.values) == 2:
        return True
    if column.whole and len(column.values) <= FEW:
        raise ValueError(
            f"{place} holds {len(column.values)} different whole numbers, which may be classes or counts: say "
            f"data.task: classes, or data.task: regression."
        )
    return False


# --- networks ---


class OwnCodeError(RuntimeError):
    """Code that a config names for its network was not allowed to run, was not found, or failed."""


class PythonNet(Options):
    """A network that a function of one's own makes: it runs code, so only from a config that the user names.

    Attributes:
        python: "package.module:function"; modules are also looked for where the command runs.
        args: its arguments. What the data say (inputs, outputs, classes, numbers, sizes, channels, size, vocabulary)
            is given to arguments of these names that are not among them.
    """

    kind: Literal["code"] = "code"
    python: Annotated[str, Field(max_length=500), AfterValidator(_function)]
    args: dict[str, Any] = Field(default={}, max_length=1000)

    def network(self, facts: Mapping[str, Any], data: str) -> Any:
        """What the function makes of its arguments, and of those facts of the data that it has names for."""
        from torch import nn  # configs are checked without it

        if not code_is_allowed():
            raise OwnCodeError(
                f"The network is made by code that the run names ({self.python}), not by slimbayes. If you trust that "
                f"code, say --allow-code."
            )
        function = _find_function(self.python)
        known = inspect.signature(function)
        given = {
            name: value for name, value in facts.items() if name in known.parameters
        } | self.args
        try:
            known.bind(**given)
        except TypeError as error:
            raise OwnCodeError(
                f"model.python: {self.python} cannot be called: {error}. model.args gives arguments; the data say "
                f"{', '.join(facts)}."
            ) from error
        try:
            made = function(**given)
        except Exception as error:  # whatever the user's code raises, it is told where
            at = traceback.extract_tb(error.__traceback__)[-1]
            told = f"{type(error).__name__}: {brief(str(error))}, in {at.filename}, line {at.lineno}"
            raise OwnCodeError(f"model.python: {self.python} raised {told}.") from error
        if not isinstance(made, nn.Module):
            raise OwnCodeError(
                f"model.python: {self.python} must give a torch.nn.Module, got {type(made).__name__}."
            )
        return made


def _find_function(place: str) -> Callable[..., Any]:
    """The function at "package.module:function"."""
    module_name, _, name = place.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(
            here
        )  # at the end: what is installed cannot be replaced by a file that lies about
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # one that the user's module needs
        raise OwnCodeError(
            f"model.python: there is no module {brief(error.name)}, installed or in {here}."
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value)]
        raise OwnCodeError(
            f"model.python: {module_name} has no function {brief(name)}{did_you_mean(name, known)}"
        )
    found: Callable[..., Any] = function
    return found


_ALLOWED = ContextVar("_ALLOWED", default=False)


def code_is_allowed() -> bool:
    """Whether the user trusts code that a config names."""
    return _ALLOWED.get()


@contextmanager
def code_allowed(allowed: bool = True) -> Iterator[None]:
    """Let networks be made by code that a config names: for configs that the user has named, or trusts."""
    token = _ALLOWED.set(allowed)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def fill_in(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A config with what follows from it: data are named by their file, tables are scaled by quantiles unless
    something else is asked for, and {python: ...} is a kind of network.

    Example:
        >>> fill_in({"data": {"csv": "in/houses.csv"}, "model": {"python": "nets:build"}})["data"]
        {'scaling': 'quantile', 'csv': 'in/houses.csv', 'name': 'houses'}
    """
    filled, data, model = dict(tree), tree.get("data"), tree.get("model")
    if isinstance(data, dict):
        filled["data"] = (
            {"scaling": "quantile"} if {"csv", "parquet"} & data.keys() else {}
        ) | data
        if isinstance(data.get("target"), int):  # a column without a name
            filled["data"]["target"] = str(data["target"])
        paths = [data[kind] for kind in SOURCES if isinstance(data.get(kind), str)]
        if paths and not data.get("name"):
            filled["data"]["name"] = PurePath(paths[0]).stem[:200] or "data"
    if isinstance(model, dict) and "python" in model:
        filled["model"] = {"kind": "code"} | model
    return filled
