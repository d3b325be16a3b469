"""What a converted model must equal: plain models whose weights are those of its draws.

`write_out` is the oracle: inside `frozen` it gives the plain network of one held draw. It is
`sb.write_out` where that exists, and else a slow copy made of `materialise`, which serves methods that
draw weights or members, not those that drop units.
"""

import copy
import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import remove_spectral_norm, remove_weight_norm
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


def write_out(model: nn.Module, index: int) -> nn.Module:
    """The plain network of held draw `index`; call it inside `frozen`."""
    if hasattr(sb, "write_out"):
        return sb.write_out(model, index)
    return _write_out_slowly(model, index)


@torch.no_grad()
def _write_out_slowly(model: nn.Module, index: int) -> nn.Module:
    from slimbayes.layers.base import Converted
    from slimbayes.layers.copied import Copied

    plain = sb.debayesianize(copy.deepcopy(model))
    for layer in (
        plain.modules()
    ):  # weights that hooks of the old style compute would overwrite what is written
        for kind, remove in (
            ("WeightNorm", remove_weight_norm),
            ("SpectralNorm", remove_spectral_norm),
        ):
            if any(
                type(hook).__name__ == kind
                for hook in layer._forward_pre_hooks.values()
            ):
                remove(layer)
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, Converted) or ".posterior." in f".{name}.":
            continue
        if isinstance(layer, Copied):
            members: Any = layer.posterior["members"]
            chosen = index % members.members
            if chosen:
                plain = _replaced(
                    plain, name, copy.deepcopy(members.others[chosen - 1])
                )
            continue
        for site, posterior in layer.posterior.items():
            weight, bias = posterior.materialise(layer.linear_map(site), index)
            _set(plain.get_submodule(name), site, weight, bias)
    return plain.train(model.training)


def _replaced(plain: nn.Module, name: str, part: nn.Module) -> nn.Module:
    if not name:
        return part
    parent, _, leaf = name.rpartition(".")
    setattr(plain.get_submodule(parent), leaf, part)
    return plain


def _set(layer: Any, site: str, weight: Tensor, bias: Tensor | None) -> None:
    """Write one site's weight and bias into a plain layer."""
    if isinstance(layer, nn.MultiheadAttention) and site != "out":
        rows = slice(
            "qkv".index(site) * layer.embed_dim,
            ("qkv".index(site) + 1) * layer.embed_dim,
        )
        own = (
            layer.in_proj_weight[rows]
            if layer._qkv_same_embed_dim
            else getattr(layer, f"{site}_proj_weight")
        )
        own_bias = None if layer.in_proj_bias is None else layer.in_proj_bias[rows]
    elif isinstance(layer, nn.MultiheadAttention):
        own, own_bias = layer.out_proj.weight, layer.out_proj.bias
    else:
        own = (
            getattr(layer, f"{site}_orig", None)
            if hasattr(layer, f"{site}_mask")
            else getattr(layer, site)
        )  # pruned or as it is
        own_bias = getattr(layer, site.replace("weight", "bias"), None)
    own.copy_(weight)
    if own_bias is not None and bias is not None:
        own_bias.copy_(bias)


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
    """The plain networks of all draws that are held; call it inside `frozen(model, draws)`."""
    total = sb.members(model) if draws is None else draws
    return [write_out(model, j) for j in range(total)]


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
