"""IMDB from Keras' pickled lists: against the rules of Keras written out, on broken files and on hostile ones."""

import hashlib
import io
import json
import lzma
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_data import REAL, Hostile, real

from slimbayes.data import archives, available, imdb, load


def ragged(rows: list[Any]) -> np.ndarray:
    out = np.empty(len(rows), dtype=object)
    out[:] = rows
    return out


def packed(array: np.ndarray, protocol: int, old: bool) -> bytes:
    """An .npy of objects as numpy wrote it over the years: the protocol, and the name of the module, have changed."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "|O", "fortran_order": False, "shape": array.shape})
    body = pickle.dumps(array, protocol=protocol)
    if old and protocol < 4:  # names are lines, whose length is free
        body = body.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")
        assert b"cnumpy.core.multiarray\n" in body
    return stream.getvalue() + body


def write_keras(root: Path, arrays: dict[str, Any], protocol: int | None = None, old: bool = False) -> Path:
    (root / "imdb").mkdir(parents=True, exist_ok=True)
    file = root / "imdb" / "imdb.npz"
    if protocol is None:
        np.savez(file, **arrays)
        return root
    with zipfile.ZipFile(file, "w") as archive:
        for name, values in arrays.items():
            stream = io.BytesIO()
            if values.dtype != object:
                np.save(stream, values)
            archive.writestr(
                f"{name}.npy", packed(values, protocol, old) if values.dtype == object else stream.getvalue()
            )
    return root


def keras_rules(row: list[int]) -> list[int]:
    """keras.datasets.imdb.load_data(num_words=20000), then pad_sequences(maxlen=80)."""
    sequence = [1] + [w + 3 for w in row]
    sequence = [w if w < 20000 else 2 for w in sequence]
    return [0] * (80 - len(sequence[-80:])) + sequence[-80:]


def reviews(rng: np.random.Generator) -> list[list[int]]:
    lengths = [1, 78, 79, 80, 81, 300]
    return [[1, 19996, 19997, 88584][:n] + rng.integers(1, 30000, max(0, n - 4)).tolist() for n in lengths]


@pytest.mark.parametrize(("protocol", "old"), [(None, False), (2, False), (2, True), (3, True), (4, False)])
def test_keras_lists(tmp_path: Path, protocol: int | None, old: bool) -> None:
    rng = np.random.default_rng(0)
    rows, more = reviews(rng), reviews(rng)[:2]
    arrays = {
        "x_train": ragged(rows),
        "y_train": np.array([0, 1, 1, 0, 1, 0]),
        "x_test": ragged(more),
        "y_test": np.array([1, 0], np.uint8),
    }
    root = write_keras(tmp_path, arrays, protocol, old)
    with np.load(root / "imdb" / "imdb.npz", allow_pickle=True) as written:  # numpy itself reads what is written here
        assert written["x_train"].tolist() == rows
    data = load("imdb", root)
    assert data.train.x.tolist() == [keras_rules(row) for row in rows] and data.test.x.tolist() == [
        keras_rules(row) for row in more
    ]
    assert data.train.y.tolist() == [0, 1, 1, 0, 1, 0] and data.test.y.tolist() == [1, 0]
    assert available(root) == {"imdb": ["train", "test"]} and len(data.vocabulary) == 20_000
    assert (
        data.vocabulary[:5] == ("<pad>", "<start>", "<unknown>", "<unused>", "#1") and data.vocabulary[-1] == "#19996"
    )
    (root / "imdb" / "imdb_word_index.json").write_text(json.dumps({"the": 1, "fawn": 19996, "sonja": 19997}))
    named = load("imdb", root).vocabulary
    assert named[4] == "the" and named[-1] == "fawn" and "sonja" not in named and len(named) == 20_000


def test_hostile_lists_are_refused_and_do_not_run(tmp_path: Path) -> None:
    canary, y = tmp_path / "canary", np.array([0, 1])
    attacks = (ragged([[1], Hostile(canary)]), ragged([Hostile(canary), [1]]))
    for rows in attacks:
        for protocol in (None, 2, 4):
            write_keras(tmp_path, {"x_train": rows, "y_train": y, "x_test": rows, "y_test": y}, protocol)
            with pytest.raises(
                ValueError, match="imdb.npz: x_train is not a pickled array of lists: it asks for (posix|nt).system"
            ):
                load("imdb", tmp_path)
            assert not canary.exists()
    with zipfile.ZipFile(tmp_path / "imdb" / "imdb.npz", "w") as archive:
        stream = io.BytesIO()
        np.save(stream, y)
        archive.writestr("y_train.npy", stream.getvalue())
        archive.writestr("y_test.npy", stream.getvalue())
        header = packed(ragged([]), 2, False).split(b"\n")[0] + b"\n"
        for name, body in (
            ("x_train", b"\x80\x02Nr\xff\xff\xff\x7f."),
            ("x_test", b"\x80\x02cbuiltins\neval\nU\x031+1\x85R."),
        ):
            archive.writestr(f"{name}.npy", header + body)
    for split, message in (("train", "memory place 2,147,483,647"), ("test", "builtins.eval")):
        with pytest.raises(ValueError, match=message):
            load("imdb", tmp_path, [split])
    with np.load(write_keras(tmp_path, {"x": attacks[0]}) / "imdb" / "imdb.npz", allow_pickle=True) as archive:
        assert len(archive["x"]) == 2 and canary.exists()  # the attack works where pickles are run


def test_lists_that_refer_to_themselves(tmp_path: Path) -> None:
    """A few bytes can stand for lists of any length, or without an end: only the kept numbers are looked at."""
    long = [7] * 100_000
    loop: list[Any] = [1]
    loop.append(loop)
    y = np.zeros(2000, np.int64)
    root = write_keras(
        tmp_path, {"x_train": ragged([long] * 2000), "y_train": y, "x_test": ragged([loop]), "y_test": y[:1]}
    )
    assert load("imdb", root, ["train"]).train.x.unique().tolist() == [10]
    with pytest.raises(ValueError, match="x_test, review 0: expected a list of word ranks"):
        load("imdb", root, ["test"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_train": ragged([[1], [0]])}, "x_train, review 1: expected a list of word ranks from 1 on"),
        ({"x_train": ragged([[1], [True]])}, "x_train, review 1"),
        ({"x_train": ragged([[1], [1.5]])}, "x_train, review 1"),
        ({"x_train": ragged([[1], "text"])}, "x_train, review 1: .* got str"),
        ({"x_train": ragged([[1], None])}, "x_train, review 1: .* got NoneType"),
        ({"x_train": ragged([[1], [float("nan")]])}, "x_train, review 1"),
        ({"x_train": ragged([[1], [[2]]])}, "x_train, review 1"),
        ({"x_train": ragged([[1]])}, "1 reviews in x_train, but 2 labels in y_train"),
        ({"x_train": np.zeros((2, 3))}, r"entry 'x_train' must hold Python lists \(dtype object\), got float64"),
        ({"x_train": np.array([[[1], [2]]], dtype=object)}, "x_train must hold one array of lists"),
        ({"y_train": np.array([0, 2])}, "imdb.npz, record 1: label 2 is not one of 0..1"),
        ({"y_train": np.array([0.0, 1.0])}, "imdb.npz: labels must be whole numbers"),
        ({"y_train": ragged([0, 1])}, "entry 'y_train' holds pickled Python objects"),
    ],
)
def test_bad_lists_are_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    arrays = {
        "x_train": ragged([[1], [2]]),
        "y_train": np.array([0, 1]),
        "x_test": ragged([[1], [2]]),
        "y_test": np.array([0, 1]),
    }
    write_keras(tmp_path, arrays | change)
    with pytest.raises(ValueError, match=message) as error:
        load("imdb", tmp_path)
    assert "imdb.npz" in str(error.value)


def test_bad_files_of_keras_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {
        "x_train": ragged([[1] * 50, [2] * 50]),
        "y_train": np.array([0, 1]),
        "x_test": ragged([[1]]),
        "y_test": np.array([0]),
    }
    file = write_keras(tmp_path, arrays) / "imdb" / "imdb.npz"
    whole = file.read_bytes()
    at = whole.index(b"numpy")
    for content, message in (
        (whole[:-30], "not a readable zip file"), (b"PK", "not a readable zip file"), (b"", "not a readable zip file"),
        (whole[:at] + b"nvmpy" + whole[at + 5 :], "entry 'x_train.npy' is damaged|Bad CRC"),
    ):  # fmt: skip
        file.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load("imdb", tmp_path)
    write_keras(tmp_path, {name: values for name, values in arrays.items() if name != "x_train"})
    with pytest.raises(ValueError, match="must hold the array x_train"):
        load("imdb", tmp_path)
    file.write_bytes(whole)
    for words, message in (
        ("[]", "must map words"),
        ("{", "must map words"),
        ('{"the": 0}', "the word 'the' has the rank 0"),
        ('{"a": "b"}', "rank 'b'"),
    ):
        (tmp_path / "imdb" / "imdb_word_index.json").write_text(words)
        with pytest.raises(ValueError, match=f"imdb_word_index.json {message}|{message}"):
            load("imdb", tmp_path)
    monkeypatch.setattr(archives, "LIMIT", 1000)
    with pytest.raises(ValueError, match="more than the 1,000 allowed"):
        load("imdb", tmp_path)


# --- text ---

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
            (root / "aclImdb" / place / f"{number}_{RATINGS[3 * quarter + number]}.txt").write_text(review)


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
        assert torch.equal(packed.splits[split].x, tree.splits[split].x) and packed.splits[split].y.tolist() == [
            0,
            0,
            0,
            1,
            1,
            1,
        ]
    assert packed.train.x.shape == (6, 80) and packed.train.x.dtype == torch.int64
    assert packed.train.x[1, -6:].tolist() == [1, 11, 3, 8, 10, 9] and not packed.train.x[1, :-6].any()
    assert packed.test.x[0, -3:].tolist() == [1, 3, 2]
    assert available(tmp_path / "a") == available(tmp_path / "b") == {"imdb": ["train", "test"]}
    assert load("imdb", tmp_path / "a", ["test"]).vocabulary == tree.vocabulary


def test_imdb_broken(tmp_path: Path) -> None:
    write_reviews(tmp_path, packed=True)
    texts, stars = tmp_path / "imdb" / "reviews.txt.xz", tmp_path / "imdb" / "ratings.npy"
    whole = texts.read_bytes()
    lines = lzma.decompress(whole)
    for content, message in (
        (whole[:-20], "is cut short"),
        (b"text", "not a readable .xz file"),
        (lzma.compress(lines + b"one more\n"), "13 lines and .* 12 ratings"),
        (lzma.compress(lines.replace(b"awful", b"\xff")), "reviews.txt.xz, line 8 is not UTF-8"),
    ):
        texts.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load("imdb", tmp_path)
    texts.write_bytes(whole)
    np.save(stars, np.array((1, 4, 7, *RATINGS[3:]), np.uint8))
    with pytest.raises(ValueError, match="ratings.npy, row 2: rating 7 in the negative quarter of train"):
        load("imdb", tmp_path)


@pytest.mark.slow
def test_real_imdb() -> None:
    data = load("imdb", real("imdb"))
    for split in (data.train, data.test):
        assert split.x.shape == (25_000, 80) and split.y.bincount().tolist() == [12_500, 12_500]
        assert 19_900 < int(split.x.max()) < 20_000 and int(split.x.min()) == 0
    assert len(data.vocabulary) == 20_000 and data.vocabulary[3] == "the"
    # README: SHA-256 of the text; the last words of the first review stand at the end of its row
    content = archives.read_xz(REAL / "imdb" / "reviews.txt.xz")
    assert hashlib.sha256(content).hexdigest() == "114083631d6c67d376f265936363b8f332e6e59ed0ff2cfd17a41446a18ff896"
    last = imdb.words(content.split(b"\n")[0].decode())[-79:]
    known = [data.vocabulary[n] for n in data.train.x[0, -len(last) :].tolist()]
    assert all(a == b or b == "<unknown>" for a, b in zip(last, known))
