"""Recurrent and attention layers against slow references with materialised weights (F18, F1)."""

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from covering import each, pairwise
from torch import Tensor, nn
from torch import distributions as td
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import slimbayes as sb

pytestmark = pytest.mark.usefixtures("last_draws")

T, B, D, U, K = 4, 3, 3, 5, 2  # steps, rows, inputs, units, members


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def convert(
    layer: nn.Module,
    draws: str = "example",
    batch_dim: int | None = None,
    **changes: Any,
) -> Any:
    config = {
        "members": K,
        "scale_init": 0.4,
        "mean_init": sb.Normal(1.0, 0.5),
        "draws": draws,
    } | changes
    net = sb.bayesianize(
        layer,
        sb.Rank1(**config),
        **({} if batch_dim is None else {"batch_dim": batch_dim}),
    )
    with torch.no_grad():
        for name, p in net.named_parameters():
            if "posterior" in name and name.endswith(".bias"):
                p.normal_()
    return net


def array(t: Tensor) -> np.ndarray:
    return t.detach().numpy()


def drawn_weight(layer: Any, site: str, n: int) -> tuple[np.ndarray, np.ndarray]:
    """W o r s^T and bias of draw n of the last pass; or, additive, W and a bias shifted by W s + r."""
    r, s, offset = layer.posterior[site].values()[:3]
    weight, r, s = array(getattr(layer, site)), array(r[n]), array(s[n])
    bias = getattr(layer, site.replace("weight", "bias"), None)
    out = np.zeros(len(weight)) if bias is None else array(bias)
    out = out + (0 if offset is None else array(offset[n]))
    if layer.posterior[site].additive:
        return weight, out + weight @ s + r
    return weight * np.outer(r, s), out


def draw_of_row(layer: Any, row: int, rows: int) -> int:
    """Which draw serves a row: its own, or that of its block of consecutive rows."""
    drawn = next(iter(layer.posterior.values())).values().r.shape[0]
    return row * drawn // rows


# The slow reference ---------------------------------------------------------------------------------------------------


def sigmoid(z: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-z))


