"""predict: run a model under many draws, batch by batch, in bounded memory.

Sizes: S draws, K members, N rows.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from slimbayes import passes
from slimbayes.convert import conversions_of
from slimbayes.objective import check_finite
from slimbayes.prediction import Likelihood, Prediction, Running
from slimbayes.sampling import call_batch, members, sample


@torch.no_grad()
def predict(
    model: nn.Module,
    x: Any,
    draws: int = 1,
    chunk: int | None = None,
    likelihood: Likelihood = "categorical",
    scale: float = 0.0,
    keep_samples: bool = True,
    output: str | int | None = None,
    class_dim: int = -1,
) -> Prediction:
    """Predict with uncertainty from S = members x draws draws, in eval mode and without gradients.

    Args:
        model: a converted model. Its training flags are restored afterwards.
        x: a tensor, a dict or tuple the model takes, or an iterable of batches (a DataLoader; targets of (input, target) pairs are ignored).
        draws: draws from every member.
        chunk: at most so many rows (draws x inputs) in one forward; by default, as many as `x` or a batch gives.
        likelihood: what the outputs parameterise: "categorical" and "bernoulli" logits, "gaussian" means, or
            "heteroscedastic_gaussian" means and raw scales.
        scale: standard deviation of the observation noise, for "gaussian".
        keep_samples: keep every draw's prediction. Without, memory does not grow with the number of draws.
        output: key or position of the outputs in what the model returns; by default the tensor itself, `.logits`, or the first tensor.
        class_dim: where `sample` has the classes, as in `categorical`: 2 for images (S, N, C, H, W). They come last in the Prediction.

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
    check_finite(model)
    flags = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        parts = []
        for args, kwargs in _batches(model, x, chunk):
            running = Running(likelihood, members(model), scale, keep_samples, class_dim)
            for outputs in _outputs(model, args, kwargs, draws, chunk, output):
                running.add(outputs)
            parts.append(running.result())
        return _join(parts)
    finally:
        for module, training in flags:
            module.training = training


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


def _outputs(model: nn.Module, args: Any, kwargs: Any, draws: int, chunk: int | None, output: str | int | None) -> Iterator[Tensor]:
    rows = passes.infer_rows((args, kwargs), conversions_of(model)[0][1].batch_dim) or 1
    at_once = draws if chunk is None else max(1, chunk // (rows * members(model)))
    floats = sum(p.widths(False)[0] for p in passes.posteriors_of(model)) * members(model)
    at_once = min(at_once, max(1, 2**24 // max(floats, 1)))  # posteriors that draw whole weights: some 64 MiB of them at once
    posteriors = passes.posteriors_of(model)
    if posteriors and passes.is_open(posteriors):  # inside frozen: the held draws are all there are
        yield _select(sample(model, *args, **kwargs), output)
        return
    for start in range(0, draws, at_once):
        yield _select(sample(model, *args, draws=min(at_once, draws - start), **kwargs), output)


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
    )
