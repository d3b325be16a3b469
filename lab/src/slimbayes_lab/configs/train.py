"""How a network is trained: optimizer, learning rates, KL annealing, decay, and the papers' options.

Rates and weights are functions of the step alone, so that nothing of them is saved.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from slimbayes.train import Form, schedules
from slimbayes_lab.configs.choices import Options

if TYPE_CHECKING:
    import torch
    from torch import nn

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1, lt=2**53)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Groups = list[dict[str, Any]]

# --- optimizers ---


class SGD(Options):
    kind: Literal["SGD"]
    lr: Positive = 0.1
    momentum: BelowOne = 0.9
    nesterov: bool = True

    def build(
        self, groups: Groups, fused: bool | None, capturable: bool
    ) -> torch.optim.Optimizer:
        import torch

        nesterov = self.nesterov and self.momentum > 0
        return torch.optim.SGD(
            groups, lr=self.lr, momentum=self.momentum, nesterov=nesterov, fused=fused
        )


class Adam(Options):
    kind: Literal["Adam", "AdamW"]
    lr: Positive = 1e-3
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    eps: Positive = 1e-8

    def build(
        self, groups: Groups, fused: bool | None, capturable: bool
    ) -> torch.optim.Optimizer:
        import torch

        kind = torch.optim.AdamW if self.kind == "AdamW" else torch.optim.Adam
        return kind(
            groups,
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            capturable=capturable,
            fused=fused,
        )


# --- learning rates, as multiples of the base rate ---


class WarmUp(Options):
    """Rises linearly over so many epochs, then does as its kind says."""

    warmup: NotNegative = 0.0

    def at(self, step: int, total: int, per_epoch: int) -> float:
        """The rate of one step of `total`, of which an epoch has `per_epoch`."""
        warm = round(self.warmup * per_epoch)
        return (min(1.0, (step + 1) / warm) if warm else 1.0) * self.after_warmup(
            step, warm, total
        )

    def after_warmup(self, step: int, warm: int, total: int) -> float:
        return 1.0


class Constant(WarmUp):
    kind: Literal["Constant"] = "Constant"


class StepDecay(WarmUp):
    """Falls by `factor` at each milestone, a share of training."""

    kind: Literal["Step"]
    milestones: tuple[Share, ...]
    factor: Positive = 0.1

    def after_warmup(self, step: int, warm: int, total: int) -> float:
        return self.factor ** sum(
            step >= round(milestone * total, 6) for milestone in self.milestones
        )


class Cosine(WarmUp):
    """Falls along half a cosine to `end` times the base rate."""

    kind: Literal["Cosine"]
    end: Share = 0.0

    def after_warmup(self, step: int, warm: int, total: int) -> float:
        done = min(1.0, max(0, step - warm) / max(1, total - warm))
        return self.end + (1 - self.end) * 0.5 * (1 + math.cos(math.pi * done))


# --- weights of the KL: each ends at `weight`, the temperature of the posterior, which is one for Bayes' rule ---


class ConstantKL(Options):
    kind: Literal["Constant"] = "Constant"
    weight: NotNegative = 1.0

    def at(self, step: int, total: int) -> float:
        return self.weight


class LinearKL(Options):
    """Rises to `weight` over a share of training: 0.8 on CIFAR and two thirds on ImageNet in the rank-1 paper."""

    kind: Literal["Linear"]
    share: Annotated[float, Field(gt=0, le=1)] = 0.8
    weight: NotNegative = 1.0

    def at(self, step: int, total: int) -> float:
        return self.weight * schedules.linear(max(1, round(self.share * total)))(step)


class StaircaseKL(Options):
    """Rises by weight * slope * every at each multiple of `every` steps (k-tied Normal, Appendix D.4), to `weight`."""

    kind: Literal["Staircase"]
    slope: Positive
    every: Count = 100
    weight: NotNegative = 1.0

    def at(self, step: int, total: int) -> float:
        return self.weight * schedules.staircase(self.slope, self.every)(step)


# --- the rest ---


class Decay(Options):
    """Weight decay for each kind of parameter; an L2 penalty lambda * |w|^2 is twice lambda here."""

    kernels: NotNegative = 0.0
    biases: NotNegative = 0.0
    norms: NotNegative = 0.0


class L2(Options):
    """Factors of the four sums of `slimbayes.l2`."""

    patched_weights: NotNegative = 0.0
    patched_biases: NotNegative = 0.0
    shared_weights: NotNegative = 0.0
    shared_biases: NotNegative = 0.0


class EarlyStop(Options):
    """Stop when the validation rows' NLL has not fallen for `patience` epochs; the best epoch's weights are kept."""

    patience: Count = 5


class Snapshots(Options):
    """Score test rows, too, after every so many epochs, of the last so many: columns `test_` and `member0_` of the
    curve, to look at training with. Nothing is chosen by them."""

    every: Count = 1
    last: Count | None = None

    def due(self, epoch: int, epochs: int) -> bool:
        """Whether an epoch of so many, the first of which is 1, is scored; the last one is.

        Example:
            >>> [epoch for epoch in range(1, 11) if Snapshots(every=2, last=5).due(epoch, 10)]
            [6, 8, 10]
        """
        return (epochs - epoch) % self.every == 0 and (
            self.last is None or epoch > epochs - self.last
        )


class Train(Options):
    """How it is trained.

    Attributes:
        batch: rows of a step, over all processes. The rows of an epoch that do not fill a batch are left to another.
        rows: "tile" shows every row to every draw; "split" hands the rows of a batch out among the draws.
        draws: of each member, in a step.
        kl: the weight of the KL: how it rises, and where it ends, below one for a tempered posterior.
        form: how draws join in the likelihood, as in `slimbayes.categorical`.
        posterior_lr: learning rate of the posterior's parameters relative to the others' (the fast-weight multiplier).
        weight_decay: for the network's own parameters, or for kernels, biases and norms apart. Never for factors.
        l2: the penalty of Ensemble Model Patching, instead.
        clip: largest norm of the gradient.
        ensemble_loss: of a deep ensemble; "sum" trains each member as it would train alone, "mean" with a part of the
            rate.
        noise: of real targets, in units of their standard deviation: a number; "learned", one number for each target;
            or "heteroscedastic", a function of the row, from a network with two outputs for each target. By default
            learned for tables and data of one's own, 1 for others.
        track: what to note of a Gaussian posterior after each epoch: "scales", and "snr", the noise of their gradients
            (see runs/step.py).
    """

    epochs: Count
    batch: Count = 128
    rows: Literal["tile", "split"] = "tile"
    draws: Count = 1
    form: Form = "average"
    optimizer: Annotated[SGD | Adam, Field(discriminator="kind")]
    schedule: Annotated[Constant | StepDecay | Cosine, Field(discriminator="kind")] = (
        Constant()
    )
    kl: Annotated[ConstantKL | LinearKL | StaircaseKL, Field(discriminator="kind")] = (
        ConstantKL()
    )
    posterior_lr: Positive = 1.0
    weight_decay: NotNegative | Decay = 0.0
    l2: L2 | None = None
    clip: Positive | None = None
    ensemble_loss: Literal["sum", "mean"] = "sum"
    noise: Positive | Literal["learned", "heteroscedastic"] | None = None
    precision: Literal["32", "bf16"] = "32"
    early_stop: EarlyStop | None = None
    track: tuple[Literal["scales", "snr"], ...] = ()
    snapshots: Snapshots | None = None

    def rate(self, step: int, per_epoch: int) -> float:
        """Learning rate of a step as a multiple of the base rate."""
        return self.schedule.at(step, self.epochs * per_epoch, per_epoch)

    def kl_weight(self, step: int, per_epoch: int) -> float:
        """Weight of the KL in a step."""
        return self.kl.at(step, self.epochs * per_epoch)

    def build_optimizer(
        self, model: nn.Module, graph: bool = False
    ) -> torch.optim.Optimizer:
        """The optimizer of a converted model; with `graph` its rates are tensors that a CUDA graph rereads."""
        import torch

        from slimbayes.train.optim import param_groups

        decay = (
            self.weight_decay.model_dump()
            if isinstance(self.weight_decay, Decay)
            else self.weight_decay
        )
        groups = param_groups(model, decay, self.optimizer.lr, self.posterior_lr)
        for group in groups:
            group["base_lr"] = group["lr"]
            if graph:
                group["lr"] = torch.tensor(group["lr"], device="cuda")
        return self.optimizer.build(
            groups, True if next(model.parameters()).is_cuda else None, graph
        )


def set_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set every group's learning rate to its own base rate times a factor."""
    for group in optimizer.param_groups:
        rate = group["base_lr"] * factor
        if hasattr(group["lr"], "fill_"):  # a tensor, which a graph rereads
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
