"""Two approximations of a positive matrix A (m x n) by rank k: the best one, and the best one with positive factors.

    low_rank              A_k = the k largest singular values' part: the nearest matrix of rank k (Eckart-Young)
    nonnegative_factors   U (m x k) >= 0, V (n x k) >= 0 with U V^T near A: what a k-tied posterior can hold

The first is a lower bound on the error of the second. They agree for k = 1 (the first singular vectors of a positive matrix are
positive: Perron-Frobenius), for k = 2 wherever A_2 is not negative, and whenever the further singular values are small beside
the first, as those of trained standard deviations are. They need not agree for k >= 3: a matrix may have a larger nonnegative
rank than rank.

The start. With A_k = P Q^T, any invertible T gives U = P T and V = Q T^-T with the same product. Divided by their first
entries, the rows of P are points p in k - 1 dimensions; U >= 0 says that a simplex holds them all. We take the all but tight
simplex of fixed directions, so U > 0 always, and V >= 0 unless its corners reach too far; then what is negative is cut off and
coordinate descent (HALS, Cichocki & Phan 2009) repairs it. Multiplicative updates (Lee & Seung 2001) from the usual SVD start
were tried first and stood still at the rank-1 solution for hundreds of steps: standard deviations that are nearly of rank one
are their worst case.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_EXTRA = 8  # singular values beyond k that the descent sees; all others are noise to a rank-k fit
_CHECK = 100  # steps between two looks at the error


class Factors(NamedTuple):
    """U (m, k) and V (n, k), not negative, and the relative error |A - U V^T| / |A|."""

    u: Tensor
    v: Tensor
    error: float


def low_rank(matrix: Tensor, rank: int) -> Tensor:
    """The nearest matrix of this rank, which may have negative entries from rank 2 on.

    >>> low_rank(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), 1)
    tensor([[2., 0.],
            [0., 0.]])
    """
    u, values, vt = torch.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * values[:rank]) @ vt[:rank]


def nonnegative_factors(matrix: Tensor, rank: int, steps: int = 2000) -> Factors:
    """Factors without negative entries whose product is near a positive matrix.

    Args:
        matrix: A (m, n), positive.
        rank: k, at most min(m, n).
        steps: at most so many rounds of coordinate descent; it stops when the error no longer falls.

    Shape: U (m, k), V (n, k), columns of equal length in both, in float64.

    Example:
        >>> a = torch.rand(6, 2) @ torch.rand(2, 5)
        >>> u, v, error = nonnegative_factors(a, 2)
        >>> bool((u >= 0).all() and (v >= 0).all()), error < 1e-6
        (True, True)
    """
    matrix = matrix.double()
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    sign = torch.ones_like(values)
    sign[0] = 1.0 if bool(left[:, 0].sum() >= 0) else -1.0
    root = values.sqrt()
    p, q = left * root * sign, right.T * root * sign  # A = P Q^T
    u, v = _simplex_start(p[:, :rank], q[:, :rank])
    best = float(values[rank:].square().sum().sqrt())
    u, v = _descend(matrix, p[:, : rank + _EXTRA], q[:, : rank + _EXTRA], u.clamp_min(0), v.clamp_min(0), best, steps)
    balance = (v.norm(dim=0) / u.norm(dim=0).clamp_min(1e-300)).sqrt().clamp_min(1e-150)
    u, v = u * balance, v / balance
    return Factors(u, v, _distance(matrix, u, v) / float(matrix.norm()))


def _simplex_start(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """U = P T >= 0 and V = Q T^-T, whose product is P Q^T exactly; V may have negative entries."""
    k = p.shape[1]
    if k == 1:
        return p, q
    # The floors are for matrices of exact blocks, or of lower rank than k: there a first entry or an axis can be mere rounding.
    points = p[:, 1:] / p[:, :1].clamp_min(1e-6 * float(p[:, 0].max()))
    # Facet normals of a regular simplex: k vectors that sum to zero, scaled to the points' extent along each axis.
    frame = torch.cat([p.new_ones(k, 1), torch.eye(k, dtype=p.dtype, device=p.device)[:, :-1]], 1)
    normals = torch.linalg.qr(frame)[0][:, 1:] / points.abs().amax(0).clamp_min(1e-6)
    heights = -(points @ normals.T).amin(0) + 1e-3  # each facet all but touches a point: a factor of zero has no log
    t = torch.cat([heights[None], normals.T]) / heights.sum()
    return p @ t, q @ torch.linalg.inv(t).T


def _descend(
    matrix: Tensor, p: Tensor, q: Tensor, u: Tensor, v: Tensor, best: float, steps: int
) -> tuple[Tensor, Tensor]:
    """Minimise |P Q^T - U V^T| one column after another until the error is the best possible or stands still."""
    enough = best * (1 + 1e-6) + 1e-9 * float(matrix.norm())
    error = _distance(matrix, u, v)
    for step in range(1, steps + 1):
        if error <= enough:
            break
        _improve(u, p, q.T @ v, v.T @ v)
        _improve(v, q, p.T @ u, u.T @ u)
        if step % _CHECK == 0:
            former, error = error, _distance(matrix, u, v)
            if error > former * (1 - 1e-5):
                break
    return u, v


def _improve(x: Tensor, outer: Tensor, inner: Tensor, gram: Tensor) -> None:
    """Set each column of one factor to its best nonnegative value, in place; target @ other = outer @ inner."""
    target = outer @ inner
    for j in range(x.shape[1]):
        gradient = target[:, j] - x @ gram[:, j]
        x[:, j] = (x[:, j] + gradient / gram[j, j].clamp_min(1e-300)).clamp_min(0)


def _distance(matrix: Tensor, u: Tensor, v: Tensor) -> float:
    return float((matrix - u @ v.T).norm())
