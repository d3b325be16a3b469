"""What modules keep from one call for the next beside parameters: buffers and attributes, such as a hidden state."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from slimbayes.engine.holders import (
    PLAIN,
    caches_of,
    homes_of,
    is_large,
    reached,
    written_by_hooks,
)
from slimbayes.engine.modules import Keyed, has_known_class, modules_of
from slimbayes.engine.quiet import inside_func

_ABSENT = object()
CACHED_NAMES = "_slimbayes_cached"  # where a module keeps the names of what it computed from drawn weights
# By number of a module and name of an attribute: (what is there after a call, or _ABSENT, True) if it is another object
# than before; else (pairs of what was written into, within it, and copies of that, False). Hooks that came in a call
# are (functions that put them up again, False), by (~number of the place they hang at, "hooks").
Change = dict[tuple[int, str], tuple[Any, bool]]


class State:
    """What the modules of a model keep at one moment, but for torch's own, whose statistics all draws share.

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

    every = False  # whether buffers of torch's own modules count, too

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        found = modules_of(model)
        own = [m for m in found if not isinstance(m, (Keyed, nn.ModuleDict))]
        self.own, self.homes = (
            len(own),
            homes_of(own),
        )  # modules whose attributes count; of the others buffers do
        more = [
            m
            for m in found
            if m._buffers
            and (has_known_class(m) or isinstance(m, (Keyed, nn.ModuleDict)))
        ]
        self.modules = own + (more if self.every else [])
        self.caches = {id(cache): cache for m in own for cache in caches_of(type(m))}
        self.clear_caches()
        self.before = self._now()
        self.hooks = [
            (held, set(held))
            for m in found
            for held in (m._forward_pre_hooks, m._forward_hooks)
        ]
        inside = reached((v for kept in self.before for v in kept.values()), self.homes)
        if self.every:
            inside |= {
                key: v
                for key, v in reached(written_by_hooks(found)).items()
                if not is_large(v)
            }
        self.values = {
            key: (v, _copy(v), _version(v))
            for key, v in inside.items()
            if not isinstance(v, tuple)
        }

    def _now(self) -> list[dict[str, Any]]:
        return [
            _kept(m) if i < self.own else dict(m._buffers)
            for i, m in enumerate(self.modules)
        ]

    def changes(self) -> Change:
        """What differs from that moment now, but for torch's own modules and posteriors."""
        found: Change = {}
        for i, (before, now) in enumerate(
            list(zip(self.before, self._now(), strict=True))[: self.own]
        ):
            for name in {**before, **now}:
                value, old = now.get(name, _ABSENT), before.get(name, _ABSENT)
                if value is not old:
                    found[i, name] = (value, True)
                elif written := [
                    v
                    for key in reached([value], self.homes)
                    for v in self._written(key)
                ]:
                    found[i, name] = (written, False)
        for i, held, number in self._hooked():
            found.setdefault((~i, "hooks"), ([], False))[0].append(
                partial(held.__setitem__, number, held[number])
            )
        return found

    def clear_caches(self) -> None:
        """Let methods that remember what they returned work it out again: with other weights."""
        for cache in self.caches.values():
            cache.cache_clear()

    def _hooked(self) -> list[tuple[int, Any, int]]:
        """Hooks that came since and are not ours: models that collect what their parts give put them up in a call."""
        new = [
            (i, held, n)
            for i, (held, old) in enumerate(self.hooks)
            for n in held
            if n not in old
        ]
        return [
            (i, held, n)
            for i, held, n in new
            if not str(held[n].__module__).startswith("slimbayes.")
        ]

    def _written(self, key: int) -> Iterator[tuple[Any, Any]]:
        if key in self.values and not _same(*self.values[key]):
            yield self.values[key][0], _copy(self.values[key][0])

    def names(self, changes: Change) -> list[str]:
        """What the model calls the changed attributes."""
        paths = {
            id(module): f"{path}." if path else ""
            for path, module in self.model.named_modules()
        }
        return [
            name if i < 0 else paths.get(id(self.modules[i]), "") + name
            for i, name in changes
        ]

    def write(self, changes: Change) -> None:
        """Make these changes, starting from that moment."""
        self.restore()
        for (i, name), (value, another) in changes.items():
            if another:
                _put(self.modules[i], name, value)
            elif i < 0:
                for put in value:
                    put()
            else:
                for inner, content in value:
                    _fill(inner, content)

    def restore(self) -> None:
        """Go back to that moment."""
        self.clear_caches()
        for module, before, now in zip(
            self.modules, self.before, self._now(), strict=True
        ):
            for name in {**before, **now}:
                if now.get(name, _ABSENT) is not before.get(name, _ABSENT):
                    _put(module, name, before.get(name, _ABSENT))
        for _, held, number in self._hooked():
            held.pop(number, None)
        for value, old, version in self.values.values():
            # Batch norm writes its statistics without counting that: a trial's are put back unseen, as to look waits.
            if (
                self.every and isinstance(value, Tensor) and value.is_cuda
            ) or not _same(value, old, version):
                _fill(value, old)

    def mark(self, places: Iterable[tuple[int, str]]) -> None:
        """Let `forget` know these attributes: each module has the names of its own."""
        for i, name in places:
            if i >= 0:
                self.modules[i].__dict__.setdefault(CACHED_NAMES, set()).add(name)

    def forget(self) -> None:
        """Go back to that moment in what is marked alone."""
        self.clear_caches()
        for module, before in zip(self.modules, self.before, strict=True):
            for name in module.__dict__.get(CACHED_NAMES, ()):
                _put(module, name, before.get(name, _ABSENT))
                for key in reached([before.get(name)], self.homes):
                    for value, old, version in (
                        [self.values[key]] if key in self.values else []
                    ):
                        if not _same(value, old, version):
                            _fill(value, old)


