"""Prepared sets: equal to their source, refused when damaged, whole or absent whatever interrupts their writing."""

import errno
import gzip
import hashlib
import lzma
import os
import signal
import struct
import textwrap
from collections.abc import Callable
from pathlib import Path

import forks
import numpy as np
import pytest
import torch
from PIL import Image
from slimbayes_lab.data import (
    Dataset,
    Split,
    as_split,
    available,
    load,
    load_bags,
    prepare,
    save,
)

from slimbayes.files import MARKER

REAL = Path(
    os.environ.get("SLIMBAYES_DATA", Path(__file__).parents[4] / "shared" / "data")
)


def write_mnist(root: Path, seed: int = 0, rows: int = 6) -> Path:
    """Two splits in plain idx files: `rows` training images and three for testing."""
    rng, folder = np.random.default_rng(seed), root / "mnist"
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", rows), ("t10k", 3)):
        for kind, shape, top in (
            ("images-idx3", (count, 28, 28), 256),
            ("labels-idx1", (count,), 10),
        ):
            values = rng.integers(0, top, shape, dtype=np.uint8)
            header = bytes((0, 0, 8, len(shape))) + struct.pack(
                f">{len(shape)}I", *shape
            )
            (folder / f"{split}-{kind}-ubyte").write_bytes(header + values.tobytes())
    return root


def write_fog(root: Path) -> Path:
    (root / "CIFAR-10-C").mkdir(parents=True)
    rng = np.random.default_rng(0)
    np.save(
        root / "CIFAR-10-C" / "fog.npy",
        rng.integers(0, 256, (40, 32, 32, 3), dtype=np.uint8),
    )
    np.save(root / "CIFAR-10-C" / "labels.npy", np.tile(rng.integers(0, 10, 8), 5))
    return root


def write_yacht(root: Path) -> Path:
    root.mkdir(exist_ok=True)
    (root / "yacht.csv").write_text(
        "a,b,y\n" + "".join(f"{i},{i * i},{i / 7}\n" for i in range(9))
    )
    return root


def write_imdb(root: Path) -> Path:
    (root / "imdb").mkdir(parents=True)
    (root / "imdb" / "reviews.txt.xz").write_bytes(
        lzma.compress("bad film\ngood film\nno ünïcode\nyes\n".encode())
    )
    np.save(root / "imdb" / "ratings.npy", np.array([1, 9, 2, 10], np.uint8))
    return root


def write_votes(root: Path) -> Path:
    """CIFAR-10H reads the images of another set, whose files count too."""
    for folder in ("cifar10", "cifar10h"):
        (root / folder).mkdir(parents=True)
    (root / "cifar10" / "test_batch.bin").write_bytes(bytes(2 * 3073))
    np.save(
        root / "cifar10h" / "cifar10h-counts.npy", np.eye(2, 10, dtype=np.int64) + 1
    )
    return root


SETS: dict[str, Callable[[Path], Path]] = {
    "mnist": write_mnist,
    "cifar10-c": write_fog,
    "uci/yacht": write_yacht,
    "imdb": write_imdb,
    "cifar10h": write_votes,
}


def equal(a: Dataset, b: Dataset) -> bool:
    words = (a.classes, a.vocabulary, list(a.splits)) == (
        b.classes,
        b.vocabulary,
        list(b.splits),
    )
    pairs = [
        (getattr(a.splits[s], axis), getattr(b.splits[s], axis))
        for s in a.splits
        for axis in "xy"
    ]
    return words and all(
        torch.equal(one, other) and one.dtype == other.dtype for one, other in pairs
    )


def mapped(folder: Path) -> bool:
    """Whether this process has a file of that folder mapped into its memory now."""
    return str(folder) in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("name", SETS)
