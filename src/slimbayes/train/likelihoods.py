"""Likelihoods: what a model's outputs mean, in training (`nll`) and in prediction (`predictive`).

Each function takes S draws of outputs and combines them in one of four forms (rank-1 paper, Appendix D):

    "average"   Eq. 13   mean over draws of -log p(y | draw)          the paper's training loss
    "mixture"   Eq. 14   -log mean over draws of p(y | draw)          the evaluation loss, by logsumexp
    "probs"     Eq. 12   -log p(y | mean over draws of the predicted parameters)
    "logits"    Eq. 11   -log p(y | mean over draws of the outputs)

`LIKELIHOODS` joins each with what its draws predict; nothing else in the library decides by a likelihood's name.
Sizes: S draws, B rows, C classes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from slimbayes.errors import did_you_mean
from slimbayes.train import Form as Form
from slimbayes.train import LikelihoodName as LikelihoodName
from slimbayes.train.fisher import BINARY, CLASSES, MEANS, MEANS_AND_SCALES, Fisher
from slimbayes.train.heteroscedastic import check_spread, noise_scale, noise_unit
from slimbayes.train.targets import (
    FORMS,
    can_read_values,
    check_classes,
    check_classes_of,
    check_real,
    check_shape,
    check_shares,
    check_two_outputs,
    is_floating,
    scale_for,
)


def categorical(
    logits: Tensor,
    target: Tensor,
    form: Form = "average",
    class_dim: int = -1,
    ignore_index: int = -100,
) -> Tensor:
    """Mean negative log-likelihood of class labels under S draws of logits.

    Shape: logits (S, B, ..., C), classes along `class_dim`; target (B, ...) class indices, or (B, ..., C) probabilities
    (soft labels); returns a scalar, the mean over all targets that are not `ignore_index`. Labels that are none are
    refused on a CPU; on a GPU that would stall every step: `check_targets` looks at a whole set once.

    Example:
        >>> categorical(torch.zeros(2, 3, 4), torch.tensor([0, 1, 2])).round(decimals=4)  # log 4
        tensor(1.3863)
    """
    check_classes(logits, class_dim)
    logits = logits if class_dim == -1 else logits.movedim(class_dim, -1)
    soft = is_floating(target)
    check_shape(
        logits,
        target,
        logits.shape[1:] if soft and target.dim() > 1 else logits.shape[1:-1],
        form,
    )
    if can_read_values(target) or (soft and target.dim() == 1):
        check_classes_of(target, logits.shape[-1], ignore_index)
    if form == "logits":
        logits, form = logits.mean(0, keepdim=True), "average"
    if form == "probs":
        form = "mixture"  # the parameters are the probabilities themselves: Eq. 12 is Eq. 14
    if form == "average" and not soft:
        every = target.long().expand(logits.shape[:-1]).flatten()
        return F.cross_entropy(logits.flatten(0, -2), every, ignore_index=ignore_index)
    logp = F.log_softmax(logits, -1)
    if soft:
        if form == "mixture":  # the expected log of the mixture, label by label
            return -(target * _log_mean(logp)).sum(-1).mean()
        return -(target * logp).sum(-1).mean()
    kept = target != ignore_index
    labels = target.long().where(kept, 0)
    picked = logp.gather(-1, labels.expand(logp.shape[:-1]).unsqueeze(-1)).squeeze(-1)
    return (_combine(picked, form) * kept).sum() / kept.sum()


def bernoulli(logits: Tensor, target: Tensor, form: Form = "average") -> Tensor:
    """Mean negative log-likelihood of binary labels under S draws of logits.

    Shape: logits (S, B, ...), target (B, ...) in [0, 1]; returns a scalar, the mean over all targets: of L labels for
    each row, `num_data` of `elbo` is L times the rows.

    Example:
        >>> bernoulli(torch.zeros(2, 3), torch.tensor([0.0, 1.0, 1.0])).round(decimals=4)  # log 2
        tensor(0.6931)
    """
    check_shape(logits, target, logits.shape[1:], form)
    if can_read_values(target):
        check_shares(target)
    if form == "logits":
        logits, form = logits.mean(0, keepdim=True), "average"
    yes, no = F.logsigmoid(logits), F.logsigmoid(-logits)
    if form in (
        "probs",
        "mixture",
    ):  # Eq. 12 is Eq. 14, as for classes; the expected log of the mixture
        yes, no, form = _log_mean(yes)[None], _log_mean(no)[None], "average"
    target = target.to(logits.dtype)
    return _combine(
        torch.where(
            target == 1,
            yes,
            torch.where(target == 0, no, target * yes + (1 - target) * no),
        ),
        form,
    ).mean()


def gaussian(
    mean: Tensor,
    target: Tensor,
    likelihood_std: float | Tensor = 1.0,
    form: Form = "average",
) -> Tensor:
    """Mean negative log-likelihood of real targets with known or shared noise under S draws of means.

    Shape: mean (S, B, ...), target (B, ...), likelihood_std a float or a tensor that broadcasts against target; returns
    a scalar: the mean over rows of the sum over a row's outputs. "logits" and "probs" both average the means, which
    are the distribution's parameters.

    Example:
        >>> gaussian(torch.zeros(2, 3), torch.zeros(3)).round(decimals=4)  # log(2 pi) / 2
        tensor(0.9189)
    """
    if form in ("logits", "probs"):
        mean, form = mean.mean(0, keepdim=True), "average"
    return _gaussian(mean, target, scale_for(likelihood_std, target, mean), form)


def heteroscedastic_gaussian(
    output: Tensor,
    target: Tensor,
    form: Form = "average",
    likelihood_std: float | Tensor = 1.0,
) -> Tensor:
    """Mean negative log-likelihood of real targets under S draws of means and noise scales.

    The network gives two numbers for each target: the mean, and the noise scale before `noise_scale`, which keeps it
    between 0.03 and 3 times the targets' spread.

    Shape: output (S, B, ..., 2), target (B, ...), likelihood_std the targets' own standard deviation: 1 if they are
    standardised, else a float or a tensor that broadcasts against target; returns a scalar, as `gaussian`. "probs"
    averages the mean and the variance, "logits" the raw outputs.

    Example:
        >>> heteroscedastic_gaussian(torch.zeros(2, 3, 2), torch.zeros(3)).round(decimals=4)  # noise 0.21
        tensor(-0.6428)
    """
    check_two_outputs(output)
    spread = scale_for(likelihood_std, target, output)
    if can_read_values(target):
        check_spread(target, spread)
    if form == "logits":
        output, form = output.mean(0, keepdim=True), "average"
    mean, noise = output[..., 0], noise_scale(output[..., 1], spread)
    if form == "probs":
        mean, noise, form = (
            mean.mean(0, keepdim=True),
            noise.square().mean(0, keepdim=True).sqrt(),
            "average",
        )
    return _gaussian(mean, target, noise, form)


def _gaussian(mean: Tensor, target: Tensor, scale: Tensor, form: str) -> Tensor:
    check_shape(mean, target, mean.shape[1:], form)
    if can_read_values(target):
        check_real(target)
    logp = (
        -0.5 * ((target - mean) / scale) ** 2
        - scale.log()
        - 0.5 * math.log(2 * math.pi)
    )
    return _combine(logp.flatten(2).sum(-1) if logp.dim() > 2 else logp, form).mean()


def _combine(logp: Tensor, form: str) -> Tensor:
    """Negative log-likelihood of each row from log densities (S, B, ...)."""
    if form == "average":
        return -logp.mean(0)  # Eq. 13
    if form == "mixture":
        return -_log_mean(logp)  # Eq. 14
    raise ValueError(f"Unknown form {form!r}{did_you_mean(form, FORMS)}")


def _log_mean(logp: Tensor) -> Tensor:
    return torch.logsumexp(logp, 0) - math.log(logp.shape[0])


def entropy(logs: Tensor) -> Tensor:
    """Entropy in nats of the probabilities whose logs are the last dimension: (..., C) to (...)."""
    surprise = -logs.clamp_min(
        torch.finfo(logs.dtype).min
    )  # finite, as zero times infinity is nan
    return (logs.exp() * surprise).sum(-1)


# What each draw predicts, from outputs (S, B, ...): logs of class probabilities and their entropies, or means and
# noise variances.


def _classes(
    outputs: Tensor, scale: float | Tensor, class_dim: int | None
) -> tuple[Tensor, Tensor]:
    if class_dim is None and outputs.dim() > 4:
        raise ValueError(
            f"Outputs of shape {tuple(outputs.shape)} do not say where their classes are. "
            f"Give class_dim=2 for images (S, N, C, H, W), class_dim=-1 where classes come last."
        )
    class_dim = -1 if class_dim is None else class_dim
    check_classes(outputs, class_dim)
    logs = F.log_softmax(outputs.movedim(class_dim, -1), -1)
    return logs, entropy(logs)


def _two_classes(
    outputs: Tensor, scale: float | Tensor, class_dim: int | None
) -> tuple[Tensor, Tensor]:
    logits = (
        outputs.squeeze(-1) if outputs.dim() > 2 and outputs.shape[-1] == 1 else outputs
    )
    logs = torch.stack([F.logsigmoid(-logits), F.logsigmoid(logits)], -1)
    return logs, entropy(logs)


def _means(
    outputs: Tensor, scale: float | Tensor, class_dim: int | None
) -> tuple[Tensor, Tensor]:
    variance = torch.as_tensor(scale**2, dtype=outputs.dtype, device=outputs.device)
    return outputs, variance + torch.zeros_like(
        outputs
    )  # a copy_ that broadcasts is none in ONNX


def _means_and_scales(
    outputs: Tensor, scale: float | Tensor, class_dim: int | None
) -> tuple[Tensor, Tensor]:
    check_two_outputs(outputs)
    spread = torch.as_tensor(
        noise_unit(scale), dtype=outputs.dtype, device=outputs.device
    )
    return outputs[..., 0], noise_scale(outputs[..., 1], spread).square()


@dataclass(frozen=True)
class Likelihood:
    """What outputs mean.

    Attributes:
        function: negative log-likelihood of targets, as training loops of one's own call it.
        predictive: of outputs (S, B, ...), a standard deviation and the dimension of classes: what each draw predicts.
        fisher: their information about the outputs.
        discrete: whether targets are classes, not real numbers.
        option: what `function` takes besides the form: "likelihood_std", "class_dim" or nothing.
        learns_noise: whether outputs have the noise in them, by `noise_scale`.
    """

    function: Callable[..., Tensor]
    predictive: Callable[[Tensor, float | Tensor, int | None], tuple[Tensor, Tensor]]
    fisher: Fisher
    discrete: bool
    option: Literal["likelihood_std", "class_dim", ""] = ""
    learns_noise: bool = False

    def nll(
        self,
        outputs: Tensor,
        target: Tensor,
        form: Form,
        likelihood_std: float | Tensor = 1.0,
        class_dim: int | None = None,
    ) -> Tensor:
        """Mean negative log-likelihood under S draws; what this likelihood does not take is left out."""
        options = {
            "likelihood_std": likelihood_std,
            "class_dim": -1 if class_dim is None else class_dim,
        }
        return self.function(
            outputs,
            target,
            form=form,
            **{k: v for k, v in options.items() if k == self.option},
        )


LIKELIHOODS: dict[str, Likelihood] = {
    "categorical": Likelihood(
        categorical, _classes, CLASSES, discrete=True, option="class_dim"
    ),
    "bernoulli": Likelihood(bernoulli, _two_classes, BINARY, discrete=True),
    "gaussian": Likelihood(
        gaussian, _means, MEANS, discrete=False, option="likelihood_std"
    ),
    "heteroscedastic_gaussian": Likelihood(
        heteroscedastic_gaussian,
        _means_and_scales,
        MEANS_AND_SCALES,
        False,
        option="likelihood_std",
        learns_noise=True,
    ),
}


def likelihood_named(name: str) -> Likelihood:
    """The likelihood of this name."""
    if name not in LIKELIHOODS:
        raise ValueError(
            f"Unknown likelihood {name!r}{did_you_mean(getattr(name, '__name__', str(name)), LIKELIHOODS)}"
        )
    return LIKELIHOODS[name]
