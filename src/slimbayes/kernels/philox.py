"""Random factors of a tile, made inside a kernel.

Bits come from Philox4x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") keyed by a seed, with the
counter (column / 8, row, salt, half): the noise of an element does not depend on how the work is cut. Seven rounds are
the fewest that passed all of BigCrush there.

Eight columns side by side are one counter's. Normals take one call for them, and one word for each pair: half of its
bits are the radius of Box and Muller, half the angle, each the middle of its cell. Their variance is 1 - 5e-6 and the
largest is 4.85, which one of 800,000 normals exceeds. Tails of log-normal and Cauchy factors matter more: these take
two calls (half 0 and 1), and a word for each number.
"""

import triton
import triton.language as tl

from slimbayes.kernels import INTERPRETED

_HARDWARE = tl.constexpr(not INTERPRETED)  # whether a GPU's own functions are at hand


@triton.jit
def _product(a, factor: tl.constexpr):  # type: ignore[no-untyped-def]
    """Lower and upper half of the product of words, in one instruction, which Triton's own Philox takes two for."""
    if not _HARDWARE:
        whole = a.to(tl.uint64) * factor
        return whole.to(tl.uint32), (whole >> 32).to(tl.uint32)
    return tl.inline_asm_elementwise(
        "{ .reg .u64 whole; mul.wide.u32 whole, $2, $3; mov.b64 {$0, $1}, whole; }",
        "=r,=r,r,r",
        [a, factor],
        (tl.uint32, tl.uint32),
        True,
        1,
    )


@triton.jit
def _bits(key, row, eight, salt, half):  # type: ignore[no-untyped-def]
    """Four words of 32 bits for each row and each eight of columns."""
    zero = ((row[:, None] + eight[None, :]) * 0).to(tl.uint32)
    a, b = zero + eight[None, :].to(tl.uint32), zero + row[:, None].to(tl.uint32)
    c, d = zero + salt, zero + half
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    for _ in tl.static_range(7):
        left, upper_left = _product(a, 0xD2511F53)
        right, upper_right = _product(c, 0xCD9E8D57)
        a, b, c, d = upper_right ^ b ^ low, right, upper_left ^ d ^ high, left
        low = tl.add(low, 0x9E3779B9, sanitize_overflow=False)
        high = tl.add(high, 0xBB67AE85, sanitize_overflow=False)
    return a, b, c, d


@triton.jit
def _counted(word, UPPER: tl.constexpr):  # type: ignore[no-untyped-def]
    """2^23 + the number in one half of a word, by its place in a mantissa: quicker than a conversion."""
    if not _HARDWARE:
        return ((word >> 16 if UPPER else word & 0xFFFF) | 0x4B000000).to(
            tl.float32, bitcast=True
        )
    selector: tl.constexpr = "0x7632" if UPPER else "0x7610"
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0x4B000000, " + selector + ";",
        "=f,r",
        [word],
        tl.float32,
        True,
        1,
    )


@triton.jit
def _polar(u, angle):  # type: ignore[no-untyped-def]
    """Two standard normals from a uniform number and an angle. The GPU's own logarithm, root, sine and cosine take a
    third of the time of exact ones, and are off by 1e-6, or where both normals are near zero by 4e-5.
    """
    if not _HARDWARE:
        size = tl.sqrt(-2.0 * tl.log(u))
        return size * tl.cos(angle), size * tl.sin(angle)
    log2 = tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [u], tl.float32, True, 1
    )
    size = tl.inline_asm_elementwise(
        "sqrt.approx.ftz.f32 $0, $1;",
        "=f,f",
        [-1.3862943611198906 * log2],
        tl.float32,
        True,
        1,
    )
    cos = tl.inline_asm_elementwise(
        "cos.approx.ftz.f32 $0, $1;", "=f,f", [angle], tl.float32, True, 1
    )
    sin = tl.inline_asm_elementwise(
        "sin.approx.ftz.f32 $0, $1;", "=f,f", [angle], tl.float32, True, 1
    )
    return size * cos, size * sin


@triton.jit
def _pair(word):  # type: ignore[no-untyped-def]
    """Two normals from one word."""
    u = _counted(word, False) * 1.52587890625e-05 - 127.99999237060547
    return _polar(
        u,
        (_counted(word, True) - 8421376.0) * 9.587379924285257e-05
        + 4.793689962142629e-05,
    )


@triton.jit
def _exact_pair(word, other):  # type: ignore[no-untyped-def]
    """Two normals from two words, whose bits all count."""
    u = word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    u = tl.minimum(u, 0.999999)  # nearer to one a GPU's logarithm may be positive
    return _polar(
        u, other.to(tl.int32, bitcast=True).to(tl.float32) * 1.4629180792671596e-09
    )


@triton.jit
def _sine(v):  # type: ignore[no-untyped-def]
    """sin(pi v) for v in [0, 1/2]."""
    w = v * v
    tail = 0.08214588661112823 + w * (-0.007370430945714351)
    return v * (
        3.141592653589793
        + w
        * (
            -5.16771278004997
            + w * (2.550164039877345 + w * (-0.5992645293207921 + w * tail))
        )
    )


@triton.jit
def _quantile(word):  # type: ignore[no-untyped-def]
    """A standard Cauchy number: cot(pi v) with a random sign; v near zero, which makes it large, keeps its digits."""
    v = (word & 0x7FFFFFFF).to(tl.int32).to(
        tl.float32
    ) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    size = _sine(0.5 - v) / _sine(v)
    return tl.where(word >= 0x80000000, size, -size)


@triton.jit
def noise(key, row, eight, salt, FAMILY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Standard numbers for a tile: rows by eight times as many columns as there are eights."""
    a, c, e, g = _bits(key, row, eight, salt, 0)
    if FAMILY == 1:
        a, b = _pair(a)
        c, d = _pair(c)
        e, f = _pair(e)
        g, h = _pair(g)
    else:
        b, d, f, h = _bits(key, row, eight, salt, 1)
        if FAMILY == 2:
            a, b, c, d = _quantile(a), _quantile(b), _quantile(c), _quantile(d)
            e, f, g, h = _quantile(e), _quantile(f), _quantile(g), _quantile(h)
        else:
            a, b = _exact_pair(a, b)
            c, d = _exact_pair(c, d)
            e, f = _exact_pair(e, f)
            g, h = _exact_pair(g, h)
    # The last of joined axes runs fastest: columns are a, b, c ... in order.
    evens, odds = (
        tl.join(tl.join(a, e), tl.join(c, g)),
        tl.join(tl.join(b, f), tl.join(d, h)),
    )
    return tl.reshape(tl.join(evens, odds), (row.shape[0], 8 * eight.shape[0]))


@triton.jit
def drawn(loc, scale, noise, clip, FAMILY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Factors before and after they are clipped."""
    value = loc + scale * noise
    if FAMILY == 3:
        value = tl.exp(value)
    return value, tl.minimum(tl.maximum(value, -clip), clip)
