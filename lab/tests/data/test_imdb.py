"""IMDB: both formats of its text, and broken files."""

import hashlib
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch
from slimbayes_lab.data import archives, available, imdb, load
from test_readers import real

REVIEWS = (["Bad, bad film.", "So bad<br />it hurts", "A bad one"], ["Good film!", "A good one", "good good"],
           ["bad zebra", "awful", "bad"], ["A good zebra", "good", "film"])  # fmt: skip
RATINGS = (1, 4, 2, 10, 7, 8, 1, 1, 3, 9, 10, 7)


def write_reviews(root: Path, packed: bool) -> None:
    if packed:
        (root / "imdb").mkdir(parents=True)
        content = "\n".join(review for quarter in REVIEWS for review in quarter) + "\n"
        (root / "imdb" / "reviews.txt.xz").write_bytes(lzma.compress(content.encode()))
        np.save(root / "imdb" / "ratings.npy", np.array(RATINGS, np.uint8))
        return
    for quarter, place in enumerate(("train/neg", "train/pos", "test/neg", "test/pos")):
        (root / "aclImdb" / place).mkdir(parents=True)
        for number, review in enumerate(REVIEWS[quarter]):
            (
                root
                / "aclImdb"
                / place
                / f"{number}_{RATINGS[3 * quarter + number]}.txt"
            ).write_text(review)


def test_imdb_two_formats_agree(tmp_path: Path) -> None:
    write_reviews(tmp_path / "a", packed=True)
    write_reviews(tmp_path / "b", packed=False)
    packed, tree = (load("imdb", tmp_path / name) for name in "ab")
    assert packed.vocabulary == tree.vocabulary
    # training half: bad 4, good 4, a 2, film 2, one 2, then br hurts it so
    assert packed.vocabulary == (
        "<pad>",
        "<start>",
        "<unknown>",
        "bad",
        "good",
        "a",
        "film",
        "one",
        "br",
        "hurts",
        "it",
        "so",
    )
    for split in ("train", "test"):
        assert torch.equal(
            packed.splits[split].x, tree.splits[split].x
        ) and packed.splits[split].y.tolist() == [
            0,
            0,
            0,
            1,
            1,
            1,
        ]
    assert packed.train.x.shape == (6, 80) and packed.train.x.dtype == torch.int64
    assert (
        packed.train.x[1, -6:].tolist() == [1, 11, 3, 8, 10, 9]
        and not packed.train.x[1, :-6].any()
    )
    assert packed.test.x[0, -3:].tolist() == [1, 3, 2]
    assert (
        available(tmp_path / "a")
        == available(tmp_path / "b")
        == {"imdb": ["train", "test"]}
    )
    assert load("imdb", tmp_path / "a", ["test"]).vocabulary == tree.vocabulary


def test_imdb_broken(tmp_path: Path) -> None:
    write_reviews(tmp_path, packed=True)
    texts, stars = (
        tmp_path / "imdb" / "reviews.txt.xz",
        tmp_path / "imdb" / "ratings.npy",
    )
    whole = texts.read_bytes()
    lines = lzma.decompress(whole)
    for content, message in (
        (whole[:-20], "is cut short"),
        (b"text", "not a readable .xz file"),
        (lzma.compress(lines + b"one more\n"), "13 lines and .* 12 ratings"),
        (
            lzma.compress(lines.replace(b"awful", b"\xff")),
            "reviews.txt.xz, line 8 is not UTF-8",
        ),
    ):
        texts.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load("imdb", tmp_path)
    texts.write_bytes(whole)
    np.save(stars, np.array((1, 4, 7, *RATINGS[3:]), np.uint8))
    with pytest.raises(
        ValueError,
        match="ratings.npy, row 2: rating 7 in the negative quarter of train",
    ):
        load("imdb", tmp_path)


@pytest.mark.slow
def test_real_imdb(monkeypatch: pytest.MonkeyPatch) -> None:
    """All reviews are read; words of every twentieth are counted, which are enough for a whole vocabulary."""
    content = archives.read_xz(real("imdb") / "imdb" / "reviews.txt.xz")
    # README: SHA-256 of the text
    assert (
        hashlib.sha256(content).hexdigest()
        == "114083631d6c67d376f265936363b8f332e6e59ed0ff2cfd17a41446a18ff896"
    )
    read, labels = imdb._read_packed, dict[str, list[int]]()

    def every_twentieth(*files: Path) -> imdb.Halves:
        halves = read(*files)
        labels.update({split: half[1] for split, half in halves.items()})
        return {
            split: (texts[::20], numbers[::20])
            for split, (texts, numbers) in halves.items()
        }

    monkeypatch.setattr(imdb, "read_xz", lambda path: content)  # once is enough
    monkeypatch.setattr(imdb, "_read_packed", every_twentieth)
    data = load("imdb", real("imdb"), ["train"])
    assert labels == dict.fromkeys(("train", "test"), [0] * 12_500 + [1] * 12_500)
    assert data.train.x.shape == (1250, 80) and data.train.y.bincount().tolist() == [
        625,
        625,
    ]
    assert 19_900 < int(data.train.x.max()) < 20_000 and int(data.train.x.min()) == 0
    assert len(data.vocabulary) == 20_000 and data.vocabulary[3] == "the"
    # the last words of the first review stand at the end of its row
    last = imdb.words(content.split(b"\n")[0].decode())[-79:]
    known = [data.vocabulary[n] for n in data.train.x[0, -len(last) :].tolist()]
    assert all(a == b or b == "<unknown>" for a, b in zip(last, known))
