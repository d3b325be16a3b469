"""predict: run a model under many draws, batch by batch, in bounded memory.

Sizes: S draws, K members, N rows.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.engine import calls, passes
from slimbayes.engine.calls import Fold
from slimbayes.engine.layout import Layout
from slimbayes.engine.sharing import evaluating
from slimbayes.engine.tree import arrays_of, padded, tree_map
from slimbayes.posteriors.ensemble import EnsemblePosterior
from slimbayes.prediction.accumulate import Accumulator
from slimbayes.prediction.batches import batches_of
from slimbayes.prediction.prediction import Prediction
from slimbayes.prediction.sample import members, posteriors_in, sampled
from slimbayes.train.elbo import check_finite
from slimbayes.train.likelihoods import LikelihoodName


@torch.no_grad()
def predict(
    model: nn.Module,
    x: Any,
    draws: int = 1,
    chunk: int | None = None,
    likelihood: LikelihoodName = "categorical",
    scale: float | Tensor = 0.0,
    keep_samples: bool = True,
    output: str | int | None = None,
    class_dim: int | None = None,
    share: bool = True,
    fold: Fold = "auto",
    inputs: int | None = None,
) -> Prediction:
    """Predict with uncertainty from S = members x draws draws, in eval mode and without gradients.

    Args:
        model: a converted model, or a part of one. Its training flags are restored afterwards; several threads may
            predict with it.
        x: a tensor or numpy array, a dict or tuple the model takes, a Dataset, or an iterable of batches (a
            DataLoader). Of batches (input, target) the targets are ignored.
        draws: draws from every member.
        chunk: at most so many rows (draws x inputs) in one forward. By default a batch is never cut, and runs under as
            many draws at once as make some 2^23 input numbers.
        likelihood: what the outputs parameterise: "categorical" and "bernoulli" logits, "gaussian" means, or
            "heteroscedastic_gaussian" means and raw scales.
        scale: standard deviation of the observation noise, for "gaussian"; a tensor for several targets.
        keep_samples: keep every draw's prediction. Without, memory does not grow with the number of draws.
        output: key or position of the outputs in what the model returns; by default the tensor itself, `.logits`, or
            the first tensor.
        class_dim: where `sample` has the classes, as in `categorical`: 2 for images (S, N, C, H, W). They come last in
            the Prediction.
        share: compute once what draws have in common: modules that run before any layer draws, and networks that
            several draws picked.
        fold: as in `sample`.
        inputs: how many leading parts of a loader's batch the model takes; needed where a batch has more than (input,
            target).

    Members of an `Ensemble` are averaged with its stacking weights, if `stack` has set them.

    Example:
        >>> import slimbayes as sb
        >>> net = sb.bayesianize(nn.Linear(4, 3), sb.Rank1(members=2))
        >>> pred = predict(net, torch.randn(7, 4), draws=8)
        >>> pred.probs.shape, pred.samples.shape
        (torch.Size([7, 3]), torch.Size([16, 7, 3]))
    """
    if draws < 1 or (chunk is not None and chunk < 1):
        raise ValueError(f"predict needs draws >= 1 and chunk >= 1, got draws={draws!r}, chunk={chunk!r}.")
    if chunk is not None and chunk < members(model):
        raise ValueError(
            f"predict runs one draw of every member at once: chunk must be at least {members(model)}, got {chunk!r}."
        )
    check_finite(model)
    parts = []
    with evaluating(model):
        for args, kwargs in batches_of(model, x, chunk, inputs):
            draws_so_far = Accumulator(
                likelihood, members(model), scale, keep_samples, class_dim, member_weights(model)
            )
            for outputs in _outputs(model, args, kwargs, draws, chunk, share, fold):
                draws_so_far.add(_checked(_select(outputs, output), likelihood))
            parts.append(Prediction(**draws_so_far.fields()))
    return Prediction.joined(parts)


@torch.no_grad()
def predict_prefixes(
    model: nn.Module,
    x: Tensor,
    draws: Sequence[int],
    likelihood: LikelihoodName = "categorical",
    scale: float | Tensor = 0.0,
) -> dict[int, Prediction]:
    """Predictions of one batch for several numbers of draws at the price of the largest: each is made of the first so
    many draws.

    Example:
        >>> import slimbayes as sb
        >>> net = sb.bayesianize(nn.Linear(4, 3), sb.Rank1(members=2))
        >>> {n: p.count for n, p in predict_prefixes(net, torch.randn(7, 4), draws=[1, 4]).items()}
        {1: 2, 4: 8}
    """
    if not draws or min(draws) < 1:
        raise ValueError(f"predict_prefixes needs numbers of draws of at least 1, got {draws!r}.")
    out, done = {}, 0
    check_finite(model)
    with evaluating(model):
        draws_so_far = Accumulator(likelihood, members(model), scale, True, None, member_weights(model))
        for count in sorted(set(draws)):
            for outputs in _outputs(model, (x,), {}, count - done, None, True, "auto"):
                draws_so_far.add(_select(outputs, None))
            out[count], done = Prediction(**draws_so_far.fields()), count
    return out


def member_weights(model: nn.Module) -> Tensor | None:
    """Stacking weights of a model's members, (K,), or None where they count alike."""
    found = [p.weights for p in passes.posteriors_of(model) if isinstance(p, EnsemblePosterior)]
    if not found or bool((found[0] == found[0][0]).all()):
        return None
    return found[0].repeat(members(model) // len(found[0])) * len(found[0]) / members(model)


def _outputs(
    model: nn.Module, args: Any, kwargs: Any, draws: int, chunk: int | None, share: bool, fold: Fold
) -> Iterator[Any]:
    """Outputs (S', N, ...) of all draws of one batch, so many at a time as fit."""
    posteriors = posteriors_in(model)
    if not posteriors:
        for _ in range(draws):
            yield calls.stack_draws([model(*args, **kwargs)])
        return
    held = passes.of(posteriors[0].key)
    if held is not None and not held.held:
        raise ValueError("predict was called inside a forward pass of the same model; call it from outside.")
    if held is not None and not isinstance(held, calls.Scope):  # inside frozen: the held draws are all there are
        yield sampled(model, args, kwargs, held.total, fold, held)
        return
    at_once = min(draws, _draws_at_once(model, (args, kwargs), chunk))
    if share and draws > 1 and members(model) == 1 and all(p.countable for p in posteriors):
        yield from _distinct(model, args, kwargs, draws, at_once, fold)
        return
    for start in range(0, draws, at_once):
        total = members(model) * min(at_once, draws - start)
        yield sampled(model, args, kwargs, total, fold, share=share)


def _draws_at_once(model: nn.Module, inputs: Any, chunk: int | None) -> int:
    """How many draws of each member one forward takes."""
    arrays = [padded(leaf) for leaf in arrays_of(inputs)]
    rows = max((a.shape[0] for a in arrays if a.dim()), default=1) or 1
    numbers = max((a.numel() for a in arrays), default=1)
    wanted = min(2**23 * rows // max(numbers, 1), 2**15) if chunk is None else chunk
    at_once = max(1, wanted // (rows * members(model)))
    floats = sum(p.widths(False)[0] for p in passes.posteriors_of(model) if not p.by_row) * members(model)
    return min(
        at_once, max(1, 2**24 // max(floats, 1))
    )  # posteriors that draw whole weights: some 64 MiB of them at once


def choices_of(posteriors: Sequence[Any]) -> list[Tensor]:
    """Which function each draw of this pass picked at each posterior: L tensors (S,)."""
    found = [p.choices() for p in posteriors]
    assert all(c is not None for c in found)
    return found  # type: ignore[return-value]


def _distinct(model: nn.Module, args: Any, kwargs: Any, draws: int, at_once: int, fold: Fold) -> Iterator[Any]:
    """Outputs of S draws that pick from finitely many networks: each network that was picked runs once."""
    posteriors = passes.posteriors_of(model)
    new, layout, folds = calls.draw_all(model, args, kwargs, draws, fold, at_once=1)
    if layout.random:  # the user's own noise differs between draws that picked alike
        for index in torch.arange(draws).split(at_once):
            yield sampled(model, args, kwargs, len(index), fold)
        return
    picked = torch.stack([choice.to(posteriors[0].device) for choice in passes.run(new, choices_of, posteriors)])
    unique, which = torch.unique(picked, dim=1, return_inverse=True)
    first = torch.empty(unique.shape[1], dtype=torch.long, device=which.device).scatter_(
        0, which, torch.arange(draws, device=which.device)
    )
    try:
        calls.check_size(model, (args, kwargs), posteriors, layout, min(at_once, len(first)) if folds else 1)
        if folds and not layout.folds:
            raise passes.Unproven(layout.why)
        parts = [_run_some(model, args, kwargs, new.take(index), layout, folds) for index in first.split(at_once)]
    except passes.Unproven as error:
        calls.unfold(layout, error, fold)
        yield from _distinct(model, args, kwargs, draws, at_once, fold)
        return
    networks = tree_map(lambda *leaves: torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0], *parts)
    for index in which.split(max(at_once, 64)):
        yield tree_map(lambda leaf, index=index: leaf[index] if isinstance(leaf, Tensor) else leaf, networks)


def _run_some(model: nn.Module, args: Any, kwargs: Any, new: Any, layout: Layout, folds: bool) -> Any:
    new.shared = layout.ahead if folds and new.total > 1 else None
    return calls.run_draws(model, args, kwargs, new, layout, folds)


def _checked(outputs: Tensor, likelihood: str) -> Tensor:
    if likelihood == "categorical" and outputs.dim() < 3:
        raise ValueError(
            f"Class scores need a row axis: the draws gave {tuple(outputs.shape)}, without one. Give predict a batch, "
            f"such as x[None], or a model whose output has one row for each input."
        )
    return outputs


def _select(outputs: Any, output: str | int | None) -> Tensor:
    """The tensor of predictions in whatever a model returns."""
    if output is not None:
        return getattr(outputs, output) if isinstance(output, str) and hasattr(outputs, output) else outputs[output]
    if isinstance(outputs, Tensor):
        return outputs
    logits = getattr(outputs, "logits", None)
    if logits is None and isinstance(outputs, dict):
        logits = outputs.get("logits")
    if logits is not None:
        return logits
    for leaf in arrays_of(outputs):
        if isinstance(leaf, Tensor):
            return leaf
    raise ValueError(f"No tensor found in the model's output of type {type(outputs).__name__}; name it with output=.")
