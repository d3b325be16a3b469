"""What the reference holds: networks, methods and options, and how each is called.

Every case is a small network and the method of each of its layers, by public names. The
numbers of a case are in `reference.safetensors`; `write.py` made them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor, nn

import slimbayes as sb


class TokenClassifier(nn.Module):
    """Embed words, run a recurrent layer, and read its last step."""

    def __init__(self, recurrent: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 3)
        self.recurrent = recurrent(3, 3, batch_first=True)
        self.head = nn.Linear(3, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        steps, _ = self.recurrent(self.embedding(tokens))
        return self.head(steps[:, -1])


class AttentionBlock(nn.Module):
    """Self-attention of one head with a residual connection and a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(4, 4)
        self.key = nn.Linear(4, 4, bias=False)
        self.value = nn.Linear(4, 4)
        self.out = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2) / 2
        attended = scores.softmax(-1) @ self.value(x)
        return self.norm(x + self.out(attended))


class SelfAttention(nn.Module):
    """torch's own attention of a sequence to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Network(NamedTuple):
    """How to build a network, what one example looks like, and its layers by kind."""

    build: Callable[[], nn.Module]
    example: tuple[int, ...]
    matrices: tuple[str, ...]
    norms: tuple[str, ...] = ()
    vocabulary: int = 0  # of word indices; 0 for real inputs


MLP = Network(
    lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)),
    (3,),
    ("0", "2"),
)
DROPOUT_MLP = Network(
    lambda: nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.3), nn.Tanh(), nn.Linear(5, 2)),
    (3,),
    ("0", "3"),
)
NORM_MLP = Network(
    lambda: nn.Sequential(
        nn.Linear(3, 4),
        nn.BatchNorm1d(4),
        nn.Tanh(),
        nn.Linear(4, 4),
        nn.LayerNorm(4),
        nn.Linear(4, 2),
    ),
    (3,),
    ("0", "3", "5"),
    ("1", "4"),
)
CONV_NET = Network(
    lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, stride=2, groups=2, bias=False),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 2),
    ),
    (2, 5, 5),
    ("0", "3", "7"),
    ("1", "4"),
)
CONV_1D = Network(
    lambda: nn.Sequential(
        nn.Conv1d(2, 4, 3),
        nn.Tanh(),
        nn.Conv1d(4, 4, 2, groups=4),
        nn.Tanh(),
        nn.ConvTranspose1d(4, 2, 2, groups=2),
    ),
    (2, 6),
    ("0", "2", "4"),
)
CONV_3D = Network(
    lambda: nn.Sequential(
        nn.Conv3d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 2)
    ),
    (1, 3, 3, 3),
    ("0", "3"),
)
LSTM = Network(
    lambda: TokenClassifier(nn.LSTM),
    (3,),
    ("embedding", "recurrent", "head"),
    vocabulary=6,
)
GRU = Network(
    lambda: TokenClassifier(nn.GRU),
    (3,),
    ("embedding", "recurrent", "head"),
    vocabulary=6,
)
ATTENTION = Network(AttentionBlock, (3, 4), ("query", "key", "value", "out"), ("norm",))
TORCH_ATTENTION = Network(SelfAttention, (3, 4), ("attention",))


@dataclass(frozen=True)
class Case:
    """One method on one network.

    Attributes:
        name: what its numbers are called in the file.
        network: the network.
        method: the method of `layers`, or a method for each layer by name.
        layers: names of the converted layers; by default all with weight matrices.
        call: "sample" runs every draw on the whole batch, "fixed" with draws that all
            examples share whatever the method, "plain" is `model(x)` in evaluation,
            where each member serves its part of the batch.
        draws: how many draws; draw j belongs to member j mod K.
        training: whether the network is in training mode.
        likelihood: what the loss is made of, and its form; by default a fixed linear
            functional of the outputs.
        gone: the one word for a method that the next core drops by decision.
        tolerance: what the KL, or its gradient, may be off where it is a quadrature.
    """

    name: str
    network: Network
    method: sb.Config | Mapping[str, sb.Config]
    layers: tuple[str, ...] | None = None
    call: Literal["sample", "fixed", "plain"] = "sample"
    draws: int = 4
    training: bool = False
    likelihood: tuple[str, str] | None = None
    gone: str = ""
    tolerance: float = 1e-6

    @property
    def methods(self) -> dict[str, sb.Config]:
        """The method of each converted layer, by the layer's name."""
        if isinstance(self.method, Mapping):
            return dict(self.method)
        if isinstance(self.method, sb.Ensemble):
            return {"": self.method}
        layers = self.network.matrices if self.layers is None else self.layers
        return dict.fromkeys(layers, self.method)