def cell(
    mode: str, gi: np.ndarray, gh: np.ndarray, h: np.ndarray, c: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """One step of one row, from torch's documentation."""
    if mode == "LSTM":
        i, f, g, o = np.split(gi + gh, 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        return sigmoid(o) * np.tanh(c), c
    if mode == "GRU":
        (ri, zi, ni), (rh, zh, nh) = np.split(gi, 3), np.split(gh, 3)
        z = sigmoid(zi + zh)
        return (1 - z) * np.tanh(ni + sigmoid(ri + rh) * nh) + z * h, c
    return (np.tanh(gi + gh) if mode == "RNN_TANH" else np.maximum(gi + gh, 0)), c


def loop(
    layer: Any,
    x: np.ndarray,
    n: int,
    h0: np.ndarray,
    c0: np.ndarray,
    hide: bool = False,
) -> tuple[np.ndarray, ...]:
    """A sequence (T', D) of one row under draw n: outputs (T', directions * U), last h and last c (layers * directions,
    U)."""
    h0, c0, index = h0.copy(), c0.copy(), 0
    for i in range(layer.num_layers):
        sides = []
        x = x * 0 if hide and i else x
        for suffix in ("", "_reverse")[: 2 if layer.bidirectional else 1]:
            (wi, bi), (wh, bh) = (
                drawn_weight(layer, f"weight_{kind}_l{i}{suffix}", n)
                for kind in ("ih", "hh")
            )
            h, c, out = h0[index], c0[index], np.zeros((len(x), len(h0[index])))
            for t in reversed(range(len(x))) if suffix else range(len(x)):
                h, c = cell(layer.mode, wi @ x[t] + bi, wh @ h + bh, h, c)
                out[t] = h
            h0[index], c0[index] = h, c
            sides.append(out)
            index += 1
        x = np.concatenate(sides, -1)
    return x, h0, c0


def states(layer: Any, rows: int) -> tuple[Tensor, Tensor]:
    n = layer.num_layers * (2 if layer.bidirectional else 1)
    return torch.randn(n, rows, U), torch.randn(n, rows, U)


KINDS = [(nn.LSTM, {}), (nn.GRU, {}), (nn.RNN, {}), (nn.RNN, {"nonlinearity": "relu"})]
SHAPES = [
    {},
    {"num_layers": 2, "batch_first": True},
    {"bidirectional": True, "bias": False},
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
]


# Every kind in every shape, each with one way to draw, and each way with every kind and every shape.
every_pair = pytest.mark.parametrize(
    ("kind", "options", "shape", "draws"),
    [
        (*kind, shape, draws)
        for kind, shape, draws in pairwise(KINDS, SHAPES, ["example", "member"])
    ],
)


@pytest.mark.slow
@every_pair
def test_sampled_sequences_equal_the_slow_loop(
    kind: type, options: dict[str, Any], shape: dict[str, Any], draws: str
) -> None:
    """F18: every draw and row runs the recurrence with its own W o r s^T, the same at every step."""
    first = 0 if shape.get("batch_first") else 1
    net = convert(kind(D, U, **options, **shape), draws, batch_dim=first)
    x = torch.randn(B, T, D)
    y, state = sb.sample(net, x if first == 0 else x.transpose(0, 1), draws=2 * K)
    y = y if first == 0 else y.transpose(1, 2)  # (S, B, T, ...)
    h = state[0] if kind is nn.LSTM else state
    zeros = np.zeros((h.shape[1], U))
    for j, b in itertools.product(range(2 * K), range(B)):
        n = draw_of_row(net, j * B + b, 2 * K * B)
        out, last_h, last_c = loop(net, array(x[b]), n, zeros, zeros)
        np.testing.assert_allclose(array(y[j, b]), out, atol=1e-12)
        np.testing.assert_allclose(array(h[j, :, b]), last_h, atol=1e-12)
        if kind is nn.LSTM:
            np.testing.assert_allclose(array(state[1][j, :, b]), last_c, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("draws", ["example", "member"])
@pytest.mark.parametrize("shape", SHAPES[1:3])
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_additive_factors_shift_both_matrices(
    kind: type, options: dict[str, Any], shape: dict[str, Any], draws: str
) -> None:
    """F18, A.2: W (x + s) + r and U (h + s') + r', also where the layer has no bias of its own."""
    first = 0 if shape.get("batch_first") else 1
    layer = kind(D, U, **options, **shape)
    net = convert(
        layer,
        draws,
        batch_dim=first,
        perturbation="additive",
        mean_init=sb.Normal(0.0, 0.5),
    )
    x = torch.randn(B, T, D)
    y, state = sb.sample(net, x if first == 0 else x.transpose(0, 1))
    y = y if first == 0 else y.transpose(1, 2)
    zeros = np.zeros(((state[0] if kind is nn.LSTM else state).shape[1], U))
    for j, b in itertools.product(range(K), range(B)):
        out, *_ = loop(
            net, array(x[b]), draw_of_row(net, j * B + b, K * B), zeros, zeros
        )
        np.testing.assert_allclose(array(y[j, b]), out, atol=1e-12)


@pytest.mark.slow
@every_pair
def test_packed_sequences_with_states_equal_the_slow_loop(
    kind: type, options: dict[str, Any], shape: dict[str, Any], draws: str
) -> None:
    """F18: rows of different lengths, unsorted, each from its own state; the reverse direction starts at a row's
    end."""
    net, lengths = convert(kind(D, U, **options, **shape), draws), [2, 4, 1, 3, 4]
    x, (h0, c0) = torch.randn(5, T, D), states(net, 5)
    packed = pack_padded_sequence(
        x, torch.tensor(lengths), batch_first=True, enforce_sorted=False
    )
    y, state = net(packed, (h0, c0) if kind is nn.LSTM else h0)
    padded, seen = pad_packed_sequence(y, batch_first=True)
    assert seen.tolist() == lengths
    h = state[0] if kind is nn.LSTM else state
    for b, length in enumerate(lengths):
        n = draw_of_row(net, b, 5)
        out, last_h, last_c = loop(
            net, array(x[b, :length]), n, array(h0[:, b]), array(c0[:, b])
        )
        np.testing.assert_allclose(array(padded[b, :length]), out, atol=1e-12)
        assert padded[b, length:].abs().sum() == 0
        np.testing.assert_allclose(array(h[:, b]), last_h, atol=1e-12)
        if kind is nn.LSTM:
            np.testing.assert_allclose(array(state[1][:, b]), last_c, atol=1e-12)


class Tagger(nn.Module):
    """Packs inside, as users do."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, U, bidirectional=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        return pad_packed_sequence(
            self.lstm(packed)[0], batch_first=True, total_length=T
        )[0]


@pytest.mark.parametrize("draws", ["example", "member"])
def test_models_that_pack_inside_are_sampled_row_by_row(draws: str) -> None:
    """F18: lengths are tiled with the rows they belong to."""
    net, lengths = convert(Tagger(), draws), torch.tensor([1, 4, 2])
    x = torch.randn(B, T, D)
    y = sb.sample(net, x, lengths)
    zeros = np.zeros((2, U))
    for j, b in itertools.product(range(K), range(B)):
        out, *_ = loop(
            net.lstm,
            array(x[b, : lengths[b]]),
            draw_of_row(net.lstm, j * B + b, K * B),
            zeros,
            zeros,
        )
        np.testing.assert_allclose(array(y[j, b, : lengths[b]]), out, atol=1e-12)


@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
@pytest.mark.parametrize("draws", ["example", "member"])
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_unbatched_sequences_equal_the_slow_loop(
    kind: type, options: dict[str, Any], draws: str
) -> None:
    """F18: (T, D) is one row, with states of shape (layers, U)."""
    net = convert(nn.Sequential(kind(D, U, num_layers=2, **options)), draws)[0]
    x, (h0, c0) = torch.randn(T, D), states(net, 1)
    y, state = net(x, (h0[:, 0], c0[:, 0]) if kind is nn.LSTM else h0[:, 0])
    out, last_h, _ = loop(net, array(x), 0, array(h0[:, 0]), array(c0[:, 0]))
    np.testing.assert_allclose(array(y), out, atol=1e-12)
    np.testing.assert_allclose(
        array(state[0] if kind is nn.LSTM else state), last_h, atol=1e-12
    )


@pytest.mark.slow
@pytest.mark.parametrize("draws", ["example", "member"])
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_dropout_between_layers_spares_the_last(
    kind: type, options: dict[str, Any], draws: str
) -> None:
    """F18: at rate one the second layer sees zeros in training, and the first layer's outputs in eval."""
    net = convert(
        kind(D, U, num_layers=2, dropout=1.0, batch_first=True, **options), draws
    )
    x, zeros = torch.randn(B, T, D), np.zeros((2, U))
    for training in (True, False):
        y = sb.sample(net.train(training), x)[0]
        for j, b in itertools.product(range(K), range(B)):
            out, *_ = loop(
                net,
                array(x[b]),
                draw_of_row(net, j * B + b, K * B),
                zeros,
                zeros,
                hide=training,
            )
            np.testing.assert_allclose(array(y[j, b]), out, atol=1e-12)


# Draws, KL and limits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draws", ["example", "member"])
def test_a_draw_is_constant_over_time_and_fresh_for_every_sequence(draws: str) -> None:
    """F18: without recurrence a constant input gives a constant output; equal sequences and later calls give others."""
    net = convert(nn.RNN(D, U, nonlinearity="tanh", batch_first=True), draws)
    with torch.no_grad():
        net.weight_hh_l0.zero_()
    x = torch.randn(1, 1, D).expand(B, T, D)
    y = sb.sample(net, x)[0]
    torch.testing.assert_close(y, y[:, :, :1].expand_as(y), rtol=0, atol=0)
    rows = y[:, :, 0].flatten(0, 1)
    others = torch.cdist(rows, rows)
    same = (
        torch.block_diag(*[torch.ones(B, B)] * K)
        if draws == "member"
        else torch.eye(K * B)
    )
    assert bool((others[same == 0] > 1e-3).all())
    assert bool((others[same == 1] < 1e-7).all())
    assert (sb.sample(net, x)[0] - y).abs().amax((2, 3)).min() > 1e-3


@pytest.mark.parametrize(
    ("layers", "bidirectional"), [(1, False), (2, False), (2, True)]
)
def test_every_layer_and_direction_pays_four_kl_terms(
    layers: int, bidirectional: bool
) -> None:
    """F18: r and s of the input and of the recurrent matrix; r has an entry for every gate, s for every input."""
    net = convert(nn.LSTM(D, U, layers, bidirectional=bidirectional))
    directions = 2 if bidirectional else 1
    assert len(net.posterior) == 2 * layers * directions
    total = 0.0
    for name, posterior in net.posterior.items():
        n_in = U if "_hh_" in name else D if "_l0" in name else U * directions
        assert posterior.r.loc.shape == (K, 1, 4 * U)
        assert posterior.s.loc.shape == (K, 1, n_in)
        for factor in (posterior.r, posterior.s):
            scale = torch.log1p(factor.rho.exp()) + 1e-7
            term = td.kl_divergence(
                td.Normal(factor.loc, scale), td.Normal(1.0, 0.1)
            ).sum()
            assert term > 0
            total += term.item()
    assert sb.kl(net).item() == pytest.approx(total, rel=1e-12)


def test_one_member_at_a_point_mass_is_torchs_cell() -> None:
    """F18: K = 1, unit point factors, stepped by nn.LSTMCell, nn.GRUCell and nn.RNNCell."""
    for layer_kind, cell_kind in (
        (nn.LSTM, nn.LSTMCell),
        (nn.GRU, nn.GRUCell),
        (nn.RNN, nn.RNNCell),
    ):
        layer, plain = layer_kind(D, U), cell_kind(D, U)
        plain.load_state_dict(
            {n.removesuffix("_l0"): p for n, p in layer.state_dict().items()}
        )
        net = sb.bayesianize(
            layer, sb.BatchEnsemble(members=1, mean_init=sb.Point(1.0)), batch_dim=1
        )
        x, state = torch.randn(T, B, D), None
        y, _ = net(x)
        for t in range(T):
            state = plain(x[t], state)
            torch.testing.assert_close(
                y[t],
                state[0] if cell_kind is nn.LSTMCell else state,
                rtol=0,
                atol=1e-14,
            )


# Cells ----------------------------------------------------------------------------------------------------------------


class Unroll(nn.Module):
    """A cell stepped by hand inside a model."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state, out = None, []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            out.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(out, 1)


CELLS = [
    (nn.LSTMCell, "LSTM", {}),
    (nn.GRUCell, "GRU", {}),
    (nn.RNNCell, "RNN_TANH", {}),
    (nn.RNNCell, "RNN_RELU", {"nonlinearity": "relu"}),
]


@pytest.mark.slow
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("draws", ["example", "member"])
@pytest.mark.parametrize(("kind", "mode", "options"), CELLS)
def test_unrolled_cells_equal_the_slow_loop(
    kind: type, mode: str, options: dict[str, Any], draws: str, bias: bool
) -> None:
    """F18: one draw for all steps of a pass, two sites for a cell."""
    net = convert(Unroll(kind(D, U, bias=bias, **options)), draws)
    x = torch.randn(B, T, D)
    y = sb.sample(net, x)
    assert set(net.cell.posterior) == {"weight_ih", "weight_hh"}
    for j, b in itertools.product(range(K), range(B)):
        n = draw_of_row(net.cell, j * B + b, K * B)
        (wi, bi), (wh, bh) = (
            drawn_weight(net.cell, "weight_ih", n),
            drawn_weight(net.cell, "weight_hh", n),
        )
        h, c = np.zeros(U), np.zeros(U)
        for t in range(T):
            h, c = cell(mode, wi @ array(x[b, t]) + bi, wh @ h + bh, h, c)
            np.testing.assert_allclose(array(y[j, b, t]), h, atol=1e-12)


@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
@pytest.mark.parametrize(("kind", "mode", "options"), CELLS)
def test_unbatched_cells_take_vectors(
    kind: type, mode: str, options: dict[str, Any]
) -> None:
    """F18: one vector is one row."""
    net = convert(nn.ModuleList([kind(D, U, **options)]))[0]
    x, h, c = torch.randn(D), torch.randn(U), torch.randn(U)
    new = net(x, (h, c) if mode == "LSTM" else h)
    (wi, bi), (wh, bh) = (
        drawn_weight(net, "weight_ih", 0),
        drawn_weight(net, "weight_hh", 0),
    )
    expected, _ = cell(mode, wi @ array(x) + bi, wh @ array(h) + bh, array(h), array(c))
    np.testing.assert_allclose(
        array(new[0] if mode == "LSTM" else new), expected, atol=1e-12
    )


# Attention ------------------------------------------------------------------------------------------------------------

E, HEADS, LQ, LK, R = 4, 2, 3, 5, 4


def plain_row(layer: Any, n: int) -> nn.MultiheadAttention:
    """torch's attention with the weights of draw n written in."""
    plain = copy.deepcopy(layer)
    sb.debayesianize(plain)
    with torch.no_grad():
        for block, site in enumerate("qkv"):
            rows = slice(block * E, (block + 1) * E)
            target = (
                plain.in_proj_weight[rows]
                if plain._qkv_same_embed_dim
                else getattr(plain, f"{site}_proj_weight")
            )
            r, s, offset = layer.posterior[site].values()[:3]
            target.mul_(torch.outer(r[n], s[n]))
            if offset is not None:
                plain.in_proj_bias[rows] += offset[n]
        r, s, offset = layer.posterior["out"].values()[:3]
        plain.out_proj.weight.mul_(torch.outer(r[n], s[n]))
        if offset is not None:
            plain.out_proj.bias += offset[n]
    return plain


def attention_draw(layer: Any, row: int, rows: int) -> int:
    drawn = layer.posterior["q"].values().r.shape[0]
    return row * drawn // rows


def inputs(layer: Any, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Batch-first query, key and value."""
    return (
        torch.randn(rows, LQ, E),
        torch.randn(rows, LK, layer.kdim),
        torch.randn(rows, LK, layer.vdim),
    )


def row_masks(masks: dict[str, Any], row: int) -> dict[str, Any]:
    out = dict(masks)
    if "key_padding_mask" in out:
        out["key_padding_mask"] = out["key_padding_mask"][row : row + 1]
    if "attn_mask" in out and out["attn_mask"].dim() == 3:
        out["attn_mask"] = out["attn_mask"][row * HEADS : (row + 1) * HEADS]
    return out


def check_attention(
    layer: Any,
    qkv: tuple[Tensor, ...],
    masks: dict[str, Any],
    y: Tensor,
    weights: Tensor | None,
    tiles: int = 1,
) -> None:
    """Each row of y (tiles * rows, LQ, E) against torch's own layer on that row alone."""
    rows = qkv[0].shape[0]
    for i in range(tiles * rows):
        plain = plain_row(layer, attention_draw(layer, i, tiles * rows))
        b = i % rows
        single = [
            t[b : b + 1] if layer.batch_first else t[b : b + 1].transpose(0, 1)
            for t in qkv
        ]
        expected, expected_weights = plain(*single, **row_masks(masks, b))
        torch.testing.assert_close(
            y[i],
            expected[0] if layer.batch_first else expected[:, 0],
            rtol=0,
            atol=1e-12,
        )
        if weights is None:
            assert expected_weights is None
        else:
            torch.testing.assert_close(
                weights[i], expected_weights[0], rtol=0, atol=1e-12
            )


def causal(rows: int = LQ, keys: int = LK) -> Tensor:
    return torch.ones(rows, keys, dtype=torch.bool).triu(1)


PADDING = torch.tensor(
    [[0, 0, 0, 1, 1], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0], [1, 0, 0, 1, 0]],
    dtype=torch.bool,
)
generator = torch.Generator().manual_seed(7)
HEAD_MASK = torch.rand(R * HEADS, LQ, LK, generator=generator) < 0.3
HEAD_MASK[..., -1] = False  # a query without keys would be NaN in both
FLOAT_MASK = torch.randn(LQ, LK, generator=generator, dtype=torch.float64)
MASKS = {
    "none": {},
    "padding": {"key_padding_mask": PADDING},
    "float padding": {"key_padding_mask": PADDING.double() * -3},
    "2d bool": {"attn_mask": causal()},
    "2d float": {"attn_mask": FLOAT_MASK},
    "3d bool": {"attn_mask": HEAD_MASK},
    "3d float": {"attn_mask": HEAD_MASK.double() * -2},
    "causal hint": {"attn_mask": causal(), "is_causal": True},
    "padding and 2d": {
        "key_padding_mask": PADDING,
        "attn_mask": causal() & ~causal(LQ, LK).roll(1, 1),
    },
    "padding and 3d float": {
        "key_padding_mask": PADDING.double() * -3,
        "attn_mask": HEAD_MASK.double() * -2,
    },
}
OPTIONS = [
    {},
    {"kdim": 3, "vdim": 6, "batch_first": True},
    {"add_zero_attn": True, "bias": False},
    {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True, "kdim": 3},
]


ASKED = [{"need_weights": False}, {"average_attn_weights": False}, {}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mask", "options", "draws", "asked"),
    pairwise(MASKS, OPTIONS, ["example", "member"], ASKED),
)
def test_attention_equals_torch_on_materialised_weights(
    mask: str, options: dict[str, Any], draws: str, asked: dict[str, Any]
) -> None:
    """F1 for the four projections, with every mask torch takes, row by row."""
    layer = convert(
        nn.MultiheadAttention(E, HEADS, **options),
        draws,
        batch_dim=0 if options.get("batch_first") else 1,
    ).eval()
    qkv = inputs(layer, R)
    given = qkv if layer.batch_first else tuple(t.transpose(0, 1) for t in qkv)
    y, weights = layer(*given, **MASKS[mask], **asked)
    told = MASKS[mask] | asked
    if layer.bias_k is not None or layer.add_zero_attn:
        # With the hint torch's fused path rebuilds the mask and hides the appended keys; its other path shows them.
        told = told | {"is_causal": False}
    check_attention(
        layer, qkv, told, y if layer.batch_first else y.transpose(0, 1), weights
    )


@pytest.mark.slow
@pytest.mark.parametrize(("draws", "mask"), each(["example", "member"], MASKS))
def test_sampled_attention_repeats_masks_with_their_rows(mask: str, draws: str) -> None:
    """F1, F2: sample tiles padding masks, and masks of every head, along with the rows."""
    layer = convert(nn.MultiheadAttention(E, HEADS, batch_first=True), draws).eval()
    qkv = inputs(layer, R)
    y, weights = sb.sample(layer, *qkv, **MASKS[mask])
    check_attention(
        layer, qkv, MASKS[mask], y.flatten(0, 1), weights.flatten(0, 1), tiles=K
    )


@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
@pytest.mark.parametrize("batch_first", [True, False])
def test_unbatched_attention_is_one_row(batch_first: bool) -> None:
    """F1: (L, E) in, (L, E) out."""
    layer = convert(
        nn.ModuleList([nn.MultiheadAttention(E, HEADS, batch_first=batch_first)])
    )[0].eval()
    q, k, v = (t[0] for t in inputs(layer, 1))
    for masks in (
        {},
        {"key_padding_mask": PADDING[1]},
        {"attn_mask": causal()},
        {"attn_mask": HEAD_MASK[:HEADS]},
    ):
        y, weights = layer(q, k, v, **masks)
        expected = plain_row(layer, 0)(q, k, v, **masks)
        torch.testing.assert_close(y, expected[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(weights, expected[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_encoder_layer_equals_torch_on_materialised_weights(
    batch_first: bool, norm_first: bool
) -> None:
    """F1 through nn.TransformerEncoderLayer: attention and both linear layers, rows along either dimension, no fast
    path."""
    plain = nn.TransformerEncoderLayer(
        E, HEADS, 6, dropout=0.0, batch_first=batch_first, norm_first=norm_first
    )
    net = convert(copy.deepcopy(plain), batch_dim=0 if batch_first else 1).eval()
    x = torch.randn(R, LQ, E)
    with torch.no_grad():
        y = sb.sample(net, x if batch_first else x.transpose(0, 1))
        y = (y if batch_first else y.transpose(1, 2)).flatten(0, 1)
        for i in range(K * R):
            single = copy.deepcopy(plain).eval()
            single.self_attn = plain_row(net.self_attn, i)
            for name in ("linear1", "linear2"):
                s, r, offset = getattr(net, name).posterior["weight"].factors()
                getattr(single, name).weight.mul_(torch.outer(r[i], s[i]))
                getattr(single, name).bias.add_(offset[i])
            row = x[i % R : i % R + 1]
            single.train()  # no dropout here; training mode keeps torch off its fused path, which reorders arithmetic
            expected = single(row if batch_first else row.transpose(0, 1))
            torch.testing.assert_close(
                y[i], expected[0] if batch_first else expected[:, 0], rtol=0, atol=1e-12
            )


# Layouts that are easy to get wrong -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
@pytest.mark.parametrize(
    ("kind", "shape", "expected"),
    [
        (lambda: nn.Linear(4, 3), (4,), (3,)),
        (lambda: nn.Conv2d(2, 3, 2), (2, 4, 4), (3, 3, 3)),
        (lambda: nn.ConvTranspose1d(2, 3, 2), (2, 4), (3, 5)),
        (lambda: nn.LSTM(D, U), (T, D), (T, U)),
        (lambda: nn.GRU(D, U, batch_first=True), (T, D), (T, U)),
        (lambda: nn.LSTMCell(D, U), (D,), (U,)),
    ],
)
def test_converted_root_layer_takes_unbatched_inputs(
    kind: Any, shape: Any, expected: Any
) -> None:
    """F1: a layer that is itself the model still counts an unbatched input as one row."""
    y = sb.bayesianize(kind(), sb.Rank1(members=2))(torch.randn(shape))
    assert (y[0] if isinstance(y, tuple) else y).shape == expected


@pytest.mark.filterwarnings("ignore:slimbayes runs this model draw by draw")
@pytest.mark.parametrize("batch_first", [True, False])
def test_converted_root_attention_takes_unbatched_inputs(batch_first: bool) -> None:
    """F1: as above, for nn.MultiheadAttention."""
    layer = sb.bayesianize(
        nn.MultiheadAttention(E, HEADS, batch_first=batch_first), sb.Rank1(members=2)
    )
    y, _ = layer(torch.randn(LQ, E), torch.randn(LK, E), torch.randn(LK, E))
    assert y.shape == (LQ, E)


@pytest.mark.parametrize(
    ("rows", "members", "units", "options"),
    [
        (2, 4, 8, {}),
        (1, 2, 3, {"num_layers": 2}),
        (1, 2, 3, {"bidirectional": True}),
        (2, 2, 3, {"num_layers": 2, "bidirectional": True}),
    ],
    ids=[
        "units equal rows",
        "layers equal rows",
        "directions equal rows",
        "layers x directions equal rows",
    ],
)
def test_states_are_split_by_rows_even_where_other_sizes_coincide(
    rows: int, members: int, units: int, options: dict[str, Any]
) -> None:
    """F2: h (layers * directions, S * B, U) gives (S, layers * directions, B, U); its last forward state is the last
    output."""
    net = sb.bayesianize(
        nn.GRU(D, units, batch_first=True, **options), sb.BatchEnsemble(members=members)
    )
    y, h = sb.sample(net, torch.randn(rows, T, D))
    index = -2 if net.bidirectional else -1
    assert h.shape == (
        members,
        net.num_layers * (2 if net.bidirectional else 1),
        rows,
        units,
    )
    torch.testing.assert_close(h[:, index], y[:, :, -1, :units], rtol=0, atol=0)


@pytest.mark.parametrize("draws", ["example", "member"])
def test_sample_tiles_initial_states_with_their_rows(draws: str) -> None:
    """F2: hx keeps its rows along dimension 1."""
    net = convert(nn.GRU(D, U, batch_first=True), draws)
    x, h0 = torch.randn(B, T, D), torch.randn(1, B, U)
    y, _ = sb.sample(net, x, h0)
    for j, b in itertools.product(range(K), range(B)):
        out, *_ = loop(
            net,
            array(x[b]),
            draw_of_row(net, j * B + b, K * B),
            array(h0[:, b]),
            np.zeros((1, U)),
        )
        np.testing.assert_allclose(array(y[j, b]), out, atol=1e-12)


@pytest.mark.parametrize("draws", ["example", "member"])
def test_sequence_first_root_is_never_sampled_along_time(draws: str) -> None:
    """F18: (T, B, D) without batch_dim=1 must give rows their draws or be refused, never tile time."""
    net, x = convert(nn.LSTM(D, U), draws), torch.randn(T, B, D)
    try:
        y, _ = sb.sample(net, x)
    except ValueError:
        return
    assert y.shape == (K, T, B, U)
    out, *_ = loop(
        net,
        array(x[:, 0]),
        draw_of_row(net, B, K * B),
        np.zeros((1, U)),
        np.zeros((1, U)),
    )
    np.testing.assert_allclose(array(y[1, :, 0]), out, atol=1e-12)


def test_sample_of_packed_sequences_separates_draws_or_refuses() -> None:
    """F2: a packed output has no axis for draws; handing every draw the rows of all draws is wrong."""
    net = convert(nn.LSTM(D, U))
    packed = pack_padded_sequence(torch.randn(T, B, D), torch.tensor([4, 2, 1]))
    try:
        y, _ = sb.sample(net, packed)
    except (ValueError, TypeError):
        return
    assert not torch.equal(y.data[0], y.data[1])


@pytest.mark.parametrize(
    "mask", ["padding", "2d bool", "3d bool", "padding and 3d float"]
)
def test_sequence_first_attention_is_sampled_with_masks(mask: str) -> None:
    """F2: query and key keep rows along dimension 1, the padding mask along dimension 0."""
    layer = convert(nn.MultiheadAttention(E, HEADS), batch_dim=1).eval()
    qkv = inputs(layer, R)
    y, weights = sb.sample(layer, *(t.transpose(0, 1) for t in qkv), **MASKS[mask])
    check_attention(
        layer,
        qkv,
        MASKS[mask],
        y.transpose(1, 2).flatten(0, 1),
        weights.flatten(0, 1),
        tiles=K,
    )


def test_attention_mask_as_long_as_the_batch_is_not_taken_for_rows() -> None:
    """F2: an (L, S) mask holds for every row, also where L happens to be the number of rows."""
    layer = convert(nn.MultiheadAttention(E, HEADS, batch_first=True)).eval()
    qkv, masks = inputs(layer, LQ), {"attn_mask": causal()}
    y, weights = sb.sample(layer, *qkv, **masks)
    check_attention(layer, qkv, masks, y.flatten(0, 1), weights.flatten(0, 1), tiles=K)
