"""One direction of one LSTM layer as a single operation: all steps, with factors for every row or block of rows.

kernels/recurrent_torch.py has the equations. `lstm` is their loop over time with a backward pass of its own: a step is
one kernel where kernels run, a handful of operations without nodes of autograd elsewhere, and the weight's gradient one
product over all steps. It is a custom operation, since a compiler should see one node and not T of them; the
dispatcher's 30 us are paid once for all steps.

Sizes: T steps, R rows, u units, n draws of the pass.
"""

import operator
from typing import Any

import torch
from torch import Tensor

from slimbayes.engine.blocks import exporting
from slimbayes.engine.passes import Pass
from slimbayes.engine.rows import LinearMap, per_row
from slimbayes.kernels import ready, recurrent_torch
from slimbayes.kernels.recurrent_torch import Cell, steps, wide

KERNEL_TYPES = (torch.float16, torch.bfloat16, torch.float32)


def applies(x: Tensor) -> bool:
    """Whether `lstm` can take the place of a loop: compilers see through the loop, torch.func only through the loop."""
    if torch.compiler.is_compiling():
        return ready(x) and not exporting()
    return not torch._C._are_functorch_transforms_active()


def input_gates(x: Tensor, posterior: Any, linear: LinearMap) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Projections of all inputs (T, R, 4u), and what a cell still has to do to them: multiply by lines, add lines."""
    drawn = posterior.factors()
    if drawn is None:
        return posterior(x, linear), None, None
    s, r, bias = drawn
    return linear.modulated(operator.mul, x, s, None, posterior.current), r, _added(linear.bias, bias)


def cell_of(posterior: Any, linear: LinearMap, r_in: Tensor | None, shift: Tensor | None) -> Cell:
    """The draws of a recurrent matrix: factors of its weight, or one weight for each block of rows."""
    drawn = posterior.factors()
    if drawn is not None:
        s, r, bias = drawn
        return Cell(linear.weight.unsqueeze(0), s, r, r_in, _added(_added(linear.bias, bias), shift))
    weights, biases = zip(*(posterior.materialise(linear, j) for j in range(posterior.drawn)), strict=True)
    bias = None if biases[0] is None else torch.stack(biases)
    return Cell(torch.stack(weights), None, None, r_in, _added(bias, shift))


def _added(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum of biases (4u,) or lines of them (n, 4u), as lines."""
    if a is None or b is None:
        found = b if a is None else a
        return None if found is None else torch.atleast_2d(found)
    return torch.atleast_2d(a + b)


def laid_out(cell: Cell, seen: int, current: Pass, dtype: torch.dtype) -> Cell:
    """Equally many lines of each kind for the `seen` rows, given one for each draw of the pass, or one for all."""
    n = max([1, *(line.shape[0] for line in cell[1:] if line is not None)])
    even = current.rows % n == 0

    def lay(line: Tensor | None) -> Tensor | None:
        if line is None:
            return None
        line = (line.expand(n, -1) if line.shape[0] == 1 else line) if even else per_row(line, seen, current)
        return line.to(dtype)

    return Cell(cell.weight.to(dtype), *map(lay, cell[1:]))


