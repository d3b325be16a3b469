"""The factors r and s of rank-1 methods: one posterior for each, and many of them side by side.

Sizes: K members, n draws of a pass, p rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimbayes.distributions.families import Cauchy, Normal, Point
from slimbayes.distributions.joining import needs_autograd, side_by_side
from slimbayes.distributions.scales import rho_from_scale, scale_from_rho, widen
from slimbayes.engine.blocks import Spread, keep_in_memory, spread_of
from slimbayes.engine.fused import Seeded
from slimbayes.engine.passes import Pass
from slimbayes.posteriors.configs.rank1 import FAMILY, Rank1

_FEW = 2**20  # numbers below which lines of draws are repeated for each of their rows


class Factor(nn.Module):
    """Posterior of one factor, r or s, of a resolved config: parameters of shape (K, p, channels)."""

    def __init__(self, config: Rank1, channels: int, random: bool) -> None:
        super().__init__()
        assert (
            config.mean_init is not None
            and config.scale_init is not None
            and config.scale_jitter is not None
        )
        self.family: type[Any] = FAMILY[config.family] if random else Point
        self.prior = config.prior
        self.rank, self.channels = config.rank, channels
        self.width = (
            self.rank * channels if self.family is not Point else 0
        )  # of its noise
        shape = (config.members, config.rank, channels)
        self.loc = nn.Parameter(config.mean_init.initial(*shape))
        if self.family is not Point:
            # Truncated at two standard deviations, as the reference initialiser does.
            jitter = nn.init.trunc_normal_(torch.empty(shape), std=1.0, a=-2.0, b=2.0)
            self.rho = nn.Parameter(
                rho_from_scale(config.scale_init) + config.scale_jitter * jitter
            )

    def distribution(self) -> Any:
        """q of each member, (K, p, channels), in float32 at least."""
        return distribution_of([self], lambda parameter: parameter.view(self.loc.shape))

    def against_prior(self) -> list[tuple[Tensor, Tensor]]:
        """How far locations are from the prior's, in its scales, and scales over the prior's; none of a point."""
        prior: Any = self.prior
        alike = isinstance(prior, Normal | Cauchy) or type(prior) is self.family
        if self.family is Point or not alike:
            return []
        q = self.distribution()
        return [
            ((q.loc.detach() - prior.loc) / prior.scale, q.scale.detach() / prior.scale)
        ]


class Drawn(NamedTuple):
    """Factors of one pass: r (n, out) and s (n, in), of rank p (n, p, out) and (n, p, in), and members' bias offsets
    (n, out) or None; `own` is the layer's own bias where that is in the offsets already. `lines` has the same of all
    layers, as their inputs meet them.
    """

    r: Tensor
    s: Tensor
    bias: Tensor | None
    own: Tensor | None = None
    lines: Lines | None = None


class Lines:
    """Factors and biases of all layers, (n, sum of widths), the width of each by its name, and each; shaped for kinds
    of inputs: once for all layers, where each would take several views of its own. For layers whose channels come
    second, or last, and inputs of as many dimensions as the first: lines that nobody asks for cost, too.
    """

    def __init__(self, second: bool) -> None:
        self.second, self.dims = second, 0
        self.wholes: list[tuple[Tensor, dict[Any, int], Sequence[Tensor]]] = []
        self.made: dict[Any, dict[Any, Tensor]] = {}

    def meeting(
        self, x: Tensor, channel_dim: int, rows: int
    ) -> dict[Any, Tensor] | None:
        """Lines by name that meet an input with so many rows first; None for other inputs than those they are for."""
        dims, second = x.dim(), channel_dim == 1 and x.dim() > 2
        if second != self.second or self.dims not in (0, dims):
            return None
        self.dims = dims
        # What is made without a graph, in a checkpoint's forward say, is not for those who need one.
        kind = rows, x.dtype, torch.is_grad_enabled()
        if kind not in self.made:
            self.made[kind] = {}
            for whole, widths, parts in self.wholes:
                lines = whole if whole.dtype == x.dtype else whole.to(x.dtype)
                if lines.shape[0] != rows:
                    lines = lines.repeat_interleave(rows // lines.shape[0], 0)
                for _ in range(dims - 2):
                    lines = lines.unsqueeze(-1 if second else 1)
                if lines is not whole:
                    parts = lines.split_with_sizes(
                        list(widths.values()), 1 if second else -1
                    )
                self.made[kind] |= zip(widths, parts, strict=True)
        return self.made[kind]


def _whole(
    factors: Sequence[Factor], current: Pass | None
) -> tuple[Tensor, Tensor | None]:
    """Locations of factors of one family side by side, (K, 1, sum of p * channels), and their scales; in float32."""
    locs: list[Any] = [f._parameters["loc"] for f in factors]
    rhos: list[Any] = (
        [] if factors[0].family is Point else [f._parameters["rho"] for f in factors]
    )
    if factors[0].rank > 1:
        locs, rhos = (
            [part.flatten(1).unsqueeze(1) for part in parts] for parts in (locs, rhos)
        )
    held = None if current is None else current.joined
    loc, rho = (
        side_by_side(locs, 2, held),
        side_by_side(rhos, 2, held) if rhos else None,
    )
    return widen(loc), None if rho is None else scale_from_rho(rho)


def distribution_of(
    factors: Sequence[Factor],
    lay_out: Callable[[Tensor], Tensor] = lambda parameter: parameter,
) -> Any:
    """q of several factors of one family side by side, (K, sum of p * channels), laid out by `lay_out`; in float32."""
    loc, scale = _whole(factors, None)
    if scale is None:
        return Point(lay_out(loc.squeeze(1)))
    return factors[0].family(lay_out(loc.squeeze(1)), lay_out(scale.squeeze(1)))


def group_by(items: Sequence[Any], key: Callable[[Any], Any]) -> list[list[Any]]:
    """Items with equal keys together, in order of first appearance."""
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


class FactorGroup:
    """Posteriors with equal members, clip and kind of draw, whose draws take few large operations for all of them."""

    def __init__(self, posteriors: Sequence[Any]) -> None:
        self.lead = posteriors[0]
        self.keys = tuple([p.key for p in posteriors])
        self.factors: list[tuple[Factor, Factor]] = [(p.r, p.s) for p in posteriors]
        self.families: list[list[Factor]] = group_by(
            [f for pair in self.factors for f in pair], lambda f: f.family
        )
        self.random = [
            family for family in self.families if family[0].family is not Point
        ]
        # Whether channels come second in most layers, or last; of layers with several matrices neither counts.
        alone = [
            p.layer
            for p in posteriors
            if p.layer is not None and len(p.layer.posterior) == 1
        ]
        second = [layer.bayes_channel_dim == 1 for layer in alone]
        self.second = next(
            (s for s in (True, False) if 4 * second.count(s) >= 3 * len(posteriors)),
            None,
        )
        self.width = sum(f.channels for pair in self.factors for f in pair)
        self.widths = {
            family[0].family: {f: f.channels for f in family}
            for family in self.families
        }
        biased = [p for p in posteriors if p.bias is not None]
        self.offsets = [(p.key, p._parameters) for p in biased]
        self.layers = [{} if p.layer is None else p.layer._parameters for p in biased]

    def draw(self, current: Pass) -> None:
        """Make this pass's draws."""
        lead, noise = self.lead, current.noise[self.lead.key]
        blocks, seeded = current.draws or lead.members, noise.seed is not None
        count = (
            blocks
            if seeded
            else (noise.row if noise.row.shape[1] else noise.block).shape[0]
        )
        spread = spread_of(
            lead.members, blocks, count, current.first, noise.block.device
        )
        drawn: dict[Factor, Any] = {}
        special = (
            seeded or lead.additive or lead.r.rank > 1 or torch.compiler.is_compiling()
        )
        wanted = self.second is not None and not special and self._few(count, current)
        lines = Lines(self.second is True) if wanted else None
        for family in self.families:
            values = (
                self._seeded(family, current, spread)
                if seeded
                else self._values(family, current, spread, lines)
            )
            drawn |= zip(family, values, strict=True)
        biases = self._biases(spread, lines)
        for key, (r, s) in zip(self.keys, self.factors, strict=True):
            bias, own = biases.get(key, (None, None))
            current.values[key] = Drawn(drawn[r], drawn[s], bias, own, lines)

    def _few(self, count: int, current: Pass) -> bool:
        """Whether n lines meet the rows of a pass as they are, or may be repeated for each of them."""
        return count == current.rows or (
            current.rows % count == 0 and current.rows * self.width < _FEW
        )

    def _values(
        self, factors: list[Factor], current: Pass, spread: Spread, every: Lines | None
    ) -> Sequence[Tensor]:
        """Factors of one family, (n, channels) or (n, p, channels)."""
        loc, scale = _whole(factors, current)
        # Compiled for a CPU, values of dense layers are made where they are met, from scales that stay in memory.
        whole = loc.device.type != "cpu" or self.second is not False
        if scale is None:
            values = spread.laid(loc)
        else:
            lines, scale = (
                self._noise(factors, current),
                scale if whole else keep_in_memory(scale),
            )
            if spread.member is not None:
                loc, scale = spread.out(loc), spread.out(scale)
            q = factors[0].family(loc, scale)
            # By broadcasting, whose gradient is a sum; that of a lookup is a scatter.
            values = q.rsample(lines.view(spread.shape + lines.shape[1:])).view(
                lines.shape
            )
        values = _clipped(values, self.lead.clip)
        values = keep_in_memory(values) if whole else values
        parts = values.split_with_sizes([f.channels * f.rank for f in factors], 1)
        if every is not None:
            every.wholes.append((values, self.widths[factors[0].family], parts))
        if factors[0].rank == 1:
            return parts
        return [
            part.unflatten(1, (f.rank, f.channels))
            for f, part in zip(factors, parts, strict=True)
        ]

    def _noise(self, factors: list[Factor], current: Pass) -> Tensor:
        """Standard normals of factors side by side, (n, sum of p * channels)."""
        whole = current.joint.get(self.keys)
        if whole is not None and len(self.random) == 1:
            return whole.row if whole.row.shape[1] else whole.block
        noise: dict[Factor, Tensor] = {}
        for key, (r, s) in zip(self.keys, self.factors, strict=True):
            own = current.noise[key]
            noise[r], noise[s] = (own.row if own.row.shape[1] else own.block).split(
                [r.width, s.width], dim=1
            )
        return (
            noise[factors[0]]
            if len(factors) == 1
            else torch.cat([noise[f] for f in factors], 1)
        )

    def _seeded(
        self, factors: list[Factor], current: Pass, spread: Spread
    ) -> list[Seeded]:
        """Factors of one family whose noise is made where they are used."""
        owner = {}
        for key, (r, s) in zip(self.keys, self.factors, strict=True):
            own = current.noise[key]
            owner[r], owner[s] = (own, own.salt), (own, own.salt + 1)
        loc, scale = _whole(factors, current)
        sizes, how = [f.channels for f in factors], (self.lead.clip, current.rows)
        locs = spread.laid(loc).split_with_sizes(sizes, 1)
        scales = (
            [None] * len(factors)
            if scale is None
            else spread.laid(scale).split_with_sizes(sizes, 1)
        )
        kinds = zip(factors, locs, scales, strict=True)
        return [Seeded(m, s, *owner[f], f.family.__name__, *how) for f, m, s in kinds]

    def _biases(
        self, spread: Spread, every: Lines | None
    ) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Bias offsets (n, out) by key, laid out by member, of which the first has none; and the bias of a layer that
        is in them, where it is at hand and of their type.
        """
        if not self.offsets:
            return {}
        offsets: list[Any] = [parameters["bias"] for _, parameters in self.offsets]
        own: list[Any] = []
        for layer, like in zip(self.layers, offsets, strict=True):
            bias = layer.get("bias")
            # Of another shape: somebody gathers it when the layer runs.
            fits = type(bias) is nn.Parameter and bias.shape == like.shape[1:]
            own.append(
                bias
                if fits and bias.dtype == like.dtype and bias.device == like.device
                else None
            )
        lines = F.pad(side_by_side(offsets, 1), (0, 0, 1, 0))
        if any([bias is not None for bias in own]):
            pairs = zip(own, offsets, strict=True)
            lines = lines + torch.cat(
                [o.new_zeros(o.shape[1]) if b is None else b for b, o in pairs]
            )
        lines, keys = spread.laid(lines.unsqueeze(1)), [key for key, _ in self.offsets]
        if lines.device.type != "cpu":  # where a compiler's sum is cheaper than a copy
            lines = keep_in_memory(lines)
        widths = dict(zip(keys, [offset.shape[1] for offset in offsets], strict=True))
        parts = lines.split_with_sizes(list(widths.values()), 1)
        if every is not None:
            every.wholes.append((lines, widths, parts))
        return dict(zip(keys, zip(parts, own, strict=True), strict=True))


def _clipped(values: Tensor, clip: float | None) -> Tensor:
    """Values in [-clip, clip]."""
    if clip is None:
        return values
    if (
        values.device.type == "cpu" and values.numel() and not needs_autograd(values)
    ):  # to look is cheaper than to copy
        low, high = values.detach().aminmax()
        if -clip <= float(low) and float(high) <= clip:
            return values
    return F.hardtanh(values, -clip, clip)  # a clamp whose derivative is one operation
