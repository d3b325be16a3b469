"""The KL of a model, and the ELBO that joins it with a likelihood. All terms are per datum.

loss = nll + temperature * kl_weight * KL / num_data
    nll: mean over the batch;  KL: sum over layers, members and elements
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn

from slimbayes.engine.modules import Keyed, kinds_of, posteriors_of
from slimbayes.errors import SlimbayesWarning

# Nats that a datum can tell: 7 of one in 1,000 classes, 5 of a target between its noise's floor and ceiling.
_MOST = 10.0
_warned: WeakSet[nn.Module] = (
    WeakSet()
)  # models whose KL was said to dwarf the likelihood


class ELBO(NamedTuple):
    """Terms of the negative evidence lower bound per datum: `loss` to minimise, `nll` and `kl` to log."""

    loss: Tensor
    nll: Tensor
    kl: Tensor


def elbo(
    nll: Tensor,
    model: nn.Module,
    num_data: int,
    kl_weight: float | Tensor = 1.0,
    micro_batches: int = 1,
    temperature: float = 1.0,
) -> ELBO:
    """Negative ELBO per datum: nll + temperature * kl_weight * KL(model) / num_data.

    A `temperature` below 1 is a cold (tempered) posterior. Networks have far more weights than there are data to pay
    for their KL, so that at 1 the prior often decides: docs/recipes.md has the temperatures that scored best
    on small tasks, and a warning says, once for a model and on CPUs, that the KL dwarfs the likelihood.

    To accumulate gradients over k micro-batches, pass `nll / k` and `micro_batches=k`: each brings a k-th of the KL, so
    that the k backward passes count it once. `.kl` is then the share of one micro-batch. Hugging Face's Trainer adds up
    the losses of models whose forward takes loss arguments (`**kwargs`, most language models) without dividing them:
    there, too, give `micro_batches=gradient_accumulation_steps`. Other losses it divides itself: leave 1. Its weight
    decay would shrink factors and scales: use
    `Trainer(optimizers=(torch.optim.AdamW(sb.param_groups(model, 0.01)), None))`.

    Args:
        nll: mean negative log-likelihood of the batch, a scalar from one of the likelihoods here or from your own loss.
        model: a converted model.
        num_data: over how many targets `nll` is a mean in the whole training set, not in the batch: its rows; where a
            row has many classes (tokens, pixels) or yes and no labels, all of these that are not ignored. Real targets
            of a row are summed: of them it is rows, always.
        kl_weight: annealing weight, see `slimbayes.train.schedules`.
        micro_batches: how many losses are added up before the optimizer steps.
        temperature: of the posterior; 1 is Bayes' rule. `.kl` is reported without it and without `kl_weight`.

    Example:
        >>> import slimbayes as sb
        >>> net = sb.bayesianize(nn.Linear(4, 3), sb.Rank1(members=2))
        >>> x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
        >>> terms = elbo(sb.categorical(sb.sample(net, x), y), net, num_data=1000, temperature=0.1)
        >>> torch.allclose(terms.loss, terms.nll + 0.1 * terms.kl)
        True
    """
    if not isinstance(nll, Tensor) or nll.numel() != 1:
        got = (
            f"shape {tuple(nll.shape)}"
            if isinstance(nll, Tensor)
            else type(nll).__name__
        )
        raise ValueError(
            f"nll must be a tensor of one number, the mean over the batch, got {got}: use nll.mean()."
        )
    every = posteriors_of(model)
    if not every and not any("_slimbayes" in m.__dict__ for m in model.modules()):
        raise ValueError(
            f"This {type(model).__name__} has not been converted, so it has no KL: see bayesianize."
        )
    if not hasattr(num_data, "__float__") or not 0 < num_data < math.inf:
        raise ValueError(
            f"num_data must be the size of the training set, at least 1, got {num_data!r}."
        )
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(
            f"micro_batches must be a whole number of at least 1, got {micro_batches!r}."
        )
    if not isinstance(kl_weight, Tensor) and not 0 <= kl_weight < math.inf:
        raise ValueError(
            f"kl_weight must be a number from 0 on, 1 for the whole KL, got {kl_weight!r}."
        )
    if not 0 < temperature < math.inf:
        raise ValueError(
            f"temperature must be positive, 1 for Bayes' rule, got {temperature!r}."
        )
    divergence = _kl(model, every) / (num_data * micro_batches)
    weighed = temperature * kl_weight * divergence
    loss = nll + weighed
    if (
        loss.device.type == "cpu" and not torch.compiler.is_compiling()
    ):  # on a GPU this would stall every step
        if not math.isfinite(loss.item()):
            check_finite(model)
        elif model not in _warned:
            warn_of_dwarfed(model, micro_batches * float(weighed.detach()))
    return ELBO(loss, nll, divergence)


def dwarfed(weighed_kl: float) -> str | None:
    """A sentence if the KL, per datum and as it is weighed in the loss, leaves the likelihood no say; else None.

    The NLL is no measure of that: other units of a real target add any number of nats to it.

    >>> dwarfed(40.0)[:65]
    'The KL is 40 nats for each datum, more than one can tell: the pri'
    >>> dwarfed(0.4)
    """
    if not weighed_kl > _MOST:
        return None
    return (
        f"The KL is {weighed_kl:.3g} nats for each datum, more than one can tell: the prior decides, not the data. "
        f"Lower the temperature (docs/recipes.md), take a prior nearer to where the weights are, or use fewer members."
    )


def warn_of_dwarfed(model: nn.Module, weighed_kl: float) -> None:
    """Say once for a model that its KL, per datum, dwarfs the likelihood, if it does."""
    said = None if model in _warned else dwarfed(weighed_kl)
    if said:
        _warned.add(model)
        warnings.warn(said, SlimbayesWarning, stacklevel=3)


@contextmanager
def silent_of_dwarfed(model: nn.Module) -> Iterator[None]:
    """No word from single steps on a large KL: whoever trains looks at it when done."""
    said = model in _warned
    _warned.add(model)
    try:
        yield
    finally:
        if not said:
            _warned.discard(model)


def kl(model: nn.Module) -> Tensor:
    """KL(posterior || prior) of a whole model: summed over layers, members and elements, not divided by anything.

    Add `kl(model) / num_data` to the mean loss of any training loop of your own.

    Example:
        >>> import slimbayes as sb
        >>> bool(kl(sb.bayesianize(nn.Linear(4, 3), sb.Rank1())) > 0)
        True
    """
    return _kl(model, posteriors_of(model))


def _kl(model: nn.Module, every: Any) -> Tensor:
    terms: list[Tensor] = []
    kinds = kinds_of(every)
    for alike in kinds:
        terms += type(alike[0]).kl_together(alike)
    if sum(map(len, kinds)) < len(every):
        terms += [p.kl() for p in every if p.sharded]
    if not terms:
        first = next(model.parameters(), torch.zeros(()))
        return torch.zeros((), device=first.device)
    if len(terms) == 1 and not hasattr(terms[0], "full_tensor"):
        return terms[0]
    # FSDP2: parameters of a group that is resharded after its forward give sharded terms, the others whole ones.
    sharded = [term for term in terms if hasattr(term, "full_tensor")]
    whole = [term for term in terms if not hasattr(term, "full_tensor")]
    if sharded:
        whole.append(sum(sharded[1:], sharded[0]).full_tensor())
    return sum((term.to(whole[0].device) for term in whole[1:]), whole[0])


@torch.no_grad()
def check_finite(model: nn.Module) -> None:
    """Raise if a weight, a posterior's parameter or a buffer is NaN or infinite, naming which.

    Buffers other than running statistics may hold infinities, as masks do.

    `predict`, `save` and (on CPU) `elbo` call this by themselves.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 1))
        >>> net[0].bias.data.fill_(torch.nan)
        tensor([nan])
        >>> check_finite(net)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        FloatingPointError: 0: 1 of 1 values of its own bias, not of a posterior, are NaN or infinite. Training ...
    """
    numbers = _numbers(model)
    alike: dict[tuple[torch.device, bool], list[Tensor]] = {}
    for _, tensor, masks in numbers:
        # infinite where a mask has a NaN
        looked_at = (~tensor.isnan().any()).float().reciprocal() if masks else tensor
        alike.setdefault((tensor.device, hasattr(tensor, "full_tensor")), []).append(
            looked_at
        )
    # One number is read for each device, not one for each parameter. A norm may overflow by itself: it only raises the
    # question.
    if all(
        bool(_whole(torch.stack(torch._foreach_norm(same)).isfinite().all()))
        for same in alike.values()
    ):
        return
    for name, tensor, masks in numbers:
        bad = int(_whole((tensor.isnan() if masks else ~tensor.isfinite()).sum()))
        if bad:
            owner, own = _owner(model, name)
            raise FloatingPointError(
                f"{owner}: {bad} of {tensor.numel()} values of {own} are NaN or infinite. Training has diverged: lower "
                f"the learning rate, clip gradients, or go back to an earlier checkpoint."
            )


def _numbers(model: nn.Module) -> list[tuple[str, Tensor, bool]]:
    """All parameters and buffers of floating type, by name, and whether infinities may stand in them."""
    every: list[tuple[str, Tensor, bool]] = [
        (name, p, False) for name, p in model.named_parameters()
    ]
    every += [
        (name, b, not name.rpartition(".")[2].startswith("running_"))
        for name, b in model.named_buffers()
    ]
    return [
        (n, t, masks)
        for n, t, masks in every
        if t.is_floating_point() and not t.is_meta and t.numel()
    ]


def _owner(model: nn.Module, name: str) -> tuple[str, str]:
    """The layer that a parameter or buffer belongs to, and what it is there."""
    for path, module in model.named_modules():
        if isinstance(module, Keyed) and name.startswith(f"{path}."):
            return str(module.name), f"its posterior's {name.removeprefix(f'{path}.')}"
    layer, _, last = name.rpartition(".")
    return layer or "the model", f"its own {last}, not of a posterior,"


def _whole(flag: Tensor) -> Tensor:
    return flag.full_tensor() if hasattr(flag, "full_tensor") else flag
