"""IMDB reviews as word numbers, by the rules of the Keras example that the k-tied paper trains on.

From the official tree of text files, or `reviews.txt.xz` with `ratings.npy`. Text is lower-cased, punctuation becomes
space, words are split at space. 0 pads, 1 starts a review, 2 is a word outside the vocabulary, and the most frequent
word is 3; so 20,000 numbers are 19,997 words.
Reviews are cut and padded at the front: their last 80 numbers are kept. We count words in the training half only; Keras
counted them beforehand and leaves the number 3 unused. Rows keep the file's order, which Keras shuffles.

Sizes: N reviews, L numbers for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from slimbayes.untrusted import read_file
from slimbayes_lab.data.archives import map_npy, read_xz
from slimbayes_lab.data.dataset import Found, Split

VOCABULARY, LENGTH = 20_000, 80
RESERVED = ("<pad>", "<start>", "<unknown>")
CLASSES = ("negative", "positive")
Halves = Mapping[str, tuple[list[str], list[int]]]  # texts and labels by split
_SPACES = str.maketrans({mark: " " for mark in '!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~\t\n'})
_QUARTERS = (("train", 0), ("train", 1), ("test", 0), ("test", 1))


def words(text: str) -> list[str]:
    """Words of a text."""
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


def encode(
    texts: Sequence[str], vocabulary: Sequence[str], length: int = LENGTH
) -> Tensor:
    """Word numbers (N, L) int64 of texts, the last `length` of each, padded in front.

    Example:
        >>> encode(["b zebra", "a a b b"], ("<pad>", "<start>", "<unknown>", "b", "a"), length=4)
        tensor([[0, 1, 3, 2],
                [4, 4, 3, 3]])
    """
    number = {
        word: index for index, word in enumerate(vocabulary) if index >= len(RESERVED)
    }
    out = torch.zeros(len(texts), length, dtype=torch.int64, device="cpu")
    for place, text in enumerate(texts):
        kept = [1, *(number.get(word, 2) for word in words(text)[-length:])][-length:]
        out[place, length - len(kept) :] = torch.tensor(kept, device="cpu")
    return out


def tree(folder: Path) -> Found | None:
    """The aclImdb folders: train and test, neg and pos in each, <id>_<rating>.txt for each review."""
    places = {
        (split, label): folder / split / ("neg", "pos")[label]
        for split, label in _QUARTERS
    }
    if not all(place.is_dir() for place in places.values()):
        return None

    def read() -> Halves:
        halves: Halves = {"train": ([], []), "test": ([], [])}
        for (split, label), place in places.items():
            if not (files := _review_files(place)):
                raise ValueError(
                    f"{place} holds no reviews; files named <id>_<rating>.txt were expected."
                )
            halves[split][0].extend(
                _decode(read_file(file), str(file)) for file in files
            )
            halves[split][1].extend([label] * len(files))
        return halves

    return _reviews(
        read,
        lambda: [file for place in places.values() for file in _review_files(place)],
    )


def _review_files(place: Path) -> list[Path]:
    """Review files by number, which is also the order of the packed format."""
    files = list(place.glob("*.txt"))
    odd = next(
        (file for file in files if not file.stem.split("_")[0].isdecimal()), None
    )
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
        raise ValueError(
            f"{texts} has {len(lines)} lines and {stars} {len(ratings)} ratings; {need}."
        )
    halves: Halves = {"train": ([], []), "test": ([], [])}
    for row, (line, rating) in enumerate(zip(lines, ratings)):
        split, label = _QUARTERS[row * 4 // len(lines)]
        if rating not in ((1, 2, 3, 4) if label == 0 else (7, 8, 9, 10)):
            where = f"rating {rating} in the {CLASSES[label]} quarter of {split}"
            raise ValueError(
                f"{stars}, row {row}: {where}, expected 1-4 or 7-10 there."
            )
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

    return Found(
        {name: partial(split, name) for name in ("train", "test")},
        CLASSES,
        vocabulary,
        files,
    )
