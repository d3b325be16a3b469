"""The cache of arrays: equal to its source, never out of date, and whole or absent whatever interrupts its writing."""

import errno
import gzip
import json
import lzma
import os
import signal
import struct
import subprocess
import sys
import textwrap
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path

import forks
import numpy as np
import pytest
import torch
from PIL import Image

from slimbayes.data import cache as caches
from slimbayes.data import load, prepare
from slimbayes.data.dataset import Dataset

REAL = Path(os.environ.get("SLIMBAYES_DATA", Path(__file__).parents[2] / "shared" / "data"))


@pytest.fixture(autouse=True)
def _no_shared_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIMBAYES_CACHE", raising=False)


def write_mnist(root: Path, seed: int = 0, rows: int = 6) -> Path:
    """Two splits in plain idx files: `rows` training images and three for testing."""
    rng, folder = np.random.default_rng(seed), root / "mnist"
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", rows), ("t10k", 3)):
        for kind, shape, top in (("images-idx3", (count, 28, 28), 256), ("labels-idx1", (count,), 10)):
            values = rng.integers(0, top, shape, dtype=np.uint8)
            header = bytes((0, 0, 8, len(shape))) + struct.pack(f">{len(shape)}I", *shape)
            (folder / f"{split}-{kind}-ubyte").write_bytes(header + values.tobytes())
    return root


def write_fog(root: Path) -> Path:
    (root / "CIFAR-10-C").mkdir(parents=True)
    rng = np.random.default_rng(0)
    np.save(root / "CIFAR-10-C" / "fog.npy", rng.integers(0, 256, (40, 32, 32, 3), dtype=np.uint8))
    np.save(root / "CIFAR-10-C" / "labels.npy", np.tile(rng.integers(0, 10, 8), 5))
    return root


def write_yacht(root: Path) -> Path:
    root.mkdir(exist_ok=True)
    (root / "yacht.csv").write_text("a,b,y\n" + "".join(f"{i},{i * i},{i / 7}\n" for i in range(9)))
    return root


def write_imdb(root: Path) -> Path:
    (root / "imdb").mkdir(parents=True)
    (root / "imdb" / "reviews.txt.xz").write_bytes(lzma.compress("bad film\ngood film\nno ünïcode\nyes\n".encode()))
    np.save(root / "imdb" / "ratings.npy", np.array([1, 9, 2, 10], np.uint8))
    return root


def write_votes(root: Path) -> Path:
    """CIFAR-10H reads the images of another set, whose files count too."""
    for folder in ("cifar10", "cifar10h"):
        (root / folder).mkdir(parents=True)
    (root / "cifar10" / "test_batch.bin").write_bytes(bytes(2 * 3073))
    np.save(root / "cifar10h" / "cifar10h-counts.npy", np.eye(2, 10, dtype=np.int64) + 1)
    return root


SETS: dict[str, Callable[[Path], Path]] = {
    "mnist": write_mnist,
    "cifar10-c": write_fog,
    "uci/yacht": write_yacht,
    "imdb": write_imdb,
    "cifar10h": write_votes,
}


def equal(a: Dataset, b: Dataset) -> bool:
    words = (a.classes, a.vocabulary, list(a.splits)) == (b.classes, b.vocabulary, list(b.splits))
    pairs = [(getattr(a.splits[s], axis), getattr(b.splits[s], axis)) for s in a.splits for axis in "xy"]
    return words and all(torch.equal(one, other) and one.dtype == other.dtype for one, other in pairs)


def mapped(folder: Path) -> bool:
    """Whether this process has a file of that folder mapped into its memory now."""
    return str(folder) in Path("/proc/self/maps").read_text()


def entries(folder: Path) -> set[str]:
    return {path.name.split("-")[0] for path in folder.iterdir()} if folder.is_dir() else set()


