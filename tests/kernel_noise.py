"""The numbers that kernels make from a seed (kernels/philox.py), by numpy in float64: Philox, then Box and Muller."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = tuple[NDArray[np.uint64], ...]
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox(counter: Words, key: int, rounds: int = 7) -> Words:
    """Four words of 32 bits from four, as Salmon et al. (2011) define them."""
    a, b, c, d = counter
    low, high = key & 0xFFFFFFFF, key >> 32
    for _ in range(rounds):
        left, right = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (
            (right >> _SHIFT) ^ b ^ np.uint64(low),
            right & _LOW,
            (left >> _SHIFT) ^ d ^ np.uint64(high),
            left & _LOW,
        )
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return a, b, c, d


def noise(
    family: int, rows: int, channels: int, seed: int, salt: int = 0, first_row: int = 0
) -> NDArray[np.float64]:
    """Standard numbers (rows, channels): normals (1, and 3 for log-normal factors) or Cauchy numbers (2)."""
    row, eight = np.meshgrid(
        np.arange(rows) + first_row, np.arange(-(-channels // 8)), indexing="ij"
    )
    zero = np.zeros_like(row)
    counters = [
        [part.astype(np.uint64) for part in (eight, row, zero + salt, zero + half)]
        for half in range(2)
    ]
    first = np.stack(philox((*counters[0],), seed), -1)  # (rows, eights, 4)
    if family == 1:
        parts = polar(
            (first & np.uint64(0xFFFF)) + 0.5,
            2.0**16,
            (first >> np.uint64(16)) - 32767.5,
        )
    else:
        second = np.stack(philox((*counters[1],), seed), -1)
        if family == 2:
            parts = np.stack([cauchy(first), cauchy(second)], -1)
        else:
            parts = polar(
                first + 0.5,
                2.0**32,
                second.astype(np.int64).astype(np.int32).astype(np.float64),
            )
    return parts.reshape(rows, -1)[:, :channels]


def polar(count: NDArray[Any], cells: float, turn: NDArray[Any]) -> NDArray[np.float64]:
    """Pairs of normals by Box and Muller, from where in so many cells the radius and the angle are."""
    size, angle = np.sqrt(-2 * np.log(count / cells)), 2 * np.pi * turn / cells
    return np.stack([size * np.cos(angle), size * np.sin(angle)], -1)


def cauchy(word: NDArray[np.uint64]) -> NDArray[np.float64]:
    size = 1 / np.tan(np.pi * ((word & np.uint64(0x7FFFFFFF)) + 0.5) / 2.0**32)
    return np.where(word >= np.uint64(0x80000000), size, -size)
