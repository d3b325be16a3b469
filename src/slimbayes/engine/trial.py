"""A trial of the plain model: nothing random in it, nothing left behind, and a probe that notes what its converted
layers met.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.engine import passes
from slimbayes.engine.probe import Mixed, Probe
from slimbayes.engine.quiet import Quiet
from slimbayes.engine.sharing import Ahead
from slimbayes.engine.tree import arrays_of, map_arrays, padded


@contextmanager
def undisturbed(model: nn.Module, inputs: Any) -> Iterator[None]:
    """Random numbers, buffers and gradients are afterwards as they were. Compiled parts run as they were written: each
    trial would be compiled anew.
    """
    devices = sorted({a.device.index or 0 for a in map(padded, arrays_of(inputs)) if a.is_cuda})
    with torch.no_grad(), buffers_kept(model), torch.random.fork_rng(devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.compiler.set_stance("force_eager"):
            yield


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in buffers:
            buffer.copy_(value)


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
    quiet = Quiet()
    probe = Probe([p.key for p in posteriors], quiet, before, taint)
    probe.rows = rows
    args, kwargs = copied(inputs)
    watcher = Ahead(model, probe, before)
    devices = {p.device.type for p in posteriors} or {"cpu"}
    with quiet, no_autocast(devices), buffers_kept(model), watcher:
        out = passes.run(probe, model, *args, **kwargs)
    probe.ahead = watcher.found
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
