"""Calls of a converted model: what opens a pass, how many draws share a forward, and what happens where they cannot.

    model(x)                       call_module -> _open_pass -> run_pass
    model(x) inside `fixed_draws`  call_module -> _call_under_held_draws -> run_pass
    model.encode(x)                scope_of, then every call inside as inside `fixed_draws`
    sample(model, x), predict      run_sampled -> run_draws -> run_pass, once or for each draw

Sizes: S draws, B rows of the caller's batch, K members.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import nn

from slimbayes.engine import noise, passes
from slimbayes.engine.bare import Scope, bare_pass, most_members, needs_rows
from slimbayes.engine.layout import Layout, Unproven
from slimbayes.engine.locate import (
    call_outside,
    check_size,
    latest_of,
    layout_of,
    warn_of_loop,
    warn_of_part,
    warn_of_unused,
)
from slimbayes.engine.modules import first_key, plan_once
from slimbayes.engine.objects import (
    NotJoined,
    check_caches,
    copy_containers,
    is_cache,
    keep_caches_whole,
    stack_draws,
)
from slimbayes.engine.passes import Pass
from slimbayes.engine.quiet import inside_func
from slimbayes.engine.trial import forgetting_drawn_weights

Parallel = Literal["auto"] | bool


def call_module(
    module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Call a module that has converted layers in it: as part of the pass under way, or in one of its own."""
    key = first_key(module)
    found = None if key is None else passes.pass_of(key)
    if found is not None and found.opener is module and passes.recomputing(found):
        # A checkpoint around the whole call: it restores the random state, too.
        return _open_pass(module, function, args, kwargs)
    if key is None or (found is not None and not found.held):
        return function(*args, **kwargs)
    if found is None or (
        isinstance(found, Scope)
        and found.module is module
        and not (found.whole or found.fixed)
    ):
        return _open_pass(module, function, args, kwargs)
    return _call_under_held_draws(found, module, function, args, kwargs)


