"""How a network is trained, as closed types: optimizer, learning rates, KL annealing, decay, and the papers' options."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from slimbayes.train.elbo import Form

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class SGD(Part):
    kind: Literal["SGD"]
    lr: Positive = 0.1
    momentum: NotNegative = 0.9
    nesterov: bool = True


class Adam(Part):
    kind: Literal["Adam"]
    lr: Positive = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: Positive = 1e-8


class AdamW(Adam):
    """Adam with decoupled weight decay."""

    kind: Literal["AdamW"]  # type: ignore[assignment]


class Constant(Part):
    kind: Literal["Constant"] = "Constant"
    warmup: NotNegative = 0.0  # epochs of linear rise


class Step(Part):
    """Falls by `factor` at each milestone, a share of training."""

    kind: Literal["Step"]
    milestones: tuple[Share, ...]
    factor: Positive = 0.1
    warmup: NotNegative = 0.0


class Cosine(Part):
    """Falls along half a cosine to `end` times the base rate."""

    kind: Literal["Cosine"]
    end: Share = 0.0
    warmup: NotNegative = 0.0


class OneCycle(Part):
    """Rises from 1/`start` of the base rate to it over `rise` of training, then falls to 1/`end`, both along half a cosine."""

    kind: Literal["OneCycle"]
    rise: Annotated[float, Field(gt=0, lt=1)] = 0.3
    start: Positive = 25.0
    end: Positive = 1e4


class ConstantKL(Part):
    kind: Literal["Constant"] = "Constant"
    weight: NotNegative = 1.0


class LinearKL(Part):
    """Rises to one over a share of training: 0.8 on CIFAR and two thirds on ImageNet in the rank-1 paper."""

    kind: Literal["Linear"]
    share: Annotated[float, Field(gt=0, le=1)] = 0.8


class StaircaseKL(Part):
    """Rises by slope * every at each multiple of `every` steps (k-tied Normal, Appendix D.4)."""

    kind: Literal["Staircase"]
    slope: Positive
    every: Count = 100


class Decay(Part):
    """Weight decay for each kind of parameter; an L2 penalty lambda * |w|^2 is twice lambda here."""

    kernels: NotNegative = 0.0
    biases: NotNegative = 0.0
    norms: NotNegative = 0.0


class L2(Part):
    """Factors of the four sums of `slimbayes.l2`."""

    patched_weights: NotNegative = 0.0
    patched_biases: NotNegative = 0.0
    shared_weights: NotNegative = 0.0
    shared_biases: NotNegative = 0.0


class EarlyStop(Part):
    """Stop when the NLL of the validation rows has not fallen for `patience` epochs; the best epoch's weights are kept."""

    patience: Count = 5


Optimizer = Annotated[SGD | Adam | AdamW, Field(discriminator="kind")]
Schedule = Annotated[Constant | Step | Cosine | OneCycle, Field(discriminator="kind")]
KL = Annotated[ConstantKL | LinearKL | StaircaseKL, Field(discriminator="kind")]


class Train(Part):
    """How it is trained.

    Attributes:
        batch: rows of a step, over all processes. The rows of an epoch that do not fill a batch are left to another epoch.
        rows: "tile" shows every row to every draw; "split" hands the rows of a batch out among the draws.
        draws: of each member, in a step.
        form: how draws join in the likelihood, as in `slimbayes.categorical`.
        posterior_lr: learning rate of the posterior's parameters relative to the others' (the papers' fast-weight multiplier).
        weight_decay: for all of the network's own parameters, or for kernels, biases and norms apart. Never for factors.
        l2: the penalty of Ensemble Model Patching, instead.
        clip: largest norm of the gradient.
        accumulate: cut each batch into so many pieces and add their gradients.
        norm_statistics: "member" lets each member keep batch-norm statistics of its own; "shared" is the papers'.
        noise: standard deviation of the targets' noise, for real targets (standardised).
        ema: decay of a running average of the weights, which is what is evaluated and saved.
    """

    epochs: Count
    batch: Count = 128
    rows: Literal["tile", "split"] = "tile"
    draws: Count = 1
    form: Form = "average"
    optimizer: Optimizer
    schedule: Schedule = Constant()
    kl: KL = ConstantKL()
    posterior_lr: Positive = 1.0
    weight_decay: NotNegative | Decay = 0.0
    l2: L2 | None = None
    clip: Positive | None = None
    accumulate: Count = 1
    norm_statistics: Literal["shared", "member"] = "shared"
    noise: Positive = 1.0
    precision: Literal["32", "bf16"] = "32"
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    early_stop: EarlyStop | None = None

    @model_validator(mode="after")
    def _pieces(self) -> Train:
        if self.batch % self.accumulate:
            raise ValueError(f"accumulate must divide the batch of {self.batch}, got {self.accumulate}.")
        return self
