"""Lines of a .csv or .csv.gz file one by one, or tables of numbers block by block, whatever their size; every error
names the file and the line.

Sizes: n rows of a block, P columns.
"""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from typing import IO

import numpy as np

LINE = 1 << 20  # characters: the longest honest line has a few thousand
_CELLS = 1 << 16  # of a block
_MOST = float(np.finfo(np.float32).max)


@contextmanager
def open_rows(file: Path, columns: Sequence[str]) -> Iterator[Iterator[tuple[str, ...]]]:
    """The named cells of every line; names are compared without regard to case, other columns are left out.

    A ValueError that is raised while the file is open, here or by the caller, gets the file and the line in front.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        ...     _ = file.write("ID,note,Value\\n7,low,1.5\\n"), file.flush()
        ...     with open_rows(Path(file.name), ["id", "value"]) as rows:
        ...         list(rows)
        [('7', '1.5')]
    """
    with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf8", newline="") as stream:
        lines = csv.reader(_bounded(stream), strict=True)
        try:
            yield _cells(lines, columns)
        except (csv.Error, EOFError, OSError, zlib.error, UnicodeDecodeError) as error:
            raise ValueError(f"{file}, line {lines.line_num}: damaged or cut short: {error}") from error
        except ValueError as error:
            raise ValueError(f"{file}, line {max(1, lines.line_num)}: {error}") from error


def _cells(lines: Iterator[list[str]], columns: Sequence[str]) -> Iterator[tuple[str, ...]]:
    names = [name.casefold() for name in next(lines, [])]
    if missing := [column for column in columns if column.casefold() not in names]:
        raise ValueError(f"the columns {', '.join(missing)} are missing.")
    pick, width = itemgetter(*(names.index(column.casefold()) for column in columns)), len(names)
    for line in lines:
        if len(line) != width:
            raise ValueError(f"{len(line)} cells, but there are {width} column names.")
        yield pick(line)


# --- tables of numbers ---


def first_cells(file: Path) -> list[str]:
    """The cells of the first line of a csv that is not empty, without blanks around them: names, or the first row."""
    with _open_table(file) as stream:
        return [cell.strip() for cell in next((line for _, line in _numbered(file, stream) if line), [])]