def test_a_prepared_set_equals_its_source_and_is_mapped(
    name: str, tmp_path: Path
) -> None:
    root = SETS[name](tmp_path / "data")
    plain = load(name, root)
    folder = prepare(name, root, tmp_path / "out")
    assert folder == tmp_path / "out" / name
    assert {path.name for path in folder.iterdir()} == {
        MARKER,
        "prepared.json",
        *(f"{s.replace('/', '-')}.safetensors" for s in plain.splits),
    }
    data = load(name, tmp_path / "out")
    assert equal(data, plain) and data.columns == plain.columns and mapped(folder)
    assert available(tmp_path / "out") == {name: list(plain.splits)}
    one = list(plain.splits)[-1]
    assert equal(
        load(name, tmp_path / "out", [one]),
        Dataset(name, {one: plain.splits[one]}, plain.classes, plain.vocabulary),
    )


def test_a_set_prepared_beside_its_files_no_longer_needs_them(tmp_path: Path) -> None:
    root = write_mnist(tmp_path)
    plain = load("mnist", root)
    assert prepare("mnist", root) == root / "mnist"
    for file in root.rglob("*-ubyte"):
        file.unlink()
    assert equal(load("mnist", root), plain)
    with pytest.raises(FileNotFoundError, match="No mnist: looked in"):
        prepare("mnist", root)


def test_writing_to_a_mapped_tensor_changes_memory_only(tmp_path: Path) -> None:
    root = write_mnist(tmp_path)
    plain, _ = load("mnist", root), prepare("mnist", root)
    load("mnist", root).train.x.zero_()
    assert equal(load("mnist", root), plain)


def test_preparing_again_takes_what_the_files_hold_now(tmp_path: Path) -> None:
    root = write_mnist(tmp_path)
    first = load("mnist", root)
    prepare("mnist", root)
    write_mnist(root, seed=1)
    assert equal(load("mnist", root), first)
    prepare("mnist", root)
    assert not equal(load("mnist", root), first)


def test_a_set_can_use_the_prepared_images_of_another(tmp_path: Path) -> None:
    root = write_votes(tmp_path)
    plain = load("cifar10h", root)
    prepare("cifar10", root)
    (root / "cifar10" / "test_batch.bin").unlink()
    assert equal(load("cifar10h", root), plain)


def test_health_records_are_put_into_bags_from_their_own_files(tmp_path: Path) -> None:
    tokens = Split(torch.ones(2, 3, 4, dtype=torch.int32), torch.tensor([0, 1]))
    save(Dataset("physionet2012", {"train": tokens}, ("survived", "died")), tmp_path)
    assert torch.equal(load("physionet2012", tmp_path).train.x, tokens.x)
    with pytest.raises(FileNotFoundError, match="No physionet2012: looked in"):
        load_bags("physionet2012", tmp_path)


def test_what_another_package_read_is_kept(tmp_path: Path) -> None:
    rows = [(Image.new("RGB", (32, 32), (i, 0, 0)), i) for i in range(4)]
    save(Dataset("cifar10", {"test": as_split(rows)}, tuple("abcdefghij")), tmp_path)
    data = load("cifar10", tmp_path)
    assert data.test.y.tolist() == data.test.x[:, 0, 0, 0].tolist() == [0, 1, 2, 3]
    assert data.classes == tuple("abcdefghij")


def damage(folder: Path, kind: str) -> None:
    file, manifest = folder / "train.safetensors", folder / "prepared.json"
    whole, text = file.read_bytes(), manifest.read_text()
    changed = {
        "short": whole[:-1],
        "empty": b"",
        "header": whole[:9] + b"!" + whole[10:],
        "pixel": whole[:-1] + bytes([whole[-1] ^ 1]),
    }
    said = {
        "manifest cut": text[:-1],
        "manifest nested": "[" * 100 + "]" * 100,
        "manifest of another set": text.replace("mnist", "imdb"),
        "manifest of another format": text.replace('"format": 1', '"format": 9'),
        "digest of another type": text.replace('"train": "', '"train": 3, "x": "'),
        "no classes": text.replace('"classes"', '"kinds"'),
    }
    if kind == "missing":
        file.unlink()
    elif kind == "pipe":
        file.unlink()
        os.mkfifo(file)
    elif kind == "no tensor x":
        file.write_bytes(whole.replace(b'"x":{"dtype"', b'"z":{"dtype"'))
        digests = [
            hashlib.sha256(content).hexdigest()
            for content in (whole, file.read_bytes())
        ]
        manifest.write_text(text.replace(*digests))
    elif kind in changed:
        file.write_bytes(changed[kind])
    else:
        manifest.write_text(said[kind])


