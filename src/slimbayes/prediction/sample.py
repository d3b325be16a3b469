"""sample, frozen, mean, write_out and merge: run a model under S draws, hold draws or means over many calls, or write a
draw or a member's mean into a plain model.

Sizes: S draws, B rows of the caller's batch, K members. Folded batches are draw-major: rows [j*B:(j+1)*B] belong to
draw j, and draw j to member j mod K.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from slimbayes.convert.bayesianize import conversions_of, debayesianize
from slimbayes.engine import bare, calls, noise, passes
from slimbayes.engine.calls import Parallel
from slimbayes.engine.layout import arrays_of
from slimbayes.engine.noise import Seed
from slimbayes.engine.objects import copy_containers, is_opaque, stack_draws
from slimbayes.engine.passes import Noise, Pass
from slimbayes.engine.state import copy_modules
from slimbayes.layers.base import BayesLayer, Converted
from slimbayes.prediction.checks import MISFITS, check_draws, explain

Model = TypeVar("Model", bound=nn.Module)


def members(model: nn.Module) -> int:
    """K, the number of members of a converted model; with several methods, their least common multiple.

    >>> import slimbayes as sb
    >>> members(sb.bayesianize(nn.Linear(2, 2), sb.BatchEnsemble(members=3)))
    3
    """
    return calls.count_members(converted_posteriors(model))


def converted_posteriors(model: nn.Module) -> list[Any]:
    """The posteriors of a converted model, or of a part of one; refuses a model that was never converted."""
    found = passes.posteriors_of(model)
    if not found:
        conversions_of(model)
    return found


def device_of(model: nn.Module) -> torch.device:
    """Where a model's first parameter is."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def sample(
    model: nn.Module,
    *args: Any,
    draws: int | None = None,
    rows: Literal["tile", "split"] = "tile",
    parallel: Parallel = "auto",
    seed: Seed = None,
    **kwargs: Any,
) -> Any:
    """Run the model under S draws from its posterior.

    Args:
        model: a converted model, or a part of one; its mode (train or eval) is left as it is.
        *args, **kwargs: what the model takes. What holds rows is found out on the first call and repeated for each
            draw.
        draws: S, the number of draws; by default K, one from each member. It need not be a multiple of K.
        rows: "tile" lets every draw see every row; "split" hands the rows out, the first S-th of them to draw 0.
        parallel: True runs all draws as one large batch, False one after another: the same draws, so the same outputs.
            "auto" folds where that was proven to be right for this kind of input, and says so once where it is not.
        seed: a whole number or a torch.Generator from which everything random in the call follows; by default torch's
            own generators.

    Shape: every tensor of the output gets a leading axis S; what follows is what the plain model returns.
    Draw j belongs to member j mod K.

    Example:
        >>> import slimbayes as sb
        >>> net = sb.bayesianize(nn.Linear(4, 3), sb.Rank1(members=2))
        >>> sample(net, torch.randn(5, 4), draws=6).shape
        torch.Size([6, 5, 3])
    """
    check_draws("sample", draws, parallel)
    if rows not in ("tile", "split"):
        raise ValueError(f'rows must be "tile" or "split", got {rows!r}.')
    posteriors = converted_posteriors(model)
    if not arrays_of((args, kwargs)):
        if rows == "split" or not any(map(is_opaque, (*args, *kwargs.values()))):
            raise ValueError(
                "sample found no tensor among the inputs, so it cannot tell the number of rows."
            )
        parallel = (
            False  # what an object of somebody's holds cannot be repeated for each draw
        )
    if not posteriors:
        with noise.own_noise(
            None if seed is None else noise.seed_of(seed), device_of(model)
        ):
            every = (copy_containers((args, kwargs)) for _ in range(draws or 1))
            return stack_draws([model(*own, **options) for own, options in every])
    held = calls.held_draws("sample", posteriors, seed)
    total = calls.count_draws(posteriors, draws) if held is None else held.total
    how = (
        total,
        parallel,
        held,
        rows == "split",
        False,
        None if seed is None else noise.seed_of(seed),
    )
    if torch.compiler.is_compiling():
        return calls.run_sampled(model, posteriors, args, kwargs, *how)
    try:
        return calls.run_sampled(model, posteriors, args, kwargs, *how)
    except MISFITS as error:
        explain(error, model, args, kwargs)


@contextmanager
def frozen(
    model: nn.Module, draws: int | None = None, seed: Seed = None
) -> Iterator[nn.Module]:
    """Hold S draws over every call inside the block: the same functions on every batch. By default one for each member.

    Inside, `sample(model, x)` returns (S, B, ...) of the held draws, and a plain forward, `model(x)`, shares its rows out
    among them. Methods that draw afresh for every row hold one draw for all rows here. Equal seeds hold equal functions, the
    same that `predict` uses with that seed; by default the seed is the next number of torch's own generator.
    Threads that begin inside hold nothing: run what they call by `contextvars.copy_context().run`.

    Example:
        >>> import slimbayes as sb
        >>> net = sb.bayesianize(nn.Linear(1, 1), sb.Rank1(members=1))
        >>> x = torch.linspace(-1, 1, 5).unsqueeze(1)
        >>> with frozen(net, draws=8):
        ...     same = torch.equal(sample(net, x), sample(net, x))
        >>> same
        True
    """
    check_draws("frozen", draws)
    posteriors = converted_posteriors(model)
    if not posteriors:
        yield model
        return
    if passes.pass_of(posteriors[0].key) is not None:
        raise ValueError("frozen cannot be nested: draws are already held.")
    new = Pass(calls.count_draws(posteriors, draws), 1, held=True)
    noise.draw_numbered(posteriors, new, noise.seed_of(seed))
    with passes.holding(new):
        yield model


