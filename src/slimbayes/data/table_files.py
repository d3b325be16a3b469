"""Tables of one's own, .csv or .parquet: what their columns hold, and their rows block by block.

A column holds numbers, words (categories) or dates. Cells that are empty, NA, N/A, NaN, null or ? are missing. Numbers
have a decimal point or, if that is said, a comma.

Sizes: n rows of a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from slimbayes.data.csv_rows import (
    MISSING,
    Decimal,
    Kind,
    cell_lines,
    check_text,
    decimal_of,
    looks_like_date,
    nearly_number,
    number_in,
    read_column,
    text_of,
)
from slimbayes.errors import brief
from slimbayes.untrusted import check_regular

TABLES = (".csv", ".tsv", ".parquet")  # ends of files' names
MOST_VALUES = 1000  # different ones of a column that are kept
_ROWS = 1 << 14  # of a block
Lines = Iterable[tuple[int, Sequence[Any]]]  # numbers of lines (or rows of a parquet file) and their cells


@dataclass
class Column:
    """What a column holds: how many values are missing, numbers, numbers but for their decimal mark, or but for some
    sign, and up to 1,001 different ones."""

    name: str
    missing: int = 0
    numbers: int = 0
    others: int = 0
    dates: int = 0
    marked: int = 0
    nearly: int = 0
    whole: bool = True
    values: set[str] = field(default_factory=set)
    odd: tuple[int, str] = (0, "")  # the first line with something else than a number

    @property
    def kind(self) -> Kind:
        """Texts are words, as are truth values; a column with nothing in it holds numbers."""
        if self.others and self.dates == self.others and not self.numbers:
            return "date"
        return "word" if self.others else "number"

    @property
    def other_mark(self) -> bool:
        """Whether what is no number would be one with the other decimal mark."""
        return bool(self.marked) and self.marked == self.others

    @property
    def dressed(self) -> bool:
        """Whether what is no number would be one without signs of money, per cent or thousands."""
        return bool(self.nearly) and self.nearly == self.others

    def add(self, cell: str, line: int, file: Path, decimal: Decimal = "point") -> None:
        if cell.lower() in MISSING:
            self.missing += 1
            return
        if len(self.values) <= MOST_VALUES and cell not in self.values:
            check_text(f"{file}, line {line}", cell, f"a text of column {brief(self.name)}")
            self.values.add(cell)
        value = number_in(cell, decimal)
        if value is None:
            self.odd = self.odd if self.others else (line, cell)
            self.others += 1
            self.dates += looks_like_date(cell)
            other = number_in(cell, "comma" if decimal == "point" else "point") is not None
            self.marked += other
            self.nearly += other or nearly_number(cell)
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
    decimal: Decimal = "point"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    def column(self, name: str) -> Column:
        return self.columns[self.names.index(name)]


@dataclass(frozen=True)
class Frame:
    """Columns (n,) by name: numbers, and days of dates, in float64, NaN where missing; words as texts, None where
    missing."""

    data: Mapping[str, np.ndarray]

    @property
    def columns(self) -> list[str]:
        return list(self.data)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.data[name]

    def __len__(self) -> int:
        return len(next(iter(self.data.values()), ()))


def look(file: Path, header: bool | None = None, decimal: Decimal = "point") -> TableFile:
    """Read a table through and say what is in it.

    Args:
        header: whether the first line of a csv has the columns' names; without one a column is called by its number,
            1, 2, ... By default it has if none of its cells is a number, and has not if all are.
        decimal: what parts a number's whole from its fraction.
    """
    first, names, named, lines = _opened(file, header, decimal)
    columns, rows = tuple(map(Column, names)), 0
    for number, cells in lines:
        _check_width(file, number, cells, first, named)
        rows += 1
        for column, cell in zip(columns, cells, strict=True):
            column.add(text_of(cell), number, file, decimal_of(cell, decimal))
    if not rows:
        raise ValueError(f"{file} has no rows{' below its line of column names' if named else ''}.")
    return TableFile(file, named, rows, columns, decimal)


def frames(
    file: Path, kinds: Mapping[str, Kind], header: bool | None = None, decimal: Decimal = "point"
) -> Iterator[Frame]:
    """The named columns of a table, some rows at a time; others are passed over."""
    first, names, named, lines = _opened(file, header, decimal)
    places = {name: names.index(name) for name in kinds}
    stream = iter(lines)
    while block := list(islice(stream, _ROWS)):
        for number, cells in block:
            _check_width(file, number, cells, first, named)
        yield Frame(
            {name: read_column(f"{file}, line", name, kinds[name], block, at, decimal) for name, at in places.items()}
        )


def frame_of(values: Mapping[str, Sequence[Any]], kinds: Mapping[str, Kind]) -> Frame:
    """The named columns of values in memory, read as those of a file.

    >>> frame_of({"size": [1, None], "town": ["north", 7]}, {"size": "number", "town": "word"})["size"]
    array([ 1., nan])
    """
    found = {}
    for name, kind in kinds.items():
        found[name] = read_column("row", name, kind, [(i, (value,)) for i, value in enumerate(values[name])], 0)
    return Frame(found)


def column_names(file: Path, header: bool | None = None, decimal: Decimal = "point") -> tuple[str, ...]:
    """The names of a file's columns."""
    return _opened(file, header, decimal)[1]


# --- lines ---


def _opened(file: Path, header: bool | None, decimal: Decimal) -> tuple[int, tuple[str, ...], bool, Lines]:
    """A file's number of columns, their names, whether it has them itself, and its rows."""
    if not file.exists():
        raise FileNotFoundError(f"{file} is not there.")
    check_regular(file)
    if file.suffix.lower() == ".parquet":
        names, lines = _parquet(file)
        return len(names), names, True, lines
    stream = iter(cell_lines(file))
    number, first = next(stream, (1, []))
    if not first:
        raise ValueError(f"{file} is empty.")
    named = _is_header(file, first, decimal) if header is None else header
    if not named:
        return len(first), tuple(str(i + 1) for i in range(len(first))), False, chain([(number, first)], stream)
    first = [name or str(i + 1) for i, name in enumerate(first)]  # one that pandas wrote has an index without a name
    if odd := next((name for name in first if first.count(name) > 1), None):
        raise ValueError(f"{file}, line {number}: two columns are called {brief(odd)}.")
    for name in first:
        check_text(f"{file}, line {number}", name, "a column's name")
    return len(first), tuple(first), True, stream


def _is_header(file: Path, first: Sequence[str], decimal: Decimal) -> bool:
    numbers = [cell for cell in first if number_in(cell, decimal) is not None]
    if 0 < len(numbers) < len(first):
        raise ValueError(
            f"{file}, line 1 holds numbers ({brief(numbers[0])}) and other cells: it may be a row, or the names of "
            f"columns. Say `header: true` or `header: false` in a config, --header or --no-header to `slimbayes init`."
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
