"""Files that want to hang, to fill the memory, or to be another: each is refused in words, within 2 s and 256 MiB.

Each is tried in a fork of this process, which has imported torch and the lab; its peak memory is compared with what it
had at its start.
"""

import ast
import hashlib
import io
import json
import math
import multiprocessing
import os
import resource
import shutil
import struct
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pytest
import torch
import yaml
from lab_configs import call
from PIL import Image
from pyarrow import parquet
from safetensors.torch import load as load_tensors
from safetensors.torch import save as dump_tensors
from slimbayes_lab.configs.init import config_text
from slimbayes_lab.data import archives
from slimbayes_lab.data.folders import decode
from slimbayes_lab.data.table_files import look
from slimbayes_lab.finished.predict_file import row_blocks
from slimbayes_lab.report.record import RecordError
from slimbayes_lab.runs.checkpoints import latest_checkpoint, save_checkpoint
from slimbayes_lab.runs.fit import _cost
from slimbayes_lab.runs.folder import append_steps, forget_steps, read_curve, read_rows
from torch import nn

import slimbayes as sb
from slimbayes.files import MARKER
from slimbayes.untrusted import append_file, open_file, parse_json

SECONDS = 2.0
MEMORY = 256 << 20
TOLD = (ValueError, OSError, RuntimeError, RecordError)
LONG = 1500  # characters of a refusal


@dataclass
class Measured:
    """What became of a call: its message where it refused, and what that took."""

    refused: bool
    message: str
    seconds: float
    memory: int


def measure(*runs: Callable[[], Any]) -> list[Measured]:
    """Call functions one after another in a fork of this process."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    child = fork.Process(target=_measured, args=(theirs, runs))
    child.start()
    theirs.close()
    found: list[Measured] = []
    try:
        for _ in runs:
            if not ours.poll(20):
                return [*found, Measured(False, "it hangs", math.inf, 0)]
            found.append(ours.recv())
        return found
    except EOFError:
        return [*found, Measured(False, "it was killed", math.inf, 0)]
    finally:
        child.kill()
        child.join()
        ours.close()


def _measured(pipe: Connection, runs: tuple[Callable[[], Any], ...]) -> None:
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    warnings.simplefilter("ignore")  # Pillow's of large pictures
    memory = _peak()
    # Far above what is allowed: the tests' machine lives on.
    size = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (size + (8 << 30), resource.RLIM_INFINITY))
    for run in runs:
        start = time.process_time()
        try:
            done = run()
            refused = getattr(done, "exit_code", 0) != 0
            message = " ".join(str(getattr(done, "output", "")).split())
        except TOLD as error:
            refused, message = True, str(error)
        except BaseException as error:
            refused, message = False, f"{type(error).__name__}: {error}"
        seconds = time.process_time() - start
        pipe.send(Measured(refused, message[: LONG + 1], seconds, _peak() - memory))


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def check_refused(run: Callable[[], Any], *told: str) -> None:
    (found,) = measure(run)
    check(found, *told)


def check(found: Measured, *told: str) -> None:
    assert found.refused, found
    assert all(word in found.message for word in told), found.message
    assert len(found.message) <= LONG, found.message
    assert found.seconds < SECONDS, found
    assert found.memory < MEMORY, found


def check_each(
    read: Callable[[Path], Any], folder: Path, name: str, told: str = ""
) -> None:
    """Everything that is no plain file is refused under a file's name, whatever reads it."""
    places = [folder / str(number) / name for number in range(len(KINDS))]
    for kind, place in zip(KINDS, places):
        place.parent.mkdir()
        put(kind, place)
    found = measure(*(partial(read, place) for place in places))
    for kind, one in zip(KINDS, found):
        check(one, told or WORDS[kind])
    assert len(found) == len(KINDS)


# --- files that are none ---


