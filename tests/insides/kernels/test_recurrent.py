"""The recurrence of an LSTM: its loop in plain torch, and kernels as one operation against that loop."""

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import slimbayes as sb
from slimbayes import kernels
from slimbayes.kernels.lstm import Cell, lstm, steps

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 4e-2,
}


class Case(NamedTuple):
    """T steps, R rows, u units, n lines, B weights; which of s, r, r_in and bias there are."""

    sizes: tuple[int, int, int]
    lines: int = 1
    weights: int = 1
    given: str = "s r r_in bias"
    lengths: bool = False
    reverse: bool = False


# Rows and units on both sides of a tile, and lines for each row, for blocks of rows and for all.
CASES = [
    Case((3, 6, 5), 6),
    Case((4, 6, 5), 6, lengths=True, reverse=True),
    Case((3, 6, 37), 2, lengths=True),
    Case((2, 35, 34), 35, reverse=True),
    Case((3, 6, 5), 1, 2, "bias", lengths=True, reverse=True),
    Case((3, 6, 5), 1, 3, ""),
    Case((2, 6, 5), 3, 1, "s bias"),
    Case((1, 4, 3), 2, 2, "r r_in"),
    Case((1, 1, 1), 1),
]


class Given(NamedTuple):
    gates: Tensor
    cell: Cell
    h: Tensor
    c: Tensor
    lengths: Tensor | None
    reverse: bool

    @property
    def tensors(self) -> list[Tensor]:
        return [t for t in (self.gates, *self.cell, self.h, self.c) if t is not None]

    def to(self, dtype: torch.dtype) -> "Given":
        def leaf(t: Tensor | None) -> Any:
            return None if t is None else t.detach().to(dtype).requires_grad_()

        cell = Cell(*map(leaf, self.cell))
        return self._replace(
            gates=leaf(self.gates), cell=cell, h=leaf(self.h), c=leaf(self.c)
        )


def given(case: Case, dtype: torch.dtype = torch.float64) -> Given:
    """Numbers that `dtype` has exactly, so that a wider copy starts from the same."""
    torch.manual_seed(0)
    T, R, u = case.sizes

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()

    shapes = {
        "s": (case.lines, u),
        "r": (case.lines, 4 * u),
        "r_in": (case.lines, 4 * u),
        "bias": (case.lines, 4 * u),
    }
    lines = [
        random(*shape) if name in case.given.split() else None
        for name, shape in shapes.items()
    ]
    weight = (random(case.weights, 4 * u, u) / u**0.5).detach().requires_grad_()
    lengths = torch.randint(0, T + 1, (R,)) if case.lengths else None
    return Given(
        random(T, R, 4 * u),
        Cell(weight, *lines),
        random(R, u),
        random(R, u),
        lengths,
        case.reverse,
    )


def check(case: Case, dtype: torch.dtype) -> None:
    """Outputs, and gradients of all inputs from gradients of all outputs."""
    narrow = given(case, dtype)
    exact = narrow.to(torch.float64)
    found, expected = lstm(*narrow), steps(*exact)
    weights = [torch.randn_like(t) for t in expected]
    gradients = torch.autograd.grad(
        found, narrow.tensors, [w.to(dtype) for w in weights]
    )
    expected = (*expected, *torch.autograd.grad(expected, exact.tensors, weights))
    for got, wanted in zip((*found, *gradients), expected, strict=True):
        assert got.dtype == dtype and got.shape == wanted.shape
        error = (got.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1)
        assert error < TOLERANCE[dtype]
    with torch.no_grad():
        for got, again in zip(lstm(*narrow), found, strict=True):
            assert torch.equal(got, again)


