"""Tables of one's own, .csv or .parquet: what their columns hold, and their rows block by block.

A column holds numbers, words (categories) or dates. Cells that are empty, NA, N/A, NaN, null or ? are missing.

Sizes: n rows of a block.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from slimbayes.data.csv_rows import cell_lines
from slimbayes.errors import brief
from slimbayes.untrusted import check_regular

Kind = Literal["number", "word", "date"]
MISSING = frozenset({"", "na", "n/a", "nan", "null", "?"})
MOST_VALUES = 1000  # different ones of a column that are kept
_DATE = re.compile(r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{4})([ T]\d{1,2}:.*)?")
_ROWS = 1 << 14  # of a block
_LARGEST = float(np.finfo(np.float32).max)
Lines = Iterable[tuple[int, Sequence[Any]]]  # numbers of lines (or rows of a parquet file) and their cells


@dataclass
class Column:
    """What a column holds: how many values are missing or numbers, and up to 1,001 different ones."""

    name: str
    missing: int = 0
    numbers: int = 0
    others: int = 0
    dates: int = 0
    whole: bool = True
    values: set[str] = field(default_factory=set)
    odd: tuple[int, str] = (0, "")  # the first line with something else than a number

    @property
    def kind(self) -> Kind:
        """Texts are words, as are truth values; a column with nothing in it holds numbers."""
        if self.others and self.dates == self.others and not self.numbers:
            return "date"
        return "word" if self.others else "number"

    def add(self, cell: str, line: int) -> None:
        if cell.lower() in MISSING:
            self.missing += 1
            return
        if len(self.values) <= MOST_VALUES and cell not in self.values:
            _check_text(cell, line, self.name)
            self.values.add(cell)
        value = _number(cell)
        if value is None:
            self.odd = self.odd if self.others else (line, cell)
            self.others += 1
            self.dates += bool(_DATE.fullmatch(cell))
        else:
            self.numbers += 1
            self.whole = self.whole and value.is_integer()


@dataclass(frozen=True)
class TableFile:
    """A file's columns as they were found.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        ...     _ = file.write("size,colour\\n1,red\\n2.5,\\n"), file.flush()
        ...     found = look(Path(file.name))
        >>> found.rows, [(column.name, column.kind, column.missing) for column in found.columns]
        (2, [('size', 'number', 0), ('colour', 'word', 1)])
    """

    file: Path
    header: bool
    rows: int
    columns: tuple[Column, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    def column(self, name: str) -> Column:
        return self.columns[self.names.index(name)]


@dataclass(frozen=True)
class Frame:
    """Columns (n,) by name: numbers in float64, NaN where missing; words as texts, None where missing."""

    data: Mapping[str, np.ndarray]

    @property
    def columns(self) -> list[str]:
        return list(self.data)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.data[name]

    def __len__(self) -> int:
        return len(next(iter(self.data.values()), ()))


def look(file: Path, header: bool | None = None) -> TableFile:
    """Read a table through and say what is in it.

    Args:
        header: whether the first line of a csv has the columns' names; without them they are called 1, 2, ... By
            default it has if none of its cells is a number, and has not if all are.
    """
    first, names, named, lines = _opened(file, header)
    columns, rows = tuple(map(Column, names)), 0
    for number, cells in lines:
        _check_width(file, number, cells, first, named)
        rows += 1
        for column, cell in zip(columns, cells, strict=True):
            column.add(cell if isinstance(cell, str) else _text(cell), number)
    if not rows:
        raise ValueError(f"{file} has no rows{' below its line of column names' if named else ''}.")
    return TableFile(file, named, rows, columns)


def frames(file: Path, kinds: Mapping[str, Kind], header: bool | None = None) -> Iterator[Frame]:
    """The named columns of a table, some rows at a time; others are passed over."""
    first, names, named, lines = _opened(file, header)
    places = {name: names.index(name) for name in kinds}
    stream = iter(lines)
    while block := list(islice(stream, _ROWS)):
        for number, cells in block:
            _check_width(file, number, cells, first, named)
        yield Frame({name: _column(file, name, kinds[name], block, at) for name, at in places.items()})


def column_names(file: Path, header: bool | None = None) -> tuple[str, ...]:
    """The names of a file's columns."""
    return _opened(file, header)[1]


# --- lines ---


