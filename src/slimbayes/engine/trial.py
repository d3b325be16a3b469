"""A trial of the plain model: nothing random, nothing left behind, and a note of what its converted layers met. And
what a few of them tell: whether it seeds itself, what lasts from call to call, what it keeps of drawn weights.
"""

from __future__ import annotations

import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from slimbayes.engine import noise, passes
from slimbayes.engine.layout import (
    Dims,
    Unproven,
    arrays_of,
    leaves_of,
    map_arrays,
    padded,
    tree_map,
)
from slimbayes.engine.objects import (
    UNORDERED,
    attributes_of,
    copy_containers,
    open_objects,
    without_cache,
)
from slimbayes.engine.probe import Mask, Probe, other_numbers
from slimbayes.engine.quiet import Quiet, inside_func
from slimbayes.engine.sharing import finding_shareable
from slimbayes.engine.state import State, Trials, same_changes
from slimbayes.errors import SlimbayesWarning

_UNDER_WAY: ContextVar[bool] = ContextVar("slimbayes_trial", default=False)
_LOCK = threading.Lock()
_CACHES = (
    threading.RLock()
)  # one call at a time of models that keep something computed from drawn weights
_VALIDATED: list[
    bool
] = []  # as it was before each of the trials under way, in whatever thread


@contextmanager
def without_validation() -> Iterator[None]:
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
def undisturbed(
    model: nn.Module, inputs: Any, posteriors: Sequence[Any] = ()
) -> Iterator[Trials]:
    """Random numbers, what modules keep, and gradients are afterwards as they were. Compiled parts run as they were
    written: each trial would be compiled anew. Distributions do not look at their parameters: whether all rows' are
    valid would seem to lead the model.
    """
    devices = sorted(
        {a.device.index or 0 for a in map(padded, arrays_of(inputs)) if a.is_cuda}
    )
    trials, token = Trials(model, posteriors), _UNDER_WAY.set(True)
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices),
            warnings.catch_warnings(),
            without_validation(),
        ):
            warnings.simplefilter("ignore")
            with torch.compiler.set_stance("force_eager"):
                yield trials
    finally:
        _UNDER_WAY.reset(token)
        trials.restore()


@contextmanager
def no_autocast(devices: set[str]) -> Iterator[None]:
    if not devices:
        yield
        return
    with torch.autocast(devices.pop(), enabled=False), no_autocast(devices):
        yield


def takes_derivatives(error: Exception) -> bool:
    """Whether a model failed because its forward takes derivatives (forces of an energy), and gradients are off."""
    return not torch.is_grad_enabled() and "does not require grad" in str(error)


def run_probe(
    trials: Trials,
    inputs: Any,
    rows: int,
    before: Probe | None = None,
    taint: Mask | None = None,
) -> tuple[Probe, Any]:
    """Run the plain model once, with everything random in it made constant: what was met, and the outputs. Refuses
    weights that are used past their layer, and other calls than before.
    """
    probe, out = run_unchecked(trials, inputs, rows, before, taint)
    if probe.quiet.used:
        raise Unproven(
            f"the weight of {next(iter(probe.quiet.used))} is used past the layer's own forward"
        )
    if before is not None and len(before.visits) != len(probe.visits):
        raise Unproven(
            f"{before.visits[-1].name} and other layers are not called alike for more rows"
        )
    return probe, out


def run_unchecked(
    trials: Trials, inputs: Any, rows: int = 1, *compared: Any, random: bool = False
) -> tuple[Probe, Any]:
    """The same, which refuses neither; with `random` the model draws as it does."""
    quiet = Quiet(not trials.model.training, trials)
    probe = Probe([p.key for p in trials.posteriors], quiet, *compared)
    probe.rows = rows
    args, kwargs = copy_containers(inputs)
    try:
        still, devices = (
            nullcontext() if random else quiet,
            {p.device.type for p in trials.posteriors} or {"cpu"},
        )
        with finding_shareable(probe, trials.model), still, no_autocast(devices):
            out = passes.run(probe, trials.model, *args, **kwargs)
        probe.objects = any(
            isinstance(leaf, UNORDERED) or attributes_of(leaf)
            for leaf in leaves_of(out)
        )
        probe.changes, out = (
            trials.changes() if probe.before is None else {},
            open_objects(out),
        )
        return probe, out
    except RuntimeError as error:
        if not takes_derivatives(error):
            raise
    finally:
        trials.restore()
    torch.set_grad_enabled(True)  # until the trials are over, which began without
    return run_unchecked(trials, inputs, rows, *compared, random=random)


