"""A set as plain arrays on disk, mapped into memory instead of read: opening takes no time, and pages come when
touched.

    <root>/.slimbayes-cache/<name>/manifest.json                    what it holds, and what it was made from
    <root>/.slimbayes-cache/<name>/arrays-<number>/<split>.x.npy    and <split>.y.npy

The manifest names its folder of arrays, so that replacing this one file, which the system does at once or not at all,
is what puts a new cache in the place of an old one. Whatever stops the writing before that leaves the old cache as it
was. A file is the same as before if its size and time are, or else its SHA-256 is: copying a set does not spoil its
cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimbayes.data.archives import map_npy, require
from slimbayes.data.dataset import Dataset, Found, Split
from slimbayes.files import sync, write_json

try:
    import fcntl
except ImportError:  # not on Windows; two writers at once then only waste each other's work
    fcntl = None  # type: ignore[assignment]

FORMAT = 1  # raise it when a reader gives other numbers for the same files
MANIFEST = "manifest.json"
CHUNK = 16 << 20  # bytes written at a time
Progress = Callable[[int, int, str], None]
_ARRAYS = re.compile(r"arrays-[0-9a-f]{32}")
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError)


class Unusable(Exception):
    """There is a cache, but it may not be used: the message says why."""


def read(folder: Path, name: str, files: Sequence[Path], root: Path, splits: Sequence[str]) -> Dataset:
    """The named splits from a cache made of exactly these source files, as they are now; else raises Unusable."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        made = manifest["name"], manifest["format"]
        if made != (name, FORMAT):
            raise Unusable(f"it is of {made[0]!r} in format {made[1]!r}, needed is {name!r} in format {FORMAT}")
        _compare(manifest["sources"], files, root)
        if not _ARRAYS.fullmatch(manifest["folder"]):
            raise ValueError(f"{manifest['folder']!r} is no folder of arrays")
        arrays, listed = folder / manifest["folder"], manifest["splits"]
        found = {split: Split(*(_mapped(arrays, listed[split][axis]) for axis in "xy")) for split in splits}
        return Dataset(name, found, tuple(map(str, manifest["classes"])), tuple(map(str, manifest["vocabulary"])))
    except _DAMAGE as error:
        raise Unusable(f"it is damaged: {type(error).__name__}: {error}") from error


def _compare(sources: Sequence[Mapping[str, Any]], files: Sequence[Path], root: Path) -> None:
    recorded, now = {entry["file"]: entry for entry in sources}, {shown(file, root): file for file in files}
    if odd := sorted(set(recorded) ^ set(now)):
        raise Unusable(f"the source has other files than it was made from, such as {odd[0]}")
    changed = next((name for name, file in now.items() if not _same(file, recorded[name])), None)
    if changed is not None:
        raise Unusable(f"its source {changed} has changed")


def _mapped(folder: Path, entry: Mapping[str, Any]) -> Tensor:
    file = folder / Path(entry["file"]).name
    if not _same(file, entry):
        raise ValueError(f"{file} is not as it was written")
    return torch.from_numpy(map_npy(file, tuple(entry["shape"]), "uif"))


def _same(file: Path, entry: Mapping[str, Any]) -> bool:
    """Whether a file is what an entry recorded; its content is read only where size and time leave a doubt."""
    now = file.stat()
    return now.st_size == entry["size"] and (now.st_mtime_ns == entry["mtime_ns"] or sha256(file) == entry["sha256"])


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def shown(file: Path, root: Path) -> str:
    """The name of a file under the root."""
    return file.relative_to(root).as_posix() if file.is_relative_to(root) else str(file)


def _entry(file: Path, name: str) -> dict[str, Any]:
    now = file.stat()
    return {"file": name, "size": now.st_size, "mtime_ns": now.st_mtime_ns, "sha256": sha256(file)}


def write(folder: Path, name: str, found: Found, files: Sequence[Path], root: Path, progress: Progress) -> None:
    """All splits of a set into a cache at `folder`, whole or not at all. One split at a time is in memory, less where
    its reader maps files."""
    with _only_writer(folder):
        arrays = folder / f"arrays-{uuid.uuid4().hex}"
        arrays.mkdir()
        sources = [_entry(file, shown(file, root)) for file in files]
        splits = _write_splits(arrays, found, progress)
        _compare(sources, files, root)
        sync(arrays)
        manifest = {"format": FORMAT, "name": name, "folder": arrays.name, "splits": splits, "sources": sources}
        words = {"classes": list(found.classes), "vocabulary": list(found.vocabulary())}
        write_json(folder / MANIFEST, manifest | words)
        sync(folder)


def _write_splits(folder: Path, found: Found, progress: Progress) -> dict[str, Any]:
    total, done, out = sum(part.count() for part in found.parts.values()), 0, {}
    for split, part in found.parts.items():
        progress(done, total, f"reading {split}")
        rows = part.read()
        if not isinstance(rows, Split):
            raise TypeError(f"The split {split} is decoded image by image: there are no arrays to keep.")
        stem = split.replace("/", "-")
        y, x = _write_array(folder / f"{stem}.y.npy", rows.y), _write_array(folder / f"{stem}.x.npy", rows.x)
        out[split], done = {"x": x, "y": y}, done + len(rows)
        progress(done, total, f"writing {split}")
    return out


def _write_array(file: Path, values: Tensor) -> dict[str, Any]:
    numpy, array = require("numpy"), values.detach().cpu().numpy()
    header = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}
    step = max(1, CHUNK // max(1, array[:1].nbytes))
    try:
        with file.open("wb") as stream:
            numpy.lib.format.write_array_header_1_0(stream, header)
            for start in range(0, len(array), step):  # never a whole copy of an array that is mapped itself
                stream.write(numpy.ascontiguousarray(array[start : start + step]).data.cast("B"))
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        need = f"{file} needs {array.nbytes:,} bytes; make room, or choose another folder"
        raise OSError(error.errno, f"{error.strerror}: {need}") from error
    return _entry(file, file.name) | {"shape": list(array.shape)}


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Holds a folder, which is made where it is not there, against other writers, and leaves in it only what its
    manifest names; nothing at all, if nothing came of it."""
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    if foreign := next((p.name for p in folder.iterdir() if p.name != MANIFEST and not _is_leaving(p)), None):
        need = "give an empty folder, or one that does not exist"
        raise FileExistsError(f"{folder} holds {foreign!r}, which is no part of a cache: {need}.")
    handle = os.open(folder, os.O_RDONLY)
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _sweep(folder)  # what a killed writer left takes up room
        try:
            yield
        finally:
            _sweep(folder)
    except BlockingIOError as error:
        raise BlockingIOError(f"{folder} is being written by another process: wait until it has finished.") from error
    finally:
        os.close(handle)
        with suppress(OSError):  # succeeds on empty folders only
            for place in made:
                place.rmdir()


def _is_leaving(path: Path) -> bool:
    return bool(_ARRAYS.fullmatch(path.name)) or path.name.startswith(f".{MANIFEST}.")


def _sweep(folder: Path) -> None:
    """Removes what no manifest names: leavings of a writer that was killed, and the arrays of an earlier cache."""
    try:
        named = json.loads((folder / MANIFEST).read_bytes())["folder"]
    except _DAMAGE:
        named = None
    for path in [path for path in folder.iterdir() if _is_leaving(path) and path.name != named]:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
