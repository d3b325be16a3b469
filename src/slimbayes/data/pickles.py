"""The python version of CIFAR is pickles. This reads such files and nothing else.

A pickle may call any function it can name. These files name three, all of numpy, to rebuild one array of bytes; each
has a harmless stand-in here that only notes its arguments, and any other name is refused: no name in a file
is ever looked up. numpy's own functions would not do: a state they trust can make it take numbers for addresses.
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

from slimbayes.data.archives import LIMIT
from slimbayes.untrusted import read_file


class _Dtype:
    """Stands for numpy.dtype: the type's code, as "u1"."""

    def __init__(self, code: Any = None, *rest: Any) -> None:
        self.code = code.decode("latin1") if isinstance(code, bytes) else code

    def __setstate__(self, state: Any) -> None:
        pass  # byte order and alignment mean nothing for single bytes


class _Array:
    """Stands for numpy.ndarray: shape, type, order and content as numpy would be told them."""

    def __init__(self, *arguments: Any) -> None:
        self.shape: Any = None
        self.code: Any = None
        self.fortran, self.content = False, None

    def __setstate__(self, state: Any) -> None:
        _, self.shape, dtype, self.fortran, self.content = state
        self.code = dtype.code if isinstance(dtype, _Dtype) else None


class _Bytes(bytes):
    """Stands for _codecs.encode, which is how Python 3 spells bytes in protocol 2. A class with a state that cannot be
    set: a pickle may set the attributes of anything that it was handed, a plain function's too."""

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
    packed = read_file(path, LIMIT)
    try:
        for operation, argument, _ in pickletools.genops(packed):
            # Python makes room for whatever place in its memory a pickle names: six bytes could ask for all there is.
            if "PUT" in operation.name and isinstance(argument, int) and argument > len(packed):
                raise ValueError(f"it asks for memory place {argument:,}, more than it has bytes")
        content = _Reader(io.BytesIO(packed), encoding="bytes").load()
    except Exception as error:  # a broken pickle can raise nearly anything
        raise ValueError(f"{path} is not a file of CIFAR's python version: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a dictionary, got {type(content).__name__}.")
    named = {key.decode("latin1") if isinstance(key, bytes) else str(key): value for key, value in content.items()}
    return {k: _tensor(f"{path}: {k!r}", v) if isinstance(v, _Array) else v for k, v in named.items()}


def _tensor(place: str, array: _Array) -> Tensor:
    raw, shape = array.content, array.shape
    if not isinstance(raw, bytes) or not isinstance(shape, tuple):
        raise ValueError(f"{place} is not an array of bytes.")
    if array.code not in ("u1", "|u1") or not all(type(n) is int and n > 0 for n in shape):
        raise ValueError(f"{place} must be an array of unsigned bytes, got {array.code!r} of shape {shape}.")
    if math.prod(shape) != len(raw):
        raise ValueError(f"{place} has {len(raw):,} bytes where its shape {shape} needs {math.prod(shape):,}.")
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return flat.reshape(shape[::-1]).permute(*reversed(range(len(shape)))) if array.fortran else flat.reshape(shape)
