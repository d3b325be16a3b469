"""The lists of the contract: methods and layers. A new one adds a line here, a method also its count in answers.py."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from answers import Matrix
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import slimbayes as sb

METHODS: dict[str, sb.Config] = {
    "rank1-normal": sb.Rank1(members=2, member_bias=True),
    "rank1-cauchy": sb.Rank1(members=2, prior=sb.Cauchy(1.0, 0.1), scale_init=0.05),
    "rank1-lognormal": sb.Rank1(members=2, posterior="lognormal"),
    "rank1-per-member": sb.Rank1(members=2, draws="member"),
    "rank1-r-only": sb.Rank1(members=2, random="r"),
    "rank1-s-only": sb.Rank1(members=2, random="s"),
    "rank1-additive": sb.Rank1(members=2, perturbation="additive"),
    "rank1-rank-2": sb.Rank1(members=2, rank=2),
    "rank1-heavy-prior": sb.Rank1(
        members=2, posterior="normal", prior=sb.Cauchy(1.0, 0.1)
    ),
    "batch-ensemble": sb.BatchEnsemble(members=2),
    "mean-field": sb.MeanField(
        prior=sb.Normal(0.0, 0.3), scale_init=0.1, bias="gaussian"
    ),
    "mean-field-flipout": sb.MeanField(estimator="flipout", scale_init=0.1),
    "mean-field-local": sb.MeanField(
        estimator="local", scale_init=0.1, bias="gaussian", independent_positions=True
    ),
    "joint-factors": sb.JointNormal(members=2, scale_init=0.05),
    "joint-biases": sb.JointNormal(over="both+bias", members=2, scale_init=0.05),
    "joint-weights": sb.JointNormal(
        over="weights", prior=sb.Normal(0.0, 0.3), scale_init=0.1, full_up_to=200
    ),
    "full-matrix-normal": sb.FullMatrixNormal(scale_init=0.1),
    "k-tied": sb.KTied(rank=2, scale_init=0.1),
    "k-tied-flipout": sb.KTied(
        rank=2, estimator="flipout", scale_init=0.1, bias="gaussian"
    ),
    "k-tied-local": sb.KTied(
        rank=2, estimator="local", scale_init=0.1, independent_positions=True
    ),
    "matrix-normal": sb.MatrixNormal(scale_init=0.1),
    "emp": sb.ModelPatch(components=3, jitter=0.5),
    "emp-example": sb.ModelPatch(components=3, jitter=0.5, draws="example"),
    "emp-learned": sb.ModelPatch(components=3, jitter=0.5, learn_probs=True),
    "ecmp": sb.ModelPatch(
        components=3, cross=True, jitter=0.5, probs=(0.5, 0.3, 0.2), rho=0.5
    ),
    "ecmp-example": sb.ModelPatch(
        components=3, cross=True, jitter=0.5, draws="example"
    ),
    "ecmp-learned": sb.ModelPatch(
        components=3, cross=True, jitter=0.5, learn_probs=True
    ),
    "flow-patch": sb.FlowPatch(steps=2, scale_init=0.1, samples=2000),
    "mixture-noise": sb.Mixture(components=2, sigma=0.1, jitter=0.5),
    "mixture-members": sb.Mixture(components=2, assignment="model", jitter=0.5),
    "drop-connect": sb.DropConnect(rate=0.4, tau=1.0),
    "mc-dropout": sb.MCDropout(rate=0.4),
    "mc-dropout-channel": sb.MCDropout(rate=0.4, unit="channel"),
    "mixture-inputs": sb.Mixture(
        components=2,
        assignment="input",
        zero=True,
        probs=(0.5, 0.5),
        draws="example",
    ),
    "ensemble": sb.Ensemble(members=2, init="copies", jitter=0.5),
    "member-norm": sb.MemberNorm(members=2, affine=True),
    "deterministic": sb.Deterministic(),
}
# To a layer, methods that differ in what numbers are drawn from, or how these start, are one: fewer layers meet them.
ALIKE_TO_LAYERS = dict.fromkeys(
    ("rank1-cauchy", "rank1-lognormal", "rank1-heavy-prior", "rank1-r-only", "rank1-s-only"), "rank1-normal"
) | {
    "k-tied": "mean-field", "matrix-normal": "mean-field", "k-tied-flipout": "mean-field-flipout",
    "emp-learned": "emp", "ecmp-learned": "ecmp", "joint-biases": "joint-factors",
}  # fmt: skip
# To a method, layers that differ in the number of their axes or of their gates are one.
ALIKE_TO_METHODS = {
    "Linear-4d": "Linear", "Conv1d": "Conv2d", "Conv3d": "Conv2d", "Conv2d-reflect": "Conv2d", "Conv1D": "Linear",
    "ConvTranspose1d": "ConvTranspose2d", "ConvTranspose3d": "ConvTranspose2d", "RNN": "LSTM", "RNNCell": "GRUCell",
    "LSTMCell": "GRUCell", "MultiheadAttention-batch-first": "MultiheadAttention", "BatchNorm1d": "BatchNorm2d",
    "BatchNorm3d": "BatchNorm2d", "InstanceNorm1d": "InstanceNorm2d", "InstanceNorm3d": "InstanceNorm2d",
    "LayerNorm-2d": "LayerNorm", "Dropout1d": "Dropout2d", "Dropout3d": "Dropout2d",
    "FeatureAlphaDropout": "AlphaDropout",
}  # fmt: skip
# Their graphs are another's: they are not compiled.
SAME_GRAPH = (
    "rank1-cauchy", "rank1-lognormal", "rank1-r-only", "rank1-s-only", "rank1-heavy-prior", "rank1-rank-2",
    "k-tied-flipout", "k-tied-local", "matrix-normal", "full-matrix-normal", "ecmp-learned", "joint-biases",
)  # fmt: skip
# Their operations are another's: they are traced, no further; and of some, so is what a bare call draws in its graph.
TRACED = (
    "emp-example",
    "rank1-additive",
    "rank1-per-member",
    "joint-factors",
    "mixture-members",
    "mean-field-local",
)
SAME_BARE_GRAPH = (
    "emp-example",
    "rank1-additive",
    "rank1-per-member",
    "mixture-members",
)


def _plain(layer: Any, full: Tensor, a: int, b: int) -> Tensor:
    """The number of a matrix (out, in) that is for element (a, b) of a weight."""
    return full[a, b]


def _turned(layer: Any, full: Tensor, a: int, b: int) -> Tensor:
    return full[b, a]


def _of_groups(layer: Any, full: Tensor, a: int, b: int) -> Tensor:
    outputs, inputs = layer.weight.shape[:2]
    return full[a, a // (outputs // layer.groups) * inputs + b]


def _of_transposed_groups(layer: Any, full: Tensor, a: int, b: int) -> Tensor:
    inputs, outputs = layer.weight.shape[:2]
    return full[a // (inputs // layer.groups) * outputs + b, a]


def _own(layer: Any, site: str) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a site."""
    return getattr(layer, site), getattr(layer, site.replace("weight", "bias"), None)


