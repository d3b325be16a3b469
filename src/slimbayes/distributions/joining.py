"""Parameters of many layers side by side, and the way back of their gradients.

Draws are made from such a whole, and what is added to the loss from the parameters themselves, a KL or a penalty, may
send its gradient there, too: it is then added once, and not to each parameter's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from operator import is_
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

MANY = {
    "cuda": 8
}  # by kind of device: parameters from which on this pays; on a CPU it does for none


def needs_autograd(x: Tensor) -> bool:
    """Whether autograd must see plain operations, and no backward of our own: for compilers, torch.func, shards."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or hasattr(x, "full_tensor")
    )


class Joined:
    """Parameters, and the tensor that has them side by side along a dimension: its values may be older than theirs."""

    def __init__(self, parts: Sequence[Tensor], whole: Tensor, dim: int) -> None:
        self.parts, self.whole, self.dim = parts, whole, dim
        _JOINED[id(parts[0])] = self

    def leads_back(self) -> bool:
        """Whether gradients of the whole still become those of the parts."""
        like = self.whole.dtype, self.whole.device
        return all(
            [p.requires_grad and (p.dtype, p.device) == like for p in self.parts]
        )


_JOINED: WeakValueDictionary[int, Joined] = (
    WeakValueDictionary()
)  # by first part; passes hold them, graphs hold passes


def side_by_side(
    parts: Sequence[Tensor], dim: int, held: list[Any] | None = None
) -> Tensor:
    """Parameters joined along a dimension, which `held` keeps known. Autograd's own way back gives each a strided part
    of one gradient, which is copied when it is kept, by a kernel for each parameter; here one lays out all.

    >>> side_by_side([torch.zeros(2, 1), torch.ones(2, 2)], 1)
    tensor([[0., 1., 1.],
            [0., 1., 1.]])
    """
    many = len(parts) >= MANY.get(parts[0].device.type, 2**62)
    if not many or not torch.is_grad_enabled() or needs_autograd(parts[0]):
        return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
    whole: Tensor = _side_by_side(dim, *parts)
    if held is not None and all(
        [part.is_leaf and part.requires_grad for part in parts]
    ):  # a frozen one has no way back
        held.append(Joined(parts, whole, dim))
    return whole


def joined(parts: Sequence[Tensor]) -> Tensor | None:
    """What a pass whose graph still stands has joined these parameters to, and no others."""
    found = _JOINED.get(id(parts[0]))
    if (
        found is None
        or len(found.parts) != len(parts)
        or not all(map(is_, found.parts, parts))
    ):
        return None
    return found.whole if found.leads_back() else None


def joined_among(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """What has joined some of these parameters; its tensors, then the others."""
    known = {id(t) for t in tensors}
    every = (
        list(_JOINED.values()) if len(known) == len(tensors) else []
    )  # a tensor that counts twice is no part of any
    found = [
        one
        for one in every
        if known.issuperset(map(id, one.parts)) and one.leads_back()
    ]
    gone = {id(part) for one in found for part in one.parts}
    return (
        found,
        *[one.whole for one in found],
        *[t for t in tensors if id(t) not in gone],
    )


class _SideBySide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dim: int, *parts: Tensor) -> Tensor:
        ctx.dim, ctx.shapes = dim, tuple([part.shape for part in parts])
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return None, *gradients[0].split(
                [shape[ctx.dim] for shape in ctx.shapes], ctx.dim
            )
        order, sizes = _part_after_part(ctx.shapes, ctx.dim, gradients[0].device)
        flat = gradients[0].flatten().index_select(0, order).split_with_sizes(sizes)
        return None, *[
            part.view(shape) for part, shape in zip(flat, ctx.shapes, strict=True)
        ]


# Past what Function.apply does in Python for tensors of torch.func, which never come here.
_side_by_side: Any = super(torch.autograd.Function, _SideBySide).apply


@cache  # for good: a recorded CUDA graph reads it as long as there is one
def _part_after_part(
    shapes: tuple[torch.Size, ...], dim: int, device: torch.device
) -> tuple[Tensor, list[int]]:
    """Where the elements of each part lie in what is joined along `dim`, part after part; and how many they are."""
    whole = list(shapes[0])
    whole[dim] = sum(shape[dim] for shape in shapes)
    places = (
        torch.arange(math.prod(whole), device="cpu")
        .view(whole)
        .split([shape[dim] for shape in shapes], dim)
    )
    return torch.cat([part.flatten() for part in places]).to(device), [
        shape.numel() for shape in shapes
    ]