def put(kind: str, path: Path) -> None:
    """Something that is no plain file, under a file's name."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "ring of links":
        path.symlink_to(path.with_name(path.name + ".2"))
        path.with_name(path.name + ".2").symlink_to(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "holes":
        with open(path, "wb") as file:
            file.truncate(1 << 40)


KINDS = ("pipe", "device", "ring of links", "folder", "holes")
WORDS = {
    "pipe": "it is a pipe, not a regular file",
    "device": "it is a device, not a regular file",
    "ring of links": "symbolic links",
    "folder": "it is a folder, not a regular file",
    "holes": "bytes",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on a table, its config and rows to predict."""
    root = tmp_path_factory.mktemp("hostile")
    x = np.random.default_rng(0).normal(size=(60, 3)).round(3)
    lines = [f"{a},{b},{c},{'yes' if a + b > 0 else 'no'}" for a, b, c in x.tolist()]
    (root / "rows.csv").write_text("\n".join(["a,b,c,y", *lines, ""]))
    tree = {
        "name": "small",
        "data": {"csv": str(root / "rows.csv"), "target": "y"},
        "model": {"kind": "mlp", "hidden": [8]},
        "method": {"kind": "Rank1", "members": 2},
        "train": {"epochs": 1, "batch": 16, "optimizer": {"kind": "AdamW", "lr": 0.01}},
        "evaluate": {"draws": [1], "examples": 2},
    }
    (root / "c.yaml").write_text(yaml.safe_dump(tree))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slimbayes_lab.runs.fit._diagnostics", lambda *args: None)
        done = call(
            "fit", root / "c.yaml", "--out", root / "run", "--accelerator", "cpu"
        )
    assert done.exit_code == 0, done.output
    (root / "new.csv").write_text("a,b,c\n1,2,3\n")
    # What commands import is no part of what they take.
    for words in (
        ("report", root / "run", "-o", root / "p.html", "--force"),
        predict(root),
    ):
        assert call(*words).exit_code == 0
    return root


def predict(root: Path, run: Path | None = None) -> tuple[Any, ...]:
    words = ("-o", root / "p.csv", "--force", "--accelerator", "cpu")
    return ("predict", run or root / "run", root / "new.csv", *words)


def copied(finished: Path, folder: Path) -> Path:
    return shutil.copytree(finished / "run", folder / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("inputs.json", "predict"),
        ("SHA256SUMS", "predict"),
        ("config.yaml", "predict"),
        ("model/manifest.json", "predict"),
        ("model/config.json", "predict"),
        ("model/posterior.safetensors", "predict"),
        ("model/base.safetensors", "predict"),
        ("metrics.csv", "evaluate"),
        ("cost.json", "evaluate"),
        ("data.json", "evaluate"),
        ("record.json", "report"),
    ],
)
def test_a_file_of_a_run_that_is_no_file(
    name: str, command: str, finished: Path, tmp_path: Path
) -> None:
    runs = []
    for number, kind in enumerate(KINDS):
        runs.append(shutil.copytree(finished / "run", tmp_path / str(number)))
        put(kind, runs[-1] / name)
    commands: dict[str, Callable[[Path], tuple[Any, ...]]] = {
        "predict": lambda run: predict(finished, run),
        "evaluate": lambda run: ("evaluate", run, "--accelerator", "cpu"),
        "report": lambda run: ("report", run, "-o", tmp_path / "p.html"),
    }
    found = measure(*(partial(call, *commands[command](run)) for run in runs))
    for one in found:
        check(one, Path(name).name)
    assert len(found) == len(KINDS)


@pytest.mark.parametrize("kind", ["pipe", "device", "ring of links", "folder"])
def test_the_lock_of_a_run_that_is_no_file(
    kind: str, finished: Path, tmp_path: Path
) -> None:
    put(kind, tmp_path / MARKER)
    config = finished / "run" / "config.yaml"
    done = call("fit", config, "--out", tmp_path)
    assert done.exit_code == 1
    assert "is in the way: " in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("metrics.csv", lambda file: read_curve(file.parent)),
        ("steps.csv", lambda file: list(read_rows(file, "loss"))),
        ("steps.csv", lambda file: forget_steps(file, 1)),
        ("cost.json", lambda file: _cost(file, 0.0)),
        ("table.csv", look),
        ("table.parquet", look),
        ("a.npz", archives.read_npz),
        ("a.npy", lambda file: archives.map_npy(file, (None,), "f")),
        ("a.gz", lambda file: archives.read_idx(file, 1)),
        ("a.xz", archives.read_xz),
        ("a.png", decode),
    ],
)
def test_a_file_that_is_none(
    name: str, read: Callable[[Path], Any], tmp_path: Path
) -> None:
    check_each(read, tmp_path, name)


