"""Where a kernel scales rows instead of plain torch; `rows.apply_rows` is the definition of both.

Sizes: R rows of the pass, B blocks of rows, C channels.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slimbayes.engine.blocks import sizes_equal
from slimbayes.engine.passes import Noise
from slimbayes.kernels import LARGE, ready

SEEDED = 2**20  # from so many numbers on, noise of rows is made where it is used


class Seeded(NamedTuple):
    """Factors (R, C), one line for each row, that no tensor holds: loc + scale * noise, the noise made from a seed.

    `loc`, `scale` are (B, C); `scale` is None for point estimates. `family` is the name of a distribution.
    """

    loc: Tensor
    scale: Tensor | None
    noise: Noise
    salt: int
    family: str
    clip: float | None
    rows: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.loc.shape[1]

    def dim(self) -> int:
        return 2

    def meet(
        self, x: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """x * factors + bias for x (R, C), bias (B, C) or (1, C)."""
        from slimbayes.kernels import scale

        loc, spread, how = self.kernel_lines()
        return scale.scaled(
            x,
            loc,
            spread,
            bias,
            None if spread is None else self.noise.seed,
            how,
            dtype,
        )

    def kernel_lines(self) -> Any:
        """loc and scale, and how kernels make factors from them: `kernels.dense.KernelLines`."""
        from slimbayes.kernels import dense, scale

        clip = float("inf") if self.clip is None else self.clip
        if self.scale is None:
            return dense.KernelLines(
                self.loc if self.clip is None else self.loc.clamp(-clip, clip)
            )
        how = scale.How(
            scale.FAMILIES[self.family], clip, self.salt, self.noise.first_row
        )
        return dense.KernelLines(self.loc, self.scale, how)

    def lines(self) -> Tensor:
        """The factors as a tensor (R, C)."""
        return self.meet(
            torch.ones(1, self.shape[1], device=self.loc.device).expand(self.shape)
        )


def autocast_type(x: Tensor) -> torch.dtype:
    """The type in which autocast would hand x to a matrix product."""
    if x.dtype == torch.float32 and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def fused(
    combine: Any,
    x: Tensor,
    factor: Tensor,
    dim: int,
    channel_dim: int,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor | None:
    """`apply_rows` in one kernel, or None where it cannot or had better not: x is small, or lies in memory otherwise.

    While torch.compile traces, its own kernels fuse the product with what comes before and after.
    """
    if (
        dim != 0
        or combine is not operator.mul
        or torch.compiler.is_compiling()
        or x.numel() < LARGE
    ):
        return None
    if not ready(x) or x.dtype == torch.float64 or x.shape[0] % factor.shape[0]:
        return None
    last = channel_dim % x.dim() == x.dim() - 1
    if last and x.is_contiguous():
        rows = x.view(-1, x.shape[-1])
    elif (
        not last
        and channel_dim == 1
        and x.dim() == 4
        and x.is_contiguous(memory_format=torch.channels_last)
    ):
        rows = x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])
    else:
        return None
    from slimbayes.kernels import scale

    y = scale.scaled(
        rows, _side_by_side(factor), None, _side_by_side(bias), None, scale.How(), dtype
    )
    return (
        y.view(x.shape)
        if last
        else y.view(x.shape[0], *x.shape[2:], x.shape[1]).permute(0, 3, 1, 2)
    )


def product_type(x: Tensor, weight: Any) -> torch.dtype | None:
    """The type in which kernels take x's product with a weight; None where they cannot."""
    dtype, auto = autocast_type(x), torch.is_autocast_enabled(x.device.type)
    fits = (
        dtype == torch.get_autocast_dtype(x.device.type)
        if auto
        else dtype == weight.dtype
    )
    plain = (
        type(weight) in (Tensor, torch.nn.Parameter)
        and not torch._C._are_functorch_transforms_active()
    )
    return dtype if fits and plain and dtype != torch.float64 else None


def dense(
    x: Tensor, weight: Any, out_dim: int, s: Any, r: Any, bias: Tensor | None
) -> Tensor | None:
    """((x o s) W) o r + bias, rows first and channels last, as one operation; None where it cannot be one.

    Shape: x (R, ..., in); s (n, in), r (n, out), where n divides the number of rows.
    """
    dtype = product_type(x, weight)
    if dtype is None or not x.is_contiguous():
        return None
    if isinstance(s, Seeded) and (x.dim() != 2 or x.shape[0] != s.rows):
        return None
    from slimbayes.kernels.dense import KernelLines, scaled_product

    from_seed = isinstance(s, Seeded)
    of_s, of_r = (
        f.kernel_lines() if from_seed else KernelLines(_side_by_side(f)) for f in (s, r)
    )
    seed = s.noise.seed if from_seed else None
    return scaled_product(
        x, weight, out_dim, of_s, of_r, _side_by_side(bias), seed, dtype
    )


def _side_by_side(lines: Any) -> Any:
    return lines if lines is None or lines.stride(1) == 1 else lines.contiguous()


def seeded(width: int, rows: int, anchor: Tensor) -> bool:
    """Whether kernels make `width` numbers for each of so many rows where they are used."""
    large = rows * width >= SEEDED
    return bool(large) and ready(anchor) and not sizes_equal(rows, 1)
