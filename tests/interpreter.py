"""Kernels in Triton's interpreter, chosen when Triton is imported: their tests run in a process of their own."""

import os
import subprocess
import sys

import pytest
import torch

CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if CUDA else "cpu"
needs_triton = (
    pytest.mark.filterwarnings("error:slimbayes runs this model draw by draw")
    if INTERPRETED or CUDA
    else pytest.mark.skip(reason="runs in the process of test_under_the_interpreter")
)


def run_interpreted(file: str) -> None:
    """Run a file's tests with the interpreter, unless they run already."""
    pytest.importorskip("triton", reason="the kernels' tests need Triton")
    if INTERPRETED or CUDA:
        return
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        file,
    ]
    done = subprocess.run(
        words,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
