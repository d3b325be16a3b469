"""sample, fixed_draws and materialize: run a model under S draws, hold draws over many calls, or copy a draw or a
member's mean into a plain model.

Sizes: S draws, B rows of the caller's batch, K members. Folded batches are draw-major: rows [j*B:(j+1)*B] belong to
draw j, and draw j to member j mod K.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
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
def fixed_draws(
    model: Model, draws: int | Literal["mean"] | None = None, seed: Seed = None
) -> Iterator[Model]:
    """Hold S draws over every call inside the block: the same functions on every batch.

    Inside, `sample(model, x)` returns (S, B, ...) of the held draws, `predict(model, x)` averages them, and a plain
    forward `model(x)` shares the examples of its batch out among them. Methods that draw afresh for every example hold
    one draw for all of them here. Threads that begin inside hold nothing: run what they call by
    `contextvars.copy_context().run`.

    Args:
        model: a converted model, or a part of one.
        draws: S, the total number of draws; one from each member by default. Draw j belongs to member j mod K. With
            "mean" nothing is drawn: each member is held at its posterior mean, without any noise. A Cauchy or
            log-normal factor has its median, and dropout is off.
        seed: as in `sample`. Equal seeds hold equal functions, the same that `predict` uses with that seed; by default
            the seed is the next number of torch's own generator.

    Example:
        >>> import slimbayes as sb
        >>> net, x = sb.bayesianize(nn.Linear(4, 3), sb.MeanField()), torch.randn(5, 4)
        >>> with fixed_draws(net, 8):
        ...     same = torch.equal(sample(net, x), sample(net, x))
        >>> same
        True
        >>> with fixed_draws(net, "mean"):
        ...     torch.equal(net(x), nn.functional.linear(x, net.weight, net.bias))
        True
    """
    if draws is not None:
        check_draws("fixed_draws", draws, also=("mean",))
    if draws == "mean" and seed is not None:
        raise ValueError(
            'fixed_draws(model, "mean") draws nothing, so it takes no seed.'
        )
    posteriors = converted_posteriors(model)
    if any(passes.pass_of(p.key) is not None for p in posteriors):
        raise ValueError(
            "fixed_draws cannot run inside another fixed_draws or a call of the model: draws are already held."
        )
    if not posteriors:
        yield model
        return
    if draws == "mean":
        new = central_pass(posteriors)
    else:
        total = calls.count_draws(posteriors, draws)
        new = Pass(total, 1, held=True)
        noise.draw_numbered(posteriors, new, noise.seed_of(seed))
    with passes.holding(new):
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


def materialize(
    model: Model,
    *,
    draw: int | None = None,
    member: int | Literal["mean"] | None = None,
) -> Model:
    """A plain copy of a converted model, with the weights of one draw, of one member or of the members' mean.

    The copy has no posterior and the classes that the model had before it was converted. The model itself stays as it
    is. Give either `draw` or `member`.

    Args:
        model: a converted model, or a part of one.
        draw: number of one of the S draws that `fixed_draws` holds, from 0 to S - 1; only inside its block. Draw j
            belongs to member j mod K.
        member: number of a member, from 0 to K - 1, whose weights are then at their mean, without any noise (medians,
            of Cauchy and log-normal factors). "mean" averages the members' weights and biases, which for rank-1
            methods is one network near all of them.

    Example:
        >>> import slimbayes as sb
        >>> net, x = sb.bayesianize(nn.Linear(4, 3), sb.Rank1(members=2)), torch.randn(5, 4)
        >>> with fixed_draws(net, 6):
        ...     plain = materialize(net, draw=4)
        ...     bool(torch.allclose(plain(x), sample(net, x)[4], atol=1e-6))
        True
        >>> type(plain).__name__
        'Linear'
        >>> with fixed_draws(net, "mean"):
        ...     means = sample(net, x)
        >>> bool(torch.allclose(materialize(net, member=1)(x), means[1], atol=1e-6))
        True
    """
    if (draw is None) == (member is None):
        given = "neither" if draw is None else "both"
        raise ValueError(
            f"materialize needs either a draw or a member, got {given}: materialize(model, draw=j) inside "
            f'`with fixed_draws(model):`, or materialize(model, member=k), or member="mean".'
        )
    posteriors = converted_posteriors(model)
    if member is None:
        return _materialize_draw(model, posteriors, draw)
    return _materialize_member(model, posteriors, member)


def _materialize_draw(model: Model, posteriors: Sequence[Any], draw: Any) -> Model:
    """A plain copy with the weights of one of the draws that are held."""
    if not posteriors:
        return debayesianize(copy_modules(model))
    held = passes.pass_of(posteriors[0].key)
    held = held.fixed if isinstance(held, bare.Scope) else held
    if held is None or not held.held:
        raise ValueError(
            f"materialize(model, draw={draw!r}) found no draws that are held: call it inside "
            f"`with fixed_draws(model):`."
        )
    if not isinstance(draw, Integral) or not 0 <= int(draw) < held.total:
        raise ValueError(
            f"materialize: draw must be a number from 0 to {held.total - 1}, got {draw!r}."
        )
    return passes.run(held.single(int(draw)), _plain_copy, model)


@torch.no_grad()
def _materialize_member(model: Model, posteriors: Sequence[Any], member: Any) -> Model:
    """A plain copy with the weights of one member at its mean, or the average of all members' ones."""
    total = calls.count_members(posteriors)
    if member != "mean" and not (
        isinstance(member, Integral) and 0 <= int(member) < total
    ):
        raise ValueError(
            f'materialize: member must be "mean" or a number from 0 to {total - 1}, got {member!r}.'
        )
    if not posteriors:
        return debayesianize(copy_modules(model))
    means = central_pass(posteriors)
    if member != "mean":
        return passes.run(means.single(int(member)), _plain_copy, model)
    every = [passes.run(means.single(k), _plain_copy, model) for k in range(total)]
    averages = []
    for tensors in zip(*(plain.state_dict().values() for plain in every), strict=True):
        if isinstance(tensors[0], Tensor) and tensors[0].is_floating_point():
            wide = torch.promote_types(tensors[0].dtype, torch.float32)
            average = torch.stack([t.to(wide) for t in tensors]).mean(0)
            averages.append((tensors[0], average))
    for own, average in averages:  # only now: a tied one is listed under all its names
        own.copy_(average)
    return every[0]


@torch.no_grad()
def _plain_copy(model: Model) -> Model:
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
            setattr(plain.get_submodule(parent), last, _plain_copy(layer))
    return plain


def _fill(plain: nn.Module, layer: BayesLayer) -> None:
    """Write the drawn weights of one layer into its plain copy."""
    for site in layer.sites():
        posterior: Any = layer.posterior[site.name]
        linear = layer.linear_map(site.name)
        if not posterior.has_weights or linear.weight.is_meta:
            raise ValueError(
                f"{posterior.name}: a draw of {type(posterior).__name__}, or on the meta device, is no weight that a "
                f"plain layer can hold."
            )
        layer.write_draw(plain, site, *posterior.materialize(linear, 0))
