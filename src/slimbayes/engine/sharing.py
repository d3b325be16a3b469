"""Prediction: eval mode for as long as anybody predicts, and work that all draws have in common done once.

Modules that run before any layer has used its draw see S equal repetitions of the batch. While a prediction is under
way they run on one of them, and their output is repeated. Which modules those are, and where their rows lie, is found
with the proof of rows; modules in which anything is random are never shared. Several threads may predict with one
model: what hooks do depends on the pass of their thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.jit import ScriptModule

from slimbayes.engine import passes
from slimbayes.engine.layout import Unproven, arrays_of, map_arrays, padded
from slimbayes.engine.modules import first_key
from slimbayes.engine.probe import Probe, doubled


def plain_modules(model: nn.Module) -> list[nn.Module]:
    """The largest modules without posteriors in them that have a weight matrix: the work worth sharing."""
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        if hasattr(type(module), "plain_forward") or isinstance(module, ScriptModule):
            return
        if first_key(module) is None and type(module).forward is not nn.Module.forward:
            if any(p.dim() > 1 for p in module.parameters()):
                found.append(module)
            return
        for child in module.children():
            visit(child)

    visit(model)
    return found


@contextmanager
def finding_shareable(probe: Probe, model: nn.Module) -> Iterator[None]:
    """A run of the proof that notes which modules run before any converted layer does, and where their rows lie."""
    shapes, random = probe.early_shapes, False

    def enter(module: nn.Module, args: Any, kwargs: Any = None) -> None:
        nonlocal random
        if passes.innermost() is not probe or kwargs is None:
            return  # another thread's call; torch may not have marked the hook as taking keywords yet
        first = not probe.visits and id(module) not in shapes
        shapes[id(module)] = ((_shapes((args, kwargs)) or []) if first else [], None)
        random = probe.quiet.random if first else random

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
        ins, outs = shapes.get(id(module), ([], None))
        undrawn = not probe.visits and probe.quiet.random == random
        if passes.innermost() is probe and ins and outs is None and undrawn:
            shapes[id(module)] = (ins, _shapes(output))

    handles: list[Any] = []
    for module in plain_modules(model) if probe.taint is None else ():
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    before = {} if probe.before is None else probe.before.early_shapes
    for key, (ins, outs) in shapes.items():
        ins_before, outs_before = before.get(key, ([], None))
        if outs is None or outs_before is None:
            continue
        try:
            dims = [
                tuple(doubled(a, b, "") for a, b in zip(*pair, strict=True))
                for pair in ((ins_before, ins), (outs_before, outs))
            ]
        except (Unproven, ValueError):
            continue
        if (
            None not in dims[0] + dims[1]
        ):  # what has no rows might still depend on all of them
            probe.shareable[key] = (dims[0], dims[1])


def _shapes(tree: Any) -> list[tuple[int, ...]] | None:
    """Of all tensors in it; None where some are packed sequences, whose rows cannot be cut."""
    arrays = arrays_of(tree)
    return (
        [tuple(a.shape) for a in arrays]
        if all(isinstance(a, Tensor) for a in arrays)
        else None
    )


_LOCK = threading.RLock()
_BUSY: dict[int, _Busy] = {}


@dataclass
class _Busy:
    """A model that predicts for somebody."""

    model: nn.Module
    flags: list[tuple[nn.Module, bool]]
    users: int = 0
    handles: list[Any] = field(default_factory=list)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode; the last to leave puts the training flags back."""
    with _LOCK:
        busy = _BUSY.get(id(model))
        if busy is None:
            busy = _BUSY[id(model)] = _Busy(
                model, [(m, m.training) for m in model.modules()]
            )
            model.eval()
            for module in [] if "_orig_mod" in model._modules else plain_modules(model):
                busy.handles.append(
                    module.register_forward_pre_hook(_narrow, with_kwargs=True)
                )
                busy.handles.append(module.register_forward_hook(_repeat))
        busy.users += 1
    try:
        yield
    finally:
        with _LOCK:
            busy.users -= 1
            if busy.users == 0:
                del _BUSY[id(model)]
                for handle in busy.handles:
                    handle.remove()
                for module, training in busy.flags:
                    module.training = training


def _narrow(module: nn.Module, args: Any, kwargs: Any = None) -> Any:
    found = passes.innermost()
    if kwargs is None:
        return None  # torch has not yet marked the hook as taking keywords: another thread registers it just now
    if (
        found is None
        or found.shared is None
        or found.drawn_yet
        or id(module) not in found.shared
    ):
        return None
    if any(a.requires_grad for a in map(padded, arrays_of((args, kwargs)))):
        return None  # derivatives by its inputs may be taken, and every row has its own
    dims, total = found.shared[id(module)][0], found.total
    found.waiting.append(module)
    return map_arrays(
        lambda i, leaf: leaf.narrow(dims[i], 0, leaf.shape[dims[i]] // total),
        (args, kwargs),
    )


def _repeat(module: nn.Module, args: Any, output: Any) -> Any:
    found = passes.innermost()
    if found is None or not found.waiting or found.waiting[-1] is not module:
        return None
    found.waiting.pop()
    dims, total = found.shared[id(module)][1], found.total  # type: ignore[index]

    def repeat(i: int, leaf: Any) -> Any:
        repeats = [1] * leaf.dim()
        repeats[dims[i]] = total
        return leaf.repeat(repeats)

    return map_arrays(repeat, output)
