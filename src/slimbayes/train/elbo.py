"""Likelihoods, the KL of a model, and the ELBO that joins them. All terms are per datum.

    loss = nll + kl_weight * KL / num_data          nll: mean over the batch;  KL: sum over layers, members and elements

Each likelihood takes S draws of the model's outputs and combines them in one of the four forms of the rank-1 paper's Appendix D:

    "average"   Eq. 13   mean over draws of -log p(y | draw)          the paper's training loss
    "mixture"   Eq. 14   -log mean over draws of p(y | draw)          the evaluation loss, by logsumexp
    "probs"     Eq. 12   -log p(y | mean over draws of the predicted parameters)
    "logits"    Eq. 11   -log p(y | mean over draws of the outputs)

Sizes: S draws, B rows, C classes, N data.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimbayes.engine.passes import posteriors_of
from slimbayes.errors import did_you_mean
from slimbayes.layers.base import BayesLayer

Form = Literal["average", "mixture", "probs", "logits"]
_FORMS = ("average", "mixture", "probs", "logits")


class ELBO(NamedTuple):
    """Terms of the negative evidence lower bound per datum: `loss` to minimise, `nll` and `kl` to log."""

    loss: Tensor
    nll: Tensor
    kl: Tensor


def elbo(nll: Tensor, model: nn.Module, num_data: int, kl_weight: float | Tensor = 1.0, micro_batches: int = 1) -> ELBO:
    """Negative ELBO per datum: nll + kl_weight * KL(model) / num_data.

    To accumulate gradients over k micro-batches, pass `nll / k` and `micro_batches=k`: each brings a k-th of the KL, so
    that the k backward passes count it once. `.kl` is then the share of one micro-batch. Hugging Face's Trainer adds up
    the losses of models whose forward takes loss arguments (`**kwargs`, most language models) without dividing them:
    there, too, give `micro_batches=gradient_accumulation_steps`. Other losses it divides itself: leave 1. Its weight
    decay would shrink factors and scales: use
    `Trainer(optimizers=(torch.optim.AdamW(sb.param_groups(model, 0.01)), None))`.

    Args:
        nll: mean negative log-likelihood of the batch, a scalar from one of the likelihoods here or from your own loss.
        model: a converted model.
        num_data: size of the training set, not of the batch.
        kl_weight: annealing weight, see `slimbayes.train.schedules`. `.kl` is reported without it.
        micro_batches: how many losses are added up before the optimizer steps.

    Example:
        >>> import slimbayes as sb
        >>> net = sb.bayesianize(nn.Linear(4, 3), sb.Rank1(members=2))
        >>> x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
        >>> terms = elbo(categorical(sb.sample(net, x), y), net, num_data=1000)
        >>> torch.equal(terms.loss, terms.nll + terms.kl)
        True
    """
    if not num_data > 0:
        raise ValueError(f"num_data must be the size of the training set, at least 1, got {num_data!r}.")
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(f"micro_batches must be a whole number of at least 1, got {micro_batches!r}.")
    divergence = kl(model) / (num_data * micro_batches)
    loss = nll + kl_weight * divergence
    if loss.device.type == "cpu" and not torch.compiler.is_compiling() and not bool(loss.isfinite().all()):
        check_finite(model)  # on a GPU this would stall every step; call it yourself when a loss turns NaN
    return ELBO(loss, nll, divergence)


def kl(model: nn.Module) -> Tensor:
    """KL(posterior || prior) of a whole model: summed over layers, members and elements, not divided by anything.

    Add `kl(model) / num_data` to the mean loss of any training loop of your own.

    Example:
        >>> import slimbayes as sb
        >>> bool(kl(sb.bayesianize(nn.Linear(4, 3), sb.Rank1())) > 0)
        True
    """
    layers = [m for m in model.modules() if isinstance(m, BayesLayer)]
    every = [(p, partial(layer.linear_map, site)) for layer in layers for site, p in layer.posterior.items()]
    found = list({id(pair[0]): pair for pair in reversed(every)}.values())[
        ::-1
    ]  # layers with one weight share a posterior: once
    terms: list[Tensor] = []
    for kind in dict.fromkeys((type(p), p.sharded) for p, _ in found):
        same = [pair for pair in found if (type(pair[0]), pair[0].sharded) == kind]
        if kind[1]:
            terms += [p.kl(linear) for p, linear in same]
        else:
            terms += kind[0].kl_together([p for p, _ in same], [linear for _, linear in same])
    if not terms:
        first = next(model.parameters(), torch.zeros(()))
        return torch.zeros((), device=first.device)
    # FSDP2: parameters of a group that is resharded after its forward give sharded terms, the others whole ones.
    sharded = [term for term in terms if hasattr(term, "full_tensor")]
    whole = [term for term in terms if not hasattr(term, "full_tensor")]
    if sharded:
        whole.append(sum(sharded[1:], sharded[0]).full_tensor())
    return sum((term.to(whole[0].device) for term in whole[1:]), whole[0])


def check_finite(model: nn.Module) -> None:
    """Raise if a posterior parameter is NaN or infinite, naming the layer.

    `predict`, `save` and (on CPU) `elbo` call this by themselves.
    """
    found = [p.detach() for posterior in posteriors_of(model) for p in posterior.parameters()]
    flags: dict[torch.device, list[Tensor]] = {}
    for parameter in found:
        flags.setdefault(parameter.device, []).append(parameter.isfinite().all())
    # One number is read for each device, not one for each parameter.
    if all(bool(_whole(torch.stack(same).all())) for same in flags.values()):
        return
    for posterior in posteriors_of(model):
        for name, parameter in posterior.named_parameters():
            bad = int((~parameter.detach().isfinite()).sum())
            if bad:
                raise FloatingPointError(
                    f"{posterior.name}: {bad} of {parameter.numel()} values of its posterior's {name} are NaN or infinite. Training has "
                    f"diverged: lower the learning rate, clip gradients, or go back to an earlier checkpoint."
                )


def _whole(flag: Tensor) -> Tensor:
    return flag.full_tensor() if hasattr(flag, "full_tensor") else flag


def categorical(
    logits: Tensor, target: Tensor, form: Form = "average", class_dim: int = -1, ignore_index: int = -100
) -> Tensor:
    """Mean negative log-likelihood of class labels under S draws of logits.

    Shape: logits (S, B, ..., C), classes along `class_dim`; target (B, ...) class indices, or (B, ..., C) probabilities (soft labels);
    returns a scalar, the mean over all targets that are not `ignore_index`.

    Example:
        >>> categorical(torch.zeros(2, 3, 4), torch.tensor([0, 1, 2])).round(decimals=4)  # log 4
        tensor(1.3863)
    """
    check_classes(logits, class_dim)
    logits = logits.movedim(class_dim, -1)
    soft = target.is_floating_point()
    _check(logits, target, logits.shape[1:] if soft else logits.shape[1:-1], form)
    if form == "logits":
        logits, form = logits.mean(0, keepdim=True), "average"
    if form == "probs":
        form = "mixture"  # the parameters are the probabilities themselves: Eq. 12 is Eq. 14
    logp = F.log_softmax(logits, -1)
    if soft:
        if form == "mixture":  # the expected log of the mixture, label by label
            return -(target * _log_mean(logp)).sum(-1).mean()
        return -(target * logp).sum(-1).mean()
    kept = target != ignore_index
    picked = logp.gather(
        -1, target.where(kept, torch.zeros_like(target)).expand(logp.shape[:-1]).unsqueeze(-1)
    ).squeeze(-1)
    return (_combine(picked, form) * kept).sum() / kept.sum()


def bernoulli(logits: Tensor, target: Tensor, form: Form = "average") -> Tensor:
    """Mean negative log-likelihood of binary labels under S draws of logits.

    Shape: logits (S, B, ...), target (B, ...) in [0, 1]; returns a scalar.

    Example:
        >>> bernoulli(torch.zeros(2, 3), torch.tensor([0.0, 1.0, 1.0])).round(decimals=4)  # log 2
        tensor(0.6931)
    """
    _check(logits, target, logits.shape[1:], form)
    if form == "logits":
        logits, form = logits.mean(0, keepdim=True), "average"
    if form == "probs":
        form = "mixture"  # Eq. 12 is Eq. 14, as for classes
    yes, no = F.logsigmoid(logits), F.logsigmoid(-logits)
    if form == "mixture" and bool(((target != 0) & (target != 1)).any()):
        return -(target * _log_mean(yes) + (1 - target) * _log_mean(no)).mean()
    target = target.to(logits.dtype)
    return _combine(
        torch.where(target == 1, yes, torch.where(target == 0, no, target * yes + (1 - target) * no)), form
    ).mean()


def gaussian(mean: Tensor, target: Tensor, scale: float | Tensor = 1.0, form: Form = "average") -> Tensor:
    """Mean negative log-likelihood of real targets with known or shared noise under S draws of means.

    Shape: mean (S, B, ...), target (B, ...), scale a float or a tensor that broadcasts against target; returns a scalar: the mean over
    rows of the sum over a row's outputs. "logits" and "probs" both average the means, which are the distribution's parameters.

    Example:
        >>> gaussian(torch.zeros(2, 3), torch.zeros(3)).round(decimals=4)  # log(2 pi) / 2
        tensor(0.9189)
    """
    if form in ("logits", "probs"):
        mean, form = mean.mean(0, keepdim=True), "average"
    return _gaussian(mean, target, torch.as_tensor(scale, dtype=mean.dtype, device=mean.device), form)


def heteroscedastic_gaussian(output: Tensor, target: Tensor, form: Form = "average") -> Tensor:
    """Mean negative log-likelihood of real targets under S draws of means and noise scales.

    The network gives two numbers for each target: the mean, and the noise scale before a softplus.

    Shape: output (S, B, ..., 2), target (B, ...); returns a scalar, as `gaussian`. "probs" averages the mean and the variance,
    "logits" the raw outputs.

    Example:
        >>> heteroscedastic_gaussian(torch.zeros(2, 3, 2), torch.zeros(3)).round(decimals=4)  # scale log 2, and the floor
        tensor(0.5526)
    """
    check_two_outputs(output)
    if form == "logits":
        output, form = output.mean(0, keepdim=True), "average"
    mean, scale = output[..., 0], noise_scale(output[..., 1])
    if form == "probs":
        mean, scale, form = mean.mean(0, keepdim=True), scale.square().mean(0, keepdim=True).sqrt(), "average"
    return _gaussian(mean, target, scale, form)


def noise_scale(raw: Tensor) -> Tensor:
    """The positive noise scale behind a raw network output: softplus, with a floor of 1e-4 against collapse."""
    return F.softplus(raw) + 1e-4


def check_classes(logits: Tensor, class_dim: int) -> None:
    """Refuse the logits of one class: its probability is 1 whatever the network says."""
    if logits.shape[class_dim] == 1:
        raise ValueError(
            f"A categorical likelihood needs logits of at least two classes, got one along dimension {class_dim} of "
            f"outputs of shape {tuple(logits.shape)}. "
            f'For a yes or no use likelihood="bernoulli", for a real target "gaussian".'
        )


def check_two_outputs(outputs: Tensor) -> None:
    """Refuse outputs that are not a mean and a raw scale for each target."""
    if outputs.shape[-1] != 2:
        raise ValueError(
            f"heteroscedastic_gaussian needs two numbers for each target, its mean and its raw scale, in a last "
            f"dimension of 2; got outputs of shape {tuple(outputs.shape)}. "
            f'View T targets as (..., T, 2); for means alone use "gaussian".'
        )


def _check(outputs: Tensor, target: Tensor, needed: torch.Size, form: str) -> None:
    """Refuse a target that would broadcast, as (B,) against (S, B, 1) does, and a form that is none."""
    if target.shape != needed:
        raise ValueError(
            f"A target of shape {tuple(needed)} is needed for outputs of shape {tuple(outputs.shape)}, got {tuple(target.shape)}."
        )
    if form not in _FORMS:
        raise ValueError(f"Unknown form {form!r}{did_you_mean(form, _FORMS)}")


def _gaussian(mean: Tensor, target: Tensor, scale: Tensor, form: str) -> Tensor:
    if mean.shape[1:] != target.shape:
        # Broadcasting (S, B, 1) against (B,) would silently compare every row with every target.
        raise ValueError(
            f"A target of shape {tuple(mean.shape[1:])} is needed for outputs of shape {tuple(mean.shape)}, got {tuple(target.shape)}."
        )
    logp = -0.5 * ((target - mean) / scale) ** 2 - scale.log() - 0.5 * math.log(2 * math.pi)
    return _combine(logp.flatten(2).sum(-1) if logp.dim() > 2 else logp, form).mean()


def _combine(logp: Tensor, form: str) -> Tensor:
    """Negative log-likelihood of each row from log densities (S, B, ...)."""
    if form == "average":
        return -logp.mean(0)  # Eq. 13
    if form == "mixture":
        return -_log_mean(logp)  # Eq. 14
    raise ValueError(f"Unknown form {form!r}{did_you_mean(form, _FORMS)}")


def _log_mean(logp: Tensor) -> Tensor:
    return torch.logsumexp(logp, 0) - math.log(logp.shape[0])


LIKELIHOODS: dict[str, Callable[..., Tensor]] = {
    f.__name__: f for f in (categorical, bernoulli, gaussian, heteroscedastic_gaussian)
}
