"""Readers: each on a tiny file of the true format written here, on broken and hostile files, and on the real sets where
they are.

The images of the tiny files are random bytes, compared with what was written in plain numpy indexing.
"""

import gzip
import hashlib
import io
import lzma
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from slimbayes_lab.data import (
    archives,
    as_split,
    available,
    check,
    load,
    table_files,
    uci,
)
from slimbayes_lab.data.catalog import SOURCES
from slimbayes_lab.data.dataset import Dataset, Split
from slimbayes_lab.data.folders import ImageFolder

REAL = Path(
    os.environ.get("SLIMBAYES_DATA", Path(__file__).parents[4] / "shared" / "data")
)


def real(name: str) -> Path:
    folder = REAL / name.split("/")[0]
    if not folder.is_dir():
        pytest.skip(
            f"NOT CHECKED on real data: {folder} does not exist; set SLIMBAYES_DATA to a folder that has it."
        )
    return REAL


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def pictures(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(0, 256, shape, dtype=np.uint8)


def same(split: Split, x: np.ndarray, y: np.ndarray) -> None:
    assert split.x.dtype == torch.uint8 and split.y.dtype == torch.int64
    assert np.array_equal(split.x.numpy(), x) and np.array_equal(split.y.numpy(), y)


def test_missing_sets_name_files_and_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, source in SOURCES.items():
        with pytest.raises(FileNotFoundError) as error:
            load(name, tmp_path)
        assert (
            source.url in str(error.value)
            and source.layout in str(error.value)
            and str(tmp_path) in str(error.value)
        )
    assert available(tmp_path) == {}
    with pytest.raises(ValueError, match="Unknown data set 'cifar'; known are cifar10"):
        load("cifar", tmp_path)
    monkeypatch.delenv("SLIMBAYES_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="SLIMBAYES_DATA"):
        load("mnist")
    monkeypatch.setenv("SLIMBAYES_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        load("mnist")


def test_missing_package_names_the_extra() -> None:
    with pytest.raises(ImportError, match=r'pip install "slimbayes-lab"'):
        archives.require("no_such_package_at_all")


def test_dataset_splits_and_devices() -> None:
    data = Dataset("toy", {"test": Split(torch.zeros(3, 1), torch.zeros(3))})
    assert len(data.test) == 3 and data.to("meta").test.x.device.type == "meta"
    with pytest.raises(ValueError, match="toy has no split 'train' here, it has: test"):
        _ = data.train
    with pytest.raises(ValueError, match="3 inputs and 2 targets"):
        Split(torch.zeros(3, 1), torch.zeros(2))


# --- CIFAR, binary version ---


def write_binary(
    folder: Path, rng: np.random.Generator, fine: bool, rows: int = 7
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    folder.mkdir()
    names = (
        {"train": ["train"], "test": ["test"]}
        if fine
        else {"train": [f"data_batch_{n}" for n in range(1, 6)], "test": ["test_batch"]}
    )
    truth = {}
    for split, files in names.items():
        x, y = (
            pictures(rng, rows * len(files), 3, 32, 32),
            rng.integers(0, 100 if fine else 10, rows * len(files)),
        )
        for index, name in enumerate(files):
            coarse = b"\x05" if fine else b""
            records = [
                coarse + bytes([y[i]]) + x[i].tobytes()
                for i in range(index * rows, (index + 1) * rows)
            ]
            (folder / f"{name}.bin").write_bytes(b"".join(records))
        truth[split] = (x, y)
    return truth


@pytest.mark.parametrize(
    ("name", "folder"),
    [("cifar10", "cifar-10-batches-bin"), ("cifar100", "cifar-100-binary")],
)
def test_cifar_binary(
    tmp_path: Path, rng: np.random.Generator, name: str, folder: str
) -> None:
    truth = write_binary(tmp_path / folder, rng, name == "cifar100")
    data = load(name, tmp_path)
    for split, (x, y) in truth.items():
        same(data.splits[split], x, y)
    assert available(tmp_path) == {name: list(truth)}
    assert set(load(name, tmp_path, ["test"]).splits) == {"test"}
    assert any("published are 10000" in line for line in check(name, tmp_path))


def test_cifar_binary_broken(tmp_path: Path, rng: np.random.Generator) -> None:
    folder = tmp_path / "cifar10"
    write_binary(folder, rng, False)
    file = folder / "test_batch.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(
        ValueError,
        match=r"test_batch.bin has 21,510 bytes and stops in record 6; every record has 3073",
    ):
        load("cifar10", tmp_path, ["test"])
    file.write_bytes(whole[: 3073 * 2] + b"\x0a" + whole[3073 * 2 + 1 :])
    with pytest.raises(
        ValueError, match=r"test_batch.bin, record 2: label 10 is not one of 0..9"
    ):
        load("cifar10", tmp_path, ["test"])
    (folder / "data_batch_4.bin").unlink()
    with pytest.raises(FileNotFoundError, match="data_batch_4.bin is missing"):
        load("cifar10", tmp_path)
    with pytest.raises(ValueError, match="no split 'val' here"):
        load("cifar10", tmp_path, ["val"])


class Hostile:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.canary}",)


# --- CIFAR, sheets ---


def write_sheets(file: Path, x: np.ndarray, first: int = 0) -> None:
    """x (100 s, 3, 32, 32) as s sheets, pasted image by image."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(file, "w") as archive:
        for number in range(len(x) // 100):
            sheet = Image.new("RGB", (320, 320))
            for i in range(100):
                sheet.paste(
                    Image.fromarray(
                        np.ascontiguousarray(x[100 * number + i].transpose(1, 2, 0))
                    ),
                    (i % 10 * 32, i // 10 * 32),
                )
            packed = io.BytesIO()
            sheet.save(packed, "WEBP", lossless=True, quality=0, method=0)
            archive.writestr(f"{first + number:04d}.webp", packed.getvalue())


def test_cifar_sheets(tmp_path: Path, rng: np.random.Generator) -> None:
    folder = tmp_path / "cifar100"
    x, y = pictures(rng, 300, 3, 32, 32), rng.integers(0, 100, 300).astype(np.uint8)
    write_sheets(
        folder / "z" / "train-images-0.zip", x[:100]
    )  # by path this piece would be the second
    write_sheets(folder / "a" / "train-images-1.zip", x[100:200], first=1)
    write_sheets(folder / "test-images.zip", x[200:])
    names = np.array([f"name {n}" for n in range(100)])
    np.savez(folder / "labels.npz", train=y[:200], test=y[200:], classes=names)
    data = load("cifar100", tmp_path)
    same(data.train, x[:200], y[:200])
    same(data.test, x[200:], y[200:])
    assert data.classes == tuple(names) and available(tmp_path) == {
        "cifar100": ["train", "test"]
    }
    (folder / "z" / "train-images-0.zip").unlink()
    with pytest.raises(
        ValueError,
        match=r"train-images-1.zip: entry '0001.webp' stands where sheet 0000 must; a piece is missing",
    ):
        load("cifar100", tmp_path)


def test_cifar_sheets_broken(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cifar10"
    x = pictures(rng, 100, 3, 32, 32)
    write_sheets(folder / "test-images.zip", x)
    good = (folder / "test-images.zip").read_bytes()

    def fails(message: str) -> None:
        with pytest.raises(ValueError, match=message) as error:
            load("cifar10", tmp_path)
        assert ".zip" in str(error.value) or ".npz" in str(error.value)

    def entries(*pairs: tuple[str, bytes]) -> None:
        with zipfile.ZipFile(
            folder / "test-images.zip", "w", zipfile.ZIP_DEFLATED
        ) as archive:
            for name, content in pairs:
                archive.writestr(name, content)

    np.savez(folder / "labels.npz", test=np.zeros(99, np.uint8))
    fails("has 99 test labels, but test-images.zip hold 100 images")
    np.savez(folder / "labels.npz", test=np.zeros(200, np.uint8))
    fails("has 200 test labels, but test-images.zip hold 100 images")
    np.savez(folder / "labels.npz", test=np.full(100, 10, np.uint8))
    fails("labels.npz, record 0: label 10 is not one of 0..9")
    np.savez(folder / "labels.npz", train=np.zeros(100, np.uint8))
    fails("labels.npz must hold the arrays test")
    np.savez(folder / "labels.npz", test=np.zeros(100, np.uint8))
    for name in (
        "../0000.webp",
        "/0000.webp",
        "a/../../0000.webp",
        "C:0000.webp",
        "..\\0000.webp",
    ):
        entries((name, b"x"))
        fails("points outside the archive")
    entries(("0000.webp", b"not an image"))
    fails("entry '0000.webp' is not a sheet of images")
    small = io.BytesIO()
    Image.new("RGB", (32, 32)).save(small, "WEBP")
    entries(("0000.webp", small.getvalue()))
    fails("it is 32 x 32 pixels, a sheet is 320 x 320")
    entries(("notes.txt", b""))
    fails("entry 'notes.txt' stands where sheet 0000 must")
    (folder / "test-images.zip").write_bytes(good[:-30])
    fails("not a readable zip file")
    (folder / "test-images.zip").write_bytes(good[:200] + bytes(50) + good[250:])
    fails("entry '0000.webp' is damaged")
    with zipfile.ZipFile(folder / "test-images.zip", "w") as archive:
        archive.writestr("0000.webp", b"x")
        archive.filelist[0].file_size = 3 << 30
    fails("unpacked size to 3,221,225,472 bytes, more than the 67,108,864 allowed")
    monkeypatch.setattr(archives, "LIMIT", 1 << 20)
    entries(("0000.webp", bytes(2 << 20)))  # 2 KB that unpack to 2 MB
    assert (folder / "test-images.zip").stat().st_size < 5000
    fails("unpacked size to 2,097,152 bytes")


def test_npz_that_is_no_plain_array(tmp_path: Path) -> None:
    file = tmp_path / "a.npz"
    canary = tmp_path / "canary"
    np.savez(file, test=np.array([Hostile(canary)], dtype=object))
    with pytest.raises(
        ValueError, match=r"a.npz: entry 'test' holds pickled Python objects"
    ):
        archives.read_npz(file)
    assert not canary.exists()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("test.npy", pickle.dumps(Hostile(canary)))
    with pytest.raises(ValueError, match="entry 'test' is not an .npy array"):
        archives.read_npz(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("run.sh", b"")
    with pytest.raises(ValueError, match="entry 'run.sh' is not an array"):
        archives.read_npz(file)
    lying = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        lying, {"descr": "|u1", "fortran_order": False, "shape": (1 << 45,)}
    )
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("test.npy", lying.getvalue())
    with pytest.raises(ValueError, match="0 bytes of data where its shape"):
        archives.read_npz(file)
    assert not canary.exists()


def test_npz_equals_numpy(tmp_path: Path, rng: np.random.Generator) -> None:
    file, arrays = (
        tmp_path / "a.npz",
        {
            "f": np.asfortranarray(rng.normal(size=(3, 4))),
            "e": np.empty((0, 2)),
            "s": np.array(["x", "yz"]),
            "n": np.array(3),
        },
    )
    np.savez_compressed(file, **arrays)
    read = archives.read_npz(file)
    assert all(
        np.array_equal(read[k], v) and read[k].dtype == v.dtype
        for k, v in arrays.items()
    )


# --- idx ---


def write_idx(file: Path, values: np.ndarray) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    content = (
        bytes((0, 0, 8, values.ndim))
        + struct.pack(f">{values.ndim}I", *values.shape)
        + values.tobytes()
    )
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)


@pytest.mark.parametrize("name", ["mnist", "notmnist"])
@pytest.mark.parametrize(("dot", "gz"), [("-", ".gz"), ("-", ""), (".", "")])
def test_idx(
    tmp_path: Path, rng: np.random.Generator, name: str, dot: str, gz: str
) -> None:
    folder = tmp_path / SOURCES[name].folders[-1 if gz else 0]
    truth = {
        split: (pictures(rng, n, 28, 28), rng.integers(0, 10, n, dtype=np.uint8))
        for split, n in (("train", 5), ("t10k", 3))
    }
    for split, (x, y) in truth.items():
        write_idx(folder / f"{split}-images{dot}idx3-ubyte{gz}", x)
        write_idx(folder / f"{split}-labels{dot}idx1-ubyte{gz}", y)
    data = load(name, tmp_path)
    same(data.train, truth["train"][0][:, None], truth["train"][1])
    same(data.test, truth["t10k"][0][:, None], truth["t10k"][1])
    assert len(data.classes) == 10 and available(tmp_path) == {name: ["train", "test"]}
    (folder / f"t10k-labels{dot}idx1-ubyte{gz}").unlink()
    with pytest.raises(
        FileNotFoundError,
        match="t10k-labels.* is missing, though other files of the set are there",
    ):
        load(name, tmp_path)


@pytest.mark.parametrize("gz", ["", ".gz"])
def test_idx_broken(tmp_path: Path, rng: np.random.Generator, gz: str) -> None:
    images, labels = (
        tmp_path / "mnist" / f"t10k-{kind}-ubyte{gz}"
        for kind in ("images-idx3", "labels-idx1")
    )
    x, y = pictures(rng, 4, 28, 28), np.array([0, 1, 12, 3], np.uint8)

    def fails(message: str) -> None:
        with pytest.raises(ValueError, match=message) as error:
            load("mnist", tmp_path)
        assert "ubyte" in str(error.value)

    def raw(content: bytes) -> None:
        images.write_bytes(gzip.compress(content) if gz else content)

    write_idx(images, x)
    write_idx(labels, y)
    fails("labels-idx1-ubyte.*record 2: label 12 is not one of 0..9")
    write_idx(labels, y[:2])
    fails("4 images but .* 2 labels")
    whole = bytes((0, 0, 8, 3)) + struct.pack(">3I", 4, 28, 28) + x.tobytes()
    raw(whole[:-800])
    fails(
        r"shape \(4, 28, 28\) needs 3,136 bytes, the file has 2,336; it stops in record 2"
    )
    raw(whole + b"x")
    fails("the file has more")
    raw(b"\x00\x00\x0d\x03" + whole[4:])
    fails("starts with 00000d03, an idx file of 3-dimensional bytes with 00000803")
    raw(whole[:7])
    fails("starts with 00000803")
    raw(b"")
    fails("starts with nothing")
    raw(whole[:4] + struct.pack(">3I", 1 << 31, 28, 28))
    fails("needs 1,683,627,180,032 bytes, the file has 0")
    if gz:
        images.write_bytes(gzip.compress(whole)[:-900])
        fails("damaged or cut short")
        images.write_bytes(whole)
        fails("cannot be read, is damaged or cut short: Not a gzipped file")


# --- the .npy sets ---


@pytest.mark.parametrize("classes", [10, 100])
def test_cifar_c(tmp_path: Path, rng: np.random.Generator, classes: int) -> None:
    folder = tmp_path / f"CIFAR-{classes}-C"
    folder.mkdir()
    y = np.tile(rng.integers(0, classes, 6), 5)
    x = {name: pictures(rng, 30, 32, 32, 3) for name in ("fog", "gaussian_noise")}
    np.save(folder / "labels.npy", y)
    for name, values in x.items():
        np.save(folder / f"{name}.npy", values)
    data = load(f"cifar{classes}-c", tmp_path)
    assert len(data.splits) == 10
    same(data.splits["fog/1"], x["fog"][:6].transpose(0, 3, 1, 2), y[:6])
    same(
        data.splits["gaussian_noise/4"],
        x["gaussian_noise"][18:24].transpose(0, 3, 1, 2),
        y[18:24],
    )
    assert "fog/5" in available(tmp_path)[f"cifar{classes}-c"]

    data.splits["fog/1"].x.zero_()  # writing stays in memory
    assert np.array_equal(np.load(folder / "fog.npy"), x["fog"])
    whole = (folder / "fog.npy").read_bytes()
    (folder / "fog.npy").write_bytes(whole[:-1])
    with pytest.raises(
        ValueError, match="fog.npy is not a plain .npy array, or it is cut short"
    ):
        load(f"cifar{classes}-c", tmp_path, ["fog/1"])
    (folder / "fog.npy").write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match="fog.npy is not a plain .npy array"):
        load(f"cifar{classes}-c", tmp_path, ["fog/1"])
    np.save(folder / "fog.npy", x["fog"][:25])
    with pytest.raises(
        ValueError,
        match=r"fog.npy holds uint8 of shape \(25, 32, 32, 3\), expected \(30, 32, 32, 3\)",
    ):
        load(f"cifar{classes}-c", tmp_path, ["fog/1"])
    canary = tmp_path / "canary"
    np.save(
        folder / "fog.npy", np.array([Hostile(canary)], dtype=object), allow_pickle=True
    )
    with pytest.raises(ValueError, match="fog.npy is not a plain .npy array"):
        load(f"cifar{classes}-c", tmp_path, ["fog/1"])
    assert not canary.exists()
    np.save(folder / "labels.npy", np.where(np.arange(30) == 7, classes, y))
    with pytest.raises(
        ValueError, match=f"labels.npy, record 7: label {classes} is not one"
    ):
        load(f"cifar{classes}-c", tmp_path)
    np.save(folder / "labels.npy", y[:29])
    with pytest.raises(ValueError, match="29 labels, which is not a multiple of 5"):
        load(f"cifar{classes}-c", tmp_path)


@pytest.mark.parametrize(
    "file", ["cifar10h-counts.npy", "cifar10h-probs.npy", "cifar10h_counts.npz"]
)
def test_cifar10h(tmp_path: Path, rng: np.random.Generator, file: str) -> None:
    truth = write_binary(tmp_path / "cifar10", rng, False)["test"][0]
    path = tmp_path / "cifar10h" / file
    path.parent.mkdir()
    votes = rng.integers(0, 9, (7, 10))
    shares = votes / votes.sum(1, keepdims=True)

    def write(values: np.ndarray) -> None:
        np.savez(path, counts=values) if path.suffix == ".npz" else np.save(
            path, values
        )

    write(shares if "probs" in file else votes)
    data = load("cifar10h", tmp_path)
    assert np.array_equal(data.test.x.numpy(), truth) and np.allclose(
        data.test.y.numpy(), shares, atol=1e-7
    )
    assert ("counts" in data.splits) == ("counts" in file)
    if "counts" in file:
        assert np.array_equal(data.splits["counts"].y.numpy(), votes)
    write(np.where(np.arange(7)[:, None] == 3, 0, votes))
    with pytest.raises(
        ValueError,
        match=f"{file}, row 3: votes must be finite, not negative and not all zero",
    ):
        load("cifar10h", tmp_path)
    write(votes[:6])
    with pytest.raises(
        ValueError, match="votes on 6 images, but CIFAR-10's test set here has 7"
    ):
        load("cifar10h", tmp_path)


def test_svhn(tmp_path: Path, rng: np.random.Generator) -> None:
    from scipy.io import savemat

    folder = tmp_path / "svhn"
    folder.mkdir()
    x, y = pictures(rng, 32, 32, 3, 5), np.array([[1], [10], [3], [9], [10]], np.uint8)
    for split in ("train", "test"):
        savemat(folder / f"{split}_32x32.mat", {"X": x, "y": y}, do_compression=True)
    same(
        load("svhn", tmp_path).test, x.transpose(3, 2, 0, 1), np.array([1, 0, 3, 9, 0])
    )
    assert available(tmp_path) == {"svhn": ["train", "test"]}
    file = folder / "test_32x32.mat"
    cases = [
        (
            {"X": x, "y": np.where(y == 3, 0, y)},
            "record 2: label 0 is not one of 1..10",
        ),
        ({"X": x[..., :4], "y": y}, r"must hold X \(32, 32, 3, n\)"),
        ({"y": y}, "must hold X"),
        ({"X": x.astype(float), "y": y}, "X must be uint8"),
    ]
    for content, message in cases:
        savemat(file, content)
        with pytest.raises(ValueError, match=message):
            load("svhn", tmp_path)
    for content in (
        file.read_bytes()[:-20],
        b"",
        b"MATLAB 7.3 MAT-file" + bytes(105) + b"\x00\x02IM" + bytes(400),
    ):
        file.write_bytes(content)
        with pytest.raises(
            ValueError,
            match="test_32x32.mat (is not a readable MATLAB 5 file|must hold)",
        ):
            load("svhn", tmp_path)


# --- folders ---


def write_tree(
    folder: Path, rng: np.random.Generator, classes: tuple[str, ...] = ("n01", "n02")
) -> np.ndarray:
    image = pictures(rng, 6, 8, 3)
    for name in classes:
        (folder / name).mkdir(parents=True)
        Image.fromarray(image).save(folder / name / "b.png")
        Image.fromarray(image[::2]).save(folder / name / "a.JPEG")
    return image


def test_imagenet(tmp_path: Path, rng: np.random.Generator) -> None:
    write_tree(tmp_path / "imagenet" / "train", rng)
    image = write_tree(tmp_path / "imagenet" / "val", rng)
    Image.fromarray(image[..., 0]).save(
        tmp_path / "imagenet" / "val" / "n02" / "c.JPEG"
    )  # grey, as some of ImageNet are
    data = load("imagenet", tmp_path).to("cpu")
    folder = data.splits["val"]
    assert (
        isinstance(folder, ImageFolder)
        and len(folder) == 5
        and folder.y.tolist() == [0, 0, 1, 1, 1]
        and data.classes == ("n01", "n02")
    )
    assert (
        np.array_equal(folder[3][0].numpy(), image.transpose(2, 0, 1))
        and folder[3][1] == 1
    )
    assert folder[0][0].shape == (3, 3, 8) and folder[4][0].shape == (3, 6, 8)
    folder.transform = lambda x: x[:, :2, :2].float()
    x, y = next(iter(torch.utils.data.DataLoader(folder, batch_size=5)))
    assert x.shape == (5, 3, 2, 2) and y.tolist() == folder.y.tolist()
    assert available(tmp_path) == {"imagenet": ["train", "val"]}
    with pytest.raises(TypeError, match="decoded image by image"):
        _ = data.train
    folder.paths[0].write_bytes(b"no image")
    with pytest.raises(ValueError, match="a.JPEG cannot be decoded"):
        folder[0]
    (tmp_path / "imagenet" / "val" / "n03").mkdir()
    with pytest.raises(
        ValueError,
        match=r"val has 3 class folders and 2 were expected; only one side has \['n03'\]",
    ):
        load("imagenet", tmp_path)
    (tmp_path / "imagenet" / "train" / "n03").mkdir()
    with pytest.raises(ValueError, match="n03 holds no image"):
        load("imagenet", tmp_path)


@pytest.mark.parametrize("group", ["", "weather/"])
def test_imagenet_c(tmp_path: Path, rng: np.random.Generator, group: str) -> None:
    for severity in range(1, 6):
        write_tree(tmp_path / "ImageNet-C" / f"{group}fog" / str(severity), rng)
    data = load("imagenet-c", tmp_path, ["fog/2", "fog/5"])
    assert list(data.splits) == ["fog/2", "fog/5"] and len(data.splits["fog/5"]) == 4
    assert (
        data.splits["fog/5"].paths[0].parent
        == tmp_path / "ImageNet-C" / f"{group}fog" / "5" / "n01"
    )
    assert available(tmp_path)["imagenet-c"] == [f"fog/{s}" for s in range(1, 6)]


# --- tables ---


def test_uci_npz_and_csv(tmp_path: Path, rng: np.random.Generator) -> None:
    (tmp_path / "uci").mkdir()
    x, y = rng.normal(3, 2, (40, 3)), rng.normal(size=40)
    x[:, 1] = 0.1  # constant
    np.savez(tmp_path / "uci" / "yacht.npz", X=x, y=y)
    rows = [",".join(map(repr, [*map(float, a), float(b)])) for a, b in zip(x, y)]
    (tmp_path / "uci" / "energy.csv").write_text(
        "\n".join(["a,b,c,target", *rows]) + "\n"
    )
    npz, written = load("uci/yacht", tmp_path), load("uci/energy", tmp_path)
    assert torch.equal(npz.splits["all"].x, torch.tensor(x, dtype=torch.float32))
    assert torch.equal(npz.splits["all"].x, written.splits["all"].x) and torch.equal(
        npz.splits["all"].y, written.splits["all"].y
    )
    assert available(tmp_path) == {"uci/energy": ["all"], "uci/yacht": ["all"]}

    split = uci.standard_split(npz, 2)
    generator = np.random.RandomState(1)
    orders = [generator.permutation(40) for _ in range(3)]
    train, test = orders[2][:36], orders[2][36:]
    x, y = x.astype(np.float32).astype(float), y.astype(np.float32).astype(float)
    varying = x[:, [0, 2]]
    assert np.allclose(
        split.train.x[:, [0, 2]],
        (varying[train] - varying[train].mean(0)) / varying[train].std(0),
        atol=1e-5,
    )
    assert np.allclose(split.train.x[:, 1], 0) and np.allclose(
        split.test.y[:, 0], y[test]
    )
    assert np.allclose(
        split.y_mean + split.y_std * split.train.y, y[train][:, None], atol=1e-6
    )
    assert split.to("meta").y_std.device.type == "meta"
    for index in (-1, 20):
        with pytest.raises(ValueError, match="splits 0..19"):
            uci.standard_split(npz, index)
    with pytest.raises(ValueError, match="toy is no table"):
        uci.standard_split(Dataset("toy", {}), 0)


def test_uci_two_targets_and_year_in_its_own_file(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    values = rng.normal(size=(12, 10)).round(3)
    names = ",".join([*(f"x{i}" for i in range(8)), "heating", "cooling"])
    np.savetxt(
        tmp_path / "energy.csv",
        values,
        delimiter=",",
        fmt="%.3f",
        header=names,
        comments="",
    )
    both = load("uci/energy", tmp_path)
    assert both.columns == tuple(f"x{i}" for i in range(8))
    np.testing.assert_allclose(both.splits["all"].x, values[:, :8], rtol=1e-6)
    np.testing.assert_allclose(both.splits["all"].y, values[:, 8:], rtol=1e-6)
    np.savetxt(
        tmp_path / "yacht.csv",
        values,
        delimiter=",",
        fmt="%.3f",
        header=names,
        comments="",
    )
    assert load("uci/yacht", tmp_path).splits["all"].y.shape == (
        12,
        1,
    )  # one target, however many columns

    songs = np.concatenate(
        [rng.integers(1922, 2011, (5, 1)), rng.normal(size=(5, 90)).round(3)], 1
    )
    np.savetxt(tmp_path / "YearPredictionMSD.txt", songs, delimiter=",", fmt="%.5f")
    year = load("uci/year", tmp_path).splits["all"]
    np.testing.assert_allclose(year.y, songs[:, :1])
    np.testing.assert_allclose(year.x, songs[:, 1:], rtol=1e-6)
    (tmp_path / "YearPredictionMSD.txt").write_text("2001,1.0\n")
    with pytest.raises(
        ValueError, match="must have 91 columns, the year and 90 features, got 2"
    ):
        load("uci/year", tmp_path)


def test_uci_broken(tmp_path: Path) -> None:
    file = tmp_path / "yacht.npz"
    x, y = np.zeros((20, 2)), np.zeros(20)
    x_nan = x.copy()
    x_nan[7, 1] = np.nan
    wrong = np.stack([np.array(uci.split_rows(20, 0)[1]), np.array([0, 1])])
    cases = [
        ({"X": x_nan, "y": y}, "yacht.npz: X row 7, column 1 is nan"),
        ({"X": x, "y": y + 1e300}, "y row 0, column 0 is 1e\\+300"),
        ({"X": x, "y": y[:-1]}, r"got \(20, 2\) and \(19, 1\)"),
        ({"X": x}, "must hold the arrays X and y, got X"),
        ({"X": x.astype("U3"), "y": y}, "X must be numbers"),
        (
            {"X": x, "y": y, "test_idx": wrong},
            "row 1 of test_idx is not the standard split 1",
        ),
    ]
    for arrays, message in cases:
        np.savez(file, **arrays)
        with np.errstate(over="ignore"), pytest.raises(ValueError, match=message):
            load("uci/yacht", tmp_path)
    file.unlink()
    table = tmp_path / "yacht.csv"
    for content, message in (
        (
            "a,y\n1,2\n3,nan\n",
            r"yacht.csv, line 3, column 'y': 'nan' is not a finite number",
        ),
        ("a,y\n1,2\n,4\n", r"line 3, column 'a': '' is not a finite number"),
        ("a,y\n1,2,3\n", "line 2: 3 cells, but there are 2 column names"),
        ("a,y\n", "has no rows below its line of column names"),
        ("a\n1\n", "must have a line of two or more column names"),
        ("", "is empty"),
        (
            "a,y\n1,2\n\n3,1e39\n",
            r"line 4, column 'y': '1e39' is infinite, or too large for float32",
        ),
        (
            "a,y\n1,2\n3,\udcff4\n",
            r"yacht.csv, line 3, column 'y': .*udcff4' is not a number",
        ),
        ('a,y\n1,2\n3,"4\n', r"yacht.csv, line 3: unexpected end of data"),
        (
            "a,y\n1,2\n3," + "4" * 140_000,
            r"yacht.csv, line 3: field larger than field limit",
        ),
    ):
        table.write_text(content, errors="surrogateescape")
        with pytest.raises(ValueError, match=message):
            load("uci/yacht", tmp_path)


def test_a_table_is_read_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.random.default_rng(0).normal(size=(107, 3)).astype("float32")
    np.savetxt(
        tmp_path / "yacht.csv",
        values,
        delimiter=",",
        fmt="%.9g",
        header="a,b,y",
        comments="\ufeff",
    )
    blocks = []
    for cells in (1, 30, 1 << 16):
        monkeypatch.setattr(table_files, "_CELLS", cells)
        found = load("uci/yacht", tmp_path)
        rows = found.splits["all"]
        assert isinstance(rows, Split) and found.columns == ("a", "b")
        assert torch.cat([rows.x, rows.y], 1).numpy().tobytes() == values.tobytes()
        blocks.append(len(list(table_files.number_blocks(tmp_path / "yacht.csv"))))
    assert blocks == [107, 11, 1]


@pytest.mark.slow
def test_xz_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.xz").write_bytes(lzma.compress(bytes(30 << 20)))
    monkeypatch.setattr(archives, "LIMIT", 20 << 20)
    with pytest.raises(ValueError, match="more than the 20,971,520 bytes allowed"):
        archives.read_xz(tmp_path / "a.xz")


# --- the real sets ---


def moments(x: torch.Tensor) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel in units of 255, from counts of the 256 values."""
    levels = torch.arange(256, dtype=torch.float64) / 255
    shares = [
        x[:, c].flatten().bincount(minlength=256).double() / x[:, c].numel()
        for c in range(x.shape[1])
    ]
    means = [float(share @ levels) for share in shares]
    return means, [
        float(share @ (levels - mean) ** 2) ** 0.5 for share, mean in zip(shares, means)
    ]


@pytest.mark.slow
def test_real_cifar10() -> None:
    data = load("cifar10", real("cifar10"), ["test"])
    assert (
        data.test.x.shape == (10_000, 3, 32, 32)
        and data.test.y.bincount().tolist() == [1000] * 10
    )
    assert data.test.y[:5].tolist() == [
        3,
        8,
        8,
        0,
        6,
    ]  # cat, ship, ship, airplane, frog
    records = torch.cat([data.test.y.byte()[:, None], data.test.x.flatten(1)], 1)
    assert (
        hashlib.sha1(records.numpy().tobytes()).hexdigest().startswith("67eb016d")
    )  # of the official test_batch.bin


@pytest.mark.slow
def test_real_cifar10_train() -> None:
    data = load("cifar10", real("cifar10"), ["train"])
    sha1 = []
    for x, y in zip(data.train.x.split(10_000), data.train.y.split(10_000)):
        assert len(y) == 10_000
        sha1.append(
            hashlib.sha1(
                torch.cat([y.byte()[:, None], x.flatten(1)], 1).numpy().tobytes()
            ).hexdigest()[:8]
        )
    assert (
        sha1 == ["aadd24ac", "c0ba65cc", "1dd00a74", "aab85764", "26e2849e"]
        and data.train.y.bincount().tolist() == [5000] * 10
    )
    mean, std = moments(data.train.x)
    assert mean == pytest.approx(
        [0.49140, 0.48216, 0.44653], abs=1e-5
    ) and std == pytest.approx([0.24703, 0.24349, 0.26159], abs=1e-5)


@pytest.mark.slow
def test_real_cifar100() -> None:
    data = load("cifar100", real("cifar100"), ["test"])
    assert data.test.y.bincount().tolist() == [100] * 100 and data.classes[:2] == (
        "apple",
        "aquarium_fish",
    )
    pixels = data.test.x.permute(0, 2, 3, 1).contiguous().numpy().tobytes()
    assert (
        hashlib.sha256(pixels).hexdigest()
        == "d3095d123e93a0bf89623544a9d4b9ef4bd9655fb375ab7a6e8ee71c86295a31"
    )


@pytest.mark.slow
def test_real_cifar10h() -> None:
    root = real("cifar10h")
    votes = load("cifar10h", root)
    counts, test = votes.splits["counts"].y, load("cifar10", root, ["test"]).test
    assert (
        counts.sum() == 511_000
        and (counts.sum(1).min(), counts.sum(1).max()) == (47, 63)
        and torch.equal(votes.test.x, test.x)
    )
    assert torch.allclose(votes.test.y.sum(1), torch.ones(10_000))
    assert (counts.argmax(1) == test.y).double().mean().item() == pytest.approx(
        0.9921, abs=1e-9
    )


@pytest.mark.slow
def test_real_mnist() -> None:
    data = load("mnist", real("mnist"))
    assert check("mnist", REAL) == []
    assert data.train.y.bincount().tolist() == [
        5923,
        6742,
        5958,
        6131,
        5842,
        5421,
        5918,
        6265,
        5851,
        5949,
    ]  # as published
    md5 = [
        hashlib.md5(
            bytes((0, 0, 8, 3))
            + struct.pack(">3I", len(s), 28, 28)
            + s.x.numpy().tobytes()
        ).hexdigest()
        for s in (data.train, data.test)
    ]
    assert md5 == [
        "6bbc9ace898e44ae57da46a324031adb",
        "2646ac647ad5339dbf082846283269ea",
    ]
    assert moments(data.train.x) == (
        pytest.approx([0.13066], abs=1e-5),
        pytest.approx([0.30811], abs=1e-5),
    )


def test_real_notmnist() -> None:
    data = load("notmnist", real("notmnist"))
    assert data.test.y.bincount().tolist() == [1000] * 10
    assert moments(data.test.x) == (
        pytest.approx([0.42662], abs=1e-5),
        pytest.approx([0.45893], abs=1e-5),
    )


@pytest.mark.parametrize("name", [name for name in uci.UCI if name != "year"])
def test_real_uci(name: str) -> None:
    data = load(
        f"uci/{name}", real("uci")
    )  # also compares all stored index arrays with split_rows
    rows, features, splits = uci.UCI[name]
    assert data.splits["all"].x.shape == (rows, features) and data.splits[
        "all"
    ].y.shape == (rows, 1)
    with np.load(REAL / "uci" / f"{name}.npz") as arrays:
        assert len(arrays["test_idx"]) == splits
        train, test = arrays["train_idx"][splits - 1], arrays["test_idx"][splits - 1]
        x, y = arrays["X"], arrays["y"][:, None]
    split = uci.standard_split(data, splits - 1)
    std = np.where(np.ptp(x[train], 0) > 0, x[train].std(0), 1)
    assert (
        np.abs(split.test.x.numpy() - (x[test] - x[train].mean(0)) / std).max() < 1e-4
    )  # float32 storage against float64
    assert np.allclose(split.test.y, y[test], rtol=1e-6) and np.allclose(
        split.y_std, y[train].std(0), rtol=1e-5
    )


def test_real_listing() -> None:
    assert {f"uci/{name}" for name in uci.UCI if name != "year"} <= set(
        available(real("uci"))
    )


def test_a_broken_set_does_not_hide_the_others(tmp_path: Path) -> None:
    (tmp_path / "CIFAR-10-C").mkdir()
    for name in ("fog.npy", "labels.npy"):
        (tmp_path / "CIFAR-10-C" / name).write_bytes(b"nonsense")
    (tmp_path / "uci").mkdir()
    (tmp_path / "uci" / "yacht.csv").write_text("a,b\n" + "1.0,2.0\n" * 10)
    with pytest.warns(UserWarning, match="cifar10-c is there but cannot be read"):
        found = available(tmp_path)
    assert found == {"uci/yacht": ["all"]}


# --- rows as torchvision and Hugging Face give them ---

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 6, 5, 3), dtype=np.uint8)


