"""Small models that a conversion can get wrong, each with inputs of sizes that invite a wrong guess.

Sizes: S = 3 draws in every test, B = 4 rows unless a case says otherwise, T steps, D = 4 channels, so D == B, and T
runs over B, S * B and others. `rows` says where outputs hold their rows: None where rows act on each other or there are
none, so that a bare call must be one draw.
"""

import functools
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

S, B, D, H, C = 3, 4, 4, 6, 3
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """An awkward model.

    Attributes:
        make: builds the model, always with the same structure.
        inputs: builds (args, kwargs).
        rows: dimension of the outputs that holds the rows, or one for each output; None where a bare call must be
            one draw, "any" for an output that may be made of several, such as a loss.
        owner: the input's row of an output's row, where they differ.
        part: the submodule that is converted, if not all.
        folds: False where running the draws as one batch cannot be right; True where it must be; None
            where either will do.
        trains: whether runs in training mode can be compared: no batch norm, no dropout, no state that a
            forward changes.
        predicts: whether `predict` can be asked: the first output holds rows or at least one axis.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    rows: Any = 0
    owner: Callable[[int], int] | None = None
    part: str = ""
    folds: bool | None = None
    trains: bool = True
    predicts: bool = True


CASES: dict[str, Case] = {}


def call(*args: Any, **kwargs: Any) -> Inputs:
    return args, kwargs


def x(*shape: int, **kwargs: Any) -> Callable[[], Inputs]:
    """One random tensor."""
    return lambda: call(torch.randn(shape), **kwargs)


def add(
    name: str, make: Callable[[], nn.Module], inputs: Callable[[], Inputs], **facts: Any
) -> None:
    assert name not in CASES
    CASES[name] = Case(make, inputs, **facts)


class Net(nn.Module):
    """A module made of named submodules and a function of (self, *inputs)."""

    def __init__(self, run: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def two(
    run: Callable[..., Any],
    n_in: int = D,
    hidden: int = H,
    n_out: int = C,
    **parts: nn.Module,
) -> Callable[[], nn.Module]:
    """Two dense layers `a` and `b`, used by `run`."""
    return lambda: Net(
        run,
        a=nn.Linear(n_in, hidden),
        b=nn.Linear(hidden, n_out),
        **{k: v for k, v in parts.items()},
    )


def net(
    run: Callable[..., Any], **parts: Callable[[], nn.Module]
) -> Callable[[], nn.Module]:
    """A Net whose submodules are built anew for each model."""
    return lambda: Net(run, **{name: part() for name, part in parts.items()})


def lin(n_in: int = D, n_out: int = H, **options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(n_in, n_out, **options)


# Controls: folding must be found right --------------------------------------------------------------------------------


add("mlp", two(lambda m, x: m.b(torch.tanh(m.a(x)))), x(B, D), folds=True)
add("mlp-one-row", two(lambda m, x: m.b(torch.tanh(m.a(x)))), x(1, D), folds=True)
add(
    "cnn",
    net(
        lambda m, x: m.fc(torch.relu(m.norm(m.conv(x))).mean((2, 3))),
        conv=lambda: nn.Conv2d(2, 4, 3), norm=lambda: nn.GroupNorm(2, 4), fc=lin(4, C),
    ),
    x(B, 2, 5, 5),
    folds=True,
)  # fmt: skip


# Rows guessed from sizes: review 1.1 ----------------------------------------------------------------------------------


def time_major(m: Any, x: Tensor) -> Tensor:
    rows, steps, size = x.shape
    return m.b(
        torch.tanh(m.a(x.transpose(0, 1).reshape(steps * rows, size)))
        .view(steps, rows, -1)
        .mean(0)
    )


def graph(m: Any, x: Tensor, edge: Tensor) -> Tensor:
    h = torch.tanh(m.a(x))
    return m.b(h.index_add(0, edge[1], h[edge[0]]))


def batch_attention(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.b((h @ h.T).softmax(-1) @ h)


def positions(m: Any, x: Tensor) -> Tensor:
    grid = torch.arange(x.shape[1], device=x.device, dtype=x.dtype).unsqueeze(1) / 10
    return m.b(torch.tanh(m.a(x) + m.p(grid))).mean(1)


def mask_first(m: Any, mask: Tensor, x: Tensor) -> Tensor:
    return m.b(torch.tanh(m.a(x)) * mask.unsqueeze(-1)).sum(1)


def windows(m: Any, x: Tensor) -> Tensor:
    rows, steps, size = x.shape
    y, _ = m.lstm(x.reshape(rows * 2, steps // 2, size))
    return m.fc(y[:, -1]).view(rows, 2, -1).mean(1)


def tensor(*shape: int) -> Tensor:
    return torch.randn(shape)


add("time-major", two(time_major), x(B, 5, D))
add("time-major-T=B", two(time_major), x(B, B, D))
add("time-major-T=SB", two(time_major), x(B, S * B, D))
add(
    "siamese-cat",
    two(lambda m, x: m.b(torch.tanh(m.a(torch.cat([x, 2 * x]))))),
    x(B, D),
    owner=lambda i: i % B,
)
add(
    "siamese-pair",
    two(lambda m, x, y: (m.b(m.a(torch.cat([x, y]))).chunk(2)[0] - m.b(m.a(y))).abs()),
    lambda: call(tensor(B, D), tensor(B, D)),
)
add(
    "graph",
    two(graph),
    lambda: call(tensor(5, D), torch.tensor([[0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 0, 2]])),
    rows=None,
    folds=False,
)
add(
    "graph-E=N",
    two(graph),
    lambda: call(tensor(5, D), torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 0]])),
    rows=None,
    folds=False,
)
add(
    "graph-N=2",
    two(graph),
    lambda: call(tensor(2, D), torch.tensor([[0, 1], [1, 0]])),
    rows=None,
    folds=False,
)
add(
    "flat-outputs",
    two(lambda m, x: m.b(torch.tanh(m.a(x))).view(-1, C)),
    x(B, 5, D),
    owner=lambda i: i // 5,
)
add("batch-attention", two(batch_attention), x(B, D), rows=None, folds=False)
for _t in (B, 5, S * B, 2 * S * B):
    add(
        f"positions-T={_t}",
        net(positions, a=lin(), b=lin(H, C), p=lin(1, H)),
        x(B, _t, D),
    )
for _t in (B, 5, S * B):
    add(
        f"sequence-first-T={_t}",
        two(lambda m, x: m.b(torch.tanh(m.a(x))).mean(0)),
        x(_t, B, D),
    )
    add(
        f"sequence-first-kept-T={_t}",
        two(lambda m, x: m.b(torch.tanh(m.a(x)))),
        x(_t, B, D),
    )  # nothing tells steps from rows: the first counts
add("one-B-D", two(lambda m, x: m.b(torch.tanh(m.a(x)))), x(1, B, D), rows=None)
add(
    "one-B-D-summed",
    two(lambda m, x: m.b(torch.tanh(m.a(x))).sum((0, 1))),
    x(1, B, D),
    rows=None,
)
add(
    "mask-first", two(mask_first), lambda: call(torch.rand(B, 5) > 0.3, tensor(B, 5, D))
)
add(
    "mask-first-keywords",
    two(mask_first),
    lambda: call(mask=torch.rand(B, B) > 0.3, x=tensor(B, B, D)),
)
add(
    "shared-mask-first",
    two(lambda m, mask, x: m.b(torch.tanh(m.a(x)) * mask[None, :, None]).sum(1)),
    lambda: call(torch.rand(5) > 0.3, tensor(B, 5, D)),
)
add(
    "lstm-alone-sequence-first",
    net(
        lambda m, x: m.fc(m.lstm(x.transpose(0, 1))[0][-1]),
        lstm=lambda: nn.LSTM(D, H),
        fc=lin(H, C),
    ),
    x(B, 5, D),
    part="lstm",
)
add(
    "windows-lstm",
    net(windows, lstm=lambda: nn.LSTM(D, H, batch_first=True), fc=lin(H, C)),
    x(B, 6, D),
)
add(
    "windows-lstm-B=5",
    net(windows, lstm=lambda: nn.LSTM(D, H, batch_first=True), fc=lin(H, C)),
    x(5, 6, D),
)


# Used past a layer's forward, or twice: review 1.3 --------------------------------------------------------------------


add(
    "functional-linear",
    two(lambda m, x: m.b(torch.tanh(F.linear(x, m.a.weight, m.a.bias)))),
    x(B, D),
)
add(
    "functional-only",
    lambda: Net(
        lambda m, x: F.linear(x, m.fc.weight, 2 * m.fc.bias), fc=nn.Linear(D, C)
    ),
    x(B, D),
)
add(
    "functional-conv",
    net(
        lambda m, x: m.fc(
            torch.tanh(F.conv1d(x, m.conv.weight, m.conv.bias, padding=2, groups=D)[..., : x.shape[-1]]).mean(2)
        ),
        conv=lambda: nn.Conv1d(D, D, 3, groups=D), fc=lin(D, C),
    ),
    x(B, D, 5),
)  # fmt: skip
add(
    "weight-twice",
    two(lambda m, x: m.b(torch.tanh(m.a(x)) + F.linear(x, m.a.weight))),
    x(B, D),
)


def _hooked(module: nn.Module, *args: Any) -> Any:
    return module._old_forward(*args) + 1.0


def with_instance_forward() -> nn.Module:
    """What accelerate's hooks do to a module."""
    model = nn.Sequential(nn.Linear(D, H), nn.Tanh(), nn.Linear(H, C))
    for layer in (model[0], model[2]):
        layer._old_forward = layer.forward  # type: ignore[assignment]
        layer.forward = functools.update_wrapper(
            functools.partial(_hooked, layer), layer.forward
        )  # type: ignore[method-assign]
    return model