def run_drawn(trials: Trials, new: passes.Pass, inputs: Any) -> Any:
    """What the model gives with the draws of a pass, and nothing else at random."""
    model, (args, kwargs) = trials.model, copy_containers(inputs)
    try:
        with no_autocast({p.device.type for p in trials.posteriors}):
            passes.run(new, noise.make_draws, trials.posteriors, new)
            with Quiet(not model.training, trials):
                out = passes.run(new, model, *args, **kwargs)
        return tree_map(padded, open_objects(out))
    finally:
        trials.restore()


def fails(trials: Trials, inputs: Any) -> bool:
    """Whether these are inputs that the plain model cannot take."""
    try:
        run_probe(trials, inputs, 1)
    except Exception as error:
        return not isinstance(error, Unproven)
    return False


def seeds_itself(trials: Trials, twice: Any, rows: int, dims: Dims) -> bool:
    """Whether a model's random numbers are the same in each call, of a seed of its own, but others in each half."""
    one, other = (
        arrays_of(run_unchecked(trials, twice, rows, random=True)[1]) for _ in range(2)
    )
    halves = [
        padded(a).chunk(2, d) for a, d in zip(one, dims, strict=True) if d is not None
    ]
    same = all(map(torch.equal, map(padded, one), map(padded, other)))
    return same and any(
        relative_difference(*two) > 1e-5 for two in halves if len(two) == 2
    )


def _count_uses(probe: Probe) -> Counter[str]:
    """How often a run called each converted layer, or used a weight of it."""
    return Counter(visit.key for visit in probe.visits) + probe.quiet.used


@contextmanager
def forgetting_drawn_weights(
    tree: Any, inputs: Any, new: passes.Pass
) -> Iterator[None]:
    """A call after which modules have nothing left that they computed from drawn weights and would take for the next
    one's, such as a product of two or the features of a prompt: that has other draws. Looked for once in each mode.
    """
    model = tree.modules[0]
    mode = model.training, torch.is_grad_enabled()
    with _CACHES if tree.keeps_drawn.get(mode) else nullcontext():
        if not tree.keeps_drawn:
            _warn_of_ties(tree.modules)
        state = State(model)
        try:
            yield
            if mode not in tree.keeps_drawn and not inside_func():
                changed = bool(state.own and state.changes())
                if name := new.written():
                    state.restore()  # the next call is to fail, too
                    raise ValueError(
                        f"A forward writes into a parameter of {name}, which is drawn anew in each call: what it "
                        f"writes would be lost. Write to it outside of forward (if that is done in the first call, "
                        f"call the model before it is converted), or leave the layer as it is: exclude={name!r}."
                    )
                marked = changed and _marked(model, tree.posteriors, inputs, state)
                tree.keeps_drawn[mode] = marked or bool(state.caches)
        finally:
            state.forget()


def _warn_of_ties(modules: Sequence[nn.Module]) -> None:
    """Say which layers have one weight and were converted apart, so that each draws it anew."""
    owners: dict[int, Any] = {}
    layers: list[Any] = [m for m in modules if "posterior" in m._modules]
    for layer in layers:
        for weight in [
            p for p in layer._parameters.values() if p is not None and p.dim() > 1
        ]:
            other, own = (
                owners.setdefault(id(weight), layer),
                {id(p) for p in layer.posteriors()},
            )
            if own.isdisjoint(map(id, other.posteriors())):
                warnings.warn(
                    f"{layer.bayes_name} ({type(layer).__name__}) and {other.bayes_name} ({type(other).__name__}) "
                    f"have one weight, but were converted in different calls: each draws it by itself, and no plain "
                    f"model is like that. Convert both in one call of bayesianize, or give one a weight of its own.",
                    SlimbayesWarning,
                    stacklevel=9,
                )


