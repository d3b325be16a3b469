"""What modules keep from one call for the next, beside parameters: buffers, and attributes of their own such as a
hidden state, a cache or a count.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from slimbayes.engine.modules import Keyed, modules_of, torch_or_own

_GROWS = (list, dict, set, deque)
_ABSENT = object()
# By module and name: what is there after a call, or that nothing is, and whether it is another object than before.
Change = dict[tuple[int, str], tuple[Any, bool]]


class State:
    """What the modules of a model keep at one moment; with `every`, torch's own, too, whose statistics all draws share.

    Example:
        >>> class Counts(nn.Module):
        ...     seen = 0
        ...     def forward(self, x):
        ...         self.seen += len(x)
        >>> Counts.__module__ = "somebody.elses"  # of modules of ours nothing is looked at
        >>> model = Counts()
        >>> before = State(model)
        >>> model(torch.randn(3))
        >>> before.names(before.changes()), before.restore(), model.seen
        (['seen'], None, 0)
    """

    def __init__(self, model: nn.Module, every: bool = False) -> None:
        self.model = model
        found = modules_of(model)
        own = [m for m in found if not (isinstance(m, (Keyed, nn.ModuleDict)) or torch_or_own(m))]
        self.own = len(own)  # modules whose attributes count, too; of the others only buffers do
        known = set(map(id, own))
        self.modules = own + ([m for m in found if m._buffers and id(m) not in known] if every else [])
        self.before = self._now()
        self.values = {id(v): (v, _copy(v), _version(v)) for kept in self.before for v in kept.values() if _mutable(v)}

    def _now(self) -> list[dict[str, Any]]:
        return [_kept(m) if i < self.own else dict(m._buffers) for i, m in enumerate(self.modules)]

    def changes(self) -> Change:
        """What differs from that moment now, but for torch's own modules and posteriors."""
        found: Change = {}
        for i, (before, now) in enumerate(list(zip(self.before, self._now(), strict=True))[: self.own]):
            for name in {**before, **now}:
                value, old = now.get(name, _ABSENT), before.get(name, _ABSENT)
                if value is not old:
                    found[i, name] = (value, True)
                elif id(value) in self.values and not _same(*self.values[id(value)]):
                    found[i, name] = (_copy(value), False)
        return found

    def names(self, changes: Change) -> list[str]:
        """What the model calls the changed attributes."""
        paths = {id(module): f"{path}." if path else "" for path, module in self.model.named_modules()}
        return [paths.get(id(self.modules[i]), "") + name for i, name in changes]

    def write(self, changes: Change) -> None:
        """Make these changes, starting from that moment."""
        self.restore()
        for (i, name), (value, another) in changes.items():
            if another:
                _put(self.modules[i], name, value)
            else:
                _fill(self.before[i][name], value)

    def restore(self) -> None:
        """Go back to that moment."""
        for module, before, now in zip(self.modules, self.before, self._now(), strict=True):
            for name in {**before, **now}:
                if now.get(name, _ABSENT) is not before.get(name, _ABSENT):
                    _put(module, name, before.get(name, _ABSENT))
        for value, old, version in self.values.values():
            if not _same(value, old, version):
                _fill(value, old)


@contextmanager
def kept(model: nn.Module) -> Iterator[State]:
    """Whatever modules keep is afterwards as it was, and so are the random numbers of Python and numpy."""
    state, python, arrays = State(model, every=True), random.getstate(), np.random.get_state()
    try:
        yield state
    finally:
        state.restore()
        random.setstate(python)
        np.random.set_state(arrays)


class Lasting:
    """What each of several draws that run one after another left in the modules. Each begins with what it left itself
    in the call before, or where the modules are now if they are elsewhere; afterwards they have what all left together,
    the last draw's where several did.
    """

    def __init__(self) -> None:
        self.origin: State | None = None
        self.by_draw: dict[int, Change] = {}

    def each(self, model: nn.Module, draws: int) -> Iterator[int]:
        """The numbers of the draws, with the modules made ready for each."""
        if self.origin is None or not same_changes(self.origin.changes(), self._together()):
            self.origin, self.by_draw = State(model), {}
        try:
            for j in range(draws):
                self.origin.write(self.by_draw.get(j, {}))
                yield j
                self.by_draw[j] = self.origin.changes()
        finally:
            self.origin.write(self._together())

    def _together(self) -> Change:
        return {place: value for left in self.by_draw.values() for place, value in left.items()}


def same_changes(a: Change, b: Change) -> bool:
    """Whether two runs left the same numbers behind.

    Example:
        >>> same_changes({(0, "h"): (torch.zeros(2), True)}, {(0, "h"): (torch.ones(2), True)})
        False
    """
    one, other = tree_leaves(list(a.values())), tree_leaves(list(b.values()))
    return a.keys() == b.keys() and len(one) == len(other) and all(map(_equal, one, other))


def _equal(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.shape == y.shape and bool(torch.equal(x, y))
    return not isinstance(x, (bool, int, float, str)) or x == y


def _kept(module: nn.Module) -> dict[str, Any]:
    """Buffers, and attributes that not every module has."""
    own = {n: v for n, v in module.__dict__.items() if not (n.startswith("_slimbayes") or n in _OF_ALL)}
    return {**own, **module._buffers}


_OF_ALL = {*nn.Module().__dict__, "forward"}


def _mutable(value: Any) -> bool:
    return isinstance(value, (Tensor, *_GROWS)) and not isinstance(value, nn.Parameter)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value.copy()


def _version(value: Any) -> int | None:
    """How often a tensor on a device was written to, by which it can be judged without waiting for its numbers."""
    return value._version if isinstance(value, Tensor) and value.is_cuda and not value.is_inference() else None


def _same(value: Any, old: Any, version: int | None) -> bool:
    if isinstance(value, Tensor):
        same = value.shape == old.shape and value.dtype == old.dtype
        return same and (value._version == version if version is not None else bool(torch.equal(value, old)))
    a, b = (list(v.items()) if isinstance(v, dict) else list(v) for v in (value, old))
    return len(a) == len(b) and all(map(_is, a, b))


def _is(a: Any, b: Any) -> bool:
    return all(map(_is, a, b)) if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b) else a is b


def _fill(value: Any, old: Any) -> None:
    """Make the contents of one the contents of the other."""
    if isinstance(value, Tensor):
        with torch.no_grad():
            value.copy_(old)
    else:
        value.clear()
        (value.update if isinstance(value, (dict, set)) else value.extend)(old)


def _put(module: nn.Module, name: str, value: Any) -> None:
    place = module._buffers if name in module._buffers else module.__dict__
    if value is _ABSENT:
        del place[name]
    else:
        place[name] = value
