"""Launching a kernel again without asking Triton anew how it is specialised: a tenth of the time of a launch."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from slimbayes.kernels import INTERPRETED

_COMPILED: dict[Any, Any] = {}


def aligned(*tensors: Tensor) -> tuple[bool, ...]:
    """Which tensors start at a multiple of 16 bytes, as part of a key; nothing while torch.compile traces."""
    return (
        ()
        if torch.compiler.is_compiling()
        else tuple([t.data_ptr() % 16 == 0 for t in tensors])
    )


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    args: tuple[Any, ...],
    constants: tuple[Any, ...],
    key: Any,
    warps: int = 4,
) -> None:
    """kernel[grid](*args, *constants, num_warps=warps).

    Args:
        kernel: a Triton kernel whose constants come last. Its whole numbers must not be specialised.
        key: everything else that Triton compiles a variant for: types of pointers, which of them are aligned.
        warps: of a program; they follow from the constants.
    """
    if INTERPRETED or torch.compiler.is_compiling():
        kernel[grid](*args, *constants, num_warps=warps)
        return
    known = kernel, torch.cuda.current_device(), key, constants
    found = _COMPILED.get(known)
    if found is None:
        _COMPILED[known] = kernel[grid](*args, *constants, num_warps=warps)
    else:
        found[grid](*args, *constants)


def launch_steps(
    kernel: Any,
    grid: tuple[int, int, int],
    steps: Iterable[tuple[Any, ...]],
    constants: tuple[Any, ...],
    key: Any,
    warps: int = 4,
) -> None:
    """`launch` for the arguments of each step, all of one variant, which is looked up once, as is the stream."""
    first, *others = steps
    launch(kernel, grid, first, constants, key, warps)
    if INTERPRETED:
        for args in others:
            launch(kernel, grid, args, constants, key, warps)
        return
    again = _COMPILED[kernel, torch.cuda.current_device(), key, constants][grid]
    stream = torch.cuda.current_stream().cuda_stream
    for args in others:
        again(*args, *constants, stream=stream)