DAMAGE = {
    "short": "train.safetensors is missing or damaged: its SHA-256 is not the one",
    "empty": "train.safetensors is missing or damaged: its SHA-256 is not the one",
    "header": "train.safetensors is missing or damaged: its SHA-256 is not the one",
    "pixel": "train.safetensors is missing or damaged: its SHA-256 is not the one",
    "missing": "train.safetensors is missing or damaged: .*No such file",
    "pipe": "train.safetensors is missing or damaged: .*it is a pipe",
    "no tensor x": "train.safetensors is missing or damaged: .*does not contain tensor x",
    "manifest cut": "prepared.json cannot be read or is damaged",
    "manifest nested": "prepared.json cannot be read or is damaged: .*64 levels",
    "manifest of another set": "prepared.json is of 'imdb' in format 1, needed is 'mnist'",
    "manifest of another format": "prepared.json is of 'mnist' in format 9, needed is",
    "digest of another type": "prepared.json .* sha256.train must be str, got 3",
    "no classes": "prepared.json .* classes is missing",
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_prepared_set_is_refused_and_can_be_replaced(
    kind: str, tmp_path: Path
) -> None:
    root = write_mnist(tmp_path)
    plain, folder = load("mnist", root), prepare("mnist", root)
    damage(folder, kind)
    with pytest.raises(ValueError, match=f"{DAMAGE[kind]}.* Prepare mnist again"):
        load("mnist", root)
    if kind == "pipe":
        (folder / "train.safetensors").unlink()
    prepare("mnist", root)
    assert equal(load("mnist", root), plain)


def test_a_split_that_is_not_asked_for_is_not_read(tmp_path: Path) -> None:
    root = write_mnist(tmp_path)
    (prepare("mnist", root) / "train.safetensors").unlink()
    assert len(load("mnist", root, ["test"]).test) == 3


def test_folders_of_images_are_refused(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / "imagenet" / split / "n01").mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "imagenet" / split / "n01" / "a.png")
    with pytest.raises(
        ValueError,
        match="imagenet is a folder of images of many sizes.*not kept as arrays",
    ):
        prepare("imagenet", tmp_path)


# --- interruptions and company ---


def spoil(root: Path) -> None:
    """The second split has a label out of range."""
    file = root / "mnist" / "t10k-labels-idx1-ubyte"
    file.write_bytes(file.read_bytes()[:-1] + b"\x63")


