"""The factors r and s of rank-1 methods: one posterior for each, and many of them side by side.

Sizes: K members, p rank.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimbayes.distributions.families import Cauchy, Distribution, Normal, Point, rho_from_scale, scale_from_rho, wide
from slimbayes.distributions.joining import by_hand, side_by_side
from slimbayes.engine.blocks import realised, same
from slimbayes.engine.fused import Seeded
from slimbayes.engine.passes import Pass
from slimbayes.posteriors.configs.rank1 import FAMILY


class Factor(nn.Module):
    """Posterior of one factor, r or s: parameters of shape (K, p, channels), where means start as `mean_init` says."""

    def __init__(
        self,
        family: type[Distribution],
        prior: Distribution | None,
        shape: tuple[int, int, int],
        mean_init: Distribution,
        scale_init: float,
        scale_jitter: float,
    ) -> None:
        super().__init__()
        self.family: type[Any] = family
        self.prior = prior
        self.loc = nn.Parameter(mean_init.initial(*shape))
        if family is not Point:
            # Truncated at two standard deviations, as the reference initialiser does.
            jitter = nn.init.trunc_normal_(torch.empty(shape), std=1.0, a=-2.0, b=2.0)
            self.rho = nn.Parameter(rho_from_scale(scale_init) + scale_jitter * jitter)
        _, self.rank, self.channels = shape
        self.width = 0 if family is Point else self.rank * self.channels

    def distribution(self) -> Any:
        """q of each member, (K, p, channels), in float32 at least."""
        return joint([self], lambda parameter: parameter.view(self.loc.shape))

    def against_prior(self) -> list[tuple[Tensor, Tensor]]:
        """How far locations are from the prior's, in its scales, and scales over the prior's; none of a point."""
        prior: Any = self.prior
        alike = isinstance(prior, Normal | Cauchy) or type(prior) is self.family
        if self.family is Point or not alike:
            return []
        q = self.distribution()
        return [((q.loc.detach() - prior.loc) / prior.scale, q.scale.detach() / prior.scale)]


def factor_of(config: Any, channels: int, random: bool) -> Factor:
    """r or s of a resolved config: parameters (K, p, channels)."""
    assert config.mean_init is not None and config.scale_init is not None and config.scale_jitter is not None
    family = FAMILY[config.family] if random else Point
    shape = (config.members, config.rank, channels)
    return Factor(family, config.prior, shape, config.mean_init, config.scale_init, config.scale_jitter)


class Drawn(NamedTuple):
    """Factors of one pass: r (n, out) and s (n, in), of rank p (n, p, out) and (n, p, in), and members' bias offsets
    (n, out) or None.
    """

    r: Tensor
    s: Tensor
    bias: Tensor | None


def joint(
    factors: Sequence[Factor],
    pick: Callable[[Tensor], Tensor] = lambda parameter: parameter,
    current: Pass | None = None,
) -> Any:
    """q of several factors of one family side by side, (K, sum of p * channels), laid out by `pick`; in float32."""

    def flat(name: str) -> Tensor:
        parts: list[Any] = [f._parameters[name] for f in factors]
        parts = parts if parts[0].shape[1] == 1 else [part.flatten(1).unsqueeze(1) for part in parts]
        return wide(side_by_side(parts, 2, None if current is None else current.joined)).squeeze(1)

    family = factors[0].family
    return Point(pick(flat("loc"))) if family is Point else family(pick(flat("loc")), pick(scale_from_rho(flat("rho"))))


def grouped(items: Sequence[Any], key: Callable[[Any], Any]) -> list[list[Any]]:
    """Items with equal keys together, in order of first appearance."""
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


class Alike:
    """Posteriors with equal members, clip and kind of draw, whose draws take few large operations for all of them."""

    def __init__(self, posteriors: Sequence[Any]) -> None:
        self.lead = posteriors[0]
        self.keys = tuple([p.key for p in posteriors])
        self.factors: list[tuple[Factor, Factor]] = [(p.r, p.s) for p in posteriors]
        self.families: list[list[Factor]] = grouped([f for pair in self.factors for f in pair], lambda f: f.family)
        self.random = [family for family in self.families if family[0].family is not Point]
        self.offsets = [None if p.bias is None else p._parameters for p in posteriors]
        # Of dense layers with offsets: their own parameters.
        self.layers = [
            p.layer._parameters
            if p.bias is not None and p.layer is not None and p.layer.bayes_out_dim is not None
            else {}
            for p in posteriors
        ]

    def draw(self, current: Pass) -> None:
        """Make this pass's draws."""
        noise, blocks = current.noise[self.lead.key], current.blocks(self.lead)
        count = (noise.row if noise.row.shape[1] else noise.block).shape[0]
        drawn: dict[Factor, Any] = {}
        for family in self.families:
            values = self._values(family, current, count) if noise.seed is None else self._seeded(family, current)
            drawn |= zip(family, values, strict=True)
        biases = self._biases(current, blocks if noise.seed is not None else count)
        for key, (r, s), offset in zip(self.keys, self.factors, self.offsets, strict=True):
            current.values[key] = Drawn(drawn[r], drawn[s], None if offset is None else next(biases))

    def _values(self, factors: list[Factor], current: Pass, count: int) -> list[Tensor]:
        """Factors of one family, (n, channels) or (n, p, channels)."""
        values = realised(_clipped(self._joint_values(factors, current, count), self.lead.clip))
        parts = values.split_with_sizes([f.channels * f.rank for f in factors], 1)
        if factors[0].rank == 1:
            return list(parts)
        return [part.unflatten(1, (f.rank, f.channels)) for f, part in zip(factors, parts, strict=True)]

    def _joint_values(self, factors: list[Factor], current: Pass, count: int) -> Tensor:
        """Values (n, sum of p * channels) of factors of one family, not clipped."""
        lead, blocks = self.lead, current.blocks(self.lead)
        nested = _nested(count, blocks)
        q = joint(factors, lambda parameter: current.pick(lead, parameter, blocks if nested else count), current)
        if factors[0].family is Point:
            return q.loc.repeat_interleave(count // blocks, 0) if nested else q.loc
        lines = self._noise(factors, current)
        if not nested:
            return q.rsample(lines)
        q = type(q)(q.loc.unsqueeze(1), q.scale.unsqueeze(1))
        return q.rsample(lines.unflatten(0, (blocks, count // blocks))).flatten(0, 1)

    def _noise(self, factors: list[Factor], current: Pass) -> Tensor:
        """Standard normals of factors side by side, (n, sum of p * channels)."""
        whole = current.joint.get(self.keys)
        if whole is not None and len(self.random) == 1:
            return whole.row if whole.row.shape[1] else whole.block
        noise: dict[Factor, Tensor] = {}
        for key, (r, s) in zip(self.keys, self.factors, strict=True):
            own = current.noise[key]
            noise[r], noise[s] = (own.row if own.row.shape[1] else own.block).split([r.width, s.width], dim=1)
        return noise[factors[0]] if len(factors) == 1 else torch.cat([noise[f] for f in factors], 1)

    def _seeded(self, factors: list[Factor], current: Pass) -> list[Seeded]:
        """Factors of one family whose noise is made where they are used."""
        lead, rows = self.lead, current.rows
        owner = {}
        for key, (r, s) in zip(self.keys, self.factors, strict=True):
            own = current.noise[key]
            owner[r], owner[s] = (own, own.salt), (own, own.salt + 1)
        q = joint(factors, lambda parameter: current.pick(lead, parameter, current.blocks(lead)), current)
        sizes = [f.channels for f in factors]
        locs = q.loc.split_with_sizes(sizes, 1)
        scales = [None] * len(factors) if factors[0].family is Point else q.scale.split_with_sizes(sizes, 1)
        return [
            Seeded(loc, scale, *owner[f], f.family.__name__, lead.clip, rows)
            for f, loc, scale in zip(factors, locs, scales, strict=True)
        ]

    def _own_biases(self) -> dict[str, Tensor]:
        """The biases of dense layers, by key of their posterior, where they are at hand and of the offsets' type."""
        found: dict[str, Tensor] = {}
        for key, layer, offset in zip(self.keys, self.layers, self.offsets, strict=True):
            bias = layer.get("bias")
            if type(bias) is nn.Parameter and offset is not None:
                like = offset["bias"]
                whole = bias.shape == like.shape[1:]  # else somebody gathers it when the layer runs
                if whole and bias.dtype == like.dtype and bias.device == like.device:
                    found[key] = bias
        return found

    def _biases(self, current: Pass, count: int) -> Iterator[Tensor]:
        """Bias offsets (n, out) of each posterior that has any, laid out by member; that of the first is zero."""
        offsets: list[Any] = [own["bias"] for own in self.offsets if own is not None]
        if not offsets:
            return iter(())
        others, blocks = side_by_side(offsets, 1), current.blocks(self.lead)
        nested = _nested(count, blocks)
        lines = current.pick(self.lead, F.pad(others, (0, 0, 1, 0)), blocks if nested else count)
        lines = lines.repeat_interleave(count // blocks, 0) if nested else lines
        sizes = [offset.shape[1] for offset in offsets]
        if known := self._own_biases():
            keys = [key for key, offset in zip(self.keys, self.offsets, strict=True) if offset is not None]
            own = [known[k] if k in known else o.new_zeros(o.shape[1]) for k, o in zip(keys, offsets, strict=True)]
            for key, part in zip(keys, realised(lines + torch.cat(own)).split_with_sizes(sizes, 1), strict=True):
                if key in known:
                    current.biases[key] = known[key], part
        return iter(lines.split_with_sizes(sizes, 1))


def _clipped(values: Tensor, clip: float | None) -> Tensor:
    """Values in [-clip, clip]."""
    if clip is None:
        return values
    if values.device.type == "cpu" and values.numel() and not by_hand(values):  # to look is cheaper than to copy
        low, high = values.detach().aminmax()
        if -clip <= float(low) and float(high) <= clip:
            return values
    return F.hardtanh(values, -clip, clip)  # a clamp whose derivative is one operation


def _nested(count: int, blocks: int) -> bool:
    """Whether n draws lie evenly in blocks of rows: the numbers of a member then meet its rows by broadcasting, whose
    gradient is a sum; that of a lookup is a scatter.
    """
    return not same(count, blocks) and same(count % blocks, 0)
