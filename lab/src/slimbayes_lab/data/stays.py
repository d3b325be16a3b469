"""Hospital stays whose outcome is known, the data sets made of them (bags of tokens, and who died), and their tables.

Sizes: N stays, T bags, L tokens in the fullest bag of all splits.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from typing import IO, cast

import torch.nn.functional as F
from torch import Tensor

from slimbayes.columns import number_in
from slimbayes.untrusted import open_file
from slimbayes_lab.data.dataset import Dataset, Found, Split
from slimbayes_lab.data.events import Buckets, Events, bag
from slimbayes_lab.data.table_files import LINE

CLASSES = ("survived", "died")


@dataclass(frozen=True)
class Stays:
    """Hospital stays with an outcome, and which of them belong to which split.

    Shape: labels (N,) int64, 1 for a death in hospital; records (N,) int64, the set's own numbers; splits (n,) int64.
    """

    name: str
    events: Events
    labels: Tensor
    records: Tensor
    splits: Mapping[str, Tensor]
    hours: float = 48.0  # prediction time, since admission

    def __post_init__(self) -> None:
        sizes = self.events.patients, len(self.labels), len(self.records)
        if len(set(sizes)) > 1:
            raise ValueError(
                f"{self.name}: {sizes[0]} stays, {sizes[1]} labels, {sizes[2]} record numbers."
            )


def mortality(
    stays: Stays,
    hours: float | None = None,
    precision: float = 1.0,
    aggregate_older_than: float | None = None,
    count: int = 5,
    tokens_per_bag: int | None = None,
) -> Dataset:
    """Tokens and labels of every split, with `count` buckets from the split "train". Other arguments as in `bag`.

    `hours` is the stays' own prediction time by default.

    Shape: x (N, T, L) int32, with one L for all splits; y (N,) int64.

    Example:
        >>> import torch
        >>> from slimbayes_lab.data.events import EventList
        >>> beats = EventList()
        >>> beats.append(0, 0.0, 0, 60.0), beats.append(1, 0.0, 0, 90.0)
        (None, None)
        >>> splits = {"train": torch.tensor([0]), "test": torch.tensor([1])}
        >>> stays = Stays("toy", beats.events(2, ("HR",)), torch.tensor([0, 1]), torch.tensor([7, 8]), splits)
        >>> data = mortality(stays, hours=24.0, precision=6.0)
        >>> data.train.x.shape, data.test.y.tolist(), len(data.vocabulary)
        (torch.Size([1, 4, 1]), [1], 7)
    """
    if "train" not in stays.splits:
        raise ValueError(
            f"{stays.name} has no split 'train' to fit buckets on, it has: {', '.join(stays.splits)}."
        )
    hours = stays.hours if hours is None else hours
    buckets = Buckets.fit(stays.events.of(stays.splits["train"]), hours, count)
    bags = {
        name: bag(
            stays.events.of(rows),
            buckets,
            hours,
            precision,
            aggregate_older_than,
            tokens_per_bag,
        )
        for name, rows in stays.splits.items()
    }
    fullest = max(tokens.shape[2] for tokens in bags.values())
    splits = {
        name: Split(
            F.pad(tokens, (0, fullest - tokens.shape[2])),
            stays.labels[stays.splits[name]],
        )
        for name, tokens in bags.items()
    }
    return Dataset(stays.name, splits, CLASSES, buckets.names())


def found_stays(
    stays: Callable[[], Stays],
    bags: Callable[[Stays], Dataset],
    splits: Sequence[str],
    files: Callable[[], Sequence[Path]],
) -> Found:
    """For `load`: the splits of stays that are read from files, put into bags as a set comes by default."""

    @cache
    def data() -> Dataset:
        return bags(stays())

    read = {split: partial(lambda name: data().splits[name], split) for split in splits}
    return Found(read, CLASSES, lambda: data().vocabulary, files, stays=stays)


# --- their tables, .csv or .csv.gz; every error names the file and the line ---


@contextmanager
def open_rows(
    file: Path, columns: Sequence[str]
) -> Iterator[Iterator[tuple[str, ...]]]:
    """The named cells of every line; names are compared without regard to case, other columns are left out.

    A ValueError that is raised while the file is open, here or by the caller, gets the file and the line in front.
    """
    with (
        open_file(file) as stored,
        gzip.open(stored) if file.suffix == ".gz" else stored as unpacked,
        io.TextIOWrapper(
            cast(IO[bytes], unpacked), encoding="utf8", newline=""
        ) as stream,
    ):
        lines = csv.reader(_bounded(stream), strict=True)
        try:
            yield _cells(lines, columns)
        except (csv.Error, EOFError, OSError, zlib.error, UnicodeDecodeError) as error:
            raise ValueError(
                f"{file}, line {lines.line_num}: damaged or cut short: {error}"
            ) from error
        except ValueError as error:
            raise ValueError(
                f"{file}, line {max(1, lines.line_num)}: {error}"
            ) from error


def _cells(
    lines: Iterator[list[str]], columns: Sequence[str]
) -> Iterator[tuple[str, ...]]:
    names = [name.casefold() for name in next(lines, [])]
    if missing := [column for column in columns if column.casefold() not in names]:
        raise ValueError(f"the columns {', '.join(missing)} are missing.")
    pick, width = (
        itemgetter(*(names.index(column.casefold()) for column in columns)),
        len(names),
    )
    for line in lines:
        if len(line) != width:
            raise ValueError(f"{len(line)} cells, but there are {width} column names.")
        yield pick(line)


def find_table(folder: Path, table: str) -> Path | None:
    """<table>.csv or <table>.csv.gz in a folder."""
    return next(
        (
            file
            for file in (folder / f"{table}.csv", folder / f"{table}.csv.gz")
            if file.is_file()
        ),
        None,
    )


def time_of(cell: str) -> datetime:
    """A moment."""
    try:
        if len(cell) == 19:  # fromisoformat alone would also take a bare date or a zone
            return datetime.fromisoformat(cell)
    except ValueError:
        pass
    raise ValueError(f"{cell!r} is not a time such as 2164-10-23 21:09:00.")


def number_of(cell: str) -> float:
    """A number that float32 can hold; nan for an empty cell."""
    if not cell:
        return math.nan
    value = number_in(cell)
    if value is None or not abs(value) < 1e38:
        raise ValueError(f"{cell!r} is not a finite number.")
    return value


def _bounded(stream: IO[str]) -> Iterator[str]:
    while line := stream.readline(LINE):
        if len(line) == LINE:
            raise ValueError(f"a line has more than {LINE:,} characters.")
        yield line
