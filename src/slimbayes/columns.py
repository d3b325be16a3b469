"""What the columns of a table are: numbers, categories or dates, or none of these and refused.

The estimators decide by `column_kind`, and so does the command line: a table means the same to both. What is refused
as a number, or as too many categories, is taken for categories once it is named as one.

Cells that are empty, NA, N/A, NaN, null or ? are missing. Numbers have a decimal point or, if that is said, a comma.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import time, timedelta
from typing import Any, Literal

from slimbayes.errors import brief

Kind = Literal["number", "word", "date"]
Decimal = Literal["point", "comma"]
MISSING = frozenset({"", "na", "n/a", "nan", "null", "?"})
FEW = 20  # different texts that are never too many, whole numbers that may be classes
MOST_VALUES = 1000  # different ones of a column that are kept
MOST_EXACT = 2**53  # float64 holds each whole number up to it
# Signs of money or per cent, and what parts thousands: "$1,005.24", "12 €", "1 234,5", "7 %".
_DRESSED = re.compile(
    r"[-+]?[$€£¥₹]?\s*[-+]?\d+(?:[ ,.'\u00a0\u202f]\d{3})*(?:[.,]\d+)?\s*[$€£¥₹%]?"
)
YEAR_FIRST = re.compile(r"(\d{4})([-/.])(\d{1,2})\2(\d{1,2})")
YEAR_LAST = re.compile(r"(\d{1,2})([-/.])(\d{1,2})\2(\d{4})")


# --- cells ---


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


def changes_as_number(cell: str) -> bool:
    """Whether a whole number loses leading zeros, or digits beyond 2^53, as postcodes and ids do.

    >>> changes_as_number("00007"), changes_as_number("9007199254740993"), changes_as_number("0.25")
    (True, True, False)
    """
    digits = cell.lstrip("+-")
    if not digits.isdecimal():
        return False
    if len(digits) > 1 and digits[0] == "0":
        return True
    return len(digits) > 16 or int(digits) > MOST_EXACT


def day_and_time(cell: str) -> tuple[str, str]:
    """The two parts of a date with a time of day; the second is empty where there is none."""
    day, _, rest = cell.replace("T", " ", 1).partition(" ")
    return day, rest.strip()


def looks_like_date(cell: str) -> bool:
    """Whether a text is a date, with or without a time of day.

    >>> looks_like_date("2024-01-31"), looks_like_date("31.1.2024 10:30"), looks_like_date("version 3")
    (True, True, False)
    """
    day, rest = day_and_time(cell)
    dated = YEAR_FIRST.fullmatch(day) or YEAR_LAST.fullmatch(day)
    return dated is not None and (not rest or re.match(r"\d{1,2}:", rest) is not None)


def text_of(value: Any) -> str:
    """A cell that is no text, as a csv has it."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    return repr(value) if isinstance(value, float) else str(value)


def is_compound(value: Any) -> bool:
    """Whether a cell holds several values, or bytes."""
    return hasattr(value, "__len__") and not isinstance(value, str)


# --- columns ---


