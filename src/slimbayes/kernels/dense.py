"""y = ((x o s) W) o r + b in two kernels and a product, and all gradients in two kernels and two products.

`rows.apply_rows` before and after a product defines it; as one operation it costs a host a third of the time of three.

Sizes: M rows, B blocks of rows, in and out channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slimbayes.kernels.scale import (
    How,
    gradients_of_rows,
    refuse_second_derivatives,
    scale_rows,
)


class KernelLines(NamedTuple):
    """Factors (B, C), or (M, C) as loc + scale * noise made from a seed."""

    loc: Tensor
    scale: Tensor | None = None
    how: tuple[Any, ...] = How()


def scaled_product(
    x: Tensor,
    weight: Tensor,
    out_dim: int,
    s: KernelLines,
    r: KernelLines,
    bias: Tensor | None = None,
    seed: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """((x o s) W) o r + bias.

    Shape: x (M, in), or (..., in) of M rows that lie side by side, as the result then does; weight (out, in), or (in,
    out) if `out_dim` is 1; bias (B, out) or (1, out). Columns of all but the weight must lie side by side. The product
    is taken in `dtype`, by default x's.
    """
    how = out_dim, s.how, r.how, dtype or x.dtype
    return _apply(x, weight, s.loc, s.scale, r.loc, r.scale, bias, seed, how)


class _ScaledProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        s: Tensor,
        s_scale: Tensor | None,
        r: Tensor,
        r_scale: Tensor | None,
        bias: Tensor | None,
        seed: Tensor | None,
        how: tuple[int, Any, Any, torch.dtype],
    ) -> Tensor:
        out_dim, how_s, how_r, dtype = how
        # Cast by hand: autocast would keep the cast weight, without a way back to the weight, for who uses it next.
        low, shape = weight.to(dtype), x.shape
        x = (
            x.view(-1, shape[-1]) if len(shape) > 2 else x
        )  # here, for autograd keeps a book of every view outside
        scaled = scale_rows(x, s, s_scale, None, seed, how_s, dtype)
        z = scaled @ (low.t() if out_dim == 0 else low)
        kept = scaled if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(x, low, s, s_scale, r, r_scale, seed, kept, z)
        ctx.how, ctx.bias = how, None if bias is None else (bias.shape[0], bias.dtype)
        ctx.dtype, ctx.shape = weight.dtype, shape
        y = scale_rows(z, r, r_scale, bias, seed, how_r, dtype)
        return y.view(*shape[:-1], y.shape[1]) if len(shape) > 2 else y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        refuse_second_derivatives()
        x, low, s, s_scale, r, r_scale, seed, scaled, z = ctx.saved_tensors
        out_dim, how_s, how_r, _ = ctx.how
        need_x, need_w, need_s, need_s_scale, need_r, need_r_scale, need_bias = (
            ctx.needs_input_grad[:7]
        )
        g, inner = (
            gradients[0].reshape(z.shape).contiguous(),
            need_x or need_s or need_s_scale,
        )
        dx: list[Any] = [None] * 3
        dw = None
        dz: Any
        dz, *dr = gradients_of_rows(
            g,
            z,
            r,
            r_scale,
            seed,
            how_r,
            ctx.bias,
            (inner or need_w, need_r, need_r_scale, need_bias),
        )
        if need_w:
            dw = (dz.t() @ scaled if out_dim == 0 else scaled.t() @ dz).to(ctx.dtype)
        if inner:
            back = dz @ (low if out_dim == 0 else low.t())
            dx = gradients_of_rows(
                back,
                x,
                s,
                s_scale,
                seed,
                how_s,
                None,
                (need_x, need_s, need_s_scale, False),
            )[:3]
        return (
            None if dx[0] is None else dx[0].view(ctx.shape),
            dw,
            *dx[1:],
            *dr,
            None,
            None,
        )


# Past what Function.apply does in Python for tensors of torch.func, which never come here: a tenth of a call's time.
_apply: Any = super(torch.autograd.Function, _ScaledProduct).apply