def _opened(file: Path, header: bool | None) -> tuple[int, tuple[str, ...], bool, Lines]:
    """A file's number of columns, their names, whether it has them itself, and its rows."""
    if not file.exists():
        raise FileNotFoundError(f"{file} is not there.")
    check_regular(file)
    if file.suffix == ".parquet":
        names, lines = _parquet(file)
        return len(names), names, True, lines
    stream = iter(cell_lines(file))
    number, first = next(stream, (1, []))
    if not first:
        raise ValueError(f"{file} is empty.")
    named = _is_header(file, first) if header is None else header
    if not named:
        return len(first), tuple(str(i + 1) for i in range(len(first))), False, _again((number, first), stream)
    if "" in first:
        raise ValueError(f"{file}, line {number}: column {first.index('') + 1} has no name: give it one.")
    if odd := next((name for name in first if first.count(name) > 1), None):
        raise ValueError(f"{file}, line {number}: two columns are called {brief(odd)}.")
    for name in first:
        _check_text(name, number, "names")
    return len(first), tuple(first), True, stream


def _again(first: tuple[int, list[str]], rest: Iterator[tuple[int, list[str]]]) -> Iterator[tuple[int, list[str]]]:
    yield first
    yield from rest


def _is_header(file: Path, first: Sequence[str]) -> bool:
    numbers = [cell for cell in first if _number(cell) is not None]
    if 0 < len(numbers) < len(first):
        raise ValueError(
            f"{file}, line 1 holds numbers ({brief(numbers[0])}) and other cells: it may be a row, or the names of "
            f"columns. Say `header: true` or `header: false`."
        )
    return not numbers


def _check_width(file: Path, number: int, cells: Sequence[Any], width: int, named: bool) -> None:
    if len(cells) != width:
        wanted = "column names" if named else "in the first row"
        raise ValueError(f"{file}, line {number}: {len(cells)} cells, but there are {width} {wanted}.")


def _parquet(file: Path) -> tuple[tuple[str, ...], Lines]:
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise ImportError('Parquet files are read by pyarrow: pip install "slimbayes[parquet]"') from error
    try:
        opened = parquet.ParquetFile(file)
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{file} is no parquet file: {brief(str(error))}.") from error
    for one in opened.schema_arrow:
        if arrow.types.is_nested(one.type) or arrow.types.is_binary(one.type):
            raise ValueError(
                f"{file}: column {brief(one.name)} holds {one.type}; numbers, texts and dates can be read."
            )
    names = tuple(opened.schema_arrow.names)
    if len(set(names)) < len(names):
        raise ValueError(f"{file}: two columns have one name.")

    def lines() -> Iterator[tuple[int, Sequence[Any]]]:
        number = 0
        for batch in opened.iter_batches(_ROWS):
            for cells in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                number += 1
                yield number, cells

    return names, lines()


# --- cells ---


def _column(file: Path, name: str, kind: Kind, block: Sequence[tuple[int, Sequence[Any]]], at: int) -> np.ndarray:
    cells = ((number, cells[at] if isinstance(cells[at], str) else _text(cells[at])) for number, cells in block)
    if kind == "number":
        return np.array([_value(file, name, number, cell) for number, cell in cells])
    out = np.empty(len(block), dtype=object)
    for row, (number, cell) in enumerate(cells):
        _check_text(cell, number, name)
        out[row] = None if cell.lower() in MISSING else cell
    return out


def _value(file: Path, name: str, number: int, cell: str) -> float:
    value = float("nan") if cell.lower() in MISSING else _number(cell)
    fault = "is not a number" if value is None else ""
    if value is not None and abs(value) > _LARGEST:
        fault = "is infinite, or too large for float32"
    if value is None or fault:
        raise ValueError(f"{file}, line {number}, column {brief(name)}: {brief(cell)} {fault}.")
    return value


def _number(cell: str) -> float | None:
    if "_" in cell:  # Python reads 1_000, authors of tables don't write it
        return None
    try:
        return float(cell)
    except ValueError:
        return None


def _text(value: Any) -> str:
    """A cell of a parquet file as a csv has it."""
    return "" if value is None else repr(value) if isinstance(value, float) else str(value)


def _check_text(cell: str, line: int, name: str) -> None:
    try:
        cell.encode("utf8")
    except UnicodeEncodeError:
        raise ValueError(f"line {line}, column {brief(name)}: a text is not UTF-8. Save the file as UTF-8.") from None
