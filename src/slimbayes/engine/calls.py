"""Calls of a converted model: what opens a pass, how many draws share a forward, and what happens where they cannot.

Sizes: S draws, B rows of the caller's batch, K members.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from slimbayes.engine import noise, passes
from slimbayes.engine.layout import Layout, NotJoined, arrays_of, is_cache, padded
from slimbayes.engine.locate import batch_dim_of as batch_dim_of
from slimbayes.engine.locate import call_outside, check_size, latest_of, warn_of_loop, warn_of_part, warn_of_unused
from slimbayes.engine.locate import layout_of as layout_of
from slimbayes.engine.modules import plan_once
from slimbayes.engine.objects import check_caches, copy_containers, stack_draws
from slimbayes.engine.passes import Pass, Unproven
from slimbayes.engine.quiet import inside_func
from slimbayes.engine.trial import forgetting_drawn_weights
from slimbayes.errors import SlimbayesWarning

Fold = Literal["auto"] | bool


class Scope(Pass):
    """A method other than forward: the layers it calls belong to one pass, and each row to one member.

    Its draws are made when the first layer asks, again after a backward pass, or when the number of rows changes. In a
    `whole` scope (generate) calls of the model itself share it, and rows are the sequences that came in, however many
    beams they become. Where several draws are `frozen`, it shares out those.
    """

    def __init__(self, module: nn.Module, posteriors: Any, whole: bool, rows: int, frozen: Pass | None) -> None:
        super().__init__(None, rows, held=True)
        self.frozen = frozen
        self.noise = dict.fromkeys([p.key for p in posteriors])  # type: ignore[assignment]
        self.module, self.posteriors, self.whole = module, posteriors, whole
        self.first = noise.random_member(posteriors[0].device) if frozen is None else 0
        self.inner: Pass | None = None
        self.layouts: dict[nn.Module, Layout] = {}  # of the modules that were called inside

    def located(self, module: nn.Module, args: Any, kwargs: Any) -> Layout:
        """Where rows lie in a call inside; in a whole scope as at the module's first call."""
        found = self.layouts.get(module) if self.whole else None  # later steps carry a cache that no proof can repeat
        if found is None:
            found = self.layouts[module] = layout_of(module, args, kwargs, passes.posteriors_of(module))
        return found

    def call(self, rows: int, layout: Layout) -> Pass:
        """The pass for one call inside."""
        if self.whole and rows and self.rows and rows % self.rows == 0:
            rows = self.rows
        if self.frozen is None and not needs_rows(self.posteriors):
            layout = replace(layout, apart=False)  # one draw for all, however many rows the parts are called with
        if self.inner is not None and self.inner.spent and self.frozen is None:
            self.inner = None
        if self.inner is None or (self.inner.rows != rows and self.inner.draws != 1):
            if self.inner is not None and layout.apart:
                said = (
                    f"A method of {type(self.module).__name__} calls its parts with {self.inner.rows} and {rows} rows"
                )
                how = "which share out draws in other ways: take one, write_out(model, j) inside frozen(model)."
                warnings.warn(f"{said}, {how}", SlimbayesWarning, stacklevel=6)
            self.inner = self._begin(rows, layout)
        if self.whole and self.inner.draws != 1 and not layout.apart and rows > 1:
            raise ValueError(
                f"Sequences cannot each have a draw: the rows of a part of {type(self.module).__name__} cannot be told "
                f"apart ({layout.why}). Take one draw for all of them, write_out(model, j) inside frozen(model)."
            )
        if self.frozen is not None and self.inner.draws == 1:
            return self.frozen.single(0, layout if layout.folds else None)
        return (self.frozen or self.inner).view(rows, layout if self.inner.draws != 1 else None)

    def _begin(self, rows: int, layout: Layout) -> Pass:
        if self.frozen is None:
            return _bare_pass(self.posteriors, rows, layout, self.first)
        if not layout.apart:
            warn_of_loop(layout, f"of the {self.frozen.total} draws that are held this call uses the first")
        return self.frozen.view(rows, layout) if layout.apart else self.frozen.single(0)


