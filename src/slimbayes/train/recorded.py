"""A training step as one CUDA graph: the GPU repeats what it did once, and Python has no part in it.

Steps of small and middling networks wait for Python, and Bayesian ones more so, since they have more operations. A
recorded step costs what the GPU's work costs. The lab trains so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.utils._pytree import tree_flatten, tree_map_only

from slimbayes.errors import SlimbayesWarning

T = TypeVar("T")
WARM_UP = 3  # calls before recording: autograd, optimizers and libraries set themselves up


def moments(optimizer: Optimizer) -> list[Tensor]:
    """All tensors of an optimizer's state."""
    return [t for values in optimizer.state.values() for t in values.values() if isinstance(t, Tensor)]


def record(work: Callable[[], T], state: list[Tensor], optimizer: Optimizer | None) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of work() on the current device, and the tensors it returned: each replay writes into these.

    What the calls that this takes changed is undone in place: `state`, and what the optimizer, one of SGD, Adam and
    AdamW, remembers, which starts at zero.
    """
    old = [] if optimizer is None else moments(optimizer)
    kept = {id(t): (t, t.detach().clone()) for t in [*state, *old]}
    random = torch.cuda.get_rng_state()
    try:
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="torch")  # on streams; what slimbayes says is for the user
            for _ in range(WARM_UP):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            found = work()
        return graph, found
    except BaseException:
        # A recording that breaks off leaves the generator believing that it goes on: whoever drew next would fail.
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())
        raise
    finally:
        torch.cuda.synchronize()
        torch.cuda.set_rng_state(random)
        with torch.no_grad():
            for tensor, value in kept.values():
                tensor.copy_(value)
            for moment in [] if optimizer is None else moments(optimizer):
                if id(moment) not in kept:
                    moment.zero_()


class _Recording(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: Any


class Recorded:
    """See `recorded`."""

    def __init__(self, step: Callable[..., Any], model: nn.Module, optimizer: Optimizer | None) -> None:
        self.step, self.model, self.optimizer = step, model, optimizer
        self.recordings: dict[Hashable, _Recording | None] = {}

    def __call__(self, *args: Any) -> Any:
        leaves, spec = tree_flatten(args)
        if not any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in leaves):
            return self.step(*args)
        key = (spec, *map(_kind, leaves), self.model.training, torch.is_grad_enabled(), *self._settings())
        if key not in self.recordings:
            self.recordings[key] = self._recorded(leaves, spec)
        found = self.recordings[key]
        if found is None:
            return self.step(*args)
        for static, given in zip(found.inputs, filter(_varies, leaves), strict=True):
            static.copy_(given, non_blocking=True) if isinstance(given, Tensor) else static.fill_(given)
        found.graph.replay()
        return tree_map_only(Tensor, Tensor.clone, found.outputs)

    def _settings(self) -> list[Any]:
        """What a graph has fixed of the optimizer: everything but tensors' values, among them the learning rates."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        values = [v for group in groups for name, v in group.items() if name != "params" and not isinstance(v, Tensor)]
        return [*map(repr, values), *(p.data_ptr() for group in groups for p in group["params"])]

    def _recorded(self, leaves: list[Any], spec: Any) -> _Recording | None:
        device = next(leaf.device for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_cuda)
        static = [_static(leaf, device) for leaf in leaves]
        state = [*self.model.parameters(), *self.model.buffers()]

        def work() -> Any:
            return tree_map_only(Tensor, Tensor.detach, self.step(*spec.unflatten(static)))

        try:
            graph, outputs = record(work, state, self.optimizer)
        except Exception as error:  # whatever a step does that cannot be recorded, it can still be run
            lines = str(error).splitlines() or [""]
            warnings.warn(
                f"slimbayes cannot record this step as a CUDA graph and runs it operation by operation "
                f"({type(error).__name__}: {lines[0]}).",
                SlimbayesWarning,
                stacklevel=4,
            )
            return None
        return _Recording(graph, [s for s, leaf in zip(static, leaves, strict=True) if _varies(leaf)], outputs)


def _varies(leaf: Any) -> bool:
    return isinstance(leaf, Tensor | float)


def _kind(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    return float if isinstance(leaf, float) else repr(leaf)


def _static(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, float):
        return torch.tensor(leaf, device=device)
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def recorded(step: Callable[..., Any], model: nn.Module, optimizer: Optimizer | None = None) -> Recorded:
    """The same step, which a GPU repeats without Python: a CUDA graph, recorded when shapes are new.

    All that differs between calls must come as an argument. Tensors are copied into the graph, and floats, a KL's
    weight say, become tensors of no dimension; what the step takes from elsewhere stays what it was at the first call.
    The learning rate may change, also by a scheduler: it becomes a tensor here. On other devices, and where a step
    cannot be recorded, which is said, it runs as it is.

    Args:
        step: what is done with a batch: `step(x, y)`, with all of zero_grad, forward, backward, optimizer.step.
        model: whatever the step trains; its parameters and buffers are all that the step changes, but for
        optimizer: SGD, Adam or AdamW made with `fused=True`; None for a step that trains nothing, a prediction say.

    Example:
        >>> import torch, slimbayes as sb
        >>> net = sb.bayesianize(torch.nn.Linear(3, 2), sb.Rank1(members=2))
        >>> optimizer = torch.optim.Adam(net.parameters(), fused=True)
        >>> def step(x, y, weight):
        ...     optimizer.zero_grad()
        ...     loss = sb.elbo(sb.categorical(sb.sample(net, x), y), net, 100, kl_weight=weight).loss
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss.detach()
        >>> step = sb.recorded(step, net, optimizer)
        >>> step(torch.randn(8, 3), torch.zeros(8, dtype=torch.long), 0.5).shape
        torch.Size([])
    """
    for group in [] if optimizer is None else optimizer.param_groups:
        if not isinstance(optimizer, SGD | Adam) or not (group.get("fused") or group.get("capturable")):
            raise ValueError(
                f"recorded needs torch's SGD, Adam or AdamW made with fused=True, whose steps a graph can hold; got "
                f"{type(optimizer).__name__}."
            )
        if "capturable" in group:
            group["capturable"] = True  # steps are counted on the device
        if not isinstance(group["lr"], Tensor) and group["params"]:
            group["lr"] = torch.tensor(float(group["lr"]), device=group["params"][0].device)
    return Recorded(step, model, optimizer)
