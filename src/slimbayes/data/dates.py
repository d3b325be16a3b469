"""Dates as numbers: days since 1970, and where in its year, its week and its day a moment lies.

Sizes: n rows.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

import numpy as np

_DATE = re.compile(r"(\d{4})([-/.])(\d{1,2})\2(\d{1,2})|(\d{1,2})([-/.])(\d{1,2})\6(\d{4})")
_CYCLES = {"year": 365.2425, "week": 7.0, "day": 1.0}  # in days


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
