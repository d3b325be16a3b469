"""Lines of a .csv file, tables of numbers block by block, whatever their size, and what cells hold: numbers, words or
dates, or nothing. Every error names the file and the line.

Cells that are empty, NA, N/A, NaN, null or ? are missing. Numbers have a decimal point or, if that is said, a comma.
Dates become numbers: days since 1970, and where in its year, its week and its day a moment lies.

Sizes: n rows of a block, P columns.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from slimbayes.errors import brief

LINE = 1 << 20  # characters: the longest honest line has a few thousand
_CELLS = 1 << 16  # of a block
_MOST = float(np.finfo(np.float32).max)

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


Kind = Literal["number", "word", "date"]
Decimal = Literal["point", "comma"]
MISSING = frozenset({"", "na", "n/a", "nan", "null", "?"})
# Signs of money or per cent, and what parts thousands: "$1,005.24", "12 €", "1 234,5", "7 %".
_DRESSED = re.compile(r"[-+]?[$€£¥₹]?\s*[-+]?\d+(?:[ ,.'\u00a0\u202f]\d{3})*(?:[.,]\d+)?\s*[$€£¥₹%]?")
_DATE = re.compile(r"(\d{4})([-/.])(\d{1,2})\2(\d{1,2})|(\d{1,2})([-/.])(\d{1,2})\6(\d{4})")
_CYCLES = {"year": 365.2425, "week": 7.0, "day": 1.0}  # in days


def read_column(
    place: str, name: str, kind: Kind, block: Sequence[tuple[int, Sequence[Any]]], at: int, decimal: Decimal = "point"
) -> np.ndarray:
    """One column (n,) of a block of lines; errors say `place` and the line's number."""
    cells = [(number, cells[at]) for number, cells in block]
    if kind != "word":
        return np.array([_value(place, number, name, kind, cell, decimal) for number, cell in cells])
    out = np.empty(len(block), dtype=object)
    for row, (number, cell) in enumerate(cells):
        text = text_of(cell)
        check_text(f"{place} {number}", text, f"a text of column {brief(name)}")
        out[row] = None if text.lower() in MISSING else text
    return out


def _value(place: str, number: int, name: str, kind: Kind, cell: Any, decimal: Decimal) -> float:
    """A number, or the days of a date; NaN where it is missing."""
    text = text_of(cell)
    if text.lower() in MISSING:
        return float("nan")
    fault, value = "is not a number", None if kind == "date" else number_in(text, decimal_of(cell, decimal))
    if kind == "date":
        try:
            value = days_of(text)
        except ValueError as error:
            fault = str(error)
    elif value is None and number_in(text, "comma" if decimal == "point" else "point") is not None:
        fault = f"is no number with a decimal {decimal}{'' if place == 'row' else ', as the run is told to read'}"
    elif value is not None and abs(value) > _MOST:
        fault, value = "is infinite, or too large for float32", None
    if value is None:
        raise ValueError(f"{place} {number}, column {brief(name)}: {brief(text)} {fault}.")
    return value


def decimal_of(cell: Any, decimal: Decimal) -> Decimal:
    """Numbers that are no texts, as parquet files have them, have a point."""
    return decimal if isinstance(cell, str) else "point"


def number_in(cell: str, decimal: Decimal = "point") -> float | None:
    """The number that a text is, if it is one.

    >>> number_in("1.5"), number_in("1,5", "comma"), number_in("1.500", "comma")
    (1.5, 1.5, None)
    """
    if decimal == "comma":
        cell = "?" if "." in cell else cell.replace(",", ".")  # whose points part thousands
    if "_" in cell:  # Python reads 1_000, authors of tables don't write it
        return None
    try:
        return float(cell)
    except ValueError:
        return None


def nearly_number(cell: str) -> bool:
    """Whether a text that is no number would be one without signs of money, per cent or thousands.

    >>> nearly_number("$1,005.24"), nearly_number("12 €"), nearly_number("BMW 320")
    (True, True, False)
    """
    return _DRESSED.fullmatch(cell) is not None


def text_of(value: Any) -> str:
    """A cell of a parquet file as a csv has it."""
    if isinstance(value, str):
        return value
    return "" if value is None else repr(value) if isinstance(value, float) else str(value)


def check_text(place: str, cell: str, what: str) -> None:
    """Refuse a text with bytes that are no UTF-8."""
    try:
        cell.encode("utf8")
    except UnicodeEncodeError:
        raise ValueError(
            f"{place}: {what} is not UTF-8. Save the file as UTF-8; Latin-1 becomes it by `iconv -f latin1 -t utf8`."
        ) from None


# --- dates ---


def looks_like_date(cell: str) -> bool:
    """Whether a text is a date, with or without a time of day.

    >>> looks_like_date("2024-01-31"), looks_like_date("31.1.2024 10:30"), looks_like_date("version 3")
    (True, True, False)
    """
    day, time = _parted(cell)
    return bool(_DATE.fullmatch(day)) and (not time or bool(re.match(r"\d{1,2}:", time)))


def days_of(cell: str) -> float:
    """Days since 1970 of a date: year, month, day, or with points day, month, year; a time with a zone becomes UTC.

    >>> days_of("1970-01-03"), days_of("3.1.1970 6:00"), days_of("1970-01-03T01:00+01:00")
    (2.0, 2.25, 2.0)
    >>> days_of("03/01/1970")
    Traceback (most recent call last):
    ...
    ValueError: may be the day or the month first: write dates as 1970-01-31
    """
    day, time = _parted(cell)
    found = _DATE.fullmatch(day)
    if found is None:
        raise ValueError("is no date such as 1970-01-31")
    if found[8] and found[6] != ".":
        raise ValueError("may be the day or the month first: write dates as 1970-01-31")
    year, month, number = (found[1], found[3], found[4]) if found[1] else (found[8], found[7], found[5])
    hours = f"{time if time[1:2] != ':' else '0' + time}" or "00:00"
    try:
        moment = datetime.fromisoformat(f"{year}-{int(month):02}-{int(number):02}T{hours}")
    except ValueError:
        raise ValueError("is no date such as 1970-01-31, or no time such as 18:30") from None
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() / 86400


def _parted(cell: str) -> tuple[str, str]:
    day, _, time = cell.replace("T", " ", 1).partition(" ")
    return day, time.strip()


def date_columns(name: str, days: np.ndarray) -> dict[str, np.ndarray]:
    """A column of days (n,) as columns of numbers, each (n,): the days, and sine and cosine of each cycle.

    >>> list(date_columns("sold", np.array([0.0, 1.5])))[:3]
    ['sold: days', 'sold: year sin', 'sold: year cos']
    """
    found = {f"{name}: days": days}
    for cycle, length in _CYCLES.items():
        angle = 2 * np.pi * (days / length % 1)
        found |= {f"{name}: {cycle} sin": np.sin(angle), f"{name}: {cycle} cos": np.cos(angle)}
    return found
