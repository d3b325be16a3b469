"""Tables in files, .csv or .parquet: what their columns hold, and their rows block by block, whatever the file's size.

A column holds numbers, words (categories) or dates (cells.py). Every error names the file and the line.

Sizes: n rows of a block, P columns.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from slimbayes.data.cells import (
    MISSING,
    Allow,
    Decimal,
    Kind,
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
LINE = 1 << 20  # characters: the longest honest line has a few thousand
_CELLS = 1 << 14  # of a block
Lines = Iterator[
    tuple[int, Sequence[Any]]
]  # numbers of lines (or rows of a parquet file) and their cells
# Columns (n,) by name: numbers, and days of dates, NaN where missing; words as texts, None where missing.
Frame = Mapping[str, np.ndarray]


@dataclass
class Column:
    """What a column holds: how many of its cells are what, and the different ones."""

    name: str
    missing: int = 0
    numbers: int = 0
    whole: bool = True  # whether all numbers are
    others: int = 0  # that are neither missing nor numbers; of these
    dates: int = 0  # look like dates,
    marked: int = 0  # would be numbers with the other decimal mark,
    nearly: int = 0  # with that mark, or without signs of money, per cent or thousands
    odd: tuple[int, str] = (0, "")  # line and text of the first
    values: set[str] = field(default_factory=set)  # up to 1,001 different ones

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
            check_text(
                f"{file}, line {line}", cell, f"a text of column {brief(self.name)}"
            )
            self.values.add(cell)
        value = number_in(cell, decimal)
        if value is None:
            self.odd = self.odd if self.others else (line, cell)
            self.others += 1
            self.dates += looks_like_date(cell)
            other = (
                number_in(cell, "comma" if decimal == "point" else "point") is not None
            )
            self.marked += other
            self.nearly += other or nearly_number(cell)
        else:
            self.numbers += 1
            self.whole = self.whole and value.is_integer()


@dataclass(frozen=True)
class TableFile:
    """A file's columns as they were found."""

    file: Path
    header: bool
    rows: int
    columns: Mapping[str, Column]
    decimal: Decimal = "point"


def look(
    file: Path, header: bool | None = None, decimal: Decimal = "point"
) -> TableFile:
    """Read a table through and say what is in it.

    Args:
        header: whether the first line of a csv has the columns' names; without one a column is called by its number,
            1, 2, ... By default it has if none of its cells is a number, and has not if all are.
        decimal: what parts a number's whole from its fraction.
    """
    names, named, lines = _opened(file, header, decimal)
    columns, rows = {name: Column(name) for name in names}, 0
    for number, cells in lines:
        rows += 1
        for column, cell in zip(columns.values(), cells, strict=True):
            column.add(text_of(cell), number, file, decimal_of(cell, decimal))
    return TableFile(file, named, rows, columns, decimal)