BATCH = 4
PLAIN_MEMBERS = 2  # of cases with call="plain": their number of draws


def per_member(**options: object) -> sb.Rank1:
    """Rank-1 factors of two members that all examples of a draw share."""
    return sb.Rank1(**({"members": 2, "draws": "member"} | options))


def per_example(**options: object) -> sb.Rank1:
    """Rank-1 factors of two members, drawn for every example."""
    return sb.Rank1(**({"members": 2, "draws": "example"} | options))


SMALL_PRIOR = sb.Normal(0.1, 0.3)

RANK_ONE = [
    Case("rank1-normal", MLP, per_member()),
    Case("rank1-normal-three-members", MLP, per_member(members=3), draws=6),
    Case("rank1-normal-prior", MLP, per_member(prior=sb.Normal(0.9, 0.3))),
    Case("rank1-cauchy", MLP, per_member(prior=sb.Cauchy(1.0, 0.1))),
    Case("rank1-cauchy-no-clip", MLP, per_member(posterior="cauchy", clip=None)),
    Case("rank1-lognormal", MLP, per_member(posterior="lognormal")),
    Case("rank1-point", MLP, per_member(posterior="point")),
    Case("batch-ensemble", MLP, sb.BatchEnsemble(members=2)),
    Case(
        "batch-ensemble-additive",
        MLP,
        sb.BatchEnsemble(members=2, perturbation="additive"),
    ),
    Case("batch-ensemble-rank-2", MLP, sb.BatchEnsemble(members=2, rank=2)),
    Case(
        "rank1-normal-under-cauchy",
        MLP,
        per_member(posterior="normal", prior=sb.Cauchy(1.0, 0.1)),
    ),
    Case(
        "rank1-normal-under-log-uniform",
        MLP,
        per_member(prior=sb.LogUniform()),
        tolerance=3e-5,
    ),
    Case(
        "rank1-cauchy-under-log-uniform",
        MLP,
        per_member(posterior="cauchy", prior=sb.LogUniform()),
    ),
    Case("rank1-lognormal-under-half-cauchy", MLP, per_member(prior=sb.HalfCauchy())),
    Case(
        "rank1-lognormal-under-normal",
        MLP,
        per_member(posterior="lognormal", prior=sb.Normal(1.0, 0.3)),
    ),
    Case(
        "rank1-lognormal-under-cauchy",
        MLP,
        per_member(posterior="lognormal", prior=sb.Cauchy(1.0, 0.3)),
    ),
    Case("rank1-mixture-kl-mean", MLP, per_member(mixture_kl="mean")),
    Case("rank1-mixture-kl-exact", MLP, per_member(mixture_kl="exact")),
    Case("rank1-r-only", MLP, per_member(random="r")),
    Case("rank1-s-only", MLP, per_member(random="s")),
    Case("rank1-additive", MLP, per_member(perturbation="additive")),
    Case("rank1-rank-2", MLP, per_member(rank=2)),
    Case("rank1-no-member-bias", MLP, per_member(member_bias=False)),
    Case("rank1-one-member", MLP, per_member(members=1), draws=2),
    Case("rank1-clip", MLP, per_member(clip=1.1)),
    Case("rank1-per-example", MLP, per_example()),
    Case("rank1-per-example-cauchy", MLP, per_example(posterior="cauchy")),
    Case("rank1-per-example-additive", MLP, per_example(perturbation="additive")),
    Case("rank1-per-example-rank-2", MLP, per_example(rank=2)),
    Case("rank1-fixed-draws", MLP, per_example(), call="fixed"),
    Case("rank1-plain-call", MLP, per_member(), call="plain", draws=PLAIN_MEMBERS),
    Case(
        "rank1-per-example-plain-call",
        MLP,
        per_example(),
        call="plain",
        draws=PLAIN_MEMBERS,
    ),
    Case(
        "batch-ensemble-plain-call",
        CONV_NET,
        sb.BatchEnsemble(members=2),
        call="plain",
        draws=PLAIN_MEMBERS,
    ),
    Case("rank1-conv-net", CONV_NET, per_member()),
    Case("rank1-per-example-conv-net", CONV_NET, per_example()),
    Case("rank1-conv-net-training", CONV_NET, per_member(), training=True),
    Case("rank1-conv-1d", CONV_1D, per_member()),
    Case("rank1-conv-3d", CONV_3D, per_member(), draws=2),
    Case("rank1-lstm", LSTM, per_member(), layers=("recurrent", "head")),
    Case("rank1-gru-and-table", GRU, per_member()),
    Case("rank1-per-example-lstm", LSTM, per_example(), layers=("recurrent", "head")),
    Case("rank1-attention", ATTENTION, per_member()),
    Case("rank1-per-example-attention", ATTENTION, per_example()),
    Case("batch-ensemble-conv-1d", CONV_1D, sb.BatchEnsemble(members=2)),
]

