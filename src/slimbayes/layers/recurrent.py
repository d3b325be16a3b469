"""LSTM, GRU and RNN layers and cells.

Every input and every recurrent matrix is a site of its own, all gates of one matrix together: (4u, in) for an LSTM.
Factors are drawn once per pass, so they stay fixed over time. Draws shared by a block of rows go through torch's fused
kernel, once per block, with that draw's weights; it cannot take fresh draws for every row. For these the LSTM has
kernels/lstm.py, whose kernels on a GPU also serve blocks of rows, all at once; every other recurrence is a loop over
time.

Sizes: T steps, R rows, D inputs, u units, n draws of the pass.
"""

import functools
import operator
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import _VF, Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from slimbayes.engine.rows import LinearMap, per_row, sizes_of_blocks
from slimbayes.kernels.lstm import Cell, activated, fused, lstm
from slimbayes.layers.base import BayesLayer, bayes_form
from slimbayes.layers.site import Site

State = tuple[Tensor, ...]  # h, and of an LSTM c


def _gru_step(gi: Tensor, gh: Tensor, state: State) -> State:
    reset_i, update_i, new_i = gi.chunk(3, -1)
    reset_h, update_h, new_h = gh.chunk(3, -1)
    update = torch.sigmoid(update_i + update_h)
    new = torch.tanh(new_i + torch.sigmoid(reset_i + reset_h) * new_h)
    return (new + update * (state[0] - new),)


_STEPS: dict[str, Callable[[Tensor, Tensor, State], State]] = {
    "LSTM": lambda gi, gh, state: activated(gi + gh, state[1]),
    "GRU": _gru_step,
    "RNN_TANH": lambda gi, gh, state: (torch.tanh(gi + gh),),
    "RNN_RELU": lambda gi, gh, state: (torch.relu(gi + gh),),
}
_KERNELS: dict[str, Any] = {
    "LSTM": _VF.lstm,
    "GRU": _VF.gru,
    "RNN_TANH": _VF.rnn_tanh,
    "RNN_RELU": _VF.rnn_relu,
}


@contextmanager
def _drawn_weights(x: Tensor) -> Iterator[None]:
    """cuDNN warns that weights should lie in one piece of memory, which drawn ones never do."""
    if not x.is_cuda or torch.compiler.is_compiling():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore",
            "RNN module weights are not part of single contiguous chunk",
            UserWarning,
        )
        yield


def _stems(layer: Any) -> list[tuple[int, bool, str]]:
    """(layer, runs backwards, suffix of its parameter names) in torch's order."""
    directions = ("", "_reverse")[: 2 if layer.bidirectional else 1]
    return [
        (i, bool(d), f"_l{i}{d}") for i in range(layer.num_layers) for d in directions
    ]


def _site(layer: Any, name: str, bias: bool) -> Site:
    gates, inputs = getattr(layer, name).shape
    return Site(name, inputs, gates, bias, name, (gates, inputs), positions="many")


class _Gated(BayesLayer):
    """What layers and cells share: weights_ih and weights_hh, each with a bias of its own."""

    read_names = ()

    def linear_map(self, site: str, batch_dim: int = 0) -> LinearMap:
        bias = getattr(self, site.replace("weight", "bias")) if self.bias else None
        return LinearMap(
            getattr(self, site), bias, F.linear, torch.outer, batch_dim, -1
        )

    def _initial(self, x: Tensor, hx: Any, batched: bool, *layers: int) -> State:
        if hx is None:
            zeros = x.new_zeros(*layers, x.shape[-2], self.hidden_size)
            return (zeros, zeros) if self.mode == "LSTM" else (zeros,)
        state = tuple(hx) if self.mode == "LSTM" else (hx,)
        return state if batched else tuple(h.unsqueeze(-2) for h in state)


