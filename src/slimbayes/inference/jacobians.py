"""Derivatives of a network's outputs, row by row, in the numbers of its joint posteriors.

Each row of a batch is a draw of its own: a member's mean plus a deviation of zero that needs a gradient. Backward then
gives every row's own derivative at once. Rows that cannot be told apart run one by one.

Sizes: B rows, D numbers of one posterior.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.engine import calls, passes
from slimbayes.engine.layout import Layout
from slimbayes.engine.locate import check_size
from slimbayes.engine.passes import Noise, Pass, Unproven
from slimbayes.engine.tree import map_arrays
from slimbayes.posteriors.joint_normal import Joint
from slimbayes.posteriors.kronecker_weights import Watched
from slimbayes.prediction.predict import select

MOST = 2**24  # numbers that the derivatives of a piece of a batch may hold


@dataclass
class Rows:
    """Outputs (B, ...) of consecutive rows at the means, the first of them row `start` of the batch."""

    start: int
    outputs: Tensor
    deviations: list[Tensor]
    watched: list[Watched | None]

    def pull(self, cotangent: Tensor) -> list[Tensor]:
        """cotangent^T d outputs / d numbers of each row, (B, D) for each posterior."""
        found = torch.autograd.grad(self.outputs, self.deviations, cotangent, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(d) if g is None else g for g, d in zip(found, self.deviations, strict=True)]

    def inputs(self) -> list[Tensor | None]:
        """Inputs (B, m) of the layers whose curvature is a Kronecker product."""
        return [None if w is None else w.inputs(len(self.outputs)) for w in self.watched]


def joints_of(model: nn.Module) -> list[Any]:
    """The joint posteriors of a model; refused where others have a part in its draws."""
    found = passes.posteriors_of(model)
    others = [p.name for p in found if not isinstance(p, Joint)]
    if others or not found:
        what = f"{others[0]} has another one" if others else "the model has none"
        raise ValueError(f"Derivatives are taken in the numbers of JointNormal posteriors, but {what}; see laplace.")
    return found


def rows_at_means(
    model: nn.Module, args: Any, kwargs: Any, member: int, output: str | int | None, factored: bool = False
) -> Iterator[Rows]:
    """A batch in pieces, each run at a member's means, so small that derivatives of all its rows fit into memory.

    `factored` takes derivatives in the outputs of layers whose covariance is a Kronecker product, not in its numbers.
    """
    joints = joints_of(model)
    layout = calls.layout_of(model, args, kwargs, joints)
    many = layout.rows((args, kwargs)) if layout.apart else rows_in(model, args, kwargs)
    start, most = 0, max(1, MOST // sum(_sizes(joints, factored)))
    while start < many:
        count = min(most, many - start) if layout.apart else 1
        if layout.apart:
            part = layout.narrow((args, kwargs), start, count)
            check_size(model, part, joints, layout)
        else:
            part = map_arrays(partial(_row, model, start, many), (args, kwargs))
        try:
            yield _run(model, joints, part, count, layout, member, output, start, factored)
        except Unproven as error:
            calls.unfold(layout, error)
            continue
        start += count


def rows_in(model: nn.Module, args: Any, kwargs: Any) -> int:
    """How many rows a batch has, by the dimension that holds them."""
    dim, sizes = calls.batch_dim_of(model) or 0, []
    map_arrays(lambda i, leaf: sizes.append(leaf.shape[dim] if leaf.dim() > dim else 1), (args, kwargs))
    return max(sizes, default=0)


def _sizes(joints: Sequence[Any], factored: bool) -> list[int]:
    return [p.site.n_out if factored and p.factored else p.size for p in joints]


def _row(model: nn.Module, at: int, many: int, i: int, leaf: Any) -> Any:
    dim = calls.batch_dim_of(model) or 0
    return leaf.narrow(dim, at, 1) if leaf.dim() > dim and leaf.shape[dim] == many else leaf


def _mask(kwargs: Any, rows: int) -> Tensor | None:
    """Which tokens (B, T) count, of models of transformers: padding must not change what layers get on average."""
    mask = kwargs.get("attention_mask")
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 and len(mask) == rows else None


def _run(
    model: nn.Module,
    joints: Sequence[Any],
    inputs: Any,
    count: int,
    layout: Layout,
    member: int,
    output: str | int | None,
    start: int,
    factored: bool,
) -> Rows:
    new = Pass(count, count, rowwise=False)
    new.layout = layout if count > 1 else None
    deviations: list[Tensor] = []
    watched: list[Watched | None] = []
    for p, size in zip(joints, _sizes(joints, factored), strict=True):
        deviation = torch.zeros(count, size, device=p.device, dtype=p.dtype, requires_grad=True)
        new.put(p.key, Noise(deviation.detach()[:, :0], deviation.detach()[:, :0]))

        def pick(parameter: Tensor, n: int) -> Tensor:
            return parameter.detach()[member : member + 1].expand(n, *parameter.shape[1:])

        with torch.enable_grad():
            watched.append(Watched(deviation, [], _mask(inputs[1], count)) if factored and p.factored else None)
            new.values[p.key] = watched[-1] or p.at(deviation, pick)
        deviations.append(deviation)
    with torch.enable_grad():
        found = select(passes.run(new, model, *inputs[0], **inputs[1]), output)
    return Rows(start, found, deviations, watched)
