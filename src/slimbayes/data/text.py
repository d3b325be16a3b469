"""IMDB reviews as word numbers, by the rules of the Keras example that the k-tied paper trains on.

Text is lower-cased, punctuation becomes space, words are split at space. 0 pads, 1 starts a review, 2 is a word outside the vocabulary, and
the most frequent word is 3; so 20,000 numbers are 19,997 words. Reviews are cut and padded at the front: their last 80 numbers are kept.
We count words in the training half only; Keras' ready-made file counted them beforehand and leaves the number 3 unused.

Sizes: N reviews, L numbers for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from slimbayes.data.archives import map_npy, read_xz
from slimbayes.data.dataset import Found, Part, Split

VOCABULARY, LENGTH = 20_000, 80
RESERVED = ("<pad>", "<start>", "<unknown>")
CLASSES = ("negative", "positive")
_SPACES = str.maketrans({mark: " " for mark in '!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~\t\n'})
Halves = dict[str, tuple[list[str], list[int]]]  # texts and labels by split
_QUARTERS = (("train", 0), ("train", 1), ("test", 0), ("test", 1))


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
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(words(text))
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
    numbers = torch.zeros(len(texts), length, dtype=torch.int64, device="cpu")
    for row, text in enumerate(texts):
        kept = [1, *(number.get(word, 2) for word in words(text))][-length:]
        numbers[row, length - len(kept) :] = torch.tensor(kept, device="cpu")
    return numbers


def packed(folder: Path) -> Found | None:
    """reviews.txt.xz, a review a line, and ratings.npy: train negative, train positive, test negative, test positive, a quarter each."""
    texts, stars = folder / "reviews.txt.xz", folder / "ratings.npy"
    if not (texts.is_file() and stars.is_file()):
        return None
    half = lambda: len(map_npy(stars, (None,), "ui")) // 2  # noqa: E731
    return reviews(partial(_read_packed, texts, stars), {"train": half, "test": half}, lambda: [texts, stars])


def _read_packed(texts: Path, stars: Path) -> Halves:
    ratings = map_npy(stars, (None,), "ui").tolist()
    content = read_xz(texts).split(b"\n")
    lines = content[:-1] if content[-1] == b"" else content
    if len(lines) != len(ratings) or not lines or len(lines) % 4:
        raise ValueError(
            f"{texts} has {len(lines)} lines and {stars} {len(ratings)} ratings; both need the same number, a multiple of 4."
        )
    halves: Halves = {"train": ([], []), "test": ([], [])}
    for row, (line, rating) in enumerate(zip(lines, ratings)):
        split, label = _QUARTERS[row * 4 // len(lines)]
        if rating not in ((1, 2, 3, 4) if label == 0 else (7, 8, 9, 10)):
            raise ValueError(
                f"{stars}, row {row}: rating {rating} in the {CLASSES[label]} quarter of {split}, expected 1-4 or 7-10 there."
            )
        halves[split][0].append(_text(line, f"{texts}, line {row + 1}"))
        halves[split][1].append(label)
    return halves


def tree(folder: Path) -> Found | None:
    """The aclImdb folders: train and test, neg and pos in each, one text file for each review, named <id>_<rating>.txt."""
    places = {split: [folder / split / name for name in ("neg", "pos")] for split in ("train", "test")}
    if not all(place.is_dir() for pair in places.values() for place in pair):
        return None
    count = {
        split: partial(lambda pair: sum(len(_files(place)) for place in pair), pair) for split, pair in places.items()
    }
    return reviews(
        partial(_read_tree, places),
        count,
        lambda: [file for pair in places.values() for place in pair for file in _files(place)],
    )


def _read_tree(places: dict[str, list[Path]]) -> Halves:
    halves: Halves = {}
    for split, pair in places.items():
        texts, numbers = halves[split] = [], []
        for label, place in enumerate(pair):
            files = _files(place)
            if not files:
                raise ValueError(f"{place} holds no reviews; files named <id>_<rating>.txt were expected.")
            texts += [_text(file.read_bytes(), str(file)) for file in files]
            numbers += [label] * len(files)
    return halves


def _files(place: Path) -> list[Path]:
    """Review files by number, which is also the order of the packed format."""
    files = list(place.glob("*.txt"))
    odd = next((file for file in files if not file.stem.split("_")[0].isdecimal()), None)
    if odd is not None:
        raise ValueError(f"{odd} is not named <id>_<rating>.txt.")
    return sorted(files, key=lambda file: (int(file.stem.split("_")[0]), file.name))


def _text(content: bytes, place: str) -> str:
    try:
        return content.decode("utf8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{place} is not UTF-8 text: {error}") from error


def reviews(
    read: Callable[[], Halves], count: Mapping[str, Callable[[], int]], files: Callable[[], Sequence[Path]]
) -> Found:
    """Both halves, encoded with the vocabulary of the training half. The texts are read once."""
    texts = cache(read)
    vocabulary = cache(lambda: count_vocabulary(texts()["train"][0]))

    def split(name: str) -> Split:
        written, numbers = texts()[name]
        return Split(encode(written, vocabulary()), torch.tensor(numbers, device="cpu"))

    return Found(
        {name: Part(count[name], partial(split, name)) for name in ("train", "test")}, CLASSES, vocabulary, files
    )