@dataclass
class Column:
    """What a column holds: how many of its cells are what, and the different ones."""

    name: str
    counted: str = "line"  # what its cells are counted by: lines of a file, or rows
    missing: int = 0
    numbers: int = 0
    whole: bool = True  # whether all numbers are
    others: int = 0  # that are neither missing nor numbers; of these
    dates: int = 0  # are dates, times or durations,
    marked: int = 0  # would be numbers with the other decimal mark,
    nearly: int = 0  # with that mark, or without signs of money, per cent or thousands
    compound: bool = False  # whether some hold several values
    declared: bool = False  # whether the table's type says that these are categories
    odd: tuple[int, str] = (0, "")  # line and text of the first
    changing: tuple[int, str] | None = None  # of the first that changes as a number
    values: set[str] = field(default_factory=set)  # up to 1,001 different ones

    @property
    def kind(self) -> Kind:
        """Texts are words, as are truth values; a column with nothing in it holds numbers."""
        if self.declared:
            return "word"
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

    def add(self, value: Any, line: int, decimal: Decimal = "point") -> None:
        """Count a cell: a text, or a value that has a type."""
        cell = text_of(value)
        if cell.lower() in MISSING:
            self.missing += 1
            return
        if len(self.values) <= MOST_VALUES:
            self.values.add(cell)
        number = number_in(cell, decimal if isinstance(value, str) else "point")
        if number is not None:
            self.numbers += 1
            self.whole = self.whole and number.is_integer()
            if self.changing is None and changes_as_number(cell):
                self.changing = (line, cell)
            return
        self.odd = self.odd if self.others else (line, cell)
        self.others += 1
        self.compound = self.compound or is_compound(value)
        self.dates += isinstance(value, time | timedelta) or looks_like_date(cell)
        other: Decimal = "comma" if decimal == "point" else "point"
        marked = number_in(cell, other) is not None
        self.marked += marked
        self.nearly += marked or nearly_number(cell)


def column_kind(column: Column, named: bool = False, dates: bool = False) -> Kind:
    """Decide whether a column is numbers, categories or, where they are taken, dates.

    Args:
        column: what its cells are.
        named: whether the user says that it holds categories.
        dates: whether dates are taken.

    Raises:
        ValueError: if it is none of these. The message begins with the column and calls options as the estimators do.
    """
    place = f"column {brief(column.name)}"
    if column.compound:
        raise ValueError(compound_text(column.name))
    if named or column.declared:
        return "word"
    if column.kind == "date" and not dates:
        raise ValueError(
            f"{place} holds dates or durations ({brief(column.odd[1])}): turn them into numbers, such as days since a "
            f"date, or leave it out."
        )
    refuse_signs(column, place, "name it in categorical_features")
    if column.kind == "word" and column.numbers >= column.others:
        line, cell = column.odd
        raise ValueError(
            f"{place} holds numbers, but not in {column.counted} {line}: {brief(cell)}. Mend it, or name the column in "
            f"categorical_features if it holds categories."
        )
    if column.kind == "word" and (many := hardly_repeats(column)):
        raise ValueError(
            f"{place} holds {many}, too many for categories: leave it out, or name it in categorical_features if it is "
            f"meant."
        )
    if column.kind == "number" and column.changing:
        line, cell = column.changing
        raise ValueError(
            f"{place} holds {brief(cell)} in {column.counted} {line}, which is another one as a number: leading zeros "
            f"get lost, and digits beyond 2^53. Name it in categorical_features if these are names of things, leave it "
            f"out, or scale it if it is a quantity."
        )
    return column.kind


def compound_text(name: str) -> str:
    """Why a column is refused that holds several values in a cell."""
    return (
        f"column {brief(name)} holds lists, structures or bytes; numbers, texts and truth values can be read: make "
        f"columns of these."
    )


def hardly_repeats(column: Column) -> str:
    """How many texts there are, if too many for categories; nothing if they repeat."""
    rows, count = column.numbers + column.others + column.missing, len(column.values)
    if count <= max(FEW, min(MOST_VALUES, rows / 2)):
        return ""
    many = f"more than {MOST_VALUES:,}" if count > MOST_VALUES else str(count)
    return f"{many} different texts in {rows:,} rows"


def refuse_signs(column: Column, place: str, unless: str) -> None:
    """Numbers with another decimal mark, or with signs, are no categories, unless it is said that they are."""
    if column.other_mark:
        raise ValueError(
            f"{place} holds {brief(column.odd[1])}, a number but for its decimal mark: say which mark it has where it "
            f"is read, or take out what parts thousands."
        )
    if column.dressed:
        raise ValueError(
            f"{place} holds {brief(column.odd[1])}, a number but for signs of money, per cent or thousands: take the "
            f"signs out, or {unless} if these are names of things."
        )
