"""Tables in files, .csv or .parquet: what their columns hold, and their rows block by block, whatever the file's size.

A column holds numbers, words (categories) or dates (cells.py). Every error names the file and the line.

Sizes: n rows of a block, P columns.
"""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from slimbayes.columns import Column, Decimal, Kind, compound_text, number_in
from slimbayes.errors import brief
from slimbayes.untrusted import most_unpacked, open_file
from slimbayes_lab.data.cells import Allow, check_text, read_column

TABLES = (".csv", ".tsv", ".parquet")  # ends of files' names
MOST_COLUMNS = 50_000
MOST_TEXT = 1 << 17  # characters of a cell; Python's reader of csv files has this limit
LINE = 1 << 20  # characters: the longest honest line has a few thousand
_CELLS = 1 << 14  # of a block
Lines = Iterator[
    tuple[int, Sequence[Any]]
]  # numbers of lines (or rows of a parquet file) and their cells
# Columns (n,) by name: numbers, and days of dates, NaN where missing; words as texts, None where missing.
Frame = Mapping[str, np.ndarray]


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
    declared = _declared_categories(file)
    columns = {name: Column(name, declared=name in declared) for name in names}
    rows = 0
    for number, cells in lines:
        rows += 1
        for column, cell in zip(columns.values(), cells, strict=True):
            if isinstance(cell, str) and not cell.isascii():
                check_text(
                    f"{file}, line {number}",
                    cell,
                    f"a text of column {brief(column.name)}",
                )
            column.add(cell, number, decimal)
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
    if not os.path.lexists(file):
        raise FileNotFoundError(f"{file} is not there.")
    parquet = file.suffix.lower() == ".parquet"
    lines = _parquet_lines(file) if parquet else cell_lines(file)
    number, first = next(lines, (1, []))
    if not first:
        raise ValueError(f"{file} is empty: it has no rows.")
    named = parquet or (_is_header(file, first, decimal) if header is None else header)
    if len(first) > MOST_COLUMNS:
        raise ValueError(
            f"{file} has {len(first):,} columns; tables of up to {MOST_COLUMNS:,} can be read. Wider ones come as arrays "
            f"in an .npz file."
        )
    names = tuple(
        (named and name) or str(i + 1) for i, name in enumerate(first)
    )  # an index that pandas wrote has none
    for name in names:
        check_text(f"{file}, line {number}", name, "a column's name")
    seen = Counter(names)
    if odd := next((name for name in names if seen[name] > 1), None):
        raise ValueError(f"{file}, line {number}: two columns are called {brief(odd)}.")
    rows = lines if named else chain([(number, first)], lines)
    return names, named, _checked(file, rows, len(names), named)


def cell_lines(file: Path) -> Lines:
    """The cells of every line of a csv that is not empty, without blanks around them, and its number.

    Cells are parted by whichever of comma, semicolon and tab the first line that is not empty has most of.
    """
    # Bytes that are no UTF-8 get through as what no number has in it, so that their line can be told.
    with (
        open_file(file) as stored,
        io.TextIOWrapper(
            stored, newline="", encoding="utf-8-sig", errors="surrogateescape"
        ) as stream,
    ):
        first = next((line for line in _short_lines(file, stream) if line.strip()), "")
        stream.seek(0)
        delimiter = max(",;\t", key=first.count)
        bounded = _short_lines(file, stream)
        lines = csv.reader(bounded, strict=True, delimiter=delimiter)
        try:
            for line in filter(None, lines):
                yield lines.line_num, list(map(str.strip, line))
        except csv.Error as error:
            raise ValueError(f"{file}, line {lines.line_num}: {error}.") from error


def _short_lines(file: Path, stream: IO[str]) -> Iterator[str]:
    """The lines of a file, none of which is longer than LINE."""
    number = 0
    while line := stream.readline(LINE + 1):
        number += 1
        if len(line) > LINE:
            raise ValueError(
                f"{file}, line {number}: it has more than {LINE:,} characters. A table has a row on each line."
            )
        yield line


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


def _declared_categories(file: Path) -> set[str]:
    """The columns that a parquet file itself calls categories, whatever these are."""
    if file.suffix.lower() != ".parquet":
        return set()
    import pyarrow as arrow
    from pyarrow import parquet

    with open_file(file) as stream:
        schema = parquet.read_schema(stream)
    return {one.name for one in schema if arrow.types.is_dictionary(one.type)}


def _parquet_lines(file: Path) -> Lines:
    """The names of a file's columns as line 0, then its rows."""
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise ImportError(
            'Parquet files are read by pyarrow: pip install "slimbayes-lab[parquet]"'
        ) from error
    with open_file(file) as stream:
        try:
            opened = parquet.ParquetFile(stream)
            texts = _text_columns(file, opened.schema_arrow, arrow.types)
            _check_parquet(file, opened.metadata, os.fstat(stream.fileno()).st_size)
            # Every different text once: a column may hold the same long one a million times.
            opened = parquet.ParquetFile(stream, read_dictionary=texts)
            yield 0, (names := opened.schema_arrow.names)
            batches = opened.iter_batches(max(1, _CELLS // max(1, len(names))))
            rows = (
                row
                for batch in batches
                for row in zip(
                    *(_cells_of(c, file) for c in batch.columns), strict=True
                )
            )
            yield from enumerate(rows, 1)
        except (arrow.ArrowException, OSError) as error:
            raise ValueError(
                f"{file} is no parquet file: {brief(str(error))}."
            ) from error


def _text_columns(file: Path, schema: Any, types: Any) -> list[str]:
    """The columns of texts, none of which holds lists or bytes."""
    texts = []
    for one in schema:
        kind = one.type.value_type if types.is_dictionary(one.type) else one.type
        if (
            types.is_nested(kind)
            or types.is_binary(kind)
            or types.is_large_binary(kind)
        ):
            raise ValueError(f"{file}, {compound_text(one.name)}")
        if types.is_string(kind) or types.is_large_string(kind):
            texts.append(one.name)
    return texts


def _check_parquet(file: Path, about: Any, size: int) -> None:
    """Refuse a file that unpacks to more than one of its size may, by its own account."""
    groups = [about.row_group(i) for i in range(about.num_row_groups)]
    numbers = 8 * about.num_rows * about.num_columns
    unpacked = max(numbers, sum(group.total_byte_size for group in groups))
    if unpacked > most_unpacked(size):
        raise ValueError(
            f"{file} has {size:,} bytes, which unpack to {unpacked:,}: too many for a file of its size. If that is "
            f"meant, write it with compression=None and use_dictionary=False."
        )


def _cells_of(column: Any, file: Path) -> Sequence[Any]:
    """A parquet column's cells; equal texts are one object."""
    if not hasattr(column, "dictionary"):
        cells: list[Any] = column.to_pylist()
        return cells
    values = column.dictionary.to_pylist()
    longest = max((len(v) for v in values if isinstance(v, str)), default=0)
    if longest > MOST_TEXT:
        raise ValueError(
            f"{file} holds a text of {longest:,} characters; cells of up to {MOST_TEXT:,} can be read"
        )
    return [None if at is None else values[at] for at in column.indices.to_pylist()]
