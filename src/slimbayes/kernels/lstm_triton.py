"""The recurrence of an LSTM in Triton: one kernel a step, forward and backward; `lstm.steps` defines it.

A program owns a tile of rows and units. Forward it multiplies its rows of h o s by the four gates' weights of its units
and goes straight on to the new states; backward it multiplies its rows of the next step's dz by W and goes on to its
gates' gradients. What crosses units passes through memory between two launches. Sums of products are float32.

Sizes: T steps, R rows, u units (C = 4u gates), n lines of factors, B weights.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slimbayes.kernels.launch import aligned, launch_steps
from slimbayes.kernels.lstm import Cell, sum_lines, weight_gradient

UNITS = tl.constexpr(32)  # of a program
BUSY = (
    96  # programs that keep a large GPU busy: tiles have as many rows as leave so many
)


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _gate(z, gates, r, r_in, bias, at, line, inside):  # type: ignore[no-untyped-def]
    """A gate before its nonlinearity: gates o r_in + z o r + bias."""
    a = tl.load(gates + at, mask=inside, other=0.0).to(tl.float32)
    if r_in is not None:
        a = a * tl.load(r_in + line, mask=inside, other=0.0).to(tl.float32)
    if r is not None:
        z = z * tl.load(r + line, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        a = a + tl.load(bias + line, mask=inside, other=0.0).to(tl.float32)
    return a + z


@triton.jit
def _settled(product, room, z, at, inside, KEEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """A product, through memory: else all that is loaded moves to where tensor cores left it, at two barriers each."""
    tl.store(room + at, product, mask=inside)
    tl.debug_barrier()
    product = tl.load(room + at, mask=inside, other=0.0)
    if KEEP:
        tl.store(z + at, product, mask=inside)
    return product


@triton.jit
def _place(R, u, span, tiles, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Block of rows, rows (ROWS, 1) and units (1, UNITS) of this program, and which of the rows there are."""
    block = tl.program_id(0) // tiles
    row = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)[:, None]
    unit = tl.program_id(1) * UNITS + tl.arange(0, UNITS)[None, :]
    return block, block * span + row, unit, row < span


