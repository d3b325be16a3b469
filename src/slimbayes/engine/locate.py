"""The layout of a call: proven for each kind of input and mode of a model, kept with the model, and checked again on
sizes it was not proven for, and now and then. And warnings of what follows from it.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.utils.rnn import PackedSequence

from slimbayes.engine import passes, proof
from slimbayes.engine.layout import Layout, Unproven, arrays_of, leaves_of, tree_map
from slimbayes.engine.modules import Posteriors, modules_of, tree_of
from slimbayes.engine.objects import calls_layers, without_cache
from slimbayes.engine.probe import Visit
from slimbayes.engine.quiet import inside_func, is_captured
from slimbayes.engine.trial import first_line, run_probe, undisturbed
from slimbayes.errors import SlimbayesWarning

_PROVING = threading.RLock()
_PLAIN = {Tensor, bool, int, float, str, type(None)}  # arguments that hold no others
_MODES = 8  # of a model for which rows are located, for each kind of input
_PART = threading.local()  # the latest part of a model called by itself: its name, its model's number, and its rows
_WRAPPED = {
    "_orig_mod",
    "_forward_module",
}  # where torch.compile and Fabric keep what they run


def call_kind(model: nn.Module, args: Any, kwargs: Any, modes: Any) -> tuple[Any, Any]:
    """What makes two calls alike: the nesting, types and numbers of dimensions, flags; and modes and numbers."""
    leaves: list[Any] = [*args, *kwargs.values()]
    if all([type(leaf) in _PLAIN for leaf in leaves]):
        spec: Any = len(args), *kwargs
    else:
        import torch.utils._pytree as pytree

        leaves, tree = pytree.tree_flatten(
            (args, dict(kwargs)), is_leaf=lambda leaf: isinstance(leaf, PackedSequence)
        )
        spec = str(tree)

    def kind(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.dim(), leaf.is_floating_point()
        return leaf if isinstance(leaf, (bool, str, type(None))) else type(leaf)

    numbers = [leaf for leaf in leaves if isinstance(leaf, (int, float))]
    return (model.training, spec, tuple(map(kind, leaves))), (modes, *numbers)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch.compile, DistributedDataParallel and Lightning Fabric's modules."""
    while isinstance(
        model, (nn.parallel.DistributedDataParallel, nn.DataParallel)
    ) or _WRAPPED & set(model._modules):
        inner = next(
            (model._modules[name] for name in _WRAPPED if name in model._modules), None
        )
        model = model.module if inner is None else inner  # type: ignore[assignment]
    return model


def batch_dim_of(model: nn.Module) -> int | None:
    """Where the user said that rows lie, if anything was said."""
    for module in unwrapped(model).modules():
        conversion = module.__dict__.get("_slimbayes")
        if conversion is not None:
            return conversion.batch_dim
    return None


def layout_of(
    model: nn.Module, args: Any, kwargs: Any, posteriors: Sequence[Any]
) -> Layout:
    """The proven layout of a call. While torch.compile traces, the one of the last call of this model in its mode."""
    if not torch.compiler.is_compiling():
        return locate(model, args, kwargs, posteriors)
    return latest_of(model) or _locate_outside(model, args, kwargs)


def latest_of(model: nn.Module) -> Layout | None:
    """The layout of the last call of a model in its mode."""
    tree: Any = getattr(model, "_slimbayes_tree", None)
    return None if tree is None else tree.latest[model.training]


def _outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates what the compiler leaves to Python: as torch._dynamo.disable(reason=), which takes 1.4 s to load."""
    outside = _disable_dynamo(function)
    outside._torchdynamo_disable = True  # type: ignore[attr-defined]
    outside._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "slimbayes locates the rows of a model on real inputs: call it once before compiling it with fullgraph=True"
    )
    return outside


@_outside
def _locate_outside(model: nn.Module, args: Any, kwargs: Any) -> Layout:
    _refuse_fake(args, kwargs)
    return locate(model, args, kwargs, passes.posteriors_of(model))


@_outside
def call_outside(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Call a module past the compiler."""
    _refuse_fake(args, kwargs)
    return module.forward(*args, **kwargs)


def _refuse_fake(args: Any, kwargs: Any) -> None:
    if any(type(leaf).__name__ == "FakeTensor" for leaf in arrays_of((args, kwargs))):
        raise RuntimeError(
            "slimbayes locates the rows of a model on real inputs: call the model once before torch.export."
        )