@pytest.mark.parametrize("name", SETS)
def test_a_cache_equals_its_source_and_is_mapped(name: str, tmp_path: Path) -> None:
    root = SETS[name](tmp_path / "data")
    plain = load(name, root)
    steps: list[tuple[int, int, str]] = []
    folder = prepare(name, root, progress=lambda *step: steps.append(step))
    assert folder == root / ".slimbayes-cache" / name and entries(folder) == {"manifest.json", "arrays"}
    rows = sum(len(split) for split in plain.splits.values())
    assert [done for done, *_ in steps] == sorted(done for done, *_ in steps) and steps[-1][:2] == (rows, rows)
    assert {what.split(" ", 1)[1] for *_, what in steps} == set(plain.splits) and all(
        total == rows for _, total, _ in steps
    )
    data = load(name, root)
    assert equal(data, plain) and mapped(folder)
    one = list(plain.splits)[-1]
    assert equal(load(name, root, [one]), Dataset(name, {one: plain.splits[one]}, plain.classes, plain.vocabulary))
    manifest = json.loads((folder / "manifest.json").read_text())
    for split in plain.splits:
        for axis in "xy":  # any reader of .npy files can use them
            array = np.load(folder / manifest["folder"] / f"{split.replace('/', '-')}.{axis}.npy", allow_pickle=False)
            assert np.array_equal(array, getattr(plain.splits[split], axis).numpy()) and array.flags.c_contiguous


def test_writing_to_a_mapped_tensor_changes_memory_only(tmp_path: Path) -> None:
    root = write_mnist(tmp_path)
    plain, _ = load("mnist", root), prepare("mnist", root)
    load("mnist", root).train.x.zero_()
    assert equal(load("mnist", root), plain)


def test_the_cache_is_what_is_read(tmp_path: Path) -> None:
    """Pixels that change behind the back of size and time are not seen: this is the price of not reading the source."""
    root = write_mnist(tmp_path)
    plain, _, file = load("mnist", root), prepare("mnist", root), root / "mnist" / "train-images-idx3-ubyte"
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
        os.utime(file, ns=(1, 1))  # as after copying: the content decides, and is the same
    assert equal(load("mnist", root), first) and mapped(folder)
    write_mnist(root, seed=1)
    with pytest.warns(
        UserWarning, match=r"cache .*mnist is not used: its source mnist/t.*-ubyte has changed.*prepare it again"
    ):
        second = load("mnist", root)
    assert not equal(first, second)
    prepare("mnist", root)
    assert equal(load("mnist", root), second) and len(list(folder.iterdir())) == 2  # the old arrays are gone
    (root / "mnist" / "t10k-labels-idx1-ubyte").rename(root / "mnist" / "t10k-labels.idx1-ubyte")
    with pytest.warns(UserWarning, match="other files than it was made from, such as mnist/t10k-labels"):
        assert equal(load("mnist", root), second)


def test_the_files_of_another_set_count(tmp_path: Path) -> None:
    root = write_votes(tmp_path)
    prepare("cifar10h", root)
    (root / "cifar10" / "test_batch.bin").write_bytes(bytes(3073) + b"\x01" * 3073)
    with pytest.warns(UserWarning, match="its source cifar10/test_batch.bin has changed"):
        assert int(load("cifar10h", root).test.x[1, 0, 0, 0]) == 1


def test_an_up_to_date_cache_is_left_alone(tmp_path: Path) -> None:
    root = write_mnist(tmp_path)
    manifest = prepare("mnist", root) / "manifest.json"
    before = manifest.stat().st_mtime_ns
    prepare("mnist", root, progress=lambda *step: pytest.fail("nothing needed doing"))
    assert manifest.stat().st_mtime_ns == before