MEAN_FIELD = [
    Case("mean-field", MLP, sb.MeanField(), draws=2),
    Case("mean-field-prior", MLP, sb.MeanField(prior=SMALL_PRIOR), draws=2),
    Case("mean-field-he", MLP, sb.MeanField(prior=sb.HeNormal()), draws=2),
    Case(
        "mean-field-tied-mean",
        MLP,
        sb.MeanField(prior=sb.TiedMean(0.2), bias="gaussian"),
        draws=2,
    ),
    Case("mean-field-laplace", MLP, sb.MeanField(prior=sb.LaplacePrior(0.3)), draws=2),
    Case(
        "mean-field-empirical-bayes",
        MLP,
        sb.MeanField(prior=sb.EmpiricalBayes(), bias="gaussian"),
        draws=2,
    ),
    Case(
        "mean-field-scale-mixture",
        MLP,
        sb.MeanField(prior=sb.ScaleMixture(0.3, 1.0, 0.1)),
        draws=2,
    ),
    Case("mean-field-max-scale", MLP, sb.MeanField(max_scale=0.2), draws=2),
    Case(
        "mean-field-gaussian-bias",
        MLP,
        sb.MeanField(prior=SMALL_PRIOR, bias="gaussian"),
        draws=2,
    ),
    Case(
        "mean-field-he-gaussian-bias",
        MLP,
        sb.MeanField(prior=sb.HeNormal(1.5), bias="gaussian"),
        draws=2,
    ),
    Case("mean-field-plain-call", MLP, sb.MeanField(), call="plain", draws=1),
    Case("mean-field-conv-net", CONV_NET, sb.MeanField(bias="gaussian"), draws=2),
    Case(
        "mean-field-conv-net-training", CONV_NET, sb.MeanField(), draws=2, training=True
    ),
    Case("mean-field-conv-1d", CONV_1D, sb.MeanField(), draws=2),
    Case("mean-field-lstm", LSTM, sb.MeanField(), draws=2),
    Case("mean-field-attention", TORCH_ATTENTION, sb.MeanField(), draws=2),
    Case(
        "mean-field-flipout",
        MLP,
        sb.MeanField(estimator="flipout", bias="gaussian"),
        draws=2,
    ),
    Case(
        "mean-field-flipout-conv-net",
        CONV_NET,
        sb.MeanField(estimator="flipout"),
        draws=2,
    ),
    Case(
        "mean-field-flipout-fixed-draws",
        MLP,
        sb.MeanField(estimator="flipout"),
        call="fixed",
        draws=2,
    ),
    Case(
        "mean-field-local",
        MLP,
        sb.MeanField(estimator="local", bias="gaussian"),
        draws=2,
    ),
    Case(
        "mean-field-local-fixed-draws",
        MLP,
        sb.MeanField(estimator="local"),
        call="fixed",
        draws=2,
    ),
    Case(
        "mean-field-local-conv-net",
        CONV_NET,
        sb.MeanField(estimator="local", independent_positions=True),
        draws=2,
    ),
    Case("k-tied-1", MLP, sb.KTied(rank=1), draws=2),
    Case("k-tied-2", MLP, sb.KTied(rank=2, prior=SMALL_PRIOR), draws=2),
    Case("k-tied-he", MLP, sb.KTied(rank=2, prior=sb.HeNormal()), draws=2),
    Case("k-tied-laplace", MLP, sb.KTied(rank=2, prior=sb.LaplacePrior(0.3)), draws=2),
    Case(
        "k-tied-empirical-bayes",
        MLP,
        sb.KTied(rank=2, prior=sb.EmpiricalBayes()),
        draws=2,
    ),
    Case("k-tied-gaussian-bias", MLP, sb.KTied(rank=2, bias="gaussian"), draws=2),
    Case("k-tied-conv-net", CONV_NET, sb.KTied(rank=2), draws=2),
    Case("k-tied-conv-1d", CONV_1D, sb.KTied(rank=2), draws=2),
    Case("k-tied-lstm", LSTM, sb.KTied(rank=2), draws=2),
    Case("k-tied-attention", TORCH_ATTENTION, sb.KTied(rank=1), draws=2),
    Case("k-tied-flipout", MLP, sb.KTied(rank=2, estimator="flipout"), draws=2),
    Case("k-tied-local", MLP, sb.KTied(rank=2, estimator="local"), draws=2),
    Case("matrix-normal", MLP, sb.MatrixNormal(), draws=2),
]

