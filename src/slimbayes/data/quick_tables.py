"""Tables of measurements by duckdb, in bounded memory: what does not fit is put on disk.

duckdb is told the dialect, reads every cell as text, and is held to what the plain reader takes: whole lines, UTF-8, times and numbers in one
spelling, known patients. A file that leaves any doubt makes it stumble, and nothing has happened yet. What it does not see by itself, a
wrong checksum of a packed file and empty lines, is seen by reading the bytes once beforehand.

No text from a user or a file is ever part of a query: paths and names are bound, columns are called c0, c1, ...

Sizes: E events.
"""

from __future__ import annotations

import codecs
import gzip
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimbayes.data import csv_rows

MEMORY = "160MB"  # of duckdb; it takes some more for reading
PIECE = 500_000  # lines whose events are fetched at a time
_SCAN = 1 << 20
_GLOB = set("*?[]{}")
_NUMBER = "[+-]?([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][+-]?[0-9]{1,3})?"
_SOURCE = """read_csv(?, columns=?, header=true, auto_detect=false, delim=',', quote='"', escape='"', strict_mode=true, null_padding=false,
    ignore_errors=false, max_line_size=1048576)"""
_COUNT = f"SELECT count(*) FROM {_SOURCE}"
# Empty cells are NULL. A time must read the same after a round trip: that leaves one spelling. A row that is odd in any way is kept, to be found
# afterwards; `later` is the same column as `taken` where a table has one time.
_KEEP = f"""CREATE TABLE kept AS
WITH cells AS (
    SELECT {{}} AS subject, {{}} AS item, nullif({{}}, '') AS number, coalesce({{}}, '') AS unit, nullif({{}}, '') AS taken, nullif({{}}, '') AS later,
        row_number() OVER () AS line
    FROM {_SOURCE}),
parsed AS (
    SELECT line, subject, item, unit, number, taken, later, try_cast(number AS DOUBLE) AS value, try_cast(taken AS TIMESTAMP) AS t0, try_cast(later AS TIMESTAMP) AS t1
    FROM cells),
checked AS (
    SELECT line, subject, item, unit, coalesce(value, 'nan'::DOUBLE)::FLOAT AS value, CASE WHEN taken IS NULL THEN NULL ELSE epoch(greatest(t0, t1)) END AS known,
        coalesce(t0::VARCHAR <> taken, taken IS NOT NULL) OR coalesce(t1::VARCHAR <> later, later IS NOT NULL)
        OR coalesce(NOT (abs(value) < 1e38 AND regexp_full_match(number, ?)), number IS NOT NULL) AS odd
    FROM parsed)
SELECT line, stay, (known - start) / 3600 AS hours, item, unit, value, odd OR stays.subject IS NULL AS wrong
FROM checked LEFT JOIN stays ON checked.subject = stays.subject
WHERE wrong OR (stay >= 0 AND hours <= ?)"""


class Stumbled(Exception):
    """This file is not for the quick way: let the plain reader look at it."""


@dataclass(frozen=True)
class Table:
    """The measurements of one file that count."""

    connection: Any
    lines: int

    def pairs(self) -> list[tuple[str, str]]:
        """Items with their units, in the order in which they come first."""
        rows = self.connection.execute("SELECT item, unit FROM kept GROUP BY item, unit ORDER BY min(line)").fetchall()
        return [(str(item or ""), str(unit)) for item, unit in rows]

    def pieces(self, numbers: Sequence[int]) -> Iterator[tuple[Any, Any, Any, Any]]:
        """Stay, hours, feature and value of the events, in the file's order; `numbers` are the features of `pairs`."""
        query = """CREATE TABLE pairs AS SELECT item, unit, list_extract(?::BIGINT[], row_number() OVER (ORDER BY first)) AS feature
            FROM (SELECT item, unit, min(line) AS first FROM kept GROUP BY item, unit)"""
        self.connection.execute(query, [list(numbers)])
        for start in range(1, self.lines + 1, PIECE):
            piece = self.connection.execute(
                """SELECT stay::BIGINT AS stay, hours::DOUBLE AS hours, feature::BIGINT AS feature, value::FLOAT AS value FROM kept JOIN pairs
                ON kept.unit = pairs.unit AND kept.item IS NOT DISTINCT FROM pairs.item WHERE line >= ? AND line < ? ORDER BY line, stay""",
                [start, start + PIECE],
            ).fetchnumpy()
            yield tuple(piece[name] for name in ("stay", "hours", "feature", "value"))


