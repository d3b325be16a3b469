"""Files that anybody may have written: read without waiting, within bounds, and refused in words.

open_file       a regular file, opened for reading; pipes, devices, sockets and folders are refused unopened
read_file       what it holds, at most so many bytes
append_file     the same file, opened for adding to its end
most_unpacked   how much a compressed file may unpack to
parse_json      JSON of bounded depth and size, each key once
check_form      whether what it holds has the fields and types that it should
check_tensors   whether the header of a safetensors file is short enough to be read

Errors quote a few characters of what they refuse at most.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any

from slimbayes.errors import brief, cut

LIMIT = 16 << 20  # bytes of a small file: our largest record has 600,000
DEPTH = 64  # mappings and lists inside one another; ours have ten at most
VALUES = 500_000  # of a JSON text; our largest record has 40,000
HEADER = 2 << 20  # bytes of a safetensors header: some 15,000 tensors
UNPACKED = 64 << 20  # bytes that any file may unpack to
RATIO = 100  # a larger one may unpack to this many times its own size
_KINDS = {
    stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}  # fmt: skip
# Never wait for a writer, never become the terminal of the process. Windows has neither flag.
_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
_BINARY = getattr(os, "O_BINARY", 0)


def open_file(path: Path | str, limit: float = math.inf) -> BufferedReader:
    """Open a regular file of at most `limit` bytes; OSError says in its `strerror` why it is refused.

    Links are followed. A large file that consists of holes is refused: it takes no space on the disk, but all of its
    size in memory.

    Example:
        >>> open_file("/dev/zero")
        Traceback (most recent call last):
        ...
        OSError: [Errno 22] it is a device, not a regular file: '/dev/zero'
    """
    check_regular(path)
    handle = os.open(path, os.O_RDONLY | _BINARY | _FLAGS)
    try:
        opened = os.fstat(handle)  # names can be swapped meanwhile
        check_regular(path, opened.st_mode)
        if opened.st_size > limit:
            raise OSError(
                errno.EFBIG,
                f"it has more than the {limit:,} bytes that such a file may have",
                str(path),
            )
        if opened.st_size > most_unpacked(_stored(handle, opened.st_size)):
            raise OSError(
                errno.EFBIG,
                f"it has {opened.st_size:,} bytes, nearly all of them holes; if they are meant, fill them: "
                f"cp --sparse=never",
                str(path),
            )
    except BaseException:
        os.close(handle)
        raise
    return os.fdopen(handle, "rb")


def read_file(path: Path | str, limit: float = LIMIT) -> bytes:
    """What a regular file holds, `limit` bytes at most; refused as `open_file` does."""
    with open_file(path, limit) as file:
        # It may grow while it is read.
        return file.read(os.fstat(file.fileno()).st_size)


def append_file(path: Path | str) -> BufferedWriter:
    """Open a regular file for adding to its end; it is made if it is not there. Links are refused: they could lead to
    any file of the user's."""
    links = getattr(os, "O_NOFOLLOW", 0)
    if os.path.islink(path):
        raise OSError(errno.ELOOP, "it is a link, not a regular file", str(path))
    if os.path.exists(path):
        check_regular(path)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | links | _BINARY | _FLAGS
    handle = os.open(path, flags, 0o666)
    try:
        check_regular(path, os.fstat(handle).st_mode)
    except BaseException:
        os.close(handle)
        raise
    return os.fdopen(handle, "ab")


def check_regular(path: Path | str, mode: int | None = None) -> None:
    """Refuse pipes, devices, sockets and folders with an OSError: opening one could wait for ever, or act."""
    try:
        mode = os.stat(path).st_mode if mode is None else mode
    except ValueError as error:  # a NUL, or half a surrogate pair
        raise OSError(errno.EINVAL, f"its name is no path: {error}") from None
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def most_unpacked(stored: int) -> int:
    """Bytes that a file of `stored` bytes may unpack to: files that ask for more are made to fill the memory.

    Example:
        >>> most_unpacked(1_000), most_unpacked(10_000_000)
        (67108864, 1000000000)
    """
    return max(UNPACKED, RATIO * stored)


