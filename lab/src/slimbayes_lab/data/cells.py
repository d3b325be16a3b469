"""The cells of a table in a file as arrays; what they are, columns.py says.

Dates become numbers: days since 1970, and where in its year, its week and its day a moment lies.

Sizes: n rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np

from slimbayes.columns import (
    MISSING,
    YEAR_FIRST,
    YEAR_LAST,
    Decimal,
    Kind,
    day_and_time,
    number_in,
    text_of,
)
from slimbayes.errors import brief

_MOST = float(np.finfo(np.float32).max)
Allow = Literal["finite", "missing"]  # numbers: all there, or some missing (NaN)
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


def check_text(place: str, cell: str, what: str) -> None:
    """Refuse a text with bytes that are no UTF-8."""
    try:
        cell.encode("utf8")
    except UnicodeEncodeError:
        raise ValueError(
            f"{place}: {what} is not UTF-8. Save the file as UTF-8; Latin-1 becomes it by `iconv -f latin1 -t utf8`."
        ) from None


# --- dates ---


def days_of(cell: str) -> float:
    """Days since 1970 of a date: year, month, day, or with points day, month, year; a time with a zone becomes UTC.

    >>> days_of("1970-01-03"), days_of("3.1.1970 6:00"), days_of("1970-01-03T01:00+01:00")
    (2.0, 2.25, 2.0)
    >>> days_of("03/01/1970")
    Traceback (most recent call last):
    ...
    ValueError: may be the day or the month first: write dates as 1970-01-31
    """
    day, time = day_and_time(cell)
    if found := YEAR_FIRST.fullmatch(day):
        year, _, month, number = found.groups()
    elif found := YEAR_LAST.fullmatch(day):
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