@pytest.mark.parametrize("name", ["rows.csv", "rows.npz", "rows.npy"])
def test_rows_to_predict_that_are_no_file(name: str, tmp_path: Path) -> None:
    """A folder of that name is one of pictures."""
    check_each(lambda file: list(row_blocks(file)), tmp_path, name, told=name)


@pytest.mark.parametrize("kind", ["pipe", "device", "ring of links", "folder"])
def test_nothing_is_added_to_what_is_no_file(kind: str, tmp_path: Path) -> None:
    put(kind, tmp_path / "steps.csv")
    with pytest.raises(OSError, match="it is a"):
        append_steps(tmp_path / "steps.csv", 0, torch.zeros(1, 3))


def test_nothing_is_added_to_what_a_link_leads_to(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "log.txt").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="it is a link"):
        append_file(tmp_path / "log.txt")
    assert (tmp_path / "mine").read_text() == "mine"


def test_links_are_followed_and_half_empty_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with open_file(tmp_path / "link") as file:
        assert file.read() == b"mine"
    with open(tmp_path / "half", "wb") as wide:  # as a map that is filled later
        wide.seek(100 << 20)
        wide.write(bytes(2 << 20))
    with open_file(tmp_path / "half") as file:
        assert os.fstat(file.fileno()).st_size == 102 << 20 and file.tell() == 0


@pytest.mark.parametrize("name", ["a\0b", "\udcff\ud800"])
def test_names_that_are_no_paths(name: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="its name is no path"):
        open_file(tmp_path / name)


# --- bombs ---