def call_module(module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a module that has converted layers in it: as part of the pass under way, or in one of its own."""
    key = passes.first_key(module)
    found = None if key is None else passes.of(key)
    if found is not None and found.opener is module and passes.recomputing(found):
        # A checkpoint around the whole call: it restores the random state, too.
        return _open(module, function, args, kwargs)
    if key is None or (found is not None and not found.held):
        return function(*args, **kwargs)
    if found is None or (isinstance(found, Scope) and found.module is module and not (found.whole or found.frozen)):
        return _open(module, function, args, kwargs)
    return _call_under_held_draws(found, module, function, args, kwargs)


def scope_of(module: nn.Module, args: Any, kwargs: Any, whole: bool = False) -> Scope | None:
    """The scope that a call of a method opens; None where a pass is under way, one draw is held or nothing drawn."""
    key = passes.first_key(module)
    found = None if key is None else passes.of(key)
    several = found is not None and found.held and found.total > 1 and not isinstance(found, Scope)
    if key is None or torch.compiler.is_compiling() or (found is not None and not several):
        return None
    arrays = arrays_of((args, kwargs)) if whole else []
    rows = padded(arrays[0]).shape[0] if arrays and padded(arrays[0]).dim() else 1
    return Scope(module, passes.posteriors_of(module), whole, rows, found)


def needs_rows(posteriors: Sequence[Any]) -> bool:
    """Whether a bare call has different draws for different rows."""
    return plan_once(posteriors, "needs rows", lambda: any(p.members > 1 or p.by_row for p in posteriors))


def _open(module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    posteriors = passes.posteriors_of(module)
    if torch.compiler.is_compiling() and needs_rows(posteriors) and latest_of(module) is None:
        return call_outside(module, args, kwargs)  # the compiler sees the next call, which it can take whole
    layout = layout_of(module, args, kwargs, posteriors) if needs_rows(posteriors) else None
    if kwargs:
        check_caches(kwargs)
    rows = 1
    if layout is not None:
        rows = layout.rows((args, kwargs))
        check_size(module, (args, kwargs), posteriors, layout)
        if _most_members(posteriors) > 1:
            warn_of_part(module, posteriors, rows)
    if layout is not None and not layout.apart and rows > 1:
        warn_of_loop(layout, "each call uses one draw for all rows, where rows would share out the members")
    new = _bare_pass(posteriors, rows, layout)
    new.opener = module
    try:
        return finish(new, posteriors, function, args, kwargs)
    except Unproven as error:
        assert layout is not None
        unfold(layout, error)
        return _open(module, function, args, kwargs)


def _most_members(posteriors: Sequence[Any]) -> int:
    return plan_once(posteriors, "most members", lambda: max(p.members for p in posteriors))


def _bare_pass(posteriors: Sequence[Any], rows: int, layout: Layout | None, first: Any = None) -> Pass:
    """Each row one draw, members starting at a random one; one draw for all rows where they cannot be told apart."""
    most = _most_members(posteriors)
    apart = layout is not None and layout.apart and rows > 0
    if first is None:
        first = noise.random_member(posteriors[0].device) if most > 1 else 0
    new = Pass(None if apart else 1, rows, first, rowwise=apart)
    new.layout = layout if apart else None
    return noise.draw(posteriors, new)


def finish(new: Pass, posteriors: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Make the draws of a pass, run, and let a backward pass find them again."""
    tree = getattr(posteriors, "tree", None)  # of all posteriors under a module, outside of a compiler
    kept = tree is not None and posteriors.keeps.get((tree.modules[0].training, torch.is_grad_enabled()))
    looks = kept is None or kept
    new.handed = [] if kept is None and not inside_func() else None

    def call_drawn() -> Any:
        noise.realise(posteriors, new)
        return function(*args, **kwargs)

    with forgetting_drawn_weights(posteriors, (args, kwargs), new) if looks else nullcontext():
        out = passes.run(new, call_drawn)
    warn_of_unused(posteriors, new, function, out)
    passes.remember(out, new)
    return out


def _call_under_held_draws(held: Pass, module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A call while draws are held: its rows are shared out among them."""
    posteriors = passes.posteriors_of(module)
    if isinstance(held, Scope):
        layout = held.located(module, args, kwargs)
        new = held.call(layout.rows((args, kwargs)), layout)
    elif held.draws == 1 and not any(p.late for p in posteriors):
        new = held.view(1, None)
    else:
        layout = layout_of(module, args, kwargs, posteriors)
        rows = layout.rows((args, kwargs))
        check_size(module, (args, kwargs), posteriors, layout)
        if not layout.apart and held.total > 1:
            what = f"of the {held.draws} draws that are held this call uses the first; sample(model, ...) runs all"
            warn_of_loop(layout, what)
        new = held.view(rows, layout) if layout.apart else held.single(0, layout if layout.folds else None)
    try:
        return finish(new, posteriors, function, args, kwargs)
    except Unproven as error:
        if isinstance(held, Scope):
            raise ValueError(f"{error}: take one draw, write_out(model, j) inside frozen(model).") from error
        unfold(layout, error)
        return _call_under_held_draws(held, module, function, args, kwargs)


def sampled(
    model: nn.Module,
    posteriors: Sequence[Any],
    args: Any,
    kwargs: Any,
    total: int,
    fold: Fold,
    held: Pass | None = None,
    split: bool = False,
    share: bool = False,
    seed: int | None = None,
) -> Any:
    """Outputs (S, B, ...) of one call under so many draws; `share` runs what comes before any draw once for all.

    `seed` also rules what the model draws by itself.
    """
    by_row = plan_once(posteriors, "by row", lambda: any(p.by_row or p.late for p in posteriors))
    alone = not split and not by_row and (total == 1 or fold is False)
    layout = Layout(keeps=True) if alone else layout_of(model, args, kwargs, posteriors)
    rows = max(layout.rows((args, kwargs)), 0)
    copies = 1 if split or fold is False else total
    if rows and not layout.covers((args, kwargs), copies):
        check_size(model, (args, kwargs), posteriors, layout, copies)
    if kwargs:
        check_caches(kwargs, total if held is not None else None)
    cached = layout.objects or any(map(is_cache, kwargs.values()))  # each has one draw's rows
    folds = layout.folds and fold is not False and rows > 0 and not cached
    if fold is True and total > 1 and not layout.folds and rows > 0:
        raise ValueError(
            f"fold=True: the draws of this model cannot share a forward: {layout.why}. Use fold='auto' or fold=False."
        )
    if fold == "auto" and total > 1 and not folds and rows > 0 and not cached:
        warn_of_loop(layout, "its draws run one after another")
    if split and not layout.apart:
        raise ValueError(
            f"rows='split' hands rows out to draws, but the rows of this model cannot be told apart: {layout.why}."
        )
    if split and rows % total:
        raise ValueError(
            f"rows='split' hands rows out to {total} draws (members x draws) evenly, but the batch has {rows} rows. "
            f"Use a multiple of {total}, or call model(x), which takes any number."
        )
    rows = rows // total if split else rows
    if held is not None:
        new = held.view(total * rows, layout)
    else:
        new = Pass(total, total * rows, rowwise=layout.apart and rows > 0)
        new.stream = None if seed is None else noise.Stream(seed)
        noise.draw(posteriors, new)
    if share and folds and total > 1 and not layout.random:  # what a random module gives differs between draws
        new.shared = layout.ahead
    # What is drawn late in compiled code comes from torch's generators, too, unless draws are numbered.
    own = None if held is not None and not (alone or layout.random) else seed
    try:
        with nullcontext() if own is None else noise.own_noise(own, posteriors[0].device):
            return run_draws(model, posteriors, args, kwargs, new, layout, folds, tile=not split)
    except Unproven as error:
        unfold(layout, error, fold)
        return sampled(model, posteriors, args, kwargs, total, fold, held, split, share, seed)


def unfold(layout: Layout, error: Unproven, fold: Fold = "auto") -> None:
    """A layer met what the proof did not foresee: from now on calls of this kind run draw by draw."""
    if fold is True:
        raise ValueError(f"The draws of this model cannot share a forward: {error}. Use fold=False.") from error
    layout.folds, layout.apart, layout.why = False, False, str(error)


def run_draws(
    model: nn.Module, posteriors: Any, args: Any, kwargs: Any, new: Pass, layout: Layout, folds: bool, tile: bool = True
) -> Any:
    """Outputs (S, B, ...) of a pass: all draws in one forward, or one after another."""
    total, own = new.draws or 1, (lambda inputs: inputs) if torch.compiler.is_compiling() else copy_containers
    if folds:
        new.layout = layout
        more, options = layout.tile((args, kwargs), total) if tile and total > 1 else own((args, kwargs))
        return layout.split(finish(new, posteriors, model, more, options), total, max(new.rows // total, 1))
    known, rows, parts = layout if layout.folds or layout.apart else None, new.rows // total, []
    for j in new.lasting.each(model, total) if layout.keeps and total > 1 else range(total):
        mine = {name: value.of(j) if isinstance(value, NotJoined) else value for name, value in kwargs.items()}
        more, options = own((args, mine) if tile else layout.narrow((args, mine), j * rows, rows))
        parts.append(finish(new.single(j, known), posteriors, model, more, options))
    return stack_draws(parts)


def total_draws(posteriors: Sequence[Any], draws: int) -> int:
    return plan_once(posteriors, "members", lambda: math.lcm(*(p.members for p in posteriors))) * int(draws)