def number_blocks(
    file: Path, first: Sequence[str], named: bool, order: Sequence[int] | None = None, finite: bool = True
) -> Iterator[np.ndarray]:
    """The rows of a table of numbers, float32 (n, P), some at a time: never all of a large file.

    Args:
        first: the cells of its first line, which are no row if `named`.
        order: which columns to take, in this order; all by default.
        finite: refuse cells that are NaN or infinite.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        ...     _ = file.write("a,b\\n1,2\\n3,4\\n"), file.flush()
        ...     names = first_cells(Path(file.name))
        ...     next(number_blocks(Path(file.name), names, named=True, order=[1, 0])).tolist()
        [[2.0, 1.0], [4.0, 3.0]]
    """
    table = _Table(file, first, named, range(len(first)) if order is None else order, finite)
    with _open_table(file) as stream:
        lines = ((number, line) for number, line in _numbered(file, stream) if line)
        if named:
            next(lines, None)
        while block := list(islice(lines, max(1, _CELLS // max(1, len(first))))):
            yield table.numbers(block)


@dataclass(frozen=True)
class _Table:
    """What the lines of a table must be like."""

    file: Path
    first: Sequence[str]
    named: bool
    order: Sequence[int]
    finite: bool

    def numbers(self, block: list[tuple[int, list[str]]]) -> np.ndarray:
        width, order = len(self.first), self.order
        try:
            cells = chain.from_iterable([line[i] for i in order] for _, line in block if len(line) == width)
            values = np.fromiter(map(float, cells), np.float64, len(block) * len(order))
            odd = ~(np.abs(values) <= _MOST)
            if odd.any() and (self.finite or (np.isfinite(values) & odd).any()):
                raise ValueError
        except ValueError:
            for number, line in block:
                self._check(number, line)
            raise  # not one of its lines is wrong
        return values.astype(np.float32).reshape(len(block), len(order))

    def _check(self, number: int, line: list[str]) -> None:
        """Refuse a line that does not fit, and say which cell it is."""
        place = f"{self.file}, line {number}"
        if len(line) != len(self.first):
            wanted = f"{len(self.first)} {'column names' if self.named else 'in the first row'}"
            raise ValueError(f"{place}: {len(line)} cells, but there are {wanted}.")
        for i in self.order:
            column = f"column {self.first[i]!r}" if self.named else f"cell {i + 1}"
            if fault := self._fault(line[i]):
                shown = line[i].encode("utf8", "backslashreplace").decode()[:40]
                raise ValueError(f"{place}, {column}: {shown!r} {fault}.")

    def _fault(self, cell: str) -> str:
        no_number = "is not a finite number" if self.finite else "is not a number"
        try:
            value = float(cell)
        except ValueError:
            return no_number
        if math.isfinite(value):
            return "" if abs(value) <= _MOST else f"is too large for float32, which ends at {_MOST:.2g}"
        return no_number if self.finite else ""


def _open_table(file: Path) -> IO[str]:
    # Bytes that are no UTF-8 get through as what no number has in it, so that their line can be told.
    return file.open(newline="", encoding="utf-8-sig", errors="surrogateescape")


def _numbered(file: Path, stream: IO[str], delimiter: str = ",") -> Iterator[tuple[int, list[str]]]:
    """Lines with their numbers."""
    lines = csv.reader(stream, strict=True, delimiter=delimiter)
    try:
        for line in lines:
            yield lines.line_num, line
    except csv.Error as error:
        raise ValueError(f"{file}, line {lines.line_num}: {error}.") from error


def cell_lines(file: Path) -> Iterator[tuple[int, list[str]]]:
    """The cells of every line that is not empty, without blanks around them, and its number.

    Cells are parted by whichever of comma, semicolon and tab the first line that is not empty has most of.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        ...     _ = file.write("a; b\\n1,5; red\\n"), file.flush()
        ...     list(cell_lines(Path(file.name)))
        [(1, ['a', 'b']), (2, ['1,5', 'red'])]
    """
    with _open_table(file) as stream:
        first = next((line for line in iter(lambda: stream.readline(LINE), "") if line.strip()), "")
        stream.seek(0)
        delimiter = max(",;\t", key=first.count)
        for number, line in _numbered(file, stream, delimiter):
            if line:
                yield number, [cell.strip() for cell in line]


def find_table(folder: Path, table: str) -> Path | None:
    """<table>.csv or <table>.csv.gz in a folder."""
    return next((file for file in (folder / f"{table}.csv", folder / f"{table}.csv.gz") if file.is_file()), None)


def time_of(cell: str) -> datetime:
    """A moment.

    Example:
        >>> time_of("2164-10-23 21:09:00").hour
        21
    """
    try:
        if len(cell) == 19:  # fromisoformat alone would also take a bare date or a zone
            return datetime.fromisoformat(cell)
    except ValueError:
        pass
    raise ValueError(f"{cell!r} is not a time such as 2164-10-23 21:09:00.")


def number_of(cell: str) -> float:
    """A number that float32 can hold; nan for an empty cell.

    Example:
        >>> number_of("1.5"), number_of("")
        (1.5, nan)
    """
    if not cell:
        return math.nan
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not abs(value) < 1e38 or "_" in cell:  # Python reads 1_000, the tables' authors don't write it
        raise ValueError(f"{cell!r} is not a finite number.")
    return value


def _bounded(stream: IO[str]) -> Iterator[str]:
    while line := stream.readline(LINE):
        if len(line) == LINE:
            raise ValueError(f"a line has more than {LINE:,} characters.")
        yield line