def locate(
    model: nn.Module, args: Any, kwargs: Any, posteriors: Sequence[Any]
) -> Layout:
    """The layout of a call: the one proven for its kind and kept with the model, or a proof now."""
    given, model = model, unwrapped(model)
    read = (
        posteriors.tree
        if model is given and isinstance(posteriors, Posteriors)
        else None
    )  # just now
    tree = read or tree_of(model)
    kind, modes = call_kind(model, args, kwargs, tree.modes())
    known: dict[Any, Layout] = tree.layouts.setdefault(kind, {})
    with _PROVING:  # threads that meet a model together wait for the first
        layout = known.get(modes)
        if layout is None and len(known) >= _MODES:
            # Of many modes the most careful serves a further one: a model that counts its calls, or is told which step
            # it is at, would be proven anew each time.
            layout = min(
                known.values(), key=lambda layout: (layout.folds, layout.rowwise)
            )
        if layout is None:
            layout = proof.prove(model, (args, kwargs), posteriors, batch_dim_of(model))
        else:
            changed = layout.folds and _look_again(
                model, (args, kwargs), posteriors, layout
            )
            if not changed and layout is tree.latest[model.training]:
                return layout
        if not layout.provisional and (
            layout.lead is None or layout.rows((args, kwargs)) > 0
        ):
            tree.latest[model.training] = layout
            layout.warned = any(
                other.warned and other.why == layout.why for other in known.values()
            )
            if len(known) < _MODES:
                known[modes] = layout
        return layout