def _stored(handle: int, size: int) -> int:
    """Bytes of a file that are no holes; all, where the file system does not tell. It leaves the place at the start."""
    if size <= UNPACKED or not hasattr(os, "SEEK_DATA"):
        return size
    stored, end = 0, 0
    try:
        while end < size and size > most_unpacked(stored):
            start = os.lseek(handle, end, os.SEEK_DATA)
            end = os.lseek(handle, start, os.SEEK_HOLE)
            stored += end - start
    except OSError as error:
        if error.errno != errno.ENXIO:  # which says that only a hole follows
            stored = size
    os.lseek(handle, 0, os.SEEK_SET)
    return stored


def parse_json(data: bytes | str) -> Any:
    """What a JSON text holds; ValueError if it is none, is nested deeper than DEPTH, has more than
    VALUES values, or has a key twice.

    Example:
        >>> parse_json(b'{"seed": 1, "seed": 2}')
        Traceback (most recent call last):
        ...
        ValueError: a key is there twice
    """
    text = data.decode("latin-1") if isinstance(data, bytes) else data
    values = sum(text.count(mark) for mark in ",[{")  # in texts, too
    if values > VALUES:
        raise ValueError(f"it has more than {VALUES:,} values")
    try:
        tree = json.loads(data, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {DEPTH} levels") from None
    level = [tree]
    for _ in range(DEPTH + 1):
        level = [inner for one in level for inner in _inside(one)]
        if not level:
            return tree
    raise ValueError(f"it is nested deeper than {DEPTH} levels")


def check_form(value: Any, form: Any, place: str = "") -> None:
    """Refuse what has another form, with a ValueError that says where: `form` is a type, a list of one form, a mapping
    from any name to one form (its key is str), or fields by name, beside which there may be others. A tuple has several
    types.

    Example:
        >>> check_form({"layers": ["a", 3]}, {"layers": [str]})
        Traceback (most recent call last):
        ...
        ValueError: layers.1 must be str, got 3
    """
    needed: Any = type(form) if isinstance(form, list | dict) else form
    if not isinstance(value, needed) or (
        needed not in (object, bool) and isinstance(value, bool)
    ):
        kinds = needed if isinstance(needed, tuple) else (needed,)
        name = " or ".join("null" if k is type(None) else k.__name__ for k in kinds)
        raise ValueError(f"{place or 'the whole'} must be {name}, got {brief(value)}")
    if isinstance(form, list):
        for number, inner in enumerate(value):
            check_form(inner, form[0], f"{place}.{number}".lstrip("."))
    elif isinstance(form, dict) and str in form:
        for name, inner in value.items():
            check_form(inner, form[str], f"{place}.{cut(name, most=60)}")
    elif isinstance(form, dict):
        for name, inner in form.items():
            if name not in value:
                raise ValueError(f"{f'{place}.{name}'.lstrip('.')} is missing")
            check_form(value[name], inner, f"{place}.{name}".lstrip("."))


def check_tensors(data: bytes) -> None:
    """Refuse the bytes of a safetensors file whose header is longer than HEADER: millions of empty tensors fit into
    one, and each takes its time.

    Example:
        >>> check_tensors((1 << 40).to_bytes(8, "little"))
        Traceback (most recent call last):
        ...
        ValueError: its header has 1,099,511,627,776 bytes, more than the 2,097,152 allowed
    """
    header = int.from_bytes(data[:8], "little")
    if header > HEADER:
        raise ValueError(
            f"its header has {header:,} bytes, more than the {HEADER:,} allowed"
        )


def _inside(value: Any) -> Any:
    return (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, list)
        else ()
    )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found
