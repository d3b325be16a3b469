"""A set as plain arrays on disk, mapped into memory instead of read: opening it takes no time, and pages come when touched.

    <root>/.slimbayes-cache/<name>/manifest.json                    what it holds, and what it was made from
    <root>/.slimbayes-cache/<name>/arrays-<number>/<split>.x.npy    and <split>.y.npy

The manifest names its folder of arrays, so that replacing this one file, which the system does at once or not at all, is what puts a new cache
in the place of an old one. Whatever stops the writing before that leaves the old cache as it was. A file is the same as before if its
size and time are, or else its SHA-256 is: copying a set does not spoil its cache, changing it does.
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

try:
    import fcntl
except ImportError:  # not on Windows; two writers at once then only waste each other's work
    fcntl = None  # type: ignore[assignment]

FORMAT = 1  # raise it when a reader gives other numbers for the same files
MANIFEST = "manifest.json"
CHUNK = 16 << 20  # bytes written at a time
Progress = Callable[[int, int, str], None]
_FOLDER = re.compile(r"arrays-[0-9a-f]{32}")
_OURS = re.compile(rf"{re.escape(MANIFEST)}|\.writing-[0-9a-f]{{32}}(\.json)?|{_FOLDER.pattern}")
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError)


class Unusable(Exception):
    """There is a cache, but it may not be used: the message says why."""


# Reading ---------------------------------------------------------------------------------------------------------------


def read(folder: Path, name: str, files: Sequence[Path], root: Path, splits: Sequence[str]) -> Dataset:
    """The named splits from a cache made of exactly these source files, as they are now; raises Unusable where that fails."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if manifest["format"] != FORMAT or manifest["name"] != name:
            raise Unusable(
                f"it is of {manifest['name']!r} in format {manifest['format']!r}, needed is {name!r} in format {FORMAT}"
            )
        _compare({entry["file"]: entry for entry in manifest["sources"]}, files, root)
        if not _FOLDER.fullmatch(manifest["folder"]):
            raise ValueError(f"{manifest['folder']!r} is no folder of arrays")
        arrays = folder / manifest["folder"]
        read_ = {split: Split(*(_mapped(arrays, manifest["splits"][split][axis]) for axis in "xy")) for split in splits}
        return Dataset(name, read_, tuple(map(str, manifest["classes"])), tuple(map(str, manifest["vocabulary"])))
    except _DAMAGE as error:
        raise Unusable(f"it is damaged: {type(error).__name__}: {error}") from error


def _compare(recorded: Mapping[str, Any], files: Sequence[Path], root: Path) -> None:
    now = {_shown(file, root): file for file in files}
    if odd := sorted(set(recorded) ^ set(now)):
        raise Unusable(f"the source has other files than it was made from, such as {odd[0]}")
    changed = next((name for name, file in now.items() if not _same(file, recorded[name])), None)
    if changed is not None:
        raise Unusable(f"its source {changed} has changed")


def _mapped(folder: Path, entry: Mapping[str, Any]) -> Tensor:
    file = folder / Path(entry["file"]).name
    if not _same(file, entry):
        raise ValueError(f"{file} is not as it was written")
    array = map_npy(file, tuple(entry["shape"]), "uif")
    if array.dtype.str != entry["dtype"]:
        raise ValueError(f"{file} holds {array.dtype.str}, written was {entry['dtype']}")
    return torch.from_numpy(array)


def _same(file: Path, entry: Mapping[str, Any]) -> bool:
    """Whether a file is what an entry recorded; its content is read only where size and time leave a doubt."""
    now = file.stat()
    return now.st_size == entry["size"] and (now.st_mtime_ns == entry["mtime_ns"] or sha256(file) == entry["sha256"])


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _entry(file: Path, name: str) -> dict[str, Any]:
    now = file.stat()
    return {"file": name, "size": now.st_size, "mtime_ns": now.st_mtime_ns, "sha256": sha256(file)}


def _shown(file: Path, root: Path) -> str:
    return file.relative_to(root).as_posix() if file.is_relative_to(root) else str(file)


# Writing ---------------------------------------------------------------------------------------------------------------


