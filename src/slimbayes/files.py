"""Files that are whole or not there, and only files of our own are replaced.

replacing                           one file, written piece by piece, then put in place at once
write_text, write_json, write_csv, write_bytes      one file, at once
check_output                        refuses an output file that is there already
claim_folder                        refuses a folder that holds files which a command would replace
write_folder, read_folder, remove_folder, tidy_folder       a folder with the sha256 of each file in its manifest.json
remove_drafts                       removes what killed writers left

How a folder is replaced: its manifest says which contents belong to it. New contents are written beside the old ones,
as drafts whose names hold their sha256. Then the new manifest replaces the old one, in one step, and only then do the
drafts get their proper names. A reader who finds other contents under a name than the manifest lists looks for the
draft. So there is no moment without a whole state, wherever a writer is killed: before the manifest is replaced it is
the old one, afterwards the new one. The next writer removes what is left over.
"""

import csv
import errno
import fcntl
import hashlib
import io
import json
import math
import os
import platform
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from slimbayes.errors import brief, cut
from slimbayes.untrusted import check_regular, open_file, parse_json, read_file

LIBRARY = "slimbayes"
FORMAT = 1
MANIFEST = "manifest.json"
MARKER = ".slimbayes"  # lists what commands may replace in a folder
_MARKER_HEAD = "# Written by slimbayes, which may replace these files of this folder:"
# Seconds after which a draft of another machine counts as left behind.
_FOREIGN = 12 * 3600.0
# A manifest that is not there, is no regular file, or is too large.
_NO_MANIFEST = (errno.ENOENT, errno.EINVAL, errno.EFBIG)
# .<name>.slimbayes-<machine>-<process>-<token>: a file that is being written.
_DRAFT = re.compile(
    r"\..*\.slimbayes-([0-9a-f]{8})-(\d+)-[0-9a-f]{8}",
    re.DOTALL,
)
# .<name>.slimbayes-<sha256>: new contents of a folder's file.
_FOLDER_DRAFT = re.compile(r"\.(.*)\.slimbayes-([0-9a-f]{64})", re.DOTALL)


class CheckpointError(ValueError):
    """A checkpoint that is damaged or does not fit; the message says what is wrong and where."""


def as_json(data: Any) -> bytes:
    return (json.dumps(data, indent=1) + "\n").encode()


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Replace a file at once by what the block writes to the path it gets; an error leaves what was there.

    A link to a file stays one: the file it points to is replaced. What is no regular file, such as a device or a
    folder, is refused. An OSError, such as a full disk, comes out with the file's name.
    """
    target = Path(os.path.realpath(file))
    if target.exists():
        check_regular(target)
    remove_drafts(target.parent)
    draft = _draft(target)
    try:
        yield draft
        sync(draft)
        draft.replace(target)
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


def check_output(file: Path, force: bool = False) -> None:
    """Refuse to write to a file that is there already, unless the user asked to replace it.

    Example:
        >>> check_output(Path("/etc/hosts"))
        Traceback (most recent call last):
        ...
        FileExistsError: /etc/hosts is there already. Choose another name with -o, or replace it with --force.
    """
    if not file.exists():
        return
    if not file.is_file():
        raise FileExistsError(
            f"{file} is not a regular file, so it cannot be replaced. Choose another name with -o."
        )
    if not force:
        raise FileExistsError(
            f"{file} is there already. Choose another name with -o, or replace it with --force."
        )


def claim_folder(folder: Path, names: Sequence[str]) -> Path:
    """Mark a folder as one where slimbayes may write and replace files of these names; make it if it is not there.

    A folder that holds one of these names already, and is not marked for it, is refused: that file is the user's.

    Returns: the marker, a file that lists the names.
    """
    marker = folder / MARKER
    if obstacle := _obstacle(Path(os.path.realpath(folder)), folder):
        raise FileExistsError(obstacle)
    with _exclusive(folder):
        claimed = _names_in(marker)
        new = [name for name in names if name not in claimed]
        theirs = [name for name in new if os.path.lexists(folder / name)]
        if theirs:
            raise FileExistsError(
                f"{folder} holds {_enumerated(theirs)}, which slimbayes did not write there and would replace. Choose "
                f"another folder with --out. If this is a copy of a folder that slimbayes wrote, copy its file {MARKER}, "
                "too."
            )
        if new:
            _append_lines(marker, new if claimed else [_MARKER_HEAD, *new])
    return marker


def write_folder(path: Path, files: Mapping[str, bytes]) -> Path:
    """Write a folder with its manifest, at once for whoever reads it; returns its path.

    A folder that is there already is replaced only if it is empty or was written by this function and holds nothing
    else; CheckpointError says what is in the way. A link to a folder stays one. Writers on one machine wait for one
    another.
    """
    folder = Path(os.path.realpath(path))
    if obstacle := _obstacle(folder, path):
        raise CheckpointError(obstacle)
    new = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    manifest = as_json({"library": LIBRARY, "format": FORMAT, "sha256": new})
    made = not folder.exists()
    try:
        with _exclusive(folder):
            try:
                old = _own_files(folder, path)
                _tidy(folder, old)
                _write_drafts(folder, files, new)
                _set_aside(folder, old, old.keys() - new.keys())
                _replace_manifest(folder, manifest)
            except BaseException:
                with suppress(OSError, CheckpointError):
                    _tidy(folder, _own_files(folder, path))
                    if made:
                        folder.rmdir()  # it stays if anything is in it
                raise
            for name, digest in new.items():
                os.replace(_folder_draft(folder, name, digest), folder / name)
            _tidy(folder, new)
            sync(folder)
    except OSError as error:
        raise _named(error, folder, path) from error
    return path


def remove_folder(path: Path) -> None:
    """Remove a folder that `write_folder` wrote; one that holds anything else is refused with a CheckpointError."""
    folder = Path(os.path.realpath(path))
    with _exclusive(folder):
        old = _own_files(folder, path)
        _tidy(folder, old)
        _set_aside(folder, old, old.keys())
        (folder / MANIFEST).unlink(missing_ok=True)
        _tidy(folder, {})
        folder.rmdir()


def tidy_folder(path: Path) -> None:
    """Finish or undo what a killed writer had begun in a folder of `write_folder`, which `load` reads either way."""
    folder = Path(os.path.realpath(path))
    with _exclusive(folder):
        _tidy(folder, _own_files(folder, path))


def read_folder(folder: Path, needed: set[str]) -> dict[str, bytes]:
    """All files of a folder after comparing each with the manifest, which must list those needed."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a checkpoint directory.")
    try:
        return _read_files(folder, needed)
    except CheckpointError:
        # A writer may have replaced the folder meanwhile. Once it has ended, what is there counts.
        with _shared(folder):
            return _read_files(folder, needed)