@pytest.mark.parametrize("case", CASES)
def test_the_loop_equals_torchs_cell_row_by_row(case: Case) -> None:
    """With the weight W o r s^T of each row written out."""
    one = given(case)
    (T, R, u), (weight, *lines) = case.sizes, one.cell
    s, r, r_in, bias = (
        None if line is None else line.repeat_interleave(R // len(line), 0)
        for line in lines
    )
    states, last = steps(*one)
    for row in range(R):
        own = (
            weight[row * case.weights // R]
            * (1 if r is None else r[row, :, None])
            * (1 if s is None else s[row])
        )
        inputs = one.gates[:, row] * (1 if r_in is None else r_in[row]) + (
            0 if bias is None else bias[row]
        )
        state = one.h[row, None], one.c[row, None]
        for t in reversed(range(T)) if case.reverse else range(T):
            if one.lengths is None or t < one.lengths[row]:
                state = torch.lstm_cell(
                    inputs[t, None], state, torch.eye(4 * u).double(), own
                )
            torch.testing.assert_close(states[t, row], state[0][0])
        torch.testing.assert_close(last[row], state[1][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_torch_keeps_cell_states_in_float32(dtype: torch.dtype) -> None:
    with kernels.disable():
        check(Case((4, 6, 5), 3, lengths=True), dtype)


# The operation, by kernels where there are any, else by the loop in their place ---------------------------------------


class Loop:
    """What kernels/lstm_triton.py computes, by the loop and its gradients."""

    @staticmethod
    def forward(
        gates: Tensor,
        cell: Cell,
        h: Tensor,
        c: Tensor,
        lengths: Any,
        reverse: bool,
        keep: bool,
    ) -> Any:
        T, R, u = *gates.shape[:2], h.shape[1]
        kept = [(T + 1, R, u), (T, R, 4 * u), (T, R, u)] if keep else [(0,)] * 3
        return *steps(gates, cell, h, c, lengths, reverse), *(
            gates.new_empty(shape) for shape in kept
        )

    @staticmethod
    def backward(
        dh: Tensor,
        dc: Tensor,
        gates: Tensor,
        cell: Cell,
        h: Tensor,
        c: Tensor,
        *rest: Any,
    ) -> Any:
        *_, lengths, reverse, weighs = rest
        given = {i: t for i, t in enumerate((gates, *cell, h, c)) if t is not None}

        def run(found: dict[int, Tensor]) -> Any:
            every: list[Any] = [found.get(i) for i in range(8)]
            return steps(every[0], Cell(*every[1:6]), *every[6:], lengths, reverse)

        (grads,) = torch.func.vjp(run, given)[1](
            (dh, dc)
        )  # autograd itself is off inside an operation
        kept = grads if weighs else {i: g for i, g in grads.items() if i != 1}
        return tuple(kept[i] if i in kept else gates.new_empty(0) for i in range(8))


@pytest.fixture
def operation(monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels.ready(torch.zeros(1)):
        monkeypatch.setattr(kernels, "lstm_triton", Loop, raising=False)
        monkeypatch.setattr("slimbayes.kernels.lstm.ready", lambda x: True)


@pytest.mark.usefixtures("operation")
@pytest.mark.parametrize("case", CASES)
def test_the_operation_equals_the_loop(case: Case) -> None:
    check(case, torch.float32)


@pytest.mark.usefixtures("operation")
@pytest.mark.slow
def test_second_derivatives_go_through_the_loop() -> None:
    case = given(Case((2, 2, 1), 2, lengths=True), torch.float32)
    tensors = case.tensors

    def second(run: Any) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(
            sum(t.square().sum() for t in run(*case)), tensors, create_graph=True
        )
        return torch.autograd.grad(sum(t.square().sum() for t in first), tensors)

    for a, b in zip(second(lstm), second(steps), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("operation")
def test_gradients_of_what_needs_none_are_left_out() -> None:
    """A frozen weight, and a state that nothing depends on."""
    case = given(Case((3, 4, 2), 4), torch.float32)
    frozen = case._replace(
        cell=case.cell._replace(weight=case.cell.weight.detach()), h=case.h.detach()
    )
    leaves = [t for t in frozen.tensors if t.requires_grad]
    got = torch.autograd.grad(lstm(*frozen)[0].sum(), leaves)
    wanted = torch.autograd.grad(steps(*frozen)[0].sum(), leaves)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("operation")
def test_a_graph_has_one_node_for_all_steps() -> None:
    """That of a long sequence is as large as that of a short one."""

    def nodes(length: int) -> int:
        model = sb.bayesianize(nn.LSTM(3, 4, batch_first=True), METHODS["per example"])
        seen, found = set(), [sb.sample(model, torch.randn(2, length, 3))[0].grad_fn]
        while found:
            node = found.pop()
            if node is not None and node not in seen:
                seen.add(node)
                found.extend(n for n, _ in node.next_functions)
        return len(seen)

    assert nodes(2) == nodes(5)


# Kernels, interpreted on a CPU under TRITON_INTERPRET=1 ---------------------------------------------------------------


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="kernels need triton")
    if not kernels.ready(torch.zeros(1)):
        pytest.skip("kernels run on a GPU, or under TRITON_INTERPRET=1")
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    dot = InterpreterBuilder.create_dot

    def widened(
        self: Any, a: Any, b: Any, *rest: Any
    ) -> Any:  # the interpreter multiplies the bits of bfloat16
        if a.dtype == tl.bfloat16:
            a, b = (self.cast_impl(x, tl.float32) for x in (a, b))
        return dot(self, a, b, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", widened)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.float32) for case in CASES]
    + list(itertools.product(CASES[1:3], [torch.float16, torch.bfloat16])),
)
def test_kernels_equal_the_loop(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


@pytest.mark.usefixtures("interpreter")
def test_kernels_take_strided_inputs_and_expanded_gradients() -> None:
    case = given(Case((2, 4, 3), 2), torch.float32)
    turned = case._replace(
        gates=case.gates.detach()
        .transpose(0, 2)
        .contiguous()
        .transpose(0, 2)
        .requires_grad_()
    )
    assert not turned.gates.is_contiguous()
    for a, b in zip(
        torch.autograd.grad(lstm(*turned)[0].sum(), turned.tensors),
        torch.autograd.grad(steps(*case)[0].sum(), case.tensors),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# Layers ---------------------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    """One layer used twice in a pass, on sequences of different lengths the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, bidirectional=True)
        self.back = nn.Linear(8, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        first, state = self.lstm(x.transpose(0, 1))
        packed = pack_padded_sequence(self.back(first), lengths, enforce_sorted=False)
        second, (h, c) = self.lstm(packed, state)
        padded, _ = pad_packed_sequence(
            second, batch_first=True, total_length=x.shape[1]
        )
        return torch.cat(
            [
                padded.flatten(1),
                h.transpose(0, 1).flatten(1),
                c.transpose(0, 1).flatten(1),
            ],
            1,
        )


METHODS = {
    "per example": sb.Rank1(members=2, scale_init=0.3),
    "per member": sb.Rank1(members=2, scale_init=0.3, draws="member"),
    "whole weights": sb.MeanField(),
}


def gradients_of(model: nn.Module, x: Tensor, lengths: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    y = sb.sample(model, x, lengths, draws=4)
    model.zero_grad()
    y.square().sum().backward()
    return [y, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_used_twice_is_as_the_loop_over_time(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where kernels run, all draws of every method; elsewhere, draws of single rows."""
    torch.manual_seed(0)
    model = sb.bayesianize(Twice(), METHODS[method])
    inputs = torch.randn(3, 2, 3), torch.tensor([1, 2, 1])
    got = gradients_of(model, *inputs)
    assert len(got) > 10
    monkeypatch.setattr(type(model.lstm), "_lstm", type(model.lstm)._direction)
    with kernels.disable():
        wanted = gradients_of(model, *inputs)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_uneven_blocks_keep_their_lines() -> None:
    """Five rows of two members: lines are spread over rows, as the loop does."""
    torch.manual_seed(0)
    model = sb.bayesianize(nn.LSTM(3, 4, batch_first=True), METHODS["per member"])
    x = torch.randn(5, 3, 3)
    outputs = []
    for together in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                type(model), "_together", lambda self, x, answer=together: answer
            )
            torch.manual_seed(3)
            outputs.append(model(x)[0])
    torch.testing.assert_close(*outputs)


class Recomputed(nn.Module):
    """Its layer's activations are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.again = nn.LSTM(3, 4, batch_first=True), False

    def forward(self, x: Tensor) -> Tensor:
        return (
            checkpoint(self.lstm, x, use_reentrant=False)[0]
            if self.again
            else self.lstm(x)[0]
        )


def test_half_precision_under_autocast_and_checkpointing() -> None:
    model = sb.bayesianize(Recomputed(), METHODS["per example"])
    x = torch.randn(4, 3, 3)
    grads = []
    for again in (False, True):
        torch.manual_seed(0)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            model.again = again
            y = sb.sample(model, x)
        assert y.dtype == torch.bfloat16
        y.float().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
@pytest.mark.usefixtures("operation")
def test_models_with_the_operation_compile_as_one_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU, where the compiler meets the operation and not the loop."""
    monkeypatch.setattr(torch._dynamo.config, "allow_rnn", True)
    torch._dynamo.reset()
    model = sb.bayesianize(nn.LSTM(3, 4, batch_first=True), METHODS["per example"])
    x = torch.randn(4, 3, 3)
    model(x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = []
    for call in (model, compiled):
        torch.manual_seed(0)
        model.zero_grad()
        y, _ = sb.sample(call, x)
        y.sum().backward()
        found.append(
            [y, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        )
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("draws", ["example", "member"])
def test_a_compiler_that_gives_recurrent_modules_up_compiles_nothing_inside(
    draws: Any,
) -> None:
    """It compiled six pieces of what the layer calls, each with guards; now there is one, the head."""
    torch._dynamo.reset()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0][:, -1])

    net, x, pieces = (
        sb.bayesianize(Net(), sb.Rank1(members=2, draws=draws)),
        torch.randn(4, 5, 3),
        [],
    )

    def backend(module: Any, inputs: Any) -> Any:
        pieces.append(sum(node.op.startswith("call") for node in module.graph.nodes))
        return module.forward

    fast = torch.compile(net, backend=backend)
    torch.testing.assert_close(sb.sample(fast, x, seed=0), sb.sample(net, x, seed=0))
    assert len(pieces) == 1, pieces
    torch._dynamo.reset()