def write(folder: Path, name: str, found: Found, files: Sequence[Path], root: Path, progress: Progress) -> None:
    """All splits of a set into a cache at `folder`, whole or not at all. One split at a time is in memory, less where its reader maps files."""
    with _only_writer(folder):
        number = uuid.uuid4().hex
        new, draft = folder / f".writing-{number}", folder / f".writing-{number}.json"
        _sweep(folder)  # what a killed writer left takes up room
        try:
            new.mkdir()
            sources = [_entry(file, _shown(file, root)) for file in files]
            splits = _write_splits(new, found, progress)
            _compare({entry["file"]: entry for entry in sources}, files, root)
            manifest = {
                "format": FORMAT,
                "name": name,
                "folder": f"arrays-{number}",
                "splits": splits,
                "sources": sources,
            }
            words = {"classes": list(found.classes), "vocabulary": list(found.vocabulary())}
            with draft.open("w") as stream:
                json.dump(manifest | words, stream, indent=1)
                _flush(stream)
            _flush_folder(new)
            new.rename(folder / f"arrays-{number}")
            draft.replace(folder / MANIFEST)
            _flush_folder(folder)
        finally:  # also after success: the arrays of the cache before this one
            _sweep(folder)


def _write_splits(folder: Path, found: Found, progress: Progress) -> dict[str, Any]:
    total, done, out = sum(part.count() for part in found.parts.values()), 0, {}
    for split, part in found.parts.items():
        progress(done, total, f"reading {split}")
        rows = part.read()
        if not isinstance(rows, Split):
            raise TypeError(f"The split {split} is decoded image by image: there are no arrays to keep.")
        stem = split.replace("/", "-")
        y = _write_array(folder / f"{stem}.y.npy", rows.y, lambda _: None)
        x = _write_array(
            folder / f"{stem}.x.npy", rows.x, lambda n, d=done, s=split: progress(d + n, total, f"writing {s}")
        )
        out[split], done = {"x": x, "y": y}, done + len(rows)
    return out


def _write_array(file: Path, values: Tensor, tick: Callable[[int], None]) -> dict[str, Any]:
    numpy = require("numpy")
    array = values.detach().cpu().numpy()
    header = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}
    step = max(1, CHUNK // max(1, array[:1].nbytes))
    try:
        with file.open("wb") as stream:
            numpy.lib.format.write_array_header_1_0(stream, header)
            for start in range(0, len(array), step):
                stream.write(numpy.ascontiguousarray(array[start : start + step]).data.cast("B"))
                tick(min(start + step, len(array)))
            _flush(stream)
    except OSError as error:
        raise OSError(
            error.errno, f"{error.strerror}: {file} needs {array.nbytes:,} bytes; make room, or choose another folder"
        ) from error
    return _entry(file, file.name) | {"shape": list(array.shape), "dtype": array.dtype.str}


def _flush(stream: Any) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _flush_folder(folder: Path) -> None:
    with suppress(OSError), _opened(folder) as handle:  # some systems cannot open a folder
        os.fsync(handle)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Holds the folder against other writers; a folder that is not there is made, and removed again if nothing came of it."""
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    foreign = next((entry.name for entry in folder.iterdir() if not _OURS.fullmatch(entry.name)), None)
    if foreign is not None:
        raise FileExistsError(
            f"{folder} holds {foreign!r}, which is no part of a cache: give an empty folder, or one that does not exist."
        )
    try:
        with _opened(folder) as handle:
            if fcntl is not None:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    raise BlockingIOError(
                        f"{folder} is being written by another process: wait until it has finished."
                    ) from error
            yield
    finally:
        with suppress(OSError):  # succeeds on empty folders only
            for place in made:
                place.rmdir()


def _sweep(folder: Path) -> None:
    """Removes what no manifest names: leavings of a writer that was killed, and the arrays of an earlier cache."""
    try:
        named = json.loads((folder / MANIFEST).read_bytes())["folder"]
    except _DAMAGE:
        named = None
    for entry in list(folder.iterdir()):
        if _OURS.fullmatch(entry.name) and entry.name not in (MANIFEST, named):
            shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)