def _of_attention(layer: Any, site: str) -> tuple[Tensor, Tensor | None]:
    if site == "out":
        return _own(layer.out_proj, "weight")
    block = slice({"q": 0, "k": 8, "v": 16}[site], {"q": 8, "k": 16, "v": 24}[site])
    return layer.in_proj_weight[block], layer.in_proj_bias[block]


@dataclass
class LayerCase:
    """A layer, an input with `rows` along `batch_dim`, its weights' channels (n_in, n_out, has bias) and matrix
    views.

    Attributes:
        matrix: a weight's matrix view, if not (n_in, n_out).
        inner: what the layer is called inside of what is made.
        place: which output and input channel an element of a weight belongs to.
        own: weight and bias of a site of the plain layer.
        graph: whether it is compiled: others have its graph, with other axes, options or gates of one operation.
        written_out: whether ours is not torch's own operation, so that it rounds otherwise.
        mixes_types: whether torch's own keeps a state in float32 under autocast.
        looks_up: whether rows that were not looked up get no gradient.
    """

    make: Callable[[], nn.Module]
    input: Callable[[], Any]
    sites: tuple[tuple[int, int, bool], ...]
    batch_dim: int = 0
    rows: int = 3
    matrix: tuple[int, int] | None = None
    kind: str = "matrix"
    inner: str = ""
    place: Callable[[Any, Tensor, int, int], Tensor] = _plain
    own: Callable[[Any, str], tuple[Tensor, Tensor | None]] = _own
    graph: bool = True
    written_out: bool = False
    mixes_types: bool = False
    looks_up: bool = False

    @property
    def matrices(self) -> list[Matrix]:
        return [Matrix(*site, *(self.matrix or site[:2])) for site in self.sites]

    def spread(
        self, layer: nn.Module, shape: torch.Size, r: Tensor, s: Tensor
    ) -> Tensor:
        """The product of factors r (rank, out) and s (rank, in), or lines of them, for every element of a weight."""
        r, s = torch.atleast_2d(r), torch.atleast_2d(s)
        full = torch.einsum("jo,ji->oi", r, s) / r.shape[0]
        rows = [
            torch.stack([self.place(layer, full, a, b) for b in range(shape[1])])
            for a in range(shape[0])
        ]
        return torch.stack(rows).view(*shape[:2], *[1] * (len(shape) - 2))


