"""Features of rows, for distances: a model's inputs, or what reaches a layer inside it.

Sizes: N rows, P features.
"""

from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.engine import passes
from slimbayes.errors import did_you_mean
from slimbayes.prediction.sample import frozen, sample

_DRAWS = 2  # of each member: the same functions every time


def is_table(args: Any, kwargs: Any) -> bool:
    """Whether a model is called with one table of numbers."""
    first = args[0] if len(args) == 1 and not kwargs else None
    return isinstance(first, Tensor) and first.dim() == 2 and first.is_floating_point()


def features_of(model: nn.Module, args: Any, kwargs: Any, at: str | None) -> Tensor:
    """What rows look like (N, P): the inputs themselves, or those of layer `at`, averaged over a few draws."""
    if at is None:
        return args[0].float()
    if any(passes.of(p.key) is not None for p in passes.posteriors_of(model)):
        raise ValueError(f"The features of {at!r} belong to draws of their own: predict(..., far=) outside `frozen`.")
    seen = _seen(model, args, kwargs, {at: _module(model, at)})
    if not seen or any(x.dim() != 2 or x.shape != seen[0][1].shape for _, x in seen):
        got = "nothing" if not seen else f"shape {tuple(seen[0][1].shape)}"
        raise ValueError(
            f"far needs a layer whose inputs are one line of features for each row, (N, P); at={at!r} got {got}."
        )
    return torch.stack([x for _, x in seen]).mean(0)


def _module(model: nn.Module, at: str) -> nn.Module:
    names = dict(model.named_modules())
    if at not in names or not at:
        raise ValueError(f"far(at={at!r}): the model has no such layer{did_you_mean(at, names)}")
    return names[at]


def last_linear(model: nn.Module, args: Any, kwargs: Any) -> str:
    """The linear layer that is called last."""
    linear: dict[str, nn.Module] = {
        name: module for name, module in model.named_modules() if name and isinstance(module, nn.Linear)
    }
    seen = _seen(model, args, kwargs, linear)
    if not seen:
        raise ValueError("far found no linear layer inside the model that is called: name one with at=.")
    return seen[-1][0]


def _seen(model: nn.Module, args: Any, kwargs: Any, modules: dict[str, nn.Module]) -> list[tuple[str, Tensor]]:
    """Inputs of these modules, in the order of their calls, under a few draws that are always the same."""
    found: list[tuple[str, Tensor]] = []

    def note(name: str) -> Any:
        return lambda module, inputs: found.append((name, inputs[0].detach().float()))

    handles = [module.register_forward_pre_hook(note(name)) for name, module in modules.items()]
    try:
        if not passes.posteriors_of(model):
            model(*args, **kwargs)
        else:
            with frozen(model, _DRAWS, seed=0):
                sample(model, *args, fold=False, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return found
