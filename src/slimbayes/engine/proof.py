"""Where rows lie is proven, not guessed: once for each kind of input a model meets, then kept.

The plain model, with nothing random in it (see quiet.py), runs five times on the inputs at hand:

    as they are                                  shapes of everything that reaches a converted layer, and of the outputs
    every row twice, [x, x]                      what doubles holds rows; both halves of the outputs must equal the first run's
    [x, x'], converted layers tainted in x'      the first half may not feel it: several draws can share a forward ("folds")
    [x, x with another last row], likewise       no other row may feel it: each row can have a draw of its own ("apart")
    one row more in front                        the others' outputs stay: nothing depends on a row's number

x' is x with other numbers, and a tainted layer's output is changed in the rows of x' alone. Runs of one shape use the same kernels, so a
leak shows as any difference at all. Last, two real draws run folded and one by one and must agree. Which inputs hold rows is a
hypothesis: those with as many entries along one dimension as a leading one; hypotheses are tried in turn until one holds.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from slimbayes.engine import passes
from slimbayes.engine.ahead import Ahead
from slimbayes.engine.hypotheses import Hypothesis, hypotheses
from slimbayes.engine.layout import Dims, Layout, stack_draws
from slimbayes.engine.probe import Mixed, Probe, Visit, doubled, packed_from, prints_of, stands_for_all
from slimbayes.engine.quiet import Quiet
from slimbayes.engine.tree import arrays_of, index_rows, leaves_of, map_arrays, padded, tree_map

_PROVING = threading.RLock()


def kind_of(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """What makes two calls alike: the mode, the nesting, types and numbers of dimensions, flags."""
    if len(args) == 1 and isinstance(args[0], Tensor) and not kwargs:
        return model.training, args[0].dim(), args[0].is_floating_point()
    import torch.utils._pytree as pytree

    leaves, spec = pytree.tree_flatten((args, dict(kwargs)), is_leaf=lambda leaf: isinstance(leaf, PackedSequence))
    return model.training, str(spec), tuple(_kind(leaf) for leaf in leaves)


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.dim(), leaf.is_floating_point()
    return leaf if isinstance(leaf, (bool, str, type(None))) else type(leaf)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch.compile and DistributedDataParallel."""
    while isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)) or "_orig_mod" in model._modules:
        model = model._modules.get("_orig_mod") or model.module  # type: ignore[assignment]
    return model


def tree_of(model: nn.Module) -> int:
    return hash(tuple(map(id, model.modules())))


def locate(model: nn.Module, args: Any, kwargs: Any, posteriors: Sequence[Any], batch_dim: int | None) -> Layout:
    """The layout of a call: the one proven for its kind, or a proof now. It is kept with the model it was proven for."""
    model = unwrapped(model)
    known: dict[Any, Layout] = model.__dict__.setdefault("_slimbayes_rows", {})
    kind, tree = kind_of(model, args, kwargs), tree_of(model)
    with _PROVING:  # threads that meet a model together wait for the first
        found = known.get(kind)
        if found is not None and found.tree == tree:
            model.__dict__["_slimbayes_latest"] = found
            return found
        return _located(model, args, kwargs, posteriors, batch_dim, known, kind, tree)


def _located(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    posteriors: Sequence[Any],
    batch_dim: int | None,
    known: dict[Any, Layout],
    kind: Any,
    tree: int,
) -> Layout:
    layout = prove(model, (args, kwargs), posteriors, batch_dim)
    layout.tree, layout.key = tree, passes.first_key(model)
    if not layout.told and (layout.lead is None or layout.rows((args, kwargs)) > 0):
        known[kind] = layout
        model.__dict__["_slimbayes_latest"] = layout
    return layout


def prove(model: nn.Module, inputs: Any, posteriors: Sequence[Any], batch_dim: int | None) -> Layout:
    """Try hypotheses until one holds; where none does the model runs one draw at a time."""
    if not any(leaf.numel() for leaf in map(padded, arrays_of(inputs))):
        return Layout(why="there is nothing in the inputs", told=True)
    if torch._C._functorch.peek_interpreter_stack() is not None:  # inside vmap or grad, where nothing can be looked at
        return Layout(why="it runs inside torch.func", told=True)
    if any(a.is_cuda for a in map(padded, arrays_of(inputs))) and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "The rows of this kind of input are not located yet: call the model once before a CUDA graph is captured."
        )
    first = ""
    inputs = tree_map(_without_cache, inputs)
    with _undisturbed(model, inputs):
        for tried, guess in enumerate(hypotheses(inputs, batch_dim)):
            try:
                proof = _Proof(model, inputs, posteriors, guess)
                layout = proof.run()
            except Mixed as error:
                first = first or str(error)
            except Exception as error:
                first = (
                    first
                    or f"{type(error).__name__} when every row came twice: {str(error).splitlines()[0] if str(error) else ''}"
                )
            else:
                try:
                    proof.verify()
                    return layout
                except (Mixed, passes.Unproven) as error:
                    first = first or str(error)
                except ValueError:
                    return layout  # a posterior refuses what it met: the call itself will say so
            if tried > 20:
                break
    lead = next(((h.lead for h in hypotheses(inputs, batch_dim))), None)
    return Layout(why=first or "no input has a dimension that could hold rows", lead=lead)


