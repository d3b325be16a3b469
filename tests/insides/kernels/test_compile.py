"""Kernels as compiled for an H200, on a machine without one: what the interpreter lets pass and a GPU would refuse, and
what the assembler says of registers and shared memory. Tensors lie on the CPU; nothing is launched.
"""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import CUDA, INTERPRETED
from torch import Tensor

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CUDA or INTERPRETED,
        reason="kernels run here, which says more than compiling them",
    ),
    pytest.mark.filterwarnings(
        "ignore:TRITON_DEFAULT_FP_FUSION"
    ),  # of Triton 3.9, about 3.10
]
SHARED = 227 * 1024  # bytes that a program of an H200 can have
REGISTERS = 65536  # of a multiprocessor
BF16, FP32 = torch.bfloat16, torch.float32


class Hopper:
    """As much of a driver as Triton asks before it compiles."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every kernel that is launched is compiled instead, and found in this list."""
    pytest.importorskip("triton", reason="kernels need Triton: make kernels")
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from slimbayes.kernels import launch

    run, found = JITFunction.run, []
    monkeypatch.setattr(
        JITFunction,
        "run",
        lambda *args, **how: found.append(run(*args, **how | {"warmup": True})),
    )
    monkeypatch.setattr(launch, "INTERPRETED", True)  # Triton is asked at each launch
    monkeypatch.setattr(driver, "_active", Hopper())
    return found


def check(kernels: list[Any], folder: Path) -> None:
    """Nothing spilled, and a multiprocessor has room for two programs at least."""
    from triton.backends.nvidia.compiler import get_ptxas

    assert kernels
    for kernel in kernels:
        code = folder / "kernel.ptx"
        code.write_text(kernel.asm["ptx"])
        arch = re.search(r"\.target (\w+)", kernel.asm["ptx"])[1]  # type: ignore[index]
        words = [
            get_ptxas(90).path,
            "-v",
            f"-arch={arch}",
            str(code),
            "-o",
            str(folder / "kernel.cubin"),
        ]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stderr
        registers = int(re.search(r"Used (\d+) registers", said)[1])  # type: ignore[index]
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
        shared, warps = kernel.metadata.shared, kernel.metadata.num_warps
        what = f"{kernel.name}: {registers} registers, {spilled} bytes spilled, {shared} shared, {warps} warps"
        assert (
            not spilled
            and 2 * shared <= SHARED
            and 2 * 32 * warps * registers <= REGISTERS
        ), what


def numbers(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.rand(shape).to(dtype) + 0.1


@pytest.mark.parametrize(
    ("channels", "dtype"),
    [(16, FP32), (64, BF16), (160, BF16), (640, BF16), (640, FP32)],
)
@pytest.mark.parametrize("family", range(4))
def test_scaled_rows(
    compiled: list[Any], tmp_path: Path, family: int, channels: int, dtype: torch.dtype
) -> None:
    from slimbayes.kernels.scale import gradients_of_rows, scale_rows

    x, loc, bias = (
        numbers(64, channels, dtype=dtype),
        numbers(4, channels),
        numbers(4, channels),
    )
    scale, seed = (numbers(4, channels), torch.tensor(3)) if family else (None, None)
    how, needs = (family, 2.0, 0, 0), (True, True, family > 0, True)
    scale_rows(x, loc, scale, bias, seed, how, dtype)
    gradients_of_rows(x, x, loc, scale, seed, how, (4, FP32), needs)
    assert len(compiled) == 2
    check(compiled, tmp_path)


@pytest.mark.parametrize(
    ("rank", "dtype"), [(1, BF16), (2, BF16), (2, FP32), (8, BF16)]
)
def test_tied(
    compiled: list[Any], tmp_path: Path, rank: int, dtype: torch.dtype
) -> None:
    from slimbayes.kernels.tied import sum_log_outer, tied_local

    p, q = numbers(256, rank).requires_grad_(), numbers(128, rank).requires_grad_()
    x, weight = (
        numbers(64, 256, dtype=dtype).requires_grad_(),
        numbers(128, 256).requires_grad_(),
    )
    tied_local(
        x, weight, 0, numbers(128), p, q, numbers(128), torch.tensor(3), 0, dtype
    ).sum().backward()
    sum_log_outer(p, q).backward()
    assert len(compiled) == 5
    check(compiled, tmp_path)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("rows", "units", "lines", "weights", "dtype"),
    [
        (256, 512, 256, 1, BF16),
        (256, 512, 4, 4, BF16),
        (1024, 512, 1024, 1, BF16),  # eight warps
        (8, 33, 2, 1, BF16),
        (256, 512, 256, 1, FP32),
    ],
)
def test_lstm(
    compiled: list[Any],
    tmp_path: Path,
    rows: int,
    units: int,
    lines: int,
    weights: int,
    dtype: torch.dtype,
    reverse: bool,
) -> None:
    from slimbayes.kernels.lstm import Cell
    from slimbayes.kernels.lstm_triton import backward, forward

    gates, h, c = (
        numbers(*shape, dtype=dtype)
        for shape in ((3, rows, 4 * units), (rows, units), (rows, units))
    )
    shapes = (weights, 4 * units, units), (lines, units), *((lines, 4 * units),) * 3
    cell = Cell(*(numbers(*shape, dtype=dtype) for shape in shapes))
    lengths = torch.full((rows,), 2) if reverse else None
    forward(gates, cell, h, c, lengths, reverse, False)
    states, _, *kept = forward(gates, cell, h, c, lengths, reverse, True)
    backward(states, c, gates, cell, h, c, states, *kept, lengths, reverse, True)
    assert len({kernel.hash for kernel in compiled}) == 4
    check(list({kernel.hash: kernel for kernel in compiled}.values()), tmp_path)
