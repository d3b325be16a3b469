"""The factors r and s of rank-1 methods: one posterior for each, and many of them side by side.

Sizes: K members, p rank.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slimbayes.distributions.families import (
    Cauchy,
    Distribution,
    LogNormal,
    Normal,
    Point,
    rho_from_scale,
    scale_from_rho,
    wide,
)
from slimbayes.engine.passes import Pass
from slimbayes.layers import kind_of
from slimbayes.posteriors.base import SiteConfig

FAMILY: dict[str, type[Distribution]] = {"normal": Normal, "cauchy": Cauchy, "lognormal": LogNormal, "point": Point}


class FactorConfig(SiteConfig):
    """What configs of rank-1 methods share: where they go."""

    def leaves_alone(self, layer: nn.Module) -> str:
        why = "rank-1 methods leave embeddings alone, as the paper does; include it by name to convert it"
        return why if kind_of(layer) == "table" else ""


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
        self.width = 0 if family is Point else shape[1] * shape[2]

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
    """Factors of one pass: r (n, p, out), s (n, p, in) and the members' bias offsets (n, out) or None."""

    r: Tensor
    s: Tensor
    bias: Tensor | None


def joint(factors: Sequence[Factor], pick: Callable[[Tensor], Tensor] = lambda parameter: parameter) -> Any:
    """q of several factors of one family side by side, (K, sum of p * channels), laid out by `pick`; in float32."""

    def flat(name: str) -> Tensor:
        parts = [getattr(f, name).flatten(1) for f in factors]
        return wide(parts[0] if len(parts) == 1 else torch.cat(parts, 1))

    family = factors[0].family
    return Point(pick(flat("loc"))) if family is Point else family(pick(flat("loc")), pick(scale_from_rho(flat("rho"))))


def grouped(items: Sequence[Any], key: Callable[[Any], Any]) -> list[list[Any]]:
    """Items with equal keys together, in order of first appearance."""
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def draw_alike(alike: Sequence[Any], current: Pass, by_row: bool) -> list[tuple[Tensor, Tensor]]:
    """r and s (n, p, channels) of posteriors with equal members, clip and kind of draw."""
    lead = alike[0]
    noise: dict[Factor, Tensor] = {}
    drawn: dict[Factor, Tensor] = {}
    for p in alike:
        own = current.noise[p.key]
        lines = own.row if by_row else own.block
        noise[p.r], noise[p.s] = lines.split([p.r.width, p.s.width], dim=1)

    def pick(parameter: Tensor) -> Tensor:
        return current.pick(lead, parameter, lines.shape[0])

    for same in grouped(list(noise), lambda factor: factor.family):
        q = joint(same, pick)
        values = q.loc if same[0].family is Point else q.rsample(torch.cat([noise[f] for f in same], 1))
        values = values if lead.clip is None else values.clamp(-lead.clip, lead.clip)
        parts = values.split([f.loc[0].numel() for f in same], dim=1)
        drawn |= {f: part.unflatten(1, f.loc.shape[1:]) for f, part in zip(same, parts, strict=True)}
    return [(drawn[p.r], drawn[p.s]) for p in alike]
