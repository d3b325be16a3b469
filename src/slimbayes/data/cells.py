"""What the cells of a table hold: numbers, words or dates, or nothing.

Cells that are empty, NA, N/A, NaN, null or ? are missing. Numbers have a decimal point or, if that is said, a comma.
Dates become numbers: days since 1970, and where in its year, its week and its day a moment lies.

Sizes: n rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np

from slimbayes.errors import brief

_MOST = float(np.finfo(np.float32).max)
Kind = Literal["number", "word", "date"]
Decimal = Literal["point", "comma"]
Allow = Literal["finite", "missing"]  # numbers: all there, or some missing (NaN)
MISSING = frozenset({"", "na", "n/a", "nan", "null", "?"})
# Signs of money or per cent, and what parts thousands: "$1,005.24", "12 €", "1 234,5", "7 %".
_DRESSED = re.compile(
    r"[-+]?[$€£¥₹]?\s*[-+]?\d+(?:[ ,.'\u00a0\u202f]\d{3})*(?:[.,]\d+)?\s*[$€£¥₹%]?"
)
_YEAR_FIRST = re.compile(r"(\d{4})([-/.])(\d{1,2})\2(\d{1,2})")
_YEAR_LAST = re.compile(r"(\d{1,2})([-/.])(\d{1,2})\2(\d{4})")
_CYCLES = {"year": 365.2425, "week": 7.0, "day": 1.0}  # in days


def read_column(
    place: str,
    name: str,
    kind: Kind,
    cells: Sequence[Any],
    lines: Sequence[int],
    decimal: Decimal,
    allow: Allow,
) -> np.ndarray:
    """A column (n,) of cells from lines with these numbers, which errors name after `place`."""
    if kind == "number" and decimal == "point":
        with suppress(
            ValueError, TypeError
        ):  # nearly always they are plain numbers: all at once
            plain = np.fromiter(map(float, cells), np.float64, len(cells))
            if (np.abs(plain) <= _MOST).all() and "_" not in "".join(cells):
                return plain
    out = np.empty(len(cells), dtype=object)
    for row, (cell, line) in enumerate(zip(cells, lines)):
        text = text_of(cell)
        if kind == "word":
            check_text(f"{place} {line}", text, f"a text of column {brief(name)}")
        try:
            out[row] = _value(text, kind, decimal_of(cell, decimal), allow)
        except ValueError as error:
            raise ValueError(
                f"{place} {line}, column {brief(name)}: {brief(text)} {error}."
            ) from error
    return out if kind == "word" else out.astype(np.float64)


def _value(text: str, kind: Kind, decimal: Decimal, allow: Allow) -> str | float | None:
    """What a text says, the days of a date; None where it is missing. An error goes on after the text."""
    if text.lower() in MISSING:
        if allow == "finite":
            raise ValueError("is not a finite number")
        return None
    if kind != "number":
        return text if kind == "word" else days_of(text)
    value = number_in(text, decimal)
    if value is None:
        other = number_in(text, "comma" if decimal == "point" else "point")
        raise ValueError(
            "is not a number"
            if other is None
            else f"is no number with a decimal {decimal}"
        )
    if abs(value) > _MOST:
        raise ValueError("is infinite, or too large for float32")
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
        if "." in cell:  # it parts thousands
            return None
        cell = cell.replace(",", ".")
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
    return (
        "" if value is None else repr(value) if isinstance(value, float) else str(value)
    )


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
    dated = _YEAR_FIRST.fullmatch(day) or _YEAR_LAST.fullmatch(day)
    return dated is not None and (not time or re.match(r"\d{1,2}:", time) is not None)


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
    if found := _YEAR_FIRST.fullmatch(day):
        year, _, month, number = found.groups()
    elif found := _YEAR_LAST.fullmatch(day):
        number, mark, month, year = found.groups()
        if mark != ".":
            raise ValueError(
                "may be the day or the month first: write dates as 1970-01-31"
            )
    else:
        raise ValueError("is no date such as 1970-01-31")
    if time[1:2] == ":":  # 6:00
        time = f"0{time}"
    try:
        moment = datetime.fromisoformat(
            f"{year}-{int(month):02}-{int(number):02}T{time or '00:00'}"
        )
    except ValueError:
        raise ValueError(
            "is no date such as 1970-01-31, or no time such as 18:30"
        ) from None
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
        found |= {
            f"{name}: {cycle} sin": np.sin(angle),
            f"{name}: {cycle} cos": np.cos(angle),
        }
    return found
