"""Rank-1 Bayesian neural nets (Dusenberry et al. 2020); batch_ensemble.py has their point-estimate case.

    Eq. 1   W' = W o r s^T          y = (W (x o s)) o r + b
    Eq. 2   K members, each with its own q(r_k) q(s_k); KL summed over members, the same prior for all

r scales outputs, s scales inputs (the paper's text; its code calls them gamma and alpha). W stays a point estimate.
`rank=p` averages p such products, W' = W o (1/p) sum_j r_j s_j^T, the paper's future work: factors of one give W.

Where this deviates from the reference code is written in docs/deviations.md: the Cauchy KL is a closed form, members
differ by K - 1 bias offsets beside the layer's own bias, log-normal factors start at median one, recurrent factors are
clipped too.

Sizes: K members, n draws of a pass, p rank, in and out the channels of the layer.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from slimbayes.distributions.families import (
    Cauchy,
    Distribution,
    HalfCauchy,
    LogNormal,
    Normal,
    Point,
    Signs,
    dropout_scale,
    rho_from_scale,
)
from slimbayes.distributions.kl import check_pair, kl
from slimbayes.engine.passes import Noise, Pass
from slimbayes.layers.site import LinearMap, Site
from slimbayes.posteriors.base import MapOf, Pick, Posterior, Role, WeightPosterior
from slimbayes.posteriors.checks import check_choice, check_count, check_distribution, check_not_negative, check_number
from slimbayes.posteriors.factors import FAMILY, Drawn, FactorConfig, draw_alike, factor_of, grouped, joint

Family = Literal["normal", "cauchy", "lognormal", "point"]
_FAMILY_OF_PRIOR = {Normal: "normal", Cauchy: "cauchy", LogNormal: "lognormal", HalfCauchy: "lognormal"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Rank1(FactorConfig):
    """Rank-1 Bayesian neural net: distributions over one input and one output factor of every weight matrix.

    What is left open stays None and follows from the rest; `resolved()` says everything. Configs are equal if they
    resolve alike, and files hold the resolved form, so that later defaults change no saved model.

    Args:
        members: K, the number of mixture components.
        posterior: family of q(r) and q(s); by default that of the prior.
        prior: prior of every factor; by default the posterior's family around the neutral factor with scale 0.1.
        random: which factors are distributions, "both", "r" (outputs) or "s" (inputs); the other stays a point
            estimate.
        perturbation: "multiplicative" is Eq. 1; "additive" is y = W (x + s) + r + b.
        mean_init: where posterior means start: `Normal(1, v)`, `Signs(p)` or `Point(1)` (the model exactly as it was).
            By default Normal(1, 0.05): members differ, but a trained network stays close to itself. The paper trains
            from Normal(1, 0.5).
        scale_init: where posterior scales start. `dropout_scale(p)` turns a dropout rate into one; by default rate 1e-3
            (cauchy: 1e-6), the paper's "deterministic" initialisation.
        scale_jitter: standard deviation of the jitter around `scale_init`, in softplus space (cauchy: none).
        clip: factors are clipped to [-clip, clip] after drawing; None turns it off.
        member_bias: whether members get their own biases.
        rank: p, the number of averaged rank-1 products.
        draws: "example" draws fresh factors for every row (the paper); "member" once per member and pass.

    Example:
        >>> import slimbayes as sb, torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> net = sb.bayesianize(net, sb.Rank1(members=4, prior=sb.Cauchy(1.0, 0.1)))
        >>> sb.sample(net, torch.randn(5, 3)).shape
        torch.Size([4, 5, 2])
    """

    members: int = 4
    posterior: Family | None = None
    prior: Distribution | None = None
    random: Literal["both", "r", "s"] = "both"
    perturbation: Literal["multiplicative", "additive"] = "multiplicative"
    mean_init: Distribution | None = None
    scale_init: float | None = None
    scale_jitter: float | None = None
    clip: float | None = 10.0
    member_bias: bool = True
    rank: int = 1
    draws: Literal["example", "member"] = "example"

    def __post_init__(self) -> None:
        check_count(self, "members", self.members)
        check_count(self, "rank", self.rank)
        check_choice(self, "random", self.random, ("both", "r", "s"))
        check_choice(self, "perturbation", self.perturbation, ("multiplicative", "additive"))
        check_choice(self, "draws", self.draws, ("example", "member"))
        for field in ("prior", "mean_init"):
            check_distribution(self, field, getattr(self, field))
        for field in ("clip", "scale_init", "scale_jitter"):
            check_number(self, field, getattr(self, field))
        check_choice(self, "posterior", self.family, tuple(FAMILY))
        self._check_family()
        self._check_scales()

    def _check_family(self) -> None:
        """The family of the factors has a finite KL to the prior, a neutral value and possible starts."""
        if self.prior is not None:
            check_pair(FAMILY[self.family], type(self.prior))
            if type(self.prior) not in _FAMILY_OF_PRIOR:
                known = ", ".join(prior.__name__ for prior in _FAMILY_OF_PRIOR)
                raise ValueError(f"Rank1: {type(self.prior).__name__} is no prior of factors; use one of {known}.")
        if self.family == "lognormal" and self.perturbation == "additive":
            raise ValueError(
                "Rank1: a lognormal factor is never zero, so it has no neutral additive value. "
                "Use perturbation='multiplicative'."
            )
        if self.family == "lognormal" and isinstance(self.mean_init, Signs):
            raise ValueError(
                "Rank1: lognormal factors are positive, so they cannot start at random signs. "
                "Use mean_init=Normal(0.0, v), in log space."
            )

    def _check_scales(self) -> None:
        if not (self.clip is None or self.clip > 0):
            raise ValueError(f"Rank1: clip must be positive or None, got {self.clip!r}.")
        check_not_negative(self, "scale_jitter", self.scale_jitter)
        if self.scale_init == 0 and self.family != "point":
            raise ValueError(
                "Rank1: scale_init must be positive, got 0. Factors of scale zero are points: "
                'use posterior="point", or BatchEnsemble.'
            )
        if self.scale_init:
            rho_from_scale(self.scale_init)

    @property
    def family(self) -> str:
        """Family of q(r) and q(s): `posterior`, or that of the prior."""
        return self.posterior or _FAMILY_OF_PRIOR.get(type(self.prior), "normal")

    def resolved(self) -> Rank1:
        """This config with everything filled in that was left open.

        Example:
            >>> Rank1(perturbation="additive").resolved().prior
            Normal(loc=0.0, scale=0.1)
        """
        family = self.family
        neutral = 0.0 if family == "lognormal" or self.perturbation == "additive" else 1.0
        prior = {"cauchy": Cauchy, "lognormal": LogNormal}.get(family, Normal)
        open_ones: dict[str, Any] = {
            "posterior": family,
            "prior": prior(neutral, 0.1),
            "mean_init": Normal(neutral, 0.05),
            "scale_init": dropout_scale(1e-6 if family == "cauchy" else 1e-3),
            "scale_jitter": 0.0 if family == "cauchy" else 0.1,
        }
        return replace(self, **{name: value for name, value in open_ones.items() if getattr(self, name) is None})

    def to_dict(self) -> dict[str, Any]:
        """JSON form of the resolved config."""
        return super(Rank1, self.resolved()).to_dict()

    def _values(self) -> tuple[Any, ...]:
        whole = self.resolved()
        return tuple(getattr(whole, field.name) for field in fields(whole))

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, Rank1) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def extra_flops(self, site: Site) -> float:
        """p products instead of one, whose inputs and outputs are scaled: a multiplication is half a multiply-add."""
        rows, columns = site.matrix
        return 0.5 * self.rank * (site.n_in + site.n_out) + (self.rank - 1) * rows * columns

    def build(self, site: Site) -> Posterior:
        return Rank1Posterior(self.resolved(), site)

    def describe(self) -> str:
        return f"Rank1({self.family}, members={self.members})"


class Rank1Posterior(WeightPosterior):
    """Factor posteriors r and s of one weight matrix, and the members' bias offsets (K - 1, out)."""

    def __init__(self, config: Rank1, site: Site) -> None:
        super().__init__()
        if site.whole and config.perturbation == "additive":
            raise ValueError("additive factors need a layer whose inputs are known; use perturbation='multiplicative'")
        self.r = factor_of(config, site.n_out, config.random in ("both", "r"))
        self.s = factor_of(config, site.n_in, config.random in ("both", "s"))
        # Member 0 has the layer's own bias. K - 1 offsets then give K independent biases, the paper's count.
        offsets = config.members - 1 if site.bias and config.member_bias else 0
        self.bias = nn.Parameter(torch.zeros(offsets, site.n_out)) if offsets else None
        self.members = config.members
        self.rowwise = config.draws == "example" and config.posterior != "point"
        self.clip = config.clip
        self.additive = config.perturbation == "additive"

    def role(self, name: str) -> Role:
        return "factor"

    @property
    def anchor(self) -> Tensor:
        return self.r.loc

    @property
    def countable(self) -> bool:
        return self.r.family is Point and self.s.family is Point

    def choices(self) -> Tensor | None:
        if not self.countable:
            return None
        return self.current.pick(self, torch.arange(self.members, device=self.device), self.drawn)

    @property
    def log_size(self) -> float:
        return 0.0 if self.countable else math.inf

    def widths(self, rowwise: bool) -> tuple[int, int]:
        width = self.r.width + self.s.width
        return (0, width) if self.rowwise and rowwise else (width, 0)

    @property
    def has_weights(self) -> bool:
        return not self.per_row or self.drawn == 1

    def realise(self, noise: Noise, pick: Pick) -> Drawn:
        self.realise_together([self])
        return self.current.values[self.key]

    @classmethod
    def realise_together(cls, posteriors: Sequence[Self]) -> None:
        """All factors that are drawn alike in a handful of large operations, not a dozen small ones for each layer."""
        current = posteriors[0].current
        by_row = {p.key: current.noise[p.key].row.shape[1] > 0 for p in posteriors}
        for alike in grouped(posteriors, lambda p: (p.members, by_row[p.key], p.clip, p.device, p.dtype)):
            for p, (r, s) in zip(alike, draw_alike(alike, current, by_row[alike[0].key]), strict=True):
                current.values[p.key] = Drawn(r, s, p._drawn_bias(current, r.shape[0]))

    def _drawn_bias(self, current: Pass, count: int) -> Tensor | None:
        if self.bias is None:
            return None
        return current.pick(self, torch.cat([torch.zeros_like(self.bias[:1]), self.bias]), count)

    def kl(self, linear: MapOf) -> Tensor:
        return sum(self.kl_together([self], [linear]), self.r.loc.new_zeros(()))

    @classmethod
    def kl_together(cls, posteriors: Sequence[Self], linears: Sequence[MapOf]) -> list[Tensor]:
        factors = [f for p in posteriors for f in (p.r, p.s) if f.family is not Point]
        groups = grouped(factors, lambda f: (f.family, f.prior, f.loc.shape[0], f.loc.device, f.loc.dtype))
        return [kl(joint(same), same[0].prior).sum() for same in groups] or [posteriors[0].r.loc.new_zeros(())]

    def log_ratio(self, linear: LinearMap) -> Tensor:
        """Of the factors as they are drawn, before they are clipped."""
        lines = self.noise.block.double()
        total = lines.new_zeros(len(lines))
        for factor, noise in zip((self.r, self.s), lines.split([self.r.width, self.s.width], 1), strict=True):
            if factor.width and factor.prior is not None:
                q = joint([factor], lambda parameter: self.current.pick(self, parameter.double(), len(lines)))
                x = q.rsample(noise)
                total = total + (factor.prior.log_prob(x) - q.log_prob(x)).sum(1)
        return total

    def against_prior(self, linear: LinearMap) -> list[tuple[Tensor, Tensor]]:
        return self.r.against_prior() + self.s.against_prior()

    def forward(self, x: Tensor, linear: LinearMap) -> Tensor:
        drawn: Drawn = self.values()
        if drawn.r.shape[0] == 1 and linear.foldable and not self.additive:
            return linear.op(x, *self.materialise(linear, 0))
        combine: Callable[[Any, Any], Any] = operator.add if self.additive else operator.mul
        # Eq. 1: y = (W (x o s)) o r, averaged over the p products
        current = self.current
        y = linear.add_bias(linear.averaged(combine, x, drawn.s, drawn.r, current))
        return y if drawn.bias is None else linear.rows(operator.add, y, drawn.bias, current)

    def materialise(self, linear: LinearMap, index: int) -> tuple[Tensor, Tensor | None]:
        drawn: Drawn = self.values()
        r, s, weight = drawn.r[index], drawn.s[index], linear.weight
        bias = linear.bias
        if bias is not None and drawn.bias is not None:
            bias = bias + drawn.bias[index].to(weight.dtype)
        if self.additive:
            # W (x + s) + r = W x + (W s + r): the perturbation is a shift of the bias
            shift = (torch.nn.functional.linear(s.to(weight.dtype), weight) + r.to(weight.dtype)).mean(0)
            return weight, shift if bias is None else bias + shift
        # Eq. 1: W' = W o r s^T
        masks = [linear.outer(r[j], s[j]) for j in range(r.shape[0])]
        mask = masks[0] if len(masks) == 1 else torch.stack(masks).mean(0)
        return weight * mask.to(weight.dtype), bias