def _look_again(
    model: nn.Module, inputs: Any, posteriors: Sequence[Any], layout: Layout
) -> bool:
    """Prove it anew at the 16th, 64th, 256th ... call after the first: other numbers may lead a model another way, as
    when experts are full and pass rows on. While it trains, two draws are compared both ways at the second, fourth and
    eighth after it, too: that takes less than a step where modules keep little. Says whether that changed the layout.
    """
    layout.calls += 1
    again = layout.calls >= 16 and 4 ** round(math.log(layout.calls, 4)) == layout.calls
    if (
        not (again or (model.training and layout.calls in (2, 4, 8)))
        or not layout.rows(inputs)
        or _cannot_look(inputs)
    ):
        return False
    # A proof shows every row twice: half of them are as many rows as the model has room for.
    half = layout.narrow(inputs, 0, -(-layout.rows(inputs) // 2))
    whole = again and proof.prove(model, half, posteriors, batch_dim_of(model))
    found = whole or _compare_with_loop(model, half, posteriors, layout)
    if not (found.folds or found.mixed) or (found.folds, found.rowwise) >= (
        layout.folds,
        layout.rowwise,
    ):
        return False
    layout.folds, layout.rowwise, layout.why = found.folds, found.rowwise, found.why
    warnings.warn(
        f"slimbayes looked again at how this model treats rows, after {layout.calls} calls, and found what the first "
        f"ones did not show: {found.why}. From now on it is respected; results since the model began to do so may mix "
        f"draws of different rows. Pass parallel=False, or exclude that layer, to be sure from the first call on.",
        stacklevel=6,
    )
    return True


def _compare_with_loop(
    model: nn.Module, inputs: Any, posteriors: Sequence[Any], layout: Layout
) -> Layout:
    """The layout, or what two draws say against it that run folded and one by one."""
    inputs = tree_map(without_cache, inputs)
    try:
        with undisturbed(model, inputs, posteriors) as trials:
            proof.Proof(trials, inputs, layout).verify()
    except Unproven as error:
        return Layout(why=str(error), mixed=True)
    except Exception:  # inputs that the model cannot take: the call itself will say so
        pass
    return layout


def check_size(
    model: nn.Module,
    inputs: Any,
    posteriors: Sequence[Any],
    layout: Layout,
    draws: int = 1,
) -> None:
    """Look once more where inputs are larger than all before: a model may cut large batches into pieces.

    Layers must be called alike for all rows and for a part of them. Two runs of the plain model are paid for each new
    maximum.
    """
    if layout.covers(inputs, draws) or _cannot_look(inputs):
        return
    with _PROVING:
        inputs, model = tree_map(without_cache, inputs), unwrapped(model)
        layout.largest = tuple(map(max, layout.largest, layout.size(inputs, draws)))
        count, many = layout.rows(inputs), layout.tile(inputs, draws)
        # Never a single row, which batch norm refuses.
        few = (
            layout.narrow(inputs, 0, count // 2)
            if draws == 1
            else layout.tile(inputs, 1 if count > 1 else 2)
        )
        rows = layout.rows(few), layout.rows(many)
        try:
            with undisturbed(model, inputs, posteriors) as trials:
                met = [
                    run_probe(trials, part, n)[0].visits
                    for part, n in zip((few, many), rows, strict=True)
                ]
            odd = next(
                (
                    (b or a).name
                    for a, b in zip_longest(*met)
                    if not _met_all_rows(a, b, *rows)
                ),
                None,
            )
            why = (
                f"{odd} is called in another way for {rows[1]} rows than for {rows[0]}"
                if odd
                else ""
            )
        except Exception as error:
            why = f"{type(error).__name__} for {rows[1]} rows: {first_line(error)}"
        if why:
            layout.run_one_by_one(why)


def _cannot_look(inputs: Any) -> bool:
    """Inside torch.func, and while a CUDA graph is captured."""
    return inside_func() or is_captured(inputs)


def _met_all_rows(
    few: Visit | None, many: Visit | None, rows_few: int, rows_many: int
) -> bool:
    """Whether a layer was called with all its rows at once, however many there were."""

    def grew(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
        other = [
            (m * rows_many, n * rows_few) for m, n in zip(a, b, strict=False) if m != n
        ]
        return len(a) == len(b) and (
            not other or [m for m, _ in other] == [n for _, n in other][:1]
        )

    if (
        few is None
        or many is None
        or few.key != many.key
        or len(few.shapes) != len(many.shapes)
    ):
        return False
    return all(map(grew, few.shapes, many.shapes))


def warn_of_loop(layout: Layout, what: str) -> None:
    """Say once what a layout that cannot be folded means."""
    if layout.warned or layout.provisional or torch.compiler.is_compiling():
        return
    layout.warned = True
    warnings.warn(
        f"slimbayes runs this model draw by draw, which is right but slower: {layout.why}. So {what}. Exclude that "
        f"layer, declare batch_dim= in bayesianize, or pass parallel=False to run draw by draw without this warning.",
        stacklevel=4,
    )


def warn_of_part(module: nn.Module, posteriors: Sequence[Any], rows: int) -> None:
    """Say once that parts of a model which are called one after another begin at members of their own."""
    if torch.compiler.is_compiling():
        return
    part = posteriors[0].name if "_slimbayes" not in module.__dict__ else ""
    before, _PART.latest = (
        getattr(_PART, "latest", None),
        (part, posteriors[0].conversion, rows),
    )
    if (
        part
        and before
        and before[0] not in ("", part)
        and before[1:] == _PART.latest[1:]
        and not posteriors[0].told_of_part
    ):
        posteriors[0].told_of_part = True
        warnings.warn(
            f"{posteriors[0].name or type(module).__name__} is called by itself after another part: each such call "
            f"shares its rows out among members anew, so that parts which belong together (net.head(net.body(x)), a "
            f"Sequential of some children) run as different members. Call them inside `with fixed_draws(model):`, "
            f"in a method of the model, or by sample.",
            SlimbayesWarning,
            stacklevel=5,
        )


def warn_of_unused(
    posteriors: Sequence[Any], done: passes.Pass, function: Any = None, out: Any = None
) -> None:
    """After the first pass, say which layers never ran: their posteriors have no part in any prediction."""
    if torch.compiler.is_compiling() or posteriors[0].told_of_unused:
        return
    if isinstance(function, nn.Module) and any(
        "_orig_mod" in m._modules for m in modules_of(function)
    ):
        return  # compiled code leaves no trace in `met`
    posteriors[0].told_of_unused = True
    silent = [
        p
        for p in posteriors
        if p.layer is not None and p.layer.trace_of(p) not in done.met
    ]
    for posterior in silent:
        posterior.note = "did not run in the first pass"
    if silent:
        names = ", ".join(p.name or "the model itself" for p in silent[:8])
        names += f" and {len(silent) - 8} more" if len(silent) > 8 else ""
        what = "Their posteriors have no part in predictions. Exclude them, unless another mode of the model uses them."
        if kept := [p.name for p in silent if p.layer.bayes_key in done.met]:
            what = f"{kept[0]} was not read as an attribute of its layer, which did run (or not at all). {what}"
        if any(map(calls_layers, leaves_of(out))):
            what = "What it returned calls them later, when each draws anew: compute that in forward, or use fixed_draws."
        warnings.warn(
            f"slimbayes converted layers that the first pass never called: {names}. {what}",
            stacklevel=5,
        )