def _open_pass(
    module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """A bare call: in a pass of its own, whose rows share out the members."""
    posteriors, layout, rows = passes.posteriors_of(module), None, 1
    if needs_rows(posteriors):
        if torch.compiler.is_compiling() and latest_of(module) is None:
            return call_outside(
                module, args, kwargs
            )  # the compiler sees the next call, which it can take whole
        layout = layout_of(module, args, kwargs, posteriors)
        rows = layout.rows((args, kwargs))
    if kwargs:
        check_caches(kwargs)
    if layout is not None:
        check_size(module, (args, kwargs), posteriors, layout)
        if most_members(posteriors) > 1:
            warn_of_part(module, posteriors, rows)
        if not layout.rowwise and rows > 1:
            warn_of_loop(
                layout,
                "each call uses one draw for all rows, where rows would share out the members",
            )
    new = bare_pass(posteriors, rows, layout)
    new.opener = module
    try:
        return run_pass(new, posteriors, function, args, kwargs)
    except Unproven as error:
        assert layout is not None
        unfold(layout, error)
        return _open_pass(module, function, args, kwargs)


def run_pass(
    new: Pass, posteriors: Any, function: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Make the draws of a pass, run, and let a backward pass find them again."""
    tree = getattr(
        posteriors, "tree", None
    )  # of all posteriors under a module, outside of a compiler
    known = (
        None
        if tree is None
        else tree.keeps_drawn.get((tree.modules[0].training, torch.is_grad_enabled()))
    )
    looks = tree is not None and (known is None or known)
    new.handed = [] if looks and known is None and not inside_func() else None

    def call_drawn() -> Any:
        noise.make_draws(posteriors, new)
        return function(*args, **kwargs)

    with (
        forgetting_drawn_weights(tree, (args, kwargs), new) if looks else nullcontext()
    ):
        out = passes.run(new, call_drawn)
    warn_of_unused(posteriors, new, function, out)
    passes.remember(out, new)
    return out


def _call_under_held_draws(
    held: Pass, module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
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
        if not layout.rowwise and held.total > 1:
            what = f"of the {held.draws} draws that are held this call uses the first; sample(model, ...) runs all"
            warn_of_loop(layout, what)
        new = (
            held.view(rows, layout)
            if layout.rowwise
            else held.single(0, layout if layout.folds else None)
        )
    try:
        return run_pass(new, posteriors, function, args, kwargs)
    except Unproven as error:
        if isinstance(held, Scope):
            raise ValueError(
                f"{error}: take one draw, materialize(model, draw=j) inside fixed_draws(model)."
            ) from error
        unfold(layout, error)
        return _call_under_held_draws(held, module, function, args, kwargs)


def held_draws(what: str, posteriors: Sequence[Any], seed: noise.Seed) -> Pass | None:
    """The draws that `fixed_draws` holds for a model, which no seed can change; refused inside its own forward."""
    held = passes.pass_of(posteriors[0].key) if posteriors else None
    if held is None or passes.recomputing(held):
        return None
    if not held.held:
        raise ValueError(
            f"{what} was called inside a forward pass of the same model; call it from outside."
        )
    held = held.fixed if isinstance(held, Scope) else held
    if held is not None and seed is not None:
        raise ValueError(
            f"{what}(..., seed=) inside `fixed_draws` would change nothing: give the seed to fixed_draws."
        )
    return held


def run_sampled(
    model: nn.Module,
    posteriors: Sequence[Any],
    args: Any,
    kwargs: Any,
    total: int,
    parallel: Parallel,
    held: Pass | None = None,
    split: bool = False,
    share: bool = False,
    seed: int | None = None,
) -> Any:
    """Outputs (S, B, ...) of one call under so many draws; `share` runs what comes before any draw once for all.

    `seed` also rules what the model draws by itself.
    """
    by_row = plan_once(
        posteriors, "by row", lambda: any(p.by_row or p.late for p in posteriors)
    )
    needs_layout = split or by_row or (total > 1 and parallel is not False)
    layout = (
        layout_of(model, args, kwargs, posteriors)
        if needs_layout
        else Layout(stateful=True)
    )
    rows = max(layout.rows((args, kwargs)), 0)
    copies = 1 if split or parallel is False else total
    if rows and not layout.covers((args, kwargs), copies):
        check_size(model, (args, kwargs), posteriors, layout, copies)
    if kwargs:
        check_caches(kwargs, total if held is not None else None)
    cached = layout.objects or any(
        map(is_cache, kwargs.values())
    )  # each has one draw's rows
    folds = layout.folds and parallel is not False and rows > 0 and not cached
    if parallel is True and total > 1 and not layout.folds and rows > 0:
        raise ValueError(
            f"parallel=True: the draws of this model cannot share a forward: {layout.why}. Use parallel='auto' or "
            f"parallel=False."
        )
    if parallel == "auto" and total > 1 and not folds and rows > 0 and not cached:
        warn_of_loop(layout, "its draws run one after another")
    if split and not layout.rowwise:
        raise ValueError(
            f"rows='split' hands rows out to draws, but the rows of this model cannot be told apart: {layout.why}."
        )
    if split and rows % total:
        raise ValueError(
            f"rows='split' hands rows out to {total} draws evenly, but the batch has {rows} rows. "
            f"Use a multiple of {total}, or call model(x), which takes any number."
        )
    rows = rows // total if split else rows
    if held is not None:
        new = held.view(total * rows, layout)
    else:
        new = Pass(total, total * rows, rowwise=layout.rowwise and rows > 0)
        new.stream = None if seed is None else noise.Stream(seed)
        noise.draw(posteriors, new)
    if (
        share and folds and total > 1 and not layout.random
    ):  # what a random module gives differs between draws
        new.shared = layout.shareable
    # What is drawn late in compiled code comes from torch's generators, too, unless draws are numbered.
    own = None if held is not None and needs_layout and not layout.random else seed
    try:
        with (
            nullcontext() if own is None else noise.own_noise(own, posteriors[0].device)
        ):
            return run_draws(
                model, posteriors, args, kwargs, new, layout, folds, tile=not split
            )
    except Unproven as error:
        unfold(layout, error, parallel)
        return run_sampled(
            model, posteriors, args, kwargs, total, parallel, held, split, share, seed
        )


def unfold(layout: Layout, error: Unproven, parallel: Parallel = "auto") -> None:
    """A layer met what the proof did not foresee: from now on calls of this kind run draw by draw."""
    if parallel is True:
        raise ValueError(
            f"The draws of this model cannot share a forward: {error}. Use parallel=False."
        ) from error
    layout.run_one_by_one(str(error))


def run_draws(
    model: nn.Module,
    posteriors: Any,
    args: Any,
    kwargs: Any,
    new: Pass,
    layout: Layout,
    folds: bool,
    tile: bool = True,
) -> Any:
    """Outputs (S, B, ...) of a pass: all draws in one forward, or one after another."""
    total, own = (
        new.draws or 1,
        (lambda inputs: inputs) if torch.compiler.is_compiling() else copy_containers,
    )
    if folds:
        new.layout = layout
        more, options = (
            layout.tile((args, kwargs), total)
            if tile and total > 1
            else own((args, kwargs))
        )
        out = run_pass(new, posteriors, model, more, options)
        if total > 1 and not isinstance(out, torch.Tensor):
            out = keep_caches_whole(out, total)
        return layout.split(out, total, max(new.rows // total, 1))
    known, rows, parts = (
        layout if layout.folds or layout.rowwise else None,
        new.rows // total,
        [],
    )
    for j in (
        new.lasting.each(model, total)
        if layout.stateful and total > 1
        else range(total)
    ):
        mine = {
            name: value.of(j) if isinstance(value, NotJoined) else value
            for name, value in kwargs.items()
        }
        more, options = own(
            (args, mine) if tile else layout.narrow((args, mine), j * rows, rows)
        )
        parts.append(run_pass(new.single(j, known), posteriors, model, more, options))
    return stack_draws(parts)


def count_members(posteriors: Sequence[Any]) -> int:
    """K, the number of members of a model with these posteriors."""
    return plan_once(
        posteriors, "members", lambda: math.lcm(*(p.members for p in posteriors))
    )


def count_draws(posteriors: Sequence[Any], draws: int | None) -> int:
    """S, the number of draws that a caller asked for: by default one for each member."""
    return count_members(posteriors) if draws is None else int(draws)
