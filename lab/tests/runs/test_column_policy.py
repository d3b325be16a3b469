"""A table means the same to the estimators and to the command line: numbers, categories, or refused in the same words."""

import re
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("narwhals")

import pandas
import polars
import pyarrow
from pyarrow import parquet
from slimbayes_lab.configs.own import feature_kind, say_as_config
from slimbayes_lab.data.table_files import look

from slimbayes.errors import SlimbayesWarning
from slimbayes.sklearn.columns import Preparation

ROWS = 50
FRAMES: dict[str, Callable[[dict[str, list[Any]]], Any]] = {
    "pandas": pandas.DataFrame,
    "polars": polars.DataFrame,
    "pyarrow": pyarrow.table,
}
DAY = date(2024, 1, 31)


def every(value: Callable[[int], Any]) -> list[Any]:
    return [value(row) for row in range(ROWS)]


# What a column holds, and what it is taken for, or why not.
COLUMNS: dict[str, tuple[list[Any], str]] = {
    "whole numbers": (every(lambda i: i), "number"),
    "fractions": (every(lambda i: i / 7), "number"),
    "gaps": (every(lambda i: i / 7 if i % 5 else None), "number"),
    "nothing": (every(lambda i: None if i else 1.5), "number"),
    "exact money": (every(lambda i: Decimal(i) / 4), "number"),
    "large floats": (every(lambda i: 2.0**60 + 2**30 * i), "number"),
    "large, but exact": (every(lambda i: 2**53 - i), "number"),
    "few words": (every(lambda i: ("red", "green", "blue")[i % 3]), "word"),
    "truth values": (every(lambda i: i % 2 == 0), "word"),
    "words and gaps": (every(lambda i: "ab"[i % 2] if i % 5 else None), "word"),
    "words and NA": (every(lambda i: ("red", "blue", "NA", "?")[i % 4]), "word"),
    "codes": (every(lambda i: f"{i % 7}B"), "word"),
    "twenty names": (every(lambda i: f"name {i % 20}"), "word"),
    "fifty names": (every(lambda i: f"name {i}"), "50 different texts in 50 rows"),
    "dollars": (every(lambda i: f"${i + 1},200"), "but for signs of money"),
    "per cent": (every(lambda i: f"{i % 4} %"), "but for signs of money"),
    "commas": (every(lambda i: f"{i % 4},5"), "but for its decimal mark"),
    "one odd text": (every(lambda i: "oops" if i == 7 else f"{i}"), "but not in"),
    "postcodes": (every(lambda i: f"{i % 9:05}"), "'00000' .* leading zeros"),
    "ids": (every(lambda i: 2**60 + i), "1152921504606846976' .* beyond 2.53"),
    "signed ids": (every(lambda i: -(2**60) + i), "'-1152921504606846976' .* beyond 2.53"),
    "dates": (every(lambda i: DAY + timedelta(days=i)), "holds dates or durations"),
    "dates as texts": (every(lambda i: f"2024-01-{i % 28 + 1:02}"), "holds dates"),
    "moments": (every(lambda i: datetime(2024, 1, 1, i % 24)), "holds dates"),
    "zones": (every(lambda i: datetime(2024, 1, 1, i % 24, tzinfo=UTC)), "holds dates"),
    "times": (every(lambda i: time(i % 24)), "holds dates or durations"),
    "durations": (every(lambda i: timedelta(hours=i)), "holds dates or durations"),
    "lists": (every(lambda i: [i, i + 1]), "lists, structures or bytes"),
    "structures": (every(lambda i: {"a": i}), "lists, structures or bytes"),
    "bytes": (every(lambda i: bytes([i])), "lists, structures or bytes"),
}  # fmt: skip


def plain(message: str) -> str:
    """A message without where the column lies."""
    text = re.sub(r"in (?:row|line) \d+", "in a row", message)
    text = text.replace("0 days 0", "")  # pandas has texts of its own for durations
    return text[text.index("olumn 'it'") :]


def by_estimator(frame: Any, named: Sequence[str] = ()) -> str:
    """What the estimators take the only column for, or what they say."""
    preparation = Preparation("impute")
    try:
        preparation.fit(frame, list(named) or "auto")
    except ValueError as error:
        return plain(say_as_config(error))
    return "word" if preparation.words else "number"


def by_command_line(file: Path, named: Sequence[str] = ()) -> str:
    """What the command line takes the only column for, or what it says."""
    try:
        (column,) = look(file).columns.values()
        return feature_kind(column, file, named)
    except ValueError as error:
        return plain(str(error))


@pytest.mark.filterwarnings("ignore:Column 'it' holds numbers as texts")
@pytest.mark.parametrize("library", FRAMES)
@pytest.mark.parametrize("name", COLUMNS)
def test_both_decide_alike_and_say_the_same(
    name: str, library: str, tmp_path: Path
) -> None:
    cells, expected = COLUMNS[name]
    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"it": cells}), file)
    found = by_estimator(FRAMES[library]({"it": cells}))
    assert found == by_command_line(file)
    assert found == expected or re.search(f" .*{expected}", found)


@pytest.mark.parametrize("library", FRAMES)
@pytest.mark.parametrize("name", COLUMNS)
def test_who_names_a_column_gets_categories(
    name: str, library: str, tmp_path: Path
) -> None:
    """Unless a cell holds several values, which no category does."""
    cells, expected = COLUMNS[name]
    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"it": cells}), file)
    found = by_estimator(FRAMES[library]({"it": cells}), ["it"])
    assert found == by_command_line(file, ["it"])
    assert found == "word" or expected == "lists, structures or bytes"


# A csv has no lists, and pandas drops zeros as it reads.
IN_A_CSV = set(COLUMNS) - {"lists", "structures", "bytes", "postcodes"}


@pytest.mark.parametrize("name", sorted(IN_A_CSV))
def test_a_csv_that_pandas_reads_is_the_same_table(name: str, tmp_path: Path) -> None:
    cells = COLUMNS[name][0]
    file = tmp_path / "rows.csv"
    pandas.DataFrame({"it": cells, "other": 1.0}).to_csv(file, index=False)
    columns = look(file).columns
    try:
        found: str = feature_kind(columns["it"], file)
    except ValueError as error:
        found = plain(str(error))
    assert by_estimator(pandas.read_csv(file)[["it"]]) == found


def test_categories_that_a_table_declares_are_categories(tmp_path: Path) -> None:
    table = pandas.DataFrame({"it": pandas.Categorical(["10", "20", "30"] * 10)})
    file = tmp_path / "rows.parquet"
    table.to_parquet(file)
    assert by_estimator(table) == by_command_line(file) == "word"


def test_ids_that_are_named_stay_apart() -> None:
    for make in FRAMES.values():
        preparation = Preparation("refuse")
        preparation.fit(make({"it": COLUMNS["ids"][0]}), ["it"])
        assert preparation.sizes == (ROWS + 1,)


def test_numbers_that_come_as_texts_are_told() -> None:
    preparation = Preparation("refuse")
    with pytest.warns(SlimbayesWarning, match="'it' holds numbers as texts"):
        preparation.fit(polars.DataFrame({"it": ["1", "2.5", "1"]}))
    read = preparation.read(polars.DataFrame({"it": ["4", "1e2"]}))
    assert read.tolist() == [[4.0], [100.0]]
