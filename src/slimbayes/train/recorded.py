"""A training step as one CUDA graph: the GPU repeats what it did once, and Python has no part in it.

Steps of small and middling networks wait for Python, and Bayesian ones more so, since they have more operations. A
recorded step costs what the GPU's work costs. The lab trains so, and compiles by `compiled`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from slimbayes.errors import SlimbayesWarning

T = TypeVar("T")
WARM_UP = (
    3  # calls before recording: autograd, optimizers and libraries set themselves up
)
# Inductor's thresholds for writing a value to memory that several kernels use. A norm of a scaled activation reads six
# tensors, of which one is large: by a GPU's defaults (4, 8, 30) the backward pass of a WRN-16-4 with rank-1 factors
# writes and reads it again, and moves 1.57 times the plain network's bytes; with these, 1.13 times
# (benchmarks/traffic.py).
FUSION = {
    "realize_reads_threshold": 16,
    "realize_acc_reads_threshold": 16,
    "realize_opcount_threshold": 100,
    # torch 2.11's compiler fails an assertion of its own when it joins batch norm's sums with a factor's.
    "triton.mix_order_reduction": False,
}


def moments(optimizer: Optimizer) -> list[Tensor]:
    """All tensors of an optimizer's state."""
    return [
        t
        for values in optimizer.state.values()
        for t in values.values()
        if isinstance(t, Tensor)
    ]


def record(
    work: Callable[[], T], state: list[Tensor], optimizer: Optimizer | None
) -> tuple[torch.cuda.CUDAGraph, T]:
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
            warnings.filterwarnings(
                "ignore", module="torch"
            )  # on streams; what slimbayes says is for the user
            for _ in range(WARM_UP):
                torch.clear_autocast_cache()  # else the graph would read weights that were lowered before it
                work()
        torch.cuda.current_stream().wait_stream(stream)
        torch.clear_autocast_cache()
        with torch.cuda.graph(graph):
            found = work()
        return graph, found
    except BaseException:
        # A recording that breaks off leaves the generator believing that it goes on: whoever drew next would fail.
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())
        raise
    finally:
        torch.clear_autocast_cache()
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

    def __init__(
        self, step: Callable[..., Any], model: nn.Module, optimizer: Optimizer | None
    ) -> None:
        self.step, self.optimizer = step, optimizer
        groups = [] if optimizer is None else optimizer.param_groups
        self.modules, every = (
            list(model.modules()),
            [*model.parameters(), *(p for g in groups for p in g["params"])],
        )
        self.state, self.parameters = (
            [*every, *model.buffers()],
            list(dict.fromkeys(every)),
        )
        self.rates: list[Tensor] = []
        self.moments = None if optimizer is None else optimizer.state
        self.recordings: dict[Hashable, _Recording | None] = {}
        self._tie_rates()

    def __call__(self, *args: Any, **named: Any) -> Any:
        leaves, spec = tree_flatten((args, named))
        if not any(_on_gpu(leaf) for leaf in leaves):
            return self.step(*args, **named)
        self._tie_rates()
        if (
            self.optimizer is not None and self.moments is not self.optimizer.state
        ):  # others were loaded
            self.recordings.clear()
            self.moments = self.optimizer.state
        key = (spec, *map(_kind, leaves), *self._settings())
        if key not in self.recordings:
            self.recordings[key] = self._recorded(leaves, spec)
        found = self.recordings[key]
        if found is None:
            return self.step(*args, **named)
        for static, given in zip(found.inputs, filter(_varies, leaves), strict=True):
            static.copy_(given) if isinstance(given, Tensor) else static.fill_(
                float(given)
            )
        found.graph.replay()
        return tree_map_only(Tensor, Tensor.clone, found.outputs)

    def _tie_rates(self) -> None:
        """Have graphs read each group's learning rate, whoever has replaced it by another number or tensor."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        for i, group in enumerate(groups):
            if "capturable" in group:
                group["capturable"] = True  # steps are counted on the device
            device = next((p.device for p in group["params"]), torch.device("cpu"))
            if i == len(self.rates):
                self.rates.append(torch.zeros((), device=device))
            if group["lr"] is not self.rates[i] or group["lr"].device != device:
                self.rates[i] = (
                    self.rates[i]
                    .to(device)
                    .copy_(torch.as_tensor(group["lr"]).reshape(()))
                )
                group["lr"] = self.rates[i]

    def _settings(self) -> list[Hashable]:
        """What a graph has fixed besides arguments: everything but values of tensors on the device."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        values = [
            v
            for group in groups
            for name, v in group.items()
            if name != "params" and not _on_gpu(v)
        ]
        how = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        auto = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        trained = [id(p) for group in groups for p in group["params"]]
        modes = [(p.requires_grad, p.data_ptr()) for p in self.parameters]
        return [
            *how,
            *auto,
            *map(repr, values),
            *trained,
            *modes,
            *(m.training for m in self.modules),
        ]

    def _recorded(self, leaves: list[Any], spec: Any) -> _Recording | None:
        device = next(leaf.device for leaf in leaves if _on_gpu(leaf))

        def work() -> Any:
            args, named = spec.unflatten(static)
            outputs = tree_map_only(Tensor, Tensor.detach, self.step(*args, **named))
            for leaf in tree_leaves(outputs):
                if not _on_gpu(leaf) and not isinstance(leaf, float | _CONSTANTS):
                    raise TypeError(
                        f"it returns a {type(leaf).__name__}; tensors on the GPU can be returned"
                    )
            return outputs

        try:
            static = [_static(leaf, device) for leaf in leaves]
            graph, outputs = record(work, self.state, self.optimizer)
        except (
            Exception
        ) as error:  # whatever a step does that cannot be recorded, it can still be run
            lines = str(error).splitlines() or [""]
            warnings.warn(
                f"slimbayes cannot record this step as a CUDA graph and runs it operation by operation "
                f"({type(error).__name__}: {lines[0]}).",
                SlimbayesWarning,
                stacklevel=3,
            )
            return None
        return _Recording(
            graph,
            [s for s, leaf in zip(static, leaves, strict=True) if _varies(leaf)],
            outputs,
        )


