"""Batches as calls of the model: what predict is given (tensors, arrays, mappings, Datasets, loaders), many rows cut;
and what is fitted to, with targets, among them what models of transformers call labels.

Sizes: B rows, C classes.
"""

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from slimbayes.engine.layout import arrays_of, map_arrays, padded
from slimbayes.engine.locate import batch_dim_of, layout_of
from slimbayes.engine.objects import is_opaque
from slimbayes.engine.sharing import evaluating
from slimbayes.errors import SlimbayesWarning
from slimbayes.prediction.checks import check_inputs
from slimbayes.prediction.draws import MOST_ROWS
from slimbayes.prediction.sample import (
    converted_posteriors,
    fixed_draws,
    members,
    sample,
)

_FEW = 64


def batches_of(
    model: nn.Module,
    x: Any,
    chunk: int | None,
    inputs: int | None,
    allow_nonfinite: bool = False,
) -> Iterator[tuple[Any, Any]]:
    """Inputs of the forwards: the loader's batches, or slices of one batch that fit the chunk with one draw of each
    member. NaN and infinity are refused, unless allowed, and so is a whole without rows.
    """
    done = 0
    for batch in _whole_batches(model, x, inputs):
        arrays = arrays_of(batch)
        if not arrays and not any(map(is_opaque, batch[0])):
            what = type(batch[0][0]).__name__ if batch[0] else "nothing"
            raise ValueError(
                f"predict found no tensor in {what}: give it tensors, arrays or batches."
            )
        rows = rows_of(model, arrays)
        if rows and not allow_nonfinite:
            check_inputs(model, batch, done)
        if rows:
            yield from _slices(model, batch, rows, chunk)
        done += rows
    if not done:
        raise ValueError(
            "predict was given no rows: x, or every batch of it, is empty."
        )


def _whole_batches(
    model: nn.Module, x: Any, inputs: int | None
) -> Iterator[tuple[Any, Any]]:
    if isinstance(x, torch.utils.data.Dataset) and not isinstance(
        x, torch.utils.data.IterableDataset
    ):
        x = torch.utils.data.DataLoader(x, batch_size=256)
    if (
        isinstance(x, list)
        and x
        and all(isinstance(part, (tuple, list, Mapping)) for part in x)
    ):
        x = iter(x)  # batches (input, target), or mappings
    if (
        isinstance(x, Iterable)
        and not isinstance(x, (Tensor, Mapping, tuple, list, PackedSequence))
        and not _array(x)
    ):
        _warn_of_shuffling(x)
        for batch in x:
            yield call_batch(model, batch, inputs)
    elif isinstance(x, (tuple, list)) and not isinstance(x, PackedSequence):
        kinds = [p.kind for p in inspect.signature(model.forward).parameters.values()]
        most = sum(
            k
            in (
                inspect.Parameter.POSITIONAL_ONLY,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
            )
            for k in kinds
        )
        if (
            len(x) > most and inspect.Parameter.VAR_POSITIONAL not in kinds
        ):  # they may be batches
            raise ValueError(
                f"predict takes a tuple or list as the arguments of one call, but {type(model).__name__}.forward has "
                f"{most} and {len(x)} were given: give a tensor, or an iterator of batches, such as iter([...])."
            )
        yield tuple(_tensor(model, part) for part in x), {}
    else:
        yield call_batch(model, x, inputs)


def _warn_of_shuffling(loader: Any) -> None:
    """Targets in the order of the data would be compared with predictions of other rows."""
    sampler = getattr(
        getattr(loader, "batch_sampler", None),
        "sampler",
        getattr(loader, "sampler", None),
    )
    if isinstance(sampler, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)):
        warnings.warn(
            "This loader shuffles: predictions are in the order in which it gave rows, not in that of its data. Give "
            "predict a loader with shuffle=False, or the data set.",
            SlimbayesWarning,
            stacklevel=4,
        )