def damage(folder: Path, kind: str) -> None:
    manifest = folder / "manifest.json"
    content = json.loads(manifest.read_text())
    array = folder / content["folder"] / "train.x.npy"
    whole = array.read_bytes()
    if kind == "short":
        array.write_bytes(whole[:-1])
    elif kind == "flipped":
        array.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    elif kind == "gone":
        array.unlink()
    elif kind == "pickled":
        np.save(array, np.array([{}], dtype=object), allow_pickle=True)
        content["splits"]["train"]["x"] |= {"size": array.stat().st_size, "mtime_ns": array.stat().st_mtime_ns}
    elif kind == "elsewhere":
        content["folder"] = "../../../mnist"
    elif kind == "format":
        content["format"] = 99
    elif kind == "shape":
        content["splits"]["train"]["x"]["shape"] = [6, 1, 28, 27]
    elif kind == "no split":
        del content["splits"]["train"]
    manifest.write_text({"no json": "{", "nested": "[" * 100_000, "list": "[]"}.get(kind) or json.dumps(content))


@pytest.mark.parametrize(
    "kind",
    ["short", "flipped", "gone", "pickled", "elsewhere", "format", "shape", "no split", "no json", "nested", "list"],
)
def test_a_damaged_cache_is_not_used_and_can_be_replaced(kind: str, tmp_path: Path) -> None:
    root = write_mnist(tmp_path)
    plain, folder = load("mnist", root), prepare("mnist", root)
    damage(folder, kind)
    with pytest.warns(UserWarning, match="damaged|in format 99") as caught:
        assert equal(load("mnist", root), plain)
    assert caught[0].filename == __file__  # the caller's line, not ours
    prepare("mnist", root)
    assert equal(load("mnist", root), plain) and mapped(folder) and len(list(folder.iterdir())) == 2


def test_where_the_cache_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_mnist(tmp_path / "data")
    plain = load("mnist", root)
    assert prepare("mnist", root, out=tmp_path / "mine") == tmp_path / "mine"
    assert equal(load("mnist", root, cache=tmp_path / "mine"), plain) and mapped(tmp_path / "mine")
    monkeypatch.setenv("SLIMBAYES_CACHE", str(tmp_path / "all"))
    assert prepare("mnist", root) == tmp_path / "all" / "mnist"
    assert equal(load("mnist", root), plain) and mapped(tmp_path / "all") and not (root / ".slimbayes-cache").exists()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("mine")
    with pytest.raises(FileExistsError, match="holds 'thesis.tex', which is no part of a cache"):
        prepare("mnist", root, out=tmp_path / "home")
    assert os.listdir(tmp_path / "home") == ["thesis.tex"]


def test_folders_of_images_are_refused(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / "imagenet" / split / "n01").mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "imagenet" / split / "n01" / "a.png")
    with pytest.raises(ValueError, match="imagenet is a folder of images of many sizes.*not kept as arrays"):
        prepare("imagenet", tmp_path)


# --- interruptions ---


def spoil(root: Path) -> None:
    """The second split has a label out of range: the first one is read and written by then."""
    file = root / "mnist" / "t10k-labels-idx1-ubyte"
    file.write_bytes(file.read_bytes()[:-1] + b"\x63")


