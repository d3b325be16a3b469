"""Random small models: whatever a model does with its rows, its draws are those of plain models with the drawn weights.

A model is a program of a dozen kinds of step, interpreted by an nn.Module; hypothesis finds the programs and shrinks
those that fail. SLIMBAYES_RANDOM_MODELS=10000 runs that many instead of 100, other ones each time.
"""

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import assert_equal, held, leaves, quietly
from torch import Tensor, nn

import slimbayes as sb

COUNT = int(os.environ.get("SLIMBAYES_RANDOM_MODELS", "100"))
S = 3
METHODS: dict[str, Any] = {
    "batch-ensemble": sb.BatchEnsemble(members=3),
    "rank1-example": sb.Rank1(members=3, scale_init=0.3, mean_init=sb.Normal(1.0, 0.5)),
    "rank1-member": sb.Rank1(
        members=3, scale_init=0.3, mean_init=sb.Normal(1.0, 0.5), draws="member"
    ),
    "mean-field": sb.MeanField(scale_init=0.2),
    "flipout": sb.MeanField(scale_init=0.2, estimator="flipout"),
    "k-tied": sb.KTied(rank=1, scale_init=0.2),
    "emp": sb.ModelPatch(components=3, jitter=0.5, patch=".*"),
    "drop-connect": sb.DropConnect(rate=0.4),
    "ensemble-layers": {".+": sb.Ensemble(members=3, init="copies", jitter=0.5)},
}
CALM = [
    "linear",
    "layer_norm",
    "loop",
    "again",
    "cat_features",
    "skip",
    "swish",
]  # steps that leave every row to itself, in its place
WILD = [
    *CALM, "linear", "conv", "transpose", "flatten_rows", "unflatten_rows", "fixed_view", "cat_rows", "split_rows",
    "centre", "attend_first", "attend", "mask", "positions", "row_numbers", "by_size", "cumsum", "pick", "average",
    "flip", "batch_norm", "functional", "chunks", "matrix",
]  # fmt: skip
MOST = 1500  # numbers in any tensor of a plain run


@dataclass(frozen=True)
class Program:
    """Steps (name, two small numbers), the input's shape, and whether it holds word indices."""

    steps: tuple[tuple[str, int, int], ...]
    shape: tuple[int, ...]
    words: bool = False


