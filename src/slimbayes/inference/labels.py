"""Batches with their targets, from loaders of tuples or of mappings; and what models of transformers mean by labels.

Sizes: B rows, C classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from slimbayes.engine.sharing import evaluating
from slimbayes.prediction.batches import call_batch
from slimbayes.prediction.sample import frozen, sample

IGNORED = -100  # a target that does not count


def is_causal(model: nn.Module) -> bool:
    """Whether a model of transformers tells each next token, by the names of its classes."""
    return any("CausalLM" in c.__name__ or "LMHead" in c.__name__ for c in type(base_model(model)).__mro__)


def base_model(model: Any) -> Any:
    """The model that one of peft wraps; any other as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def without_labels(model: nn.Module, batch: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """What a model takes besides labels, and those. A model of transformers that reads one sequence and tells another
    makes the latter's start of them.
    """
    rest, target = dict(batch), None
    for name in ("labels", "label"):
        target = rest.pop(name, None) if target is None else target
    start: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    decodes = start is not None and getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if decodes and isinstance(target, Tensor) and target.dim() > 1 and "decoder_input_ids" not in rest:
        rest["decoder_input_ids"] = start(target)
    return rest, target


def align_labels(model: nn.Module, values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """What tells each label (B, ..., C), and the label: of causal language models each token tells the next."""
    causal = labels.dim() > 1 and is_causal(model)
    return (values[:, :-1], labels[:, 1:]) if causal else (values, labels)


LossKind = Literal["cross-entropy", "of classes", "other"]


def loss_kind(model: nn.Module, batch: Mapping[str, Any]) -> LossKind:
    """What the loss that a model of transformers gives is: where labels are a class for each line of logits their
    cross-entropy, or another one "of classes": it may weigh them, or add a term.
    """
    with torch.no_grad(), evaluating(model), frozen(model, seed=0):
        own = sample(model, fold=False, **batch).get("loss")
        logits = sample(model, fold=False, **without_labels(model, batch)[0])["logits"][0]
    logits, labels = align_labels(model, logits, batch["labels"])
    if logits.shape[:-1] != labels.shape or logits.shape[-1] == 1:
        return "other"
    if own is None:
        return "cross-entropy"
    # A loss somebody wrote may weigh what one batch does not show.
    stock = type(base_model(model)).__module__.startswith("transformers.") and not hasattr(
        base_model(model), "_loss_function"
    )
    ours = nn.functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED)
    return "cross-entropy" if stock and torch.allclose(own[0].float(), ours, rtol=1e-4) else "of classes"


def _fits(accepted: inspect.Signature, args: Iterable[Any]) -> bool:
    """Whether a forward takes these one by one, and not as one."""
    try:
        accepted.bind(*args)
    except TypeError:
        return False
    return True


def labelled_batches(model: nn.Module, loader: Iterable[Any]) -> Iterator[tuple[Any, Any, Tensor]]:
    """Batches as arguments, keyword arguments and targets, on the model's device; refuses batches without targets."""
    first, accepted = next(model.parameters()), inspect.signature(model.forward)
    for number, batch in enumerate(loader):
        if isinstance(batch, Mapping):
            rest, target = without_labels(model, batch)
            if target is not None and is_causal(model) and target.dim() > 1:  # transformers' labels are the inputs
                target = nn.functional.pad(target[:, 1:], (0, 1), value=IGNORED)
            args, kwargs = call_batch(model, rest)
        elif isinstance(batch, (tuple, list)) and len(batch) > 1:
            nested = len(batch) == 2 and isinstance(batch[0], (tuple, list)) and _fits(accepted, batch[0])
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
        inputs = torch.utils._pytree.tree_map_only(Tensor, lambda t: t.to(first.device), (args, dict(kwargs)))
        yield *inputs, torch.as_tensor(target).to(first.device)
