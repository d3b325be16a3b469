"""One run of the proof of rows: what reaches every converted module, and the taint it puts on their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from slimbayes.engine import passes
from slimbayes.engine.layout import (
    Dims,
    Unproven,
    arrays_of,
    leaves_of,
    map_arrays,
    padded,
)
from slimbayes.engine.objects import attributes_of
from slimbayes.engine.quiet import Quiet
from slimbayes.engine.state import Change

Mask = np.ndarray[Any, np.dtype[np.bool_]]  # of rows
Prints = tuple[Tensor, Tensor] | None


@dataclass(eq=False)
class Visit:
    """One call of a converted module in a run of the proof."""

    layer: Any
    key: str
    name: str
    shapes: list[tuple[int, ...]]
    outputs: list[tuple[int, ...]] = field(default_factory=list)
    prints: list[Prints] = field(default_factory=list)
    dims: list[int | None] = field(default_factory=list)
    out_dims: list[int | None] = field(default_factory=list)
    reads: list[float] = field(default_factory=list)


class Probe(passes.Pass):
    """Takes the place of a pass while the proof runs: converted modules call `visit` instead of drawing."""

    probing = True

    def __init__(
        self,
        keys: Sequence[str],
        quiet: Quiet,
        before: Probe | None = None,
        taint: Mask | None = None,
    ) -> None:
        super().__init__(1, 1, rowwise=False)
        self.noise = dict.fromkeys(keys)  # type: ignore[assignment]
        self.quiet, self.before, self.taint = quiet, before, taint
        self.weights: dict[Any, Tensor] = (
            {} if before is None else before.weights
        )  # of fingerprints
        self.visits: list[Visit] = []
        # Of modules that ran before any draw was used (sharing.py): shapes of inputs and outputs, and where rows lie.
        self.early_shapes: dict[int, tuple[list[Any], list[Any] | None]] = {}
        self.shareable: dict[int, tuple[Dims, Dims]] = {}
        self.inside: list[str] = []  # keys of modules whose own forward is under way
        self.changes: Change = {}  # what modules kept of the run
        self.objects = False  # whether outputs hold objects of somebody's

    def visit(self, layer: Any, args: Any, kwargs: Any) -> Any:
        """Run a converted module's plain forward and note what came in and what went out."""
        place, quiet = len(self.visits), self.quiet
        with torch._C.DisableTorchFunction():  # sums of our own are none of the model's
            arrays = [padded(leaf) for leaf in arrays_of((args, kwargs))]
            shapes = [tuple(a.shape) for a in arrays]
            here = Visit(layer, layer.bayes_key, layer.bayes_name, shapes)
            self.visits.append(here)
            if self.before is not None:
                self._compare(
                    here, next(iter(self.before.visits[place:]), None), arrays
                )
        self.inside.append(layer.bayes_key)
        start, evaluates = len(quiet.reads), quiet.evaluates
        quiet.evaluates = evaluates and not any(
            hasattr(p, "own_statistics") for p in layer.posteriors()
        )
        try:
            out = layer.plain_forward(args, kwargs)
        finally:
            self.inside.pop()
            quiet.evaluates = evaluates
        with torch._C.DisableTorchFunction():
            here.reads = quiet.reads[start:]
            here.outputs = [tuple(padded(leaf).shape) for leaf in arrays_of(out)]
            if self.before is None:
                return out
            earlier = self.before.visits[place]
            if self.taint is None:
                here.out_dims = [
                    doubled(a, b, here.name)
                    for a, b in zip(earlier.outputs, here.outputs, strict=True)
                ]
                if layer.bayes_copied:
                    self._refuse_unshared(here, out, arrays)
                return out
            if layer.bayes_copied and here.reads != earlier.reads:
                # Members see only their own rows: what one reads from all rows it would read from fewer.
                raise Unproven(
                    f"{here.name}: a number computed from all rows decides what it does"
                )
            return self._tainted(out, earlier, here)

    def prints(self, x: Tensor, dim: int | None) -> Prints:
        """Fingerprints of the n entries along `dim`: weighted sums, and their sizes, (n,) each; n is 1 without rows."""
        if (
            x.numel() == 0
            or x.is_complex()
            or x.is_nested
            or x.layout is not torch.strided
        ):
            return None
        lines = (
            x.reshape(1, -1)
            if dim is None
            else x.movedim(dim, 0).reshape(x.shape[dim], -1)
        )
        lines = lines.detach().float().nan_to_num(0.123, 7.7, -7.7)
        at = lines.shape[1], x.device
        if at not in self.weights:
            self.weights[at] = (
                torch.arange(at[0], device=x.device).mul(0.6180339887).frac_().add_(0.5)
            )
        sums = (lines * self.weights[at]).sum(1, dtype=torch.float64)
        return sums, sums if self.taint is not None else lines.abs().sum(
            1, dtype=torch.float64
        )

    def _refuse_unshared(self, here: Visit, out: Any, inputs: list[Tensor]) -> None:
        """Each member makes its own of objects, and of what has no rows, such as a bias for all positions."""
        given, outputs = {a.data_ptr() for a in inputs}, arrays_of(out)
        objects = [
            type(leaf).__name__ for leaf in leaves_of(out) if attributes_of(leaf)
        ]
        for leaf, dim in zip(map(padded, outputs), here.out_dims, strict=True):
            if (
                dim is None
                and leaf.is_floating_point()
                and leaf.numel()
                and leaf.data_ptr() not in given
            ):
                objects.append(f"{tuple(leaf.shape)} without rows")
        if objects:
            raise Unproven(
                f"{here.name} gives {objects[0]}, of which each member has its own"
            )

    def _compare(
        self, here: Visit, earlier: Visit | None, arrays: list[Tensor]
    ) -> None:
        if (
            earlier is None
            or earlier.key != here.key
            or len(earlier.shapes) != len(here.shapes)
        ):
            raise Unproven(f"{here.name} is not called alike for more rows")
        if self.taint is None:
            here.dims = [
                doubled(a, b, here.name)
                for a, b in zip(earlier.shapes, here.shapes, strict=True)
            ]
        else:
            here.dims = list(earlier.dims)
            for i, (a, b) in enumerate(zip(earlier.shapes, here.shapes, strict=True)):
                if a != b:  # behind a single row that stood for all and was repeated
                    here.dims[i] = (
                        next(d for d in range(len(a)) if a[d] != b[d])
                        if len(a) == len(b)
                        else None
                    )
        here.prints = [
            self.prints(a, d) for a, d in zip(arrays, here.dims, strict=True)
        ]

    def _tainted(self, out: Any, earlier: Visit, here: Visit) -> Any:
        """An output changed in the tainted rows."""
        mask = self.taint
        assert mask is not None

        def change(i: int, leaf: Any) -> Any:
            dim = earlier.out_dims[i] if i < len(earlier.out_dims) else None
            if isinstance(leaf, PackedSequence):
                return (
                    leaf
                    if dim is None
                    else packed_in(leaf, leaf.data * 1.25 + 0.125, mask)
                )
            if not leaf.is_floating_point():
                return leaf
            if dim is None:
                if not stands_for_all(here) or leaf.shape[0] != 1:
                    return leaf
                leaf, dim = leaf.expand(self.rows, *leaf.shape[1:]), 0
            return torch.where(
                flags_along(mask, leaf, dim, here.name), leaf * 1.25 + 0.125, leaf
            )

        return map_arrays(change, out)


