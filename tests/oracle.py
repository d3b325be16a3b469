"""What a converted model must equal: plain models whose weights are those of its draws.

`sb.materialize` is the oracle: inside `fixed_draws` it gives the plain network of one held draw.
"""

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

import slimbayes as sb

RTOL, ATOL = 1e-4, 3e-5


@contextmanager
def shapes_alone() -> Iterator[None]:
    """Networks made inside have shapes and no numbers; torch would go through much Python to draw none."""
    with torch.device("meta"), pytest.MonkeyPatch.context() as patch:
        for draw in ("normal_", "uniform_"):
            patch.setattr(Tensor, draw, lambda tensor, *args, **options: tensor)
        yield


def leaves(output: Any) -> list[Tensor]:
    """Every tensor in what a model returns, in order: containers, named tuples, dataclasses, packed sequences."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, PackedSequence):
        return [output.data]
    if isinstance(output, Mapping):
        return [leaf for value in output.values() for leaf in leaves(value)]
    if isinstance(output, (tuple, list)):
        return [leaf for value in output for leaf in leaves(value)]
    if dataclasses.is_dataclass(output):
        return [
            leaf
            for f in dataclasses.fields(output)
            for leaf in leaves(getattr(output, f.name))
        ]
    return []


def assert_equal(actual: Any, expected: Any, message: str = "") -> None:
    """Equal to rounding, tensor by tensor."""
    got, wanted = leaves(actual), leaves(expected)
    assert len(got) == len(wanted), (
        f"{message}: {len(got)} tensors instead of {len(wanted)}"
    )
    for i, (a, b) in enumerate(zip(got, wanted)):
        assert a.shape == b.shape, (
            f"{message}: tensor {i} is {tuple(a.shape)} instead of {tuple(b.shape)}"
        )
        torch.testing.assert_close(
            a,
            b,
            rtol=RTOL,
            atol=ATOL,
            msg=lambda text, i=i: f"{message}, tensor {i}: {text}",
        )


def assert_draws(outputs: Any, plains: list[nn.Module], args: Any, kwargs: Any) -> None:
    """Draw j of `outputs` is what the j-th plain model returns."""
    expected = [leaves(plain(*args, **kwargs)) for plain in plains]
    got = leaves(outputs)
    assert len(got) == len(expected[0]), (
        f"{len(got)} tensors instead of {len(expected[0])}"
    )
    for i, tensor in enumerate(got):
        wanted = torch.stack([one[i] for one in expected])
        assert tensor.shape == wanted.shape, (
            f"tensor {i} is {tuple(tensor.shape)} instead of {tuple(wanted.shape)}"
        )
        torch.testing.assert_close(
            tensor,
            wanted,
            rtol=RTOL,
            atol=ATOL,
            msg=lambda text, i=i: f"tensor {i}: {text}",
        )


def held(model: nn.Module, draws: int | None = None) -> list[nn.Module]:
    """The plain networks of all draws that are held; call it inside `fixed_draws(model, draws)`."""
    total = sb.members(model) if draws is None else draws
    return [sb.materialize(model, draw=j) for j in range(total)]


def draws_of_rows(
    output: Any, expected: list[Any], rows: Any, owner: Any = None
) -> list[set[int]]:
    """Which of the expected outputs each row agrees with in all tensors: one set of draws for each row of the input.

    `rows` is the dimension that holds the rows, or one for each tensor; None makes a tensor one row, "any" leaves it
    out. `owner` tells the input's row of an output's row.
    """
    sets: dict[int, set[int]] = {}
    for i, tensor in enumerate(leaves(output)):
        dim = rows[i] if isinstance(rows, tuple) else rows
        ones = [leaves(one)[i] for one in expected]
        assert all(tensor.shape == one.shape for one in ones), (
            f"tensor {i} is {tuple(tensor.shape)} instead of {tuple(ones[0].shape)}"
        )
        for row in range(
            0 if dim == "any" else 1 if dim is None else tensor.shape[dim]
        ):
            parts = [t if dim is None else t.select(dim, row) for t in (tensor, *ones)]
            fits = {
                j
                for j, part in enumerate(parts[1:])
                if torch.allclose(parts[0], part, rtol=RTOL, atol=ATOL)
            }
            key = row if owner is None else owner(row)
            sets[key] = sets.get(key, fits) & fits
    return [sets[key] for key in sorted(sets)]


def assert_rows_of_draws(
    output: Any, expected: list[Any], rows: Any, owner: Any = None
) -> None:
    """A bare call: the whole output is one draw's, or, where rows can be told apart, every row is."""
    whole = draws_of_rows(output, expected, None)
    if set.intersection(*whole):
        return
    assert rows is not None, (
        "rows of this model cannot be told apart, but the output is no single draw's"
    )
    found = draws_of_rows(output, expected, rows, owner)
    assert all(found), (
        f"rows {[i for i, fits in enumerate(found) if not fits]} belong to no draw"
    )


@contextmanager
def quietly() -> Iterator[list[str]]:
    """Let the warning that a model runs draw by draw pass, and collect it; every other warning stays an error."""
    seen: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings(
            "ignore", category=FutureWarning, message=".*weight_norm.*"
        )
        warnings.filterwarnings(
            "always", message=r"(?s).*draw by draw", category=UserWarning
        )
        warnings.filterwarnings(
            "ignore",
            message="Converting a tensor with requires_grad=True to a scalar",
            category=UserWarning,
        )
        warnings.filterwarnings(
            "ignore",
            message=r".*layers that the first pass never called",
            category=UserWarning,
        )
        yield seen
    seen.extend(str(w.message) for w in caught if "draw by draw" in str(w.message))
