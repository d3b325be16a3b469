"""predict: run a model under many draws, batch by batch, in bounded memory.

Sizes: S draws, K members, N rows.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from slimbayes import passes
from slimbayes.convert import conversions_of
from slimbayes.objective import check_finite
from slimbayes.passes import Pass, posteriors_of
from slimbayes.posteriors.base import Noise, Posterior
from slimbayes.posteriors.ensemble import EnsemblePosterior
from slimbayes.prediction import Likelihood, Prediction
from slimbayes.running import Running
from slimbayes.sampling import call_batch, members, run_pass, sample
from slimbayes.sharing import shared


@torch.no_grad()
def predict(
    model: nn.Module,
    x: Any,
    draws: int = 1,
    chunk: int | None = None,
    likelihood: Likelihood = "categorical",
    scale: float | Tensor = 0.0,
    keep_samples: bool = True,
    output: str | int | None = None,
    class_dim: int = -1,
    share: bool = True,
) -> Prediction:
    """Predict with uncertainty from S = members x draws draws, in eval mode and without gradients.

    Args:
        model: a converted model. Its training flags are restored afterwards.
        x: a tensor, a dict or tuple the model takes, or an iterable of batches (a DataLoader; targets of (input, target) pairs are ignored).
        draws: draws from every member.
        chunk: at most so many rows (draws x inputs) in one forward. By default a batch is never cut, and runs under as many draws at once as
            make some 2^23 input numbers.
        likelihood: what the outputs parameterise: "categorical" and "bernoulli" logits, "gaussian" means, or
            "heteroscedastic_gaussian" means and raw scales.
        scale: standard deviation of the observation noise, for "gaussian"; a tensor for several targets.
        keep_samples: keep every draw's prediction. Without, memory does not grow with the number of draws.
        output: key or position of the outputs in what the model returns; by default the tensor itself, `.logits`, or the first tensor.
        class_dim: where `sample` has the classes, as in `categorical`: 2 for images (S, N, C, H, W). They come last in the Prediction.
        share: compute once what draws have in common: layers before the first that draws, and networks or parts of networks that several
            draws picked alike. Turn it off for models whose layers mix the rows of a batch.

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
        raise ValueError(f"predict runs one draw of every member at once: chunk must be at least {members(model)}, got {chunk!r}.")
    parts = []
    with _evaluating(model, share):
        for args, kwargs in _batches(model, x, chunk):
            running = Running(likelihood, members(model), scale, keep_samples, class_dim, member_weights(model))
            for outputs in _outputs(model, args, kwargs, draws, chunk, share):
                running.add(_select(outputs, output))
            parts.append(running.result())
    return _join(parts)


@torch.no_grad()
def predict_prefixes(
    model: nn.Module, x: Tensor, draws: Sequence[int], likelihood: Likelihood = "categorical", scale: float | Tensor = 0.0
) -> dict[int, Prediction]:
    """Predictions of one batch for several numbers of draws at the price of the largest: each is made of the first so many draws.

    Example:
        >>> import slimbayes as sb
        >>> net = sb.bayesianize(nn.Linear(4, 3), sb.Rank1(members=2))
        >>> {n: p.count for n, p in predict_prefixes(net, torch.randn(7, 4), draws=[1, 4]).items()}
        {1: 2, 4: 8}
    """
    if not draws or min(draws) < 1:
        raise ValueError(f"predict_prefixes needs numbers of draws of at least 1, got {draws!r}.")
    out, done = {}, 0
    with _evaluating(model, share=True):
        running = Running(likelihood, members(model), scale, True, -1, member_weights(model))
        for count in sorted(set(draws)):
            for outputs in _outputs(model, (x,), {}, count - done, None, share=True):
                running.add(_select(outputs, None))
            out[count], done = running.result(), count
    return out


@contextmanager
def _evaluating(model: nn.Module, share: bool) -> Iterator[None]:
    """Eval mode, and work shared between draws if asked for; training flags come back afterwards."""
    check_finite(model)
    flags = [(m, m.training) for m in model.modules()]
    model.eval()
    batch_dim = conversions_of(model)[0][1].batch_dim
    # Hooks of a compiled model's inner modules are not seen, so only whole draws are shared there.
    context = shared(model, batch_dim) if share and posteriors_of(model) and not hasattr(model, "_orig_mod") else nullcontext()
    try:
        with context:
            yield
    finally:
        for module, training in flags:
            module.training = training