class LoudEncoderLayer(nn.TransformerEncoderLayer):
    """A subclass that adds nothing: torch's fused path must not hide its drawn weights."""


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.out = (
            nn.Embedding(7, H),
            nn.Linear(H, H),
            nn.Linear(H, 7, bias=False),
        )
        self.out.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mix(self.table(ids))))


def ids(*shape: int, most: int = 7) -> Tensor:
    return torch.randint(most, shape)


def pruned() -> nn.Module:
    model = nn.Sequential(nn.Linear(D, H), nn.Tanh(), nn.Linear(H, C))
    prune.l1_unstructured(model[0], "weight", 0.5)
    return settled(model, torch.zeros(1, D))


def settled(model: nn.Module, x: Tensor) -> nn.Module:
    """Run hooks that compute weights once without gradients, so that the model can be copied."""
    with torch.no_grad():
        model.eval()(x)
    return model.train()


add("instance-forward", with_instance_forward, x(B, D))
add(
    "encoder-subclass",
    lambda: LoudEncoderLayer(D, 2, 8, dropout=0.0, batch_first=True),
    x(B, 5, D),
)
add(
    "encoder-stack-subclass",
    lambda: nn.TransformerEncoder(
        LoudEncoderLayer(D, 2, 8, 0.0, batch_first=True), 2, enable_nested_tensor=False
    ),
    x(B, B, D),
)
add("tied", Tied, lambda: call(ids(B, 5)))
add(
    "padding",
    net(
        lambda m, t: m.fc(m.table(t).sum(1)),
        table=lambda: nn.Embedding(7, H, padding_idx=0),
        fc=lin(H, C),
    ),
    lambda: call(torch.tensor([[1, 2, 0], [3, 0, 0], [0, 0, 0], [4, 5, 6]])),
)
add("pruned", pruned, x(B, D))