_Conv = partial(LayerCase, place=_of_groups)
_Transposed = partial(LayerCase, place=_of_transposed_groups)
_Cell = partial(LayerCase, inner="cell", written_out=True, mixes_types=True)
_Attention = partial(LayerCase, inner="attention", own=_of_attention, written_out=True)


def _ints(*shape: int) -> Tensor:
    return torch.randint(7, shape)


def _x(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape)


class SelfAttention(nn.Module):
    """Lets a MultiheadAttention take one input, as the contract's other layers do."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class TwoSteps(nn.Module):
    """Steps a cell twice, so that its recurrent matrix sees a state and its one draw serves two calls."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state = self.cell(x, self.cell(x))
        return state[0] if isinstance(state, tuple) else state


def _norm(cls: Any, *args: Any, **options: Any) -> Callable[[], nn.Module]:
    """A norm layer with scales, biases and statistics that were trained; rows are independent in eval mode only."""

    def make() -> nn.Module:
        layer = cls(*args, **options)
        for tensor in (
            *layer.parameters(),
            *(b for b in layer.buffers() if b.is_floating_point()),
        ):
            nn.init.uniform_(tensor, 0.5, 1.5)
        return layer.eval()

    return make


_EIGHT = ((8, 8, True),) * 4
LAYERS: dict[str, LayerCase] = {
    "Linear": LayerCase(lambda: nn.Linear(4, 5), _x(3, 4), ((4, 5, True),)),
    "Linear-no-bias": LayerCase(
        lambda: nn.Linear(4, 5, bias=False), _x(3, 4), ((4, 5, False),), graph=False
    ),
    "Linear-4d": LayerCase(
        lambda: nn.Linear(4, 5), _x(3, 2, 6, 4), ((4, 5, True),), graph=False
    ),
    "Conv1D": LayerCase(
        lambda: Conv1D(5, 4), _x(3, 2, 4), ((4, 5, True),), place=_turned
    ),
    "Conv1d": _Conv(
        lambda: nn.Conv1d(4, 6, 3),
        _x(3, 4, 9),
        ((4, 6, True),),
        matrix=(12, 6),
        graph=False,
    ),
    "Conv2d": _Conv(
        lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1),
        _x(3, 4, 7, 7),
        ((4, 6, True),),
        matrix=(36, 6),
    ),
    "Conv2d-groups": _Conv(
        lambda: nn.Conv2d(4, 6, 3, groups=2, bias=False),
        _x(3, 4, 7, 7),
        ((4, 6, False),),
        matrix=(18, 6),
        graph=False,
    ),
    "Conv2d-reflect": _Conv(
        lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
        _x(3, 4, 7, 7),
        ((4, 6, True),),
        matrix=(36, 6),
        graph=False,
    ),
    "Conv3d": _Conv(
        lambda: nn.Conv3d(2, 3, 2),
        _x(3, 2, 4, 4, 4),
        ((2, 3, True),),
        matrix=(16, 3),
        graph=False,
    ),
    "ConvTranspose1d": _Transposed(
        lambda: nn.ConvTranspose1d(4, 6, 3, stride=2),
        _x(3, 4, 5),
        ((4, 6, True),),
        matrix=(12, 6),
        graph=False,
    ),
    "ConvTranspose2d": _Transposed(
        lambda: nn.ConvTranspose2d(4, 6, 3, groups=2, output_padding=1, stride=2),
        _x(3, 4, 5, 5),
        ((4, 6, True),),
        matrix=(36, 3),
    ),
    "ConvTranspose3d": _Transposed(
        lambda: nn.ConvTranspose3d(2, 3, 2),
        _x(3, 2, 3, 3, 3),
        ((2, 3, True),),
        matrix=(16, 3),
        graph=False,
    ),
    "Embedding": LayerCase(
        lambda: nn.Embedding(7, 5, padding_idx=0),
        lambda: _ints(3, 4),
        ((7, 5, False),),
        place=_turned,
        looks_up=True,
    ),
    "EmbeddingBag": LayerCase(
        lambda: nn.EmbeddingBag(7, 5, mode="mean"),
        lambda: _ints(3, 4),
        ((7, 5, False),),
        place=_turned,
        written_out=True,
        looks_up=True,
    ),
    "LSTM": LayerCase(
        lambda: nn.LSTM(4, 5, batch_first=True),
        _x(3, 6, 4),
        ((4, 20, True), (5, 20, False)),
        graph=False,
    ),
    "LSTM-stacked-bi": LayerCase(
        lambda: nn.LSTM(4, 5, num_layers=2, bidirectional=True),
        _x(6, 3, 4),
        (
            (4, 20, True),
            (5, 20, False),
            (4, 20, True),
            (5, 20, False),
            (10, 20, True),
            (5, 20, False),
            (10, 20, True),
            (5, 20, False),
        ),
        batch_dim=1,
    ),
    "GRU": LayerCase(
        lambda: nn.GRU(4, 5),
        _x(6, 3, 4),
        ((4, 15, True), (5, 15, False)),
        batch_dim=1,
        mixes_types=True,
        graph=False,
    ),
    "RNN": LayerCase(
        lambda: nn.RNN(4, 5, batch_first=True),
        _x(3, 6, 4),
        ((4, 5, True), (5, 5, False)),
        graph=False,
    ),
    "LSTMCell": _Cell(
        lambda: TwoSteps(nn.LSTMCell(4, 5)), _x(3, 4), ((4, 20, True), (5, 20, False))
    ),
    "GRUCell": _Cell(
        lambda: TwoSteps(nn.GRUCell(4, 5)),
        _x(3, 4),
        ((4, 15, True), (5, 15, False)),
        graph=False,
    ),
    "RNNCell": _Cell(
        lambda: TwoSteps(nn.RNNCell(4, 5)),
        _x(3, 4),
        ((4, 5, True), (5, 5, False)),
        graph=False,
    ),
    "MultiheadAttention": _Attention(
        lambda: SelfAttention(), _x(4, 3, 8), _EIGHT, batch_dim=1
    ),
    "MultiheadAttention-batch-first": _Attention(
        lambda: SelfAttention(batch_first=True), _x(3, 4, 8), _EIGHT, graph=False
    ),
    "BatchNorm1d": LayerCase(
        _norm(nn.BatchNorm1d, 4), _x(3, 4), ((4, 4, True),), matrix=(1, 4), kind="norm"
    ),
    "BatchNorm2d": LayerCase(
        _norm(nn.BatchNorm2d, 4),
        _x(3, 4, 5, 5),
        ((4, 4, True),),
        matrix=(1, 4),
        kind="norm",
    ),
    "BatchNorm3d": LayerCase(
        _norm(nn.BatchNorm3d, 4),
        _x(3, 4, 2, 3, 3),
        ((4, 4, True),),
        matrix=(1, 4),
        kind="norm",
    ),
    "InstanceNorm1d": LayerCase(
        _norm(nn.InstanceNorm1d, 4, affine=True),
        _x(3, 4, 6),
        ((4, 4, True),),
        matrix=(1, 4),
        kind="norm",
    ),
    "InstanceNorm2d": LayerCase(
        _norm(nn.InstanceNorm2d, 4, affine=True, track_running_stats=True),
        _x(3, 4, 5, 5),
        ((4, 4, True),),
        matrix=(1, 4),
        kind="norm",
    ),
    "InstanceNorm3d": LayerCase(
        _norm(nn.InstanceNorm3d, 4, affine=True),
        _x(3, 4, 2, 3, 3),
        ((4, 4, True),),
        matrix=(1, 4),
        kind="norm",
    ),
    "GroupNorm": LayerCase(
        _norm(nn.GroupNorm, 2, 4),
        _x(3, 4, 5),
        ((4, 4, True),),
        matrix=(1, 4),
        kind="norm",
    ),
    "LayerNorm": LayerCase(
        _norm(nn.LayerNorm, 4), _x(3, 6, 4), ((4, 4, True),), matrix=(1, 4), kind="norm"
    ),
    "LayerNorm-2d": LayerCase(
        _norm(nn.LayerNorm, (5, 4)),
        _x(3, 2, 5, 4),
        ((20, 20, True),),
        matrix=(1, 20),
        kind="norm",
    ),
    "RMSNorm": LayerCase(
        _norm(nn.RMSNorm, 4), _x(3, 6, 4), ((4, 4, False),), matrix=(1, 4), kind="norm"
    ),
    "Dropout": LayerCase(
        lambda: nn.Dropout(0.3).eval(), _x(3, 4, 5), (), kind="dropout"
    ),
    "Dropout1d": LayerCase(
        lambda: nn.Dropout1d(0.3).eval(), _x(3, 20, 5), (), kind="dropout"
    ),
    "Dropout2d": LayerCase(
        lambda: nn.Dropout2d(0.3).eval(), _x(3, 20, 5, 5), (), kind="dropout"
    ),
    "Dropout3d": LayerCase(
        lambda: nn.Dropout3d(0.3).eval(), _x(3, 20, 2, 2, 2), (), kind="dropout"
    ),
    "AlphaDropout": LayerCase(
        lambda: nn.AlphaDropout(0.3).eval(), _x(3, 4, 5), (), kind="dropout"
    ),
    "FeatureAlphaDropout": LayerCase(
        lambda: nn.FeatureAlphaDropout(0.3).eval(), _x(3, 20, 5), (), kind="dropout"
    ),
}


def fits(method: str, layer: str) -> bool:
    """Whether a method is for this layer."""
    config, kind = METHODS[method], LAYERS[layer].kind
    if isinstance(config, sb.Deterministic):
        return kind == "matrix"
    if isinstance(config, sb.MemberNorm):  # other norms have no statistics over rows
        return layer.startswith("BatchNorm")
    # The local estimator draws outputs, which a bag does not give linearly; dropout acts on inputs, not on indices.
    lookup = (method.endswith("local") and layer == "EmbeddingBag") or (
        method.startswith("mc-dropout") and "Embedding" in layer
    )
    return kind in config.covers and not lookup


def convert(layer: nn.Module, method: str, case: LayerCase) -> nn.Module:
    """Convert with every layer included, embeddings too."""
    config = METHODS[method]
    include = (
        None if isinstance(config, sb.Deterministic) else (lambda name, layer: True)
    )
    return sb.bayesianize(layer, config, include=include, batch_dim=case.batch_dim)