def header(shape: str, kind: str = "<f4") -> bytes:
    """The header of an .npy file that says so."""
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}"
    text += " " * (63 - (len(text) + 10) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


def write_npz(file: Path, **entries: bytes) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(f"{name}.npy", data)


def npz_bomb(file: Path) -> None:
    """Some 300 kB that unpack to 320 MiB."""
    block = bytes(1 << 24)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, shape in (("x", "(16777216, 4)"), ("y", "(16777216,)")):
            with archive.open(f"{name}.npy", "w") as entry:
                entry.write(header(shape))
                for _ in range(16 if name == "x" else 4):
                    entry.write(block)


def write_parquet(file: Path, blocks: int, **columns: Any) -> None:
    table = arrow.table(columns)
    with parquet.ParquetWriter(file, table.schema, compression="zstd") as writer:
        for _ in range(blocks):
            writer.write_table(table)


def picture(side: int) -> bytes:
    """A black and white PNG, some 20 kB for 13,000 pixels a side."""
    packer = zlib.compressobj(9)
    row = bytes(1 + (side + 7) // 8)
    body = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    facts = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    parts = chunk(b"IHDR", facts) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


@pytest.fixture(scope="module")
def bombs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bombs")
    npz_bomb(root / "bomb.npz")
    write_npz(root / "lie.npz", x=header("(1099511627776, 4)") + bytes(16))
    write_npz(root / "negative.npz", x=header("(-1, -4)") + bytes(16))
    write_npz(root / "brackets.npz", x=header("(" * 500))
    (root / "over.npy").write_bytes(header(f"({2**62}, {2**62})"))
    (root / "row.npy").write_bytes(header("(1, 1099511627776)") + bytes(64))
    (root / "token.npy").write_bytes(header("((( ", "<f4"))
    million = 1_000_000
    write_parquet(
        root / "rows.parquet", 20, a=np.zeros(million), b=np.zeros(million, bool)
    )
    write_parquet(root / "texts.parquet", 1, a=np.zeros(60), b=["y" * (5 << 20)] * 60)
    write_parquet(
        root / "distinct.parquet", 1, a=[f"{i}{'y' * (40 << 20)}" for i in range(2)]
    )
    for width in (300_000, 60_000):
        with open(root / f"wide{width}.csv", "w") as file:
            file.write(",".join(f"c{i}" for i in range(width)) + "\n")
            file.write((",".join("1" * width) + "\n") * 3)
    (root / "cell.csv").write_text("a,label\n" + "1" * (50 << 20) + ",yes\n")
    (root / "quote.csv").write_text('a,label\n"' + "x\n" * 1_000_000)
    (root / "bomb.png").write_bytes(picture(13_000))
    return root


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reader", "told"),
    [
        ("bomb.npz", lambda f: archives.read_npz(f, limit=math.inf), "without compr"),
        ("bomb.npz", lambda f: config_text(f, f), "without compr"),
        ("bomb.npz", lambda f: next(row_blocks(f)), "without compr"),
        ("lie.npz", archives.read_npz, "16 bytes of data where its shape"),
        ("lie.npz", lambda f: next(row_blocks(f)), "it ends before its last row"),
        ("negative.npz", archives.read_npz, "shape"),
        ("brackets.npz", archives.read_npz, "header"),
        ("over.npy", lambda f: next(row_blocks(f)), "it ends before its last row"),
        ("row.npy", lambda f: next(row_blocks(f)), "it ends before its last row"),
        ("token.npy", lambda f: next(row_blocks(f)), "header"),
        ("rows.parquet", look, "which unpack to 320,000,000"),
        ("texts.parquet", look, "a text of 5,242,880 characters"),
        ("distinct.parquet", look, "which unpack to"),
        ("wide300000.csv", look, "more than 1,048,576 characters"),
        ("wide60000.csv", look, "60,000 columns"),
        ("cell.csv", look, "more than 1,048,576 characters"),
        ("quote.csv", look, "field larger than field limit"),
        ("bomb.png", decode, "13,000 x 13,000 pixels"),
    ],
)
def test_bombs(
    name: str, reader: Callable[[Path], Any], told: str, bombs: Path
) -> None:
    check_refused(lambda: reader(bombs / name), name, told)


def test_what_is_large_and_honest_is_read(tmp_path: Path) -> None:
    """A table of 5,000 columns, a picture of 12 million pixels, zeros of 40 MB, a column of few texts."""
    wide = ",".join(f"c{i}" for i in range(5_000))
    (tmp_path / "a.csv").write_text(f"{wide}\n{','.join('1' * 5_000)}\n")
    Image.new("RGB", (4_000, 3_000)).save(tmp_path / "a.jpg", quality=30)
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros(10_000_000, np.float32))
    write_parquet(
        tmp_path / "a.parquet", 1, a=["no", "yes"] * 5_000, b=[1.0, 2] * 5_000
    )
    (found,) = measure(lambda: look(tmp_path / "a.csv"))
    assert not found.refused and found.memory < MEMORY
    assert decode(tmp_path / "a.jpg").shape == (3, 3_000, 4_000)
    assert archives.read_npz(tmp_path / "a.npz")["x"].shape == (10_000_000,)
    assert look(tmp_path / "a.parquet").columns["a"].values == {"no", "yes"}


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        "[" + "[]," * 4_000_000 + "[]]",
        "{" + ",".join(f'"{i}":{{}}' for i in range(600_000)) + "}",
        '{"row":' + "1" * 1_000_000 + "}",
    ],
    ids=["lists", "mappings", "many lists", "many mappings", "digits"],
)
def test_json_that_is_too_much(text: str) -> None:
    check_refused(lambda: parse_json(text.encode()))


# --- what a run says of itself ---