# Layers that are not in the table -------------------------------------------------------------------------------------


class OwnMatrix(nn.Module):
    """A layer of somebody's own, with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.gain = (
            nn.Parameter(torch.randn(D, H) / 2),
            nn.Parameter(torch.ones(H)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.kernel) * self.gain


class Scaled(nn.Linear):
    """A subclass that overrides forward."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight / self.weight.norm(), self.bias)


class SamePad(nn.Conv2d):
    """timm's Conv2dSame in small."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (1, 1, 1, 1)), self.weight, self.bias, self.stride)


def old_style(norm: Callable[..., Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = nn.Sequential(norm(nn.Linear(D, H)), nn.Tanh(), nn.Linear(H, C))
        return settled(model, torch.zeros(1, D))

    return make


def new_style(norm: Callable[..., Any]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(norm(nn.Linear(D, H)), nn.Tanh(), nn.Linear(H, C))


add(
    "own-matrix",
    lambda: nn.Sequential(OwnMatrix(), nn.Tanh(), nn.Linear(H, C)),
    x(B, D),
)
add(
    "scaled-linear",
    lambda: nn.Sequential(Scaled(D, H), nn.Tanh(), nn.Linear(H, C)),
    x(B, D),
)
add(
    "same-pad-conv",
    net(
        lambda m, x: m.fc(m.conv(x).mean((2, 3))),
        conv=lambda: SamePad(2, 4, 3),
        fc=lin(4, C),
    ),
    x(B, 2, 4, 4),
)
add(
    "bilinear",
    net(
        lambda m, x, y: m.fc(torch.tanh(m.mix(x, y))),
        mix=lambda: nn.Bilinear(D, D, H),
        fc=lin(H, C),
    ),
    lambda: call(tensor(B, D), tensor(B, D)),
)
add("weight-norm-old", old_style(torch.nn.utils.weight_norm), x(B, D))
add("weight-norm-new", new_style(parametrizations.weight_norm), x(B, D))
add("spectral-norm-old", old_style(torch.nn.utils.spectral_norm), x(B, D), trains=False)
add(
    "spectral-norm-new",
    new_style(parametrizations.spectral_norm),
    x(B, D),
    trains=False,
)


# Layouts --------------------------------------------------------------------------------------------------------------


def packed_inside(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    y, _ = m.gru(packed)
    padded, _ = pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])
    return m.fc(padded.sum(1))


def patches(m: Any, x: Tensor) -> Tensor:
    cut = x.unfold(2, 2, 2).unfold(3, 2, 2)  # (B, c, h, w, 2, 2)
    tokens = cut.permute(0, 2, 3, 1, 4, 5).reshape(-1, x.shape[1] * 4)
    return m.b(torch.tanh(m.a(tokens))).view(x.shape[0], -1, C).mean(1)


class Causal(nn.Module):
    """torch's encoder, sequence first or batch first, with a (T, T) mask made inside or given."""

    def __init__(self, batch_first: bool, dropout: float = 0.0) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            D, 2, 8, dropout=dropout, batch_first=batch_first
        )
        self.encoder, self.head = (
            nn.TransformerEncoder(layer, 1, enable_nested_tensor=False),
            nn.Linear(D, C),
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.head(self.encoder(x, mask=mask))


def causal(size: int) -> Tensor:
    return torch.triu(torch.ones(size, size, dtype=torch.bool), 1)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.inner = (
            nn.Conv2d(2, 4, 3, stride=2, padding=1),
            nn.Conv2d(4, 4, 3, padding=1),
        )
        self.up, self.head = nn.ConvTranspose2d(4, 4, 2, stride=2), nn.Conv2d(6, C, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.down(x))
        return self.head(torch.cat([x, self.up(torch.relu(self.inner(h)) + h)], 1))


def per_row(m: Any, x: Tensor) -> Tensor:
    return torch.stack([m.b(torch.tanh(m.a(row))) for row in x])


def cells(m: Any, x: Tensor) -> Tensor:
    state = x.new_zeros(x.shape[0], H)
    for step in x.unbind(1):
        state = m.cell(step, state)
    return m.fc(state)


def class_token(m: Any, x: Tensor) -> Tensor:
    token = m.a(x.new_ones(1, 1, x.shape[-1])).expand(x.shape[0], -1, -1)
    return m.b(torch.tanh(torch.cat([token, m.a(x)], 1)).mean(1))


add(
    "packed-inside",
    net(packed_inside, gru=lambda: nn.GRU(D, H, batch_first=True), fc=lin(H, C)),
    lambda: call(tensor(B, 5, D), torch.tensor([5, 2, 4, 1])),
)
add("patches", two(patches, n_in=8), x(B, 2, 4, 4))
add("transformer-sequence-first", lambda: Causal(False), x(5, B, D), rows=1)
add(
    "transformer-sequence-first-T=B",
    lambda: Causal(False),
    lambda: call(tensor(B, B, D), mask=causal(B)),
    rows=1,
)
add(
    "transformer-sequence-first-T=SB",
    lambda: Causal(False),
    lambda: call(tensor(S * B, B, D), mask=causal(S * B)),
    rows=1,
)
add("transformer-T=B", lambda: Causal(True), lambda: call(tensor(B, B, D), causal(B)))
add(
    "transformer-T=SB",
    lambda: Causal(True),
    lambda: call(tensor(B, S * B, D), mask=causal(S * B)),
)
add("transformer-dropout", lambda: Causal(True, 0.3), x(B, 5, D), trains=False)
add(
    "attention-mask-T=B",
    net(
        lambda m, x, mask: m.fc(m.att(x, x, x, attn_mask=mask)[0]),
        att=lambda: nn.MultiheadAttention(D, 2, batch_first=True),
        fc=lin(D, C),
    ),
    lambda: call(tensor(B, B, D), causal(B)),
)
add("unet", UNet, x(B, 2, 4, 4))
add(
    "channels-last",
    two(lambda m, x: m.b(torch.tanh(m.a(x.permute(0, 2, 3, 1)))).permute(0, 3, 1, 2)),
    x(B, D, 3, 3),
)
add(
    "split-chunks",
    two(lambda m, x: torch.cat([m.b(torch.tanh(m.a(part))) for part in x.split(3)])),
    x(B, D),
)
add("row-by-row", two(per_row), x(B, D))
add("gru-cell", net(cells, cell=lambda: nn.GRUCell(D, H), fc=lin(H, C)), x(B, 5, D))
add(
    "lstm-wrapper",
    net(
        lambda m, x: m.fc(m.lstm(x.transpose(0, 1))[0].transpose(0, 1)),
        lstm=lambda: nn.LSTM(D, H),
        fc=lin(H, C),
    ),
    x(B, 5, D),
)
add(
    "lstm-wrapper-T=B",
    net(
        lambda m, x: m.fc(m.lstm(x.transpose(0, 1))[0].transpose(0, 1)),
        lstm=lambda: nn.LSTM(D, H),
        fc=lin(H, C),
    ),
    x(B, B, D),
)
add(
    "lstm-states",
    net(lambda m, x: m.lstm(x), lstm=lambda: nn.LSTM(D, H, batch_first=True)),
    x(B, 5, D),
    rows=(0, 1, 1),
)
add("class-token", two(class_token), x(B, 5, D))
add("unbatched", two(lambda m, x: m.b(torch.tanh(m.a(x)))), x(D), rows=None)
add(
    "transposed-batch", two(lambda m, x: m.b(torch.tanh(m.a(x.T)))), x(B, D)
)  # its rows are the columns
add(
    "einsum",
    two(lambda m, x: torch.einsum("bth,bsh->bts", m.a(x), m.a(x)).mean(2)),
    x(B, 5, D),
)


# Rows that act on each other ------------------------------------------------------------------------------------------


def prototypes(m: Any, x: Tensor, support: Tensor) -> Tensor:
    return m.b(torch.tanh(m.a(x))) @ m.b(torch.tanh(m.a(support))).T


def experts(m: Any, x: Tensor) -> Tensor:
    weight, chosen = m.router(x).softmax(-1).topk(2, -1)
    out = x.new_zeros(x.shape[0], C)
    for e, expert in enumerate((m.e0, m.e1, m.e2)):
        row, place = torch.where(chosen == e)
        out = out.index_add(0, row, weight[row, place, None] * expert(x[row]))
    return out


def branch(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(torch.tanh(h)) if bool(h.mean() > 0) else m.b(torch.relu(h)) * 2


add(
    "adjacency",
    two(lambda m, x, adj: m.b(adj @ torch.tanh(m.a(x)))),
    lambda: call(tensor(5, D), torch.rand(5, 5)),
    rows=None,
    folds=False,
)
add(
    "contrastive",
    two(lambda m, x: (lambda h: h @ h.T)(m.b(torch.tanh(m.a(x))))),
    x(B, D),
    rows=None,
    folds=False,
)
add(
    "prototypes",
    two(prototypes),
    lambda: call(tensor(B, D), tensor(B, D)),
    rows=None,
    folds=False,
)
add("prototypes-2", two(prototypes), lambda: call(tensor(B, D), tensor(2, D)))
add(
    "pairwise",
    two(lambda m, x: m.b(torch.tanh(m.a(x).unsqueeze(1) - m.a(x).unsqueeze(0)))),
    x(B, D),
    rows=None,
    folds=False,
)
add(
    "pairs",
    two(lambda m, x: m.b(torch.tanh(m.a(x)).view(x.shape[0] // 2, 2, -1).sum(1))),
    x(B, D),
    rows=None,
)
add(
    "cumsum",
    two(lambda m, x: m.b(torch.tanh(m.a(x)).cumsum(0))),
    x(B, D),
    rows=None,
    folds=False,
)
add(
    "sorted",
    two(lambda m, x: m.b(m.a(x).sort(0).values)),
    x(B, D),
    rows=None,
    folds=False,
)
add("flipped", two(lambda m, x: m.b(torch.tanh(m.a(x).flip(0)))), x(B, D), rows=None)
add(
    "batch-size",
    two(lambda m, x: m.b(torch.tanh(m.a(x))) / x.shape[0]),
    x(B, D),
    folds=False,
)
add(
    "arange-rows",
    two(lambda m, x: m.b(torch.tanh(m.a(x + torch.arange(len(x)).unsqueeze(1))))),
    x(B, D),
    folds=False,
)
add(
    "centred",
    two(lambda m, x: m.b(m.a(x) - m.a(x).mean(0))),
    x(B, D),
    rows=None,
    folds=False,
)
add("branch", two(branch), x(B, D), rows=None)
add("branch-other-seed", two(branch), lambda: call(tensor(B, D) - 0.5), rows=None)
add(
    "experts",
    net(experts, router=lin(D, 3), e0=lin(D, C), e1=lin(D, C), e2=lin(D, C)),
    x(B, D),
)


# Inputs and outputs of other kinds ------------------------------------------------------------------------------------


@dataclass
class Result:
    logits: Tensor
    hidden: Tensor


Pair = namedtuple("Pair", "mean scale")


def ragged(m: Any, xs: list[Tensor]) -> Tensor:
    return torch.stack([m.b(torch.tanh(m.a(one)).mean(0)) for one in xs])


def nested(m: Any, batch: dict[str, Any]) -> Tensor:
    return m.b(torch.tanh(m.a(batch["left"]["x"]) + m.a(batch["right"][0])))


def many_steps(m: Any, x: Tensor, steps: int = 2) -> Tensor:
    h = m.a(x)
    for _ in range(steps):
        h = torch.tanh(m.c(h))
    return m.b(h)


def until_small(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    for _ in range(4):
        if float(h.abs().max()) < 0.7:
            break
        h = torch.tanh(m.c(h)) * 0.8
    return m.b(h)


class Holds(nn.Module):
    """Tensors in a list, which are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, H), nn.Linear(H, C)
        self.shifts = [torch.linspace(-1, 1, D), torch.linspace(0, 1, B * D).view(B, D)]

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x + self.shifts[0]))) + self.b(
            torch.tanh(self.a(self.shifts[1]))
        ).mean(0)


add(
    "dict-outputs",
    two(lambda m, x: {"logits": m.b(m.a(x)), "hidden": m.a(x), "note": "kept"}),
    x(B, D),
)
add("dataclass-outputs", two(lambda m, x: Result(m.b(m.a(x)), m.a(x))), x(B, D))
add(
    "namedtuple-outputs",
    two(lambda m, x: Pair(m.b(m.a(x)), F.softplus(m.b(m.a(x))))),
    x(B, D),
)
add(
    "nested-outputs",
    two(lambda m, x: {"all": [m.b(m.a(x)), (m.a(x), None, 3)]}),
    x(B, D),
)
add(
    "scalar-loss",
    two(lambda m, x, y: F.cross_entropy(m.b(m.a(x)), y)),
    lambda: call(tensor(B, D), ids(B, most=C)),
    rows=("any",),
    predicts=False,
)
add(
    "loss-and-logits",
    two(
        lambda m, x, y: {"loss": F.cross_entropy(m.b(m.a(x)), y), "logits": m.b(m.a(x))}
    ),
    lambda: call(tensor(B, D), ids(B, most=C)),
    rows=("any", 0),
)
add("no-rows", two(lambda m, x: m.b(m.a(x)).mean(0)), x(B, D), rows=("any",))
add(
    "no-rows-C=SB",
    two(lambda m, x: m.b(m.a(x)).mean(0), n_out=S * B),
    x(B, D),
    rows=("any",),
)
add(
    "weights-returned",
    two(lambda m, x: (m.b(m.a(x)), m.a.bias * 2)),
    x(B, D),
    rows=None,
)
add(
    "keywords-only",
    two(lambda m, *, x, scale: m.b(torch.tanh(m.a(x)) * scale)),
    lambda: call(x=tensor(B, D), scale=torch.rand(B, 1)),
)
add(
    "keywords-scale-first",
    two(lambda m, *, x, scale: m.b(torch.tanh(m.a(x)) * scale)),
    lambda: call(scale=torch.rand(H), x=tensor(B, D)),
)
add(
    "var-args",
    two(lambda m, *xs: m.b(torch.tanh(sum(m.a(x) for x in xs)))),
    lambda: call(tensor(B, D), tensor(B, D), tensor(1, D)),
)
add("ragged", two(ragged), lambda: call([tensor(2, D), tensor(5, D), tensor(B, D)]))
add(
    "ragged-outputs",
    two(lambda m, xs: [m.b(torch.tanh(m.a(one))) for one in xs]),
    lambda: call([tensor(2, D), tensor(5, D)]),
    rows=None,
)
add(
    "nested-dict",
    two(nested),
    lambda: call({"left": {"x": tensor(B, D)}, "right": [tensor(B, D), "word"]}),
)
add(
    "integers",
    net(
        lambda m, t, keep: m.fc((m.table(t) * keep.unsqueeze(-1)).sum(1)),
        table=lambda: nn.Embedding(7, H),
        fc=lin(H, C),
    ),
    lambda: call(ids(B, B), torch.rand(B, B) > 0.3),
)
add(
    "boxes",  # whose widths are looked up: corners in another order have none
    net(
        lambda m, t: m.fc(torch.tanh(m.table(t[..., 2] - t[..., 0])).mean(1)),
        table=lambda: nn.Embedding(7, H),
        fc=lin(H, C),
    ),
    lambda: call(torch.randint(2, (B, 5, 4)).cumsum(-1)),
    folds=True,
)
add(
    "row-index",
    two(lambda m, x, i: m.b(torch.tanh(m.a(x))).gather(1, i.unsqueeze(1))),
    lambda: call(tensor(B, D), ids(B, most=C)),
)
add(
    "one-hot",
    two(lambda m, t: m.b(torch.tanh(m.a(F.one_hot(t, D).float())))),
    lambda: call(ids(B, most=D)),
)
add(
    "shared-layer",
    two(lambda m, x: m.b(m.a(torch.tanh(m.b(m.a(x))) @ x.new_ones(C, D)))),
    x(B, D),
)
add(
    "steps-3",
    net(many_steps, a=lin(), c=lin(H, H), b=lin(H, C)),
    lambda: call(tensor(B, D), 3),
)
add("steps-default", net(many_steps, a=lin(), c=lin(H, H), b=lin(H, C)), x(B, D))
add(
    "until-small",
    net(until_small, a=lin(), c=lin(H, H), b=lin(H, C)),
    x(B, D),
    rows=None,
)
add("holds-tensors", Holds, x(B, D))
add(
    "batch-norm",
    net(
        lambda m, x: m.fc(torch.relu(m.norm(m.conv(x))).mean((2, 3))),
        conv=lambda: nn.Conv2d(2, 4, 3),
        norm=lambda: nn.BatchNorm2d(4),
        fc=lin(4, C),
    ),
    x(B, 2, 5, 5),
    trains=False,
)
add(
    "group-norm",
    net(
        lambda m, x: m.fc(m.norm(torch.relu(m.conv(x))).mean(2)),
        conv=lambda: nn.Conv1d(2, 4, 3),
        norm=lambda: nn.GroupNorm(2, 4),
        fc=lin(4, C),
    ),
    x(B, 2, 6),
)
add(
    "layer-norm-T=B",
    net(
        lambda m, x: m.fc(m.norm(torch.relu(m.a(x)))),
        a=lin(),
        norm=lambda: nn.LayerNorm(H),
        fc=lin(H, C),
    ),
    x(B, B, D),
)
add(
    "instance-norm",
    net(
        lambda m, x: m.fc(torch.relu(m.norm(m.a(x))).mean(2)),
        a=lambda: nn.Conv1d(2, 4, 3),
        norm=lambda: nn.InstanceNorm1d(4, affine=True),
        fc=lin(4, C),
    ),
    x(B, 2, 6),
)
add(
    "dropout",
    net(
        lambda m, x: m.b(m.drop(torch.tanh(m.a(x)))),
        a=lin(),
        b=lin(H, C),
        drop=lambda: nn.Dropout(0.4),
    ),
    x(B, D),
    trains=False,
)
add(
    "dropout-time-major",
    net(
        lambda m, x: m.b(m.drop(torch.tanh(m.a(x.transpose(0, 1))))).mean(0),
        a=lin(),
        b=lin(H, C),
        drop=lambda: nn.Dropout(0.4),
    ),
    x(B, 5, D),
    trains=False,
)
