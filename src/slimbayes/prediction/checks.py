"""The door of predict: inputs that are no numbers, inputs that do not fit the model, outputs that are no numbers.

A look costs one sum per batch; places are searched for only where something is wrong.
"""

import inspect
import warnings
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from numbers import Integral
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from slimbayes.engine.layout import arrays_of
from slimbayes.engine.locate import batch_dim_of
from slimbayes.engine.passes import posteriors_of
from slimbayes.engine.quiet import Quiet
from slimbayes.engine.trial import undisturbed
from slimbayes.errors import SlimbayesWarning
from slimbayes.layers.base import BayesLayer
from slimbayes.prediction.averages import Accumulator
from slimbayes.train.targets import check_logits

_ANYWAY = "predict(..., allow_nonfinite=True) predicts anyway"


def check_draws(
    what: str, draws: Any, parallel: Any = "auto", also: tuple[Any, ...] = ()
) -> None:
    """Raise if `draws` is neither None, nor a positive integer, nor among what is taken `also`; and for an unknown
    `parallel`.
    """
    if draws is None or draws in also:
        pass
    elif not isinstance(draws, Integral) or draws < 1:
        told = "".join(f", or {other!r}" for other in also)
        raise ValueError(
            f"{what} needs at least one draw, a whole number{told}, got draws={draws!r}."
        )
    if parallel != "auto" and not isinstance(parallel, bool):
        raise ValueError(f'parallel must be True, False or "auto", got {parallel!r}.')


def check_inputs(model: nn.Module, inputs: tuple[Any, Any], before: int = 0) -> None:
    """Refuse NaN and infinity, naming the argument, the row (after `before` earlier ones) and the column."""
    leaves = [
        leaf.data if isinstance(leaf, PackedSequence) else leaf
        for leaf in arrays_of(inputs)
    ]
    for number, values in enumerate(leaves):
        if not values.is_floating_point() or values.layout != torch.strided:
            continue
        if bool(values.sum().isfinite()) or bool(values.isfinite().all()):
            continue  # a sum of large numbers may be infinite
        at = (~values.isfinite()).nonzero()[0].tolist()
        value, where = values[tuple(at)].item(), f"at {tuple(at)}"
        dim = batch_dim_of(model) or 0
        if not isinstance(arrays_of(inputs)[number], PackedSequence) and dim < len(at):
            row = before + at.pop(dim)
            where = f"row {row}" + (
                f", column {at[0]}"
                if len(at) == 1
                else f", at {tuple(at)}"
                if at
                else ""
            )
        raise ValueError(
            f"predict was given {value} in {_name_of(model, inputs, number)}, {where}. Remove or replace such values; "
            f"{_ANYWAY}."
        )


def check_scores(
    model: nn.Module, outputs: Tensor, likelihood: str, class_dim: int | None = None
) -> None:
    """Refuse probabilities of classes in the place of logits, on any device, and warn of what looks like those of a yes
    or no: numbers from near 0 to near 1 and none beyond, or out of a model whose last part is a sigmoid.
    """
    if likelihood == "categorical" and (class_dim is not None or outputs.dim() < 5):
        check_logits(outputs, -1 if class_dim is None else class_dim)
    if (
        likelihood != "bernoulli"
        or outputs.numel() < 2
        or bool(((outputs < 0) | (outputs > 1)).any())
    ):
        return
    last = [m for m in model.modules() if not m._modules][-1]
    if isinstance(last, nn.Sigmoid) or bool(
        (outputs.min() < 0.05) & (outputs.max() > 0.95)
    ):
        warnings.warn(
            "All outputs lie between 0 and 1, as probabilities do, but a bernoulli likelihood takes logits: if the "
            "model ends in a sigmoid, return what goes into it.",
            SlimbayesWarning,
            stacklevel=3,
        )


def _name_of(model: nn.Module, inputs: tuple[Any, Any], number: int) -> str:
    """What the model calls its n-th tensor, with its place in a nested argument."""
    packed = pytree.tree_flatten_with_path(
        inputs, is_leaf=lambda leaf: isinstance(leaf, PackedSequence)
    )[0]
    paths = [
        path for path, leaf in packed if isinstance(leaf, (Tensor, PackedSequence))
    ]
    if number >= len(paths):
        return "its inputs"  # inside a dataclass
    _, place, *rest = paths[number]
    names, index = (
        list(inspect.signature(model.forward).parameters),
        getattr(place, "idx", -1),
    )
    name = (
        names[index]
        if 0 <= index < len(names)
        else str(getattr(place, "key", f"argument {index}"))
    )
    return f"{name!r}" + pytree.keystr(tuple(rest))


