"""IMDB reviews as other people pass them on: the table that Kaggle has, and Keras' file of numbers.

Table: a file such as "IMDB Dataset.csv" with the columns review and sentiment, the same 50,000 reviews in mixed order and without the official
halves. Here its first half is "train" and its second "test"; results are not comparable with those on the official halves, since
reviews of one film can be in both, and classes are balanced only nearly.

Keras: imdb.npz with x_train, y_train, x_test, y_test. A review is a list of word ranks, 1 for the most frequent; as `keras.datasets.imdb` does,
3 is added to a rank, 1 starts a review, 2 is a word beyond the vocabulary, and 3 stays unused. Rows keep the file's order, which Keras
shuffles. Words have names where imdb_word_index.json lies beside it. The lists are pickled; see pickles.py.

Sizes: N reviews, L numbers for each.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimbayes.data.archives import read_npz, read_pickled
from slimbayes.data.dataset import Found, Part, Split, labels
from slimbayes.data.pickles import read_ragged
from slimbayes.data.text import CLASSES, LENGTH, RESERVED, VOCABULARY, Halves, reviews

_COLUMNS = ["review", "sentiment"]
_SHIFT = len(RESERVED)
_WORD_INDEX = 64 << 20  # bytes; the true file has 1.6e6


def table(folder: Path) -> Found | None:
    """A csv of reviews: the first file whose name has "imdb" in it."""
    file = next((path for path in sorted(folder.glob("*.csv")) if "imdb" in path.name.casefold()), None)
    if file is None:
        return None

    def half(test: int) -> int:
        count = sum(1 for _ in _rows(file))
        return count - count // 2 if test else count // 2

    return reviews(partial(_read_table, file), {"train": partial(half, 0), "test": partial(half, 1)}, lambda: [file])


def _read_table(file: Path) -> Halves:
    rows = list(_rows(file))
    if len(rows) < 2:
        raise ValueError(f"{file} has {len(rows)} reviews; a half each for training and testing needs two at least.")
    cut = len(rows) // 2
    return {
        name: ([text for text, _ in half], [label for _, label in half])
        for name, half in (("train", rows[:cut]), ("test", rows[cut:]))
    }


def _rows(file: Path) -> Iterator[tuple[str, int]]:
    """Text and label of each review. A review may have line breaks: a place is the line that its row ends in."""
    with file.open(newline="", encoding="utf8") as stream:
        lines = csv.reader(stream, strict=True)
        try:
            if (first := next(lines, [])) != _COLUMNS:
                raise ValueError(
                    f"{file}, line 1: expected the column names {','.join(_COLUMNS)}, got {','.join(first)[:80]!r}."
                )
            for line in lines:
                if len(line) != 2 or line[1] not in CLASSES:
                    got = f"{len(line)} cells" if len(line) != 2 else f"the sentiment {line[1][:40]!r}"
                    raise ValueError(
                        f"{file}, line {lines.line_num}: expected a review and one of {', '.join(CLASSES)}, got {got}."
                    )
                yield line[0], CLASSES.index(line[1])
        except csv.Error as error:
            raise ValueError(
                f"{file}, line {lines.line_num}: {error}; the file is cut short or not of this format."
            ) from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}, after line {lines.line_num}: not UTF-8 text: {error}") from error


def keras(folder: Path) -> Found | None:
    """imdb.npz as `keras.datasets.imdb` downloads it, and imdb_word_index.json if it is there."""
    file, index = folder / "imdb.npz", folder / "imdb_word_index.json"
    if not file.is_file():
        return None
    parts = {
        split: Part(lambda s=split: len(read_npz(file, f"y_{s}")[f"y_{s}"]), partial(_read_keras, file, split))
        for split in ("train", "test")
    }
    return Found(parts, CLASSES, partial(_names, index), lambda: [file, *([index] if index.is_file() else [])])


def _read_keras(file: Path, split: str) -> Split:
    stored = read_npz(file, f"y_{split}")[f"y_{split}"]
    if stored.ndim != 1 or stored.dtype.kind not in "ui":
        raise ValueError(f"{file}: y_{split} must be whole numbers (n,), got {stored.dtype} of shape {stored.shape}.")
    y = labels(torch.from_numpy(stored.astype("int64")), len(CLASSES), file)
    rows = read_ragged(f"{file}: x_{split}", read_pickled(file, f"x_{split}"))
    if len(rows) != len(y):
        raise ValueError(f"{file}: {len(rows)} reviews in x_{split}, but {len(y)} labels in y_{split}.")
    return Split(_numbers(rows, f"{file}: x_{split}"), y)


def _numbers(rows: Sequence[Any], place: str) -> Tensor:
    """Word ranks as numbers (N, L), cut and padded in front. Only what is kept of a list is looked at."""
    out = torch.zeros(len(rows), LENGTH, dtype=torch.int64, device="cpu")
    for number, row in enumerate(rows):
        kept = row[-LENGTH:] if isinstance(row, list) else None
        if kept is None or not all(type(rank) is int and rank > 0 for rank in kept):
            raise ValueError(
                f"{place}, review {number}: expected a list of word ranks from 1 on, got {type(row).__name__} {str(kept)[:60]}."
            )
        known = [rank + _SHIFT if rank + _SHIFT < VOCABULARY else 2 for rank in kept]
        sequence = [1, *known][-LENGTH:]
        out[number, LENGTH - len(sequence) :] = torch.tensor(sequence, device="cpu")
    return out


def _names(index: Path) -> tuple[str, ...]:
    """The name of every number; "#17" for the word of rank 17 where there is no list of words."""
    names = [*RESERVED, "<unused>", *(f"#{rank}" for rank in range(1, VOCABULARY - _SHIFT))]
    if not index.is_file():
        return tuple(names)
    try:
        if index.stat().st_size > _WORD_INDEX:
            raise ValueError(f"it has more than {_WORD_INDEX:,} bytes")
        ranks = json.loads(index.read_bytes())
        for word, rank in ranks.items():
            if type(rank) is not int or rank < 1:
                raise ValueError(f"the word {word!r} has the rank {rank!r}")
            if rank + _SHIFT < VOCABULARY:
                names[rank + _SHIFT] = word
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} must map words to ranks from 1 on: {error}") from error
    return tuple(names)
