"""Scales of distributions, and the unconstrained parameters behind them; and fair signs from standard normals."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

SCALE_FLOOR = 1e-7  # the reference code's constraint adds it, so that a scale is never exactly zero


def widen(tensor: Tensor) -> Tensor:
    """Half-precision tensors as float32, others as they are: scales and KLs need the digits."""
    return (
        tensor.float()
        if tensor.is_floating_point() and tensor.element_size() == 2
        else tensor
    )


def scale_from_rho(rho: Tensor) -> Tensor:
    """Map an unconstrained parameter to a positive scale: softplus(rho) + 1e-7, in float32 or wider.

    >>> import torch
    >>> round(scale_from_rho(torch.tensor(-3.437516)).item(), 6)
    0.031639
    """
    from torch.nn.functional import softplus

    return softplus(widen(rho)) + SCALE_FLOOR


def rho_from_scale(scale: float) -> float:
    """Invert `scale_from_rho` for one number.

    >>> round(rho_from_scale(0.0316386), 4)
    -3.4375
    """
    if not scale > SCALE_FLOOR:
        raise ValueError(f"A scale must be above {SCALE_FLOOR:g}, got {scale!r}.")
    excess = scale - SCALE_FLOOR
    return excess if excess > 30 else math.log(math.expm1(excess))


def cholesky_factor(log_scale: Tensor, below: Tensor | None) -> Tensor:
    """diag(e^log_scale) (1 + T), T strictly lower triangular, in float32 at least: correlations are apart from scales.

    Shape: log_scale (..., D), below (..., D (D - 1) / 2) what T has, row by row, None for zeros; returns (..., D, D).

    >>> import torch
    >>> cholesky_factor(torch.zeros(2), torch.tensor([0.5]))
    tensor([[1.0000, 0.0000],
            [0.5000, 1.0000]])
    """
    import torch

    scale = widen(log_scale).exp()
    if below is None:
        return torch.diag_embed(scale)
    size = scale.shape[-1]
    unit = (
        torch.eye(size, dtype=scale.dtype, device=scale.device)
        .flatten()
        .repeat(*scale.shape[:-1], 1)
    )
    row, column = torch.tril_indices(size, size, -1, device=scale.device)
    index = (row * size + column).expand(below.shape)
    return scale.unsqueeze(-1) * unit.scatter(-1, index, widen(below)).unflatten(
        -1, (size, size)
    )


def dropout_scale(rate: float) -> float:
    """Standard deviation of the multiplicative noise of dropout with this rate: sqrt(p / (1 - p)).

    Rates of 0.1 to 0.3 are the paper's "dropout initialisation"; a rate near zero is its "deterministic" one.

    >>> round(dropout_scale(0.1), 4)
    0.3333
    """
    if not 0 < rate < 1:
        raise ValueError(
            f"A dropout rate must lie strictly between 0 and 1, got {rate!r}."
        )
    return math.sqrt(rate / (1 - rate))


def rademacher(normals: Tensor) -> Tensor:
    """Eight fair signs from each standard normal: the first eight binary digits of its quantile, 1 for 0 and -1 for 1.

    Shape: normals (R, w); returns (R, 8 w).

    >>> import torch
    >>> rademacher(torch.tensor([[0.0]]))  # 0.1 in binary
    tensor([[-1.,  1.,  1.,  1.,  1.,  1.,  1.,  1.]])
    """
    import torch

    byte = (torch.special.ndtr(normals) * 256).clamp_max(255).to(torch.uint8)
    if (
        normals.device.type != "cpu"
    ):  # on an H200, looking up 4 million lines took 2.5 ms
        return bits_as_signs(byte).to(normals.dtype).flatten(1)
    every = bits_as_signs(torch.arange(256).to(torch.uint8)).to(normals.dtype)
    return torch.nn.functional.embedding(byte.int(), every).flatten(1)


def bits_as_signs(byte: Tensor) -> Tensor:
    """The binary digits of bytes (...), as signs (..., 8)."""
    import torch

    digit = (128 >> torch.arange(8, device=byte.device)).to(torch.uint8)
    return torch.where((byte.unsqueeze(-1) & digit) > 0, -1.0, 1.0)