def full(handle: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupted(handle: int) -> None:
    raise KeyboardInterrupt("stopped")


@pytest.mark.parametrize(
    ("cause", "error", "message"),
    [
        ("source", ValueError, "t10k-labels-idx1-ubyte, record 2: label 99"),
        ("disk", OSError, "No space left on device.*train.safetensors"),
        ("interrupt", KeyboardInterrupt, "stopped"),
    ],
)
def test_failure_leaves_no_part_and_keeps_the_old(
    cause: str,
    error: type[BaseException],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = write_mnist(tmp_path / "data", seed=1)
    folder, old = prepare("mnist", root), load("mnist", root)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    write_mnist(root)
    if cause == "source":
        spoil(root)
    else:
        monkeypatch.setattr(os, "fsync", full if cause == "disk" else interrupted)
    with pytest.raises(error, match=message):
        prepare("mnist", root)
    assert {path.name for path in folder.iterdir()} == before.keys()
    assert equal(load("mnist", root), old)


def test_a_conversion_that_stopped_half_way_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first split is the new one, the second one is the old: a mix of both is never used."""
    root = write_mnist(tmp_path)
    prepare("mnist", root)
    write_mnist(root, seed=1)
    sync = os.fsync
    calls = iter([sync, interrupted])
    monkeypatch.setattr(os, "fsync", lambda handle: next(calls)(handle))
    with pytest.raises(KeyboardInterrupt):
        prepare("mnist", root)
    with pytest.raises(ValueError, match="train.safetensors is missing or damaged"):
        load("mnist", root)
    monkeypatch.setattr(os, "fsync", sync)
    prepare("mnist", root)
    assert len(load("mnist", root).train) == 6


@pytest.mark.slow
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """The system itself refuses: no file may grow beyond 64 KiB."""
    root = write_mnist(tmp_path / "data", rows=200)
    code = f"""
        import resource
        from slimbayes_lab.data import prepare
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
        try:
            prepare("mnist", {str(root)!r}, {str(tmp_path / "out")!r})
        except OSError as error:
            print(error)
    """
    assert forks.exit_codes(
        [forks.start(exec, textwrap.dedent(code), {}, log=tmp_path / "log")], 60
    ) == [0]
    said = (tmp_path / "log").read_text()
    assert (
        "train.safetensors cannot be written: " in said and "File too large" in said
    ), said
    assert os.listdir(tmp_path / "out" / "mnist") == [MARKER]


@pytest.mark.slow
def test_kill_before_a_file_is_in_place(tmp_path: Path) -> None:
    root, out = write_mnist(tmp_path / "data"), tmp_path / "out"
    plain, folder = load("mnist", root), out / "mnist"
    code = f"""
        import os, signal
        from pathlib import Path
        from slimbayes_lab.data import prepare
        Path.replace = lambda *a: os.kill(os.getpid(), signal.SIGKILL)
        prepare("mnist", {str(root)!r}, {str(out)!r})
    """
    assert forks.exit_codes([forks.start(exec, textwrap.dedent(code), {})], 60) == [
        -signal.SIGKILL
    ]
    (left,) = (path for path in folder.iterdir() if path.name != MARKER)
    assert left.name.startswith(".") and available(out) == {}
    os.utime(left, (1, 1))  # long ago: the writer is gone
    prepare("mnist", root, out)
    assert not left.exists() and equal(load("mnist", out), plain)


def prepare_often(root: Path, times: int) -> None:
    plain = load("mnist", root / "data")
    for _ in range(times):
        prepare("mnist", root / "data", root / "out")
        assert equal(load("mnist", root / "out"), plain)


def test_processes_that_prepare_a_set_together_do_not_disturb_one_another(
    tmp_path: Path,
) -> None:
    write_mnist(tmp_path / "data", rows=500)
    log = [tmp_path / f"log-{i}" for i in range(3)]
    running = [forks.start(prepare_often, tmp_path, 5, log=file) for file in log]
    codes = forks.exit_codes(running, 120)
    assert codes == [0, 0, 0], [file.read_text()[-2000:] for file in log]
    assert {path.name for path in (tmp_path / "out" / "mnist").iterdir()} == {
        MARKER,
        "prepared.json",
        "train.safetensors",
        "test.safetensors",
    }


def test_gzipped_sources(tmp_path: Path) -> None:
    root = write_mnist(tmp_path)
    plain = load("mnist", root)
    for file in list((root / "mnist").iterdir()):
        file.with_name(file.name + ".gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    prepare("mnist", root)
    assert equal(load("mnist", root), plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist", "cifar10", "imdb", "physionet2012"])
def test_real_sets(name: str, tmp_path: Path) -> None:
    if not (REAL / name).is_dir():
        pytest.skip(
            f"NOT CHECKED on real data: {REAL / name} does not exist; set SLIMBAYES_DATA to a folder that has it."
        )
    prepare(name, REAL, tmp_path)
    assert equal(load(name, tmp_path), load(name, REAL)) and mapped(tmp_path)
