"""Prediction: eval mode for as long as anybody predicts, and work that all draws have in common done once.

Modules that run before any layer has used its draw see S equal repetitions of the batch. While a prediction is under
way they run on one of them, and their output is repeated. Which modules those are, and where their rows lie, is found
with the proof of rows (`Ahead`); modules in which anything is random are never shared. Several threads may predict with
one model: what hooks do depends on the pass of their thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from slimbayes.engine import passes
from slimbayes.engine.layout import Dims
from slimbayes.engine.probe import Mixed, Probe, doubled
from slimbayes.engine.tree import arrays_of, map_arrays, padded


class Ahead:
    """Finds the largest modules that run before any converted layer does, and where their rows lie."""

    def __init__(self, model: nn.Module, probe: Probe, before: Probe | None) -> None:
        self.model, self.probe, self.before = model, probe, before
        self.handles: list[Any] = []
        self.random = False
        self.shapes: dict[int, tuple[list[Any], list[Any]]] = {}
        self.found: dict[int, tuple[Dims, Dims]] = {}

    def __enter__(self) -> Ahead:
        if self.probe.taint is not None:
            return self
        for module in plain_modules(self.model):
            self.handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self.handles.append(module.register_forward_hook(self._leave, with_kwargs=True))
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self.handles:
            handle.remove()
        self.probe.shapes_ahead = self.shapes
        compared = {} if self.before is None or self.probe.taint is not None else self.before.shapes_ahead
        for module, now in self.shapes.items():
            earlier = compared.get(module)
            if earlier is None or None in (earlier[1], now[1]):
                continue
            try:
                ins, outs = (tuple(doubled(a, b, "") for a, b in zip(*pair, strict=True)) for pair in zip(earlier, now))
            except (Mixed, ValueError):
                continue
            if all(d is not None for d in (*ins, *outs)):  # what has no rows might still depend on all of them
                self.found[module] = (ins, outs)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        if passes.current() is not self.probe or kwargs is None:
            return  # another thread's call; torch may not have marked the hook as taking keywords yet
        if not self.probe.visits and id(module) not in self.shapes:
            self.shapes[id(module)] = ([tuple(a.shape) for a in map(padded, arrays_of((args, kwargs)))], None)  # type: ignore[assignment]
            self.random = self.probe.quiet.random
        else:
            self.shapes[id(module)] = ([], None)  # type: ignore[assignment]

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
        if passes.current() is not self.probe:
            return
        ins, done = self.shapes.get(id(module), ([], None))
        if ins and done is None and not self.probe.visits and self.probe.quiet.random == self.random:
            self.shapes[id(module)] = (ins, [tuple(a.shape) for a in map(padded, arrays_of(output))])


def plain_modules(model: nn.Module) -> list[nn.Module]:
    """The largest modules without posteriors in them that have a weight matrix: the work worth sharing."""
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        if hasattr(type(module), "plain_forward"):
            return
        heavy = any(p.dim() > 1 for p in module.parameters())
        if heavy and passes.first_key(module) is None and type(module).forward is not nn.Module.forward:
            found.append(module)
            return
        for child in module.children():
            visit(child)

    visit(model)
    return found


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
            busy = _BUSY[id(model)] = _Busy(model, [(m, m.training) for m in model.modules()])
            model.eval()
            for module in [] if "_orig_mod" in model._modules else plain_modules(model):
                busy.handles.append(module.register_forward_pre_hook(_narrow, with_kwargs=True))
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
    found = passes.current()
    if kwargs is None:
        return None  # torch has not yet marked the hook as taking keywords: another thread registers it just now
    if found is None or found.shared is None or found.drawn_yet or id(module) not in found.shared:
        return None
    dims, total = found.shared[id(module)][0], found.total
    found.waiting.append(module)
    return map_arrays(lambda i, leaf: leaf.narrow(dims[i], 0, leaf.shape[dims[i]] // total), (args, kwargs))


def _repeat(module: nn.Module, args: Any, output: Any) -> Any:
    found = passes.current()
    if found is None or not found.waiting or found.waiting[-1] is not module:
        return None
    found.waiting.pop()
    dims, total = found.shared[id(module)][1], found.total  # type: ignore[index]

    def repeat(i: int, leaf: Any) -> Any:
        repeats = [1] * leaf.dim()
        repeats[dims[i]] = total
        return leaf.repeat(repeats)

    return map_arrays(repeat, output)