class Trials(State):
    """Trials of a model under these posteriors, and what they leave as it was: what modules keep, torch's own included,
    parameters that are written to, as target networks are in a forward (not those of FSDP2, which writes to them
    itself), what hooks collect, and random numbers of Python, numpy and the modules' own.
    """

    every = True

    def __init__(self, model: nn.Module, posteriors: Sequence[Any] = ()) -> None:
        super().__init__(model)
        self.posteriors = posteriors
        self.random = random.getstate(), np.random.get_state()
        own = [
            v
            for held in self.before
            for v in held.values()
            if isinstance(v, torch.Generator)
        ]
        self.generators = [(generator, generator.get_state()) for generator in own]
        self.sharded = any(hasattr(type(m), "unshard") for m in modules_of(model))
        self.places: dict[int, list[nn.Parameter]] = {}
        self.written: dict[
            int, tuple[Tensor, Tensor, Tensor]
        ] = {}  # parameter, its numbers, and a copy of these

    def note_write(self, target: Any) -> None:
        """Keep the numbers of parameters that are about to be written to."""
        for one in target if isinstance(target, (list, tuple)) else [target]:
            if (
                self.sharded
                or type(one) not in (Tensor, nn.Parameter)
                or inside_func()
                or not _comparable(one.data)
            ):
                continue
            if not self.places:
                for p in [
                    p
                    for p in self.model.parameters()
                    if type(p) is nn.Parameter and _comparable(p.data)
                ]:
                    self.places.setdefault(p.untyped_storage().data_ptr(), []).append(p)
            for p in self.places.get(one.untyped_storage().data_ptr(), ()):
                self.written.setdefault(id(p), (p, p.data, p.data.clone()))

    def restore(self) -> None:
        super().restore()
        for p, data, old in self.written.values():
            p.data = data
            data.copy_(old)
        self.written = {}
        random.setstate(self.random[0])
        np.random.set_state(self.random[1])
        for generator, numbers in self.generators:
            generator.set_state(numbers)