CORRELATED = [
    Case("full-matrix-normal", MLP, sb.FullMatrixNormal(prior=SMALL_PRIOR), draws=2),
    Case("full-matrix-normal-he", MLP, sb.FullMatrixNormal(prior=sb.HeNormal())),
    Case("full-matrix-normal-conv-1d", CONV_1D, sb.FullMatrixNormal(), draws=2),
    Case("joint-factors", MLP, sb.JointNormal(members=2)),
    Case(
        "joint-factors-and-biases",
        MLP,
        sb.JointNormal(over="both+bias", members=2, prior=sb.Normal(0.875, 0.2)),
    ),
    Case("joint-r", MLP, sb.JointNormal(over="r", members=2)),
    Case("joint-s", MLP, sb.JointNormal(over="s", members=2)),
    Case("joint-factors-directions", MLP, sb.JointNormal(members=2, directions=2)),
    Case("joint-factors-independent", MLP, sb.JointNormal(members=2, full_up_to=0)),
    Case("joint-factors-conv-1d", CONV_1D, sb.JointNormal(members=2)),
    Case(
        "joint-weights",
        MLP,
        sb.JointNormal(over="weights", prior=SMALL_PRIOR),
        draws=2,
    ),
    Case(
        "joint-weights-independent",
        CONV_1D,
        sb.JointNormal(over="weights", prior=SMALL_PRIOR, full_up_to=0),
        draws=2,
    ),
    Case(
        "joint-weights-kronecker",
        MLP,
        sb.JointNormal(
            over="weights", prior=SMALL_PRIOR, full_up_to=0, beyond="kronecker"
        ),
        draws=2,
    ),
]

