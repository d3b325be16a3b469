"""MC dropout (Gal & Ghahramani 2016): dropout that stays on at prediction.

    Table 2 of Chang et al. 2019:   K = 2, M_2 = 0, one pick for every input channel of a matrix; biases are never dropped.

With `unit="channel"` in front of a matrix this is that case of `Mixture`, a distribution over weights. With `unit="element"`, torch's
nn.Dropout, every position of an image or a sequence drops on its own, so that no single weight matrix describes a draw; for
plain vectors the two are the same. In front of a norm layer the normalised inputs are dropped, not the scale: the paper's baseline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from slimbayes.engine.passes import Noise, uniform
from slimbayes.engine.rows import line_of_row, spread
from slimbayes.posteriors.base import (
    Config,
    Kind,
    MapOf,
    Pick,
    Posterior,
    Site,
    Unit,
    check_choice,
    check_rate,
)
from slimbayes.posteriors.mixture import Mixture, MixturePosterior
from slimbayes.posteriors.model_patch import check_layers, chosen_layers

if TYPE_CHECKING:
    from slimbayes.layers.base import LinearMap

_SELU_LIMIT = -1.7580993408473766  # minus the product of SELU's two constants


@dataclass(frozen=True, kw_only=True)
class MCDropout(Config):
    """Dropout that is part of the posterior: active in eval mode, drawn afresh for every row, held by `frozen`.

    Args:
        rate: probability of dropping a unit; by default a dropout layer's own, and 0.005 (the paper's) elsewhere.
        before: None turns on the model's own dropout layers, or acts on the inputs of the layers that `include` or a mapping's pattern
            picks. "norm", "output", "input", joined by "+", or a regular expression put dropout in front of those layers.
        unit: "element" drops every number on its own (nn.Dropout); "channel" drops whole channels (nn.Dropout2d), or the same inputs at
            all positions. A dropout layer of the model keeps its own unit.
        tau, rho: prior precisions, for matrices with unit="channel" (Eq. 2). By default the prior is left to weight decay.

    Example:
        >>> import slimbayes as sb
        >>> net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.1), nn.Linear(8, 2))
        >>> pred = sb.predict(sb.bayesianize(net, MCDropout()), torch.randn(5, 3), draws=20)
        >>> bool((pred.epistemic > 0).all())
        True
    """

    rate: float | None = None
    before: str | None = None
    unit: Unit = "element"
    tau: float | None = None
    rho: float | None = None

    def __post_init__(self) -> None:
        if self.rate is not None:
            check_rate(self, "rate", self.rate)
        check_choice(self, "unit", self.unit, ("element", "channel"))
        if self.before is not None:
            check_layers(self, "before", self.before)
        if self.tau is not None and self.unit != "channel":
            raise ValueError(
                "MCDropout: tau needs unit='channel', where a draw is a weight matrix; use weight decay with unit='element'."
            )

    @property
    def covers(self) -> tuple[Kind, ...]:
        return ("matrix", "norm", "dropout")

    def targets(self, model: nn.Module, offered: Mapping[str, nn.Module], named: bool) -> set[str] | None:
        if self.before is not None:
            return chosen_layers(f"MCDropout(before={self.before!r})", self.before, model, offered, scales=False)
        if named:
            return None
        return _own_dropout(model, offered)

    def build(self, site: Site) -> Posterior:
        rate = 0.005 if self.rate is None else self.rate
        if site.kind == "matrix" and self.unit == "channel":
            mixture = Mixture(
                components=2,
                assignment="input",
                zero=True,
                probs=(1 - rate, rate),
                draws="example",
                tau=self.tau,
                rho=self.rho,
            )
            return MixturePosterior(mixture, site)
        return DropoutPosterior(rate, self.unit, site, fixed=self.rate is not None)

    def describe(self) -> str:
        return f"MCDropout(rate={'own or 0.005' if self.rate is None else self.rate})"


def _own_dropout(model: nn.Module, offered: Mapping[str, nn.Module]) -> set[str]:
    from slimbayes.layers.dropout import DROPOUTS, functional_dropout

    found = {name for name, layer in offered.items() if type(layer) in [cls.plain for cls in DROPOUTS]}
    if found:
        return found
    functional = "; ".join(f"{name or '(the model itself)'} {what}" for name, what in functional_dropout(model).items())
    inside = (
        f" Dropout inside a forward was found, which cannot be converted: {functional}. Make it an nn.Dropout layer."
        if functional
        else ""
    )
    raise ValueError(
        f"MCDropout() looked for dropout layers ({', '.join(cls.plain.__name__ for cls in DROPOUTS)}) in this {type(model).__name__} and "
        f'found none.{inside} Put dropout in front of layers with before="norm" (as the EMP paper does), "output" or a regular expression.'
    )


class DropoutPosterior(Posterior):
    """Which units of a layer's input are dropped. It has no parameters; masks are drawn when the input's shape is known."""

    place: Tensor
    late = True

    def __init__(self, rate: float, unit: Unit, site: Site, fixed: bool) -> None:
        super().__init__()
        self.rate, self.unit, self.fixed = rate, unit, fixed
        self.own = site.kind == "dropout"  # a dropout layer of the model, with a rate and a unit of its own
        self.units = site.n_in
        self.register_buffer("place", torch.zeros(1), persistent=False)  # tells the device

    @property
    def has_weights(self) -> bool:
        return False

    @property
    def log_size(self) -> float:
        return self.units * math.log(
            2
        )  # at least: how many positions there are, or what a dropout layer sees, shows only when it runs

    def widths(self, rowwise: bool) -> tuple[int, int]:
        return 0, 0

    def realise(self, noise: Noise, pick: Pick) -> list[Tensor]:
        """Masks of a held pass, in the order in which a forward asks for them."""
        return []

    def kl(self, linear: MapOf) -> Tensor:
        return self.place.new_zeros(())

    def forward(self, x: Tensor, linear: LinearMap) -> Tensor:
        rate = linear.rate if self.own and not self.fixed else self.rate
        if rate == 0:
            return linear.op(x, linear.weight, linear.bias)
        if not x.is_floating_point():
            raise ValueError(
                f"{self.name}: dropping single word indices means nothing; use unit='channel', which drops whole words."
            )
        if rate == 1:
            return linear.op(x * 0.0, linear.weight, linear.bias)
        x, dim = self._rows(x, linear)
        kept = self._kept(x, dim, linear, rate)
        if getattr(linear, "selu", False):
            scale = ((1 - rate) * (1 + rate * _SELU_LIMIT**2)) ** -0.5
            dropped = scale * torch.where(kept, x, _SELU_LIMIT) - scale * _SELU_LIMIT * rate
        else:
            dropped = x * kept.to(x.dtype) / (1 - rate)
        return linear.op(dropped, linear.weight, linear.bias)

    def _rows(self, x: Tensor, linear: LinearMap) -> tuple[Tensor, int | None]:
        """x and the dimension of its rows, where that matters; a single row that stands for all is dropped anew for each."""
        if self.current.layout is None:
            return x, None
        return spread(x, self.current.rows, linear.batch_dim)

    def _kept(self, x: Tensor, dim: int | None, linear: LinearMap, rate: float) -> Tensor:
        """Which units stay, as a boolean tensor that broadcasts against x."""
        current, shape = self.current, list(x.shape)
        if (linear.unit if self.own else self.unit) == "channel":  # type: ignore[attr-defined]
            kept = (0 if dim is None else dim, linear.channel_dim % x.dim())
            shape = [size if d in kept else 1 for d, size in enumerate(shape)]
        if not current.keeps:
            return self.drawn_late(lambda sizes: uniform(sizes, x.device), shape, dim) >= rate
        # A function stays the same over calls: one mask for each draw, whatever the rows.
        mask = self._held([size if d != dim else 1 for d, size in enumerate(shape)], x, rate)
        if current.index is not None or current.total == 1:
            return mask[current.index or 0]
        assert dim is not None
        lines = mask.squeeze(dim + 1).movedim(0, dim)
        return lines.index_select(dim, line_of_row(len(mask), x.shape[dim], current, x.device))

    def _held(self, shape: list[int], x: Tensor, rate: float) -> Tensor:
        """The masks (S, ...) that this place of the forward had in the first call of a held pass."""
        current = self.current
        masks, place = current.masks.setdefault(self.key, []), self.place_in_forward()
        while len(masks) <= place:
            masks.append(uniform([current.total, *shape], x.device) >= rate)
        if list(masks[place].shape[1:]) != shape:
            held = list(masks[place].shape[1:])
            raise ValueError(
                f"{self.name}: held draws drop units of inputs {held}, but this call needs {shape}; use unit='channel'."
            )
        return masks[place]

    def materialise(self, linear: LinearMap, index: int) -> tuple[Tensor, Tensor | None]:
        raise AssertionError("dropout of single elements is no weight matrix")
