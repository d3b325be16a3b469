"""Passes that nobody gave a number of draws: of a bare call, whose rows share out the members, and of a method, whose
calls belong together.

Sizes: K members.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from slimbayes.engine import noise, passes
from slimbayes.engine.layout import Layout, arrays_of, padded
from slimbayes.engine.locate import layout_of, warn_of_loop
from slimbayes.engine.modules import first_key, plan_once
from slimbayes.engine.passes import Pass
from slimbayes.errors import SlimbayesWarning


def needs_rows(posteriors: Sequence[Any]) -> bool:
    """Whether a bare call has different draws for different rows."""
    return plan_once(
        posteriors,
        "needs rows",
        lambda: any(p.members > 1 or p.by_row for p in posteriors),
    )


def most_members(posteriors: Sequence[Any]) -> int:
    return plan_once(
        posteriors, "most members", lambda: max(p.members for p in posteriors)
    )


def bare_pass(
    posteriors: Sequence[Any], rows: int, layout: Layout | None, first: Any = None
) -> Pass:
    """Each row one draw, members starting at a random one; one draw for all rows where they cannot be told apart."""
    most = most_members(posteriors)
    rowwise = layout is not None and layout.rowwise and rows > 0
    if first is None:
        first = noise.random_member(posteriors[0].device) if most > 1 else 0
    new = Pass(None if rowwise else 1, rows, first, rowwise)
    new.layout = layout if rowwise else None
    return noise.draw(posteriors, new)


class Scope(Pass):
    """A method other than forward: the layers it calls belong to one pass, and each row to one member.

    Its draws are made when the first layer asks, again after a backward pass, or when the number of rows changes. In a
    `whole` scope (generate) calls of the model itself share it, and rows are the sequences that came in, however many
    beams they become. Where `fixed_draws` holds several draws, it shares out those.
    """

    def __init__(
        self,
        module: nn.Module,
        posteriors: Any,
        whole: bool,
        rows: int,
        fixed: Pass | None,
    ) -> None:
        super().__init__(None, rows, held=True)
        self.fixed = fixed
        self.noise = dict.fromkeys([p.key for p in posteriors])  # type: ignore[assignment]
        self.module, self.posteriors, self.whole = module, posteriors, whole
        self.first = noise.random_member(posteriors[0].device) if fixed is None else 0
        self.inner: Pass | None = None
        self.layouts: dict[
            nn.Module, Layout
        ] = {}  # of the modules that were called inside

    def located(self, module: nn.Module, args: Any, kwargs: Any) -> Layout:
        """Where rows lie in a call inside; in a whole scope as at the module's first call."""
        found = (
            self.layouts.get(module) if self.whole else None
        )  # later steps carry a cache that no proof can repeat
        if found is None:
            found = self.layouts[module] = layout_of(
                module, args, kwargs, passes.posteriors_of(module)
            )
        return found

    def call(self, rows: int, layout: Layout) -> Pass:
        """The pass for one call inside."""
        if self.whole and rows and self.rows and rows % self.rows == 0:
            rows = self.rows
        if self.fixed is None and not needs_rows(self.posteriors):
            layout = replace(
                layout, rowwise=False
            )  # one draw for all, however many rows the parts are called with
        if self.inner is not None and self.inner.spent and self.fixed is None:
            self.inner = None
        if self.inner is None or (self.inner.rows != rows and self.inner.draws != 1):
            if self.inner is not None and layout.rowwise:
                said = f"A method of {type(self.module).__name__} calls its parts with {self.inner.rows} and {rows} rows"
                how = "which share out draws in other ways: take one, materialize(model, draw=j) inside fixed_draws(model)."
                warnings.warn(f"{said}, {how}", SlimbayesWarning, stacklevel=6)
            self.inner = self._begin(rows, layout)
        if self.whole and self.inner.draws != 1 and not layout.rowwise and rows > 1:
            raise ValueError(
                f"Sequences cannot each have a draw: the rows of a part of {type(self.module).__name__} cannot be told "
                f"apart ({layout.why}). Take one draw for all of them, materialize(model, draw=j) inside fixed_draws(model)."
            )
        if self.fixed is not None and self.inner.draws == 1:
            return self.fixed.single(0, layout if layout.folds else None)
        return (self.fixed or self.inner).view(
            rows, layout if self.inner.draws != 1 else None
        )

    def _begin(self, rows: int, layout: Layout) -> Pass:
        if self.fixed is None:
            return bare_pass(self.posteriors, rows, layout, self.first)
        if not layout.rowwise:
            warn_of_loop(
                layout,
                f"of the {self.fixed.total} draws that are held this call uses the first",
            )
        return self.fixed.view(rows, layout) if layout.rowwise else self.fixed.single(0)


def scope_of(
    module: nn.Module, args: Any, kwargs: Any, whole: bool = False
) -> Scope | None:
    """The scope that a call of a method opens; None where a pass is under way, one draw is held or nothing drawn."""
    key = first_key(module)
    found = None if key is None else passes.pass_of(key)
    several = (
        found is not None
        and found.held
        and found.total > 1
        and not isinstance(found, Scope)
    )
    if (
        key is None
        or torch.compiler.is_compiling()
        or (found is not None and not several)
    ):
        return None
    arrays = arrays_of((args, kwargs)) if whole else []
    rows = padded(arrays[0]).shape[0] if arrays and padded(arrays[0]).dim() else 1
    return Scope(module, passes.posteriors_of(module), whole, rows, found)
