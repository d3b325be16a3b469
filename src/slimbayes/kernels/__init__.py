"""Fused kernels, written in Triton, for what posteriors and layers do to activations.

Each kernel has a twin in plain torch that defines it. Nobody chooses between them: a kernel runs where it can, on CUDA
tensors with Triton installed, and the twin everywhere else. Under TRITON_INTERPRET=1 kernels also run on a CPU, slowly,
as the tests do where there is no GPU.
"""

import os
from importlib.util import find_spec
from types import TracebackType

import torch
from torch import Tensor

LARGE = 2**18  # below so many elements launching a kernel costs more than it saves
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_POSSIBLE = find_spec("triton") is not None and (
    INTERPRETED or torch.cuda.is_available()
)
_ALLOWED = [True]


class disable:
    """Use the plain-torch twins from now on, or inside a with statement.

    Example:
        >>> from slimbayes import kernels
        >>> with kernels.disable():
        ...     kernels.ready(torch.zeros(1))
        False
    """

    def __init__(self) -> None:
        self.before = _ALLOWED[0]
        _ALLOWED[0] = False

    def __enter__(self) -> "disable":
        return self

    def __exit__(
        self, *error: type[BaseException] | BaseException | TracebackType | None
    ) -> None:
        _ALLOWED[0] = self.before


def enable() -> None:
    """Let kernels run again where they can, after `disable()`."""
    _ALLOWED[0] = True


def ready(*tensors: Tensor) -> bool:
    """Whether kernels may run on these tensors."""
    return (
        _ALLOWED[0] and _POSSIBLE and (INTERPRETED or all(t.is_cuda for t in tensors))
    )