@triton.jit(do_not_specialize=["t", "T", "R", "share", "span", "tiles"])
def _forward_step(  # type: ignore[no-untyped-def]
    gates, weight, s, r, r_in, bias, before, lengths, states, cells, z, hs, products, t, T, R, share, span, tiles,
    u: tl.constexpr, REVERSE: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Step t. `before` is h or, after the first step, the states; a line serves `share` rows, a weight `span`."""
    block, row, unit, there = _place(R, u, span, tiles, ROWS)
    inside = there & (unit < u)
    t = t.to(
        tl.int64
    )  # a step's part of a tensor has fewer than 2^31 elements, all steps may have more
    size = R * u
    gates += t * (4 * size)
    z += t * (4 * size)
    source = hs + (t if KEEP else t % 2) * size + row * u
    w = weight + block.to(tl.int64) * 4 * u * u + unit * u
    zi = tl.zeros((ROWS, UNITS), tl.float32)
    zf = tl.zeros((ROWS, UNITS), tl.float32)
    zg = tl.zeros((ROWS, UNITS), tl.float32)
    zo = tl.zeros((ROWS, UNITS), tl.float32)
    for start in range(0, u, DEPTH):
        k = start + tl.arange(0, DEPTH)
        x = tl.load(source + k[None, :], mask=there & (k[None, :] < u), other=0.0)
        known = (k[:, None] < u) & (unit < u)
        zi = tl.dot(
            x,
            tl.load(w + k[:, None], mask=known, other=0.0),
            zi,
            input_precision=PRECISION,
        )
        zf = tl.dot(
            x,
            tl.load(w + u * u + k[:, None], mask=known, other=0.0),
            zf,
            input_precision=PRECISION,
        )
        zg = tl.dot(
            x,
            tl.load(w + 2 * u * u + k[:, None], mask=known, other=0.0),
            zg,
            input_precision=PRECISION,
        )
        zo = tl.dot(
            x,
            tl.load(w + 3 * u * u + k[:, None], mask=known, other=0.0),
            zo,
            input_precision=PRECISION,
        )
    gate = row * 4 * u + unit
    line = row // share * 4 * u + unit
    zi = _settled(zi, products, z, gate, inside, KEEP)
    zf = _settled(zf, products, z, gate + u, inside, KEEP)
    zg = _settled(zg, products, z, gate + 2 * u, inside, KEEP)
    zo = _settled(zo, products, z, gate + 3 * u, inside, KEEP)
    i = tl.sigmoid(_gate(zi, gates, r, r_in, bias, gate, line, inside))
    f = tl.sigmoid(_gate(zf, gates, r, r_in, bias, gate + u, line + u, inside))
    g = _tanh(_gate(zg, gates, r, r_in, bias, gate + 2 * u, line + 2 * u, inside))
    o = tl.sigmoid(_gate(zo, gates, r, r_in, bias, gate + 3 * u, line + 3 * u, inside))
    own = row * u + unit
    old_slot, new_slot = t + REVERSE, t + 1 - REVERSE
    if not KEEP:
        old_slot, new_slot = old_slot % 2, new_slot % 2
    c = tl.load(cells + old_slot * size + own, mask=inside, other=0.0)
    new = f * c + i * g
    h = o * _tanh(new)
    first = t == (T - 1 if REVERSE else 0)
    if lengths is not None:
        live = t < tl.load(lengths + row, mask=there, other=0)
        old = tl.load(
            before + tl.where(first, 0, t - 1 + 2 * REVERSE) * size + own,
            mask=inside,
            other=0.0,
        )
        new = tl.where(live, new, c)
        h = tl.where(live, h, old.to(tl.float32))
    tl.store(cells + new_slot * size + own, new, mask=inside)
    tl.store(states + t * size + own, h, mask=inside)
    if s is not None:
        h = h * tl.load(s + row // share * u + unit, mask=inside, other=0.0).to(
            tl.float32
        )
    following = t + 1 - 2 * REVERSE
    edge = tl.where(
        t == (0 if REVERSE else T - 1), 0, u
    )  # the last step has no other to write for
    tl.store(
        hs + (following if KEEP else (t + 1) % 2) * size + own,
        h,
        mask=there & (unit < edge),
    )


@triton.jit(do_not_specialize=["t", "depth", "R", "share", "span", "tiles"])
def _backward_step(  # type: ignore[no-untyped-def]
    dh, carry, rest, ds, products, gates, weight, s, r, r_in, bias, lengths, states, cells, z, dgates, dz, t, depth, R,
    share, span, tiles, u: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Step t. carry holds dc, rest what goes past a row that rests; `depth` is 4u, and 0 where no step comes after."""
    block, row, unit, there = _place(R, u, span, tiles, ROWS)
    inside = there & (unit < u)
    t = t.to(tl.int64)
    size = R * u
    source = dz + (t + 1 - 2 * REVERSE) * (4 * size) + row * 4 * u
    gates += t * (4 * size)
    z += t * (4 * size)
    dgates += t * (4 * size)
    dz += t * (4 * size)
    w = weight + block.to(tl.int64) * 4 * u * u + unit
    back = tl.zeros((ROWS, UNITS), tl.float32)
    for start in range(0, depth, DEPTH):
        k = start + tl.arange(0, DEPTH)
        x = tl.load(source + k[None, :], mask=there & (k[None, :] < 4 * u), other=0.0)
        known = (k[:, None] < 4 * u) & (unit < u)
        back = tl.dot(
            x,
            tl.load(w + k[:, None] * u, mask=known, other=0.0),
            back,
            input_precision=PRECISION,
        )
    own = row * u + unit
    back = _settled(back, products, products, own, inside, False)
    if s is not None:
        h = tl.load(states + t * size + own, mask=inside, other=0.0).to(tl.float32)
        tl.store(
            ds + own, tl.load(ds + own, mask=inside, other=0.0) + back * h, mask=inside
        )
        back = back * tl.load(s + row // share * u + unit, mask=inside, other=0.0).to(
            tl.float32
        )
    upper = back + tl.load(dh + t * size + own, mask=inside, other=0.0).to(tl.float32)

    gate = row * 4 * u + unit
    line = row // share * 4 * u + unit
    zi = tl.load(z + gate, mask=inside, other=0.0).to(tl.float32)
    zf = tl.load(z + gate + u, mask=inside, other=0.0).to(tl.float32)
    zg = tl.load(z + gate + 2 * u, mask=inside, other=0.0).to(tl.float32)
    zo = tl.load(z + gate + 3 * u, mask=inside, other=0.0).to(tl.float32)
    i = tl.sigmoid(_gate(zi, gates, r, r_in, bias, gate, line, inside))
    f = tl.sigmoid(_gate(zf, gates, r, r_in, bias, gate + u, line + u, inside))
    g = _tanh(_gate(zg, gates, r, r_in, bias, gate + 2 * u, line + 2 * u, inside))
    o = tl.sigmoid(_gate(zo, gates, r, r_in, bias, gate + 3 * u, line + 3 * u, inside))
    c = tl.load(cells + (t + REVERSE) * size + own, mask=inside, other=0.0)
    bent = _tanh(
        tl.load(cells + (t + 1 - REVERSE) * size + own, mask=inside, other=0.0)
    )

    dc = tl.load(carry + own, mask=inside, other=0.0)
    if lengths is not None:
        live = t < tl.load(lengths + row, mask=there, other=0)
        upper = upper + tl.load(rest + own, mask=inside, other=0.0)
        tl.store(rest + own, tl.where(live, 0.0, upper), mask=inside)
        new = tl.where(live, dc + upper * o * (1 - bent * bent), 0.0)
        upper = tl.where(live, upper, 0.0)
        tl.store(carry + own, tl.where(live, new * f, dc), mask=inside)
    else:
        new = dc + upper * o * (1 - bent * bent)
        tl.store(carry + own, new * f, mask=inside)
    _store_gate(new * g * i * (1 - i), dgates, dz, r, gate, line, inside)
    _store_gate(new * c * f * (1 - f), dgates, dz, r, gate + u, line + u, inside)
    _store_gate(
        new * i * (1 - g * g), dgates, dz, r, gate + 2 * u, line + 2 * u, inside
    )
    _store_gate(
        upper * bent * o * (1 - o), dgates, dz, r, gate + 3 * u, line + 3 * u, inside
    )


@triton.jit
def _store_gate(d, dgates, dz, r, at, line, inside):  # type: ignore[no-untyped-def]
    tl.store(dgates + at, d, mask=inside)
    if r is not None:  # else dz is dgates
        tl.store(
            dz + at,
            d * tl.load(r + line, mask=inside, other=0.0).to(tl.float32),
            mask=inside,
        )


@triton.jit
def _sum_steps(
    dgates, gates, z, r_in, dr, dr_in, dbias, T, C, size, share, BLOCK: tl.constexpr
):  # type: ignore[no-untyped-def]
    """Gradients of r, r_in and bias for every row (R, C), and dgates o r_in in place of dgates; one pass over steps."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    sum_r = tl.zeros((BLOCK,), tl.float32)
    sum_in = tl.zeros((BLOCK,), tl.float32)
    sum_bias = tl.zeros((BLOCK,), tl.float32)
    factor = tl.zeros((BLOCK,), tl.float32)
    if r_in is not None:
        factor = tl.load(
            r_in + at // C // share * C + at % C, mask=inside, other=0.0
        ).to(tl.float32)
    there = at
    for _ in range(T):
        d = tl.load(dgates + there, mask=inside, other=0.0).to(tl.float32)
        sum_bias += d
        if dr is not None:
            sum_r += d * tl.load(z + there, mask=inside, other=0.0).to(tl.float32)
        if r_in is not None:
            sum_in += d * tl.load(gates + there, mask=inside, other=0.0).to(tl.float32)
            tl.store(dgates + there, d * factor, mask=inside)
        there += size
    if dr is not None:
        tl.store(dr + at, sum_r, mask=inside)
    if r_in is not None:
        tl.store(dr_in + at, sum_in, mask=inside)
    if dbias is not None:
        tl.store(dbias + at, sum_bias, mask=inside)


# Launches -------------------------------------------------------------------------------------------------------------


def _plan(
    gates: Tensor, cell: Cell
) -> tuple[tuple[int, int, int], tuple[int, ...], tuple[Any, ...], int]:
    """The grid; R, rows of a line, rows of a weight, tiles of these; PRECISION, ROWS, DEPTH; and warps."""
    R, blocks, u = gates.shape[1], cell.weight.shape[0], cell.weight.shape[2]
    span, columns = R // blocks, triton.cdiv(u, UNITS.value)
    rows = next(
        n
        for n in (64, 32, 16)
        if n == 16 or blocks * triton.cdiv(span, n) * columns >= BUSY
    )
    tiles = triton.cdiv(span, rows)
    lines = next((line.shape[0] for line in cell[1:] if line is not None), 1)
    precision = (
        "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
    )
    depth = 32 if gates.dtype == torch.float32 else 64
    warps = 8 if rows == depth == 64 else 4  # a sixth of the time less on an H200
    return (
        (blocks * tiles, columns, 1),
        (R, R // lines, span, tiles),
        (precision, rows, depth),
        warps,
    )


def _key(gates: Tensor, *tensors: Tensor | None) -> tuple[Any, ...]:
    """What variants of a kernel differ in: the type, which tensors there are, and how they lie."""
    return gates.dtype, *(None if t is None else aligned(t) for t in (gates, *tensors))


def forward(
    gates: Tensor,
    cell: Cell,
    h: Tensor,
    c: Tensor,
    lengths: Tensor | None,
    reverse: bool,
    keep: bool,
) -> tuple[Tensor, ...]:
    """What the operation in lstm.py says it returns."""
    T, R, u = *gates.shape[:2], h.shape[1]
    grid, sizes, constants, warps = _plan(gates, cell)
    states = gates.new_empty(T, R, u)
    cells = gates.new_empty(T + 1 if keep else 2, R, u, dtype=torch.float32)
    z, hs = (
        gates.new_empty(T if keep else 0, R, 4 * u),
        gates.new_empty(T if keep else 2, R, u),
    )
    start, slots = (T - 1, T) if reverse else (0, 0)
    cells[slots % len(cells)] = c
    hs[start % len(hs)] = (
        h if cell.s is None else h * cell.s.repeat_interleave(sizes[1], 0)
    )
    constants = (u, int(reverse), keep, *constants)
    # The state before the first step is given, those before the others are computed.
    first, *others = range(T)[:: -1 if reverse else 1]
    products = torch.empty_like(gates[0], dtype=torch.float32)
    fixed, key = (
        (states, cells, z, hs, products),
        _key(gates, *cell, h, lengths, states),
    )
    steps = [(gates, *cell, h, lengths, *fixed, first, T, *sizes)]
    steps += [(gates, *cell, states, lengths, *fixed, t, T, *sizes) for t in others]
    launch_steps(_forward_step, grid, steps, constants, key, warps)
    last = cells[(0 if reverse else T) % len(cells)].to(gates.dtype, copy=True)
    return (
        states,
        last,
        *((cells, z, hs) if keep else (gates.new_empty(0) for _ in range(3))),
    )


def backward(
    dh: Tensor, dc: Tensor, gates: Tensor, cell: Cell, h: Tensor, c: Tensor, states: Tensor, cells: Tensor,
    z: Tensor, hs: Tensor, lengths: Tensor | None, reverse: bool, weighs: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What the operation in lstm.py says it returns."""
    T, _, u = states.shape
    grid, sizes, constants, warps = _plan(gates, cell)
    dc = dc.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    flows = (
        dh,
        dc,
        torch.zeros_like(cells[0]),
        torch.zeros_like(cells[0]),
        torch.empty_like(cells[0]),
    )
    _, carry, rest, ds, _ = flows
    dgates = torch.empty_like(gates)
    dz = dgates if cell.r is None else torch.empty_like(gates)
    key = _key(gates, *cell, dh, lengths, states, cells, z)
    last, *others = range(T)[:: 1 if reverse else -1]
    fixed = *flows, gates, *cell, lengths, states, cells, z, dgates, dz
    steps = [(*fixed, last, 0, *sizes), *((*fixed, t, 4 * u, *sizes) for t in others)]
    launch_steps(_backward_step, grid, steps, (u, int(reverse), *constants), key, warps)
    back = torch.bmm(
        dz[T - 1 if reverse else 0].unflatten(0, (len(cell.weight), -1)), cell.weight
    ).flatten(0, 1)
    dweight = weight_gradient(dz, hs, cell.weight) if weighs else None
    dr, dr_in, dbias = _line_gradients(dgates, gates, z, cell, sizes[1])
    if cell.s is not None:
        ds = ds + back * h
        back = back * cell.s.repeat_interleave(sizes[1], 0)
    found = (
        dgates,
        dweight,
        None if cell.s is None else sum_lines(cell.s, ds),
        dr,
        dr_in,
        dbias,
    )
    return (
        *(gates.new_empty(0) if g is None else g for g in found),
        (back + rest).to(h.dtype),
        carry.to(c.dtype),
    )


def _line_gradients(
    dgates: Tensor, gates: Tensor, z: Tensor, cell: Cell, share: int
) -> tuple[Tensor | None, ...]:
    """Those of r, r_in and bias; dgates becomes the gradient of the gates as they came."""
    given = cell.r, cell.r_in, cell.bias
    if all(line is None for line in given):
        return None, None, None
    sums = [
        None if line is None else torch.empty_like(gates[0], dtype=torch.float32)
        for line in given
    ]
    size = gates[0].numel()
    _sum_steps[(triton.cdiv(size, 512),)](
        dgates,
        gates,
        z,
        cell.r_in,
        *sums,
        len(gates),
        gates.shape[2],
        size,
        share,
        BLOCK=512,
    )
    return tuple(
        None if d is None else sum_lines(line, d)
        for line, d in zip(given, sums, strict=True)
    )