@contextmanager
def mean(model: Model) -> Iterator[Model]:
    """Run the posterior mean over every call inside the block: each member's centre, without any noise.

    A Cauchy or log-normal factor has its median, dropout is off. Members stay apart: inside, `sample(model, x)` and
    `predict(model, x)` give one draw for each, and a plain forward, `model(x)`, shares its rows out among them.

    Example:
        >>> import slimbayes as sb
        >>> net, x = sb.bayesianize(nn.Linear(4, 3), sb.MeanField()), torch.randn(5, 4)
        >>> with mean(net):
        ...     torch.equal(net(x), nn.functional.linear(x, net.weight, net.bias))
        True
    """
    posteriors = converted_posteriors(model)
    if any(passes.pass_of(p.key) is not None for p in posteriors):
        raise ValueError(
            "mean cannot run inside frozen, another mean or a call of the model: draws are already held."
        )
    if not posteriors:
        yield model
        return
    with passes.holding(central_pass(posteriors)):
        yield model


def central_pass(posteriors: Sequence[Any]) -> Pass:
    """A pass that holds one draw for each member, at its mean; refused where draws have none."""
    new = Pass(calls.count_members(posteriors), 1, held=True)
    new.centred = True
    noise.draw_numbered(posteriors, new, 0)
    for posterior in posteriors:
        own = new.noise[posterior.key]
        new.put(posterior.key, Noise(posterior.centre(own.block), own.row))
    return new


def write_out(model: Model, draw: int = 0) -> Model:
    """A plain copy of a model with the weights of one draw that `frozen` holds: no posterior, the classes it had.

    Args:
        draw: number of the held draw, which belongs to member draw mod K.

    Example:
        >>> import slimbayes as sb
        >>> net, x = sb.bayesianize(nn.Linear(4, 3), sb.Rank1(members=2)), torch.randn(5, 4)
        >>> with frozen(net, draws=6):
        ...     bool(torch.allclose(write_out(net, 4)(x), sample(net, x)[4], atol=1e-6))
        True
    """
    posteriors = converted_posteriors(model)
    held = passes.pass_of(posteriors[0].key) if posteriors else None
    held = held.frozen if isinstance(held, bare.Scope) else held
    if posteriors and (held is None or not held.held or not 0 <= draw < held.total):
        raise ValueError(
            f"write_out(model, {draw}) needs that draw to be held: call it inside `with frozen(model, draws=...):`."
        )
    if not posteriors or held is None:
        return debayesianize(copy_modules(model))
    return passes.run(held.single(draw), write_out_draw, model)


@torch.no_grad()
def write_out_draw(model: Model) -> Model:
    """A plain copy with the weights of the one draw of the pass under way."""
    if isinstance(model, Converted) and not isinstance(model, BayesLayer):
        members: Any = model.posterior["members"]
        index = int(members.values()[0])
        return debayesianize(
            copy_modules(members.others[index - 1] if index else model)
        )
    plain = debayesianize(copy_modules(model))
    for name, layer in model.named_modules():
        if isinstance(layer, BayesLayer):
            _fill(plain.get_submodule(name), layer)
        elif isinstance(layer, Converted):
            parent, _, last = name.rpartition(".")
            setattr(plain.get_submodule(parent), last, write_out_draw(layer))
    return plain


def _fill(plain: nn.Module, layer: BayesLayer) -> None:
    """Write the drawn weights of one layer into its plain copy."""
    for site in layer.sites():
        posterior: Any = layer.posterior[site.name]
        linear = layer.linear_map(site.name)
        if not posterior.has_weights or linear.weight.is_meta:
            what = f"a draw of {type(posterior).__name__}, or on the meta device, is no weight that can be written out"
            raise ValueError(f"{posterior.name}: {what}.")
        layer.write_draw(plain, site, *posterior.materialise(linear, 0))


@torch.no_grad()
def merge(model: Model, member: int | Literal["mean"] = 0) -> Model:
    """A plain copy of a converted model whose weights are those of one member at its mean, or the mean of all members.

    Noise is gone: factors and weights are at their means (medians, of log-normal factors). The mean of members is that
    of their weights and biases, which for rank-1 methods is one network near all of them.

    Args:
        model: a converted model; it stays as it is.
        member: number of the member, or "mean".

    Example:
        >>> import slimbayes as sb
        >>> net = sb.bayesianize(nn.Linear(4, 3), sb.BatchEnsemble(members=2))
        >>> plain, x = merge(net, member=1), torch.randn(5, 4)
        >>> type(plain).__name__, bool(torch.allclose(plain(x), sb.sample(net, x)[1], atol=1e-6))
        ('Linear', True)
    """
    posteriors = converted_posteriors(model)
    if not posteriors:
        return debayesianize(copy_modules(model))
    total = calls.count_members(posteriors)
    if member != "mean" and not (isinstance(member, int) and 0 <= member < total):
        raise ValueError(
            f'merge: member must be "mean" or a number from 0 to {total - 1}, got {member!r}.'
        )
    new = central_pass(posteriors)
    if member != "mean":
        return passes.run(new.single(member), write_out_draw, model)
    every = [passes.run(new.single(k), write_out_draw, model) for k in range(total)]
    means = []
    for tensors in zip(*(plain.state_dict().values() for plain in every), strict=True):
        if isinstance(tensors[0], Tensor) and tensors[0].is_floating_point():
            wide = torch.promote_types(tensors[0].dtype, torch.float32)
            means.append(
                (tensors[0], torch.stack([t.to(wide) for t in tensors]).mean(0))
            )
    for own, mean in means:  # only now: what is tied is listed under each of its names
        own.copy_(mean)
    return every[0]