class _BayesRecurrent(_Gated):
    inner_dropout = "between its layers"

    @classmethod
    def refuse(cls, layer: Any) -> str | None:
        projects = f"proj_size={layer.proj_size} adds a projection of the hidden state, which is not supported"
        return f"{projects}; use proj_size=0" if layer.proj_size else None

    def sites(self) -> list[Site]:
        # Only the input matrix carries the members' bias: two offsets would add up to one.
        kinds = {"ih": bool(self.bias), "hh": False}
        return [
            _site(self, f"weight_{k}{stem}", bias)
            for _, _, stem in _stems(self)
            for k, bias in kinds.items()
        ]

    def may_hold_rows(self, dim: int, ndim: int) -> bool:  # type: ignore[override]
        return ndim == 3 and dim in (
            (0, 1) if self.batch_first else (1,)
        )  # packed ones come as (time, rows, ...)

    def linear_map(self, site: str, batch_dim: int = 0) -> LinearMap:
        # Inside, sequences are (T, R, D) and hidden states (R, u).
        return super().linear_map(site, 1 if "_ih_" in site else 0)

    def bayes_forward(self, input: Any, hx: Any = None) -> Any:
        lengths, batched = None, True
        if isinstance(input, PackedSequence):
            x, lengths = pad_packed_sequence(input)
        else:
            batched = input.dim() == 3
            x = input if batched else input.unsqueeze(1)
            x = x.transpose(0, 1) if self.batch_first and batched else x
        if x.shape[-1] != self.input_size:  # torch's kernels do not look
            raise ValueError(
                f"inputs of width {self.input_size} (input_size) are needed, got {tuple(input.shape)}"
            )
        state = self._initial(
            x, hx, batched, self.num_layers * (2 if self.bidirectional else 1)
        )
        run = self._over_time if self._together(x) else self._fused
        y: Any
        y, state = run(x, state, lengths)
        if lengths is not None:
            y = pack_padded_sequence(y, lengths, enforce_sorted=False)
        elif not batched:
            y, state = y.squeeze(1), tuple(h.squeeze(1) for h in state)
        elif self.batch_first:
            y = y.transpose(0, 1)
        return y, (state if self.mode == "LSTM" else state[0])

    def _together(self, x: Tensor) -> bool:
        """Whether all draws run in one loop over time, not draw by draw through torch's kernel.

        A step of few rows waits for launches and latency: on an H200 four calls of torch's kernel, for four draws of
        128 rows, took 2.65 times as long as one.
        """
        lead = self.posteriors()[0]
        if not lead.has_weights:
            return True
        if self.mode != "LSTM" or lead.drawn == 1 or not fused(x):
            return False
        return lead.factors() is not None or lead.current.rows % lead.drawn == 0

    def _fused(
        self, x: Tensor, state: State, lengths: Tensor | None
    ) -> tuple[Tensor, State]:
        """torch's kernel once for each draw, on the rows that belong to it."""
        lead = self.posteriors()[0]
        sizes = sizes_of_blocks(x.shape[1], lead.drawn, lead.current)
        states = zip(*(h.split(sizes, 1) for h in state), strict=True)
        ends = lengths.split(sizes) if lengths is not None else [None] * lead.drawn
        parts = enumerate(zip(x.split(sizes, 1), states, ends, strict=True))
        outputs, last = zip(
            *(self._kernel(j, *part) for j, part in parts if part[0].shape[1]),
            strict=True,
        )
        return torch.cat(outputs, 1), tuple(
            torch.cat(h, 1) for h in zip(*last, strict=True)
        )

    def _kernel(
        self, draw: int, x: Tensor, state: State, lengths: Tensor | None
    ) -> Any:
        kernel, (weights, has_bias), lstm = (
            _KERNELS[self.mode],
            self._weights(draw),
            self.mode == "LSTM",
        )
        options = (
            weights,
            has_bias,
            self.num_layers,
            self.dropout,
            self.training,
            self.bidirectional,
        )
        with _drawn_weights(x):
            if lengths is None:
                hx: Any = (
                    [h.contiguous() for h in state] if lstm else state[0].contiguous()
                )
                y, *last = kernel(x, hx, *options, False)
                return y, last
            packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
            order, back = packed.sorted_indices, packed.unsorted_indices
            hx = [h[:, order] for h in state] if lstm else state[0][:, order]
            data, *last = kernel(packed.data, packed.batch_sizes, hx, *options)
            y, _ = pad_packed_sequence(
                packed._replace(data=data), total_length=x.shape[0]
            )
            return y, [h[:, back] for h in last]

    def _weights(self, draw: int) -> tuple[list[Tensor], bool]:
        """The flat list of weights and biases of one draw that the kernel takes, and whether it holds biases."""
        found: Any = self.posterior.items()
        drawn = [
            posterior.materialize(self.linear_map(site), draw)
            for site, posterior in found
        ]
        weights, biases = [weight for weight, _ in drawn], [bias for _, bias in drawn]
        if all(b is None for b in biases):
            return weights, False
        biases = [
            w.new_zeros(w.shape[0]) if b is None else b
            for w, b in zip(weights, biases, strict=True)
        ]
        flat = [
            t
            for i in range(0, len(weights), 2)
            for t in (*weights[i : i + 2], *biases[i : i + 2])
        ]
        return flat, True

    def _over_time(
        self, x: Tensor, state: State, lengths: Tensor | None
    ) -> tuple[Tensor, State]:
        """All draws at once, layer by layer and direction by direction."""
        last: list[State] = []
        outputs: list[Tensor] = []
        for row, (layer, backwards, stem) in enumerate(_stems(self)):
            if not backwards:
                if layer and outputs:
                    x = F.dropout(torch.cat(outputs, -1), self.dropout, self.training)
                outputs = []
            hidden: Any = self.posterior[f"weight_hh{stem}"]
            whole = (
                self.mode == "LSTM"
                and x.numel()
                and (hidden.has_weights or hidden.factors() is not None)
            )
            run = self._lstm if whole else self._direction
            y, final = run(x, tuple(h[row] for h in state), stem, backwards, lengths)
            outputs.append(y)
            last.append(final)
        return torch.cat(outputs, -1), tuple(
            torch.stack(h) for h in zip(*last, strict=True)
        )

    def _direction(
        self,
        x: Tensor,
        state: State,
        stem: str,
        backwards: bool,
        lengths: Tensor | None,
    ) -> Any:
        gates = self.project_draw(f"weight_ih{stem}", x, 1)
        state = tuple(
            h.to(gates.dtype) for h in state
        )  # autocast lowers the gates, not the state
        step, recurrent = _STEPS[self.mode], self.linear_map(f"weight_hh{stem}")
        posterior = self.posterior[f"weight_hh{stem}"]
        outputs: list[Tensor] = [x] * x.shape[0]
        for t in reversed(range(x.shape[0])) if backwards else range(x.shape[0]):
            new = step(gates[t], posterior(state[0], recurrent), state)
            if lengths is None:
                state, outputs[t] = new, new[0]
            else:
                live = (t < lengths).to(x.device).unsqueeze(-1)
                state = tuple(
                    torch.where(live, a, b) for a, b in zip(new, state, strict=True)
                )
                outputs[t] = torch.where(live, new[0], torch.zeros_like(new[0]))
        return torch.stack(outputs), state

    def _lstm(
        self,
        x: Tensor,
        state: State,
        stem: str,
        backwards: bool,
        lengths: Tensor | None,
    ) -> Any:
        """`_direction` of an LSTM, by factors of its two matrices, or one recurrent matrix for each block of rows."""
        inward: Any = self.posterior[f"weight_ih{stem}"]
        hidden: Any = self.posterior[f"weight_hh{stem}"]
        linear, current = (
            self.linear_map(f"weight_ih{stem}"),
            self.posteriors()[0].current,
        )
        given, s, r, r_in, shift = inward.factors(), None, None, None, None
        if given is None:
            gates = inward(x, linear)
        else:
            gates = linear.modulated(operator.mul, x, given[0], None, inward.current)
            r_in, shift = given[1], _added(linear.bias, given[2])
        linear, drawn = self.linear_map(f"weight_hh{stem}"), hidden.factors()
        if drawn is not None:
            weights, (s, r, bias) = linear.weight.unsqueeze(0), drawn
            bias = _added(linear.bias, bias)
        else:
            each = [hidden.materialize(linear, j) for j in range(hidden.drawn)]
            weights = torch.stack([weight for weight, _ in each])
            bias = (
                None if each[0][1] is None else torch.stack([bias for _, bias in each])
            )
        lines = [
            None if line is None else torch.atleast_2d(line)
            for line in (s, r, r_in, _added(bias, shift))
        ]
        n = max([1, *(len(line) for line in lines if line is not None)])

        def lay(line: Tensor | None) -> Tensor | None:
            """Equally many lines of each kind, given one for each draw of the pass, or one for all."""
            if line is None:
                return None
            even = line.expand(n, -1) if len(line) == 1 else line
            return (
                per_row(line, x.shape[1], current) if current.rows % n else even
            ).to(gates.dtype)

        cell = Cell(weights.to(gates.dtype), *map(lay, lines))
        h, c = (
            part.to(gates.dtype) for part in state
        )  # autocast lowers the gates, not the state
        y, last = lstm(gates, cell, h, c, lengths, backwards)
        final = y[0 if backwards else -1]
        if lengths is not None:
            steps = torch.arange(x.shape[0], device=x.device)[:, None, None]
            y = y.where(steps < lengths.to(x.device)[:, None], y.new_zeros(()))
        return y, (final, last)


