"""Rank-1 Bayesian neural nets (Dusenberry et al. 2020); BatchEnsemble is their point-estimate case.

    Eq. 1   W' = W o r s^T          y = (W (x o s)) o r + b
    Eq. 2   K members, each with its own q(r_k) q(s_k); KL summed over members, the same prior for all
            (`mixture_kl` has the KL of the mixture of members, too: distributions/kl.py)

r scales outputs, s scales inputs (the paper's text; its code calls them gamma and alpha). W stays a point estimate.
`rank=p` averages p such products, W' = W o (1/p) sum_j r_j s_j^T, the paper's future work: factors of one give W.

Where this deviates from the reference code is written in docs/deviations.md: the Cauchy KL is a closed form, members
differ by K - 1 bias offsets beside the layer's own bias, log-normal factors start at median one, recurrent factors are
clipped too.

Sizes: K members, n draws of a pass, p rank, in and out the channels of the layer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from slimbayes.distributions.families import Point
from slimbayes.distributions.joining import joined
from slimbayes.distributions.kl import information, summed_kl
from slimbayes.engine.fused import seeded
from slimbayes.engine.modules import places_of, plan_once
from slimbayes.engine.passes import Noise, Pass
from slimbayes.engine.rows import LinearMap
from slimbayes.kernels import LARGE
from slimbayes.layers.site import Site
from slimbayes.posteriors.base import Role, WeightPosterior
from slimbayes.posteriors.configs.rank1 import Rank1
from slimbayes.posteriors.factors import (
    Drawn,
    Factor,
    FactorGroup,
    distribution_of,
    group_by,
)


class Rank1Posterior(WeightPosterior):
    """Factor posteriors r and s of one weight matrix, and the members' bias offsets (K - 1, out)."""

    def __init__(self, config: Rank1, site: Site) -> None:
        super().__init__()
        if site.whole and config.perturbation == "additive":
            raise ValueError(
                "additive factors need a layer whose inputs are known; use perturbation='multiplicative'"
            )
        self.r = Factor(config, site.n_out, config.random in ("both", "r"))
        self.s = Factor(config, site.n_in, config.random in ("both", "s"))
        # Member 0 has the layer's own bias. K - 1 offsets then give K independent biases, the paper's count.
        offsets = config.members - 1 if site.bias and config.member_bias else 0
        self.bias = nn.Parameter(torch.zeros(offsets, site.n_out)) if offsets else None
        self.members, self.mixture_kl = config.members, config.mixture_kl
        self.rowwise = config.draws == "example" and config.posterior != "point"
        self.clip = (
            None if config.clip == "auto" else config.clip
        )  # a resolved config has a number or None
        # Elsewhere many activations share a factor, and noise is small beside them.
        self.dense = site.positions == "one" and not site.whole and config.rank == 1
        self.dense &= config.perturbation == "multiplicative"
        self.additive = config.perturbation == "additive"

    oriented = True

    @property
    def prior_of_factors(self) -> Any:
        """The prior of r and s; none of points."""
        return None if self.is_point else self.r.prior

    @torch.no_grad()
    def keep_members(self, members: Sequence[int], tied: Sequence[Any] = ()) -> None:
        index, self.members = torch.tensor(members, device=self.device), len(members)
        lines = (
            nn.functional.pad(self.bias, (0, 0, 1, 0))[index]
            if self.bias is not None
            else None
        )
        trains, self.bias = self.bias is not None and self.bias.requires_grad, None
        for owner in (self, self.r, self.s):
            for name, p in owner.named_parameters(recurse=False):
                setattr(owner, name, nn.Parameter(p[index], p.requires_grad))
        if lines is not None:  # member 0 has the layer's own bias
            moved: set[int] = set()
            for layer in (self.layer, *tied):
                site = next(
                    site for site, own in layer.posterior.items() if own is self
                )
                bias = layer.linear_map(site).bias
                if (
                    bias is not None and bias.data_ptr() not in moved
                ):  # tied layers may share their bias, too
                    moved.add(bias.data_ptr())
                    bias.add_(lines[0].to(bias.dtype))
            self.bias = (
                nn.Parameter(lines[1:] - lines[0], trains) if len(members) > 1 else None
            )

    def role(self, name: str) -> Role:
        return (
            "offset"
            if name == "bias"
            else "scale"
            if name.endswith("rho")
            else "factor"
        )

    @property
    def anchor(self) -> Tensor:
        return self._modules["r"]._parameters["loc"]  # type: ignore[union-attr, return-value]

    def widths(self, rowwise: bool) -> tuple[int, int]:
        width = self.r.width + self.s.width
        return (0, width) if self.rowwise and rowwise else (width, 0)

    def seeded(self, rows: int) -> bool:
        return (
            self.dense
            and self.rowwise
            and seeded(self.r.width + self.s.width, rows, self.anchor)
        )

    @property
    def has_weights(self) -> bool:
        return not self.per_row or self.drawn == 1

    def draw(self, noise: Noise) -> Drawn:
        current = self.current
        FactorGroup([self]).draw(current)
        return current.values[self.key]

    @classmethod
    def draw_together(cls, posteriors: Sequence[Self], current: Pass) -> None:
        """All factors that are drawn alike in a handful of large operations, not a dozen small ones for each layer."""
        pairs = zip(posteriors, [current.noise[p.key] for p in posteriors], strict=True)
        kinds, places = (
            tuple([(n.row.shape[1] > 0, n.seed is None, p.clip) for p, n in pairs]),
            places_of(posteriors),
        )

        def alike() -> list[FactorGroup]:
            kind = dict(
                zip(
                    [p.key for p in posteriors],
                    zip(kinds, places, strict=True),
                    strict=True,
                )
            )
            return [
                FactorGroup(same)
                for same in group_by(posteriors, lambda p: (p.members, kind[p.key]))
            ]

        for same in plan_once(posteriors, ("alike", kinds, places), alike):
            same.draw(current)

    def factors(self) -> tuple[Tensor, Tensor, Tensor | None] | None:
        drawn: Drawn = self.values()
        if self.additive or drawn.r.dim() > 2 or self.noise.seed is not None:
            return None
        return drawn.s, drawn.r, self._offsets(drawn)

    def kl(self) -> Tensor:
        if self.sharded and self.mixture_kl == "exact":
            raise ValueError(
                'Rank1: mixture_kl="exact" needs whole parameters; use "mean" with sharded ones.'
            )
        return sum(self.kl_together([self]), self.r.loc.new_zeros(()))

    @classmethod
    def kl_together(cls, posteriors: Sequence[Self]) -> list[Tensor]:
        kinds = tuple([(p.mixture_kl, p.r.prior, p.s.prior) for p in posteriors])

        def alike() -> list[list[Any]]:
            every = [
                (p.mixture_kl, f)
                for p in posteriors
                for f in (p.r, p.s)
                if f.family is not Point
            ]
            return group_by(every, lambda pair: (pair[0], *_alike(pair[1])))

        terms: list[Tensor] = []
        mixed: list[Any] = []
        for same in plan_once(posteriors, ("kl", kinds, places_of(posteriors)), alike):
            (how, lead), factors = same[0], [f for _, f in same]
            locs, rhos = (
                [f._parameters[name] for f in factors] for name in ("loc", "rho")
            )
            total = summed_kl(
                lead.family, lead.prior, locs, rhos, joined(locs), joined(rhos)
            )
            terms.append(total if how == "sum" else total / len(locs[0]))
            mixed += [distribution_of(factors)] if how == "exact" else []
        terms += [-information(mixed)] if mixed else []
        return terms or [posteriors[0].r.loc.new_zeros(())]

    def log_ratio(self) -> Tensor | None:
        """Of the factors as they are drawn, before they are clipped."""
        lines = self.noise.block.double()
        total = lines.new_zeros(len(lines))
        for factor, noise in zip(
            (self.r, self.s), lines.split([self.r.width, self.s.width], 1), strict=True
        ):
            if factor.width and factor.prior is not None:
                q = distribution_of(
                    [factor],
                    lambda parameter: self.by_member(parameter.double(), len(lines)),
                )
                x = q.rsample(noise)
                total = total + (factor.prior.log_prob(x) - q.log_prob(x)).sum(1)
        return total

    def against_prior(self) -> list[tuple[Tensor, Tensor]]:
        return self.r.against_prior() + self.s.against_prior()

    def forward(self, x: Tensor, linear: LinearMap) -> Tensor:
        """Eq. 1 in three ways that must agree: in the weight for one draw, by lines shaped once for all layers for few
        rows, and by `LinearMap.modulated`, which knows kernels, for all others.
        """
        current = linear.current or self.current
        drawn: Drawn = current.values.get(self.key) or self.values()
        if drawn.r.shape[0] == 1 and linear.absorbs and not self.additive:
            return linear.op(x, *self.materialize(linear, 0))
        every = (
            drawn.lines
            if drawn.own is linear.bias and type(linear) is LinearMap
            else None
        )
        # Rows come first, all that the pass has, and are too few for kernels.
        if (
            every is not None
            and linear.batch_dim == 0
            and x.shape[0] == current.rows
            and x.numel() < LARGE
        ):
            lines = every.meeting(x, linear.channel_dim, current.rows)
            if lines is not None:
                y = linear.op(x * lines[self.s], linear.weight, None)
                if y.dtype != x.dtype:
                    lines = every.meeting(y, linear.channel_dim, current.rows) or lines
                return (
                    y * lines[self.r] + lines[self.key]
                    if drawn.own is not None
                    else y * lines[self.r]
                )
        combine: Callable[[Any, Any], Any] = (
            operator.add if self.additive else operator.mul
        )
        # Eq. 1: y = (W (x o s)) o r + b, averaged over the p products
        apply = linear.modulated if drawn.s.dim() == 2 else linear.averaged
        return apply(
            combine, x, drawn.s, drawn.r, current, bias=self._biases(drawn, linear.bias)
        )

    def _offsets(self, drawn: Drawn) -> Tensor | None:
        """Bias offsets (n, out) of members, without a layer's own bias."""
        if drawn.own is None or drawn.bias is None or self.bias is None:
            return drawn.bias
        return self.by_member(
            nn.functional.pad(self.bias, (0, 0, 1, 0)), drawn.bias.shape[0]
        )

    def _biases(
        self, drawn: Drawn, own: Tensor | None, index: int | None = None
    ) -> Tensor | None:
        """Biases (n, out) or (1, out) of a layer with this bias of its own, or that of one draw (out,)."""
        given = drawn.own is not None and drawn.own is own
        lines = (
            drawn.bias if given else self._offsets(drawn)
        )  # layers that share a weight may have a bias each
        if own is None or lines is None:
            return own if own is None or index is not None else own.unsqueeze(0)
        lines = lines if index is None else self._line(lines, index)
        return lines if given else own + lines.to(own.dtype)

    def materialize(
        self, linear: LinearMap, index: int
    ) -> tuple[Tensor, Tensor | None]:
        drawn: Drawn = self.values()
        weight = linear.weight
        if not weight.is_floating_point():
            raise ValueError(
                f"{self.name}: integers cannot take factors in; convert the layer back to floats first."
            )
        r, s = self._line(drawn.r, index), self._line(drawn.s, index)
        bias = self._biases(drawn, linear.bias, index)
        if self.additive and weight.dim() > 2:
            raise ValueError(
                f"{self.name}: additive factors do not shift a convolution's padding: no weight has them."
            )
        if self.additive:
            # W (x + s) + r = W x + (W s + r): the perturbation is a shift of the bias
            shift = torch.nn.functional.linear(s.to(weight.dtype), weight) + r.to(
                weight.dtype
            )
            shift = shift if r.dim() == 1 else shift.mean(0)
            return weight, shift if bias is None else bias + shift
        # Eq. 1: W' = W o r s^T
        mask = (
            linear.outer(r, s)
            if r.dim() == 1
            else torch.stack([*map(linear.outer, r, s)]).mean(0)
        )
        return weight * mask.to(weight.dtype), bias

    def _line(self, lines: Tensor, index: int) -> Tensor:
        """One of n lines. All are taken apart when the first is asked for: a lookup's gradient is as large as all."""
        if lines.shape[0] == 1 or torch.compiler.is_compiling():
            return lines.squeeze(0) if lines.shape[0] == 1 else lines[index]
        unbound, kind = self.current.unbound, (id(lines), torch.is_grad_enabled())
        if kind not in unbound:
            unbound[kind] = lines, lines.unbind()
        return unbound[kind][1][index]


def _alike(f: Factor) -> tuple[Any, ...]:
    """What factors have in common whose KLs are computed together."""
    return f.family, f.prior, *f.loc.shape[:2], f.loc.device, f.loc.dtype
