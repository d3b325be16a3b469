"""Files that are whole or not there: written aside, synced and renamed, so that a crash leaves the old or the new one.

write_text, write_json, write_csv, write_bytes      one file, at once
replacing                                           one file, written piece by piece
write_folder, read_folder                           a folder with the sha256 of each file in its manifest.json
find_folder                                         where it is, also after a writer died between two renames
remove_drafts                                       removes what killed writers left
"""

import csv
import errno
import hashlib
import io
import json
import math
import os
import platform
import re
import secrets
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from slimbayes.errors import brief, cut
from slimbayes.untrusted import parse_json, read_file

FORMAT = 1
_FOREIGN = (
    12 * 3600.0
)  # seconds after which a draft of another machine counts as left behind
# .<name>.draft-<machine>-<process>-<token>; checkpoints of steps were once drafted without an owner.
_DRAFT = re.compile(
    r"\..*\.draft-([0-9a-f]{8})-(\d+)-[0-9a-f]{8}|\.step-\d{8}\.[a-z0-9_]{8}", re.DOTALL
)


class CheckpointError(ValueError):
    """A checkpoint that is damaged or does not fit; the message says what is wrong and where."""


def as_json(data: Any) -> bytes:
    return (json.dumps(data, indent=1) + "\n").encode()


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Replace a file at once by what the block writes to the path it gets; an error leaves what was there.

    An OSError, such as a full disk, comes out with the file's name.
    """
    remove_drafts(file.parent)
    draft = _draft(file)
    try:
        yield draft
        sync(draft)
        draft.replace(file)
    except OSError as error:
        raise _named(error, draft, file) from error
    finally:
        draft.unlink(missing_ok=True)


def write_bytes(file: Path, data: bytes) -> None:
    """Replace a file at once: whoever reads it sees the old one or the new one."""
    with replacing(file) as draft:
        draft.write_bytes(data)


def write_text(file: Path, text: str) -> None:
    """Replace a text file at once, in UTF-8, its line ends as they are."""
    write_bytes(file, text.encode())


def write_json(file: Path, data: Any) -> None:
    """Replace a JSON file at once."""
    write_bytes(file, as_json(data))


def write_csv(file: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Replace a CSV file at once; its columns are the names in all lines, in the order they appear."""
    text = io.StringIO()
    writer = csv.DictWriter(
        text,
        list(dict.fromkeys(name for line in lines for name in line)),
        lineterminator="\n",
    )
    writer.writeheader()
    writer.writerows(lines)
    write_text(file, text.getvalue())


def write_folder(path: Path, files: Mapping[str, bytes]) -> Path:
    """Write a folder at once, with its manifest; a former one is replaced only when the new one is complete.

    The former one steps aside as "<name>.previous" for the moment between two renames.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_drafts(path.parent)
    if path.exists() and not (path / "manifest.json").exists() and any(path.iterdir()):
        raise CheckpointError(
            f"{path} exists and is not a slimbayes checkpoint; refusing to replace it."
        )
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    manifest = as_json({"format": FORMAT, "sha256": hashes})
    draft = _draft(path)
    try:
        draft.mkdir()
        for name, data in {**files, "manifest.json": manifest}.items():
            (draft / name).write_bytes(data)
            sync(draft / name)
        sync(draft)
        os.chmod(draft, 0o755)
        _replace_folder(draft, path)
    except OSError as error:
        raise _named(error, draft, path) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return path


def find_folder(path: Path) -> Path:
    """The folder of a checkpoint: its former state, with a warning, where a writer died between two renames."""
    previous = path.with_name(path.name + ".previous")
    if not path.exists() and previous.exists():
        warnings.warn(
            f"{path} is missing, but an interrupted save left its former state: reading {previous}.",
            stacklevel=3,
        )
        return previous
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a checkpoint directory.")
    return path


def read_folder(folder: Path, needed: set[str]) -> dict[str, bytes]:
    """All files of a folder after comparing each with the manifest, which must list those needed."""
    files = {}
    for name, expected in _read_manifest(folder, needed).items():
        try:
            files[name] = read_file(folder / name, limit=math.inf)
        except OSError as error:
            raise CheckpointError(
                f"{folder / name} cannot be read: {error.strerror}."
            ) from error
        if hashlib.sha256(files[name]).hexdigest() != expected:
            raise CheckpointError(
                f"{folder / name} is damaged: its sha256 differs from the manifest's. Restore it from a copy."
            )
    return files


def sync(path: Path) -> None:
    """Wait until a file's contents, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read_manifest(folder: Path, needed: set[str]) -> dict[str, str]:
    """The sha256 of each file, by its name."""
    file = folder / "manifest.json"
    try:
        manifest = parse_json(read_file(file))
        version, hashes = manifest["format"], manifest["sha256"]
        named = all(
            isinstance(n, str) and Path(n).name == n and isinstance(h, str)
            for n, h in hashes.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{file} is missing or damaged: {cut(str(error))}."
        ) from error
    if version != FORMAT:
        raise CheckpointError(
            f"{folder} has format {brief(version)}; this version of slimbayes reads format {FORMAT}."
        )
    if not named or not needed <= set(hashes):
        raise CheckpointError(
            f"{file} is damaged: it does not list {' and '.join(sorted(needed))}."
        )
    return hashes


def _replace_folder(draft: Path, path: Path) -> None:
    previous = path.with_name(path.name + ".previous")
    if path.exists():
        shutil.rmtree(previous, ignore_errors=True)
        os.rename(path, previous)
    os.rename(draft, path)
    sync(path.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _named(error: OSError, draft: Path, path: Path) -> OSError:
    """The error with the name of what could not be written, not that of its draft; a full disk names nothing itself."""
    about_it = error.filename is None or str(error.filename).startswith(str(draft))
    return (
        OSError(error.errno, error.strerror, str(path))
        if about_it and error.errno is not None
        else error
    )


# --- drafts, and what is left of them ---


def remove_drafts(folder: Path) -> None:
    """Remove the drafts of processes that were killed: those of this machine whose process is gone, and others that
    nobody has touched for twelve hours. Drafts of processes that are alive stay."""
    with suppress(OSError), os.scandir(folder) as entries:
        left = [Path(e.path) for e in entries if e.name[0] == "." and _is_left(e)]
        for path in left:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(
                missing_ok=True
            )


def _is_left(entry: "os.DirEntry[str]") -> bool:
    found = _DRAFT.fullmatch(entry.name)
    if found is None or entry.is_symlink():
        return False
    machine, process = found.groups()
    if machine == _machine():
        return not _alive(int(process))
    return time.time() - entry.stat().st_mtime > _FOREIGN


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:
        return error.errno == errno.EPERM  # it is another user's
    except OverflowError:
        return False  # no process has such a number
    return True


def _draft(path: Path) -> Path:
    """Where a file or folder is written before it gets its name; the draft's own name says whose it is."""
    return path.with_name(
        f".{path.name[:40]}.draft-{_machine()}-{os.getpid()}-{secrets.token_hex(4)}"
    )


@cache
def _machine() -> str:
    """Eight characters for this host and its space of process numbers, which a container has to itself."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return hashlib.sha256(f"{platform.node()} {space}".encode()).hexdigest()[:8]
