"""One direction of one LSTM layer, with factors for every row or block of rows:

    a_t = (W_ih x_t) o r_in + (W_hh (h_{t-1} o s)) o r + b        four gates side by side
    c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(g)                 h_t = sigmoid(o) tanh(c_t)

`steps` is the definition, a loop that autograd follows. Where kernels run, all steps are a single operation with a
backward pass of its own: one kernel a step (lstm_triton.py), and the weight's gradient one product over all steps. It
is a custom operation, since a compiler should see one node and not T of them; the dispatcher's 30 us are paid once for
all steps.

Sizes: T steps, R rows, u units, n lines of factors (R is a multiple of n), B weights (one for each block of rows).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slimbayes.kernels import ready

_TYPES = (torch.float16, torch.bfloat16, torch.float32)


class Cell(NamedTuple):
    """What all steps share: weight (B, 4u, u) and, each optional, s (n, u), r, r_in and bias (n, 4u)."""

    weight: Tensor
    s: Tensor | None = None
    r: Tensor | None = None
    r_in: Tensor | None = None
    bias: Tensor | None = None


def fused(x: Tensor) -> bool:
    """Whether kernels can take the place of the loop, through which alone torch.func and torch.export see."""
    if torch.compiler.is_compiling():
        return ready(x) and not torch.compiler._is_exporting_flag
    return ready(x) and not torch._C._are_functorch_transforms_active()


def lstm(
    gates: Tensor,
    cell: Cell,
    h: Tensor,
    c: Tensor,
    lengths: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """States (T, R, u) after each step, and the last cell state (R, u).

    Shape: gates, the input projections, (T, R, 4u); h and c (R, u); lengths (R,). A row rests past its length.
    """
    lengths = None if lengths is None else lengths.to(gates.device, torch.int64)
    if not (fused(gates) and gates.dtype in _TYPES and gates[0].numel() < 2**31):
        return steps(gates, cell, h, c, lengths, reverse)
    inputs: tuple[Any, ...] = (gates, *cell, h, c)
    keep = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in inputs
    )
    states, last, *_ = _lstm(
        *(t if t is None else t.contiguous() for t in inputs), lengths, reverse, keep
    )
    return states, last


def steps(
    gates: Tensor,
    cell: Cell,
    h: Tensor,
    c: Tensor,
    lengths: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """As `lstm`, in plain torch. Cell states are float32 at least."""
    weight, s, r, r_in, bias = (
        cell.weight.mT,
        *(_by_row(line, gates.shape[1]) for line in cell[1:]),
    )
    gates = gates if r_in is None else gates * r_in
    inputs = (
        gates if bias is None else gates + bias
    ).unbind()  # a backward pass over T parts of one is quadratic in T
    states, single, dtype = [h] * len(inputs), weight[0], gates.dtype
    c = c.to(torch.promote_types(c.dtype, torch.float32))
    for t in reversed(range(len(inputs))) if reverse else range(len(inputs)):
        x = h if s is None else h * s
        z = (
            x @ single
            if len(weight) == 1
            else torch.bmm(x.unflatten(0, (len(weight), -1)), weight).flatten(0, 1)
        )
        a = inputs[t] + z if r is None else torch.addcmul(inputs[t], z, r)
        out, new = activated(a.to(c.dtype), c)
        live = None if lengths is None else (t < lengths).unsqueeze(-1)
        h, c = (
            (out, new)
            if live is None
            else (torch.where(live, out, h), torch.where(live, new, c))
        )
        states[t] = h = h.to(dtype)
    return torch.stack(states), c.to(dtype)


def activated(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The next state and cell state (R, u), from four gates (R, 4u) before their nonlinearity."""
    i, f, g, o = gates.chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _by_row(line: Tensor | None, rows: int) -> Tensor | None:
    return (
        line
        if line is None or line.shape[0] == rows
        else line.repeat_interleave(rows // line.shape[0], 0)
    )


# The operation and its backward pass ----------------------------------------------------------------------------------

_ARGUMENTS = "Tensor gates, Tensor weight, Tensor? s, Tensor? r, Tensor? r_in, Tensor? bias, Tensor h, Tensor c"
_OPTIONS = "Tensor? lengths, bool reverse"


@torch.library.custom_op(
    "slimbayes::lstm",
    mutates_args=(),
    schema=f"({_ARGUMENTS}, {_OPTIONS}, bool keep) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _lstm(
    gates: Any,
    weight: Any,
    s: Any,
    r: Any,
    r_in: Any,
    bias: Any,
    h: Any,
    c: Any,
    *options: Any,
) -> Any:
    """States and last cell state; with `keep` also what the backward pass needs, else three empty tensors.

    Kept are cell states (T + 1, R, u) in float32, where those before step t lie at t (at t + 1 in reverse);
    products W_hh (h o s) (T, R, 4u); and h o s (T, R, u).
    """
    from slimbayes.kernels import lstm_triton

    with torch.cuda.device_of(gates):
        return lstm_triton.forward(
            gates, Cell(weight, s, r, r_in, bias), h, c, *options
        )


@_lstm.register_fake
def _(
    gates: Any,
    weight: Any,
    s: Any,
    r: Any,
    r_in: Any,
    bias: Any,
    h: Any,
    c: Any,
    *options: Any,
) -> Any:
    (T, R), u = gates.shape[:2], h.shape[1]
    kept = [(T + 1, R, u), (T, R, 4 * u), (T, R, u)] if options[-1] else [(0,)] * 3
    types = (torch.float32 if options[-1] else gates.dtype, gates.dtype, gates.dtype)
    kept = [
        gates.new_empty(shape, dtype=dtype)
        for shape, dtype in zip(kept, types, strict=True)
    ]
    return gates.new_empty(T, R, u), gates.new_empty(R, u), *kept


@torch.library.custom_op(
    "slimbayes::lstm_backward",
    mutates_args=(),
    schema=f"(Tensor dh, Tensor dc, {_ARGUMENTS}, Tensor states, Tensor cells, Tensor z, Tensor hs, {_OPTIONS}, "
    "bool weighs) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _lstm_backward(
    dh: Any,
    dc: Any,
    gates: Any,
    weight: Any,
    s: Any,
    r: Any,
    r_in: Any,
    bias: Any,
    *rest: Any,
) -> Any:
    """Gradients of gates, weight (empty unless `weighs`), s, r, r_in, bias (empty where there is none), h and c."""
    from slimbayes.kernels import lstm_triton

    with torch.cuda.device_of(gates):
        return lstm_triton.backward(
            dh, dc, gates, Cell(weight, s, r, r_in, bias), *rest
        )


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


def _differentiate(
    ctx: Any, dh: Tensor | None, dc: Tensor | None, *unused: Any
) -> tuple[Any, ...]:
    *tensors, lengths, states, cells, z, hs = ctx.saved_tensors
    gates, *_, h, c = tensors
    dh = torch.zeros_like(states) if dh is None else dh
    dc = torch.zeros_like(c) if dc is None else dc
    if (
        torch.is_grad_enabled()
    ):  # a derivative of the derivative is wanted: the loop has one
        outputs = steps(gates, Cell(*tensors[1:-2]), h, c, lengths, ctx.reverse)
        wanted = [t for t in tensors if t is not None and t.requires_grad]
        found = iter(
            torch.autograd.grad(
                outputs, wanted, (dh, dc), create_graph=True, allow_unused=True
            )
        )
        return (
            *(
                next(found) if t is not None and t.requires_grad else None
                for t in tensors
            ),
            None,
            None,
            None,
        )
    kept = (states, cells, z, hs, lengths, ctx.reverse, ctx.needs_input_grad[1])
    found = iter(_lstm_backward(dh.contiguous(), dc, *tensors, *kept))
    grads = [
        g if t is not None and g.numel() == t.numel() else None
        for t, g in zip(tensors, found, strict=True)
    ]
    return *grads, None, None, None


_lstm.register_autograd(_differentiate, setup_context=_keep)


def sum_lines(line: Any, by_row: Tensor) -> Tensor:
    """The gradient of lines (n, width) from that of every row (R, width)."""
    return by_row.unflatten(0, (line.shape[0], -1)).sum(1).to(line.dtype)


def weight_gradient(dz: Tensor, hs: Tensor, weight: Tensor) -> Tensor:
    """(B, 4u, u) from dz (T, R, 4u) and hs (T, R, u): one product over all steps."""
    blocks = weight.shape[0]
    if blocks == 1:
        return torch.mm(dz.flatten(0, 1).t(), hs.flatten(0, 1)).unsqueeze(0)
    dz, hs = (
        t.unflatten(1, (blocks, -1)).transpose(0, 1).flatten(1, 2) for t in (dz, hs)
    )
    return torch.bmm(dz.mT, hs)