NORMS = NORM_MLP.norms
PATCHED = [
    Case("emp", NORM_MLP, sb.ModelPatch(components=3), layers=NORMS),
    Case("emp-output", NORM_MLP, sb.ModelPatch(components=3), layers=(*NORMS, "5")),
    Case(
        "emp-precisions",
        NORM_MLP,
        sb.ModelPatch(components=3, tau=0.7, rho=0.3, probs=(0.5, 0.375, 0.125)),
        layers=NORMS,
    ),
    Case(
        "emp-inferred-precisions",
        NORM_MLP,
        sb.ModelPatch(components=3, tau=0.7, rho=0.3, precision_shape=2.5),
        layers=(*NORMS, "5"),
    ),
    Case(
        "emp-learned-probabilities",
        NORM_MLP,
        sb.ModelPatch(components=3, learn_probs=True),
        layers=NORMS,
    ),
    Case(
        "emp-weight-decay",
        NORM_MLP,
        sb.ModelPatch(components=3, tau=None),
        layers=NORMS,
    ),
    Case(
        "emp-per-example",
        NORM_MLP,
        sb.ModelPatch(components=3, draws="example"),
        layers=NORMS,
    ),
    Case(
        "emp-plain-call",
        NORM_MLP,
        sb.ModelPatch(components=3),
        layers=NORMS,
        call="plain",
        draws=1,
    ),
    Case(
        "emp-per-example-plain-call",
        NORM_MLP,
        sb.ModelPatch(components=3, draws="example"),
        layers=NORMS,
        call="plain",
        draws=1,
    ),
    Case(
        "emp-training",
        NORM_MLP,
        sb.ModelPatch(components=3),
        layers=NORMS,
        training=True,
    ),
    Case("emp-conv-net", CONV_NET, sb.ModelPatch(components=3), layers=("1", "4", "7")),
    Case("emp-attention", ATTENTION, sb.ModelPatch(components=2), layers=("norm",)),
    Case("ecmp", NORM_MLP, sb.ModelPatch(components=3, cross=True), layers=NORMS),
    Case(
        "ecmp-output",
        NORM_MLP,
        sb.ModelPatch(components=3, cross=True, probs=(0.5, 0.375, 0.125), rho=0.5),
        layers=(*NORMS, "5"),
    ),
    Case(
        "ecmp-learned-probabilities",
        NORM_MLP,
        sb.ModelPatch(components=3, cross=True, learn_probs=True),
        layers=(*NORMS, "5"),
    ),
    Case(
        "ecmp-per-example",
        NORM_MLP,
        sb.ModelPatch(components=3, cross=True, draws="example"),
        layers=(*NORMS, "5"),
    ),
    Case("mixture-noise", MLP, sb.Mixture(components=2, sigma=0.2)),
    Case("mixture-noise-alone", MLP, sb.Mixture(components=1, sigma=0.2), draws=2),
    Case(
        "mixture-zero",
        MLP,
        sb.Mixture(components=3, zero=True, probs=(0.5, 0.125, 0.375)),
    ),
    Case("mixture-members", MLP, sb.Mixture(components=2, assignment="model")),
    Case("drop-connect", MLP, sb.DropConnect(rate=0.375, tau=0.8, rho=0.3), draws=3),
    Case(
        "drop-connect-per-example",
        MLP,
        sb.DropConnect(rate=0.375, draws="example"),
        draws=2,
    ),
    Case("drop-connect-conv-net", CONV_NET, sb.DropConnect(rate=0.375), draws=2),
    Case("flow-patch", NORM_MLP, sb.FlowPatch(steps=2, tau=0.7, rho=0.3), layers=NORMS),
    Case("flow-patch-no-steps", NORM_MLP, sb.FlowPatch(steps=0), layers=NORMS),
]

WHOLE = [
    Case("mc-dropout", DROPOUT_MLP, sb.MCDropout(), layers=("1",), draws=3),
    Case("mc-dropout-rate", DROPOUT_MLP, sb.MCDropout(rate=0.375), layers=("1",)),
    Case("mc-dropout-before", MLP, sb.MCDropout(rate=0.375), layers=("2",), draws=3),
    Case(
        "mc-dropout-channel",
        CONV_NET,
        sb.Mixture(
            components=2,
            assignment="input",
            zero=True,
            probs=(0.625, 0.375),
            draws="example",
            tau=0.8,
            rho=0.3,
        ),
        layers=("3", "7"),
        draws=3,
    ),
    Case("ensemble", NORM_MLP, sb.Ensemble(members=3, init="copies"), draws=3),
    Case(
        "ensemble-plain-call",
        MLP,
        sb.Ensemble(members=2, init="copies"),
        call="plain",
        draws=PLAIN_MEMBERS,
    ),
    Case(
        "member-norm",
        NORM_MLP,
        {"1": sb.MemberNorm(members=2, affine=True)},
    ),
    Case(
        "member-norm-training",
        NORM_MLP,
        {
            "1": sb.MemberNorm(members=2, affine=True),
            **dict.fromkeys(NORM_MLP.matrices, per_member()),
        },
        training=True,
    ),
    Case(
        "member-norm-shared-scales",
        CONV_NET,
        {
            "1": sb.MemberNorm(members=2),
            **dict.fromkeys(CONV_NET.matrices, sb.BatchEnsemble(members=2)),
        },
        training=True,
    ),
    Case(
        "rank1-and-emp",
        NORM_MLP,
        {
            "1": sb.ModelPatch(components=3),
            **dict.fromkeys(NORM_MLP.matrices, per_member()),
        },
    ),
]

LIKELIHOODS = [
    Case(f"{name.replace('_', '-')}-{form}", MLP, per_member(), likelihood=(name, form))
    for name, form in (
        ("categorical", "average"),
        ("categorical", "mixture"),
        ("gaussian", "average"),
        ("bernoulli", "mixture"),
        ("heteroscedastic_gaussian", "average"),
        ("heteroscedastic_gaussian", "mixture"),
        ("heteroscedastic_gaussian", "probs"),
    )
]

CASES = {
    case.name: case
    for case in RANK_ONE + MEAN_FIELD + CORRELATED + PATCHED + WHOLE + LIKELIHOODS
}
