"""Shifts of a test set whose size is known: turned images, other class frequencies, other inputs.

Sizes: B images, N rows, C classes, P features.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def rotate(images: Tensor, degrees: float | Tensor, fill: float = 0.0) -> Tensor:
    """Turn images about their centres, counterclockwise, bilinearly; corners that come into view get `fill`.

    Shape: float (B, C, H, W); degrees a number, or (B,) for one angle each -> (B, C, H, W).

    Example:
        >>> ramp = torch.arange(9.0).view(1, 1, 3, 3)
        >>> rotate(ramp, 90).round()[0, 0]  # the last column becomes the first row
        tensor([[2., 5., 8.],
                [1., 4., 7.],
                [0., 3., 6.]])
    """
    if images.dim() != 4 or not images.is_floating_point():
        got = f"{images.dtype} of shape {tuple(images.shape)}"
        raise ValueError(f"rotate needs a floating-point batch (B, C, H, W), got {got}.")
    batch, _, height, width = images.shape
    angle = torch.deg2rad(torch.as_tensor(degrees, dtype=images.dtype, device=images.device)).expand(batch)
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    # affine_grid asks where a target pixel comes from; its axes are scaled by the image's sides.
    rows = torch.stack([cos, -sin * height / width, zero, sin * width / height, cos, zero], 1).view(-1, 2, 3)
    grid = F.affine_grid(rows, list(images.shape), align_corners=False)
    return F.grid_sample(images - fill, grid, mode="bilinear", padding_mode="zeros", align_corners=False) + fill


def label_shift(
    labels: Tensor,
    proportions: Sequence[float] | Tensor,
    count: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Rows, drawn with replacement, in which classes have other frequencies: p(y) changes, p(x | y) does not.

    Args:
        proportions: what share each class is to have; they are divided by their sum.
        count: how many rows to draw; as many as there are by default.

    Shape: labels (N,) class indices, proportions (C,); returns row numbers (count,).

    Example:
        >>> rows = label_shift(torch.tensor([0, 0, 0, 1]), [0.0, 1.0])
        >>> rows
        tensor([3, 3, 3, 3])
    """
    share = torch.as_tensor(proportions, dtype=torch.float64, device=labels.device)
    if share.dim() != 1 or not bool((share >= 0).all()) or not float(share.sum()) > 0:
        raise ValueError(f"proportions must be numbers from 0 on, not all zero, one a class; got {share.tolist()}.")
    if labels.dim() != 1 or labels.is_floating_point() or int(labels.min()) < 0 or int(labels.max()) >= len(share):
        got = f"{labels.dtype} of shape {tuple(labels.shape)}"
        raise ValueError(f"labels must be (N,) class indices below {len(share)}, got {got}.")
    present = torch.bincount(labels, minlength=len(share))
    missing = ((present == 0) & (share > 0)).nonzero().flatten().tolist()
    if missing:
        wanted = float(share[missing[0]] / share.sum())
        raise ValueError(f"No row has class {missing[0]}, which is to have a share of {wanted:.3g}.")
    return _draw((share / present.clamp_min(1))[labels], count, generator)


def feature_shift(
    x: Tensor,
    strength: float,
    column: int | None = None,
    count: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Rows, drawn with replacement, whose inputs lie elsewhere: p(x) is tilted by exp(strength * z), p(y | x) stays.

    z is a column of x, or the first principal component of the standardised columns, scaled to mean 0 and standard
    deviation 1: for normal inputs the mean of z moves by `strength`.

    Shape: x (N, P); returns row numbers (count,).

    Example:
        >>> x = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0))
        >>> moved = x[feature_shift(x, strength=1.0, column=0, generator=torch.Generator().manual_seed(0))]
        >>> bool(moved[:, 0].mean() > 0.8), bool(moved[:, 1].mean().abs() < 0.2)
        (True, True)
    """
    if x.dim() != 2 or len(x) < 2:
        raise ValueError(f"feature_shift needs a table (N, P) of at least two rows, got shape {tuple(x.shape)}.")
    if column is not None and not -x.shape[1] <= column < x.shape[1]:
        raise ValueError(f"column must be one of {x.shape[1]}, got {column!r}.")
    spread = x.double().std(0)
    if column is not None and not float(spread[column]) > 0:
        raise ValueError(f"column {column} is constant, so there is nowhere to shift it to.")
    table = (x.double() - x.double().mean(0)) / spread.clamp_min(torch.finfo(torch.float64).tiny)
    z = table[:, column] if column is not None else table @ _leading_direction(table)
    z = (z - z.mean()) / z.std()
    return _draw((strength * z - (strength * z).max()).exp(), count, generator)


def _leading_direction(table: Tensor) -> Tensor:
    """First principal component (P,), its largest entry positive: a direction has no sign of its own."""
    direction = torch.linalg.svd(table, full_matrices=False)[2][0]
    return direction * direction[direction.abs().argmax()].sign()


def _draw(weights: Tensor, count: int | None, generator: torch.Generator | None) -> Tensor:
    device = generator.device if generator else weights.device
    rows = torch.multinomial(weights.to(device), count or len(weights), replacement=True, generator=generator)
    return rows.to(weights.device)
