"""Targets that are none: refused by row and value; outputs and scales that do not go with them.

Likelihoods look at shapes and types always, at values only on a CPU: on a GPU that would stall every training step.
`check_targets` looks at a whole set of them, once, wherever they are.

Sizes: N rows, C classes.
"""

from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from slimbayes.errors import did_you_mean
from slimbayes.train import Form, LikelihoodName

FORMS: tuple[str, ...] = get_args(Form)
_LIKELIHOODS: tuple[str, ...] = get_args(LikelihoodName)


def check_targets(
    target: Any,
    likelihood: str = "categorical",
    classes: int | None = None,
    ignore_index: int | None = None,
) -> None:
    """Refuse targets of a training set that a likelihood cannot take; call it once, before training.

    Args:
        target: class indices (N, ...) or probabilities (N, ..., C), zeros and ones (or what lies between), or real
            numbers; a tensor or an array.
        likelihood: as in `predict`.
        classes: C, where it is known.
        ignore_index: a label that `categorical` is told to leave out.

    Example:
        >>> check_targets(torch.tensor([0, 2, 3]), classes=3)
        Traceback (most recent call last):
        ValueError: Targets must be class indices from 0 to 2, got 3 in row 2.
    """
    if likelihood not in _LIKELIHOODS:
        raise ValueError(
            f"Unknown likelihood {likelihood!r}{did_you_mean(likelihood, _LIKELIHOODS)}"
        )
    values = torch.as_tensor(target)
    check_some(values)
    if likelihood == "categorical":
        check_classes_of(
            values, classes if classes is not None else 2**62, ignore_index
        )
        values = values.argmax(-1) if values.is_floating_point() else values
    elif likelihood == "bernoulli":
        check_shares(values)
    else:
        check_real(values)
        return
    if bool((values == values.flatten()[0]).all()):
        raise ValueError(
            f"All {len(values)} targets are {values.flatten()[0].item()!r}: of one class there is nothing to learn."
        )


def can_read_values(target: Tensor) -> bool:
    """Whether values can be looked at without waiting for a device or breaking a graph."""
    func = torch._C._functorch.peek_interpreter_stack() is not None
    return (
        target.device.type == "cpu" and not func and not torch.compiler.is_compiling()
    )


def is_floating(target: Any) -> bool:
    """Whether targets are of a floating type; refuses what is no tensor."""
    if not isinstance(target, Tensor):
        raise TypeError(
            f"Targets must be a tensor, got {type(target).__name__}: use torch.as_tensor(target)."
        )
    return target.is_floating_point()


def check_shape(outputs: Tensor, target: Tensor, needed: torch.Size, form: str) -> None:
    """Refuse a target that would broadcast, as (B,) against (S, B, 1) does, no targets, and a form that is none."""
    is_floating(target)
    if target.shape != needed:
        bare = target.shape in (outputs.shape, outputs.shape[:-1])
        hint = (
            " Outputs have draws in front, as `sample` gives them: use model(x)[None] for a plain forward."
            if bare
            else ""
        )
        raise ValueError(
            f"A target of shape {tuple(needed)} is needed for outputs of shape {tuple(outputs.shape)}, got "
            f"{tuple(target.shape)}.{hint}"
        )
    check_some(target)
    if form not in FORMS:
        raise ValueError(f"Unknown form {form!r}{did_you_mean(form, FORMS)}")


def check_classes(logits: Tensor, class_dim: int) -> None:
    """Refuse classes along draws or rows, and the logits of one class: its probability is 1 whatever the network
    says.
    """
    dims = logits.dim()
    if not -dims <= class_dim < dims or class_dim % dims < min(2, dims - 1):
        raise ValueError(
            f"class_dim={class_dim} is no dimension of classes in outputs of shape {tuple(logits.shape)}: draws and "
            f"rows come first. Use -1 where classes come last, 2 for images (S, N, C, H, W)."
        )
    if logits.shape[class_dim] == 1:
        raise ValueError(
            f"A categorical likelihood needs logits of at least two classes, got one along dimension {class_dim} of "
            f"outputs of shape {tuple(logits.shape)}. "
            f'For a yes or no use likelihood="bernoulli", for a real target "gaussian".'
        )
    if can_read_values(logits):
        check_logits(logits, class_dim)


def check_logits(logits: Tensor, class_dim: int = -1) -> None:
    """Refuse probabilities where logits are needed: the softmax of a softmax is nearly uniform, whatever was learned.

    Several rows that all sum to 1, none of them negative nor all of them zeros and ones, are no logits by chance.
    """
    near = 1e-4 if logits.dtype in (torch.float32, torch.float64) else 1e-2
    lines = (
        logits.detach() if class_dim == -1 else logits.detach().movedim(class_dim, -1)
    )
    # One look is enough for most.
    if (
        not lines.numel()
        or not abs(float(lines[(0,) * (lines.dim() - 1)].sum()) - 1) < near
    ):
        return
    rows = lines.flatten(0, -2)
    if len(rows) > 1 and bool(
        ((rows.sum(-1) - 1).abs() < near).all()
        & (rows >= 0).all()
        & (rows.frac() > 0).any()
    ):
        raise ValueError(
            "The outputs are probabilities already: each row sums to 1 and none is negative. A categorical likelihood "
            "takes logits: return what goes into the softmax, or the logarithms of the probabilities."
        )


