"""IMDB reviews as word numbers, by the rules of the Keras example that the k-tied paper trains on, in three formats.

The official tree of text files; `reviews.txt.xz` with `ratings.npy`; and Keras' `imdb.npz`, whose lists of word ranks
are pickled (see pickles.py). Text is lower-cased, punctuation becomes space, words are split at space. 0 pads, 1 starts
a review, 2 is a word outside the vocabulary, and the most frequent word is 3; so 20,000 numbers are 19,997 words.
Reviews are cut and padded at the front: their last 80 numbers are kept. We count words in the training half only; Keras
counted them beforehand and leaves the number 3 unused. Rows keep the file's order, which Keras shuffles.

Sizes: N reviews, L numbers for each.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimbayes.data.archives import map_npy, read_npz, read_pickled, read_xz
from slimbayes.data.dataset import Found, Split, labels
from slimbayes.data.pickles import read_ragged

VOCABULARY, LENGTH = 20_000, 80
RESERVED = ("<pad>", "<start>", "<unknown>")
CLASSES = ("negative", "positive")
Halves = Mapping[str, tuple[list[str], list[int]]]  # texts and labels by split
_SPACES = str.maketrans({mark: " " for mark in '!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~\t\n'})
_QUARTERS = (("train", 0), ("train", 1), ("test", 0), ("test", 1))
_WORD_INDEX = 64 << 20  # bytes; the true file has 1.6e6


def words(text: str) -> list[str]:
    """Words of a text.

    Example:
        >>> words("It's GOOD, isn't it?<br />Yes.")
        ["it's", 'good', "isn't", 'it', 'br', 'yes']
    """
    return text.lower().translate(_SPACES).split()


def count_vocabulary(texts: Iterable[str], size: int = VOCABULARY) -> tuple[str, ...]:
    """The reserved names and the most frequent words, `size` in all; words equally frequent are in alphabetical order.

    Example:
        >>> count_vocabulary(["b a b", "c a b"], size=5)
        ('<pad>', '<start>', '<unknown>', 'b', 'a')
    """
    counts = Counter(word for text in texts for word in words(text))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return (*RESERVED, *ranked[: size - len(RESERVED)])


def encode(texts: Sequence[str], vocabulary: Sequence[str], length: int = LENGTH) -> Tensor:
    """Word numbers (N, L) int64 of texts, the last `length` of each, padded in front.

    Example:
        >>> encode(["b zebra", "a a b b"], ("<pad>", "<start>", "<unknown>", "b", "a"), length=4)
        tensor([[0, 1, 3, 2],
                [4, 4, 3, 3]])
    """
    number = {word: index for index, word in enumerate(vocabulary) if index >= len(RESERVED)}
    return _padded(([number.get(word, 2) for word in words(text)] for text in texts), len(texts), length)


def _padded(rows: Iterable[list[int]], count: int, length: int) -> Tensor:
    """Rows of numbers as (N, L) int64: the mark of the start before each, cut and padded in front."""
    out = torch.zeros(count, length, dtype=torch.int64, device="cpu")
    for place, row in enumerate(rows):
        kept = [1, *row][-length:]
        out[place, length - len(kept) :] = torch.tensor(kept, device="cpu")
    return out


def tree(folder: Path) -> Found | None:
    """The aclImdb folders: train and test, neg and pos in each, <id>_<rating>.txt for each review."""
    places = {(split, label): folder / split / ("neg", "pos")[label] for split, label in _QUARTERS}
    if not all(place.is_dir() for place in places.values()):
        return None

    def read() -> Halves:
        halves: Halves = {"train": ([], []), "test": ([], [])}
        for (split, label), place in places.items():
            if not (files := _review_files(place)):
                raise ValueError(f"{place} holds no reviews; files named <id>_<rating>.txt were expected.")
            halves[split][0].extend(_decode(file.read_bytes(), str(file)) for file in files)
            halves[split][1].extend([label] * len(files))
        return halves

    return _reviews(read, lambda: [file for place in places.values() for file in _review_files(place)])


def _review_files(place: Path) -> list[Path]:
    """Review files by number, which is also the order of the packed format."""
    files = list(place.glob("*.txt"))
    odd = next((file for file in files if not file.stem.split("_")[0].isdecimal()), None)
    if odd is not None:
        raise ValueError(f"{odd} is not named <id>_<rating>.txt.")
    return sorted(files, key=lambda file: (int(file.stem.split("_")[0]), file.name))


def packed(folder: Path) -> Found | None:
    """reviews.txt.xz, a review a line, and ratings.npy: quarters of train negative, train positive, test likewise."""
    texts, stars = folder / "reviews.txt.xz", folder / "ratings.npy"
    if not (texts.is_file() and stars.is_file()):
        return None
    return _reviews(partial(_read_packed, texts, stars), lambda: [texts, stars])


def _read_packed(texts: Path, stars: Path) -> Halves:
    ratings = map_npy(stars, (None,), "ui").tolist()
    lines = read_xz(texts).removesuffix(b"\n").split(b"\n")
    if len(lines) != len(ratings) or len(lines) % 4:
        need = "both need the same number, a multiple of 4"
        raise ValueError(f"{texts} has {len(lines)} lines and {stars} {len(ratings)} ratings; {need}.")
    halves: Halves = {"train": ([], []), "test": ([], [])}
    for row, (line, rating) in enumerate(zip(lines, ratings)):
        split, label = _QUARTERS[row * 4 // len(lines)]
        if rating not in ((1, 2, 3, 4) if label == 0 else (7, 8, 9, 10)):
            where = f"rating {rating} in the {CLASSES[label]} quarter of {split}"
            raise ValueError(f"{stars}, row {row}: {where}, expected 1-4 or 7-10 there.")
        halves[split][0].append(_decode(line, f"{texts}, line {row + 1}"))
        halves[split][1].append(label)
    return halves


def _decode(content: bytes, place: str) -> str:
    try:
        return content.decode("utf8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{place} is not UTF-8 text: {error}") from error


def _reviews(read: Callable[[], Halves], files: Callable[[], Sequence[Path]]) -> Found:
    """Both halves, encoded with the vocabulary of the training half. The texts are read once."""
    texts = cache(read)
    vocabulary = cache(lambda: count_vocabulary(texts()["train"][0]))

    def split(name: str) -> Split:
        written, numbers = texts()[name]
        return Split(encode(written, vocabulary()), torch.tensor(numbers, device="cpu"))

    return Found({name: partial(split, name) for name in ("train", "test")}, CLASSES, vocabulary, files)


def keras(folder: Path) -> Found | None:
    """imdb.npz as `keras.datasets.imdb` downloads it (lists of word ranks), and imdb_word_index.json, if any."""
    file, index = folder / "imdb.npz", folder / "imdb_word_index.json"
    if not file.is_file():
        return None

    files, splits = [path for path in (file, index) if path.is_file()], ("train", "test")
    return Found({s: partial(_read_keras, file, s) for s in splits}, CLASSES, partial(_names, index), lambda: files)


def _read_keras(file: Path, split: str) -> Split:
    y = labels(read_npz(file, f"y_{split}")[f"y_{split}"], len(CLASSES), file)
    rows = read_ragged(f"{file}: x_{split}", read_pickled(file, f"x_{split}"))
    if len(rows) != len(y):
        raise ValueError(f"{file}: {len(rows)} reviews in x_{split}, but {len(y)} labels in y_{split}.")
    numbered = (_shifted(row, f"{file}: x_{split}, review {number}") for number, row in enumerate(rows))
    return Split(_padded(numbered, len(rows), LENGTH), y)


def _shifted(row: Any, place: str) -> list[int]:
    """Numbers of a list of word ranks. Only what is kept of it is looked at: a pickled list may have any length."""
    kept = row[-LENGTH:] if isinstance(row, list) else None
    if kept is None or not all(type(rank) is int and rank > 0 for rank in kept):
        got = f"{type(row).__name__} {str(kept)[:60]}"
        raise ValueError(f"{place}: expected a list of word ranks from 1 on, got {got}.")
    return [rank + len(RESERVED) if rank + len(RESERVED) < VOCABULARY else 2 for rank in kept]


def _names(index: Path) -> tuple[str, ...]:
    """The name of every number; "#17" for the word of rank 17 where there is no list of words."""
    names = [*RESERVED, "<unused>", *(f"#{rank}" for rank in range(1, VOCABULARY - len(RESERVED)))]
    if not index.is_file():
        return tuple(names)
    try:
        if index.stat().st_size > _WORD_INDEX:
            raise ValueError(f"it has more than {_WORD_INDEX:,} bytes")
        for word, rank in json.loads(index.read_bytes()).items():
            if type(rank) is not int or rank < 1:
                raise ValueError(f"the word {word!r} has the rank {rank!r}")
            if rank + len(RESERVED) < VOCABULARY:
                names[rank + len(RESERVED)] = word
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} must map words to ranks from 1 on: {error}") from error
    return tuple(names)