class Lasting:
    """What each of several draws that run one after another left in the modules. Each begins with what it left itself
    in the call before, or where the modules are now if they are elsewhere; afterwards they have what all left together,
    the last draw's where several did.
    """

    origin: State | None = None
    by_draw: dict[int, Change] = {}  # noqa: RUF012 - of each object as soon as there is anything in it

    def each(self, model: nn.Module, draws: int) -> Iterator[int]:
        """The numbers of the draws, with the modules made ready for each."""
        if self.origin is None or not same_changes(
            self.origin.changes(), self._together()
        ):
            self.origin, self.by_draw = State(model), {}
        try:
            for j in range(draws):
                self.origin.write(self.by_draw.get(j, {}))
                yield j
                self.by_draw[j] = self.origin.changes()
        finally:
            self.origin.write(self._together())

    def _together(self) -> Change:
        return {
            place: value
            for left in self.by_draw.values()
            for place, value in left.items()
        }


def same_changes(a: Change, b: Change) -> bool:
    """Whether two runs left the same numbers behind.

    Example:
        >>> same_changes({(0, "h"): (torch.zeros(2), True)}, {(0, "h"): (torch.ones(2), True)})
        False
    """

    def equal(x: Any, y: Any) -> bool:
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            alike = x.device == y.device and x.dtype == y.dtype and x.shape == y.shape
            return x is y or (
                alike and _comparable(x) and _comparable(y) and bool(torch.equal(x, y))
            )
        return not isinstance(x, (bool, int, float, str)) or x == y

    one, other = tree_leaves(list(a.values())), tree_leaves(list(b.values()))
    return (
        a.keys() == b.keys() and len(one) == len(other) and all(map(equal, one, other))
    )


def _kept(module: nn.Module) -> dict[str, Any]:
    """Buffers, and attributes that not every module has; of torch's own modules what others put there: tensors and
    objects, but for weights that hooks compute.
    """
    own = {
        n: v
        for n, v in module.__dict__.items()
        if not (n in _OF_ALL or n.startswith("_slimbayes"))
    }
    if has_known_class(module):
        return {
            n: v
            for n, v in own.items()
            if type(v) not in PLAIN and not n.startswith(("_", "weight", "bias"))
        }
    return {**own, **module._buffers}


_OF_ALL = {*nn.Module().__dict__, "forward"}


def copy_modules(model: Any) -> Any:
    """A deep copy of a module, also where it keeps tensors of its last call's graph, which torch does not copy."""
    found = modules_of(model)
    inside = reached(
        (v for m in found for v in _kept(m).values()), homes_of(found)
    ).values()
    kept = [v for v in inside if isinstance(v, Tensor) and v.grad_fn is not None]
    return copy.deepcopy(model, {id(v): v.detach().clone() for v in kept})


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value.copy()


def _comparable(value: Tensor) -> bool:
    """Sparse tensors, those without numbers and other kinds of them are not."""
    return type(value) is Tensor and value.layout is torch.strided and not value.is_meta


def _version(value: Any) -> int | None:
    """How often a tensor was written to, where its numbers cannot be compared, or not without waiting for a device."""
    if not isinstance(value, Tensor) or (_comparable(value) and not value.is_cuda):
        return None
    return (
        (None if _comparable(value) else 0) if value.is_inference() else value._version
    )


def _same(value: Any, old: Any, version: int | None) -> bool:
    if isinstance(value, Tensor):
        same = value.shape == old.shape and value.dtype == old.dtype
        return same and (
            _version(value) == version
            if version is not None
            else bool(torch.equal(value, old))
        )
    if isinstance(value, set):
        return value == old
    pairs = (
        (value.keys(), old.keys(), value.values(), old.values())
        if isinstance(value, dict)
        else (value, old) * 2
    )
    return (
        len(value) == len(old)
        and all(map(is_, *pairs[:2]))
        and all(map(is_, *pairs[2:]))
    )


def _fill(value: Any, old: Any) -> None:
    """Make the contents of one the contents of the other."""
    if isinstance(value, Tensor):
        with torch.no_grad():
            (value if value.shape == old.shape else value.resize_(old.shape)).copy_(old)
    else:
        value.clear()
        (value.update if isinstance(value, (dict, set)) else value.extend)(old)


def _put(module: nn.Module, name: str, value: Any) -> None:
    place = module._buffers if name in module._buffers else module.__dict__
    if value is _ABSENT:
        place.pop(name, None)
    else:
        place[name] = value