def entries(mask: Mask, size: int, name: str) -> Mask:
    """Which of `size` entries belong to the rows of a mask; where none is a single row's, only halves are told apart.

    Example:
        >>> entries(np.array([False, True]), 4, "a layer")
        array([False, False,  True,  True])
    """
    rows = len(mask)
    if size % rows == 0:
        return mask.repeat(size // rows)
    if (
        size % 2
        or (mask[: rows // 2] == mask[rows // 2 :]).any()
        or (mask[1:] != mask[:-1]).sum() != 1
    ):
        raise Unproven(f"{name}: {size} entries for {rows} rows, none for each of them")
    return mask[[0, -1]].repeat(size // 2)


def flags_along(mask: Mask, x: Tensor, dim: int, name: str) -> Tensor:
    """The entries of x along `dim` that belong to the rows of a mask, as flags that broadcast against x.

    >>> flags_along(np.array([False, True]), torch.ones(3, 4), 1, "a layer")
    tensor([[False, False,  True,  True]])
    """
    rows = torch.from_numpy(entries(mask, x.shape[dim], name)).to(x.device)
    return rows.view([-1 if d == dim else 1 for d in range(x.dim())])


def stands_for_all(visit: Visit) -> bool:
    """Whether a layer's first input is a single row without any rows of the batch in it: (1, ...)."""
    return (
        bool(visit.shapes)
        and visit.dims[:1] == [None]
        and len(visit.shapes[0]) > 1
        and visit.shapes[0][0] == 1
    )


def doubled(a: tuple[int, ...], b: tuple[int, ...], name: str) -> int | None:
    """The one dimension that doubled, None where nothing changed."""
    if a == b:
        return None
    found = [d for d in range(min(len(a), len(b))) if a[d] != b[d]]
    if len(a) != len(b) or len(found) != 1 or b[found[0]] != 2 * a[found[0]]:
        raise Unproven(f"{name}: {a} became {b} when every row came twice")
    return found[0]


def packed_in(whole: PackedSequence, other: Tensor, mask: Mask) -> PackedSequence:
    """A packed sequence with other numbers in the rows of a mask."""
    order = (
        torch.arange(int(whole.batch_sizes[0]))
        if whole.sorted_indices is None
        else whole.sorted_indices.cpu()
    )
    rows = mask[torch.cat([order[: int(n)] for n in whole.batch_sizes]).numpy()]
    return whole._replace(
        data=torch.where(flags_along(rows, whole.data, 0, ""), other, whole.data)
    )


def some_rows(rows: int) -> Mask:
    """A mask of about every second row and the last, without a pattern that a model could share, unless few."""
    mask = (
        torch.randint(2, (rows,), generator=torch.Generator().manual_seed(rows)).numpy()
        > 0
    )
    mask[0], mask[-1] = False, True
    return np.arange(rows) % 2 > 0 if rows <= 8 else mask


def other_numbers(x: Tensor, dim: int, moved: bool, steps: bool = True) -> Tensor:
    """Other numbers of the same kind: indices and flags are only moved about, to other rows or within a row."""
    if x.is_floating_point():
        return x * 0.7 + 0.37
    x = x.roll(1, dim) if moved else x
    if (
        not steps
        or x.dim() < 2
        or dim % x.dim() == x.dim() - 1
        or x.dtype == torch.bool
    ):
        return x
    return x.roll(
        1, 0 if dim % x.dim() else 1
    )  # steps, not what each holds: the corners of a box have an order
