"""Random factors of a tile, made inside a kernel.

Numbers come from Philox keyed by a seed, with the counter (column / 4, row, salt), whose four outputs serve four
columns side by side: the noise of an element does not depend on how the work is cut.
"""

import triton
import triton.language as tl

from slimbayes.kernels import INTERPRETED

_HARDWARE = tl.constexpr(not INTERPRETED)  # whether a GPU's own functions are at hand


@triton.jit
def _quantile(u):  # type: ignore[no-untyped-def]
    """Of a standard Cauchy: tan(pi (u - 1/2))."""
    angle = 3.141592653589793 * tl.maximum(u, 2.3e-10)
    return -tl.cos(angle) / tl.maximum(tl.sin(angle), 1e-30)


@triton.jit
def _normal(u, v):  # type: ignore[no-untyped-def]
    """Two standard normals from two uniform numbers. The GPU's own logarithm, root, sine and cosine are off by 1e-6 at
    most, and take a third of the time of exact ones.
    """
    if not _HARDWARE:
        return tl.pair_uniform_to_normal(u, v)
    log2 = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [tl.maximum(u, 1e-7)], tl.float32, True, 1)
    size = tl.inline_asm_elementwise(
        "sqrt.approx.f32 $0, $1;", "=f,f", [-1.3862943611198906 * log2], tl.float32, True, 1
    )
    angle = 6.283185307179586 * v
    cos = tl.inline_asm_elementwise("cos.approx.f32 $0, $1;", "=f,f", [angle], tl.float32, True, 1)
    sin = tl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=f,f", [angle], tl.float32, True, 1)
    return size * cos, size * sin


@triton.jit
def noise(key, row, quad, salt, FAMILY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Standard numbers for a tile: rows by four times as many columns as there are quads."""
    zero = (row[:, None] + quad[None, :]) * 0
    a, b, c, d = tl.philox(key, zero + quad[None, :], zero + row[:, None], zero + salt, zero, 7)  # rounds
    a, b = tl.uint_to_uniform_float(a), tl.uint_to_uniform_float(b)
    c, d = tl.uint_to_uniform_float(c), tl.uint_to_uniform_float(d)
    if FAMILY == 2:
        a, b, c, d = _quantile(a), _quantile(b), _quantile(c), _quantile(d)
    else:
        a, b = _normal(a, b)
        c, d = _normal(c, d)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (row.shape[0], 4 * quad.shape[0]))


@triton.jit
def drawn(loc, scale, noise, clip, FAMILY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Factors, and their derivatives by loc and by scale."""
    value = loc + scale * noise
    by_loc = value * 0.0 + 1.0
    if FAMILY == 3:
        value = tl.exp(value)
        by_loc = value
    inside = (value >= -clip) & (value <= clip)
    by_loc = tl.where(inside, by_loc, 0.0)
    return tl.minimum(tl.maximum(value, -clip), clip), by_loc, tl.where(inside, by_loc * noise, 0.0)