def check_two_outputs(outputs: Tensor) -> None:
    """Refuse outputs that are not a mean and a raw scale for each target."""
    if outputs.shape[-1] != 2:
        raise ValueError(
            f"heteroscedastic_gaussian needs two numbers for each target, its mean and its raw scale, in a last "
            f"dimension of 2; got outputs of shape {tuple(outputs.shape)}. "
            f'View T targets as (..., T, 2); for means alone use "gaussian".'
        )


def scale_for(scale: float | Tensor, target: Tensor, outputs: Tensor) -> Tensor:
    """A noise scale as a tensor of the outputs' type; refused where it would broadcast targets, as (B, 1) does (B,),
    or, on a CPU, is no positive number.
    """
    is_floating(target)
    given = torch.as_tensor(scale, dtype=outputs.dtype, device=outputs.device)
    given = given.reshape(()) if given.numel() == 1 else given
    if not broadcasts(given.shape, target.shape):
        raise ValueError(
            f"likelihood_std of shape {tuple(given.shape)} does not broadcast against targets of shape "
            f"{tuple(target.shape)}."
        )
    if can_read_values(given):
        check_positive("likelihood_std", given)
    return given


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether a tensor of one shape can be expanded to another."""
    spare = len(to) - len(shape)
    return spare >= 0 and all(
        a in (1, b) for a, b in zip(shape, to[spare:], strict=True)
    )


def check_positive(name: str, values: Tensor, zero: bool = False) -> None:
    """Refuse standard deviations that are none."""
    bad = ~((values >= 0 if zero else values > 0) & values.isfinite())
    if bool(bad.any()):
        what = "finite and not negative" if zero else "positive and finite"
        raise ValueError(
            f"{name} is a standard deviation and must be {what}, got {values[bad].flatten()[0].item()!r}."
        )


def check_some(target: Tensor) -> None:
    """Refuse no rows at all, whose mean is no number."""
    if target.numel() == 0:
        raise ValueError(
            f"At least one target is needed, got shape {tuple(target.shape)}: the batch is empty."
        )


def check_classes_of(target: Tensor, classes: int, ignore_index: int | None) -> None:
    """Refuse what is neither class indices, of which `ignore_index` counts as one, nor class probabilities."""
    if target.is_floating_point() and target.dim() > 1:
        _refuse(
            (target < 0) | ~target.isfinite(),
            target,
            "probabilities of classes, or class indices (whole numbers)",
        )
        off = (target.sum(-1) - 1).abs()
        if bool((off > 0.05).any()):  # rounded to two digits, or to bfloat16, they do
            raise ValueError(
                f"Probabilities of classes must sum to 1, got {float(target.sum(-1).flatten()[off.argmax()]):.3g}. "
                f"Divide them by their sum; for several labels of one row use bernoulli."
            )
        return
    if target.dtype == torch.long and target.numel():  # one look is enough for most
        low, high = map(int, target.aminmax())
        if (
            low >= 0
            and high < classes
            and not low <= (-1 if ignore_index is None else ignore_index) <= high
        ):
            return
    check_labels(target, classes, ignore_index)
    if ignore_index is not None and bool((target == ignore_index).all()):
        raise ValueError(
            f"All {target.numel()} targets are ignore_index={ignore_index}: nothing is left to learn from."
        )


def check_labels(
    target: Tensor, classes: int | None, ignore_index: int | None = None
) -> None:
    """Refuse targets that are not class indices below `classes`, or with None not 0 or 1, of whatever type."""
    if classes is None:
        _refuse((target != 0) & (target != 1), target, "0 or 1")
        return
    needed = (
        f"class indices from 0 to {classes - 1}"
        if classes < 2**62
        else "class indices from 0 on"
    )
    if target.is_floating_point():
        raise ValueError(
            f"Targets must be {needed}, got dtype {target.dtype}: convert them with target.long()."
        )
    bad = (target < 0) | (target >= classes)
    _refuse(
        bad if ignore_index is None else bad & (target != ignore_index), target, needed
    )


def check_shares(target: Tensor) -> None:
    """Refuse targets outside [0, 1]."""
    _refuse(
        ~((target >= 0) & (target <= 1)), target, "0, 1 or a probability between them"
    )


def check_real(target: Tensor) -> None:
    """Refuse targets that are NaN or infinite."""
    if target.is_floating_point():
        _refuse(~target.isfinite(), target, "finite")


def _refuse(bad: Tensor, target: Tensor, needed: str) -> None:
    if not bool(bad.any()):
        return
    row, *rest = bad.nonzero()[0].tolist() if bad.dim() else (0,)
    value = target[bad][0].item()
    at = f", at {tuple(rest)}" if rest else ""
    hint = (
        " Rows without a label must be left out, or given to categorical(..., ignore_index=)."
        if value == -100
        else ""
    )
    raise ValueError(f"Targets must be {needed}, got {value!r} in row {row}{at}.{hint}")