def _added(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


class _BayesCell(_Gated):
    mode = "RNN"

    def sites(self) -> list[Site]:
        return [
            _site(self, "weight_ih", self.bias_ih is not None),
            _site(self, "weight_hh", False),
        ]

    def may_hold_rows(self, dim: int, ndim: int) -> bool:  # type: ignore[override]
        return ndim == 2 and dim == 0

    def bayes_forward(self, input: Tensor, hx: Any = None) -> Any:
        batched = input.dim() == 2
        x = input if batched else input.unsqueeze(0)
        mode = f"RNN_{self.nonlinearity.upper()}" if self.mode == "RNN" else self.mode
        gates = self.project_draw("weight_ih", x, 0)
        state = tuple(h.to(gates.dtype) for h in self._initial(x, hx, batched))
        new = _STEPS[mode](gates, self.project_draw("weight_hh", state[0], 0), state)
        new = new if batched else tuple(h.squeeze(0) for h in new)
        return new if self.mode == "LSTM" else new[0]


def _unseen(forward: Any) -> Any:
    """A forward into which torch's compiler does not look: it gives recurrent modules up, and would compile piece by
    piece what they call, steps unrolled. With torch._dynamo.config.allow_rnn it follows them, in one graph.
    """
    hidden = functools.cache(
        lambda: torch.compiler.disable(forward)
    )  # the first call loads the compiler

    @functools.wraps(forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen = torch.compiler.is_compiling() or "torch._dynamo" not in sys.modules
        return (forward if seen else hidden())(self, *args, **kwargs)

    return call


# As torch's: stacked, bidirectional, packed or unbatched. Sites weight_ih_l0, weight_hh_l0, ...
BayesLSTM = bayes_form(_BayesRecurrent, nn.LSTM)
BayesGRU = bayes_form(_BayesRecurrent, nn.GRU)
BayesRNN = bayes_form(_BayesRecurrent, nn.RNN)
for _form in (BayesLSTM, BayesGRU, BayesRNN):
    _form.forward = _unseen(_form.forward)  # type: ignore[method-assign]
# One draw serves every step of a pass of the model that holds a cell.
BayesLSTMCell = bayes_form(_BayesCell, nn.LSTMCell, mode="LSTM")
BayesGRUCell = bayes_form(_BayesCell, nn.GRUCell, mode="GRU")
BayesRNNCell = bayes_form(_BayesCell, nn.RNNCell)