def _read_files(folder: Path, needed: set[str]) -> dict[str, bytes]:
    hashes = _read_manifest(folder, needed)
    return {name: _read_listed(folder, name, hashes[name]) for name in hashes}


def _read_listed(folder: Path, name: str, expected: str) -> bytes:
    """The contents that the manifest lists under a name; they are in a draft where a writer was killed."""
    try:
        data = read_file(folder / name, limit=math.inf)
        if hashlib.sha256(data).hexdigest() == expected:
            return data
        problem = f"{folder / name} is damaged: its sha256 differs from the manifest's. Restore it from a copy."
    except OSError as error:
        problem = f"{folder / name} cannot be read: {error.strerror}."
    with suppress(OSError):
        data = read_file(_folder_draft(folder, name, expected), limit=math.inf)
        if hashlib.sha256(data).hexdigest() == expected:
            return data
    raise CheckpointError(problem)


def sync(path: Path) -> None:
    """Wait until a file's contents, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read_manifest(folder: Path, needed: set[str]) -> dict[str, str]:
    """The sha256 of each file, by its name."""
    file = folder / MANIFEST
    try:
        manifest = parse_json(read_file(file))
        library, version = manifest["library"], manifest["format"]
        hashes = manifest["sha256"]
        named = all(
            isinstance(name, str)
            and isinstance(digest, str)
            and name not in ("", "..", MANIFEST)
            and Path(name).name == name
            and re.fullmatch(r"[0-9a-f]{64}", digest)
            for name, digest in hashes.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{file} is missing or damaged: {cut(str(error))}."
        ) from error
    if library != LIBRARY:
        raise CheckpointError(f"{file} was not written by slimbayes.")
    if version != FORMAT:
        raise CheckpointError(
            f"{folder} has format {brief(version)}; this version of slimbayes reads format {FORMAT}."
        )
    if not named or not needed <= set(hashes):
        raise CheckpointError(
            f"{file} is damaged: it does not list {' and '.join(sorted(needed))}."
        )
    return dict(hashes)


# --- what is ours in a folder ---


def _obstacle(folder: Path, path: Path) -> str:
    """Why there can be no folder at a path, whose links lead to `folder`; nothing if there can."""
    for place in (folder, *folder.parents):
        if place.is_dir():
            return ""
        if os.path.lexists(place):
            # A ring of links resolves to none of them.
            kind = "a link that leads nowhere" if place.is_symlink() else "a file"
            name = path if place == folder else place
            return (
                f"{name} is {kind}, and {path} must be a folder. Choose another path."
            )
    return ""


def _own_files(folder: Path, path: Path) -> dict[str, str]:
    """The sha256 of each file that was written here, by its name; CheckpointError if there is anything else."""
    with os.scandir(folder) as entries:
        plain = {e.name: e.is_file(follow_symlinks=False) for e in entries}
    drafts = {name for name in plain if plain[name] and _is_any_draft(name)}
    others = plain.keys() - drafts
    if not others:
        return {}
    try:
        listed = _read_manifest(folder, set())
    except CheckpointError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno not in _NO_MANIFEST:
            raise cause from None  # whose it is cannot be told
        raise CheckpointError(
            f"{path} was not written by slimbayes, so it is not replaced: it holds {_enumerated(others)}, and no "
            f"{MANIFEST} that lists just these. Choose another path, such as {path / 'posterior'}."
        ) from error
    strange = others - listed.keys() - {MANIFEST}
    strange |= {name for name in others if not plain[name]}
    if strange:
        raise CheckpointError(
            f"{path} is not replaced, because it holds {_enumerated(strange)}, which slimbayes did not write there. "
            f"Move that elsewhere, or choose another path."
        )
    return listed


def _enumerated(names: Iterable[str]) -> str:
    """The first few names of many."""
    shown = sorted(names)
    more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    return ", ".join(cut(name, most=60) for name in shown[:3]) + more


def _names_in(marker: Path) -> set[str]:
    """The names that a folder's marker lists; none if there is no marker yet."""
    try:
        lines = read_file(marker).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise FileExistsError(
            f"{marker} is in the way: {error.strerror}. Choose another folder with --out."
        ) from error
    if lines and not _MARKER_HEAD.startswith(lines[0]):
        raise FileExistsError(
            f"{marker} is in the way: slimbayes did not write it. Choose another folder with --out."
        )
    return set(lines[1:])