def lstm(
    gates: Tensor, cell: Cell, h: Tensor, c: Tensor, lengths: Tensor | None = None, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    """States (T, R, u) after each step, and the last cell state (R, u).

    Shape: gates, the input projections, (T, R, 4u); h and c (R, u); lengths (R,). A row rests past its length.

    >>> gates, weight, zeros = torch.randn(5, 3, 8), torch.randn(1, 8, 2), torch.zeros(3, 2)
    >>> states, last = lstm(gates, Cell(weight, s=torch.ones(3, 2)), zeros, zeros)
    >>> torch.allclose(states, steps(gates, Cell(weight), zeros, zeros)[0], atol=1e-6)
    True
    """
    inputs: tuple[Any, ...] = (gates, *cell, h, c)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    lengths = None if lengths is None else lengths.to(gates.device, torch.int64)
    states, last, *_ = _lstm(*(t if t is None else t.contiguous() for t in inputs), lengths, reverse, keep)
    return states, last


# The operation and its backward pass ----------------------------------------------------------------------------------

_ARGUMENTS = "Tensor gates, Tensor weight, Tensor? s, Tensor? r, Tensor? r_in, Tensor? bias, Tensor h, Tensor c"
_OPTIONS = "Tensor? lengths, bool reverse"


def _kernel(gates: Tensor) -> bool:
    return ready(gates) and gates.dtype in KERNEL_TYPES and gates[0].numel() < 2**31


@torch.library.custom_op(
    "slimbayes::lstm",
    mutates_args=(),
    schema=f"({_ARGUMENTS}, {_OPTIONS}, bool keep) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _lstm(gates: Any, weight: Any, s: Any, r: Any, r_in: Any, bias: Any, h: Any, c: Any, *options: Any) -> Any:
    """States and last cell state; with `keep` also what the backward pass needs, else three empty tensors.

    Kept are cell states (T + 1, R, u) in float32 at least, where those before step t lie at t (at t + 1 in reverse);
    products W_hh (h o s) (T, R, 4u); and h o s (T, R, u).
    """
    cell = Cell(weight, s, r, r_in, bias)
    if _kernel(gates):
        from slimbayes.kernels import recurrent

        with torch.cuda.device_of(gates):
            return recurrent.forward(gates, cell, h, c, *options)
    return recurrent_torch.forward(gates, cell, h, c, *options)


@_lstm.register_fake
def _(gates: Any, weight: Any, s: Any, r: Any, r_in: Any, bias: Any, h: Any, c: Any, *options: Any) -> Any:
    (T, R), u = gates.shape[:2], h.shape[1]
    kept = [(T + 1, R, u), (T, R, 4 * u), (T, R, u)] if options[-1] else [(0,)] * 3
    types = (wide(gates) if options[-1] else gates.dtype, gates.dtype, gates.dtype)
    kept = [gates.new_empty(shape, dtype=dtype) for shape, dtype in zip(kept, types, strict=True)]
    return gates.new_empty(T, R, u), gates.new_empty(R, u), *kept


@torch.library.custom_op(
    "slimbayes::lstm_backward",
    mutates_args=(),
    schema=f"(Tensor dh, Tensor dc, {_ARGUMENTS}, Tensor states, Tensor cells, Tensor z, Tensor hs, {_OPTIONS}, "
    "bool weighs) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _lstm_backward(dh: Any, dc: Any, gates: Any, weight: Any, s: Any, r: Any, r_in: Any, bias: Any, *rest: Any) -> Any:
    """Gradients of gates, weight (empty unless `weighs`), s, r, r_in, bias (empty where there is none), h and c."""
    cell = Cell(weight, s, r, r_in, bias)
    if _kernel(gates):
        from slimbayes.kernels import recurrent

        with torch.cuda.device_of(gates):
            return recurrent.backward(dh, dc, gates, cell, *rest)
    return recurrent_torch.backward(dh, dc, gates, cell, *rest)


@_lstm_backward.register_fake
def _(dh: Any, dc: Any, gates: Any, weight: Any, *rest: Any) -> Any:
    like: Any = [gates, weight if rest[-1] else None, *rest[:6]]
    return tuple(gates.new_empty(0) if t is None else torch.empty_like(t) for t in like)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, lengths, reverse, _ = inputs
    states, _, cells, z, hs = output
    ctx.save_for_backward(*tensors, lengths, states, cells, z, hs)
    ctx.mark_non_differentiable(cells, z, hs)
    ctx.set_materialize_grads(False)
    ctx.reverse = reverse


def _differentiate(ctx: Any, dh: Tensor | None, dc: Tensor | None, *unused: Any) -> tuple[Any, ...]:
    *tensors, lengths, states, cells, z, hs = ctx.saved_tensors
    gates, *_, h, c = tensors
    dh = torch.zeros_like(states) if dh is None else dh
    dc = torch.zeros_like(c) if dc is None else dc
    if torch.is_grad_enabled():  # a derivative of the derivative is wanted: the loop has one
        outputs = steps(gates, Cell(*tensors[1:-2]), h, c, lengths, ctx.reverse)
        wanted = [t for t in tensors if t is not None and t.requires_grad]
        found = iter(torch.autograd.grad(outputs, wanted, (dh, dc), create_graph=True, allow_unused=True))
        return *(next(found) if t is not None and t.requires_grad else None for t in tensors), None, None, None
    kept = (states, cells, z, hs, lengths, ctx.reverse, ctx.needs_input_grad[1])
    found = iter(_lstm_backward(dh.contiguous(), dc, *tensors, *kept))
    grads = [g if t is not None and g.numel() == t.numel() else None for t, g in zip(tensors, found, strict=True)]
    return *grads, None, None, None


_lstm.register_autograd(_differentiate, setup_context=_keep)
