"""Opening files that may be broken or hostile: sizes are checked before anything is unpacked, and no object is ever built from them.

Every error is a ValueError that names the file and, where there is one, the entry.
"""

from __future__ import annotations

import gzip
import importlib
import io
import lzma
import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

LIMIT = (
    1 << 30
)  # bytes that one file may unpack to: the largest honest one, the year table of 515,345 x 91 float64, has 0.38e9
_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError)


def require(module: str) -> Any:
    """A package that only some formats need.

    Example:
        >>> require("math").sqrt(4.0)
        2.0
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = {"PIL": "Pillow"}.get(module.split(".")[0], module.split(".")[0])
        raise ImportError(f'Reading this format needs {package}: pip install "slimbayes[data]".') from error


@contextmanager
def checked_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """An open zip whose entries have harmless names and unpack to LIMIT bytes at most; reading errors name the file."""
    try:
        archive = zipfile.ZipFile(path)
    except _BROKEN as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{path} is not a readable zip file: {error}") from error
    with archive:
        _check_entries(path, archive)
        yield archive


def _check_entries(path: Path, archive: zipfile.ZipFile) -> None:
    total, seen = 0, set()
    for entry in archive.infolist():
        name = entry.orig_filename
        if (
            "\\" in name
            or ":" in name
            or "\0" in name
            or PurePosixPath(name).is_absolute()
            or ".." in PurePosixPath(name).parts
        ):
            raise ValueError(
                f"{path}: entry {name!r} points outside the archive; entries must have plain relative names."
            )
        if name in seen:
            raise ValueError(f"{path}: entry {name!r} is there twice.")
        seen.add(name)
        total += entry.file_size
        if total > LIMIT:
            raise ValueError(
                f"{path}: entry {name!r} brings the unpacked size to {total:,} bytes, more than the {LIMIT:,} allowed."
            )


def read_entry(path: Path, archive: zipfile.ZipFile, name: str) -> bytes:
    """One entry of a checked zip, no longer than it declares."""
    try:
        return archive.read(name)
    except _BROKEN as error:
        raise ValueError(f"{path}: entry {name!r} is damaged: {error}") from error


def read_npz(path: Path, *names: str) -> dict[str, Any]:
    """Arrays of an .npz file by name, all of them if no name is given. Pickled objects are refused.

    Every named array must be there.
    """
    with checked_zip(path) as archive:
        entries = archive.namelist()
        for entry in entries:
            if not entry.endswith(".npy"):
                raise ValueError(f"{path}: entry {entry!r} is not an array; an .npz file holds .npy entries only.")
        here = {entry.removesuffix(".npy") for entry in entries}
        if missing := set(names) - here:
            raise ValueError(
                f"{path} must hold the arrays {', '.join(names)}; {', '.join(sorted(missing))} is not among {sorted(here)}."
            )
        return {
            name: _array(f"{path}: entry {name!r}", read_entry(path, archive, f"{name}.npy"))
            for name in names or sorted(here)
        }


def read_pickled(path: Path, name: str) -> bytes:
    """The pickle inside an array of objects of an .npz file, as bytes: what to make of it is up to the caller."""
    with checked_zip(path) as archive:
        if f"{name}.npy" not in archive.namelist():
            raise ValueError(f"{path} must hold the array {name}; it has {sorted(archive.namelist())}.")
        content = read_entry(path, archive, f"{name}.npy")
    stream = io.BytesIO(content)
    _, _, dtype = _header(f"{path}: entry {name!r}", stream)
    if not dtype.hasobject:
        raise ValueError(f"{path}: entry {name!r} must hold Python lists (dtype object), got {dtype}.")
    return content[stream.tell() :]


def _header(place: str, stream: io.BytesIO) -> tuple[tuple[int, ...], bool, Any]:
    """Shape, order and dtype of an .npy file."""
    numpy = require("numpy")
    try:
        version = numpy.lib.format.read_magic(stream)
        header = numpy.lib.format.read_array_header_1_0 if version == (1, 0) else numpy.lib.format.read_array_header_2_0
        shape, fortran, dtype = header(stream)
    except ValueError as error:
        raise ValueError(f"{place} is not an .npy array: {error}") from error
    return shape, fortran, dtype


def _array(place: str, content: bytes) -> Any:
    """An array from the bytes of an .npy file whose length is what its header says."""
    numpy, stream = require("numpy"), io.BytesIO(content)
    shape, fortran, dtype = _header(place, stream)
    if dtype.hasobject:
        raise ValueError(f"{place} holds pickled Python objects (dtype {dtype}); only plain numbers and text are read.")
    need = math.prod(shape) * dtype.itemsize
    if len(content) - stream.tell() != need:
        raise ValueError(
            f"{place} has {len(content) - stream.tell()} bytes of data where its shape {shape} needs {need}."
        )
    flat = numpy.frombuffer(content, dtype, offset=stream.tell()) if need else numpy.empty(shape, dtype)
    return flat.reshape(shape, order="F" if fortran else "C").copy()


def map_npy(path: Path, shape: tuple[int | None, ...], kinds: str) -> Any:
    """An .npy file as a memory map, read when touched; writing to it changes memory only.

    `shape` has None where any size will do, `kinds` the letters of the allowed numpy kinds ("u" unsigned, "i" signed, "f" float).
    """
    numpy = require("numpy")
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing.")
    try:
        array = numpy.lib.format.open_memmap(path, mode="c")
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{path} is not a plain .npy array, or it is cut short: {error}") from error
    fits = array.ndim == len(shape) and all(want in (None, got) for got, want in zip(array.shape, shape))
    if not fits or array.dtype.kind not in kinds:
        wanted = "(" + ", ".join("n" if size is None else str(size) for size in shape) + ")"
        raise ValueError(
            f"{path} holds {array.dtype} of shape {array.shape}, expected {wanted} with a dtype of kind {'/'.join(kinds)}."
        )
    return array


def read_idx(path: Path, dims: int) -> Tensor:
    """An idx file of unsigned bytes with `dims` dimensions, plain or gzipped (its name ends in .gz): uint8."""
    shape = idx_shape(path, dims)
    need = math.prod(shape)
    if need > LIMIT:
        raise ValueError(f"{path}: its header asks for {need:,} bytes {shape}, more than the {LIMIT:,} allowed.")
    try:
        with _open(path) as file:
            file.seek(4 + 4 * dims)
            content = bytearray(file.read(need + 1))
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged or cut short: {error}") from error
    if len(content) != need:
        got = f"{len(content):,}" if len(content) < need else "more"
        raise ValueError(
            f"{path}: the header's shape {shape} needs {need:,} bytes, the file has {got}; it stops in record {_row(content, shape)}."
        )
    return (
        torch.frombuffer(content, dtype=torch.uint8).reshape(shape)
        if need
        else torch.empty(shape, dtype=torch.uint8, device="cpu")
    )


def idx_shape(path: Path, dims: int) -> tuple[int, ...]:
    """Sizes from an idx header."""
    try:
        with _open(path) as file:
            header = file.read(4 + 4 * dims)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    magic = bytes((0, 0, 8, dims))
    if header[:4] != magic or len(header) < 4 + 4 * dims:
        raise ValueError(
            f"{path} starts with {header[:4].hex() or 'nothing'}, an idx file of {dims}-dimensional bytes with {magic.hex()}."
        )
    return tuple(int.from_bytes(header[at : at + 4], "big") for at in range(4, len(header), 4))


def _open(path: Path) -> Any:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _row(content: bytearray, shape: tuple[int, ...]) -> int:
    return len(content) // max(1, math.prod(shape[1:]))


def read_xz(path: Path) -> bytes:
    """The content of an .xz file, LIMIT bytes at most."""
    unpacker = lzma.LZMADecompressor(memlimit=LIMIT)
    try:
        content = unpacker.decompress(path.read_bytes(), LIMIT + 1)
    except lzma.LZMAError as error:
        raise ValueError(f"{path} is not a readable .xz file: {error}") from error
    if not unpacker.eof:
        raise ValueError(f"{path} is cut short, or unpacks to more than the {LIMIT:,} bytes allowed.")
    return content