def reseal(run: Path) -> None:
    """The sums of a run, as whoever changes its files can write them."""
    model = run / "model"
    names = [file for file in model.iterdir() if file.name != "manifest.json"]
    sums = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in names}
    (model / "manifest.json").write_text(json.dumps({"format": 1, "sha256": sums}))
    (run / "SHA256SUMS").unlink()


FACTS: dict[str, dict[str, Any]] = {
    "row of a billion billions": {"row": [10**9, 10**9, 10**9]},
    "row beyond all numbers": {"row": [2**70]},
    "negative row": {"row": [-1]},
    "row that is text": {"row": "4"},
    "dtype": {"dtype": "__class__"},
    "classes that are a number": {"classes": 5},
    "likelihood": {"likelihood": "__import__"},
    "likelihood that is a list": {"likelihood": ["gaussian"]},
    "no fills": {"fills": None},
    "a billion classes": {"fills": {"inputs": 10**9, "classes": 10**9}},
    "classes beyond all numbers": {"fills": {"inputs": 2**70, "classes": 2**70}},
    "negative inputs": {"fills": {"inputs": -3, "classes": 2}},
    "inputs that are text": {"fills": {"inputs": "a", "classes": 2}},
    "ragged mean": {"mean": [[1.0], [1.0, 2.0]]},
    "mean that is text": {"mean": "a"},
    "name": {"name": 5},
    "vocabulary": {"vocabulary": "many"},
    "reader that is a list": {"own": [1]},
    "reader without anything": {"own": {}},
}


@pytest.mark.slow
def test_inputs_of_a_run_that_say_strange_things(
    finished: Path, tmp_path: Path
) -> None:
    runs = []
    for number, strange in enumerate(FACTS.values()):
        runs.append(shutil.copytree(finished / "run", tmp_path / str(number)))
        facts = json.loads((runs[-1] / "inputs.json").read_text())
        (runs[-1] / "inputs.json").write_text(json.dumps(facts | strange))
        reseal(runs[-1])
    found = measure(*(partial(call, *predict(finished, run)) for run in runs))
    for name, one in zip(FACTS, found):
        assert one.refused, (name, one)
        check(one)
    assert len(found) == len(FACTS)


