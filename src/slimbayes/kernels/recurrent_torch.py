"""The recurrence of an LSTM in plain torch: what defines the kernels of recurrent.py, and what runs without them.

    a_t = (W_ih x_t) o r_in + (W_hh (h_{t-1} o s)) o r + b        four gates side by side
    c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(g)                 h_t = sigmoid(o) tanh(c_t)

`steps` is the definition, `forward` and `backward` the same and its gradient, with few operations a step.

Sizes: T steps, R rows, u units, n lines of factors (R is a multiple of n), B weights (one for each block of rows).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Cell(NamedTuple):
    """What all steps share: weight (B, 4u, u) and, each optional, s (n, u), r, r_in and bias (n, 4u)."""

    weight: Tensor
    s: Tensor | None = None
    r: Tensor | None = None
    r_in: Tensor | None = None
    bias: Tensor | None = None


def steps(
    gates: Tensor, cell: Cell, h: Tensor, c: Tensor, lengths: Tensor | None = None, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    """States (T, R, u) after each step, and the last cell state (R, u), by a loop that autograd follows.

    Shape: gates, the input projections, (T, R, 4u); h and c (R, u); lengths (R,). A row rests past its length.
    """
    weight, s, r, r_in, bias = cell[0], *(_by_row(line, gates.shape[1]) for line in cell[1:])
    states: list[Tensor] = [h] * gates.shape[0]
    for t in _order(gates.shape[0], reverse):
        z = _blockwise(h if s is None else h * s, weight.mT)
        a = gates[t] if r_in is None else gates[t] * r_in
        a = a + (z if r is None else z * r) + (0 if bias is None else bias)
        i, f, g, o = a.chunk(4, -1)
        new = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        out = torch.sigmoid(o) * torch.tanh(new)
        live = None if lengths is None else (t < lengths).unsqueeze(-1)
        h, c = (out, new) if live is None else (torch.where(live, out, h), torch.where(live, new, c))
        states[t] = h
    return torch.stack(states), c


def wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _order(count: int, reverse: bool) -> Any:
    return reversed(range(count)) if reverse else range(count)


def _by_row(line: Tensor | None, rows: int) -> Tensor | None:
    return line if line is None or line.shape[0] == rows else line.repeat_interleave(rows // line.shape[0], 0)


def _blockwise(x: Tensor, weight: Tensor) -> Tensor:
    """x (R, in) through one matrix (B, in, out) for each block of rows."""
    if weight.shape[0] == 1:
        return torch.mm(x, weight[0])
    return torch.bmm(x.unflatten(0, (weight.shape[0], -1)), weight).flatten(0, 1)


def _shifted(gates: Tensor, r_in: Tensor | None, bias: Tensor | None) -> Tensor:
    """gates o r_in + bias, for all steps."""
    if r_in is None:
        return gates if bias is None else gates + bias
    return gates * r_in if bias is None else torch.addcmul(bias, gates, r_in)


def _activate(a: Tensor) -> tuple[Tensor, ...]:
    """Gates i, f, g, o (..., u) of their inputs (..., 4u), which are overwritten."""
    i, f, g, o = a.chunk(4, -1)
    g = torch.tanh(g)
    a.sigmoid_()  # of g too, for nothing: one operation is cheaper than three on parts
    return i, f, g, o


def forward(
    gates: Tensor, cell: Cell, h: Tensor, c: Tensor, lengths: Tensor | None, reverse: bool, keep: bool
) -> tuple[Tensor, ...]:
    T, R = gates.shape[:2]
    weight, s, r, r_in, bias = cell[0].mT, *(_by_row(line, R) for line in cell[1:])
    start, dtype, c = _shifted(gates, r_in, bias).unbind(), gates.dtype, c.to(wide(gates))
    states, cells, products, scaled = [h] * T, [c] * (T + 1), [h] * T, [h] * T
    for t in _order(T, reverse):
        scaled[t] = h if s is None else h * s
        products[t] = z = _blockwise(scaled[t], weight)
        a = start[t] + z if r is None else torch.addcmul(start[t], z, r)
        i, f, g, o = _activate(a.to(c.dtype))
        new = (f * c).addcmul_(i, g)
        out = (o * torch.tanh(new)).to(dtype)
        live = None if lengths is None else (t < lengths).unsqueeze(-1)
        h, c = (out, new) if live is None else (torch.where(live, out, h), torch.where(live, new, c))
        states[t], cells[t + (not reverse)] = h, c
    kept = (torch.stack(part) for part in (cells, products, scaled)) if keep else (gates.new_empty(0) for _ in range(3))
    return torch.stack(states), c.to(dtype, copy=True), *kept


def backward(
    dh: Tensor, dc: Tensor, gates: Tensor, cell: Cell, h: Tensor, c: Tensor, states: Tensor, cells: Tensor, z: Tensor,
    hs: Tensor, lengths: Tensor | None, reverse: bool, weighs: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    T, R, u = states.shape
    weight, s, r, r_in, bias = cell[0], *(_by_row(line, R) for line in cell[1:])
    slopes = _slopes(gates, (r, r_in, bias), cells, z, lengths, reverse)
    dgates, dz, dhs = torch.empty_like(z, dtype=cells.dtype), [gates] * T, [gates] * T
    carry, back = dc.to(cells.dtype), torch.zeros_like(h, dtype=cells.dtype)
    split = zip(dh, dgates, *(d.unbind() for d in dgates.view(T, R, 4, u).split([3, 1], 2)), *slopes, strict=True)
    parts = list(split)
    for t in reversed(list(_order(T, reverse))):
        above, d, inner, outer, state, output, cell_input, forget = parts[t]
        upper = above + back
        torch.mul(upper, output, out=outer.squeeze(1))
        new = torch.addcmul(carry, upper, state)
        torch.mul(new.unsqueeze(1), cell_input, out=inner)
        carry = new * forget
        dz[t] = (d if r is None else d * r).to(gates.dtype)
        dhs[t] = _blockwise(dz[t], weight)
        back = (dhs[t] if s is None else dhs[t] * s).to(cells.dtype)
        if lengths is not None:
            back = torch.where((t < lengths).unsqueeze(-1), back, upper)
    before = [*states[1:], h] if reverse else [h, *states[:-1]]
    ds = None if s is None else sum_lines(cell.s, (torch.stack(dhs) * torch.stack(before)).sum(0))
    dr = None if r is None else sum_lines(cell.r, (dgates * z).sum(0))
    dr_in = None if r_in is None else sum_lines(cell.r_in, (dgates * gates).sum(0))
    dbias = None if bias is None else sum_lines(cell.bias, dgates.sum(0))
    dgates = (dgates if r_in is None else dgates * r_in).to(gates.dtype)
    dweight = weight_gradient(torch.stack(dz), hs, weight) if weighs else None
    found = (dgates, dweight, ds, dr, dr_in, dbias, back.to(h.dtype), carry.to(c.dtype))
    return tuple(gates.new_empty(0) if g is None else g for g in found)


def _slopes(
    gates: Tensor, lines: tuple[Tensor | None, ...], cells: Tensor, z: Tensor, lengths: Tensor | None, reverse: bool
) -> tuple[Tensor, ...]:
    """For all steps: dc/dh and do/dh; di, df, dg/dc (T, R, 3, u); dc_{t-1}/dc_t. Gates before their nonlinearity."""
    r, r_in, bias = lines
    start = _shifted(gates, r_in, bias)
    a = start + z if r is None else torch.addcmul(start, z, r)
    i, f, g, o = _activate(a.to(cells.dtype))
    before, after = (cells[1:], cells[:-1]) if reverse else (cells[:-1], cells[1:])
    bent = torch.tanh(after)
    state, output = o * (1 - bent * bent), bent * o * (1 - o)
    inner = torch.stack([g * i * (1 - i), before * f * (1 - f), i * (1 - g * g)], 2)
    if lengths is None:
        return state, output, inner, f
    live = (torch.arange(len(gates), device=gates.device)[:, None] < lengths)[..., None]
    return state * live, output * live, inner * live[..., None], torch.where(live, f, torch.ones_like(f))


def sum_lines(line: Any, by_row: Tensor) -> Tensor:
    """The gradient of lines (n, width) from that of every row (R, width)."""
    return by_row.unflatten(0, (line.shape[0], -1)).sum(1).to(line.dtype)


def weight_gradient(dz: Tensor, hs: Tensor, weight: Tensor) -> Tensor:
    """(B, 4u, u) from dz (T, R, 4u) and hs (T, R, u): one product over all steps."""
    blocks = weight.shape[0]
    if blocks == 1:
        return torch.mm(dz.flatten(0, 1).t(), hs.flatten(0, 1)).unsqueeze(0)
    dz, hs = (t.unflatten(1, (blocks, -1)).transpose(0, 1).flatten(1, 2) for t in (dz, hs))
    return torch.bmm(dz.mT, hs)
