"""The checks of benchmarks/zoo.py: one architecture under one method, none of which can stop the others.

convert     bayesianize succeeds
zero noise  from a neutral start, sample and a bare call give the plain model's outputs in eval mode
draws       draws differ in eval mode
gradients   in train mode every posterior parameter gets a finite gradient that is not all zero
fold        sample(net, x) equals sample(net, x, parallel=False) under the same seed
undo        debayesianize gives the plain model's outputs and state back, bit for bit
summary     summary can be printed
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from zoo_models import Architecture

import slimbayes as sb

CHECKS = ("convert", "zero noise", "draws", "gradients", "fold", "undo", "summary")
CLOSE, APART = (
    1e-3,
    1e-5,
)  # relative to the largest output: rounding in a deep random net, and what counts as a difference
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Method:
    """Configs for a plain model: one that leaves its function as it is, and one as users start from."""

    neutral: Callable[[nn.Module], sb.Config]
    usual: Callable[[nn.Module], sb.Config]
    draws: int = 2  # of each member
    may_rest: bool = False  # components that no draw picked get no gradient
    may_be_zero: bool = False  # members that start afresh may start with gains of zero
    close: float = CLOSE  # for zero noise


def _patch(model: nn.Module) -> str:
    """Norm layers, or the output layer of a network that has none."""
    norms = (m for m in model.modules() if "Norm" in type(m).__name__)
    return (
        "norm"
        if any(next(m.parameters(recurse=False), None) is not None for m in norms)
        else "output"
    )


def _dropout(model: nn.Module, rate: float) -> sb.Config:
    own = any(isinstance(m, nn.modules.dropout._DropoutNd) for m in model.modules())
    return (
        sb.MCDropout(rate=rate)
        if own
        else sb.MCDropout(rate=rate, before=_patch(model))
    )


def _model_patch(cross: bool) -> Method:
    return Method(
        lambda m: sb.ModelPatch(
            components=2, cross=cross, patch=_patch(m), init="copies", jitter=0.0
        ),
        lambda m: sb.ModelPatch(
            components=2, cross=cross, patch=_patch(m), init="copies", jitter=0.2
        ),
        draws=8,
        may_rest=True,
    )


def _always(neutral: sb.Config, usual: sb.Config, close: float = CLOSE) -> Method:
    return Method(lambda m: neutral, lambda m: usual, close=close)


ONE, TINY = sb.Point(1.0), 2e-7  # scales have a floor of 1e-7
METHODS: dict[str, Method] = {
    "rank1-normal": _always(
        sb.Rank1(members=2, mean_init=ONE, scale_init=TINY, scale_jitter=0.0),
        sb.Rank1(members=2),
    ),
    "rank1-cauchy": _always(
        sb.Rank1(members=2, prior=sb.Cauchy(1.0, 0.1), mean_init=ONE, scale_init=TINY),
        sb.Rank1(members=2, prior=sb.Cauchy(1.0, 0.1)),
        close=0.2,  # the largest of a million Cauchy draws is a million scales away
    ),
    "batchensemble": _always(
        sb.BatchEnsemble(members=2, mean_init=ONE), sb.BatchEnsemble(members=2)
    ),
    "ktied": _always(sb.KTied(rank=2, scale_init=1e-8), sb.KTied(rank=2)),
    "meanfield": _always(
        sb.MeanField(scale_init=1e-8, scale_jitter=0.0), sb.MeanField()
    ),
    "emp": _model_patch(cross=False),
    "ecmp": _model_patch(cross=True),
    "dropconnect": _always(sb.DropConnect(rate=0.0), sb.DropConnect(rate=0.1)),
    "mcdropout": Method(lambda m: _dropout(m, 0.0), lambda m: _dropout(m, 0.1)),
    "ensemble": replace(
        _always(sb.Ensemble(members=2, init="copies"), sb.Ensemble(members=2)),
        may_be_zero=True,
    ),
}


class Failed(Exception):
    """A check that does not hold, in words."""


class OutOfTime(BaseException):
    """A pair took too long. No `except Exception` on the way may swallow it."""


@dataclass
class Plain:
    """A plain model, an input for it, and what it does."""

    model: nn.Module
    inputs: Inputs
    outputs: list[Tensor]
    repeatable: bool
    asleep: set[str]  # parameters that get no gradient in the plain model either


# --- the plain model


def build_plain(architecture: Architecture, device: torch.device) -> Plain:
    torch.manual_seed(0)
    model = _enliven(architecture.build()).to(device)
    given = pytree.tree_map(lambda value: value.to(device), architecture.inputs())
    inputs = ((given.pop(""),) if "" in given else (), given)
    _settle(model, inputs)
    asleep = _asleep(deepcopy(model), inputs)
    model.eval()
    outputs, again = _run(model, inputs), _run(model, inputs)
    if not outputs or not all(bool(t.isfinite().all()) for t in outputs):
        raise Failed("the plain model gives no finite outputs")
    return Plain(model, inputs, outputs, all(map(torch.equal, outputs, again)), asleep)


@torch.no_grad()
def _enliven(model: nn.Module) -> nn.Module:
    """Move constant parameters a little, as training would: a layer scale of zero hides all that comes before it."""
    for parameter in model.parameters():
        if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
            parameter.add_(0.1 * torch.randn_like(parameter))
        elif parameter.numel() == 1:
            parameter.add_(0.1)
    return model


@torch.no_grad()
def _settle(model: nn.Module, inputs: Inputs) -> None:
    """Give batch norms the statistics of the input: with their first ones, signals of a deep random net die out."""
    norms = [
        m
        for m in model.modules()
        if isinstance(getattr(m, "running_mean", None), Tensor)
        and hasattr(m, "momentum")
    ]
    former = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    model.train()
    model(*inputs[0], **inputs[1])
    for norm, momentum in zip(norms, former, strict=True):
        norm.momentum = momentum
        norm.running_var.clamp_(
            min=0.1 * float(norm.running_var.mean())
        )  # three rows may agree by chance


def _asleep(model: nn.Module, inputs: Inputs) -> set[str]:
    model.train()
    _weighted_sum(_leaves(model(*inputs[0], **inputs[1]))).backward()
    return {
        name
        for name, p in model.named_parameters()
        if p.grad is None or not bool(p.grad.any())
    }


@torch.no_grad()
def _run(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    return _leaves(model(*inputs[0], **inputs[1]))


def _leaves(outputs: Any) -> list[Tensor]:
    """Every tensor of real numbers in what a model returns."""
    return [
        t
        for t in pytree.tree_leaves(outputs)
        if isinstance(t, Tensor) and t.is_floating_point()
    ]


def _weighted_sum(leaves: Sequence[Tensor]) -> Tensor:
    """A plain sum is constant behind a softmax or a norm, so numbers get random weights."""
    torch.manual_seed(1)
    return torch.stack(
        [(t.float() * torch.randn(t.shape, device=t.device)).sum() for t in leaves]
    ).sum()


# --- one pair


def check_pair(plain: Plain, method: Method) -> dict[str, Any]:
    """Run all checks of one pair; none can stop the others."""
    found: dict[str, Any] = {"checks": dict.fromkeys(CHECKS, "not run"), "errors": {}}

    def check(name: str, act: Callable[[], Any]) -> bool:
        if found["checks"][name] == "fails":
            return False
        try:
            act()
            found["checks"][name] = "holds"
        except Exception as error:
            found["checks"][name] = "fails"
            found["errors"][name] = words_of(error)
        return found["checks"][name] == "holds"

    net = deepcopy(plain.model)
    if check("convert", lambda: sb.bayesianize(net, method.neutral(net))):
        check("zero noise", lambda: _check_neutral(plain, net, method))
        check("summary", lambda: str(sb.summary(net)))
        check("undo", lambda: _check_undo(plain, net))
    net = deepcopy(plain.model)
    if check("convert", lambda: sb.bayesianize(net, method.usual(net))):
        check("draws", lambda: _check_draws(plain, net, method))
        check("fold", lambda: _check_fold(plain, net, method))
        check("gradients", lambda: _check_gradients(plain, net, method))
    return found


def _sampled(
    net: nn.Module, inputs: Inputs, draws: int, **options: Any
) -> list[Tensor]:
    torch.manual_seed(2)
    total = draws * sb.members(net)
    return _leaves(sb.sample(net, *inputs[0], draws=total, **options, **inputs[1]))


def _check_neutral(plain: Plain, net: nn.Module, method: Method) -> None:
    with torch.no_grad():
        sampled = _sampled(net, plain.inputs, method.draws)
    _compare("sample", sampled, plain.outputs, method.close, draws=True)
    _compare("a bare call", _run(net, plain.inputs), plain.outputs, method.close)


def _compare(
    what: str,
    got: Sequence[Tensor],
    wanted: Sequence[Tensor],
    close: float = CLOSE,
    draws: bool = False,
) -> None:
    """Equal up to rounding; with `draws`, `got` has an axis of draws in front."""
    if len(got) != len(wanted):
        raise Failed(f"{what} gives {len(got)} tensors, not {len(wanted)}")
    for one, other in zip(got, wanted, strict=True):
        shape = one.shape[1:] if draws else one.shape
        if shape != other.shape:
            raise Failed(
                f"{what} gives the shape {tuple(one.shape)} for {tuple(other.shape)}"
            )
        off = _off(one, other)
        if not off <= close:
            raise Failed(f"{what} is off by {off:.1e} of the largest output")


def _off(one: Tensor, other: Tensor) -> float:
    return (
        float((one - other).abs().max() / other.abs().max().clamp_min(1e-30))
        if one.numel()
        else 0.0
    )


def _check_draws(plain: Plain, net: nn.Module, method: Method) -> None:
    with torch.no_grad():
        outputs = _sampled(net, plain.inputs, method.draws)
    spread = max(_off(t, t[:1].expand_as(t)) for t in outputs)
    if not spread > APART:
        raise Failed(f"draws differ by {spread:.1e} of the largest output")


def _check_fold(plain: Plain, net: nn.Module, method: Method) -> None:
    try:
        _compare_folded(net, plain.inputs, method.draws)
    except Failed as told:
        # A deep random net may blow rounding up; what vanishes in float64 is rounding.
        try:
            wide = pytree.tree_map(
                lambda t: t.double() if t.is_floating_point() else t, plain.inputs
            )
            _compare_folded(deepcopy(net).double(), wide, method.draws)
        except Exception:
            raise told from None


@torch.no_grad()
def _compare_folded(net: nn.Module, inputs: Inputs, draws: int) -> None:
    folded = _sampled(net, inputs, draws)
    one_by_one = _sampled(net, inputs, draws, parallel=False)
    # Where draws hardly differ, the largest output says little about whether these are the same draws.
    spread = max(_off(t, t[:1].expand_as(t)) for t in one_by_one)
    _compare("folded sample", folded, one_by_one, min(CLOSE, 0.02 * spread + 1e-6))


def _check_gradients(plain: Plain, net: nn.Module, method: Method) -> None:
    net.train()
    _weighted_sum(_sampled(net, plain.inputs, method.draws)).backward()
    net.eval()
    own = {
        name: p.grad
        for name, p in net.named_parameters()
        if _is_posterior(name) and p.requires_grad
    }
    bad = [
        name
        for name, grad in own.items()
        if grad is not None and not bool(grad.isfinite().all())
    ]
    if bad:
        raise Failed(f"gradients that are not finite: {_some(bad)}")
    awake = {
        name
        for name, grad in own.items()
        if grad is not None and (method.may_be_zero or bool(grad.any()))
    }
    layers = {_layer(name) for name in awake}
    resting = [
        n
        for n in own
        if n not in awake
        and not _asleep_in_plain(n, plain)
        and not (method.may_rest and _layer(n) in layers)
    ]
    if resting:
        raise Failed(f"no gradient: {_some(resting)}")


def _is_posterior(name: str) -> bool:
    return ".posterior." in f".{name}"


def _layer(name: str) -> str:
    return f".{name}".partition(".posterior.")[0].strip(".")


def _asleep_in_plain(name: str, plain: Plain) -> bool:
    """Whether the plain layer, or the parameter that a member of an ensemble repeats, has no gradient either."""
    layer, _, rest = f".{name}".partition(".posterior.")
    if repeated := re.search(r"(?:^|\.)others\.\d+\.(.+)", rest):
        return f"{layer}.{repeated[1]}".strip(".") in plain.asleep
    try:
        own = [
            f"{layer}.{n}".strip(".")
            for n, _ in plain.model.get_submodule(layer.strip(".")).named_parameters()
        ]
    except AttributeError:  # the posterior is kept elsewhere
        return False
    return bool(own) and plain.asleep.issuperset(own)


def _check_undo(plain: Plain, net: nn.Module) -> None:
    sb.debayesianize(net)
    now, before = net.state_dict(), plain.model.state_dict()
    if list(now) != list(before) or [n for n, _ in net.named_parameters()] != [
        n for n, _ in plain.model.named_parameters()
    ]:
        raise Failed(
            f"names differ: {_some(sorted(now.keys() ^ before.keys())) or 'their order'}"
        )
    changed = [
        name
        for name in now
        if isinstance(now[name], Tensor) and not torch.equal(now[name], before[name])
    ]
    types = [
        n
        for (n, a), (_, b) in zip(
            net.named_modules(), plain.model.named_modules(), strict=True
        )
        if type(a).__qualname__
        != type(b).__qualname__  # every module of torch.fx has a class of its own
    ]
    if changed or types:
        raise Failed(f"changed: {_some(changed + types)}")
    outputs = _run(net, plain.inputs)
    if not plain.repeatable:
        _compare("the plain model", outputs, plain.outputs)
    elif not all(map(torch.equal, outputs, plain.outputs)):
        raise Failed("outputs differ though all weights are equal")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (
        f" and {len(names) - 3} more" if len(names) > 3 else ""
    )


def words_of(error: BaseException) -> str:
    text = " ".join(str(error).split())[:400]
    return text if isinstance(error, Failed) else f"{type(error).__name__}: {text}"