_CONSTANTS = (
    int | str | None | np.integer | np.bool_ | torch.dtype | torch.device | Enum
)


def _on_gpu(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_cuda


def _varies(leaf: Any) -> bool:
    return isinstance(leaf, Tensor | float | np.floating)


def _kind(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    return (
        float
        if _varies(leaf)
        else (type(leaf), leaf if isinstance(leaf, _CONSTANTS) else None)
    )


def _static(leaf: Any, device: torch.device) -> Any:
    """What a graph reads in an argument's place. On the device, whose kernels take a CPU's number as it was once."""
    if isinstance(leaf, Tensor):
        if leaf.requires_grad:
            raise TypeError(
                "an argument requires a gradient, which a recording cannot give back; detach it"
            )
        return leaf.detach().to(device, copy=True)
    if not _varies(leaf) and not isinstance(leaf, _CONSTANTS):
        raise TypeError(
            f"an argument is a {type(leaf).__name__}, whose contents cannot be seen; pass tensors, numbers, words, or "
            f"tuples, lists and dicts of them"
        )
    return torch.tensor(float(leaf), device=device) if _varies(leaf) else leaf


def recorded(
    step: Callable[..., Any], model: nn.Module, optimizer: Optimizer | None = None
) -> Recorded:
    """The same step, which a GPU repeats without Python: a CUDA graph, recorded when shapes are new.

    All that differs between calls must come as an argument, in tuples, lists or dicts if you like. Tensors are copied
    into the graph, and floats, a KL's weight say, become tensors of no dimension; for each other value, a whole number
    say, there is a recording of its own. What the step takes from elsewhere stays what it was at the first call. The
    learning rate may change, also by a scheduler: it becomes a tensor here. On other devices, and where a step cannot
    be recorded, which is said, it runs as it is.

    Args:
        step: what is done with a batch: `step(x, y)`, with all of zero_grad, forward, backward, optimizer.step. It may
            return tensors, and tuples, lists or dicts of them.
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
        if not isinstance(optimizer, SGD | Adam) or not (
            group.get("fused") or group.get("capturable")
        ):
            raise ValueError(
                f"recorded needs torch's SGD, Adam or AdamW made with fused=True, whose steps a graph can hold; got "
                f"{type(optimizer).__name__}."
            )
        if group.get("dampening"):
            raise ValueError(
                "recorded cannot hold SGD's dampening, which leaves out the first step; use 0."
            )
    return Recorded(step, model, optimizer)


_CODE = {
    "CLOSURE_MATCH",
    "FUNCTION_MATCH",
    "CLASS_MATCH",
    "BUILTIN_MATCH",
    "MODULE_MATCH",
    "DUPLICATE_INPUT",
}
_LIBRARIES = ("G['__import_slimbayes", "G['__import_torch", "G['__builtins_dict__")


def _keep_guards_of_values(guards: Sequence[Any]) -> list[bool]:
    """Which of a compiler's guards stay: all but those on code of libraries, and on defaults of its arguments."""
    return [
        not (
            guard.name.startswith(_LIBRARIES)
            and (guard.guard_type in _CODE or "defaults__" in guard.name)
        )
        for guard in guards
    ]


def compiled(
    model: Callable[..., Any],
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    **how: Any,
) -> Any:
    """torch.compile(model) with settings of its compiler under which scaling activations costs least.

    Factors and what norms do to scaled activations are computed anew where they are used, and not written to memory.
    Before each call the compiler looks whether what it compiled still holds, but not whether somebody has replaced
    functions and classes of torch, Python or slimbayes meanwhile: those are hundreds of looks. The numbers are those of
    `torch.compile`, up to its order of operations. Compile the model, not the call to `sample`:
    `fast = sb.compiled(net)`, then `sb.sample(fast, x)`.

    Args:
        model: converted or not, or a function; it stays as it is.
        mode, options, how: those of `torch.compile` for its own backend; options come before ours.

    Example:
        >>> import torch, slimbayes as sb
        >>> net = sb.bayesianize(torch.nn.Linear(3, 2), sb.Rank1(members=2))
        >>> fast = sb.compiled(net, dynamic=False)  # compiles when it is first called
    """
    if how.get("backend", "inductor") != "inductor":
        raise ValueError(
            f"compiled is for torch's own backend, inductor; call torch.compile for {how['backend']!r}."
        )
    import torch._inductor as inductor  # slow to import

    known = set(inductor.list_options())
    ours: dict[str, Any] = {
        name: value for name, value in FUSION.items() if name in known
    }
    ours["guard_filter_fn"] = _keep_guards_of_values
    by_mode = inductor.list_mode_options(mode) if mode else {}
    return torch.compile(model, options=ours | by_mode | (options or {}), **how)
