"""The factors r and s of rank-1 methods: one posterior for each, and many of them side by side.

Sizes: K members, p rank.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimbayes.distributions.families import Cauchy, Distribution, Normal, Point, rho_from_scale, scale_from_rho, wide
from slimbayes.engine.blocks import same
from slimbayes.engine.fused import Seeded
from slimbayes.engine.passes import Pass
from slimbayes.posteriors.configs.factors import FAMILY


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


def joint(factors: Sequence[Factor], pick: Callable[[Tensor], Tensor] = lambda parameter: parameter) -> Any:
    """q of several factors of one family side by side, (K, sum of p * channels), laid out by `pick`; in float32."""

    def flat(name: str) -> Tensor:
        parts = [getattr(f, name) for f in factors]
        parts = parts if parts[0].shape[1] == 1 else [part.flatten(1).unsqueeze(1) for part in parts]
        return wide(parts[0] if len(parts) == 1 else torch.cat(parts, 2)).squeeze(1)

    family = factors[0].family
    return Point(pick(flat("loc"))) if family is Point else family(pick(flat("loc")), pick(scale_from_rho(flat("rho"))))


def grouped(items: Sequence[Any], key: Callable[[Any], Any]) -> list[list[Any]]:
    """Items with equal keys together, in order of first appearance."""
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def draw_alike(alike: Sequence[Any], current: Pass) -> list[Drawn]:
    """Draws of posteriors with equal members, clip and kind of draw, in few large operations for all of them."""
    lead = alike[0]
    values = _seeded_values if lead.noise.seed is not None else _values
    drawn: dict[Factor, Any] = {}
    for same_family in grouped([f for p in alike for f in (p.r, p.s)], lambda factor: factor.family):
        drawn |= zip(same_family, values(same_family, alike, current), strict=True)
    count = current.blocks(lead) if lead.noise.seed is not None else lead.drawn
    biases = _biases([p.bias for p in alike if p.bias is not None], current, lead, count)
    return [Drawn(drawn[p.r], drawn[p.s], None if p.bias is None else next(biases)) for p in alike]


def _values(factors: Sequence[Factor], alike: Sequence[Any], current: Pass) -> list[Tensor]:
    """Factors of one family, (n, channels) or (n, p, channels)."""
    lead, noise = alike[0], {}
    for p in alike:
        own = current.noise[p.key]
        noise[p.r], noise[p.s] = (own.row if own.row.shape[1] else own.block).split([p.r.width, p.s.width], dim=1)
    values = _joint_values(factors, [noise[f] for f in factors], current, lead)
    values = values if lead.clip is None else values.clamp(-lead.clip, lead.clip)
    parts = values.split([f.channels * f.rank for f in factors], dim=1)
    return [
        part if f.rank == 1 else part.unflatten(1, (f.rank, f.channels)) for f, part in zip(factors, parts, strict=True)
    ]


def _seeded_values(factors: Sequence[Factor], alike: Sequence[Any], current: Pass) -> list[Seeded]:
    """Factors of one family whose noise is made where they are used."""
    lead, rows = alike[0], current.rows
    owner = {}
    for p in alike:
        own = current.noise[p.key]
        owner[p.r], owner[p.s] = (own, own.salt), (own, own.salt + 1)
    q = joint(factors, lambda parameter: current.pick(lead, parameter, current.blocks(lead)))
    sizes = [f.channels for f in factors]
    locs = q.loc.split(sizes, dim=1)
    scales = [None] * len(factors) if factors[0].family is Point else q.scale.split(sizes, dim=1)
    return [
        Seeded(loc, scale, *owner[f], f.family.__name__, lead.clip, rows)
        for f, loc, scale in zip(factors, locs, scales, strict=True)
    ]


def _joint_values(factors: Sequence[Factor], noise: list[Tensor], current: Pass, lead: Any) -> Tensor:
    """Values (n, sum of p * channels) of factors of one family, not clipped."""
    blocks, count = current.blocks(lead), lead.drawn
    nested = _nested(count, blocks)
    q = joint(factors, lambda parameter: current.pick(lead, parameter, blocks if nested else count))
    if factors[0].family is Point:
        return q.loc.repeat_interleave(count // blocks, 0) if nested else q.loc
    lines = noise[0] if len(noise) == 1 else torch.cat(noise, 1)
    if not nested:
        return q.rsample(lines)
    q = type(q)(q.loc.unsqueeze(1), q.scale.unsqueeze(1))
    return q.rsample(lines.unflatten(0, (blocks, count // blocks))).flatten(0, 1)


def _nested(count: int, blocks: int) -> bool:
    """Whether n draws lie evenly in blocks of rows: the numbers of a member then meet its rows by broadcasting, whose
    gradient is a sum; that of a lookup is a scatter.
    """
    return not same(count, blocks) and same(count % blocks, 0)


def _biases(offsets: list[Tensor], current: Pass, lead: Any, count: int) -> Iterator[Tensor]:
    """Bias offsets (n, out) of each posterior, laid out by member; that of the first member is zero."""
    if not offsets:
        return iter(())
    others, blocks = offsets[0] if len(offsets) == 1 else torch.cat(offsets, 1), current.blocks(lead)
    nested = _nested(count, blocks)
    lines = current.pick(lead, F.pad(others, (0, 0, 1, 0)), blocks if nested else count)
    lines = lines.repeat_interleave(count // blocks, 0) if nested else lines
    return iter(lines.split([o.shape[1] for o in offsets], dim=1))
