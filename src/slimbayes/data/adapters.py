"""Data sets of other packages as a Split: torchvision's, Hugging Face's, or anything with rows."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from slimbayes.data.dataset import Split

_INPUTS, _TARGETS = ("image", "img", "x", "pixel_values", "input_ids"), ("label", "labels", "y", "target", "fine_label")


def as_split(dataset: Any, inputs: str | None = None, targets: str | None = None) -> Split:
    """All rows of a data set as tensors in main memory.

    Args:
        dataset: rows that are (input, target) pairs, as torchvision's data sets have, or dictionaries, as Hugging Face's. Inputs may be
            PIL images, arrays or tensors, all of one size; what the data set's own transform makes of them is what you get.
        inputs, targets: the keys of dictionaries; by default the first of the usual names that is there.

    Shape: images without a transform become uint8 (N, C, H, W); targets int64 (N,), or float32 if they are real numbers.

    Example:
        >>> rows = [{"img": torch.zeros(3, 8, 8), "label": k % 2} for k in range(5)]
        >>> split = as_split(rows)
        >>> split.x.shape, split.y.tolist()
        (torch.Size([5, 3, 8, 8]), [0, 1, 0, 1, 0])
    """
    xs, ys = [], []
    rows: Iterable[Any] = dataset if hasattr(dataset, "__iter__") else (dataset[i] for i in range(len(dataset)))
    for number, row in enumerate(rows):
        x, y = _pair(row, number, inputs, targets)
        xs.append(_input(x, number))
        ys.append(_target(y, number))
        if xs[-1].shape != xs[0].shape:
            raise ValueError(
                f"Row {number} has an input of shape {tuple(xs[-1].shape)}, row 0 one of {tuple(xs[0].shape)}; give the data set a transform that resizes."
            )
    if not xs:
        raise ValueError("The data set has no rows.")
    return Split(torch.stack(xs), torch.stack(ys))


def _pair(row: Any, number: int, inputs: str | None, targets: str | None) -> tuple[Any, Any]:
    if hasattr(row, "keys"):
        return row[_key(row, inputs, _INPUTS, "inputs", number)], row[_key(row, targets, _TARGETS, "targets", number)]
    if isinstance(row, (tuple, list)) and len(row) == 2:
        return row[0], row[1]
    raise ValueError(f"Row {number} must be an (input, target) pair or a dictionary, got {type(row).__name__}.")


def _key(row: Any, wanted: str | None, usual: tuple[str, ...], argument: str, number: int) -> str:
    found = wanted if wanted is not None else next((name for name in usual if name in row), None)
    if found is None or found not in row:
        raise ValueError(
            f"Row {number} has the keys {', '.join(map(str, row.keys()))}; say with {argument}= which of them to take."
        )
    return found


def _input(x: Any, number: int) -> Tensor:
    if isinstance(x, Tensor):
        return x
    if hasattr(x, "getbands"):  # a PIL image
        import numpy

        x = numpy.array(x)
        return torch.from_numpy(x[None] if x.ndim == 2 else x.transpose(2, 0, 1).copy())
    try:
        return torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"Row {number} has an input of type {type(x).__name__}, which is no image, array or tensor."
        ) from error


def _target(y: Any, number: int) -> Tensor:
    try:
        target = torch.as_tensor(y)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"Row {number} has a target of type {type(y).__name__}, which is no number or array."
        ) from error
    return target.float() if target.is_floating_point() else target.long()
