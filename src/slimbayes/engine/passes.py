"""A pass: which draw each row of a batch gets, and the noise behind the draws.

A draw belongs to a forward pass of the whole model, not to one layer call: a module called twice, or tied weights, see
one weight sample. The pass under way is found through a context variable, so threads, tasks, nested calls and recursion
keep apart, and nothing of it stays on a module. Whoever opened a pass closes it.

Layout. Rows are cut into consecutive blocks, one block per draw: rows [j*B:(j+1)*B] belong to draw j, and draw j
belongs to member (first + j) mod K. In a bare call there are K blocks, of as equal size as R allows, and `first` is
random, so every row gets one draw of a uniformly random member.

Sizes: S draws, R rows of the batch, B rows per draw, K members.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slimbayes.engine.blocks import spread_of
from slimbayes.engine.layout import Layout, Unproven, arrays_of
from slimbayes.engine.modules import posteriors_of as posteriors_of
from slimbayes.engine.state import Lasting


class Noise(NamedTuple):
    """Standard normals of one pass for one posterior: one line for each block of rows, and one for each row.

    Where kernels make the numbers of rows as they need them, there is a seed instead, and `row` is empty, (R, 0).
    """

    block: Tensor
    row: Tensor
    seed: Tensor | None = None
    salt: int = 0  # tells the posteriors of a pass apart
    first_row: int = 0  # of a view

    def single(self, index: int, rows: int) -> Noise:
        """Those of one block, which has so many rows, as all blocks have."""
        start = index * rows
        own = self.block[index : index + 1], self.row[start : start + rows]
        return Noise(*own, self.seed, self.salt, self.first_row + start)


class Pass:
    """The layout of one call and the draws in it."""

    probing = False  # a proof of rows is no pass, but takes its place
    watched = False  # whether a method that holds it is looked at

    def __init__(
        self,
        draws: int | None,
        rows: int,
        first: int | Tensor = 0,
        rowwise: bool = True,
        held: bool = False,
    ) -> None:
        # Which row gets which draw.
        self.draws = (
            draws  # None in a bare call: each posterior then has one draw per member
        )
        self.total = draws or 1  # also for a view of one draw
        self.index: int | None = None  # which draw of a larger pass this view shows
        self.rows = rows  # of the call under way
        self.first = first
        self.rowwise = (
            rowwise and not held
        )  # whether single rows may have noise of their own
        self.layout: Layout | None = None
        # What draws are made from.
        self.noise: dict[str, Noise] = {}  # by key of a posterior
        self.joint: dict[
            tuple[str, ...], Noise
        ] = {}  # the same of several posteriors side by side, by their keys
        self.centred = (
            False  # whether draws are the posterior's centre: nothing is random
        )
        self.keys: dict[
            str, Tensor
        ] = {}  # numbers (S,) from which a posterior draws while its layer runs
        self.stream: Any = (
            None  # where random numbers come from if not from torch's own generators
        )
        self.masks: dict[
            str, list[Tensor]
        ] = {}  # drawn for all draws while the first of them ran
        # Where it stands among other passes, and in time.
        self.held = held  # open for many calls, each of which is a view of it
        self.outer: Pass | None = None
        self.opener: Any = None  # the module whose call opened it
        self.task = -1
        self.spent: list[bool] = []  # filled when a backward pass has gone through it
        # In a first call: drawn weights that code past their layers has read, by name, and copies of these.
        self.handed: list[tuple[str, Tensor, Tensor]] | None = None
        # Of layers that have run, in any call: their keys, and, where their own forward reads weights, which it read.
        self.met: dict[Any, None] = {}
        self.lasting = (
            Lasting()
        )  # what draws that run one after another left in the modules
        self.shared: dict[int, tuple[Any, Any]] | None = (
            None  # modules that run once for all draws
        )
        self.waiting: list[nn.Module] = []  # of those, the ones under way
        self._begin_call()

    def _begin_call(self) -> None:
        """Nothing has been made or met yet."""
        self.values: dict[str, Any] = {}  # draws made from noise, by key of a posterior
        self.joined: list[Any] = []  # parameters side by side that draws were made from
        self.unbound: dict[
            Any, Any
        ] = {}  # tensors with a line for each draw, and these lines
        self.calls: dict[str, int] = {}  # how often each posterior was asked
        self.substitutes: dict[
            tuple[str, str], Tensor | None
        ] = {}  # what a layer's own forward reads as its weights
        self.drawn_yet = False  # whether a layer has used its draw

    def put(self, key: str, noise: Noise) -> None:
        """Give a posterior noise of the caller's, instead of what was drawn."""
        self.noise[key] = noise
        self.joint = {}  # has what was drawn

    def blocks(self, posterior: Any) -> int:
        """How many blocks of rows this posterior has draws for."""
        return posterior.members if self.draws is None else self.draws

    def view(self, rows: int, layout: Layout | None) -> Pass:
        """One call of a held pass: the same draws on so many rows."""
        new = copy.copy(self)
        new._begin_call()
        new.rows, new.layout, new.held = rows, layout, False
        if not self.held:  # else numbers are held, not what they made: parameters and types may differ between calls
            new.values = self.values
        return new

    def single(self, index: int, layout: Layout | None = None) -> Pass:
        """Draw `index` alone, on its own rows."""
        if (
            self.draws == self.total == 1
            and self.index is None
            and not self.held
            and not self.values
        ):  # all there is
            self.layout = layout
            return self
        new = self.view(self.rows // (self.draws or 1), layout)
        new.draws, new.first, new.index, new.values, new.joint = (
            1,
            self.first + index,
            index,
            {},
            {},
        )
        new.noise = {
            key: noise.single(index, new.rows) for key, noise in self.noise.items()
        }
        new.keys = {
            key: numbers[index : index + 1] for key, numbers in self.keys.items()
        }
        return new

    def take(self, index: Tensor) -> Pass:
        """Some of the draws, by number, where rows share them."""
        assert not self.rowwise
        new = self.view(self.rows, self.layout)
        new.draws, new.total, new.values, new.joint, new.lasting = (
            len(index),
            len(index),
            {},
            {},
            Lasting(),
        )
        new.noise = {
            key: Noise(noise.block[index], noise.row)
            for key, noise in self.noise.items()
        }
        new.keys = {key: numbers[index] for key, numbers in self.keys.items()}
        return new

    def hand_out(self, name: str, value: Tensor) -> Tensor:
        """A drawn weight for code past its layer, which may read it."""
        if self.handed is not None and not value.is_meta:
            self.handed.append((name, value, value.detach().clone()))
        return value

    def written(self) -> str | None:
        """The name of a layer whose drawn weight somebody wrote into."""
        handed, self.handed = self.handed or (), None
        other = (
            n
            for n, v, old in handed
            if v.shape != old.shape or bool(((v != old) & (old == old)).any())
        )
        return next(other, None)

    def pick(self, posterior: Any, parameter: Tensor, count: int) -> Tensor:
        """Lay a parameter (K, ...) out by the member of each block, or of each row: (count, ...)."""
        blocks = self.blocks(posterior)
        return spread_of(
            posterior.members, blocks, count, self.first, posterior.device
        ).laid(parameter.unsqueeze(1))

    def dim(self, key: str, x: Tensor) -> int:
        """The dimension of x that holds rows, as proven for this layer; -1 where one row stands for all."""
        one = (
            self.draws == 1 and not self.rowwise
        )  # for all rows: where they lie does not matter
        found = None if self.layout is None else self.layout.dims.get((key, x.dim()))
        if found is None or self.layout is None:
            if one:
                return 0
            if self.layout is None:
                raise Unproven("a layer that the proof of rows has not met")
            raise Unproven(
                f"a layer met an input of {x.dim()} dimensions, unlike those that its rows were located in"
            )
        if (
            one
            or found < 0
            or torch.compiler.is_compiling()
            or x.shape[found] == self.rows
        ):
            return found
        if x.shape[found] == 1 or (
            x.shape[found] % self.rows and (key, x.dim()) not in self.layout.merged
        ):
            raise Unproven(
                f"a layer met {x.shape[found]} of {self.rows} rows, where it had all when located"
            )
        return found


# The pass under way.

_PASS: ContextVar[Pass | None] = ContextVar("slimbayes_pass", default=None)


_TRACED = (
    threading.local()
)  # the same for code that torch.compile traces, which cannot read context variables
_BACKWARD: dict[
    int, weakref.ref[Pass]
] = {}  # by graph task: the pass whose part of the graph is run backwards


def _traced() -> Pass | None:
    return getattr(_TRACED, "current", None)


def innermost() -> Pass | None:
    """The pass under way, or the one whose graph a backward pass is going through (gradient checkpointing runs layers
    again).
    """
    if torch.compiler.is_compiling():
        return _traced()
    found, task = _PASS.get(), torch._C._current_graph_task_id()
    if task != -1 and (found is None or found.task != task):
        recorded = _BACKWARD.get(task)
        return found if recorded is None else _again(recorded())
    return found


def _again(done: Pass | None) -> Pass | None:
    """What a checkpoint meets that runs parts of a pass again. A reentrant one, the kind without hooks for saved
    tensors, goes backwards through all that it makes: draws that layers share are then made anew for each.
    """
    if (
        done is None
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    ):
        return done
    new = copy.copy(done)
    new.values, new.unbound = {}, {}
    return new


def recomputing(found: Pass) -> bool:
    """Whether a pass is not under way, but gone through backwards: gradient checkpointing runs parts of it again."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._current_graph_task_id() not in (-1, found.task)
    )


def pass_of(key: str) -> Pass | None:
    """The innermost pass under way that has draws of this posterior."""
    found = innermost()
    while found is not None and key not in found.noise:
        found = found.outer
    return found


def met_by(key: str, x: Tensor) -> tuple[Pass, int]:
    """The pass under way that has draws of this posterior, and the dimension of an input that holds rows, as proven."""
    found = pass_of(key)
    assert found is not None
    return found, found.dim(key, x)


def run(new: Pass, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function while a pass is under way; it ends with the call, whatever is raised."""
    new.outer, before = innermost(), _traced()
    if torch.compiler.is_compiling():
        _TRACED.current = new
        try:
            return function(*args, **kwargs)
        finally:
            _TRACED.current = before
    new.task = torch._C._current_graph_task_id()
    token = _PASS.set(new)
    try:
        _TRACED.current = new
        return function(*args, **kwargs)
    finally:
        _TRACED.current = before
        _PASS.reset(token)


@contextmanager
def holding(new: Pass) -> Iterator[None]:
    """Keep a pass open for many calls."""
    new.outer = innermost()
    token = _PASS.set(new)
    try:
        _TRACED.current = new
        yield
    finally:
        _PASS.reset(token)
        _TRACED.current = (
            _PASS.get()
        )  # not what was there before: another task may have left it


def remember(outputs: Any, done: Pass) -> None:
    """Let the backward pass through these outputs find the pass again: gradient checkpointing recomputes layers then.

    Autograd runs nodes in the reverse order of their creation: all of a later pass is done when an earlier output is
    reached.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return

    def restore(gradients: Any) -> None:
        done.spent.append(True)
        while len(_BACKWARD) > 16:
            _BACKWARD.pop(next(iter(_BACKWARD)), None)
        _BACKWARD[torch._C._current_graph_task_id()] = weakref.ref(done)

    for leaf in (outputs,) if type(outputs) is Tensor else arrays_of(outputs):
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            leaf.grad_fn.register_prehook(restore)
