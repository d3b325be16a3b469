"""The cache of tensors: equal to its source, never out of date, and whole or absent whatever interrupts its writing."""

import errno
import gzip
import lzma
import os
import signal
import struct
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path

import forks
import numpy as np
import pytest
import torch
from PIL import Image

from slimbayes.data import load, prepare
from slimbayes.data.catalog import FORMAT
from slimbayes.data.dataset import Dataset

REAL = Path(
    os.environ.get("SLIMBAYES_DATA", Path(__file__).parents[3] / "shared" / "data")
)


@pytest.fixture(autouse=True)
def _no_shared_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIMBAYES_CACHE", raising=False)


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
def test_a_cache_equals_its_source_and_is_mapped(name: str, tmp_path: Path) -> None:
    root = SETS[name](tmp_path / "data")
    plain = load(name, root)
    steps: list[tuple[int, int, str]] = []
    folder = prepare(name, root, progress=lambda *step: steps.append(step))
    assert folder == root / ".slimbayes-cache" / name
    assert {path.name for path in folder.iterdir()} == {
        f"{s.replace('/', '-')}.safetensors" for s in plain.splits
    }
    count = len(plain.splits)
    assert steps == [
        *((done, count, split) for done, split in enumerate(plain.splits)),
        (count, count, "done"),
    ]
    data = load(name, root)
    assert equal(data, plain) and mapped(folder)
    one = list(plain.splits)[-1]
    assert equal(
        load(name, root, [one]),
        Dataset(name, {one: plain.splits[one]}, plain.classes, plain.vocabulary),
    )


def test_writing_to_a_mapped_tensor_changes_memory_only(tmp_path: Path) -> None:
    root = write_mnist(tmp_path)
    plain, _ = load("mnist", root), prepare("mnist", root)
    load("mnist", root).train.x.zero_()
    assert equal(load("mnist", root), plain)


def test_the_cache_is_what_is_read(tmp_path: Path) -> None:
    """Pixels that change behind the back of size and time are not seen: this is the price of not reading the source."""
    root = write_mnist(tmp_path)
    plain, _, file = (
        load("mnist", root),
        prepare("mnist", root),
        root / "mnist" / "train-images-idx3-ubyte",
    )
    before = file.stat()
    file.write_bytes(file.read_bytes()[:-1] + b"\x07")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert equal(load("mnist", root), plain)
    os.utime(file)
    with pytest.warns(UserWarning, match="train-images-idx3-ubyte has changed"):
        assert int(load("mnist", root).train.x[-1, 0, -1, -1]) == 7


def test_a_changed_source_makes_the_cache_stale(tmp_path: Path) -> None:
    root = write_mnist(tmp_path)
    first = load("mnist", root)
    folder = prepare("mnist", root)
    for file in (root / "mnist").iterdir():
        os.utime(
            file, ns=(1, 1)
        )  # as after copying: the content decides, and is the same
    assert equal(load("mnist", root), first) and mapped(folder)
    write_mnist(root, seed=1)
    with pytest.warns(
        UserWarning,
        match=r"cache .*mnist is not used: its source mnist/t.*-ubyte has changed.*prepare it again",
    ):
        second = load("mnist", root)
    assert not equal(first, second)
    prepare("mnist", root)
    assert equal(load("mnist", root), second) and len(list(folder.iterdir())) == 2
    (root / "mnist" / "t10k-labels-idx1-ubyte").rename(
        root / "mnist" / "t10k-labels.idx1-ubyte"
    )
    with pytest.warns(
        UserWarning,
        match="other files than it was made from, such as mnist/t10k-labels",
    ):
        assert equal(load("mnist", root), second)


def test_the_files_of_another_set_count(tmp_path: Path) -> None:
    root = write_votes(tmp_path)
    prepare("cifar10h", root)
    (root / "cifar10" / "test_batch.bin").write_bytes(bytes(3073) + b"\x01" * 3073)
    with pytest.warns(
        UserWarning, match="its source cifar10/test_batch.bin has changed"
    ):
        assert int(load("cifar10h", root).test.x[1, 0, 0, 0]) == 1


def test_an_up_to_date_cache_is_left_alone(tmp_path: Path) -> None:
    root = write_mnist(tmp_path)
    prepare("mnist", root)
    prepare("mnist", root, progress=lambda *step: pytest.fail("nothing needed doing"))


def damage(folder: Path, kind: str) -> None:
    file = folder / "train.safetensors"
    whole = file.read_bytes()
    if kind == "short":
        file.write_bytes(whole[:-1])
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "header":
        file.write_bytes(whole[:9] + b"!" + whole[10:])
    elif kind == "format":
        file.write_bytes(
            whole.replace(f'"format":"{FORMAT}"'.encode(), b'"format":"9"')
        )
    elif kind == "other set":
        file.write_bytes(whole.replace(b'"name":"mnist"', b'"name":"kmnis"'))
    elif kind == "sources":
        file.write_bytes(whole.replace(b'[{\\"file\\"', b'{[\\"file\\"'))
    elif kind == "tensors":
        file.write_bytes(whole.replace(b'"x":{"dtype"', b'"z":{"dtype"'))