def refuse_outputs(
    sums: Accumulator, outputs: Iterable[Tensor], before: int
) -> NoReturn:
    """Say which draw of which row is no number."""
    draws = 0
    for some in outputs:
        values, noise = sums.meaning.predictive(
            some.float(), sums.likelihood_std, sums.class_dim
        )
        bad = (
            values.isnan()
            if sums.meaning.discrete
            else ~(values.isfinite() & noise.isfinite())
        )
        bad = bad.flatten(2).any(-1) if bad.dim() > 2 else bad
        if bool(bad.any()):
            draw, row = bad.nonzero()[0].tolist()
            where = f"row {before + row} under draw {draws + draw}"
            break
        draws += len(some)
    else:
        where = f"a row from {before} on"
    raise FloatingPointError(
        f"The model's output for {where} is NaN or infinite, though its inputs and weights are finite: numbers "
        f"overflow inside. Scale the inputs as in training, or use a wider dtype; {_ANYWAY}, with label -1 there."
    )


MISFITS = (
    RuntimeError,
    IndexError,
    ValueError,
)  # what torch raises for inputs that do not fit a layer


def explain(error: Exception, model: nn.Module, args: Any, kwargs: Any) -> NoReturn:
    """Raise a sentence that names inputs that do not fit a layer, and that, instead of torch's error; else this."""
    why = (
        None
        if isinstance(error, torch.OutOfMemoryError)
        else _resized(model) or _misfit(model, args, kwargs)
    )
    if why is None:
        raise error
    raise ValueError(why) from error


def _resized(model: nn.Module) -> str | None:
    """What was made of a layer whose weight has got another shape since it was converted."""
    for p in (p for p in posteriors_of(model) if isinstance(p.layer, BayesLayer)):
        weight: Any = p.linear_map().weight
        if (
            weight is not None
            and weight.is_floating_point()
            and tuple(weight.shape) != p.site.shape
        ):
            return (
                f"The weight of layer {p.layer.bayes_name!r} is {tuple(weight.shape)}, but its posterior was made for "
                f"{p.site.shape}: resize layers before bayesianize, or call debayesianize first and convert again."
            )
    return None


def _misfit(model: nn.Module, args: Any, kwargs: Any) -> str | None:
    """Run the model until it fails again, and say what the first layer that cannot take its input expects."""
    found: list[str] = []

    def look(module: nn.Module, inputs: Any) -> None:
        first = inputs[0] if inputs else None
        why = _unfit(module, first) if isinstance(first, Tensor) and not found else None
        if why is not None:
            name = next(n for n, m in model.named_modules() if m is module)
            found.append(
                f"The model's layer {name!r} {why}" if name else f"The model {why}"
            )

    with (
        suppress(Exception),
        ExitStack() as hooks,
        undisturbed(model, (args, kwargs)) as trials,
        Quiet(trials=trials),
    ):
        for module in model.modules():
            hooks.enter_context(module.register_forward_pre_hook(look))
        model(*args, **kwargs)
        return None
    return found[0] if found else None


def _unfit(layer: Any, x: Tensor) -> str | None:
    """What stands between a layer and its input, by the names torch's own layers have for what they expect."""
    space = (
        len(layer.kernel_size)
        if isinstance(getattr(layer, "kernel_size", None), tuple)
        else 0
    )
    weight = next(layer.parameters(recurse=False), None)
    for name, dim in (
        ("in_features", -1),
        ("input_size", -1),
        ("in_channels", -1 - space),
    ):
        width = getattr(layer, name, None)
        if isinstance(width, int) and (x.dim() < -dim or x.shape[dim] != width):
            at = "" if dim == -1 else f" along dimension {dim}"
            return f"takes inputs of width {width}{at} ({name}), got shape {tuple(x.shape)}."
    if isinstance(getattr(layer, "num_embeddings", None), int):
        if x.is_floating_point():
            return f"takes whole numbers below {layer.num_embeddings}, got {x.dtype}: convert them with x.long()."
        if x.numel() and (int(x.min()) < 0 or int(x.max()) >= layer.num_embeddings):
            return f"takes whole numbers from 0 to {layer.num_embeddings - 1}, got {int(x.min())} to {int(x.max())}."
    elif isinstance(weight, Tensor):
        stored = not weight.is_floating_point()  # integers are stored, not computed in
        if (
            x.dtype != weight.dtype
            and not stored
            and not torch.is_autocast_enabled(x.device.type)
        ):
            kind = str(weight.dtype).removeprefix("torch.")
            return f"computes in {kind}, got inputs of {x.dtype}: convert them with x.to(torch.{kind})."
        if x.device != weight.device:
            return f"is on {weight.device}, got inputs on {x.device}: move them with x.to({str(weight.device)!r})."
    return None
