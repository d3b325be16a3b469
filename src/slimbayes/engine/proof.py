"""Where rows lie is proven, not guessed: once for each kind of input a model meets, then kept.

The plain model, with nothing random in it (see quiet.py), runs six times on the inputs at hand:

    as they are                                  shapes of everything that reaches a converted layer, and of the outputs
    every row twice, [x, x]                      what doubles holds rows; the outputs' halves must equal the first run's
    [x, x'], converted layers tainted in x'      x may not feel it, nor in [x', x]: draws can share a forward ("folds")
    [x, x] with some rows changed, likewise      others may not feel it: each row can have a draw of its own ("rowwise")
    one row more in front                        the others' outputs stay: nothing depends on a row's number

x' is x with other numbers, and a tainted layer's output is changed in the rows of x' alone. Runs of one shape use the
same kernels, so a leak shows as any difference at all. Last, two real draws run folded and one by one and must agree.
Which inputs hold rows is a hypothesis: those with as many entries along one dimension as a leading one; hypotheses are
tried in turn until one holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from slimbayes.engine import noise, passes, trial
from slimbayes.engine.layout import (
    Dims,
    Layout,
    Unproven,
    arrays_of,
    candidate_layouts,
    leaves_of,
    map_arrays,
    padded,
    tree_map,
)
from slimbayes.engine.objects import stack_draws, without_cache
from slimbayes.engine.probe import (
    Mask,
    Probe,
    doubled,
    entries,
    flags_along,
    other_numbers,
    packed_in,
    some_rows,
    stands_for_all,
)
from slimbayes.engine.quiet import inside_func, is_captured
from slimbayes.engine.state import Trials


def prove(
    model: nn.Module, inputs: Any, posteriors: Sequence[Any], batch_dim: int | None
) -> Layout:
    """Try hypotheses until one holds; where none does the model runs one draw at a time."""
    if not any(leaf.numel() for leaf in map(padded, arrays_of(inputs))):
        return Layout(why="there is nothing in the inputs", provisional=True)
    if inside_func():
        return Layout(why="it runs inside torch.func", provisional=True)
    if is_captured(inputs):
        raise RuntimeError(
            "The rows of this kind of input are not located yet: call the model once before a CUDA graph is captured."
        )
    reasons: list[
        str
    ] = []  # why guesses did not hold: the first guess is the likeliest
    mixed, stateful, looped = False, False, False
    inputs = tree_map(without_cache, inputs)
    with trial.undisturbed(model, inputs, posteriors) as trials:
        for tried, guess in enumerate(candidate_layouts(inputs, batch_dim)):
            proof, along = Proof(trials, inputs, guess), (guess.lead or (0, 0))[1]
            try:
                layout = proof.run()
            except Unproven as error:
                reasons.append(str(error))
                mixed, looped = (
                    True,
                    looped or (tried == 0 and not along and proof.one_by_one()),
                )
            except Exception as error:
                reasons.append(
                    f"{type(error).__name__} when every row came twice: {trial.first_line(error)}"
                )
            else:
                if not layout.folds:
                    return layout
                if looped and along:  # steps of rows that run by themselves
                    layout = replace(layout, rowwise=False, why=reasons[0])
                try:
                    proof.verify()
                    counts = model.training and any(
                        getattr(m, "scale_grad_by_freq", False) for m in model.modules()
                    )
                    why = "an embedding divides gradients by how often a word occurs, which is more often in all draws"
                    return replace(layout, folds=False, why=why) if counts else layout
                except Unproven as error:
                    reasons.append(str(error))
                    mixed = True
                except ValueError:
                    return layout  # a posterior refuses what it met: the call itself will say so
                except (
                    RuntimeError,
                    IndexError,
                ) as error:  # experts that get other rows of each draw
                    reasons.append(
                        f"{type(error).__name__} when two draws came together: {trial.first_line(error)}"
                    )
            stateful = stateful or proof.layout.stateful
            if tried > 20:
                break
        fails = trial.fails(
            trials, inputs
        )  # what says nothing of other inputs; the call itself will say why
    lead = next((h.lead for h in candidate_layouts(inputs, batch_dim)), None)
    why = next(
        (reason for reason in reasons if reason),
        "no input has a dimension that could hold rows",
    )
    return Layout(why=why, lead=lead, provisional=fails, mixed=mixed, stateful=stateful)


class Proof:
    """The runs and the comparisons, for one hypothesis."""

    def __init__(self, trials: Trials, inputs: Any, layout: Layout) -> None:
        self.trials, self.posteriors, self.layout = trials, trials.posteriors, layout
        self.tolerance = trial.tolerance(trials.model)
        # Of a single row nothing can be told apart.
        self.alone = inputs if self.layout.rows(inputs) == 1 else None
        self.inputs = self.layout.tile(inputs, 2) if self.alone is not None else inputs
        self.rows = self.layout.rows(self.inputs)

    def run(self) -> Layout:
        layout = self.layout
        if self.alone is not None:
            self._outputs(self._probe(self.alone)[1], self._probe(self.inputs)[1])
        layout.largest = layout.size(self.inputs, 2)
        single, out1 = self._probe(self.inputs)
        layout.stateful, layout.objects = bool(single.changes), single.objects
        if lasts := trial.what_lasts(self.trials, self.inputs, single, out1):
            layout.why, layout.mixed = (
                f"it keeps {lasts!r} from one call for the next, which draws cannot share",
                True,
            )
            return layout
        double, out2 = self._probe(twice := layout.tile(self.inputs, 2), single)
        layout.outputs = self._outputs(out1, out2)
        layout.output_sizes = (
            self.rows,
            [tuple(padded(a).shape) for a in arrays_of(out1)],
        )
        layout.shareable, layout.random = double.shareable, single.quiet.random
        if layout.random and trial.seeds_itself(
            self.trials, twice, 2 * self.rows, layout.outputs
        ):
            raise Unproven("it seeds random numbers itself, which differ between rows")
        second, some = np.arange(2 * self.rows) >= self.rows, some_rows(2 * self.rows)
        self._collect(self._change(second, double, out2))
        self._change(~second, double, out2)
        layout.folds = True
        try:
            self._shift(out1)
            self._change(some, double, out2)
            layout.rowwise = True
        except Unproven as error:
            layout.why = str(error)
            if not layout.folds:
                raise
        return layout

    def one_by_one(self) -> bool:
        """Whether rows run by themselves: for every row twice layers are called more often, and outputs double."""
        try:
            (few, out1), (many, out2) = map(
                self._probe, (self.inputs, self.layout.tile(self.inputs, 2))
            )
            return len(many.visits) > len(few.visits) and 0 in self._outputs(out1, out2)
        except Exception:
            return False

    def _change(self, mask: Mask, plain: Probe, out: Any) -> Probe:
        """Run [x, x] with other numbers in some rows, and refuse if the others feel it."""
        try:
            tainted, changed = self._probe(self._altered(mask), plain, mask)
        except (
            IndexError,
            RuntimeError,
            ValueError,
        ):  # a column's categories may be none of another's
            tainted, changed = self._probe(
                self._altered(mask, steps=False), plain, mask
            )
        self._feels(mask, plain, tainted, arrays_of(out), arrays_of(changed))
        if (
            plain.quiet.reads != tainted.quiet.reads
        ):  # they may depend on the inputs, but not on the draws of some rows
            again, _ = self._probe(self.layout.tile(self.inputs, 2), plain, mask)
            if plain.quiet.reads != again.quiet.reads:
                raise Unproven(
                    "a number computed from all rows decides what the model does"
                )
        return tainted

    def _shift(self, out: Any) -> None:
        """One row more in front may not change the others: outputs that depend on a row's number would fold wrongly.
        Nor may some rows be others alone where copied modules see theirs alone: some cut all to the longest.
        """
        self._compare(
            out,
            self.layout.one_more(self.inputs),
            1,
            (0, self.rows),
            "one row more came in front",
        )
        half = self.rows // 2
        for start, size in ((0, half), (half, self.rows - half)):
            if any(getattr(p.layer, "bayes_copied", False) for p in self.posteriors):
                part = self.layout.narrow(self.inputs, start, size)
                self._compare(
                    out, part, 0, (start, size), "some of the rows came alone"
                )

    def _compare(
        self, out: Any, inputs: Any, more: int, rows: tuple[int, int], when: str
    ) -> None:
        """Refuse if inputs, with so many rows more in front, give other outputs for these rows (start and size)."""
        try:
            other = arrays_of(self._probe(inputs)[1])
        except Unproven:
            raise
        except Exception as error:
            raise Unproven(
                f"{type(error).__name__} when {when}: {trial.first_line(error)}"
            ) from error
        pairs = zip(
            map(padded, arrays_of(out)),
            map(padded, other),
            self.layout.outputs,
            strict=True,
        )
        for i, (a, b, dim) in enumerate(pairs):
            name = f"output {i} of shape {tuple(a.shape)}"
            if dim is not None:
                if a.shape[dim] % self.rows:
                    raise Unproven(f"{name} has no entry for each row")
                each = a.shape[dim] // self.rows
                a = a.narrow(dim, rows[0] * each, rows[1] * each)
                b = b.narrow(dim, more * each, b.shape[dim] - more * each)
            if b.shape != a.shape:
                raise Unproven(f"{name} has not as many entries as rows when {when}")
            if (more or dim is not None) and not self._close(b, a):
                self.layout.folds = not more
                raise Unproven(f"{name} changes when {when}")

    def _probe(
        self, inputs: Any, before: Probe | None = None, mask: Mask | None = None
    ) -> tuple[Probe, Any]:
        rows = self.rows * (1 if before is None else 2)
        return trial.run_probe(self.trials, inputs, rows, before, mask)

    def _outputs(self, one: Any, other: Any) -> Dims:
        """Where rows lie in outputs, of which the others have twice as many."""
        first, second = arrays_of(one), arrays_of(other)
        if len(first) != len(second) or len(leaves_of(one)) != len(leaves_of(other)):
            raise Unproven("the number of outputs depends on the number of rows")
        for a, b in zip(leaves_of(one), leaves_of(other), strict=True):
            if isinstance(a, float) and a != b:
                raise Unproven(
                    "a number that the model returns depends on the number of rows"
                )
        dims = []
        for i, (a, b) in enumerate(
            zip(map(padded, first), map(padded, second), strict=True)
        ):
            name = f"output {i} of shape {tuple(a.shape)}"
            dim = (
                doubled(tuple(a.shape), tuple(b.shape), name)
                if a.numel()
                else tuple(a.shape).index(0)
            )
            halves = (
                [b]
                if dim is None
                else list(b.split(a.shape[dim], dim))
                if a.shape[dim]
                else []
            )
            if not all(self._close(half, a) for half in halves):
                raise Unproven(f"{name} changes when every row comes twice")
            dims.append(dim)
        return tuple(dims)

    def _altered(self, mask: Mask, steps: bool = True) -> Any:
        """[x, x] with other numbers in some rows; with `steps`, whole numbers move within a row, too."""
        between = not self.layout.folds

        def alter(i: int, leaf: Any) -> Any:
            dim = self.layout.inputs[i]
            if dim is None:
                return leaf
            if isinstance(leaf, PackedSequence):
                return packed_in(leaf, leaf.data * 0.7 + 0.37, mask)
            if leaf.shape[dim] == 1 != self.rows:
                return leaf
            # Indices and lengths go to other rows of their half: the longest row of a batch stays the longest.
            other = torch.cat(
                [
                    other_numbers(half, dim, between, steps)
                    for half in leaf.chunk(2, dim)
                ],
                dim,
            )
            return torch.where(flags_along(mask, leaf, dim, f"input {i}"), other, leaf)

        return map_arrays(alter, self.layout.tile(self.inputs, 2))

    def _feels(
        self,
        mask: Mask,
        plain: Probe,
        tainted: Probe,
        out: list[Any],
        changed: list[Any],
    ) -> None:
        """Refuse if anything outside the changed rows differs. A layer whose input nothing reaches (token types that
        are all zero) shows where its rows lie by its own output, which is tainted."""
        for a, b in zip(plain.visits, tainted.visits, strict=True):
            for i, (p, q) in enumerate(zip(a.prints, b.prints, strict=True)):
                if a.shapes[i] == b.shapes[i] and p is not None and q is not None:
                    self._check(
                        mask,
                        p,
                        q,
                        b.dims[i],
                        f"{a.name}: rows of its input mix with those of other draws",
                    )
        pairs = zip(
            map(padded, out), map(padded, changed), self.layout.outputs, strict=True
        )
        for i, (x, y, dim) in enumerate(pairs):
            if x.shape != y.shape:
                raise Unproven(
                    f"output {i} changes its shape when a single row is repeated for each draw"
                )
            said = f"output {i}{'' if dim is not None else ', which has no rows,'} mixes rows of different draws"
            if (p := plain.prints(x, dim)) is not None and (
                q := tainted.prints(y, dim)
            ) is not None:
                self._check(mask, p, q, dim, said)

    def _check(self, mask: Mask, p: Any, q: Any, dim: int | None, message: str) -> None:
        """Compare fingerprints outside the changed rows, up to the last digits of atomic additions on a GPU."""
        plain, size, changed = (part.cpu().numpy() for part in (*p, q[0]))
        kept = slice(None) if dim is None else ~entries(mask, len(plain), message)
        slack = (1e-7 if p[0].is_cuda else 1e-13) * size[kept].sum()
        if (
            plain.shape != changed.shape
            or not (abs(plain - changed)[kept] <= slack).all()
        ):
            raise Unproven(
                message.replace("draws", "rows") if self.layout.folds else message
            )

    def _collect(self, probe: Probe) -> None:
        """The dimension of rows of every layer's inputs."""
        layout = self.layout
        assert probe.before is not None
        for visit, before in zip(probe.visits, probe.before.visits, strict=True):
            dim = visit.dims[0] if visit.dims else None
            if dim is None:
                if not stands_for_all(visit):
                    shape = visit.shapes[0] if visit.shapes else ()
                    raise Unproven(
                        f"{visit.name}: an input of shape {shape} has no rows in it"
                    )
                dim = -1
            if not visit.layer.may_hold_rows(dim, len(visit.shapes[0])):
                raise Unproven(
                    f"{visit.name}: dimension {dim} of its input {visit.shapes[0]} cannot hold rows"
                )
            at = (visit.key, len(visit.shapes[0]))
            if (known := layout.dims.setdefault(at, dim)) != dim:
                raise Unproven(
                    f"{visit.name}: its rows lie along dimension {known} in one call and {dim} in another"
                )
            if dim >= 0 and visit.shapes[0][dim] % (2 * self.rows):
                layout.merged.add(at)
            layout.arguments[visit.key, tuple(map(len, visit.shapes))] = (
                tuple(visit.dims),
                tuple(before.out_dims),
            )

    def verify(self) -> None:
        """Two real draws folded and one by one must agree."""
        if not self.posteriors:
            return
        new = noise.draw(
            self.posteriors, passes.Pass(2, 2 * self.rows, rowwise=self.layout.rowwise)
        )
        out = trial.run_drawn(
            self.trials,
            new.view(new.rows, self.layout),
            self.layout.tile(self.inputs, 2),
        )
        together = arrays_of(self.layout.split(out, 2, self.rows))
        parts = [
            trial.run_drawn(self.trials, new.single(j, self.layout), self.inputs)
            for j in range(2)
        ]
        for i, (a, b) in enumerate(
            zip(together, arrays_of(stack_draws(parts)), strict=True)
        ):
            if not self._close(a, b):
                off = trial.relative_difference(a, b)
                raise Unproven(
                    f"output {i} of folded draws differs from that of single ones by {off:.2g} of its size"
                )

    def _close(self, a: Tensor, b: Tensor) -> bool:
        return a.shape == b.shape and trial.relative_difference(a, b) <= self.tolerance
