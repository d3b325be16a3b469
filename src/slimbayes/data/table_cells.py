"""Cells of a table: numbers, words and dates, or missing.

Cells that are empty, NA, N/A, NaN, null or ? are missing. Numbers have a decimal point or, if that is said, a comma.

Sizes: n rows of a block.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from slimbayes.data.dates import days_of
from slimbayes.errors import brief

Kind = Literal["number", "word", "date"]
Decimal = Literal["point", "comma"]
MISSING = frozenset({"", "na", "n/a", "nan", "null", "?"})
# Signs of money or per cent, and what parts thousands: "$1,005.24", "12 €", "1 234,5", "7 %".
_DRESSED = re.compile(r"[-+]?[$€£¥₹]?\s*[-+]?\d+(?:[ ,.'\u00a0\u202f]\d{3})*(?:[.,]\d+)?\s*[$€£¥₹%]?")
_LARGEST = float(np.finfo(np.float32).max)


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
    elif value is not None and abs(value) > _LARGEST:
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
