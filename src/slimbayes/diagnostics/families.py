"""How many numbers each Gaussian family over a weight matrix has (Swiatkowski et al. 2020, Table 1)."""

from typing import Literal

from slimbayes.errors import did_you_mean

Family = Literal["multivariate-normal", "matrix-normal", "matrix-normal-diagonal", "mean-field", "k-tied"]
_FAMILIES = ("multivariate-normal", "matrix-normal", "matrix-normal-diagonal", "mean-field", "k-tied")


def variational_parameters(family: Family, m: int, n: int, k: int | None = None) -> int:
    """Number of variational parameters of a posterior over an m x n weight matrix, its m n means included.

        multivariate-normal      m n + m n (m n + 1) / 2            a full covariance
        matrix-normal            m n + m (m + 1) / 2 + n (n + 1) / 2  a covariance of the rows and one of the columns
        matrix-normal-diagonal   m n + m + n                        both diagonal
        mean-field               m n + m n
        k-tied                   m n + k (m + n)

    Args:
        family: one of the names above.
        m, n: inputs (times the kernel's size) and outputs.
        k: rank of the standard deviations, for "k-tied" alone.

    Example:
        >>> [variational_parameters(f, 400, 400) for f in ("matrix-normal-diagonal", "mean-field")]
        [160800, 320000]
        >>> variational_parameters("k-tied", 400, 400, k=2)
        161600
    """
    if family not in _FAMILIES:
        raise ValueError(f"Unknown family {family!r}{did_you_mean(str(family), _FAMILIES)}")
    if m < 1 or n < 1:
        raise ValueError(f"A weight matrix has at least one row and one column, got m={m!r}, n={n!r}.")
    if (k is not None) != (family == "k-tied") or (k is not None and k < 1):
        raise ValueError(
            f"k is the rank, at least 1, of the family 'k-tied' and of no other; got family={family!r}, k={k!r}."
        )
    spread = {
        "multivariate-normal": _triangle(m * n),
        "matrix-normal": _triangle(m) + _triangle(n),
        "matrix-normal-diagonal": m + n,
        "mean-field": m * n,
        "k-tied": (k or 0) * (m + n),
    }
    return m * n + spread[family]


def _triangle(size: int) -> int:
    """Free entries of a symmetric matrix."""
    return size * (size + 1) // 2