@contextmanager
def open_table(
    duckdb: Any, file: Path, columns: Sequence[str], stays: Mapping[str, Sequence[Any]], until: float
) -> Iterator[Table]:
    """The rows of a file that belong to a stay and were known `until` hours into it; raises Stumbled before anything is given out."""
    if _GLOB & set(str(file)):
        raise Stumbled(f"{file} would be taken for a pattern")
    try:
        names = csv_rows.header(file)
        picks = csv_rows.pick(file, names, columns)
    except ValueError as error:
        raise Stumbled(str(error)) from error
    lines = _count_lines(file)
    with tempfile.TemporaryDirectory(prefix="slimbayes-") as scratch:
        options = {
            "memory_limit": MEMORY,
            "threads": 1,
            "temp_directory": scratch,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        }
        connection = duckdb.connect(str(Path(scratch, "events.duckdb")), config=options)
        try:
            _keep(connection, file, len(names), picks, lines, stays, until)
        except duckdb.Error as error:
            connection.close()
            raise Stumbled(str(error)) from error
        try:
            yield Table(connection, lines)
        finally:
            connection.close()


def _keep(
    connection: Any,
    file: Path,
    width: int,
    picks: list[int],
    lines: int,
    stays: Mapping[str, Sequence[Any]],
    until: float,
) -> None:
    # It would guess that the file is the smaller side of the join, keep all of it in memory, and give its rows in another order.
    connection.execute("SET disabled_optimizers = 'join_order,build_side_probe_side'")
    source = [str(file), {f"c{i}": "VARCHAR" for i in range(width)}]
    if connection.execute(_COUNT, source).fetchone()[0] != lines - 1:
        raise Stumbled(f"{file} has empty lines, or cells of several lines")
    _insert_stays(connection, stays)
    chosen = [f"c{i}" for i in (*picks, picks[-1])[:6]]  # a table with one time has it twice
    connection.execute(_KEEP.format(*chosen), [*source, _NUMBER, until])
    if wrong := connection.execute("SELECT count(*) FROM kept WHERE wrong").fetchone()[0]:
        raise Stumbled(f"{file} has {wrong} odd rows")


def _insert_stays(connection: Any, stays: Mapping[str, Sequence[Any]]) -> None:
    """Every stay with its start in seconds; a patient without one that counts has a row too, to be known."""
    rows = [(subject, stay.stay, stay.start) for subject, listed in stays.items() for stay in listed]
    subjects, numbers, starts = (list(column) for column in zip(*rows)) if rows else ([], [], [])
    connection.execute("CREATE TABLE stays (subject VARCHAR, stay INTEGER, start DOUBLE)")
    connection.execute(
        "INSERT INTO stays SELECT unnest(?::VARCHAR[]), unnest(?::INTEGER[]), epoch(unnest(?::TIMESTAMP[]))",
        [subjects, numbers, starts],
    )


def _count_lines(file: Path) -> int:
    """Lines of a file, the last one with or without its end; damaged packing or text that is not UTF-8 makes it stumble."""
    decoder, count, last = codecs.getincrementaldecoder("utf8")(), 0, b""
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            while piece := stream.read(_SCAN):
                decoder.decode(piece)
                count, last = count + piece.count(b"\n"), piece[-1:]
            decoder.decode(b"", final=True)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise Stumbled(f"{file}: {error}") from error
    return count + (last not in (b"\n", b""))
