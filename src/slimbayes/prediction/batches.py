"""What predict is given, as calls of the model: tensors, arrays, mappings, Datasets, loaders; many rows are cut."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from slimbayes.engine import calls
from slimbayes.engine.tree import arrays_of
from slimbayes.prediction.sample import members, posteriors_in


def batches_of(model: nn.Module, x: Any, chunk: int | None, inputs: int | None) -> Iterator[tuple[Any, Any]]:
    """Inputs of the forwards: the loader's batches, or slices of one batch that fit the chunk with one draw of each
    member.
    """
    if isinstance(x, torch.utils.data.Dataset) and not isinstance(x, torch.utils.data.IterableDataset):
        x = torch.utils.data.DataLoader(x, batch_size=256)
    if isinstance(x, Iterable) and not isinstance(x, (Tensor, Mapping, tuple, list, PackedSequence)) and not _array(x):
        for batch in x:
            yield from _slices(model, call_batch(model, batch, inputs), chunk)
    elif isinstance(x, (tuple, list)) and not isinstance(x, PackedSequence):
        yield from _slices(model, (tuple(_tensor(model, part) for part in x), {}), chunk)
    else:
        yield from _slices(model, call_batch(model, x, inputs), chunk)


def _array(x: Any) -> bool:
    return hasattr(x, "__array__") and not isinstance(x, Tensor)


def _tensor(model: nn.Module, x: Any) -> Any:
    """A numpy array as a tensor of the model's type and device; anything else as it is."""
    if not _array(x):
        return x
    values = torch.as_tensor(np.ascontiguousarray(x))
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    if first is None:
        return values
    return values.to(device=first.device, dtype=first.dtype if values.is_floating_point() else None)


def call_batch(model: nn.Module, batch: Any, inputs: int | None = None) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """How to hand a data loader's batch to a model: inputs of an (inputs, targets) pair, a mapping by keyword if it
    fits.
    """
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
        if any(p.kind is p.VAR_KEYWORD for p in accepted.values()) or set(batch) <= set(accepted):
            return (), {name: _tensor(model, value) for name, value in batch.items()}
    return (_tensor(model, batch),), {}


def _slices(model: nn.Module, inputs: tuple[Any, Any], chunk: int | None) -> Iterator[tuple[Any, Any]]:
    if not arrays_of(inputs):
        raise ValueError(
            f"predict found no tensor in {type(inputs[0][0]).__name__ if inputs[0] else 'nothing'}: give it tensors, "
            "arrays or batches."
        )
    if chunk is None or not posteriors_in(model):
        yield inputs
        return
    layout = calls.layout_of(model, *inputs, posteriors_in(model))
    rows, size = layout.rows(inputs), max(1, chunk // members(model))
    if rows <= size or not layout.apart:  # rows that cannot be told apart stay together
        yield inputs
        return
    for start in range(0, rows, size):
        yield layout.narrow(inputs, start, min(size, rows - start))
