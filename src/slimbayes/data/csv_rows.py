"""Lines of a .csv or .csv.gz file one by one, whatever its size; every error names the file and the line."""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

LINE = 1 << 20  # characters: the longest honest line has a few thousand


def find_table(folder: Path, table: str) -> Path | None:
    """<table>.csv or <table>.csv.gz in a folder."""
    return next((file for file in (folder / f"{table}.csv", folder / f"{table}.csv.gz") if file.is_file()), None)


def rows(file: Path, columns: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """The named cells of every line, with its place for messages. Column names may be in capitals."""
    count = 1
    try:
        with _open(file) as stream:
            lines = csv.reader(_lines(stream, file), strict=True)
            names = next(lines, [])
            picks = pick(file, names, columns)
            for line in lines:
                count = lines.line_num
                if len(line) != len(names):
                    raise ValueError(
                        f"{file}, line {count}: {len(line)} cells, but there are {len(names)} column names."
                    )
                yield f"{file}, line {count}", [line[i] for i in picks]
    except (csv.Error, EOFError, OSError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{file}, after line {count}: damaged or cut short: {error}") from error


def header(file: Path) -> list[str]:
    """The column names as they are written."""
    try:
        with _open(file) as stream:
            return next(csv.reader(_lines(stream, file), strict=True), [])
    except (csv.Error, EOFError, OSError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{file}, line 1: damaged or cut short: {error}") from error


def pick(file: Path, names: Sequence[str], columns: Sequence[str]) -> list[int]:
    """Where the columns are among the names; all of them must be there."""
    folded = [name.casefold() for name in names]
    if missing := [column for column in columns if column not in folded]:
        raise ValueError(f"{file}, line 1: the columns {', '.join(missing)} are missing.")
    return [folded.index(column) for column in columns]


def time_of(place: str, cell: str) -> datetime:
    """A moment.

    Example:
        >>> time_of("labs.csv, line 2", "2164-10-23 21:09:00").hour
        21
    """
    try:
        if len(cell) == 19:  # fromisoformat alone would also take a bare date or a zone
            return datetime.fromisoformat(cell)
    except ValueError:
        pass
    raise ValueError(f"{place}: {cell!r} is not a time such as 2164-10-23 21:09:00.")


def number_of(place: str, cell: str) -> float:
    """A number that float32 can hold; nan for an empty cell.

    Example:
        >>> number_of("labs.csv, line 2", "1.5"), number_of("labs.csv, line 3", "")
        (1.5, nan)
    """
    if not cell:
        return math.nan
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not abs(value) < 1e38:
        raise ValueError(f"{place}: {cell!r} is not a finite number.")
    return value


def _open(file: Path) -> Any:
    return (
        gzip.open(file, "rt", encoding="utf8", newline="")
        if file.suffix == ".gz"
        else file.open(encoding="utf8", newline="")
    )


def _lines(stream: Any, file: Path) -> Iterator[str]:
    while line := stream.readline(LINE):
        if len(line) == LINE:
            raise ValueError(f"{file}: a line has more than {LINE:,} characters.")
        yield line
