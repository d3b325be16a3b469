"""Small files that anybody may have written: read without waiting, within bounds, and refused in words.

read_file       a regular file of at most so many bytes; pipes, devices, sockets and folders are refused unopened
parse_json      JSON of bounded depth, each key once
check_form      whether what it holds has the fields and types that it should

Errors quote a few characters of what they refuse at most.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from slimbayes.errors import brief, cut

LIMIT = (
    64 << 20
)  # bytes: a record with a thousand curves and all its pictures has a few million
DEPTH = 64  # mappings and lists inside one another; ours have ten at most
_KINDS = {
    stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}  # fmt: skip


def read_file(path: Path, limit: float = LIMIT) -> bytes:
    """What a regular file holds, `limit` bytes at most; OSError says in its `strerror` why it cannot be read.

    Example:
        >>> read_file(Path("/dev/zero"))
        Traceback (most recent call last):
        ...
        OSError: [Errno 22] it is a device, not a regular file: '/dev/zero'
    """
    check_regular(path)
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(handle, "rb") as file:
        opened = os.fstat(handle)  # names can be swapped meanwhile
        check_regular(path, opened.st_mode)
        if opened.st_size > limit:
            raise OSError(
                errno.EFBIG,
                f"it has more than the {limit:,} bytes that such a file may have",
                str(path),
            )
        return file.read(opened.st_size)


def check_regular(path: Path, mode: int | None = None) -> None:
    """Refuse pipes, devices, sockets and folders with an OSError: opening one could wait for ever, or act."""
    mode = os.stat(path).st_mode if mode is None else mode
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def parse_json(data: bytes | str) -> Any:
    """What a JSON text holds; ValueError if it is none, is nested deeper than DEPTH, or has a key twice.

    Example:
        >>> parse_json(b'{"seed": 1, "seed": 2}')
        Traceback (most recent call last):
        ...
        ValueError: a key is there twice
    """
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
    from any name to one form (its key is str), or fields by name, beside which there may be others.

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
        name = getattr(needed, "__name__", "int or null")
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