class Interpreter(nn.Module):
    """Runs a program. Layers are made while a plain input is sent through; what that does not allow is left out."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.table = nn.Embedding(9, 4) if program.words else None
        self.layers = nn.ModuleDict()
        self.places: dict[
            int, Any
        ] = {}  # numbers that a step fixed while the model was built
        self.skipped: set[int] = set()
        self.building = True
        with torch.no_grad():
            self(program_input(program))
        self.building = False

    def forward(self, x: Tensor) -> Tensor:
        h = x if self.table is None else self.table(x)
        first = h
        for i, (name, a, b) in enumerate(self.program.steps):
            if i in self.skipped:
                continue
            if not self.building:
                h = getattr(self, f"_{name}")(h, i, a, b, first)
                continue
            try:
                new = getattr(self, f"_{name}")(h, i, a, b, first)
                assert 1 <= new.dim() <= 4 and 0 < new.numel() <= MOST
            except (RuntimeError, ValueError, IndexError, AssertionError):
                self.skipped.add(i)
                if str(i) in self.layers:
                    del self.layers[str(i)]
                continue
            h = new
        return self._linear(h, len(self.program.steps), 2, 0, first) if h.dim() else h

    def _layer(self, i: int, make: Any) -> Any:
        if self.building:
            self.layers[str(i)] = make()
        return self.layers[str(i)]

    def _fixed(self, i: int, value: Any) -> Any:
        if self.building:
            self.places[i] = value
        return self.places[i]

    def _linear(self, h: Tensor, i: int, a: int, b: int, first: Tensor) -> Tensor:
        return torch.tanh(self._layer(i, lambda: nn.Linear(h.shape[-1], 2 + a))(h))

    def _layer_norm(self, h: Tensor, i: int, a: int, b: int, first: Tensor) -> Tensor:
        return self._layer(i, lambda: nn.LayerNorm(h.shape[-1], eps=0.1))(h)

    def _batch_norm(self, h: Tensor, i: int, a: int, b: int, first: Tensor) -> Tensor:
        return self._layer(i, lambda: nn.BatchNorm1d(h.shape[1]).eval())(h)

    def _loop(self, h: Tensor, i: int, a: int, b: int, first: Tensor) -> Tensor:
        layer = self._layer(i, lambda: nn.Linear(h.shape[-1], h.shape[-1]))
        for _ in range(1 + a):
            h = torch.tanh(layer(h))
        return h

    def _again(self, h: Tensor, i: int, a: int, b: int, first: Tensor) -> Tensor:
        """Call an earlier layer once more."""
        names = [
            n
            for n, layer in self.layers.items()
            if isinstance(layer, nn.Linear) and layer.in_features == h.shape[-1]
        ]
        name = self._fixed(i, names[a % len(names)] if names else None)
        assert name is not None
        return torch.tanh(self.layers[name](h))

    def _functional(self, h: Tensor, i: int, a: int, b: int, first: Tensor) -> Tensor:
        """Use a layer's weight past its forward."""
        layer = self._layer(i, lambda: nn.Linear(h.shape[-1], 2 + a))
        return torch.tanh(F.linear(h, layer.weight, layer.bias))

    def _matrix(self, h: Tensor, i: int, a: int, b: int, first: Tensor) -> Tensor:
        """A plain product with a weight."""
        layer = self._layer(i, lambda: nn.Linear(h.shape[-1], 2 + a, bias=False))
        return torch.sin(h @ layer.weight.T)

    def _conv(self, h: Tensor, i: int, a: int, b: int, first: Tensor) -> Tensor:
        h = h.unsqueeze(1) if h.dim() == 2 else h
        assert h.dim() == 3
        return torch.tanh(
            self._layer(i, lambda: nn.Conv1d(h.shape[1], 2 + a, 3, padding=1))(h)
        )

    def _transpose(self, h: Tensor, i: int, a: int, b: int, first: Tensor) -> Tensor:
        assert h.dim() > 1 and a % h.dim() != b % h.dim()
        return h.transpose(a % h.dim(), b % h.dim())

    def _flatten_rows(self, h: Tensor, i: int, a: int, b: int, first: Tensor) -> Tensor:
        assert h.dim() > 2
        return h.flatten(0, 1) if a % 2 else h.flatten(1)

    def _unflatten_rows(
        self, h: Tensor, i: int, a: int, b: int, first: Tensor
    ) -> Tensor:
        part = 2 + a % 2
        return h.unflatten(
            0, (h.shape[0] // part, part) if b % 2 else (part, h.shape[0] // part)
        )

    def _fixed_view(self, h: Tensor, i: int, a: int, b: int, first: Tensor) -> Tensor:
        """The number of rows is a constant of the model, or the number of steps is."""
        rows, tail = (
            self._fixed(i, (h.shape[0], h.shape[1:]))
            if h.dim() > 1
            else (h.shape[0], ())
        )
        return h.reshape(rows, -1) if a % 2 else h.reshape(-1, *tail[-1:])

    def _cat_rows(self, h: Tensor, i: int, a: int, b: int, first: Tensor) -> Tensor:
        return torch.cat([h, 2 * h.flip(0) if a % 2 else 2 * h], 0)

    def _split_rows(self, h: Tensor, i: int, a: int, b: int, first: Tensor) -> Tensor:
        """Two halves of the rows meet."""
        assert h.shape[0] % 2 == 0
        one, other = h.chunk(2)
        return one - other.sin()

    def _cat_features(self, h: Tensor, i: int, a: int, b: int, first: Tensor) -> Tensor:
        return torch.cat([h, h.sin()], -1)

    def _skip(self, h: Tensor, i: int, a: int, b: int, first: Tensor) -> Tensor:
        assert h.shape == first.shape
        return h + first

    def _swish(self, h: Tensor, i: int, a: int, b: int, first: Tensor) -> Tensor:
        return F.silu(h)

    def _centre(self, h: Tensor, i: int, a: int, b: int, first: Tensor) -> Tensor:
        return h - h.mean(a % h.dim(), keepdim=True) / 2

    def _attend_first(self, h: Tensor, i: int, a: int, b: int, first: Tensor) -> Tensor:
        flat = h.flatten(1) if h.dim() > 1 else h.unsqueeze(1)
        return ((flat @ flat.T).softmax(-1) @ flat).view(h.shape)

    def _attend(self, h: Tensor, i: int, a: int, b: int, first: Tensor) -> Tensor:
        assert h.dim() > 2
        return (h @ h.transpose(-1, -2)).softmax(-1) @ h

    def _mask(self, h: Tensor, i: int, a: int, b: int, first: Tensor) -> Tensor:
        """Every other place of a dimension."""
        shape = [1] * h.dim()
        shape[a % h.dim()] = -1
        return h * (torch.arange(h.shape[a % h.dim()]) % 2 * 0.5 + 0.5).view(shape).to(
            h
        )

    def _positions(self, h: Tensor, i: int, a: int, b: int, first: Tensor) -> Tensor:
        assert h.dim() > 2
        table = self._layer(i, lambda: nn.Embedding(64, h.shape[-1]))
        return h + table(torch.arange(h.shape[-2]) % 64)

    def _row_numbers(self, h: Tensor, i: int, a: int, b: int, first: Tensor) -> Tensor:
        assert h.dim() > 1
        layer = self._layer(i, lambda: nn.Linear(1, h.shape[-1]))
        places = torch.arange(h.shape[0], dtype=h.dtype).view(-1, *[1] * (h.dim() - 1))
        return h + torch.tanh(layer(places / 8))

    def _by_size(self, h: Tensor, i: int, a: int, b: int, first: Tensor) -> Tensor:
        return h * 2 / h.shape[a % h.dim()]

    def _cumsum(self, h: Tensor, i: int, a: int, b: int, first: Tensor) -> Tensor:
        return h.cumsum(a % h.dim()) / 4

    def _pick(self, h: Tensor, i: int, a: int, b: int, first: Tensor) -> Tensor:
        assert h.dim() > 2
        return h.select(a % 2, -1)

    def _average(self, h: Tensor, i: int, a: int, b: int, first: Tensor) -> Tensor:
        assert h.dim() > 1
        return h.mean(a % (h.dim() - 1))

    def _flip(self, h: Tensor, i: int, a: int, b: int, first: Tensor) -> Tensor:
        return h.flip(a % h.dim())

    def _chunks(self, h: Tensor, i: int, a: int, b: int, first: Tensor) -> Tensor:
        """A layer that is called a number of times that depends on the batch."""
        layer = self._layer(i, lambda: nn.Linear(h.shape[-1], h.shape[-1]))
        assert h.dim() > 1
        return torch.cat([torch.tanh(layer(part)) for part in h.split(2)])


def program_input(program: Program) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if program.words:
        return torch.randint(9, program.shape, generator=generator)
    return torch.randn(program.shape, generator=generator, dtype=torch.float64)


def programs(names: list[str], sizes: list[int]) -> Any:
    step = st.tuples(st.sampled_from(names), st.integers(0, 3), st.integers(0, 3))
    shape = st.lists(st.sampled_from(sizes), min_size=2, max_size=3).map(tuple)
    return st.builds(
        Program, st.lists(step, min_size=1, max_size=7).map(tuple), shape, st.booleans()
    )


def built(program: Program, method: str) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    torch.set_default_dtype(
        torch.float64
    )  # so that rounding, which norms and softmaxes enlarge, is out of the picture
    try:
        model = Interpreter(program).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    return sb.bayesianize(model, METHODS[method]), program_input(program)


def check(program: Program, method: str) -> list[str]:
    """Compare held draws with written-out models, and draws of one seed in both folds; returns what was said."""
    model, x = built(program, method)
    draws = S
    with quietly() as said, torch.no_grad():
        with sb.fixed_draws(model, S):
            expected = torch.stack([plain(x) for plain in held(model, S)])
            assert_equal(sb.sample(model, x), expected, "held draws")
        torch.manual_seed(1)
        one_by_one = sb.sample(model, x, draws=draws, parallel=False)
        torch.manual_seed(1)
        assert_equal(sb.sample(model, x, draws=draws), one_by_one, "draws of one seed")
    assert all(torch.isfinite(t).all() for t in leaves(expected))
    return said


LOOSE = settings(
    max_examples=COUNT, deadline=None, derandomize=COUNT <= 100, database=None, print_blob=False,
    suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(0)
@LOOSE
@given(programs(WILD, [1, 2, 3, 4, 6, 12]), st.sampled_from(list(METHODS)))
def test_random_models_equal_their_written_out_draws(
    program: Program, method: str
) -> None:
    check(program, method)


@pytest.mark.slow
@pytest.mark.timeout(0)
@settings(LOOSE, max_examples=max(30, COUNT // 5))
@given(
    programs(CALM, [2, 3, 4, 5]),
    st.sampled_from(["batch-ensemble", "rank1-example", "mean-field", "flipout"]),
)
def test_models_that_leave_rows_alone_fold_without_a_word(
    program: Program, method: str
) -> None:
    assert check(program, method) == []


@pytest.mark.slow
def test_the_programs_are_worth_running() -> None:
    """Every kind of step is found in some model as it stands, after steps that do not fit were left out."""
    seen: set[str] = set()

    @settings(LOOSE, max_examples=400, derandomize=True)
    @given(programs(WILD, [1, 2, 3, 4, 6, 12]))
    def look(program: Program) -> None:
        model = built(program, "batch-ensemble")[0]
        seen.update(
            name
            for i, (name, _, _) in enumerate(program.steps)
            if i not in model.skipped
        )

    look()
    assert seen == set(WILD)