def frames(
    file: Path,
    kinds: Mapping[str, Kind],
    header: bool | None = None,
    decimal: Decimal = "point",
    allow: Allow = "missing",
) -> Iterator[Frame]:
    """The named columns of a table, some rows at a time; others are passed over."""
    names, _, lines = _opened(file, header, decimal)
    places = {name: names.index(name) for name in kinds}
    while block := list(islice(lines, max(1, _CELLS // len(names)))):
        numbers, rows = zip(*block)
        columns = list(zip(*rows))
        yield {
            name: read_column(
                f"{file}, line", name, kinds[name], columns[at], numbers, decimal, allow
            )
            for name, at in places.items()
        }


def number_blocks(
    file: Path,
    columns: Sequence[str] | None = None,
    header: bool | None = None,
) -> Iterator[np.ndarray]:
    """The named columns, or all, of a table of numbers: float32 (n, P), some rows at a time."""
    chosen = column_names(file, header) if columns is None else columns
    for frame in frames(file, dict.fromkeys(chosen, "number"), header, allow="finite"):
        yield np.stack(list(frame.values()), 1).astype(np.float32)


def column_names(
    file: Path, header: bool | None = None, decimal: Decimal = "point"
) -> tuple[str, ...]:
    """The names of a file's columns."""
    return _opened(file, header, decimal)[0]


# --- lines ---


def _opened(
    file: Path, header: bool | None, decimal: Decimal
) -> tuple[tuple[str, ...], bool, Lines]:
    """The names of a file's columns, whether it has them itself, and its rows."""
    if not file.exists():
        raise FileNotFoundError(f"{file} is not there.")
    check_regular(file)
    parquet = file.suffix.lower() == ".parquet"
    lines = _parquet_lines(file) if parquet else cell_lines(file)
    number, first = next(lines, (1, []))
    if not first:
        raise ValueError(f"{file} is empty: it has no rows.")
    named = parquet or (_is_header(file, first, decimal) if header is None else header)
    names = tuple(
        (named and name) or str(i + 1) for i, name in enumerate(first)
    )  # an index that pandas wrote has none
    for name in names:
        check_text(f"{file}, line {number}", name, "a column's name")
    if odd := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{file}, line {number}: two columns are called {brief(odd)}.")
    rows = lines if named else chain([(number, first)], lines)
    return names, named, _checked(file, rows, len(names), named)


def cell_lines(file: Path) -> Lines:
    """The cells of every line of a csv that is not empty, without blanks around them, and its number.

    Cells are parted by whichever of comma, semicolon and tab the first line that is not empty has most of.
    """
    # Bytes that are no UTF-8 get through as what no number has in it, so that their line can be told.
    with file.open(
        newline="", encoding="utf-8-sig", errors="surrogateescape"
    ) as stream:
        first = next(
            (line for line in iter(lambda: stream.readline(LINE), "") if line.strip()),
            "",
        )
        stream.seek(0)
        lines = csv.reader(stream, strict=True, delimiter=max(",;\t", key=first.count))
        try:
            for line in filter(None, lines):
                yield lines.line_num, list(map(str.strip, line))
        except csv.Error as error:
            raise ValueError(f"{file}, line {lines.line_num}: {error}.") from error


def _is_header(file: Path, first: Sequence[str], decimal: Decimal) -> bool:
    numbers = [cell for cell in first if number_in(cell, decimal) is not None]
    if 0 < len(numbers) < len(first):
        raise ValueError(
            f"{file}, line 1 holds numbers ({brief(numbers[0])}) and other cells: it is neither a row nor the names of "
            f"columns. Fill in its missing cells or give every column a name that is no number; of a table to train "
            f"on, say `header: true` or `header: false` in a config, --header or --no-header to `slimbayes init`."
        )
    return not numbers


def _checked(
    file: Path, lines: Iterable[tuple[int, Sequence[Any]]], width: int, named: bool
) -> Lines:
    """Lines, of which there must be one, and all as wide as the first."""
    none = True
    for number, cells in lines:
        if len(cells) != width:
            wanted = "column names" if named else "in the first row"
            raise ValueError(
                f"{file}, line {number}: {len(cells)} cells, but there are {width} {wanted}."
            )
        yield number, cells
        none = False
    if none:
        raise ValueError(
            f"{file} has no rows{' below its line of column names' if named else ''}."
        )


def _parquet_lines(file: Path) -> Lines:
    """The names of a file's columns as line 0, then its rows."""
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise ImportError(
            'Parquet files are read by pyarrow: pip install "slimbayes[parquet]"'
        ) from error
    try:
        opened = parquet.ParquetFile(file)
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{file} is no parquet file: {brief(str(error))}.") from error
    for one in opened.schema_arrow:
        if arrow.types.is_nested(one.type) or arrow.types.is_binary(one.type):
            raise ValueError(
                f"{file}: column {brief(one.name)} holds {one.type}; numbers, texts and dates can be read."
            )
    yield 0, (names := opened.schema_arrow.names)
    batches = opened.iter_batches(max(1, _CELLS // len(names)))
    rows = (
        row
        for batch in batches
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)
    )
    yield from enumerate(rows, 1)
