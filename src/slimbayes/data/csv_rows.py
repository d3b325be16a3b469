"""Lines of a .csv or .csv.gz file one by one, whatever its size; every error names the file and the line."""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import IO

LINE = 1 << 20  # characters: the longest honest line has a few thousand


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
    with _open(file) as stream:
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


def _open(file: Path) -> IO[str]:
    return (
        gzip.open(file, "rt", encoding="utf8", newline="")
        if file.suffix == ".gz"
        else file.open("r", -1, "utf8", newline="")
    )


def _bounded(stream: IO[str]) -> Iterator[str]:
    while line := stream.readline(LINE):
        if len(line) == LINE:
            raise ValueError(f"a line has more than {LINE:,} characters.")
        yield line