NETWORKS = {
    "two layers of 100,000": {"kind": "mlp", "hidden": [100_000, 100_000]},
    "two layers of 30,000": {"kind": "mlp", "hidden": [30_000, 30_000]},
    "a thousand layers": {"kind": "mlp", "hidden": [1_000_000] * 1000},
    "a wide network of a million": {"kind": "small_cnn", "width": 1_000_000},
    "a very deep network": {"kind": "wrn", "depth": 1204, "width": 10_000},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_a_run_whose_network_would_fill_the_memory(
    name: str, finished: Path, tmp_path: Path
) -> None:
    run = copied(finished, tmp_path)
    facts = json.loads((run / "inputs.json").read_text())
    facts["fills"] |= {"channels": 3, "inputs": 3}
    (run / "inputs.json").write_text(json.dumps(facts))
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree["model"] = NETWORKS[name]
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    reseal(run)
    check_refused(
        lambda: call(*predict(finished, run)), "numbers, but the files of its"
    )


def test_a_config_whose_network_would_fill_the_memory(
    finished: Path, tmp_path: Path
) -> None:
    tree = yaml.safe_load((finished / "c.yaml").read_text())
    tree["model"]["hidden"] = [1_000_000, 1_000_000]
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    words = ("fit", tmp_path / "c.yaml", "--out", tmp_path / "run")
    check_refused(
        lambda: call(*words, "--accelerator", "cpu"), "give `model` smaller sizes"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("cost.json", '{"train_seconds": "a"}', "train_seconds must be int or float"),
        ("cost.json", '{"train_seconds": 1}', "epoch_seconds is missing"),
        ("cost.json", "[]", "the whole must be dict"),
        ("metrics.csv", "epoch,loss\n1,2,3\n", "line 2 does not fit its columns"),
        ("metrics.csv", "epoch,loss\n1,a\n", "could not convert string to float"),
        ("metrics.csv", "loss\n1\n", "line 2 does not fit its columns"),
        ("metrics.csv", "epoch," * 2000 + "\n1\n", "more than 1,000 columns"),
        ("metrics.csv", "epoch,b\n" + "1,2\n" * 400_000, "more than 500,000 values"),
        ("steps.csv", "step,loss\n" + "1" * 10_000_000 + ",2\n", "damaged"),
    ],
    ids=[
        "a text",
        "no epochs",
        "a list",
        "a cell too many",
        "a word",
        "no epoch",
        "columns",
        "rows",
        "a long line",
    ],
)
def test_measurements_of_a_run_that_are_none(
    name: str, text: str, told: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    readers: dict[str, Callable[[], Any]] = {
        "cost.json": lambda: _cost(tmp_path / name, 0.0),
        "metrics.csv": lambda: read_curve(tmp_path),
        "steps.csv": lambda: list(read_rows(tmp_path / name, "loss")),
    }
    check_refused(readers[name], name, told)


def test_steps_that_say_strange_things_are_forgotten(tmp_path: Path) -> None:
    file = tmp_path / "steps.csv"
    file.write_text("step,loss\n0,1\n" + "9" * 60_000 + ",1\nx,1\n1,1\n2,1")
    forget_steps(file, 2)
    assert file.read_text() == "step,loss,nll,kl\n0,1\n1,1\n"


# --- checkpoints ---


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "posterior"
    return sb.save(sb.bayesianize(plain(), sb.Rank1(members=2)), folder, base=True)


def with_tensors(saved: Path, folder: Path, file: str, data: bytes) -> Path:
    """A copy of a checkpoint with another file of tensors, whose manifest agrees."""
    copy = shutil.copytree(saved, folder / "checkpoint")
    (copy / file).write_bytes(data)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["sha256"][file] = hashlib.sha256(data).hexdigest()
    (copy / "manifest.json").write_text(json.dumps(manifest))
    return copy


FILES = ("posterior.safetensors", "base.safetensors")


@pytest.mark.parametrize(
    "kind", [torch.int32, torch.uint8, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("file", FILES)
def test_tensors_of_another_kind(
    file: str, kind: torch.dtype, saved: Path, tmp_path: Path
) -> None:
    tensors = load_tensors((saved / file).read_bytes())
    name = min(tensors)
    tensors[name] = torch.ones_like(tensors[name], dtype=kind)
    other = with_tensors(saved, tmp_path, file, dump_tensors(tensors))
    model = plain()
    with pytest.raises(sb.CheckpointError, match=f"{name} is {kind} but .* is wanted"):
        sb.load(model, other)
    assert not hasattr(model[0], "posterior")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    "change", [lambda t: t[None], lambda t: t.flatten()[:1], lambda t: t.sum()]
)
def test_tensors_of_another_rank(
    file: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    saved: Path,
    tmp_path: Path,
) -> None:
    tensors = load_tensors((saved / file).read_bytes())
    name = max(tensors, key=lambda name: tensors[name].numel())
    tensors[name] = change(tensors[name]).clone()
    other = with_tensors(saved, tmp_path, file, dump_tensors(tensors))
    with pytest.raises(sb.CheckpointError, match=r"is wanted|holds \d+"):
        sb.load(plain(), other)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_hundreds_of_thousands_of_tensors(
    file: str, saved: Path, tmp_path: Path
) -> None:
    entry = b'"t%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    for count, told in ((200_000, "its header has"), (30_000, file)):
        text = b"{" + b",".join(entry % i for i in range(count)) + b"}"
        data = len(text).to_bytes(8, "little") + text
        other = with_tensors(saved, tmp_path / str(count), file, data)
        check_refused(lambda other=other: sb.load(plain(), other), told)


@pytest.mark.parametrize("file", FILES)
def test_a_checkpoint_of_things_that_are_no_files(
    file: str, saved: Path, tmp_path: Path
) -> None:
    def load(place: Path) -> None:
        for other in saved.iterdir():
            if other.name != file:
                shutil.copy(other, place.parent)
        sb.load(plain(), place.parent)

    check_each(load, tmp_path, file)


def test_a_checkpoint_of_training_with_tensors_of_another_kind_is_skipped(
    tmp_path: Path,
) -> None:
    net = plain()
    tensors = {f"network/{n}": t for n, t in net.state_dict().items()}
    facts = {"curve": [], "hash": "x"}
    save_checkpoint(tmp_path, 1, tensors, facts)
    other = tensors | {"network/0.bias": torch.zeros(3, dtype=torch.int32)}
    save_checkpoint(tmp_path, 2, other, facts)
    with pytest.warns(UserWarning, match=r"another network: 0.bias differ"):
        found = latest_checkpoint(tmp_path, {}, net)
    assert found is not None and found[1]["step"] == 1


# --- the rule ---

# Calls that open a file by its name, or read one. All others go through slimbayes.untrusted.
OPENERS = {
    "open", "read_text", "read_bytes", "load_file", "safe_open", "open_memmap", "fromfile", "loadtxt", "genfromtxt",
    "read_csv", "read_parquet",
}  # fmt: skip
ALLOWED = {
    # An open file, or bytes, and no name.
    "archive.open(f'{name}.npy')",
    "archive.open(entry)",
    "gzip.open(file)",
    "gzip.open(stored)",
    "image.open(file)",
    "image.open(file, formats=_FORMATS)",
    "image.open(io.BytesIO(content), formats=('WEBP', 'PNG'))",
    # Drafts, which this process has just made under a name of its own.
    "archive.open(f'{name}.npy', 'w', force_zip64=True)",
    "open(draft, 'w', encoding='utf8', newline='')",
    "open(draft, 'wb')",
    "os.open(path, os.O_RDONLY)",  # for fsync
    # Safetensors are mapped by name; check_regular comes first.
    "safe_open(file, 'pt')",
    # A marker that the checked reader has just read, under the lock of its folder; and folders, which are locked.
    "open(file, 'a+b')",
    "os.open(folder, os.O_RDONLY | os.O_DIRECTORY)",
    # A file of the package, one of the system, and a key, which may come through a pipe.
    "files(__package__).joinpath('templates', name).read_text(encoding='utf-8')",
    "Path('/proc/cpuinfo').read_text()",
    "key_file.read_text()",
}
ELSEWHERE = ("untrusted.py",)


def test_every_file_is_opened_by_the_checked_reader() -> None:
    root, strange = Path(sb.__file__).parent, []
    for file in sorted(root.rglob("*.py")):
        if file.name in ELSEWHERE:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            named = isinstance(node.func, ast.Name)
            name = node.func.id if named else getattr(node.func, "attr", "")
            if name in OPENERS and ast.unparse(node) not in ALLOWED:
                strange.append(f"{file.relative_to(root)}: {ast.unparse(node)}")
    assert not strange, "open them with slimbayes.untrusted: " + "; ".join(strange)


def test_an_array_of_any_layout_is_read_as_numpy_does(tmp_path: Path) -> None:
    arrays = {
        "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        "texts": np.array([["a", "bc"], ["", "d"]]),
        "empty": np.zeros((0, 3)),
        "scalar": np.array(7),
        "big_endian": np.arange(5, dtype=">i4"),
    }
    np.savez_compressed(tmp_path / "a.npz", **arrays)
    found = archives.read_npz(tmp_path / "a.npz")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert np.array_equal(found[name], array) and found[name].dtype == array.dtype
    stream = io.BytesIO()
    np.save(stream, arrays["fortran"])
    (tmp_path / "a.npy").write_bytes(stream.getvalue())
    mapped = archives.map_npy(tmp_path / "a.npy", (None, None), "f")
    assert np.array_equal(mapped, arrays["fortran"])
    mapped[0, 0] = 5  # in memory only
    assert (tmp_path / "a.npy").read_bytes() == stream.getvalue()