def member_weights(model: nn.Module) -> Tensor | None:
    """Stacking weights of a model's members, (K,), or None where they count alike."""
    found = [p.weights for p in posteriors_of(model) if isinstance(p, EnsemblePosterior)]
    if not found or bool((found[0] == found[0][0]).all()):
        return None
    return found[0].repeat(members(model) // len(found[0])) * len(found[0]) / members(model)


def _batches(model: nn.Module, x: Any, chunk: int | None) -> Iterator[tuple[Any, Any]]:
    """Inputs of the forwards: the loader's batches, or slices of one batch that fit the chunk with one draw of each member."""
    if isinstance(x, Iterable) and not isinstance(x, (Tensor, dict, tuple, list)) and not hasattr(x, "keys"):
        for batch in x:
            yield from _slices(model, call_batch(model, batch), chunk)
    else:
        inputs = (tuple(x), {}) if isinstance(x, (tuple, list)) else call_batch(model, x)
        yield from _slices(model, inputs, chunk)


def _slices(model: nn.Module, inputs: tuple[Any, Any], chunk: int | None) -> Iterator[tuple[Any, Any]]:
    batch_dim = conversions_of(model)[0][1].batch_dim
    rows = passes.infer_rows(inputs, batch_dim)
    size = max(1, chunk // members(model)) if chunk is not None else rows
    if rows is None or size is None or rows <= size:
        yield inputs
        return
    for start in range(0, rows, size):
        yield _narrow(inputs, rows, start, min(size, rows - start), batch_dim)


def _narrow(inputs: Any, rows: int, start: int, size: int, batch_dim: int) -> Any:
    def cut(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim() > batch_dim and leaf.shape[batch_dim] == rows:
            return leaf.narrow(batch_dim, start, size)
        return leaf

    return pytree.tree_map(cut, inputs)


def _outputs(model: nn.Module, args: Any, kwargs: Any, draws: int, chunk: int | None, share: bool) -> Iterator[Any]:
    """Outputs (S', N, ...) of all draws of one batch, so many at a time as fit."""
    posteriors = posteriors_of(model)
    batch_dim = conversions_of(model)[0][1].batch_dim
    rows = passes.infer_rows((args, kwargs), batch_dim) or 1
    if posteriors and passes.is_open(posteriors):  # inside frozen: the held draws are all there are
        yield sample(model, *args, **kwargs)
        return
    at_once = min(draws, _draws_at_once(model, (args, kwargs), rows, chunk))
    if share and posteriors and draws > 1 and members(model) == 1 and all(p.countable for p in posteriors):
        yield from _distinct(model, (args, kwargs), draws, rows, at_once, batch_dim)
        return
    for start in range(0, draws, at_once):
        yield sample(model, *args, draws=min(at_once, draws - start), **kwargs)


def _draws_at_once(model: nn.Module, inputs: Any, rows: int, chunk: int | None) -> int:
    """How many draws of each member one forward takes."""
    numbers = max(leaf.numel() for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor))
    wanted = min(2**23 * rows // max(numbers, 1), 2**15) if chunk is None else chunk
    at_once = max(1, wanted // (rows * members(model)))
    floats = sum(p.widths(False)[0] for p in posteriors_of(model)) * members(model)
    return min(at_once, max(1, 2**24 // max(floats, 1)))  # posteriors that draw whole weights: some 64 MiB of them at once


def choices_of(posteriors: Sequence[Posterior]) -> list[Tensor]:
    """Which function each draw of this pass picked at each posterior: L tensors (S,)."""
    found = [p.choices() for p in posteriors]
    assert all(c is not None for c in found)
    return found  # type: ignore[return-value]


def _distinct(model: nn.Module, inputs: Any, draws: int, rows: int, at_once: int, batch_dim: int) -> Iterator[Any]:
    """Outputs of S draws that pick from finitely many networks: each network that was picked runs once."""
    posteriors = posteriors_of(model)
    passes.begin(posteriors, Pass(draws, draws * rows)).open = False
    picked, which = torch.unique(torch.stack(choices_of(posteriors)), dim=1, return_inverse=True)
    first = torch.empty(picked.shape[1], dtype=torch.long, device=which.device).scatter_(0, which, torch.arange(draws, device=which.device))
    noises = [p.noise for p in posteriors]
    parts = []
    for index in first.split(at_once):
        current = Pass(len(index), len(index) * rows)
        for posterior, noise in zip(posteriors, noises, strict=True):
            posterior.start(current, Noise(noise.block[index], noise.row.new_empty(len(index) * rows, 0)))
        try:
            parts.append(run_pass(model, posteriors, inputs, current, rows, batch_dim))
        finally:
            current.open = False
    networks = pytree.tree_map(lambda *leaves: torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0], *parts)
    for index in which.split(max(at_once, 64)):
        yield pytree.tree_map(lambda leaf, index=index: leaf[index] if isinstance(leaf, Tensor) else leaf, networks)


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
    for leaf in outputs.values() if isinstance(outputs, dict) else outputs:
        if isinstance(leaf, Tensor):
            return leaf
    raise ValueError(f"No tensor found in the model's output of type {type(outputs).__name__}; name it with output=.")


def _join(parts: list[Prediction]) -> Prediction:
    if not parts:
        raise ValueError("predict was given no batch.")
    first = parts[0]

    def joined(name: str, dim: int) -> Any:
        tensors = [getattr(p, name) for p in parts]
        return None if tensors[0] is None else torch.cat(tensors, dim)

    return Prediction(
        first.likelihood,
        first.count,
        joined("member_mean", 1),
        joined("aleatoric", 0),
        joined("epistemic", 0),
        joined("kept", 1),
        joined("noise", 1),
        first.weights,
    )
