"""Opening files that may be broken or hostile: sizes are checked before anything is unpacked, and no object is ever
built.

Every error is a ValueError that names the file and, where there is one, the entry.
"""

from __future__ import annotations

import gzip
import importlib
import lzma
import math
import os
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

import numpy as np
import torch
from torch import Tensor

from slimbayes.errors import cut
from slimbayes.untrusted import most_unpacked, open_file, read_file

LIMIT = (
    1 << 30
)  # bytes that a file may unpack to: the largest honest one, the year table of 515,345 x 91, has 0.38e9
_BLOCK = 1 << 22  # bytes of rows that are read together
DAMAGE = (
    ValueError,
    TypeError,
    OSError,
    EOFError,
    KeyError,
    MemoryError,
    zipfile.BadZipFile,
    zlib.error,
)
_BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    OSError,
    NotImplementedError,
    RuntimeError,
)


def require(module: str) -> Any:
    """A package that only some formats need."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = {"PIL": "Pillow"}.get(module.split(".")[0], module.split(".")[0])
        raise ImportError(
            f'Reading this format needs {package}: pip install "slimbayes-lab".'
        ) from error


@contextmanager
def checked_zip(
    path: Path, content: IO[bytes] | None = None, limit: float | None = None
) -> Iterator[zipfile.ZipFile]:
    """An open zip, at `path` or the `content` that came from there, whose entries have harmless names and unpack to
    `limit` bytes at most (LIMIT), and to no more than such a file may (`most_unpacked`); reading errors name the file."""
    with ExitStack() as stack:
        try:
            file = content or stack.enter_context(open_file(path))
            archive = stack.enter_context(zipfile.ZipFile(file))
            size = file.seek(0, os.SEEK_END)
        except _BROKEN as error:
            why = getattr(error, "strerror", None) or error
            raise ValueError(f"{path} is not a readable zip file: {why}") from error
        _check_entries(
            path, archive, min(LIMIT if limit is None else limit, most_unpacked(size))
        )
        yield archive


def _check_entries(path: Path, archive: zipfile.ZipFile, limit: float) -> None:
    total, names = 0, [entry.orig_filename for entry in archive.infolist()]
    for name, entry in zip(names, archive.infolist()):
        inside = PurePosixPath(name)
        if set(name) & set("\\:\0") or inside.is_absolute() or ".." in inside.parts:
            raise ValueError(
                f"{path}: entry {name!r} points outside the archive; names must be plain and relative."
            )
        total += entry.file_size
        if total > limit:
            size = f"the unpacked size to {total:,} bytes, more than the {limit:,} allowed for a file of its size"
            raise ValueError(
                f"{path}: entry {name!r} brings {size}. If that is meant, write it without compression, as np.savez "
                f"does."
            )
    if len(set(names)) < len(names):
        raise ValueError(f"{path}: an entry is there twice.")


def read_entry(path: Path, archive: zipfile.ZipFile, name: str) -> bytes:
    """One entry of a checked zip, no longer than it declares."""
    try:
        return archive.read(name)
    except _BROKEN as error:
        raise ValueError(f"{path}: entry {name!r} is damaged: {error}") from error


def read_npz(
    path: Path,
    *names: str,
    content: IO[bytes] | None = None,
    limit: float | None = None,
) -> dict[str, Any]:
    """Arrays of an .npz file by name, each of which must be there, or all of them. Pickled objects are refused.

    `content` is what the file holds where it had to be unpacked first.
    """
    with checked_zip(path, content, limit) as archive:
        here = _array_names(path, archive)
        if missing := set(names) - set(here):
            listed = ", ".join(sorted(missing))
            raise ValueError(
                f"{path} must hold the arrays {', '.join(names)}; {listed} is not among {sorted(here)}."
            )
        return {name: _array(path, archive, name) for name in names or sorted(here)}


def npz_headers(path: Path) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and dtype of every array of an .npz file, none of which is read."""
    with checked_zip(path, limit=math.inf) as archive:
        found = {}
        for name in _array_names(path, archive):
            with _opened_array(path, archive, name) as (_, shape, _, dtype):
                found[name] = (shape, dtype)
        return found