def _marked(
    model: nn.Module, posteriors: Sequence[Any], inputs: Any, state: State
) -> bool:
    """Mark what a call left in the modules that spares the next one a converted layer; says whether there is any."""
    after, inputs = state.changes(), tree_map(without_cache, inputs)
    state.restore()
    try:
        with undisturbed(model, inputs, posteriors) as trials:
            first, found = run_unchecked(trials, inputs)[0], []
            for changes in (
                first.changes,
                *({place: change} for place, change in first.changes.items()),
            ):
                trials.write(changes)
                spared = _count_uses(first) - _count_uses(
                    run_unchecked(trials, inputs)[0]
                )
                if not spared and changes is first.changes:
                    break
                found += [*changes] if spared and len(changes) == 1 else []
        state.mark(found)
    except Exception:  # inputs that the model has written into, or a state that does not fit them any more
        return False
    finally:
        state.write(after)
    return bool(found)


def first_line(error: Exception) -> str:
    """The first line of what an error says; of one that says nothing, the line that raised it."""
    raised = [
        f"in {frame.name}: {frame.line}"
        for frame in traceback.extract_tb(error.__traceback__)[-1:]
    ]
    return next((line for line in (*str(error).splitlines(), *raised) if line), "")


def what_lasts(trials: Trials, inputs: Any, first: Probe, out: Any) -> str | None:
    """The name of what a run left in the modules, if it depends on the inputs and changes what a second one gives."""
    if not first.changes:
        return None
    name = trials.names(first.changes)[0]
    other = map_arrays(
        lambda i, a: (
            other_numbers(a, 0, True) if isinstance(a, Tensor) and a.dim() else a
        ),
        inputs,
    )
    try:
        if same_changes(first.changes, run_probe(trials, other, first.rows)[0].changes):
            return None
        trials.write(first.changes)
        second, given = run_probe(trials, inputs, first.rows)
        again = arrays_of(given)
    except Exception:  # a state that does not fit the inputs any more
        trials.restore()
        return name
    pairs = list(zip(map(padded, arrays_of(out)), map(padded, again), strict=False))
    alike = len(arrays_of(out)) == len(again) and all(
        a.shape == b.shape and relative_difference(a, b) < 1e-6 for a, b in pairs
    )
    return None if alike and _rows_in(first) == _rows_in(second) else name


def _rows_in(probe: Probe) -> list[float]:
    """Sums of what a run left of each row: a state that has not changed the outputs yet may change later ones."""
    left = [
        a
        for a in arrays_of(list(probe.changes.values()))
        if isinstance(a, Tensor) and probe.rows in a.shape
    ]
    return [float(a.detach().double().nan_to_num().sum()) for a in left]


def relative_difference(a: Tensor, b: Tensor) -> float:
    """Largest difference relative to the largest number."""
    if a.numel() == 0 or torch.equal(a, b):
        return 0.0
    if not a.is_floating_point():
        return float((a != b).any())
    a, b = (
        a.double().nan_to_num(0.123, 1e30, -1e30),
        b.double().nan_to_num(0.123, 1e30, -1e30),
    )
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))


def tolerance(model: nn.Module) -> float:
    """How far apart outputs may be that ought to be the same."""
    kinds = {(p.dtype, p.is_cuda) for p in model.parameters() if p.is_floating_point()}
    types = {dtype for dtype, _ in kinds}
    if types & {torch.bfloat16, torch.float16}:
        return 0.1
    return (
        1e-6
        if types == {torch.float64}
        else 1e-2
        if any(on_gpu for _, on_gpu in kinds)
        else 1e-3
    )