def _without_cache(leaf: Any) -> Any:
    return None if hasattr(leaf, "get_seq_length") or type(leaf).__name__ == "NotJoined" else leaf


@contextmanager
def _undisturbed(model: nn.Module, inputs: Any) -> Iterator[None]:
    """Random numbers, buffers and gradients are afterwards as they were."""
    devices = sorted({a.device.index or 0 for a in map(padded, arrays_of(inputs)) if a.is_cuda})
    with torch.no_grad(), _buffers_kept(model), torch.random.fork_rng(devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in buffers:
            buffer.copy_(value)


class _Proof:
    """The four runs and the comparison, for one hypothesis."""

    def __init__(self, model: nn.Module, inputs: Any, posteriors: Sequence[Any], guess: Hypothesis) -> None:
        self.model, self.posteriors, self.guess = model, posteriors, guess
        self.layout = Layout(inputs=guess.inputs, lead=guess.lead)
        # Of a single row nothing can be told apart.
        self.alone = inputs if self.layout.rows(inputs) == 1 else None
        self.inputs = self.layout.tile(inputs, 2) if self.alone is not None else inputs
        self.rows = self.layout.rows(self.inputs)

    def run(self) -> Layout:
        layout = self.layout
        if self.alone is not None:
            self._outputs(
                arrays_of(self._probe(self.alone, None, "")[1]),
                arrays_of(self._probe(self.inputs, None, "")[1]),
                [],
                [],
            )
        single, out1 = self._probe(self.inputs, None, "")
        double, out2 = self._probe(layout.tile(self.inputs, 2), single, "")
        layout.outputs = self._outputs(arrays_of(out1), arrays_of(out2), leaves_of(out1), leaves_of(out2))
        layout.ahead = double.quiet_modules  # type: ignore[attr-defined]
        layout.random = single.quiet.random
        half, out3 = self._probe(self._altered("half"), double, "half")
        self._feels("half", double, half, arrays_of(out2), arrays_of(out3), layout.outputs)
        self._reads_alike(double, half, "half")
        self._collect(half)
        layout.folds = True
        last, out4 = self._probe(self._altered("row"), double, "row")
        try:
            self._shift(out1)
            self._feels("row", double, last, arrays_of(out2), arrays_of(out4), layout.outputs)
            self._reads_alike(double, last, "row")
            layout.apart = True
        except Mixed as error:
            layout.why = str(error)
            if not layout.folds:
                raise
        return layout

    def _reads_alike(self, plain: Probe, tainted: Probe, what: str) -> None:
        """Numbers that the model reads may depend on its inputs, but not on the draws of some rows."""
        if plain.quiet.reads != tainted.quiet.reads:
            again, _ = self._probe(self.layout.tile(self.inputs, 2), plain, what)
            if plain.quiet.reads != again.quiet.reads:
                raise Mixed("a number computed from all rows decides what the model does")

    def _shift(self, out: Any) -> None:
        """One row more in front may not change the others: outputs that depend on a row's number would fold wrongly."""
        args = map_arrays(lambda i, leaf: _one_more(leaf, self.guess.inputs[i], self.rows), self.inputs)
        try:
            shifted = arrays_of(self._probe(args, None, "")[1])
        except Mixed:
            raise
        except Exception as error:
            raise Mixed(
                f"{type(error).__name__} when one row more came: {str(error).splitlines()[0] if str(error) else ''}"
            ) from error
        for i, (a, b, dim) in enumerate(
            zip(map(padded, arrays_of(out)), map(padded, shifted), self.layout.outputs, strict=True)
        ):
            if dim is not None and a.shape[dim] % self.rows:
                raise Mixed(f"output {i} of shape {tuple(a.shape)} has no entry for each row")
            each = 0 if dim is None else a.shape[dim] // self.rows
            rest = b if dim is None else b.narrow(dim, each, b.shape[dim] - each)
            if rest.shape != a.shape:
                raise Mixed(f"output {i} of shape {tuple(a.shape)} does not get one row more for one row more")
            if not self._close(rest, a):
                self.layout.folds = False
                raise Mixed(f"output {i} of shape {tuple(a.shape)} changes when one row more comes in front")

    def _probe(self, inputs: Any, before: Probe | None, taint: str) -> tuple[Probe, Any]:
        quiet = Quiet()
        probe = Probe([p.key for p in self.posteriors], quiet, before, taint)
        probe.rows = self.rows * (1 if before is None else 2)
        args, kwargs = map_arrays(lambda i, leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, inputs)
        watcher = Ahead(self.model, probe, before)
        devices = {p.device.type for p in self.posteriors} or {"cpu"}
        with quiet, _no_autocast(devices), _buffers_kept(self.model), watcher:
            out = passes.run(probe, self.model, *args, **kwargs)
        probe.quiet_modules = watcher.found  # type: ignore[attr-defined]
        if quiet.used:
            raise Mixed(f"the weight of {next(iter(quiet.used))} is used past the layer's own forward")
        if before is not None and len(before.visits) != len(probe.visits):
            raise Mixed(f"{before.visits[-1].name} and other layers are not called alike for more rows")
        return probe, out

    def _outputs(self, first: list[Any], second: list[Any], flat1: list[Any], flat2: list[Any]) -> Dims:
        if len(first) != len(second):
            raise Mixed("the number of outputs depends on the number of rows")
        for a, b in zip(flat1, flat2, strict=True):
            if isinstance(a, float) and a != b:
                raise Mixed("a number that the model returns depends on the number of rows")
        dims = []
        for i, (a, b) in enumerate(zip(map(padded, first), map(padded, second), strict=True)):
            name = f"output {i} of shape {tuple(a.shape)}"
            dim = doubled(tuple(a.shape), tuple(b.shape), name)
            halves = [b] if dim is None else list(b.split(a.shape[dim], dim)) if a.shape[dim] else []
            if not all(self._close(half, a) for half in halves):
                raise Mixed(f"{name} changes when every row comes twice")
            dims.append(dim)
        return tuple(dims)

    def _altered(self, what: str) -> Any:
        """[x, x'] with other numbers in the second half, or in the last row alone."""

        def alter(i: int, leaf: Any) -> Any:
            dim = self.guess.inputs[i]
            if dim is None:
                return leaf
            if isinstance(leaf, PackedSequence):
                return packed_from(leaf, leaf.data * 0.7 + 0.37, self.rows if what == "half" else 2 * self.rows - 1)
            if leaf.shape[dim] == 1 != self.rows:
                return leaf
            part = leaf.shape[dim] // 2 if what == "half" else leaf.shape[dim] // (2 * self.rows)
            out = leaf.clone()
            last = out.narrow(dim, leaf.shape[dim] - part, part)
            last.copy_(_other(last, dim))
            return out

        return map_arrays(alter, self.layout.tile(self.inputs, 2))

    def _feels(
        self, what: str, plain: Probe, tainted: Probe, out: list[Any], out_tainted: list[Any], dims: Dims
    ) -> None:
        """Refuse if anything outside the changed rows differs.

        A layer whose input nothing reaches (token types that are all zero) shows where its rows lie by its own output, which is tainted.
        """
        for a, b in zip(plain.visits, tainted.visits, strict=True):
            for i, (p, q) in enumerate(zip(a.prints, b.prints, strict=True)):
                if p is not None and q is not None and a.shapes[i] == b.shapes[i]:
                    self._check(what, p, q, b.dims[i], f"{a.name}: rows of its input mix with those of other draws")
        for i, (x, y, dim) in enumerate(zip(map(padded, out), map(padded, out_tainted), dims, strict=True)):
            if x.shape != y.shape:
                raise Mixed(f"output {i} changes its shape when a single row is repeated for each draw")
            p, q = prints_of(x, dim), prints_of(y, dim)
            if p is not None and q is not None:
                rowless = "" if dim is not None else ", which has no rows,"
                self._check(what, p, q, dim, f"output {i}{rowless} mixes rows of different draws")

    def _check(self, what: str, p: Tensor, q: Tensor, dim: int | None, message: str) -> None:
        """Compare fingerprints outside the changed rows."""
        count = p.shape[1]
        kept = count if dim is None else count // 2 if what == "half" else count - count // (2 * self.rows)
        if p.shape != q.shape or not _equal(p[:, :kept].sum(1), q[:, :kept].sum(1)):
            raise Mixed(message if what == "half" else message.replace("draws", "rows"))

    def _collect(self, probe: Probe) -> None:
        """The dimension of rows of every layer's inputs."""
        layout = self.layout
        for visit in probe.visits:
            dim = visit.dims[0] if visit.dims else None
            if dim is None:
                if not stands_for_all(visit):
                    raise Mixed(
                        f"{visit.name}: an input of shape {visit.shapes[0] if visit.shapes else ()} has no rows in it"
                    )
                dim = -1
            if not visit.allowed(dim, len(visit.shapes[0])):
                raise Mixed(f"{visit.name}: dimension {dim} of its input {visit.shapes[0]} cannot hold rows")
            before = self._earlier(probe, visit)
            at = (visit.key, len(visit.shapes[0]))
            if layout.dims.setdefault(at, dim) != dim:
                raise Mixed(
                    f"{visit.name}: its rows lie along dimension {layout.dims[at]} in one call and {dim} in another"
                )
            layout.arguments[visit.key, visit.ndims] = (tuple(visit.dims), tuple(before.out_dims))

    def _earlier(self, probe: Probe, visit: Visit) -> Visit:
        assert probe.before is not None
        return probe.before.visits[probe.visits.index(visit)]

    def verify(self) -> None:
        """Two real draws folded and one by one must agree."""
        if not self.posteriors:
            return
        new = passes.draw(self.posteriors, passes.Pass(2, 2 * self.rows, rowwise=self.layout.apart))
        devices = {p.device.type for p in self.posteriors}
        with Quiet(), _no_autocast(devices):
            folded = passes.realise(self.posteriors, new.view(new.rows, self.layout))
            args, kwargs = map_arrays(
                lambda i, leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, self.layout.tile(self.inputs, 2)
            )
            with _buffers_kept(self.model):
                out = tree_map(padded, passes.run(folded, self.model, *args, **kwargs))
                together = arrays_of(self.layout.split(out, 2))
            parts = []
            for j in range(2):
                args, kwargs = map_arrays(
                    lambda i, leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, self.inputs
                )
                one = passes.realise(self.posteriors, new.single(j, self.layout))
                with _buffers_kept(self.model):
                    parts.append(tree_map(padded, passes.run(one, self.model, *args, **kwargs)))
        for i, (a, b) in enumerate(zip(together, arrays_of(stack_draws(parts)), strict=True)):
            if not self._close(a, b):
                raise Mixed(
                    f"output {i} of folded draws differs from that of single ones by {_apart(a, b):.2g} of its size"
                )

    def _close(self, a: Tensor, b: Tensor) -> bool:
        return a.shape == b.shape and _apart(a, b) <= self.tolerance

    @property
    def tolerance(self) -> float:
        kinds = {p.dtype for p in self.model.parameters() if p.is_floating_point()}
        if kinds & {torch.bfloat16, torch.float16}:
            return 0.1
        on_gpu = any(p.is_cuda for p in self.model.parameters())
        return 1e-6 if kinds == {torch.float64} else 1e-2 if on_gpu else 1e-3


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two fingerprints (sum, size) are the same; sums by atomic additions on a GPU may differ in the last digits."""
    slack = 1e-7 if a.is_cuda else 1e-13
    return bool((a - b).abs()[0] <= slack * torch.maximum(a[1], b[1]))


def _apart(a: Tensor, b: Tensor) -> float:
    """Largest difference relative to the largest number."""
    if a.numel() == 0:
        return 0.0
    if not a.is_floating_point():
        return float((a != b).any())
    a, b = a.double().nan_to_num(0.123, 1e30, -1e30), b.double().nan_to_num(0.123, 1e30, -1e30)
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))


def _other(x: Tensor, dim: int) -> Tensor:
    """Other numbers of the same kind: indices and flags are only moved about, so that they stay valid."""
    if x.is_floating_point():
        return x * 0.7 + 0.37
    x = x.roll(1, dim)
    return x.roll(1, -1) if x.dim() > 1 and dim % x.dim() != x.dim() - 1 and x.dtype != torch.bool else x


def _one_more(leaf: Any, dim: int | None, rows: int) -> Any:
    """The first row twice, then the others."""
    if dim is None or (isinstance(leaf, Tensor) and leaf.shape[dim] == 1 != rows):
        return leaf
    if isinstance(leaf, PackedSequence):
        return index_rows(leaf, 1, torch.cat([torch.zeros(1, dtype=torch.long), torch.arange(rows)]))
    return torch.cat([leaf.narrow(dim, 0, leaf.shape[dim] // rows), leaf], dim)


@contextmanager
def _no_autocast(devices: set[str]) -> Iterator[None]:
    if not devices:
        yield
        return
    with torch.autocast(devices.pop(), enabled=False), _no_autocast(devices):
        yield