def _array_names(path: Path, archive: zipfile.ZipFile) -> list[str]:
    for entry in archive.namelist():
        if not entry.endswith(".npy"):
            raise ValueError(
                f"{path}: entry {entry!r} is not an array; an .npz file holds .npy entries only."
            )
    return [entry.removesuffix(".npy") for entry in archive.namelist()]


def npy_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, Any]:
    """Shape, order and dtype of an .npy file; ValueError where there is none."""
    npy = np.lib.format
    try:
        first = npy.read_magic(stream) == (1, 0)
        read = npy.read_array_header_1_0 if first else npy.read_array_header_2_0
        return read(stream)
    except (
        ArithmeticError,
        LookupError,
        MemoryError,
        RecursionError,
        SyntaxError,
        TypeError,
        tokenize.TokenError,
    ) as error:  # numpy takes a header for Python's words
        raise ValueError(f"its header is damaged: {cut(str(error))}") from error


def npy_blocks(stream: IO[bytes], length: int | None = None) -> Iterator[Tensor]:
    """The array of an .npy stream in blocks of rows; DAMAGE has what is raised where it is none, or is cut short.

    `length` is how many bytes the stream has, where that is known: an array of more is refused before it gets room.
    """
    shape, fortran, dtype = npy_header(stream)
    if dtype.hasobject or not shape or min(shape) < 0:
        raise ValueError("an array of rows of numbers is needed")
    rows, row = shape[0], dtype.itemsize * math.prod(shape[1:])
    if length is not None and rows * row > length:
        raise ValueError(
            f"it ends before its last row: shape {shape} of {dtype} needs {rows * row:,} bytes"
        )
    size = (
        rows if fortran else max(1, _BLOCK // max(1, row))
    )  # whose columns come first is read at once
    for start in range(0, max(1, rows), max(1, size)):
        count = min(size, rows - start)
        data = stream.read(count * row)
        if len(data) != count * row:
            raise ValueError(f"it ends before its last row, of {rows:,}")
        block = np.frombuffer(data, dtype).reshape(
            (count, *shape[1:]), order="F" if fortran else "C"
        )
        yield torch.from_numpy(np.array(block, dtype.newbyteorder("="), order="C"))
    if stream.read(1):  # of an archive, this looks at the checksum too
        raise ValueError("it goes on after its last row")


@contextmanager
def _opened_array(
    path: Path, archive: zipfile.ZipFile, name: str
) -> Iterator[tuple[IO[bytes], tuple[int, ...], bool, Any]]:
    """An array's numbers as a stream, with its shape, order and dtype, which need as many bytes as there are."""
    place = f"{path}: entry {name!r}"
    try:
        with archive.open(f"{name}.npy") as stream:
            try:
                shape, fortran, dtype = npy_header(stream)
            except ValueError as error:
                raise ValueError(f"{place} is not an .npy array: {error}") from error
            if dtype.hasobject:
                raise ValueError(
                    f"{place} holds pickled Python objects (dtype {dtype}); only plain numbers and text are read."
                )
            have = archive.getinfo(f"{name}.npy").file_size - stream.tell()
            need = math.prod(shape) * dtype.itemsize
            if have != need or any(size < 0 for size in shape):
                raise ValueError(
                    f"{place} has {have} bytes of data where its shape {shape} needs {need}."
                )
            yield stream, shape, fortran, dtype
    except _BROKEN as error:
        raise ValueError(
            f"{path}: entry {f'{name}.npy'!r} is damaged: {error}"
        ) from error


def _array(path: Path, archive: zipfile.ZipFile, name: str) -> Any:
    """An array of a checked zip, read piece by piece into its place."""
    with _opened_array(path, archive, name) as (stream, shape, fortran, dtype):
        array = np.empty(shape, dtype, order="F" if fortran else "C")
        if array.size and dtype.itemsize:
            flat = array.reshape(-1, order="A").view(np.uint8)
            for start in range(0, len(flat), _BLOCK):
                piece = stream.read(len(flat[start : start + _BLOCK]))
                flat[start : start + len(piece)] = np.frombuffer(piece, np.uint8)
                if len(piece) < min(_BLOCK, len(flat) - start):
                    raise EOFError("it is cut short")
        stream.read(1)  # looks at the checksum
        return array


def map_npy(path: Path, shape: tuple[int | None, ...], kinds: str) -> Any:
    """An .npy file as a memory map, read when touched; writing to it changes memory only.

    `shape` has None where any size will do, `kinds` the letters of the allowed numpy kinds (unsigned, int, float).
    """
    try:
        with open_file(path) as stream:
            found, fortran, dtype = npy_header(stream)
            if dtype.hasobject:
                raise ValueError("it holds pickled Python objects")
            order: Any = "F" if fortran else "C"
            array = np.memmap(stream, dtype, "c", stream.tell(), found, order)
    except (ValueError, OSError, EOFError, OverflowError, MemoryError) as error:
        raise ValueError(
            f"{path} is not a plain .npy array, or it is cut short: {error}"
        ) from error
    fits = array.ndim == len(shape) and all(
        want in (None, got) for got, want in zip(array.shape, shape)
    )
    if not fits or array.dtype.kind not in kinds:
        wanted = f"({', '.join('n' if size is None else str(size) for size in shape)}) of kind {'/'.join(kinds)}"
        raise ValueError(
            f"{path} holds {array.dtype} of shape {array.shape}, expected {wanted}."
        )
    return array


def _unpacked(path: Path, file: IO[bytes]) -> IO[bytes]:
    """An open file, or what is packed in it where its name ends in .gz."""
    return cast(IO[bytes], gzip.open(file)) if path.suffix == ".gz" else file


def read_idx(path: Path, dims: int) -> Tensor:
    """An idx file of unsigned bytes with `dims` dimensions, plain or gzipped (its name ends in .gz): uint8."""
    start, magic = 4 + 4 * dims, bytes((0, 0, 8, dims))
    try:
        with open_file(path) as stored, _unpacked(path, stored) as file:
            most = min(LIMIT, most_unpacked(os.fstat(stored.fileno()).st_size))
            header = file.read(start)
            shape = tuple(
                int.from_bytes(header[at : at + 4], "big") for at in range(4, start, 4)
            )
            content = bytearray(file.read(min(math.prod(shape), most) + 1))
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f"{path} cannot be read, is damaged or cut short: {error}"
        ) from error
    if header[:4] != magic or len(header) < start:
        got = header[:4].hex() or "nothing"
        raise ValueError(
            f"{path} starts with {got}, an idx file of {dims}-dimensional bytes with {magic.hex()}."
        )
    need, have = math.prod(shape), len(content)
    if have != need:
        got, row = (
            f"{have:,}" if have < need else "more",
            have // max(1, math.prod(shape[1:])),
        )
        raise ValueError(
            f"{path}: shape {shape} needs {need:,} bytes, the file has {got}; it stops in record {row}."
        )
    flat = (
        torch.frombuffer(content, dtype=torch.uint8)
        if need
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    return flat.reshape(shape)


def read_xz(path: Path) -> bytes:
    """The content of an .xz file, LIMIT bytes at most."""
    unpacker, most = lzma.LZMADecompressor(memlimit=LIMIT), LIMIT
    try:
        packed = read_file(path, LIMIT)
        most = min(LIMIT, most_unpacked(len(packed)))
        content = unpacker.decompress(packed, most + 1)
    except (OSError, lzma.LZMAError) as error:
        raise ValueError(f"{path} is not a readable .xz file: {error}") from error
    if not unpacker.eof:
        raise ValueError(
            f"{path} is cut short, or unpacks to more than the {most:,} bytes allowed."
        )
    return content