def _append_lines(file: Path, lines: Sequence[str]) -> None:
    """Add lines to a file that is never replaced, because runs lock it; a line that was cut off is ended first."""
    with open(file, "a+b") as out:
        out.seek(0)
        text = out.read()
        begin = b"" if not text or text.endswith(b"\n") else b"\n"
        out.write(begin + "".join(f"{line}\n" for line in lines).encode())
        out.flush()
        os.fsync(out.fileno())


# --- how a folder is replaced ---


def _write_drafts(
    folder: Path, files: Mapping[str, bytes], hashes: Mapping[str, str]
) -> None:
    for name, data in files.items():
        draft = _folder_draft(folder, name, hashes[name])
        draft.write_bytes(data)
        sync(draft)
    sync(folder)


def _set_aside(folder: Path, hashes: Mapping[str, str], names: Iterable[str]) -> None:
    """Give files that are about to go the names of drafts, under which readers of this manifest still find them."""
    for name in names:
        if (folder / name).exists():
            os.replace(folder / name, _folder_draft(folder, name, hashes[name]))


def _replace_manifest(folder: Path, manifest: bytes) -> None:
    """The one step that makes the old state of a folder the new one."""
    digest = hashlib.sha256(manifest).hexdigest()
    draft = _folder_draft(folder, MANIFEST, digest)
    draft.write_bytes(manifest)
    sync(draft)
    os.replace(draft, folder / MANIFEST)
    sync(folder)


def _tidy(folder: Path, hashes: Mapping[str, str]) -> None:
    """Put drafts that the manifest lists in their places, and remove all others."""
    with os.scandir(folder) as entries:
        drafts = [e.name for e in entries if e.is_file(follow_symlinks=False)]
    for name in drafts:
        found = _FOLDER_DRAFT.fullmatch(name)
        if found is None:
            continue
        target, digest = found.groups()
        # A killed writer may have left a part of it.
        if hashes.get(target) == digest and _sha256(folder / name) == digest:
            os.replace(folder / name, folder / target)
        else:
            (folder / name).unlink()
    remove_drafts(folder)


def _sha256(file: Path) -> str:
    with open_file(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _folder_draft(folder: Path, name: str, digest: str) -> Path:
    return folder / f".{name}.slimbayes-{digest}"


def _is_any_draft(name: str) -> bool:
    return bool(_FOLDER_DRAFT.fullmatch(name) or _DRAFT.fullmatch(name))


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Make a folder if needed, and keep other writers of this machine out of it.

    The folder itself is locked, so that no file for it is left in there.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _lock(handle, fcntl.LOCK_EX)
            if _is_still(folder, handle):
                yield
                return
        finally:
            _lock(handle, fcntl.LOCK_UN)
            os.close(handle)


def _is_still(folder: Path, handle: int) -> bool:
    """Whether an open folder has its name still: whoever held the lock before may have removed it."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(folder))
    except FileNotFoundError:
        return False


@contextmanager
def _shared(folder: Path) -> Iterator[None]:
    """Wait until no writer of this machine is at work in a folder, and keep them out of it."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield  # a folder that may not be listed can be read all the same
        return
    try:
        _lock(handle, fcntl.LOCK_SH)
        yield
    finally:
        _lock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _lock(handle: int, kind: int) -> None:
    """Lock a folder; where a file system has no locks, writers do not wait for one another."""
    try:
        fcntl.flock(handle, kind)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF):
            raise


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
        for entry in entries:
            with suppress(OSError):
                if _is_left(entry):
                    os.unlink(entry.path)


def _is_left(entry: "os.DirEntry[str]") -> bool:
    found = _DRAFT.fullmatch(entry.name)
    if found is None or not entry.is_file(follow_symlinks=False):
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
    """Where a file is written before it gets its name; the draft's own name says whose it is."""
    return path.with_name(
        f".{path.name[:40]}.slimbayes-{_machine()}-{os.getpid()}-{secrets.token_hex(4)}"
    )


@cache
def _machine() -> str:
    """Eight characters for this host and its space of process numbers, which a container has to itself."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return hashlib.sha256(f"{platform.node()} {space}".encode()).hexdigest()[:8]
