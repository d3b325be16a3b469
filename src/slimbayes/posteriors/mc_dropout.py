"""MC dropout (Gal & Ghahramani 2016): dropout that stays on at prediction.

What a layer is given is dropped, never its bias. With `unit="channel"` in front of a matrix that is a draw of its
weights, the case `Mixture(assignment="input", zero=True)` of Chang et al. 2019, Table 2. With `unit="element"`, torch's
nn.Dropout, every position of an image or a sequence drops on its own, so that no single weight matrix describes a draw;
for plain vectors the two are the same. In front of a norm layer the normalised inputs are dropped, not the scale: the
paper's baseline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from slimbayes.engine.blocks import block_of_row, sizes_equal
from slimbayes.engine.noise import GOLDEN, uniform
from slimbayes.engine.passes import Noise
from slimbayes.engine.rows import LinearMap, spread
from slimbayes.layers.dropout import BayesDropLayer
from slimbayes.layers.site import Site, Unit
from slimbayes.posteriors.base import Posterior
from slimbayes.posteriors.configs.whole_modules import MCDropout
from slimbayes.posteriors.late import drawn_late, place_in_forward

_SELU_LIMIT = -1.7580993408473766  # minus the product of SELU's two constants


class DropoutPosterior(Posterior):
    """Which units of a layer's input are dropped. It has no parameters; masks are drawn when the input is seen."""

    place: Tensor
    late = True

    def __init__(self, config: MCDropout, site: Site) -> None:
        super().__init__()
        self.rate, self.fixed = (
            0.005 if config.rate is None else config.rate,
            config.rate is not None,
        )
        self.unit, self.units = config.unit, site.n_in
        self.register_buffer(
            "place", torch.zeros(1), persistent=False
        )  # tells the device

    @property
    def log_size(self) -> float:
        return self.units * math.log(2)

    def widths(self, rowwise: bool) -> tuple[int, int]:
        return 0, 0

    def draw(self, noise: Noise) -> None:
        """Nothing, before the input is seen."""

    def kl(self) -> Tensor:
        return self.place.new_zeros(())

    def forward(self, x: Tensor, linear: LinearMap) -> Tensor:
        own = (
            self.layer if isinstance(self.layer, BayesDropLayer) else None
        )  # of the model, as it is set now
        rate = self.rate if own is None or self.fixed else own.p
        if rate == 0 or self.current.centred:
            return linear.op(x, linear.weight, linear.bias)
        if not x.is_floating_point():
            raise ValueError(
                f"{self.name}: MCDropout drops numbers, and this layer is given {x.dtype}."
            )
        if rate == 1:
            return linear.op(x * 0.0, linear.weight, linear.bias)
        # Where rows matter, one that stands for all is dropped anew for each.
        x, dim = (
            (x, None)
            if self.current.layout is None
            else spread(x, self.current.rows, linear.batch_dim)
        )
        kept = self._kept(x, dim, linear, self.unit if own is None else own.unit, rate)
        if own is not None and own.selu:
            scale = ((1 - rate) * (1 + rate * _SELU_LIMIT**2)) ** -0.5
            dropped = (
                scale * torch.where(kept, x, _SELU_LIMIT) - scale * _SELU_LIMIT * rate
            )
        else:
            dropped = x * kept.to(x.dtype) / (1 - rate)
        return linear.op(dropped, linear.weight, linear.bias)

    def _kept(
        self, x: Tensor, dim: int | None, linear: LinearMap, unit: Unit, rate: float
    ) -> Tensor:
        """Which units stay, as a boolean tensor that broadcasts against x."""
        current, shape = self.current, list(x.shape)
        if unit == "channel":
            kept = (0 if dim is None else dim, linear.channel_dim % x.dim())
            shape = [size if d in kept else 1 for d, size in enumerate(shape)]
        keys = current.keys.get(self.key)
        if keys is None:
            return (
                drawn_late(self, lambda sizes: uniform(sizes, x.device), shape, dim)
                >= rate
            )
        # One function for all rows and calls: a mask for each draw. A row may have become several, say windows.
        each = (
            1
            if dim is None or sizes_equal(x.shape[dim], current.rows)
            else x.shape[dim] // current.rows
        )
        mask = kept_units(
            keys,
            place_in_forward(self),
            [each if d == dim else n for d, n in enumerate(shape)],
            rate,
        )
        if len(keys) == 1 and (dim is None or sizes_equal(each, 1)):
            return mask[0]
        assert (
            dim is not None
        )  # several draws share a forward only where rows are known
        seen = torch.arange(x.shape[dim], device=x.device)
        line = (
            block_of_row(current.rows, len(keys), x.device)[seen // each] * each
            + seen % each
        )
        return mask.movedim(0, dim).flatten(dim, dim + 1).index_select(dim, line)


def kept_units(keys: Tensor, place: int, shape: Sequence[int], rate: float) -> Tensor:
    """Which units stay when each is dropped with probability `rate`, as a function of a draw's key and of the unit.

    Units keep their fate when there are more of them: of a longer sequence, say.

    Shape: keys (S,) int64; returns (S, *shape), boolean.

    Example:
        >>> few, more = (kept_units(torch.tensor([7]), 0, [n, 3], 0.5) for n in (2, 5))
        >>> torch.equal(few, more[:, :2])
        True
    """
    number = _mixed(keys + _signed(place * GOLDEN))
    for size in shape:
        number = number.unsqueeze(-1)
        if not sizes_equal(size, 1):
            number = _mixed(
                number + torch.arange(size, device=keys.device) * _signed(GOLDEN)
            )
    return ((number >> 11) & (2**53 - 1)) >= int(rate * 2**53)


def _signed(number: int) -> int:
    """A whole number modulo 2^64, as int64 has it."""
    return (number + 2**63) % 2**64 - 2**63


def _mixed(number: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele et al. 2014): int64 in, int64 out, products modulo 2^64."""
    number = (number ^ ((number >> 30) & (2**34 - 1))) * _signed(0xBF58476D1CE4E5B9)
    number = (number ^ ((number >> 27) & (2**37 - 1))) * _signed(0x94D049BB133111EB)
    return number ^ ((number >> 31) & (2**33 - 1))
