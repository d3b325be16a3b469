"""The generalised Gauss-Newton matrix of each joint posterior's numbers, summed over a data set in one pass.

    H = sum over rows J^T F J       J: derivatives of a row's outputs;  F: the likelihood's information about them

Sizes: K members, D numbers of one posterior, B rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.engine.sharing import evaluating
from slimbayes.inference.evidence import Product, Single
from slimbayes.inference.linearised import MOST_ROOTS, joints_of, rows_at_means
from slimbayes.prediction.batches import call_batch
from slimbayes.prediction.prediction import Prediction
from slimbayes.prediction.sample import frozen, sample
from slimbayes.train.likelihoods import LikelihoodName, likelihood_named

IGNORED = -100  # a target that does not count
NO_TARGETS = "laplace was given no targets: the loader is empty, or all of them are -100."


@dataclass
class Curvature:
    """What a pass over the data tells.

    Attributes:
        blocks: H of each posterior, in float64.
        log_likelihood: of all targets at the means, averaged over members; at unit noise for "gaussian".
        targets: how many there were.
    """

    blocks: list[Single] = field(default_factory=list)
    log_likelihood: float = 0.0
    targets: int = 0


def is_causal(model: nn.Module) -> bool:
    """Whether a model of transformers tells each next token, by the names of its classes; peft's wrap another model."""
    return any("CausalLM" in c.__name__ or "LMHead" in c.__name__ for c in type(_base(model)).__mro__)


def _base(model: Any) -> Any:
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


def loss_facts(model: nn.Module, batch: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether labels are a class for each line of logits, and whether the loss that a model of transformers gives is
    their cross-entropy: it may weigh classes, add a term, or mean something else.
    """
    with torch.no_grad(), evaluating(model), frozen(model, seed=0):
        own = sample(model, fold=False, **batch).get("loss")
        logits = sample(model, fold=False, **without_labels(model, batch)[0])["logits"][0]
    logits, labels = align_labels(model, logits, batch["labels"])
    if logits.shape[:-1] != labels.shape or logits.shape[-1] == 1:
        return False, False
    if own is None:
        return True, True
    # A loss somebody wrote may weigh what one batch does not show.
    stock = type(_base(model)).__module__.startswith("transformers.") and not hasattr(_base(model), "_loss_function")
    ours = nn.functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED)
    return True, stock and torch.allclose(own[0].float(), ours, rtol=1e-4)


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


def accumulate(
    model: nn.Module,
    batches: Iterable[tuple[Any, Any, Tensor]],
    likelihood: LikelihoodName,
    samples: int | None = None,
    output: str | int | None = None,
    scale: float = 1.0,
) -> Curvature:
    """Sum the curvature over all batches; `samples` draws targets from the model instead of exact information.

    `scale` is the noise of "gaussian", or the targets' own deviation for "heteroscedastic_gaussian".
    """
    joints = joints_of(model)
    total, members = Curvature([(Product if p.factored else Single)(p) for p in joints]), joints[0].members
    for args, kwargs, target in batches:
        for member in range(members):
            for rows in rows_at_means(model, args, kwargs, member, output, factored=True):
                part = target[rows.start : rows.start + len(rows.outputs)]
                likelihood_named(likelihood).predictive(rows.outputs[None, :1], 1.0, None)  # refuses what does not fit
                kept = _kept(rows.outputs, part, likelihood).to(rows.outputs.dtype)
                for root in _roots(rows.outputs.detach(), likelihood, samples, scale):
                    for block, lines in zip(total.blocks, rows.pull(root * kept), strict=True):
                        block.add(lines, member)
                for block, inputs in zip(total.blocks, rows.inputs(), strict=True):
                    block.see(inputs, kept.flatten(1).amax(1) if kept.dim() > 1 else kept)
                total.log_likelihood += _log_likelihood(rows.outputs, part, likelihood, scale) / members
        total.targets += int(_kept(target, target, likelihood).sum())
    if not total.targets:
        raise ValueError(NO_TARGETS)
    for p, block in zip(joints, total.blocks, strict=True):
        if not block.finite():
            raise FloatingPointError(
                f"laplace: the curvature of {p.name} is NaN or infinite. Look for inputs or weights that are not "
                f"finite (check_finite), or run the model in float32."
            )
    return total


def _roots(outputs: Tensor, likelihood: LikelihoodName, samples: int | None, scale: float) -> Iterator[Tensor]:
    """Square roots of the information about outputs (B, ...), exact or of targets that are drawn."""
    information = likelihood_named(likelihood).fisher
    if samples is not None:
        return (information.score(outputs, scale) / samples**0.5 for _ in range(samples))
    count = information.count(outputs)
    if count > MOST_ROOTS:
        raise ValueError(
            f"Exact curvature of outputs of shape {tuple(outputs.shape)} takes {count:,} backward passes for each "
            f"batch. Give samples=, such as 10, to draw as many targets from the model instead."
        )
    return information.roots(outputs, scale)


def _kept(outputs: Tensor, target: Tensor, likelihood: LikelihoodName) -> Tensor:
    """Where targets are to count, shaped to meet the outputs; a real target may be any number, of whatever type."""
    real = not likelihood_named(likelihood).discrete
    kept = torch.ones_like(target, dtype=torch.bool) if real else target != IGNORED
    return kept.view(*kept.shape, *[1] * max(outputs.dim() - kept.dim(), 0))


def _log_likelihood(outputs: Tensor, target: Tensor, likelihood: LikelihoodName, scale: float) -> float:
    outputs = outputs.detach().double()
    if likelihood == "bernoulli" and target.shape == outputs.shape and target.dim() > 1 and target.shape[-1] == 1:
        target = target.squeeze(-1)  # as `bernoulli` takes it and a Prediction does not
    if likelihood_named(likelihood).discrete and bool((target == IGNORED).any()):
        kept = target != IGNORED
        outputs, target = outputs[kept], target[kept]
    if not target.numel():
        return 0.0
    target = target.double() if target.is_floating_point() else target
    return float(Prediction.from_outputs(outputs[None], likelihood, scale=scale).log_prob(target).sum())