@pytest.mark.parametrize(
    "kind", ["short", "empty", "header", "format", "other set", "sources", "tensors"]
)
def test_a_damaged_cache_is_not_used_and_can_be_replaced(
    kind: str, tmp_path: Path
) -> None:
    root = write_mnist(tmp_path)
    plain, folder = load("mnist", root), prepare("mnist", root)
    before = (folder / "train.safetensors").read_bytes()
    damage(folder, kind)
    assert (folder / "train.safetensors").read_bytes() != before
    with pytest.warns(
        UserWarning, match="damaged|in format '9'|it is of 'kmnis'"
    ) as caught:
        assert equal(load("mnist", root), plain)
    assert caught[0].filename == __file__  # the caller's line, not ours
    prepare("mnist", root)
    assert equal(load("mnist", root), plain) and mapped(folder)


def test_where_the_cache_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_mnist(tmp_path / "data")
    plain = load("mnist", root)
    assert prepare("mnist", root, out=tmp_path / "mine") == tmp_path / "mine"
    assert equal(load("mnist", root, cache=tmp_path / "mine"), plain) and mapped(
        tmp_path / "mine"
    )
    monkeypatch.setenv("SLIMBAYES_CACHE", str(tmp_path / "all"))
    assert prepare("mnist", root) == tmp_path / "all" / "mnist"
    assert (
        equal(load("mnist", root), plain)
        and mapped(tmp_path / "all")
        and not (root / ".slimbayes-cache").exists()
    )


def test_folders_of_images_are_refused(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / "imagenet" / split / "n01").mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "imagenet" / split / "n01" / "a.png")
    with pytest.raises(
        ValueError,
        match="imagenet is a folder of images of many sizes.*not kept as arrays",
    ):
        prepare("imagenet", tmp_path)


# --- interruptions ---


def spoil(root: Path) -> None:
    """The second split has a label out of range: the first one is read and written by then."""
    file = root / "mnist" / "t10k-labels-idx1-ubyte"
    file.write_bytes(file.read_bytes()[:-1] + b"\x63")


@pytest.mark.parametrize("cause", ["source", "disk", "interrupt"])
def test_failure_leaves_no_part_and_keeps_the_old(
    cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_mnist(tmp_path / "data", seed=1)
    folder = prepare("mnist", root)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    write_mnist(root)
    if cause == "source":
        spoil(root)
        with pytest.raises(
            ValueError, match="t10k-labels-idx1-ubyte, record 2: label 99"
        ):
            prepare("mnist", root)
    elif cause == "interrupt":
        with pytest.raises(KeyboardInterrupt):
            prepare("mnist", root, progress=interrupted)
    else:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left on device"):
            prepare("mnist", root)
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert (
        after.keys() == before.keys()
        and after["test.safetensors"] == before["test.safetensors"]
    )
    write_mnist(root)
    new = load_quietly(root)
    assert equal(new, load("mnist", root, cache=tmp_path / "none")), (
        "a mix of old and new is never used"
    )


def interrupted(done: int, total: int, split: str) -> None:
    if split == "test":
        raise KeyboardInterrupt


def full(handle: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.slow
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """The system itself refuses: no file may grow beyond 64 KiB."""
    root = write_mnist(tmp_path, rows=200)
    code = f"""
        import resource
        from slimbayes.data import prepare
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
        try:
            prepare("mnist", {str(root)!r})
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
    assert not list((root / ".slimbayes-cache" / "mnist").iterdir())


@pytest.mark.slow
def test_kill_before_a_file_is_in_place(tmp_path: Path) -> None:
    root = write_mnist(tmp_path)
    plain, folder = load("mnist", root), root / ".slimbayes-cache" / "mnist"
    code = f"""
        import os, signal
        from pathlib import Path
        from slimbayes.data import prepare
        Path.replace = lambda *a: os.kill(os.getpid(), signal.SIGKILL)
        prepare("mnist", {str(root)!r})
    """
    assert forks.exit_codes([forks.start(exec, textwrap.dedent(code), {})], 60) == [
        -signal.SIGKILL
    ]
    (left,) = folder.iterdir()
    assert left.name.startswith(".") and equal(load("mnist", root), plain)
    os.utime(left, (1, 1))  # long ago: the writer is gone
    prepare("mnist", root)
    assert not left.exists() and equal(load("mnist", root), plain) and mapped(folder)


def load_quietly(root: Path) -> Dataset:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load("mnist", root)


def test_a_source_that_changes_while_it_is_read(tmp_path: Path) -> None:
    root = write_mnist(tmp_path)

    def meddle(*step: object) -> None:
        write_mnist(root, seed=2)

    with pytest.raises(
        ValueError,
        match="mnist: its source .* has changed while it was being read; prepare it again",
    ):
        prepare("mnist", root, progress=meddle)
    assert not list((root / ".slimbayes-cache" / "mnist").iterdir())


def test_gzipped_sources(tmp_path: Path) -> None:
    root = write_mnist(tmp_path)
    plain = load("mnist", root)
    for file in list((root / "mnist").iterdir()):
        file.with_name(file.name + ".gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    prepare("mnist", root)
    assert equal(load("mnist", root), plain)


@pytest.mark.slow
def test_the_real_mnist(tmp_path: Path) -> None:
    if not (REAL / "mnist").is_dir():
        pytest.skip(
            f"NOT CHECKED on real data: {REAL / 'mnist'} does not exist; set SLIMBAYES_DATA to a folder that has it."
        )
    prepare("mnist", REAL, out=tmp_path / "cache")
    data, plain = (
        load("mnist", REAL, cache=tmp_path / "cache"),
        load("mnist", REAL, cache=tmp_path / "none"),
    )
    assert mapped(tmp_path / "cache") and equal(data, plain)
