"""The python version of CIFAR and Keras' reviews are pickles. This reads such files and nothing else: no name in them is ever looked up.

A pickle may call any function it can name. These files name three, all of numpy, to rebuild one array, of bytes or of lists; each has a
harmless stand-in here that only notes its arguments, and any other name is refused.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class _Dtype:
    """Stands for numpy.dtype: the type's code, as "u1"."""

    def __init__(self, code: Any = None, *rest: Any) -> None:
        self.code = code.decode("latin1") if isinstance(code, bytes) else code

    def __setstate__(self, state: Any) -> None:
        pass  # byte order and alignment mean nothing for single bytes


class _Array:
    """Stands for numpy.ndarray: the state that numpy would take its content from."""

    def __init__(self, *arguments: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Bytes(bytes):
    """Stands for _codecs.encode, which is how Python 3 spells bytes in protocol 2. A class with a state that cannot be set: a pickle
    may set the attributes of anything that it was handed, a plain function's too."""

    def __new__(cls, text: Any, codec: Any = "latin1") -> _Bytes:
        if not isinstance(text, str) or codec not in ("latin1", b"latin1"):
            raise ValueError(f"a byte string spelled with the codec {codec!r}, only latin1 is known")
        return super().__new__(cls, text.encode("latin1"))

    def __setstate__(self, state: Any) -> None:
        raise ValueError("a byte string with attributes")


_STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _Bytes,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            raise ValueError(f"it asks for {module}.{name}, which no such file does; refused, nothing was run")
        return _STAND_INS[module, name]


def read_cifar_pickle(path: Path) -> dict[str, Any]:
    """The dictionary in a file of CIFAR's python version, text keys, arrays as uint8 tensors."""
    try:
        content = _load(path.read_bytes())
    except FileNotFoundError:
        raise
    except Exception as error:  # a broken pickle can raise nearly anything
        raise ValueError(f"{path} is not a file of CIFAR's python version: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a dictionary, got {type(content).__name__}.")
    named = {key.decode("latin1") if isinstance(key, bytes) else str(key): value for key, value in content.items()}
    return {key: _tensor(path, key, value) if isinstance(value, _Array) else value for key, value in named.items()}


def read_ragged(place: str, packed: bytes) -> list[Any]:
    """The items of a pickled numpy array (N,) of Python objects, as plain as they are in the pickle: numbers, text, lists of these."""
    try:
        array = _load(packed)
    except Exception as error:  # a broken pickle can raise nearly anything
        raise ValueError(f"{place} is not a pickled array of lists: {error}") from error
    state: Any = array.state if isinstance(array, _Array) else None
    fits = (
        isinstance(state, tuple)
        and len(state) == 5
        and isinstance(state[2], _Dtype)
        and state[2].code in ("O", "O8", "|O")
    )
    if not fits or not isinstance(state[4], list) or state[1] != (len(state[4]),):
        raise ValueError(
            f"{place} must hold one array of lists (n,), got {type(array).__name__.strip('_')} of another kind or shape."
        )
    return state[4]


def _load(packed: bytes) -> Any:
    _check_sizes(packed)
    return _Reader(io.BytesIO(packed), encoding="bytes").load()


def _check_sizes(packed: bytes) -> None:
    """Python makes room for whatever place in its memory a pickle names: six bytes could ask for all there is."""
    for operation, argument, _ in pickletools.genops(packed):
        if "PUT" in operation.name and isinstance(argument, int) and argument > len(packed):
            raise ValueError(f"it asks for memory place {argument:,}, more than it has bytes")


def _tensor(path: Path, key: str, array: _Array) -> Tensor:
    state = array.state
    if not (
        isinstance(state, tuple) and len(state) == 5 and isinstance(state[1], tuple) and isinstance(state[4], bytes)
    ):
        raise ValueError(f"{path}: {key!r} is not an array of bytes.")
    _, shape, dtype, fortran, raw = state
    if (
        not isinstance(dtype, _Dtype)
        or dtype.code not in ("u1", "|u1")
        or not all(type(n) is int and n > 0 for n in shape)
    ):
        raise ValueError(
            f"{path}: {key!r} must be an array of unsigned bytes, got {getattr(dtype, 'code', dtype)!r} of shape {shape}."
        )
    if math.prod(shape) != len(raw):
        raise ValueError(f"{path}: {key!r} has {len(raw):,} bytes where its shape {shape} needs {math.prod(shape):,}.")
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return flat.reshape(shape[::-1]).permute(*reversed(range(len(shape)))) if fortran else flat.reshape(shape)