class Full:
    """A disk that is full after so many calls of fsync."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, handle: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupted(*step: object) -> None:
    if step[2] == "writing test":
        raise KeyboardInterrupt


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("cause", ["source", "disk 0", "disk 3", "disk 4", "interrupt"])
def test_failure_leaves_no_part_and_keeps_the_old(
    cause: str, earlier: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_mnist(tmp_path / "data", seed=1)
    old = load("mnist", root)
    if earlier:
        folder = prepare("mnist", root)
        before = {path: path.read_bytes() for path in sorted(folder.rglob("*.*")) if path.is_file()}
    write_mnist(root)
    if cause == "source":
        spoil(root)
        with pytest.raises(ValueError, match="t10k-labels-idx1-ubyte, record 2: label 99"):
            prepare("mnist", root)
    elif cause == "interrupt":
        with pytest.raises(KeyboardInterrupt):
            prepare("mnist", root, progress=interrupted)
    else:
        monkeypatch.setattr(os, "fsync", Full(int(cause.split()[1])))
        with pytest.raises(OSError, match="No space left on device") as error:
            prepare("mnist", root)
        assert error.value.errno == errno.ENOSPC
    if earlier:
        assert {path: path.read_bytes() for path in sorted(folder.rglob("*.*")) if path.is_file()} == before
        write_mnist(root, seed=1)
        assert equal(load("mnist", root), old) and mapped(folder)
    else:
        assert not (root / ".slimbayes-cache").exists()


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
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert "File too large" in out.stdout and "train.x.npy needs 156,800 bytes; make room" in out.stdout, out
    assert not (root / ".slimbayes-cache").exists()


KILLS = {
    "reading": "progress = lambda *s: s[2] == 'reading test' and die()",
    "writing": "progress = lambda *s: s[2] == 'writing train' and die()",
    "before the manifest is in place": "Path.replace = die",
    "before the old is swept": "sweep = caches._sweep; calls = []; "
    "caches._sweep = lambda f: die() if calls else (calls.append(1), sweep(f))",
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", KILLS)
@pytest.mark.parametrize("earlier", [False, True])
def test_kill_at_any_moment(moment: str, earlier: bool, tmp_path: Path) -> None:
    root = write_mnist(tmp_path, seed=1)
    old = load("mnist", root)
    folder = root / ".slimbayes-cache" / "mnist"
    if earlier:
        prepare("mnist", root)
    write_mnist(root)
    new = load_quietly(root)
    code = f"""
        import os, signal
        from pathlib import Path
        from slimbayes.data import cache as caches, prepare
        die = lambda *a: os.kill(os.getpid(), signal.SIGKILL)
        progress = None
        {KILLS[moment]}
        prepare("mnist", {str(root)!r}, progress=progress)
    """
    assert forks.exit_codes([forks.start(exec, textwrap.dedent(code), {})], 60) == [-signal.SIGKILL]
    switched = moment == "before the old is swept"
    assert (folder / "manifest.json").exists() == (earlier or switched) and len(list(folder.iterdir())) > (
        2 if earlier else 0
    )
    assert equal(load_quietly(root), new)  # whatever is there is not mistaken for a cache of the new files
    if not switched and earlier:
        write_mnist(root, seed=1)
        assert equal(load("mnist", root), old) and mapped(folder)
        write_mnist(root)
    (folder / "manifest.json").unlink(missing_ok=True)
    prepare("mnist", root)
    assert equal(load("mnist", root), new) and len(list(folder.iterdir())) == 2  # leavings are swept


def load_quietly(root: Path) -> Dataset:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load("mnist", root)


def test_two_writers_at_once(tmp_path: Path) -> None:
    root, seen = write_mnist(tmp_path), []

    def second(*step: object) -> None:
        with pytest.raises(BlockingIOError, match="being written by another process: wait"):
            prepare("mnist", root)
        seen.append(step)

    prepare("mnist", root, progress=second)
    assert seen and equal(load("mnist", root), load("mnist", root, cache=tmp_path / "none"))


def test_a_source_that_changes_while_it_is_read(tmp_path: Path) -> None:
    root = write_mnist(tmp_path)

    def meddle(*step: object) -> None:
        if step[2] == "writing train":
            write_mnist(root, seed=2)

    with pytest.raises(ValueError, match="mnist: its source .* has changed while it was being read; prepare it again"):
        prepare("mnist", root, progress=meddle)
    assert not (root / ".slimbayes-cache").exists()


def test_memory_stays_bounded_where_the_source_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_fog(tmp_path)
    np.save(root / "CIFAR-10-C" / "fog.npy", np.ones((5000, 32, 32, 3), np.uint8))  # 15 MB
    np.save(root / "CIFAR-10-C" / "labels.npy", np.zeros(5000, np.int64))
    monkeypatch.setattr(caches, "CHUNK", 1 << 18)
    tracemalloc.start()
    prepare("cifar10-c", root)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20, peak


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
    data, plain = load("mnist", REAL, cache=tmp_path / "cache"), load("mnist", REAL, cache=tmp_path / "none")
    assert mapped(tmp_path / "cache") and equal(data, plain)
