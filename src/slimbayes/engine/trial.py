"""A trial of the plain model: nothing random, nothing left behind, and a note of what its converted layers met."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from slimbayes.engine import passes
from slimbayes.engine.layout import UNORDERED
from slimbayes.engine.probe import Mixed, Probe, other_numbers
from slimbayes.engine.quiet import Quiet
from slimbayes.engine.sharing import plain_modules
from slimbayes.engine.state import kept, same_changes
from slimbayes.engine.tree import arrays_of, attributes_of, leaves_of, map_arrays, opened, padded

_UNDER_WAY: ContextVar[bool] = ContextVar("slimbayes_trial", default=False)


_LOCK = threading.Lock()
_VALIDATED: list[bool] = []  # as it was before each of the trials under way, in whatever thread


@contextmanager
def unvalidated() -> Iterator[None]:
    """Distributions do not look at their parameters: one setting for all threads, which the last to leave undoes."""
    with _LOCK:
        _VALIDATED.append(bool(Distribution._validate_args))
        Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        with _LOCK:
            before = _VALIDATED[0]
            _VALIDATED.pop()
            if not _VALIDATED:
                Distribution.set_default_validate_args(before)


def on_trial() -> bool:
    """Whether a trial is under way, whose inputs nobody gave: hooks that note what layers meet pass over them."""
    return _UNDER_WAY.get()


@contextmanager
def undisturbed(model: nn.Module, inputs: Any) -> Iterator[None]:
    """Random numbers, what modules keep, and gradients are afterwards as they were. Compiled parts run as they were
    written: each trial would be compiled anew. Distributions do not look at their parameters: whether all rows' are
    valid would seem to lead the model.
    """
    devices = sorted({a.device.index or 0 for a in map(padded, arrays_of(inputs)) if a.is_cuda})
    with torch.no_grad(), kept(model), torch.random.fork_rng(devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        token = _UNDER_WAY.set(True)
        try:
            with torch.compiler.set_stance("force_eager"), unvalidated():
                yield
        finally:
            _UNDER_WAY.reset(token)


@contextmanager
def no_autocast(devices: set[str]) -> Iterator[None]:
    if not devices:
        yield
        return
    with torch.autocast(devices.pop(), enabled=False), no_autocast(devices):
        yield


def probed(
    model: nn.Module,
    posteriors: Sequence[Any],
    inputs: Any,
    rows: int,
    before: Probe | None = None,
    taint: Tensor | None = None,
) -> tuple[Probe, Any]:
    """Run the plain model once, with everything random in it made constant: what was met, and the outputs."""
    quiet = Quiet(not model.training)
    probe = Probe([p.key for p in posteriors], quiet, before, taint)
    probe.rows = rows
    args, kwargs = copied(inputs)
    devices = {p.device.type for p in posteriors} or {"cpu"}
    with kept(model) as state, quiet, no_autocast(devices), probe.watching(plain_modules(model)):
        out = passes.run(probe, model, *args, **kwargs)
        quiet.muted = True
        leaves = leaves_of(out)
        probe.objects, out = any(isinstance(leaf, UNORDERED) or attributes_of(leaf) for leaf in leaves), opened(out)
        probe.changes = state.changes() if before is None else {}
    if quiet.used:
        raise Mixed(f"the weight of {next(iter(quiet.used))} is used past the layer's own forward")
    if before is not None and len(before.visits) != len(probe.visits):
        raise Mixed(f"{before.visits[-1].name} and other layers are not called alike for more rows")
    return probe, out


def copied(inputs: Any) -> Any:
    """Copies of the tensors, which the model may change."""
    return map_arrays(lambda i, leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, inputs)


def first_line(error: Exception) -> str:
    """The first line of what an error says."""
    return next(iter(str(error).splitlines()), "")


def what_lasts(model: nn.Module, posteriors: Sequence[Any], inputs: Any, first: Probe, out: Any) -> str | None:
    """The name of what a run left in the modules, if it depends on the inputs and changes what a second one gives."""
    if not first.changes:
        return None
    with kept(model) as state:
        name = state.names(first.changes)[0]
        other = map_arrays(lambda i, a: other_numbers(a, 0, True) if isinstance(a, Tensor) and a.dim() else a, inputs)
        try:
            if same_changes(first.changes, probed(model, posteriors, other, first.rows)[0].changes):
                return None
            state.write(first.changes)
            again = arrays_of(probed(model, posteriors, inputs, first.rows)[1])
        except Exception:  # a state that does not fit the inputs any more
            return name
    pairs = list(zip(map(padded, arrays_of(out)), map(padded, again), strict=False))
    alike = len(arrays_of(out)) == len(again) and all(a.shape == b.shape and apart(a, b) < 1e-6 for a, b in pairs)
    return None if alike else name


def apart(a: Tensor, b: Tensor) -> float:
    """Largest difference relative to the largest number."""
    if a.numel() == 0:
        return 0.0
    if not a.is_floating_point():
        return float((a != b).any())
    a, b = a.double().nan_to_num(0.123, 1e30, -1e30), b.double().nan_to_num(0.123, 1e30, -1e30)
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