class Pairs:
    """torchvision's way: length and items, PIL images unless a transform says otherwise."""

    def __init__(self, transform: Any = None) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> tuple[Any, int]:
        image = Image.fromarray(PIXELS[i])
        return (self.transform(image) if self.transform else image), i % 3


def test_pairs_of_pil_images_and_labels() -> None:
    split = as_split(Pairs())
    assert split.x.dtype == torch.uint8 and torch.equal(
        split.x, torch.from_numpy(PIXELS).permute(0, 3, 1, 2)
    )
    assert split.y.tolist() == [0, 1, 2, 0] and split.y.dtype == torch.int64


def test_a_transform_is_respected() -> None:
    split = as_split(
        Pairs(lambda image: torch.from_numpy(np.array(image)).float().mean())
    )
    torch.testing.assert_close(
        split.x, torch.from_numpy(PIXELS).float().mean((1, 2, 3))
    )


def test_dictionaries_with_usual_and_with_other_names() -> None:
    rows = [
        {"img": Image.fromarray(PIXELS[i, :, :, 0]), "fine_label": i, "note": "x"}
        for i in range(4)
    ]
    split = as_split(rows)
    assert torch.equal(
        split.x[:, 0], torch.from_numpy(PIXELS[..., 0])
    ) and split.y.tolist() == [0, 1, 2, 3]
    table = [{"features": [1.0 * i, 2.0], "outcome": 0.5 * i} for i in range(3)]
    split = as_split(table, inputs="features", targets="outcome")
    assert (
        split.x.tolist() == [[0.0, 2.0], [1.0, 2.0], [2.0, 2.0]]
        and split.y.dtype == torch.float32
    )


def test_a_tensor_dataset() -> None:
    x, y = torch.randn(5, 2), torch.arange(5)
    split = as_split(torch.utils.data.TensorDataset(x, y))
    assert torch.equal(split.x, x) and torch.equal(split.y, y)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "no rows"),
        ([3], "Row 0 must be an"),
        ([{"a": 1, "b": 2}], "keys a, b; say with inputs="),
        ([(torch.zeros(2), 0), (torch.zeros(3), 0)], "Row 1 has an input of shape"),
        ([("text", 0)], "Row 0 has an input of type str"),
        ([(torch.zeros(2), "cat")], "Row 0 has a target of type str"),
    ],
)
def test_rows_that_do_not_fit_are_named(rows: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        as_split(rows)