def _array(x: Any) -> bool:
    return hasattr(x, "__array__") and not isinstance(x, Tensor)


def _tensor(model: nn.Module, x: Any) -> Any:
    """A numpy array as a tensor of the model's type and device; anything else as it is."""
    if not _array(x):
        return x
    array = np.ascontiguousarray(x)
    if array.dtype.kind not in "biufc":
        raise TypeError(
            f"predict needs numbers, got an array of dtype {array.dtype}: encode text and categories first, or convert "
            f"columns with astype('float32')."
        )
    values = torch.as_tensor(array)
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    if first is None:
        return values
    return values.to(
        device=first.device, dtype=first.dtype if values.is_floating_point() else None
    )


def call_batch(
    model: nn.Module, batch: Any, inputs: int | None = None
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """A data loader's batch as a call: inputs of an (inputs, targets) pair, a mapping by keyword if it fits."""
    if isinstance(batch, (tuple, list)) and not isinstance(batch, PackedSequence):
        if inputs is None and len(batch) > 2:
            raise ValueError(
                f"A batch of {len(batch)} parts does not say which of them the model takes: give inputs=, the number "
                f"of leading parts that are its arguments ({len(batch) - 1} if only the last is a target)."
            )
        if inputs is not None and not 1 <= inputs <= len(batch):
            raise ValueError(f"inputs={inputs!r}, but a batch has {len(batch)} parts.")
        if (inputs or 1) > 1:
            return tuple(_tensor(model, part) for part in batch[:inputs]), {}
        batch = batch[0]
    if isinstance(batch, Mapping):
        accepted = inspect.signature(model.forward).parameters
        if any(p.kind is p.VAR_KEYWORD for p in accepted.values()) or set(batch) <= set(
            accepted
        ):
            return (), {name: _tensor(model, value) for name, value in batch.items()}
    return (_tensor(model, batch),), {}


def rows_of(model: nn.Module, arrays: list[Any]) -> int:
    """The largest number of rows that one of these tensors can have."""
    dim = batch_dim_of(model) or 0
    return max(
        (leaf.shape[dim] for leaf in map(padded, arrays) if leaf.dim() > dim), default=1
    )


def _slices(
    model: nn.Module, inputs: tuple[Any, Any], many: int, chunk: int | None
) -> Iterator[tuple[Any, Any]]:
    """Rows cut so that a forward has no more than the chunk, or by default no more than MOST_ROWS."""
    most = max(1, (MOST_ROWS if chunk is None else chunk) // members(model))
    if not converted_posteriors(model) or (chunk is None and many <= most):
        yield inputs
        return
    dim = batch_dim_of(model) or 0

    def first(i: int, leaf: Any) -> Any:
        alike = (
            isinstance(leaf, Tensor) and leaf.dim() > dim and leaf.shape[dim] == many
        )
        return leaf.narrow(dim, 0, _FEW) if alike else leaf

    # Rows are located on a few: a proof with all of them would take the memory that cutting is to save.
    few = map_arrays(first, inputs) if many > MOST_ROWS else inputs
    layout = layout_of(model, few[0], few[1], converted_posteriors(model))
    rows = layout.rows(inputs)
    if (
        rows <= most or not layout.rowwise
    ):  # rows that cannot be told apart stay together
        yield inputs
        return
    for start in range(0, rows, most):
        yield layout.narrow(inputs, start, min(most, rows - start))


# --- with targets ---

IGNORED = -100  # a target that does not count


def is_causal(model: nn.Module) -> bool:
    """Whether a model of transformers tells each next token, by the names of its classes."""
    return any(
        "CausalLM" in c.__name__ or "LMHead" in c.__name__
        for c in type(base_model(model)).__mro__
    )


def base_model(model: Any) -> Any:
    """The model that one of peft wraps; any other as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def without_labels(
    model: nn.Module, batch: Mapping[str, Any]
) -> tuple[dict[str, Any], Any]:
    """What a model takes besides labels, and those. A model of transformers that reads one sequence and tells another
    makes the latter's start of them.
    """
    rest, target = dict(batch), None
    for name in ("labels", "label"):
        target = rest.pop(name, None) if target is None else target
    start: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    decodes = start is not None and getattr(
        getattr(model, "config", None), "is_encoder_decoder", False
    )
    if (
        decodes
        and isinstance(target, Tensor)
        and target.dim() > 1
        and "decoder_input_ids" not in rest
    ):
        rest["decoder_input_ids"] = start(target)
    return rest, target


def align_labels(
    model: nn.Module, values: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """What tells each label (B, ..., C), and the label: of causal language models each token tells the next."""
    causal = labels.dim() > 1 and is_causal(model)
    return (values[:, :-1], labels[:, 1:]) if causal else (values, labels)


LossKind = Literal["cross-entropy", "of classes", "other"]


def loss_kind(model: nn.Module, batch: Mapping[str, Any]) -> LossKind:
    """What the loss that a model of transformers gives is: where labels are a class for each line of logits their
    cross-entropy, or another one "of classes": it may weigh them, or add a term.
    """
    with torch.no_grad(), evaluating(model), fixed_draws(model, seed=0):
        own = sample(model, parallel=False, **batch).get("loss")
        logits = sample(model, parallel=False, **without_labels(model, batch)[0])[
            "logits"
        ][0]
    logits, labels = align_labels(model, logits, batch["labels"])
    if logits.shape[:-1] != labels.shape or logits.shape[-1] == 1:
        return "other"
    if own is None:
        return "cross-entropy"
    # A loss somebody wrote may weigh what one batch does not show.
    stock = type(base_model(model)).__module__.startswith(
        "transformers."
    ) and not hasattr(base_model(model), "_loss_function")
    ours = nn.functional.cross_entropy(
        logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED
    )
    return (
        "cross-entropy"
        if stock and torch.allclose(own[0].float(), ours, rtol=1e-4)
        else "of classes"
    )


def _fits(accepted: inspect.Signature, args: Iterable[Any]) -> bool:
    """Whether a forward takes these one by one, and not as one."""
    try:
        accepted.bind(*args)
    except TypeError:
        return False
    return True


def labelled_batches(
    model: nn.Module, loader: Iterable[Any]
) -> Iterator[tuple[Any, Any, Tensor]]:
    """Batches as arguments, keyword arguments and targets, on the model's device; refuses batches without targets."""
    first, accepted = next(model.parameters()), inspect.signature(model.forward)
    for number, batch in enumerate(loader):
        if isinstance(batch, Mapping):
            rest, target = without_labels(model, batch)
            if (
                target is not None and is_causal(model) and target.dim() > 1
            ):  # transformers' labels are the inputs
                target = nn.functional.pad(target[:, 1:], (0, 1), value=IGNORED)
            args, kwargs = call_batch(model, rest)
        elif isinstance(batch, (tuple, list)) and len(batch) > 1:
            nested = (
                len(batch) == 2
                and isinstance(batch[0], (tuple, list))
                and _fits(accepted, batch[0])
            )
            inputs = batch[0] if nested else batch[:-1]
            args, kwargs = call_batch(model, inputs, len(inputs))
            target = batch[-1]
        else:
            target = None
        if target is None:
            raise ValueError(
                f"Batch {number} of the loader is a {type(batch).__name__} without targets: give batches (inputs, "
                f"targets), or mappings with 'labels'."
            )
        try:
            accepted.bind(*args, **kwargs)
        except TypeError as error:
            raise ValueError(
                f"Batch {number} of the loader does not fit {type(model).__name__}.forward: {error}. The last part of "
                f"a batch is its targets, all before are inputs; weights of rows are not taken."
            ) from error
        inputs = torch.utils._pytree.tree_map_only(
            Tensor, lambda t: t.to(first.device), (args, dict(kwargs))
        )
        yield *inputs, torch.as_tensor(target).to(first.device)
